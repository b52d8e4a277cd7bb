"""A script's layers offload or compress what they store, as a plan says, and train as in a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.techniques import activation_offload as activations
from meshwright.runtime.techniques.activation_offload import LEAST_ELEMENTS
from tests.runtime import own_modules
from tests.runtime import test_script_engine as script
from tests.runtime.ranks import on_ranks

OFFLOADED: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero 2, selective": {"zero": 2, "micro_batches": 2, "recompute": "selective"},
    "zero 3": {"zero": 3},
    "zero 3, full": {"zero": 3, "micro_batches": 2, "recompute": "full"},
    "two stages": {"pipeline": 2},
    "zero bubble, selective": {"pipeline": 2, "schedule": "zb-h1", "recompute": "selective"},
    "tied stages of one rank": {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv"},
    "tensor": {"tensor": 2},
}
Moved = tuple[script.Run, int]


def offloaded(layout: dict[str, Any], how: str = "offload") -> Moved:
    """Train with even the smallest tensors packed; return how many went to the host too."""
    count, to_host = 0, host.to_host

    def counted(span: Tensor) -> host.Copied:
        nonlocal count
        count += 1
        return to_host(span)

    activations.LEAST_ELEMENTS, host.to_host = 1, counted
    try:
        return script.trained({**layout, "activations": how}), count
    finally:
        activations.LEAST_ELEMENTS, host.to_host = LEAST_ELEMENTS, to_host


def rows_of(names: list[str]) -> tuple[dict[str, Moved], Moved]:
    found = {name: offloaded(OFFLOADED[name]) for name in names}
    return found, offloaded({"zero": 3}, "compress")


@pytest.mark.ranks
@pytest.mark.matrix
def test_offloaded_activations_train_as_a_plain_loop_under_any_plan() -> None:
    expected = script.plainly()

    for runs, _ in on_ranks(2, rows_of, [*OFFLOADED]):
        for name, (run, moved) in runs.items():
            script.check(run, expected, name)
            assert moved, name
        # Parameters stay: ZeRO-3 gathers them in the midst of a layer, and moves no more.
        assert runs["zero 3"][1] == runs["replicated"][1]


@pytest.mark.ranks
def test_offloaded_and_compressed_activations_train_as_a_plain_loop() -> None:
    expected = script.plainly()

    for runs, (compressed, _) in on_ranks(2, rows_of, ["zero 3"]):
        for name, (run, moved) in runs.items():
            script.check(run, expected, name)
            assert moved, name
        losses = [result.loss for result in compressed[0]]
        assert losses[0] == pytest.approx(expected[0][0], rel=1e-6)
        assert losses == pytest.approx(expected[0], rel=2e-3)
        assert losses[1:] != pytest.approx(expected[0][1:], rel=1e-6)


def squares(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.float().square().sum() for leaf in leaves]).sum(), 4


def gradients(kind: str, layout: dict[str, Any]) -> dict[str, Tensor]:
    build, example, inputs = own_modules.MODULES[kind]
    torch.manual_seed(1)
    batch = example()
    engine = Engine(
        build,
        layout,
        loss=squares,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        batch=batch,
        inputs=inputs,
    )
    engine.forward_backward(batch)
    return dict(engine.gradients())


@pytest.mark.spread(2)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("kind", ["resnet", "diffusion", "two_towers", "lstm", "t5", "experts"])
def test_layers_of_every_kind_store_their_tensors_on_the_host(
    kind: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips over layers, changes in place, several inputs, buffers, a library's recurrence."""
    kept = gradients(kind, {"recompute": recompute})
    monkeypatch.setattr(activations, "LEAST_ELEMENTS", 1)

    found = gradients(kind, {"recompute": recompute, "activations": "offload"})

    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
