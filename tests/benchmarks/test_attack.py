"""Plans that the search did not make never beat its proof, nor its answer by more than a little."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.attack import Attack, check_phrases
from benchmarks.attack_plans import Draft
from benchmarks.attack_requests import REQUESTS, Target
from benchmarks.attack_unlike import Pipelines, UnlikeDraft
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Layout, Plan, ScheduleName
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.partition.layout_partition import instance_of
from meshwright.planner.search.proof_account import LEFT_OUT, UNSEARCHED
from meshwright.planner.search.proof_budget import FULL
from meshwright.planner.search.search import search
from meshwright.planner.solver.partition_problem import evaluate_split

PLANS = 200
LONG = (
    "unequal",
    "unequal-l40s",
    "8b-3090",
    "neox-a100",
    "gemma2-4090",
    "unlike-7b",
    "unlike-3b",
    "unlike-three",
    "unequal-ethernet",
)
"""Requests whose answer takes 3 to 20 CPU seconds."""


@cache
def attack_on(name: str) -> Attack:
    """One request's answer, for several tests."""
    return Attack(REQUESTS[name])


@pytest.mark.spread(1)
@pytest.mark.long(
    "unequal-v100",
    "mixtral-16",
    "gemma2-a100",
    "13b-v100",
    "gpt2-xl-4090",
    "pcie-l40s",
    "deep-3b",
    "offload-13b",
    "qwen3-moe-16",
    "70b-64",
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix) if name in LONG else name for name in REQUESTS],
)
def test_no_plan_of_an_attack_beats_an_answer(name: str) -> None:
    attack = attack_on(name)
    outcome = attack.run(PLANS)

    assert outcome.plans >= PLANS
    assert outcome.inside > PLANS // 20
    assert outcome.agrees
    assert outcome.closed_form_hits == []
    assert outcome.bound_hits == []
    assert outcome.simulation_hits == []


@pytest.mark.matrix
def test_an_attack_draws_devices_that_are_idle_and_micro_batches_of_any_size() -> None:
    attack = attack_on("deep-3b")

    drawn = [draft.layout for _ in range(200) if (draft := attack.drafts.some()) is not None]

    assert any(layout.devices < attack.cluster.devices for layout in drawn)
    assert any(layout.micro_batch > 64 for layout in drawn)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"pipeline": 3}, "idle devices"),
        ({"micro_batch": 96}, None),
        ({"loss": ChunkedLoss(rows=4096)}, None),
        ({"loss": ChunkedLoss(rows=64)}, "loss chunks of other lengths"),
        ({"prefetch": 2}, "ZeRO-3 that gathers more than one unit ahead, or in groups other"),
        ({"scales": "rowwise"}, "fp8 with a scale for each row"),
    ],
)
def test_a_proof_says_what_an_attack_finds_outside_of_its_space(
    changes: dict[str, Any], reason: str | None
) -> None:
    attack = attack_on("8b-8")
    draft = attack.starts[0]

    found = attack.outside(replace(draft, layout=replace(draft.layout, **changes)))

    assert found is None if reason is None else (found or "").startswith(reason)
    assert found is None or found in LEFT_OUT


def test_a_phrase_of_the_certificate_without_a_test_of_it_is_refused() -> None:
    check_phrases(UNSEARCHED)
    with pytest.raises(LookupError, match="'blue devices' is in only one of"):
        check_phrases((*UNSEARCHED, "blue devices"))
    with pytest.raises(LookupError, match=f"'{UNSEARCHED[3]}' is in only one of"):
        check_phrases((*UNSEARCHED[:3], *UNSEARCHED[4:]))


def unlike_draft(*entries: tuple[int, str, int], **changes: Any) -> UnlikeDraft:
    """Return pipelines of llama-3.2-1b by number, groups and micro-batches of all of them."""
    pipelines = []
    for number, groups, micro_batches in entries:
        depth = len(groups.split())
        sizes = (18 - 6 * (depth - 1), *[6] * (depth - 1))
        pipelines.append(
            Pipelines(
                number=number,
                groups=tuple(groups.split()),
                micro_batches=micro_batches,
                sizes=sizes,
            )
        )
    return UnlikeDraft(
        layout=Layout(micro_batch=2, compile="block", **changes),
        entries=tuple(pipelines),
        choices=(("none", "keep"),) * (18 * len(pipelines)),
    )


L40S, OTHERS = (3, "l40s", 17), (5, "rtx-3090", 15)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (unlike_draft(L40S, OTHERS), None),
        (unlike_draft((1, "l40s l40s l40s", 17), OTHERS), None),
        (unlike_draft((2, "rtx-3090 rtx-3090", 15), (3, "l40s", 17)), "idle devices"),
        (
            unlike_draft((2, "rtx-3090 rtx-3090", 12), (3, "l40s", 17), (1, "rtx-3090", 3)),
            "pipelines that differ within a group",
        ),
        (
            unlike_draft((1, "l40s rtx-3090", 8), (2, "l40s", 12), (4, "rtx-3090", 12)),
            "pipelines that differ within a group",
        ),
        (
            unlike_draft((1, "l40s l40s l40s", 17), OTHERS, schedule="1f1b ahead=1-0"),
            "other numbers of forwards ahead",
        ),
        (unlike_draft(L40S, OTHERS, loss=ChunkedLoss(rows=64)), "loss chunks of other lengths"),
    ],
)
def test_pipelines_that_differ_lie_in_the_space_or_are_outside(
    draft: UnlikeDraft, reason: str | None
) -> None:
    attack = attack_on("unlike-lora")

    judged = attack.judged(draft)

    assert judged is not None
    assert (judged.outside or "").startswith(reason or "")
    assert (judged.outside is None) == (reason is None)
    plan = Plan.parse(judged.plan.dump())
    again = predict(plan, attack.model, attack.cluster)
    assert again.step_time_s == pytest.approx(judged.prediction.step_time_s, rel=1e-12)
    assert attack.judged(attack.drafts.of(plan)) == judged


def test_an_attack_draws_pipelines_that_differ() -> None:
    """By depth, by cuts, by recomputation and by micro-batches; in the space and outside."""
    attack = attack_on("unlike-lora")
    attack.rng.seed(7)

    drawn = [draft for _ in range(120) if (draft := attack.drafts.unlike.some()) is not None]
    judged = [one for draft in drawn if (one := attack.judged(draft)) is not None]
    inside = [one for one in judged if one.outside is None and one.fits]
    moved = [
        draft for _ in range(60) if (draft := attack.drafts.neighbour(inside[0].draft)) is not None
    ]

    assert len({kind.mesh.pipeline for one in inside for kind in one.plan.kinds}) > 1
    assert {one.outside for one in judged} >= {None, "idle devices"}
    assert any("pipelines that differ" in (one.outside or "") for one in judged)
    assert all(isinstance(draft, UnlikeDraft) for draft in moved)
    for name in ("entries", "choices", "layout"):
        assert any(getattr(draft, name) != getattr(inside[0].draft, name) for draft in moved)


def test_an_attack_sees_that_a_bound_of_pipelines_that_differ_is_too_high() -> None:
    answer = attack_on("unlike-lora").answer
    too_high = answer.certificate.model_copy(
        update={"lower_bound_s": 1.3 * answer.certificate.objective_s}
    )
    attack = Attack(REQUESTS["unlike-lora"], answer=replace(answer, certificate=too_high))

    judged = attack.tried(unlike_draft(L40S, OTHERS))

    assert judged is not None and judged.fits
    [hit] = attack.outcome.bound_hits
    assert hit["seconds"] == judged.prediction.step_time_s


def test_an_attack_holds_plans_on_parts_against_what_is_proven_of_parts() -> None:
    """One device is the fastest of three whose links are slow."""
    target = Target(
        name="parts", model="demo-4m", cluster="3x1xh100-sxm-80gb", seq_len=1024, global_batch=8
    )
    attack = Attack(target, parts=True)
    assert attack.printed is not None
    devices = attack.printed.part.request.cluster.devices
    draft = attack.drafts.of(attack.printed.answer.plan)

    judged = attack.tried(draft)

    assert devices == 1
    assert judged is not None and judged.outside == "idle devices"
    assert judged.prediction.step_time_s == pytest.approx(attack.outcome.part_s)
    assert attack.outcome.part_hits == []
    attack.outcome.part_bound_s = 1.01 * judged.prediction.step_time_s
    attack.tried(draft)
    assert len(attack.outcome.part_hits) == 1


CLOSED = ("pcie-l40s", "deep-3b")
"""Requests with pipelines in their answers whose gap takes a second to close."""


@pytest.mark.long("deep-3b", "pcie-l40s")
@pytest.mark.parametrize(
    "name",
    [name if name in CLOSED else pytest.param(name, marks=pytest.mark.matrix) for name in REQUESTS],
)
def test_no_plan_of_an_attack_simulates_below_what_is_proven(name: str) -> None:
    attack = Attack(REQUESTS[name], effort=FULL)
    certificate = attack.answer.certificate

    outcome = attack.run(PLANS if name in CLOSED else 10 * PLANS)

    assert outcome.bound_hits == []
    assert attack.cluster.is_mixed or certificate.gap <= 0.005


@pytest.mark.matrix
def test_an_attack_sees_a_simulated_bound_that_is_too_high() -> None:
    answer = attack_on("gpt2-xl-4090").answer
    true = answer.certificate
    too_high = true.model_copy(update={"lower_bound_s": 1.3 * true.objective_s})
    wrong = replace(answer, certificate=too_high)
    attack = Attack(REQUESTS["gpt2-xl-4090"], answer=wrong)

    outcome = attack.run(PLANS)

    assert outcome.bound_hits


@pytest.mark.matrix
def test_an_attack_sees_a_closed_form_bound_that_is_too_high() -> None:
    answer = attack_on("gpt2-xl-4090").answer
    wrong = replace(answer, closed_form_bound_s=1.3 * answer.closed_form.objective_s)
    attack = Attack(REQUESTS["gpt2-xl-4090"], answer=wrong)

    outcome = attack.run(PLANS)

    assert outcome.closed_form_hits


@pytest.mark.matrix
def test_an_attack_sees_an_answer_that_is_too_slow() -> None:
    answer = attack_on("gpt2-xl-4090").answer
    true = answer.prediction
    slow = true.model_copy(update={"step_time_s": 1.3 * true.step_time_s})
    wrong = replace(answer, prediction=slow)
    attack = Attack(REQUESTS["gpt2-xl-4090"], answer=wrong)

    outcome = attack.run(PLANS)

    assert outcome.simulation_hits


@cache
def attack_on_a_pipeline() -> Attack:
    """Return an attack on a pinned plan, which is there at once."""
    target = REQUESTS["gpt2-xl-4090"]
    pins = Pins(pipeline=4, schedule="1f1b", micro_batch=2, recompute="none", compile="none")
    model, cluster = resolve_model(target.model), resolve_cluster(target.cluster)
    return Attack(target, answer=search(Request(model, cluster, target.job, pins)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_any_cuts_have_the_objective_that_the_search_gives_them(schedule: ScheduleName) -> None:
    attack = attack_on_a_pipeline()
    layout = Layout(pipeline=4, schedule=schedule, micro_batch=2, micro_batches=32)
    tables = CostTables(Request(attack.model, attack.cluster, attack.job))
    costs = tables.costs_of(layout)
    # Nothing recomputed: forwards and backwards apart ask all choices for one forward.
    kinds = {kind: options[:1] for kind, options in costs.kinds.items()}
    alone = replace(costs, kinds=kinds)
    instance = instance_of(attack.model, attack.cluster, layout, alone)
    rng = random.Random(schedule)
    every = [[0, *sorted(rng.sample(range(1, 50), 3)), 50] for _ in range(20)]

    # Behind [0, 14, ...] the embedding's rank has the slowest forward, another the backward.
    for cuts in ([0, 14, 27, 40, 50], [0, 12, 25, 38, 50], *every):
        sizes = tuple(end - first for first, end in pairwise(cuts))
        judged = attack.judged(Draft(layout=layout, sizes=sizes, choices=(("none", "keep"),) * 50))
        assert judged is not None
        expected_s = evaluate_split(instance, cuts, [0] * 50).objective_s + costs.step_s
        assert judged.objective_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "even"),
    [
        ((9, 8, 9, 8), True),  # 8 + 9 and 8 + 7 like layers, after the embedding, before the head
        ((12, 6, 8, 8), False),
        ((9, 8, 11, 6), False),
        ((1, 11, 11, 11), False),
    ],
)
def test_ranks_share_like_layers_evenly_or_are_outside(sizes: tuple[int, ...], even: bool) -> None:
    attack = attack_on("8b-8")
    layout = Layout(
        pipeline=2,
        data_shard=4,
        zero=1,
        schedule="interleaved",
        virtual_stages=2,
        micro_batches=16,
    )
    draft = Draft(layout=layout, sizes=sizes, choices=(("none", "keep"),) * 34)

    judged = attack.judged(draft)

    assert judged is not None
    assert (judged.outside is None) == even


@pytest.mark.matrix
def test_an_answer_read_as_a_draft_is_written_as_it_was() -> None:
    attack = attack_on("unequal-v100")
    plan = attack.answer.plan

    judged = attack.judged(attack.drafts.of(plan))

    assert judged is not None
    assert judged.plan.stages == plan.stages
    assert judged.plan.layout == plan.layout
    assert judged.prediction.step_time_s == pytest.approx(attack.answer.prediction.step_time_s)
