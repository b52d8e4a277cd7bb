"""A calibration as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from planner.calibrate.calibration import Calibrated, Fitted, errors


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
            found = errors(signed)
            yield (
                f"  error {when}: median {found['median']:.1%}, mean {found['mean']:.1%}, "
                f"90th percentile {found['p90']:.1%}, bias {found['bias']:+.1%}"
            )


def _constants(each: Fitted) -> Iterator[str]:
    for constant in each.constants:
        if constant.name in each.fit.values:
            value = each.fit.values[constant.name]
            yield f"  {constant.name}: {constant.usual:.4g} -> {value:.4g} ({constant.what})"
    for refused in each.fit.refused:
        yield f"  {refused.name} stays: {refused.reason}{each.pulled_text(refused)}"
