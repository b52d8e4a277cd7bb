"""solve.solve of chains on several types of devices, against all orders, cuts and options."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.solver import inner
from planner.solver.graph_instance import (
    DeviceType,
    GraphInstance,
    GraphSolution,
    in_a_row,
)
from planner.solver.instance import Infeasible, Instance, Option, Solution, StageLimits, fits
from planner.solver.solve import solve
from planner.solver.unequal import unequal
from tests.planner.solver.small_graphs import first_take_later, more_bytes


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


def orders(problem: GraphInstance) -> set[tuple[int, ...]]:
    every = [g for g, one in enumerate(problem.types) for _ in range(one.stages)]
    return set(itertools.permutations(every))


def least_objective_s(problem: GraphInstance) -> float:
    """Seconds of the best order, cuts and options from the definition; inf if none fits."""
    layers, stages = len(problem.chain.layers), len(problem.chain.stages)
    known: dict[tuple[int, int, int, int], list[tuple[float, ...]]] = {}

    def of(s: int, g: int, first: int, end: int) -> list[tuple[float, ...]]:
        if (s, g, first, end) not in known:
            held = range(first, end)
            known[s, g, first, end] = choices_of(problem, s, g, held, before=range(first))
        return known[s, g, first, end]

    best = math.inf
    apart = 0.5 if problem.chain.forward_apart else 0.0
    for order in orders(problem):
        for between in itertools.combinations(range(1, layers), stages - 1):
            cuts = (0, *between, layers)
            choices = [of(s, g, cuts[s], cuts[s + 1]) for s, g in enumerate(order)]
            beside = [0.0] * stages
            if problem.output_s:
                for s in range(1, stages):
                    cut_s = problem.output_s[order[s - 1]][order[s]][cuts[s] - 1]
                    beside[s - 1] += cut_s
                    beside[s] += cut_s
            credit_s = sum(
                scale(problem, g) * problem.types[g].chain.credit_s(layer)
                for s, g in enumerate(order)
                for layer in range(cuts[s], cuts[s + 1])
            )
            for parts in itertools.product(*choices):
                both = list(zip(parts, beside, strict=True))
                slowest_s = max(f + apart * cut for (f, _, _), cut in both)
                slowest_s += max(b + (1 - apart) * cut for (_, b, _), cut in both)
                sum_s = sum(f + b + cut for (f, b, _), cut in both)
                total = problem.chain.steady * slowest_s + problem.chain.fill * sum_s - credit_s
                best = min(best, total + max(sync for _, _, sync in parts))
    return best


def scale(problem: GraphInstance, g: int) -> float:
    return problem.types[g].chain.stages[0].time_scale


def choices_of(
    problem: GraphInstance, s: int, g: int, held: Sequence[int], *, before: Sequence[int]
) -> list[tuple[float, ...]]:
    """Seconds apart, other seconds and sync of options that fit and that no others beat."""
    one = problem.types[g].chain
    stage = one.stages[s]
    found = set()
    if len(held) < stage.least_layers:
        return []
    tables = [one.kinds[one.layers[layer]] for layer in held]
    for picks in itertools.product(*(range(len(table)) for table in tables)):
        chosen = [table[pick] for table, pick in zip(tables, picks, strict=True)]
        used = stage.fixed_bytes + max(o.transient_bytes for o in chosen)
        for o in chosen:
            used += o.resident_bytes + stage.in_flight * o.stored_bytes
            used += stage.waiting * o.kept_bytes
        if one.used_bytes is not None:
            used = one.used_bytes.of(s, before, held, picks)
            if not first_take_later([one.layers[layer] for layer in held], picks):
                continue
        on_host = sum(o.host_bytes * (stage.most_in_flight or stage.in_flight) for o in chosen)
        if any(host.ranks[s] * on_host > host.capacity_bytes * (1 + 1e-12) for host in one.hosts):
            continue
        if used <= stage.capacity_bytes * (1 + 1e-12):
            forward = stage.time_scale * sum(o.forward_s for o in chosen) + stage.exposed_s / 2
            backward = stage.time_scale * sum(o.backward_s for o in chosen) + stage.exposed_s / 2
            seconds = (forward, backward) if one.forward_apart else (0.0, forward + backward)
            found.add((*seconds, sum(o.sync_s for o in chosen)))
    return [
        one
        for one in found
        if not any(a != one and all(x <= y for x, y in zip(a, one, strict=True)) for a in found)
    ]


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


@pytest.mark.spread(2)
@pytest.mark.parametrize("sync_by_option", [False, True])
@pytest.mark.parametrize("start", range(0, 120, 40))
def test_bytes_that_are_no_sums_are_kept_to(start: int, sync_by_option: bool) -> None:
    feasible = [
        agrees_with_enumeration(with_more_bytes(problem, seed, by_place=False))
        for seed in range(start, start + 40)
        for problem in [random_unequal(seed, sync_by_option=sync_by_option)]
    ]

    assert 5 < sum(feasible) < 40


def agrees_with_enumeration(problem: GraphInstance) -> bool:
    """Solve, compare with the best of everything there is, and say whether anything fits."""
    best_s = least_objective_s(problem)
    answer = solve(problem)
    if best_s == math.inf:
        assert isinstance(answer, Infeasible)
        assert answer.reason
        return False
    assert isinstance(answer, GraphSolution)
    assert answer.split.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
    assert answer.split.optimal
    assert answer.types in orders(problem)
    laid = problem.laid(answer.order, answer.split.cuts, answer.types)
    assert fits(laid, answer.split)
    return True


@pytest.mark.spread(2)
@pytest.mark.parametrize("start", range(0, 240, 60))
def test_no_order_cuts_and_options_beat_the_solution(start: int) -> None:
    feasible = [agrees_with_enumeration(random_unequal(seed)) for seed in range(start, start + 60)]

    assert 20 < sum(feasible) < 60


@pytest.mark.parametrize("start", range(240, 300, 30))
def test_climbing_from_a_ceiling_far_too_low_changes_nothing(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unequal, "_FIRST", 0.3)
    monkeypatch.setattr(unequal, "_RISE", 1.04)

    feasible = [agrees_with_enumeration(random_unequal(seed)) for seed in range(start, start + 30)]

    assert 10 < sum(feasible) < 30


@pytest.mark.parametrize("start", range(300, 400, 50))
def test_sync_may_differ_between_the_options_of_a_kind(start: int) -> None:
    feasible = [
        agrees_with_enumeration(random_unequal(seed, sync_by_option=True))
        for seed in range(start, start + 50)
    ]

    assert 10 < sum(feasible) < 50


def decoder(*, memory: float = 1.0, pace: float = 1.0, send_s: float = 2e-4) -> GraphInstance:
    """30 blocks and a heavy head on 3 fast devices with much memory and 3 slow ones with little."""

    def option(name: str, time_s: float, stored: float) -> Option:
        return Option(
            name=name,
            forward_s=time_s / 3,
            backward_s=2 * time_s / 3,
            stored_bytes=stored,
            resident_bytes=0.5e9,
            sync_s=0.01,
        )

    block = (option("none", 0.01, 0.5e9), option("full", 0.0133, 0.05e9))
    head = (option("none", 0.02, 0.1e9),)
    return on_types(
        {
            "large": (3, StageLimits(capacity_bytes=memory * 16e9)),
            "small": (3, StageLimits(capacity_bytes=memory * 10e9, time_scale=2.2 * pace)),
        },
        Instance(
            layers=(*[0] * 30, 1),
            kinds=(block, head),
            stages=tuple(StageLimits(capacity_bytes=0.0, in_flight=6 - s) for s in range(6)),
            steady=15,
        ),
        (((0.5 * send_s,) * 31, (send_s,) * 31), ((send_s,) * 31, (0.8 * send_s,) * 31)),
    )


def on_types(
    types: dict[str, tuple[int, StageLimits]],
    chain: Instance,
    output_s: tuple[tuple[tuple[float, ...], ...], ...] = (),
) -> GraphInstance:
    """A chain on types with so many stages, alike but for what is in flight."""
    return GraphInstance(
        types=tuple(
            DeviceType(
                name=name,
                stages=count,
                chain=replace(
                    chain,
                    stages=tuple(replace(stage, in_flight=s.in_flight) for s in chain.stages),
                ),
            )
            for name, (count, stage) in types.items()
        ),
        edges=in_a_row(len(chain.layers)),
        output_s=output_s,
    )


def objective_of(problem: GraphInstance) -> float:
    answer = solve(problem)
    assert isinstance(answer, GraphSolution)
    return answer.split.objective_s


def in_order_s(problem: GraphInstance, order: tuple[int, ...]) -> float:
    """Seconds of the best cuts for one order, by the chain solver; cuts free of charge."""
    laid = [problem.types[g].chain.stages[s] for s, g in enumerate(order)]
    answer = inner.solve(replace(problem.chain, stages=tuple(laid)))
    return answer.objective_s if isinstance(answer, Solution) else math.inf


def test_it_finds_the_best_of_all_orders_solved_as_chains() -> None:
    problem = replace(decoder(), output_s=())

    answer = solve(problem)

    assert isinstance(answer, GraphSolution)
    times_s = {order: in_order_s(problem, order) for order in orders(problem)}
    assert answer.split.objective_s == pytest.approx(min(times_s.values()), rel=1e-9)
    assert times_s[answer.types] == pytest.approx(answer.split.objective_s, rel=1e-9)
    assert max(times_s.values()) > 1.02 * min(times_s.values())


def test_the_sum_over_stages_may_be_worth_a_slower_slowest_stage() -> None:
    layer = (Option(name="none", forward_s=0.5, backward_s=0.5),)
    fast = StageLimits(capacity_bytes=1, exposed_s=2)
    chain = Instance(layers=(0,) * 10, kinds=(layer,), stages=(fast, fast), steady=1)

    answer = solve(on_types({"slow": (1, replace(fast, time_scale=3.0)), "fast": (1, fast)}, chain))

    # 8 and 2 layers take (8 + 2) + (8 + 2 + 6 + 2); 9 and 1 take (9 + 2) + (9 + 2 + 3 + 2).
    assert isinstance(answer, GraphSolution)
    assert sorted(answer.split.sizes()) == [1, 9]
    assert answer.split.objective_s == pytest.approx(27)


def test_one_type_alone_is_the_chain_solvers_problem() -> None:
    problem = decoder()
    large = replace(problem.types[0], stages=6)
    alone = replace(problem, types=(large,), output_s=())

    answer = solve(alone)

    assert isinstance(answer, GraphSolution)
    assert answer.stage_types == ("large",) * 6
    assert answer.split.objective_s == pytest.approx(in_order_s(alone, (0,) * 6), rel=1e-12)


def test_two_names_for_one_type_change_nothing() -> None:
    problem = decoder()
    large = replace(problem.types[0], stages=6)
    alone = replace(problem, types=(large,), output_s=())
    twins = replace(
        problem,
        types=(replace(large, stages=2), replace(large, name="twin", stages=4)),
        output_s=(),
    )

    assert objective_of(twins) == pytest.approx(objective_of(alone), rel=1e-12)


def test_more_memory_is_never_slower() -> None:
    times_s = [objective_of(decoder(memory=memory)) for memory in (0.6, 0.7, 0.85, 1, 1.3, 2)]

    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]


def test_faster_devices_and_links_are_never_slower() -> None:
    paces = [objective_of(decoder(pace=pace)) for pace in (1.5, 1.2, 1.0, 0.8, 0.5)]
    links = [objective_of(decoder(send_s=send_s)) for send_s in (1e-2, 1e-3, 2e-4, 0)]

    assert paces == sorted(paces, reverse=True)
    assert links == sorted(links, reverse=True)


def test_listing_the_types_in_another_order_changes_no_time() -> None:
    problem = decoder()
    turned = replace(
        problem,
        types=problem.types[::-1],
        output_s=tuple(row[::-1] for row in problem.output_s[::-1]),
    )

    assert objective_of(turned) == pytest.approx(objective_of(problem), rel=1e-12)


@pytest.mark.parametrize(
    ("memory", "words"),
    [(0.03, "layer '0' alone fits on no stage"), (0.2, "no order of 3 x large and 3 x small")],
)
def test_what_does_not_fit_says_what_binds(memory: float, words: str) -> None:
    answer = solve(decoder(memory=memory))

    assert isinstance(answer, Infeasible)
    assert words in answer.reason


def test_too_many_stages_for_the_layers_are_told() -> None:
    problem = decoder()

    short = (replace(one, chain=replace(one.chain, layers=(0, 0, 1))) for one in problem.types)
    answer = solve(replace(problem, types=tuple(short), edges=in_a_row(3), output_s=()))

    assert isinstance(answer, Infeasible)
    assert "6 stages need as many layers; there are 3" in answer.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"types": decoder().types[:1]}, "the chains have 6 stages; the types have 3"),
        ({"types": ()}, "at least one device type"),
        ({"output_s": (((1.0,),),)}, "2 x 2 rows of 31 layers"),
        ({"output_s": (((-1.0,) * 31,) * 2,) * 2}, "output_s must not be negative"),
        ({"relayed": False}, "outputs are relayed where stages are of several types"),
    ],
)
def test_an_inconsistent_problem_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(decoder(), **change)
