"""State is put back from memory under the same plan and others, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.planner.errors import LaunchError
from meshwright.runtime.checkpoint.state_snapshot import Snapshot, SnapshotPart
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases
from tests.runtime import test_script_techniques as nets
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
SCRIPT: list[dict[str, Any]] = [
    {"zero": 3},
    {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv", "cuts": [1, 2, 1, 1]},
    {},
]
TOKENS: list[dict[str, Any]] = [
    {"data_shard": 2, "zero": 3, "offload": "optimizer"},
    {"tensor": 2},
    {"pipeline": 2},
]


def of_script(layout: dict[str, Any]) -> tuple[Engine, Callable[[int], Any]]:
    engine = Engine(nets.Net, layout, loss=nets.loss, optimizer=nets.adamw, batch=nets.batch_of(0))
    return engine, lambda step: engine.slice(nets.batch_of(step))


def of_tokens(layout: dict[str, Any]) -> tuple[Engine, Callable[[int], Any]]:
    model = cases.transformer("llama", heads=4)
    engine = token_engine(cases.plan(model, **layout), model, device=CPU)
    return engine, lambda step: cases.global_tokens(step).chunk(engine.slices)[engine.slice_rank]


def gathered(engine: Engine) -> list[Snapshot]:
    """Return the snapshots of all ranks, on each."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, engine.snapshot())
    return every


def whole(engine: Engine) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).clone()
        for name, one in engine.state().items()
    }


def moved(make: Callable[..., Any], layouts: list[dict[str, Any]]) -> list[str]:
    """Return what of the state is another behind a way over all plans and back to the first."""
    first, batch = make(layouts[0])
    for step in range(2):
        first.step(batch(step))
    parts = gathered(first)
    expected, at = whole(first), first.steps
    for layout in (*layouts[1:], layouts[0]):
        engine, own = make(layout)
        engine.restore(parts)
        assert (engine.steps, engine.next_sample) == (at, 2 * engine.plan.global_batch)
        parts = gathered(engine)
    wrong = [
        name for name, value in whole(engine).items() if not torch.equal(value, expected[name])
    ]
    losses = [(one.step(own(2)).loss, one.step(own(3)).grad_norm) for one in (engine, first)]
    return wrong if losses[0] == losses[1] else [*wrong, str(losses)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "layouts"),
    [
        (of_script, SCRIPT[:2]),
        pytest.param(of_script, SCRIPT, marks=pytest.mark.matrix),
        pytest.param(of_tokens, TOKENS, marks=pytest.mark.matrix),
    ],
)
def test_state_that_goes_through_other_plans_comes_back_bit_by_bit(
    make: Callable[..., Any], layouts: list[dict[str, Any]]
) -> None:
    assert on_ranks(2, moved, make, layouts) == [[], []]


def test_a_snapshot_is_no_view_and_one_that_lacks_something_changes_nothing() -> None:
    engine, batch = of_script({})
    engine.step(batch(0))
    snapshot = engine.snapshot()
    kept = {name: part.values.clone() for name, part in snapshot.parts.items()}
    engine.step(batch(1))
    assert all(torch.equal(part.values, kept[n]) for n, part in snapshot.parts.items())
    now = {name: value.clone() for name, value in engine.state().items()}

    name = "optim.head.weight.exp_avg"
    part = snapshot.parts[name]
    half = SnapshotPart(part.shape, part.offset, part.values[:16])
    over = SnapshotPart(part.shape, (8, 0), part.values[8:])
    lacking = [
        ([replace(snapshot, parts={**snapshot.parts, name: half})], "have 512 of the 1024 numbers"),
        ([replace(snapshot, parts={name: part})], "have 0 of the"),
        ([snapshot, replace(snapshot, step=7)], r"are of steps \[1, 7\]"),
        ([], r"are of steps \[\]"),
        (
            [snapshot, replace(snapshot, parts={name: over})],
            "head.weight.exp_avg: parts of the snapshots overlap",
        ),
        (
            [replace(snapshot, parts={**snapshot.parts, name: replace(part, shape=(1, 2))})],
            r"has shape \(32, 32\) here",
        ),
    ]
    for given, said in lacking:
        with pytest.raises(LaunchError, match=said):
            engine.restore(given)
        assert all(torch.equal(value, now[name]) for name, value in engine.state().items())

    engine.restore([snapshot])
    assert (engine.steps, engine.next_sample) == (1, engine.plan.global_batch)
    assert engine.step(batch(1)).loss > 0


def test_a_step_that_is_half_done_is_neither_saved_nor_replaced(tmp_path: Path) -> None:
    engine, batch = of_script({})
    engine.step(batch(0))
    engine.save(tmp_path)
    snapshot = engine.snapshot()
    engine.forward_backward(batch(1))

    ways: dict[str, Callable[[], object]] = {
        "snapshot": engine.snapshot,
        "restore": lambda: engine.restore([snapshot]),
        "save": lambda: engine.save(tmp_path),
        "load": lambda: engine.resume(tmp_path),
    }
    for name, way in ways.items():
        with pytest.raises(LaunchError, match=f"{name}: gradients wait"):
            way()
    engine.zero_grad()
    assert engine.resume(tmp_path)
    assert engine.next_sample == engine.plan.global_batch
