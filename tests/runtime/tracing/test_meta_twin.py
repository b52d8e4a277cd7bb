"""Figures of layers on the meta device are those of the same layers traced with fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.model import ModelGraph
from meshwright.runtime.engine import module_graph
from meshwright.runtime.engine.module_graph import script_model
from meshwright.runtime.tracing import meta_twin
from meshwright.runtime.tracing.meta_twin import EqualOperators, MetaTwin

WIDTH = 8


class Feed(nn.Module):
    """A residual product of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(x)))


class Attention(Feed):
    """The same behind torch's attention, which chooses its kernel by device."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return super().forward(mixed.transpose(1, 2).flatten(2))


class ByDevice(Feed):
    """The same, with another backward where nothing is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin() if x.is_meta and not x.is_cpu else x)


class OfConstant(Feed):
    """The same with a table that is on the CPU wherever the module is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.ones(x.shape[1], 1))


class Chunks(Feed):
    """A loop over positions, as libraries have it in place of a kernel."""

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for position in x.unbind(1):
            state = state * 0.5 + position
            outputs.append(state)
        return super().forward(torch.stack(outputs, 1))


def graph_of(kind: type[Feed]) -> ModelGraph:
    torch.manual_seed(0)
    module = nn.Sequential(*(kind() for _ in range(3)), Feed())
    batch = torch.randn(4, 6, WIDTH)
    return script_model(
        module,
        batch,
        loss=lambda outputs, _: (outputs.square().sum(), torch.tensor(1.0)),
        name="build",
        degrees=(2,),
    )


@pytest.mark.parametrize(
    ("kind", "believed"),
    [(Feed, True), (Chunks, True), (Attention, False), (ByDevice, False), (OfConstant, False)],
)
def test_figures_are_those_of_fake_tensors(
    kind: type[Feed], believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: dict[str, bool] = {}
    note = EqualOperators.note

    def noting(self: EqualOperators, layer: object, *, equal: bool) -> None:
        notes[layer.name] = equal  # type: ignore[attr-defined]
        note(self, layer, equal=equal)  # type: ignore[arg-type]

    monkeypatch.setattr(EqualOperators, "note", noting)
    graph = graph_of(kind)

    first = dict(notes)
    monkeypatch.setattr(module_graph, "MetaTwin", without_twin)
    assert graph == graph_of(kind)
    assert first["0"] is believed
    assert any(layer.divided for layer in graph.layers)


class without_twin(MetaTwin):  # noqa: N801 - stands for the class
    """A twin on which nothing runs."""

    def result(self, trace: Callable[..., object], taken: tuple[Tensor, ...]) -> None:  # type: ignore[override]
        return None


def test_a_twin_leaves_the_mode_of_fake_tensors_and_comes_back() -> None:
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        module = nn.Linear(2, 2)
        twin = MetaTwin(module, torch.ones(1, 2))
        kinds = twin.result(lambda part, _, batch: (type(batch), part.weight.device.type), ())

        assert kinds == (Tensor, "meta")
        assert meta_twin.empty_twin(torch.ones(2), "cpu").device.type == "cpu"
        assert isinstance(torch.ones(1), torch._subclasses.FakeTensor)
