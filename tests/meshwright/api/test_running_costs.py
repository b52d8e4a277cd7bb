"""What a step takes in energy and rent, against the formula of studies."""

from __future__ import annotations

import re

import pytest

import meshwright
from meshwright.planner.errors import DocumentError

ASKED = {"seq_len": 512, "global_batch": 8}


def test_energy_is_that_of_the_devices_in_use() -> None:
    """700 W a device, 1.23 times with the node, 60 W of network, and 1.3 times that in all."""
    answer = meshwright.search("demo-4m", "2xh100-sxm-80gb", prefer="energy", **ASKED)  # type: ignore[arg-type]

    devices = answer.plan.mesh.devices
    energy_wh = devices * (1.23 * 700 + 60) * 1.3 * answer.prediction.step_time_s / 3600
    [note] = [note for note in answer.prediction.notes if "Wh at the meter" in note]
    taken, low, high = map(float, re.findall(r"(\d+\.\d+(?:e-\d+)?)", note)[:3])
    assert taken == pytest.approx(energy_wh, rel=6e-3)
    assert low < taken < high
    [limited] = [note for note in answer.prediction.notes if "power limit" in note]
    assert "420 W of h100-sxm-80gb" in limited


def test_rent_needs_a_price() -> None:
    """Nobody rents this machine's processes."""
    with pytest.raises(DocumentError, match=r"on-demand price of nodes of cpu.*--prefer fastest"):
        meshwright.search("demo-4m", "local:2", prefer="cost", **ASKED)  # type: ignore[arg-type]
