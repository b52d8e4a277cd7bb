"""A calibration as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from meshwright.planner.calibration.fitting.fitted_calibration import Calibrated, Fitted, errors
from meshwright.planner.report.facts import Fact, Summary

MEASURED = {"step time": "time", "peak memory": "memory"}
"""What a fit is of, as labels."""


def calibration_text(
    result: Calibrated, extra: Sequence[Fact] = (), *, explain: bool = False
) -> RenderableType:
    """Return how far predictions were off before and after, and the constants that changed."""
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
