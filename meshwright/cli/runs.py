"""Commands that run something on these machines: launch, run, profile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.console import out
from meshwright.cli.options import (
    Explain,
    GlobalBatch,
    Json,
    ModelArgument,
    Node,
    Nodes,
    PrecisionOption,
    ProfileOption,
    Rendezvous,
    SeqLen,
    TrustCode,
    with_records,
)
from meshwright.planner.errors import DocumentError
from meshwright.runtime.run.launch_options import HERE, SCALE_UP_AFTER_S, LaunchRun, Where

if TYPE_CHECKING:
    from meshwright.launch.schedulers import Submission


@with_records
def launch(
    plan: Annotated[str, typer.Argument(help="A plan.yaml")],
    run: LaunchRun,
    where: Where,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan", help="If devices fail, plan again for the remaining ones and continue"
        ),
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="If ranks fail or hang, restart them, or go on with fewer"),
    ] = False,
    profile: ProfileOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only")] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Train with a plan and compare with the prediction.

    On several nodes start it once on each: torchrun's, Slurm's and Kubernetes' variables are read.
    """
    from meshwright.launch import launch as launches
    from meshwright.launch.attempt import LaunchResult
    from meshwright.render.json_output import as_json, job_json, run_json
    from meshwright.render.text import run_parts

    if json and dry_run and where.on == "local":
        raise DocumentError("json", "a dry run here prints commands; leave out --json")
    done = launches.launch(
        plan,
        run,
        where,
        replan=replan,
        elastic=elastic,
        profile=profile,
        dry_run=dry_run,
        trust_code=trust_code,
        quiet=json,
    )
    if done is None:
        return
    if not isinstance(done, LaunchResult):
        if json:
            print(as_json(job_json(done)))
        else:
            _tell_job(done)
        return
    if json:
        print(as_json(run_json(done)))
        return
    for part in run_parts(done):
        out.print(part)


@with_records
def run(
    script: Annotated[str, typer.Argument(help="Your script, which makes a meshwright.Engine")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="A plan.yaml")] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Plan the script for N ranks of this host")
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Folder of logs and metrics")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="Restart at most N times if a rank fails")
    ] = 0,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Go on after hangs, crashes and losses, as launch does"),
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", help="Save here what engine.resume() goes on from"),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            "--checkpoint-every", help="Steps; default: the interval that loses least time"
        ),
    ] = None,
    scale_up_after: Annotated[
        float,
        typer.Option(
            "--scale-up-after", help="With --elastic: seconds until a run that lost nodes grows"
        ),
    ] = SCALE_UP_AFTER_S,
    replace_stragglers: Annotated[
        bool,
        typer.Option(
            "--replace-stragglers",
            help="With --elastic: let a spare take the place of a node with a slow rank",
        ),
    ] = False,
    profile: ProfileOption = None,
    where: Where = HERE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print that job only")] = False,
) -> None:
    """Run your own script on the ranks of a plan.

    The plan is plan.yaml, or one that is made for --ranks N.

    Options stand before the script's name; what stands behind it is the script's.
    On several nodes start it once on each: torchrun's, Slurm's and Kubernetes' variables are read.
    """
    from meshwright.launch import run_script as scripts
    from meshwright.render.text import script_parts

    done = scripts.run_script(
        plan,
        script,
        arguments or (),
        ranks=ranks,
        output=output,
        restarts=restarts,
        elastic=elastic,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        scale_up_after=scale_up_after,
        replace_stragglers=replace_stragglers,
        profile=profile,
        where=where,
        dry_run=dry_run,
    )
    if done is None:
        return
    if not isinstance(done, scripts.ScriptResult):
        _tell_job(done)
        return
    for part in script_parts(done):
        out.print(part)


def watch(
    run: Annotated[str, typer.Argument(help="A folder that launch -o has written")],
    once: Annotated[
        bool, typer.Option("--once", help="Read it once; without: until it ends")
    ] = False,
    incident: Annotated[
        int | None, typer.Option("--incident", help="Report this incident, by its number")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Leave out names of hosts, users and paths")
    ] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Write a page here")] = None,
    json: Json = False,
) -> None:
    """Show a run: step, pace, goodput, and what failed.

    It reads files alone and opens no port, so it works over ssh and after the run's end.
    """
    import time

    from rich.console import Group
    from rich.live import Live

    from meshwright.launch import watch as watching
    from meshwright.planner.documents.document import write_text
    from meshwright.planner.report.run_page import page
    from meshwright.render.json_output import as_json

    follows = not (once or json or incident is not None) and (out.is_terminal or output is not None)
    shown = Live(console=out, auto_refresh=False) if follows and out.is_terminal else None
    with shown or contextlib.nullcontext():
        while True:
            begin_s = time.monotonic()
            watched = watching.read_run(run)
            reading = watching.reading_of(watched, incident)
            if share:
                reading = watching.without_names(reading)
            lives = follows and not watched.is_over
            if output is not None:
                write_text(page(reading, again_s=watching.EVERY_S if lives else None), output)
            if json:
                print(as_json(watching.reading_json(reading, watched)))
            elif shown is not None:
                shown.update(Group(*watching.reading_parts(reading)), refresh=True)
            elif not lives:
                for part in watching.reading_parts(reading):
                    out.print(part)
            if not lives:
                return
            # A long record takes a while to read: most of the time is left to the run.
            time.sleep(max(watching.EVERY_S, 20 * (time.monotonic() - begin_s)))


def _tell_job(submission: Submission) -> None:
    """Print a job that was written, or its scheduler's answer."""
    if submission.file is None:
        print(submission.text, end="")
    else:
        out.print(f"{submission.said}\njob {submission.file}")


def profile(
    model: ModelArgument,
    cluster: Annotated[
        str, typer.Option("--cluster", help="These machines: local:2, cluster.yaml")
    ] = "local",
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionOption = None,
    nodes: Nodes = None,
    node: Node = None,
    rendezvous: Rendezvous = None,
    output: Annotated[
        str, typer.Option("-o", "--output", help="Write the profile here")
    ] = "profile.yaml",
    cluster_output: Annotated[
        str | None, typer.Option("--cluster-output", help="Write the cluster with its links here")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="About how long to measure: 90s, 5min")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured before")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be measured, in order")
    ] = False,
    trust_code: TrustCode = False,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Measure a model's layers and the machines' links.

    On several nodes start it once on each: torchrun's, Slurm's and Kubernetes' variables are read.
    """
    from meshwright.api import commands
    from meshwright.api.defaults import CommandDefaults
    from meshwright.render.json_output import agenda_json, as_json
    from meshwright.render.text import agenda_lines, profile_parts

    if dry_run:
        agenda = commands.profile_agenda(
            model,
            cluster,
            seq_len=seq_len,
            global_batch=global_batch,
            precision=precision.value if precision else None,
            nodes=nodes,
            node=node,
            rendezvous=rendezvous,
            budget=budget,
        )
        if json:
            print(as_json(agenda_json(agenda)))
            return
        for line in agenda_lines(agenda):
            out.print(line)
        return
    measured = commands.profile(
        model,
        cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision.value if precision else None,
        output=output,
        cluster_output=cluster_output,
        nodes=nodes,
        node=node,
        rendezvous=rendezvous,
        budget=budget,
        fresh=fresh,
        trust_code=trust_code,
        quiet=json,
    )
    if json:
        print(as_json(measured.model_dump(mode="json", exclude_none=True)))
        return
    defaults = CommandDefaults({})
    if measured.layers and measured.layers[0].seq_len > 1:  # a script's batch defines it
        defaults.left_open({"seq-len": (seq_len, measured.layers[0].seq_len)})
    written = [name for name in (output, cluster_output) if name]
    for part in profile_parts(measured, model, defaults.notes, written, explain=explain):
        out.print(part)
