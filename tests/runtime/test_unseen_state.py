"""What a plan's forwards, backwards and updates cannot see is refused, or trains as in one loop.

A module is replayed in parts, on parts of the batch; a loss is called for each; an optimizer has
some of the parameters.  Whatever depends on more than that shows here.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import (
    BatchError,
    DocumentError,
    LaunchError,
    MeshwrightError,
    OptimizerError,
    RecordError,
)
from meshwright.runtime.core.batches import part_of
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.module_graph import check_replay
from meshwright.runtime.optim.sharded_optimizer import (
    ParameterGroup,
    couples_parameters,
    is_elementwise,
)
from meshwright.runtime.techniques.split_backward import WeightGradients, defer
from meshwright.runtime.tracing.tracer import Recorder
from tests.runtime.ranks import on_ranks

WIDTH, SAMPLES, STEPS = 6, 8, 3
MICRO: dict[str, Any] = {"micro_batch": 2}
SETTINGS = types.SimpleNamespace(temperature=1.0, blocks=3)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, SAMPLES, WIDTH, generator=generator).unbind()


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.mse_loss(out, batch[1], reduction="sum"), batch[1].numel()


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def between(self, x: Tensor, number: int) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.between(block(x).tanh(), number)
        return x


def plainly(
    build: Callable[[], nn.Module], *, before: Callable[[int], None] = lambda step: None
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = build()
    optimizer = sgd(module.parameters())
    for step in range(STEPS):
        before(step)
        total, count = loss(module(batch_of(step)[0]), batch_of(step))
        total.backward()
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / count
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def planned(
    build: Callable[[], nn.Module],
    layout: dict[str, Any],
    *,
    before: Callable[[int], None] = lambda step: None,
    **given: Any,
) -> dict[str, Tensor]:
    before(0)
    engine = Engine(build, layout, loss=loss, optimizer=sgd, batch=batch_of(0), **given)
    for step in range(STEPS):
        before(step)
        engine.step(engine.slice(batch_of(step)))
    return engine.state_dict()


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


# --- samples that depend on each other --------------------------------------------------------


class Centred(Net):
    def between(self, x: Tensor, number: int) -> Tensor:
        return x - x.mean(0) if number == 1 else x


class OverSamples(Net):
    """Positions are its first dim, and the batch has as many of them as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RNN(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x)[0])


class Capacity(Net):
    """A token beyond what its expert takes is dropped."""

    def between(self, x: Tensor, number: int) -> Tensor:
        chosen = x[:, :1] > 0
        place = torch.where(chosen, chosen.cumsum(0), (~chosen).cumsum(0))
        return x * (place <= -(-len(x) // 4))


@pytest.mark.parametrize("build", [Centred, OverSamples, Capacity])
def test_a_module_whose_samples_depend_on_each_other_is_refused(build: type[nn.Module]) -> None:
    with pytest.raises(RecordError, match=r"other samples of its batch.*batch_sum"):
        Engine(build, MICRO, loss=loss, optimizer=sgd, batch=batch_of(0))
    Engine(build, {"micro_batch": SAMPLES}, loss=loss, optimizer=sgd, batch=batch_of(0))
    Engine(build, MICRO, loss=loss, optimizer=sgd, batch=batch_of(0), by_micro_batch=True)


# --- backwards --------------------------------------------------------------------------------


class Hooked(Net):
    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 1 and x.requires_grad:
            x.register_hook(lambda grad: -0.5 * grad)
        return x


def hooked_inside() -> nn.Module:
    outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), Net())
    outer[1].register_full_backward_pre_hook(lambda _, grads: tuple(0.5 * one for one in grads))
    return outer


class Penalised(Net):
    """Uses a gradient by its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        made = super().forward(x)
        return made + torch.autograd.grad(made.sum(), x, create_graph=True)[0]


def replaced_forward() -> nn.Module:
    module = Net()
    first = module.blocks[1].forward
    module.blocks[1].forward = lambda x: 2 * first(x)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("build", [Hooked, hooked_inside, Penalised, replaced_forward])
def test_what_only_a_backward_does_is_done(build: Callable[[], nn.Module]) -> None:
    same(planned(build, MICRO), plainly(build))


class Repacked(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: 2 * one):
            return super().forward(x)


def test_gradients_that_a_replay_would_not_have_are_refused_in_stages_alone() -> None:
    same(planned(Repacked, MICRO), plainly(Repacked))
    with pytest.raises(RecordError, match="another gradient than its replayed forward"):
        check_replay(Repacked(), Recorder(Repacked(), batch_of(0)), batch_of(0))


class Cast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_a_forward_under_autocast_is_one_unit() -> None:
    same(planned(Cast, {"micro_batch": SAMPLES}), plainly(Cast))


# --- what the training loop changes -----------------------------------------------------------


class Tempered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.settings = SETTINGS

    def between(self, x: Tensor, number: int) -> Tensor:
        return x / self.settings.temperature


class TemperedByGlobal(Net):
    def between(self, x: Tensor, number: int) -> Tensor:
        return x / SETTINGS.temperature


class Growing(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: SETTINGS.blocks]:
            x = block(x).tanh()
        return x


def cool(step: int) -> None:
    SETTINGS.temperature = 1.0 / (1 + step)


@pytest.mark.parametrize("build", [Tempered, TemperedByGlobal])
def test_numbers_that_the_loop_changes_are_those_of_the_step(build: type[nn.Module]) -> None:
    same(planned(build, MICRO, before=cool), plainly(build, before=cool))


def test_numbers_of_the_inputs_are_those_of_the_step() -> None:
    class Scaled(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x / SETTINGS.temperature if scale == 1.0 else x * scale)

    found = planned(
        Scaled, MICRO, before=cool, inputs=lambda batch: (batch[0], 1 / SETTINGS.temperature)
    )
    same(found, plainly(Scaled, before=cool))


def recorder_of(module: nn.Module) -> Recorder:
    """Return one that follows a module of an example, and has looked at it once."""
    recorder = Recorder(module, batch_of(0), lambda batch: (batch[0],))
    recorder.follow(module)
    return recorder


def test_a_global_that_is_called_like_an_attribute_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "temperature", -1)  # as `self.settings.temperature`
    recorder = recorder_of(Tempered())
    for step in range(3):
        monkeypatch.setitem(globals(), "temperature", step)
        recorder.renew(batch_of(0))

    assert recorder.renewals == 0


def test_what_changes_again_and_again_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(Tempered())
    with pytest.warns(UserWarning, match=r"temperature: changes again and again.* ms\)") as said:
        for step in range(12):
            monkeypatch.setattr(SETTINGS, "temperature", 1.0 / (2 + step))
            recorder.renew(batch_of(0))

    assert (recorder.renewals, len(said)) == (12, 1)


def test_other_units_after_a_change_of_the_loop_are_refused_in_stages_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grow(step: int) -> None:
        SETTINGS.blocks = 2 if step < 2 else 3

    same(planned(Growing, MICRO, before=grow), plainly(Growing, before=grow))

    monkeypatch.setattr(SETTINGS, "blocks", 2)
    recorder = recorder_of(Growing())
    monkeypatch.setattr(SETTINGS, "blocks", 3)
    with pytest.raises(RecordError, match="runs other units since the training loop changed"):
        recorder.renew(batch_of(0))


def test_a_parameter_that_is_unfrozen_too_late_is_refused() -> None:
    def build() -> nn.Module:
        module = Net()
        module.blocks[0].requires_grad_(False)
        return module

    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    engine.step(batch_of(0))
    engine.units["blocks.0"].requires_grad_(True)

    with pytest.raises(LaunchError, match=r"blocks\.0\.weight: was frozen.*groups="):
        engine.step(batch_of(1))


# --- random numbers of Python -----------------------------------------------------------------


class Skipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x
        return super().forward(x) * float(np.random.uniform(0.5, 1.0))


def test_random_numbers_of_python_are_those_of_the_micro_batch() -> None:
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(WIDTH, WIDTH), *(Skipped(WIDTH, WIDTH) for _ in range(4))
    )
    once = planned(build, MICRO)
    random.random()
    same(planned(build, {**MICRO, "recompute": "full"}), once)
    with pytest.raises(AssertionError):  # it draws in each step
        same(planned(build, {**MICRO, "seed": 1}), once)


class DropsItself(nn.Linear):
    """Goes by its parameters in most forwards, those of a trial and of a recording too."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()).item() < 0.8 else super().forward(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropsItself(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x - 0.5 * block(x)
        return x


def _drop_layers(layout: dict[str, Any], wanted: list[dict[str, Tensor]]) -> None:
    for seed, one in enumerate(wanted):
        same(planned(Residual, {**layout, **MICRO, "seed": seed}), one)


def test_layers_that_drop_themselves_train_alike_in_stages_and_replicas() -> None:
    """Also in micro-batches that drop all layers of a stage, or of the module."""
    wanted = [planned(Residual, {**MICRO, "seed": seed}) for seed in range(2)]
    assert any(
        not torch.equal(one["blocks.0.weight"], wanted[0]["blocks.0.weight"]) for one in wanted
    )
    for layout, seeds in (({"pipeline": 2}, 2), ({"zero": 3}, 1)):
        on_ranks(2, _drop_layers, layout, wanted[:seeds])


# --- losses -----------------------------------------------------------------------------------


class WithoutGraph(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def detached_loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return loss(out.detach(), batch)


@pytest.mark.parametrize(("build", "by"), [(Net, detached_loss), (WithoutGraph, loss)])
def test_a_step_whose_loss_depends_on_nothing_trained_is_refused(build: Any, by: Any) -> None:
    engine = Engine(build, MICRO, loss=by, optimizer=sgd, batch=batch_of(0))
    with pytest.raises(BatchError, match=r"has no gradient.*detach"):
        engine.step(batch_of(0))


class Uncertainty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, out: Tensor, batch: Any) -> tuple[Tensor, int]:
        total, count = loss(out, batch)
        return total * self.scale.sum(), count


class Warming:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, batch: Any) -> tuple[Tensor, int]:
        self.calls += 1
        total, count = loss(out, batch)
        return total * min(1.0, self.calls / 100), count


@pytest.mark.parametrize("layout", [{}, MICRO], ids=["whole", "cut"])
def test_a_loss_with_parameters_of_its_own_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match=r"it has a parameter of its own \(\[1\]\)"):
        Engine(Net, layout, loss=Uncertainty(), optimizer=sgd, batch=batch_of(0))
    frozen = Uncertainty().requires_grad_(False)
    Engine(Net, layout, loss=frozen, optimizer=sgd, batch=batch_of(0))


def test_a_loss_that_counts_its_calls_is_refused_where_a_step_has_several() -> None:
    with pytest.raises(
        BatchError, match=r"second call .* another value \('calls' changes\).*4 times"
    ):
        Engine(Net, MICRO, loss=Warming(), optimizer=sgd, batch=batch_of(0))
    Engine(Net, {}, loss=Warming(), optimizer=sgd, batch=batch_of(0))


def _end_in_a_stage(by: Callable[[Tensor, Any], Any]) -> None:
    engine = Engine(
        Net,
        {"pipeline": 2, **MICRO},
        loss=by,
        optimizer=sgd,
        batch=batch_of(0),
        by_micro_batch=True,
    )
    SETTINGS.blocks = 0
    engine.step(batch_of(0))


def failing(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    if not SETTINGS.blocks:
        raise BatchError("of this step") from KeyError("and why")
    return loss(out, batch)


def test_what_fails_in_a_stage_is_said_as_it_was_raised() -> None:
    """torch's own error around it has shapes alone: whoever reads its kind would know nothing."""
    with pytest.raises(RuntimeError) as raised:
        on_ranks(2, _end_in_a_stage, failing)
    assert "BatchError: of this step" in str(raised.value).strip().splitlines()[-1]
    assert "KeyError" in str(raised.value)


@pytest.mark.parametrize("field", ["micro_batch", "micro_batches"])
def test_what_is_said_beside_shares_is_not_passed_over(field: str) -> None:
    Engine(Net, {"shares": [4], field: 4 if field == "micro_batches" else 2},
           loss=loss, optimizer=sgd, batch=batch_of(0))  # fmt: skip
    with pytest.raises(DocumentError, match="share"):
        Engine(Net, {"shares": [4], field: 1}, loss=loss, optimizer=sgd, batch=batch_of(0))


# --- optimizers -------------------------------------------------------------------------------


class ClipsAll(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        every = [one for group in self.param_groups for one in group["params"]]
        nn.utils.clip_grad_norm_(every, 1e-3)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for one in self.param_groups[0]["params"]:
            one.grad.add_(torch.randn_like(one.grad))
        return super().step(closure)


@pytest.mark.parametrize(
    ("factory", "coupled"),
    [(ClipsAll, True), (Noisy, False), (torch.optim.Adafactor, False), (torch.optim.NAdam, False)],
)
def test_optimizers_that_look_at_all_parameters_are_told_apart(factory: Any, coupled: bool) -> None:
    assert couples_parameters(ParameterGroup(factory, {"lr": 0.1}, ())) is coupled


class CentresVectors(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for one in self.param_groups[0]["params"]:
            if one.ndim == 1:
                one.grad.sub_(one.grad.mean())
        return super().step(closure)


@pytest.mark.parametrize(("dims", "elementwise"), [((2,), True), ((4,), True), ((1, 2), False)])
def test_updates_are_tried_on_parameters_of_as_many_dims(
    dims: tuple[int, ...], elementwise: bool
) -> None:
    assert is_elementwise(CentresVectors, {"lr": 0.1}, dims) is elementwise


def _refuse_on_two_ranks() -> None:
    factory = functools.partial(ClipsAll, lr=0.1)
    with pytest.raises(OptimizerError, match=r"all parameters.*clip_norm"):
        Engine(Net, {"pipeline": 2}, loss=loss, optimizer=factory, batch=batch_of(0))
    engine = Engine(Net, {"pipeline": 2}, loss=loss, optimizer=sgd, batch=batch_of(0))
    engine.load_state_dict(Net().state_dict())
    engine.step(batch_of(0))
    with pytest.raises(BatchError, match="different samples"):
        engine.step(batch_of(engine.stage))

    engine = Engine(Net, {}, loss=loss, optimizer=sgd, batch=batch_of(0))
    engine.step(part_of(batch_of(0), range(SAMPLES // 2)))
    with pytest.raises(BatchError, match=r"all 2 slices are the same samples.*engine\.slice"):
        engine.step(part_of(batch_of(1), range(SAMPLES // 2)))


def test_what_ranks_would_see_apart_or_alike_is_refused_on_all_of_them() -> None:
    """An update from all parameters, a later batch that differs on stages or not on slices."""
    on_ranks(2, _refuse_on_two_ranks)


def test_gradients_are_clipped_as_they_were_changed() -> None:
    engine = Engine(Net, loss=loss, optimizer=sgd, batch=batch_of(0))
    engine.forward_backward(batch_of(0))
    for grad in engine.gradients().values():
        grad.clamp_(-1e-3, 1e-3)
    before = engine.state_dict()

    engine.optimizer_step(clip_norm=5e-3)

    moved = [(before[name] - now).square().sum() for name, now in engine.state_dict().items()]
    assert float(sum(moved)) ** 0.5 == pytest.approx(0.1 * 5e-3, rel=1e-3)


# --- modules that have no copy, or no shapes --------------------------------------------------


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_makes_before_each_forward_train() -> None:
    same(planned(weight_normed, MICRO), plainly(weight_normed))
    layer = weight_normed()
    defer(layer, WeightGradients())
    layer(torch.ones(2, WIDTH)).sum().backward()
    assert layer[0].weight_v.grad is not None


def test_a_lazy_module_is_refused_by_name() -> None:
    build = lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    with pytest.raises(LaunchError, match=r"0\.weight: has no shape before the first forward"):
        Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))


class Queue(Net):
    """Compares with what earlier forwards made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(WIDTH))

    def between(self, x: Tensor, number: int) -> Tensor:
        made = x * self.queue
        with torch.no_grad():
            self.queue.copy_(x[-1])
        return made


def test_a_buffer_that_every_forward_reads_and_changes_is_named() -> None:
    with pytest.raises(MeshwrightError, match="queue: is changed by every forward"):
        Engine(Queue, MICRO, loss=loss, optimizer=sgd, batch=batch_of(0))


class Spectral(Net):
    """Each forward brings the vectors of its norms nearer, whatever its samples are."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.spectral_norm(block)


class Drawing(Net):
    """A buffer of what every forward draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.ones(WIDTH))

    def between(self, x: Tensor, number: int) -> Tensor:
        made = x * self.noise
        self.noise.copy_(torch.rand(WIDTH))
        return made


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{"data_replicate": 2}, {"zero": 3}])
def test_what_forwards_change_alike_on_every_rank_is_that_of_one_loop(
    layout: dict[str, Any],
) -> None:
    for found in on_ranks(2, planned, Spectral, {**layout, "micro_batches": 1}):
        same(found, plainly(Spectral))


@pytest.mark.ranks
@pytest.mark.parametrize("build", [Queue, Drawing])
def test_what_forwards_change_by_samples_or_draws_is_refused_over_ranks(
    build: Callable[[], nn.Module],
) -> None:
    with pytest.raises(RuntimeError, match=r"is changed by every forward.*one rank for the data"):
        on_ranks(2, planned, build, {"data_replicate": 2, "micro_batches": 1})


# --- tensors by name, and by sample -----------------------------------------------------------


def test_names_that_the_module_does_not_have_are_not_passed_over() -> None:
    engine = Engine(Net, loss=loss, optimizer=sgd, batch=batch_of(0))
    wrapped = {f"module.{name}": value for name, value in Net().state_dict().items()}
    with pytest.raises(LaunchError, match=r"module\.blocks\.0\.weight.*6 of 6.*prefix"):
        engine.load_state_dict(wrapped)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight


def test_a_tied_parameter_is_loaded_by_any_of_its_names() -> None:
    engine = Engine(Tied, loss=loss, optimizer=sgd, batch=batch_of(0))
    value = torch.eye(WIDTH)
    engine.load_state_dict({"blocks.2.weight": value})
    assert torch.equal(engine.state_dict()["blocks.0.weight"], value)


class TwoViews(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((super().forward(x), super().forward(x + 1)))


def contrastive(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    first, second = out.chunk(2)
    return functional.cross_entropy(first @ second.t(), torch.arange(len(first))), 1


def likeness(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    first, second = out.chunk(2)
    return (first - second).square().sum(), batch[1].numel()


def test_outputs_may_have_several_rows_for_a_sample() -> None:
    Engine(TwoViews, MICRO, loss=likeness, optimizer=sgd, batch=batch_of(0))


def test_outputs_that_are_no_samples_are_not_put_together_as_if_they_were() -> None:
    engine = Engine(
        TwoViews, MICRO, loss=whole_batch(contrastive), optimizer=sgd, batch=batch_of(0)
    )
    with pytest.raises(BatchError, match=r"\[4, 6\] for 2 samples.*torch\.stack"):
        engine.step(batch_of(0))
