"""A whole calibration: its constants, and the errors of predictions before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.calibration.fitting.fitted_constants import Constant, calibration_of
from meshwright.planner.calibration.fitting.least_squares import (
    FittedConstants,
    UnfittedConstant,
    fit,
)
from meshwright.planner.calibration.fitting.runs import Observed, common_constants
from meshwright.planner.calibration.scores.statistics import quantile
from meshwright.planner.documents.profile import Calibration
from meshwright.planner.errors import DocumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One quantity's fit, and the runs it is of."""

    quantity: str
    constants: tuple[Constant, ...]
    runs: tuple[str, ...]
    fit: FittedConstants

    def pulled_text(self, refused: UnfittedConstant) -> str:
        """Return the runs that pull a constant out of its bounds, in brackets; else nothing."""
        names = ", ".join(self.runs[i] for i in refused.pulled_by)
        return f" (pulled by {names})" if names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Calibration of a profile, with the fits that it comes from."""

    calibration: Calibration
    fits: tuple[Fitted, ...]


def calibrate(observed: Sequence[Observed], *, source: str) -> Calibrated:
    """Fit a cluster's constants to runs on it; refuse where no constant can be determined."""
    if not observed:
        raise DocumentError(
            "runs",
            "none has a step time or reserved memory that can be predicted; "
            "give tables or launches with either",
        )
    constants = common_constants(observed)
    timed = [run for run in observed if run.step_s]
    held = [run for run in observed if run.memory_bytes]
    fits = []
    if timed:
        chosen = [c for c in constants if not c.of_memory]

        def seconds(index: int, values: Mapping[str, float]) -> float:
            return timed[index].seconds(values)

        fitted = fit(chosen, [run.step_s or 0.0 for run in timed], seconds)
        fits.append(_fit_of_quantity("step time", chosen, timed, fitted))
    if held:
        chosen = [c for c in constants if c.of_memory]

        def size(index: int, values: Mapping[str, float]) -> float:
            return held[index].bytes(values)

        fitted = fit(chosen, [run.memory_bytes or 0.0 for run in held], size)
        fits.append(_fit_of_quantity("peak memory", chosen, held, fitted))
    values = {name: value for each in fits for name, value in each.fit.values.items()}
    if not values:
        reasons = "; ".join(
            f"{r.name}: {r.reason}{each.pulled_text(r)}" for each in fits for r in each.fit.refused
        )
        raise DocumentError(
            "runs",
            f"tell no constant of the cluster ({reasons}); "
            "add runs on more ranks, nodes or micro-batches",
        )
    left_out = [error for each in fits[:1] for error in each.fit.left_out]
    sizes = sorted(abs(math.log1p(max(error, -0.99))) for error in left_out)
    calibration = calibration_of(
        values,
        accelerator=observed[0].cluster.groups[0].accelerator.name,
        spread=quantile(sizes, 0.8) if sizes else 0.0,
        runs=len(observed),
        source=source,
    )
    return Calibrated(
        calibration=Calibration.model_validate(calibration.model_dump()), fits=tuple(fits)
    )


def _fit_of_quantity(
    quantity: str, constants: Sequence[Constant], runs: Sequence[Observed], fitted: FittedConstants
) -> Fitted:
    return Fitted(
        quantity=quantity,
        constants=tuple(constants),
        runs=tuple(run.name for run in runs),
        fit=fitted,
    )


def calibrated_json(result: Calibrated) -> dict[str, Any]:
    """Return the output of `calibrate --json`; errors are fractions."""
    return {
        "calibration": result.calibration.model_dump(mode="json", exclude_none=True),
        "quantities": {each.quantity: _quantity(each) for each in result.fits},
    }


def _quantity(each: Fitted) -> dict[str, Any]:
    usual = {c.name: c.usual for c in each.constants}
    return {
        "runs": len(each.runs),
        "constants": {
            name: {"before": usual[name], "after": value} for name, value in each.fit.values.items()
        },
        "refused": {
            refused.name: {
                "reason": refused.reason,
                "pulled_by": [each.runs[i] for i in refused.pulled_by],
            }
            for refused in each.fit.refused
        },
        "errors": {
            "before": errors(each.fit.before),
            "after": errors(each.fit.after),
            "left_out": errors(each.fit.left_out),
        },
    }


def errors(signed: Sequence[float]) -> dict[str, float]:
    """Return median, mean and 90th percentile of absolute errors, and their bias."""
    sizes = sorted(abs(error) for error in signed)
    return {
        "median": quantile(sizes, 0.5),
        "mean": sum(sizes) / len(sizes),
        "p90": quantile(sizes, 0.9),
        "bias": sum(signed) / len(signed),
    }
