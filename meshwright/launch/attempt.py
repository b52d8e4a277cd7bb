"""One attempt to train by a plan: ranks start, train and end; its decision is recorded."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.planner.costs.predict import predict as predict_plan
from meshwright.planner.documents.document import read
from meshwright.planner.documents.events import Decision, Expected, Reaction
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import HandedOver, LaunchError, MeshwrightError
from meshwright.planner.errors.shown import lines
from meshwright.planner.frameworks.native_limits import caveat
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_HOUR
from meshwright.planner.whatif.pricing.goodput import expected_of, save_figures
from meshwright.planner.whatif.pricing.survival import COPIES_SHARE, RunSeconds, SaveFigures
from meshwright.planner.whatif.study import Failures
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd, Verdict
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import account_of, append_record, events_file

if TYPE_CHECKING:
    from meshwright.runtime.launch.launch_config import Launch
    from meshwright.runtime.resilience.shared_memory import Slots
    from meshwright.runtime.run.run_report import Comparison, RunReport

LONG_RUN_HOURS = 1.0
"""A longer run reports when it is saved, if it is saved at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """A finished training run beside its prediction."""

    plan: Plan
    report: RunReport
    prediction: Prediction
    rows: list[Comparison]


def run_attempt(
    fit: LaunchablePlan, asked: Launch, ends: Sequence[RankEnd] = ()
) -> LaunchResult | None:
    """Launch a plan on the devices that are here; `ends` are those of former attempts."""
    from meshwright.runtime.launch.launch import launch as start  # noqa: PLC0415 - the runtime
    from meshwright.runtime.launch.preflight import cuda_devices  # noqa: PLC0415
    from meshwright.runtime.run.run_report import comparison  # noqa: PLC0415

    wanted, graph, machine = fit.plan, fit.graph, fit.machine
    if asked.again and read(Plan, fit.path).digest != wanted.digest:
        raise LaunchError(
            f"{fit.path}: has changed since the run began; put back what it was, and start the "
            "run again with --resume"
        )
    run, node_rank = asked.run, asked.node_rank
    devices = [group.devices_per_node for group in machine.groups for _ in range(group.nodes)]
    if node_rank.nodes > 1 and node_rank.nodes != len(devices):
        raise LaunchError(
            f"the plan is for {len(devices)} nodes ({wanted.cluster}), but {node_rank.source} "
            f"gives {node_rank.nodes}. Plan for these nodes, or add --replan"
        )
    warning = caveat(graph, machine)
    if warning is not None:
        raise LaunchError(f"{fit.path}: {warning.what}")
    accelerator = machine.groups[0].accelerator
    if accelerator.kind != "cpu" and not cuda_devices():
        raise LaunchError(
            f"the plan is for {wanted.cluster}, but this machine has no {accelerator.name}. "
            "Launch it on those devices, or plan for --cluster local"
        )
    prediction = predict_plan(wanted, graph, machine, fit.measured)
    measured_s = account_of(run.output) if run.output is not None else RunSeconds()
    figures = save_figures(
        Failures(), measured_s, parameters=graph.parameters, devices=wanted.ranks
    )
    saves = None
    if run.checkpoint is not None and run.checkpoint_every is None:
        saves = figures
        run = with_interval(run, saves, step_s=prediction.step_time_s, quiet=asked.quiet)

    def expect(steps: int) -> Expected:
        return expected_of(
            Failures(),
            measured_s,
            figures,
            steps=steps,
            step_s=prediction.step_time_s,
            every_steps=run.checkpoint_every or steps,
            elastic=asked.elastic,
            copies=COPIES_SHARE if asked.elastic else 0.0,
        )

    caution = None
    if not asked.again and not asked.dry_run:
        caution = host_memory_caution(fit, prediction, elastic=asked.elastic)
    report = start(
        replace(
            asked,
            plan=fit.path,
            run=run,
            model=graph,
            nodes=devices if node_rank.nodes > 1 else (),
            prediction=prediction,
            caution=caution,
            saves=saves,
            expect=expect if run.checkpoint is not None else None,
            # Copies are newer than the last comparison of replicas; checkpoints are compared first.
            copies=not any(end.spoils_copies for end in ends),
        )
    )
    if report is None:
        return None
    return LaunchResult(
        plan=wanted, report=report, prediction=prediction, rows=comparison(report, prediction)
    )


def host_memory_caution(
    fit: LaunchablePlan, prediction: Prediction, *, elastic: bool
) -> str | None:
    """Return what ranks and launcher of this node should take of host memory, if it is too much."""
    from meshwright.runtime.launch.host_memory_limits import (  # noqa: PLC0415 - the runtime
        available_bytes,
        memory_problem,
    )

    group = fit.machine.groups[0]
    on_host = group.accelerator.kind == "cpu"
    return memory_problem(
        ranks=min(fit.plan.ranks, group.devices_per_node),
        process_bytes=max(
            stage.host_bytes + (stage.peak_memory_bytes if on_host else 0.0)
            for stage in prediction.stages
        ),
        copies_bytes=copy_bytes(fit) if elastic else 0.0,
        available=available_bytes(),
    )


def with_interval(
    run: LaunchRun, saves: SaveFigures, *, step_s: float, quiet: bool = False
) -> LaunchRun:
    """Return a run with the interval of checkpoints that loses least, and report the interval."""
    hours = run.steps * step_s / SECONDS_PER_HOUR
    every = saves.every_steps(step_s)
    if not quiet and (hours > LONG_RUN_HOURS or every < run.steps):
        took = seconds_text(every * step_s)
        where = f"every {every} steps" if every < run.steps else "after the last step only"
        print(
            f"meshwright: checkpoints are saved {where}. One every {took} loses least time, at "
            f"{saves.failures_per_hour:.3g} failures an hour over {hours:.3g} hours. Measured "
            "saves will refine the interval; --checkpoint-every sets another",
            file=sys.stderr,
        )
    return run.model_copy(update={"checkpoint_every": every})


def log_decision(output: Path, verdict: Verdict, fit: LaunchablePlan, *, quiet: bool) -> None:
    """Record and report the reaction to an end."""
    start_s = None if verdict.reaction == "stop" else account_of(output).start_s
    decision = decision_record(verdict.reaction, verdict.why, fit, start_s, quiet=quiet)
    append_record(decision, events_file(output))


def decision_record(
    reaction: Reaction,
    why: str,
    fit: LaunchablePlan,
    predicted_s: float | None = None,
    *,
    quiet: bool,
) -> Decision:
    """Return and report the record of a reaction after which training goes on under a plan."""
    if not quiet:
        until = f"; training should resume in {seconds_text(predicted_s)}" if predicted_s else ""
        print(f"meshwright: {reaction}, because {why}{until}", file=sys.stderr)
    return Decision(
        at_unix_s=unix_now_s(),
        reaction=reaction,
        why=why,
        predicted_s=predicted_s,
        devices=fit.plan.ranks,
        plan=fit.plan.digest,
        plan_source=fit.source,
    )


def stop_if_preempted(noticed: Sequence[int], failed: LaunchError) -> None:
    """Raise HandedOver where a notice came while no ranks ran: all that counts is saved."""
    if noticed:
        raise HandedOver(
            f"a notice to stop came after a failure ({failed}); start again with --resume"
        )


def copy_bytes(fit: LaunchablePlan) -> float:
    """Return the bytes that copies of a node's ranks take, with those of a ward's; inf if unknown.

    A state has at most what parameters and optimizer take in the fullest stage.
    """
    from meshwright.runtime.resilience.shared_memory import GENERATIONS  # noqa: PLC0415 - the runtime

    try:
        prediction = predict_plan(fit.plan, fit.graph, fit.machine, fit.measured)
    except MeshwrightError:
        return math.inf
    state = max(
        stage.memory_parts.get("parameters", 0) + stage.memory_parts.get("optimizer", 0)
        for stage in prediction.stages
    )
    here = min(fit.plan.ranks, fit.machine.groups[0].devices_per_node)
    return state * here * GENERATIONS * (2 if fit.machine.devices > here else 1)


@contextlib.contextmanager
def copies_rescued(slots: Slots, folder: Path | None, *, quiet: bool) -> Iterator[None]:
    """Have the newest state on disk, whatever ends a run; an error then names the saved state."""
    from meshwright.runtime.launch.failure_report import RunEnded, saved_text  # noqa: PLC0415 - the runtime
    from meshwright.runtime.resilience.state_rescue import delete_older_copies, rescue  # noqa: PLC0415

    def print_notice(text: str) -> None:
        if not quiet:
            print(f"meshwright: {lines(text)}", file=sys.stderr)

    try:
        yield
    except BaseException as error:
        saved = rescue(slots, folder, say=print_notice) if folder is not None else None
        if saved is not None and isinstance(error, RunEnded):
            error.saved = saved_text(folder)
        raise
    if folder is not None:
        delete_older_copies(folder)
