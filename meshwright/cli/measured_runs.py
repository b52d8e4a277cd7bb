"""Commands on measured runs: tune a plan, validate predictions, calibrate a cluster's constants."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.console import bar, out, print_message
from meshwright.cli.options import (
    JOB_OPTIONS,
    ClusterOption,
    Explain,
    FrameworkOption,
    Html,
    Json,
    ProfileOption,
    TrustCode,
    with_options,
)
from meshwright.planner.errors import DocumentError

if TYPE_CHECKING:
    from meshwright.tune.tune import TuningResult


@with_options(JOB_OPTIONS)
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
    options: Mapping[str, Any] = MappingProxyType({}),
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
    from meshwright.tune.tune import tune as tuned
    from meshwright.tune.tuning_text import tuned_json, tuned_parts, write_page

    if html and dry_run:
        raise DocumentError(
            "html", "is a page of trials, and a dry run makes none; leave one of them out"
        )
    mine = of_user()
    where = mine.value_of("cluster", cluster)
    if where is None:
        raise DocumentError("cluster", "is missing; name the machine, for example --cluster local")
    with bar("searching layouts", quiet=json) as progress:
        result = tuned(
            model,
            where,
            trial_cluster=trial_cluster,
            **{**options, "precision": mine.precision(options.get("precision"))},
            profile=profile,
            fix=fix or (),
            allow=allow or (),
            framework=mine.value_of("framework", framework) or "native",
            budget=budget,
            run=run,
            data=data,
            tokenizer=tokenizer,
            trust_code=trust_code,
            trials=trials,
            output=output,
            dry_run=dry_run,
            progress=progress,
            notify=(lambda text: None) if json else print_message,
        )
    if html:
        write_page(result, html)
    if json:
        print(as_json(tuned_json(result) | {"html": html}))
        return
    then = "run the same command without --dry-run" if dry_run else _then(run, result)
    facts = [*defaults_facts(mine.notes), next_fact(then, explain=explain)]
    if html:
        facts.insert(-1, Fact(label="page", text=html, copied=True))
    for part in tuned_parts(result, facts, explain=explain):
        out.print(part)


def _then(run: str | None, result: TuningResult) -> str:
    """Return what trains by the plan: as its trials ran, predicted with what they showed."""
    from meshwright.tune.tune import CONSTANTS_FILE

    output = result.plan_file or ""
    if result.trial_cluster is not None and run is None:
        return f"meshwright launch {output}"
    if run is None:
        return f"meshwright launch {output} --profile {result.folder}/{CONSTANTS_FILE}"
    if "{config}" in run:
        return f"meshwright export {output} -o CONFIG"
    return run.replace("{plan}", output).replace("{output}", "runs/tuned")


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
    from meshwright.api import commands
    from meshwright.planner.calibration.scores.validate import validation_json
    from meshwright.planner.report.validation_report import validation_text
    from meshwright.render.json_output import as_json
    from meshwright.render.text import next_fact

    with bar("predicting rows", quiet=json) as progress:
        result = commands.validate(table, html=html, rows=rows, progress=progress)
    if json:
        print(as_json(validation_json(result)))
        return
    facts = [next_fact("" if html else "--html makes a page of it", explain=explain)]
    out.print(validation_text(result, facts=facts, explain=explain))


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
    from meshwright.api import calibration
    from meshwright.planner.calibration.fitting.fitted_calibration import calibrated_json
    from meshwright.planner.report.validation_report import calibration_text
    from meshwright.render.json_output import as_json
    from meshwright.render.text import next_fact

    result = calibration.calibrate(runs, accelerator=accelerator, profile=profile, output=output)
    if json:
        print(as_json(calibrated_json(result)))
        return
    then = f"meshwright plan MODEL --cluster CLUSTER --profile {output}"
    facts = [next_fact(then if output else "add -o constants.yaml to keep them", explain=explain)]
    out.print(calibration_text(result, facts, explain=explain))
