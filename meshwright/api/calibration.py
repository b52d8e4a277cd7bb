"""`meshwright calibrate`: constants of a cluster, fitted to runs that were measured on it."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path

from meshwright.planner.calibration.fitting import runs
from meshwright.planner.calibration.fitting.fitted_calibration import Calibrated
from meshwright.planner.calibration.fitting.fitted_calibration import calibrate as fitted
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents import document
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Birth, Calibration, Profile
from meshwright.planner.errors import DocumentError

ANY_MODEL = "any"
RECORD = ("plan.yaml", "model.yaml", "report.json")


def calibrate(
    sources: Sequence[str],
    *,
    accelerator: str | None = None,
    profile: str | None = None,
    output: str | None = None,
) -> Calibrated:
    """Fit the constants of a cluster to tables of runs and to folders that `launch` wrote.

    The fitted constants go into a profile of their own, or into an earlier one of layers.
    """
    if not sources:
        raise DocumentError("runs", "are missing; give tables of runs or folders of launches")
    observed = [run for source in sources for run in _observed_runs(Path(source))]
    chosen = runs.runs_on(observed, accelerator)
    if observed and not chosen:
        raise DocumentError(
            "accelerator", f"is {accelerator}, but no run used it; name one that ran"
        )
    today = datetime.date.today().isoformat()
    names = ", ".join(Path(source).name for source in sources)
    result = fitted(chosen, source=f"calibrate of {today}, {len(chosen)} runs: {names}"[:200])
    if output is not None:
        document.write(_profile(result, profile, sources, today), output)
    return result


def _observed_runs(source: Path) -> list[runs.Observed]:
    """Return the runs of a table, or the one of a launch's folder."""
    if not document.is_folder(source):
        return runs.of_table(source)
    missing = [name for name in RECORD if not document.is_file(source / name)]
    if missing:
        raise DocumentError(
            "",
            f"lacks {', '.join(missing)}, which a launch writes; give the folder of a whole launch",
            file=str(source),
        )
    from meshwright.runtime.run.run_report import RunReport  # noqa: PLC0415 - the runtime

    plan = document.read(Plan, source / "plan.yaml")
    report = document.read(RunReport, source / "report.json")
    if report.step_time_s is None:
        raise DocumentError(
            "step_time_s", "is missing: the run was too short; train more steps", file=str(source)
        )
    model = document.read(ModelGraph, source / "model.yaml")
    cluster = resolve_cluster(plan.cluster)
    return [runs.of_launch(source.name, plan, model, cluster, report.step_time_s)]


def _profile(result: Calibrated, base: str | None, sources: Sequence[str], today: str) -> Profile:
    if base is not None:
        measured = document.read(Profile, base)
        return measured.model_copy(update={"calibration": result.calibration})
    return profile_of_any_model(
        result.calibration, command=f"meshwright calibrate {' '.join(sources)}", today=today
    )


def profile_of_any_model(
    fitted: Calibration, *, command: str, today: str, ranks: int = 1
) -> Profile:
    """Return constants of a cluster as a profile that is valid for any model."""
    return Profile(
        model=ANY_MODEL,
        model_digest=ANY_MODEL,
        birth=Birth(
            command=command[:200],
            date=today,
            host=platform.node() or "unknown",
            device=fitted.accelerator,
            ranks=ranks,
            threads_per_rank=1,
            software={"python": platform.python_version()},
        ),
        layers=(),
        calibration=fitted,
    )
