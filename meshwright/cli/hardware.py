"""Commands about hardware and its prices: whatif, catalog."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any

import typer

from meshwright.cli.console import bar, out
from meshwright.cli.options import (
    STEP_OPTIONS,
    Explain,
    GlobalBatch,
    Html,
    Json,
    SeqLen,
    with_options,
)
from meshwright.planner.errors import DocumentError


class WhatIfOrder(StrEnum):
    """Criterion by which candidates are ranked."""

    COST = "cost"
    TIME = "time"
    ENERGY = "energy"
    CARBON = "carbon"
    WEIGHTED = "weighted"


class WhatIfSizing(StrEnum):
    """Purpose for which the number of nodes is computed."""

    NEED = "need"
    POWER = "power"
    AFFORD = "afford"


class WhatIfMarket(StrEnum):
    """Kinds of providers."""

    SPECIALIST = "specialist"
    HYPERSCALER = "hyperscaler"


class WhatIfTuning(StrEnum):
    """Kinds of training."""

    PRETRAIN = "pretrain"
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


@with_options(STEP_OPTIONS)
def whatif(
    study: Annotated[str | None, typer.Argument(help="A STUDY.yaml")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to train, in place of a study")
    ] = None,
    clusters: Annotated[
        str | None, typer.Option("--clusters", help="Separated by commas: 8xa10g,4xp5.48xlarge")
    ] = None,
    owned: Annotated[
        str | None,
        typer.Option("--owned", help="Clusters that you own, whose hardware costs nothing more"),
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
        typer.Option("--confidence", help="Least probability of meeting these goals: 0.8"),
    ] = None,
    electricity: Annotated[
        float | None, typer.Option("--electricity", help="US dollars per kWh")
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option("--utilisation", help="Share of bought or reserved hours that all work uses"),
    ] = None,
    spot: Annotated[
        str | None, typer.Option("--spot", help="Clusters that may be taken away at any time")
    ] = None,
    jobs: Annotated[
        str | None,
        typer.Option("--jobs", help="A year of jobs in place of a model: MODEL=1e10x12,..."),
    ] = None,
    change: Annotated[
        str | None,
        typer.Option("--change", help="Compare --clusters with what they could be: network=0.1"),
    ] = None,
    fix: Annotated[
        str | None, typer.Option("--fix", help="Fix choices of each plan: tp=1,zero=3")
    ] = None,
    allow: Annotated[
        str | None, typer.Option("--allow", help="Allow what costs accuracy or a host: offload")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option("--host-memory", help="GiB of a node's memory, to offload to")
    ] = None,
    as_run: Annotated[
        bool, typer.Option("--as-run", help="Compare plans with tp=1, pp=1, zero=3, as most run")
    ] = False,
    each_provider: Annotated[
        bool, typer.Option("--each-provider", help="Compare the providers of --clusters")
    ] = False,
    wait_months: Annotated[
        float | None, typer.Option("--wait-months", help="Compare with an order so much later")
    ] = None,
    rent_change: Annotated[
        float | None, typer.Option("--rent-change", help="Change of rents a year: -0.2")
    ] = None,
    lead_days: Annotated[
        float | None, typer.Option("--lead-days", help="Days until bought devices are delivered")
    ] = None,
    market: Annotated[
        WhatIfMarket | None, typer.Option("--market", help="Ask one kind of provider")
    ] = None,
    quota: Annotated[
        int | None, typer.Option("--quota", help="Devices rented at once, with {n}: 512")
    ] = None,
    years: Annotated[
        float | None, typer.Option("--years", help="Years until bought devices are sold")
    ] = None,
    by: Annotated[WhatIfOrder | None, typer.Option("--by", help="What to rank by")] = None,
    day_usd: Annotated[
        float | None,
        typer.Option("--day-usd", help="With --by weighted: US dollars that a day sooner is worth"),
    ] = None,
    tuning: Annotated[
        WhatIfTuning | None,
        typer.Option("--tuning", help="Pretraining, or which kind of fine-tuning"),
    ] = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    framework: Annotated[
        str | None, typer.Option("--framework", help="Framework; default: the fastest public one")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="bf16, fp8; auto takes the fastest")
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    fit_probability: Annotated[
        float | None,
        typer.Option("--fit-probability", help="Least probability that a plan fits: 0.95"),
    ] = None,
    prices: Annotated[
        str | None, typer.Option("--prices", help="Price file instead of the catalogue")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="How many candidates to plan in parallel")
    ] = None,
    executor: Annotated[
        str | None, typer.Option("--executor", help="processes, dask:ADDRESS or ray")
    ] = None,
    html: Html = None,
    table: Annotated[str | None, typer.Option("--csv", help="Write all candidates here")] = None,
    write: Annotated[
        str | None, typer.Option("--write", help="Write the flags as a study to edit")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the page on 127.0.0.1, where it can plan again")
    ] = False,
    explain: Explain = False,
    json: Json = False,
) -> None:
    """Compare clusters before they are bought or rented.

    For each cluster: time, cost and energy of its best plan.
    """
    from meshwright.api.defaults import of_user
    from meshwright.planner.report.whatif_text import result_facts, result_text
    from meshwright.planner.whatif.conclusions import verdicts
    from meshwright.planner.whatif.findings import answers
    from meshwright.planner.whatif.run_study import result_json
    from meshwright.render.json_output import as_json
    from meshwright.render.text import defaults_facts, next_fact
    from meshwright.studies import study_command as studies

    mine = of_user()
    if study is None:  # which says everything itself
        framework, prices = mine.value_of("framework", framework), mine.value_of("prices", prices)
    with bar("planning candidates", quiet=json) as progress:
        result = studies.whatif(
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
            market=market.value if market else None,
            spot=_parts(spot),
            jobs=_parts(jobs),
            change=_parts(change),
            fix=_parts(fix),
            allow=_parts(allow),
            host_memory=host_memory,
            as_run=as_run,
            each_provider=each_provider,
            wait_months=wait_months,
            rent_change=rent_change,
            lead_days=lead_days,
            quota=quota,
            by=by.value if by else None,
            day_usd=day_usd,
            tuning=tuning.value if tuning else None,
            **{
                name: value
                for name, value in options.items()
                if value != STEP_OPTIONS[name][1]  # beside a study nothing is given
            },
            framework=framework,
            precision=precision,
            seq_len=seq_len,
            global_batch=global_batch,
            fit_probability=fit_probability,
            prices=prices,
            processes=processes,
            executor=executor,
            html=html,
            table=table,
            write=write,
            progress=progress,
        )
    if json:
        conclusion = {"verdict": " ".join(verdicts(result)), "answers": answers(result)}
        print(as_json({**conclusion, **result_json(result)}))
    elif explain:
        out.print(result_text(result))
    else:
        planned = next((outcome.plan for outcome in result.outcomes if outcome.plan), None)
        if study is None and planned is not None:
            job = planned.job
            mine.left_open(
                {
                    "seq-len": (seq_len, job.seq_len),
                    "global-batch": (global_batch, job.global_batch),
                }
            )
        for cluster in _parts(clusters):
            mine.abbreviated(cluster)
        out.print(result_facts(result, [*defaults_facts(mine.notes), next_fact("", explain=False)]))
    if result.interrupted:
        raise typer.Exit(1)  # what is printed is a part
    if json:
        return
    for path in (html, table, write):
        if path:
            out.print(f"written: {path}")
    if serve:
        with studies.serve(result, prices=prices, processes=processes) as server:
            out.print(f"page: {server.address} (Ctrl+C ends it)")
            server.serve_forever()


def _parts(text: str | None) -> list[str]:
    """Return the parts that commas separate."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


class Shelf(StrEnum):
    """The lists of the catalogue."""

    ACCELERATORS = "accelerators"
    NODES = "nodes"
    MODELS = "models"
    FRAMEWORKS = "frameworks"
    PRICES = "prices"
    CLUSTER = "cluster"


def _write_cluster(text: str, output: str | None, *, json: bool) -> None:
    """Write a cluster as a file to change, or print it."""
    from meshwright.planner.catalog.cluster_file import cluster_text
    from meshwright.planner.catalog.expressions import resolve_cluster
    from meshwright.planner.documents import document
    from meshwright.render.json_output import as_json

    cluster = resolve_cluster(text)
    if output is not None:
        document.write_text(cluster_text(cluster), output)
    if json:
        print(as_json(cluster.model_dump(mode="json", exclude_none=True)))
    elif output is None:
        print(cluster_text(cluster), end="")
    else:
        out.print(f"written to {output}; use: plan MODEL --cluster {output}")


def _update_prices(shelf: Shelf, imported: str | None, output: str, *, json: bool) -> None:
    """Fetch today's lists, write them as rents, and say what moved."""
    from meshwright.render.json_output import as_json
    from meshwright.studies.price_update import update_prices

    if shelf is not Shelf.PRICES or imported is not None:
        raise DocumentError("update", "goes with `catalog prices` and no --import; give one")
    prices, moves = update_prices(output, say=out.print if not json else len)
    if json:
        print(as_json(prices.model_dump(mode="json", exclude_none=True)))
        return
    for text in moves or ["no price of the catalogue moved"]:
        out.print(text)
    out.print(f"{len(prices.rents)} rents written to {output}; use: whatif --prices {output}")


def catalog(
    shelf: Annotated[Shelf, typer.Argument(help="Which list")] = Shelf.MODELS,
    what: Annotated[
        str | None, typer.Argument(help="With cluster: which, as 4x8xh100-sxm-80gb")
    ] = None,
    plugins: Annotated[
        bool, typer.Option("--plugins", help="List what installed packages add instead")
    ] = False,
    imported: Annotated[
        str | None, typer.Option("--import", help="A price list of SkyPilot or gpuhunt (CSV)")
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Fetch today's public price lists, and say what moved")
    ] = False,
    provider: Annotated[
        str, typer.Option("--provider", help="With --import: provider of the prices")
    ] = "imported",
    date: Annotated[
        str | None, typer.Option("--date", help="With --import: month of the prices, 2026-11")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            help="With --import, --update: the prices, default rents.yaml; with cluster: the file",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List models, accelerators, prices; write a cluster."""
    from meshwright.api import commands
    from meshwright.render.json_output import as_json
    from meshwright.render.text import catalog_table

    if (what is None) == (shelf is Shelf.CLUSTER):
        raise DocumentError(
            "", "of the lists, cluster alone takes a name; write catalog cluster 4x8xh100-sxm-80gb"
        )
    if what is not None:
        _write_cluster(what, output, json=json)
        return
    if update:
        _update_prices(shelf, imported, output or "rents.yaml", json=json)
        return
    if imported is not None:
        output = output or "rents.yaml"
        if shelf is not Shelf.PRICES or date is None:
            raise DocumentError(
                "import", "goes with `catalog prices` and the list's --date; give both"
            )
        from meshwright.studies import study_command as studies

        price_list = studies.import_prices(imported, provider=provider, date=date, output=output)
        if json:
            print(as_json(price_list.model_dump(mode="json", exclude_none=True)))
        else:
            out.print(
                f"{len(price_list.rents)} rents written to {output}; use: whatif --prices {output}"
            )
        return
    rows = commands.plugins() if plugins else commands.catalog(shelf.value)
    if json:
        print(as_json(rows))
    elif rows:
        out.print(catalog_table(rows))
    else:
        out.print("no installed package adds anything")
