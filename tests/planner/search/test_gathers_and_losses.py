"""When ZeRO-3 gathers, and how the loss is computed: what the search chooses, and why."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from meshwright.planner.catalog import native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import SHORT_NAMES, read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.layout_bounds import Candidates, candidates_of
from meshwright.planner.search.bounds.simulated_optimum import of_chain
from meshwright.planner.search.bounds.simulated_step import SimulatedCandidates
from meshwright.planner.search.goals import SplitSolution
from meshwright.planner.search.offload_choices import Saving
from meshwright.planner.search.queue import Pruned
from meshwright.planner.search.remedies import written_pin
from meshwright.planner.search.search import search
from meshwright.planner.search.space import (
    Degrees,
    chunk_rows,
    complexity,
    gathers,
    layouts,
    losses,
)
from meshwright.planner.search.spaces.chain import ChainSpace
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import Solution

ALONE = Degrees(tensor=1, context=1, expert=1, pipeline=1, data=8)


def request(cluster: str, *pins: str, model: str = "llama-3.1-8b", batch: int = 64) -> Request:
    return Request(
        model=resolve_model(model),
        cluster=resolve_cluster(cluster),
        job=Job(seq_len=4096, global_batch=batch),
        framework=native(),
        pins=read_pins(pins),
    )


# --- the loss -----------------------------------------------------------------------------------


CHUNKS, ANEW = ChunkedLoss(rows=2048), ChunkedLoss(rows=2048, gradients="recomputed")
"""Those of 128,256 outputs on 40 GB: in 32 bits 1,051 of 1,057 MB."""


@pytest.mark.matrix
def test_a_loss_is_in_chunks_where_that_is_faster() -> None:
    free, chunks, plain = (
        search(request("8xa100-sxm-40gb", *pins))
        for pins in ((), ("loss=chunked/2048",), ("loss=full",))
    )

    assert free.plan.loss == CHUNKS
    assert free.prediction.step_time_s == pytest.approx(chunks.prediction.step_time_s)
    assert chunks.prediction.step_time_s < 0.99 * plain.prediction.step_time_s


@pytest.mark.parametrize(
    ("model", "cluster", "rows"),
    [
        ("llama-3.1-8b", "8xh100-sxm-80gb", 4096),  # 513 KB of logits a row, 2,124 MB
        ("llama-2-7b", "8xh100-sxm-80gb", 8192),  # 128 KB: more rows gain nothing
        ("gemma-2-9b", "8xa100-sxm-40gb", 1024),  # 1,024 KB of 1,057 MB
        ("gemma-2-9b", "4xrtx-4090", 1024),  # of 635 MB: fewer rows are not worth it
        ("llama-3.1-8b", "8xh100-sxm-80gb+8xa100-sxm-40gb", 2048),
    ],
)
def test_logits_of_a_chunk_take_a_part_of_the_smallest_memory(
    model: str, cluster: str, rows: int
) -> None:
    _, chunks, _ = losses(request(cluster, model=model), "1f1b")

    assert chunks == ChunkedLoss(rows=rows)


def of_memory(asked: Request, memory_bytes: float) -> Request:
    """Return a request on devices with so much memory."""
    [group] = asked.cluster.groups
    device = group.accelerator.model_copy(update={"memory_bytes": memory_bytes})
    groups = (group.model_copy(update={"accelerator": device}),)
    return replace(asked, cluster=asked.cluster.model_copy(update={"groups": groups}))


HELD = 10
"""Bytes that a logit of a chunk takes at most: in 32 bits, in 16, and the slope of its cap."""


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1-8b", "gemma-2-9b"])
def test_a_chunk_grows_by_less_than_the_memory(model: str) -> None:
    draw, asked = random.Random(3), request("8xh100-sxm-80gb", model=model)
    assert asked.model.architecture is not None
    row_bytes = 4 * asked.model.architecture.vocab_size
    for _ in range(300):
        edge = draw.choice((2048, 4096, 8192, 128 * draw.randrange(8, 70)))
        less = row_bytes * (40 * edge - 1)
        more = less + draw.choice((342 * row_bytes, 999 * row_bytes, draw.uniform(1e9, 1e11)))
        shorter, longer = (chunk_rows(asked.model, size) for size in (less, more))

        assert 0 <= (longer - shorter) * HELD / 4 * row_bytes < more - less
        assert shorter % 128 == longer % 128 == 0


@pytest.mark.long("8xh100-sxm-80gb")
@pytest.mark.parametrize("cluster", ["4xh100-sxm-80gb", "8xh100-sxm-80gb"])
def test_more_memory_is_not_slower_where_chunks_get_longer(cluster: str) -> None:
    """At 168 GB logits of 8,192 rows take 1/40 of the memory, of 4,096 at half of it."""
    asked = request(cluster)
    edge = 40 * 4 * 128_256 * (8192 if cluster[0] == "4" else 4096)

    less, more = (search(of_memory(asked, edge + off)) for off in (-1e8, 1e8))

    assert more.prediction.step_time_s <= less.prediction.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cluster", "schedule", "ways"),
    [
        ("8xa100-sxm-40gb", "1f1b", (None, CHUNKS, ANEW)),
        ("8xa100-sxm-40gb", "pipedream-2bw", (None,)),
        ("local", "1f1b", (None,)),
    ],
)
def test_where_chunks_are_looked_at(
    cluster: str, schedule: str, ways: tuple[ChunkedLoss | None, ...]
) -> None:
    assert losses(request(cluster), schedule) == ways
    assert losses(request(cluster, "loss=chunked-recompute/512"), schedule) == (
        ChunkedLoss(rows=512, gradients="recomputed"),
    )
    assert losses(request(cluster, "loss=full"), schedule) == (None,)


@pytest.mark.spread(1)
@pytest.mark.long("gemma-2-2b-4xrtx-4090-4096-16")
@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch"),
    [
        ("qwen2.5-7b", "8xrtx-4090", 2048, 48),
        ("llama-3.2-3b", "4xrtx-3090", 4096, 32),
        ("gemma-2-2b", "4xrtx-4090", 4096, 16),
    ],
)
@pytest.mark.matrix
def test_no_loss_that_can_be_fixed_is_faster_than_the_answer(
    model: str, cluster: str, seq_len: int, batch: int
) -> None:
    asked = replace(request(cluster, model=model), job=Job(seq_len=seq_len, global_batch=batch))

    fixed = [
        search(replace(asked, pins=read_pins([f"loss={loss}"]))).prediction.step_time_s
        for loss in ("chunked", "chunked-recompute")
    ]

    assert search(asked).prediction.step_time_s <= min(fixed) * (1 + 1e-6)


def test_no_two_layouts_of_a_space_are_equally_complex() -> None:
    every = list(layouts(request("2xa100-sxm-40gb", model="llama-3.2-1b")))

    assert len({complexity(layout) for layout in every}) == len(every)


def test_what_would_fit_is_written_as_it_is_fixed() -> None:
    """Of every pin and every layout, and not as Python shows its values."""
    asked = request("2xa100-sxm-40gb", model="llama-3.2-1b")
    every = [*layouts(asked), replace(ZERO_3, reshard_after_forward=8, loss=ChunkedLoss(rows=256))]

    for layout in random.Random(0).sample(every, 40) + every[-1:]:
        for name, field in SHORT_NAMES.items():
            if field in ("recompute", "activations"):
                continue
            written = written_pin(layout, field)
            allow = ("offload", "compress", "stale")
            assert written is None or read_pins([f"{name}={written}"], allow).allow(layout)


@pytest.mark.long("2")
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.matrix
def test_no_layout_of_either_loss_beats_the_answer(pipeline: int) -> None:
    """Every layout's own optimum, on a model small enough to solve all of them."""
    asked = request("2xa100-sxm-40gb", f"pipeline={pipeline}", "context=1", model="llama-3.2-1b")

    found = search(asked)

    [candidates] = found.candidates
    every = list(candidates.layouts())
    assert {layout.loss for layout in every} == {None, CHUNKS, ANEW}
    least_s = math.inf
    for layout in every:
        solution = solve(candidates.instance(layout))
        if isinstance(solution, Solution):
            step_s = solution.objective_s + candidates.costs(layout).step_s
            assert candidates.memory_s(layout) <= step_s * (1 + 1e-9)
            least_s = min(least_s, step_s)
    assert found.closed_form.objective_s == pytest.approx(least_s)


@pytest.mark.parametrize("cutoff", [1.2, 0.9])
def test_a_cutoff_loses_no_layout_of_any_loss_that_is_below_it(cutoff: float) -> None:
    asked = request("2xa100-sxm-40gb", "tensor=1", "context=1", "pipeline=2", model="llama-3.2-1b")
    candidates = candidates_of(asked, None, None, ())
    space = ChainSpace(candidates)
    some = random.Random(1).sample(list(candidates.layouts()), 30)
    below_s = cutoff * min(_own_optimum_s(candidates, layout) for layout in some)

    for layout in some:
        found, least_s = space.solve(layout, below_s), _own_optimum_s(candidates, layout)
        if least_s < below_s:
            assert isinstance(found, SplitSolution)
            assert found.objective_s == pytest.approx(least_s)
        else:
            assert isinstance(found, Pruned)


def _own_optimum_s(candidates: Candidates, layout: Layout) -> float:
    solution = solve(candidates.instance(layout))
    if not isinstance(solution, Solution):
        return math.inf
    return solution.objective_s + candidates.costs(layout).step_s


def test_what_bounds_layouts_of_any_loss_bounds_each_of_them() -> None:
    """Within memory and over all cuts, where the loss in chunks decides what fits."""
    asked = request("8xa100-sxm-40gb", "pipeline=4", "micro_batch=1")
    candidates = candidates_of(asked, None, None, ())
    bounded = SimulatedCandidates.from_candidates(candidates)
    layouts = [one for one in candidates.layouts() if one.loss is None and one.zero == 1][::50]
    tighter = 0

    for plain in layouts:
        together = candidates.stated_of_any_loss(plain)
        least_s = bounded.within_memory_s(plain, together)
        cuts = of_chain(candidates, plain, together, 1e3, ways=20_000)
        for loss in losses(candidates.request, plain.schedule):
            layout = replace(plain, loss=loss)
            alone = candidates.problem_of(layout)
            alone_s = bounded.within_memory_s(layout, alone)
            assert least_s <= alone_s * (1 + 1e-9)
            tighter += least_s < alone_s
            own = of_chain(candidates, layout, alone, 1e3, ways=20_000)
            if cuts is not None and own is not None:
                assert cuts.cut_s(1e3) <= own.cut_s(1e3) * (1 + 1e-9)

    assert tighter


@pytest.mark.parametrize("text", ["precomputed", "chunked/0", "chunked/", "full/3"])
def test_what_is_no_loss_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match="ROWS"):
        read_pins([f"loss={text}"])


# --- gathers of ZeRO-3 --------------------------------------------------------------------------


def parts_s(layout: Layout, *, seq_len: int = 4096) -> tuple[float, float]:
    asked = replace(request("4x8xh100-sxm-80gb"), job=Job(seq_len=seq_len, global_batch=64))
    block = next(kind for kind in asked.model.chain_kinds if kind not in ("embedding", "head"))
    [part] = CostTables(asked, recomputes=("none",)).parts(block, layout, linked=True)
    return part.forward_s, part.backward_s


ZERO_3 = Layout(data_shard=32, zero=3, micro_batches=2)


def test_one_unit_ahead_helps_where_the_device_waits_for_its_host() -> None:
    ahead = replace(ZERO_3, prefetch=1)

    assert parts_s(ahead) == parts_s(ZERO_3)  # a large block: the host is ahead by itself
    small, small_ahead = (parts_s(one, seq_len=16) for one in (ZERO_3, ahead))
    assert small_ahead[0] < small[0]
    assert small_ahead[1] == small[1]


def test_who_keeps_parameters_in_its_node_gathers_over_its_links_alone() -> None:
    forward_s, backward_s = parts_s(ZERO_3)
    within = parts_s(replace(ZERO_3, reshard_after_forward=8))
    whole = parts_s(replace(ZERO_3, reshard_after_forward=1))

    assert forward_s == within[0] == whole[0]
    assert backward_s > within[1] >= whole[1]


def test_what_is_offered_is_what_may_be_worth_it() -> None:
    alone = replace(ALONE, data=32)
    nodes, node = request("4x8xh100-sxm-80gb"), request("8xh100-sxm-80gb")

    assert list(gathers(nodes, alone, 3, 32, [Saving()])) == [(0, None), (0, 8), (1, None), (1, 8)]
    assert list(gathers(nodes, alone, 2, 32, [Saving()])) == [(0, None)]
    assert list(gathers(node, ALONE, 3, 8, [Saving()])) == [(0, None), (1, None)]
    assert list(gathers(nodes, alone, 3, 32, [Saving("parameters")])) == [(0, None)]
    pinned = request("4x8xh100-sxm-80gb", "prefetch=2", "reshard_after_forward=4")
    assert list(gathers(pinned, alone, 3, 32, [Saving()])) == [(2, 4)]
    assert list(gathers(pinned, alone, 1, 32, [Saving()])) == []


def test_a_pinned_depth_and_groups_are_planned_and_predicted() -> None:
    asked = request(
        "4x8xh100-sxm-80gb", "zero=3", "prefetch=2", "reshard_after_forward=8", batch=128
    )

    found = search(asked)

    assert (found.plan.prefetch, found.plan.reshard_after_forward) == (2, 8)
    assert "prefetch=2 reshard_after_forward=8" in found.plan.layout.text()
    again = predict(found.plan, asked.model, asked.cluster)
    assert again.step_time_s == pytest.approx(found.prediction.step_time_s)
