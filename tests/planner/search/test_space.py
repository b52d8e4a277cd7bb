"""The space holds each configuration once; an axis order left out costs what one in it costs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import INSIDE_OUT, Job, Layout
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.requests.pins import Pins, read_layout, read_pins, without_effect
from meshwright.planner.requests.request import Request, pinned_layout
from meshwright.planner.search.axis_orders import distinct_orders
from meshwright.planner.search.micro_batch_size import largest_micro_batch
from meshwright.planner.search.search import search
from meshwright.planner.search.space import canonical, every_degrees, families, layouts

JOB = Job(seq_len=4096, global_batch=64)


@pytest.fixture
def mixtral() -> ModelGraph:
    return resolve_model("mixtral-8x7b")


@pytest.fixture
def four_nodes() -> ClusterSpec:
    return resolve_cluster("4x8xh100-sxm-80gb")


def test_every_layout_is_there_once_and_uses_all_devices(
    mixtral: ModelGraph, four_nodes: ClusterSpec
) -> None:
    every = list(layouts(Request(mixtral, four_nodes, JOB, pins=Pins(context=1))))

    assert len(set(every)) == len(every) > 1000
    for layout in every:
        assert layout.devices == four_nodes.devices
        assert layout.micro_batch * layout.micro_batches * layout.data == JOB.global_batch
        assert (layout.data_shard * layout.context * layout.tensor) % layout.expert == 0
        assert (layout.zero > 0) == (layout.data_shard > 1)


def test_layouts_of_a_family_have_equal_computation_and_the_first_is_the_simplest(
    mixtral: ModelGraph, four_nodes: ClusterSpec
) -> None:
    tables = CostTables(Request(mixtral, four_nodes, JOB))
    pins = Pins(tensor=2, micro_batch=1)
    for degrees in itertools.islice(
        every_degrees(Request(mixtral, four_nodes, JOB, pins=pins)), 0, 40, 3
    ):
        for family in families(Request(mixtral, four_nodes, JOB, pins=pins), degrees):
            every = list(family.layouts())

            seconds = tables.fastest_s(every)

            # The last layer's depends on how it computes the loss.
            assert (seconds[:-1] == seconds[:-1, :1]).all()
            for loss in family.losses:
                own = seconds[-1, [layout.loss == loss for layout in every]]
                assert len(own) == family.size / len(family.losses)
                assert (own == own[0]).all()
            assert len(every) == family.size
            assert every[0] == family.first


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, pipeline=4, data_shard=4, zero=3),
        Layout(tensor=4, pipeline=2, data_shard=2, data_replicate=2, zero=1),
        Layout(tensor=1, pipeline=2, data_shard=4, data_replicate=4, zero=2),
        Layout(tensor=2, context=4, data_shard=4, zero=3),
    ],
    ids=lambda layout: layout.text(),
)
def test_an_order_that_is_left_out_costs_what_its_representative_costs(
    layout: Layout, mixtral: ModelGraph, four_nodes: ClusterSpec
) -> None:
    tables = CostTables(Request(mixtral, four_nodes, JOB))
    found = set()
    for order in itertools.permutations(INSIDE_OUT):
        ordered = replace(layout, order=order)

        same = canonical(four_nodes, ordered)

        found.add(same.order)
        assert tables.costs_of(ordered).kinds == tables.costs_of(same).kinds
        assert tables.costs_of(ordered).boundary_s == tables.costs_of(same).boundary_s
    assert INSIDE_OUT in found
    assert 1 < len(found) < 24


def test_on_one_node_all_orders_are_the_same() -> None:
    assert list(distinct_orders((8,), (2, 1, 2, 1, 2)).values()) == [INSIDE_OUT]
    assert list(distinct_orders((), (1, 1, 1, 1, 1)).values()) == [INSIDE_OUT]


def test_a_pinned_layout_takes_hybrid_shards_and_context(
    mixtral: ModelGraph, four_nodes: ClusterSpec
) -> None:
    layout = pinned_layout(
        Request(mixtral, four_nodes, JOB, pins=read_pins(["cp=2,pp=2,shard=4,zero=2"]))
    )

    assert (layout.context, layout.data_shard, layout.data_replicate) == (2, 4, 2)
    assert layout.text() == "tp=1 pp=2 dp=8 cp=2 zero=2 shard=4 1f1b micro_batch=1x8"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("shard=3,zero=1", "shard=3 must divide dp=32"),
        ("shard=4,zero=0", "shard=4 needs zero=1, 2 or 3"),
        ("ep=3", "ep=3 does not divide"),
        ("dp=1,zero=2", "zero=2 needs dp > 1"),
        ("micro_batch=5", "does not divide the global batch"),
    ],
)
def test_pins_that_contradict_each_other_are_refused(
    pins: str, message: str, mixtral: ModelGraph, four_nodes: ClusterSpec
) -> None:
    with pytest.raises(DocumentError, match=message):
        pinned_layout(Request(mixtral, four_nodes, JOB, pins=read_pins([pins])))


@pytest.mark.matrix
def test_pins_allow_what_they_describe(mixtral: ModelGraph, four_nodes: ClusterSpec) -> None:
    pins = read_pins(["tp=2,shard=4", "schedule=gpipe", "micro_batch=1"])

    every = list(layouts(Request(mixtral, four_nodes, JOB, pins=pins)))

    assert every
    assert all(pins.allow(layout) for layout in every)
    assert all(
        pins.allow(layout) == (layout in every)
        for layout in layouts(Request(mixtral, four_nodes, JOB, pins=Pins(context=1, expert=1)))
        if layout.context == 1 and layout.expert == 1
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,dp=2", r"leaves 28 of 32 devices idle; add idle=28, or name degrees whose product"),
        ("tp=3,dp=2", "leaves 26 of 32 devices idle; add idle=26"),
        ("tp=2,dp=2,idle=4", "leaves 28 of 32 devices idle; add idle=28"),
        ("tp=2,idle=32", "idle=32 leaves none of 32 devices"),
    ],
)
def test_a_layout_that_leaves_devices_idle_must_say_so(
    text: str, message: str, mixtral: ModelGraph, four_nodes: ClusterSpec
) -> None:
    pins, idle = read_layout(text, ["stale"])

    with pytest.raises(DocumentError, match=message):
        pinned_layout(Request(mixtral, four_nodes, JOB, pins=pins), idle=idle)


def test_a_layout_may_name_idle_devices(mixtral: ModelGraph, four_nodes: ClusterSpec) -> None:
    pins, idle = read_layout("tp=2,idle=16", ["stale"])

    layout = pinned_layout(Request(mixtral, four_nodes, JOB, pins=pins), idle=idle)

    assert (layout.tensor, layout.data, layout.devices) == (2, 8, 16)


@pytest.mark.parametrize(
    ("text", "layout", "expected"),
    [
        ("schedule=1f1b", Layout(data_shard=8, zero=1), ["schedule=1f1b has no effect: pp=1"]),
        ("v=1", Layout(data_shard=8, zero=1), ["v=1 has no effect: pp=1"]),
        ("order=pp-tp", Layout(pipeline=8), ["order=pp-tp-cp-dp has no effect: pp alone is"]),
        ("zero=2", Layout(pipeline=2, data_shard=4, zero=2), ["zero=2 has the effect of zero=1"]),
        ("schedule=1f1b,v=1,pp=2,order=pp-tp", Layout(pipeline=2, tensor=4), []),
        ("zero=2", Layout(data_shard=4, zero=2, micro_batches=2), []),
        ("tp=1,dp=8,recompute=full,micro_batch=1", Layout(data_shard=8, zero=1), []),
    ],
)
def test_pins_without_effect_are_named(
    text: str, layout: Layout, expected: list[str], four_nodes: ClusterSpec
) -> None:
    found = list(without_effect(read_pins([text]), layout, four_nodes))

    assert len(found) == len(expected)
    assert all(one.startswith(start) for one, start in zip(found, expected, strict=True))


def test_tensor_parallelism_goes_up_to_the_number_of_heads(four_nodes: ClusterSpec) -> None:
    model = resolve_model("demo-4m")
    assert model.architecture is not None
    found = {d.tensor for d in every_degrees(Request(model, four_nodes, JOB))}
    narrow = replace_heads(model, 4)

    assert max(found) == model.architecture.heads == 8
    assert max(d.tensor for d in every_degrees(Request(narrow, four_nodes, JOB))) == 4


def replace_heads(model: ModelGraph, heads: int) -> ModelGraph:
    assert model.architecture is not None
    fewer = model.architecture.model_copy(update={"heads": heads, "kv_heads": heads})
    return model.model_copy(update={"architecture": fewer})


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [("vit-l-16", "1xh100-sxm-80gb", 512), ("gpt2", "1xrtx-4090", 1 << 16)],
)
def test_the_largest_micro_batch_is_what_memory_has_room_for(
    model: str, cluster: str, batch: int
) -> None:
    """A larger one than the space has does not fit; 64 samples are no limit."""
    asked = Request.create(resolve_model(model), resolve_cluster(cluster), global_batch=batch)
    most = largest_micro_batch(asked, 1)
    too_many = 1 << most.bit_length()
    pinned = replace(
        asked,
        job=replace(asked.job, global_batch=too_many),
        pins=Pins(micro_batch=too_many),
    )

    assert most > 64
    with pytest.raises(NoPlanFits):
        search(pinned)


def test_one_pass_of_all_images_is_faster_than_eight() -> None:
    asked = Request.create(
        resolve_model("vit-l-16"), resolve_cluster("8xh100-sxm-80gb"), global_batch=4096
    )

    assert search(asked).plan.layout.micro_batch == 512
