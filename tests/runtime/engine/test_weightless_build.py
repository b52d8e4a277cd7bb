"""A large module of a script is planned as any other, and its weights take no memory meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import meshwright
from meshwright.runtime.engine import weightless_build
from meshwright.runtime.engine.script_module import OwnScript

WIDTH, DEPTH, POSITIONS = 1024, 6, 4
WEIGHT_BYTES = 4 * WIDTH * WIDTH
BOUND = 2 * WIDTH * WIDTH
BATCH = (torch.zeros(4, POSITIONS, WIDTH), torch.zeros(4, POSITIONS))


class Net(nn.Module):
    """Blocks of a width, with something in their construction that may need values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = [self.blocks[0].weight]
        self.register_buffer("mask", torch.tril(torch.ones(POSITIONS, POSITIONS)))
        match kind:
            case "tied":
                self.head.weight = self.blocks[-1].weight  # type: ignore[assignment]
            case "itself":
                self.parts = [self]
            case "value":
                self.scale = float(self.head.weight.abs().max()) > 0
            case "buffer":
                self.register_buffer("sums", self.head.weight.detach().sum(0))
            case "large buffer":
                self.register_buffer("noise", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head makes of the blocks' results."""
        for block in self.blocks:
            x = block(x).relu()
            if self.kind == "numpy":
                x = x + torch.from_numpy(x.detach().numpy())
            if self.kind != "attention":
                x = self.mask @ x
            else:
                heads = x.view(*x.shape[:2], 8, -1)
                x = meshwright.attention(heads, heads, heads).reshape(x.shape)
        made: Tensor = self.head(x)
        return made


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs[..., 0].numel()


def live_bytes() -> int:
    """Bytes of all tensors that have data, each memory once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    stored = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors
        if not (isinstance(x, FakeTensor) or x.is_meta)
    }
    return sum(stored.values())


def script(kind: str, inputs: Callable[[Any], Any] | None = None) -> OwnScript:
    return OwnScript(build=lambda: Net(kind), batch=BATCH, loss=loss, inputs=inputs)


@pytest.fixture
def few_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights are more parameters than a module has that is tried whole."""
    monkeypatch.setattr(weightless_build, "MOST_CHECKED", BOUND)


@pytest.mark.usefixtures("few_checked")
@pytest.mark.parametrize("kind", ["plain", "tied", "itself", "value"])
def test_weights_are_gone_when_a_module_is_traced(kind: str, tmp_path: Path) -> None:
    notes = tmp_path / "bytes"  # lists are put back after a trial

    def inputs(batch: Any) -> Any:
        if not notes.exists():
            notes.write_text(str(live_bytes()))
        return batch[0]

    before_bytes = live_bytes()
    script(kind, inputs).graph()

    assert int(notes.read_text()) - before_bytes < WEIGHT_BYTES


@pytest.mark.usefixtures("few_checked")
def test_weights_behind_a_bound_take_no_memory_while_a_module_is_built(tmp_path: Path) -> None:
    notes = tmp_path / "bytes"

    def build() -> nn.Module:
        net = Net("plain")
        with notes.open("a") as file:
            print(live_bytes(), file=file)
        return net

    before_bytes = live_bytes()
    OwnScript(build=build, batch=BATCH, loss=loss).graph()

    (built_bytes,) = map(int, notes.read_text().split())
    assert built_bytes - before_bytes < 4 * BOUND + WEIGHT_BYTES < DEPTH * WEIGHT_BYTES


@pytest.mark.parametrize(
    "kind", ["plain", "tied", "itself", "value", "buffer", "large buffer", "numpy", "attention"]
)
def test_the_graph_is_that_of_the_module_with_its_data(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_data = script(kind).graph()
    monkeypatch.setattr(weightless_build, "MOST_CHECKED", BOUND)

    assert script(kind).graph() == with_data
    assert with_data.positions == (POSITIONS if kind == "attention" else None)


@pytest.mark.usefixtures("few_checked")
def test_an_error_of_the_users_own_construction_is_theirs() -> None:
    def build() -> nn.Module:
        net = Net("plain")
        raise ValueError(f"{len(net.blocks)} blocks are too many")

    with pytest.raises(ValueError, match="6 blocks are too many"):
        OwnScript(build=build, batch=BATCH, loss=loss).graph()
