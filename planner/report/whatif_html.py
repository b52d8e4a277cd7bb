"""Page of a study that needs no network: verdict, charts, controls, tables.

The page computes all figures itself, with the `*.mjs` of `planner/whatif/`, twins of
the planner's arithmetic; what needed a search is written into it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from meshwright.planner.documents.units import bytes_text, seconds_text
from meshwright.planner.report.whatif_text import MOST_ASKED, provenance_text
from meshwright.planner.whatif.conclusions import caveat_texts, overall_texts, verdicts
from meshwright.planner.whatif.findings import answers, asked_texts, nearest_texts
from meshwright.planner.whatif.formatting import days_text, usd_text
from meshwright.planner.whatif.page_data import page_data
from meshwright.planner.whatif.ranking import figure as compared
from meshwright.planner.whatif.ranking import measured_first, ordered_by
from meshwright.planner.whatif.study import Offer, Study
from meshwright.planner.whatif.uncertain_value import exact

if TYPE_CHECKING:
    from meshwright.planner.catalog import Quantity
    from meshwright.planner.whatif.outcome import CandidateOutcome
    from meshwright.planner.whatif.run_study import Result
    from meshwright.planner.whatif.study import Assumptions

ARITHMETIC = (
    "uncertain_value",
    "pricing/financing",
    "pricing/economics",
    "pricing/goodput",
    "probabilities",
    "monte_carlo",
    "pricing/queueing",
    "pricing/terms",
    "pricing/transfers",
    "evaluate",
    "ranking",
    "pricing/break_even",
    "sensitivity",
)
"""Modules of the page in planner/whatif, each after those that it imports."""
VIEW = ("state", "inputs", "documents", "charts", "words", "card", "again", "view")
"""Modules in planner/report/page."""


def study_page(result: Result, *, served: bool = False) -> str:
    """Return the report of a study; `served` by `page_server.py`, it can plan again."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_report_file),
    )
    data = page_data(result)
    return environment.get_template("whatif.html").render(
        study=result.study,
        heading=heading(result.study),
        verdicts=verdicts(result),
        caveats=caveat_texts(result),
        asked=[*overall_texts(result), *asked_texts(result), *nearest_texts(result)][:MOST_ASKED],
        served=served,
        solved=any(offer.solve is not None for offer in result.study.offers),
        static=list(_static(result, environment)),
        css=_report_file("page/tokens.css") + _report_file("page/page.css"),
        data=script_json(data),
        script=script_text(),
        made=data["made"],
    )


def heading(study: Study) -> str:
    """Return a study's question, or what its models, tokens and terms ask.

    >>> heading(Study.of({"name": "a", "models": ["gpt2"], "goal": {"tokens": 2e9},
    ...     "offers": [{"cluster": "8xa10g"}, {"cluster": "8xl4", "buy": {}}]}))
    'Train gpt2 on 2 billion tokens: rent or buy?'
    """
    if study.question is not None:
        return study.question
    tokens = study.goal.tokens
    on = "" if tokens is None or study.jobs else f" on {_count_words(tokens)} tokens"
    what = "A year of jobs" if study.jobs else f"Train {', '.join(study.models)}{on}"
    terms = dict.fromkeys(map(_term_word, study.offers))
    if len(terms) == 1:
        return f"{what}: which of {len(study.offers)} offers?" if study.offers[1:] else what
    *first, last = terms
    return f"{what}: {', '.join(first)} or {last}?"


def _count_words(count: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:g} {word}"
    return f"{count:,.0f}"


def _term_word(offer: Offer) -> str:
    if offer.buy is not None:
        return "lease" if offer.buy.lease is not None else "buy"
    if offer.owned:
        return "use what is owned"
    return "reserve" if offer.rent and offer.rent.commitment == "reserved" else "rent"


def _report_file(name: str) -> str:
    return resources.files("meshwright.planner.report").joinpath(name).read_text("utf-8")


def script_json(data: Any) -> str:
    """Return plain data as JSON that no HTML inside of it can end.

    >>> script_json({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def script_text() -> str:
    """Return the page's modules as one script, in their order; each keeps a scope of its own."""
    arithmetic = resources.files("meshwright.planner.whatif")
    parts = {name: arithmetic.joinpath(f"{name}.mjs").read_text("utf-8") for name in ARITHMETIC}
    parts |= {name: _report_file(f"page/{name}.mjs") for name in VIEW}
    return "\n".join(_module_scope(name.rpartition("/")[2], text) for name, text in parts.items())


def _module_scope(name: str, text: str) -> str:
    """Return a module as a function that returns what it exports, called at once.

    >>> print(_module_scope("b", 'import { x } from "./a.mjs";\\nexport const y = 2 * x;\\n'))
    const $b = (() => {
    const { x } = $a;
    const y = 2 * x;
    return { y };
    })();
    """
    names = ", ".join(_EXPORT.findall(text))
    body = _IMPORT.sub(r"const \1 = $\2;", text)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const ${name} = (() => {{\n{body}return {{ {names} }};\n}})();"


_EXPORT = re.compile(r"^export (?:const|function) (\w+)", re.MULTILINE)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "[./\w]*?(\w+)\.mjs";', re.MULTILINE)


def _static(result: Result, environment: jinja2.Environment) -> Iterator[tuple[str, str]]:
    """Yield (title, HTML) of what no control changes: plans, reasons, assumptions."""
    template = environment.get_template("whatif_static.html")
    matrix = _cells(result)
    failed = [outcome for outcome in result.outcomes if not outcome.fits]
    module: Any = template.make_module(
        {
            "result": result,
            "failed": failed,
            "matrix": matrix,
            "assumptions": assumption_rows(result.study.assumptions),
            "provenance": provenance_text(result).splitlines(),
            "seconds": seconds_text,
            "size": bytes_text,
            "percent": lambda share: f"{100 * (share - 1):+.1f} %",
        }
    )
    yield "Plans and prices of the candidates", module.plans()
    if matrix:
        yield "Models and candidates, as the study has it", module.cells()
    sentences = [*verdicts(result), *answers(result)]
    if sentences:
        yield "What follows, as the study has it", module.listed(sentences)
    if failed:
        yield "What does not fit", module.misfits()
    if result.best is not None:
        measure = measured_first(result.study, result.best)
        yield "What to measure first", module.listed(measure)
    if result.marginal and result.base is not None:
        title = f"One change on {result.base.candidate}, planned again"
        yield title, module.changes(result.marginal, title)
    for curve in result.curves:
        title = f"{curve[0].words.split(' x ')[0].capitalize()}, step by step, planned again"
        yield title, module.changes(curve, title)
    yield "Assumptions and sources", module.assumed()


def _cells(result: Result) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each model's figures on each candidate, with how they compare to the row's best."""
    models, names = result.study.rows, list(result.candidates)
    if len(models) == 1:
        return []
    outcomes = {(o.model, o.candidate): o for o in result.outcomes}
    by = ordered_by(result.study, result.outcomes)
    rows = []
    for model in models:
        row = [outcomes.get((model, name)) for name in names]
        sizes = [compared(o, by) if o is not None and o.fits else math.inf for o in row]
        least = min(sizes)
        rows.append(
            (model, [(_cell(o), _shade(size, least)) for o, size in zip(row, sizes, strict=True)])
        )
    return rows


def _shade(size: float, least: float) -> str:
    if size == math.inf:
        return "none"
    return "best" if size <= 1.05 * least else ""


def _cell(outcome: CandidateOutcome | None) -> str:
    if outcome is None:
        return ""
    if not outcome.fits:
        return "does not fit"
    parts = [usd_text(exact(outcome.usd.value))] if outcome.usd else []
    if outcome.hours is not None:
        parts.append(days_text(exact(outcome.hours.value)))
    if outcome.misses:
        parts.append("misses " + outcome.misses[0].split(":")[0])
    return ", ".join(parts)


def assumption_rows(assumed: Assumptions) -> list[tuple[str, str, str]]:
    """Return (what, value, source) of every assumption; what was left out is a default."""
    facility, failures, owning = assumed.facility, assumed.failures, assumed.owning
    quantities = [
        *([("goodput", assumed.goodput)] if assumed.goodput is not None else []),
        ("failures of a device an hour", failures.per_device_hour),
        ("interruptions of a spot instance an hour", failures.spot_per_node_hour),
        ("restart, s", failures.restart_s),
        ("checkpoint, bytes per parameter", failures.checkpoint_bytes_per_parameter),
        ("store, bytes/s per device", failures.store_bytes_per_s_per_device),
        ("copy to the host, bytes/s per device", failures.copy_bytes_per_s_per_device),
        ("stall at each checkpoint beside the copy, s", failures.checkpoint_stall_s),
        ("hours lost at any size", failures.other),
        ("value left from year to year", owning.retained_a_year),
        ("storage, USD per device", owning.storage_usd_per_device),
        ("spares, share of hardware", owning.spares),
        ("support a year, share of hardware", owning.support_a_year),
        ("insurance a year, share of hardware", owning.insurance_a_year),
        ("staff, USD per device and year", owning.staff_usd_per_device_year),
        ("hosting, USD per kW and month", owning.hosting_usd_per_kw_month),
        ("idle power, share of power in use", owning.idle_power),
        ("storage, USD per TB and month", assumed.data.usd_per_tb_month),
        ("transfers, USD per TB", assumed.data.usd_per_tb_moved),
        ("hours of a run before it trains", assumed.start_hours),
        ("days until bought devices are delivered", assumed.lead_days),
        ("node power over design power", facility.node_power_over_tdp),
        ("network, W per device", facility.network_w_per_device),
        ("power usage effectiveness", facility.power_usage_effectiveness),
        ("electricity, USD per kWh", facility.electricity_usd_per_kwh),
        ("exponent of compute over power limit", assumed.power_limit_exponent),
    ]
    rows = [(name, _range(quantity), quantity.source) for name, quantity in quantities]
    grams = assumed.carbon_g_per_kwh
    if grams is None:
        country = assumed.country
        of_country = facility.carbon_g_per_kwh.by_country.get(country)
        rows.append(
            ("carbon, g per kWh", f"{of_country:g}, {country}", facility.carbon_g_per_kwh.source)
        )
    else:
        rows.append(("carbon, g per kWh", f"{grams:g}", "the study"))
    for name, field, value in (
        ("years until sold, or compared", "years", assumed.years),
        ("interest a year", "interest", assumed.interest),
        ("share of bought or reserved hours used", "utilisation", assumed.utilisation),
        ("change of rents a year", "rent_change_a_year", assumed.rent_change_a_year),
        ("tied within", "tie", assumed.tie),
    ):
        origin = "the study" if field in assumed.model_fields_set else "default"
        rows.append((name, f"{value:g}", origin))
    for name, rate in (("sales tax", owning.sales_tax), ("income tax", owning.income_tax)):
        rows.append((name, f"{rate:g}", "the study" if rate else "default"))
    rows += [
        (f"{code} in USD", f"{exchange.usd:g} on {exchange.date}", exchange.source)
        for code, exchange in assumed.currencies.items()
    ]
    return rows


def _range(quantity: Quantity) -> str:
    if quantity.low == quantity.high:
        return f"{quantity.value:g}"
    return f"{quantity.value:g} ({quantity.low:g} to {quantity.high:g})"
