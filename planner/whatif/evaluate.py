"""One model on one candidate: the best plan there, and what it takes to reach the goal with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from planner.catalog import facility
from planner.cluster import ClusterSpec
from planner.costs.uncertainty import link_seconds
from planner.errors import DocumentError, NoPlanFits
from planner.expressions import resolve_model
from planner.model import ModelGraph
from planner.pins import read_pins
from planner.plan import Job, Plan
from planner.prediction import Prediction
from planner.request import Request
from planner.search.answer import Answer
from planner.search.best_first import search
from planner.tolerances import ROUNDING
from planner.units import bytes_text
from planner.whatif import economics
from planner.whatif.candidates import (
    Candidate,
    Priced,
    power_usd_per_device_hour,
    watts_of,
)
from planner.whatif.changes import changed
from planner.whatif.fine_tuning import tuned
from planner.whatif.span import Span, exact, product, span_of
from planner.whatif.study import Assumptions, Study

SECONDS_PER_DAY = 86_400.0
FULL = 0.92
"""Share of device memory above which a plan is called bound by it."""
FEW_NODES = 16
"""Up to so many, every smaller number of nodes is tried."""
SHAPES = 0.9
"""By what factor the same work may take less on fewer devices, whose products are larger."""
NOTABLE = 0.12
"""Share of a step above which communication or the pipeline is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one model on one candidate; fields of time and cost are None if none fits."""

    candidate: str
    model: str
    devices: int
    accelerator: str
    fits: bool
    binding: str
    """What limits it, in words; the reason why nothing fits if nothing does."""
    layout: str = ""
    step_s: Span | None = None
    tokens_per_s: Span | None = None
    mfu: float = 0.0
    step_parts: dict[str, float] = field(default_factory=dict)
    memory_parts: tuple[dict[str, float], ...] = ()
    peak_bytes: float = 0.0
    capacity_bytes: float = 0.0
    host_bytes: float = 0.0
    """Of a node's memory, at most."""
    parameters: int = 0
    tokens: float | None = None
    """To train in all."""
    tokens_in_budget: float | None = None
    hours: Span | None = None
    usd: Span | None = None
    usd_per_device_hour: Span | None = None
    price: str = ""
    """Commitment, date and source of the price, in words."""
    capital_usd: float | None = None
    watts: Span | None = None
    energy_kwh: Span | None = None
    carbon_kg: Span | None = None
    misses: tuple[str, ...] = ()
    """Goals that it does not meet."""
    idle: int = 0
    """Devices that the plan leaves out, since it is faster without them."""
    provenance: dict[str, int] = field(default_factory=dict)
    """How many figures behind the prediction are measured, fitted, quoted, assumed."""
    optimal: bool = False
    plan: Plan | None = None

    @property
    def utilisation(self) -> Span:
        """MFU with the range of the step."""
        if self.step_s is None:
            return exact(0.0)
        return self.step_s.inverse.times(self.mfu * self.step_s.value)

    @property
    def link_share(self) -> float:
        """Share of a step that waits for links between devices."""
        step_s = sum(self.step_parts.values())
        return link_seconds(self.step_parts) / step_s if step_s else 0.0

    @property
    def headroom_bytes(self) -> float:
        """Memory left on the fullest device."""
        return self.capacity_bytes - self.peak_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the plan as its document."""
        result: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Span):
                value = value.as_dict()
            elif isinstance(value, Plan):
                value = value.model_dump(mode="json", exclude_none=True)
            result[name] = value
        return {**result, "headroom_bytes": self.headroom_bytes}


def asked(study: Study, model: ModelGraph, candidate: Candidate) -> Request:
    """Return what a study asks of one candidate."""
    return Request.of(
        model,
        candidate.cluster,
        seq_len=study.work.seq_len,
        global_batch=study.work.global_batch,
        precision=study.work.precision,
        pins=read_pins(candidate.fix, candidate.allow),
        stack=study.work.backend,
        called=candidate.name,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The best plan of a model on a cluster, or why there is none, on whatever terms it is had."""

    job: Job | None = None
    prediction: Prediction | None = None
    plan: Plan | None = None
    optimal: bool = False
    reason: str = ""
    """Why nothing fits."""
    parameters: int = 0
    """Of the model."""


def planned(study: Study, model_name: str, candidate: Candidate) -> Planned:
    """Return the best plan of one model on one candidate; this is what takes long."""
    model = resolve_model(model_name)
    try:
        request = asked(study, model, candidate)
        plan, prediction, optimal = _best(request, candidate)
    except (NoPlanFits, DocumentError) as error:
        return Planned(reason=str(error))
    return Planned(
        job=request.job,
        prediction=prediction,
        plan=plan,
        optimal=optimal,
        parameters=model.parameters,
    )


def same_plan(study: Study, model_name: str, candidate: Candidate) -> tuple[str, ...]:
    """Return what a plan depends on; terms, prices and names are not among it."""
    cluster = candidate.cluster.model_copy(update={"price": None})
    work = study.work.model_dump_json()
    terms = (candidate.tuning, *candidate.fix, *candidate.allow)
    return (model_name, cluster.model_dump_json(), work, *terms)


def evaluate(
    study: Study, model_name: str, candidate: Candidate, found: Planned | None = None
) -> Outcome:
    """Return the outcome of one model on one candidate, planned already or not."""
    found = found or planned(study, model_name, candidate)
    blank = Outcome(
        candidate=candidate.name,
        model=model_name,
        devices=candidate.devices,
        accelerator="+".join(group.accelerator.name for group in candidate.cluster.groups),
        fits=False,
        binding=found.reason,
        price=candidate.priced.how,
    )
    prediction, plan = found.prediction, found.plan
    if prediction is None or found.job is None:
        return blank
    fullest = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes)
    step = Span(
        value=prediction.step_time_s,
        low=prediction.step_time_low_s,
        high=prediction.step_time_high_s,
    )
    tokens = exact(float(found.job.global_batch * found.job.seq_len))
    idle = 0
    if plan is not None and len(candidate.cluster.groups) == 1:
        idle = candidate.devices - plan.mesh.devices
    per_node = max(group.devices_per_node for group in candidate.cluster.groups)
    outcome = replace(
        blank,
        parameters=found.parameters,
        fits=True,
        layout=prediction.layout
        + (f" ({idle} of {candidate.devices} devices idle)" if idle else ""),
        idle=idle,
        step_s=step,
        tokens_per_s=product([tokens, step.inverse]),
        mfu=prediction.mfu * (1 - idle / candidate.devices),
        step_parts=dict(prediction.step_parts),
        memory_parts=tuple(dict(stage.memory_parts) for stage in prediction.stages),
        peak_bytes=fullest.peak_memory_bytes,
        capacity_bytes=fullest.memory_capacity_bytes,
        host_bytes=per_node * max(stage.host_bytes for stage in prediction.stages),
        binding=binding_of(prediction),
        provenance=_provenance(prediction),
        optimal=found.optimal,
        plan=plan.model_copy(update={"cluster": candidate.name}) if plan else None,
    )
    return _with_goal(study, candidate, outcome)


def binding_of(prediction: Prediction) -> str:
    """Say in words what keeps a plan from being faster."""
    step_s = prediction.step_time_s
    fullest = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes)
    share = fullest.peak_memory_bytes / fullest.memory_capacity_bytes
    parts = dict(prediction.step_parts)
    again = parts.pop("recompute", 0.0)
    computing = again + parts.pop("forward", 0.0) + parts.pop("backward", 0.0)
    said = []
    if share > FULL:
        text = f"memory: {100 * share:.0f} % of {bytes_text(fullest.memory_capacity_bytes)}"
        if again > 0.02 * step_s:
            text += f", recomputation takes {100 * again / step_s:.0f} %"
        said.append(text)
    name, seconds = max(parts.items(), key=lambda part: part[1], default=("", 0.0))
    if seconds > NOTABLE * step_s:
        said.append(f"{name} {100 * seconds / step_s:.0f} % of the step")
    if not said:
        said.append(f"compute: {100 * computing / step_s:.0f} % of the step")
    return "; ".join(said)


def _best(request: Request, candidate: Candidate) -> tuple[Plan, Prediction, bool]:
    if candidate.tuning in ("lora", "qlora"):
        answer = tuned(request, quantised=candidate.tuning == "qlora")
        return answer.plan, answer.prediction, answer.certificate.optimal
    found: Answer | None = None
    reason: NoPlanFits | None = None
    try:
        found = search(request)
    except NoPlanFits as error:
        reason = error
    for fewer in _worth_trying(request, found.prediction if found else None):
        with contextlib.suppress(NoPlanFits):
            best_s = math.inf if found is None else found.certificate.objective_s
            other = search(fewer, below_s=best_s)
            if found is None or other.prediction.step_time_s < found.prediction.step_time_s:
                found = other
    if found is None:
        assert reason is not None  # the first search found nothing
        raise reason
    return found.plan, found.prediction, found.certificate.optimal


def _worth_trying(request: Request, prediction: Prediction | None) -> Iterator[Request]:
    """Yield the request with nodes left idle, where a plan on fewer may be faster.

    That is where links are too slow for so many: half of them may do; or where devices divide the
    global batch badly.  Then every smaller number is tried, or of many nodes those that divide
    better: more replicas take whole shares of the batch, or what is left for other axes has smaller
    factors.  Fewer devices compute longer by their number, within SHAPES, which ends it soon.
    """
    cluster, job = request.cluster, request.job
    if len(cluster.groups) > 1:
        return
    [group] = cluster.groups
    for nodes in _fewer_nodes(group.nodes, group.devices_per_node, job.global_batch):
        if prediction is not None:
            computing_s = SHAPES * _computing_s(prediction)
            if computing_s * group.nodes / nodes >= prediction.step_time_s:
                return
        fewer = changed(cluster, "devices", nodes / group.nodes)
        if fewer is not None:
            yield replace(request, cluster=fewer)


def _fewer_nodes(nodes: int, per_node: int, global_batch: int) -> Iterator[int]:
    """Yield smaller numbers of nodes that are worth a look, the largest first.

    >>> list(_fewer_nodes(8, 8, 512)), list(_fewer_nodes(5, 8, 512)), list(_fewer_nodes(36, 8, 512))
    ([4, 2, 1], [4, 3, 2, 1], [32])
    """
    if global_batch % (nodes * per_node) == 0:
        while nodes := nodes // 2:
            yield nodes
        return
    better: list[tuple[int, int]] = []
    for fewer in range(nodes, 0, -1):
        replicas = math.gcd(fewer * per_node, global_batch)
        factor = max(factors(fewer * per_node // replicas), default=1)
        worse = any(r >= replicas and f <= factor for r, f in better)
        better.append((replicas, factor))
        if fewer < nodes and (nodes <= FEW_NODES or not worse):
            yield fewer


def _computing_s(prediction: Prediction) -> float:
    """Return the seconds of a step that devices compute, on average over stages.

    What is computed again counts: fewer devices have less memory, so they do not compute less.
    """
    parts = prediction.step_parts
    of_stages = [stage.forward_s + stage.backward_s for stage in prediction.stages]
    mean = sum(of_stages) / len(of_stages)
    computing_s = sum(parts.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    return computing_s * mean / max(of_stages)


def factors(number: int) -> list[int]:
    """Return the prime factors of a number.

    >>> factors(360), factors(1)
    ([2, 2, 2, 3, 3, 5], [])
    """
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found + [number] * (number > 1)


def _with_goal(study: Study, candidate: Candidate, outcome: Outcome) -> Outcome:
    """Add hours, cost, energy and carbon, and what of the goal is missed."""
    assumed, goal = study.assumptions, study.goal
    watts = watts_of(candidate.cluster, assumed)
    outcome = replace(outcome, watts=watts, **_prices(candidate.cluster, candidate.priced, assumed))
    tokens = goal.tokens_of(outcome.parameters)
    if tokens is not None and outcome.tokens_per_s is not None:
        run_hours = economics.hours(tokens, outcome.tokens_per_s, _goodput(candidate, assumed))
        outcome = replace(outcome, hours=run_hours, tokens=tokens)
        if outcome.usd_per_device_hour is not None:
            usd = economics.rent_usd(outcome.devices, run_hours, outcome.usd_per_device_hour)
            outcome = replace(outcome, usd=usd)
            if goal.budget_usd is not None:
                affordable = tokens * goal.budget_usd / usd.value
                outcome = replace(outcome, tokens_in_budget=affordable)
        if watts is not None:
            energy = economics.energy_kwh(watts, run_hours)
            grams = assumed.carbon_g_per_kwh
            if grams is None:
                grams = carbon_of(assumed.country)
            outcome = replace(
                outcome, energy_kwh=energy, carbon_kg=economics.carbon_kg(energy, grams)
            )
    return replace(outcome, misses=tuple(_misses(study, outcome)))


def carbon_of(country: str) -> float:
    """Return grams of CO2 per kWh; DocumentError with the known countries."""
    known = facility().carbon_g_per_kwh.by_country
    if country not in known:
        raise DocumentError(
            "assumptions.country",
            f"is '{country:.20}'; known are {', '.join(known)}; or give carbon_g_per_kwh",
        )
    return known[country]


def _goodput(candidate: Candidate, assumed: Assumptions) -> Span:
    span = span_of(assumed.goodput)
    if not candidate.spot:
        return span
    lost = assumed.spot_lost
    kept = Span(value=1 - lost.value, low=1 - lost.high, high=1 - lost.low)
    return product([span, kept])


def _prices(cluster: ClusterSpec, priced: Priced, assumed: Assumptions) -> dict[str, Any]:
    """Return the price of a device hour on the candidate's terms, and what is paid at once."""
    if priced.rent_usd_per_device_hour is not None:
        return {"usd_per_device_hour": priced.rent_usd_per_device_hour}
    if priced.purchase is None and not priced.owned:
        return {}
    power = power_usd_per_device_hour(cluster, assumed) or exact(0.0)
    if priced.purchase is None:
        return {"usd_per_device_hour": power}
    each = economics.owned_usd_per_device_hour(
        priced.purchase, utilisation=assumed.utilisation, power_usd_per_device_hour=power
    )
    capital = priced.purchase.capital_usd_per_device.value * cluster.devices
    return {"usd_per_device_hour": each, "capital_usd": capital}


def _misses(study: Study, outcome: Outcome) -> list[str]:
    goal, missed = study.goal, []
    limits = (
        ("deadline", outcome.hours, goal.deadline_days, 1 / 24, "days"),
        ("budget", _paid(outcome), goal.budget_usd, 1.0, "USD"),
        ("power cap", outcome.watts, goal.power_cap_w, 1.0, "W"),
        ("emission cap", outcome.carbon_kg, goal.emission_cap_kg, 1.0, "kg"),
    )
    for name, span, limit, unit, words in limits:
        if limit is None:
            continue
        if span is None:
            missed.append(f"{name}: not known")
        elif span.value * unit > limit * (1 + ROUNDING):
            missed.append(f"{name}: {span.value * unit:,.4g} of {limit:,.4g} {words}")
    return missed


def _paid(outcome: Outcome) -> Span | None:
    """Return what a run takes out of a budget; a purchase is paid whole."""
    if outcome.capital_usd is None:
        return outcome.usd
    return exact(outcome.capital_usd)


def _provenance(prediction: Prediction) -> dict[str, int]:
    counts: dict[str, int] = {}
    for assumption in prediction.assumptions:
        counts[assumption.provenance] = counts.get(assumption.provenance, 0) + 1
    return counts
