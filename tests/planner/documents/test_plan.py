"""Plan: its parts must agree with each other and with the model that it is for."""

from __future__ import annotations

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
