"""A rehearsed rank holds what a real one holds, kind by kind."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.rehearsal import Rehearsal, fake_job, rank_at, rehearse
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Mesh, Plan
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

FIGURES = {"hidden_size": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn_size": 384}
TRIES = 3


def rehearsed(plan: Plan, model: ModelGraph, rank: int) -> Rehearsal:
    """Rehearse in a process of its own, which may be in no process group yet."""
    fork = multiprocessing.get_context("fork")
    # What was there before the fork need not be looked through for tensors again and again.
    with ProcessPoolExecutor(1, mp_context=fork, initializer=gc.freeze) as apart:
        return apart.submit(rehearse, plan, model, rank=rank).result()


def groups_of_engine(plan: Plan, model: ModelGraph) -> int:
    """Return how many process groups an engine makes beside those of its mesh."""
    with fake_job(plan, rank=0):
        before = len(dist.distributed_c10d._world.pg_map)
        token_engine(plan, model, device=torch.device("cpu"))
        return len(dist.distributed_c10d._world.pg_map) - before


def test_ranks_that_keep_parameters_together_have_one_group_for_all_layers() -> None:
    """Were there one for each layer, ranks of other layers would wait for it for ever."""
    graph = cases.transformer("llama", layers=3)
    plan = cases.plan(graph, data_shard=4, data_replicate=2, zero=3, global_batch=16)
    fork = multiprocessing.get_context("fork")

    with ProcessPoolExecutor(1, mp_context=fork, initializer=gc.freeze) as apart:
        made = apart.submit(
            groups_of_engine, plan.model_copy(update={"reshard_after_forward": 2}), graph
        )

        assert made.result() == 0


def real_peak_bytes(plan: Plan, model: ModelGraph) -> int:
    engine = token_engine(plan, model, device=torch.device("cpu"))
    tokens = torch.zeros(plan.micro_batch * plan.micro_batches, plan.seq_len + 1, dtype=torch.int64)
    engine.step(tokens)
    peaks = []
    for _ in range(TRIES):
        with LiveMemory(engine.state().values()) as live:
            engine.step(tokens)
        peaks.append(live.peak_bytes)
    # gloo's thread lets go of a collective's tensors some time after the wait for it, never before.
    return min(peaks)


@pytest.mark.matrix
def test_every_micro_batch_holds_what_the_second_does() -> None:
    """Were the order of all forwards kept, the first unit's backward would gather the output
    projection, and a third micro-batch begin beside it."""
    graph = cases.transformer("llama", **FIGURES, layers=2, vocab_size=4096)
    peaks = [
        rehearsed(
            cases.plan(
                graph,
                global_batch=4 * count,
                data_shard=4,
                zero=3,
                precision="bf16",
                micro_batches=count,
            ),
            graph,
            0,
        ).peak_bytes
        for count in (2, 3)
    ]

    assert peaks[0] == peaks[1]


@pytest.mark.long("mixtral-figures4-layout4", "reference-figures3-layout3")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "figures", "layout"),
    [
        ("reference", {}, {"data_replicate": 2, "precision": "bf16"}),
        # Eight layers of which a quarter stays: copies that are not let go of would be the peak.
        pytest.param(
            "reference",
            {"layers": 8},
            {"data_shard": 4, "zero": 3, "recompute": "full"},
            marks=pytest.mark.matrix,
        ),
        # Logits that outweigh all else: shapes of whole tensors must not count.
        pytest.param(
            "llama",
            {"vocab_size": 8192},
            {"tensor": 2, "recompute": "selective"},
            marks=pytest.mark.matrix,
        ),
        ("reference", {}, {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2}),
        ("mixtral", {}, {"context": 2, "zero": 1, "precision": "bf16"}),
    ],
)
@pytest.mark.matrix
def test_a_rehearsed_rank_peaks_where_a_real_one_does(
    family: str, figures: dict[str, int], layout: dict[str, Any]
) -> None:
    graph = cases.transformer(family, **FIGURES, **figures)
    plan = cases.plan(graph, global_batch=64, **layout)

    measured = on_ranks(plan.mesh.devices, real_peak_bytes, plan, graph)

    # A real message is under way for a while, and its tensor stays.
    near = 0.02 if plan.mesh.pipeline > 1 else 0.002
    for place in range(plan.mesh.pipeline):
        rank = rank_at(plan, place)
        assert rehearsed(plan, graph, rank).peak_bytes == pytest.approx(measured[rank], rel=near)


@pytest.mark.matrix
def test_the_copies_of_a_small_model_peak_where_predicted() -> None:
    graph = resolve_model("demo-4m")
    plan = cases.plan(graph, global_batch=16, data_replicate=2, micro_batches=1)
    plan = plan.model_copy(update={"seq_len": 128})
    (stage,) = predict(plan, graph, resolve_cluster("local:2")).stages

    found = rehearsed(plan, graph, 0)

    # One bucket with all gradients would be there beside all activations, and 8 % more.
    assert found.peak_bytes == pytest.approx(stage.peak_memory_bytes, rel=0.015)


@pytest.mark.matrix
def test_the_first_of_a_thousand_ranks_holds_its_share_of_every_row() -> None:
    graph = cases.transformer(**FIGURES)
    plan = cases.plan(
        graph, global_batch=1024, data_shard=1024, zero=1, precision="bf16", micro_batches=1
    )

    found = rehearsed(plan, graph, 0)

    # FSDP divides rows: of at most 1,024 of them the first rank has one, whatever its length.
    rows = [128, 128, *(6 * [128] + [384] + 2 * [1]) * 3, 1]
    assert sum(rows) * 8 <= found.optimizer_bytes <= sum(rows) * 8 + 1000
    assert found.activations_bytes > 0


@pytest.mark.matrix
def test_kinds_of_one_rank_are_counted_whole() -> None:
    graph = cases.transformer(**FIGURES)
    plan = cases.plan(graph)

    found = rehearsed(plan, graph, 0)

    assert found.parameters_bytes == 4 * graph.parameters
    assert found.gradients_bytes == 4 * graph.parameters
    steps = found.optimizer_bytes - 8 * graph.parameters
    assert 0 <= steps < 1000  # a count of steps for each parameter


@pytest.mark.matrix
def test_a_table_that_both_ends_use_is_whole_through_a_step_of_zero_3() -> None:
    figures = {**FIGURES, "hidden_size": 256, "ffn_size": 1024, "layers": 6, "vocab_size": 5000}
    graph = cases.transformer("llama", tied_embeddings=True, **figures)
    plan = cases.plan(
        graph, global_batch=16, data_shard=8, zero=3, precision="bf16", micro_batches=2
    )

    found = rehearsed(plan, graph, 0)

    parts = predict(plan, graph, resolve_cluster("8xh100-sxm-80gb")).stages[0].memory_parts
    predicted = sum(
        size for name, size in parts.items() if name not in ("context", "allocator overhead")
    )
    assert predicted == pytest.approx(found.peak_bytes, rel=0.06)


def rehearsed_all(rows: list[tuple[Plan, ModelGraph]]) -> list[int]:
    return [rehearse(plan, graph, rank=0).peak_bytes for plan, graph in rows]


@pytest.mark.matrix
def test_when_the_loss_runs_nothing_of_the_micro_batch_before_is_left() -> None:
    """Neither what its last reduction read, nor what was gathered ahead."""
    graph = cases.transformer("llama", vocab_size=16384, layers=2, **FIGURES)
    plan = cases.plan(
        graph, global_batch=32, data_shard=8, zero=3, precision="bf16", micro_batches=2
    ).model_copy(update={"seq_len": 128})
    chunks = [ChunkedLoss(rows=64, gradients=how) for how in ("precomputed", "recomputed")]
    changes: list[dict[str, Any]] = [
        {},
        {"prefetch": 2, "reshard_after_forward": 2},
        {"reshard_after_forward": 1},
    ]
    changes += [{"loss": loss} for loss in chunks]
    rows = [(plan.model_copy(update=change), graph) for change in changes]

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork, initializer=gc.freeze) as apart:
        found = apart.submit(rehearsed_all, rows).result()

    cluster = resolve_cluster("8xh100-sxm-80gb")
    for (changed, _), peak in zip(rows, found, strict=True):
        parts = predict(changed, graph, cluster).stages[0].memory_parts
        predicted = sum(
            size for name, size in parts.items() if name not in ("context", "allocator overhead")
        )
        assert predicted == pytest.approx(peak, rel=0.01), changed.layout.text()


def test_places_of_the_pipeline_are_told_apart_by_the_order_of_axes() -> None:
    outside_in = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
    mesh = {"tensor": 2, "data_replicate": 2, "pipeline": 2}
    inside = Plan.model_construct(mesh=Mesh(**mesh))
    outside = Plan.model_construct(mesh=Mesh(**mesh, order=outside_in))

    assert [rank_at(inside, place) for place in (0, 1)] == [0, 4]
    assert [rank_at(outside, place) for place in (0, 1)] == [0, 1]
