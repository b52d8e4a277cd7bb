"""Plan: its parts must agree with each other and with the model that it is for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.plan import Layout, Plan
from meshwright.planner.errors import DocumentError

MODEL = resolve_model("demo-4m")
LAYERS = [name for name, _ in MODEL.chain]


def plan(**changes: Any) -> Plan:
    half = len(LAYERS) // 2
    data = {
        "model": {"name": MODEL.name, "source": MODEL.source, "digest": MODEL.digest},
        "cluster": "local:4",
        "seq_len": 128,
        "global_batch": 16,
        "precision": "fp32",
        "mesh": {"pipeline": 2, "data_shard": 2},
        "zero": 1,
        "schedule": "1f1b",
        "micro_batch": 2,
        "micro_batches": 4,
        "stages": [
            {"layers": [{"layer": name} for name in LAYERS[:half]]},
            {"layers": [{"layer": name} for name in LAYERS[half:]]},
        ],
    }
    return Plan.of(data | changes)


def test_stages_of_a_rank_follow_from_the_schedule() -> None:
    four = {"stages": [{"layers": [{"layer": name}]} for name in LAYERS[:4]], "virtual_stages": 2}

    assert plan(schedule="zbv", **four).stages_of_rank(0) == (0, 3)
    assert plan(schedule="interleaved", **four).stages_of_rank(0) == (0, 2)
    assert plan().stages_of_rank(1) == (1,)
    assert plan(schedule="zbv", **four).layout.stages == 4
    assert "zbv stages=2/rank" in plan(schedule="zbv", **four).layout.text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch": 15}, "global_batch: is 15"),
        ({"micro_batches": 3}, "global_batch: is 16"),
        ({"zero": 0}, "zero: is 0"),
        ({"zero": 4}, "zero"),
        ({"stages": []}, r"there are 0, and mesh\.pipeline is 2"),
        ({"stages": [{"layers": [{"layer": "a"}]}, {"layers": []}]},
         r"stages\[1\]\.layers: is empty"),
        ({"stages": [{"layers": [{"layer": "a"}]}, {"layers": [{"layer": "a"}]}]},
         r"stages\[1\]\.layers: layer 'a' is also in stages\[0\]"),
        ({"mesh": {"pipeline": 2, "data_shard": 2, "order": ["tensor"]}}, "name each of"),
        ({"mesh": {"pipeline": 2, "data_shard": 0}}, r"mesh\.data_shard: is 0"),
        ({"precision": "fp12"}, "precision"),
        ({"schedule": "zigzag"}, "schedule"),
        ({"virtual_stages": 2}, r"there are 2, .* every pipeline rank needs 2 stages"),
        ({"schedule": "zbv"}, r"virtual_stages: is 1; zbv puts 2 stages on every rank"),
        ({"schedule": "1f1b", "virtual_stages": 2, "mesh": {"data_shard": 2}},
         r"virtual_stages: is 2; 1f1b puts 1 stage on every rank"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)  # fmt: skip
def test_parts_that_disagree_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        plan(**changes)


GROUPS = [{"name": "large", "devices": 2}, {"name": "small", "devices": 4}]


def on(*groups: str) -> list[dict[str, Any]]:
    """Return two stages that run on these groups."""
    return [{"layers": [{"layer": name}], "group": g} for name, g in zip("ab", groups, strict=True)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": on("large", "small")}, r"stages\[0\]\.group: is large, and the plan lists no"),
        ({"stages": on("small", "huge"), "groups": GROUPS},
         r"stages\[1\]\.group: is huge; name one of large, small"),
        ({"groups": GROUPS}, r"stages\[0\]\.group: is None; name one of large, small"),
        ({"stages": on("large", "large"), "groups": GROUPS},
         "those on large need 4 devices, and it has 2"),
        ({"stages": on("small", "small"), "groups": GROUPS[1:] * 2}, "needs its own name"),
        ({"stages": on("large", "small"), "groups": GROUPS,
          "mesh": {"pipeline": 2, "data_shard": 2, "order": ["pipeline", "tensor", "context",
                                                             "data_shard", "data_replicate"]}},
         "pipeline must be the last axis"),
        ({"stages": [*on("large", "small"), *({**s, "layers": [{"layer": s["group"]}]}
                                              for s in on("large", "small"))],
          "groups": GROUPS, "schedule": "zbv", "virtual_stages": 2},
         r"stages\[2\]\.group: is large, and another stage of the same rank runs on small"),
    ],
)  # fmt: skip
def test_groups_that_do_not_hold_the_stages_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        plan(**changes)


def shared(*counts: int, **changes: Any) -> Plan:
    """Return a plan of ranks without a pipeline that take so many micro-batches."""
    names = ("small", "small", "large")
    parts = {
        "mesh": {"data_replicate": 3},
        "zero": 0,
        "global_batch": 12,
        "micro_batches": max(counts),
        "groups": GROUPS,
        "shares": [{"group": g, "micro_batches": c} for g, c in zip(names, counts, strict=False)],
        "stages": [{"layers": [{"layer": name} for name in LAYERS]}],
    }
    return plan(**parts | changes)


def test_shares_say_who_takes_which_samples_on_which_devices() -> None:
    three = shared(1, 2, 3)

    assert [three.micro_batches_of(rank) for rank in range(3)] == [1, 2, 3]
    assert [three.samples_of(rank) for rank in range(3)] == [range(2), range(2, 6), range(6, 12)]
    assert [three.device_of_rank(rank) for rank in range(3)] == [2, 3, 0]
    assert plan().samples_of(1) == range(8, 16)


@pytest.mark.parametrize(
    ("counts", "changes", "says"),
    [
        ((3, 3), {}, r"shares: there are 2, and data is 3"),
        ((1, 2, 2), {}, "global_batch: is 12, but the shares are 5 micro-batches of 2"),
        ((1, 2, 3), {"micro_batches": 2}, "micro_batches: is 2; the largest share is 3"),
        ((1, 2, 3), {"mesh": {"data_shard": 3}, "zero": 2}, "zero 0 or 1"),
        ((1, 2, 3), {"mesh": {"data_shard": 3}, "zero": 1}, "with zero 1 none may be 1"),
        ((2, 2, 2), {"mesh": {"data_shard": 3}, "zero": 1, "offload": "parameters"},
         "with offload parameters need zero 0"),
        ((1, 2, 3), {"groups": GROUPS[:1]}, r"shares\[0\]\.group: is small; name one of large"),
        ((1, 2, 3), {"groups": [GROUPS[0], {"name": "small", "devices": 1}]},
         "those on small need 2 devices, and it has 1"),
        ((1, 2, 3), {"stages": [{"layers": [{"layer": "a"}], "group": "small"}]},
         r"stages\[0\]\.group: is small, and the plan has shares"),
    ],
)  # fmt: skip
def test_shares_that_do_not_add_up_are_refused(
    counts: tuple[int, ...], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(DocumentError, match=says):
        shared(*counts, **changes)


def cut_at(*sizes: int, groups: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return stages of so many layers in the model's order, the last with the rest."""
    ends = [*itertools.accumulate(sizes), len(LAYERS)]
    return [
        {"layers": [{"layer": name} for name in LAYERS[begin:end]], **on_group}
        for begin, end, on_group in zip(
            [0, *ends],
            ends,
            [{"group": name} for name in groups] or [{}] * len(ends),
            strict=False,
        )
    ]


THREE_STAGES = {"data": 1, "micro_batches": 4, "stages": cut_at(2, 4)}
NO_LAYERS = [*cut_at(), {"layers": []}]


def unlike(**changes: Any) -> Plan:
    """Return two pipelines of two stages, and three of one stage, each of two ranks a stage."""
    data = {
        "mesh": {"tensor": 2, "pipeline": 2, "data_replicate": 2},
        "zero": 0,
        "global_batch": 2 * (2 * 4 + 3 * 1),
        "stages": cut_at(2),
        "other_pipelines": [{"data": 3, "micro_batches": 1, "stages": cut_at()}],
    }
    return plan(**(data | changes))


def test_pipelines_that_differ_number_ranks_and_samples_kind_by_kind() -> None:
    wanted = unlike()

    assert wanted.ranks == 2 * (2 * 2 + 3 * 1)
    assert wanted.data_degree == 5
    assert [wanted.micro_batches_of(rank) for rank in range(5)] == [4, 4, 1, 1, 1]
    assert [wanted.samples_of(rank) for rank in range(5)] == [
        range(8), range(8, 16), range(16, 18), range(18, 20), range(20, 22)
    ]  # fmt: skip
    assert [wanted.kind_of_rank(rank) for rank in (7, 8, 13)] == [(0, 7), (1, 0), (1, 5)]
    assert [wanted.coordinate(rank, "pipeline") for rank in (0, 3, 4, 7, 8, 13)] == [
        0, 0, 1, 1, 0, 0
    ]  # fmt: skip
    assert [wanted.coordinate(rank, "data_replicate") for rank in (2, 8, 10, 12)] == [1, 0, 1, 2]


def test_stages_of_all_kinds_are_numbered_one_behind_the_other() -> None:
    whole = {"data": 3, "micro_batches": 1, "stages": cut_at()}
    wanted = unlike(other_pipelines=[whole, THREE_STAGES], global_batch=22 + 2 * 4)
    virtual = plan(schedule="zbv", virtual_stages=2, stages=cut_at(1, 2, 3))

    firsts = [wanted.first_stage(rank) for rank in (0, 4, 8, 14, 16, 18)]

    assert firsts == [0, 1, 2, 3, 4, 5]
    assert [wanted.pipeline_rank(rank) for rank in (0, 4, 8, 14, 16, 18)] == firsts
    assert wanted.pipeline_ranks == (0, 1, 2, 3, 4, 5)
    assert virtual.pipeline_ranks == (0, 1, 1, 0)
    assert [virtual.first_stage(rank) for rank in (0, 2)] == [0, 1]
    assert (wanted.most_micro_batches, plan().most_micro_batches) == (15, 8)
    assert wanted.is_cut
    assert not plan(mesh={"data_shard": 2}, stages=cut_at()).is_cut


def test_each_kind_of_pipelines_is_a_plan_as_if_it_were_alone() -> None:
    wanted = unlike(schedule="gpipe")

    first, other = wanted.kinds

    assert (first.ranks, first.global_batch, first.schedule) == (8, 16, "gpipe")
    assert (other.ranks, other.global_batch, other.schedule) == (6, 6, "1f1b")
    assert [Plan.parse(kind.dump()) for kind in (first, other)] == [first, other]
    assert plan().kinds == (plan(),)
    assert Plan.parse(wanted.dump()) == wanted
    assert "other_pipelines" not in plan().dump()
    assert wanted.layout_text.endswith(
        "tp=2 pp=2 dp=2 zero=0 gpipe micro_batch=2x4 split=2+6 + pp=1 dp=3 micro_batch=2x1"
    )


def test_pipelines_that_differ_may_run_forwards_ahead() -> None:
    wanted = unlike(schedule="1f1b ahead=1")

    assert [kind.schedule for kind in wanted.kinds] == ["1f1b ahead=1", "1f1b"]
    with pytest.raises(DocumentError, match=r"other_pipelines\[0\]\.schedule"):
        unlike(schedule="1f1b ahead=1", other_pipelines=[THREE_STAGES], global_batch=2 * 12)


def test_stages_of_all_kinds_take_the_next_devices_of_their_group() -> None:
    groups = [{"name": "large", "devices": 4}, {"name": "small", "devices": 3}]

    wanted = unlike(
        mesh={"pipeline": 2, "data_replicate": 2},
        groups=groups,
        stages=cut_at(2, groups=["small", "large"]),
        other_pipelines=[
            {"data": 1, "micro_batches": 1, "stages": cut_at(3, groups=["large", "small"])},
            {"data": 1, "micro_batches": 2, "stages": cut_at(groups=["large"])},
        ],
    )

    assert [wanted.device_of_rank(rank) for rank in range(7)] == [4, 5, 0, 1, 2, 6, 3]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"other_pipelines": []}, "other_pipelines: is empty"),
        ({"global_batch": 16}, r"global_batch: is 16, but micro_batch 2 x micro_batches "
         r"\(4 x data 2 \+ 1 x data 3 of other_pipelines\[0\]\) is 22"),
        ({"zero": 1}, "zero: is 1, and pipelines differ"),
        ({"mesh": {"context": 2, "pipeline": 2}}, r"mesh\.context: is 2, and pipelines differ"),
        ({"mesh": {"expert": 2, "pipeline": 2}}, r"mesh\.expert: is 2"),
        ({"virtual_stages": 2, "schedule": "zbv", "mesh": {"data_replicate": 2}},
         "virtual_stages: is 2"),
        ({"offload": "optimizer"}, "offload: is optimizer"),
        ({"gradient_compression": "bf16"}, "gradient_compression: is bf16"),
        ({"graphs": "micro_batch"}, "graphs: is micro_batch"),
        ({"schedule": "pipedream-2bw"}, "schedule: is pipedream-2bw"),
        ({"shares": [{"group": "large", "micro_batches": 4}]}, "shares: are there beside"),
        ({"other_pipelines": [{"data": 3, "micro_batches": 1, "stages": cut_at(2)[:1]}]},
         r"other_pipelines\[0\]\.stages: layer '.*' is not in both kinds"),
        ({"other_pipelines": [{"data": 3, "micro_batches": 1, "stages": NO_LAYERS}]},
         r"other_pipelines\[0\]\.stages\[1\]\.layers: is empty"),
        ({"other_pipelines": [{"data": 999_999, "micro_batches": 1, "stages": cut_at()}]},
         "other_pipelines: the plan has"),
        ({"other_pipelines": [{"data": 3, "micro_batches": 1, "stages": cut_at(groups=["x"])}]},
         r"other_pipelines\[0\]\.stages\[0\]\.group: is x, and the plan lists no groups"),
        ({"groups": [{"name": "large", "devices": 13}], "stages": cut_at(2, groups=["large"] * 2),
          "other_pipelines": [{"data": 3, "micro_batches": 1, "stages": cut_at(groups=["large"])}]},
         "those on large need 14 devices, and it has 13"),
    ],
)  # fmt: skip
def test_pipelines_that_differ_are_refused_where_their_ranks_cannot_work_together(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(DocumentError, match=says):
        unlike(**changes)


def test_each_kind_of_pipelines_has_the_layers_of_the_model_in_order() -> None:
    turned = [{"layers": [{"layer": name} for name in reversed(LAYERS)]}]

    unlike().check_model(MODEL)
    with pytest.raises(DocumentError, match=r"other_pipelines\[0\]\.stages: .* stands elsewhere"):
        unlike(other_pipelines=[{"data": 3, "micro_batches": 1, "stages": turned}])
    with pytest.raises(DocumentError, match=r"^stages: layer 0 is 'head'"):
        unlike(
            stages=[{"layers": turned[0]["layers"][:2]}, {"layers": turned[0]["layers"][2:]}],
            other_pipelines=[{"data": 3, "micro_batches": 1, "stages": turned}],
        ).check_model(MODEL)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(DocumentError, match="made for another model") as caught:
        plan().check_model(resolve_model("local-25m"))

    assert caught.value.path == "model.digest"


def test_a_plan_that_reorders_or_loses_layers_is_refused() -> None:
    first, *rest = LAYERS
    swapped = [*rest[:1], first, *rest[1:]]

    with pytest.raises(DocumentError, match=r"layer 0 is 'block\.0'; the model's order"):
        plan(stages=staged(swapped)).check_model(MODEL)
    with pytest.raises(DocumentError, match=f"place {len(LAYERS) - 1} layers; the model has"):
        plan(stages=staged(LAYERS[:-1])).check_model(MODEL)


def staged(names: list[str]) -> list[dict[str, Any]]:
    return [{"layers": [{"layer": name} for name in part]} for part in (names[:3], names[3:])]


def test_what_other_frameworks_divide_is_written_only_where_it_is() -> None:
    divided = {"tensor": 4, "expert_tensor": 2, "sequence_parallel": False}
    usual, foreign = plan(), plan(mesh={"pipeline": 2, "data_shard": 2, **divided})

    assert "expert_tensor" not in usual.dump()
    assert "sequence_parallel" not in usual.dump()
    assert Plan.parse(foreign.dump()) == foreign
    assert (foreign.layout.expert_tensor, foreign.layout.sequence_parallel) == (2, False)
    assert "etp=2 sequence_parallel=off" in foreign.layout.text()


def test_a_layout_reads_as_people_write_it() -> None:
    assert Layout().text() == "tp=1 pp=1 dp=1 zero=0 micro_batch=1x1"
    assert (
        Layout(tensor=2, context=2, expert=4, data_replicate=2, data_shard=4, zero=3).text()
        == "tp=2 pp=1 dp=8 cp=2 ep=4 zero=3 shard=4 micro_batch=1x1"
    )
