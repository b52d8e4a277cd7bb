"""From one plan to another, one change at a time: what each is worth.

The change that saves most is made first, among those that leave a plan which can be run and, if any
does, one that fits.  Changes that only go together are made together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from meshwright.planner.costs.layout_costs import refusal
from meshwright.planner.costs.predict import balanced_cuts, predict
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, Stage
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.prediction import Prediction

_AXES = ("tensor", "context", "pipeline", "expert")
_TOGETHER = 3
"""Most changes that are tried together before all that are left are made at once."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two plans, and what it is worth."""

    what: str
    """`tp 8 -> 2`; several if they only go together."""
    plan: Plan
    prediction: Prediction
    """With this change and those before it."""
    saved_s: float
    """Seconds of a step that it saves; less than 0 where others need it first."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The cluster of a plan, and the part of it that a plan with fewer ranks is for."""

    whole: ClusterSpec
    part: ClusterSpec

    def of_plan(self, plan: Plan) -> ClusterSpec:
        """Return the part for plans that have no more ranks than it has devices."""
        return self.part if plan.ranks <= self.part.devices else self.whole


def waterfall(
    mine: Plan,
    best: Plan,
    model: ModelGraph,
    cluster: ClusterSpec,
    part: ClusterSpec | None = None,
) -> tuple[Change, ...]:
    """Return the changes from one plan to another of the same job, each with its worth.

    The best may be for a part of the cluster.  The predictions' steps fall from the first plan's to
    the last one's: what is saved adds up.
    """
    if mine.job != best.job:
        raise DocumentError(
            "plans",
            "belong to different jobs: sequence, batch or precision differ; plan both again",
        )
    machines = Machines(cluster, part or cluster)
    left = dict(_differences(mine, best))
    changes: list[str] = []
    before = predict(mine, model, cluster)
    steps = []
    while left:
        step = _next(mine, best, model, machines, changes, list(left))
        saved_s = before.step_time_s - step[2].step_time_s
        what = ", ".join(left[name] for name in step[0])
        steps.append(Change(what, step[1], step[2], saved_s))
        changes += step[0]
        for name in step[0]:
            del left[name]
        before = step[2]
    return tuple(steps)


def _next(
    mine: Plan,
    best: Plan,
    model: ModelGraph,
    machines: Machines,
    changes: list[str],
    left: list[str],
) -> tuple[tuple[str, ...], Plan, Prediction]:
    """Return the fewest changes that leave a plan, of these the ones that save most."""
    for count in range(1, min(_TOGETHER, len(left) - 1) + 1):
        tried = []
        for names in combinations(left, count):
            plan = _between(mine, best, model, machines, frozenset((*changes, *names)))
            if plan is None:
                continue
            try:
                prediction = predict(plan, model, machines.of_plan(plan))
            except DocumentError:
                continue
            tried.append((names, plan, prediction))
        if tried:
            return min(tried, key=lambda trial: (not trial[2].fits, trial[2].step_time_s))
    return tuple(left), best, predict(best, model, machines.part)


def _differences(mine: Plan, best: Plan) -> Iterator[tuple[str, str]]:
    """Yield what differs, by the field that a change sets, in words."""
    a, b = mine.layout, best.layout
    short = {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep"}
    for name in _AXES:
        if getattr(a, name) != getattr(b, name):
            yield name, f"{short[name]} {getattr(a, name)} -> {getattr(b, name)}"
    used = [plan.ranks for plan in (mine, best)]
    if used[0] != used[1]:
        yield "devices", f"devices {used[0]} -> {used[1]}"
    if (a.zero, _sharding_ranks(a)) != (b.zero, _sharding_ranks(b)):
        yield "zero", f"{_sharding(a)} -> {_sharding(b)}"
    if a.pipeline > 1 and b.pipeline > 1:
        schedules = [_schedule(layout) for layout in (a, b)]
        if schedules[0] != schedules[1]:
            yield "schedule", f"{schedules[0]} -> {schedules[1]}"
    if a.micro_batch != b.micro_batch:
        yield "micro_batch", f"micro-batch {a.micro_batch} -> {b.micro_batch}"
    for name in ("recompute", "activations"):
        changed = _changed_layers(_choices(mine, name), _choices(best, name))
        if changed:
            yield name, f"{name} {changed}"
    yield from _plain_differences(mine, best)


def _plain_differences(mine: Plan, best: Plan) -> Iterator[tuple[str, str]]:
    """Yield what differs in fields that stand for themselves, and in cuts of as many stages."""
    for name in _PLAIN:
        values = [_plain(plan, name) for plan in (mine, best)]
        divided = name != "sequence_parallel" or min(mine.mesh.tensor, best.mesh.tensor) > 1
        if divided and values[0] != values[1]:
            yield name, f"{name.replace('_', ' ')} {_word(values[0])} -> {_word(values[1])}"
    cuts = [[len(stage.layers) for stage in plan.stages] for plan in (mine, best)]
    if len(cuts[0]) == len(cuts[1]) and cuts[0] != cuts[1]:
        yield "stages", f"layers a stage {cuts[0]} -> {cuts[1]}"
    if base_of(mine.framework) != base_of(best.framework) or mine.framework != best.framework:
        yield "framework", f"{mine.framework} -> {best.framework}"


_OF_MESH = ("sequence_parallel", "expert_tensor", "order")
_KEPT = (
    *("format", "model", "cluster", "seq_len", "document_len", "batch", "global_batch"),
    *("precision", "training", "timeout_s", "groups", "shares", "other_pipelines"),
)
_SET = ("framework", "mesh", "zero", "schedule", "virtual_stages", "micro_batch", "micro_batches")
_PLAIN = (
    *_OF_MESH,
    *(name for name in Plan.model_fields if name not in (*_KEPT, *_SET, "stages")),
)
"""Fields of a plan, or of its mesh, that stand for themselves: `offload`, `compile`."""


def _plain(plan: Plan, name: str) -> Any:
    return getattr(plan.mesh if name in _OF_MESH else plan, name)


def _word(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return "-".join(map(str, value))
        case ChunkedLoss():
            return f"{value.gradients} in chunks of {value.rows:,} rows"
    return str(value)


def _sharding(layout: Any) -> str:
    hybrid = f" in groups of {layout.data_shard}" if _sharding_ranks(layout) else ""
    return f"ZeRO-{layout.zero}{hybrid}"


def _sharding_ranks(layout: Any) -> int | None:
    """Return ranks that shard where replicas of them exist."""
    return layout.data_shard if layout.zero and layout.data_replicate > 1 else None


def _schedule(layout: Any) -> str:
    stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    return f"{layout.schedule}{stages}"


def _choices(plan: Plan, field: str) -> dict[str, str]:
    return {item.layer: getattr(item, field) for stage in plan.stages for item in stage.layers}


def _changed_layers(mine: dict[str, str], best: dict[str, str]) -> str:
    """Return how many layers are treated otherwise, and how."""
    pairs = Counter((mine[layer], best[layer]) for layer in mine if mine[layer] != best[layer])
    return ", ".join(f"{label} -> {other} in {n} layers" for (label, other), n in pairs.items())


def _between(
    mine: Plan, best: Plan, model: ModelGraph, machines: Machines, changes: frozenset[str]
) -> Plan | None:
    """Return the plan with some changes made, None if there is none."""
    if changes >= {name for name, _ in _differences(mine, best)}:
        return best

    def side_of(name: str) -> Plan:
        return best if name in changes else mine

    axes = {name: getattr(side_of(name).mesh, name) for name in _AXES}
    devices = side_of("devices").mesh.devices
    others = axes["tensor"] * axes["context"] * axes["pipeline"]
    data, rest = divmod(devices, others)
    micro_batch = side_of("micro_batch").micro_batch
    if rest or mine.global_batch % (data * micro_batch or 1) or not data:
        return None
    sharding = side_of("zero")
    shard = _sharding_ranks(sharding.layout) or data
    zero = sharding.zero if data > 1 or axes["context"] > 1 else 0
    if zero and data % shard:
        return None
    scheduled = side_of("schedule")
    pipelined = axes["pipeline"] > 1
    if pipelined and scheduled.mesh.pipeline == 1:
        scheduled = best if mine.mesh.pipeline == 1 else mine
    dividing = side_of("sequence_parallel")
    if dividing.mesh.tensor == 1:
        dividing = best if mine.mesh.tensor == 1 else mine
    virtual = scheduled.virtual_stages if pipelined else 1
    try:
        plan = Plan.model_validate(
            {
                **{name: getattr(mine, name) for name in _KEPT},
                **{name: getattr(side_of(name), name) for name in _PLAIN if name not in _OF_MESH},
                "framework": side_of("framework").framework,
                "mesh": Mesh(
                    **axes,
                    data_shard=shard if zero else 1,
                    data_replicate=data // shard if zero else data,
                    expert_tensor=side_of("expert_tensor").mesh.expert_tensor,
                    order=side_of("order").mesh.order,
                    sequence_parallel=dividing.mesh.sequence_parallel,
                ),
                "zero": zero,
                "schedule": scheduled.schedule,
                "virtual_stages": virtual,
                "micro_batch": micro_batch,
                "micro_batches": mine.global_batch // (data * micro_batch),
                "stages": _stages(mine, best, changes, model, axes["pipeline"] * virtual),
            }
        )
    except (ValidationError, DocumentError):
        return None
    cluster = machines.of_plan(plan)
    framework = Request.of_plan(plan, model, cluster).framework
    if (
        base_of(framework.name) == "native"
        and refusal(model, cluster, plan.job, plan.layout) is not None
    ):
        return None
    return plan


def _stages(
    mine: Plan, best: Plan, changes: frozenset[str], model: ModelGraph, count: int
) -> tuple[Stage, ...]:
    """Return stages with the cuts of the plan that has as many, else of equal numbers of layers."""
    sides: Sequence[Plan] = (best, mine) if "stages" in changes else (mine, best)
    recompute = _choices(best if "recompute" in changes else mine, "recompute")
    activations = _choices(best if "activations" in changes else mine, "activations")
    names = [name for name, _ in model.chain]
    groups = next(
        (
            [[item.layer for item in stage.layers] for stage in side.stages]
            for side in sides
            if len(side.stages) == count
        ),
        None,
    )
    if groups is None:
        cuts = balanced_cuts([1.0] * len(names), count)
        groups = [names[first:last] for first, last in pairwise(cuts)]
    return tuple(
        Stage(
            layers=tuple(
                PlacedLayer(
                    layer=name,
                    recompute=recompute[name],
                    activations=activations[name],
                )
                for name in group
            )
        )
        for group in groups
    )
