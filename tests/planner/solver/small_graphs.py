"""Random graphs of layers small enough to list every split of them, and that list."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import networkx

from planner.solver.graph_instance import GraphInstance, alike
from planner.solver.instance import Instance, Option, StageLimits, UsedBytes


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
    stages = range(len(problem.chain.stages))
    for stage_of in itertools.product(stages, repeat=len(problem.chain.layers)):
        forward = all(stage_of[a] <= stage_of[b] for a, b in problem.edges)
        together = all(len({stage_of[at] for at in group}) == 1 for group in problem.colocated)
        if forward and together and set(stage_of) == set(stages):
            yield stage_of


def objective_s(
    problem: GraphInstance, stage_of: tuple[int, ...], options: tuple[int, ...]
) -> float:
    """Seconds of one split, from the definition; inf if a stage has not the bytes."""
    parts = [
        _layers_s(problem, s, _before(stage_of, s), held, [options[layer] for layer in held])
        for s, held in enumerate(_held(problem, stage_of))
    ]
    return _total_s(problem, stage_of, parts)


def least_objective_s(problem: GraphInstance) -> float:
    """Seconds of the best split of all there are; inf if none fits.

    Of the options of one stage only those are tried that no others beat in both time and sync.
    """
    best = math.inf
    for stage_of in splits(problem):
        choices = []
        for s, held in enumerate(_held(problem, stage_of)):
            tables = [
                range(len(problem.chain.kinds[problem.chain.layers[layer]])) for layer in held
            ]
            before = _before(stage_of, s)
            every = [
                _layers_s(problem, s, before, held, picks) for picks in itertools.product(*tables)
            ]
            choices.append(_unbeaten(every))
        for parts in itertools.product(*choices):
            best = min(best, _total_s(problem, stage_of, parts))
    return best


# Seconds that count apart in the slowest stage (0 if they do not), the others, and sync.
Part = tuple[float, float, float]


def _held(problem: GraphInstance, stage_of: tuple[int, ...]) -> list[list[int]]:
    """[stage] Its layers."""
    return [
        [layer for layer, at in enumerate(stage_of) if at == s]
        for s in range(len(problem.chain.stages))
    ]


def _unbeaten(every: list[Part]) -> list[Part]:
    distinct = set(every)
    return [
        one
        for one in distinct
        if not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in distinct
        )
    ]


def _before(stage_of: tuple[int, ...], s: int) -> list[int]:
    """Layers of the stages before one."""
    return [layer for layer, at in enumerate(stage_of) if at < s]


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
        sums = room.fixed_bytes + sum(room.held_bytes(o) for o in chosen)
        sums += max(o.transient_bytes for o in chosen)
        return sums + rng.choice((0.0, 0.0, 1.0, 5.0, rng.uniform(0, 25)))

    return UsedBytes(used_bytes, by_place)


def _layers_s(
    problem: GraphInstance,
    s: int,
    before: Sequence[int],
    held: Sequence[int],
    picks: Sequence[int],
) -> Part:
    """What stage s takes with these layers and options; inf if it has not the bytes."""
    chain, stage = problem.chain, problem.chain.stages[s]
    kinds = [chain.layers[layer] for layer in held]
    chosen = [chain.options_of(layer)[pick] for layer, pick in zip(held, picks, strict=True)]
    used = stage.fixed_bytes + max(o.transient_bytes for o in chosen)
    for o in chosen:
        used += o.resident_bytes + stage.in_flight * o.stored_bytes
        used += stage.waiting * o.kept_bytes
    if chain.used_bytes is not None:
        used = chain.used_bytes.of(s, before, held, picks)
        if not first_take_later(kinds, picks):
            used = math.inf
    if used > stage.capacity_bytes * (1 + 1e-12):
        return math.inf, math.inf, math.inf
    forward = stage.time_scale * sum(o.forward_s for o in chosen) + stage.exposed_s / 2
    backward = stage.time_scale * sum(o.backward_s for o in chosen) + stage.exposed_s / 2
    sync = sum(o.sync_s for o in chosen)
    return (
        (forward, backward, sync)
        if problem.chain.forward_apart
        else (0.0, forward + backward, sync)
    )


def _total_s(problem: GraphInstance, stage_of: tuple[int, ...], parts: Sequence[Part]) -> float:
    if any(backward == math.inf for _, backward, _ in parts):
        return math.inf
    sends_s = [_sends_s(problem, stage_of, s) for s in range(len(parts))]
    apart = 0.5 if problem.chain.forward_apart else 0.0
    slowest_s = max(f + apart * sent for (f, _, _), sent in zip(parts, sends_s, strict=True))
    slowest_s += max(b + (1 - apart) * sent for (_, b, _), sent in zip(parts, sends_s, strict=True))
    total = problem.chain.steady * slowest_s
    total += problem.chain.fill * (sum(f + b for f, b, _ in parts) + sum(sends_s))
    total += max(sync for _, _, sync in parts)
    if problem.chain.credits_s:
        for layer, s in enumerate(stage_of):
            total -= (
                problem.chain.stages[s].time_scale
                * problem.chain.credits_s[problem.chain.layers[layer]]
            )
    return total


def _sends_s(problem: GraphInstance, stage_of: tuple[int, ...], s: int) -> float:
    """Seconds that stage s spends on outputs from before it or for after it, with any relays."""
    total = 0.0
    if s in problem.unpaid:
        return total
    for layer, at in enumerate(stage_of):
        if not problem.relayed:
            reading = {stage_of[b] for a, b in problem.edges if a == layer} - {at}
            if reading and s in {at, *reading}:
                total += problem.sent_s()[layer]
            continue
        last = max((stage_of[b] for a, b in problem.edges if a == layer), default=at)
        if at < s <= last:
            total += problem.sent_s()[layer]  # received
        if at <= s < last:
            total += problem.sent_s()[layer]  # sent, or passed on
    return total
