"""Tensor parallelism of a script's own modules, by styles in torch's own words, or derived.

    tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

A pattern names modules by their paths; `*` stands for one step.  Without a map, or beside it, what
tensor_styles_search.py finds is divided.  The rest is whole on every rank of the
tensor axis: each computes the same, and its gradients are equal there.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.parallel.tensor_check import TRIED, DividedUnit
from meshwright.runtime.parallel.tensor_collectives import TensorRanks
from meshwright.runtime.parallel.tensor_regions import take_parts
from meshwright.runtime.parallel.tensor_styles_search import DerivedStyles, given_text, line_of
from meshwright.runtime.parallel.trial_weights import joined
from meshwright.runtime.techniques import lora
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.trace import ModuleTensor
from meshwright.runtime.tracing.tracer import Recorder

Styles = Mapping[str, ParallelStyle]
EXAMPLE = {"blocks.*.up": "ColwiseParallel()", "blocks.*.down": "RowwiseParallel()"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStyles:
    """The division of a script's modules over the tensor axis."""

    given: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """By path, as the user says."""
    derived: Mapping[str, DividedUnit] = field(default_factory=dict)
    """By unit."""

    def __bool__(self) -> bool:
        """Return whether anything is divided."""
        return bool(self.given) or bool(self.derived)


def styles_by_name(
    plan: Plan, module: nn.Module, recorder: Recorder, styles: Styles | None, tried: Any
) -> ScriptStyles:
    """Return how each module is divided: as `styles` say, and else as can be derived.

    Units are tried on a batch like `tried`.  Warns where nothing can be divided.

    Raises LaunchError where plan and styles do not go together, a pattern matches nothing, or a
    module is named whose parameters something else reads too.
    """
    degree = plan.mesh.tensor
    if degree == 1:
        return ScriptStyles()
    given = _named_styles(module, recorder, styles or {})
    units = DerivedStyles(module, recorder, tried, left_out=frozenset(given)).units_at(degree)
    derived = {name: unit for name, unit in units.items() if unit.regions}
    if not (given or derived):
        name, reason = _main_reason(
            units, (type(module).__name__, "it has no Linear, convolution or table")
        )
        # Styles do not help code that does not run on a part, unless only its draws differ.
        fitting = given_text(units) or ({} if reason.startswith(TRIED) else EXAMPLE)
        say_how = f"say how with Engine({line_of(fitting)}), or " if fitting else ""
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(
                f"mesh.tensor: is {degree}, and no module can be divided ({name}: {reason}), so "
                f"that {degree} ranks each compute the same; {say_how}plan with tensor 1",
                stacklevel=2,
            )
    return ScriptStyles(given=given, derived=derived)


def _main_reason(units: Mapping[str, DividedUnit], otherwise: tuple[str, str]) -> tuple[str, str]:
    """Return what stays whole and why, that which was tried first."""
    reasons = [
        (f"{name}.{path}".strip("."), text)
        for name, unit in units.items()
        for path, text in unit.whole.items()
    ]
    return min(reasons, key=lambda pair: not pair[1].startswith(TRIED), default=otherwise)


def _named_styles(
    module: nn.Module, recorder: Recorder, styles: Styles
) -> dict[str, ParallelStyle]:
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
            raise LaunchError(
                f"tensor: '{pattern}' names {twice}, which has a style already; "
                "name each module once"
            )
        found |= dict.fromkeys(matched, style)
    leaves = (leaf for node in recorder.first.nodes for leaf in node.leaves)
    held = {leaf.name for leaf in leaves if isinstance(leaf, ModuleTensor)}
    firsts = list(recorder.aliases.values())
    for name in found:
        if lora.is_adapted(module.get_submodule(name)):
            raise LaunchError(
                f"tensor: {name} has an adapter of the plan's lora, whose matrices torch's styles "
                "do not know; leave it out, and it is divided where it can be"
            )
        for parameter_name, _ in module.get_submodule(name).named_parameters():
            full = f"{name}.{parameter_name}"
            first = recorder.aliases.get(full, full)
            if first in held or firsts.count(first) > 1:
                raise LaunchError(
                    f"tensor: {full} is read elsewhere too, and would be divided in one place "
                    "only; leave its module whole"
                )
    return found


def divide(
    stage: RecordedStage, styles: ScriptStyles, mesh: DeviceMesh
) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    """Divide the modules of a stage over the tensor axis; those of other stages stay.

    Return the whole parameters whose gradients must be summed over that axis, and the sizes of
    matrices that lie one behind the other in dim 0 of a parameter, each divided by itself.
    """
    for name, style in styles.given.items():
        try:
            part = stage.part(name)
        except KeyError:
            continue
        parallelize_module(part, mesh, style)
    summed: set[str] = set()
    sections: dict[str, tuple[int, ...]] = {}
    group = mesh.get_group()
    for name, divided in styles.derived.items():
        unit = stage.unit(name)
        if unit is None:
            continue
        prefix = f"{name}." if name else ""
        for parameter_name, pieces in take_parts(
            unit,
            divided.regions,
            group.rank(),
            group.size(),
            lambda pieces, dim: DTensor.from_local(
                joined(pieces, dim), mesh, [Shard(dim)], run_check=False
            ),
        ).items():
            if len(pieces) > 1:
                sections[f"{prefix}{parameter_name}"] = pieces
        divided.apply(unit, TensorRanks(group))
        summed |= {f"{prefix}{parameter_name}" for parameter_name in divided.partial}
    return summed, sections


def _matches(name: str, pattern: str) -> bool:
    steps, wanted = name.split("."), pattern.split(".")
    return len(steps) == len(wanted) and all(map(fnmatch.fnmatchcase, steps, wanted))
