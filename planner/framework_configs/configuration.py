"""A plan as the configuration of a framework, or why that cannot run it.

A configuration contains the plan's parallel degrees, batches, schedule, recomputation, sharding,
precision, optimizer and learning rates; model, data and number of steps are the other's own.  A
plan that uses what a framework does not support is refused, and what a framework sets in its
training script is named: nothing is left out silently.  `docs/results/exports.md` measures which
releases read the configurations, and the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import nearest
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.plugins import load_plugin, plugins
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs import (
    fine_tuners,
    megatron,
    megatron_bridge,
    torchtitan,
    torchtitan_toml,
    writers,
)
from meshwright.planner.framework_configs.exportable_plan import FrameworkPlan, for_all, own_text
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.frameworks.native_limits import Rules
from meshwright.planner.requests.request import Request


class Written(NamedTuple):
    """Functions that write plans for a framework."""

    obstacles: Callable[[FrameworkPlan], Iterator[str]]
    """Function that yields the obstacles to writing a plan."""
    text: Callable[[FrameworkPlan], str]
    outside: Callable[[FrameworkPlan], Iterator[str]]
    """Function that yields settings that are made elsewhere."""
    says: frozenset[str] = frozenset()
    """Fields of a plan that this configuration contains and most others do not."""


def configuration(
    plan: Plan,
    model: ModelGraph,
    to: str,
    cluster: ClusterSpec | None = None,
    *,
    recipe: bool = True,
) -> str:
    """Return the text of a framework's configuration; DocumentError names what it cannot do.

    Frameworks of NEED_NODES get the cluster's nodes too.  Without its `recipe` a plan leaves
    optimizer and learning rates to the framework's own, save for WHOLE_RECIPES.
    """
    if not is_written(to):
        targets = [*FRAMEWORKS, *plugins("exporters")]
        raise DocumentError("to", f"is '{to:.40}'; {nearest(to, targets)}")
    reasons = obstacles(plan, model, to, cluster)
    if reasons:
        cannot = "has no words here for" if plan.read_from is not None else "cannot run"
        raise DocumentError("to", f"{to} {cannot} this plan: {'; '.join(reasons)}")
    wanted = FrameworkPlan(plan=plan, model=model, cluster=cluster, recipe=recipe)
    return _writer(to).text(wanted)


def is_written(to: str) -> bool:
    """Return True if plans are written for a framework, by us or by an installed package."""
    return to in FRAMEWORKS or to in plugins("exporters")


def _writer(to: str) -> Written:
    """Return the functions that write plans for a framework; our own come before packages'."""
    if to in FRAMEWORKS:
        return FRAMEWORKS[to]
    exporters = load_plugin("exporters", to)
    if not isinstance(exporters, Written):
        raise DocumentError(
            "to",
            f"{plugins('exporters')[to].value} is no "
            "meshwright.planner.framework_configs.configuration.Written; "
            "return one from the plugin",
        )
    return exporters


def obstacles(
    plan: Plan, model: ModelGraph, to: str, cluster: ClusterSpec | None = None
) -> list[str]:
    """Return the properties of a plan that a framework does not have."""
    wanted, how = FrameworkPlan(plan=plan, model=model, cluster=cluster), _writer(to)
    return [*for_all(wanted, how.says), *how.obstacles(wanted)]


def usual_writer(plan: Plan, model: ModelGraph, cluster: ClusterSpec | None = None) -> str:
    """Return whose configuration a plan of a framework is written as, unless somebody names one.

    The first of those around the framework that can say all of the plan.
    """
    framework = base_of(plan.framework)
    writers = (framework, *AROUND.get(framework, ()))
    able = (to for to in writers if is_written(to) and not obstacles(plan, model, to, cluster))
    return next(able, framework)


def _refusals(
    plan: Plan, model: ModelGraph, cluster: ClusterSpec, rules: Rules
) -> Iterator[str | None]:
    """Yield why a framework does not run each kind of a plan's pipelines, on its own devices."""
    for kind in plan.kinds:
        names = {stage.group for stage in kind.stages}
        groups = tuple(group for group in cluster.groups if group.name in names)
        part = cluster.part(groups) if groups and plan.other_pipelines else cluster
        yield rules(model, part, plan.job, kind.layout)


def caveats(plan: Plan, model: ModelGraph, cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the reasons for which a framework or its configuration does not have a plan.

    A plan has figures all the same: those of the framework, were it to run the plan.  One that was
    read from a configuration of it is run by it.
    """
    if plan.read_from is not None:
        return ()
    request = Request.of_plan(plan, model, cluster)
    reason = next(filter(None, _refusals(plan, model, cluster, rules_of(request.framework))), None)
    reasons = [] if reason is None else [reason.removeprefix(f"{request.framework.name}: ")]
    if is_written(base_of(plan.framework)):
        reasons += obstacles(plan, model, usual_writer(plan, model, cluster), cluster)
    text = "; ".join(dict.fromkeys(reasons))
    return (f"outside of what is planned for {plan.framework}: {text}",) if text else ()


def with_environment(text: str, environment: Mapping[str, str]) -> str:
    """Return a configuration headed by a comment with what its ranks are started with.

    JSON has no comments, and is returned as it is.
    """
    if not environment or text.startswith("{"):
        return text
    pairs = " ".join(f"{name}={value}" for name, value in environment.items())
    return f"# start ranks with {pairs}\n{text}"


def in_the_script(
    plan: Plan,
    model: ModelGraph,
    to: str,
    cluster: ClusterSpec | None = None,
    *,
    recipe: bool = True,
    has_job: bool = False,
) -> list[str]:
    """Return the settings of a plan that its training script or its launcher makes.

    Those of the launcher are left out where a job has them.
    """
    wanted = FrameworkPlan(plan=plan, model=model, cluster=cluster, recipe=recipe, has_job=has_job)
    left = (
        [] if recipe or to in WHOLE_RECIPES else ["optimizer and learning rates are your recipe's"]
    )
    return [*_writer(to).outside(wanted), *own_text(wanted), *left]


FRAMEWORKS = {
    "megatron": Written(megatron.obstacles, megatron.text, megatron.outside, megatron.SAYS),
    "torchtitan": Written(
        torchtitan.obstacles, torchtitan.text, torchtitan.outside, torchtitan.SAYS
    ),
    "torchtitan@0.2": Written(
        torchtitan_toml.obstacles, torchtitan_toml.text, torchtitan_toml.outside, torchtitan.SAYS
    ),
    "megatron-bridge": Written(
        megatron_bridge.obstacles,
        megatron_bridge.text,
        megatron_bridge.outside,
        megatron.SAYS | {"lora", "document_len"},
    ),
    "transformers": Written(
        writers.transformers_obstacles,
        writers.transformers_text,
        writers.transformers_outside,
        fine_tuners.SAYS,
    ),
    "trl": Written(
        fine_tuners.adapter_obstacles,
        fine_tuners.trl_text,
        fine_tuners.trl_outside,
        fine_tuners.SAYS | {"document_len", "objective"},
    ),
    "axolotl": Written(
        fine_tuners.adapter_obstacles,
        fine_tuners.axolotl_text,
        fine_tuners.outside,
        fine_tuners.SAYS | {"document_len", "objective"},
    ),
    "llama-factory": Written(
        fine_tuners.llama_factory_obstacles,
        fine_tuners.llama_factory_text,
        fine_tuners.outside,
        fine_tuners.SAYS | {"document_len", "objective"},
    ),
    "torchtune": Written(
        fine_tuners.torchtune_obstacles,
        fine_tuners.torchtune_text,
        fine_tuners.torchtune_outside,
        fine_tuners.SAYS | {"document_len"},
    ),
    "deepspeed": Written(
        writers.deepspeed_obstacles, writers.deepspeed_text, writers.deepspeed_outside
    ),
    "accelerate": Written(
        writers.accelerate_obstacles, writers.accelerate_text, writers.accelerate_outside
    ),
    "nanotron": Written(
        writers.nanotron_obstacles, writers.nanotron_text, writers.nanotron_outside
    ),
    "fsdp": Written(writers.fsdp_obstacles, writers.fsdp_text, writers.fsdp_outside),
    "megatron-deepspeed": Written(
        megatron.deepspeed_obstacles, megatron.deepspeed_text, megatron.outside
    ),
}
"""Writers by the name of their framework; torchtitan@0.2 is its last release that reads TOML."""

AROUND = {
    "transformers": ("trl", "axolotl", "llama-factory"),
    "megatron": ("megatron-bridge",),
}
"""Programs that train by a framework, and whose configurations say more."""
WHOLE_RECIPES = ("nanotron", "fsdp", "accelerate")
"""Frameworks whose file is a whole recipe, or contains no part of one."""
NEED_NODES = ("accelerate",)
"""Frameworks whose configuration counts nodes."""
