"""The command that plans and measures: tune."""

from __future__ import annotations

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
    PrecisionOption,
    ProfileOption,
    SeqLen,
    TrustCode,
)
from meshwright.planner.errors import DocumentError

if TYPE_CHECKING:
    from meshwright.tune.tune import Tuned


def tune(
    model: Annotated[
        str,
        typer.Argument(help="A model, as of plan; or a plan.yaml, whose model and job are used"),
    ],
    cluster: ClusterOption = None,
    trial_cluster: Annotated[
        str | None,
        typer.Option(
            "--trial-cluster",
            help="Try plans in small on fewer of these devices, as 8xh100-sxm-80gb: fewer stages "
            "and layers",
        ),
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    precision: PrecisionOption = None,
    profile: ProfileOption = None,
    fix: Annotated[
        list[str] | None, typer.Option("--fix", help="Pin a choice of all plans: tp=8")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="As of plan: offload, stale, compress")
    ] = None,
    framework: FrameworkOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="'8 trials' (default) or about how long: 20min"),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="What trains by a plan instead of launch: 'torchrun ... {config}', with {plan}, "
            "{config} and {output}",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Text or rows for trials, as of launch")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A local tokenizer folder, as of launch")
    ] = None,
    trust_code: TrustCode = False,
    trials: Annotated[
        str | None,
        typer.Option("--trials", help="Folder of trials, used again; default: beside the plan"),
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", help="Write the plan here, after every trial")
    ] = "plan.yaml",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials and what they would take")
    ] = False,
    html: Html = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Plan, then measure what prediction leaves open.

    Interrupted or killed, it goes on with the same command; the plan so far is always valid.
    """
    from meshwright.api.defaults import of_user
    from meshwright.planner.report.facts import Fact
    from meshwright.render.json_output import as_json
    from meshwright.render.text import defaults_facts, next_fact
    from meshwright.render.tuning_text import tuned_json, tuned_parts, write_page
    from meshwright.tune.tune import tune as tuned

    if html and dry_run:
        raise DocumentError(
            "html", "is a page of trials, and a dry run makes none; leave one of them out"
        )
    mine = of_user()
    where = mine.take("cluster", cluster)
    if where is None:
        raise DocumentError("cluster", "is missing; name the machine, for example --cluster local")
    with bar("searching layouts", quiet=json) as progress:
        found = tuned(
            model,
            where,
            trial_cluster=trial_cluster,
            seq_len=seq_len,
            global_batch=global_batch,
            precision=mine.precision(precision.value if precision else None),
            profile=profile,
            fix=fix or (),
            allow=allow or (),
            framework=mine.take("framework", framework) or "native",
            budget=budget,
            run=run,
            data=data,
            tokenizer=tokenizer,
            trust_code=trust_code,
            trials=trials,
            output=output,
            dry_run=dry_run,
            progress=progress,
            told=(lambda text: None) if json else say,
        )
    if html:
        write_page(found, html)
    if json:
        print(as_json(tuned_json(found) | {"html": html}))
        return
    then = "the same without --dry-run" if dry_run else _then(run, found)
    said = [*defaults_facts(mine.said), next_fact(then, explain=explain)]
    if html:
        said.insert(-1, Fact(label="page", text=html, copied=True))
    for part in tuned_parts(found, said, explain=explain):
        out.print(part)


def _then(run: str | None, found: Tuned) -> str:
    """Return what trains by the plan: as its trials ran, predicted with what they showed."""
    from meshwright.tune.tune import CONSTANTS_FILE

    output = found.plan_file or ""
    if found.trial_cluster is not None and run is None:
        return f"meshwright launch {output}"
    if run is None:
        return f"meshwright launch {output} --profile {found.folder}/{CONSTANTS_FILE}"
    if "{config}" in run:
        return f"meshwright export {output} -o CONFIG"
    return run.replace("{plan}", output).replace("{output}", "runs/tuned")
