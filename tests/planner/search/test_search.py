"""search is checked against solving every configuration, and against laws of machines."""

from __future__ import annotations

import contextlib
import math
import random
import re
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.frameworks.native_limits import Rules, limit, refusal
from meshwright.planner.requests.pins import Pins, read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search import space
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.bounds import layout_groups as configurations
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.proof_budget import GOAL
from meshwright.planner.search.search import MARGIN, search
from meshwright.planner.search.space import LayoutFamily, complexity, kind
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import Solution


@dataclass(frozen=True)
class Case:
    model: str
    cluster: str
    seq_len: int
    global_batch: int
    pins: Pins = field(default_factory=Pins)
    rules: Rules = refusal

    @property
    def job(self) -> Job:
        return Job(seq_len=self.seq_len, global_batch=self.global_batch)

    def candidates(self) -> Candidates:
        model, cluster = resolve_model(self.model), resolve_cluster(self.cluster)
        return Candidates(Request(model, cluster, self.job, pins=self.pins), self.rules)

    def search(self, cluster: ClusterSpec | None = None, **settings: object) -> Answer:
        return search(
            Request(
                resolve_model(self.model),
                cluster or resolve_cluster(self.cluster),
                self.job,
                pins=self.pins,
            ),
            rules=self.rules,
            **settings,
        )


ROOMY = Case("gpt2", "4xv100-sxm-32gb", 1024, 32)
TIGHT = Case("llama-3.2-3b", "4xa100-sxm-40gb", 4096, 32)
TIGHTER = Case("llama-3.1-8b", "8xa100-sxm-40gb", 8192, 32, Pins(micro_batch=1))
EXPERTS = Case(
    "mixtral-8x7b",
    "4x8xh100-sxm-80gb",
    4096,
    64,
    Pins(tensor=2, micro_batch=1, zero=1, pipeline=4),
)
TWO_KINDS = Case("gemma-2-2b", "8xrtx-4090", 4096, 32)
ALL_AXES = Case(
    "mixtral-8x7b",
    "2x4xh200-sxm-141gb",
    4096,
    8,
    Pins(micro_batch=1, zero=3, pipeline=2),
    rules=limit,
)
DENSE_AND_EXPERTS = Case(
    "deepseek-v3",
    "16x8xh200-sxm-141gb",
    4096,
    128,
    Pins(micro_batch=1, zero=3, pipeline=4, data=8, schedule="interleaved", loss="full"),
    rules=limit,
)
ENDS_ALONE = Case("gpt2", "7xv100-sxm-32gb", 1024, 28, Pins(pipeline=7))
"""12 blocks on 14 stages: the embedding and the head have one each."""
SNUG = replace(TIGHT, pins=Pins(micro_batch=2, compile="block"))
CASES = [ROOMY, SNUG, TIGHT, TIGHTER, EXPERTS, TWO_KINDS, ALL_AXES, DENSE_AND_EXPERTS, ENDS_ALONE]
LONG = (TIGHT, TIGHTER, EXPERTS, TWO_KINDS)
QUICK_AND_LONG = [
    pytest.param(case, marks=pytest.mark.matrix) if case in LONG else case for case in CASES
]
"""For tests that solve all configurations of a case."""


@cache
def usual_answer(case: Case) -> Answer:
    """The fastest plan under the usual settings, for several tests."""
    return case.search()


@cache
def optima(case: Case) -> dict[Layout, float]:
    """Return the optimum of every configuration, inf where none fits."""
    candidates, frontiers = case.candidates(), FrontierStore()
    result = {}
    for layout in candidates.layouts():
        found = solve(candidates.instance(layout), frontiers=frontiers)
        result[layout] = math.inf
        if isinstance(found, Solution):
            result[layout] = found.objective_s + candidates.costs(layout).step_s
    return result


@pytest.mark.long(
    "gpt2 4xv100-sxm-32gb",
    "mixtral-8x7b 2x4xh200-sxm-141gb",
    "deepseek-v3 16x8xh200-sxm-141gb",
    "llama-3.2-3b 4xa100-sxm-40gb0",
)
@pytest.mark.parametrize("case", QUICK_AND_LONG, ids=lambda case: f"{case.model} {case.cluster}")
def test_no_configuration_is_faster_and_no_bound_is_above_its_optimum(case: Case) -> None:
    exhaustive = optima(case)
    candidates = case.candidates()

    answer = usual_answer(case)

    fastest = min(exhaustive, key=lambda layout: (exhaustive[layout], complexity(layout)))
    assert answer.closed_form.objective_s == pytest.approx(exhaustive[fastest], rel=1e-12)
    assert answer.closed_form.plan.layout == fastest
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.certificate.gap < GOAL
    assert sum(answer.certificate.counts.values()) == answer.certificate.configurations
    layouts = sum(family.size for family in candidates.families)
    assert answer.certificate.configurations == layouts + sum(candidates.refused.values())
    for family, family_s in zip(candidates.families, candidates.computation_s(), strict=True):
        parts_s = candidates.timetables_s(family)
        assert family_s == pytest.approx(min(parts_s), rel=1e-14)
        (levels,) = candidates.rooms_s([family])
        assert sum(len(sharings) for sharings, _ in levels) == len(family.sharings)
        for sharings, rooms_s in levels:
            for timetable, computation_s, room_s in zip(
                family.timetables, parts_s, rooms_s, strict=True
            ):
                whole = family.part(sharings=sharings, timetables=(timetable,))
                parts = list(whole.by_loss())
                assert sum(part.size for part in parts) == whole.size
                each = candidates.shared_s(parts)
                both = candidates.shared_rooms_s(parts)
                for layout, alone_s, better_s in (
                    row
                    for part, shared_s, both_s in zip(parts, each, both, strict=True)
                    for row in zip(part.layouts(), shared_s, both_s, strict=True)
                ):
                    if layout not in exhaustive:
                        continue
                    limit_s = exhaustive[layout] * (1 + 1e-12)
                    communication_s = candidates.communication_s(layout)
                    assert computation_s <= alone_s * (1 + 1e-11)
                    assert alone_s <= min(better_s, communication_s * (1 + 1e-12))
                    assert room_s <= limit_s
                    assert better_s <= limit_s
                    assert communication_s <= limit_s
                    assert candidates.memory_s(layout) <= limit_s


@pytest.mark.matrix
def test_cases_have_all_axes_and_memory_that_is_too_small_for_many() -> None:
    for case in (ALL_AXES, DENSE_AND_EXPERTS):
        exhaustive = optima(case)
        for degree in ("tensor", "context", "expert", "pipeline"):
            assert max(getattr(layout, degree) for layout in exhaustive) > 1
        assert 3 < sum(map(math.isfinite, exhaustive.values())) < len(exhaustive) / 2


@pytest.mark.long(
    "gpt2 4xv100-sxm-32gb",
    "mixtral-8x7b 2x4xh200-sxm-141gb",
    "deepseek-v3 16x8xh200-sxm-141gb",
    "llama-3.2-3b 4xa100-sxm-40gb0",
)
@pytest.mark.parametrize("case", QUICK_AND_LONG, ids=lambda case: f"{case.model} {case.cluster}")
def test_a_dominator_is_at_least_as_fast(case: Case) -> None:
    exhaustive = optima(case)
    candidates = case.candidates()

    pairs = [(layout, candidates.dominator(layout)) for layout in exhaustive]

    repeated = [layout for layout in exhaustive if candidates.repeats(layout)]
    for layout in repeated:
        simpler = replace(layout, zero=1)
        assert candidates.costs(layout).kinds == candidates.costs(simpler).kinds
        assert exhaustive[simpler] == exhaustive[layout]
    dominated = [(layout, by) for layout, by in pairs if by is not None]
    assert bool(repeated) == any(layout.zero == 2 for layout, _ in dominated)
    assert dominated
    for layout, by in dominated:
        assert exhaustive[by] <= exhaustive[layout] * (1 + 1e-12)


@pytest.mark.long("gemma-2-2b 8xrtx-4090")
@pytest.mark.parametrize(
    "case", [TIGHT, TWO_KINDS], ids=lambda case: f"{case.model} {case.cluster}"
)
@pytest.mark.matrix
def test_the_order_of_enumeration_does_not_matter(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = usual_answer(case)
    every = space.families
    for seed in range(3):
        rng = random.Random(seed)

        def shuffled(*arguments: object, rng: random.Random = rng) -> list[LayoutFamily]:
            listed = list(every(*arguments))  # type: ignore[arg-type]
            rng.shuffle(listed)
            return listed

        monkeypatch.setattr(configurations, "families", shuffled)

        answer = case.search()

        assert answer.plan == usual.plan
        assert answer.certificate == usual.certificate


@pytest.mark.matrix
def test_context_and_expert_degrees_are_searched_where_a_framework_runs_them() -> None:
    pins = Pins(tensor=1, micro_batch=1, schedule="1f1b")
    case = Case("mixtral-8x7b", "2x8xh200-sxm", 8192, 16, pins, rules=limit)
    exhaustive = optima(case)

    answer = case.search()

    fastest = min(exhaustive, key=lambda layout: (exhaustive[layout], complexity(layout)))
    assert answer.closed_form.plan.layout == fastest
    assert max(layout.context for layout in exhaustive) == 16
    assert max(layout.expert for layout in exhaustive) == 8
    assert answer.certificate.configurations == len(exhaustive)


def test_no_two_layouts_are_equally_simple() -> None:
    layouts = list(EXPERTS.candidates().layouts())

    assert len({complexity(layout) for layout in layouts}) == len(layouts)


def with_more(cluster: ClusterSpec, what: str) -> ClusterSpec:
    """Return a cluster with a tenth more of one thing."""
    group = cluster.groups[0]
    device = group.accelerator
    if what == "memory":
        changes: dict[str, object] = {"memory_bytes": int(device.memory_bytes * 1.1)}
    elif what == "memory bandwidth":
        changes = {"memory_bytes_per_s": device.memory_bytes_per_s * 1.1}
    elif what == "flops":
        changes = {"peak_flops": {name: 1.1 * rate for name, rate in device.peak_flops.items()}}
    else:
        tiers = tuple(
            tier.model_copy(update={"bytes_per_s": tier.bytes_per_s * 1.1})
            for tier in cluster.tiers
        )
        return cluster.model_copy(update={"tiers": tiers})
    faster = group.model_copy(update={"accelerator": device.model_copy(update=changes)})
    return cluster.model_copy(update={"groups": (faster,)})


@pytest.mark.spread(2)
@pytest.mark.long(
    "mixtral-8x7b 4x8xh100-sxm-80gb-memory",
    "mixtral-8x7b 4x8xh100-sxm-80gb-links",
    "mixtral-8x7b 4x8xh100-sxm-80gb-flops",
    "mixtral-8x7b 4x8xh100-sxm-80gb-memory bandwidth",
)
@pytest.mark.long(
    "gemma-2-2b 8xrtx-4090-flops",
    "gemma-2-2b 8xrtx-4090-memory",
    "gemma-2-2b 8xrtx-4090-links",
    "gemma-2-2b 8xrtx-4090-memory bandwidth",
    "mixtral-8x7b 2x4xh200-sxm-141gb-flops",
    "mixtral-8x7b 2x4xh200-sxm-141gb-memory",
    "mixtral-8x7b 2x4xh200-sxm-141gb-links",
    "mixtral-8x7b 2x4xh200-sxm-141gb-memory bandwidth",
)
@pytest.mark.parametrize("what", ["memory", "memory bandwidth", "flops", "links"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.matrix) if case is DENSE_AND_EXPERTS else case
        for case in CASES
    ],
    ids=lambda case: f"{case.model} {case.cluster}",
)
def test_a_better_machine_is_never_slower(case: Case, what: str) -> None:
    before = usual_answer(case)

    after = case.search(with_more(resolve_cluster(case.cluster), what))

    assert after.closed_form.objective_s <= before.closed_form.objective_s * (1 + 1e-9)


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", [ROOMY, EXPERTS], ids=lambda case: f"{case.model} {case.cluster}")
def test_the_integer_program_finds_the_same_objective(case: Case) -> None:
    exact = usual_answer(case)

    program = case.search(solver="ilp")

    assert program.closed_form.objective_s == pytest.approx(exact.closed_form.objective_s, rel=1e-5)


@pytest.mark.matrix
def test_the_best_plans_of_each_kind_are_those_of_all_configurations() -> None:
    exhaustive = optima(SNUG)
    fastest_of_kind: dict[tuple[int, ...], float] = {}
    for layout, seconds in exhaustive.items():
        key = kind(layout)
        fastest_of_kind[key] = min(seconds, fastest_of_kind.get(key, math.inf))
    expected = sorted(s for s in fastest_of_kind.values() if s < math.inf)

    top = SNUG.search(top=4).top

    assert len({kind(ranked.plan.layout) for ranked in top}) == 4
    assert [ranked.objective_s for ranked in top[1:]] == pytest.approx(expected[1:4], rel=1e-12)
    assert expected[0] <= top[0].objective_s <= expected[0] * (1 + MARGIN)


@pytest.mark.matrix
def test_fewer_kinds_than_asked_for_are_all_returned() -> None:
    answer = Case("gpt2", "4xv100-sxm-32gb", 1024, 32, Pins(tensor=1)).search(top=50)

    kinds = {kind(ranked.plan.layout) for ranked in answer.top}
    assert len(kinds) == len(answer.top) < 50
    assert sum(answer.certificate.counts.values()) == answer.certificate.configurations


def test_hosts_that_are_too_small_for_what_would_fit_devices_are_named() -> None:
    cluster = resolve_cluster("1xt4")
    groups = tuple(g.model_copy(update={"host_memory_bytes": 8 << 30}) for g in cluster.groups)
    small = cluster.model_copy(update={"groups": groups})

    with pytest.raises(NoPlanFits) as caught:
        search(
            Request(
                resolve_model("gpt2-xl"),
                small,
                Job(seq_len=1024, global_batch=4, precision="fp16"),
                pins=read_pins([], ["offload"]),
            )
        )

    assert "in each node's host memory, of which 4.0 GiB of 8.0 GiB" in str(caught.value)


@pytest.mark.matrix
def test_a_model_that_cannot_fit_names_the_closest_miss_and_ways_out_that_hold() -> None:
    impossible = Case("llama-3.1-8b", "4xa100-sxm-40gb", 65536, 8)
    with pytest.raises(NoPlanFits) as raised:
        impossible.search()

    message = str(raised.value)
    assert "The closest, tp=4" in message
    assert "; stage " in message and "optimizer" in message
    devices = int(re.findall(r"on (\d+) such devices", message)[0])
    gibibytes = float(re.findall(r"at least ([\d.]+) GiB on each", message)[0])
    sequence = int(re.findall(r"at sequence (\d+)$", message.rstrip("."))[0])
    assert devices > 4 and gibibytes > 40 and sequence < 65536
    assert replace(impossible, cluster=f"{devices}xa100-sxm-40gb").search()
    assert replace(impossible, seq_len=sequence).search()
    cluster = resolve_cluster(impossible.cluster)
    assert impossible.search(with_memory(cluster, (gibibytes + 0.1) * 2**30))
    with pytest.raises(NoPlanFits):
        replace(impossible, seq_len=2 * sequence).search()
    with pytest.raises(NoPlanFits):
        replace(impossible, cluster=f"{devices // 2}xa100-sxm-40gb").search()


def test_an_allowance_that_helps_is_told_and_holds() -> None:
    small = Case("llama-3.2-3b", "1xa100-sxm-40gb", 2048, 1)
    with pytest.raises(NoPlanFits) as raised:
        small.search()

    words = re.findall(r"with --allow (\w+)", str(raised.value))

    assert "offload" in words
    for word in words:
        pins = replace(small.pins, allowed=frozenset({word}))
        assert replace(small, pins=pins).search().prediction.fits


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        (Pins(tensor=3), "tp=3 stands in the way: it can be 1, 2, 4"),
        (Pins(expert=2), "ep=2 stands in the way: it can be 1"),
        (Pins(micro_batch=3), "micro_batch=3 stands in the way: it can be 1, 2, 4, 8"),
        (Pins(tensor=2, context=2, zero=1), "zero=1 stands in the way: it can be 0"),
        (Pins(data=4, data_shard=3), "shard=3 stands in the way: it can be 1, 4, 2"),
        (Pins(pipeline=4, zero=3), "zero=3 stands in the way: it can be 0"),
    ],
)
def test_a_pin_that_divides_nothing_is_told_with_what_does(pins: Pins, told: str) -> None:
    with pytest.raises(NoPlanFits, match=told):
        Case("llama-3.2-3b", "4xa100-sxm-40gb", 4096, 32, pins).search()


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 12), marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_a_pin_that_is_blamed_is_to_blame(seed: int | range) -> None:
    blamed = 0
    for number in seed if isinstance(seed, range) else [seed]:
        draw = random.Random(number)
        for _ in range(8):
            degrees = {name: draw.choice((1, 2, 4)) for name in ("tp", "cp", "pp")}
            fixed = {**degrees, "zero": draw.randrange(4), "micro_batch": draw.choice((1, 3))}
            pins = read_pins([f"{name}={value}" for name, value in fixed.items()])
            case = Case("llama-3.2-1b", "4xa100-sxm-80gb", 512, 32, pins)
            with contextlib.suppress(NoPlanFits):
                case.search()
                continue
            with pytest.raises(NoPlanFits) as raised:
                case.search()
            told = re.findall(r"(\w+)=\w+ stands in the way: it can be (\d+)", str(raised.value))
            for name, value in told:
                changed = read_pins([f"{n}={v}" for n, v in {**fixed, name: value}.items()])
                try:
                    replace(case, pins=changed).search()
                except NoPlanFits as error:
                    assert f"{name}={value} stands in the way" not in str(error)
                blamed += 1
    assert blamed > 0


def test_a_pin_that_leaves_no_room_is_told() -> None:
    pins = Pins(schedule="gpipe", pipeline=2, loss="full")
    pinned = Case("llama-3.2-3b", "4xa100-sxm-40gb", 4096, 32, pins)
    with pytest.raises(NoPlanFits) as raised:
        pinned.search()

    schedule = read_pins(re.findall(r"with (schedule=[\w-]+)", str(raised.value))).schedule
    assert schedule not in (None, "gpipe")
    assert replace(pinned, pins=replace(pins, schedule=schedule)).search()


@pytest.mark.matrix
def test_a_pinned_recomputation_that_leaves_no_room_is_told() -> None:
    pins = Pins(recompute="none", micro_batch=4, tensor=1)
    pinned = Case("llama-3.1-8b", "8xa100-sxm-40gb", 8192, 32, pins)
    with pytest.raises(NoPlanFits, match="with recompute=full"):
        pinned.search()

    assert replace(pinned, pins=replace(pins, recompute="full")).search()


def test_pins_that_the_framework_refuses_everywhere_say_so() -> None:
    folded = Case("gpt2", "4xv100-sxm-32gb", 1024, 32, Pins(schedule="zbv", pipeline=4))

    with pytest.raises(NoPlanFits, match="tied embedding") as raised:
        folded.search()

    # Other schedules use all devices and divide this batch: that is not what is in the way.
    assert str(raised.value).endswith(
        "No other layout keeps all that is fixed (pp, schedule); fix less"
    )


def with_memory(cluster: ClusterSpec, memory_bytes: float) -> ClusterSpec:
    group = cluster.groups[0]
    device = group.accelerator.model_copy(update={"memory_bytes": int(memory_bytes)})
    return cluster.model_copy(
        update={"groups": (group.model_copy(update={"accelerator": device}),)}
    )
