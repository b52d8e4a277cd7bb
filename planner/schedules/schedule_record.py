"""Record of a schedule: everything that other modules need to know of it.

A record has one function per question, each of a `Shape`.  Missing figures are computed from its
orders (in-flight counts), or are the costlier of two cases.  The closed form of its coefficients is
in `meshwright.planner.schedules.closed_form`.

Actions: the words of a pipeline schedule, and how they are written.

An action reads `2F0`: stage 2, forward, micro-batch 0.  Its kind is one of

    F   forward
    B   whole backward
    I   the part of backward that makes the gradient of the stage's input, which others wait for
    W   the rest: gradients of weights, which nobody waits for before the end of the step

A backward is either one B, or an I and some time later its W.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.errors import DocumentError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        """Return `2F0` for stage 2, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Action, ...]


def actions(stages: int | Iterable[int], kind: Kind, micro_batches: Iterable[int]) -> list[Action]:
    """Return actions of one kind, of one stage or of one each.

    Orders of a table's rows are millions of actions; one by one they take several times as long.

    >>> list(map(str, actions(2, "F", range(3))))
    ['2F0', '2F1', '2F2']
    """
    each = repeat(stages) if isinstance(stages, int) else stages
    return list(map(_OF, zip(each, repeat(kind), micro_batches)))


_OF = partial(tuple.__new__, Action)


def read_action(text: str) -> Action:
    """Return the action that a text names.

    >>> read_action("2F0")
    Action(stage=2, kind='F', micro_batch=0)
    """
    match = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,9})", text.strip())
    if match is None:
        raise DocumentError(
            "", f"'{text}' is no action; write stage, F, B, I or W, micro-batch: 2F0"
        )
    return Action(int(match[1]), cast(Kind, match[2]), int(match[3]))


def csv_text(ranks: Sequence[Order]) -> str:
    """Return the schedule as lines of comma-separated actions, one line per rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in ranks)


class Shape(NamedTuple):
    """Shape of a pipeline: P ranks of V stages each, m micro-batches."""

    ranks: int
    micro_batches: int
    virtual_stages: int = 1

    @property
    def stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.virtual_stages


class InFlight(NamedTuple):
    """Largest number of micro-batches that a rank holds at once, counted for each of its stages."""

    whole: int
    """Micro-batches from F to B or W."""
    alive: int
    """Micro-batches from F to the end of B or I, rounded up so that at most j / V of them are in
    the last j of the V stages (meshwright.planner.schedules.closed_form.InFlightCounts)."""
    deferred: int
    """Micro-batches from the start of I to W."""


@dataclass(frozen=True, slots=True, eq=False)
class Fullest:
    """One backward of every rank: with most alive, and of such with most on late stages."""

    holding: NDArray[np.float64]
    """[stage of the rank, rank] Micro-batches alive, including the acting one."""
    waiting: NDArray[np.float64]
    """[stage of the rank, rank] Micro-batches from the end of I to W."""
    place: NDArray[np.intp]
    """[rank] Place of the acting stage."""


LATE = 1e-3
"""Extra weight of a micro-batch for each stage before its own on the rank, since late stages store
most (meshwright.planner.search.partition.stage_counts)."""
DEFERRED, LEAN = 0.3, 4.0
"""Weight of a micro-batch that waits for W, relative to one that is alive: where layers store what
backward needs, and where they recompute most of it, which leaves W the same amount."""


AHEAD = " ahead="
"""What stands between a schedule's name and its forwards ahead, link by link."""
MOST_AHEAD = 1_000
"""Largest number of forwards ahead of one link."""


def name_with_ahead(name: str, ahead: Sequence[int]) -> str:
    """Return the name of a schedule whose ranks run ahead of some links.

    >>> name_with_ahead("1f1b", (1, 0, 0)), name_with_ahead("1f1b", (0, 0))
    ('1f1b ahead=1-0-0', '1f1b')
    """
    return f"{name}{AHEAD}{'-'.join(map(str, ahead))}" if any(ahead) else name


def read_ahead(text: str) -> tuple[int, ...]:
    """Return the forwards ahead of each link, as a schedule's name has them.

    >>> read_ahead("1-0-0")
    (1, 0, 0)
    """
    words = text.split("-")
    if not all(word.isdecimal() and len(word) < 10 and int(word) <= MOST_AHEAD for word in words):
        raise DocumentError(
            "ahead",
            f"is '{text:.60}'; give a number of forwards up to {MOST_AHEAD} for each link between "
            "ranks of the pipeline: 1-0-0",
        )
    return tuple(map(int, words))


class Coefficients(NamedTuple):
    """`steady` and `fill` of the closed form."""

    of: Callable[[int, int, float], tuple[float, float]]
    """Function of P ranks, m micro-batches and the share of a rank's work in its largest stage; it
    returns `steady` and `fill`."""
    text: str
    """Formula in a certificate, with the schedules that it is valid for."""


DRAINED = Coefficients(
    lambda ranks, micro_batches, largest: (micro_batches - 1.0, 1.0),
    "m-1 and fill = 1 under 1F1B and GPipe (there with max_r f_r + max_r b_r for max_r t_r)",
)
SPLIT = Coefficients(
    lambda ranks, micro_batches, largest: (float(micro_batches), largest * (ranks - 1) / ranks),
    "m and p(P-1)/P with split backwards",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """One pipeline schedule."""

    name: str
    order: Callable[[int, Shape], Order]
    """Function that returns the order of one rank."""
    coefficients: Coefficients
    stages_per_rank: tuple[int, int | None] = (1, 1)
    """Smallest and largest number of stages on a rank, None for no limit."""
    placement: Literal["loop", "v"] = "loop"
    """Stages go round the ranks, or down and up again: rank r has stages r and 2 P - 1 - r."""
    micro_batches_needed: Callable[[Shape], str] = lambda shape: ""
    """Function that names the numbers of micro-batches that the schedule accepts; an empty string
    if it accepts those of the shape."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed separately."""
    forwards_first: bool = False
    """No backward starts before the last forward has ended, on any rank: the slowest forward and
    the slowest backward count apart."""
    last_waits: bool = True
    """The last stage may do something between a forward and its backward."""
    ahead: tuple[int, ...] = ()
    """[link] Forwards that every rank before a link runs earlier, for its transfers to be hidden;
    empty: none."""
    with_ahead: Callable[[Schedule, tuple[int, ...]], Schedule] | None = None
    """Function that returns the schedule with such forwards; None if it has no such form."""
    weight_versions: int = 1
    """Number of copies of its parameters on a rank; above 1 if the pipeline never drains."""
    repeats: bool = False
    """From 2 P micro-batches on, the counts in flight do not depend on their number."""
    in_flight: Callable[[int, Shape], InFlight] | None = None
    """Closed form of the counts of a rank, or more, before m V limits them."""
    fullest: Callable[[Shape, float], Fullest] | None = None
    """Closed form of every rank's fullest backward, from the weight of a micro-batch that waits for
    W; None: the orders are scanned."""
    no_slower: str | None = None
    """Schedule under which no split is slower in the closed form; it is preferred there where it
    needs no more memory."""
    phi_bound: bool = False
    """The simulated step has a lower bound that holds for every cut of stages
    (`simulated_bounds`)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of the schedule by framework; a framework that is not listed cannot run it."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further lines of the configuration by framework."""

    def __post_init__(self) -> None:
        least, most = self.stages_per_rank
        assert most == 1 if least == 1 else most is None or most >= least
        assert self.placement == "loop" or self.stages_per_rank == (2, 2), "a V has two stages"
        plain = self.stages_per_rank == (1, 1) and not self.splits_backward
        assert plain or not self.forwards_first, "the closed form has no such term"
        assert not self.stale or (plain and self.weight_versions == 2), (
            "meshwright.runtime.engine.pipedream_2bw"
        )

    @property
    def stale(self) -> bool:
        """True if the pipeline never drains, so that gradients are a step old."""
        return self.weight_versions > 1

    @property
    def several_stages(self) -> bool:
        """True if ranks hold more than one stage."""
        return self.stages_per_rank[0] > 1

    def takes(self, virtual_stages: int) -> bool:
        """Return True if ranks may have this number of stages."""
        least, most = self.stages_per_rank
        return least <= virtual_stages and (most is None or virtual_stages <= most)

    def homes(self, shape: Shape) -> tuple[int, ...]:
        """Return the rank of each stage, [stage]."""
        stages = range(shape.stages)
        if self.placement == "v":
            return tuple(min(stage, shape.stages - 1 - stage) for stage in stages)
        return tuple(stage % shape.ranks for stage in stages)

    def counts(self, rank: int, shape: Shape) -> InFlight:
        """Return the most micro-batches that a rank has at once."""
        if self.in_flight is None:
            return _count_in_flight(self, rank, shape)
        most = shape.micro_batches * shape.virtual_stages
        whole, alive, deferred = self.in_flight(rank, shape)
        return InFlight(min(whole, most), min(alive, most), min(deferred, most))

    def on_first_stage(self, shape: Shape) -> int:
        """Return the most micro-batches in flight on the model's first stage."""
        if shape.virtual_stages == 1:
            return self.counts(0, shape).alive
        return min(shape.micro_batches, 2 * shape.ranks) if self.repeats else shape.micro_batches


@lru_cache(maxsize=1 << 10)
def _count_in_flight(schedule: Schedule, rank: int, shape: Shape) -> InFlight:
    """Return a rank's counts in flight, action by action.

    In `alive` every stage counts as much as the fullest, so that the last j of V stages have at
    most j / V of it.
    """
    alive = {stage: 0 for stage, home in enumerate(schedule.homes(shape)) if home == rank}
    whole = deferred = 0
    most = InFlight(0, 0, 0)
    for action in schedule.order(rank, shape):
        whole += action.kind == "F"
        alive[action.stage] += action.kind == "F"
        deferred += action.kind == "I"
        now = InFlight(whole, len(alive) * max(alive.values()), deferred)
        most = InFlight(*map(max, most, now))
        whole -= action.kind in "BW"
        alive[action.stage] -= action.kind in "BI"
        deferred -= action.kind == "W"
    return most
