"""What a step takes in energy and rent, against the formula of studies."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import meshwright
from meshwright.api import commands
from meshwright.api.running_costs import running_rate
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.errors import DocumentError
from meshwright.planner.search.cluster_parts import search_parts

ASKED = {"seq_len": 512, "global_batch": 8}


def test_energy_is_that_of_the_devices_in_use() -> None:
    """60 % of 700 W a device, 1.23 times with the node, 60 W of network, and 1.3 times that."""
    answer = meshwright.search("demo-4m", "2xh100-sxm-80gb", prefer="energy", **ASKED)  # type: ignore[arg-type]

    devices = answer.plan.mesh.devices
    energy_wh = devices * (1.23 * 420 + 60) * 1.3 * answer.prediction.step_time_s / 3600
    [note] = [note for note in answer.prediction.notes if "Wh at the meter" in note]
    taken, low, high = map(float, re.findall(r"(\d+\.\d+(?:e-\d+)?)", note)[:3])
    assert taken == pytest.approx(energy_wh, rel=6e-3)
    assert low < taken < high
    [limited] = [note for note in answer.prediction.notes if "power limit" in note]
    assert "420 of 700 W of h100-sxm-80gb" in limited


@pytest.mark.parametrize("name", ["1xh100-sxm-80gb", "8xh100-sxm-80gb", "4x8xh100-sxm-80gb"])
def test_a_second_takes_the_power_of_all_devices(name: str) -> None:
    """One function is asked of the whole cluster and of its parts."""
    rate = running_rate("energy", resolve_cluster("8x8xh100-sxm-80gb"))
    part = resolve_cluster(name)

    assert rate is not None
    assert rate(part) == rate(part) == pytest.approx(part.devices * (1.23 * 700 + 60) * 1.3)


def test_every_search_of_an_answer_compares_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of recomputed modules too: of two parts the faster may take more."""
    rates: list[Any] = []

    def noting(*arguments: Any, **keywords: Any) -> Any:
        rates.append(keywords["rate"])
        assert keywords.get("below_s", math.inf) == math.inf
        return search_parts(*arguments, **keywords)

    monkeypatch.setattr(commands, "search_parts", noting)
    monkeypatch.setattr(commands, "with_modules", lambda request, searched: [request])

    meshwright.search("demo-4m", "2xh100-sxm-80gb", prefer="energy", **ASKED)  # type: ignore[arg-type]

    assert len(rates) == 2
    assert None not in rates


def test_rent_needs_a_price() -> None:
    """Nobody rents this machine's processes."""
    with pytest.raises(DocumentError, match=r"on-demand price of nodes of cpu.*--prefer fastest"):
        meshwright.search("demo-4m", "local:2", prefer="cost", **ASKED)  # type: ignore[arg-type]
