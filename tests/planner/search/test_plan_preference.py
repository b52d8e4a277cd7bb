"""The simplest plan near the fastest, against searches of every set of axes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from meshwright.planner.calibration.tables.predictions import framework_plan
from meshwright.planner.catalog import framework as catalog_framework
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.costs.uncertainty import LAYOUT_ERROR
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.plan import Compile, Job, Layout
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.errors import NoneFaster, NoPlanFits
from meshwright.planner.report.text import why_text
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import SURE_TO_FIT, Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.plan_preference import (
    AXES,
    NEAR,
    alternative_row,
    faster_by_chunks,
    faster_elsewhere,
    features,
    framework_choices,
    margin_of,
    not_worth_eight_bits,
    with_preference,
)
from meshwright.planner.search.search import search

CASES = [
    ("llama-3.1-8b", "8xh100-sxm-80gb", 64, "native"),
    ("llama-3.2-3b", "8xa100-sxm-40gb", 32, "native"),
    ("llama-3.1-8b", "2x8xa100-sxm-40gb", 64, "torchtitan"),
]


def asked(name: str, cluster: str, batch: int, framework: str) -> Request:
    job = Job(seq_len=4096, global_batch=batch)
    return Request(
        resolve_model(name), resolve_cluster(cluster), job, framework=frameworks()[framework]
    )


def test_a_simpler_plan_may_take_what_two_layouts_ratio_errs_by_in_other_frameworks() -> None:
    """Plain FSDP is 2.9 % slower than three axes, on one node under torchtitan."""
    name, cluster = "llama-3.1-8b", "8xh100-sxm-80gb"
    job = Job(seq_len=8192, global_batch=64)
    request = Request(
        resolve_model(name),
        resolve_cluster(cluster),
        job,
        framework=frameworks()["torchtitan"],
        fit_probability=SURE_TO_FIT,
    )
    assert margin_of(request) == LAYOUT_ERROR > NEAR
    assert margin_of(replace(request, framework=frameworks()["native"])) == NEAR
    found = search(request)

    simplest, fastest = (with_preference(request, found, how) for how in ("simplest", "fastest"))

    assert not [axis for axis in AXES if getattr(simplest.plan.layout, axis) > 1]
    assert len(features(fastest.plan)) > len(features(simplest.plan))
    assert "a tie: predicted ratios err by 6 %" in why_text(simplest.choices)
    assert "plain data parallel +2.9 % (a tie" in why_text(fastest.choices)
    # The proof is about the fastest that was found, and the gap counts against the chosen.
    proof = simplest.certificate.plan
    assert proof is not None
    assert proof.gap == pytest.approx(1 - proof.lower_bound_s / simplest.prediction.step_time_s)
    assert proof.lower_bound_s <= fastest.prediction.step_time_s < simplest.prediction.step_time_s


def pinned(request: Request, kept: tuple[str, ...], schedule: str | None) -> Answer | None:
    """The fastest plan that has these axes at most, and this schedule."""
    pins = replace(Pins(schedule=schedule), **{axis: 1 for axis in AXES if axis not in kept})
    try:
        return search(replace(request, pins=pins), below_s=1e30)  # no closest miss
    except NoPlanFits:
        return None


@pytest.mark.long(
    "('llama-3.2-3b', '8xa100-sxm-40gb', 32, 'native')",
    "('llama-3.1-8b', '8xh100-sxm-80gb', 64, 'native')",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.matrix
def test_no_plan_near_the_fastest_asks_for_fewer_axes(case: tuple[str, str, int, str]) -> None:
    request = asked(*case)
    found = search(request)

    answer = with_preference(request, found)

    rows = {choice.what: choice for choice in answer.choices}
    fastest = rows["fastest"].prediction
    assert fastest is not None
    limit_s = fastest.step_time_s * (1 + margin_of(request))
    assert answer.prediction.fits
    assert answer.prediction.step_time_s <= limit_s
    own = sum(getattr(answer.plan.layout, axis) > 1 for axis in AXES)
    for count, schedule in itertools.product(range(own), (None, "1f1b")):
        for kept in itertools.combinations(AXES, count):
            other = pinned(request, kept, schedule)
            assert other is None or other.prediction.step_time_s > limit_s
    # The proof is about the fastest, and says where the chosen plan stands.
    assert answer.closed_form.objective_s == found.closed_form.objective_s
    assert answer.certificate.plan is not None
    assert answer.certificate.plan.layout == answer.plan.layout.text()
    assert answer.certificate.plan.step_time_s == answer.prediction.step_time_s
    assert answer.certificate.plan.lower_bound_s == found.certificate.lower_bound_s


@pytest.mark.matrix
def test_usual_plans_are_the_best_of_their_kind() -> None:
    request = asked(*CASES[0])

    answer = with_preference(request, search(request), "fastest")

    rows = {choice.what: choice for choice in answer.choices}
    assert rows["chosen"].plan == rows["fastest"].plan == answer.plan
    plain = pinned(request, (), None)
    assert plain is not None
    assert rows["plain data parallel"].plan == plain.plan
    both = rows["tensor + pipeline"]
    assert both.prediction is not None
    layouts = []
    for tensor, pipeline in ((2, 2), (2, 4), (4, 2)):
        pins = Pins(tensor=tensor, pipeline=pipeline, context=1)
        layouts.append(search(replace(request, pins=pins)).prediction.step_time_s)
    # Beside the answer stages and recomputation are not chosen in simulated time.
    assert min(layouts) <= both.prediction.step_time_s <= min(layouts) * 1.01
    assert both.more == pytest.approx(
        both.prediction.step_time_s / answer.prediction.step_time_s - 1
    )
    assert both.why.startswith("uses tensor, pipeline")
    assert "tensor communication +" in both.why


PINNED = [
    Pins(context=1, divided=frozenset({"tensor", "pipeline"})),
    Pins(tensor=1, context=1, expert=1, pipeline=1),
    Pins(context=1, recompute="full"),
    Pins(tensor=2, schedule="1f1b"),
    Pins(zero=3),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "framework", ["native", pytest.param("torchtitan", marks=pytest.mark.matrix)]
)
def test_a_search_that_goes_on_from_another_finds_what_one_from_scratch_does(
    framework: str,
) -> None:
    request = asked("llama-3.1-8b", "8xh100-sxm-80gb", 64, framework)
    known = search(request).candidates

    for pins in PINNED:
        other = replace(request, pins=pins)
        scratch = search(other)
        below_s = scratch.closed_form.objective_s * 1.01
        for limit_s in (1e30, below_s):
            onward = search(other, candidates=known, below_s=limit_s)
            assert onward.plan == scratch.plan
            assert onward.prediction == scratch.prediction
            assert {one.plan.digest for one in onward.finalists} == {
                one.plan.digest for one in scratch.finalists
            }
        with pytest.raises(NoneFaster):
            search(other, candidates=known, below_s=scratch.closed_form.objective_s)
    # What others have gone on from still answers the first request.
    assert search(request, candidates=known).plan == search(request).plan


@pytest.mark.matrix
def test_what_the_user_pins_stays_and_what_it_excludes_is_not_told() -> None:
    request = replace(asked(*CASES[0]), pins=Pins(tensor=2))

    answer = with_preference(request, search(request))

    assert answer.plan.mesh.tensor == 2
    assert {choice.what for choice in answer.choices} == {"chosen", "fastest", "tensor + pipeline"}


def test_what_cannot_fit_is_said() -> None:
    request = asked("llama-3.1-70b", "8x8xa100-sxm-40gb", 64, "megatron")

    answer = with_preference(request, search(request))

    rows = {choice.what: choice for choice in answer.choices}
    assert rows["plain data parallel"].plan is None
    assert "does not fit" in rows["plain data parallel"].why
    assert "tensor" in features(answer.plan)


def test_what_a_framework_cannot_divide_is_said_where_its_usual_plan_would_stand() -> None:
    request = asked("gpt2-xl", "8xa100-sxm-80gb", 32, "native")
    request = replace(request, job=Job(seq_len=1024, global_batch=32))

    answer = with_preference(request, search(request))

    rows = {choice.what: choice for choice in answer.choices}
    assert rows["tensor + pipeline"].plan is None
    assert rows["tensor + pipeline"].why == (
        "native cannot: tensor parallelism does not divide the family gpt2; "
        "other frameworks may (--framework)"
    )


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("framework", "compiles", "worth"),
    [("native", "none", False), ("native", "block", True), ("torchtitan", "block", True)],
)
def test_eight_bits_that_gain_nothing_are_named_beside_sixteen(
    framework: str, compiles: Compile, worth: bool
) -> None:
    # Rounding by operators that start one by one costs more than products in 8 bits gain.
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
    pins = Pins(tensor=1, pipeline=1, context=1, data_shard=8, zero=3, micro_batch=1)
    pins = replace(pins, compile=compiles, scales="tensorwise")
    request, wide = (
        Request(
            model,
            cluster,
            Job(seq_len=8192, global_batch=16, precision=precision),
            pins=pins,
            framework=catalog_framework(framework),
        )
        for precision in ("fp8", "bf16")
    )

    found = search(request)
    notes = list(not_worth_eight_bits(request, found.plan, found.prediction))

    assert found.plan.weight_gather_dtype == "fp8"
    changed = {"precision": "bf16", "weight_gather_dtype": "full"}
    same = predict(found.plan.model_copy(update=changed), model, cluster)
    if worth:
        assert notes == []
        assert 1.2 < same.step_time_s / found.prediction.step_time_s < 1.5
    else:
        assert seconds_text(same.step_time_s) in notes[0]
        assert same.step_time_s < found.prediction.step_time_s
    plain = search(wide)
    assert list(not_worth_eight_bits(wide, plain.plan, plain.prediction)) == []


def test_a_slower_plan_says_where_it_takes_longer_as_shares_of_the_fastest_step() -> None:
    request = asked("llama-3.2-1b", "1xa100-sxm-80gb", 8, "native")
    found = search(request)
    fastest = found.prediction
    longer = {**fastest.step_parts, "forward": 0.25 * fastest.step_time_s}
    longer["forward"] += fastest.step_parts["forward"]
    slower = fastest.model_copy(
        update={"step_time_s": 1.25 * fastest.step_time_s, "step_parts": longer}
    )

    row = alternative_row("mine", found.plan, slower, fastest)

    assert row.more == pytest.approx(0.25)
    assert row.why.endswith("; forward +25.0 %")


@pytest.mark.parametrize(
    ("model", "cluster", "experts", "found"),
    [
        ("gemma-2-9b", "8xh100-sxm-80gb", 1, True),
        ("gpt-oss-20b", "8xh100-sxm-80gb", 8, False),
        ("llama-3.1-8b", "8xh100-sxm-80gb", 1, False),
        ("gpt-oss-20b", "local:8", 8, False),
    ],
)
def test_a_layout_that_is_much_faster_elsewhere_says_so(
    model: str, cluster: str, experts: int, found: bool
) -> None:
    # Capped scores of Gemma-2 are written to memory, and not by Megatron's attention; sinks of
    # GPT-OSS are so in 32 bits alone.
    precision: Precision = "fp32" if cluster.startswith("local") else "bf16"
    job = Job(seq_len=8192, global_batch=8, precision=precision)
    request = Request(resolve_model(model), resolve_cluster(cluster), job)
    plan = framework_plan(request, Layout(data_shard=8, expert=experts, zero=2))

    notes = list(faster_elsewhere(request, plan, predict(plan, request.model, request.cluster)))

    assert len(notes) == found
    assert all("with --framework megatron" in note for note in notes)


def test_options_that_a_framework_has_are_not_named_again() -> None:
    layout = Layout(data_shard=8, expert=8, zero=1)
    names = []
    for name in ("megatron", "megatron+deepep"):
        request = Request(
            resolve_model("qwen3-30b-a3b"),
            resolve_cluster("8xh100-sxm-80gb"),
            Job(seq_len=4096, global_batch=64),
            framework=catalog_framework(name),
        )
        names.append([words.split("+") for words, _ in framework_choices(request, layout)])

    assert any("deepep" in words for words in names[0])
    assert all(len(set(words)) == len(words) for every in names for words in every)


def test_a_note_names_longer_chunks_of_the_loss_that_are_faster() -> None:
    """The card with 24 GB decides the length; the head is on one with 40 GB and a few layers."""
    pins = Pins(pipeline=3, data=1, tensor=1, micro_batch=3, schedule="1f1b", ahead=())
    request = Request(
        resolve_model("llama-3.2-1b"),
        resolve_cluster("2xa100-sxm-40gb+1xrtx-4090"),
        Job(seq_len=2048, global_batch=30),
        pins,
    )
    found = search(request)

    [note] = faster_by_chunks(request, found.plan, found.prediction)

    longer = replace(request, pins=replace(pins, loss=ChunkedLoss(rows=8192)))
    pinned = search(longer)
    gain = 1 - pinned.prediction.step_time_s / found.prediction.step_time_s
    noted = float(note.removeprefix("the same plan takes ").split(" %")[0]) / 100
    assert 0.005 < noted <= gain + 0.001
    assert "--fix loss=chunked/8192" in note
    assert [*faster_by_chunks(longer, found.plan, found.prediction)] == []
    assert [*faster_by_chunks(request, pinned.plan, pinned.prediction)] == []
