"""Choices that the user has made: what is pinned, what is allowed, what stages must keep."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from meshwright.planner.catalog import framework as framework_called
from meshwright.planner.catalog import framework_name
from meshwright.planner.documents.axes import LAYOUT_AXES, LayoutAxis
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import nearest
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.framework_space import Space
from meshwright.planner.documents.placement_text import Placement, read_placement
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Activations,
    Axis,
    Compile,
    Dispatch,
    GradientCompression,
    Graphs,
    Layout,
    Offload,
    Prefetch,
    Scales,
    TensorOverlap,
    WeightGatherDtype,
    loss_text,
)
from meshwright.planner.documents.profile import CHUNK_ROWS, LOSS_WORDS, ChunkedLoss, Recompute
from meshwright.planner.documents.units import MOST_SAMPLES, MOST_TOKENS, whole_number
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules import PLAIN, SCHEDULES, family_of, schedule_of
from meshwright.planner.schedules.schedule_record import read_ahead
from meshwright.planner.solver.requirements import Requirement

Allowance = Literal[
    "stale", "compress", "offload", "async-tensor", "graphs", "quantized", "framework-options"
]
"""Choice that the search makes only on request.  Weights one step old, 8-bit activations and
gradients, and frozen weights in 4 bits change the arithmetic of training.  Offloading does not, but
the search takes longer.  Asynchronous tensor parallelism needs devices that share memory, which no
cluster document states.  No device has run captured graphs yet.  Options of another framework need
libraries and releases that a cluster may not have."""
PipelineKinds = Literal["alike", "unlike"]
"""Data-parallel pipelines: all the same, or others on each group of devices."""
SHORT_NAMES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "dp": "data",
    "shard": "data_shard",
    "zero": "zero",
    "micro_batch": "micro_batch",
    "schedule": "schedule",
    "ahead": "ahead",
    "v": "virtual_stages",
    "recompute": "recompute",
    "activations": "activations",
    **{axis.short: axis.name for axis in LAYOUT_AXES},
    "order": "order",
    "pipelines": "pipelines",
}
LONGEST_NUMBER = 12
"""Digits of a number that counts devices."""
WORDS: dict[str, Collection[str]] = {
    "schedule": SCHEDULES,
    "recompute": get_args(Recompute),
    "activations": get_args(Activations),
    "pipelines": get_args(PipelineKinds),
    **{axis.name: axis.values for axis in LAYOUT_AXES if axis.values},
}
AXES: dict[str, tuple[Axis, ...]] = {
    "tp": ("tensor",),
    "cp": ("context",),
    "dp": ("data_shard", "data_replicate"),
    "shard": ("data_shard",),
    "replicate": ("data_replicate",),
    "pp": ("pipeline",),
}


LIKE_LAYOUTS = tuple(axis.name for axis in LAYOUT_AXES if axis.name != "loss")
"""Axes that a pin gives as a layout does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Choices that the user has made; None leaves the choice to the search."""

    tensor: int | None = None
    context: int | None = None
    expert: int | None = None
    pipeline: int | None = None
    data: int | None = None
    data_shard: int | None = None
    """Ranks that ZeRO divides the states among; the data axis may be a multiple of it."""
    zero: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    ahead: tuple[int, ...] | None = None
    """Forwards ahead of each link of the pipeline; empty: none."""
    virtual_stages: int | None = None
    recompute: Recompute | None = None
    activations: Activations | None = None
    offload: Offload | None = None
    gradient_compression: GradientCompression | None = None
    prefetch: Prefetch | None = None
    reshard_after_forward: int | None = None
    """Ranks over which ZeRO-3 divides parameters from forward to backward."""
    loss: ChunkedLoss | Literal["full"] | None = None
    """Loss in chunks, or of all logits (`full`); None: not pinned."""
    scales: Scales | None = None
    weight_gather_dtype: WeightGatherDtype | None = None
    dispatch: Dispatch | None = None
    """Pinned to `alltoall` without a `hierarchical_all_to_all`, each token is sent to each of its
    experts."""
    hierarchical_all_to_all: int | None = None
    """Number of neighbours that pass on among themselves tokens that are sent to them once."""
    compile: Compile | None = None
    tensor_overlap: TensorOverlap | None = None
    graphs: Graphs | None = None
    order: tuple[Axis, ...] | None = None
    """All axes, the innermost first."""
    pipelines: PipelineKinds | None = None
    """Pipelines that are alike, or that may differ from one group of devices to another."""
    divided: frozenset[Axis] = frozenset()
    """Axes that have more than one rank."""
    allowed: frozenset[Allowance] = frozenset()
    require: tuple[Requirement, ...] = ()
    """Further requirements on the split."""

    @property
    def chunks(self) -> ChunkedLoss | None:
        """Pinned chunks of the loss; None: none are pinned."""
        return None if self.loss == "full" else self.loss

    def allow(self, layout: Layout) -> bool:
        """Return True if a layout keeps every pin but those on recomputation and activations."""
        pinned = (
            (self.tensor, layout.tensor),
            (self.context, layout.context),
            (self.expert, layout.expert),
            (self.pipeline, layout.pipeline),
            (self.data, layout.data),
            (self.data_shard, layout.data_shard),
            (self.zero, layout.zero),
            (self.micro_batch, layout.micro_batch),
            (self.schedule, family_of(layout.schedule)),
            (self.ahead, layout.ahead),
            (self.virtual_stages, layout.virtual_stages),
            (self.loss, layout.loss or "full"),
            (self.order, layout.order),
        )
        several = all(getattr(layout, axis) > 1 for axis in self.divided)
        if not several or not all(pin in (None, value) for pin, value in pinned):
            return False
        return all(getattr(self, name) in (None, getattr(layout, name)) for name in LIKE_LAYOUTS)

    def axes(self) -> dict[str, Any]:
        """Return the value of each axis, by name, in a layout that has these pins alone."""
        pinned = {axis.name: getattr(self, axis.name) for axis in LAYOUT_AXES}
        usual = {axis.name: axis.usual for axis in LAYOUT_AXES}
        return usual | {n: v for n, v in pinned.items() if v is not None} | {"loss": self.chunks}


def read_pins(texts: Sequence[str], allow: Sequence[str] = ()) -> Pins:
    """Read `tp=8`, `pp=4,zero=3`, ... as the command line gives them, and what is allowed.

    >>> read_pins(["tp=8", "zero=3,recompute=full"]).recompute
    'full'
    """
    values: dict[str, PinValue] = {}
    for item in (part.strip() for text in texts for part in text.split(",")):
        name, sign, value = item.partition("=")
        field = SHORT_NAMES.get(name) or (name if name in SHORT_NAMES.values() else None)
        if field is None:
            raise DocumentError("fix", f"'{item}': there is no '{name}'; {nearest(name, _names())}")
        if not sign:
            raise DocumentError("fix", f"'{item}' has no value; write {item}=VALUE")
        if field in values:
            raise DocumentError("fix", f"'{item}': {name} is given twice; leave one out")
        values[field] = _pin_value(field, value, item)
    pins = Pins(**values, allowed=read_allowances(allow))  # type: ignore[arg-type]
    if pins.ahead and pins.schedule and schedule_of(pins.schedule).with_ahead is None:
        raise DocumentError(
            "fix",
            f"schedule={pins.schedule} has no forwards ahead of links: leave one of both out, or "
            f"take {PLAIN}",
        )
    if pins.ahead and pins.pipeline is not None and len(pins.ahead) != pins.pipeline - 1:
        numbers = _number_text(len(pins.ahead), "number")
        links = _number_text(pins.pipeline - 1, "link")
        raise DocumentError(
            "fix",
            f"ahead={'-'.join(map(str, pins.ahead))} has {numbers}, and pp={pins.pipeline} has "
            f"{links} between its ranks; give a number for each link",
        )
    for needed, word in _needed_allowances(pins):
        if word not in pins.allowed:
            raise DocumentError("fix", f"{needed} changes training: add --allow {word}")
    return pins


def read_layout(text: str, allow: Sequence[str] = ()) -> tuple[Pins, int | None]:
    """Read pins that describe one layout, and `idle=4`: how many devices it leaves idle.

    A layout as answers print it is read too (`Layout.text`); `check_micro_batches` compares its
    number of micro-batches.

    >>> pins, idle = read_layout("tp=2,idle=4")
    >>> pins.tensor, idle
    (2, 4)
    >>> read_layout("tp=8 pp=16 dp=1 zero=0 interleaved stages=8/rank micro_batch=1x16")[0].schedule
    'interleaved'
    """
    _, words = read_placement(_words_of(text))
    parts = [_as_pin(part) for part in words]
    idle = [part for part in parts if part.partition("=")[0] == "idle"]
    others = [part for part in parts if part not in idle and not _is_framework(part)]
    if len(idle) > 1:
        raise DocumentError("layout", f"'{idle[1]}': idle is given twice; leave one out")
    pins = read_pins([",".join(others)] if any(others) else [], allow)
    if not idle:
        return pins, None
    value = idle[0].partition("=")[2]
    if not value.isdecimal() or len(value) > LONGEST_NUMBER:
        raise DocumentError("layout", f"'{idle[0]:.40}': idle is no whole number; give one from 0")
    return pins, int(value)


def _words_of(layout: str) -> list[str]:
    """Return the words of a layout's text, as pins or as answers print them."""
    return re.split(r"[,\s]+", layout.strip())


def placement_beside(layout: str) -> Placement | None:
    """Return what a layout's text says of its stages, if it does."""
    return read_placement(_words_of(layout))[0]


def framework_beside(layout: str, framework: str) -> str:
    """Return the framework that prices a layout, whose text may name it as answers print it.

    The text adds options to a framework; it names no other than a `framework` that is not native.

    >>> framework_beside("tp=2 dp=4 megatron+recompute-layernorm", "megatron")
    'megatron+recompute-layernorm'
    >>> framework_beside("tp=2 dp=4", "megatron")
    'megatron'
    """
    words = [word for word in _words_of(layout) if _is_framework(word)]
    named = list(dict.fromkeys(framework_called(word).name for word in words))
    if not named:
        return framework
    asked = framework_called(framework).name
    if len(named) > 1 or (asked not in ("native", named[0], base_of(named[0]))):
        other = named[1] if len(named) > 1 else asked
        raise DocumentError(
            "layout", f"names {named[0]}, and the framework is {other}; leave one of them out"
        )
    return named[0]


def _is_framework(word: str) -> bool:
    """Return whether a word of a layout is a framework's name, with or without options."""
    try:
        framework_name(base_of(word))
    except DocumentError:
        return False
    return True


def _as_pin(word: str) -> str:
    """Return a word of a printed layout as NAME=VALUE of a pin; words of pins as they stand."""
    if word in SCHEDULES:
        return f"schedule={word}"
    if stages := re.fullmatch(r"stages=(\d+)/rank", word):
        return f"v={stages[1]}"
    return _BATCHES.sub(r"micro_batch=\1", word)


_BATCHES = re.compile(r"\bmicro_batch=(\d{1,12})x(\d{1,12})")


def check_micro_batches(text: str, layout: Layout) -> None:
    """Refuse a printed layout (`micro_batch=1x16`) whose number of micro-batches is another."""
    stated = _BATCHES.search(text)
    if stated is not None and int(stated[2]) != layout.micro_batches:
        raise DocumentError(
            "layout",
            f"'{stated[0]}' has {stated[2]} micro-batches; this global batch makes "
            f"{layout.micro_batches} of them: name the batch with --global-batch",
        )


def without_effect(pins: Pins, layout: Layout, cluster: ClusterSpec) -> Iterator[str]:
    """Yield the pins that a layout keeps and that change nothing in it, and why."""
    if layout.graphs != "none":
        for device in (group.accelerator for group in cluster.groups):
            if device.kind not in ("cuda", "rocm"):
                yield f"graphs={layout.graphs} has no effect: {device.name} has no graphs"
    if layout.pipeline == 1:
        ahead = None if pins.ahead is None else "-".join(map(str, pins.ahead or (0,)))
        pinned = ("schedule", pins.schedule), ("ahead", ahead), ("v", pins.virtual_stages)
        for name, value in pinned:
            if value is not None:
                yield f"{name}={value} has no effect: pp=1, there is no pipeline"
    for axis in LAYOUT_AXES:
        value = getattr(pins, axis.name)
        if axis.needs and getattr(layout, axis.needs) == 1 and value not in (None, axis.usual):
            yield f"{axis.short}={value} has no effect: {axis.without}"
    if pins.order is not None:
        short = {axis: name for name in ("tp", "cp", "dp", "pp") for axis in AXES[name]}
        degrees = {"tp": layout.tensor, "cp": layout.context, "dp": layout.data}
        degrees["pp"] = layout.pipeline
        divided = [name for name, degree in degrees.items() if degree > 1]
        if len(divided) < 2:
            order = "-".join(dict.fromkeys(short[axis] for axis in pins.order))
            what = f"{divided[0]} alone is divided" if divided else "no axis is divided"
            yield f"order={order} has no effect: {what}"
    if pins.zero == 2 and (layout.pipeline > 1 or layout.micro_batches == 1):
        why = "under a pipeline" if layout.pipeline > 1 else "with one micro-batch"
        yield f"zero=2 has the effect of zero=1: {why} both reduce gradients once a step"


def outside(pins: Pins, space: Space, devices_per_node: int) -> Iterator[tuple[str, str]]:
    """Yield the pins, as they are written, that no layout of a space keeps, and what there is."""
    short = {field: name for name, field in SHORT_NAMES.items()}
    for field in ("tensor", "context", "expert", "pipeline"):
        pinned, most = getattr(pins, field), space.most_ranks(field, devices_per_node)  # type: ignore[arg-type]
        if pinned is not None and most is not None and pinned > most:
            yield (
                f"{short[field]}={pinned}",
                f"has {'no such axis' if most == 1 else f'at most {most} here'}",
            )
    words: tuple[tuple[str, Collection[object] | None], ...] = (
        ("schedule", space.schedules),
        ("zero", sorted({0, *space.zero})),
        ("recompute", space.recompute),
        ("activations", space.activations),
        *((axis.name, getattr(space, axis.space)) for axis in LAYOUT_AXES if _has_values(axis)),
        ("order", (INSIDE_OUT,) if space.axis_order == "fixed" else None),
    )
    for field, word in words:
        pinned = getattr(pins, field)
        if pinned is not None and word is not None and pinned not in word:
            yield f"{short[field]}={pinned}", f"has {' or '.join(map(str, word))}"
    if pins.chunks is not None and not space.chunked_loss:
        yield f"loss={loss_text(pins.chunks)}", "has full"
    if (pins.virtual_stages or 1) > space.virtual_stages:
        yield f"v={pins.virtual_stages}", f"has at most {space.virtual_stages} stages on a rank"
    if pins.ahead and not space.forwards_ahead:
        yield f"ahead={'-'.join(map(str, pins.ahead))}", "has no forwards ahead of links"


def _has_values(axis: LayoutAxis) -> bool:
    """Return True if a space lists the axis's values, and does not say yes or no."""
    return axis.usual is not None


def _needed_allowances(pins: Pins) -> Iterator[tuple[str, Allowance]]:
    """Yield pins that need an allowance, as they are written, and which."""
    if pins.schedule is not None and schedule_of(pins.schedule).stale:
        yield f"schedule={pins.schedule}", "stale"
    if pins.activations == "compress":
        yield "activations=compress", "compress"
    for axis in LAYOUT_AXES:
        value = getattr(pins, axis.name)
        if axis.changes_training and value not in (None, axis.usual):
            yield f"{axis.short}={value}", axis.allowance  # type: ignore[misc]


def _number_text(count: int, thing: str) -> str:
    """Return a number of things.

    >>> _number_text(1, "link"), _number_text(2, "link")
    ('1 link', '2 links')
    """
    return f"{count} {thing}{'s' * (count != 1)}"


def read_allowances(texts: Sequence[str]) -> frozenset[Allowance]:
    """Read `stale`, `stale,compress`, ... as the command line gives them.

    >>> sorted(read_allowances(["stale,offload"]))
    ['offload', 'stale']
    """
    allowances: set[Allowance] = set()
    for word in (part.strip() for text in texts for part in text.split(",")):
        if word not in get_args(Allowance):
            names = list(get_args(Allowance))
            raise DocumentError("allow", f"'{word}' is not known; {nearest(word, names)}")
        allowances.add(word)  # type: ignore[arg-type]
    return frozenset(allowances)


def _names() -> list[str]:
    return list(SHORT_NAMES)


PinValue = int | str | tuple[Axis, ...] | tuple[int, ...] | ChunkedLoss


def _pin_value(field: str, value: str, item: str) -> PinValue:
    if field == "order":
        return _order(value, item)
    if field == "ahead":
        numbers = read_ahead(value)
        return numbers if any(numbers) else ()
    if field == "loss":
        return _loss(value, item)
    words = WORDS.get(field)
    if words is not None:
        if value not in words:
            raise DocumentError("fix", f"'{item}': {field} is one of {', '.join(words)}")
        return value
    least, most = (0, 3) if field in ("zero", "prefetch") else (1, MOST_SAMPLES)
    number = whole_number(value)
    if number is None or not least <= number <= most:
        bounds = "0, 1, 2 or 3" if most == 3 else f"a whole number from 1 to {most:,}"
        raise DocumentError("fix", f"'{item:.60}': {field} is {bounds}")
    return number


def _loss(value: str, item: str) -> ChunkedLoss | str:
    """Read `full`, `chunked` or `chunked-recompute/512`: how many rows of logits exist at once."""
    word, slash, text = value.partition("/")
    if value == "full":
        return value
    gradients = next((name for name, called in LOSS_WORDS.items() if called == word), None)
    rows = whole_number(text) if slash else CHUNK_ROWS
    if gradients is None or rows is None or not 1 <= rows <= MOST_TOKENS:
        raise DocumentError(
            "fix",
            f"'{item:.60}': write loss=full, chunked/ROWS or chunked-recompute/ROWS, of 1 to "
            f"{MOST_TOKENS:,} rows",
        )
    return ChunkedLoss(rows=rows, gradients=gradients)


def _order(value: str, item: str) -> tuple[Axis, ...]:
    """Read `pp-tp-dp`: axes from the innermost; those that are not named follow as usual."""
    axes: list[Axis] = []
    for name in value.split("-"):
        if name not in AXES:
            raise DocumentError(
                "fix",
                f"'{item}': order names axes from the innermost, as in pp-tp-dp; "
                f"{nearest(name, list(AXES))}",
            )
        axes.extend(AXES[name])
    if len(set(axes)) < len(axes):
        raise DocumentError("fix", f"'{item}': order names an axis twice; name each axis once")
    return (*axes, *(axis for axis in INSIDE_OUT if axis not in axes))


assert {*SHORT_NAMES.values(), "divided", "allowed", "require"} == {
    field.name for field in fields(Pins)
}
