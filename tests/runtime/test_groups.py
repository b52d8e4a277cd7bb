"""Plans for devices that differ: planned for two nominal groups of CPUs, run like one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import document
from planner.cluster import ClusterSpec
from planner.pins import Pins
from planner.plan import Plan
from planner.search import search
from runtime.launch import launch
from tests.planner.test_cluster import DEVICE
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, train

MODEL = cases.transformer()


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


def planned(fast: int, slow: int, pins: Pins) -> Plan:
    plain = cases.plan(MODEL)
    found = search(MODEL, cluster(fast, slow), plain.job, pins=pins).plan
    return Plan(**{**dict(found), "training": plain.training})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fast", "slow", "pins"),
    [(1, 2, Pins(pipeline=3)), (2, 2, Pins(pipeline=2, data=2, micro_batch=1))],
)
def test_stages_on_two_kinds_of_devices_train_like_one_process(
    fast: int, slow: int, pins: Pins
) -> None:
    plan = planned(fast, slow, pins)
    assert {stage.group for stage in plan.stages} == {"fast", "slow"}

    (one,) = on_ranks(1, train, cases.plan(MODEL), MODEL)
    runs = on_ranks(plan.mesh.devices, train, plan, MODEL)

    weights = {name: value for run in runs for name, value in run.weights.items()}
    assert weights.keys() == one.weights.keys()
    for name, value in one.weights.items():
        np.testing.assert_allclose(weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    for run in runs:
        assert run.losses == pytest.approx(one.losses, rel=TOLERANCE)


def test_each_rank_is_told_the_device_of_its_stages_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(1, 2, Pins(pipeline=3))
    document.write(plan, tmp_path / "plan.yaml")

    launch(tmp_path / "plan.yaml", model=MODEL, dry_run=True, device="cpu", output=tmp_path)

    lines = capsys.readouterr().out.splitlines()
    devices = [int(re.findall(r"LOCAL_RANK=(\d+)", line)[0]) for line in lines]
    assert sorted(devices) == [0, 1, 2]
    assert devices.index(0) == [stage.group for stage in plan.stages].index("fast")
