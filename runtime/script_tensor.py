"""Tensor parallelism of a script's own modules, by styles in torch's own words.

    tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

A pattern names modules by their paths; `*` stands for one step.  What no pattern names is whole on
every rank of the tensor axis: each computes the same, and its gradients are equal there.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from planner.errors import LaunchError
from planner.plan import Plan
from planner.schedules import schedule_of
from runtime.recorded_stage import RecordedStage
from runtime.recorder import Recorder
from runtime.recording import Held

Styles = Mapping[str, ParallelStyle]


def styles_by_name(
    plan: Plan, module: nn.Module, recorder: Recorder, styles: Styles | None
) -> dict[str, ParallelStyle]:
    """Return the style of each module that has one, by its path.

    Raises LaunchError where plan and styles do not go together, a pattern matches nothing, or a
    module is named whose parameters something else reads too.
    """
    if plan.mesh.tensor == 1:
        styles = {}
    elif not styles:
        raise LaunchError(
            f"mesh.tensor: is {plan.mesh.tensor}, and no module says how it is divided; give "
            'Engine(tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": '
            "RowwiseParallel()}), or plan with tensor 1"
        )
    elif schedule_of(plan.schedule).splits_backward:
        raise LaunchError(
            f"schedule: is {plan.schedule}, which makes weight gradients apart, and those of "
            "modules with tensor styles are not; use another schedule, or tensor 1"
        )
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in styles.items():
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise LaunchError(
                f"tensor: '{pattern}' names no module; paths are such as {', '.join(names[:4])}"
            )
        twice = next((name for name in matched if name in found), None)
        if twice is not None:
            raise LaunchError(f"tensor: '{pattern}' names {twice}, which has a style already")
        found |= dict.fromkeys(matched, style)
    leaves = (leaf for node in recorder.first.nodes for leaf in node.leaves)
    held = {leaf.name for leaf in leaves if isinstance(leaf, Held)}
    firsts = list(recorder.aliases.values())
    for name in found:
        for own, _ in module.get_submodule(name).named_parameters():
            full = f"{name}.{own}"
            first = recorder.aliases.get(full, full)
            if first in held or firsts.count(first) > 1:
                raise LaunchError(
                    f"tensor: {full} is read elsewhere too, and would be divided in one place "
                    "only; leave its module whole"
                )
    return found


def divide(stage: RecordedStage, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the modules of a stage that have a style over the tensor axis."""
    for name, style in styles.items():
        try:
            part = stage.part(name)
        except KeyError:  # on another stage
            continue
        parallelize_module(part, mesh, style)


def _matches(name: str, pattern: str) -> bool:
    steps, wanted = name.split("."), pattern.split(".")
    return len(steps) == len(wanted) and all(map(fnmatch.fnmatchcase, steps, wanted))
