"""What all tests of studies share: a search that was made once is not made again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.planner.whatif import planning
from meshwright.planner.whatif.planning import Planned, same_plan

_plans: dict[tuple[Any, ...], Planned | None] = {}
"""Plans of this process by all that a search depends on."""


@pytest.fixture(autouse=True)
def plans_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep plans from test to test; where a test replaces the search itself, it makes its own."""
    search, fastest = planning.search, planning._Among.fastest

    def kept(among: Any, candidate: Any, ways: Any, below_s: float = planning.ANY_S) -> Any:
        if planning.search is not search:
            return fastest(among, candidate, ways, below_s)
        name = (among.model.name, candidate.name, tuple(ways), below_s)
        key = (*same_plan(among.study, among.model.digest, candidate), *name)
        if key not in _plans:
            _plans[key] = fastest(among, candidate, ways, below_s)
        return _plans[key]

    monkeypatch.setattr(planning._Among, "fastest", kept)
    yield
