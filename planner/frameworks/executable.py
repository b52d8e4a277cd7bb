"""Whether a stack executes a layout: the one question that the search asks of every layout.

Of `native` planner.frameworks.native_limits says it, for what the runtime does and for models; of
other frameworks the data of their space do, beside what no backend could do as the planner
describes it.
"""

from __future__ import annotations

from functools import partial

from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.stack import Stack
from meshwright.planner.documents.stack_space import EVERYTHING, Facts, obstacles
from meshwright.planner.frameworks.native_limits import Rules, limit, refusal


def rules_of(stack: Stack, *, of_degrees: bool = False) -> Rules:
    """Return what says why a stack does not execute a layout, or None if it does.

    With `of_degrees` it speaks of any one layout for all that have its degrees.
    """
    if stack.name == "native":
        return refusal
    return partial(_refusal, stack, of_degrees)


def _refusal(
    stack: Stack,
    of_degrees: bool,
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    layout: Layout,
) -> str | None:
    space = stack.space or EVERYTHING
    reason = limit(model, cluster, job, layout, space)
    if reason is None:
        facts = Facts(model, cluster, job, layout)
        reason = next(obstacles(space, facts, of_degrees=of_degrees), None)
        reason = f"{stack.name}: {reason}" if reason else None
    return reason
