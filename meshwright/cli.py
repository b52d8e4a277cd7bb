"""The command line: translate arguments, call one function, show the answer.

Results go to stdout, talk and progress bars to stderr; `--json` prints one JSON object and nothing
else.  Exit 0 done, 1 the user must act, 2 wrong usage; a traceback is our bug.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from meshwright import commands, launches, scripts
from meshwright.answers import (
    agenda_json,
    agenda_lines,
    answer_json,
    as_json,
    choices_json,
    choices_table,
    comparison_table,
    export_json,
    imported_json,
    improved_json,
    improved_parts,
    job_json,
    profile_parts,
    run_json,
    top_table,
)
from planner.errors import DocumentError, MeshwrightError
from planner.native import CAVEAT_SOURCE
from planner.report.solution_text import solution_json, solution_text
from planner.report.terminal import Terminal
from planner.report.text import answer_text, assumption_lines, prediction_lines
from planner.shown import lines
from planner.solver.instance import Infeasible, Solution
from planner.units import bytes_text, count_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from meshwright.jobs import Submission
    from planner.search.answer import Progress as Report

app = typer.Typer(
    help="Finds the fastest way to train your model on your machines that fits in memory, "
    "proves it, and runs it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Terminal(width=None if sys.stdout.isatty() else 140)
talk = Terminal(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"meshwright {metadata.version('meshwright')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end"
        ),
    ] = False,
) -> None:
    """Find the fastest way to train your model on your machines, prove it, and run it."""


class Precision(StrEnum):
    """Number formats of the arithmetic."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Solver(StrEnum):
    """How the partition problem of each layout is solved."""

    EXACT = "exact"
    ILP = "ilp"


class Proven(StrEnum):
    """How far the proof in simulated time is followed."""

    USUAL = "usual"
    SIMULATED = "simulated"


class Preferred(StrEnum):
    """Which of the plans near the fastest is taken."""

    SIMPLEST = "simplest"
    FASTEST = "fastest"


ModelArgument = Annotated[
    str,
    typer.Argument(help="A catalogue name, a config.json or its folder, file.py:factory"),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster", help="8xh100-sxm-80gb, 16x8xh100-sxm-80gb, 4xp5.48xlarge, local, cluster.yaml"
    ),
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens per sample")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", help="Samples per step")]
PrecisionOption = Annotated[Precision | None, typer.Option("--precision")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Measurements made by 'meshwright profile'; GROUP=FILE,GROUP=FILE if devices differ",
    ),
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="Run the same command on so many nodes")]
Node = Annotated[int | None, typer.Option("--node", help="Which of them this is")]
Rendezvous = Annotated[str | None, typer.Option("--rendezvous", help="HOST:PORT of node 0")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run a document's file.py as it is, whatever its digest"),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Each stage, what was assumed, how the others fell")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")]


@app.command()
def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    seq_len: SeqLen = None,
    document_len: Annotated[
        int | None,
        typer.Option(
            "--document-len",
            help="Samples hold several documents: length of a token's, mean over tokens",
        ),
    ] = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", help="Train adapters only: rank=16, alpha=32, targets=[q_proj]"),
    ] = None,
    profile: ProfileOption = None,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", help="Pin a choice: tp=8, schedule=zbv, order=pp-tp"),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", help="offload to the host; stale weights or compress, which change training"
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", help="'layers 0-3 on stage 0', 'at most 9 layers on stage 1'"),
    ] = None,
    solver: Annotated[Solver, typer.Option("--solver")] = Solver.EXACT,
    top: Annotated[
        int, typer.Option("--top", min=1, help="So many plans, each on another mesh")
    ] = 1,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="Who trains: native, megatron, torchtitan, deepspeed, nanotron, fsdp, accelerate",
        ),
    ] = "native",
    prefer: Annotated[
        Preferred, typer.Option("--prefer", help="Of plans within 1.5 % of the fastest")
    ] = Preferred.SIMPLEST,
    prove: Annotated[
        Proven,
        typer.Option("--prove", help="simulated: close the gap in simulated time, up to 2 minutes"),
    ] = Proven.USUAL,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Write the plan here")
    ] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and prove it."""
    with _bar("searching layouts", quiet=json) as progress:
        answer = commands.plan(
            model,
            cluster,
            seq_len=seq_len,
            document_len=document_len,
            global_batch=global_batch,
            precision=precision.value if precision else None,
            lora=lora or (),
            profile=profile,
            fix=fix or (),
            allow=allow or (),
            require=require or (),
            solver=solver.value,
            top=top,
            backend=backend,
            prefer=prefer.value,
            prove=prove.value,
            output=output,
            progress=progress,
        )
    if json:
        print(as_json(answer_json(answer)))
        return
    out.print(answer_text(answer.plan, answer.prediction, answer.certificate, explain=explain))
    if top > 1:
        out.print(top_table(answer))
    out.print(choices_table(answer.choices))
    out.print(f"searched in {answer.search_s:.2f} s of CPU")
    if output:
        studied = any(a.source == CAVEAT_SOURCE for a in answer.prediction.assumptions)
        then = (
            "to be studied, not launched" if studied else f"run it with: meshwright launch {output}"
        )
        if answer.plan.backend != "native":
            then = f"its configuration: meshwright export {output}"
        out.print(f"plan written to {output}; {then}")


@app.command()
def compare(
    plans: Annotated[
        list[str], typer.Argument(help="Two or more plan.yaml; with --best your own alone")
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="On this one (default: each on its own)")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Beside the best plan: what to change, and its worth")
    ] = False,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="With --best: write that plan here")
    ] = None,
    json: Json = False,
) -> None:
    """Say what plans take beside the fastest of them: time, cost, memory and why."""
    if best:
        if len(plans) != 1:
            raise DocumentError("plans", f"are {len(plans)}; --best compares one plan")
        with _bar("searching layouts", quiet=json) as progress:
            told = commands.compare_best(plans[0], cluster, output=output, progress=progress)
        if json:
            print(as_json(improved_json(told)))
            return
        for part in improved_parts(told):
            out.print(part)
        if output:
            out.print(f"best plan written to {output}")
        return
    found = commands.compare(plans, cluster)
    if json:
        print(as_json({"plans": choices_json(found)}))
        return
    out.print(choices_table(found))


@app.command(name="import")
def import_(
    file: Annotated[str, typer.Argument(help="A framework's configuration, or a script")],
    of: Annotated[
        str,
        typer.Option(
            "--from",
            help="megatron, megatron-bridge, torchtitan, deepspeed, accelerate, transformers, "
            "nanotron, fsdp; slurm: a script that runs one of them",
        ),
    ],
    cluster: ClusterOption,
    model: Annotated[
        str | None,
        typer.Option("--model", help="As for 'plan', where the configuration does not say it"),
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Write the plan here")
    ] = None,
    json: Json = False,
) -> None:
    """Read another framework's configuration as a plan; nothing in it is executed."""
    found = commands.import_plan(
        file,
        of=of,
        cluster=cluster,
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        output=output,
    )
    if json:
        print(as_json(imported_json(found)))
        return
    out.print(f"{found.plan.model.name} on {found.plan.cluster}: {found.plan.layout.text()}")
    for what in found.assumed:
        out.print(f"assumed: {what}")
    if found.unknown:
        out.print(f"not read: {', '.join(found.unknown)}")
    if output:
        out.print(f"plan written to {output}; improve it with: meshwright compare {output} --best")


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="A model as for 'plan', or a plan.yaml")],
    cluster: Annotated[str | None, typer.Option("--cluster")] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="tp=8,pp=4,dp=2,recompute=full,idle=0")
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionOption = None,
    profile: ProfileOption = None,
    backend: Annotated[
        str,
        typer.Option("--backend", help="Whose rules price a layout: native, megatron, torchtitan"),
    ] = "native",
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Say what a plan, or a layout of a model, will take in time and memory."""
    prediction = commands.predict(
        model,
        cluster,
        layout=layout,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision.value if precision else None,
        profile=profile,
        backend=backend,
    )
    if json:
        print(as_json(prediction.model_dump(mode="json", exclude_none=True)))
        return
    out.print(prediction.layout)
    for line in prediction_lines(prediction):
        out.print(line)
    for line in assumption_lines(prediction) if explain else ():
        out.print(line)


@app.command()
def solve(
    problem: Annotated[
        str, typer.Argument(help="A partition problem, YAML or JSON: docs/problem.md")
    ],
    solver: Annotated[Solver, typer.Option("--solver")] = Solver.EXACT,
    json: Json = False,
) -> None:
    """Solve a bare partition problem exactly, for comparison with other solvers."""
    solved = commands.solve(problem, solver=solver.value)
    if json:
        print(as_json(solution_json(solved.problem, solved.result)))
    elif isinstance(solved.result, Solution):
        out.print(solution_text(solved.problem, solved.result))
    elif isinstance(solved.result, Infeasible):
        raise MeshwrightError(f"{problem}: no split fits: {solved.result.reason}")
    if isinstance(solved.result, Infeasible):
        raise typer.Exit(1)


@app.command()
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
    steps: Annotated[int, typer.Option("--steps", help="Steps from the start of training")] = 20,
    on: Annotated[
        str, typer.Option("--on", help="local, or write and submit a job: slurm, kubernetes")
    ] = "local",
    job: Annotated[
        list[str] | None,
        typer.Option("--job", help="Of that job: partition=gpu, time=24:00:00; image=NAME"),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Save here")] = None,
    checkpoint_every: Annotated[int | None, typer.Option("--checkpoint-every")] = None,
    keep_checkpoints: Annotated[
        int, typer.Option("--keep-checkpoints", help="Only the last so many stay")
    ] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint")
    ] = False,
    or_start: Annotated[
        bool, typer.Option("--or-start", help="With --resume: start if there is none yet")
    ] = False,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan", help="Where devices are lost, plan again for those that are left and go on"
        ),
    ] = False,
    max_seconds: Annotated[float | None, typer.Option("--max-seconds")] = None,
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
        int, typer.Option("--eval-batches", help="Global batches of one evaluation")
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
    """Train by a plan, and compare with the prediction.

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
    losses = run.report.losses
    if losses:
        out.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    for evaluation in run.report.evaluations[-1:]:
        out.print(f"held-out loss {evaluation.loss:.4f} after step {evaluation.step}")
    out.print(comparison_table(run.rows))
    out.print(f"metrics {run.report.metrics}, logs {run.report.logs}")
    if run.report.checkpoint:
        out.print(f"checkpoint {run.report.checkpoint}")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="Your script, which makes a meshwright.Engine")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given")] = None,
    plan: Annotated[str, typer.Option("--plan", help="A plan.yaml")] = "plan.yaml",
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Folder of logs and metrics")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="Start again so often if a rank fails")
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
    """Run your own script on the ranks of a plan, and compare with the prediction.

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
    steps = done.run.steps
    if steps:
        out.print(f"loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f} in {len(steps)} steps")
    if done.run.restarts:
        times = "once" if done.run.restarts == 1 else f"{done.run.restarts} times"
        out.print(f"started again {times}")
    if done.rows:
        out.print(comparison_table(done.rows))
    out.print(f"metrics and logs in {done.run.output}")


def _tell_job(submission: Submission) -> None:
    """Print a job that was written, or what its scheduler said of it."""
    if submission.file is None:
        print(submission.text, end="")
    else:
        out.print(f"{submission.said}\njob {submission.file}")


class DType(StrEnum):
    """Number formats of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command()
def export(
    source: Annotated[
        str, typer.Argument(help="A checkpoint, a folder of them (the newest), or a plan.yaml")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="huggingface, or peft for LoRA adapters; of a plan megatron, torchtitan, "
            "torchtitan@0.2, megatron-bridge, deepspeed, accelerate, transformers, nanotron, fsdp, "
            "megatron-deepspeed (default: its backend)",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="A new folder; of a plan a file")
    ] = None,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of the weights")] = DType.FP32,
    json: Json = False,
) -> None:
    """Write a checkpoint as a folder that others load, or a plan as another's configuration."""
    written = commands.export(source, to=to, output=output, dtype=dtype.value)
    if isinstance(written, commands.Configured):
        if json:
            print(as_json(asdict(written)))
            return
        if written.file is None:
            print(written.text, end="")
        else:
            out.print(f"written to {written.file}; {written.framework} reads it")
        for said in written.in_the_script:
            _say(f"outside this file: {said}")
        return
    for warning in written.warnings:
        _say(f"warning: {warning}")
    if json:
        print(as_json(export_json(written)))
        return
    out.print(
        f"{written.checkpoint}, step {written.step}: {count_text(written.parameters)} parameters, "
        f"{bytes_text(written.size_bytes)} in {len(written.files)} files"
    )
    out.print(f"written to {written.folder}; {to} reads it")


@app.command()
def profile(
    model: ModelArgument,
    cluster: ClusterOption = "local",
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionOption = None,
    nodes: Nodes = None,
    node: Node = None,
    rendezvous: Rendezvous = None,
    output: Annotated[str, typer.Option("-o", "--output")] = "profile.yaml",
    cluster_output: Annotated[
        str | None, typer.Option("--cluster-output", help="Write the cluster with its links here")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="About how long it may take: 90s, 5min")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured before")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be measured, in its order")
    ] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Measure a model's layers and the machines' links, for plans that hold there.

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
    for shown in profile_parts(measured):
        out.print(shown)
    written = f" on node 0, cluster to {cluster_output}" if cluster_output else ""
    out.print(f"profile written to {output}{written}; plan with: --profile {output}")


@app.command()
def show(
    plan: Annotated[str, typer.Argument(help="A plan.yaml")],
    cluster: Annotated[str | None, typer.Option("--cluster")] = None,
    profile: ProfileOption = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page here")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Write a Chrome trace here")] = None,
    json: Json = False,
) -> None:
    """Show a plan with its prediction: text, HTML page, pipeline timeline."""
    shown = commands.show(plan, cluster=cluster, profile=profile, html=html, trace=trace)
    if json:
        dump = shown.prediction.model_dump(mode="json", exclude_none=True)
        print(as_json({"prediction": dump, "html": html, "trace": trace}))
        return
    out.print(answer_text(shown.plan, shown.prediction))
    for path in (shown.html, shown.trace):
        if path:
            out.print(f"written: {path}")


class Shelf(StrEnum):
    """The lists of the catalogue."""

    ACCELERATORS = "accelerators"
    NODES = "nodes"
    MODELS = "models"
    STACKS = "stacks"
    PRICES = "prices"


@app.command()
def validate(
    table: Annotated[str, typer.Argument(help="CSV of measured runs, one a line")],
    html: Annotated[
        str | None, typer.Option("--html", help="Write the report with scatter plots here")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", help="Write one line per row with its prediction here")
    ] = None,
    json: Json = False,
) -> None:
    """Predict every run of a table of real ones, and say how far off the predictions are."""
    from planner.report.validation_text import validation_text  # noqa: PLC0415 - rules of all
    from planner.scores.validate import validation_json  # noqa: PLC0415

    with _bar("predicting rows", quiet=json) as progress:
        result = commands.validate(table, html=html, rows=rows, progress=progress)
    if json:
        print(as_json(validation_json(result)))
        return
    out.print(validation_text(result))


@app.command()
def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(help="CSV tables of measured runs, or folders that 'launch' wrote"),
    ],
    accelerator: Annotated[
        str | None, typer.Option("--accelerator", help="Only the runs on this one")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Measured layers to keep beside the constants")
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Write a profile for 'plan --profile' here")
    ] = None,
    json: Json = False,
) -> None:
    """Fit the physical constants of your cluster to runs that were measured on it."""
    from meshwright import calibration  # noqa: PLC0415 - other commands need none of it
    from planner.calibrate.calibration import calibrated_json  # noqa: PLC0415
    from planner.report.calibration_text import calibration_lines  # noqa: PLC0415

    result = calibration.calibrate(runs, accelerator=accelerator, profile=profile, output=output)
    if json:
        print(as_json(calibrated_json(result)))
        return
    for line in calibration_lines(result):
        out.print(line)
    if output:
        out.print(f"profile written to {output}; use it with: meshwright plan --profile {output}")


class WhatIfOrder(StrEnum):
    """What candidates are ranked by."""

    COST = "cost"
    TIME = "time"
    ENERGY = "energy"


class WhatIfSizing(StrEnum):
    """What the number of nodes is found for."""

    NEED = "need"
    POWER = "power"
    AFFORD = "afford"


class WhatIfTuning(StrEnum):
    """Kinds of training."""

    PRETRAIN = "pretrain"
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


@app.command()
def whatif(
    study: Annotated[str | None, typer.Argument(help="A STUDY.yaml")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Instead of a study")] = None,
    clusters: Annotated[
        str | None, typer.Option("--clusters", help="Separated by commas: 8xa10g,4xp5.48xlarge")
    ] = None,
    owned: Annotated[
        str | None, typer.Option("--owned", help="Own machines, which take power alone")
    ] = None,
    reserved: Annotated[
        str | None,
        typer.Option("--reserved", help="Quotes, USD per device hour and months: CLUSTER=2.10/36"),
    ] = None,
    buy: Annotated[
        str | None, typer.Option("--buy", help="Purchases, USD per device: CLUSTER=38000")
    ] = None,
    solve: Annotated[
        WhatIfSizing | None, typer.Option("--solve", help="Find {n} of --clusters: {n}x8xb200")
    ] = None,
    tokens: Annotated[float | None, typer.Option("--tokens", help="To train in all: 1e12")] = None,
    deadline_days: Annotated[float | None, typer.Option("--deadline-days")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="US dollars")] = None,
    power_cap: Annotated[float | None, typer.Option("--power-cap", help="Watts")] = None,
    confidence: Annotated[
        float | None, typer.Option("--confidence", help="Least probability of keeping these: 0.8")
    ] = None,
    electricity: Annotated[
        float | None, typer.Option("--electricity", help="US dollars per kWh")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option("--utilisation", help="Share of bought hours used: 0.8")
    ] = None,
    years: Annotated[float | None, typer.Option("--years", help="Until devices are sold")] = None,
    by: Annotated[WhatIfOrder | None, typer.Option("--by", help="What is compared")] = None,
    tuning: Annotated[
        WhatIfTuning | None, typer.Option("--tuning", help="What of the model is trained")
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="Who trains; the fastest public stack if open")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="bf16, fp8; auto takes the fastest")
    ] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len")] = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch")] = None,
    prices: Annotated[
        str | None, typer.Option("--prices", help="Rents instead of the catalogue's")
    ] = None,
    processes: Annotated[int | None, typer.Option("--processes", help="Side by side")] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page here")] = None,
    table: Annotated[str | None, typer.Option("--csv", help="Write all candidates here")] = None,
    write: Annotated[
        str | None, typer.Option("--write", help="Write the flags as a study to edit")
    ] = None,
    json: Json = False,
) -> None:
    """Compare clusters before they are bought or rented: time, cost, energy of the best plans."""
    from meshwright import studies  # noqa: PLC0415 - other commands need none of it
    from planner.report.whatif_text import result_text  # noqa: PLC0415
    from planner.whatif.answers import answers  # noqa: PLC0415
    from planner.whatif.run import result_json  # noqa: PLC0415
    from planner.whatif.verdicts import verdicts  # noqa: PLC0415

    with _bar("planning candidates", quiet=json) as progress:
        found = studies.whatif(
            study,
            model=model,
            clusters=_parts(clusters),
            owned=_parts(owned),
            reserved=_parts(reserved),
            buy=_parts(buy),
            solve=solve.value if solve else None,
            tokens=tokens,
            deadline_days=deadline_days,
            budget=budget,
            power_cap=power_cap,
            confidence=confidence,
            electricity=electricity,
            utilisation=utilisation,
            years=years,
            by=by.value if by else None,
            tuning=tuning.value if tuning else None,
            backend=backend,
            precision=precision,
            seq_len=seq_len,
            global_batch=global_batch,
            prices=prices,
            processes=processes,
            html=html,
            table=table,
            write=write,
            progress=progress,
        )
    if json:
        said = {"verdict": " ".join(verdicts(found)), "answers": answers(found)}
        print(as_json({**said, **result_json(found)}))
        return
    out.print(result_text(found))
    for path in (html, table, write):
        if path:
            out.print(f"written: {path}")


def _parts(text: str | None) -> list[str]:
    """Return what commas separate."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


@app.command()
def catalog(
    shelf: Annotated[Shelf, typer.Argument(help="Which list")] = Shelf.MODELS,
    imported: Annotated[
        str | None, typer.Option("--import", help="A price list of SkyPilot or gpuhunt (CSV)")
    ] = None,
    provider: Annotated[str, typer.Option("--provider", help="Whose prices")] = "imported",
    date: Annotated[str | None, typer.Option("--date", help="Of the prices")] = None,
    output: Annotated[str, typer.Option("-o", "--output")] = "rents.yaml",
    json: Json = False,
) -> None:
    """List what can be named: accelerators, node types, models, stacks, dated prices."""
    if imported is not None:
        if shelf is not Shelf.PRICES or date is None:
            raise DocumentError("import", "goes with `catalog prices` and the list's --date")
        from meshwright import studies  # noqa: PLC0415 - loads what-if

        found = studies.import_prices(imported, provider=provider, date=date, output=output)
        if json:
            print(as_json(found.model_dump(mode="json", exclude_none=True)))
        else:
            out.print(
                f"{len(found.rents)} rents written to {output}; use: whatif --prices {output}"
            )
        return
    rows = commands.catalog(shelf.value)
    if json:
        print(as_json(rows))
        return
    table = Table(*rows[0]) if rows else Table()
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row.values()))
    out.print(table)


@contextmanager
def _bar(what: str, *, quiet: bool) -> Iterator[Report | None]:
    """Show a progress bar on stderr while a search runs, if a person is looking."""
    if quiet or not talk.is_terminal:
        yield None
        return
    columns = (
        TextColumn(what, markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %", markup=False),
    )
    with Progress(*columns, TimeElapsedColumn(), console=talk, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 means done, 1 the user must act, 2 wrong usage."""
    # No process that it starts imports modules that lie in the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        app(args=arguments, standalone_mode=True)
    except MeshwrightError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 1
    except BrokenPipeError:
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except Exception:
        sys.excepthook = _bug  # what is raised may quote a document
        raise
    return 0


def _say(message: str) -> None:
    print(f"meshwright: {lines(message)}", file=sys.stderr)


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, which is our bug, as text."""
    print(lines("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


if __name__ == "__main__":
    sys.exit(main())
