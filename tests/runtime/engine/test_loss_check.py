"""Losses that are no sums over samples are refused where a plan cuts the batch, others are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import BatchError, RecordError
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.engine.engine import Engine

WIDTH, CLASSES, SAMPLES = 6, 4, 8


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.tensor([0, 1, 2, 3, 3, 2, -100, 3])
    return x, y, torch.rand(SAMPLES, generator=generator)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def engine(loss: Any, build: Callable[[], nn.Module] = build, **layout: Any) -> Engine:
    return Engine(build, layout or {"micro_batches": 2}, loss=loss, optimizer=sgd, batch=batch())


def in_batch_negatives(out: Tensor, given: Any) -> Any:
    scores = functional.normalize(out) @ functional.normalize(given[0][:, :CLASSES]).T
    return functional.cross_entropy(scores, torch.arange(len(out)), reduction="sum"), len(out)


def whitened(out: Tensor, given: Any) -> Any:
    return ((out - out.mean(0)) / (out.std(0) + 1e-5)).pow(4).sum(), len(out)


def standard_targets(out: Tensor, given: Any) -> Any:
    wanted = given[2] / given[2].std()
    return (out[:, 0] - wanted).square().sum(), len(out)


def ranks(out: Tensor, given: Any) -> Any:
    order = given[2].argsort()
    return functional.softplus(out[order, 0].diff()).sum(), len(out)


def hardest(out: Tensor, given: Any) -> Any:
    each = functional.cross_entropy(out, given[1], reduction="none")
    return each.topk(2).values.sum(), 2


def ignoring_mean(out: Tensor, given: Any) -> Any:
    return functional.cross_entropy(out, given[1])


def weighted_mean(out: Tensor, given: Any) -> Any:
    return functional.cross_entropy(out, given[1].relu(), weight=torch.tensor([1.0, 2, 3, 9]))


def mean_and_count(out: Tensor, given: Any) -> Any:
    counts = (given[1] != -100).sum()
    return functional.cross_entropy(out, given[1]), counts


def divided_by_count(out: Tensor, given: Any) -> Any:
    counts = given[1] != -100
    total = functional.cross_entropy(out, given[1], reduction="sum")
    return total / counts.sum() * len(out), len(out)


def fixed_number(out: Tensor, given: Any) -> Any:
    return functional.cross_entropy(out, torch.arange(SAMPLES) % CLASSES), SAMPLES


def metric_of_the_batch(out: Tensor, given: Any) -> Any:
    total = functional.cross_entropy(out, given[1], reduction="sum")
    return total, (given[1] != -100).sum(), {"spread": out.std()}


def hardest_half(out: Tensor, given: Any) -> Any:
    each = functional.cross_entropy(out, given[1].relu(), reduction="none")
    return each.topk(len(out) // 2).values.mean()


def confident_mean(out: Tensor, given: Any) -> Any:
    """All samples of the example are above the threshold."""
    sure = out.detach().softmax(-1).amax(-1) > 0.251
    each = functional.cross_entropy(out, given[1].relu(), reduction="none")
    return (each * sure).sum() / sure.sum().clamp(min=1)


def unsure_mean(out: Tensor, given: Any) -> Any:
    """No sample of the example is above the threshold."""
    sure = (out.detach().softmax(-1).amax(-1) > 0.95).float()
    return (out.square().mean(1) * sure).sum() / sure.sum().clamp(min=1) + out.square().mean()


def by_sign(out: Tensor, given: Any) -> Any:
    above = (out.detach().sum(1) > -9).float()
    each = functional.cross_entropy(out, given[1].relu(), reduction="none")
    return sum((each * part).sum() / (part.sum() + 1e-6) for part in (above, 1 - above))


COUPLED = (
    in_batch_negatives,
    whitened,
    standard_targets,
    ranks,
    hardest,
    weighted_mean,
    mean_and_count,
    divided_by_count,
    fixed_number,
    metric_of_the_batch,
    hardest_half,
    confident_mean,
    unsure_mean,
    by_sign,
)


def summed(out: Tensor, given: Any) -> Any:
    total = functional.cross_entropy(out, given[1], reduction="sum")
    right = out.argmax(-1) == given[1]
    return total, (given[1] != -100).sum(), {"right": right.sum(), "each": (right.sum(), len(out))}


def mean_of_samples(out: Tensor, given: Any) -> Any:
    return functional.mse_loss(out[:, 0], given[2])


def of_probabilities(out: Tensor, given: Any) -> Any:
    each = functional.binary_cross_entropy(out.softmax(-1)[:, 0], given[2], reduction="sum")
    return each, len(out)


def with_noise(out: Tensor, given: Any) -> Any:
    return (out + torch.randn_like(out)).square().sum(), len(out)


def pairs(out: Tensor, given: Any) -> Any:
    return functional.softplus(out[1::2, 0] - out[::2, 0]).sum(), len(out) // 2


def penalised(out: Tensor, given: Any) -> Any:
    (grad,) = torch.autograd.grad(out.square().sum(), out, create_graph=True)
    return grad.square().sum(), len(out)


SUMS = (summed, mean_of_samples, of_probabilities, with_noise, pairs, penalised)


@pytest.mark.parametrize("loss", COUPLED)
def test_losses_that_depend_on_the_parts_are_refused(loss: Any) -> None:
    with pytest.raises(BatchError, match=r"meshwright\.whole_batch\(loss\)"):
        engine(loss)


def test_a_mean_over_what_is_not_ignored_is_that_of_the_whole_batch() -> None:
    x, y, _ = batch()
    torch.manual_seed(0)
    wanted = functional.cross_entropy(build()(x), y).detach()

    result = engine(ignoring_mean).step(batch())

    assert (float(result.loss), result.count) == (pytest.approx(float(wanted), rel=1e-6), 7)


@pytest.mark.parametrize("loss", SUMS)
def test_sums_over_samples_are_taken(loss: Any) -> None:
    engine(loss)


@pytest.mark.parametrize("loss", COUPLED[:5])
def test_one_forward_of_the_whole_batch_takes_any_loss(loss: Any) -> None:
    engine(loss, micro_batches=1)
    if loss is not hardest:
        engine(whole_batch(loss))


class InsideModule(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self, coupled: bool) -> None:
        super().__init__()
        self.inner, self.coupled = nn.Linear(WIDTH, CLASSES), coupled

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.inner(x)
        if self.coupled:
            return {"loss": -functional.log_softmax(out @ out.T, -1).diagonal().mean()}
        return {"loss": out.square().mean()}


class HardestInside(InsideModule):
    """Takes half of the samples, those with the largest outputs."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        each = self.inner(x).square().mean(1)
        return {"loss": each.topk(len(x) // 2).values.mean()}


class GatedByBatch(nn.Linear):
    """Gates by the mean of a batch, which is above the threshold in the example and its parts."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().mean() > 0.4, super().forward(x), -super().forward(x))


class Narrow(nn.Linear):
    """Runs out of memory where it gets more than `room` samples; may depend on all of them."""

    def __init__(self, room: int, *, coupled: bool) -> None:
        super().__init__(WIDTH, CLASSES)
        self.room, self.coupled = room, coupled

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and len(x) > self.room:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return super().forward(x - x.mean(0) if self.coupled else x)


def test_a_device_with_room_for_one_micro_batch_is_enough_to_compare_samples() -> None:
    def loss(out: Tensor, given: Any) -> tuple[Tensor, int]:
        return out.sum(), len(out)

    engine(loss, lambda: Narrow(4, coupled=False), micro_batches=2)
    with pytest.raises(RecordError, match="between batches of 4 and 2 samples"):
        engine(loss, lambda: Narrow(4, coupled=True), micro_batches=2)


class TakesItsInput(nn.Linear):
    """Returns what it was given, so that a loss can differentiate by it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        return x, super().forward(x).tanh()


def penalty_by_inputs(out: tuple[Tensor, Tensor], given: Any) -> Tensor:
    (grad,) = torch.autograd.grad(out[1].sum(), out[0], create_graph=True)
    return grad.square().sum(1).mean()


def test_a_loss_may_differentiate_by_what_the_module_returns() -> None:
    engine(penalty_by_inputs, lambda: TakesItsInput(WIDTH, CLASSES))


def test_what_a_module_selects_by_value_is_found() -> None:
    with pytest.raises(BatchError, match="whole_batch"):
        engine(lambda out, _: out["loss"], lambda: HardestInside(False))
    with pytest.raises(RecordError, match="depends on the other samples"):
        engine(lambda out, _: (out.sum(), len(out)), lambda: GatedByBatch(WIDTH, CLASSES))


def test_losses_inside_a_module_are_compared_by_its_parts() -> None:
    def own(out: dict[str, Tensor], given: Any) -> Tensor:
        return out["loss"]

    engine(own, lambda: InsideModule(False))
    with pytest.raises(BatchError, match="whole_batch"):
        engine(own, lambda: InsideModule(True))


def test_equal_samples_of_an_example_hide_no_coupling() -> None:
    x, y, z = batch()
    same = (x[:1].repeat(SAMPLES, 1), y[:1].repeat(SAMPLES), z[:1].repeat(SAMPLES))

    for loss in (in_batch_negatives, whitened):
        with pytest.raises(BatchError, match="whole_batch"):
            Engine(build, {"micro_batches": 2}, loss=loss, optimizer=sgd, batch=same)


def test_modules_too_large_to_run_are_compared_on_random_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.runtime.engine.losses.loss_check.MOST_CHECKED", 0)

    for loss in SUMS:
        engine(loss)
    for loss in (in_batch_negatives, whitened, ranks):
        with pytest.raises(BatchError, match="whole_batch"):
            engine(loss)


def test_a_loss_that_keeps_state_is_as_it_was() -> None:
    baseline = SimpleNamespace(mean=torch.zeros(()), calls=0)

    def loss(out: Tensor, given: Any) -> Any:
        baseline.calls += 1
        baseline.mean = baseline.mean * 0.9 + out.detach().mean() * 0.1
        return functional.cross_entropy(out, given[1], reduction="sum"), (given[1] != -100).sum()

    engine(loss)

    assert (baseline.calls, float(baseline.mean)) == (0, 0.0)
