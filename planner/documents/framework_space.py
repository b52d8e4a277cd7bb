"""The space of layouts that a framework executes, as data: the search considers no others.

Most of it are lists and limits: schedules, recompute kinds, degrees.  Conditions over the names of
`FACTS` state combinations, as `data_shard x context = 1` or `precision = bf16|fp8`: a `Conflict` is
a set of them that no layout may keep together, a `Divisible` a product that another must divide.
Nothing here knows a framework's name.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from meshwright.planner.documents.axes import LAYOUT_AXES
from meshwright.planner.documents.cluster import ClusterSpec, Precision
from meshwright.planner.documents.document import Part, nearest
from meshwright.planner.documents.model import ModelGraph, trains_as_module
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Activations,
    Axis,
    Compile,
    Dispatch,
    GradientCompression,
    Graphs,
    Job,
    Layout,
    Offload,
    Prefetch,
    Scales,
    ScheduleName,
    TensorOverlap,
    WeightGatherDtype,
)
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.documents.training import FrozenWeights, Objective, Optimizer
from meshwright.planner.documents.units import Flag, Positive, Text
from meshwright.planner.schedules import SCHEDULES, family_of

StageRule = Literal["any", "even", "even_but_ends", "by_products"]
"""Splits of a model's blocks among stages that a framework accepts (stage_rules)."""


class Facts(NamedTuple):
    """Values that conditions refer to: a model, a cluster, a job and a layout."""

    model: ModelGraph
    """Model."""
    cluster: ClusterSpec | None
    """Cluster; None where a layout is checked without one."""
    job: Job
    """Work of a step."""
    layout: Layout
    """Layout."""


Value = int | str
_OF_LAYOUTS = (
    "data_shard",
    "data_replicate",
    "zero",
    "schedule",
    "virtual_stages",
    "stages",
    "micro_batch",
    "micro_batches",
    *(axis.name for axis in LAYOUT_AXES if axis.values),
)
"""Facts in which layouts of the same degrees can differ."""
_OF_DEGREES = ("tensor", "context", "expert", "pipeline", "data")
_OF_JOBS = ("seq_len", "global_batch", "precision")
_OF_MODELS = ("layers", "heads", "kv_heads", "hidden_size", "ffn_size", "vocab_size")


def _experts(facts: Facts) -> Value:
    a = facts.model.architecture
    return a.experts.count if a is not None and a.experts is not None else 0


def _adapters(facts: Facts) -> Value:
    lora = facts.job.lora
    return "no" if lora is None else "qlora" if lora.packs_weights else "lora"


def _attention(facts: Facts) -> Value:
    a = facts.model.architecture
    return "none" if a is None else a.attention


def _family(facts: Facts) -> Value:
    """Return the family of a language model; of others what they are."""
    if trains_as_module(facts.model.source or ""):
        return "script"
    a = facts.model.architecture
    return "none" if a is None else a.family


def _devices_per_node(facts: Facts) -> Value:
    assert facts.cluster is not None, "what speaks of nodes is asked about a cluster"
    return facts.cluster.groups[0].devices_per_node


FACTS: dict[str, Callable[[Facts], Value]] = {
    **{name: attrgetter(f"layout.{name}") for name in (*_OF_LAYOUTS, *_OF_DEGREES)},
    **{name: attrgetter(f"job.{name}") for name in _OF_JOBS},
    **{name: attrgetter(f"model.architecture.{name}") for name in _OF_MODELS},
    "adapters": _adapters,
    "optimizer": lambda facts: facts.job.optimizer,
    "attention": _attention,
    "experts": _experts,
    "family": _family,
    "updates": lambda facts: (
        "matrices" if any(layer.whole_matrices for layer in facts.model.layers) else "elements"
    ),
    "layers_form": lambda facts: "graph" if facts.model.edges else "chain",
    "loss": lambda facts: "whole" if facts.layout.loss is None else "chunks",
    "backward": lambda facts: (
        "split" if facts.layout.executed_schedule.splits_backward else "whole"
    ),
    "idle_ranks": lambda facts: max(0, facts.layout.pipeline - facts.layout.micro_batches),
    "devices_per_node": _devices_per_node,
}
"""Functions that return the value of each fact, by its name."""
WORDS = frozenset(
    {
        "schedule",
        *(axis.name for axis in LAYOUT_AXES if axis.values),
        "precision",
        "adapters",
        "optimizer",
        "attention",
        "family",
        "layers_form",
        "updates",
        "loss",
        "backward",
    }
)
"""Facts whose values are words; all others are numbers."""
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NAMED = re.compile(r"\{([a-z_]+)\}")
_PRODUCT = re.compile(r"[a-z_]+|\d{1,9}")
_CONDITION = re.compile(r"(.{1,120}?) (=|!=|<|<=|>|>=) ([a-z0-9_|-]{1,120})")


class Product(NamedTuple):
    """Factors that are multiplied; a single one may be a word."""

    number: int
    """Product of the numbers."""
    names: tuple[str, ...]
    """Names of the facts that are multiplied."""

    def value_of(self, facts: Facts) -> Value:
        """Return its value."""
        if self.number == 1 and len(self.names) == 1:
            return FACTS[self.names[0]](facts)
        return self.number * math.prod(int(FACTS[name](facts)) for name in self.names)


@cache
def product_of(text: str) -> Product:
    """Read `2 x context`; ValueError names what is unknown.

    >>> product_of("2 x context")
    Product(number=2, names=('context',))
    """
    number, names = 1, []
    for factor in text.split(" x "):
        if not _PRODUCT.fullmatch(factor):
            raise ValueError(f"'{text:.80}' is no product; write one such as '2 x context'")
        if factor.isdecimal():
            number *= int(factor)
        elif factor not in FACTS:
            raise ValueError(f"'{factor:.60}' is not known; {nearest(factor, list(FACTS))}")
        else:
            names.append(factor)
    if WORDS.intersection(names) and text not in WORDS:
        raise ValueError(f"'{text:.80}' multiplies a word; compare it alone")
    return Product(number, tuple(names))


class Compared(NamedTuple):
    """A parsed condition."""

    product: Product
    """Left side of the comparison."""
    sign: str
    """Sign of the comparison."""
    values: tuple[str, ...]
    """Right side: the accepted values, or one number."""

    def is_fulfilled(self, facts: Facts) -> bool:
        """Return True if the condition holds."""
        places = self.product.value_of(facts)
        if self.sign in ("=", "!="):
            return (str(places) in self.values) == (self.sign == "=")
        return _COMPARED[self.sign](int(places), int(self.values[0]))


@cache
def condition_of(text: str) -> Compared:
    """Read `zero <= 1`, `precision = bf16|fp8`; ValueError names the error.

    >>> condition_of("tensor x pipeline > 1").product.names
    ('tensor', 'pipeline')
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text:.80}' is no condition; write zero <= 1 or precision = bf16")
    product, sign, value = match.groups()
    if sign in _COMPARED and product in WORDS:
        raise ValueError(f"'{text:.80}' orders words; use = or !=")
    if sign in _COMPARED and not value.isdecimal():
        raise ValueError(f"'{text:.80}' compares with '{value}'; use a whole number")
    return Compared(product_of(product), sign, tuple(value.split("|")))


def _readable_product(text: str) -> str:
    if WORDS.intersection(product_of(text).names):
        raise ValueError(f"'{text:.80}' is a word; name a number")
    return text


def _readable_condition(text: str) -> str:
    condition_of(text)
    return text


ProductText = Annotated[Text, AfterValidator(_readable_product)]
ConditionText = Annotated[Text, AfterValidator(_readable_condition)]


class Divisible(Part):
    """`by` divides `what`, wherever all of `when` hold."""

    what: ProductText
    """Product that must be divisible."""
    by: ProductText
    """Divisor."""
    when: tuple[ConditionText, ...] = ()
    """Conditions under which the rule holds; empty: always."""
    why: Text
    """Reason of the rule."""


class Conflict(Part):
    """Layouts that do not run: all of `when` holds, and not all of `needs`, or `needs` is empty."""

    when: tuple[ConditionText, ...]
    """Conditions that hold together."""
    needs: tuple[ConditionText, ...] = ()
    """Conditions that must then hold too; empty: no such layout runs."""
    why: Text
    """Reason; `{family}` and other names of facts stand for their values."""
    place: Text | None = None
    """Field of a plan that the conflict is about."""

    def text(self, facts: Facts) -> str:
        """Return the reason, with the figures of one layout."""
        return _NAMED.sub(lambda name: str(FACTS[name[1]](facts)), self.why)


RecomputeModule = Literal[
    "act", "core-attn", "layernorm", "mla-up-proj", "mlp", "moe", "moe-act", "shared-experts"
]
"""Parts of a block that Megatron Core recomputes one by one (transformer_config.py,
recompute_modules): norms, projections up from latents and activations of experts are made again
without their outputs being kept; the others are checkpoints of their own.  `act` is the activation
of a feed-forward without experts."""


class Space(Part):
    """Layouts that a framework executes, by its source and documentation; defaults exclude none."""

    schedules: tuple[ScheduleName, ...] | None = None
    """Executed schedules; None: all."""
    forwards_ahead: Flag = False
    """Ranks may run forwards ahead of slow links under the schedules that have such a form."""
    virtual_stages: Positive = 8
    """Largest number of stages on a rank that the search tries; with 1 a rank has exactly one."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    """Recomputations that layers may have."""
    selective_core: Flag = False
    """Blocks may recompute written-out attention too."""
    modules: tuple[RecomputeModule, ...] = ()
    """Parts of blocks that may be recomputed one by one; each set is an option of the framework."""
    recompute_by_layer: Flag = True
    """Each layer has its own recomputation; else all blocks have the same, and embedding and head
    have none."""
    zero: tuple[Annotated[int, Field(ge=0, le=3, strict=True)], ...] = (0, 1, 2, 3)
    """ZeRO levels with which data-parallel ranks share states."""
    hybrid: Flag = True
    """States may be divided among some of the data-parallel ranks (hybrid sharding)."""
    shards_context: Flag = False
    """Context ranks divide states where no data ranks do."""
    tensor: Positive | None = None
    """Largest tensor-parallel degree; None: no limit."""
    context: Positive | None = None
    """Largest context-parallel degree; None: no limit."""
    expert: Positive | None = None
    """Largest expert-parallel degree; None: no limit."""
    pipeline: Positive | None = None
    """Largest pipeline-parallel degree; None: no limit."""
    within_node: tuple[Axis, ...] = ()
    """Axes whose ranks must be in one node."""
    axis_order: Literal["any", "fixed"] = "any"
    """`fixed`: tensor is innermost, then context, data and pipeline; `any`: every order."""
    activations: tuple[Activations, ...] = ("keep", "offload", "compress")
    """Treatments of stored activations."""
    offload: tuple[Offload, ...] = ("none", "optimizer", "parameters")
    """States that may be on the host."""
    gradient_compressions: tuple[GradientCompression, ...] = ("full", "bf16", "fp16", "powersgd")
    """Forms of gradients between data-parallel ranks."""
    prefetch: tuple[Prefetch, ...] = (0,)
    """Prefetch depths that a layout may ask for; 0 is the framework's own behaviour."""
    reshard_after_forward: Flag = False
    """ZeRO-3 may keep parameters divided over fewer ranks from forward to backward."""
    chunked_loss: Flag = False
    """A layout may compute its loss in chunks."""
    scales: tuple[Scales, ...] = ("tensorwise",)
    """Scales of fp8 operands, the default first."""
    weight_gather_dtypes: tuple[WeightGatherDtype, ...] = ("full",)
    """Types of gathered weights."""
    dispatches: tuple[Dispatch, ...] = ("alltoall",)
    """Dispatches that a layout may name."""
    hierarchical_all_to_all: Flag = False
    """Tokens may be sent once to ranks that pass them on."""
    compile: tuple[Compile, ...] = ("none",)
    """Kinds of compilation that a layout may name; other layouts follow the framework."""
    tensor_overlaps: tuple[TensorOverlap, ...] = ("none",)
    """Executions of tensor-parallel collectives."""
    graphs: tuple[Graphs, ...] = ("none",)
    """Parts of a step that a layout may run as one captured graph."""
    precisions: tuple[Precision, ...] | None = None
    """Executed precisions; None: all."""
    optimizers: tuple[Optimizer, ...] = ("adamw",)
    """Executed optimizers."""
    trains_working: Flag = False
    """16-bit weights may be trained without an fp32 copy, where the framework usually keeps one."""
    objectives: tuple[Objective, ...] = ("sft",)
    """Training objectives."""
    packed_weights: tuple[FrozenWeights, ...] = ()
    """Types in which frozen weights may be packed."""
    pads_vocabulary: Flag = False
    """Rows are added to a vocabulary until the tensor ranks divide it."""
    shares_heads: Flag = False
    """The tensor degree may be a multiple of the number of key heads; each rank then has one whole
    head."""
    divisible: tuple[Divisible, ...] = ()
    """Divisibility rules."""
    conflicts: tuple[Conflict, ...] = ()
    """Combinations that do not run."""

    def usual_scales(self, precision: Precision) -> Scales:
        """Return the default scales of a layout: with fp8 the first of the space."""
        return self.scales[0] if precision == "fp8" else "tensorwise"

    def usual_gather_dtype(self, precision: Precision, scales: Scales) -> WeightGatherDtype:
        """Return the default type of weights that ZeRO-3 gathers.

        In 8 bits where products round them so anyway: that halves what is sent and resident and
        changes no value.
        """
        narrow = (
            precision == "fp8" and scales == "tensorwise" and "fp8" in self.weight_gather_dtypes
        )
        return "fp8" if narrow else "full"

    def most_ranks(self, axis: Axis, devices_per_node: int) -> int | None:
        """Return the most ranks of an axis; None: any number."""
        most: int | None = getattr(self, axis, None)
        if axis not in self.within_node:
            return most
        return devices_per_node if most is None else min(most, devices_per_node)


EVERYTHING = Space.model_construct()
"""Space without limits."""


def job_obstacles(space: Space, job: Job) -> Iterator[str]:
    """Yield why a space does not have a job, whatever its layout."""
    if space.precisions is not None and job.precision not in space.precisions:
        yield f"precision {job.precision}: it trains in {' or '.join(space.precisions)}"
    if job.optimizer not in space.optimizers:
        yield f"optimizer {job.optimizer}: it has {', '.join(space.optimizers)}"
    if job.objective not in space.objectives:
        yield f"objective {job.objective}: it trains {', '.join(space.objectives)}"
    if job.master_weights == "none" and not space.trains_working:
        yield "masters none: it trains an fp32 copy of its weights"
    if job.lora is not None and job.lora.weights not in ("full", *space.packed_weights):
        packed = ", ".join(space.packed_weights) or "none"
        yield f"frozen weights in {job.lora.weights}: it packs them as {packed}"


def obstacles(space: Space, facts: Facts, *, of_degrees: bool = False) -> Iterator[str]:
    """Yield why a space does not have a layout.

    With `of_degrees` only what is true of all layouts with the same degrees.
    """
    job = facts.job
    yield from _outside(space, facts, of_degrees=of_degrees)
    yield from job_obstacles(space, job)
    for rule in space.divisible:
        if of_degrees and _of_layouts((rule.what, rule.by), rule.when):
            continue
        if all(condition_of(text).is_fulfilled(facts) for text in rule.when):
            what, by = product_of(rule.what).value_of(facts), product_of(rule.by).value_of(facts)
            if int(what) % (int(by) or 1):
                yield f"{rule.by} does not divide {rule.what}: {rule.why}"
    for conflict in conflicts(space, facts, of_degrees=of_degrees):
        yield conflict.text(facts)


def conflicts(space: Space, facts: Facts, *, of_degrees: bool = False) -> Iterator[Conflict]:
    """Yield the conflicts that a layout has; see `obstacles`."""
    for conflict in _possible(space, facts, of_degrees=of_degrees):
        if all(condition_of(text).is_fulfilled(facts) for text in conflict.when) and not (
            conflict.needs
            and all(condition_of(text).is_fulfilled(facts) for text in conflict.needs)
        ):
            yield conflict


_POSSIBLE: dict[
    tuple[int, int, int, bool], tuple[Space, ModelGraph, Job, tuple[Conflict, ...]]
] = {}
"""Conflicts by the ids of a space, a model and a job, of degrees alone or of layouts; the objects
stay alive so that their ids stay theirs."""
_MOST_KNOWN = 64
_OF_MODEL_AND_JOB = frozenset(
    {
        *_OF_JOBS,
        *_OF_MODELS,
        "adapters",
        "optimizer",
        "attention",
        "experts",
        "family",
        "layers_form",
    }
)
"""Facts that all layouts of a request share."""


def _possible(space: Space, facts: Facts, *, of_degrees: bool) -> tuple[Conflict, ...]:
    """Return the conflicts that some layout of a model and a job may have; see `obstacles`."""
    model, job = facts.model, facts.job
    key = id(space), id(model), id(job), of_degrees
    cached = _POSSIBLE.get(key)
    if cached is None:
        if len(_POSSIBLE) >= _MOST_KNOWN:
            _POSSIBLE.clear()
        conflicts_here = tuple(
            conflict
            for conflict in space.conflicts
            if _may_hold(conflict, facts)
            and not (of_degrees and _of_layouts((), (*conflict.when, *conflict.needs)))
        )
        cached = _POSSIBLE[key] = space, model, job, conflicts_here
    return cached[-1]


def _may_hold(conflict: Conflict, facts: Facts) -> bool:
    """Return True if the conditions of a conflict that concern model and job hold."""
    each = (condition_of(text) for text in conflict.when)
    return all(
        conflict.is_fulfilled(facts)
        for conflict in each
        if _OF_MODEL_AND_JOB.issuperset(conflict.product.names)
    )


def _outside(space: Space, facts: Facts, *, of_degrees: bool) -> Iterator[str]:
    """Yield the choices of a layout that are outside of the lists and limits of a space."""
    layout, in_node = facts.layout, int(_devices_per_node(facts))
    for axis in ("tensor", "context", "pipeline"):
        most, degree = space.most_ranks(axis, in_node), getattr(layout, axis)
        if most is not None and degree > most:
            yield f"{axis} degree {degree}"
    if space.expert is not None and layout.expert > space.expert:
        yield f"expert degree {layout.expert}"
    if of_degrees:
        return
    beside = layout.context if space.shards_context else 1
    if layout.data * beside > 1 and layout.zero not in space.zero:
        yield f"ZeRO-{layout.zero}"
    if layout.zero and layout.data_replicate > 1 and not space.hybrid:
        yield "sharding within groups of replicas"
    schedule = layout.executed_schedule
    if layout.pipeline > 1 and family_of(schedule.name) not in (space.schedules or SCHEDULES):
        yield f"schedule {layout.schedule}"
    elif schedule.ahead and not space.forwards_ahead:
        yield f"forwards ahead of links ({schedule.name})"
    if layout.virtual_stages > 1 and space.virtual_stages == 1:
        yield f"{layout.virtual_stages} stages on a rank"
    if space.axis_order == "fixed" and layout.order != INSIDE_OUT:
        yield "another order of axes"
    for choice in LAYOUT_AXES:
        value, listed = getattr(layout, choice.name), getattr(space, choice.space)
        if value not in listed if isinstance(listed, tuple) else not (listed or value is None):
            yield choice.refused.format(value)


@cache
def _of_layouts(products: tuple[str, ...], conditions: tuple[str, ...]) -> bool:
    """Return True if a rule concerns facts in which layouts of the same degrees can differ."""
    each = [product_of(text) for text in products]
    each += [condition_of(text).product for text in conditions]
    return any(
        name in (*_OF_LAYOUTS, "loss", "backward", "idle_ranks")
        for product in each
        for name in product.names
    )
