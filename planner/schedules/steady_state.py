"""Ends of the ranks of a pipeline, without going through every micro-batch.

`rank_times` gives what `planner.schedules.simulate.timeline` does, to the rounding of its sums, at
a cost that does not grow with micro-batches.  Schedules are a beginning, a pattern that repeats
with every `period` micro-batches, and an end (`cut_of`).  The pattern on all ranks is a layer.
Layers are simulated one after the other until the times of one and of one some layers before it
differ by constants; then whole stretches are skipped.

Theorem.  x_a(k) is when action a of layer k ends, c_a its seconds.  It has an arc or two from
actions j of `lag` layers before, each with a delay d:

    x_a(k) = c_a + max over arcs of x_j(k - lag) + d

Suppose that for some g every action has its own Δ_a with x_a(k') - x_a(k' - g) = Δ_a in the last
g + (largest lag) layers up to k, and in the last g layers has an arc with
slack = x_a(k') - c_a - x_j(k' - lag) - d = 0 and Δ_j = Δ_a.  Then, for all n up to

    n* = min over arcs with Δ_j > Δ_a of ⌊slack / (Δ_j - Δ_a)⌋

x_a(k' + n g) = x_a(k') + n Δ_a.  Proof by induction over layers and, within a layer, along arcs:
the candidates at k' + n g are x_a(k') - c_a - slack + n Δ_j.  That of the arc with slack 0 is
x_a(k') - c_a + n Δ_a, and no other is larger while n (Δ_j - Δ_a) <= slack.

While a slow part of a pipeline catches up, ranks run at different paces, and n* ends the stretch
where one meets the other.  g exceeds 1 where a cycle takes several micro-batches: under 1F1B with
transfers that computation hides.  Times are integers here, so equal is equal.

The longest path of a pipeline step: which actions a step waits for.

A step takes as long as its longest path of actions, each after the one before it on its rank or the
one that makes its input.  Orders do not depend on seconds, so the actions of a path that is longest
at some stage times are a lower bound of the step at all stage times: a linear one,

    T >= Σ visits · seconds + Σ hops · transfer + what the rank does where it ends
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.schedule_record import Action, Kind, Order
from meshwright.planner.schedules.simulate import timeline

WORTH = 20_000
"""Number of actions from which a step is searched for its pattern."""
LAYERS = 6
"""A step with fewer layers than this is simulated as a whole."""
_BITS = 60
"""Bits of the largest possible time."""
_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """[rank] Time at which a rank has finished, and the seconds in which it computes and sends."""

    finish_s: tuple[float, ...]
    busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """[stage] Seconds on one micro-batch, as `planner.schedules.simulate.timeline` takes them.

    `transfer_s` and `exposed_s` have an entry for each stage but the last.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weight_s: Sequence[float] | None
    transfer_s: Sequence[float]
    exposed_s: Sequence[float]


def rank_times(
    schedule: str, times: StageTimes, *, micro_batches: int, virtual_stages: int = 1
) -> RankTimes:
    """Return the times at which ranks end under a schedule.

    >>> times = StageTimes(forward_s=[1.0] * 4, backward_s=[2.0] * 4, weight_s=None,
    ...     transfer_s=[0.0] * 3, exposed_s=[0.0] * 3)
    >>> rank_times("1f1b", times, micro_batches=100_000).finish_s
    (300009.0, 300007.0, 300005.0, 300003.0)
    """
    stages = len(times.forward_s)
    ranks = stages // virtual_stages
    home = rank_of_stage(schedule, stages=stages, virtual_stages=virtual_stages)
    finish_s: Sequence[float] | None = None
    if 2 * stages * micro_batches > WORTH:
        if schedule_of(schedule).forwards_first:
            finish_s = _forwards_first_s(times, micro_batches)
        else:
            cut = cut_of(schedule, ranks, virtual_stages)
            if cut is not None and micro_batches >= cut.micro_batches + LAYERS * cut.period:
                finish_s = extrapolated_s(cut, home, times, micro_batches)
    if finish_s is None:
        run = timeline(
            orders(
                schedule, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
            ),
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            weight_s=times.weight_s,
            transfer_s=times.transfer_s,
            exposed_s=times.exposed_s,
        )
        finish_s = [run.finish_s(rank) for rank in range(ranks)]
    busy_s = [0.0] * ranks
    for rank, seconds in zip(home, _passes_s(home, times), strict=True):
        busy_s[rank] += micro_batches * seconds
    return RankTimes(finish_s=tuple(finish_s), busy_s=tuple(busy_s))


def _passes_s(home: Sequence[int], times: StageTimes) -> Iterator[float]:
    """[stage] Both passes of a micro-batch with what is sent."""
    last = len(home) - 1
    for s, rank in enumerate(home):
        seconds = times.forward_s[s] + times.backward_s[s]
        seconds += times.exposed_s[s] if s < last and home[s + 1] != rank else 0.0
        yield seconds + (times.exposed_s[s - 1] if s and home[s - 1] != rank else 0.0)


def _forwards_first_s(times: StageTimes, micro_batches: int) -> list[float]:
    """[rank] Under GPipe, one stage a rank: a flow shop of forwards, then one of backwards.

    The last stage's last forward ends at Σ f + (m - 1) max f + Σ c.  From then on backwards flow
    the other way, and no rank waits for a forward, since those before the last stage end earlier.
    Micro-batches are alike, so the last one leaves rank r after Σ_{s>=r} b + (m - 1) max_{s>=r} b
    and the transfers between.
    """
    sent, c = [*times.exposed_s, 0.0], times.transfer_s
    forward_s = [f + e for f, e in zip(times.forward_s, sent, strict=True)]
    backward_s = [b + e for b, e in zip(times.backward_s, [0.0, *times.exposed_s], strict=True)]
    more = micro_batches - 1
    turned_s = sum(forward_s) + more * max(forward_s) + sum(c)
    result = []
    behind_s = slowest_s = 0.0
    for rank in range(len(forward_s) - 1, -1, -1):
        behind_s += backward_s[rank] + (c[rank] if rank < len(c) else 0.0)
        slowest_s = max(slowest_s, backward_s[rank])
        result.append(turned_s + behind_s + more * slowest_s)
    return result[::-1]


class _ActionNode(NamedTuple):
    """An action and its arcs; `own` and `source` are places of nodes, -1 where there is none.

    Nodes of a layer have arcs from `own_lag` and `lag` layers before.
    """

    cost: int
    """Place among the seconds: kind, then stage."""
    own: int
    own_lag: int
    source: int
    lag: int
    boundary: int
    """Boundary between stages whose transfer delays the source; -1 on one rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A schedule's lists as a beginning, a repeated layer and an end, for m0 + n · period.

    Nodes come after those that they wait for.  `own` of an end's first action, and of a layer's, is
    the last one of the rank before it.
    """

    micro_batches: int
    """m0: what beginning and end have without a layer."""
    period: int
    begins: tuple[_ActionNode, ...]
    """`lag` is 0."""
    layer: tuple[_ActionNode, ...]
    ends: tuple[_ActionNode, ...]
    """`own_lag` and `lag` are 0 for places among the ends themselves; n for the n-th last layer."""
    last_begun: tuple[int, ...]
    """[rank] Place of its last action among `begins`."""
    last_done: tuple[int, ...]
    """[rank] The same among `ends`."""
    before: tuple[tuple[int, ...], ...]
    """[lag - 1][place in the layer] The same action `lag` layers before the first, among `begins`;
    -1 where there is none."""


@lru_cache(maxsize=64)
def cut_of(schedule: str, ranks: int, virtual_stages: int) -> Cut | None:
    """Return a schedule's cut; None if its lists have no pattern.

    Where groups of micro-batches go round the ranks lists repeat with every group, else with every
    micro-batch.  The lists of m0, m0 + q and m0 + 2 q micro-batches are compared action by action;
    that larger ones are like those is read from their writers in `planner.schedules`, and checked
    by the tests.
    """
    groups = virtual_stages > 1 and schedule_of(schedule).placement == "loop"
    period, step = (ranks, ranks) if groups else (1, max(1, ranks // 2))
    shape = {"stages": ranks * virtual_stages, "virtual_stages": virtual_stages}
    home = rank_of_stage(schedule, **shape)
    for count in range(2 * ranks, 8 * ranks + 12, step):
        once, twice, thrice = (
            orders(schedule, micro_batches=count + more * period, **shape) for more in range(3)
        )
        places = _places(once, twice, period, home)
        if places is None:
            continue
        sizes = [len(b) - len(a) for a, b in zip(once, twice, strict=True)]
        if all(
            two == (*first[:x], *two[x : x + n], *_later(first[x:], period))
            and three
            == (*two[: x + n], *_later(two[x : x + n], period), *_later(two[x + n :], period))
            for first, two, three, x, n in zip(once, twice, thrice, places, sizes, strict=True)
        ):
            return _compile_cut(once, twice, places, count, period, home)
    return None


def _later(order: Iterable[Action], period: int) -> Iterator[Action]:
    return (Action(stage, kind, m + period) for stage, kind, m in order)


def source_of(action: Action, stages: int, split: set[tuple[int, int]]) -> Action | None:
    """Return the action of another stage that an action waits for; `split` backwards have an I."""
    stage, kind, m = action
    if kind == "F":
        return Action(stage - 1, "F", m) if stage else None
    if kind == "W" or stage == stages - 1:
        return None
    return Action(stage + 1, "I" if (stage + 1, m) in split else "B", m)


def split_of(lists: Sequence[Order]) -> set[tuple[int, int]]:
    """Return (stage, micro-batch) of the backwards that have an I."""
    return {(stage, m) for order in lists for stage, kind, m in order if kind == "I"}


def _places(
    once: Sequence[Order], twice: Sequence[Order], period: int, home: Sequence[int]
) -> list[int] | None:
    """[rank] Return where the lists can be cut: as late as one layer behind the earliest place.

    What lies before is closed under what it waits for, and the same in both; what lies behind is
    the same but for `period`.
    """
    heads, places = [], []
    for first, two in zip(once, twice, strict=True):
        size = len(two) - len(first)
        head = next(
            (at for at, (a, b) in enumerate(zip(first, two, strict=False)) if a != b), len(first)
        )
        back = zip(reversed(first), _later(reversed(two), -period), strict=False)
        tail = next((at for at, (a, b) in enumerate(back) if a != b), len(first))
        heads.append(head)
        places.append(max(0, len(first) - tail) + size)
    if any(place > head for place, head in zip(places, heads, strict=True)):
        return None
    split, stages = split_of(twice), len(home)
    at = {action: n for order in twice for n, action in enumerate(order)}
    looked = [0] * len(twice)
    while (rank := next((r for r, n in enumerate(looked) if n < places[r]), None)) is not None:
        upto = places[rank]
        for action in twice[rank][looked[rank] : upto]:
            source = source_of(action, stages, split)
            if source is not None:
                there = home[source.stage]
                places[there] = max(places[there], at[source] + 1)
        looked[rank] = upto
    return None if any(x > head for x, head in zip(places, heads, strict=True)) else places


def in_order(
    part: Sequence[Sequence[Action]], split: set[tuple[int, int]], home: Sequence[int]
) -> list[tuple[int, Action]]:
    """Return (rank, action) of the lists of a part, each behind what it waits for in the part."""
    inside = {action for order in part for action in order}
    position, done, result = [0] * len(part), set[Action](), list[tuple[int, Action]]()
    ready = list(range(len(part)))
    while ready:
        rank = ready.pop()
        order = part[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            source = source_of(action, len(home), split)
            if source in inside and source not in done:
                break
            done.add(action)
            result.append((rank, action))
            position[rank] += 1
            ready += [home[s] for s in (action.stage - 1, action.stage + 1) if 0 <= s < len(home)]
    assert all(n == len(order) for n, order in zip(position, part, strict=True))
    return result


def _compile_cut(
    once: Sequence[Order],
    twice: Sequence[Order],
    places: Sequence[int],
    count: int,
    period: int,
    home: Sequence[int],
) -> Cut:
    """Return a cut with its nodes in the order of their arcs."""
    stages, ranks = len(home), len(once)
    # The set of split backwards may depend on the number of remaining micro-batches.
    splits = split_of(twice), split_of(twice), split_of(once)
    sizes = [len(b) - len(a) for a, b in zip(once, twice, strict=True)]
    parts = (
        [order[:x] for order, x in zip(once, places, strict=True)],
        [order[x : x + n] for order, x, n in zip(twice, places, sizes, strict=True)],
        [order[x:] for order, x in zip(once, places, strict=True)],
    )
    begin, layer, end = (
        in_order(part, split, home) for part, split in zip(parts, splits, strict=True)
    )
    first = {action: at for at, (_, action) in enumerate(begin)}
    middle: dict[tuple[int, Kind, int], tuple[int, int]] = {}
    """Place in the layer and micro-batch, by stage, kind and micro-batch modulo the period."""
    for at, (_, (stage, kind, m)) in enumerate(layer):
        middle[stage, kind, m % period] = at, m
    last_begun, last_layer = [-1] * ranks, [-1] * ranks
    for at, (rank, _) in enumerate(begin):
        last_begun[rank] = at
    for at, (rank, _) in enumerate(layer):
        last_layer[rank] = at

    def nodes(
        part: list[tuple[int, Action]],
        split: set[tuple[int, int]],
        own_of: Sequence[int],
        own_lag: int,
    ) -> list[_ActionNode]:
        """`own_of` [rank] is the node before the part, by the number of layers before."""
        inside = {action: at for at, (_, action) in enumerate(part)}
        before = [(node, own_lag) for node in own_of]
        edges = []
        for at, (rank, action) in enumerate(part):
            source = source_of(action, stages, split)
            place, lag, boundary = -1, 0, -1
            if source is not None:
                if home[source.stage] != rank:
                    boundary = min(source.stage, action.stage)
                if source in inside:
                    place = inside[source]
                else:
                    place, its = middle[source.stage, source.kind, source.micro_batch % period]
                    lag = (its - source.micro_batch) // period
            row, its_lag = before[rank]
            before[rank] = at, 0
            cost = _KINDS.index(action.kind) * stages + action.stage
            edges.append(_ActionNode(cost, row, its_lag, place, lag, boundary))
        return edges

    of_begin = nodes(begin, splits[0], [-1] * ranks, 0)
    of_layer = nodes(layer, splits[1], last_layer, 1)
    of_end = nodes(end, splits[2], last_layer, 1)
    deepest = max(node.lag for node in (*of_layer, *of_end))
    last_done = [-1] * ranks
    for at, (rank, _) in enumerate(end):
        last_done[rank] = at
    return Cut(
        count,
        period,
        tuple(of_begin),
        tuple(of_layer),
        tuple(of_end),
        tuple(last_begun),
        tuple(last_done),
        tuple(
            tuple(
                first.get(Action(stage, kind, m - lag * period), -1)
                for _, (stage, kind, m) in layer
            )
            for lag in range(1, max(1, deepest) + 1)
        ),
    )


def extrapolated_s(
    cut: Cut, home: Sequence[int], times: StageTimes, micro_batches: int
) -> list[float] | None:
    """[rank] Return when ranks end; None if no whole number of layers lies beyond the cut."""
    count, rest = divmod(micro_batches - cut.micro_batches, cut.period)
    if rest or count < len(cut.before):
        return None
    seconds = _seconds(home, times)
    most_s = micro_batches * sum(_passes_s(home, times)) + 2 * micro_batches * sum(times.transfer_s)
    if most_s == 0.0:
        return [0.0] * len(cut.last_done)
    scale = 2.0 ** (_BITS - math.ceil(math.log2(most_s)))
    costs = [round(seconds_ * scale) for seconds_ in seconds]
    # The last entry is of sources on the same rank.
    delays = [*(round(time_s * scale) for time_s in times.transfer_s), 0]

    began: list[int] = []
    for cost, node, _, source, _, boundary in cut.begins:
        now = began[node] if node >= 0 else 0
        if source >= 0:
            now = max(now, began[source] + delays[boundary])
        began.append(now + costs[cost])
    rows = [[began[at] if at >= 0 else 0 for at in row] for row in reversed(cut.before)]
    rows = _Layers(cut, costs, delays, rows).rows_after(count)
    ended: list[int] = []
    for cost, offset, own_lag, source, lag, boundary in cut.ends:
        now = (rows[-own_lag] if own_lag else ended)[offset]
        if source >= 0:
            now = max(now, (rows[-lag] if lag else ended)[source] + delays[boundary])
        ended.append(now + costs[cost])
    return [ended[at] / scale for at in cut.last_done]


def _seconds(home: Sequence[int], times: StageTimes) -> list[float]:
    """[kind, stage] Seconds of every action, with what it sends."""
    last = len(home) - 1
    forward, whole, inputs, weights = [], [], [], []
    for s, rank in enumerate(home):
        ahead_s = times.exposed_s[s] if s < last and home[s + 1] != rank else 0.0
        back_s = times.exposed_s[s - 1] if s and home[s - 1] != rank else 0.0
        weight_s = times.weight_s[s] if times.weight_s is not None else 0.0
        forward.append(times.forward_s[s] + ahead_s)
        whole.append(times.backward_s[s] + back_s)
        inputs.append(times.backward_s[s] - weight_s + back_s)
        weights.append(weight_s)
    return [*forward, *whole, *inputs, *weights]


class _Layers:
    """The layers of a step, one after the other or skipped by the theorem of this module."""

    def __init__(
        self, cut: Cut, costs: Sequence[int], delays: Sequence[int], rows: list[list[int]]
    ) -> None:
        """`rows` [layer][action] are when the actions of the layers before the first end."""
        self._cut, self._costs, self._delays = cut, costs, delays
        self._deepest = len(rows)
        self._rows = rows
        self._furthest = len(cut.last_done) if cut.period == 1 else 1
        self._kept = 2 * self._furthest + self._deepest + 1
        self._own = 0
        """Number of rows of layers that were simulated one after the other."""
        self._repeats = [0] * (self._furthest + 1)
        """[g] For how many layers the first action is as much later than g layers before."""
        layer, none = cut.layer, np.zeros(len(cut.layer), dtype=np.int64)
        self._cost = np.array([costs[node.cost] for node in layer], dtype=np.int64)
        row, own_lag, source, lag = (
            np.array([node[at] for node in layer], dtype=np.intp) for at in (1, 2, 3, 4)
        )
        sent = np.array([delays[node.boundary] for node in layer], dtype=np.int64)
        self._arcs = (row, own_lag, none), (source, lag, sent)
        """Both arcs of every action: [action] place, layers before, delay."""

    def rows_after(self, count: int) -> list[list[int]]:
        """Return the last rows behind a number of layers."""
        while count:
            self._advance()
            count -= 1
            for g in range(1, self._furthest + 1):
                if self._repeats[g] >= g + self._deepest and count >= g:
                    skipped = self._skip(g, count // g)
                    if skipped:
                        count -= skipped * g
                        break
        return self._rows

    def _advance(self) -> None:
        """Simulate one layer."""
        rows, costs, delays = self._rows, self._costs, self._delays
        row: list[int] = []
        for cost, node, own_lag, source, lag, boundary in self._cut.layer:
            now = rows[-1][node] if own_lag else row[node]
            if source >= 0:
                now = max(now, (rows[-lag] if lag else row)[source] + delays[boundary])
            row.append(now + costs[cost])
        rows.append(row)
        if len(rows) > self._kept:
            del rows[0]
        self._own += 1
        for g in range(1, min(self._furthest, self._own - 2) + 1):
            same = rows[-1][0] - rows[-1 - g][0] == rows[-2][0] - rows[-2 - g][0]
            self._repeats[g] = self._repeats[g] + 1 if same else 0

    def _skip(self, g: int, most: int) -> int:
        """Skip up to `most` times g layers; return how many times."""
        needed = 2 * g + self._deepest
        if self._own < needed:
            return 0
        rows = np.array(self._rows[-needed:], dtype=np.int64)
        later = rows[g:] - rows[:-g]
        delta = later[-1]
        if not (later == delta).all():
            return 0
        limit = most
        # [last g layers, action] Slack of both arcs; the theorem's rows are those of `needed`.
        slacks = []
        for place, lag, delay in self._arcs:
            there = place >= 0
            column = np.where(there, place, 0)
            at = np.arange(needed - g, needed)[:, None] - lag[None, :]
            arrival = rows[at, column[None, :]] + delay[None, :]
            slack = rows[needed - g :] - self._cost - arrival
            change = np.where(there, delta[column] - delta, -1)
            slacks.append((np.where(there[None, :], slack, 1), change))
        tight = np.zeros((g, len(delta)), dtype=bool)
        for slack, change in slacks:
            tight |= (slack == 0) & (change == 0)[None, :]
            faster = change > 0
            if faster.any():
                limit = min(limit, int((slack[:, faster] // change[faster]).min()))
        if not tight.all() or limit < 1:
            return 0
        ends = rows[-g:]
        number = min(len(self._rows), self._deepest + g)
        # Layer t behind the last one known is layer t - n g of the last g, n Δ later.
        kept = []
        for back in range(number - 1, -1, -1):
            t = limit * g - back
            n = -(-t // g) if t > 0 else 0
            if t <= 0:
                kept.append(self._rows[t - 1])
            else:
                kept.append((ends[t - n * g - 1] + n * delta).tolist())
        self._rows = kept
        self._own = 0
        self._repeats = [0] * (self._furthest + 1)
        return limit


KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""In the order of `Path.visits`."""


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A path to the end of a rank."""

    rank: int
    visits: NDArray[np.float64]
    """[kind of `KINDS`, stage]"""
    hops: NDArray[np.float64]
    """[boundary] How often it waits for a transfer, forwards or backwards."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The actions of a step, each behind what it waits for."""

    stages: int
    nodes: tuple[tuple[int, int, int, int], ...]
    """Place among [kind, stage]; of the action before it on its rank, of the one that makes its
    input, -1 where there is none; the boundary between, or that behind the last where none is."""
    ends: tuple[int, ...]
    """[rank] Its last action."""

    def longest(self, seconds: Sequence[float], transfer_s: Sequence[float]) -> list[float]:
        """[node] When it ends; `seconds` [kind, stage] in one row."""
        delays = [*transfer_s, 0.0]
        ends: list[float] = []
        for cost, rank, source, boundary in self.nodes:
            now = ends[rank] if rank >= 0 else 0.0
            if source >= 0:
                now = max(now, ends[source] + delays[boundary])
            ends.append(now + seconds[cost])
        return ends

    def longest_of_many(
        self, seconds: NDArray[np.float64], transfer_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[node, step] The same of several steps: `seconds` [kind and stage, step] and transfers
        [boundary, step]."""
        steps = seconds.shape[1]
        delays, none = np.vstack([transfer_s, np.zeros((1, steps))]), np.zeros(steps)
        ends_s = np.empty((len(self.nodes), steps))
        for at, (cost, rank, source, boundary) in enumerate(self.nodes):
            now = ends_s[rank] if rank >= 0 else none
            if source >= 0:
                now = np.maximum(now, ends_s[source] + delays[boundary])
            np.add(now, seconds[cost], out=ends_s[at])
        return ends_s

    def path(self, rank: int, ends_s: Sequence[float], transfer_s: Sequence[float]) -> Path:
        """Return a longest path to the end of a rank, by what `longest` returned."""
        delays = [*transfer_s, 0.0]
        visits, hops = np.zeros(len(KINDS) * self.stages), np.zeros(self.stages)
        at = self.ends[rank]
        while at >= 0:
            cost, owner, source, boundary = self.nodes[at]
            visits[cost] += 1
            before = ends_s[owner] if owner >= 0 else 0.0
            if source >= 0 and ends_s[source] + delays[boundary] > before:
                hops[boundary] += 1
                at = source
            else:
                at = owner
        return Path(rank, visits.reshape(len(KINDS), self.stages), hops[:-1])


@lru_cache(maxsize=32)
def graph_of(schedule: str, *, stages: int, micro_batches: int, virtual_stages: int = 1) -> Graph:
    """Return the graph of a schedule.

    >>> graph = graph_of("1f1b", stages=2, micro_batches=3)
    >>> ends_s = graph.longest([1.0, 1.0, 2.0, 2.0, 0, 0, 0, 0], [0.5])
    >>> ends_s[graph.ends[0]], graph.path(0, ends_s, [0.5]).visits[:2].tolist()
    (14.0, [[2.0, 2.0], [2.0, 2.0]])
    """
    shape = {"stages": stages, "virtual_stages": virtual_stages}
    home = rank_of_stage(schedule, **shape)
    lists = orders(schedule, micro_batches=micro_batches, **shape)
    split = split_of(lists)
    before, place = [-1] * len(lists), dict[Action, int]()
    nodes = []
    for at, (rank, action) in enumerate(in_order(lists, split, home)):
        source, boundary = source_of(action, stages, split), stages - 1
        if source is not None and home[source.stage] != rank:
            boundary = min(source.stage, action.stage)
        nodes.append(
            (
                KINDS.index(action.kind) * stages + action.stage,
                before[rank],
                -1 if source is None else place[source],
                boundary,
            )
        )
        before[rank] = place[action] = at
    return Graph(stages, tuple(nodes), tuple(before))
