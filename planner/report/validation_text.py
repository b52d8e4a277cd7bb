"""A validation as text for a terminal (rich renderables)."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from planner.scores.validate import Score, Validation, macro
from planner.units import seconds_text


def validation_text(validation: Validation) -> RenderableType:
    """Return scores by source, their averages, what was skipped, the rows missed most."""
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
    lines.append("missed most, with predicted parts:")
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
    return Group(*lines)


def _table(title: str, sources: Mapping[str, Score]) -> Table:
    table = Table(title=f"{title} (in %)", title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("source", no_wrap=True, min_width=15)
    # time: median |error| of step time; mem: of peak memory; fits: right calls; false: of fitting;
    # range: measurements inside the predicted one.
    for name in ("rows", "time", "mean", "p90", "bias", "mem", "fits", "false"):
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    for name in ("tau", "regret", "range"):
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
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
