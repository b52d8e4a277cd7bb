"""A unit that does what one before it did is not run again, and nothing else is different."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.runtime.tracing import tracer
from meshwright.runtime.tracing.meta_costs import identities
from meshwright.runtime.tracing.repeated_units import RepeatedUnits, UnitRun
from meshwright.runtime.tracing.tracer import Recorder

DEPTH = 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self, at: int, kind: str) -> None:
        super().__init__()
        self.layer_idx = at
        self.linear = nn.Linear(6, 8 if kind == "wider" and at % 2 else 6)
        self.back = nn.Linear(self.linear.out_features, 6)
        self.scale = 1.0 + at if kind == "attribute" else 1.0
        self.sizes = [at] if kind == "list" else [0]
        self.calls = 0
        self.kind = kind
        rates = {"partial": 0.5, "other partial": 0.5 + at}
        self.scaled = functools.partial(torch.mul, other=rates.get(kind, 1.0))

    def forward(self, x: Tensor, layer_idx: int = 0, width: int = 6) -> Tensor:
        """Return the sum, in the way of its kind."""
        inner = self.scaled(self.linear(x))
        match self.kind:
            case "number" if self.layer_idx % 2:
                inner = inner.relu()
            case "index" if [0, 1, 0, 1][self.layer_idx]:
                inner = inner.relu()
            case "read argument" if layer_idx % 2:
                inner = inner.relu()
            case "counter":
                self.calls += 1
            case "in place":
                x.add_(1.0)
            case "dropout":
                inner = nn.functional.dropout(inner, 0.1)
            case "same":
                return x
        return x + self.back(inner) * self.scale


class Stack(nn.Module):
    """Blocks in a row, and what they are given changed between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(at, kind) for at in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last block gives."""
        x = self.embed(x)
        for at, block in enumerate(self.blocks):
            match block.kind:
                case "argument" | "read argument":
                    x = block(x, at)
                case "named argument":
                    x = block(x, layer_idx=at)
                case "other argument":
                    x = block(x, 0, at)
                case _:
                    x = block(x)
            x += 1.0
        return x


class _Counting(RepeatedUnits):
    """Counts the blocks that run; without `repeats` all do."""

    ran = 0
    repeats = True

    def run(
        self,
        unit: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[Sequence[Any], Mapping[str, Any]], UnitRun],
    ) -> UnitRun:
        """Run a unit, or repeat it."""

        def counted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> UnitRun:
            _Counting.ran += unit.startswith("blocks")
            return run(args, kwargs)

        return super().run(unit, args, kwargs, counted) if self.repeats else counted(args, kwargs)


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("plain", 1),
        ("dropout", 1),
        ("partial", 1),
        ("other partial", DEPTH),
        ("argument", 1),
        ("named argument", 1),
        ("read argument", DEPTH),
        ("other argument", DEPTH),
        ("wider", 2),
        ("attribute", DEPTH),
        ("list", DEPTH),
        ("number", DEPTH),
        ("index", DEPTH),
        ("counter", DEPTH),
        ("in place", DEPTH),
        ("same", DEPTH),
    ],
)
def test_a_recording_is_that_of_all_units_run(
    kind: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only units that may be told apart by nothing are not run, and the recording has all."""
    monkeypatch.setattr(tracer, "RepeatedUnits", _Counting)
    monkeypatch.setattr(_Counting, "ran", 0)
    module, batch = Stack(kind), torch.ones(2, 6)
    first, counted = Recorder(module, batch).first, _Counting.ran
    monkeypatch.setattr(_Counting, "repeats", False)
    every = Recorder(module, batch).first
    assert (counted, _Counting.ran - counted) == (runs, DEPTH)
    assert first.nodes == every.nodes
    assert (first.values, first.layers, first.digest) == (every.values, every.layers, every.digest)


@pytest.mark.parametrize(("kind", "kinds"), [("argument", 1), ("read argument", DEPTH)])
def test_layers_are_alike_whose_number_is_an_argument_that_they_do_not_read(
    kind: str, kinds: int
) -> None:
    module = Stack(kind)
    recording = Recorder(module, torch.ones(2, 6)).first

    # The first block follows another layer than the next ones, and the last one has the result.
    inner = identities(module, recording)[2:-1]

    assert len(set(inner)) == min(kinds, len(inner))
