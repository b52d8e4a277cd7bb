"""Which devices share a host, by numbering them one by one."""

import itertools

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.memory.host_memory import hosts, ranks_on_nodes, unknown, usable_share
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import INSIDE_OUT, Axis, Layout

OUTSIDE: tuple[Axis, ...] = ("pipeline", "context", "tensor", "data_replicate", "data_shard")
LAYOUTS = [
    Layout(tensor=8, pipeline=4),
    Layout(tensor=2, pipeline=4, data_shard=4, zero=1),
    Layout(pipeline=4, data_shard=8, zero=1, order=OUTSIDE),
    Layout(tensor=2, pipeline=16),
    Layout(pipeline=32),
    Layout(data_shard=32, zero=3),
    Layout(tensor=4, pipeline=2, data_replicate=4),
]


@pytest.fixture(scope="module")
def four_nodes() -> ClusterSpec:
    return resolve_cluster("4x8xh100-sxm-80gb")


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.text)
def test_every_kind_of_node_is_found(four_nodes: ClusterSpec, layout: Layout) -> None:
    degrees = {
        "tensor": layout.tensor,
        "context": layout.context,
        "data_shard": layout.data_shard,
        "data_replicate": layout.data_replicate,
        "pipeline": layout.pipeline,
    }
    # The first axis of the order turns fastest.
    places = [
        dict(zip(reversed(layout.order), place, strict=True))
        for place in itertools.product(*(range(degrees[axis]) for axis in reversed(layout.order)))
    ]
    expected = set()
    for first in range(0, 32, 8):
        here = [place["pipeline"] for place in places[first : first + 8]]
        expected.add(tuple(here.count(rank) for rank in range(layout.pipeline)))

    found = ranks_on_nodes(four_nodes, layout)

    assert set(found) == expected
    assert len(set(found)) == len(found)


def test_a_host_that_nobody_describes_is_an_assumption(four_nodes: ClusterSpec) -> None:
    group = four_nodes.groups[0].model_copy(update={"host_memory_bytes": None})
    silent = four_nodes.model_copy(update={"groups": (group,)})
    layout = Layout(data_shard=32, zero=3, order=INSIDE_OUT)

    assert hosts(silent, layout, 0.5) == ()
    assert not list(unknown(silent, layout, [0.0]))
    (assumed,) = unknown(silent, layout, [2.0**30])
    assert "8.0 GiB" in assumed.what
    assert not list(unknown(four_nodes, layout, [2.0**30]))


def test_torch_pins_parameters_in_powers_of_two_and_the_arena_nothing() -> None:
    assert usable_share(native(), "optimizer") == 0.8
    assert usable_share(native(), "parameters") == 0.5
    assert {usable_share(frameworks()["deepspeed"], one) for one in ("none", "optimizer")} == {0.5}
