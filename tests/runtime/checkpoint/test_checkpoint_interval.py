"""A run is saved every so many steps as asked for, or where its own figures lose the least."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

torch = pytest.importorskip("torch")

from meshwright.planner.documents.events import Decision, Saved, events_of  # noqa: E402
from meshwright.planner.whatif.pricing.survival import SaveFigures  # noqa: E402
from meshwright.runtime.checkpoint.writer import MEASURED_AFTER, Saver, SaveSchedule, SaveSeconds  # noqa: E402  # noqa: E402
from meshwright.runtime.run import run_folder as run  # noqa: E402
from meshwright.runtime.run.metrics import Metrics  # noqa: E402

FIGURES = SaveFigures(failures_per_hour=0.36, blocked_s=0.5, written_s=7.0)


class Measured:
    """Stands for a Saver whose last save took so long."""

    took: SaveSeconds | None = None


def schedule(folder: Path, *, every: int | None, saves: SaveFigures | None) -> SaveSchedule:
    orders = run.RankOrders(
        token="t",
        output=folder,
        corpus=folder,
        device="cpu",
        started_unix_s=0.0,
        checkpoint_every=every,
        saves=saves,
    )
    return SaveSchedule(orders, cast("Saver", Measured), after_step=0)


def due(one: SaveSchedule, steps: int) -> list[int]:
    return [step for step in range(1, steps) if one.due(step)]


def test_steps_that_are_asked_for_are_multiples(tmp_path: Path) -> None:
    asked = schedule(tmp_path, every=4, saves=None)
    asked.saves(4, [1.0] * 4, None)

    assert due(asked, 13) == [4, 8, 12]
    assert due(schedule(tmp_path, every=None, saves=None), 100) == []


def test_the_interval_follows_measured_steps_then_measured_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = schedule(tmp_path, every=FIGURES.every_steps(4.0), saves=FIGURES)
    metrics = Metrics(tmp_path)
    assert due(computed, 30)[0] == 25

    # Steps take 1 s and not 4: sqrt(2 x 0.5 x 10,000) = 100 of them.
    for step in range(1, MEASURED_AFTER + 2):
        computed.after_step(step, [1.0] * step, metrics)
    assert due(computed, 200)[0] == 100

    # A save blocks 2 s and not 0.5: twice as far apart.
    monkeypatch.setattr(Measured, "took", SaveSeconds(step=100, blocked_s=2.0, written_s=9.0))
    computed.saves(200, [1.0] * 200, metrics)
    assert due(computed, 500)[0] == 400

    with run.events_file(tmp_path).open("rb") as lines:
        events = list(events_of(lines))
    decided = [event.every_steps for event in events if isinstance(event, Decision)]
    assert decided == [100, 200]
    (saved,) = [event for event in events if isinstance(event, Saved)]
    assert (saved.step, saved.blocked_s, saved.predicted_blocked_s) == (100, 2.0, 0.5)
