"""Tensor styles derived from a module: which of its layers can be divided over the tensor axis.

In each unit of a recording: Linears or convolutions whose outputs go into one other and nowhere
else (attention's q, k, v and o; an MLP's up and down), tables of words, nn.MultiheadAttention.  A
region is believed only once it was run in parts (runtime.parallel.tensor_check); the user's code is
not changed, and must run on a part.

What is not found stays whole on every rank, with the reason, and styles to write where they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.planner.system import progress
from meshwright.runtime.core.side_effects import deepcopy_module, restore_side_effects
from meshwright.runtime.parallel.tensor_check import DividedUnit, DivisionTrial, with_data
from meshwright.runtime.parallel.tensor_regions import PRODUCTS, Region
from meshwright.runtime.tracing.meta_costs import plain_attributes
from meshwright.runtime.tracing.repeated_units import block_numbers, reads_block_number
from meshwright.runtime.tracing.trace import (
    Leaf,
    ModuleTensor,
    Node,
    Recording,
    StageDevice,
    Value,
    values_of,
)
from meshwright.runtime.tracing.tracer import Recorder


class DerivedStyles:
    """The units of a module divided over the tensor axis, worked out as they are asked for."""

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        batch: Any,
        *,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        """`batch` is that of the trials; modules of paths `left_out` are not divided."""
        self._module = module
        self._recorder = recorder
        self._recording = recorder.recording(batch)
        self._left_out = left_out
        self._given = _Arguments(module, self._recording, batch)
        self._found: dict[Any, DividedUnit] = {}
        self._studies: dict[Any, DivisionTrial] = {}
        self._reading: dict[Any, bool] = {}

    def units_at(self, degree: int) -> dict[str, DividedUnit]:
        """Return how each unit is divided over `degree` ranks, by path; those that are not too."""
        with restore_side_effects(self._module):
            return self._divide_units(degree)

    def _divide_units(self, degree: int) -> dict[str, DividedUnit]:
        result = {}
        for name, node in self._units():
            study = self._study(name, node)
            key = (id(study), degree)
            if key not in self._found:
                with progress.running(f"tries {name or 'the module'} over {degree} ranks"):
                    self._found[key] = study.division(degree)
            result[name] = self._found[key]
        return result

    def _units(self) -> Iterator[tuple[str, Node]]:
        """Yield the units that hold something to divide, with their first call."""
        seen: dict[str, int] = {}
        first: dict[str, Node] = {}
        for node in self._recording.nodes:
            if node.unit is not None:
                seen[node.unit] = seen.get(node.unit, 0) + 1
                first.setdefault(node.unit, node)
        for name, node in first.items():
            parts = self._module.get_submodule(name).modules()
            if any(isinstance(part, (*PRODUCTS, nn.Embedding)) for part in parts):
                yield name, node

    def _study(self, name: str, node: Node) -> DivisionTrial:
        unit = self._module.get_submodule(name)
        kept = self._kept_whole(name)
        given = self._given.identity(node)
        what = _identity(unit)
        if self._reads_number(unit, node, (what, given)):
            what = what, block_numbers(unit)
        key = (what, node.draws, node.grad, node.operators, given, tuple(kept))
        if key not in self._studies:
            self._studies[key] = DivisionTrial(
                unit, lambda: self._given.arguments_of(node), kept, draws=node.draws
            )
        return self._studies[key]

    def _reads_number(self, unit: nn.Module, node: Node, like: Any) -> bool:
        """Return whether units that are `like` this one may depend on the number of their block."""
        if not block_numbers(unit):
            return False
        if self._recorder.is_fake:
            return node.reads_number
        if like not in self._reading:
            self._reading[like] = reads_block_number(unit, *self._given.arguments_of(node))
        return self._reading[like]

    def _kept_whole(self, name: str) -> dict[str, str]:
        """Return the modules of a unit that must not be divided, by path, and why."""
        aliases = self._recorder.aliases
        firsts = list(aliases.values())
        leaves = (leaf for node in self._recording.nodes for leaf in node.leaves)
        held = {
            aliases.get(leaf.name, leaf.name) for leaf in leaves if isinstance(leaf, ModuleTensor)
        }
        held |= {r.name for r in self._recording.result if isinstance(r, ModuleTensor)}
        result = {}
        calls = [node.unit for node in self._recording.nodes].count(name)
        for path, part in self._module.get_submodule(name).named_modules():
            full = f"{name}.{path}" if name and path else name or path
            if full in self._left_out:
                result[path] = "has a style of its own"
            elif calls > 1 and isinstance(part, (*PRODUCTS, nn.Embedding)):
                result[path] = f"{name or 'the module'} is called {calls} times"
            elif isinstance(part, (*PRODUCTS, nn.Embedding)) and "weight" not in part._parameters:
                result[path] = "its weight is made of other tensors"
            for attribute in part._parameters:
                full_name = f"{full}.{attribute}" if full else attribute
                first = aliases.get(full_name, full_name)
                if first in held or firsts.count(first) > 1:
                    result[path] = f"its {attribute} is read elsewhere too"
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStyles:
    """The division of a module by a tensor axis, by pattern of paths; printed as a table."""

    ranks: int
    divided: Mapping[str, str]
    """Styles in torch's words."""
    whole: Mapping[str, str]
    """Reasons why a product or a table stays whole on every rank."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Styles for `tensor=` that divide modules now whole, with other random numbers than those of
    one process."""

    @classmethod
    def for_units(cls, units: Mapping[str, DividedUnit], ranks: int) -> TensorStyles:
        """Return both, units of one list that are alike as one pattern."""
        reasons = {
            (name, path): reason
            for name, unit in units.items()
            for path, reason in unit.whole.items()
        }
        return cls(
            ranks=ranks,
            divided=style_text(units),
            whole=_patterns(reasons),
            given=given_text(units),
        )

    def __str__(self) -> str:
        """Return both as text."""
        lines = []
        for title, lines_of_title in (
            (f"over {self.ranks} ranks:", self.divided),
            ("whole on each:", self.whole),
        ):
            if lines_of_title:
                width = max(map(len, lines_of_title))
                lines += [
                    title,
                    *(f"  {path:{width}}  {text}" for path, text in lines_of_title.items()),
                ]
        if self.given:
            lines += [
                "with random numbers other than those of one process:",
                f"  {line_of(self.given)}",
            ]
        return "\n".join(lines)


def style_text(divided: Mapping[str, DividedUnit]) -> dict[str, str]:
    """Return the styles in torch's words by pattern, in the order of the module.

    Units of one list that are divided alike are one pattern.
    """
    return _styles_of({name: unit.regions for name, unit in divided.items()})


def given_text(units: Mapping[str, DividedUnit]) -> dict[str, str]:
    """Return styles that divide what draws otherwise than one process, by pattern."""
    return _styles_of({name: unit.undrawn for name, unit in units.items()})


def line_of(styles: Mapping[str, str]) -> str:
    """Return styles as an argument of Engine.

    >>> line_of({"blocks.*.up": "ColwiseParallel()"})
    'tensor={"blocks.*.up": ColwiseParallel()}'
    """
    return "tensor={" + ", ".join(f'"{path}": {style}' for path, style in styles.items()) + "}"


def _styles_of(regions: Mapping[str, Sequence[Region]]) -> dict[str, str]:
    return _patterns(
        {
            (name, path): _style_of(region, path)
            for name, found in regions.items()
            for region in found
            for path in region.paths
        }
    )


def _patterns(texts: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return what is said of a path in a unit; units of one list that say the same are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for (unit, path), text in texts.items():
        steps = ["*" if step.isdigit() else step for step in unit.split(".")]
        pattern, full = (".".join(filter(None, (of, path))) for of in (".".join(steps), unit))
        groups.setdefault((pattern, text), []).append(full)
    patterns = [pattern for pattern, _ in groups]
    result: dict[str, str] = {}
    for (pattern, text), paths in groups.items():
        alone = len(paths) == 1 or patterns.count(pattern) > 1
        result |= dict.fromkeys(paths, text) if alone else {pattern: text}
    return result


def _style_of(region: Region, path: str) -> str:
    if region.kind == "heads":
        return "heads of nn.MultiheadAttention"
    if region.kind == "table" or path == region.rows:
        return "RowwiseParallel()"
    pieces = region.columns[path]
    return "ColwiseParallel()" + (f" of {len(pieces)} matrices" if len(pieces) > 1 else "")


class _Arguments:
    """Arguments of tried units: random numbers where the recording had numbers."""

    def __init__(self, module: nn.Module, recording: Recording, batch: Any) -> None:
        self._module = module
        self._recording = recording
        self._leaves = [with_data(leaf) for leaf in tree_leaves(batch)]
        self._values: dict[int, Any] = {}

    def identity(self, node: Node) -> Any:
        """Return what of the arguments another unit of the kind may have otherwise."""
        return tuple(
            (tuple(self._recording.values[leaf.at].shape), self._recording.values[leaf.at].dtype)
            if isinstance(leaf, Value)
            else repr(leaf)
            for leaf in node.unnumbered_leaves(self._module)
        )

    def arguments_of(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs of a unit's call."""
        with torch.no_grad():
            for at in self._recording.needed_nodes(values_of(node.leaves)):
                self._derive(self._recording.nodes[at])
        return node.arguments(self._value)

    def _derive(self, node: Node) -> None:
        # A unit without parameters, which may keep what it made.
        called = (
            node.call
            if node.unit is None
            else deepcopy_module(self._module.get_submodule(node.unit))
        )
        assert called is not None
        args, kwargs = node.arguments(self._value)
        outputs = tree_leaves(called(*args, **kwargs))
        self._values |= {value: outputs[place] for place, value in node.made}

    def _value(self, leaf: Any) -> Any:
        match leaf:
            case Value(at) if at in self._values:
                return self._values[at]
            case Value(at):
                value = self._recording.values[at]
                given = with_data(torch.empty(value.shape, dtype=value.dtype, device="meta"))
                return given.requires_grad_(value.requires_grad)
            case Leaf(at):
                return self._leaves[at]
            case ModuleTensor(name):
                path, _, attribute = name.rpartition(".")
                held = getattr(self._module.get_submodule(path), attribute)
                return with_data(held.detach()).requires_grad_(held.requires_grad)
            case StageDevice():
                return torch.device("cpu")
            case _:
                return leaf


def _identity(unit: nn.Module) -> Any:
    """Return what two units that do the same have in common, whatever their blocks' numbers."""
    return tuple(
        (
            path,
            type(part),
            tuple((k, tuple(p.shape)) for k, p in part._parameters.items() if p is not None),
            tuple((k, tuple(b.shape)) for k, b in part._buffers.items() if b is not None),
            plain_attributes(part),
        )
        for path, part in unit.named_modules()
    )
