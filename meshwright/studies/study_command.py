"""The command `whatif`: hardware compared before it is bought or rented."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.planner.catalog import Market
from meshwright.planner.catalog.imports import Rents, import_rents
from meshwright.planner.documents import document
from meshwright.planner.documents.training import MasterWeights, Objective, Optimizer
from meshwright.planner.documents.units import GIB
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import cell
from meshwright.planner.requests.lengths import Batching, lengths_of_job, summary
from meshwright.planner.requests.request import adapters_of
from meshwright.planner.whatif.pricing.queueing import load, wait_h
from meshwright.planner.whatif.run_study import Progress, Result, run
from meshwright.planner.whatif.study import Order, Sizing, Study, Tuning
from meshwright.planner.whatif.uncertain_value import UncertainValue

if TYPE_CHECKING:
    from meshwright.studies.page_server import PageServer


def _ends(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


RANGED = (
    "hours",
    "lead_days",
    "usd",
    "usd_per_device_hour",
    "watts",
    "energy_kwh",
    "carbon_kg",
    "outlay_usd",
)
"""Figures of an outcome whose ranges a table has."""
COLUMNS = (
    "model",
    "candidate",
    "accelerator",
    "devices",
    "fits",
    "framework",
    "layout",
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "native_step_time_s",
    "tokens_per_s",
    "mfu",
    "goodput",
    *_ends("hours"),
    *_ends("lead_days"),
    *_ends("usd"),
    *_ends("usd_per_device_hour"),
    *_ends("watts"),
    *_ends("energy_kwh"),
    *_ends("carbon_kg"),
    "headroom_bytes",
    "host_bytes",
    "capital_usd",
    *_ends("outlay_usd"),
    "tokens_in_budget",
    "hours_used_share",
    "mean_wait_hours",
    "misses",
    "probability",
    "probability_cheapest",
    "probability_fastest",
    "binding",
    "price",
)

FLAGS = {
    "models[0]": "model",
    "work.seq_len": "seq-len",
    "work.global_batch": "global-batch",
    "goal.tokens": "tokens",
    "goal.deadline_days": "deadline-days",
    "goal.budget_usd": "budget",
    "goal.power_cap_w": "power-cap",
    "goal.confidence": "confidence",
    "work.precision": "precision",
    "work.fit_probability": "fit-probability",
    "assumptions.electricity_usd_per_kwh": "electricity",
    "assumptions.utilisation": "utilisation",
    "assumptions.years": "years",
    "assumptions.quota_devices": "quota",
}
"""Names on the command line of fields of a study."""


def whatif(
    study: str | None = None,
    *,
    prices: str | None = None,
    html: str | None = None,
    table: str | None = None,
    write: str | None = None,
    processes: int | None = None,
    executor: str | None = None,
    progress: Progress | None = None,
    **words: Any,
) -> Result:
    """Compare clusters for some training: the best plan on each, its time, cost, energy, limits.

    `words` are a study in few words instead of a document: see `study_of`.  `write` writes it as a
    document to edit.
    """
    given = {name: value for name, value in words.items() if _is_given(value)}
    if processes is not None and processes < 1:
        raise DocumentError("processes", f"is {processes}; it is a whole number from 1")
    if study is not None and (given or write):
        flags = ", ".join("--" + name.replace("_", "-") for name in given) or "--write"
        raise DocumentError("study", f"is complete in itself; leave out {flags}")
    question = document.read(Study, study) if study is not None else study_of(**given)
    if write:
        document.write_text(question.dump(defaults=False), write)
    offers = document.read(Rents, prices).rents if prices else None
    result = run(question, processes=processes, progress=progress, offers=offers, executor=executor)
    if html:
        from meshwright.planner.report.whatif_html import study_page  # noqa: PLC0415 - loads jinja2

        document.write_text(study_page(result), html)
    if table:
        document.write_text(table_text(result), table)
    return result


def serve(result: Result, *, prices: str | None = None, processes: int | None = None) -> PageServer:
    """Return a server of a study's page that plans changed studies; it does not run yet."""
    from meshwright.studies.page_server import PageServer, Planning  # noqa: PLC0415 - loads jinja2

    offers = document.read(Rents, prices).rents if prices else None

    def again(study: Study, progress: Progress) -> Result:
        return run(study, processes=processes, progress=progress, offers=offers)

    return PageServer(Planning(result=result, run=again))


def study_of(
    *,
    model: str | None = None,
    clusters: Sequence[str] = (),
    owned: Sequence[str] = (),
    reserved: Sequence[str] = (),
    buy: Sequence[str] = (),
    solve: Sizing | None = None,
    tokens: float | None = None,
    deadline_days: float | None = None,
    budget: float | None = None,
    power_cap: float | None = None,
    confidence: float | None = None,
    by: Order = "cost",
    day_usd: float | None = None,
    tuning: Tuning | None = None,
    lora: Sequence[str] = (),
    optimizer: Optimizer = "adamw",
    masters: MasterWeights = "fp32",
    objective: Objective = "sft",
    document_len: int | None = None,
    lengths: str | None = None,
    batching: Batching | None = None,
    framework: str | None = None,
    precision: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    fit_probability: float | None = None,
    electricity: float | None = None,
    utilisation: float | None = None,
    years: float | None = None,
    market: Market | None = None,
    quota: int | None = None,
    spot: Sequence[str] = (),
    jobs: Sequence[str] = (),
    change: Sequence[str] = (),
    fix: Sequence[str] = (),
    allow: Sequence[str] = (),
    host_memory: float | None = None,
    as_run: bool = False,
    each_provider: bool = False,
    wait_months: float | None = None,
    rent_change: float | None = None,
    lead_days: float | None = None,
) -> Study:
    """Return the study that compares clusters for one model.

    `clusters` are rented at the catalogue's offers; hardware of `owned` ones costs nothing more;
    `reserved` are quotes as in 8x8xh100-sxm-80gb=2.10/36, US dollars per device and hour for a term
    in months; `buy` as in 8x8xh200-sxm=38000, or at the catalogue's price.  Where a cluster
    contains {n}, `solve` finds it.
    """
    bound = [*buy, *reserved]
    used: tuple[tuple[str, object, object, str], ...] = (
        ("solve", solve, any("{n}" in cluster for cluster in clusters), "{n} in --clusters"),
        ("quota", quota, solve, "--solve, which finds {n}"),
        ("as-run", as_run, clusters, "--clusters"),
        ("change", change, clusters, "--clusters"),
        ("each-provider", each_provider, clusters, "--clusters"),
        ("wait-months", wait_months, clusters, "--clusters, whose rent of then is compared"),
        ("market", market, [*clusters, *spot], "--clusters or --spot"),
        ("lead-days", lead_days is not None, buy, "--buy; --wait-months orders later"),
        ("years", years, bound, "--buy or --reserved"),
        ("utilisation", utilisation, [*bound, *owned], "--buy, --reserved or --owned"),
        ("electricity", electricity, [*buy, *owned], "--buy or --owned; rent includes it"),
        ("rent-change", rent_change, wait_months or bound, "--wait-months, --buy or --reserved"),
        ("day-usd", day_usd, by == "weighted", "--by weighted"),
    )
    for flag, given, there, what in used:
        if given and not there:
            raise DocumentError(flag, f"changes nothing without {what}; add that, or leave it out")
    rent = _without_none({"market": market, "each_provider": each_provider or None}) or None
    spot_rent = _without_none({"commitment": "spot", "market": market})
    rented = [
        {
            "cluster": cluster,
            "solve": _solve(cluster, solve),
            "rent": rent,
            "fix": list(fix) or None,
        }
        for cluster in clusters
    ]
    changes = dict(map(_change, change))
    offers: list[dict[str, Any]] = [
        *rented,
        *(with_name(offer, "as people run it", fix=list(AS_RUN)) for offer in rented if as_run),
        *(with_name(offer, _changes_name(change), change=changes) for offer in rented if changes),
        *(
            with_name(
                offer,
                f"as people run it, {_changes_name(change)}",
                change=changes,
                fix=list(AS_RUN),
            )
            for offer in rented
            if changes and as_run
        ),
        *(
            with_name(offer, f"in {wait_months:g} months", wait_months=wait_months)
            for offer in rented
            if wait_months
        ),
        *(
            {"name": f"{cluster} on spot", "cluster": cluster, "rent": spot_rent}
            for cluster in spot
        ),
        *({"name": f"own {cluster}", "cluster": cluster, "owned": True} for cluster in owned),
        *map(_reserved_offer, reserved),
        *map(_bought, buy),
    ]
    for_all = {
        "allow": list(allow) or None,
        "host_memory_bytes": None if host_memory is None else round(host_memory * GIB),
    }
    offers = [{**offer, **for_all} for offer in offers]
    if (model is None and not jobs) or not offers:
        raise DocumentError("study", "is missing; give a STUDY.yaml, or --model and --clusters")
    if model is not None and jobs:
        raise DocumentError("jobs", "name their models; leave out --model")
    of_job = lengths_of_job(lengths, batching, seq_len=seq_len, document_len=document_len)
    if of_job.batching != "packed":
        raise DocumentError(
            "batching",
            f"is {of_job.batching}, whose steps differ; compare clusters by packed samples",
        )
    tuning, adapters = _tuning(tuning, lora, objective)
    question = None
    if of_job.lengths is not None and of_job.seq_len is not None:
        filled = of_job.lengths.packed_share(of_job.seq_len)
        question = (
            f"{model or 'jobs'}: {summary(of_job.lengths)}; tokens are positions, of which "
            f"{filled:.0%} train"
        )
        tokens = None if tokens is None else tokens / filled
    work = {
        "seq_len": of_job.seq_len,
        "document_len": of_job.document_len,
        "global_batch": global_batch,
        "tuning": tuning,
        "lora": adapters,
        "optimizer": optimizer,
        "master_weights": masters,
        "objective": objective,
        "framework": framework,
        "precision": precision,
        "fit_probability": fit_probability,
    }
    goal = {
        "tokens": tokens,
        "deadline_days": deadline_days,
        "budget_usd": budget,
        "power_cap_w": power_cap,
        "confidence": confidence,
        "by": by,
        "day_usd": day_usd,
    }
    assumptions = {
        "electricity_usd_per_kwh": electricity,
        "utilisation": utilisation,
        "years": years,
        "quota_devices": quota,
        "rent_change_a_year": rent_change,
        "lead_days": None if lead_days is None else _given_days(lead_days),
    }
    study = {
        "name": f"{model or 'jobs'} on {', '.join(dict.fromkeys(o['cluster'] for o in offers))}"[
            :200
        ],
        "question": question,
        "models": [] if model is None else [model],
        "jobs": list(map(_job_of_year, jobs)),
        "work": _without_none(work),
        "goal": _without_none(goal),
        "offers": [_without_none(offer) for offer in offers],
        "assumptions": _without_none(assumptions),
    }
    try:
        return Study.of(_without_none(study))
    except DocumentError as error:
        path = "wait-months" if error.path.endswith(".wait_months") else error.path
        raise DocumentError(FLAGS.get(path, path), error.message) from error


def _tuning(
    tuning: Tuning | None, lora: Sequence[str], objective: Objective
) -> tuple[Tuning, dict[str, Any] | None]:
    """Return which kind of training adapters and an objective make it, and the adapters.

    >>> _tuning("qlora", ["rank=64"], "sft")[1]["weights"], _tuning(None, [], "dpo")
    ('nf4', ('full', None))
    """
    if not lora:
        return tuning or ("pretrain" if objective == "sft" else "full"), None
    adapters = adapters_of(lora)
    assert adapters is not None  # settings are given
    if tuning is None:
        tuning = "qlora" if adapters.packs_weights else "lora"
    if tuning not in ("lora", "qlora") or (tuning == "lora" and adapters.packs_weights):
        raise DocumentError("tuning", f"is {tuning}, which --lora contradicts; leave one of them")
    if tuning == "qlora" and not adapters.packs_weights:
        adapters = adapters.model_copy(update={"weights": "nf4"})
    return tuning, adapters.model_dump(mode="json")


def _is_given(value: object) -> bool:
    """Return True if an option of the command has a value; 0 is one.

    >>> [_is_given(value) for value in (None, False, [], 0, 0.0)]
    [False, False, False, True, True]
    """
    return not (value is None or value is False or value in ([], ()))


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


AS_RUN = ("tp=1", "pp=1", "zero=3")
"""Weights, gradients and optimizer sharded over all devices, as in most scripts that people start
from."""


def with_name(offer: dict[str, Any], words: str, **more: Any) -> dict[str, Any]:
    """Return an offer under another name, with what differs in it."""
    return {**offer, "name": f"{offer['cluster']} {words}", **more}


def _change(text: str) -> tuple[str, float]:
    """Read a change, as in network=0.1."""
    name, _, factor = text.partition("=")
    try:
        return name.strip(), float(factor)
    except ValueError as error:
        raise DocumentError(
            "change", f"is '{text:.60}'; write what changes and its factor, as in network=0.1"
        ) from error


def _changes_name(changes: Sequence[str]) -> str:
    return "with " + ", ".join(text.replace("=", " x ") for text in changes)


def _job_of_year(text: str) -> dict[str, Any]:
    """Read a job, as in llama-3.1-8b=1e10x12 or, of a fine-tuning, llama-3.1-70b=2e9x4/lora."""
    model, _, runs = text.partition("=")
    runs, _, tuning = runs.partition("/")
    tokens, _, times = runs.partition("x")
    try:
        job = {"name": text, "model": model, "tokens": float(tokens), "runs_a_year": float(times)}
    except ValueError as error:
        raise DocumentError(
            "jobs",
            f"is '{text:.60}'; write a model, the tokens of a run and the runs a year, as in "
            "llama-3.1-8b=1e10x12",
        ) from error
    return {**job, **({"tuning": tuning} if tuning else {})}


def _given_days(days: float) -> dict[str, Any]:
    return {"value": days, "low": days, "high": days, "source": "the command line"}


def _solve(cluster: str, solve: Sizing | None) -> Sizing | None:
    return solve if "{n}" in cluster else None


def _reserved_offer(text: str) -> dict[str, Any]:
    """Read a quote, as in 8x8xh100-sxm-80gb=2.10/36."""
    cluster, _, terms = text.partition("=")
    price, _, months = terms.partition("/")
    try:
        rent = {"usd_per_device_hour": float(price), "term_months": float(months)}
    except ValueError as error:
        raise DocumentError(
            "reserved",
            f"is '{text:.60}'; write a quote as in 8x8xh100-sxm-80gb=2.10/36, dollars per device "
            "and hour and months",
        ) from error
    quoted = {"commitment": "reserved", **_today()}
    return {"name": f"{cluster} reserved", "cluster": cluster, "rent": {**rent, **quoted}}


def _bought(text: str) -> dict[str, Any]:
    """Read a purchase, as in 8x8xh200-sxm=38000 or 8x8xh200-sxm."""
    cluster, given, price = text.partition("=")
    try:
        buying = {"usd_per_device": float(price), **_today()} if given else {}
    except ValueError as error:
        raise DocumentError(
            "buy", f"is '{text:.60}'; write a price as in 8x8xh200-sxm=38000, dollars per device"
        ) from error
    return {"name": f"{cluster} bought", "cluster": cluster, "buy": buying}


def _today() -> dict[str, str]:
    return {"date": datetime.date.today().isoformat(), "source": "the command line"}


def table_text(result: Result) -> str:
    """Return all outcomes as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    ranks = {id(rank.outcome): rank for of_model in result.ranks.values() for rank in of_model}
    for outcome in result.outcomes:
        step, tokens = outcome.step_s, outcome.tokens_in_budget
        ranges: dict[str, float] = {}
        for name in RANGED:
            span: UncertainValue | None = getattr(outcome, name)
            if span is not None:
                ends = (span.value, span.low, span.high)
                ranges |= dict(zip(_ends(name), ends, strict=True))
        first = ranks[id(outcome)].first if id(outcome) in ranks else {}
        writer.writerow(
            {
                "model": cell(outcome.model),
                "candidate": cell(outcome.candidate),
                "accelerator": cell(outcome.accelerator),
                "devices": outcome.devices,
                "fits": int(outcome.fits),
                "framework": outcome.framework,
                "layout": outcome.layout,
                "step_time_s": step.value if step else "",
                "step_time_low_s": step.low if step else "",
                "step_time_high_s": step.high if step else "",
                "native_step_time_s": outcome.native_step_s or "",
                "tokens_per_s": outcome.tokens_per_s.value if outcome.tokens_per_s else "",
                "mfu": outcome.mfu if outcome.fits else "",
                "goodput": outcome.goodput.value if outcome.goodput else "",
                "headroom_bytes": outcome.headroom_bytes if outcome.fits else "",
                "host_bytes": outcome.host_bytes if outcome.fits else "",
                "capital_usd": "" if outcome.capital_usd is None else outcome.capital_usd,
                "tokens_in_budget": "" if tokens is None else tokens,
                **ranges,
                "hours_used_share": load(outcome.arrivals) if outcome.jobs else "",
                "mean_wait_hours": (wait_h(outcome.arrivals) or "") if outcome.jobs else "",
                "misses": cell("; ".join(outcome.misses)),
                "probability": outcome.chance if outcome.chances else "",
                "probability_cheapest": first.get("cost", ""),
                "probability_fastest": first.get("time", ""),
                "binding": cell(outcome.binding),
                "price": cell(outcome.price),
            }
        )
    return out.getvalue()


def import_prices(path: str, *, provider: str, date: str, output: str) -> Rents:
    """Read a price list of SkyPilot's or gpuhunt's and write it as dated rents."""
    if Path(output).suffix not in (".yaml", ".yml"):
        raise DocumentError("output", f"is {output}; rents are YAML, as in rents.yaml")
    rents = import_rents(path, provider=provider, date=date)
    document.write(rents, output)
    return rents
