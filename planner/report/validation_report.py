"""A validation as text for a terminal and as one HTML page; a calibration as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

from rich.console import Group, RenderableType
from rich.table import Table

from meshwright.planner.calibration.fitting.fitted_calibration import Calibrated, Fitted, errors
from meshwright.planner.calibration.scores.validate import Score, ScoredRow, Validation, macro
from meshwright.planner.calibration.tables.cells import NOT_KNOWN
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.report import svg
from meshwright.planner.report.facts import Fact, Summary, plain_table

MEASURED = {"step time": "time", "peak memory": "memory"}
"""Labels of the quantities that are fitted."""


def calibration_text(
    result: Calibrated, extra: Sequence[Fact] = (), *, explain: bool = False
) -> RenderableType:
    """Return the errors of predictions before and after, and the constants that changed."""
    facts = []
    for each in result.fits:
        before, after = (errors(signed)["median"] for signed in (each.fit.before, each.fit.after))
        left_out = errors(each.fit.left_out)["median"]
        text = (
            f"median error {before:.1%} -> {after:.1%} in {len(each.runs)} runs "
            f"({left_out:.1%} with each run left out)"
        )
        facts.append(Fact(label=MEASURED[each.quantity], text=text))
        changed = [
            f"{constant.name} {constant.usual:.4g} -> {each.fit.values[constant.name]:.4g}"
            for constant in each.constants
            if constant.name in each.fit.values
        ]
        if changed:
            facts.append(Fact(label="", text=", ".join(changed)))
        if each.fit.refused:
            names = ", ".join(refused.name for refused in each.fit.refused)
            facts.append(Fact(label="stays", text=names, detail=True))
    title = f"constants of {result.calibration.accelerator}"
    shown = Summary(title, [*facts, *extra], whole=explain)
    return Group(shown, *calibration_lines(result)) if explain else shown


def calibration_lines(result: Calibrated) -> Iterator[str]:
    """Yield constants before and after, what was refused, and errors."""
    for each in result.fits:
        yield f"{each.quantity}, {len(each.runs)} runs on {result.calibration.accelerator}"
        yield from _constants(each)
        for when, signed in (
            ("before", each.fit.before),
            ("after", each.fit.after),
            ("each run left out", each.fit.left_out),
        ):
            scores = errors(signed)
            yield (
                f"  error {when}: median {scores['median']:.1%}, mean {scores['mean']:.1%}, "
                f"90th percentile {scores['p90']:.1%}, bias {scores['bias']:+.1%}"
            )


def _constants(each: Fitted) -> Iterator[str]:
    for constant in each.constants:
        if constant.name in each.fit.values:
            value = each.fit.values[constant.name]
            yield f"  {constant.name}: {constant.usual:.4g} -> {value:.4g} ({constant.what})"
    for refused in each.fit.refused:
        yield f"  {refused.name} stays: {refused.reason}{each.pulled_text(refused)}"


WORST = 3
"""Sources that are named."""


def validation_text(
    validation: Validation, *, facts: Sequence[Fact] = (), explain: bool = True
) -> RenderableType:
    """Return the errors of predictions, in ten lines.

    With `explain` follow scores by source, what was skipped, the rows missed most.
    """
    shown = Summary(_title(validation), [*_facts(validation), *facts], whole=explain)
    return Group(shown, "", *_all_of_it(validation)) if explain else shown


def _title(validation: Validation) -> str:
    predicted = sum(row.prediction is not None for row in validation.rows)
    return f"{predicted} of {len(validation.rows)} rows predicted"


def _facts(validation: Validation) -> Iterator[Fact]:
    """Yield means over sources, those that are missed most, and what was not predicted."""
    sources = validation.sources
    average = macro(sources.values())

    def mean(part: str, key: str) -> float | None:
        score = average[part].get(key)
        return None if score is None else float(score)

    median, p90 = mean("step_time", "median_abs_error"), mean("step_time", "p90_abs_error")
    if median is not None and p90 is not None:
        over = f"; means of {len(sources)} sources" if len(sources) > 1 else ""
        text = f"off by {median:.1%} in the median, {p90:.1%} in the 90th percentile"
        yield Fact(label="time", text=f"{text}{over}")
    memory = mean("peak_memory", "median_abs_error")
    calls = mean("out_of_memory", "accuracy")
    parts_text = [] if memory is None else [f"off by {memory:.1%} in the median"]
    parts_text += [] if calls is None else [f"right whether a run fits in {calls:.1%} of runs"]
    if parts_text:
        yield Fact(label="memory", text="; ".join(parts_text))
    tau, regret = mean("ranking", "kendall_tau"), mean("ranking", "regret")
    if tau is not None and regret is not None:
        text = f"Kendall's tau {tau:.2f}; the first in rank is {regret:.1%} off the fastest"
        yield Fact(label="ranking", text=text)
    timed = {name: scores.step_time for name, scores in sources.items() if scores.step_time}
    worst = sorted(timed, key=lambda name: -timed[name].median_abs_error)[:WORST]
    if len(timed) > WORST:
        parts = (f"{name} {timed[name].median_abs_error:.0%}" for name in worst)
        yield Fact(label="worst", text=", ".join(parts), detail=True)
    for reason, count in validation.skipped.items():
        yield Fact(label="left out", text=f"{count}: {reason}", detail=True)
    words = _not_understood(validation)
    if words:
        named = ", ".join(f"{word} ({count})" for word, count in words.most_common(MOST_NAMED))
        more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
        text = f"not understood, with their rows: {named}{more}; time and memory may differ"
        yield Fact(label="note", text=text)


MOST_NAMED = 3
"""Words that were not understood which the short answer names."""


def _not_understood(validation: Validation) -> Counter[str]:
    """Return rows by what their table says of them that was not understood."""
    return Counter(
        assumed.removesuffix(NOT_KNOWN)
        for row in validation.rows
        for assumed in (row.setup.assumed if row.setup is not None else ())
        if assumed.endswith(NOT_KNOWN)
    )


def _all_of_it(validation: Validation) -> list[RenderableType]:
    predicted = sum(row.prediction is not None for row in validation.rows)
    lines: list[RenderableType] = [f"{predicted} of {len(validation.rows)} rows predicted"]
    for reason, count in validation.skipped.items():
        lines.append(f"  {count} not: {reason}")
    for name, count in validation.fallbacks.items():
        lines.append(f"  {count} of framework '{name}', which has no rules of its own")
    if validation.sources:
        lines += [_table("rows whose inputs are all known", validation.sources), ""]
    if validation.incomplete:
        lines += [_table("rows with gaps in their inputs", validation.incomplete), ""]
    lines.append("largest errors, with predicted parts:")
    for row in validation.worst:
        assert row.prediction is not None
        assert row.setup is not None
        seen = row.measured
        parts = ", ".join(
            f"{name} {seconds_text(size)}"
            for name, size in row.prediction.step_parts.items()
            if size > 0.02 * row.prediction.step_time_s
        )
        lines.append(
            f"  {seen.id} ({seen.model} on {row.setup.request.cluster.name}, {row.setup.text}): "
            f"predicted {seconds_text(row.prediction.step_time_s)}, "
            f"measured {seconds_text(seen.step_time_s or 0.0)}: {parts}"
        )
    return lines


def _table(title: str, sources: Mapping[str, Score]) -> Table:
    # time: median |error| of step time; mem: of peak memory; fits: right calls; false: of fitting;
    # range: measurements inside the predicted one.
    columns = ("rows", "time", "mean", "p90", "bias", "mem", "fits", "false")
    ranks = ("tau", "regret", "range")
    right = range(1, 1 + len(columns) + len(ranks))
    table = plain_table("source", *columns, *ranks, right=right, title=f"{title} (in %)")
    table.padding = (0, 1, 0, 0)
    for name, score in sources.items():
        table.add_row(name, *_cells(score))
    table.add_row("mean", "", *_average(sources), end_section=True)
    return table


def _cells(score: Score) -> list[str]:
    time, memory, calls, ranks = (
        score.step_time,
        score.peak_memory,
        score.out_of_memory,
        score.ranking,
    )
    return [
        str(score.rows),
        *(
            [
                _share(time.median_abs_error),
                _share(time.mean_abs_error),
                _share(time.p90_abs_error),
                _share(time.bias),
            ]
            if time
            else [""] * 4
        ),
        _share(memory.median_abs_error) if memory else "",
        _share(calls.accuracy) if calls else "",
        _share(calls.false_fits) if calls else "",
        f"{ranks.kendall_tau:.2f}" if ranks else "",
        _share(ranks.regret) if ranks else "",
        _share(score.coverage) if score.coverage is not None else "",
    ]


def _average(sources: Mapping[str, Score]) -> list[str]:
    average = macro(sources.values())
    cells = []
    for part, key in (
        ("step_time", "median_abs_error"),
        ("step_time", "mean_abs_error"),
        ("step_time", "p90_abs_error"),
        ("step_time", "bias"),
        ("peak_memory", "median_abs_error"),
        ("out_of_memory", "accuracy"),
        ("out_of_memory", "false_fits"),
    ):
        cells.append(_share(average[part][key]) if key in average[part] else "")
    ranks = average["ranking"]
    cells.append(f"{ranks['kendall_tau']:.2f}" if "kendall_tau" in ranks else "")
    cells.append(_share(ranks["regret"]) if "regret" in ranks else "")
    cells.append(_share(average["coverage"]) if average["coverage"] is not None else "")
    return cells


def _share(value: float) -> str:
    return f"{100 * value:.1f}"


MOST_POINTS = 2000
"""Drawn for each source and picture."""


def validation_page(validation: Validation) -> str:
    """Return one self-contained HTML page: scores by source, predicted against measured."""
    import jinja2  # noqa: PLC0415 - a text needs none

    figures: list[tuple[str, str]] = []
    for name in dict.fromkeys(row.measured.source for row in validation.rows):
        rows = [row for row in validation.rows if row.measured.source == name]
        for quantity, unit in (("step time", "s"), ("peak memory", "GiB")):
            html = scatter(rows, quantity, unit)
            if html:
                figures.append((f"{name}: {quantity}", html))
    template = (
        resources.files("meshwright.planner.report").joinpath("validation.html").read_text("utf-8")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        css=svg.page_css(),
        validation=validation,
        figures=figures,
        average=macro(validation.sources.values()),
        predicted=sum(row.prediction is not None for row in validation.rows),
    )


def scatter(rows: list[ScoredRow], quantity: str, unit: str) -> str:
    """Return predicted against measured, both axes logarithmic; nothing without points."""
    timed = quantity == "step time"
    points = [
        (pair, row)
        for row in rows
        if (pair := row.times if timed else row.memories)
        and (row.measured.judge_time if timed else row.measured.judge_memory)
    ][:MOST_POINTS]
    drawn = [
        svg.Point(
            x=measured,
            y=predicted,
            label=f"{row.measured.id}: {row.setup.text if row.setup else ''}",
        )
        for (predicted, measured), row in points
    ]
    return svg.scatter(
        f"{quantity}: predicted over measured", drawn, f"measured, {unit}", f"predicted, {unit}"
    )
