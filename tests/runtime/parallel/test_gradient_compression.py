"""Gradients that travel in fewer bytes: how far training moves, and what goes over the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.planner.documents.plan import Plan
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.parallel.gradient_compression import RANK, PowerSGD
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import Run, errors, train

CPU = torch.device("cpu")
STEPS = 10
LOSS_BOUNDS = {"bf16": 1e-4, "fp16": 2e-5, "powersgd": 0.01}
"""Relative, of the losses of so many steps; measured over 20 up to 3e-5, 3e-6 and 2e-3."""
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "bf16": [
        {"data_replicate": 2},
        {"data_replicate": 2, "shares": (3, 1)},
        {"data_shard": 2, "zero": 1, "shares": (2, 6), "micro_batches": 4},
        {"data_shard": 2, "zero": 1},
        {"data_shard": 2, "zero": 3},
        {"data_replicate": 2, "offload": "parameters"},
        {"data_replicate": 2, "precision": "bf16"},
    ],
    "fp16": [{"data_replicate": 2}, {"data_shard": 2, "zero": 2}],
    "powersgd": [
        {"data_replicate": 2},
        {"data_replicate": 2, "shares": (1, 3)},
        {"data_replicate": 2, "precision": "bf16"},
    ],
}


def trained(wire: str, layouts: list[dict[str, Any]]) -> list[Run]:
    graph = cases.transformer()
    return [train(planned(wire, **layout), graph, STEPS) for layout in layouts]


def planned(wire: str, shares: tuple[int, ...] = (), **layout: Any) -> Plan:
    plan = cases.plan(cases.transformer(), gradient_compression=wire, **layout)
    return cases.shared(plan, shares) if shares else plan


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize("wire", LAYOUTS)
@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_losses_stay_within_the_bound(part: str, wire: str) -> None:
    layouts = LAYOUTS[wire][::3] if part == "some" else LAYOUTS[wire]
    graph = cases.transformer()
    exact = train(cases.plan(graph), graph, STEPS)

    per_rank = on_ranks(2, trained, wire, layouts)

    for index, layout in enumerate(layouts):
        found = errors([runs[index] for runs in per_rank], exact)
        room = 5e-4 if layout.get("precision") == "bf16" else 0.0
        assert 0 < found["loss"] < LOSS_BOUNDS[wire] + room, (layout, found)


@pytest.mark.matrix
@pytest.mark.ranks
def test_both_axes_of_hybrid_sharding_are_narrow() -> None:
    graph = cases.transformer()
    exact = train(cases.plan(graph), graph)

    runs = on_ranks(4, hybrid)

    assert 0 < errors([run for run, _ in runs], exact)["loss"] < LOSS_BOUNDS["bf16"]
    for _, types in runs:
        # Losses, counts, norms and checks are one message of 7; nothing larger goes as it is.
        assert {dtype for dtype, size in types if size > 7} == {torch.bfloat16}


class Sums(TorchDispatchMode):
    """Collects the type and size of whatever ranks sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dist.tensor.DTensor) for kind in types):
            return NotImplemented
        name = str(func)
        if "allreduce" in name or "reduce_scatter" in name:
            sent = args[1] if "reduce_scatter" in name else args[0][0]
            self.seen.append((sent.dtype, sent.numel()))
        return func(*args, **(kwargs or {}))


def hybrid() -> tuple[Run, list[tuple[torch.dtype, int]]]:
    graph = cases.transformer()
    plan = cases.plan(
        graph, data_replicate=2, data_shard=2, zero=2, gradient_compression="bf16", micro_batches=1
    )
    sums = Sums()
    run = train(plan, graph)
    with sums:
        train(plan, graph, 1)
    return run, sums.seen


def powersgd(rows: int, columns: int, steps: int) -> list[list[float]]:
    """Reduce the same gradients many times; return the errors of each mean and of all so far."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = torch.randn(rows, columns, generator=generator)
    other = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1 - dist.get_rank()))
    bias = torch.full((rows,), float(dist.get_rank()))
    exact = (own + other) / 2
    reduced = PowerSGD(dist.group.WORLD)
    total = torch.zeros_like(exact)
    found = []
    for step in range(steps):
        grads = [own.clone(), bias.clone()]
        reduced.reduce(["w", "b"], grads)
        assert torch.equal(grads[1], torch.full((rows,), 0.5))
        total += grads[0]
        so_far = total / (step + 1)
        found.append([float((x - exact).norm() / exact.norm()) for x in (grads[0], so_far)])
    return found


@pytest.mark.ranks
def test_what_was_left_out_comes_later() -> None:
    """One reduction of a matrix of full rank is far off; the mean of many comes to the truth."""
    first, second = on_ranks(2, powersgd, 48, 64, 100)

    assert first == second
    alone, mean = zip(*first, strict=True)
    assert alone[0] > 0.5
    assert mean[-1] < 0.1
    assert mean[-1] < mean[9] / 3


@pytest.mark.ranks
def test_a_matrix_of_low_rank_is_exact() -> None:
    def work() -> float:
        generator = torch.Generator().manual_seed(0)
        left = torch.randn(64, RANK // 2, generator=generator)
        right = torch.randn(RANK // 2, 64, generator=generator)
        grads = [(1 + dist.get_rank()) * left @ right]
        PowerSGD(dist.group.WORLD).reduce(["w"], grads)
        exact = 1.5 * left @ right
        return float((grads[0] - exact).norm() / exact.norm())

    assert max(on_ranks(2, work)) < 1e-5


@pytest.mark.ranks
def test_low_rank_sends_as_few_bytes_as_it_says() -> None:
    def work() -> list[tuple[torch.dtype, int]]:
        grads = [torch.randn(64, 96), torch.randn(64), torch.randn(4, 4)]
        with Sums() as sums:
            PowerSGD(dist.group.WORLD).reduce(["w", "b", "small"], grads)
        return sums.seen

    sent = sum(dtype.itemsize * size for dtype, size in on_ranks(2, work)[0])

    assert sent == 4 * (RANK * (64 + 96) + 64 + 16)


@pytest.mark.ranks
def test_every_replica_ends_with_the_same_weights() -> None:
    def work() -> list[torch.Tensor]:
        graph = cases.transformer()
        engine = token_engine(
            cases.plan(graph, data_replicate=2, gradient_compression="powersgd"), graph, device=CPU
        )
        for step in range(3):
            engine.step(cases.global_tokens(step).chunk(2)[engine.slice_rank])
        return [v.numpy() for k, v in engine.state().items() if k.startswith("model.")]

    first, second = on_ranks(2, work)

    assert all((a == b).all() for a, b in zip(first, second, strict=True))
