"""Weight gradients put off equal those of autograd, whatever stands around the Linear."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.documents.profile import Recompute
from meshwright.runtime.techniques.activation_checkpointing import wrapped
from meshwright.runtime.techniques.split_backward import DeferredLinear, WeightGradients, defer


def layers(recompute: Recompute) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6, bias=False))
    return nn.Sequential(wrapped(first, recompute), nn.LayerNorm(6), nn.MultiheadAttention(6, 2))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def backward(module: nn.Module, seed: int) -> None:
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(seed))
    hidden = module[1](module[0](x))
    attended, _ = module[2](hidden, hidden, hidden)
    attended.square().sum().backward()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_made_later_are_autograds(recompute: Recompute) -> None:
    expected, module = layers(recompute), layers(recompute)
    store = WeightGradients()
    defer(module, store)

    later = []
    for seed in range(3):
        backward(expected, seed)
        store.deferring = seed != 1
        backward(module, seed)
        later.append(store.take_deferred())
    early = set(gradients(module))
    for make in later:
        make()

    assert set(gradients(module)) == set(gradients(expected))
    # The second backward was done in one piece, so its weights have gradients before the rest.
    assert early == set(gradients(expected))
    for name, grad in gradients(expected).items():
        torch.testing.assert_close(gradients(module)[name], grad)


def test_a_weight_has_no_gradient_before_its_turn() -> None:
    module, store = layers("none"), WeightGradients()
    defer(module, store)
    store.deferring = True

    backward(module, 0)

    waiting = {
        f"{name}.weight" for name, m in module.named_modules() if isinstance(m, DeferredLinear)
    }
    assert waiting == {"0.0.weight", "0.2.weight"}
    assert set(gradients(module)) == set(dict(module.named_parameters())) - waiting
    store.take_deferred()()
    assert set(gradients(module)) == set(dict(module.named_parameters()))


def test_nothing_is_held_after_its_turn() -> None:
    module, store = layers("none"), WeightGradients()
    defer(module, store)
    store.deferring = True
    backward(module, 0)
    held = [weakref.ref(tensor) for _, *pair, _ in store._waiting for tensor in pair]

    assert all(tensor() is not None for tensor in held)
    store.take_deferred()()

    assert not any(tensor() is not None for tensor in held)
    assert all(grad.grad_fn is None for grad in gradients(module).values())


def test_a_frozen_weight_stays_without_gradient() -> None:
    module, store = nn.Linear(4, 4), WeightGradients()
    defer(module, store)
    store.deferring = True
    module.weight.requires_grad_(False)

    module(torch.ones(2, 4)).sum().backward()
    store.take_deferred()()

    assert module.weight.grad is None
    assert module.bias.grad is not None
