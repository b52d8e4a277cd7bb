"""The command `run`: a user's own script on the ranks of a plan, beside what was predicted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.inputs import machine_of, need_torch, plan_model, profile_for
from meshwright.api.option_words import option_words
from meshwright.launch.schedulers import Command, Submission, submit
from meshwright.planner.costs.predict import predict as predict_plan
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Profiles
from meshwright.planner.documents.units import file_name
from meshwright.planner.errors import DocumentError, LaunchError, MeshwrightError
from meshwright.planner.errors.shown import lines
from meshwright.runtime.run.launch_options import HERE, SCALE_UP_AFTER_S, LaunchRun, Where

if TYPE_CHECKING:
    from meshwright.launch.launchable_plan import LaunchablePlan
    from meshwright.runtime.launch.launch_config import Launch
    from meshwright.runtime.launch.script_run import ScriptRun
    from meshwright.runtime.run.node_rank import NodeRank
    from meshwright.runtime.run.recovery_policy import RankEnd
    from meshwright.runtime.run.run_report import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """A script's finished run, beside its prediction where the plan suffices for one."""

    run: ScriptRun
    rows: list[Comparison]


def run_script(
    plan_path: str | None,
    script: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int | None = None,
    output: str | None = None,
    restarts: int = 0,
    elastic: bool = False,
    checkpoint: str | None = None,
    checkpoint_every: int | None = None,
    scale_up_after: float = SCALE_UP_AFTER_S,
    replace_stragglers: bool = False,
    profile: str | None = None,
    where: Where = HERE,
    dry_run: bool = False,
    quiet: bool = False,
) -> ScriptResult | Submission | None:
    """Run a script on the plan's ranks; return what it did and what was predicted.

    The script makes a meshwright.Engine without naming a plan.  Where a rank fails, all are started
    again up to `restarts` times, and a script that calls `engine.resume` goes on where it saved.
    With a folder `checkpoint` its Engine saves by itself, after so many steps or where the least is
    lost, once the script has called `engine.resume(extra=...)`.  `elastic` does about each end what
    `launch` does with it, instead of `restarts`.
    A `profile` of its layers makes the prediction.
    On several nodes each calls it, and the one with rank 0 gets the answer, the others none.
    Where a scheduler starts it, the job is written and submitted; a dry run gives its text alone.
    On `where.hosts` it is started from here, and the answer is printed as they give it.

    Raises LaunchError where the ranks failed for good.
    """

    def print_line(text: str) -> None:
        if not quiet:
            print(f"meshwright: {lines(text)}", file=sys.stderr)

    if ranks is not None:
        plan_path = _plan_made(plan_path, script, arguments, ranks, output, where, print_line)
    plan_path = plan_path or "plan.yaml"
    if not document.is_file(plan_path) and ranks is None:
        raise LaunchError(
            f"{plan_path}: there is no plan; write one with `meshwright plan`, or let "
            "`meshwright run --ranks N SCRIPT` plan the script for N ranks of this machine"
        )
    wanted = document.read(Plan, plan_path)
    folder = Path(output) if output else Path("runs", file_name(wanted.model.name))
    _check_survival(elastic=elastic, checkpoint=checkpoint, every=checkpoint_every)
    if replace_stragglers and not elastic:
        raise DocumentError("replace-stragglers", "needs spares: add --elastic")
    more: dict[str, object] = {
        "elastic": elastic,
        "checkpoint": checkpoint,
        "checkpoint_every": checkpoint_every,
        **({} if scale_up_after == SCALE_UP_AFTER_S else {"scale_up_after": scale_up_after}),
        **({"replace_stragglers": True} if replace_stragglers else {}),
    }
    if where.on == "ray":
        raise DocumentError("on", "ray starts `meshwright launch`; start a script with --hosts")
    if where.on != "local":
        if profile is not None:
            raise DocumentError("profile", "is of these machines, where no job runs; leave it out")
        machine = machine_of(wanted.cluster, None)
        command = _command(wanted, plan_path, machine, script, arguments, output, restarts, more)
        return submit(plan_path, wanted, machine, command, where, folder=folder, dry_run=dry_run)
    where.refuse_job()
    if where.hosts is not None:
        machine = machine_of(wanted.cluster, None)
        command = _command(wanted, plan_path, machine, script, arguments, output, restarts, more)
        _on_hosts(
            plan_path, machine, command, where, profile=profile, elastic=elastic, dry_run=dry_run
        )
        return None
    if dry_run:
        raise DocumentError(
            "dry-run",
            "goes with --on slurm or kubernetes, and --hosts; add one, or leave this out",
        )
    measured = None
    if profile is not None:
        measured = profile_for(plan_model(wanted, plan_path), profile)
    need_torch("running a script")
    from meshwright.runtime.checkpoint.object_store import spooled  # noqa: PLC0415 - the runtime
    from meshwright.runtime.launch import script_run  # noqa: PLC0415

    node_rank = where.node_rank()
    devices = _devices(wanted) if node_rank.nodes > 1 else []
    if elastic and node_rank.nodes > 1:
        with spooled(Path(checkpoint or "")) as saved:
            run = LaunchRun(
                checkpoint=saved,
                checkpoint_every=checkpoint_every,
                output=folder,
                scale_up_after=scale_up_after,
                replace_stragglers=replace_stragglers,
            )
            fit = _with_figures(wanted, plan_path, profile)
            done = _on_nodes(fit, run, script, arguments, node_rank, say=print_line, quiet=quiet)
        return _result(wanted, done, measured)
    if node_rank.nodes > 1 and node_rank.nodes != len(devices):
        planned = "1 node" if len(devices) == 1 else f"{len(devices)} nodes"
        raise LaunchError(
            f"the plan is for {planned} ({wanted.cluster}), but {node_rank.source} gives "
            f"{node_rank.nodes}. Plan for these nodes, or add --elastic"
        )
    with spooled(None if checkpoint is None else Path(checkpoint)) as saved:
        done = script_run.run_script(
            Path(plan_path),
            Path(script),
            arguments,
            output=folder,
            restarts=restarts,
            survival=script_run.Survival(
                checkpoint=None if saved is None else saved.absolute(),
                every=checkpoint_every,
                elastic=elastic,
                fewer=_fewer(wanted, plan_path, profile, saved),
            ),
            node_rank=node_rank,
            nodes=devices,
            say=print_line,
        )
    return _result(wanted, done, measured)


def _result(wanted: Plan, done: ScriptRun | None, measured: Profiles) -> ScriptResult | None:
    if done is None:
        return None
    return ScriptResult(run=done, rows=_comparison(wanted, done, measured))


def _with_figures(wanted: Plan, plan_path: str, profile: str | None) -> LaunchablePlan:
    """Return a script's plan with what plans for fewer nodes are made from."""
    from meshwright.launch.launchable_plan import LaunchablePlan  # noqa: PLC0415 - the runtime

    if wanted.model.graph is None:
        raise LaunchError(
            f"{plan_path}: has no figures of the script's module, so it cannot be planned for "
            "fewer nodes; plan it with `meshwright plan SCRIPT.py:MODEL`, or leave out --elastic"
        )
    return LaunchablePlan.read(plan_path, profile)


def _on_nodes(
    fit: LaunchablePlan,
    run: LaunchRun,
    script: str,
    arguments: Sequence[str],
    node_rank: NodeRank,
    *,
    say: Callable[[str], None],
    quiet: bool,
) -> ScriptRun | None:
    """Run a script as one of several nodes, of which some may be lost, as `launch` does."""
    from meshwright.launch.fallback_plans import fallback  # noqa: PLC0415 - the runtime
    from meshwright.launch.launch import shrink_record  # noqa: PLC0415
    from meshwright.launch.multi_node import on_nodes  # noqa: PLC0415
    from meshwright.runtime.launch import script_run  # noqa: PLC0415

    before = None
    if (left := fit.remaining(node_rank)) is not None:
        given, fit = fit, fallback(fit, left, run, quiet=quiet)
        before = shrink_record(given, left, fit, node_rank, quiet=quiet)
    user_script = script_run.UserScript(path=Path(script), arguments=tuple(arguments))

    def attempt(fit: LaunchablePlan, asked: Launch, ends: Sequence[RankEnd]) -> ScriptRun | None:
        nodes = _devices_of(fit.machine)
        return script_run.run_epoch(
            user_script, replace(asked, plan=fit.path), nodes=nodes, say=say
        )

    done: ScriptRun | None = on_nodes(
        fit, run, node_rank, before, attempt=attempt, is_script=True, quiet=quiet
    )
    return done


def _plan_made(
    plan_path: str | None,
    script: str,
    arguments: Sequence[str],
    ranks: int,
    output: str | None,
    where: Where,
    say: Callable[[str], None],
) -> str:
    """Plan a script for ranks of this machine; return where its plan is."""
    if plan_path is not None or where.on != "local" or where.hosts is not None:
        raise DocumentError(
            "ranks",
            "plans the script for this machine, and goes with neither --plan, nor --on, nor "
            "--hosts; leave one out",
        )
    need_torch("planning a script")
    from meshwright.launch.plan_script import plan_for_script  # noqa: PLC0415 - one way needs it

    say(f"planning {script} for {ranks} ranks of this machine")
    into = Path(output) if output else Path("runs", file_name(Path(script).stem))
    path = into.parent / f"{into.name}.plan.yaml"
    plan = plan_for_script(Path(script), arguments, ranks=ranks, into=path)
    sizes = {axis: getattr(plan.mesh, axis) for axis in plan.mesh.order}
    axes = {axis: size for axis, size in sizes.items() if size > 1}
    mesh = " ".join(f"{name}={size}" for name, size in axes.items()) or "one rank"
    say(f"{path}: {mesh}, {plan.micro_batches} micro-batches, zero {plan.zero}")
    return str(path)


def _check_survival(*, elastic: bool, checkpoint: str | None, every: int | None) -> None:
    if elastic and checkpoint is None:
        raise DocumentError("elastic", "continues from checkpoints: add --checkpoint FOLDER")
    if every is not None and checkpoint is None:
        raise DocumentError("checkpoint-every", "saves in a folder: add --checkpoint FOLDER")
    if every is not None and every < 1:
        raise DocumentError("checkpoint-every", f"is {every}; it is a number of steps from 1 on")


def _fewer(
    wanted: Plan, plan_path: str, profile: str | None, saved: Path | None
) -> Callable[[int], Path | None]:
    """Return the function that plans a script's module for fewer devices, if its plan suffices."""

    def plan_for(devices: int) -> Path | None:
        from meshwright.launch.fallback_plans import fallback  # noqa: PLC0415 - after a loss alone
        from meshwright.launch.launchable_plan import LaunchablePlan  # noqa: PLC0415

        if wanted.model.graph is None or saved is None:
            return None
        try:
            fit = LaunchablePlan.read(plan_path, profile)
            run = LaunchRun(checkpoint=saved.absolute())
            return Path(fallback(fit, devices, run, quiet=True).path)
        except MeshwrightError as error:
            print(f"meshwright: {lines(str(error))}", file=sys.stderr)
            return None

    return plan_for


def _on_hosts(
    plan_path: str,
    machine: ClusterSpec,
    command: Command,
    where: Where,
    *,
    profile: str | None,
    elastic: bool,
    dry_run: bool,
) -> None:
    """Run a script on hosts over ssh; those beyond the plan's are spares where it is elastic."""
    from meshwright.launch.ssh import HostCommand, hosts_of, on_hosts  # noqa: PLC0415 - one way needs it

    started = HostCommand.of(
        machine,
        command.words(plan_path, *option_words({"profile": profile})),
        (plan_path, *command.files),
        spares=elastic,
        rendezvous=where.rendezvous,
    )
    on_hosts(hosts_of(where.told_hosts), started, dry_run=dry_run)


def _devices(wanted: Plan) -> list[int]:
    """Return the devices of each node that a plan is for."""
    return _devices_of(machine_of(wanted.cluster, None))


def _devices_of(machine: ClusterSpec) -> list[int]:
    groups = machine.groups
    return [group.devices_per_node for group in groups for _ in range(group.nodes)]


def _command(
    wanted: Plan,
    plan_path: str,
    machine: ClusterSpec,
    script: str,
    arguments: Sequence[str],
    output: str | None,
    restarts: int,
    more: Mapping[str, object],
) -> Command:
    """Return the command that a job starts on every node."""
    if machine.devices < wanted.ranks:
        raise LaunchError(
            f"{plan_path}: takes {wanted.ranks} ranks, and {machine.name} has "
            f"{machine.devices} devices; plan again for this cluster"
        )
    # A path from / may be one of the image.
    if not Path(script).is_absolute() and not document.is_file(script):
        raise LaunchError(f"{script}: is no file; name the script that trains")
    return Command(
        before=("run", "--plan"),
        options=tuple(option_words({"restarts": restarts or None, **more, "output": output})),
        after=(script, *arguments),
        files=(script,),
        goes_on=restarts > 0 or more["checkpoint"] is not None,
        handed_over=restarts > 0 or more["checkpoint"] is not None,
    )


def _comparison(wanted: Plan, done: ScriptRun, measured: Profiles) -> list[Comparison]:
    """Compare with the prediction of a plan that has its module's figures."""
    if wanted.model.graph is None:
        return []
    try:
        machine = machine_of(wanted.cluster, measured)
        prediction = predict_plan(wanted, wanted.model.graph, machine, measured)
    except MeshwrightError:
        return []  # the cluster's file is not where the script runs
    return done.comparison(prediction)
