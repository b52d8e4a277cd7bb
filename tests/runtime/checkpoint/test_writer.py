"""Plans that save memory train like one process, whatever they are combined with."""

from __future__ import annotations

import pytest

from tests.runtime.test_equality import case, check

HYBRID = {"data_replicate": 2, "data_shard": 2}
# (schedule, stages on each rank)
SCHEDULES = (
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved-zb", 2),
    ("zbv", 2),
    ("dualpipe-v", 2),
)
ZERO_3 = {"data_shard": 2, "zero": 3}
RECOMPUTES = ("none", "selective", "full")
# Micro-batches are as large as the job allows: what is small is not moved.
MESHES_OF_TWO = {
    "data": {"data_replicate": 2},
    "zero 1": {"data_shard": 2, "zero": 1},
    "zero 3": ZERO_3,
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
MESHES_OF_FOUR = {
    "zero 3, hybrid": {**HYBRID, "zero": 3, "micro_batches": 1},
    "pipeline x data": {"pipeline": 2, "data_replicate": 2, "micro_batches": 2},
    "pipeline x zero 3": {"pipeline": 2, "data_shard": 2, "zero": 3, "micro_batches": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2, "micro_batches": 2},
    "tensor x zero 3": {"tensor": 2, "data_shard": 2, "zero": 3, "micro_batches": 1},
}
SCHEDULED = {
    f"pipeline {name}": {"pipeline": 2, "schedule": name, "virtual_stages": stages}
    for name, stages in SCHEDULES
}


def offloading(meshes: dict) -> tuple:
    return tuple(
        case(f"{name}, recompute {recompute}, offload", recompute=recompute, **layout)
        for name, layout in ((n, {**mesh, "activations": "offload"}) for n, mesh in meshes.items())
        for recompute in RECOMPUTES
    )


def on_host(meshes: dict) -> tuple:
    return tuple(
        case(f"{name}, {what} on the host", **{**layout, "offload": what})
        for name, layout in meshes.items()
        for what in ("optimizer", "parameters")
    )


TIED = {"tied_embeddings": True}
TWO = (
    *offloading(MESHES_OF_TWO | SCHEDULED),
    *on_host(MESHES_OF_TWO | SCHEDULED),
    case("zero 3, tied, parameters on the host", model=TIED, **ZERO_3, offload="parameters"),
    case("pipeline, tied, parameters on the host", model=TIED, pipeline=2, offload="parameters"),
    case("zero 3, parameters on the host", "mixtral", **ZERO_3, offload="parameters"),
    case("zero 3, optimizer on the host", "gpt2", **ZERO_3, offload="optimizer"),
    case("all on the host", **ZERO_3, offload="parameters", activations="offload"),
)
FOUR = (*offloading(MESHES_OF_FOUR), *on_host(MESHES_OF_FOUR))
# Every fourth row: 4 divides neither the 3 recomputes nor the 5 meshes.
GROUPS = {"an eighth on 2 ranks": (2, TWO[::8]), "a fourth on 4 ranks": (4, FOUR[::4])}
WHOLE = {"all on 2 ranks": (2, TWO), "all on 4 ranks": (4, FOUR)}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "group", ["an eighth on 2 ranks", pytest.param("a fourth on 4 ranks", marks=pytest.mark.matrix)]
)
@pytest.mark.matrix
def test_saving_plans_train_like_one_process(group: str) -> None:
    world, rows = GROUPS[group]

    check(rows, world)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("group", WHOLE)
def test_every_saving_plan_trains_like_one_process(group: str) -> None:
    world, rows = WHOLE[group]

    check(rows, world)
