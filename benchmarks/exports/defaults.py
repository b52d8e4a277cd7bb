"""What `plan --framework X` answers without any choice, written for X: `docs/results/exports.md`.

python benchmarks/exports/defaults.py        plans and writes the section; some minutes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from page import write_section

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.framework_configs.configuration import FRAMEWORKS, configuration
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

MODELS = (
    *("gpt2", "gpt2-xl", "opt-1.3b", "pythia-410m", "falcon-7b", "bloom-560m", "mpt-7b"),
    *("llama-2-7b", "llama-2-13b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b"),
    *("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "qwen3-32b", "gemma-2-2b", "gemma-2-9b"),
    *("mistral-7b", "phi-3-mini", "phi-4", "granite-3.1-8b", "smollm3-3b", "starcoder2-15b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "llama-3.1-70b"),
)
CLUSTERS = (
    *("8xa100-sxm-40gb", "8xh100-sxm-80gb", "4x8xh100-sxm-80gb", "8x8xh100-sxm-80gb"),
    *("8xb200", "2x8xl40s"),
)


class Row(NamedTuple):
    """A default plan and what became of it."""

    framework: str
    model: str
    cluster: str
    layout: str
    """Empty: no plan of this framework fits there."""
    refused: str
    """Why the plan is not written; empty: it is."""


def searched_frameworks() -> list[str]:
    """Return the frameworks whose space is searched."""
    return [
        name
        for name, framework in frameworks().items()
        if name != "native" and name in FRAMEWORKS and framework.space is not None
    ]


def exported(framework: str, model: str, cluster: str) -> Row:
    """Plan by default for a framework, and write the plan for it."""
    graph, machine = resolve_model(model), resolve_cluster(cluster)
    request = Request.create(graph, machine, framework=framework, called=cluster)
    try:
        plan = search(request).plan
    except NoPlanFits:
        return Row(framework, model, cluster, "", "")
    try:
        configuration(plan, graph, framework, machine)
    except DocumentError as error:
        return Row(framework, model, cluster, plan.layout.text(), error.message)
    return Row(framework, model, cluster, plan.layout.text(), "")


def text(rows: Sequence[Row]) -> str:
    """Return the section of the page."""
    models, clusters = {row.model for row in rows}, {row.cluster for row in rows}
    lines = [
        f"`python benchmarks/exports/defaults.py` runs `plan --framework X` for {len(models)} models "
        f"on {len(clusters)} clusters, with default options, and exports each "
        "plan for X. *No plan*: nothing that the framework executes fits there.",
        "",
        "| framework | planned | no plan | written | refused |",
        "|---|---:|---:|---:|---:|",
    ]
    for framework in dict.fromkeys(row.framework for row in rows):
        mine = [row for row in rows if row.framework == framework]
        planned = [row for row in mine if row.layout]
        refused = sum(bool(row.refused) for row in planned)
        lines.append(
            f"| {framework} | {len(planned)} | {len(mine) - len(planned)} "
            f"| {len(planned) - refused} | {refused} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Plan, write, and fail if a default plan cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frameworks", nargs="*", help="Only these, and no page")
    only = parser.parse_args().frameworks
    rows = []
    for framework in only or searched_frameworks():
        for model in MODELS:
            for cluster in CLUSTERS:
                row = exported(framework, model, cluster)
                rows.append(row)
                if row.refused:
                    print(*row, sep=", ")
        print(f"{framework}: {sum(bool(row.layout) for row in rows)} plans so far", flush=True)
    if not only:
        write_section("Default plans", text(rows))
    sys.exit(any(row.refused for row in rows))


if __name__ == "__main__":
    main()
