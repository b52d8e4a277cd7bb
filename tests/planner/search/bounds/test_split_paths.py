"""A path that excludes a split excludes none that simulates faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.split_paths import SplitPaths
from meshwright.planner.search.proof_budget import BRIEF
from meshwright.planner.search.search import search
from meshwright.planner.search.spaces.simulated_mixed import _LayoutSearch


@pytest.mark.parametrize(
    ("cluster", "ranks"),
    [
        ("2xh100-sxm-80gb+1xa100-sxm-40gb", 3),
        pytest.param("4xa100-sxm-80gb+3xl40s", 7, marks=pytest.mark.matrix),
    ],
)
def test_what_a_path_excludes_simulates_no_faster(
    monkeypatch: pytest.MonkeyPatch, cluster: str, ranks: int
) -> None:
    """Every split that would be excluded is simulated."""
    exceed, simulate = SplitPaths.exceeds, _LayoutSearch._try
    limits: list[float] = []
    excluded = 0

    def asked(
        self: SplitPaths, columns: Sequence[Any], types: Sequence[int], limit_s: float
    ) -> bool:
        if exceed(self, columns, types, limit_s):
            limits.append(limit_s)
        return False

    def simulated(self: _LayoutSearch, split: Any) -> float:
        nonlocal excluded
        step_s = simulate(self, split)
        while limits:
            assert step_s >= limits.pop() * (1 - 1e-9)
            excluded += 1
        return step_s

    monkeypatch.setattr(SplitPaths, "exceeds", asked)
    monkeypatch.setattr(_LayoutSearch, "_try", simulated)
    request = Request.create(
        resolve_model("gpt2"),
        resolve_cluster(cluster),
        seq_len=512,
        global_batch=6,
        pins=Pins(pipeline=ranks),
    )
    search(request, below_s=1e9, effort=BRIEF)
    assert excluded > 10
