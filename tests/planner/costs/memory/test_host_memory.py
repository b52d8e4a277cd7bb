"""Which devices share a host, by numbering them one by one."""

import itertools
import math

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.memory.host_memory import (
    assumed_room,
    fullest_host,
    hosts,
    ranks_on_nodes,
    usable_share,
)
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import INSIDE_OUT, Axis, Job, Layout
from meshwright.planner.requests.request import Request

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
    update = {"host_memory_bytes": None, "host_memory_range_bytes": None}
    group = four_nodes.groups[0].model_copy(update=update)
    silent = four_nodes.model_copy(update={"groups": (group,)})
    layout = Layout(data_shard=32, zero=3, order=INSIDE_OUT)

    assert hosts(silent, layout, 0.5) == ()
    assert not list(assumed_room(None))
    (assumed,) = assumed_room(fullest_host(silent, layout, [2.0**30], 0.5))
    assert "8.0 GiB" in assumed.what
    (usual,) = assumed_room(fullest_host(four_nodes, layout, [2.0**30], 0.5))
    assert "2.0 TiB" in usual.what
    named = resolve_cluster("4xdgx-h100")
    assert not list(assumed_room(fullest_host(named, layout, [2.0**30], 0.5)))


@pytest.mark.parametrize("name", ["4xrtx-a6000", "t4", "2x8xmi300x", "p5.48xlarge", "gaudi3"])
def test_every_node_of_the_catalogue_has_a_host_of_some_size(name: str) -> None:
    group = resolve_cluster(name).groups[0]

    low, high = group.host_memory_range_bytes or (group.host_memory_bytes, group.host_memory_bytes)
    assert group.host_memory_bytes is not None
    assert low is not None and high is not None
    assert 0 < low <= group.host_memory_bytes <= high
    assert (group.host_memory_range_bytes is None) == (name == "p5.48xlarge")


def test_a_misfit_names_the_memory_that_is_too_small_and_is_never_certain() -> None:
    """8 B parameters take 16 bytes each on the host: 119.7 GiB, and torch pins half of it."""
    model = resolve_model("llama-3.1-8b")
    whole = resolve_cluster("4xrtx-a6000")
    group = whole.groups[0].model_copy(
        update={"host_memory_bytes": 200 * 2**30, "host_memory_range_bytes": (2**36, 2**39)}
    )
    cluster = whole.model_copy(update={"groups": (group,)})
    layout = Layout(tensor=4, offload="parameters", micro_batches=64)
    job = Job(seq_len=4096, global_batch=64)
    request = Request(model=model, cluster=cluster, job=job)

    prediction = layout_prediction(request, layout)

    assert prediction.overflows == ("host memory",)
    assert prediction.misfit == "does not fit in host memory"
    assert prediction.host is not None
    assert prediction.host.used_bytes == pytest.approx(16 * model.parameters, rel=1e-3)
    assert prediction.host.room_bytes == 100 * 2**30
    # Nodes lie evenly between 64 and 512 GiB on a logarithmic scale, 239 GiB are needed.
    needs = 2 * 16 * model.parameters / 2**30
    odds = math.log(512 / needs) / math.log(512 / 64)
    assert prediction.fit_probability == pytest.approx(odds, rel=0.02)


def test_torch_pins_parameters_in_powers_of_two_and_the_arena_nothing() -> None:
    assert usable_share(native(), "optimizer") == 0.8
    assert usable_share(native(), "parameters") == 0.5
    assert {usable_share(frameworks()["deepspeed"], one) for one in ("none", "optimizer")} == {0.5}
