"""Commands that make, read and write plans: plan, compare, import, predict, solve, export, show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.console import bar, out, print_message
from meshwright.cli.options import (
    JOB_OPTIONS,
    PLAN_OPTIONS,
    ClusterOption,
    DocumentLen,
    Explain,
    FrameworkOption,
    GlobalBatch,
    Html,
    Json,
    ModelArgument,
    Offline,
    OfPlan,
    Output,
    ProfileOption,
    SeqLen,
    Solver,
    SolverOption,
    with_options,
)
from meshwright.planner.errors import DocumentError, MeshwrightError
from meshwright.planner.system.progress import progress_lines

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.search.answer import Answer


@with_options(PLAN_OPTIONS)
def plan(
    model: ModelArgument,
    cluster: ClusterOption = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    output: Output = None,
    html: Html = None,
    explain: Explain = False,
    json: Json = False,
    offline: Offline = False,
) -> None:
    """Find the fastest plan that fits, and prove it."""
    from meshwright.api import commands
    from meshwright.api.defaults import of_user
    from meshwright.planner.report.facts import Fact
    from meshwright.render.json_output import answer_json, as_json
    from meshwright.render.text import defaults_facts, next_fact, plan_text, top_table

    mine = of_user()
    where = _required_cluster(mine.value_of("cluster", cluster))
    defaults = {
        "precision": mine.precision(options.get("precision")),
        "framework": mine.value_of("framework", options.get("framework")) or "native",
    }
    with (
        progress_lines(print_message),
        bar("searching layouts", quiet=json) as progress,
    ):
        answer = commands.plan(
            model,
            where,
            **{**options, **defaults},
            offline=offline,
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
            "seq-len": (options.get("seq_len"), job.seq_len),
            "global-batch": (options.get("global_batch"), job.global_batch),
        }
    )
    mine.abbreviated(where)
    facts = [*defaults_facts(mine.notes), next_fact(_then(answer, output), explain=explain)]
    if html:
        facts.insert(-1, Fact(label="written", text=html, copied=True))
    out.print(plan_text(answer, more_facts=facts, explain=explain))
    if options["top"] > 1:
        out.print(top_table(answer))
    if explain:
        out.print(f"searched in {answer.search_s:.2f} s of CPU")


def _required_cluster(cluster: str | None) -> str:
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
    from meshwright.api.inputs import plan_model
    from meshwright.api.launched_model import launch_need
    from meshwright.planner.documents.model import is_recorded
    from meshwright.planner.frameworks.native_limits import CAVEAT_SOURCE

    is_studied = any(item.source == CAVEAT_SOURCE for item in answer.prediction.assumptions)
    is_unsure = is_studied or is_recorded(answer.plan.model.source)
    need = launch_need(plan_model(answer.plan)) if is_unsure else None
    if need is not None:
        return need
    if output is None:
        return "add -o plan.yaml to keep the plan"
    if is_studied:
        return f"meshwright show {output} --html report.html"
    return _run(answer.plan, output)


def _run(plan: Plan, file: str) -> str:
    """Return the command that trains by a plan in a file."""
    from meshwright.planner.documents.framework import base_of
    from meshwright.planner.documents.model import is_script

    if base_of(plan.framework) != "native":
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
            improved = commands.compare_best(plans[0], cluster, output=output, progress=progress)
        if json:
            print(as_json(improved_json(improved)))
            return
        then = f"compare {plans[0]} --best -o best.yaml" if output is None else f"show {output}"
        for part in improved_parts(improved, then=f"meshwright {then}", explain=explain):
            out.print(part)
        return
    alternatives = commands.compare(plans, cluster)
    if json:
        print(as_json({"plans": choices_json(alternatives)}))
        return
    for part in compared_parts(alternatives, explain=explain):
        out.print(part)


def import_(
    file: Annotated[str, typer.Argument(help="A framework's configuration, or a script")],
    of: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="megatron, megatron-bridge, nemo, torchtitan, deepspeed, accelerate, "
            "transformers, trl, llama-factory, axolotl, ms-swift, litgpt, verl, nanotron, fsdp; "
            "slurm: a script that runs one of them; by its settings if left out",
        ),
    ] = None,
    cluster: ClusterOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="As for 'plan', if the configuration does not name it"),
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    document_len: DocumentLen = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Value of a script's variable, NAME=VALUE, of its first argument, 1=VALUE, or of "
            "all, @='FIRST SECOND'",
        ),
    ] = None,
    output: Output = None,
    explain: Explain = False,
    json: Json = False,
    offline: Offline = False,
) -> None:
    """Read another framework's configuration as a plan.

    It executes nothing of it, and prints what the plan takes and which words were not understood.
    """
    from meshwright.api import commands
    from meshwright.api.defaults import of_user
    from meshwright.planner.catalog import hub
    from meshwright.render.json_output import as_json, imported_json
    from meshwright.render.text import imported_facts

    mine = of_user()
    where = _required_cluster(mine.value_of("cluster", cluster))
    with hub.offline(offline):
        imported = commands.import_plan(
            file,
            of=of,
            cluster=where,
            model=model,
            seq_len=seq_len,
            global_batch=global_batch,
            document_len=document_len,
            output=output,
            values=values or (),
        )
    if json:
        print(as_json(imported_json(imported)))
        return
    mine.abbreviated(where)
    out.print(imported_facts(imported, mine.notes, output, explain=explain))


@with_options(JOB_OPTIONS)
def predict(
    model: Annotated[str, typer.Argument(help="A model as for 'plan', or a plan.yaml")],
    cluster: ClusterOption = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="Layout of a model: tp=8,pp=4,dp=2,recompute=full,idle=0"),
    ] = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    profile: ProfileOption = None,
    framework: FrameworkOption = None,
    explain: Explain = False,
    json: Json = False,
    offline: Offline = False,
) -> None:
    """Predict the time and memory of a plan or a layout."""
    from meshwright.api import commands
    from meshwright.api.defaults import of_user
    from meshwright.api.inputs import is_plan
    from meshwright.api.option_words import option_words
    from meshwright.api.plan_options import JobOptions
    from meshwright.planner.report.facts import Fact, Summary
    from meshwright.planner.report.text import assumptions_text, job_text, prediction_facts
    from meshwright.planner.requests.pins import framework_beside
    from meshwright.render.json_output import as_json
    from meshwright.render.text import defaults_facts, next_fact

    mine = of_user()
    job = dict(options)
    if not is_plan(model):  # which has its own
        named = framework_beside(layout or "", framework or "native")
        cluster, framework = (
            mine.value_of("cluster", cluster),
            mine.value_of("framework", named if named != "native" else framework),
        )
        job["precision"] = mine.precision(options.get("precision"))
    predicted = commands.predicted_plan(
        model,
        cluster,
        layout=layout,
        **job,
        profile=profile,
        framework=framework or "native",
        offline=offline,
    )
    prediction = predicted.prediction
    if json:
        print(as_json(prediction.model_dump(mode="json", exclude_none=True)))
        return
    if is_plan(model):
        then = f"compare {model} --best"
    else:
        mine.left_open(
            {
                "seq-len": (options.get("seq_len"), predicted.job.seq_len),
                "global-batch": (options.get("global_batch"), predicted.job.global_batch),
            }
        )
        mine.abbreviated(predicted.cluster)
        given = JobOptions(**options).given() | {"framework": framework}
        words = [shlex.quote(word) for word in option_words(given)]
        then = " ".join(["plan", model, "--cluster", predicted.cluster, *words])
    more_facts = [*defaults_facts(mine.notes), next_fact(f"meshwright {then}", explain=explain)]
    facts = [Fact(label="layout", text=prediction.layout_text)]
    facts += prediction_facts(prediction, whole=explain)
    title = f"{predicted.model} on {predicted.cluster}: {job_text(predicted.job)}"
    out.print(Summary(title, [*facts, *more_facts], whole=explain))
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
    if isinstance(solved.result, Infeasible | Unfinished):
        begin = "no split fits: " if isinstance(solved.result, Infeasible) else ""
        reason = f"{problem}: {begin}{solved.result.reason}"
        if not json:
            raise MeshwrightError(reason)
        print_message(reason)
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
    with_recipe: Annotated[
        bool,
        typer.Option("--with-recipe", help="Of a plan: optimizer and learning rates too"),
    ] = False,
    job: Annotated[
        str | None,
        typer.Option("--job", help="Also write a job that starts it: slurm, kubernetes, skypilot"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Setting of that job: partition=gpu, image=NAME, script=train.py, "
            "arguments='--data x'",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Export a plan or a checkpoint for another framework."""
    from meshwright.api import commands
    from meshwright.planner.documents.units import bytes_text, count_text
    from meshwright.render.json_output import as_json, export_json

    written = commands.export(
        source,
        to=to,
        output=output,
        dtype=dtype.value,
        with_recipe=with_recipe,
        job=job,
        settings=settings or (),
    )
    if isinstance(written, commands.FrameworkConfiguration):
        if json:
            print(as_json(asdict(written)))
            return
        if written.file is None:
            print(written.text, end="")
        else:
            out.print(f"written to {written.file}; {written.framework} reads it")
        if written.job is not None:
            out.print(f"job written to {written.job.file}; submit it: {written.job.submitted_by}")
        for warning in written.warnings:
            print_message(f"warning: {warning}")
        for name, value in written.environment.items():
            print_message(f"not in this file: environment {name}={value}")
        for instruction in written.in_the_script:
            print_message(f"not in this file: {instruction}")
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
    facts = [Fact(label="written", text=written, copied=True)] if written else []
    facts.append(next_fact(_run(shown.plan, plan), explain=explain))
    out.print(answer_text(shown.plan, shown.prediction, extra=facts, explain=explain))
