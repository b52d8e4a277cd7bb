"""Combinations of what a plan can say, generated from its types, and covers of their pairs.

A Row is one combination.  What the runtime refuses (planner.frameworks.native_limits,
runtime.engine.unsupported) is no row, so what it learns to execute appears here by itself.  `cover`
picks rows in which every pair of properties occurs that any row has: one row for (zbv, ZeRO-3), one
for (tensor, recompute full).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from meshwright.planner.catalog import native
from meshwright.planner.documents import plan as plan_types
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.model import Experts, ModelGraph
from meshwright.planner.documents.plan import INSIDE_OUT, Axis, Job, Layout, Plan
from meshwright.planner.documents.profile import LOSS_WORDS, ChunkedLoss, Recompute
from meshwright.planner.errors import DocumentError
from meshwright.planner.frameworks.native_limits import obstacle
from meshwright.planner.schedules import PLAIN, name_with_ahead, schedule
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.engine.unsupported import documents_refused, unsupported_reason
from tests.runtime import cases, chains
from tests.runtime.runs import TOLERANCE

OWN = "factory"
"""The family of a user's own modules."""
MIXED = "mixed"
"""Recompute choices that change from layer to layer."""
OUTSIDE_IN: tuple[Axis, ...] = tuple(reversed(INSIDE_OUT))
AHEAD = "1f1b ahead"
"""1F1B with a forward ahead of each link."""
DEGREES = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
CHOSEN = (
    "recompute",
    "activations",
    "offload",
    "gradient_compression",
    "prefetch",
    "reshard_after_forward",
    "loss",
    "compile",
    "scales",
    "weight_gather_dtype",
    "dispatch",
    "hierarchical_all_to_all",
    "precision",
)
"""Fields whose values name themselves."""
LOSS_ROWS = 10
"""Positions of a chunk: neither one nor a divisor of a micro-batch's."""
DOCUMENT_LEN = 6
"""Tokens of the document that a token of `cases.global_starts` is in, about."""
TRIES = 4
"""Rows that are tried for each place of a cover; the one with most new pairs is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan of a tiny model; every field has its plainest value unless said otherwise."""

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    zero: int = 0
    schedule: tuple[str, int] = ("1f1b", 1)
    """With stages on each rank."""
    several: bool = True
    """Micro-batches: two for each pipeline rank; else one."""
    recompute: str = "none"
    activations: str = "keep"
    offload: str = "none"
    gradient_compression: str = "full"
    prefetch: int = 0
    reshard_after_forward: int | None = None
    loss: str = "full"
    """Of all logits, or in chunks, by the name of how their gradients are made."""
    compile: str = "none"
    scales: str = "tensorwise"
    weight_gather_dtype: str = "full"
    dispatch: str = "alltoall"
    hierarchical_all_to_all: int | None = None
    documents: bool = False
    """Samples hold several."""
    precision: str = "fp32"
    family: str = "reference"
    tied: bool = False
    uneven: bool = False
    """Stages of unlike length."""
    outside_in: bool = False
    """The mesh's axes in reverse: pipeline on the fastest links, tensor on the slowest."""

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def data(self) -> int:
        """Data-parallel degree."""
        return self.data_replicate * self.data_shard

    @property
    def stages(self) -> int:
        """Pipeline stages of all ranks."""
        return self.pipeline * self.schedule[1]

    @property
    def model(self) -> tuple[str, bool, int]:
        """(family, tied, blocks): what decides which model is trained.

        Of four stages the first holds the embedding alone and the last the head, if it can.
        """
        blocks = 6 if self.stages > 4 else 3 if self.stages > 2 and self.uneven else 2
        return self.family, self.tied, blocks

    @property
    def schedule_name(self) -> str:
        """The schedule as a plan names it, with the forwards ahead of the links that it has."""
        if self.schedule[0] != AHEAD:
            return self.schedule[0]
        return name_with_ahead(PLAIN, (1,) * (self.pipeline - 1))

    @property
    def micro_batches(self) -> int:
        """Per data rank; 0 if the schedule cannot be run with one.

        Several are enough for a steady state of every schedule.
        """
        if not self.several:
            return 0 if self._hinders(1) else 1
        return 2 * self.pipeline

    @property
    def global_batch(self) -> int:
        """Samples of a step; more where activations move, since what is small stays."""
        samples = 1 if self.activations == "keep" else 8
        return max(cases.GLOBAL_BATCH, samples * self.data * self.micro_batches)

    @property
    def text(self) -> str:
        """The row as people write it: what is not plain."""
        parts = [self.family + (" tied" if self.tied else "")]
        short = {"pipeline": "pp", "data_replicate": "replicate", "data_shard": "shard"}
        short |= {"context": "cp", "tensor": "tp", "expert": "ep"}
        parts += [f"{s}={getattr(self, f)}" for f, s in short.items() if getattr(self, f) > 1]
        if self.zero:
            parts.append(f"zero={self.zero}")
        if self.pipeline > 1:
            name, virtual = self.schedule
            parts.append(name + (f" {virtual} stages/rank" if virtual > 1 else ""))
        parts.append(f"{self.micro_batches} micro-batches" if self.several else "one micro-batch")
        plain = Row()
        for field in CHOSEN:
            value = getattr(self, field)
            if value != getattr(plain, field):
                parts.append(f"{field} {value}" if field != "precision" else value)
        parts += ["documents"] if self.documents else []
        parts += ["uneven"] if self.uneven else []
        parts += ["axes outside in"] if self.outside_in else []
        return ", ".join(parts)

    def graph(self) -> ModelGraph:
        """Return the model."""
        return graph_of(self.model)

    def layout(self) -> Layout:
        """Return the plan without its stages."""
        return Layout(
            zero=self.zero,
            schedule=self.schedule_name,
            virtual_stages=self.schedule[1],
            micro_batches=self.micro_batches,
            expert=self.expert,
            offload=self.offload,
            gradient_compression=self.gradient_compression,
            prefetch=self.prefetch,  # type: ignore[arg-type]
            reshard_after_forward=self.reshard_after_forward,
            loss=self._loss,
            compile=self.compile,  # type: ignore[arg-type]
            scales=self.scales,  # type: ignore[arg-type]
            weight_gather_dtype=self.weight_gather_dtype,  # type: ignore[arg-type]
            dispatch=self.dispatch,  # type: ignore[arg-type]
            hierarchical_all_to_all=self.hierarchical_all_to_all,
            **{axis: getattr(self, axis) for axis in DEGREES},
        )

    @property
    def _loss(self) -> ChunkedLoss | None:
        if self.loss == "full":
            return None
        gradients = next(name for name, word in LOSS_WORDS.items() if word == self.loss)
        return ChunkedLoss(rows=LOSS_ROWS, gradients=gradients)

    def plan(self) -> Plan:
        """Return the plan; DocumentError if no plan can say this."""
        if not self.micro_batches:
            raise DocumentError("micro_batches", "no count suits the schedule")
        graph = self.graph()
        made = cases.plan(
            graph,
            cuts=self._cuts(len(graph.chain)),
            zero=self.zero,
            schedule=self.schedule_name,
            virtual_stages=self.schedule[1],
            micro_batches=self.micro_batches,
            global_batch=self.global_batch,
            recompute=("none", "selective", "full") if self.recompute == MIXED else self.recompute,
            activations=self.activations,
            offload=self.offload,
            gradient_compression=self.gradient_compression,
            precision=self.precision,
            order=OUTSIDE_IN if self.outside_in else INSIDE_OUT,
            expert=self.expert,
            **{axis: getattr(self, axis) for axis in DEGREES},
        )
        others = {name: getattr(self, name) for name in DEAR if name != "documents"}
        return made.model_copy(
            update={"loss": self._loss, "document_len": self.document_len, **others}
        )

    @property
    def document_len(self) -> int | None:
        """Of the document that a token is in; None where samples are one."""
        return DOCUMENT_LEN if self.documents else None

    def _cuts(self, layers: int) -> list[int]:
        """Return each stage's number of layers; the first gives one of its own to the last."""
        least, more = divmod(layers, self.stages)
        cuts = [least + (stage < more) for stage in range(self.stages)]
        if self.uneven:
            cuts[0] -= 1
            cuts[-1] += 1
            if cuts[0] == 0 or self.stages == 1:
                raise DocumentError("stages", "there are too few layers for unlike stages")
        return cuts

    def _hinders(self, micro_batches: int) -> bool:
        name, virtual_stages = self.schedule_name, self.schedule[1]
        return self.stages > 1 and bool(
            schedule.obstacle(
                name,
                stages=self.stages,
                micro_batches=micro_batches,
                virtual_stages=virtual_stages,
            )
        )


OTHERS = tuple(f.name for f in fields(Row) if f.name not in (*DEGREES, "expert"))
DEAR = (
    "compile",
    "prefetch",
    "reshard_after_forward",
    "scales",
    "weight_gather_dtype",
    "dispatch",
    "hierarchical_all_to_all",
    "documents",
)
"""Choices that the small cover leaves plain, and `dear_rows` has: what is compiled takes a rank
seconds to begin with, and the others go with few."""


@functools.cache
def graph_of(model: tuple[str, bool, int]) -> ModelGraph:
    """Return the tiny model that a row names."""
    family, tied, blocks = model
    if family == OWN:
        return graph_of_factory(f"{chains.__file__}:factory", seq_len=cases.SEQ_LEN)
    wide: dict[str, Any] = {} if family == "gpt2" else {"heads": 8, "kv_heads": 4}
    if family in cases.MIXED:
        wide["experts"] = Experts(count=4, per_token=2, ffn_size=32)  # 4 tensor ranks divide it
    return cases.transformer(family, tied_embeddings=tied, layers=blocks, **wide)


@functools.cache
def reason(row: Row) -> str | None:
    """Return why there is no such row, or None if there is."""
    idle = (
        (row.pipeline == 1 and row.schedule != ("1f1b", 1), "a schedule without a pipeline"),
        (row.zero and row.data_shard * row.context == 1, "ZeRO without ranks to divide over"),
        (row.outside_in and sum(getattr(row, d) > 1 for d in DEGREES) < 2, "one axis has no order"),
        (
            row.schedule[0] == "pipedream-2bw",
            "stale weights: tests/runtime/engine/test_pipedream_2bw.py",
        ),
        (row.family == OWN and row.tied, "the user's own modules are not tied"),
        (row.family == OWN and row.expert > 1, "those of chains.py have no experts"),
        (row.family == OWN and row.context > 1, "the user's own modules take no positions"),
        (row.family == OWN and row.documents, "the user's own modules take no positions"),
    )
    found = next((why for holds, why in idle if holds), None)
    if found:
        return found
    job = Job(
        seq_len=cases.SEQ_LEN,
        global_batch=row.global_batch,
        precision=row.precision,  # type: ignore[arg-type]
        document_len=row.document_len,
    )
    obstructed = obstacle(row.graph(), job, row.layout())  # much faster than a plan
    if obstructed:
        return str(obstructed)
    try:
        made = row.plan()
    except (DocumentError, ValidationError) as error:
        return str(error)
    return unsupported_reason(made, row.graph()) or (
        documents_refused(made, row.graph()) if row.documents else None
    )


@functools.cache
def choices() -> dict[str, tuple[Any, ...]]:
    """Return the values of every field but degrees, the plainest first, as the types list them."""
    schedules = [
        (name, virtual)
        for name in schedule.SCHEDULES
        for virtual in (1, 2)
        if not schedule.obstacle(name, stages=2 * virtual, micro_batches=8, virtual_stages=virtual)
    ]
    every = {
        "zero": get_args(Plan.model_fields["zero"].annotation),
        "schedule": (*schedules, (AHEAD, 1)),
        "several": (True, False),
        "recompute": (*get_args(Recompute), MIXED),
        "activations": get_args(plan_types.Activations),
        "offload": get_args(plan_types.Offload),
        "gradient_compression": get_args(plan_types.GradientCompression),
        "loss": ("full", *LOSS_WORDS.values()),
        "compile": get_args(plan_types.Compile),
        "prefetch": get_args(plan_types.Prefetch),
        "reshard_after_forward": (None, 1, 2),
        "scales": native().space.scales,  # type: ignore[union-attr]
        "weight_gather_dtype": get_args(plan_types.WeightGatherDtype),
        "dispatch": get_args(plan_types.Dispatch),
        "hierarchical_all_to_all": (None, 2),
        "documents": (False, True),
        "precision": get_args(Precision),
        "family": (*cases.COVERED, OWN),
        "tied": (False, True),
        "uneven": (False, True),
        "outside_in": (False, True),
    }
    plain = Row()
    return {
        name: (getattr(plain, name), *(v for v in values if v != getattr(plain, name)))
        for name, values in every.items()
    }


def meshes(ranks: Iterable[int]) -> tuple[dict[str, int], ...]:
    """Return all degrees for these numbers of ranks, powers of two; expert degrees divide others.

    >>> [mesh for mesh in meshes([2]) if mesh["tensor"] == 2]  # doctest: +NORMALIZE_WHITESPACE
    [{'pipeline': 1, 'data_replicate': 1, 'data_shard': 1, 'context': 1, 'tensor': 2, 'expert': 1},
     {'pipeline': 1, 'data_replicate': 1, 'data_shard': 1, 'context': 1, 'tensor': 2, 'expert': 2}]
    """
    result = []
    for world in ranks:
        powers = [2**i for i in range(world.bit_length())]
        for degrees in itertools.product(powers, repeat=len(DEGREES)):
            mesh = Row(**dict(zip(DEGREES, degrees, strict=True)))
            if mesh.ranks != world:
                continue
            most = mesh.data_shard * mesh.context * mesh.tensor
            result += [
                {**dict(zip(DEGREES, degrees, strict=True)), "expert": expert}
                for expert in powers
                if most % expert == 0
            ]
    return tuple(result)


TRIPLES = (("schedule", "zero"), ("zero", "recompute"))
"""Choices of which two are met together with every third, but model and exact mesh."""
MANY = {"mesh", "family"}
"""Properties with most values, which meet no two others at once."""
_TOGETHER = " x "

Property = tuple[str, Any]
Pair = tuple[Property, Property]


class Bound(NamedTuple):
    """Largest relative errors, against one process of the same precision."""

    loss: float
    norm: float
    weights: float

    @property
    def text(self) -> str:
        """The bound as a table shows it."""
        return f"{self.loss:g}" if len(set(self)) == 1 else " / ".join(f"{e:.3g}" for e in self)


EXACT = Bound(TOLERANCE, TOLERANCE, TOLERANCE)
BOUNDS: dict[Property, Bound] = {
    # Each micro-batch and each divided sum is rounded to 8 bits of mantissa on its own, and AdamW
    # makes full steps of gradients that are nothing but such rounding.
    ("precision", "bf16"): Bound(1e-4, 1e-2, 1e-1),
    # With 11 bits, and gradients that are scaled before they are rounded.
    ("precision", "fp16"): Bound(1e-4, 1e-2, 1e-1),
    # Operands of products with 3 or 2 bits of mantissa, scaled by what a rank has of them.
    ("precision", "fp8"): Bound(2e-3, 1e-1, 5e-1),
    ("precision", "mxfp8"): Bound(2e-3, 1e-1, 5e-1),
    # Each rank's gradients are rounded to 8 bits of mantissa, or 11, before they are summed.
    ("gradient_compression", "bf16"): Bound(1e-4, 1e-1, 1e-1),
    ("gradient_compression", "fp16"): Bound(1e-4, 1e-2, 1e-1),
    # Much of the first gradients comes steps later.
    ("gradient_compression", "powersgd"): Bound(1e-2, 5e-1, 1.0),
    # Stored tensors are rounded to 8 bits.
    ("activations", "compress"): Bound(2e-4, 1e-2, 1e-1),
}
"""Of what is not exact."""


def bound(row: Row) -> Bound:
    """Return the largest relative errors that a row may have; those of several causes add up."""
    found = [EXACT, *(BOUNDS[p] for p in _others(row) if p in BOUNDS)]
    if row.loss != "full":
        # The head's gradient is summed by chunks, in another order, and AdamW's steps are those of
        # signs where a gradient is nearly zero.
        found.append(Bound(0.0, 0.0, TOLERANCE))
    return Bound(*map(sum, zip(*found, strict=True))) if len(found) > 1 else EXACT


def by_axis(row: Row) -> tuple[Property, ...]:
    """Return a row's properties, of each axis but pipeline only whether it divides anything.

    Dear choices are left out.
    """
    axes = tuple((name, getattr(row, name) > 1) for name in (*DEGREES[1:], "expert"))
    others = (one for one in _others(row) if one[0] not in DEAR)
    return (("pipeline", row.pipeline), *axes, *others)


def by_mesh(row: Row) -> tuple[Property, ...]:
    """Return a row's properties, among them its degrees as one and some choices as one."""
    mesh = tuple(getattr(row, name) for name in (*DEGREES, "expert"))
    together = tuple(
        (_TOGETHER.join(names), tuple(getattr(row, name) for name in names)) for names in TRIPLES
    )
    return (("mesh", mesh), *by_axis(row), *dear(row), *together)


def dear(row: Row) -> tuple[Property, ...]:
    """Return what a row has of the dear choices."""
    return tuple((name, getattr(row, name)) for name in DEAR)


def dear_rows(rows: Iterable[Row], *, seed: int = 0) -> tuple[Row, ...]:
    """Return those of some rows that can be compiled, with the dear choices that go with them.

    Every second loss is in chunks, and of documents every second row that can has some.
    """
    rng, table, found = random.Random(seed), choices(), []
    for place, row in enumerate(rows):
        loss = row.loss if row.loss != "full" or place % 2 else "chunked"
        wished = (replace(row, compile="block", loss=loss), replace(row, compile="block"))
        one = next((one for one in wished if reason(one) is None), None)
        if one is None:
            continue
        for name in rng.sample(DEAR, len(DEAR)):
            plain, *others = table[name]
            if getattr(one, name) != plain or (name == "documents" and rng.random() < 0.5):
                continue
            rng.shuffle(others)
            changed = (replace(one, **{name: value}) for value in others)
            one = next((other for other in changed if reason(other) is None), one)
        found.append(one)
    return tuple(found)


def _others(row: Row) -> tuple[Property, ...]:
    return tuple((name, getattr(row, name)) for name in OTHERS)


def pairs(properties: tuple[Property, ...]) -> set[Pair]:
    """Return the pairs of a row's properties that it tests.

    A row that need not be exact tests only pairs with what makes it so: a wide bound would hide
    that two other things do not go together.  Of meshes it tests the axes.
    """
    inexact = {p for p in properties if p in BOUNDS}
    places = _places(tuple(name for name, _ in properties))
    every = ((properties[i], properties[j]) for i, j in places.tolist())
    if not inexact:
        return set(every)
    return {p for p in every if inexact.intersection(p) and not _exact_only(p[0][0], p[1][0])}


def _exact_only(one: str, other: str) -> bool:
    return any(name == "mesh" or _TOGETHER in name for name in (one, other))


@functools.cache
def _places(names: tuple[str, ...]) -> NDArray[np.intp]:
    """Return which of these properties make pairs, as two indices [pair, 2]."""
    every = itertools.combinations(range(len(names)), 2)
    return np.array([(i, j) for i, j in every if not _too_many(names[i], names[j])])


def _too_many(one: str, other: str) -> bool:
    """Whether a pair is a triple with one of the fields that have most values."""
    triples = [name for name in (one, other) if _TOGETHER in name]
    return len(triples) == 2 or (len(triples) == 1 and not {one, other}.isdisjoint(MANY))


def cover(
    ranks: Iterable[int], properties: Callable[[Row], tuple[Property, ...]], *, seed: int = 0
) -> tuple[Row, ...]:
    """Return few rows that together have every pair of properties that any row has.

    Greedy, from a fixed seed: the plainest row with a missing pair is changed field by field to the
    values that bring most missing pairs along; of some such rows the best is taken.
    """
    every_mesh = meshes(ranks)
    witnesses = _witnesses(every_mesh, properties)
    search = _Search(every_mesh, properties, witnesses, seed)
    rows: list[Row] = []
    for pair, row in witnesses.items():
        if search.lacks(pair):
            tried = [search.filled(row, pair) for _ in range(TRIES)]
            rows.append(max(tried, key=lambda row: search.news(row).size))
            search.add(rows[-1])
    return tuple(rows)


class _Search:
    """Rows with many pairs that are missing.  Properties are numbered, which is much faster."""

    def __init__(
        self,
        every_mesh: tuple[dict[str, int], ...],
        properties: Callable[[Row], tuple[Property, ...]],
        missing: Iterable[Pair],
        seed: int,
    ) -> None:
        self._properties = properties
        self._rng = random.Random(seed)
        missing = list(missing)
        every = dict.fromkeys(one for pair in missing for one in pair)
        self._numbers = {one: number for number, one in enumerate(every)}
        # The last number is that of properties that no missing pair has.
        self._size = len(every) + 1
        self._missing = np.zeros((self._size, self._size), dtype=bool)
        for one, other in missing:
            self._missing[self._numbers[one], self._numbers[other]] = True
        self._inexact = np.array([one in BOUNDS for one in every] + [False])
        self._exact_only = np.array([_exact_only(name, name) for name, _ in every] + [False])
        self._table: dict[str, list[dict[str, Any]]] = {"mesh": list(every_mesh)}
        told = {name for name, _ in properties(Row())}
        for name, values in choices().items():
            if name in told:
                self._table[name] = [{name: value} for value in values]

    def lacks(self, pair: Pair) -> bool:
        """Say whether no row that was added has a pair."""
        one, other = pair
        return bool(self._missing[self._numbers[one], self._numbers[other]])

    def news(self, row: Row) -> NDArray[np.intp]:
        """Return the missing pairs that a row has, a number each."""
        made = self._properties(row)
        numbers = np.array([self._numbers.get(one, self._size - 1) for one in made])
        places = _places(tuple(name for name, _ in made))
        one, other = numbers[places[:, 0]], numbers[places[:, 1]]
        found = self._missing[one, other]
        if any(one in BOUNDS for one in made):
            found &= self._inexact[one] | self._inexact[other]
            found &= ~(self._exact_only[one] | self._exact_only[other])
        return one[found] * self._size + other[found]

    def add(self, row: Row) -> None:
        """Count a row's pairs as met."""
        self._missing.reshape(-1)[self.news(row)] = False

    def filled(self, row: Row, pair: Pair) -> Row:
        """Change a row's fields, in a random order, to bring more missing pairs; `pair` stays."""
        own = self._numbers[pair[0]] * self._size + self._numbers[pair[1]]
        names = list(self._table)
        self._rng.shuffle(names)
        for name in names:
            now = self.news(row).size
            changed = [replace(row, **values) for values in self._table[name]]
            self._rng.shuffle(changed)
            gains = {}
            for one in changed:
                news = self.news(one)
                if news.size > now and own in news:
                    gains[one] = news.size
            better = sorted(gains, key=gains.__getitem__, reverse=True)
            row = next((one for one in better if reason(one) is None), row)
        return row


def _witnesses(
    every_mesh: tuple[dict[str, int], ...], properties: Callable[[Row], tuple[Property, ...]]
) -> dict[Pair, Row]:
    """Return the plainest row found with each pair of properties; pairs without one are left out.

    Beside what the pair says a row may need a mesh, a ZeRO level for it, and a family with experts.
    """
    table = choices()
    values: dict[Property, list[dict[str, int]]] = {}
    """Each property, and the meshes that it can go with."""
    for mesh in sorted(every_mesh, key=_divided):
        for name, value in properties(Row(**mesh)):
            if name not in table and _TOGETHER not in name:
                values.setdefault((name, value), []).append(mesh)
    told = {name for name, _ in properties(Row())}
    values |= {
        (name, v): list(every_mesh)
        for name, options in table.items()
        if name in told
        for v in options
    }
    for name in (name for name, _ in properties(Row()) if _TOGETHER in name):
        options = itertools.product(*(table[part] for part in name.split(_TOGETHER)))
        values |= {(name, value): list(every_mesh) for value in options}
    order = {name: at for at, (name, _) in enumerate(properties(Row()))}
    alone = sorted(
        (one for one, fitting in values.items() if _plainest((one,), fitting) is not None),
        key=lambda one: order[one[0]],
    )
    found: dict[Pair, Row] = {}
    for one, other in itertools.combinations(alone, 2):
        if one[0] != other[0] and (one, other) not in found and not _too_many(one[0], other[0]):
            fitting = [mesh for mesh in values[one] if mesh in values[other]]
            row = _plainest((one, other), fitting)
            if row is not None:
                # In one order whatever the seed of hashes is, so that all runs have the same rows.
                every = sorted(pairs(properties(row)), key=repr)
                found |= {pair: row for pair in every if pair not in found}
    return found


def _plainest(wanted: tuple[Property, ...], fitting: Iterable[dict[str, int]]) -> Row | None:
    table = choices()
    fixed: dict[str, Any] = {}
    for name, value in wanted:
        if _TOGETHER in name:
            fixed |= zip(name.split(_TOGETHER), value, strict=True)
        elif name in table:
            fixed[name] = value
    for mesh in fitting:
        families = table["family"] if mesh["expert"] > 1 else table["family"][:1]
        for zero, family in itertools.product(table["zero"], families):
            row = Row(**{**mesh, "zero": zero, "family": family, **fixed})
            if reason(row) is None:
                return row
    return None


def _divided(mesh: dict[str, int]) -> tuple[int, int]:
    degrees = list(mesh.values())
    return Row(**mesh).ranks, sum(degree > 1 for degree in degrees)
