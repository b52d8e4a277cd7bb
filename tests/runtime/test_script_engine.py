"""Modules, losses and optimizers of a script train under any plan as in a plain loop of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import BatchError, DocumentError, LaunchError, OptimizerError
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.auxiliary_loss import add_loss, batch_sum
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.engine.engine import Engine, StepResult
from meshwright.runtime.engine.user_stage import refuse_plan
from meshwright.runtime.optim import offloaded_state as streamed_state
from tests.runtime import own_modules
from tests.runtime.own_modules import WORDS
from tests.runtime.ranks import on_ranks

SAMPLES, LENGTH, STEPS = 8, 7, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "replicated, two micro-batches": {"micro_batches": 2},
    "zero 1": {"zero": 1, "micro_batches": 2},
    "zero 2": {"zero": 2, "micro_batches": 2},
    "zero 3": {"zero": 3},
    "two stages": {"pipeline": 2},
    "two stages, gpipe, recompute": {"pipeline": 2, "schedule": "gpipe", "recompute": "full"},
    "zero 3, recompute": {"zero": 3, "micro_batches": 2, "recompute": "full"},
    "unequal shares": {"shares": [3, 1]},
    "unequal shares, zero 1": {"zero": 1, "shares": [2, 6]},
    "zero 1, state on the host": {"zero": 1, "offload": "optimizer"},
    "tied stages of one rank": {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv"},
}
build = functools.partial(own_modules.GPT, tied="module", blocks=2)
INNERS: dict[str, dict[str, Any]] = {
    "zero bubble": {"pipeline": 2, "schedule": "zb-h1"},
    "zero 3, recompute": LAYOUTS["zero 3, recompute"],
    "two stages, gpipe, recompute": LAYOUTS["two stages, gpipe, recompute"],
}
LENGTHS = (LENGTH, 4, 5, 4)
"""Of the batches of a run in which they vary."""
VARYING: dict[str, dict[str, Any]] = {
    "a V": {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv"},
}
MORE_VARYING: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline": 2},
    "replicated": {},
    "zero bubble, recompute": {"pipeline": 2, "schedule": "zb-h1", "recompute": "full"},
}
COVERED = (
    "replicated",
    "replicated, two micro-batches",
    "zero 2",
    "zero 3",
    "two stages",
    "unequal shares",
    "zero 1",
    "zero 3, recompute",
    "two stages, gpipe, recompute",
    "zero 1, state on the host",
    "tied stages of one rank",
)
"""Layouts whose parts are in runs of others, or of another loop: `-m matrix` has them."""
INNER = ", losses inside the module"
BF16: dict[str, Any] = {"precision": "bf16", "micro_batch": 2}
BF16S: dict[str, dict[str, Any]] = {
    "bf16, zero 3": {**BF16, "zero": 3},
    "bf16, two stages": {**BF16, "pipeline": 2},
}


_apart: list[Tensor] | None = None
"""Where a plain loop finds the losses inside its module; without it they go to the engine."""


def penalised(x: Tensor, value: Tensor) -> Tensor:
    if _apart is None:
        return add_loss(x, value)
    _apart.append(value)
    return x


class PenalisedBlock(own_modules.Block):
    def forward(self, x: Tensor, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = super().forward(x, memory, **kwargs)
        return penalised(x, 0.05 * x.square().sum())


class Penalised(own_modules.GPT):
    """Blocks add a loss each, and one is added between units."""

    def __init__(self) -> None:
        super().__init__(tied="module")
        self.blocks = nn.ModuleList(PenalisedBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        x = self.norm(penalised(x, x.abs().sum()))
        return self.head(x)


_means: list[Tensor] | None = None
"""Where a plain loop finds the balancing losses of its batch, by its own formula."""
EXPERTS = 3


class RoutedBlock(own_modules.Block):
    """Chooses experts, whose use is balanced over the batch: load times probability."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(own_modules.WIDTH, EXPERTS)
        self.scales = nn.Parameter(torch.randn(EXPERTS))

    def forward(self, x: Tensor, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = super().forward(x, memory, **kwargs)
        shares = self.router(x).softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), EXPERTS)
        x = x * (1 + (shares * chosen * self.scales).sum(-1, keepdim=True))
        if _means is not None:
            used = chosen.flatten(0, 1).float().mean(0)
            _means.append(2.0 * EXPERTS * (used * shares.flatten(0, 1).mean(0)).sum())
            return x
        tokens = shares[..., 0].numel()
        load = batch_sum(chosen.sum((0, 1))) / batch_sum(torch.tensor(tokens))
        balance = 2.0 * EXPERTS * (load * shares.sum((0, 1))).sum()
        return add_loss(x, balance, count=tokens)


class Routed(own_modules.GPT):
    def __init__(self) -> None:
        super().__init__(tied="module")
        self.blocks = nn.ModuleList(RoutedBlock() for _ in range(2))


ROUTED: dict[str, dict[str, Any]] = {
    "two stages, gpipe, recompute": LAYOUTS["two stages, gpipe, recompute"],
}
MORE_ROUTED: dict[str, dict[str, Any]] = {
    "zero 3, recompute": LAYOUTS["zero 3, recompute"],
    "replicated, two micro-batches": LAYOUTS["replicated, two micro-batches"],
    "zero bubble": {"pipeline": 2, "schedule": "zb-h1"},
    "tensor": {"tensor": 2},
}


def batch_of(step: int) -> dict[str, Any]:
    """Return ids, and which of them count: of the first sample none, of later ones more."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    counts = torch.arange(LENGTH) < torch.arange(SAMPLES).unsqueeze(1)
    return {"ids": ids, "counts": counts, "temperature": 1.0}


def loss(logits: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the loss of predicting each token itself, where it counts."""
    counts = batch["counts"]
    each = functional.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
    right = (logits.argmax(-1) == batch["ids"]) & counts
    longest = (torch.tensor(float(len(counts))), len(counts))
    return (each * counts).sum(), counts.sum(), {"right": right.sum(), "one": longest}


def groups(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0}


def adamw(listed: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(listed, lr=1e-2, eps=1e-4)


def inputs(batch: Mapping[str, Any]) -> Any:
    return {"ids": batch["ids"]}


def new_engine(plan: Any, module: Callable[[], nn.Module] = build, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "loss": loss,
        "optimizer": adamw,
        "batch": batch_of(0),
        "groups": groups,
        "clip_norm": 0.5,
    }
    return Engine(module, plan, **{**settings, **changes})


@functools.cache
@functools.cache
def plain_plan() -> Plan:
    """Return the plan of an engine that is given none; plans do not change."""
    return new_engine({}).plan


def cut_to(length: int, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return samples without what stands behind a length."""
    cut = {name: batch[name][:, :length].contiguous() for name in ("ids", "counts")}
    return {**batch, **cut}


Run = tuple[list[StepResult], dict[str, Tensor]]
Plain = tuple[list[float], list[float], list[float], dict[str, Tensor]]


def trained(
    plan: Any,
    module: Callable[[], nn.Module] = build,
    *,
    new: Callable[..., Engine] = new_engine,
) -> Run:
    engine = new(plan, module)
    results = []
    for step in range(STEPS):
        batch = engine.slice(batch_of(step))
        before = engine.evaluate(batch) if step == STEPS - 1 else None
        results.append(engine.step(batch))
        assert before is None or before.loss == pytest.approx(results[-1].loss, rel=1e-5)
    return results, engine.state_dict()


def apart(plan: Any) -> Run:
    """Train with two halves of a batch, gradients looked at, clipped and used one by one."""
    engine = new_engine(plan)
    results = []
    for step in range(STEPS):
        batch = engine.slice(batch_of(step))
        first = engine.forward_backward(batch)
        second = engine.forward_backward(batch)
        assert first == second
        assert first.count == batch_of(step)["counts"].sum()
        assert engine.gradients().keys() <= dict(build().named_parameters()).keys()
        with pytest.raises(LaunchError, match="gradients\\(\\) was called"):
            engine.forward_backward(batch)
        results.append(engine.optimizer_step(clip_norm=0.5))
    return results, engine.state_dict()


def varying(plan: Any) -> Run:
    """Train on batches as long as the example and shorter; the last length has come before."""
    engine = new_engine(plan)
    results = []
    for step, length in enumerate(LENGTHS):
        batch = engine.slice(cut_to(length, batch_of(step)))
        before = engine.evaluate(batch)
        results.append(engine.step(batch))
        assert before.loss == pytest.approx(results[-1].loss, rel=1e-5)
    return results, engine.state_dict()


def unlike_slices() -> Run:
    """Train with slices that are as long as what counts in them: 3 and 7 tokens."""
    engine = new_engine({"zero": 3})
    results = []
    for step in range(STEPS):
        batch = engine.slice(batch_of(step))
        length = 3 if engine.slice_rank == 0 else LENGTH
        results.append(engine.step(cut_to(length, batch)))
    return results, engine.state_dict()


def disagreeing() -> list[str]:
    """Give the ranks of one pipeline other values, then other lengths; return what each says."""
    engine = new_engine({"pipeline": 2})
    rank = torch.distributed.get_rank()
    given = [batch_of(rank), cut_to(5 + rank, batch_of(0))]
    said = []
    for batch in given:
        with pytest.raises(BatchError) as error:
            engine.step(engine.slice(batch))
        said.append(str(error.value))
    engine.step(engine.slice(batch_of(0)))  # nobody waits for a message of before
    engine = new_engine({}, loss=whole_batch(loss))
    with pytest.raises(BatchError) as error:
        engine.step(cut_to(5 + rank, engine.slice(batch_of(0))))
    return [*said, str(error.value)]


def plainly(
    module: Callable[[], nn.Module] = build, lengths: Sequence[int] = (LENGTH,) * STEPS
) -> Plain:
    """Train as torch's own loop does: losses, norms, shares of right ones and weights."""
    global _apart, _means  # noqa: PLW0603
    torch.manual_seed(0)
    model = module()
    by: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        by.setdefault(groups(name, parameter)["weight_decay"], []).append(parameter)
    optimizer = adamw([{"params": ps, "weight_decay": decay} for decay, ps in by.items()])
    losses, norms, right = [], [], []
    for step, length in enumerate(lengths):
        batch = cut_to(length, batch_of(step))
        _apart, _means = [], []
        total, count, metrics = loss(model(batch["ids"]), batch)
        total = total + sum(_apart) + count * sum(_means)
        _apart = _means = None
        (total / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count.item())
        right.append(float(metrics["right"] / count))
    return losses, norms, right, dict(model.state_dict())


def everywhere() -> tuple[dict[str, Run], dict[str, Run], dict[str, Run], list[str]]:
    own = {name: plan for name, plan in LAYOUTS.items() if name not in COVERED}
    found = {name: trained(plan) for name, plan in own.items()}
    found["unlike slices"] = unlike_slices()
    varied = {name: varying(plan) for name, plan in VARYING.items()}
    routed = {name: trained(plan, Routed) for name, plan in ROUTED.items()}
    return found, varied, routed, disagreeing()


def check(run: Run, expected: Any, name: str = "") -> None:
    losses, norms, right, weights = expected
    results, found = run
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6), name
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-5), name
    assert [r.metrics["right"] for r in results] == pytest.approx(right, rel=1e-6), name
    assert [r.metrics["one"] for r in results] == [1.0] * len(losses), name
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


def differences(run: Run, other: Run) -> tuple[float, float, float]:
    """Return the largest ones of losses, gradient norms and weights."""
    (results, found), (others, wanted) = run, other
    pairs = list(zip(results, others, strict=True))
    return (
        max(abs(a.loss - b.loss) for a, b in pairs),
        max(abs(a.grad_norm - b.grad_norm) for a, b in pairs),
        max(float((found[name] - value).abs().max()) for name, value in wanted.items()),
    )


def test_one_process_trains_as_a_plain_loop() -> None:
    expected = plainly()

    check(trained({"micro_batches": 4, "recompute": "full"}), expected)
    check(apart({}), expected)
    check(trained({"micro_batches": 2, "recompute": "full"}, Penalised), plainly(Penalised))
    check(trained({"micro_batches": 4, "recompute": "selective"}, Routed), plainly(Routed))


def test_state_on_the_host_comes_in_buckets_and_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(streamed_state, "BUCKET_BYTES", 1000)  # of four parameters or so
    losses, norms, _, expected = plainly()
    found = []
    for _ in range(STEPS):  # each begins where the one before it saved
        engine = new_engine({"offload": "optimizer"})
        engine.resume(tmp_path)
        found.append(engine.step(batch_of(engine.steps)))
        engine.save(tmp_path)

    assert [one.loss for one in found] == pytest.approx(losses, rel=1e-6)
    assert [one.grad_norm for one in found] == pytest.approx(norms, rel=1e-5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    states = [value for one in engine.optimizer.state.values() for value in one.values()]
    assert all(host.on_host(value) for value in states if value.ndim)
    assert any(value.ndim for value in states)


class OneNorm(torch.optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def test_an_optimizer_that_updates_parameters_together_is_refused_with_its_state_on_the_host() -> (
    None
):
    with pytest.raises(OptimizerError, match="OneNorm updates parameters together"):
        new_engine({"offload": "optimizer"}, optimizer=OneNorm)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "nvfp4"}, "precision: is nvfp4, .* use mxfp8 or fp8"),
        ({"gradient_compression": "powersgd"}, "gradient_compression: is powersgd, .* use full"),
        ({"weight_gather_dtype": "fp8"}, "weight_gather_dtype: is fp8, and products in fp32"),
        ({"framework": "megatron"}, "framework: is megatron, .*meshwright export"),
    ],
)
def test_what_is_not_executed_is_refused_with_the_way_out(
    change: dict[str, Any], said: str
) -> None:
    plan = plain_plan().model_copy(update=change)

    with pytest.raises(LaunchError, match=said):
        new_engine(plan)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("mesh.expert_tensor", 2),
        ("prefetch", 2),
        ("reshard_after_forward", 1),
        ("scales", "rowwise"),
        ("weight_gather_dtype", "fp8"),
        ("dispatch", "allgather"),
        ("tensor_overlap", "async"),
        ("document_len", 3),
        ("training.learning_rate", 0.01),
        ("training.clip_norm", 0.5),
        ("training.warmup_steps", 10),
    ],
)
def test_a_field_of_a_plan_that_is_not_executed_is_refused_by_name(place: str, value: Any) -> None:
    plan = plain_plan()
    part, _, name = place.rpartition(".")
    changed = {name: value}
    if part:
        changed = {part: getattr(plan, part).model_copy(update=changed)}

    with pytest.raises(LaunchError, match=f"^{place}: is "):
        refuse_plan(plan.model_copy(update=changed), build(), loss)


def test_a_loss_of_logits_is_not_computed_in_chunks() -> None:
    plan = plain_plan().model_copy(update={"loss": ChunkedLoss()})

    with pytest.raises(LaunchError, match=r"^loss: is in chunks, .* give meshwright\.token_loss"):
        new_engine(plan)


def test_unequal_shares_refuse_what_gathers_as_much_from_each_rank() -> None:
    plan = new_engine({"shares": [4]}).plan
    build_norm = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # noqa: E731

    with pytest.raises(LaunchError, match="1 is a BatchNorm, whose statistics"):
        refuse_plan(plan, build_norm(), loss)
    with pytest.raises(LaunchError, match="a loss over the whole batch"):
        refuse_plan(plan, build(), whole_batch(loss))
    refuse_plan(plan, build(), loss)


Far = tuple[float, float, float]


def in_bf16(expected: Any) -> tuple[Run, Far]:
    """Return the run of one rank in 16 bits, and how far it is from the plain loop in 32."""
    losses, norms, _, weights = expected
    (one,) = on_ranks(1, trained, BF16)
    wide = [StepResult(loss, 1.0, norm) for loss, norm in zip(losses, norms, strict=True)]
    lost = differences(one, (wide, weights))
    assert min(lost) > 1e-3  # it is another type of computation
    return one, lost


def near(run: Run, one: Run, lost: Far) -> None:
    """Hold a run in 16 bits against that of one rank."""
    far = differences(run, one)
    assert all(a < b / 10 for a, b in zip(far, lost, strict=True)), (far, lost)


@pytest.mark.ranks
def test_two_ranks_train_as_a_plain_loop() -> None:
    expected, lengths, balanced = plainly(), plainly(lengths=LENGTHS), plainly(Routed)

    for runs, varied, routed, said in on_ranks(2, everywhere):
        assert ["different samples" in said[0], "different shapes" in said[1]] == [True, True], said
        assert all("ranks 0 and 1 feed slice 0" in one for one in said[:2])
        assert "slices 0 and 1 have samples of different shapes, and whole_batch" in said[2]
        for name, run in varied.items():
            check(run, lengths, f"lengths: {name}")
        for name, run in routed.items():
            check(run, balanced, f"routed: {name}")
        for name, run in runs.items():
            check(run, expected, name)


def more() -> tuple[dict[str, Run], dict[str, Run], dict[str, Run], list[Run]]:
    found = {name: trained(LAYOUTS[name]) for name in COVERED}
    found |= {f"{name}, apart": apart(LAYOUTS[name]) for name in ("replicated", "zero 3")}
    found |= {f"{name}{INNER}": trained(plan, Penalised) for name, plan in INNERS.items()}
    varied = {name: varying(plan) for name, plan in MORE_VARYING.items()}
    routed = {name: trained(plan, Routed) for name, plan in MORE_ROUTED.items()}
    return found, varied, routed, [trained(plan) for plan in BF16S.values()]


@pytest.mark.ranks
@pytest.mark.matrix
def test_more_layouts_train_as_a_plain_loop() -> None:
    expected, lengths, balanced = plainly(), plainly(lengths=LENGTHS), plainly(Routed)
    with_inner = plainly(Penalised)
    check(trained({}), expected)
    one, lost = in_bf16(expected)

    for runs, varied, routed, narrow in on_ranks(2, more):
        for run in narrow:
            near(run, one, lost)
        for name, run in runs.items():
            check(run, with_inner if name.endswith(INNER) else expected, name)
        for name, run in varied.items():
            check(run, lengths, f"lengths: {name}")
        for name, run in routed.items():
            check(run, balanced, f"routed: {name}")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"ids": torch.zeros(4, 7)},
            "has 4 samples, and this rank's slice of a step has 8 .micro-batches of 4",
        ),
        ((torch.zeros(8), torch.zeros(6)), r"\[0\] has 8 samples and \[1\] has 6 samples"),
        ({"a": 1}, "has no tensor with samples"),
        (
            {"ids": torch.zeros(8, 9), "counts": torch.zeros(8, 7)},
            r"\['ids'\] has length 9 along dim 1, and the example of Engine\(batch=...\) 7",
        ),
    ],
)
def test_a_batch_that_no_step_takes_is_refused(batch: Any, said: str) -> None:
    engine = new_engine({"micro_batches": 2})

    with pytest.raises(BatchError, match=said):
        engine.step(batch)


def test_what_a_plan_cannot_be_is_refused() -> None:
    with pytest.raises(DocumentError, match="has no field 'experts'"):
        new_engine({"experts": 2})
    plan = plain_plan()
    with pytest.raises(
        LaunchError, match="the first that differs is number 0: words in the plan, conv1"
    ):
        Engine(own_modules.ResNet, plan, loss=loss, optimizer=adamw, batch=torch.zeros(8, 3, 8, 8))


def test_nothing_is_saved_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nothing to save before the first step"):
        new_engine({}).save(tmp_path / "saved")

    assert not (tmp_path / "saved").exists()


def test_gradient_hooks_are_refused_with_the_place_where_gradients_are() -> None:
    def hooked() -> nn.Module:
        model = build()
        next(iter(model.parameters())).register_hook(lambda grad: grad)
        return model

    with pytest.raises(LaunchError, match="is never called"):
        Engine(hooked, loss=loss, optimizer=adamw, batch=batch_of(0))


def test_a_step_in_which_nothing_counts_moves_nothing() -> None:
    engine = new_engine({})
    before = engine.state_dict()

    result = engine.step({**batch_of(0), "counts": torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)})

    assert result.skipped
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def test_a_sum_over_the_batch_that_the_example_did_not_ask_for_is_refused() -> None:
    class Later(own_modules.GPT):
        asks = False

        def forward(self, ids: Tensor) -> Tensor:
            x = super().forward(ids)
            return x * batch_sum(torch.ones(())) if self.asks else x

    engine = new_engine({}, Later, units=["words"])
    Later.asks = True

    with pytest.raises(BatchError, match="was not called when the module ran on the example"):
        engine.step(batch_of(0) | {"temperature": 2.0})  # recorded anew


def test_a_loss_inside_that_is_no_number_is_refused() -> None:
    with pytest.raises(BatchError, match=r"has shape \(2, 3\); it is one number: add .sum\(\)"):
        add_loss(torch.ones(2), torch.ones(2, 3))
