"""The plan to choose among those that are nearly the fastest, and the usual ones beside it.

What a prediction errs by differs between layouts, so of plans within a margin (`margin_of`) of the
fastest the one that asks for least is chosen: fewest axes, schedules and differences between
layers.  Searches for simpler ones leave axes out, fewest first, down to data parallelism alone; the
proof of the search stays about the fastest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from meshwright.planner.costs.predict import predict
from meshwright.planner.costs.uncertainty import LAYOUT_ERROR
from meshwright.planner.documents.axes import LAYOUT_AXES
from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.framework_space import Facts, condition_of
from meshwright.planner.documents.plan import INSIDE_OUT, Layout, Plan, loss_text
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.units import percent_text, seconds_text
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.schedules import PLAIN
from meshwright.planner.search.answer import Alternative, Answer
from meshwright.planner.search.partition.stage_counts import run_of
from meshwright.planner.search.plan_candidate import Ranked, proven
from meshwright.planner.search.proof_budget import Effort
from meshwright.planner.search.search import search
from meshwright.planner.search.space import MOST_CHUNK_ROWS, kind, losses

if TYPE_CHECKING:
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.documents.profile import Recompute
    from meshwright.planner.requests.pins import Pins
    from meshwright.planner.requests.request import Request

Prefer = Literal["simplest", "fastest", "energy", "cost"]
"""The last two are of parts of a cluster: on the same devices the fastest plan takes least."""
NEAR = 0.015
"""Beyond the fastest simulated step, relatively, in our own runtime."""
MOST_ALONE = 3
"""Devices that cannot be divided twice."""
AXES = ("tensor", "context", "expert", "pipeline")
"""Axes that a layout may have beside data parallelism."""
NOTABLE = 0.005
"""Share of the fastest step from which a cause of more seconds is named."""
BESIDE = Effort(
    likely=16,
    tried=4,
    families=0,
    memory_stages=0,
    cut_stages=0,
    layouts=0,
    solved=0,
    programs=0,
)
"""Effort in simulated time for plans beside the answer: nothing is proven of them."""
LARGE_S = 1e30
"""Longer than any step; a search that may not take longer does not look for a closest miss."""


def margin_of(request: Request) -> float:
    """Return up to which share of the fastest step a simpler plan is preferred.

    Of other frameworks' runs it is what the ratio of two layouts errs by.
    """
    return NEAR if request.framework.name == "native" else LAYOUT_ERROR


def features(plan: Plan) -> list[str]:
    """Return what a plan needs beside data parallelism of one kind, in words."""
    layout = plan.layout
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    if layout.pipeline > 1 and layout.schedule != PLAIN:
        axes.append(layout.schedule)
    if layout.virtual_stages > 1:
        axes.append(f"{layout.virtual_stages} stages a rank")
    if layout.zero and layout.data_replicate > 1:
        axes.append("shards within groups")
    for axis in LAYOUT_AXES:
        value = getattr(layout, axis.name)
        if axis.machinery and value != axis.usual:
            axes.append(axis.machinery.format(value))
    if layout.order != INSIDE_OUT:
        axes.append("axes in another order")
    treated = {
        (layer.layer.partition(".")[0], layer.recompute, layer.activations)
        for stage in plan.stages
        for layer in stage.layers
    }
    if len(treated) > len({kind for kind, _, _ in treated}):
        axes.append("layers that differ")
    return axes


def with_preference(
    request: Request, answer: Answer, prefer: Prefer = "simplest", *, at_most_s: float = LARGE_S
) -> Answer:
    """Return the answer with the plan that is preferred, and the table of choices.

    A simpler plan takes `at_most_s` a step.

    The table has the plan, the fastest, the best of data parallelism alone and of tensor and
    pipeline parallelism; the last two where chains of like layers are on devices that are alike.
    """
    started = time.process_time()
    quick = _quick(request)
    usual = dict(_usual(request, answer)) if quick else {}
    every = [
        *answer.finalists,
        *answer.top,
        *(candidate for candidate in usual.values() if candidate),
    ]
    if prefer == "simplest" and quick:
        every += _simpler(request, answer, _fastest(every), usual)
    chosen = fastest = _fastest(every)
    if prefer == "simplest":
        least_s = fastest.prediction.step_time_s
        limit_s = max(least_s, min(least_s * (1 + margin_of(request)), at_most_s))
        near = (candidate for candidate in every if candidate.prediction.step_time_s <= limit_s)
        chosen = min(
            near, key=lambda ranked: (len(features(ranked.plan)), ranked.prediction.step_time_s)
        )
    rows = {"chosen": chosen, "fastest": fastest, **usual}
    mesh = kind(chosen.plan.layout)
    others = (candidate for candidate in answer.top if kind(candidate.plan.layout) != mesh)
    return replace(
        answer,
        plan=chosen.plan,
        prediction=chosen.prediction,
        certificate=proven(answer.certificate, chosen),
        top=(chosen, *others)[: len(answer.top)],
        choices=tuple(_row(request, what, candidate, fastest) for what, candidate in rows.items()),
        candidates=(),
        search_s=answer.search_s + time.process_time() - started,
    )


def not_worth_eight_bits(request: Request, plan: Plan, prediction: Prediction) -> Iterator[str]:
    """Yield a note where the same plan is about as fast, or faster, with products in 16 bits."""
    if plan.precision not in EIGHT_BITS:
        return
    plain = {"precision": "bf16", "scales": "tensorwise", "weight_gather_dtype": "full"}
    wide_plan = plan.model_copy(update=plain)
    wide = predict(wide_plan, request.model, request.cluster, request.profile)
    step_s, wide_s = prediction.step_time_s, wide.step_time_s
    if step_s < (1 - NEAR) * wide_s:
        return
    kept = "" if wide.fits else ", which would not fit"
    yield (
        f"{plan.precision} is not worth it here: this plan takes {seconds_text(step_s)} a step, "
        f"and {seconds_text(wide_s)} in bf16{kept}"
    )


def framework_choices(request: Request, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield the names of a framework with options that may make it faster, and what they need.

    Options that it has already are named once.
    """
    facts = Facts(request.model, request.cluster, request.job, layout)
    words = request.framework.name.split("+")
    for choice in request.framework.choices:
        more = [option for option in choice.options if option not in words]
        if more and all(condition_of(text).is_fulfilled(facts) for text in choice.when):
            yield "+".join((*words, *more)), choice.needs


def faster_by_options(request: Request, plan: Plan, prediction: Prediction) -> Iterator[str]:
    """Yield a note of the same plan with options of its framework that make it faster most."""
    seconds: list[tuple[float, str, str]] = []
    for name, needs in framework_choices(request, plan.layout):
        other = plan.model_copy(update={"framework": name})
        found = predict(other, request.model, request.cluster, request.profile)
        if found.fits:
            seconds.append((found.step_time_s, name, needs))
    if not seconds:
        return
    step_s, name, needs = min(seconds)
    if step_s < (1 - NEAR) * prediction.step_time_s:
        yield (
            f"{seconds_text(step_s)} for the same layout with --framework {name}, which needs "
            f"{needs}; --allow framework-options searches all layouts with it"
        )


def faster_by_chunks(request: Request, plan: Plan, prediction: Prediction) -> Iterator[str]:
    """Yield a note of the same plan with longer chunks of the loss, where that is much faster.

    The search has one length, in proportion to the smallest device's memory (`chunk_rows`); a stage
    of a larger device, or one of few layers, may have room for more.
    """
    if request.pins.loss is not None:
        return
    ways = losses(request, plan.schedule)
    searched = max((way.rows for way in ways if way is not None), default=MOST_CHUNK_ROWS)
    gradients = ways[-1].gradients if request.job.lora and ways[-1] else "precomputed"
    rows = MOST_CHUNK_ROWS
    while rows > searched:
        loss = ChunkedLoss(rows=rows, gradients=gradients)
        other = plan.model_copy(update={"loss": loss})
        try:
            found = predict(other, request.model, request.cluster, request.profile)
        except DocumentError:  # a profile may lack it
            return
        if found.fits:
            gain = 1 - found.step_time_s / prediction.step_time_s
            if gain > NOTABLE:
                yield (
                    f"the same plan takes {percent_text(gain)} less with --fix "
                    f"loss={loss_text(loss)}: longer chunks of the loss than the search has"
                )
            return
        rows //= 2


MUCH_FASTER = 2.0
"""Ratio of step times above which a faster framework is worth a note."""
OTHER_FRAMEWORK = "megatron"
"""The framework whose kernels most models have: what the own runtime's modules are held against."""


def faster_elsewhere(request: Request, plan: Plan, prediction: Prediction) -> Iterator[str]:
    """Yield a note where the same layout takes less than half under another framework.

    So it is where a model's modules write to memory what that framework computes in one kernel.
    """
    if base_of(request.framework.name) != "native" or request.profile is not None:
        return
    on_host = any(group.accelerator.kind == "cpu" for group in request.cluster.groups)
    if request.model.architecture is None or request.job.lora is not None or on_host:
        return
    other = plan.model_copy(update={"framework": OTHER_FRAMEWORK, "compile": "none", "loss": None})
    try:
        found = predict(other, request.model, request.cluster)
    except DocumentError:  # it has no such plan
        return
    if MUCH_FASTER * found.step_time_s < prediction.step_time_s:
        yield (
            f"{seconds_text(found.step_time_s)} for the same layout with --framework "
            f"{OTHER_FRAMEWORK}: kernels for what modules here do step by step"
        )


def _fastest(every: Sequence[Ranked]) -> Ranked:
    return min(every, key=lambda ranked: ranked.prediction.step_time_s)


PLAIN_DATA = "plain data parallel"
TENSOR_PIPELINE = "tensor + pipeline"


def _quick(request: Request) -> bool:
    """Return whether a search with some choices fixed takes a fraction of the full search."""
    model = request.model
    return not (request.cluster.is_mixed or model.edges) and run_of(model) is not None


def _usual(request: Request, answer: Answer) -> Iterator[tuple[str, Ranked | None]]:
    """Yield the best data-parallel plan and the best with tensor and pipeline parallelism.

    What the user's own pins exclude is left out.
    """
    pins = request.pins
    alone = dict.fromkeys(AXES, 1)
    if _open(pins, alone):
        yield PLAIN_DATA, _best(request, answer, alone)
    able = pins.tensor != 1 and pins.pipeline != 1 and request.cluster.devices > MOST_ALONE
    if able and _open(pins, {"context": 1}):
        both = replace(pins, divided=pins.divided | {"tensor", "pipeline"})
        yield TENSOR_PIPELINE, _best(replace(request, pins=both), answer, {"context": 1})


def _simpler(
    request: Request, answer: Answer, fastest: Ranked, usual: Mapping[str, Ranked | None]
) -> Iterator[Ranked]:
    """Yield plans near the fastest with fewer axes, or with a plainer schedule, or alike layers.

    Where none has a single axis, and there are no experts, the `usual` one with tensor and pipeline
    parallelism is the best with both.
    """
    below_s = answer.closed_form.objective_s * (1 + NEAR + margin_of(request))
    used = sum(getattr(fastest.plan.layout, axis) > 1 for axis in AXES)
    simplest: Ranked | None = None
    for count in range(1, used):
        for kept in itertools.combinations(AXES, count):
            others = {axis: 1 for axis in AXES if axis not in kept}
            with_both = usual.get(TENSOR_PIPELINE) if kept == ("tensor", "pipeline") else None
            if with_both is not None and not request.model.expert_count:
                better = with_both if with_both.objective_s < below_s else None
            else:
                better = _best(request, answer, others, below_s=below_s)
            if better is not None:
                simplest = better
                yield better
        if simplest is not None:
            break
    for plan in (fastest, simplest):
        if plan is None or plan.plan.layout.pipeline == 1:
            continue
        degrees = {axis: getattr(plan.plan.layout, axis) for axis in AXES}
        plain = {**degrees, "schedule": PLAIN, "ahead": ()}
        plainer = _best(request, answer, plain, below_s=below_s)
        if plainer is not None:
            yield plainer
    choices: tuple[Recompute, ...] = ("none", "selective", "full")
    for candidate, recompute in itertools.product((fastest, simplest), choices):
        if candidate is not None and "layers that differ" in features(candidate.plan):
            degrees = {axis: getattr(candidate.plan.layout, axis) for axis in AXES}
            alike = _best(request, answer, {**degrees, "recompute": recompute}, below_s=below_s)
            if alike is not None:
                yield alike


def _best(
    request: Request,
    answer: Answer,
    pins: Mapping[str, Any],
    *,
    below_s: float = LARGE_S,
) -> Ranked | None:
    """Return the fastest plan with some more choices pinned; None if there is none."""
    if not _open(request.pins, pins):
        return None
    asked: Pins = replace(request.pins, **pins)
    try:
        result = search(
            replace(request, pins=asked),
            below_s=below_s,
            candidates=answer.candidates,
            effort=BESIDE,
        )
    except (NoPlanFits, DocumentError):
        return None
    return Ranked(
        plan=result.plan,
        objective_s=result.finalists[0].objective_s,
        prediction=result.prediction,
    )


def _open(pins: Pins, wanted: Mapping[str, Any]) -> bool:
    """Return whether the user has pinned none of these to another value."""
    return all(getattr(pins, name) in (None, value) for name, value in wanted.items())


def _row(request: Request, what: str, plan: Ranked | None, fastest: Ranked) -> Alternative:
    if plan is None:
        reason = _division_obstacle(request) if what == TENSOR_PIPELINE else None
        return Alternative(what=what, why=reason or "does not fit, or is not executed")
    return alternative_row(what, plan.plan, plan.prediction, fastest.prediction)


def _division_obstacle(request: Request) -> str | None:
    """Return why the framework divides no layers among two ranks, or None if it does."""
    framework = request.framework
    layout = Layout(tensor=2, sequence_parallel=framework.tensor.sequence_parallel)
    reason = rules_of(framework, of_degrees=True)(
        request.model, request.cluster, request.job, layout
    )
    if reason is None:
        return None
    cause = reason.removeprefix("mesh.tensor: ").removesuffix("; use 1")
    return f"{framework.name} cannot: {cause}; other frameworks may (--framework)"


def alternative_row(
    what: str, plan: Plan, prediction: Prediction, fastest: Prediction, *, same: float = 1.0
) -> Alternative:
    """Return the row of a plan beside the fastest: what it needs, and where it takes longer.

    `same` is the work of the fastest's step over that of the plan's, where these are not one job.
    """
    least_s = fastest.step_time_s
    step_s = prediction.step_time_s * same
    longer = {
        name: seconds * same - fastest.step_parts.get(name, 0.0)
        for name, seconds in prediction.step_parts.items()
    }
    causes = sorted(longer, key=lambda name: -longer[name])[:2]
    differences = [
        f"{name} +{100 * longer[name] / least_s:.1f} %"
        for name in causes
        if longer[name] > NOTABLE * least_s
    ]
    if not prediction.fits:
        differences = [prediction.misfit, *differences]
    needs = ", ".join(features(plan)) or "data parallelism alone"
    return Alternative(
        what=what,
        plan=plan,
        prediction=prediction,
        more=step_s / least_s - 1,
        why="; ".join([f"uses {needs}", *differences]),
    )
