"""The command `launch`: a plan run here, submitted as a job, or gone on with on fewer devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.inputs import check_code, machine_of, need_torch, plan_model
from meshwright.api.option_words import option_words
from meshwright.launch.attempt import (
    LaunchResult,
    copies_rescued,
    copy_bytes,
    decision_record,
    log_decision,
    run_attempt,
    stop_if_preempted,
)
from meshwright.launch.fallback_plans import FallbackSolver, fallback
from meshwright.launch.launchable_plan import LaunchablePlan, refuse_foreign
from meshwright.launch.replan import leave_out
from meshwright.planner.documents import document
from meshwright.planner.documents.events import Decision
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.units import file_name
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.planner.frameworks.native_limits import caveat
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.run import run_clock
from meshwright.runtime.run.launch_options import HERE, LaunchRun, Where
from meshwright.runtime.run.locks_and_signals import signals_kept
from meshwright.runtime.run.recovery_policy import REPLANNED, VERDICTS, RankEnd, Verdict
from meshwright.runtime.run.recovery_policy import verdict as judge

if TYPE_CHECKING:
    from meshwright.launch.schedulers import Submission
    from meshwright.runtime.launch.failure_report import RankFailed
    from meshwright.runtime.run.node_rank import NodeRank


def launch(
    plan_path: str,
    run: LaunchRun,
    where: Where = HERE,
    *,
    replan: bool = False,
    elastic: bool = False,
    profile: str | None = None,
    dry_run: bool = False,
    trust_code: bool = False,
    quiet: bool = False,
) -> LaunchResult | Submission | None:
    """Train by a plan; return what was predicted and what was measured.

    On several nodes each calls it, and the one with rank 0 gets the answer, the others none.
    `replan` goes on where devices are fewer than the plan's, or one is lost, under a plan for those
    that are left.  `elastic` looks for ranks that hang, and reacts to each end by the table of
    verdicts: the ranks are started again, or those that are left go on as with `replan`, or it
    stops.  A plan of a user's own file runs it, if the file and what it imports beside it are those
    that were planned, or `trust_code` takes them as they are.  Where a scheduler starts it, the job
    is written and submitted; a dry run gives its text alone.  On `where.hosts` it is started from
    here, and the answer is printed as they give it.
    """
    if replan and run.checkpoint is None:
        raise DocumentError("replan", "continues from checkpoints: add --checkpoint FOLDER")
    if elastic and run.checkpoint is None:
        raise DocumentError("elastic", "continues from checkpoints: add --checkpoint FOLDER")
    if run.replace_stragglers and not elastic:
        raise DocumentError("replace-stragglers", "needs spares: add --elastic")
    more: dict[str, Any] = {
        "replan": replan,
        "elastic": elastic,
        "profile": profile,
        "trust_code": trust_code,
    }
    if where.on == "ray":
        _on_ray(plan_path, run, where, {**more, "json": quiet}, dry_run=dry_run)
        return None
    if where.on != "local":
        return _submit_job(plan_path, run, where, more, dry_run=dry_run)
    where.refuse_job()
    if where.hosts is not None:
        _on_hosts(plan_path, run, where, {**more, "json": quiet}, dry_run=dry_run)
        return None
    need_torch("launching a plan")
    from meshwright.runtime.checkpoint import object_store  # noqa: PLC0415 - the runtime

    if object_store.address_of(run.checkpoint) is not None and not dry_run:
        with object_store.spooled(run.checkpoint) as spool:
            run = run.model_copy(update={"checkpoint": spool})
            return _launch_here(plan_path, run, where, more, dry_run=False, quiet=quiet)
    return _launch_here(plan_path, run, where, more, dry_run=dry_run, quiet=quiet)


def _launch_here(
    plan_path: str,
    run: LaunchRun,
    where: Where,
    more: Mapping[str, Any],
    *,
    dry_run: bool,
    quiet: bool,
) -> LaunchResult | None:
    """Train as one of the nodes of a run; its checkpoints are in a folder of this node."""
    from meshwright.runtime.launch.failure_report import RankFailed  # noqa: PLC0415 - the runtime
    from meshwright.runtime.launch.launch_config import Launch  # noqa: PLC0415

    run_clock.begin()
    replan, elastic = bool(more["replan"]), bool(more["elastic"])
    node_rank = where.node_rank()
    fit = LaunchablePlan.read(plan_path, more["profile"])
    if not dry_run:
        fit = fit.with_code(trusted=bool(more["trust_code"]))
    elif not more["trust_code"]:
        check_code(fit.graph, plan_path)
    goes_on = run.model_copy(update={"resume": True, "or_start": True})
    shrunk: Decision | None = None
    if (replan or elastic) and (left := fit.remaining(node_rank)) is not None:
        given, fit, run = fit, fallback(fit, left, run, quiet=quiet), goes_on
        shrunk = shrink_record(given, left, fit, node_rank, quiet=quiet)
    if run.preflight and not dry_run:
        from meshwright.launch.device_checks import check_before_run  # noqa: PLC0415 - takes torch

        check_before_run(fit, run, node_rank, quiet=quiet)
    if elastic and node_rank.nodes > 1 and not dry_run:
        from meshwright.launch.multi_node import on_nodes  # noqa: PLC0415 - the runtime

        on_all: LaunchResult | None = on_nodes(fit, run, node_rank, shrunk, quiet=quiet)
        return on_all
    table = VERDICTS if elastic else REPLANNED if replan and node_rank.nodes == 1 else ()
    ends: list[RankEnd] = []
    planned = fit
    with (
        signals_kept() as noticed,
        Zygote() as zygote,
        Slots(
            run.checkpoint if elastic else None, expected_bytes=copy_bytes(fit) if elastic else 0
        ) as slots,
        copies_rescued(slots, run.checkpoint, quiet=quiet),
        FallbackSolver(planned, run) as keeper,
    ):
        asked = Launch(
            fit.path,
            run,
            dry_run=dry_run,
            quiet=quiet,
            node_rank=node_rank,
            elastic=elastic,
            zygote=zygote if elastic else None,
            slots=slots if elastic else None,
            begun=keeper.begin if elastic else None,
            before=shrunk,
        )
        while True:
            try:
                return run_attempt(fit, replace(asked, run=run), ends)
            except RankFailed as failed:
                asked = replace(asked, before=None, again=True)
                ends += [] if failed.end is None else [failed.end]
                judged = judge(ends, table, devices=fit.plan.ranks) if ends else None
                verdict = _raise_or_react(judged, failed, fit, quiet=quiet)
                fit, run = _next_plan(failed, verdict, fit, planned, run, quiet=quiet), goes_on
                if verdict.reaction == "replan":
                    planned = fit  # with less memory, from here on
                log_decision(failed.output, verdict, fit, quiet=quiet)
                stop_if_preempted(noticed, failed)


def shrink_record(
    given: LaunchablePlan, left: int, fit: LaunchablePlan, node_rank: NodeRank, *, quiet: bool
) -> Decision:
    """Return and report why a run begins under another plan than the given one."""
    cluster, nodes = given.plan.cluster, given.nodes
    if node_rank.nodes != nodes:
        here = (
            f"the plan is for {nodes} nodes ({cluster}), and this launch is on {left} "
            "(--nodes, --hosts or a scheduler's job tell of more)"
        )
    else:
        here = f"the plan is for {given.plan.ranks} devices ({cluster}), and {left} are here"
    return decision_record("shrink", here, fit, quiet=quiet)


def _raise_or_react(
    verdict: Verdict | None, failed: RankFailed, fit: LaunchablePlan, *, quiet: bool
) -> Verdict:
    """Return the reaction to an end; raise the end where there is none, with its reason."""
    if verdict is None:
        raise failed
    if verdict.reaction == "stop":
        log_decision(failed.output, verdict, fit, quiet=quiet)
        raise failed
    return verdict


def _next_plan(
    failed: RankFailed,
    verdict: Verdict,
    fit: LaunchablePlan,
    planned: LaunchablePlan,
    run: LaunchRun,
    *,
    quiet: bool,
) -> LaunchablePlan:
    """Return the plan of the next attempt; the book is about what was `planned` first."""
    print(f"meshwright: {lines(failed.lead)}", file=sys.stderr)
    if verdict.reaction == "replan" and failed.end is not None:
        return fit.with_less_memory(failed.end, run, quiet=quiet)
    if verdict.reaction != "shrink":
        return fit
    devices = fit.plan.ranks
    if fit.machine.groups[0].accelerator.kind != "cpu":
        leave_out(failed.local_rank, devices)
    return fallback(planned, devices - 1, run, quiet=quiet)


def _on_hosts(
    plan_path: str,
    run: LaunchRun,
    where: Where,
    more: Mapping[str, object],
    *,
    dry_run: bool,
) -> None:
    """Launch a plan on hosts over ssh, with these options."""
    from meshwright.launch.ssh import HostCommand, hosts_of, on_hosts  # noqa: PLC0415 - one way needs it

    wanted = document.read(Plan, plan_path)
    wanted.training.with_settings(run.training)
    refuse_foreign(wanted, plan_path)
    command = HostCommand.of(
        machine_of(wanted.cluster, None),
        ("launch", plan_path, *option_words({**run.model_dump(), **more})),
        (plan_path,),
        spares=bool(more["elastic"]),
        rendezvous=where.rendezvous,
    )
    on_hosts(hosts_of(where.told_hosts), command, dry_run=dry_run)


def _on_ray(
    plan_path: str,
    run: LaunchRun,
    where: Where,
    more: Mapping[str, object],
    *,
    dry_run: bool,
) -> None:
    """Launch a plan on the nodes of a Ray cluster, with these options."""
    from meshwright.launch.ray_cluster import on_ray  # noqa: PLC0415 - one way needs it
    from meshwright.launch.ssh import HostCommand  # noqa: PLC0415

    if where.hosts is not None:
        raise DocumentError("hosts", "are started over ssh, and Ray has its own; leave one out")
    if run.checkpoint is not None and not run.resume:  # a run that is started again goes on
        run = run.model_copy(update={"resume": True, "or_start": True})
    wanted = document.read(Plan, plan_path)
    wanted.training.with_settings(run.training)
    refuse_foreign(wanted, plan_path)
    machine = machine_of(wanted.cluster, None)
    if len(machine.groups) > 1:
        raise LaunchError(
            f"on: {wanted.cluster} has several kinds of nodes, which Ray does not tell apart here; "
            "start the launch on each with --hosts"
        )
    command = HostCommand.of(
        machine,
        ("launch", plan_path, *option_words({**run.model_dump(), **more})),
        (plan_path,),
        spares=False,
        rendezvous=where.rendezvous,
    )
    (group,) = machine.groups
    devices, saved = group.devices_per_node, run.checkpoint
    on_ray(command, where.job, devices=devices, saved=saved, dry_run=dry_run)


def _submit_job(
    plan_path: str, run: LaunchRun, where: Where, more: Mapping[str, object], *, dry_run: bool
) -> Submission:
    """Write the job that launches a plan with these options on all its nodes."""
    from meshwright.launch.schedulers import Command, submit  # noqa: PLC0415 - one way to launch needs it
    from meshwright.runtime.data.corpus import refuse_structured  # noqa: PLC0415 - the runtime

    for named in (run.data, run.evaluate):
        if named is not None:
            refuse_structured(named)
    if run.checkpoint is not None and not run.resume:  # a job that is started again goes on
        run = run.model_copy(update={"resume": True, "or_start": True})
    wanted = document.read(Plan, plan_path)
    wanted.training.with_settings(run.training)
    refuse_foreign(wanted, plan_path)
    machine = machine_of(wanted.cluster, None)
    graph = plan_model(wanted, plan_path)
    if not more["trust_code"]:
        check_code(graph, plan_path)
    warning = caveat(graph, machine)
    if warning is not None:
        raise LaunchError(f"{plan_path}: {warning.what}")
    options = tuple(option_words({**run.model_dump(), **more}))
    saved = run.checkpoint is not None
    command = Command(before=("launch",), options=options, goes_on=saved, handed_over=saved)
    folder = run.output or Path("runs", file_name(wanted.model.name))
    return submit(plan_path, wanted, machine, command, where, folder=folder, dry_run=dry_run)
