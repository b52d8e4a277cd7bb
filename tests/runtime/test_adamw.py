"""The update of a plan is held against torch's AdamW, wherever its state lies."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.planner.documents.plan import Mesh, Offload
from meshwright.planner.documents.training import Training
from meshwright.runtime.core.loss import LossScale
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.pinned_memory import on_host
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.optim import offloaded_state as streamed_state
from meshwright.runtime.optim.learning_rate import learning_rate
from meshwright.runtime.optim.sharded_optimizer import TorchOptimizers
from meshwright.runtime.optim.update_rules import parameter_groups_of as adamw
from meshwright.runtime.optim.update_rules import slots_of
from meshwright.runtime.tracing.stage import MicroBatch
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
RATE = 0.01
TRAINING = Training(
    learning_rate=RATE, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.2, clip_norm=0
)
SHAPES = ((64, 32), (32,), (0, 32), (32, 64), (7,), (64, 64))


class Names:
    """The rules of a model whose parameters have no names but their own."""

    tied_names = frozenset[str]()

    def published_name(self, name: str) -> str:
        return name

    def pieces(self, name: str) -> int:
        return 1


def optimizer_of(
    parameters: Sequence[torch.Tensor], training: Training, offload: Offload = "none", **how: Any
) -> TorchOptimizers:
    module = nn.Module()
    for at, parameter in enumerate(parameters):
        module.register_parameter(str(at), nn.Parameter(parameter))
    place = Place(degrees=Mesh(), mesh=None)
    slots = tuple(slots_of(module, Names(), place))  # type: ignore[arg-type]
    return TorchOptimizers(
        slots,
        adamw(slots, training, device=CPU, offload=offload),
        place,
        device=CPU,
        divisor=1.0,
        streamed=offload == "optimizer",
        learning_rate=functools.partial(learning_rate, training),
        **how,
    )


def update(
    optimizer: TorchOptimizers, grads: Sequence[torch.Tensor | None], *, counted: float = 1.0
) -> None:
    for slot, grad in zip(optimizer.slots, grads, strict=True):
        slot.parameter.grad = grad
    optimizer.step(torch.tensor([0.0, counted], dtype=torch.float64), TRAINING.clip_norm)


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[3] = made[3].t()  # lies in memory by columns
    return made


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 2**26])
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_the_update_is_torchs_bit_by_bit(
    offload: Offload, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_state, "BUCKET_BYTES", bucket_bytes)
    expected = [nn.Parameter(value) for value in values(0)]
    oracle = torch.optim.AdamW(
        [
            {"params": [p for p in expected if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for p in expected if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=True,
    )
    found = values(0)
    optimizer = optimizer_of(found, TRAINING, offload)
    for at in range(3):
        for parameter, grad in zip(expected, values(1 + at), strict=True):
            parameter.grad = grad if grad.numel() else None
        oracle.step()
        update(optimizer, values(1 + at))

    state = optimizer.state()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for at, parameter in enumerate(expected):
        if parameter.numel():
            assert state[f"optim.{at}.step"] == 3
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[f"optim.{at}.{key}"], oracle.state[parameter][key])
                assert on_host(state[f"optim.{at}.{key}"]) == (offload != "none")


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("why", ["overflown", "nothing counted"])
def test_a_step_that_is_skipped_changes_nothing(why: str, offload: Offload) -> None:
    found, grads = values(0), values(1)
    scale = LossScale(CPU, active=why == "overflown")
    if why == "overflown":
        grads[0][0, 0] = torch.inf
    optimizer = optimizer_of(found, TRAINING, offload, scale=scale)

    update(optimizer, grads, counted=0.0 if why == "nothing counted" else 1.0)

    assert all(torch.equal(a, b) for a, b in zip(found, values(0), strict=True))
    kept = {name: v for name, v in optimizer.state().items() if name.startswith("optim.")}
    assert kept
    assert not any(value.any() for value in kept.values())


def test_what_has_no_gradient_stays() -> None:
    parameters = values(0)
    optimizer = optimizer_of(parameters, TRAINING, "optimizer")

    update(optimizer, [None, *values(1)[1:]])

    assert torch.equal(parameters[0], values(0)[0])
    assert not torch.equal(parameters[5], values(0)[5])


def test_a_step_holds_three_buckets_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    each = 64 * 64 * 4
    monkeypatch.setattr(streamed_state, "BUCKET_BYTES", 2 * each)  # the state of one parameter
    optimizer = optimizer_of([torch.randn(64, 64) for _ in range(8)], TRAINING, "optimizer")
    update(optimizer, [torch.randn(64, 64) for _ in range(8)])
    grads = [torch.randn(64, 64) for _ in range(8)]

    with LiveMemory(existing=grads) as live:
        held = live.current_bytes
        update(optimizer, grads)

    assert live.current_bytes <= held
    assert 2 * 2 * each <= live.peak_bytes - held <= 3 * 2 * each + 1024


@pytest.mark.ranks
def test_parameters_on_the_host_need_no_process_group() -> None:
    def work() -> tuple[int, int]:
        dist.destroy_process_group()
        return state_bytes("parameters")

    ((held, _),) = on_ranks(1, work)

    assert held <= 1024  # counts of steps


def state_bytes(offload: str) -> tuple[int, int]:
    """Return what an engine holds between steps, and the bytes of its parameters."""
    graph = cases.transformer()
    engine = token_engine(cases.plan(graph, offload=offload), graph, device=CPU)
    engine.step(cases.global_tokens(0))
    gc.collect()
    state = engine.state()
    parameters = sum(value.nbytes for name, value in state.items() if name.startswith("model."))
    return LiveMemory(existing=state.values()).current_bytes, parameters


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    counts = 1024  # of steps, one for each parameter
    kept, parameters = state_bytes("none")

    assert 3 * parameters <= kept <= 3 * parameters + counts
    assert parameters <= state_bytes("optimizer")[0] <= parameters + counts


def forward_bytes(offload: str) -> tuple[int, int, int]:
    """Return the peak of a forward, and the bytes of the largest layer and of all layers."""
    if offload == "parameters":
        dist.destroy_process_group()
    graph = cases.transformer(layers=8)
    engine = token_engine(cases.plan(graph, offload=offload), graph, device=CPU)
    engine.step(cases.global_tokens(0))
    gc.collect()
    with LiveMemory(existing=engine.state().values()) as live:
        tokens = cases.global_tokens(1)[:4]
        engine._parts[0].module(micro=MicroBatch((tokens[:, :-1], tokens[:, 1:])))
    sizes = [4 * layer.parameters for _, layer in graph.chain]
    return live.peak_bytes, max(sizes), sum(sizes)


@pytest.mark.ranks
def test_parameters_on_the_host_come_layer_by_layer() -> None:
    (kept, largest, whole) = on_ranks(1, forward_bytes, "none")[0]
    (moved, _, _) = on_ranks(1, forward_bytes, "parameters")[0]

    assert kept - moved >= 3 * whole - 4 * largest  # parameters and two moments
