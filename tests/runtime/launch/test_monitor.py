"""A launcher's look at the pace of its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.runtime.launch.monitor import Pace
from tests.runtime.rooms import plan_of


def test_a_node_whose_ranks_report_no_steps_knows_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a replacement of a slow rank saves follows from the steps that are left."""
    place = SimpleNamespace(steps_done=538, process=0)
    ready = SimpleNamespace(plan=plan_of(data=2), ranks=SimpleNamespace(devices={1: 0}))
    shown = SimpleNamespace(step=0, say=SimpleNamespace(print=print))
    seen = SimpleNamespace(places=lambda: [place], paces=lambda: [None])
    pace = Pace(cast(Any, ready), cast(Any, shown), cast(Any, seen), None, {})
    monkeypatch.setattr(pace, "_look_at_memory", lambda processes, now_s: None)
    steps: list[int] = []
    monkeypatch.setattr(
        pace._watch, "look", lambda seconds, paces, step, others: steps.append(step) or []
    )

    pace([])
    assert steps == [538]
