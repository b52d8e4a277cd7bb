"""The command `launch`: a plan run here, submitted as a job, or gone on with on fewer devices."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.inputs import (
    check_code,
    machine_of,
    need_torch,
    own_code,
    plan_model,
    profile_for,
)
from meshwright.cli.options import written
from meshwright.launch.fallback_plans import Book, BookEntry, BookKeeper
from meshwright.launch.replan import leave_out, planned_again
from meshwright.planner.costs.predict import predict as predict_plan
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.events import Decision, Expected, PlanSource, Reaction
from meshwright.planner.documents.model import ModelGraph, is_factory
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.profile import Profiles
from meshwright.planner.documents.units import file_name, seconds_text
from meshwright.planner.errors import DocumentError, HandedOver, LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.planner.frameworks.native_limits import caveat
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_HOUR
from meshwright.planner.whatif.pricing.goodput import expected_of, save_figures
from meshwright.planner.whatif.pricing.survival import COPIES_SHARE, RunSeconds, SaveFigures
from meshwright.planner.whatif.study import Failures
from meshwright.planner.whatif.what_if_changes import changed_cluster
from meshwright.runtime.launch.fork_server import Zygote
from meshwright.runtime.resilience.shared_memory import Slots
from meshwright.runtime.run.launch_options import HERE, LaunchRun, Where
from meshwright.runtime.run.locks_and_signals import signals_kept
from meshwright.runtime.run.recovery_policy import REPLANNED, VERDICTS, RankEnd, Verdict, verdict
from meshwright.runtime.run.run_folder import account_of, append_record, events_file

MEMORY_MARGIN = 0.03
"""Share by which a plan has less memory than one that ran out, where nobody knows how much."""
LONG_RUN_HOURS = 1.0
"""A longer run says when it is saved, if it is saved at all."""

if TYPE_CHECKING:
    from meshwright.launch.schedulers import Submission
    from meshwright.runtime.launch.failure_report import RankFailed
    from meshwright.runtime.launch.launch_config import Launch
    from meshwright.runtime.run.node_rank import NodeRank
    from meshwright.runtime.run.run_report import Comparison, RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A finished training run beside its prediction."""

    plan: Plan
    report: RunReport
    prediction: Prediction
    rows: list[Comparison]


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
) -> Launched | Submission | None:
    """Train by a plan; return what was predicted and what was measured.

    On several nodes each calls it, and the one with rank 0 gets the answer, the others none.
    `replan` goes on where devices are fewer than the plan's, or one is lost, under a plan for those
    that are left.
    `elastic` looks for ranks that hang, and does about each end what the table of verdicts says:
    the ranks are started again, or those that are left go on as with `replan`, or it stops.
    A plan of a user's own file runs it, if the file and what it imports beside it are those that
    were planned, or `trust_code` takes them as they are.
    Where a scheduler starts it, the job is written and submitted; a dry run gives its text alone.
    On `where.hosts` it is started from here, and the answer is printed as they give it.
    """
    if replan and run.checkpoint is None:
        raise DocumentError("replan", "continues from checkpoints: add --checkpoint FOLDER")
    if elastic and run.checkpoint is None:
        raise DocumentError("elastic", "continues from checkpoints: add --checkpoint FOLDER")
    more = {"replan": replan, "elastic": elastic, "profile": profile, "trust_code": trust_code}
    if where.on != "local":
        return _submitted(plan_path, run, where, more, dry_run=dry_run)
    where.refuse_job()
    if where.hosts is not None:
        _on_hosts(plan_path, run, where, {**more, "json": quiet}, dry_run=dry_run)
        return None
    need_torch("launching a plan")
    from meshwright.runtime.launch.failure_report import RankFailed  # noqa: PLC0415 - the runtime
    from meshwright.runtime.launch.launch_config import Launch  # noqa: PLC0415

    node_rank = where.node_rank()
    fit = LaunchablePlan.of(plan_path, profile)
    if not dry_run:
        fit = fit.with_code(trusted=trust_code)
    elif not trust_code:
        check_code(fit.graph, plan_path)
    goes_on = run.model_copy(update={"resume": True, "or_start": True})
    shrunk: Decision | None = None
    if (replan or elastic) and (left := fit.left(node_rank)) is not None:
        given, fit, run = fit, fit.again(left, run, quiet=quiet), goes_on
        shrunk = _shrunk(given, left, fit, node_rank, quiet=quiet)
    if elastic and node_rank.nodes > 1 and not dry_run:
        from meshwright.launch.multi_node import on_nodes  # noqa: PLC0415 - the runtime

        return on_nodes(fit, run, node_rank, shrunk, quiet=quiet)
    table = VERDICTS if elastic else REPLANNED if replan and node_rank.nodes == 1 else ()
    ends: list[RankEnd] = []
    planned = fit
    with (
        signals_kept() as noticed,
        Zygote() as zygote,
        Slots() as slots,
        BookKeeper(planned, run) as keeper,
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
                return launched(fit, replace(asked, run=run), ends)
            except RankFailed as failed:
                asked = replace(asked, before=None, again=True)
                ends += [] if failed.end is None else [failed.end]
                found = verdict(ends, table, devices=fit.plan.mesh.devices) if ends else None
                found = _to_do(found, failed, fit, quiet=quiet)
                fit, run = _reacted(failed, found, fit, planned, run, quiet=quiet), goes_on
                if found.reaction == "replan":
                    planned = fit  # with less memory, from here on
                decided(failed.output, found, fit, quiet=quiet)
                hand_over(noticed, failed)


def _shrunk(
    given: LaunchablePlan, left: int, fit: LaunchablePlan, node_rank: NodeRank, *, quiet: bool
) -> Decision:
    """Return why a run begins under another plan than the given one, and say it."""
    cluster, nodes = given.plan.cluster, given.nodes
    if node_rank.nodes != nodes:
        here = (
            f"the plan is for {nodes} nodes ({cluster}), and this launch is on {left} "
            "(--nodes, --hosts or a scheduler's job tell of more)"
        )
    else:
        here = f"the plan is for {given.plan.mesh.devices} devices ({cluster}), and {left} are here"
    return _decision("shrink", here, fit, quiet=quiet)


def hand_over(noticed: Sequence[int], failed: LaunchError) -> None:
    """Raise HandedOver where a notice came while no ranks ran: all that counts is saved."""
    if noticed:
        raise HandedOver(f"a notice came after this: {failed}; start it again with --resume")


def _to_do(
    found: Verdict | None, failed: RankFailed, fit: LaunchablePlan, *, quiet: bool
) -> Verdict:
    """Return what is done; raise how the run ended where that is nothing, and say why."""
    if found is None:
        raise failed
    if found.reaction == "stop":
        decided(failed.output, found, fit, quiet=quiet)
        raise failed
    return found


def _reacted(
    failed: RankFailed,
    found: Verdict,
    fit: LaunchablePlan,
    planned: LaunchablePlan,
    run: LaunchRun,
    *,
    quiet: bool,
) -> LaunchablePlan:
    """Return what is launched next; the book is about what was `planned` first."""
    print(f"meshwright: {lines(failed.lead)}", file=sys.stderr)
    if found.reaction == "replan" and failed.end is not None:
        return fit.with_less_memory(failed.end, run, quiet=quiet)
    if found.reaction != "shrink":
        return fit
    devices = fit.plan.mesh.devices
    if fit.machine.groups[0].accelerator.kind != "cpu":
        leave_out(failed.local_rank, devices)
    return planned.again(devices - 1, run, quiet=quiet)


def decided(output: Path, found: Verdict, fit: LaunchablePlan, *, quiet: bool) -> None:
    """Write down what is done about an end, and say it."""
    start_s = None if found.reaction == "stop" else account_of(output).start_s
    decision = _decision(found.reaction, found.why, fit, start_s, quiet=quiet)
    append_record(decision, events_file(output))


def _decision(
    reaction: Reaction,
    why: str,
    fit: LaunchablePlan,
    predicted_s: float | None = None,
    *,
    quiet: bool,
) -> Decision:
    """Return the record of a reaction after which training goes on under a plan, and say it."""
    if not quiet:
        until = f"; ranks should train in {seconds_text(predicted_s)}" if predicted_s else ""
        print(f"meshwright: {reaction}, because {why}{until}", file=sys.stderr)
    return Decision(
        at_unix_s=time.time(),
        reaction=reaction,
        why=why,
        predicted_s=predicted_s,
        devices=fit.plan.mesh.devices,
        plan=fit.plan.digest,
        plan_source=fit.source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchablePlan:
    """A plan, its model, and the machine that it is for."""

    path: str
    plan: Plan
    graph: ModelGraph
    machine: ClusterSpec
    measured: Profiles
    profile: str | None = None
    """The file that has what was measured, where one was named."""
    source: PlanSource = "given"

    @classmethod
    def of(cls, path: str, profile: str | None) -> LaunchablePlan:
        """Read a plan with what it names."""
        plan = document.read(Plan, path)
        graph = plan_model(plan, path)
        _refuse_foreign(plan, path)
        measured = profile_for(graph, profile)
        machine = machine_of(plan.cluster, measured)
        return cls(
            path=path, plan=plan, graph=graph, machine=machine, measured=measured, profile=profile
        )

    def with_code(self, *, trusted: bool) -> LaunchablePlan:
        """Run the user's file if the model is one; it must still make what was planned."""
        if not is_factory(self.plan.model.source):
            return self
        try:
            graph = own_code(self.graph, self.path, seq_len=self.plan.seq_len, trusted=trusted)
            self.plan.check_model(graph)
        except DocumentError as error:
            raise (error if error.file else error.in_file(self.path)) from error
        return replace(self, graph=graph)

    def left(self, node_rank: NodeRank) -> int | None:
        """Return how many nodes are there, or devices of one node; None if as many as planned."""
        from meshwright.runtime.launch.preflight import cuda_devices  # noqa: PLC0415 - the runtime

        planned = self.nodes
        if node_rank.nodes != planned:
            return node_rank.nodes if node_rank.nodes < planned else None
        on_cpu = self.machine.groups[0].accelerator.kind == "cpu"
        if planned > 1 or on_cpu:
            return None
        here: int = cuda_devices()
        return here if 0 < here < self.plan.mesh.devices else None

    @property
    def nodes(self) -> int:
        """Nodes that the plan is for."""
        return sum(group.nodes for group in self.machine.groups)

    def at(self, path: str) -> LaunchablePlan:
        """Return the same training under another plan of its own."""
        plan = document.read(Plan, path)
        machine = machine_of(plan.cluster, self.measured)
        return replace(self, path=path, plan=plan, machine=machine, source="given")

    def again(
        self, left: int, run: LaunchRun, *, each: int | None = None, quiet: bool
    ) -> LaunchablePlan:
        """Return the same training planned for what is left: out of the book, or solved now.

        That is `left` nodes, with `each` devices where that is given, or devices of one node.
        """
        entry, source = self.booked(left, run, each=each)
        return self._told(Path(entry.path), source=source, quiet=quiet)

    def booked(
        self, left: int, run: LaunchRun, *, each: int | None = None
    ) -> tuple[BookEntry, PlanSource]:
        """Return what the book has for what is left, solved now where it lacks."""
        book = Book(run.checkpoint or Path())
        known = book.entry(self.plan, left, each)
        return (known, "book") if known else (book.solve(self, left, each), "solved")

    def with_less_memory(self, end: RankEnd, run: LaunchRun, *, quiet: bool) -> LaunchablePlan:
        """Return the same training planned for devices that count as smaller, since it ran out.

        They have less by what the rank needed over what was predicted, and so little at least that
        the plan that ran out does not fit.  LaunchError where no plan does.
        """
        prediction = predict_plan(self.plan, self.graph, self.machine, self.measured)
        if end.on_host:
            smaller = changed_cluster(self.machine, "host_memory", 1 - MEMORY_MARGIN)
        else:
            has = min(group.accelerator.memory_bytes for group in self.machine.groups)
            peak = max(stage.peak_memory_bytes for stage in prediction.stages)
            room = min(has / (end.needed or 1.0), peak) * (1 - MEMORY_MARGIN)
            smaller = changed_cluster(self.machine, "memory", room / has)
        if smaller is None:
            raise LaunchError(
                f"{self.machine.name}: nothing says how much memory its hosts have; plan again "
                "for less"
            )
        path = planned_again(
            self.movable(), self.graph, [smaller], self.measured, folder=run.checkpoint or Path()
        )
        return self._told(path, source="solved", quiet=quiet)

    def movable(self) -> Plan:
        """Return the plan with its model's file named from anywhere: a new plan lies elsewhere."""
        from meshwright.runtime.launch.preflight import found_here  # noqa: PLC0415 - the runtime

        model = found_here(self.plan.model, self.graph, self.path)
        return self.plan.model_copy(update={"model": model})

    def _told(self, path: Path, *, source: PlanSource, quiet: bool) -> LaunchablePlan:
        fit = replace(self.at(str(path)), source=source)
        if not quiet:
            print(
                f"meshwright: planned again for {fit.machine.devices} of {self.machine.devices} "
                f"devices: {fit.plan.layout.text()}, "
                f"{'found' if source == 'book' else 'written'} in {path}",
                file=sys.stderr,
            )
        return fit


def _refuse_foreign(wanted: Plan, path: str) -> None:
    """Refuse a plan for another framework before anything else is looked at."""
    from meshwright.runtime.engine.unsupported import foreign  # noqa: PLC0415 - the runtime

    other = foreign(wanted)
    if other:
        raise LaunchError(f"{path}: {other}")


def launched(fit: LaunchablePlan, asked: Launch, ends: Sequence[RankEnd] = ()) -> Launched | None:
    """Launch a plan on the devices that are here; `ends` are those of former attempts."""
    from meshwright.runtime.launch.launch import launch as start  # noqa: PLC0415 - the runtime
    from meshwright.runtime.launch.preflight import cuda_devices  # noqa: PLC0415
    from meshwright.runtime.run.run_report import comparison  # noqa: PLC0415

    wanted, graph, machine = fit.plan, fit.graph, fit.machine
    run, node_rank = asked.run, asked.node_rank
    devices = [group.devices_per_node for group in machine.groups for _ in range(group.nodes)]
    if node_rank.nodes > 1 and node_rank.nodes != len(devices):
        raise LaunchError(
            f"the plan is for {len(devices)} nodes ({wanted.cluster}), and {node_rank.source} says "
            f"that there are {node_rank.nodes}; plan again for what is there, or add --replan"
        )
    warning = caveat(graph, machine)
    if warning is not None:
        raise LaunchError(f"{fit.path}: {warning.what}")
    accelerator = machine.groups[0].accelerator
    if accelerator.kind != "cpu" and not cuda_devices():
        raise LaunchError(
            f"the plan is for {wanted.cluster}, and this machine has no {accelerator.name}; "
            "launch it where the devices are, or plan again for --cluster local"
        )
    prediction = predict_plan(wanted, graph, machine, fit.measured)
    known = account_of(run.output) if run.output is not None else RunSeconds()
    figures = save_figures(
        Failures(), known, parameters=graph.parameters, devices=wanted.mesh.devices
    )
    saves = None
    if run.checkpoint is not None and run.checkpoint_every is None:
        saves = figures
        run = with_interval(run, saves, step_s=prediction.step_time_s, quiet=asked.quiet)

    def expect(steps: int) -> Expected:
        return expected_of(
            Failures(),
            known,
            figures,
            steps=steps,
            step_s=prediction.step_time_s,
            every_steps=run.checkpoint_every or steps,
            elastic=asked.elastic,
            copies=COPIES_SHARE if asked.elastic else 0.0,
        )

    report = start(
        replace(
            asked,
            plan=fit.path,
            run=run,
            model=graph,
            nodes=devices if node_rank.nodes > 1 else (),
            prediction=prediction,
            saves=saves,
            expect=expect if run.checkpoint is not None else None,
            # Copies are newer than the last comparison of replicas; checkpoints are compared first.
            copies=all(end.cause != "corruption" for end in ends),
        )
    )
    if report is None:
        return None
    return Launched(
        plan=wanted, report=report, prediction=prediction, rows=comparison(report, prediction)
    )


def with_interval(
    run: LaunchRun, saves: SaveFigures, *, step_s: float, quiet: bool = False
) -> LaunchRun:
    """Return a run with the interval of checkpoints at which the least is lost, and say it."""
    hours = run.steps * step_s / SECONDS_PER_HOUR
    every = saves.every_steps(step_s)
    if not quiet and (hours > LONG_RUN_HOURS or every < run.steps):
        took = seconds_text(every * step_s)
        where = f"every {every} steps" if every < run.steps else "after the last step alone"
        print(
            f"meshwright: checkpoints are saved {where}: the least is lost at one every {took}, "
            f"with {saves.failures_per_hour:.3g} failures an hour, in {hours:.3g} hours; this is "
            "computed again as saves are measured, and --checkpoint-every sets another interval",
            file=sys.stderr,
        )
    return run.model_copy(update={"checkpoint_every": every})


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
    _refuse_foreign(wanted, plan_path)
    command = HostCommand.of(
        machine_of(wanted.cluster, None),
        ("launch", plan_path, *written({**run.model_dump(), **more})),
        (plan_path,),
        spares=bool(more["elastic"]),
        rendezvous=where.rendezvous,
    )
    on_hosts(hosts_of(where.told_hosts), command, dry_run=dry_run)


def _submitted(
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
    _refuse_foreign(wanted, plan_path)
    machine = machine_of(wanted.cluster, None)
    graph = plan_model(wanted, plan_path)
    if not more["trust_code"]:
        check_code(graph, plan_path)
    warning = caveat(graph, machine)
    if warning is not None:
        raise LaunchError(f"{plan_path}: {warning.what}")
    options = tuple(written({**run.model_dump(), **more}))
    saved = run.checkpoint is not None
    command = Command(before=("launch",), options=options, goes_on=saved, handed_over=saved)
    folder = run.output or Path("runs", file_name(wanted.model.name))
    return submit(plan_path, wanted, machine, command, where, folder=folder, dry_run=dry_run)
