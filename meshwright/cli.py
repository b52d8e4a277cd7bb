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

from meshwright import commands, launches, scripts
from meshwright.answer_texts import (
    agenda_lines,
    catalog_table,
    compared_parts,
    defaults_facts,
    imported_facts,
    improved_parts,
    next_fact,
    plan_text,
    profile_parts,
    run_parts,
    script_parts,
    top_table,
)
from meshwright.answers import (
    agenda_json,
    answer_json,
    as_json,
    choices_json,
    export_json,
    imported_json,
    improved_json,
    job_json,
    run_json,
)
from meshwright.defaults import CommandDefaults, of_user
from meshwright.examples import epilog
from meshwright.inputs import is_plan
from meshwright.options import (
    BackendOption,
    ClusterOption,
    Explain,
    GlobalBatch,
    Html,
    Json,
    ModelArgument,
    Node,
    Nodes,
    OfPlan,
    Output,
    PrecisionOption,
    Preferred,
    ProfileOption,
    Proven,
    Rendezvous,
    SeqLen,
    Solver,
    SolverOption,
    TrustCode,
)
from planner.errors import DocumentError, MeshwrightError
from planner.native import CAVEAT_SOURCE
from planner.report.facts import Fact, Summary
from planner.report.solution_text import solution_json, solution_text
from planner.report.terminal import Terminal
from planner.report.text import answer_text, assumptions_text, job_text, prediction_facts
from planner.shown import lines
from planner.solver.graphs.graph_instance import GraphSolution
from planner.solver.instance import Infeasible, Solution, Unfinished
from planner.units import bytes_text, count_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from meshwright.jobs import Submission
    from planner.search.answer import Answer
    from planner.search.answer import Progress as Report

START = """\b
First plan:
  meshwright plan llama-3.1-8b --cluster 8xh100-sxm-80gb -o plan.yaml

Options that are not given come from MESHWRIGHT_CLUSTER, MESHWRIGHT_BACKEND, MESHWRIGHT_PRECISION,
MESHWRIGHT_PRICES, else from ~/.config/meshwright/defaults.yaml; the answer lists them.
"""

app = typer.Typer(
    help="Finds the fastest way to train your model on your machines that fits in memory, "
    "proves it, and runs it.",
    no_args_is_help=True,
    epilog=START,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Terminal()
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


@app.command(epilog=epilog("plan"))
def plan(
    model: ModelArgument,
    cluster: ClusterOption = None,
    seq_len: SeqLen = None,
    document_len: Annotated[
        int | None,
        typer.Option(
            "--document-len",
            help="Packed samples: mean over tokens of the length of the token's document",
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
    solver: SolverOption = Solver.EXACT,
    top: Annotated[
        int, typer.Option("--top", min=1, help="Show the K best plans with different meshes")
    ] = 1,
    backend: BackendOption = None,
    prefer: Annotated[
        Preferred, typer.Option("--prefer", help="Which of the plans within 1.5 % of the fastest")
    ] = Preferred.SIMPLEST,
    prove: Annotated[
        Proven,
        typer.Option(
            "--prove", help="simulated: close the gap of the simulated step, up to 2 minutes"
        ),
    ] = Proven.USUAL,
    output: Output = None,
    html: Html = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and prove it."""
    mine = of_user()
    with _bar("searching layouts", quiet=json) as progress:
        answer = commands.plan(
            model,
            _needed(mine.take("cluster", cluster)),
            seq_len=seq_len,
            document_len=document_len,
            global_batch=global_batch,
            precision=mine.precision(precision.value if precision else None),
            lora=lora or (),
            profile=profile,
            fix=fix or (),
            allow=allow or (),
            require=require or (),
            solver=solver.value,
            top=top,
            backend=mine.take("backend", backend) or "native",
            prefer=prefer.value,
            prove=prove.value,
            output=output,
            html=html,
            progress=progress,
        )
    if json:
        print(as_json(answer_json(answer)))
        return
    job = answer.plan.job
    mine.left_open(
        {
            "seq-len": (seq_len, job.seq_len),
            "global-batch": (global_batch, job.global_batch),
        }
    )
    said = [*defaults_facts(mine.said), next_fact(_then(answer, output), explain=explain)]
    if html:
        said.insert(-1, Fact(label="written", text=html, copied=True))
    out.print(plan_text(answer, said=said, explain=explain))
    if top > 1:
        out.print(top_table(answer))
    if explain:
        out.print(f"searched in {answer.search_s:.2f} s of CPU")


def _then(answer: Answer, output: str | None) -> str:
    """Return what a user does with a plan."""
    if output is None:
        return "add -o plan.yaml to keep the plan"
    if answer.plan.backend != "native":
        return f"meshwright export {output}"
    if any(item.source == CAVEAT_SOURCE for item in answer.prediction.assumptions):
        return f"meshwright show {output} --html report.html"
    return f"meshwright launch {output}"


def _needed(cluster: str | None) -> str:
    """Return the cluster, which somebody must have named."""
    if cluster is None:
        raise DocumentError(
            "cluster",
            "is missing; give --cluster 8xh100-sxm-80gb or local, set MESHWRIGHT_CLUSTER, or write "
            "'cluster: ...' into ~/.config/meshwright/defaults.yaml",
        )
    return cluster


@app.command(epilog=epilog("compare"))
def compare(
    plans: Annotated[list[str], typer.Argument(help="Two or more plan.yaml; with --best one")],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help="Price all plans on this cluster (default: each on its own)"
        ),
    ] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="Compare with the best plan: each change and what it saves"),
    ] = False,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="With --best: write the best plan here")
    ] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Compare plans: time, cost, memory and why.

    With --best: one plan beside the best of its job, and what each change is worth.
    """
    if best:
        if len(plans) != 1:
            raise DocumentError("plans", f"are {len(plans)}; --best compares one plan")
        with _bar("searching layouts", quiet=json) as progress:
            told = commands.compare_best(plans[0], cluster, output=output, progress=progress)
        if json:
            print(as_json(improved_json(told)))
            return
        then = f"compare {plans[0]} --best -o best.yaml" if output is None else f"show {output}"
        for part in improved_parts(told, then=f"meshwright {then}", explain=explain):
            out.print(part)
        return
    found = commands.compare(plans, cluster)
    if json:
        print(as_json({"plans": choices_json(found)}))
        return
    for part in compared_parts(found, explain=explain):
        out.print(part)


@app.command(name="import", epilog=epilog("import"))
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
    cluster: ClusterOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="As for 'plan', if the configuration does not name it"),
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    output: Output = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Read another framework's configuration as a plan.

    Nothing in it is executed; what was assumed and which keys were not read is said.
    """
    mine = of_user()
    found = commands.import_plan(
        file,
        of=of,
        cluster=_needed(mine.take("cluster", cluster)),
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        output=output,
    )
    if json:
        print(as_json(imported_json(found)))
        return
    out.print(imported_facts(found, mine.said, output, explain=explain))


@app.command(epilog=epilog("predict"))
def predict(
    model: Annotated[str, typer.Argument(help="A model as for 'plan', or a plan.yaml")],
    cluster: ClusterOption = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="Layout of a model: tp=8,pp=4,dp=2,recompute=full,idle=0"),
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionOption = None,
    profile: ProfileOption = None,
    backend: BackendOption = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Predict the time and memory of a plan or a layout."""
    mine = of_user()
    if not is_plan(model):  # which has its own
        cluster, backend = mine.take("cluster", cluster), mine.take("backend", backend)
    wanted = mine.precision(precision.value if precision else None) if not is_plan(model) else None
    found = commands.priced(
        model,
        cluster,
        layout=layout,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=wanted,
        profile=profile,
        backend=backend or "native",
    )
    prediction = found.prediction
    if json:
        print(as_json(prediction.model_dump(mode="json", exclude_none=True)))
        return
    if not is_plan(model):
        job = found.job
        mine.left_open(
            {
                "seq-len": (seq_len, job.seq_len),
                "global-batch": (global_batch, job.global_batch),
            }
        )
    then = (
        f"compare {model} --best" if is_plan(model) else f"plan {model} --cluster {found.cluster}"
    )
    said = [*defaults_facts(mine.said), next_fact(f"meshwright {then}", explain=explain)]
    facts = [Fact(label="layout", text=prediction.layout)]
    facts += prediction_facts(prediction, whole=explain)
    title = f"{found.model} on {found.cluster}: {job_text(found.job)}"
    out.print(Summary(title, [*facts, *said], whole=explain))
    if explain:
        out.print(assumptions_text(prediction))


@app.command(epilog=epilog("solve"))
def solve(
    problem: Annotated[
        str, typer.Argument(help="A partition problem, YAML or JSON: docs/problem.md")
    ],
    solver: SolverOption = Solver.EXACT,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Solve a partition problem that is given in numbers."""
    solved = commands.solve(problem, solver=solver.value)
    if json:
        print(as_json(solution_json(solved.problem, solved.result)))
    elif isinstance(solved.result, Solution | GraphSolution):
        out.print(solution_text(solved.problem, solved.result, explain=explain))
    elif isinstance(solved.result, Infeasible):
        raise MeshwrightError(f"{problem}: no split fits: {solved.result.reason}")
    elif isinstance(solved.result, Unfinished):
        raise MeshwrightError(f"{problem}: {solved.result.reason}")
    if isinstance(solved.result, Infeasible | Unfinished):
        raise typer.Exit(1)


@app.command(epilog=epilog("launch"))
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


@app.command(context_settings={"allow_interspersed_args": False}, epilog=epilog("run"))
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


class DType(StrEnum):
    """Number formats of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command(epilog=epilog("export"))
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, a folder of checkpoints (the newest counts), or a plan.yaml"
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Checkpoints: huggingface, peft (LoRA adapters). Plans: megatron, torchtitan, "
            "torchtitan@0.2, megatron-bridge, deepspeed, accelerate, transformers, nanotron, fsdp, "
            "megatron-deepspeed (default: its backend)",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="A new folder; for a plan a file")
    ] = None,
    dtype: Annotated[DType, typer.Option("--dtype", help="Type of the weights")] = DType.FP32,
    json: Json = False,
) -> None:
    """Export a plan or a checkpoint for another framework."""
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


@app.command(epilog=epilog("profile"))
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


@app.command(epilog=epilog("show"))
def show(
    plan: Annotated[str, typer.Argument(help="A plan.yaml")],
    cluster: OfPlan = None,
    profile: ProfileOption = None,
    html: Html = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="Write a trace for Perfetto or Chrome here")
    ] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Show a plan: text, HTML page, pipeline timeline."""
    shown = commands.show(plan, cluster=cluster, profile=profile, html=html, trace=trace)
    if json:
        dump = shown.prediction.model_dump(mode="json", exclude_none=True)
        print(as_json({"prediction": dump, "html": html, "trace": trace}))
        return
    written = ", ".join(path for path in (shown.html, shown.trace) if path)
    said = [Fact(label="written", text=written, copied=True)] if written else []
    then = f"launch {plan}" if shown.plan.backend == "native" else f"export {plan}"
    said.append(next_fact(f"meshwright {then}", explain=explain))
    out.print(answer_text(shown.plan, shown.prediction, said=said, explain=explain))


class Shelf(StrEnum):
    """The lists of the catalogue."""

    ACCELERATORS = "accelerators"
    NODES = "nodes"
    MODELS = "models"
    STACKS = "stacks"
    PRICES = "prices"


@app.command(epilog=epilog("validate"))
def validate(
    table: Annotated[str, typer.Argument(help="CSV of measured runs, one per line")],
    html: Annotated[
        str | None, typer.Option("--html", help="Write the report with scatter plots here")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", help="Write one line per row with its prediction here")
    ] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Compare predictions with a table of measured runs."""
    from planner.report.validation_text import validation_text  # noqa: PLC0415 - rules of all
    from planner.scores.validate import validation_json  # noqa: PLC0415

    with _bar("predicting rows", quiet=json) as progress:
        result = commands.validate(table, html=html, rows=rows, progress=progress)
    if json:
        print(as_json(validation_json(result)))
        return
    said = [next_fact("" if html else "--html makes a page of it", explain=explain)]
    out.print(validation_text(result, said=said, explain=explain))


@app.command(epilog=epilog("calibrate"))
def calibrate(
    runs: Annotated[
        list[str],
        typer.Argument(help="CSV tables of measured runs, or folders that 'launch' wrote"),
    ],
    accelerator: Annotated[
        str | None, typer.Option("--accelerator", help="Use only runs on this accelerator")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Keep the measured layers of this profile")
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Write a profile for 'plan --profile' here")
    ] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Fit the constants of your cluster to measured runs."""
    from meshwright import calibration  # noqa: PLC0415 - other commands need none of it
    from planner.calibrate.calibration import calibrated_json  # noqa: PLC0415
    from planner.report.calibration_text import calibration_text  # noqa: PLC0415

    result = calibration.calibrate(runs, accelerator=accelerator, profile=profile, output=output)
    if json:
        print(as_json(calibrated_json(result)))
        return
    then = f"meshwright plan MODEL --cluster CLUSTER --profile {output}"
    said = [next_fact(then if output else "add -o constants.yaml to keep them", explain=explain)]
    out.print(calibration_text(result, said, explain=explain))


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


@app.command(epilog=epilog("whatif"))
def whatif(
    study: Annotated[str | None, typer.Argument(help="A STUDY.yaml")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Instead of a study")] = None,
    clusters: Annotated[
        str | None, typer.Option("--clusters", help="Separated by commas: 8xa10g,4xp5.48xlarge")
    ] = None,
    owned: Annotated[
        str | None, typer.Option("--owned", help="Clusters that you own: only electricity is paid")
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
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="Tokens to train on: 1e12")
    ] = None,
    deadline_days: Annotated[
        float | None, typer.Option("--deadline-days", help="Days until training has to be done")
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="US dollars")] = None,
    power_cap: Annotated[float | None, typer.Option("--power-cap", help="Watts")] = None,
    confidence: Annotated[
        float | None,
        typer.Option("--confidence", help="Minimum probability of keeping these goals: 0.8"),
    ] = None,
    electricity: Annotated[
        float | None, typer.Option("--electricity", help="US dollars per kWh")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option("--utilisation", help="Share of bought hours used: 0.8")
    ] = None,
    years: Annotated[
        float | None, typer.Option("--years", help="Years until bought devices are sold")
    ] = None,
    by: Annotated[WhatIfOrder | None, typer.Option("--by", help="What to rank by")] = None,
    tuning: Annotated[
        WhatIfTuning | None,
        typer.Option("--tuning", help="Pretraining, or which kind of fine-tuning"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="Framework; default: the fastest public one")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="bf16, fp8; auto takes the fastest")
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    prices: Annotated[
        str | None, typer.Option("--prices", help="Price file instead of the catalogue")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="How many candidates to plan in parallel")
    ] = None,
    html: Html = None,
    table: Annotated[str | None, typer.Option("--csv", help="Write all candidates here")] = None,
    write: Annotated[
        str | None, typer.Option("--write", help="Write the flags as a study to edit")
    ] = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Compare clusters before they are bought or rented.

    For each cluster: time, cost and energy of its best plan.
    """
    from meshwright import studies  # noqa: PLC0415 - other commands need none of it
    from planner.report.whatif_text import result_facts, result_text  # noqa: PLC0415
    from planner.whatif.answers import answers  # noqa: PLC0415
    from planner.whatif.run import result_json  # noqa: PLC0415
    from planner.whatif.verdicts import verdicts  # noqa: PLC0415

    mine = of_user()
    if study is None:  # which says everything itself
        backend, prices = mine.take("backend", backend), mine.take("prices", prices)
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
    if explain:
        out.print(result_text(found))
    else:
        planned = next((one.plan for one in found.outcomes if one.plan), None)
        if study is None and planned is not None:
            job = planned.job
            mine.left_open(
                {
                    "seq-len": (seq_len, job.seq_len),
                    "global-batch": (global_batch, job.global_batch),
                }
            )
        out.print(result_facts(found, [*defaults_facts(mine.said), next_fact("", explain=False)]))
    for path in (html, table, write):
        if path:
            out.print(f"written: {path}")


def _parts(text: str | None) -> list[str]:
    """Return what commas separate."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


@app.command(epilog=epilog("catalog"))
def catalog(
    shelf: Annotated[Shelf, typer.Argument(help="Which list")] = Shelf.MODELS,
    imported: Annotated[
        str | None, typer.Option("--import", help="A price list of SkyPilot or gpuhunt (CSV)")
    ] = None,
    provider: Annotated[
        str, typer.Option("--provider", help="With --import: provider of the prices")
    ] = "imported",
    date: Annotated[
        str | None, typer.Option("--date", help="With --import: month of the prices, 2026-11")
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", help="With --import: write the prices here")
    ] = "rents.yaml",
    json: Json = False,
) -> None:
    """List what can be named: models, accelerators, prices."""
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
    out.print(catalog_table(rows))


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
        app(args=arguments, standalone_mode=True, prog_name="meshwright")
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
    if talk.is_terminal:
        talk.print(f"meshwright: {message}")
        return
    print(f"meshwright: {lines(message)}", file=sys.stderr)


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, which is our bug, as text."""
    print(lines("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


if __name__ == "__main__":
    sys.exit(main())
