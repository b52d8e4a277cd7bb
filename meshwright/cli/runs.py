"""Commands that run something on these machines: launch, run, profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from meshwright import commands, launches, scripts
from meshwright.answer_texts import agenda_lines, profile_parts, run_parts, script_parts
from meshwright.answers import agenda_json, as_json, job_json, run_json
from meshwright.cli.console import out
from meshwright.defaults import CommandDefaults
from meshwright.options import (
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
)

if TYPE_CHECKING:
    from meshwright.jobs import Submission


def launch(
    plan: Annotated[str, typer.Argument(help="A plan.yaml")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Text, or rows (.jsonl, .parquet) of text or conversations; a file or a folder. "
            "Default: Python's sources",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A local tokenizer folder; default: bytes")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", help="Total steps, counted from the start of training")
    ] = 20,
    on: Annotated[
        str, typer.Option("--on", help="local, or write and submit a job: slurm, kubernetes")
    ] = "local",
    job: Annotated[
        list[str] | None,
        typer.Option("--job", help="Of that job: partition=gpu, time=24:00:00; image=NAME"),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Save here")] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", help="Steps; default: after the last only"),
    ] = None,
    keep_checkpoints: Annotated[
        int, typer.Option("--keep-checkpoints", help="Keep only the newest N")
    ] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint")
    ] = False,
    or_start: Annotated[
        bool, typer.Option("--or-start", help="With --resume: start if there is none yet")
    ] = False,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan", help="If devices fail, plan again for the remaining ones and continue"
        ),
    ] = False,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", help="Stop with a checkpoint after this time")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="A Hugging Face folder of safetensors")
    ] = None,
    training: Annotated[
        list[str] | None,
        typer.Option("--training", help="Change a setting: learning_rate=1e-4, warmup_steps=100"),
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option("--eval", help="Held-out text, a file or folder")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option("--eval-every", help="Steps; default: after the last only")
    ] = None,
    evaluate_batches: Annotated[
        int, typer.Option("--eval-batches", help="Global batches per evaluation")
    ] = 8,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write events for TensorBoard too")
    ] = False,
    wandb: Annotated[
        str | None, typer.Option("--wandb", help="Log to this project on Weights & Biases too")
    ] = None,
    profile: ProfileOption = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Folder of logs and metrics")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only")] = False,
    trust_code: TrustCode = False,
    nodes: Nodes = None,
    node: Node = None,
    rendezvous: Rendezvous = None,
    json: Json = False,
) -> None:
    """Train with a plan and compare with the prediction.

    On several nodes start it once on each: torchrun's, Slurm's and Kubernetes' variables are read.
    """
    run = launches.launch(
        plan,
        data=data,
        tokenizer=tokenizer,
        steps=steps,
        on=on,
        job=job or (),
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        resume=resume,
        or_start=or_start,
        replan=replan,
        max_seconds=max_seconds,
        weights=weights,
        training=training or (),
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        evaluate_batches=evaluate_batches,
        tensorboard=tensorboard,
        wandb=wandb,
        profile=profile,
        output=output,
        dry_run=dry_run,
        trust_code=trust_code,
        nodes=nodes,
        node=node,
        rendezvous=rendezvous,
        quiet=json,
    )
    if run is None:
        return
    if not isinstance(run, launches.Run):
        if json:
            print(as_json(job_json(run)))
        else:
            _tell_job(run)
        return
    if json:
        print(as_json(run_json(run)))
        return
    for part in run_parts(run):
        out.print(part)


def run(
    script: Annotated[str, typer.Argument(help="Your script, which makes a meshwright.Engine")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script")] = None,
    plan: Annotated[str, typer.Option("--plan", help="A plan.yaml")] = "plan.yaml",
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Folder of logs and metrics")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="Restart at most N times if a rank fails")
    ] = 0,
    on: Annotated[
        str, typer.Option("--on", help="local, or write and submit a job: slurm, kubernetes")
    ] = "local",
    job: Annotated[
        list[str] | None,
        typer.Option("--job", help="Of that job: partition=gpu, time=24:00:00; image=NAME"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print that job only")] = False,
    nodes: Nodes = None,
    node: Node = None,
    rendezvous: Rendezvous = None,
) -> None:
    """Run your own script on the ranks of a plan.

    Options stand before the script's name; what stands behind it is the script's.
    On several nodes start it once on each: torchrun's, Slurm's and Kubernetes' variables are read.
    """
    done = scripts.run_script(
        plan,
        script,
        arguments or (),
        output=output,
        restarts=restarts,
        on=on,
        job=job or (),
        dry_run=dry_run,
        nodes=nodes,
        node=node,
        rendezvous=rendezvous,
    )
    if done is None:
        return
    if not isinstance(done, scripts.Ran):
        _tell_job(done)
        return
    for part in script_parts(done):
        out.print(part)


def _tell_job(submission: Submission) -> None:
    """Print a job that was written, or what its scheduler said of it."""
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
    if dry_run:
        found = commands.profile_agenda(
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
            print(as_json(agenda_json(found)))
            return
        for line in agenda_lines(found):
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
    said = CommandDefaults({})
    if measured.layers:
        said.left_open({"seq-len": (seq_len, measured.layers[0].seq_len)})
    written = [name for name in (output, cluster_output) if name]
    for part in profile_parts(measured, said.said, written, explain=explain):
        out.print(part)
