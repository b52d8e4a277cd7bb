"""Our AdamW is held against torch's, wherever its moments are."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.training import Training
from runtime import adamw
from runtime.adamw import AdamW
from runtime.engine import TokenEngine
from runtime.host import on_host
from runtime.live_memory import LiveMemory
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
TRAINING = Training(beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.2)
SHAPES = ((64, 32), (32,), (0, 32), (32, 64), (7,), (64, 64))
RATE = 0.01


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[3] = made[3].t()  # lies in memory by columns
    return made


def ours(offload: str, **how: Any) -> tuple[list[torch.Tensor], AdamW]:
    parameters = values(0)
    optimizer = AdamW(
        parameters,
        [parameter.ndim > 1 for parameter in parameters],
        TRAINING,
        names=[str(index) for index, _ in enumerate(parameters)],
        device=CPU,
        offload=offload,  # type: ignore[arg-type]
    )
    for step in range(3):
        optimizer.step(values(1 + step), rate=RATE, **how)
    return parameters, optimizer


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 2**26])
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_the_update_is_torchs_bit_by_bit(
    offload: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "BUCKET_BYTES", bucket_bytes)
    expected = [torch.nn.Parameter(value) for value in values(0)]
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
    for step in range(3):
        for parameter, grad in zip(expected, values(1 + step), strict=True):
            parameter.grad = grad if grad.numel() else None
        oracle.step()

    found, optimizer = ours(offload)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for parameter, moments in zip(expected, optimizer.moments, strict=True):
        assert moments.step == 3
        if parameter.numel():
            assert torch.equal(moments.exp_avg, oracle.state[parameter]["exp_avg"])
            assert torch.equal(moments.exp_avg_sq, oracle.state[parameter]["exp_avg_sq"])
            assert on_host(moments.exp_avg) == (offload != "none")


def test_a_spoilt_step_changes_nothing() -> None:
    before = values(0)

    for offload in ("none", "optimizer"):
        found, optimizer = ours(offload, spoilt=torch.tensor(1.0))

        assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
        for moments in optimizer.moments:
            assert moments.step == 0
            assert not moments.exp_avg.any()


def test_what_has_no_gradient_stays() -> None:
    parameters = values(0)
    optimizer = AdamW(
        parameters, [True] * 6, TRAINING, names=list("abcdef"), device=CPU, offload="optimizer"
    )

    optimizer.step([None, *values(1)[1:]], rate=RATE)

    assert torch.equal(parameters[0], values(0)[0])
    assert not torch.equal(parameters[5], values(0)[5])


def test_a_step_holds_three_buckets_of_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.randn(64, 64) for _ in range(8)]
    each = 64 * 64 * 4
    monkeypatch.setattr(adamw, "BUCKET_BYTES", 2 * each)  # the moments of one parameter
    optimizer = AdamW(
        parameters, [True] * 8, TRAINING, names=list("abcdefgh"), device=CPU, offload="optimizer"
    )
    grads = [torch.randn(64, 64) for _ in range(8)]
    optimizer.step(grads, rate=RATE)

    with LiveMemory() as live:
        optimizer.step(grads, rate=RATE)

    assert live.current_bytes == 0
    assert 2 * 2 * each <= live.peak_bytes <= 3 * 2 * each + 1024


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
    engine = TokenEngine(cases.plan(graph, offload=offload), graph, device=CPU)
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
    engine = TokenEngine(cases.plan(graph, offload=offload), graph, device=CPU)
    engine.step(cases.global_tokens(0))
    gc.collect()
    with LiveMemory(existing=engine.state().values()) as live:
        engine._parts[0].chain(cases.global_tokens(1)[:4, :-1])
    sizes = [4 * layer.parameters for _, layer in graph.chain]
    return live.peak_bytes, max(sizes), sum(sizes)


@pytest.mark.ranks
def test_parameters_on_the_host_come_layer_by_layer() -> None:
    (kept, largest, whole) = on_ranks(1, forward_bytes, "none")[0]
    (moved, _, _) = on_ranks(1, forward_bytes, "parameters")[0]

    assert kept - moved >= 3 * whole - 4 * largest  # parameters and two moments
