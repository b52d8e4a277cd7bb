"""The best plan of each framework for four models, with its proof: `docs/results/frameworks.md`.

python benchmarks/framework_plans.py       searches, exports and writes the page (a minute)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.framework_configs.configuration import FRAMEWORKS, configuration
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

PAGE = Path(__file__).parent.parent / "docs" / "results" / "frameworks.md"
CASES = (
    ("llama-3.1-8b", "8xh100-sxm-80gb"),
    ("llama-3.1-70b", "8x8xh100-sxm-80gb"),
    ("mixtral-8x7b", "2x8xh100-sxm-80gb"),
    ("deepseek-v3", "256x8xh800-sxm-80gb"),
)
PLANNED = ("native", "torchtitan", "megatron", "deepspeed", "nanotron", "fsdp", "accelerate")
HEAD = (
    "# Plans for each framework\n\n"
    "Written by `python benchmarks/framework_plans.py`: 4,096 tokens per sample and about 4 "
    "million per step, with no choice pinned. For each framework its own space is searched "
    "(`space` of `planner/catalog/frameworks/NAME.yaml`) with its own costs. Each plan is the "
    "fastest that was simulated, and is exported as the framework's configuration. "
    "Step times differ between frameworks because their kernels, overlap and memory differ, as "
    "far as published runs show it (`docs/results/accuracy.md`). *Searched* counts configurations, "
    "*solved* exact partition problems.\n\n"
    "| model, cluster | framework | plan | step | searched | solved | configuration |\n"
    "|---|---|---|---:|---:|---:|---|\n"
)


def rows() -> Iterator[str]:
    """Yield a row for every model and framework."""
    for name, cluster in CASES:
        model, machine = resolve_model(name), resolve_cluster(cluster)
        for framework in PLANNED:
            request = Request.create(model, machine, framework=framework, called=cluster)
            head = f"| {name}, {cluster} | {framework} |"
            try:
                found = search(request)
            except NoPlanFits as error:
                yield f"{head} none: {_why(str(error))} | | | | |"
                continue
            assert found.certificate.lower_bound_s <= found.prediction.step_time_s
            choices = {item.recompute for stage in found.plan.stages for item in stage.layers}
            again = "" if choices == {"none"} else f", recompute {'/'.join(sorted(choices))}"
            said = "`launch`"
            if framework in FRAMEWORKS:
                text = configuration(found.plan, model, framework, machine)
                said = f"{len(text.splitlines())} lines"
            yield (
                f"{head} {found.prediction.layout}{again} | "
                f"{seconds_text(found.prediction.step_time_s)} | "
                f"{found.certificate.configurations:,} | {found.solved} | {said} |"
            )


def _why(message: str) -> str:
    """Return the first reason of a message: what is not run, or what the closest would need."""
    if ". The closest, " in message:
        return message.partition(". The closest, ")[2].partition(";")[0]
    return message.partition(" layouts: ")[2].partition(" (")[0] or message


if __name__ == "__main__":
    PAGE.write_text(HEAD + "\n".join(rows()) + "\n")
