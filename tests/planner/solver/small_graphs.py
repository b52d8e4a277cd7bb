"""Random graphs of layers, on one type of devices or several, and the list of all their splits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import networkx

from meshwright.planner.solver.graph_instance import DeviceType, GraphInstance, alike, in_a_row
from meshwright.planner.solver.partition_problem import Instance, Option, StageLimits, UsedBytes


def random_graph(seed: int, *, sync_by_option: bool = False) -> GraphInstance:
    """At most 8 layers, 3 stages, 3 options; half of them in whole numbers, so that many tie."""
    rng = random.Random(seed)
    layers = rng.randint(2, 6 if sync_by_option else 8)
    stages = rng.randint(1, min(3, layers))
    whole = rng.random() < 0.5
    resident_by_option = rng.random() < 0.4
    most_options = 3 if layers <= 6 else 2

    def number(low: int, high: int) -> float:
        return float(rng.randint(low, high)) if whole else rng.uniform(low, high)

    forward_apart = rng.random() < 0.3

    def kind() -> tuple[Option, ...]:
        resident, forward = number(0, 3), number(0, 4)
        sync = number(0, 5) if rng.random() < 0.7 else 0.0
        return tuple(
            Option(
                name=f"option {k}",
                forward_s=forward if forward_apart else number(0, 4),
                backward_s=number(0, 8),
                stored_bytes=number(0, 5),
                transient_bytes=number(0, 4) if rng.random() < 0.7 else 0.0,
                resident_bytes=number(0, 4) if resident_by_option else resident,
                sync_s=number(0, 5) if sync_by_option else sync,
            )
            for k in range(rng.randint(1, most_options))
        )

    kinds = tuple(kind() for _ in range(rng.randint(1, 4)))
    density = rng.choice([0.15, 0.3, 0.5])
    pairs = itertools.combinations(range(layers), 2)
    shared_capacity = number(6, 45)
    names = tuple(f"layer {i}" for i in range(layers))
    drawn = tuple(rng.randrange(len(kinds)) for _ in range(layers))
    edges = tuple(pair for pair in pairs if rng.random() < density)
    output_s = tuple(number(0, 4) if rng.random() < 0.8 else 0.0 for _ in range(layers))
    chain = Instance(
        layers=drawn,
        kinds=kinds,
        stages=tuple(
            StageLimits(
                capacity_bytes=shared_capacity if rng.random() < 0.5 else number(6, 45),
                in_flight=rng.choice([1.0, 2.0, 3.0, 1.5]),
                time_scale=1.0 if rng.random() < 0.5 else rng.uniform(0.5, 2.0),
                exposed_s=number(0, 2) if rng.random() < 0.5 else 0.0,
                fixed_bytes=number(0, 2),
            )
            for _ in range(stages)
        ),
        steady=float(rng.choice([0, 1, 3, 7, 31])),
        forward_apart=forward_apart,
        fill=rng.choice([1.0, 1.0, 0.5, 0.0]),
        credits_s=tuple(number(0, 2) for _ in kinds) if rng.random() < 0.3 else (),
    )
    return alike(chain, edges=edges, output_s=output_s, names=names)


def random_unequal(seed: int, *, sync_by_option: bool = False) -> GraphInstance:
    """At most 6 layers, 4 stages of 3 types, 3 options; half of them in whole numbers."""
    rng = random.Random(seed)
    stages = rng.randint(1, 4)
    layers = rng.randint(stages, 6)
    whole = rng.random() < 0.5
    resident_by_option = rng.random() < 0.4

    def number(low: int, high: int) -> float:
        return float(rng.randint(low, high)) if whole else rng.uniform(low, high)

    forward_apart = rng.random() < 0.3

    def table(options: int) -> tuple[Option, ...]:
        resident, sync = number(0, 3), number(0, 5) if rng.random() < 0.7 else 0.0
        forward = number(0, 4)
        return tuple(
            Option(
                name=f"option {k}",
                forward_s=forward if forward_apart else number(0, 4),
                backward_s=number(0, 8),
                stored_bytes=number(0, 5),
                transient_bytes=number(0, 4) if rng.random() < 0.7 else 0.0,
                resident_bytes=number(0, 4) if resident_by_option else resident,
                sync_s=number(0, 5) if sync_by_option else sync,
            )
            for k in range(options)
        )

    kinds = rng.randint(1, 3)
    numbers = [1] * rng.randint(1, min(3, stages))
    while sum(numbers) < stages:
        numbers[rng.randrange(len(numbers))] += 1
    shared = tuple(table(rng.randint(1, 3)) for _ in range(kinds))
    figures = [
        (
            shared if rng.random() < 0.5 else tuple(table(rng.randint(1, 3)) for _ in range(kinds)),
            StageLimits(
                capacity_bytes=number(6, 40),
                fixed_bytes=number(0, 2),
                time_scale=1.0 if rng.random() < 0.4 else rng.uniform(0.5, 2.0),
                exposed_s=number(0, 2) if rng.random() < 0.5 else 0.0,
            ),
        )
        for _ in numbers
    ]
    output_s = tuple(
        tuple(tuple(number(0, 3) for _ in range(layers + 1))[1:] for _ in numbers) for _ in numbers
    )
    drawn = tuple(rng.randrange(kinds) for _ in range(layers))
    in_flight = [rng.choice([1.0, 2.0, 3.0, 1.5]) for _ in range(stages)]
    steady = float(rng.choice([0, 1, 3, 7, 31]))
    fill = rng.choice([1.0, 1.0, 0.5, 0.0])
    credits_s = tuple(number(0, 2) for _ in range(kinds)) if rng.random() < 0.3 else ()
    return GraphInstance(
        types=tuple(
            DeviceType(
                name=f"type {g}",
                stages=numbers[g],
                chain=Instance(
                    layers=drawn,
                    kinds=tables,
                    stages=tuple(replace(stage, in_flight=alive) for alive in in_flight),
                    steady=steady,
                    forward_apart=forward_apart,
                    fill=fill,
                    credits_s=credits_s,
                ),
            )
            for g, (tables, stage) in enumerate(figures)
        ),
        edges=in_a_row(layers),
        output_s=output_s if rng.random() < 0.6 else (),
    )


def random_unequal_graph(seed: int) -> GraphInstance:
    """At most 6 layers on 4 stages of 3 types, whose cuts cost what crosses them."""
    rng = random.Random(1000 + seed)
    chain = random_unequal(seed)
    layers, types = len(chain.chain.layers), len(chain.types)
    share = rng.choice([0.1, 0.3, 0.5])
    pairs = itertools.combinations(range(layers), 2)
    return replace(
        chain,
        names=tuple(f"layer {i}" for i in range(layers)),
        edges=tuple(pair for pair in pairs if rng.random() < share),
        output_s=tuple(
            tuple(tuple(float(rng.randint(0, 3)) for _ in range(layers)) for _ in range(types))
            for _ in range(types)
        ),
    )


def soon_listed(problem: GraphInstance) -> bool:
    """Whether all splits, orders of types and options are soon listed."""
    chain = problem.chain
    options = max(len(table) for one in problem.types for table in one.chain.kinds)
    splits = len(chain.stages) ** len(problem.names)
    return splits * len(orders(problem)) * options <= 3000


@cache
def graphs_on_types() -> list[GraphInstance]:
    """Those of the random graphs on several types whose splits are soon listed."""
    drawn = map(random_unequal_graph, range(520))
    return [one for one in drawn if len(one.types) > 1 and soon_listed(one)]


def changed(problem: GraphInstance, **changes: Any) -> GraphInstance:
    """The same with other chains."""
    types = (replace(one, chain=replace(one.chain, **changes)) for one in problem.types)
    return replace(problem, types=tuple(types))


def cyclic(problem: GraphInstance, groups: Sequence[Sequence[int]]) -> bool:
    """Whether the graph has a cycle once each group is one node."""
    home = {layer: min(group) for group in groups for layer in group}
    graph = networkx.DiGraph(
        (home.get(a, a), home.get(b, b))
        for a, b in problem.edges
        if home.get(a, a) != home.get(b, b)
    )
    return not networkx.is_directed_acyclic_graph(graph)


def with_groups(problem: GraphInstance, seed: int) -> GraphInstance:
    """The same with up to 3 groups of layers that stay together, none of which make a cycle."""
    rng = random.Random(seed)
    free, groups = list(range(len(problem.chain.layers))), []  # type: list[int], list[tuple[int, ...]]
    for _ in range(3):
        if len(free) < 2:
            break
        group = tuple(sorted(rng.sample(free, min(len(free), rng.choice((2, 2, 3))))))
        if not cyclic(problem, [*groups, group]):
            groups.append(group)
            free = [layer for layer in free if layer not in group]
    return replace(problem, colocated=tuple(groups))


def splits(problem: GraphInstance) -> Iterator[tuple[int, ...]]:
    """[layer] Stage, for every split in which no edge leads back and no stage is empty.

    The layers of a group have one stage.
    """
    layers, stages = len(problem.chain.layers), len(problem.chain.stages)
    reads = [[a for a, b in problem.edges if b == layer] for layer in range(layers)]
    mates = [
        [a for g in problem.colocated if layer in g for a in g if a < layer]
        for layer in range(layers)
    ]

    def begun(some: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        at = len(some)
        if at == layers:
            if len(set(some)) == stages:
                yield some
            return
        least = max((some[a] for a in reads[at]), default=0)
        for stage in range(least, stages):
            if all(some[a] == stage for a in mates[at]):
                yield from begun((*some, stage))

    yield from begun(())


def orders(problem: GraphInstance) -> set[tuple[int, ...]]:
    """[stage] Type of devices, for every order of them."""
    every = [g for g, one in enumerate(problem.types) for _ in range(one.stages)]
    return set(itertools.permutations(every))


Part = tuple[float, float, float]
"""Seconds that count apart in the slowest stage (0 if they do not), the others, and sync."""


def objective_s(
    problem: GraphInstance,
    stage_of: tuple[int, ...],
    options: tuple[int, ...],
    order: Sequence[int] = (),
) -> float:
    """Seconds of one split, from the definition; inf if a stage has not the bytes.

    Without an `order` of types all stages are of the first.
    """
    order = order or (0,) * len(problem.chain.stages)
    parts = []
    for s, layers in enumerate(_contents(problem, stage_of)):
        picks = [options[layer] for layer in layers]
        part = _part(problem, s, order[s], layers, picks, before=_before(stage_of, s))
        if part is None:
            return math.inf
        parts.append(part)
    return _total_s(problem, stage_of, order, parts)


def least_objective_s(problem: GraphInstance) -> float:
    """Seconds of the best split, order of types and options of all there are; inf if none fits.

    Of the options of one stage only those are tried that no others beat in both time and sync.
    """
    known: dict[tuple[object, ...], list[Part]] = {}

    def choices(stage_of: tuple[int, ...], s: int, g: int, layers: list[int]) -> list[Part]:
        before = _before(stage_of, s)
        key = s, g, tuple(layers), tuple(before)
        if key not in known:
            known[key] = _unbeaten(problem, s, g, layers, before=before)
        return known[key]

    best, every = math.inf, orders(problem)
    for stage_of in splits(problem):
        contents = _contents(problem, stage_of)
        for order in every:
            each = [choices(stage_of, s, g, contents[s]) for s, g in enumerate(order)]
            for parts in itertools.product(*each):
                best = min(best, _total_s(problem, stage_of, order, parts))
    return best


def _contents(problem: GraphInstance, stage_of: tuple[int, ...]) -> list[list[int]]:
    """[stage] Its layers."""
    return [
        [layer for layer, at in enumerate(stage_of) if at == s]
        for s in range(len(problem.chain.stages))
    ]


def _before(stage_of: tuple[int, ...], s: int) -> list[int]:
    """Layers of the stages before one."""
    return [layer for layer, at in enumerate(stage_of) if at < s]


def _unbeaten(
    problem: GraphInstance, s: int, g: int, layers: Sequence[int], *, before: Sequence[int]
) -> list[Part]:
    """What stage s takes on a type with options that fit and that no others beat."""
    chain = problem.types[g].chain
    tables = [range(len(chain.options_of(layer))) for layer in layers]
    every = (
        _part(problem, s, g, layers, picks, before=before) for picks in itertools.product(*tables)
    )
    found = {part for part in every if part is not None}
    return [
        one
        for one in found
        if not any(a != one and all(x <= y for x, y in zip(a, one, strict=True)) for a in found)
    ]


def first_take_later(kinds: Sequence[int], picks: Sequence[int]) -> bool:
    """Whether alike layers that come first take the later options (recompute the first)."""
    taken: dict[int, int] = {}
    for kind, pick in zip(kinds, picks, strict=True):
        if pick > taken.get(kind, pick):
            return False
        taken[kind] = pick
    return True


def more_bytes(of: Instance, seed: int, *, by_place: bool) -> UsedBytes:
    """What stages hold beyond the sums of `of`: by layers, their options, and what is before."""

    def used_bytes(
        stage: int, before: Sequence[int], held: Sequence[int], options: Sequence[int]
    ) -> float:
        place = (sorted(before), list(held)) if by_place else [of.layers[at] for at in held]
        rng = random.Random(f"{seed} {stage} {place} {list(options)}")
        room = of.stages[stage]
        chosen = [of.kinds[of.layers[at]][o] for at, o in zip(held, options, strict=True)]
        sums = room.fixed_bytes + sum(room.summed_bytes(o) for o in chosen)
        sums += max(o.transient_bytes for o in chosen)
        return sums + rng.choice((0.0, 0.0, 1.0, 5.0, rng.uniform(0, 25)))

    return UsedBytes(used_bytes, by_place)


def with_more_bytes(problem: GraphInstance, seed: int, *, by_place: bool) -> GraphInstance:
    """Return the problem with stages that hold more than sums say."""
    types = tuple(
        replace(
            one,
            chain=replace(
                one.chain, used_bytes=more_bytes(one.chain, seed * 7 + g, by_place=by_place)
            ),
        )
        for g, one in enumerate(problem.types)
    )
    return replace(problem, types=types)


def _part(
    problem: GraphInstance,
    s: int,
    g: int,
    layers: Sequence[int],
    picks: Sequence[int],
    *,
    before: Sequence[int],
) -> Part | None:
    """What stage s takes on a type with these layers and options; None if it has not the bytes."""
    chain = problem.types[g].chain
    stage = chain.stages[s]
    chosen = [chain.options_of(layer)[pick] for layer, pick in zip(layers, picks, strict=True)]
    if len(layers) < stage.least_layers:
        return None
    used = stage.fixed_bytes + max(o.transient_bytes for o in chosen)
    for o in chosen:
        used += o.resident_bytes + stage.in_flight * o.stored_bytes
        used += stage.waiting * o.kept_bytes
    if chain.used_bytes is not None:
        used = chain.used_bytes.of(s, before, layers, picks)
        if not first_take_later([chain.layers[layer] for layer in layers], picks):
            return None
    on_host = sum(o.host_bytes * (stage.most_in_flight or stage.in_flight) for o in chosen)
    if any(host.ranks[s] * on_host > host.capacity_bytes * (1 + 1e-12) for host in chain.hosts):
        return None
    if used > stage.capacity_bytes * (1 + 1e-12):
        return None
    forward_s = stage.time_scale * sum(o.forward_s for o in chosen) + stage.exposed_s / 2
    backward_s = stage.time_scale * sum(o.backward_s for o in chosen) + stage.exposed_s / 2
    apart = (forward_s, backward_s) if chain.forward_apart else (0.0, forward_s + backward_s)
    return *apart, sum(o.sync_s for o in chosen)


def _total_s(
    problem: GraphInstance, stage_of: tuple[int, ...], order: Sequence[int], parts: Sequence[Part]
) -> float:
    chain = problem.chain
    apart = 0.5 if chain.forward_apart else 0.0
    both = list(zip(parts, _sends_s(problem, stage_of, order), strict=True))
    slowest_s = max(f + apart * sent for (f, _, _), sent in both)
    slowest_s += max(b + (1 - apart) * sent for (_, b, _), sent in both)
    total = chain.steady * slowest_s + chain.fill * sum(f + b + sent for (f, b, _), sent in both)
    for layer, s in enumerate(stage_of):
        one = problem.types[order[s]].chain
        total -= one.stages[s].time_scale * one.credit_s(layer)
    return total + max(sync for _, _, sync in parts)


def _sends_s(
    problem: GraphInstance, stage_of: tuple[int, ...], order: Sequence[int]
) -> list[float]:
    """[stage] Seconds spent on outputs from before it or for after it, with any relays."""
    found = [0.0] * len(order)
    for layer, at in enumerate(stage_of):
        reading = {stage_of[b] for a, b in problem.edges if a == layer} - {at}
        if not reading:
            continue
        if problem.relayed:
            for s in range(at, max(reading)):  # sent or passed on, and received
                sent_s = problem.sent_s(order[s], order[s + 1])[layer]
                found[s] += sent_s
                found[s + 1] += sent_s
        else:
            for s in {at, *reading}:
                found[s] += problem.sent_s()[layer]
    return [0.0 if s in problem.unpaid else sent for s, sent in enumerate(found)]
