"""Test whether a framework executes a layout: the search asks it of every layout.

For `native` they are in planner.frameworks.native_limits, by the runtime's abilities and by models;
of other frameworks the data of their space do, beside what no framework could do as the planner
describes it.
"""

from __future__ import annotations

from functools import partial

from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.framework import Framework, base_of
from meshwright.planner.documents.framework_space import EVERYTHING, Facts, obstacles
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.frameworks.native_limits import Rules, limit, refusal


def rules_of(framework: Framework, *, of_degrees: bool = False) -> Rules:
    """Return the function that returns why a framework does not execute a layout, or None.

    With `of_degrees` the answer for one layout holds for all with its degrees.
    """
    if base_of(framework.name) == "native":
        return refusal
    return partial(_refusal, framework, of_degrees)


def _refusal(
    framework: Framework,
    of_degrees: bool,
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    layout: Layout,
) -> str | None:
    space = framework.space or EVERYTHING
    reason = limit(model, cluster, job, layout, space)
    if reason is None:
        facts = Facts(model, cluster, job, layout)
        reason = next(obstacles(space, facts, of_degrees=of_degrees), None)
        reason = f"{framework.name}: {reason}" if reason else None
    return reason
