"""The best plan of a model on a candidate, under the public framework that is fastest there.

A public framework trains a model on devices of one kind; where none does, our own runtime is
priced. Each framework is searched below the best that others found, so that slower ones end early.

Fine-tuning with adapters (LoRA, QLoRA): the fastest plan of public fine-tuners.

Each fine-tuner is a framework with a space of its own, searched like any other.  Frozen weights may
lie in host memory where the cluster says how much there is and how it is reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.costs.cost_cache import FigureStore
from meshwright.planner.costs.uncertainty import link_seconds
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request, tuning_batch
from meshwright.planner.search.cluster_parts import search_parts
from meshwright.planner.search.proof_budget import BRIEF
from meshwright.planner.search.search import search
from meshwright.planner.system.gc_pause import pause_collector
from meshwright.planner.whatif.study import PUBLIC, YEAR, Study
from meshwright.planner.whatif.study import JobOfYear as StudyJob

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import AcceleratorKind, DeviceGroup, Precision
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Job, Plan
    from meshwright.planner.documents.prediction import Prediction
    from meshwright.planner.search.answer import Answer
    from meshwright.planner.whatif.candidates import Candidate

TUNERS = ("transformers", "megatron")
"""Frameworks that are searched: Hugging Face's Trainer with peft, Megatron Bridge or NeMo."""
RANK = 16
"""Rank of adapters, where nobody says."""


def fastest_fine_tuner(
    request: Request,
    *,
    quantised: bool,
    below_s: float = math.inf,
    tuners: Sequence[str] = TUNERS,
) -> Answer:
    """Return the fastest plan of any fine-tuner; NoPlanFits says why each has none.

    Where none takes less than a finite `below_s`, it says no more than that.
    """
    lora = request.job.lora or Lora(rank=RANK)
    if lora.packs_weights != quantised:
        lora = lora.model_copy(update={"weights": "nf4" if quantised else "full"})
    adapters = replace(request.job, lora=lora)
    groups = request.cluster.groups
    pins = request.pins
    if all(g.host_memory_bytes and g.host_link_bytes_per_s for g in groups):
        pins = replace(pins, allowed=pins.allowed | {"offload"})
    best: Answer | None = None
    reasons: list[str] = []
    for name in tuners:
        try:
            answer = search(
                replace(request, job=adapters, framework=frameworks()[name], pins=pins),
                below_s=below_s,
            )
        except NoPlanFits as error:
            reasons.append(f"{name}: {error}")
            continue
        if best is None or answer.prediction.step_time_s < best.prediction.step_time_s:
            best = answer
    if best is None:
        raise NoPlanFits("\n".join(reasons))
    return best


NATIVE = "native"
EIGHT_BITS: tuple[Precision, ...] = ("fp8", "mxfp8", "nvfp4")
"""Precisions that are tried where the precision is left to the search."""
EXPERTS = "megatron+deepep+expert-overlap+cheap-recompute"
"""Megatron Core's recipes for mixtures of experts."""
FELT = 0.1
"""Share of a step that waits for links from which on fewer devices may be faster."""
ANY_S = 1e30
"""Slower than any plan.  A search below it ends without the diagnosis of why nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The best plan of a model on a cluster, or why there is none, on whatever terms it is had."""

    job: Job | None = None
    prediction: Prediction | None = None
    plan: Plan | None = None
    optimal: bool = False
    framework: str = ""
    """Who trains."""
    reason: str = ""
    """Why nothing fits."""
    parameters: int = 0
    """Parameters of the model; of the largest where there are several."""
    runs: tuple[tuple[StudyJob, Planned], ...] = ()
    """One entry for each of a year of jobs."""

    @property
    def step_s(self) -> float:
        """Seconds of a step; slower than any where nothing fits."""
        return ANY_S if self.prediction is None else self.prediction.step_time_s

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a step; of the year where it is one."""
        if self.runs:
            return sum(job.tokens * job.runs_a_year for job, _ in self.runs)
        assert self.job is not None  # it fits
        return float(self.job.global_batch * self.job.seq_len)


@pause_collector()
def plan_candidate(
    study: Study,
    model_name: str,
    candidate: Candidate,
    framework: str | None = None,
    likely: str | None = None,
    store: FigureStore | None = None,
) -> Planned:
    """Return the best plan of one model on one candidate; this is what takes long.

    `store` has what layers take on other candidates.

    `framework` instead of the study's own.  A `likely` framework, which wins on fewer devices and
    on more, is the only one that is searched if it fits.
    """
    if model_name == YEAR:
        return _year(study, candidate, framework, store or FigureStore())
    model = resolve_model(model_name)
    ways = list(_ways(study, model, candidate, framework or study.work.framework))
    likely_ways = [way for way in ways if way[0] == likely]
    among = _Among(study=study, model=model, store=store or FigureStore())
    best = among.fastest(candidate, likely_ways) or among.fastest(candidate, ways)
    if candidate.narrower is not None:
        plain = replace(candidate, cluster=candidate.narrower, narrower=None)
        best = among.fastest(plain, ways, ANY_S if best is None else best.step_s) or best
    return best or Planned(reason=among.reason(candidate, ways))


def _year(study: Study, candidate: Candidate, framework: str | None, store: FigureStore) -> Planned:
    """Return a year of jobs as one step: the seconds that all of them train."""
    runs = []
    for job in study.jobs:
        work_fields = {"seq_len": job.seq_len, "global_batch": job.global_batch}
        update = {name: value for name, value in work_fields.items() if value is not None}
        work = study.work.model_copy(update=update)
        tuned = replace(candidate, tuning=job.tuning)
        job_study = study.model_copy(update={"work": work})
        run_plan = plan_candidate(job_study, job.model, tuned, framework, None, store)
        if run_plan.prediction is None:
            return Planned(reason=f"{job.name}: {run_plan.reason}")
        runs.append((job, run_plan))
    return year_of(runs)


def year_of(runs: Sequence[tuple[StudyJob, Planned]]) -> Planned:
    """Return jobs of a year, each with its plan, as one step that has all their tokens.

    Kernels and links are those of one accelerator, so its ends are those of all jobs together.
    """
    plans = [
        (run_plan.prediction, _steps_a_year(job, run_plan), run_plan) for job, run_plan in runs
    ]
    most, _, longest = max(plans, key=lambda run: run[1] * run[2].step_s)
    assert most is not None  # each fits

    def seconds(name: str) -> float:
        each: list[float] = [getattr(prediction, name) for prediction, _, _ in plans]
        return sum(steps * time_s for time_s, (_, steps, _) in zip(each, plans, strict=True))

    parts: dict[str, float] = {}
    for prediction, steps, _ in plans:
        assert prediction is not None  # each fits
        for name, part_s in prediction.step_parts.items():
            parts[name] = parts.get(name, 0.0) + steps * part_s
    mfu = sum(p.mfu * steps * p.step_time_s for p, steps, _ in plans if p is not None)
    year = most.model_copy(
        update={
            "step_time_s": seconds("step_time_s"),
            "step_time_low_s": seconds("step_time_low_s"),
            "step_time_high_s": seconds("step_time_high_s"),
            "step_parts": parts,
            "fit_probability": min(p.fit_probability or 0.0 for p, _, _ in plans if p is not None),
            "mfu": mfu / seconds("step_time_s"),
        }
    )
    return replace(
        longest,
        prediction=year,
        optimal=all(run_plan.optimal for _, run_plan in runs),
        framework="+".join(dict.fromkeys(run_plan.framework for _, run_plan in runs)),
        parameters=max(run_plan.parameters for _, run_plan in runs),
        runs=tuple(runs),
    )


def _steps_a_year(job: StudyJob, plan: Planned) -> float:
    return job.runs_a_year * job.tokens / plan.tokens_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Among:
    """Frameworks that are searched for one model of a study."""

    study: Study
    model: ModelGraph
    store: FigureStore

    def fastest(
        self,
        candidate: Candidate,
        ways: Sequence[tuple[str, Precision | None]],
        below_s: float = ANY_S,
    ) -> Planned | None:
        """Return the fastest plan of any framework that takes less than `below_s`."""
        best: Planned | None = None
        for framework, precision in ways:
            below_s = below_s if best is None else best.step_s
            try:
                request = request_of(self.study, self.model, candidate, framework, precision)
                known = None if best is None else best.prediction
                waits = known is not None and _link_share(known) >= FELT
                answer = self._best(request, candidate, below_s, waits_for_links=waits)
            except (NoPlanFits, DocumentError):
                continue
            if answer.prediction.step_time_s < below_s:
                best = Planned(
                    job=request.job,
                    prediction=answer.prediction,
                    plan=answer.plan,
                    optimal=answer.certificate.optimal,
                    framework=answer.plan.framework,
                    parameters=self.model.parameters,
                )
        return best

    def reason(self, candidate: Candidate, ways: Sequence[tuple[str, Precision | None]]) -> str:
        """Say why nothing fits: by the last framework, of the smallest space, that names a miss."""
        refused = ""
        for framework, precision in reversed(ways):
            try:
                request = request_of(self.study, self.model, candidate, framework, precision)
                if candidate.tuning in ("lora", "qlora"):
                    self._fastest_tuner(request, candidate)
                else:
                    search(request, store=self.store)
            except NoPlanFits as error:
                return str(error) if len(ways) == 1 else f"{framework}: {error}"
            except DocumentError as error:
                refused = str(error)
        return refused or "nothing trains it there"

    def _best(
        self, request: Request, candidate: Candidate, below_s: float, *, waits_for_links: bool
    ) -> Answer:
        """Return the fastest plan of one framework; with idle devices where those may be faster.

        They may where the batch does not divide by all devices, or a step waits for links.
        """
        if candidate.tuning in ("lora", "qlora"):
            return self._fastest_tuner(request, candidate, below_s)
        groups, batch = request.cluster.groups, request.job.global_batch
        if len(groups) > 1:
            return search(request, below_s=below_s, effort=BRIEF, store=self.store)
        if not waits_for_links and batch % request.cluster.devices == 0:
            answer = search(request, below_s=below_s, effort=BRIEF, store=self.store)
            if _link_share(answer.prediction) < FELT:
                return answer
        answer = search_parts(request, None, effort=BRIEF, below_s=below_s, store=self.store).answer
        # Idle devices are paid for: the plan is one on all that there are.
        plan = answer.plan.model_copy(update={"cluster": request.cluster_name})
        return replace(answer, plan=plan)

    def _fastest_tuner(
        self, request: Request, candidate: Candidate, below_s: float = math.inf
    ) -> Answer:
        """Return the fastest plan of adapters, by the study's framework if it names one."""
        asked = self.study.work.framework
        return fastest_fine_tuner(
            request,
            quantised=candidate.tuning == "qlora",
            below_s=below_s,
            tuners=TUNERS if asked == PUBLIC else (asked,),
        )


def _link_share(prediction: Prediction) -> float:
    """Return the share of a step that waits for links between devices."""
    return link_seconds(prediction.step_parts) / prediction.step_time_s


def same_plan(study: Study, model_name: str, candidate: Candidate) -> tuple[str, ...]:
    """Return what a plan depends on; terms, prices and names are not among it."""
    cluster = candidate.limited_cluster.model_copy(update={"price": None})
    work = study.work.model_dump_json()
    narrower = candidate.narrower.model_dump_json() if candidate.narrower else ""
    terms = (candidate.tuning, narrower, *candidate.fix, *candidate.allow)
    return (model_name, cluster.model_dump_json(), work, str(study.fit_probability), *terms)


def request_of(
    study: Study,
    model: ModelGraph,
    candidate: Candidate,
    framework: str,
    precision: Precision | None = None,
) -> Request:
    """Return what a study asks of one candidate under one framework."""
    work = study.work
    batch = work.global_batch
    if batch is None and candidate.tuning != "pretrain":
        batch = tuning_batch(candidate.devices)
    request = Request.create(
        model,
        candidate.limited_cluster,
        seq_len=work.seq_len,
        document_len=work.document_len,
        global_batch=batch,
        precision=precision,
        optimizer=work.optimizer,
        masters=work.master_weights,
        objective=work.objective,
        pins=read_pins(candidate.fix, candidate.allow),
        framework=framework,
        called=candidate.name,
        fit_probability=study.fit_probability,
    )
    lora = work.lora if candidate.tuning in ("lora", "qlora") else None
    return replace(request, job=replace(request.job, lora=lora))


def _ways(
    study: Study, model: ModelGraph, candidate: Candidate, framework: str
) -> Iterator[tuple[str, Precision | None]]:
    """Yield frameworks with the precisions that are tried under them."""
    groups = candidate.cluster.groups
    frameworks: tuple[str, ...] = (framework,)
    if candidate.tuning in ("lora", "qlora"):
        frameworks = (NATIVE,)  # the fine-tuners are searched in its place
    elif framework == PUBLIC and study.work.objective != "sft":
        frameworks = ("transformers",)
    elif framework == PUBLIC:
        routed = model.architecture is not None and model.architecture.experts is not None
        kind = groups[0].accelerator.kind
        frameworks = public_frameworks(kind, routed=routed) if len(groups) == 1 else (NATIVE,)
    precision = study.work.precision
    for name in frameworks:
        if precision == "auto":
            yield name, None
            yield from ((name, bits) for bits in EIGHT_BITS if _supports(groups, bits))
        else:
            yield name, precision


def _supports(groups: Sequence[DeviceGroup], precision: str) -> bool:
    return all(precision in group.accelerator.peak_flops for group in groups)


def public_frameworks(kind: AcceleratorKind, *, routed: bool = False) -> tuple[str, ...]:
    """Return the public frameworks that are priced on devices of a kind, the usual first.

    Those of `routed` models have the options of their recipes for experts.

    >>> public_frameworks("cuda")[0]
    'megatron'
    """
    match kind:
        case "cuda" if routed:
            return (EXPERTS, "megatron", "torchtitan+compiled", "deepspeed")
        case "cuda" | "rocm":
            return ("megatron", "torchtitan+compiled", "fsdp+compiled", "deepspeed")
        case "gaudi":
            return ("megatron-deepspeed", "deepspeed")
        case "xpu" | "npu" | "tpu" | "trainium":
            return ("fsdp",)
        case "cpu":
            return (NATIVE,)
        case _:
            assert_never(kind)
