"""Plans worth a trial: those of the space that may be faster than the one predicted fastest.

The search gives the best plan of each mesh; the meshes that may win are searched again with the
micro-batch halved and doubled and with everything recomputed, since those are choices about which
constants in doubt decide.  These searches look for plans and prove nothing.  What is left is what
may win: under the belief before any trial it is faster than the fastest with a probability of
CHANCE at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.costs.uncertainty import MEASURED_MEMORY_SPREAD
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import AS_PREDICTED, Request
from meshwright.planner.search.answer import Answer, Progress
from meshwright.planner.search.plan_preference import BESIDE
from meshwright.planner.search.search import search
from meshwright.planner.tuning.next_trial import Tuner
from meshwright.planner.tuning.trial_options import TrialOption

CHANCE = 0.025
MESHES = 16
"""Number of meshes whose best plans are candidates."""
VARIED = 4
"""Number of the fastest plans that are searched again with other choices."""
MOST = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCandidate:
    """A plan that may be tried, and its prediction."""

    plan: Plan
    prediction: Prediction
    option: TrialOption

    @property
    def peak_bytes(self) -> float:
        """Predicted peak bytes of the first stage, whose rank 0 reports its memory."""
        return self.prediction.stages[0].peak_memory_bytes


def candidates(
    request: Request, answer: Answer, progress: Progress | None = None
) -> tuple[TrialCandidate, ...]:
    """Return the plans worth a trial, the plan of the answer first."""
    candidates: dict[str, TrialCandidate] = {}
    for plan, prediction in _plans(request, answer, progress):
        if prediction.step_time_s > 0:
            candidates.setdefault(plan.digest, trial_candidate(request, plan, prediction))
    every = list(candidates.values())
    chances = _chances([candidate.option for candidate in every])
    first, *others = range(len(every))
    kept = sorted((at for at in others if chances[at] >= CHANCE), key=lambda at: -chances[at])
    return tuple(every[at] for at in (first, *_diverse(every, kept)[: MOST - 1]))


def _plans(
    request: Request, answer: Answer, progress: Progress | None
) -> Iterator[tuple[Plan, Prediction]]:
    """Yield the answer's plan, those of other meshes, and their variants."""
    yield answer.plan, answer.prediction
    every = search(
        request, top=MESHES, candidates=answer.candidates, progress=progress, effort=BESIDE
    )
    for plan in (*answer.finalists, *every.finalists):
        yield plan.plan, plan.prediction
    for candidate in every.top:
        yield candidate.plan, candidate.prediction
    as_predicted, store = replace(request, fit_probability=AS_PREDICTED), FigureStore()
    wider = _answer_or_none(as_predicted, store, top=MESHES)
    for ranked in wider.top if wider is not None else ():
        yield ranked.plan, ranked.prediction
    for ranked in every.top[:VARIED]:
        for pins in _variants(request.pins, ranked.plan):
            varied = _answer_or_none(replace(as_predicted, pins=pins), store, top=1)
            if varied is not None:
                yield varied.plan, varied.prediction


def _answer_or_none(request: Request, store: FigureStore, *, top: int) -> Answer | None:
    """Return the answer to a request that may have none."""
    try:
        return search(request, top=top, effort=BESIDE, store=store)
    except (NoPlanFits, DocumentError):
        return None


def _variants(pins: Pins, plan: Plan) -> Iterator[Pins]:
    """Yield pins of a plan's mesh with another micro-batch, or with everything recomputed."""
    layout = plan.layout
    mesh = replace(
        pins,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        data=layout.data,
    )
    if pins.micro_batch is None:
        for size in (layout.micro_batch // 2, 2 * layout.micro_batch):
            if size and plan.global_batch % (size * layout.data) == 0:
                yield replace(mesh, micro_batch=size)
    if pins.recompute is None:
        used = {layer.recompute for stage in plan.stages for layer in stage.layers}
        yield replace(mesh, recompute="none" if "full" in used else "full")


def trial_candidate(request: Request, plan: Plan, prediction: Prediction) -> TrialCandidate:
    """Return a plan of a request as one that may be tried."""
    spread = request.framework.memory.spread
    if request.profile is not None:
        spread = min(spread, MEASURED_MEMORY_SPREAD)
    option = TrialOption.of_plan(
        plan,
        prediction,
        devices_per_node=request.cluster.groups[0].devices_per_node,
        memory_spread=spread,
    )
    return TrialCandidate(plan=plan, prediction=prediction, option=option)


def _chances(options: Sequence[TrialOption]) -> list[float]:
    """[option] Return with which probability each fits and is faster than the first."""
    start = Tuner(options)
    mean, covariance = start.posterior.mean, start.posterior.covariance
    result = []
    for at in range(len(options)):
        apart = covariance[at, at] + covariance[0, 0] - 2 * covariance[at, 0]
        gain = float(mean[0] - mean[at]) / math.sqrt(max(ROUNDING, float(apart)))
        result.append(NormalDist().cdf(gain) * float(start.fits[at]))
    return result


def _diverse(every: Sequence[TrialCandidate], order: Sequence[int]) -> list[int]:
    """Return candidates with one of each family first, then the second of each, and so on."""
    seen: dict[object, int] = {}
    turns = []
    for at in order:
        family = every[at].option.family
        seen[family] = seen.get(family, 0) + 1
        turns.append((seen[family], at))
    rank = {at: place for place, at in enumerate(order)}
    return [at for _, at in sorted(turns, key=lambda turn: (turn[0], rank[turn[1]]))]
