"""The command `run`: a user's own script on the ranks of a plan, beside what was predicted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.inputs import machine_of, need_torch
from planner import document
from planner.errors import MeshwrightError
from planner.plan import Plan
from planner.predict import predict as predict_plan
from planner.shown import lines
from planner.units import file_name

if TYPE_CHECKING:
    from runtime.report import Comparison
    from runtime.script_run import ScriptRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A script's finished run, beside its prediction where the plan says enough for one."""

    run: ScriptRun
    rows: list[Comparison]


def run_script(
    plan_path: str,
    script: str,
    arguments: Sequence[str] = (),
    *,
    output: str | None = None,
    restarts: int = 0,
    quiet: bool = False,
) -> Ran:
    """Run a script on the plan's ranks of this machine; return what it did and what was predicted.

    The script makes a meshwright.Engine without naming a plan.  Where a rank fails, all are started
    again up to `restarts` times, and a script that calls `engine.resume` goes on where it saved.

    Raises LaunchError where the ranks failed for good.
    """
    need_torch("running a script")
    from runtime import script_run  # noqa: PLC0415 - the runtime

    wanted = document.read(Plan, plan_path)
    folder = Path(output) if output else Path("runs", file_name(wanted.model.name))
    done = script_run.run_script(
        Path(plan_path),
        Path(script),
        arguments,
        output=folder,
        restarts=restarts,
        say=lambda text: None if quiet else print(f"meshwright: {lines(text)}", file=sys.stderr),
    )
    return Ran(run=done, rows=_compared(wanted, done))


def _compared(wanted: Plan, done: ScriptRun) -> list[Comparison]:
    """Compare with the prediction of a plan that has its module's figures."""
    if wanted.model.graph is None:
        return []
    try:
        machine = machine_of(wanted.cluster, None)
        prediction = predict_plan(wanted, wanted.model.graph, machine, None)
    except MeshwrightError:
        return []  # the cluster's file is not where the script runs
    return done.comparison(prediction)
