"""The search on clusters of several kinds of devices, against every layout, order and cut."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from benchmarks.attack import objective_s
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.group_costs import GroupCosts
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.memory.rank_memory import has_room, rank_memory_parts
from meshwright.planner.costs.predict import layout_prediction, placements_of, predict
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Activations, Job, Layout, Plan, ScheduleName
from meshwright.planner.documents.profile import Birth, LayerMeasurement, Profile, Profiles
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.goals import SplitSolution
from meshwright.planner.search.search import search
from meshwright.planner.search.spaces.mixed import MixedSpace
from meshwright.planner.search.spaces.shares import ShareSpace
from meshwright.planner.solver.requirements import read_requirements
from tests.planner.search.spaces.every_layout import bounded, layouts_of
from tests.planner.solver.small_graphs import least_objective_s


def llama(layers: int) -> ModelGraph:
    """Return the first blocks of Llama-3.1-8B between its embedding and its head."""
    whole = resolve_model("llama-3.1-8b").architecture
    assert whole is not None
    return graph_of(whole.model_copy(update={"layers": layers}), name=f"llama-of-{layers}")


@dataclass(frozen=True)
class Case:
    cluster: str
    layers: int
    pins: Pins = field(default_factory=Pins)
    global_batch: int = 12

    @property
    def model(self) -> ModelGraph:
        return llama(self.layers)

    @property
    def job(self) -> Job:
        return Job(seq_len=2048, global_batch=self.global_batch, precision="fp32")

    def search(self, *, profile: Profiles = None, **settings: Any) -> Answer:
        cluster = resolve_cluster(self.cluster)
        return search(Request(self.model, cluster, self.job, self.pins, profile), **settings)


CASES = [
    Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 4, Pins(loss="full")),
    Case("2xa100-sxm-40gb+2xv100-sxm-16gb", 3, Pins(data=1, tensor=1, loss="full")),
    Case(
        "2xh100-sxm-80gb+2xa100-sxm-40gb+2xv100-sxm-32gb",
        4,
        Pins(zero=1, micro_batch=1, loss="full"),
    ),
    Case("2xa100-sxm-40gb+4xv100-sxm-32gb", 4, Pins(data=2, zero=1, compile="block")),
    Case("4xa100-sxm-40gb+4xv100-sxm-16gb", 4, Pins(tensor=4, schedule="gpipe")),
]


def least_shared_s(case: Case, cluster: ClusterSpec, layout: Layout) -> float:
    """Seconds of the best shares of every choice of all layers; inf if none fits."""
    micro_batches = case.global_batch // layout.micro_batch
    ways: tuple[Activations, ...] = (
        ("keep", "offload", "compress") if case.pins.allowed else ("keep",)
    )
    costs = {
        group.name: CostTables(
            Request(case.model, cluster.part((group,)), case.job), ways
        ).costs_of(layout)
        for group in cluster.groups
    }
    kinds = [layer.kind for _, layer in case.model.chain]
    some = costs[cluster.groups[0].name].kinds
    options = {
        kind: [at for at, c in enumerate(some[kind]) if case.pins.recompute in (None, c.recompute)]
        for kind in kinds
    }
    best = math.inf
    for choice in itertools.product(*(options[kind] for kind in kinds)):
        seconds, once_s = [], 0.0
        for group in cluster.groups:
            table = costs[group.name]
            held = [table.kinds[kind][option] for kind, option in zip(kinds, choice, strict=True)]
            parts = rank_memory_parts(table, layout, {0: [c.layer_bytes for c in held]}, rank=0)
            on_host = sum(
                cost.host_bytes * layout.micro_batches + cost.layer_bytes.host for cost in held
            )
            host = (group.host_memory_bytes or math.inf) / group.devices_per_node
            if not has_room(group.accelerator.memory_bytes, parts, table) or (
                on_host > table.host_share * host
            ):
                break
            ranks = group.devices // layout.tensor
            seconds += [sum(cost.forward_s + cost.backward_s for cost in held)] * ranks
            once_s = max(once_s, sum(cost.sync_s for cost in held))
        else:
            ends = {m * one for one in set(seconds) for m in range(1, micro_batches + 1)}
            for end_s in sorted(ends):
                done = [math.floor(end_s / one * (1 + 1e-12)) for one in seconds]
                least = 2 if layout.zero and micro_batches > len(seconds) else 1
                if min(done) >= least and sum(done) >= micro_batches:
                    best = min(best, end_s + once_s)
                    break
    return best + max(table.step_s for table in costs.values())


@pytest.mark.long(
    "2xa100-sxm-40gb+4xv100-sxm-32gb",
    "1xa100-sxm-40gb+2xv100-sxm-32gb",
    "2xh100-sxm-80gb+2xa100-sxm-40gb+2xv100-sxm-32gb",
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.matrix] if case.pins.data == 1 else [])
        for case in CASES
    ],
    ids=lambda case: case.cluster,
)
@pytest.mark.matrix
def test_no_layout_order_cuts_and_options_beat_the_plan(case: Case) -> None:
    cluster = resolve_cluster(case.cluster)
    best_s = math.inf
    for count in range(1, len(cluster.groups) + 1):
        for groups in itertools.combinations(cluster.groups, count):
            part = cluster.part(groups)
            space = MixedSpace(GroupCandidates(Request(case.model, part, case.job, case.pins)))
            for layout, bound_s in bounded(space):
                least_s = least_objective_s(space.instance(layout))
                bounds_s = [
                    bound_s,
                    space.candidates.communication_s(layout),
                    space.memory_s(layout),
                ]
                assert max(bounds_s) <= least_s * (1 + 1e-9)
                best_s = min(best_s, least_s)
            if part.is_mixed:
                shares = ShareSpace(GroupCandidates(Request(case.model, part, case.job, case.pins)))
                for layout in layouts_of(shares):
                    least_s = least_shared_s(case, part, layout)
                    assert shares.bound_s(layout) <= least_s * (1 + 1e-9)
                    best_s = min(best_s, least_s)

    answer = case.search()

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    assert answer.prediction.fits


HOST = frozenset({"offload", "compress"})


@pytest.mark.spread(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "interleaved-zb", "zbv"])
def test_schedules_that_several_stages_share_fit_and_come_near_the_simulation(
    schedule: ScheduleName,
) -> None:
    pins = Pins(pipeline=3, schedule=schedule, micro_batch=1, recompute="full", tensor=1)
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 9, pins)

    answer = case.search()

    plan = answer.plan
    assert plan.schedule == schedule
    groups = [stage.group for stage in plan.stages]
    assert groups.count("v100-sxm-32gb") == 2 * groups.count("a100-sxm-40gb")
    assert answer.prediction.fits
    assert answer.closed_form.objective_s == pytest.approx(answer.prediction.step_time_s, rel=0.12)
    assert predict(plan, case.model, resolve_cluster(case.cluster)) == answer.prediction


@pytest.mark.matrix
def test_activations_go_to_the_host_or_into_8_bits_where_that_is_allowed() -> None:
    case = Case("2xa100-sxm-40gb+2xv100-sxm-16gb", 6, Pins(data=1, tensor=1, micro_batch=2))
    more = replace(case, pins=replace(case.pins, allowed=HOST))

    kept, treated = case.search(), more.search()

    assert treated.closed_form.objective_s < kept.closed_form.objective_s
    chosen = {item.activations for stage in treated.plan.stages for item in stage.layers}
    assert chosen - {"keep"}
    assert treated.prediction.fits
    assert predict(treated.plan, case.model, resolve_cluster(case.cluster)) == treated.prediction


@pytest.mark.matrix
def test_states_go_to_hosts_and_gradients_travel_narrow_where_devices_differ() -> None:
    pins = Pins(pipeline=2, data=2, tensor=1, micro_batch=1, zero=1, schedule="1f1b")
    case = Case("2xa100-sxm-40gb+2xv100-sxm-16gb", 6, replace(pins, loss="full"))
    choices = list(itertools.product(("none", "optimizer", "parameters"), ("full", "bf16")))

    answer = replace(case, pins=replace(case.pins, allowed=HOST)).search()
    each = {
        (offload, wire): replace(
            case, pins=replace(case.pins, allowed=HOST, offload=offload, gradient_compression=wire)
        ).search()
        for offload, wire in choices
    }

    plain = case.search().closed_form.objective_s
    least_s = min(one.closed_form.objective_s for one in each.values())
    assert answer.closed_form.objective_s == pytest.approx(least_s, rel=1e-9)
    assert least_s < plain
    for (offload, wire), one in each.items():
        assert (one.plan.offload, one.plan.gradient_compression) == (offload, wire)
        again = predict(one.plan, case.model, resolve_cluster(case.cluster))
        assert again == one.prediction
        assert again.fits
        on_host = any(stage.host_bytes for stage in again.stages)
        assert any("host link" in assumed.what for assumed in again.assumptions) == on_host


@pytest.mark.parametrize("host_bytes", [None, 24 << 30])
@pytest.mark.long("None")
def test_replicas_that_differ_put_states_on_hosts_and_send_narrow_gradients(
    host_bytes: int | None,
) -> None:
    pins = Pins(pipeline=1, tensor=1, recompute="none", loss="full", micro_batch=2, allowed=HOST)
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 2, pins)
    cluster = resolve_cluster(case.cluster)
    groups = []
    for group in cluster.groups:
        room = {"memory_bytes": group.accelerator.memory_bytes + 10**9}
        roomy = {"accelerator": group.accelerator.model_copy(update=room)}
        groups.append(group.model_copy(update={"host_memory_bytes": host_bytes, **roomy}))
    cluster = cluster.model_copy(update={"groups": tuple(groups)})
    space = ShareSpace(GroupCandidates(Request(case.model, cluster, case.job, pins)))

    found = {layout: space.solve(layout, math.inf) for layout in layouts_of(space)}

    for layout, one in found.items():
        least_s = least_shared_s(case, cluster, layout)
        assert space.bound_s(layout) <= least_s * (1 + 1e-9)
        assert (one.objective_s if isinstance(one, SplitSolution) else math.inf) == pytest.approx(
            least_s
        )
    fitting = {one.layout for one in found.values() if isinstance(one, SplitSolution)}
    wires, offloads = (
        {getattr(o, n) for o in fitting} for n in ("gradient_compression", "offload")
    )
    assert wires >= {"full", "bf16", "fp16"}
    assert ("powersgd" in wires) == ("parameters" in offloads) == (host_bytes is None)
    assert "optimizer" in offloads
    # Where parameters are divided and on hosts, ranks would gather them in every micro-batch.
    assert all(layout.zero == 0 for layout in fitting if layout.offload == "parameters")


@pytest.mark.matrix
def test_a_plan_of_shares_says_what_lies_on_hosts_and_is_predicted_again() -> None:
    pins = Pins(pipeline=1, data=3, zero=0, recompute="none", loss="full", allowed=HOST)
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 4, pins)
    cluster = resolve_cluster(case.cluster)

    with pytest.raises(NoPlanFits):
        replace(case, pins=replace(pins, allowed=frozenset())).search()
    answer = case.search()

    assert answer.plan.shares is not None
    assert len({share.micro_batches for share in answer.plan.shares}) > 1
    assert answer.plan.offload == "optimizer"
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.prediction.fits
    assert all(stage.host_bytes for stage in answer.prediction.stages)
    assert predict(answer.plan, case.model, cluster) == answer.prediction


@pytest.mark.matrix
def test_each_group_is_priced_by_its_own_profile() -> None:
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 4, Pins(pipeline=3, micro_batch=1, tensor=1))
    cluster = resolve_cluster(case.cluster)
    slow = measured(case, "v100-sxm-32gb", factor=3.0)

    plain = case.search()
    by_profile = case.search(profile={"v100-sxm-32gb": slow})

    fast = "a100-sxm-40gb"
    assert count_on(by_profile.plan, fast) > count_on(plain.plan, fast)
    again = predict(by_profile.plan, case.model, cluster, {"v100-sxm-32gb": slow})
    assert again == by_profile.prediction
    with pytest.raises(DocumentError, match="name the kind, as in --profile a100-sxm-40gb="):
        case.search(profile=slow)
    with pytest.raises(DocumentError, match="'v100' is no group"):
        case.search(profile={"v100": slow})


def count_on(plan: Plan, group: str) -> int:
    return sum(len(stage.layers) for stage in plan.stages if stage.group == group)


def measured(case: Case, group: str, *, factor: float) -> Profile:
    """Return a profile by which every block takes `factor` times what arithmetic says."""
    cluster = resolve_cluster(case.cluster)
    part = cluster.part([one for one in cluster.groups if one.name == group])
    layout = Layout(micro_batches=case.global_batch)
    figures = CostTables(Request(case.model, part, case.job)).costs_of(layout).parts["block"]
    return Profile(
        model=case.model.name,
        model_digest=case.model.digest,
        birth=Birth(
            command="by hand",
            date="2026-11-21",
            host="none",
            device=group,
            ranks=1,
            threads_per_rank=1,
            software={},
        ),
        layers=tuple(
            LayerMeasurement(
                kind="block",
                tensor=1,
                sequence_parallel=False,
                micro_batch=1,
                seq_len=case.job.seq_len,
                precision=case.job.precision,
                recompute=part_of.recompute,
                forward_s=factor * part_of.figures.whole_forward_s,
                backward_s=factor * part_of.figures.whole_backward_s,
                stored_bytes=int(part_of.figures.stored_bytes),
                forward_transient_bytes=int(part_of.figures.forward_transient_bytes),
                backward_transient_bytes=int(part_of.figures.backward_transient_bytes),
                spread=0.0,
                samples=1,
            )
            for part_of in figures
        ),
    )


@pytest.mark.spread(1)
@pytest.mark.long(
    "1xa100-sxm-40gb+2xv100-sxm-32gb",
    "2xa100-sxm-40gb+2xv100-sxm-16gb",
    "2xa100-sxm-40gb+4xv100-sxm-32gb",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cluster)
def test_a_stage_costs_what_its_own_group_takes(case: Case) -> None:
    cluster = resolve_cluster(case.cluster)
    answer = next(one for one in case.search(top=9).top if not one.plan.shares)
    plan = answer.plan

    stage_s, sync_s = [], []
    for stage in plan.stages:
        group = next(g for g in cluster.groups if g.name == stage.group)
        costs = CostTables(Request(case.model, cluster.part((group,)), case.job)).costs_of(
            plan.layout
        )
        kinds = {name: layer.kind for name, layer in case.model.chain}
        held = [costs.kinds[kinds[p.layer]][RECOMPUTES.index(p.recompute)] for p in stage.layers]
        stage_s.append(sum(cost.forward_s + cost.backward_s for cost in held))
        sync_s.append(sum(cost.sync_s for cost in held))
    crossing = GroupCosts(Request(case.model, cluster, case.job))
    for s, (before, after) in enumerate(itertools.pairwise(plan.stages)):
        moved_s = crossing.crossing_s(plan.layout, before.group or "", after.group or "")
        moved_s += crossing.costs(plan.layout)[before.group or ""].action_s
        stage_s[s] += moved_s
        stage_s[s + 1] += moved_s

    if plan.schedule == "1f1b":
        form_s = (plan.micro_batches - 1) * max(stage_s) + sum(stage_s) + max(sync_s)
        assert answer.objective_s == pytest.approx(form_s)
    capacities = {group.name: group.accelerator.memory_bytes for group in cluster.groups}
    assert [stage.memory_capacity_bytes for stage in answer.prediction.stages] == [
        capacities[stage.group or ""] for stage in plan.stages
    ]
    assert predict(plan, case.model, cluster) == answer.prediction


@pytest.mark.matrix
def test_two_groups_of_one_device_change_nothing() -> None:
    pins = Pins(data=1, tensor=1, schedule="1f1b", loss="full")
    plain = resolve_cluster("4xa100-sxm-40gb")
    twin = plain.groups[0].accelerator.model_copy(update={"tdp_w": 1.0})
    half = plain.groups[0].model_copy(update={"devices_per_node": 2})
    other = half.model_copy(update={"name": "others", "accelerator": twin})
    halves = plain.model_copy(update={"groups": (half, other)})
    case = Case("4xa100-sxm-40gb", 6, pins)

    alike = case.search()
    mixed = search(Request(case.model, halves, case.job, pins=pins))

    assert mixed.closed_form.objective_s == pytest.approx(alike.closed_form.objective_s)
    assert alike.plan.groups is None
    assert {stage.group for stage in mixed.plan.stages} == {"a100-sxm-40gb", "others"}


@pytest.mark.matrix
def test_devices_that_only_hold_the_others_back_are_left_out() -> None:
    answer = Case("4xh100-sxm-80gb+1xv100-sxm-16gb", 4).search()

    assert {stage.group for stage in answer.plan.stages} == {"h100-sxm-80gb"}
    assert answer.plan.mesh.devices == 4


@pytest.mark.matrix
def test_of_plans_close_to_the_best_the_fastest_simulated_is_the_answer() -> None:
    found = Case("2xa100-sxm-40gb+4xv100-sxm-32gb", 4, Pins(data=2, zero=1)).search()

    assert found.closed_form in found.finalists
    steps_s = [one.prediction.step_time_s for one in found.finalists]
    assert found.prediction.step_time_s <= min(steps_s) * (1 + 1e-9)
    # DualPipe-V ties with ZBV in the closed form; simulated it is some percent faster.
    assert found.prediction.step_time_s < 0.98 * found.closed_form.prediction.step_time_s


def test_ranks_find_the_devices_of_their_stage() -> None:
    pins = Pins(data=2, zero=1, schedule="1f1b", recompute="none", micro_batch=1, loss="full")
    plan = Case("2xa100-sxm-40gb+4xv100-sxm-32gb", 2, pins).search().plan
    order = [stage.group for stage in plan.stages]
    assert sorted(map(str, order)) == ["a100-sxm-40gb", "v100-sxm-32gb", "v100-sxm-32gb"]

    devices = [plan.device_of_rank(rank) for rank in range(6)]

    assert sorted(devices) == list(range(6))
    for rank, device in enumerate(devices):
        assert order[rank // 2] == ("a100-sxm-40gb" if device < 2 else "v100-sxm-32gb")
    assert devices[0] + 1 == devices[1]


@pytest.mark.matrix
def test_what_does_not_fit_is_told() -> None:
    case = Case("1xa100-sxm-40gb+1xv100-sxm-16gb", 32)

    with pytest.raises(
        NoPlanFits, match=r"fits 1 x a100-sxm-40gb .* and 1 x v100-sxm-16gb .* at seq"
    ):
        case.search()


@pytest.mark.matrix
def test_the_integer_program_finds_the_same_optimum() -> None:
    pins = Pins(pipeline=3, schedule="1f1b", micro_batch=1)
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 4, pins)

    exact, program = case.search(), case.search(solver="ilp")

    assert program.certificate.solver == "ilp"
    assert program.closed_form.objective_s == pytest.approx(exact.closed_form.objective_s, rel=1e-6)


@pytest.mark.matrix
def test_a_request_that_does_not_fit_is_explained() -> None:
    pins = Pins(recompute="none", micro_batch=4, loss="full")
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 8, pins)

    with pytest.raises(NoPlanFits) as failure:
        case.search()

    text = str(failure.value)
    found = re.search(r"needs ([\d.]+) times their memory: stage (\d) on (\S+) needs", text)
    assert found
    assert "of it activations" in text
    ways = re.findall(r"with (\S+=\S+?|--allow \w+)[,.]", text)
    assert {"micro_batch=1", "recompute=full", "--allow offload"} <= set(ways)
    for way in ways:
        word = way.removeprefix("--allow ")
        name, _, value = way.partition("=")
        changed = {name: int(value) if value.isdecimal() else value} if value else {}
        allowed = frozenset() if value else frozenset({word})
        assert replace(case, pins=replace(pins, allowed=allowed, **changed)).search().plan
    # With so much more memory the same layout fits, with a little less it does not.
    cluster = resolve_cluster(case.cluster)
    for share, fits in ((1.0, True), (0.97, False)):
        groups = []
        for group in cluster.groups:
            size = int(share * float(found[1]) * group.accelerator.memory_bytes * 1.005)
            roomy = group.accelerator.model_copy(update={"memory_bytes": size})
            groups.append(group.model_copy(update={"accelerator": roomy}))
        machine = cluster.model_copy(update={"groups": tuple(groups)})
        if fits:
            assert search(Request(case.model, machine, case.job, pins=pins)).prediction.fits
        else:
            with pytest.raises(NoPlanFits):
                search(Request(case.model, machine, case.job, pins=pins))


def test_a_group_that_a_stage_would_straddle_is_refused() -> None:
    cluster: ClusterSpec = resolve_cluster("2xa100-sxm-40gb+3xv100-sxm-32gb")
    space = MixedSpace(GroupCandidates(Request(llama(4), cluster, Case("", 4).job)))

    layouts: list[Layout] = layouts_of(space)

    assert {layout.pipeline for layout in layouts} <= {5}


@pytest.mark.matrix
def test_faster_devices_take_more_micro_batches_and_end_with_the_others() -> None:
    case = Case("2xa100-sxm-40gb+4xv100-sxm-32gb", 2, Pins(pipeline=1, tensor=1), 96)

    answer = case.search()

    plan = answer.plan
    assert plan.shares is not None
    taken = {share.group: share.micro_batches for share in plan.shares}
    assert taken["a100-sxm-40gb"] > taken["v100-sxm-32gb"]
    assert plan.micro_batch * sum(share.micro_batches for share in plan.shares) == 96
    assert answer.closed_form.objective_s == pytest.approx(answer.prediction.step_time_s, rel=0.02)
    assert answer.prediction.fits
    assert predict(plan, case.model, resolve_cluster(case.cluster)) == answer.prediction
    # With alike shares all would wait for the slow devices.
    alike = Pins(pipeline=1, tensor=1, micro_batch=plan.micro_batch)
    slow = search(Request(case.model, resolve_cluster("6xv100-sxm-32gb"), case.job, pins=alike))
    assert answer.prediction.step_time_s < slow.prediction.step_time_s


def test_a_plan_for_other_groups_is_refused() -> None:
    case = Case("2xa100-sxm-40gb+4xv100-sxm-32gb", 2, Pins(pipeline=1, tensor=1), 96)
    plan = case.search().plan

    with pytest.raises(DocumentError, match=r"groups\[1\]: is v100-sxm-32gb with 4 devices; .* 2"):
        predict(plan, case.model, resolve_cluster("2xa100-sxm-40gb+2xv100-sxm-32gb"))


def test_a_layout_alone_does_not_say_what_runs_where() -> None:
    case = CASES[0]
    layout = Layout(pipeline=3, micro_batches=12)

    with pytest.raises(DocumentError, match="plan with --fix, then predict the plan"):
        layout_prediction(Request(case.model, resolve_cluster(case.cluster), case.job), layout)


def test_what_is_required_of_stages_is_kept_where_devices_differ() -> None:
    pins = Pins(pipeline=3, schedule="1f1b", micro_batch=1, recompute="none", loss="full")
    case = Case("1xa100-sxm-40gb+2xv100-sxm-32gb", 4, pins)
    free = case.search()
    names = [name for name, _ in case.model.chain]
    sizes = [len(stage.layers) for stage in free.plan.stages]
    most = max(sizes) - 1
    asked = replace(
        pins, require=read_requirements([f"at most {most} layers on each stage"], names)
    )

    answer = replace(case, pins=asked).search()

    kept = [len(stage.layers) for stage in answer.plan.stages]
    assert max(kept) <= most < max(sizes)
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert 0 < answer.certificate.lower_bound_s <= answer.prediction.step_time_s
    assert answer.closed_form.objective_s >= free.closed_form.objective_s * (1 - 1e-9)


JOB_OF_MANY = Job(seq_len=2048, global_batch=24, precision="fp16")
UNLIKE = ("h100-sxm-80gb", "a100-sxm-80gb", "l40s", "v100-sxm-32gb")


@pytest.mark.spread(4)
@pytest.mark.parametrize("seed", range(8))
def test_a_split_takes_in_the_closed_form_what_its_plan_takes(seed: int) -> None:
    """Whatever the links between its ranks, the way back of a loop included."""
    rng = random.Random(seed)
    names = rng.sample(UNLIKE, rng.choice((2, 3)))
    cluster = resolve_cluster("+".join(f"2x{name}" for name in names))
    ranks = cluster.devices
    space = MixedSpace(GroupCandidates(Request(llama(2 * ranks), cluster, JOB_OF_MANY)))
    schedules: tuple[ScheduleName, ...] = ("interleaved", "interleaved-zb", "zbv", "1f1b", "gpipe")
    for schedule in schedules:
        layout = Layout(
            pipeline=ranks,
            schedule=schedule,
            virtual_stages=1 if schedule in ("1f1b", "gpipe") else 2,
            micro_batches=24,
        )
        assert space.refusal(layout) is None

        solution = space.solve(layout, math.inf)

        assert isinstance(solution, SplitSolution)
        plan = space.candidate_of(solution).plan
        seats = space.costs.seats(layout, [stage.group or "" for stage in plan.stages], None)
        each = objective_s(layout, seats, placements_of(plan, space.model), ranks / layout.stages)
        assert solution.objective_s == pytest.approx(each, rel=1e-12), (schedule, names)
        assert solution.lower_bound_s <= each * (1 + 1e-12)
