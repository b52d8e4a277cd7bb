"""What the engine promises beside equality: states that any plan loads, refusals, layers, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
TIED = cases.transformer(tied_embeddings=True)
MIXED = cases.transformer("mixtral")
# Every kind of layout both writes and reads.  Ties are stored once and read at both ends; experts
# hold two matrices in one parameter, each divided by the tensor axis.
LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "data_shard": 2, "zero": 3},
    {"pipeline": 4, "offload": "optimizer"},
    {"pipeline": 2, "data_replicate": 2},
    {"data_shard": 2, "data_replicate": 2, "zero": 1},
    {"pipeline": 2, "tensor": 2, "offload": "parameters"},
    {"data_shard": 4, "zero": 3},
    {
        "pipeline": 2,
        "data_shard": 2,
        "zero": 3,
        "schedule": "interleaved-zb",
        "virtual_stages": 2,
    },
]


def steps(engine: Engine, first: int, last: int) -> list[float]:
    return [
        engine.step(cases.global_tokens(step).chunk(engine.slices)[engine.slice_rank]).loss
        for step in range(first, last)
    ]


def save_and_load(
    folder: Path, graph: ModelGraph, layouts: list[dict[str, Any]]
) -> list[list[float]]:
    """Each layout saves after two steps; the next in the list goes on from there."""
    for index, layout in enumerate(layouts):
        engine = token_engine(cases.plan(graph, **layout), graph, device=CPU)
        steps(engine, 0, 2)
        dcp.save(engine.state(), checkpoint_id=folder / str(index))
    results = []
    for index in range(len(layouts)):
        layout = layouts[(index + 1) % len(layouts)]
        engine = token_engine(cases.plan(graph, **layout, seed=99), graph, device=CPU)
        dcp.load(engine.state(), checkpoint_id=folder / str(index))
        assert engine.steps == 2
        results.append(steps(engine, 2, 4))
    return results


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("graph", "layouts"),
    [
        (TIED, LAYOUTS),
        (MIXED, LAYOUTS[:3]),
    ],
)
def test_any_plan_goes_on_where_another_stopped(
    graph: ModelGraph, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    expected = steps(token_engine(cases.plan(graph), graph, device=CPU), 0, 4)[2:]

    for results in on_ranks(4, save_and_load, tmp_path, graph, layouts):
        for losses in results:
            assert losses == pytest.approx(expected, rel=1e-6)


def in_bf16(layouts: list[dict[str, Any]]) -> list[tuple[list[float], set[torch.dtype]]]:
    graph = cases.transformer()
    results = []
    for layout in layouts:
        engine = token_engine(cases.plan(graph, precision="bf16", **layout), graph, device=CPU)
        seen: set[torch.dtype] = set()
        for layer in engine.units.values():
            layer.register_forward_hook(lambda _, inputs, output, seen=seen: seen.add(output.dtype))
        results.append((steps(engine, 0, 4), seen | {v.dtype for v in engine.state().values()}))
    return results


@pytest.mark.ranks
@pytest.mark.matrix
def test_bf16_computes_in_bf16_and_stays_near_fp32() -> None:
    graph = cases.transformer()
    expected = steps(token_engine(cases.plan(graph), graph, device=CPU), 0, 4)
    layouts: list[dict[str, Any]] = [
        {"data_shard": 2, "zero": 3},
        {"data_replicate": 2},
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "gpipe", "recompute": "selective"},
        {"tensor": 2, "recompute": "full"},
        {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2, "recompute": "full"},
    ]

    for losses, types in (row for rows in on_ranks(2, in_bf16, layouts) for row in rows):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert types == {torch.bfloat16, torch.float32, torch.int64, torch.int32}


def alone_in_bf16() -> list[float]:
    dist.destroy_process_group()
    graph = cases.transformer()
    return steps(token_engine(cases.plan(graph, precision="bf16"), graph, device=CPU), 0, 4)


@pytest.mark.ranks
def test_bf16_needs_no_process_group() -> None:
    graph = cases.transformer()
    expected = steps(token_engine(cases.plan(graph), graph, device=CPU), 0, 4)

    (losses,) = on_ranks(1, alone_in_bf16)

    assert losses == pytest.approx(expected, rel=2e-3)
    assert losses != pytest.approx(expected, rel=1e-6)


@pytest.mark.matrix
@pytest.mark.ranks
def test_weight_gradients_made_later_are_summed_in_fp32_too() -> None:
    layouts: list[dict[str, Any]] = [
        {"pipeline": 2, "micro_batches": 8},
        {"pipeline": 2, "micro_batches": 8, "schedule": "zb-h1"},
        {"pipeline": 2, "micro_batches": 8, "schedule": "zbv", "virtual_stages": 2},
    ]

    for whole, *split in on_ranks(2, in_bf16, layouts):
        for losses, _ in split:
            assert losses == pytest.approx(whole[0], rel=1e-6)


def calls_and_layers() -> tuple[list[str], dict[str, int]]:
    graph = cases.transformer()
    engine = token_engine(
        cases.plan(graph, pipeline=2, cuts=[2, 3], recompute="full"), graph, device=CPU
    )
    calls = dict.fromkeys(engine.units, 0)
    for name, layer in engine.units.items():

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        layer.register_forward_hook(count)
    steps(engine, 0, 1)
    return list(engine.units), calls


@pytest.mark.ranks
def test_each_layer_of_the_stage_runs_once_per_micro_batch() -> None:
    first, last = on_ranks(2, calls_and_layers)

    assert first == (["embedding", "block.0"], {"embedding": 4, "block.0": 4})
    assert last == (["block.1", "block.2", "head"], {"block.1": 4, "block.2": 4, "head": 4})


def test_what_cannot_be_run_is_refused() -> None:
    graph = cases.transformer(qk_norm=True)

    with pytest.raises(LaunchError, match="the reference transformer has no query/key norms"):
        token_engine(cases.plan(graph), graph, device=CPU)


def test_a_job_of_another_size_is_refused() -> None:
    graph = cases.transformer()

    with pytest.raises(LaunchError, match="the plan is for 2 ranks, and 1 are running"):
        token_engine(cases.plan(graph, data_replicate=2), graph, device=CPU)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = cases.plan(cases.transformer())

    with pytest.raises(DocumentError, match="this plan was made for another model"):
        token_engine(plan, cases.transformer(layers=2), device=CPU)


def test_tokens_of_another_shape_are_refused() -> None:
    graph = cases.transformer()
    engine = token_engine(cases.plan(graph), graph, device=CPU)

    with pytest.raises(LaunchError, match=r"tokens of shape \(8, 17\), not \(4, 17\)"):
        engine.step(cases.global_tokens(0)[:4])


def test_clipping_bounds_the_first_step_of_plain_descent() -> None:
    """With a huge epsilon AdamW moves by the clipped gradient, scaled alike for all."""
    graph = cases.transformer()
    moved = {}
    for clip_norm in (0.0, 0.01):
        engine = token_engine(cases.plan(graph, clip_norm=clip_norm), graph, device=CPU)
        norm = engine.step(cases.global_tokens(0)).grad_norm
        state = engine.state()
        moved[clip_norm] = state["optim.embedding.tokens.weight.exp_avg"].clone()

    ratio = (moved[0.01].norm() / moved[0.0].norm()).item()

    assert ratio == pytest.approx(0.01 / norm, rel=1e-4)
