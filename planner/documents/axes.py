"""The axes of a layout beside its degrees, sharding and schedule, one row each.

A row holds the names and values of an axis, the field of a framework's space that lists the
executed values, and the words of refusals.  A layout's text, the fields that a plan writes, pins,
allowances, facts of frameworks, exports and new plans read the rows; no file repeats them.  The
fields of Layout, Plan and Pins are declared by hand for their types;
`tests/planner/documents/test_axes.py` compares them with the rows.  The cost and the execution of
an axis are code.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAxis:
    """One choice that a layout makes."""

    name: str
    """Name of the field of Layout, Plan and Pins."""
    short: str
    """Name in a layout's text and in a pin."""
    usual: Any
    values: tuple[str, ...] = ()
    """Words that the axis can take; empty where its values are not words."""
    space: str
    """Field of a framework's space: the values that it executes, or whether it executes any but the
    usual one."""
    refused: str
    """Description of what a framework lacks that does not execute the value `{}`."""
    exported: str | None = None
    """Description of the value that another framework's file cannot express; None where the file
    can, or where its exporter names the reason itself."""
    machinery: str | None = None
    """Name of the machinery that an unusual value needs; a plan without it is preferred."""
    allowance: str | None = None
    """Allowance without which the search considers the usual value alone."""
    changes_training: bool = False
    """True if the value changes what is trained, so that a pin needs the allowance too."""
    needs: str | None = None
    """Degree that must be above 1 for the value to have an effect."""
    without: str = ""
    computes: bool = False
    """True if a layer's computation, or communication inside of the layer, depends on the axis."""
    always_written: bool = False
    """True if a plan's document contains the value even where it is the usual one."""


LAYOUT_AXES = (
    LayoutAxis(
        name="offload",
        short="offload",
        usual="none",
        values=("none", "optimizer", "parameters"),
        space="offload",
        refused="{} on the host",
        machinery="{} on the host",
        allowance="offload",
        always_written=True,
    ),
    LayoutAxis(
        name="gradient_compression",
        short="gradients",
        usual="full",
        values=("full", "bf16", "fp16", "powersgd"),
        space="gradient_compressions",
        refused="gradients that travel as {}",
        exported="gradients travel as {}",
        machinery="{} gradients",
        allowance="compress",
        changes_training=True,
        always_written=True,
    ),
    LayoutAxis(
        name="scales",
        short="scales",
        usual="tensorwise",
        values=("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"),
        space="scales",
        refused="{} scales",
        exported="scales of 8-bit operands are {}",
        computes=True,
    ),
    LayoutAxis(
        name="weight_gather_dtype",
        short="weights",
        usual="full",
        values=("full", "fp8"),
        space="weight_gather_dtypes",
        refused="weights that travel as {}",
        exported="weights travel as {}",
    ),
    LayoutAxis(
        name="dispatch",
        short="dispatch",
        usual="alltoall",
        values=("alltoall", "allgather"),
        space="dispatches",
        refused="tokens dispatched by {}",
        exported="tokens come to experts by {}",
        computes=True,
    ),
    LayoutAxis(
        name="hierarchical_all_to_all",
        short="hierarchical_all_to_all",
        usual=None,
        space="hierarchical_all_to_all",
        refused="tokens handed on among {} ranks",  # exported: it changes no value
        computes=True,
    ),
    LayoutAxis(
        name="prefetch",
        short="prefetch",
        usual=0,
        space="prefetch",
        refused="prefetch {}",
    ),
    LayoutAxis(
        name="reshard_after_forward",
        short="reshard_after_forward",
        usual=None,
        space="reshard_after_forward",
        refused="parameters resharded over {} ranks after forward",
        exported="parameters stay divided over {} ranks from forward to backward",
        machinery="parameters resharded within groups",
    ),
    LayoutAxis(
        name="loss",
        short="loss",
        usual=None,
        space="chunked_loss",
        refused="a loss in chunks",
        always_written=True,
    ),
    LayoutAxis(
        name="compile",
        short="compile",
        usual="none",
        values=("none", "block"),
        space="compile",
        refused="compile {}",
        computes=True,
    ),
    LayoutAxis(
        name="tensor_overlap",
        short="tensor_overlap",
        usual="none",
        values=("none", "async"),
        space="tensor_overlaps",
        refused="asynchronous tensor parallelism",
        exported="collectives of tensor parallelism are {}",
        allowance="async-tensor",
        needs="tensor",
        without="tp=1, no block is divided",
        computes=True,
    ),
    LayoutAxis(
        name="graphs",
        short="graphs",
        usual="none",
        values=("none", "micro_batch"),
        space="graphs",
        refused="graphs of each {}",  # exported: it changes no value
        machinery="captured graphs",
        allowance="graphs",
        computes=True,
    ),
)
"""Axes in the order of a layout's text."""


AXIS_NAMES = tuple(axis.name for axis in LAYOUT_AXES)
computed_by = attrgetter(*(axis.name for axis in LAYOUT_AXES if axis.computes))
"""Values, of one layout or of layouts that share them, on which a layer's seconds depend."""


def axes_of(source: object) -> dict[str, Any]:
    """Return the value of each axis by name, of a layout or a plan."""
    return {name: getattr(source, name) for name in AXIS_NAMES}
