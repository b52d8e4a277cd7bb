"""Plans that the engine cannot execute.  The list is read before a run starts: no torch here.

What a layout cannot be stands in planner.frameworks.native_limits; here is what only a plan's
stages and the source of its model tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.model import (
    ModelGraph,
    is_factory,
    is_own,
    is_recorded,
    is_script,
)
from meshwright.planner.documents.plan import Plan
from meshwright.planner.frameworks.native_limits import layer_obstacle, obstacle
from meshwright.planner.schedules import PLAIN, schedule_of


def unsupported_reason(plan: Plan, model: ModelGraph) -> str | None:
    """Return why this plan cannot be executed for this model, or None if it can."""
    return next(_obstacles(plan, model), None)


def foreign(plan: Plan) -> str | None:
    """Return why a plan for another framework is not executed here, and what does; None if ours."""
    if base_of(plan.framework) == "native":
        return None
    return (
        f"framework: is {plan.framework}, and this runtime executes native plans; write its "
        "configuration with 'meshwright export' and start it there"
    )


def documents_refused(plan: Plan, model: ModelGraph) -> str | None:
    """Return why attention cannot be restricted to documents of a sample, or None if it can."""
    is_users_module, a = is_own(plan.model.source), model.architecture
    if not is_users_module and (a is None or a.family == "reference"):
        return (
            f"documents: {plan.model.name} is no model of transformers, and attention of others is "
            "not restricted to documents here; train on text, or with meshwright.Engine"
        )
    if schedule_of(plan.schedule).stale:
        return f"schedule: {plan.schedule} does not take documents; use {PLAIN}"
    return None


def _obstacles(plan: Plan, model: ModelGraph) -> Iterator[str]:
    other = foreign(plan)
    if other:
        yield other
    if is_script(plan.model.source):
        yield (
            f"model.source: is {plan.model.source}, which its own script trains: "
            "meshwright run --plan PLAN SCRIPT.py"
        )
    own_modules = is_factory(plan.model.source) or is_recorded(plan.model.source)
    if own_modules:
        # What runs is the user's code; figures of an architecture say nothing about it.
        model = model.model_copy(update={"architecture": None, "source": plan.model.source})
    for path, kind in plan.kinds_by_path.items():
        found = obstacle(model, kind.job, kind.layout)
        if found:
            yield f"{path}{found}"
        for index, stage in enumerate(kind.stages):
            for item in stage.layers:
                reason = layer_obstacle(kind.layout, item.recompute, item.activations)
                if reason:
                    yield f"{path}stages[{index}].layers: {item.layer}: {reason}"
    if model.architecture is None and not own_modules:
        yield f"model: {model.name} has no architecture and its source is no file.py:factory"
    if model.edges and not own_modules:
        yield "model.edges: only graphs of your own modules (file.py:factory) can be executed"
