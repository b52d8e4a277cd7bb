"""Commands that make, read and write plans: plan, compare, import, predict, solve, export, show."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.console import bar, out, say
from meshwright.cli.options import (
    ClusterOption,
    Explain,
    FrameworkOption,
    GlobalBatch,
    Html,
    Json,
    ModelArgument,
    OfPlan,
    Output,
    PrecisionOption,
    Preferred,
    ProfileOption,
    ProofLevel,
    SeqLen,
    Solver,
    SolverOption,
)
from meshwright.planner.errors import DocumentError, MeshwrightError

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.search.answer import Answer


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
            "--allow",
            help="offload to the host, async-tensor; stale or compress, which change training",
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
    framework: FrameworkOption = None,
    prefer: Annotated[
        Preferred,
        typer.Option("--prefer", help="Which plan to take of those within 1.5 % of the fastest"),
    ] = Preferred.SIMPLEST,
    prove: Annotated[
        ProofLevel,
        typer.Option(
            "--prove", help="simulated: close the gap of the simulated step, up to 2 minutes"
        ),
    ] = ProofLevel.USUAL,
    fit_probability: Annotated[
        float | None,
        typer.Option(
            "--fit-probability",
            help="Least probability that a plan fits; 0.5: memory as predicted; default: 0.95",
        ),
    ] = None,
    output: Output = None,
    html: Html = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Find the fastest plan that fits, and prove it."""
    from meshwright.api import commands
    from meshwright.api.defaults import of_user
    from meshwright.planner.report.facts import Fact
    from meshwright.planner.requests.request import SURE_TO_FIT
    from meshwright.render.json_output import answer_json, as_json
    from meshwright.render.text import defaults_facts, next_fact, plan_text, top_table

    mine = of_user()
    with bar("searching layouts", quiet=json) as progress:
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
            framework=mine.take("framework", framework) or "native",
            prefer=prefer.value,
            prove=prove.value,
            fit_probability=SURE_TO_FIT if fit_probability is None else fit_probability,
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


def _needed(cluster: str | None) -> str:
    """Return the cluster, which somebody must have named."""
    if cluster is None:
        raise DocumentError(
            "cluster",
            "is missing; give --cluster 8xh100-sxm-80gb or local, set MESHWRIGHT_CLUSTER, or write "
            "'cluster: ...' into ~/.config/meshwright/defaults.yaml",
        )
    return cluster


def _then(answer: Answer, output: str | None) -> str:
    """Return what a user does with a plan."""
    from meshwright.planner.frameworks.native_limits import CAVEAT_SOURCE

    if output is None:
        return "add -o plan.yaml to keep the plan"
    if any(item.source == CAVEAT_SOURCE for item in answer.prediction.assumptions):
        return f"meshwright show {output} --html report.html"
    return _run(answer.plan, output)


def _run(plan: Plan, file: str) -> str:
    """Return the command that trains by a plan in a file."""
    from meshwright.planner.documents.model import is_script

    if plan.framework != "native":
        return f"meshwright export {file}"
    if is_script(plan.model.source):
        return f"meshwright run --plan {file} SCRIPT.py"
    return f"meshwright launch {file}"


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

    With --best: one plan against the best one of its job, and what each change saves.
    """
    from meshwright.api import commands
    from meshwright.render.json_output import as_json, choices_json, improved_json
    from meshwright.render.text import compared_parts, improved_parts

    if best:
        if len(plans) != 1:
            raise DocumentError("plans", f"are {len(plans)}; --best compares one plan")
        with bar("searching layouts", quiet=json) as progress:
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

    It executes nothing of it, and prints what was assumed and which keys were not read.
    """
    from meshwright.api import commands
    from meshwright.api.defaults import of_user
    from meshwright.render.json_output import as_json, imported_json
    from meshwright.render.text import imported_facts

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
    framework: FrameworkOption = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Predict the time and memory of a plan or a layout."""
    from meshwright.api import commands
    from meshwright.api.defaults import of_user
    from meshwright.api.inputs import is_plan
    from meshwright.planner.report.facts import Fact, Summary
    from meshwright.planner.report.text import assumptions_text, job_text, prediction_facts
    from meshwright.render.json_output import as_json
    from meshwright.render.text import defaults_facts, next_fact

    mine = of_user()
    if not is_plan(model):  # which has its own
        cluster, framework = mine.take("cluster", cluster), mine.take("framework", framework)
    wanted = mine.precision(precision.value if precision else None) if not is_plan(model) else None
    found = commands.priced(
        model,
        cluster,
        layout=layout,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=wanted,
        profile=profile,
        framework=framework or "native",
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


def solve(
    problem: Annotated[
        str, typer.Argument(help="A partition problem, YAML or JSON: docs/reference/problem.md")
    ],
    solver: SolverOption = Solver.EXACT,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Solve a partition problem that is given in numbers."""
    from meshwright.api import commands
    from meshwright.planner.report.solution_text import solution_json, solution_text
    from meshwright.planner.solver.graph_instance import GraphSolution
    from meshwright.planner.solver.partition_problem import Infeasible, Unfinished
    from meshwright.render.json_output import as_json

    solved = commands.solve(problem, solver=solver.value)
    if json:
        print(as_json(solution_json(solved.problem, solved.result)))
    elif isinstance(solved.result, GraphSolution):
        out.print(solution_text(solved.problem, solved.result, explain=explain))
    elif isinstance(solved.result, Infeasible):
        raise MeshwrightError(f"{problem}: no split fits: {solved.result.reason}")
    elif isinstance(solved.result, Unfinished):
        raise MeshwrightError(f"{problem}: {solved.result.reason}")
    if isinstance(solved.result, Infeasible | Unfinished):
        raise typer.Exit(1)


class DType(StrEnum):
    """Number formats of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


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
            "megatron-deepspeed (default: its framework)",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="A new folder; for a plan a file")
    ] = None,
    dtype: Annotated[DType, typer.Option("--dtype", help="Type of the weights")] = DType.FP32,
    json: Json = False,
) -> None:
    """Export a plan or a checkpoint for another framework."""
    from meshwright.api import commands
    from meshwright.planner.documents.units import bytes_text, count_text
    from meshwright.render.json_output import as_json, export_json

    written = commands.export(source, to=to, output=output, dtype=dtype.value)
    if isinstance(written, commands.Configured):
        if json:
            print(as_json(asdict(written)))
            return
        if written.file is None:
            print(written.text, end="")
        else:
            out.print(f"written to {written.file}; {written.framework} reads it")
        for warning in written.warnings:
            say(f"warning: {warning}")
        for name, value in written.environment.items():
            say(f"not in this file: environment {name}={value}")
        for said in written.in_the_script:
            say(f"not in this file: {said}")
        return
    if json:
        print(as_json(export_json(written)))
        return
    out.print(
        f"{written.checkpoint}, step {written.step}: {count_text(written.parameters)} parameters, "
        f"{bytes_text(written.size_bytes)} in {len(written.files)} files"
    )
    out.print(f"written to {written.folder}; {to} reads it")


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
    from meshwright.api import commands
    from meshwright.planner.report.facts import Fact
    from meshwright.planner.report.text import answer_text
    from meshwright.render.json_output import as_json
    from meshwright.render.text import next_fact

    shown = commands.show(plan, cluster=cluster, profile=profile, html=html, trace=trace)
    if json:
        dump = shown.prediction.model_dump(mode="json", exclude_none=True)
        print(as_json({"prediction": dump, "html": html, "trace": trace}))
        return
    written = ", ".join(path for path in (shown.html, shown.trace) if path)
    said = [Fact(label="written", text=written, copied=True)] if written else []
    said.append(next_fact(_run(shown.plan, plan), explain=explain))
    out.print(answer_text(shown.plan, shown.prediction, extra=said, explain=explain))
