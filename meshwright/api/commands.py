"""Every command as one Python function, with the arguments of the command line.

Functions here read documents, call one function of the package that knows, and return its answer.
torch is imported only inside the calls that need it.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.api.inputs import (
    check_code,
    check_devices,
    is_plan,
    machine_of,
    model_and_script,
    model_of,
    need_torch,
    own_code,
    plan_model,
    profile_for,
)
from meshwright.api.launched_model import launched_model
from meshwright.api.plan_options import PlanOptions, PredictOptions, keyword_options
from meshwright.api.power_limits import least_energy, may_be_limited
from meshwright.api.running_costs import running_costs, running_rate
from meshwright.planner import catalog as shelves
from meshwright.planner.catalog import framework as framework_called
from meshwright.planner.catalog import hub
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.costs.layout_costs import refusal
from meshwright.planner.costs.predict import layout_prediction, plan_timelines
from meshwright.planner.costs.predict import predict as predict_plan
from meshwright.planner.costs.uncertainty import bounded_by_words, words_notes
from meshwright.planner.documents import document
from meshwright.planner.documents import plugins as installed
from meshwright.planner.documents.cluster import ClusterSpec, Precision
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.model import BatchLeaf, ModelGraph, is_factory
from meshwright.planner.documents.placement_text import Placement
from meshwright.planner.documents.plan import Job, Layout, Plan, check_size
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.profile import Profile, Profiles
from meshwright.planner.documents.units import (
    bytes_text,
    count_text,
    duration_s,
    percent_text,
    seconds_text,
)
from meshwright.planner.errors import DocumentError, MeshwrightError, NoPlanFits
from meshwright.planner.errors.shown import html_table
from meshwright.planner.requests.lengths import LENGTH_MULTIPLE, LengthsOfJob, summary
from meshwright.planner.requests.pins import (
    check_micro_batches,
    framework_beside,
    outside,
    placement_beside,
    read_layout,
    without_effect,
)
from meshwright.planner.requests.request import (
    AS_PREDICTED,
    FACTORY_SEQ_LEN,
    SURE_TO_FIT,
    Request,
    pinned_layout,
)
from meshwright.planner.search.answer import Alternative, Answer, Progress
from meshwright.planner.search.cluster_parts import (
    PartAnswer,
    Rate,
    dividing_batch,
    search_parts,
    used_text,
)
from meshwright.planner.search.partition.layout_partition import plan_of_placement
from meshwright.planner.search.plan_preference import (
    Prefer,
    alternative_row,
    faster_by_chunks,
    faster_by_options,
    faster_elsewhere,
    framework_choices,
    not_worth_eight_bits,
)
from meshwright.planner.search.proof_budget import GapProgress, effort_to
from meshwright.planner.search.recomputed_modules import (
    recomputed_modules,
    uses_modules,
    with_modules,
)
from meshwright.planner.search.search import search
from meshwright.planner.solver.graph_instance import GraphSolution
from meshwright.planner.solver.partition_problem import CutOff, Infeasible, Unfinished

if TYPE_CHECKING:
    from meshwright.planner.calibration.scores.validate import Validation
    from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
    from meshwright.planner.framework_configs.exported_jobs import ExportedJob
    from meshwright.planner.search.plan_differences import Change
    from meshwright.planner.solver.problem_document import Problem
    from meshwright.profiler.profile import ProfileAgenda
    from meshwright.runtime.checkpoint.weight_export import Exported
    from meshwright.runtime.engine.script_module import OwnScript


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand(PlanOptions):
    """Options of a plan, and the files that the command writes."""

    output: str | None = None
    """File of the plan."""
    html: str | None = None
    """Page with the reasons, the alternatives and the pipeline's timeline."""
    offline: bool = False
    """Fetch no model's config.json from the Hugging Face hub."""
    progress: Progress | None = None


@keyword_options(PlanCommand)
def plan(model: str | OwnScript, cluster: str, *, options: PlanCommand) -> Answer:
    """Find the fastest plan that fits, and prove it; with `top`, the best of other meshes too.

    Among plans within 1.5 % of it, of another framework within 6 %, the simplest is taken, unless
    the fastest is preferred.
    `gap=0.01` takes minutes, if need be, until no plan is more than 1 % faster in simulated time,
    and may find a faster one on the way; `progress` usually gets how far the search is.

    `html` names a page that says why, with the alternatives and the pipeline's timeline.
    `document_len` is how long the document of a token is, on average over tokens, where samples
    hold several (packed conversations): attention is priced by it.
    `lora` are settings of adapters that alone are trained (`rank=16`).  `allow` names what the
    search may do beside: `offload` to the host, and what changes the arithmetic of training,
    `stale` weights and `compress`.
    `require` says in words what its stages must keep (see meshwright.planner.solver.requirements).

    Plans fit with `fit_probability` at least, since needs of memory differ from their prediction
    (`meshwright.planner.costs.uncertainty`); 0.5 takes the prediction as it is.

    `framework` trains: its own space is searched, priced as it trains.  Another framework than ours
    uses a profile's constants of the cluster; layers measured in our runtime are not that
    framework's, and are left out.

    A module that a script builds is planned for its example of a global batch, in fp32.
    """
    with hub.offline(options.offline):
        graph, script = model_and_script(model, seq_len=options.seq_len)
        graph, options, unrecorded = launched_model(graph, cluster, options)
    measured = profile_for(graph, options.profile)
    machine = machine_of(cluster, measured)
    if script is not None and not options.global_batch:
        options = replace(options, global_batch=script.samples)
    request = options.request(graph, machine, measured, called=cluster)
    answer = answer_to(
        request,
        options.prefer,
        solver=options.solver,
        top=options.top,
        gap=options.gap,
        progress=options.progress,
    )
    notes = tuple(
        _length_notes(
            options.lengths_of_job(),
            answer.plan.layout,
            answer.plan.seq_len,
            lambda seq_len: predict_plan(
                answer.plan.model_copy(update={"seq_len": seq_len}), graph, machine
            ),
        )
    )
    if base_of(request.framework.name) != "native":
        notes = (
            *notes,
            *_framework_caveats(answer.plan, graph, machine_of(answer.plan.cluster, measured)),
        )
    answer = replace(answer, prediction=answer.prediction.with_notes(*unrecorded, *notes))
    if script is not None:
        answer = _of_samples(answer, script.leaves)
    if options.output is not None:
        document.write(answer.plan, options.output)
    if options.html is not None:
        from meshwright.planner.report.html import page as report_page  # noqa: PLC0415 - loads jinja2

        page = report_page(
            answer.plan,
            answer.prediction,
            cluster=request.cluster,
            timelines=plan_timelines(answer.plan, request.model, request.cluster, measured),
            certificate=answer.certificate,
            choices=answer.choices,
        )
        document.write_text(page, options.html)
    return answer


def _length_notes(
    of_job: LengthsOfJob, layout: Layout, seq_len: int, price: Callable[[int], Prediction]
) -> Iterator[str]:
    """Yield what samples of several lengths waste, and what a step of mean ones takes.

    `price` predicts a step of samples of as many tokens.
    """
    lengths = of_job.lengths
    if lengths is None:
        return
    if of_job.batching == "packed":
        empty = 1 - lengths.packed_share(seq_len)
        yield f"{summary(lengths)}; packed in {seq_len:,}, {empty:.0%} of positions are empty"
        return
    multiple = LENGTH_MULTIPLE * layout.context * layout.tensor
    mean_len = min(seq_len, of_job.mean_len(layout.micro_batch, multiple))
    mean_s = price(mean_len).step_time_s
    padded = 1 - lengths.mean / mean_len
    yield (
        f"a step of mean samples takes {seconds_text(mean_s)}, {mean_len:,} tokens each, "
        f"{padded:.0%} padding; time and memory above are those of the longest"
    )
    yield summary(lengths)


def _of_samples(answer: Answer, batch: dict[str, BatchLeaf]) -> Answer:
    """Return an answer whose plans describe a sample in place of a length in tokens."""
    return replace(
        answer,
        plan=answer.plan.with_batch(batch),
        top=tuple(replace(ranked, plan=ranked.plan.with_batch(batch)) for ranked in answer.top),
    )


def answer_to(
    request: Request,
    prefer: Prefer,
    *,
    solver: str = "exact",
    top: int = 1,
    gap: float | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Search, choose, and note idle devices, pins without effect, 8 bits that gain nothing."""
    rate = running_rate(prefer, request.cluster)
    searches = partial(
        _search_choices,
        prefer=prefer,
        solver=solver,
        top=top,
        gap=gap,
        progress=progress,
        rate=rate,
    )
    if prefer == "energy" and rate is not None and may_be_limited(request) is None:
        searched, request = least_energy(request, rate, searches)
    else:
        searched, request = searches(request)
    answer = _beside_idle_devices(searched.answer, request.cluster.devices)
    prediction = answer.prediction.on(
        request.cluster.devices,
        used=answer.plan.ranks,
        where=used_text(request, searched, prefer),
    )
    prediction = prediction.with_notes(
        *dividing_batch(request, searched),
        *_open_gap(answer.certificate, gap),
        *recomputed_modules(answer.plan),
        *running_costs(prefer, searched.part.request, answer.plan, answer.prediction),
        *without_effect(request.pins, answer.plan.layout, request.cluster),
        *not_worth_eight_bits(searched.part.request, answer.plan, prediction),
        *faster_by_chunks(searched.part.request, answer.plan, prediction),
        *faster_by_options(searched.part.request, answer.plan, prediction),
        *faster_elsewhere(searched.part.request, answer.plan, prediction),
    )
    return replace(answer, prediction=prediction)


def _search_choices(
    request: Request,
    *,
    prefer: Prefer,
    solver: str,
    top: int,
    gap: float | None,
    progress: Progress | None,
    rate: Rate | None,
) -> tuple[PartAnswer, Request]:
    """Return the best answer of a request and of what is allowed beside it, with its request."""
    gap_progress = None if progress is None or gap is None else _closing(progress)
    search_once = partial(
        search_parts, prefer=prefer, solver=solver, top=top, effort=effort_to(gap), rate=rate
    )
    searched: PartAnswer | None = None
    refused: NoPlanFits | None = None
    for wanted in _with_allowed_choices(request):
        try:
            result = search_once(wanted, progress=progress, gap_progress=gap_progress)
        except NoPlanFits as error:
            refused = error
            continue
        if _step_cost(result, rate) < _step_cost(searched, rate):
            searched, request = result, wanted
    for wanted in with_modules(request, searched):
        below_s = math.inf
        if searched is not None and rate is None:  # a slower plan on fewer devices may cost less
            below_s = searched.answer.closed_form.objective_s
        try:
            result = search_once(wanted, below_s=below_s)
        except NoPlanFits:
            continue
        is_better = _step_cost(result, rate) < _step_cost(searched, rate)
        if uses_modules(result.answer.plan) and is_better:
            searched, request = result, wanted
    if searched is None:
        assert refused is not None
        raise type(refused)(f"{refused}{_with_less_surety(request)}") from refused
    return searched, request


def _beside_idle_devices(answer: Answer, devices: int) -> Answer:
    """Return an answer of a part whose other plans and proof name what they leave of `devices`."""
    return replace(
        answer,
        certificate=answer.certificate.leaving(devices - answer.plan.ranks),
        top=tuple(
            replace(
                ranked,
                prediction=ranked.prediction.leaving(devices - ranked.plan.ranks),
            )
            for ranked in answer.top
        ),
        choices=tuple(
            choice
            if choice.plan is None or choice.prediction is None
            else replace(
                choice,
                prediction=choice.prediction.leaving(devices - choice.plan.ranks),
            )
            for choice in answer.choices
        ),
    )


def _with_allowed_choices(request: Request) -> Iterator[Request]:
    """Yield a request, and the same with what is allowed beside the choices of one search."""
    yield from _with_packed_weights(request)
    if "framework-options" in request.pins.allowed:
        for name, _ in framework_choices(request, Layout()):
            yield replace(request, framework=framework_called(name))


def _with_packed_weights(request: Request) -> Iterator[Request]:
    """Yield a request, and the same with frozen weights in 4 bits where that is allowed.

    Experts of gpt-oss are published in MXFP4.
    """
    yield request
    lora, a = request.job.lora, request.model.architecture
    if "quantized" not in request.pins.allowed or lora is None or lora.packs_weights:
        return
    published = "mxfp4" if a is not None and a.family == "gpt_oss" else "nf4"
    packed = lora.model_copy(update={"weights": published})
    yield replace(request, job=replace(request.job, lora=packed))


def _open_gap(certificate: Certificate, asked: float | None) -> Iterator[str]:
    """Yield what a proof could not exclude, where its gap exceeds the requested one."""
    if asked is None or certificate.gap <= asked:
        return
    lowest = next(iter(certificate.runners_up), None)
    which = f"; not excluded is {lowest.layout}" if lowest is not None else ""
    yield (
        f"the gap is {percent_text(certificate.gap)}, not {percent_text(asked)}: a plan may take "
        f"{seconds_text(certificate.lower_bound_s)}{which}"
    )


def _with_less_surety(request: Request) -> str:
    """Return, for a request that no plan fits, what does if memory is as predicted, if anything."""
    if request.fit_probability <= AS_PREDICTED:
        return ""
    try:
        # Below some limit, however high, since no reason is needed here why nothing fits.
        looser = replace(request, fit_probability=AS_PREDICTED)
        prediction = search(looser, below_s=sys.float_info.max).prediction
    except NoPlanFits:
        return ""
    return (
        f" This asks for {request.fit_probability:.0%} certainty that it fits; with "
        f"--fit-probability {AS_PREDICTED:g} the plan is {prediction.layout_text}, which fits "
        f"with a probability of {prediction.fit_probability or 0.0:.0%}."
    )


def _step_cost(searched: PartAnswer | None, rate: Rate | None) -> float:
    """Return seconds of a step, or what they cost at a rate; inf where there is no answer."""
    if searched is None:
        return math.inf
    each = 1.0 if rate is None else rate(searched.part.request.cluster)
    return searched.answer.prediction.step_time_s * each


def _closing(progress: Progress) -> GapProgress:
    """Return a function that shows a closing gap as progress, in hundredths of a percent."""
    whole = 10_000
    return lambda gap: progress(round(whole * (1 - gap)), whole)


def compare(
    plans: Sequence[Plan | str | Path], cluster: str | None = None
) -> tuple[Alternative, ...]:
    """Say what plans take beside the fastest that fits, each on its own cluster or on one.

    Plans that do different amounts of work in a step are compared by the seconds of equal work.
    """
    if len(plans) < 2:
        raise DocumentError("plans", "are fewer than two; name those to be compared")
    named = [
        (plan.layout_text, plan, of_plan(plan, cluster, None))
        if isinstance(plan, Plan)
        else (str(plan), document.read(Plan, plan), predict(str(plan), cluster))
        for plan in plans
    ]
    fitting = [entry for entry in named if entry[2].fits] or named
    _, first, fastest = min(fitting, key=lambda row: row[2].step_time_s / _work(row[1]))
    return tuple(
        alternative_row(what, plan, prediction, fastest, same=_work(first) / _work(plan))
        for what, plan, prediction in named
    )


def _work(plan: Plan) -> int:
    """Return the positions that a step of a plan trains on."""
    return plan.job.sequences * plan.job.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanImprovement:
    """A plan beside the best one of its job, and their differences."""

    mine: Plan
    prediction: Prediction
    best: Answer
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


def compare_best(
    plan: Plan | str | Path,
    cluster: str | None = None,
    *,
    output: str | None = None,
    progress: Progress | None = None,
) -> PlanImprovement:
    """Return the best plan of a plan's job, cluster and framework, and the differences.

    Both are priced as the framework trains; what each difference is worth is listed one at a time.
    """
    path = None if isinstance(plan, Plan) else str(plan)
    wanted = plan if isinstance(plan, Plan) else document.read(Plan, plan)
    graph = plan_model(wanted, path)
    machine = machine_of(cluster or wanted.cluster, None)
    check_devices(wanted, machine)
    mine = _with_caveats(wanted, graph, machine)
    request = replace(
        Request.of_plan(wanted, graph, machine),
        called=cluster or wanted.cluster,
        # As sure to fit as the plan itself, so that nothing is gained by less room.
        fit_probability=min(SURE_TO_FIT, max(AS_PREDICTED, mine.fit_probability or 0.0)),
    )
    answer = answer_to(request, "fastest", progress=progress)
    words = wanted.not_understood
    best = answer.plan.model_copy(update={"training": wanted.training, "not_understood": words})
    from meshwright.planner.search.plan_differences import waterfall  # noqa: PLC0415 - other commands need none

    answer = replace(answer, plan=best, prediction=bounded_by_words(answer.prediction, words))
    if output is not None:
        document.write(best, output)
    return PlanImprovement(
        mine=wanted,
        prediction=mine,
        best=answer,
        changes=waterfall(wanted, best, graph, machine, machine_of(best.cluster, None)),
        warnings=tuple(_warnings(mine, answer.prediction)),
    )


def _warnings(mine: Prediction, best: Prediction) -> Iterator[str]:
    """Yield warnings about the figures."""
    if not mine.fits:
        yield f"yours {mine.misfit}: its time is that of larger devices"
    for name, prediction in (("yours", mine), ("the best", best)):
        notes = prediction.notes if prediction is mine else set(best.notes) - set(words_notes(mine))
        yield from (f"{name} {note}" for note in prediction.notes if note in notes)
    if mine.step_time_low_s <= best.step_time_high_s and mine.step_time_s > best.step_time_s:
        spans = [
            f"{seconds_text(each.step_time_low_s)} to {seconds_text(each.step_time_high_s)}"
            for each in (mine, best)
        ]
        yield f"ranges overlap, yours {spans[0]}, best {spans[1]}; measure both before you change"
    if words_notes(mine):
        yield "what is not understood may be worth more than the gain; no plan is called the best"
    if mine.step_time_s < best.step_time_s and mine.fits:
        yield "yours is faster: it uses a choice that is not searched"


def import_plan(
    source: str,
    *,
    cluster: str,
    of: str | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    document_len: int | None = None,
    output: str | None = None,
    values: Sequence[str] = (),
) -> ImportedPlan:
    """Read another framework's configuration as a plan; nothing of it is executed.

    `of` is the framework (`megatron`, `torchtitan`, `deepspeed`, ...) or `slurm`, a script that
    runs one of them; without it the settings tell.  `values` are those of a script's variables
    (`SIZE=7`, `1=7`).
    `document_len` is of the data that it packs, as of `plan`.
    """
    from meshwright.planner.framework_configs import import_plan as configs  # noqa: PLC0415

    try:
        imported_plan = configs.import_plan(
            document.read_text(source),
            of,
            machine_of(cluster, None),
            model=None if model is None else model_of(model, seq_len=seq_len),
            called=cluster,
            seq_len=seq_len,
            global_batch=global_batch,
            surroundings=_surroundings(source, values),
        )
    except DocumentError as error:
        raise (error if error.file else error.in_file(source)) from error
    if document_len is not None:
        check_size("document-len", document_len, imported_plan.plan.seq_len)
        packed = imported_plan.plan.model_copy(update={"document_len": document_len})
        imported_plan = replace(imported_plan, plan=packed)
    machine = machine_of(cluster, None)
    graph = (
        plan_model(imported_plan.plan, None) if model is None else model_of(model, seq_len=seq_len)
    )
    prediction = _with_caveats(imported_plan.plan, graph, machine)
    if output is not None:
        document.write(imported_plan.plan, output)
    return ImportedPlan(
        plan=imported_plan.plan,
        assumed=imported_plan.assumed,
        unknown=imported_plan.unknown,
        without_effect=imported_plan.without_effect,
        not_understood=imported_plan.not_understood,
        prediction=prediction,
    )


def _surroundings(source: str, values: Sequence[str]) -> ScriptEnvironment:
    """Return the surroundings of a script: values that are given, and files beside it."""
    from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment  # noqa: PLC0415

    settled: dict[str, str] = {}
    for item in values:
        name, sign, value = item.rpartition("=") if item.startswith("[") else item.partition("=")
        if not sign or not name:
            raise DocumentError("set", f"'{item:.60}': write NAME=VALUE")
        if name == "@":
            settled |= {str(at): word for at, word in enumerate(_shell_words(value), start=1)}
        else:
            settled[name] = value
    folder = Path(source).resolve().parent

    def text_of(name: str) -> str | None:
        """Return the text of a file beside the script, in a folder beside it, or in a repository.

        A name that begins at a repository's root is looked for from each folder above the script.
        """
        plain = Path(name)
        places = [folder / plain.name]
        if not plain.is_absolute() and ".." not in plain.parts:
            above = folder.parents if len(plain.parts) > 1 else ()
            places = [folder / plain, *(parent / plain for parent in above), *places]
        file = next((place for place in places if place.is_file()), None)
        return None if file is None else document.read_text(str(file))

    return ScriptEnvironment(values=settled, files=text_of)


def _shell_words(text: str) -> list[str]:
    """Return the words of a command line; DocumentError where a quote is open."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise DocumentError("set", f"@={text:.60}: {error}; close the quote") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPlan:
    """The plan of a configuration, its prediction, and its differences from the configuration."""

    plan: Plan
    assumed: tuple[str, ...]
    unknown: tuple[str, ...]
    """Keys that were not used."""
    without_effect: tuple[str, ...]
    """Keys that decide nothing beside the others."""
    not_understood: tuple[str, ...]
    """Unknown keys that may change seconds or bytes, the most decisive first."""
    prediction: Prediction
    """Its range is wider where words were not understood."""

    def _repr_html_(self) -> str:
        """Return the plan as notebooks show it, and what of the configuration it is without."""
        words = {
            "assumed": self.assumed,
            "not understood": self.not_understood,
            "without effect": self.without_effect,
            "unknown": self.unknown,
        }
        rows = [(name, text) for name, texts in words.items() for text in texts]
        read = html_table("What was read", ("", "words"), rows) if rows else ""
        return f"{self.plan._repr_html_()}{read}"


def of_plan(
    wanted: Plan, cluster: str | None, profile: str | None, *, path: str | None = None
) -> Prediction:
    """Return the prediction of a plan on its own cluster or another; `path` is its file, if any."""
    graph = plan_model(wanted, path)
    measured = profile_for(graph, profile)
    machine = machine_of(cluster or wanted.cluster, measured)
    check_devices(wanted, machine)
    return _with_caveats(wanted, graph, machine, measured)


def _with_caveats(
    wanted: Plan, graph: ModelGraph, machine: ClusterSpec, measured: Profiles = None
) -> Prediction:
    """Predict a plan, and say why its framework does not run it, if it does not."""
    prediction = predict_plan(wanted, graph, machine, measured)
    return prediction.with_notes(*_framework_caveats(wanted, graph, machine))


def _framework_caveats(wanted: Plan, graph: ModelGraph, machine: ClusterSpec) -> tuple[str, ...]:
    """Return why a plan's framework does not run it, if it does not."""
    from meshwright.planner.framework_configs.configuration import caveats  # noqa: PLC0415 - all formats

    return caveats(wanted, graph, machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan:
    """A prediction, and of what it is."""

    model: str
    cluster: str
    job: Job
    prediction: Prediction


@keyword_options(PredictOptions)
def predict(model: str, cluster: str | None = None, *, options: PredictOptions) -> Prediction:
    """Say what a plan, or a layout of a model, will take in time and memory.

    `lora` are settings of adapters that alone are trained, as of `plan`.
    With another framework than ours a layout is priced by its accounting rules.  `offline` fetches
    no model's config.json from the Hugging Face hub.
    """
    return _predicted(model, cluster, options).prediction


@keyword_options(PredictOptions)
def predicted_plan(
    model: str, cluster: str | None = None, *, options: PredictOptions
) -> PredictedPlan:
    """Predict as `predict` does, and say for which model, cluster and job."""
    return _predicted(model, cluster, options)


def _predicted(model: str, cluster: str | None, options: PredictOptions) -> PredictedPlan:
    """Predict a plan in a file, or a layout of a model."""
    if is_plan(model):
        wanted = document.read(Plan, model)
        options.refuse_beside_plan()
        prediction = of_plan(wanted, cluster, options.profile, path=model)
        return PredictedPlan(
            model=wanted.model.name,
            cluster=cluster or wanted.cluster,
            job=wanted.job,
            prediction=prediction,
        )
    if model.endswith((".yaml", ".yml")) and not document.is_file(model):
        raise DocumentError("", "is not there; name a file that exists", file=model)
    if cluster is None:
        raise DocumentError("cluster", "is missing; name the machine, for example --cluster local")
    with hub.offline(options.offline):
        graph = model_of(model, seq_len=options.seq_len)
    measured = profile_for(graph, options.profile)
    machine = machine_of(cluster, measured)
    layout = options.layout or ""
    pins, idle = read_layout(layout, ["stale,compress"])
    framework = framework_beside(layout, options.framework)
    request = Request.create(
        graph,
        machine,
        **options.of_request(),
        pins=pins,
        profile=measured,
        framework=framework,
    )
    wanted_layout = pinned_layout(request, idle=idle)
    check_micro_batches(layout, wanted_layout)
    placement = placement_beside(layout)
    price = _native_price if base_of(framework) == "native" else _framework_price
    if placement is not None:
        price = partial(_placed_price, placement)
    request = replace(request, cluster=_used_part(machine, wanted_layout.devices))
    priced = price(request, wanted_layout).on(machine.devices, used=wanted_layout.devices)
    priced = priced.with_notes(*without_effect(pins, wanted_layout, machine))
    notes = _length_notes(
        options.lengths_of_job(),
        wanted_layout,
        request.job.seq_len,
        lambda seq_len: price(
            replace(request, job=replace(request.job, seq_len=seq_len)), wanted_layout
        ),
    )
    return PredictedPlan(
        model=graph.name,
        cluster=cluster,
        job=request.job,
        prediction=priced.with_notes(*notes),
    )


def _used_part(machine: ClusterSpec, used: int) -> ClusterSpec:
    """Return the nodes of a cluster that as many devices fill, as for plans of a part of it."""
    each = machine.groups[0].devices_per_node
    if len(machine.groups) > 1 or used >= machine.devices:
        return machine
    if used < each:
        return machine.smaller(nodes=1, devices_per_node=used)
    if used % each:
        return machine
    return machine.smaller(nodes=used // each, devices_per_node=each)


def _native_price(request: Request, layout: Layout) -> Prediction:
    """Return what our own runtime takes; DocumentError where it does not run a layout."""
    reason = refusal(request.model, request.cluster, request.job, layout)
    if reason is not None:
        raise DocumentError("layout", f"{layout.text()}: {reason}")
    return layout_prediction(request, layout)


def _placed_price(placement: Placement, request: Request, layout: Layout) -> Prediction:
    """Return what a layout takes whose text says what its stages have."""
    if base_of(request.framework.name) == "native":
        reason = refusal(request.model, request.cluster, request.job, layout)
        if reason is not None:
            raise DocumentError("layout", f"{layout.text()}: {reason}")
    plan = plan_of_placement(request, layout, placement)
    priced = _with_caveats(plan, request.model, request.cluster, request.profile)
    named = request.framework.name
    if base_of(named) == "native" or priced.layout.endswith(f" {named}"):
        return priced
    return priced.model_copy(update={"layout": f"{priced.layout} {named}"})


def _framework_price(request: Request, layout: Layout) -> Prediction:
    """Return what another framework takes, and why it does not run a layout, if it does not."""
    from meshwright.planner.calibration.tables.predictions import (  # noqa: PLC0415 - stages by rules of frameworks
        framework_plan,
        framework_prediction,
    )

    _refuse_other_layers(request)
    theirs = framework_prediction(request, layout)
    priced = theirs.on(request.cluster.devices, used=layout.devices)
    plan = framework_plan(request, layout)
    return priced.with_notes(*_framework_caveats(plan, request.model, request.cluster))


def _refuse_other_layers(request: Request) -> None:
    """Refuse pins of layers that the framework has not: blocks would be priced as something else.

    A whole layout that it does not run still has a price, with the reason.
    """
    space, devices = request.framework.space, request.cluster.groups[0].devices_per_node
    for pin, what in () if space is None else outside(request.pins, space, devices):
        # Attention's core may be recomputed where it is fused too, for nothing.
        is_core = pin == "recompute=selective" and space is not None and space.selective_core
        if pin.partition("=")[0] in ("recompute", "activations") and not is_core:
            raise DocumentError("layout", f"{pin}: {request.framework.name} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConfiguration:
    """A plan in the words of another framework, and what its training script has to do."""

    framework: str
    text: str
    in_the_script: list[str]
    file: str | None
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of its ranks, without which they may run out of memory."""
    warnings: tuple[str, ...] = ()
    """Notes of its prediction."""
    job: ExportedJob | None = None
    """Job that starts it on the plan's nodes."""


def export(
    source: str,
    *,
    to: str | None = None,
    output: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    with_recipe: bool = False,
    job: str | None = None,
    settings: Sequence[str] = (),
) -> Exported | FrameworkConfiguration:
    """Write a checkpoint in the form that another program reads, or a plan as its configuration.

    A plan is written for its own framework unless `to` names another; its optimizer and learning
    rates only with its recipe.  With a `job` (slurm, kubernetes, skypilot) a second file starts the
    configuration on the plan's nodes; `settings` are those of the job, as NAME=VALUE.
    """
    if source.endswith((".yaml", ".yml")) and not document.is_file(source):
        raise DocumentError("", "is not there; name a file that exists", file=source)
    if settings and job is None:
        raise DocumentError("set", "is for a job; add --job slurm, kubernetes or skypilot")
    if job is not None and not is_plan(source):
        raise DocumentError("job", "starts an exported plan; a checkpoint is exported without it")
    if job is not None and output is None:
        raise DocumentError("output", "is missing; the job reads the file, so name it with -o")
    if is_plan(source):
        return _framework_configuration(source, to, output, job, settings, recipe=with_recipe)
    if to not in ("huggingface", "peft"):
        raise DocumentError(
            "to", f"is '{to or ''}'; a checkpoint is exported to huggingface, its adapters to peft"
        )
    if output is None:
        raise DocumentError("output", "is missing; name a new folder with -o")
    need_torch("exporting a checkpoint")
    from meshwright.runtime.checkpoint.weight_export import to_huggingface, to_peft  # noqa: PLC0415 - the runtime

    if to == "peft":
        written: Exported = to_peft(Path(source), Path(output))
    else:
        written = to_huggingface(Path(source), Path(output), dtype=dtype)
    return written


def _framework_configuration(
    source: str,
    to: str | None,
    output: str | None,
    job: str | None,
    settings: Sequence[str],
    *,
    recipe: bool,
) -> FrameworkConfiguration:
    from meshwright.planner.framework_configs.configuration import (  # noqa: PLC0415 - one of many
        NEED_NODES,
        configuration,
        in_the_script,
        usual_writer,
        with_environment,
    )
    from meshwright.planner.framework_configs.exportable_plan import FrameworkPlan  # noqa: PLC0415 - one of many
    from meshwright.planner.framework_configs.exported_jobs import exported_job  # noqa: PLC0415 - one of many

    wanted = document.read(Plan, source)
    graph = plan_model(wanted, source)
    to = to or usual_writer(wanted, graph)
    if to == "native":
        raise DocumentError("to", "is missing: a native plan is launched; name a framework")
    machine, environment, warnings = None, {}, []
    try:
        machine = machine_of(wanted.cluster, None)
        check_devices(wanted, machine)
        prediction = predict_plan(wanted, graph, machine)
    except DocumentError as error:
        if to in NEED_NODES or job is not None:
            raise
        warnings = [f"whether it fits in memory was not checked: {error}"]
    else:
        environment = prediction.environment
        misfit = [f"it does not fit in the memory of {wanted.cluster}"] * (not prediction.fits)
        warnings = [*misfit, *prediction.notes]
    text = with_environment(configuration(wanted, graph, to, machine, recipe=recipe), environment)
    exported = None
    if job is not None and output is not None and machine is not None:
        exported = exported_job(
            FrameworkPlan(plan=wanted, model=graph, cluster=machine, recipe=recipe),
            machine,
            job,
            to=to,
            file=output,
            text=text,
            environment=environment,
            settings=settings,
        )
        document.write_text(exported.text, exported.file)
    if output is not None:
        document.write_text(text, output)
    return FrameworkConfiguration(
        framework=to,
        text=text,
        in_the_script=in_the_script(
            wanted, graph, to, machine, recipe=recipe, has_job=job is not None
        ),
        file=output,
        environment=environment,
        warnings=tuple(warnings),
        job=exported,
    )


def profile(
    model: str,
    cluster: str = "local",
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    output: str | None = None,
    cluster_output: str | None = None,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
    budget: str | None = None,
    fresh: bool = False,
    trust_code: bool = False,
    quiet: bool = False,
) -> Profile:
    """Measure a model's layers and the links of these machines.

    `budget` is about how long it may take (`5min`); what is most valuable to a plan is measured
    first.  Earlier measurements of the same model, software and machines are reused unless `fresh`,
    and an interrupted profile is continued.

    On several nodes it is called once on each, with the same arguments; which of them this is say
    `nodes`, `node` and `rendezvous`, or the environment that torchrun, Slurm or Kubernetes made.
    Node 0 writes `output`, and to `cluster_output` the cluster with its links as measured.

    A user's file that a model document names is run only if it has the digest that the document
    says, or with `trust_code`.
    """
    need_torch("measuring a machine")
    from meshwright.profiler.profile import BUDGET_S  # noqa: PLC0415 - starts ranks
    from meshwright.profiler.profile import profile as measure  # noqa: PLC0415
    from meshwright.runtime.run.node_rank import node_rank_of  # noqa: PLC0415 - starts ranks

    graph, script = model_and_script(model, seq_len=seq_len)
    options = PlanOptions(seq_len=seq_len, global_batch=global_batch, precision=precision)
    graph, options, _ = launched_model(graph, cluster, options)
    seq_len = options.seq_len
    if trust_code and is_factory(graph.source or "") and not is_factory(model):
        graph = own_code(graph, "", seq_len=seq_len or FACTORY_SEQ_LEN, trusted=True)
    check_code(graph, "")
    node_rank = node_rank_of(os.environ, nodes=nodes, node=node, rendezvous=rendezvous)
    measured_cluster = measure(
        graph,
        cluster,
        _measured_job(graph, script, seq_len, global_batch, precision),
        script=None if script is None else (script.source, script.files),
        budget_s=BUDGET_S if budget is None else duration_s(budget),
        fresh=fresh,
        node_rank=node_rank,
        quiet=quiet,
    )
    measured: Profile = measured_cluster.profile
    if node_rank.node == 0:
        if output is not None:
            document.write(measured, output)
        if cluster_output is not None:
            document.write(measured_cluster.cluster, cluster_output)
    return measured


def _measured_job(
    graph: ModelGraph,
    script: OwnScript | None,
    seq_len: int | None,
    global_batch: int | None,
    precision: Precision | None,
) -> Callable[[ClusterSpec], Job]:
    """Return the function that builds the job to measure for, once the machine is known."""
    samples = script.samples if script is not None and not global_batch else global_batch

    def job(machine: ClusterSpec) -> Job:
        return Request.create(
            graph, machine, seq_len=seq_len, global_batch=samples, precision=precision
        ).job

    return job


def profile_agenda(
    model: str,
    cluster: str = "local",
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    nodes: int | None = None,
    node: int | None = None,
    rendezvous: str | None = None,
    budget: str | None = None,
) -> ProfileAgenda:
    """Return the agenda of `profile`, in its order, and measure nothing."""
    from meshwright.profiler import profile as profiles  # noqa: PLC0415 - the profiler
    from meshwright.runtime.run.node_rank import node_rank_of  # noqa: PLC0415

    graph, script = model_and_script(model, seq_len=seq_len)
    options = PlanOptions(seq_len=seq_len, global_batch=global_batch, precision=precision)
    graph, options, _ = launched_model(graph, cluster, options)
    seq_len = options.seq_len
    agenda: ProfileAgenda = profiles.agenda(
        graph,
        cluster,
        _measured_job(graph, script, seq_len, global_batch, precision),
        budget_s=profiles.BUDGET_S if budget is None else duration_s(budget),
        node_rank=node_rank_of(os.environ, nodes=nodes, node=node, rendezvous=rendezvous),
    )
    return agenda


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlan:
    """A plan beside its prediction, and where the pictures were written."""

    plan: Plan
    prediction: Prediction
    html: str | None
    trace: str | None


def show(
    plan_path: str,
    *,
    cluster: str | None = None,
    profile: str | None = None,
    html: str | None = None,
    trace: str | None = None,
    certificate: Certificate | None = None,
    measured_rows: Sequence[tuple[str, str, str, str]] = (),
) -> ShownPlan:
    """Show what a plan says and should do; as a page (`html`) or a Chrome trace (`trace`) too.

    The page has the proof and the alternatives of a search for the plan's job, which is made again
    unless its `certificate` is given.  `measured_rows` are quantity, predicted, measured and error.
    """
    wanted = document.read(Plan, plan_path)
    graph = plan_model(wanted, plan_path)
    measured = profile_for(graph, profile)
    machine = machine_of(cluster or wanted.cluster, measured)
    prediction = _with_caveats(wanted, graph, machine, measured)
    if html is not None:
        from meshwright.planner.report.html import page as report_page  # noqa: PLC0415 - loads jinja2

        choices: tuple[Alternative, ...] = ()
        why = ""
        if certificate is None:
            certificate, choices, why = _searched_again(wanted, graph, machine, prediction)
        page = report_page(
            wanted,
            prediction,
            cluster=machine,
            timelines=plan_timelines(wanted, graph, machine, measured),
            certificate=certificate,
            choices=choices,
            why=why,
            measured=list(measured_rows),
        )
        document.write_text(page, html)
    if trace is not None:
        from meshwright.planner.report.timeline_picture import trace_json  # noqa: PLC0415

        document.write_text(trace_json(plan_timelines(wanted, graph, machine, measured)), trace)
    return ShownPlan(plan=wanted, prediction=prediction, html=html, trace=trace)


def _searched_again(
    wanted: Plan, graph: ModelGraph, machine: ClusterSpec, prediction: Prediction
) -> tuple[Certificate | None, tuple[Alternative, ...], str]:
    """Return proof, alternatives and reason of a search for a plan's job.

    Where there is none, the reason is returned.
    """
    from meshwright.planner.report.text import why_shown  # noqa: PLC0415 - loads rich

    request = replace(Request.of_plan(wanted, graph, machine), called=wanted.cluster)
    try:
        answer = answer_to(request, "fastest")
    except MeshwrightError as error:
        return None, (), f"not proven: {error}"
    mine = alternative_row("this plan", wanted, prediction, answer.prediction)
    others = [choice for choice in answer.choices if choice.what != "chosen"]
    return answer.certificate, (mine, *others), why_shown(mine)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedProblem:
    """A partition problem and its best split, or why there is none."""

    problem: Problem
    result: GraphSolution | Infeasible | CutOff | Unfinished


def solve(problem: str, *, solver: str = "exact") -> SolvedProblem:
    """Solve a bare partition problem; docs/reference/problem.md has its format."""
    from meshwright.planner.solver import ilp  # noqa: PLC0415 - plans need no bare problems
    from meshwright.planner.solver import solve as exact  # noqa: PLC0415
    from meshwright.planner.solver.problem_document import Problem  # noqa: PLC0415

    stated = document.read(Problem, problem)
    if solver == "exact":
        return SolvedProblem(problem=stated, result=exact.solve(stated.graph()))
    if solver == "ilp":
        return SolvedProblem(problem=stated, result=ilp.solve_graph(stated.graph()))
    raise DocumentError("solver", f"is '{solver}'; the solvers are exact and ilp")


def validate(
    table: str,
    *,
    html: str | None = None,
    rows: str | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Predict every run of a table of real ones and score the predictions."""
    from meshwright.planner.calibration.scores.validate import rows_csv  # noqa: PLC0415 - loads the rules of every framework
    from meshwright.planner.calibration.scores.validate import validate as validate_table  # noqa: PLC0415

    result = validate_table(Path(table), progress=progress)
    if rows is not None:
        document.write_text(rows_csv(result), rows)
    if html is not None:
        from meshwright.planner.report.validation_report import validation_page  # noqa: PLC0415

        document.write_text(validation_page(result), html)
    return result


def plugins() -> list[dict[str, str]]:
    """Return the additions of installed packages, as rows; none of it is loaded."""
    return [
        {
            "kind": plugin.kind,
            "name": plugin.name,
            "package": f"{plugin.package} {plugin.version}",
            "is": plugin.value,
        }
        for kind in installed.GROUPS
        for plugin in installed.plugins(kind).values()
    ]


def catalog(shelf: str) -> list[dict[str, str | float | None]]:
    """Return one list of the catalogue as rows."""
    if shelf == "accelerators":
        return [
            {
                "name": name,
                "memory": bytes_text(entry.memory_bytes),
                "bf16 TFLOP/s": entry.peak_flops.get("bf16", 0) / 1e12 or None,
                "memory GB/s": entry.memory_bytes_per_s / 1e9,
                "TDP W": entry.tdp_w,
                "matmul reaches": f"{100 * entry.curve.matmul:.0f} %",
                "provenance": entry.curve.provenance,
            }
            for name, entry in shelves.accelerators().items()
        ]
    if shelf == "nodes":
        return [
            {
                "name": name,
                "devices": entry.devices_per_node,
                "accelerator": entry.accelerator,
                "network GB/s per device": (
                    entry.network.bytes_per_s / 1e9 if entry.network else None
                ),
            }
            for name, entry in shelves.nodes().items()
        ]
    if shelf == "models":
        graphs = [(name, resolve_model(name)) for name in shelves.models()]
        return [
            {
                "name": name,
                "parameters": count_text(graph.parameters),
                "layers": graph.architecture.layers if graph.architecture else None,
                "hidden": graph.architecture.hidden_size if graph.architecture else None,
                "attention": graph.architecture.attention if graph.architecture else None,
            }
            for name, graph in graphs
        ]
    if shelf == "frameworks":
        return [
            {
                "name": name,
                "trains": framework.summary,
                "searched": "yes" if framework.space else "no",
                "fitted to runs": max((entry.runs or 0 for entry in framework.basis), default=0)
                or None,
                "also called": ", ".join(framework.aliases) or None,
            }
            for name, framework in shelves.frameworks().items()
        ]
    if shelf == "prices":
        return [
            {
                "accelerator": rent.accelerator,
                "provider": rent.provider,
                "instance": rent.instance,
                "on demand $/h": rent.on_demand_usd_per_device_hour,
                "spot from $/h": rent.spot_usd_per_device_hour,
                "reserved $/h": rent.reserved_usd_per_device_hour,
                "months": rent.term_months,
                "network between nodes": rent.fabric,
                "date": rent.date,
            }
            for rent in shelves.rents()
        ]
    raise DocumentError(
        "catalog", f"'{shelf}': ask for accelerators, nodes, models, frameworks or prices"
    )
