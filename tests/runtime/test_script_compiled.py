"""A script's units compile, gather ahead and stay gathered as a plan says, and train as eager."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.torch_internals import compiled_graphs
from meshwright.runtime.engine.engine import Engine
from tests.parts import some_and_others
from tests.runtime import own_modules
from tests.runtime import test_script_engine as script
from tests.runtime.ranks import on_ranks

COMPILED: dict[str, dict[str, Any]] = {
    "zero 3, full": {"zero": 3, "micro_batches": 2, "recompute": "full"},
    "zero 2, selective, offloaded": {
        "zero": 2,
        "recompute": "selective",
        "activations": "offload",
    },
    "two stages": {"pipeline": 2},
    "tensor, selective": {"tensor": 2, "recompute": "selective"},
    "zero bubble, selective": {"pipeline": 2, "schedule": "zb-h1", "recompute": "selective"},
}
four_blocks = functools.partial(own_modules.GPT, tied="module")
"""Two and more on each stage, and enough to gather three ahead."""


Compiled = tuple[script.Run, int, dict[str, str]]


def with_graphs(layout: dict[str, Any]) -> Compiled:
    graphs = compiled_graphs()
    torch._dynamo.reset()
    engines: list[Engine] = []

    def kept(*args: Any, **kwargs: Any) -> Engine:
        engines.append(script.new_engine(*args, **kwargs))
        return engines[-1]

    run = script.trained({**layout, "compile": "block"}, four_blocks, new=kept)
    return run, compiled_graphs() - graphs, dict(engines[0].not_compiled)


def compiled_under(names: list[str]) -> dict[str, Compiled]:
    return {name: with_graphs(COMPILED[name]) for name in names}


@pytest.mark.ranks
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("names", some_and_others(COMPILED, ["zero 3, full"]))
def test_units_that_repeat_are_one_graph_and_train_as_a_plain_loop(names: list[str]) -> None:
    expected = script.plainly(four_blocks)
    importlib.import_module("torch._inductor.lowering")  # once, not in each rank that is forked

    for found in on_ranks(2, compiled_under, names):
        for name, (run, graphs, eager) in found.items():
            script.check(run, expected, name)
            assert eager == {}, name
            assert 1 <= graphs <= 2, (name, graphs)  # of training, and of evaluation


class Drawing(own_modules.Block):
    """Draws random numbers, which follow the sample whatever the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.drop(super().forward(x, memory, **kwargs))


class Counting(own_modules.Block):
    """Keeps what it saw in Python."""

    def forward(self, x: Tensor, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = super().forward(x, memory, **kwargs)
        return x if float(x.sum()) else 2 * x


class Normalised(own_modules.Block):
    """Moves running statistics, which all ranks have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(own_modules.WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = super().forward(x, memory, **kwargs)
        return self.batch(x.transpose(1, 2)).transpose(1, 2)


def of_blocks(block: Callable[[], nn.Module]) -> nn.Module:
    module = own_modules.GPT(tied="module")
    module.blocks = nn.ModuleList(block() for _ in range(2))
    return module


@pytest.mark.spread(1)
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("block", "reason"),
    [(Drawing, "draws"), (Counting, ""), (script.PenalisedBlock, ""), (Normalised, "")],
)
def test_what_no_graph_may_hold_runs_eager_says_why_and_trains_alike(
    block: Callable[[], nn.Module], reason: str
) -> None:
    """Inner losses, statistics and random numbers are the engine's, and a value ends a graph."""
    runs = []
    for layout in ({}, {"compile": "block"}):
        engine = script.new_engine(
            {**layout, "micro_batches": 2, "recompute": "full"}, functools.partial(of_blocks, block)
        )
        results = [engine.step(script.batch_of(step)) for step in range(2)]
        runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict()))

    assert engine.not_compiled.keys() == {"blocks.0", "blocks.1"}
    assert all(reason in text and text for text in engine.not_compiled.values())
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


# --- what ZeRO-3 gathers ahead, and keeps ---------------------------------------------------------

AHEAD: dict[str, dict[str, Any]] = {
    "none": {"zero": 3},
    "one ahead": {"zero": 3, "prefetch": 1},
    "three ahead": {"zero": 3, "prefetch": 3, "micro_batches": 2, "recompute": "full"},
    "kept whole": {"zero": 3, "reshard_after_forward": 1, "micro_batches": 2},
}


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""What FSDP calls, by torch's version."""


def gathers(layout: dict[str, Any]) -> tuple[script.Run, int, int]:
    """Train; return the gathers before the first block of a forward, and all of the first step."""
    engine = script.new_engine(layout, four_blocks)
    gather, begun, before, every = getattr(dist, GATHER), 0, 0, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun += 1
        return gather(*args, **kwargs)

    def first(*_: Any) -> None:
        nonlocal before
        before = before or begun

    (part,) = engine._passes._parts
    part.module.part("blocks.0").register_forward_pre_hook(first)
    setattr(dist, GATHER, counted)
    results = []
    try:
        for step in range(script.STEPS):
            results.append(engine.step(engine.slice(script.batch_of(step))))
            every = every or begun
    finally:
        setattr(dist, GATHER, gather)
    return (results, engine.state_dict()), before, every


def gathered_everywhere() -> dict[str, tuple[script.Run, int, int]]:
    return {name: gathers(layout) for name, layout in AHEAD.items()}


@pytest.mark.ranks
@pytest.mark.matrix
def test_units_are_gathered_as_far_ahead_and_kept_as_a_plan_says() -> None:
    expected = script.plainly(four_blocks)

    for found in on_ranks(2, gathered_everywhere):
        for name, (run, _, _) in found.items():
            script.check(run, expected, name)
        ahead = {name: before for name, (_, before, _) in found.items()}
        assert ahead["one ahead"] == ahead["none"] + 1
        assert ahead["three ahead"] == ahead["none"] + 3
        # Whole between forward and backward: each unit comes once in both, of two micro-batches.
        assert found["kept whole"][2] < 2 * found["none"][2]


def four_ranks() -> script.Run:
    return script.trained(
        {"zero": 3, "data_replicate": 1, "reshard_after_forward": 2, "micro_batches": 1}
    )


@pytest.mark.ranks
@pytest.mark.matrix
def test_units_stay_divided_among_two_of_four_ranks() -> None:
    expected = script.plainly()

    for run in on_ranks(4, four_ranks):
        script.check(run, expected)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ({"zero": 2, "prefetch": 1}, "prefetch"),
        ({"zero": 3, "reshard_after_forward": 2}, "reshard_after_forward"),
    ],
)
def test_what_nothing_gathers_for_is_refused_by_name(layout: dict[str, Any], field: str) -> None:
    with pytest.raises(LaunchError, match=f"^{field}: is "):
        script.new_engine(layout)
