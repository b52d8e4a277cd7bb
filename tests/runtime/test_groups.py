"""Plans for devices that differ: planned for two nominal groups of CPUs, run like one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Mesh, Plan
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.run.launch_options import LaunchRun
from tests.planner.documents.test_cluster import DEVICE
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, train

MODEL = cases.transformer()
DEEP = cases.transformer(layers=4)


def group(name: str, devices: int, pace: float) -> dict[str, Any]:
    """Return nominal CPUs of one pace."""
    accelerator = {
        **DEVICE,
        "name": name,
        "kind": "cpu",
        "peak_flops": {"fp32": pace * 1e9},
        "memory_bytes_per_s": pace * 1e9,
    }
    return {"name": name, "accelerator": accelerator, "nodes": 1, "devices_per_node": devices}


def cluster(fast: int, slow: int) -> ClusterSpec:
    tier = {"name": "memory", "devices": fast + slow, "latency_s": 1e-6, "bytes_per_s": 1e9}
    return ClusterSpec.of(
        {
            "name": "two kinds",
            "groups": [group("fast", fast, 4.0), group("slow", slow, 1.0)],
            "tiers": [tier],
        }
    )


def planned(fast: int, slow: int, pins: Pins, model: ModelGraph = MODEL) -> Plan:
    plain = cases.plan(model)
    found = search(Request(model, cluster(fast, slow), plain.job, pins=pins)).plan
    return Plan(**{**dict(found), "training": plain.training})


@pytest.mark.spread(1)
@pytest.mark.long("2-2-gpipe", "1-2-zb-h1", "1-1-interleaved-zb")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fast", "slow", "pins"),
    [
        pytest.param(1, 2, Pins(pipeline=3, schedule="1f1b"), marks=pytest.mark.matrix),
        (2, 2, Pins(pipeline=2, data=2, micro_batch=1, schedule="gpipe")),
        (1, 2, Pins(pipeline=3, schedule="zb-h1")),
        pytest.param(
            *(1, 1, Pins(pipeline=2, schedule="interleaved", virtual_stages=2)),
            marks=pytest.mark.matrix,
        ),
        (1, 1, Pins(pipeline=2, schedule="interleaved-zb", activations="offload")),
        (1, 1, Pins(pipeline=2, schedule="zbv")),
        (1, 1, Pins(pipeline=2, schedule="dualpipe-v")),
    ],
    ids=lambda value: value.schedule if isinstance(value, Pins) else str(value),
)
def test_stages_on_two_kinds_of_devices_train_like_one_process(
    fast: int, slow: int, pins: Pins
) -> None:
    model = MODEL if pins.schedule in ("1f1b", "gpipe", "zb-h1") else DEEP
    plan = planned(fast, slow, pins, model)
    assert plan.schedule == pins.schedule
    assert {stage.group for stage in plan.stages} == {"fast", "slow"}

    equals_one_process(plan, model)


def held_out_loss(plan: Plan) -> float:
    engine = token_engine(plan, MODEL, device=torch.device("cpu"))
    own = plan.samples_of(engine.slice_rank)
    return engine.evaluate(cases.global_tokens(9)[own.start : own.stop]).loss


def equals_one_process(plan: Plan, model: ModelGraph = MODEL) -> None:
    (one,) = on_ranks(1, train, cases.plan(model), model)
    runs = on_ranks(plan.mesh.devices, train, plan, model)

    weights = {name: value for run in runs for name, value in run.weights.items()}
    assert weights.keys() == one.weights.keys()
    for name, value in one.weights.items():
        np.testing.assert_allclose(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    for run in runs:
        assert run.losses == pytest.approx(one.losses, rel=TOLERANCE)
        assert run.norms == pytest.approx(one.norms, rel=TOLERANCE)


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "shares", "recompute"),
    [
        ({"data_replicate": 2}, (3, 1), "none"),
        pytest.param({"data_shard": 2, "zero": 1}, (5, 3), "none", marks=pytest.mark.matrix),
        ({"data_shard": 2, "zero": 1}, (2, 6), "selective"),
        ({"data_replicate": 3}, (1, 2, 1), "full"),
    ],
)
def test_unequal_shares_train_like_one_process(
    mesh: dict[str, Any], shares: tuple[int, ...], recompute: str
) -> None:
    zero = mesh.get("zero", 0)
    degrees = {axis: degree for axis, degree in mesh.items() if axis != "zero"}
    plain = cases.plan(MODEL, micro_batches=sum(shares), recompute=recompute)
    plan = plain.model_copy(update={"mesh": Mesh(**degrees), "zero": zero})

    equals_one_process(cases.shared(plan, shares))


@pytest.mark.ranks
@pytest.mark.matrix
def test_shares_that_the_search_plans_train_like_one_process() -> None:
    plan = planned(1, 2, Pins(pipeline=1, data=3, tensor=1))
    assert plan.shares is not None
    assert len({share.micro_batches for share in plan.shares}) > 1

    equals_one_process(plan)
    (expected,) = on_ranks(1, held_out_loss, cases.plan(MODEL))
    assert on_ranks(3, held_out_loss, plan) == pytest.approx([expected] * 3, rel=TOLERANCE)


@pytest.mark.matrix
def test_each_rank_is_told_the_device_of_its_stages_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(1, 2, Pins(pipeline=3))
    document.write(plan, tmp_path / "plan.yaml")

    launch(
        Launch(
            tmp_path / "plan.yaml",
            LaunchRun(output=tmp_path),
            model=MODEL,
            dry_run=True,
            device="cpu",
        )
    )

    lines = capsys.readouterr().out.splitlines()
    devices = [int(re.findall(r"LOCAL_RANK=(\d+)", line)[0]) for line in lines]
    assert sorted(devices) == [0, 1, 2]
    assert devices.index(0) == [stage.group for stage in plan.stages].index("fast")
