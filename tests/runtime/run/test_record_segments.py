"""Records of a run in segments: what is read of them is what one long file says."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from meshwright.planner.documents.document import json_line
from meshwright.planner.documents.events import (
    Attempt,
    Decision,
    Event,
    Expected,
    Incident,
    PhaseDone,
    Saved,
    StepDone,
    StepRecord,
)
from meshwright.planner.whatif.run_status import run_view
from meshwright.runtime.run import record_segments, run_folder
from meshwright.runtime.run.record_segments import Rotation, segments


def step_of(number: int) -> StepRecord:
    return StepRecord(step=number, loss=1.0 / number, grad_norm=1.0, step_s=0.5, epoch=0)


def run_of(steps: int, seed: int = 0) -> list[Event]:
    """A run whose ranks are killed now and then, and do some steps again."""
    rng, now_s, done = random.Random(seed), 1000.0, 0
    events: list[Event] = [
        Expected(at_unix_s=now_s, seconds={"steps": 9.0}, failures=1.0, goodput=0.9,
                 goodput_low=0.8, goodput_high=1.0),
        Attempt(at_unix_s=now_s, plan="sha256:1", devices=2),
    ]  # fmt: skip
    while done < steps:
        done += 1
        now_s += 0.6
        events.append(StepDone(at_unix_s=now_s, record=step_of(done), predicted_s=0.4))
        if done % 50 == 0:
            events.append(Saved(at_unix_s=now_s, step=done, blocked_s=0.1, written_s=0.2))
        if rng.random() < 0.01:
            now_s += 5
            events += [
                Incident(at_unix_s=now_s, cause="crash", rank=1, after_step=done, evidence="x"),
                Decision(at_unix_s=now_s, reaction="restart", why="it happened once here"),
                Attempt(at_unix_s=now_s, plan="sha256:1", devices=2, after_step=done // 50 * 50),
                PhaseDone(at_unix_s=now_s + 3, phase="start", measured_s=3.0),
            ]
            now_s += 3
            done = done // 50 * 50
    return events


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_segments, "SEGMENT_BYTES", 20_000)


def written(output: Path, events: list[Event]) -> None:
    """Write a run's records as its ranks and its launcher do."""
    rotation = Rotation(run_folder.events_file(output), run_folder.metrics_file(output))
    for number, event in enumerate(events):
        run_folder.append_record(event, run_folder.events_file(output))
        if isinstance(event, Attempt):
            run_folder.forget_steps_after(event.after_step, run_folder.metrics_file(output))
        if isinstance(event, StepDone):
            run_folder.append_record(event.record, run_folder.metrics_file(output))
        if number % 20 == 0:
            rotation.look(now_s=1e6 + number)


@pytest.mark.usefixtures("small")
def test_a_run_in_segments_reads_as_one_in_a_file(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    events = run_of(400)

    written(output, events)

    moved = segments(run_folder.events_file(output))
    assert len(moved) > 3
    assert sum(file.suffix == ".gz" for _, file in moved) >= len(moved) - 1
    stored = list(run_folder.events(output))
    assert [event for event in stored if event.event != "step"] == [
        event for event in events if event.event != "step"
    ]
    assert len(stored) < 0.8 * len(events)
    assert run_folder.viewer(output).view() == run_view(events)
    assert run_folder.account_of(output) == run_view(events).seconds
    assert run_folder.expected_of(output) == events[0]
    steps = [record.step for record in run_folder.read_records(run_folder.metrics_file(output))]
    assert steps == list(range(1, 401))
    newest = run_folder.newest_record(run_folder.metrics_file(output))
    assert newest is not None
    assert newest.step == 400
    for after, until in ((390, 400), (350, 396)):
        found = run_folder.steps_of_events(output, after=after, until=until)
        assert [record.step for record in found] == list(range(after + 1, until + 1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("step", [0, 5, 250, 399, 900])
def test_steps_that_are_done_again_are_forgotten_in_segments_too(tmp_path: Path, step: int) -> None:
    written(tmp_path, run_of(400, seed=3))
    path = run_folder.metrics_file(tmp_path)

    run_folder.forget_steps_after(step, path)

    steps = [record.step for record in run_folder.read_records(path)]
    assert steps == list(range(1, min(step, 400) + 1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", ["index", "cut", "bomb", "link"])
def test_damaged_segments_end_nothing(tmp_path: Path, damage: str) -> None:
    output = tmp_path / "out"
    output.mkdir()
    events = run_of(300)
    written(output, events)
    folder = output / "records"
    first = folder / "events-000001.jsonl.gz"
    if damage == "index":
        (folder / "index.json").write_text('{"until": 99999, "view": {}}')
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-20])
    if damage == "bomb":
        first.write_bytes(gzip.compress(b"x" * (100 << 20), 1))
    if damage == "link":
        (folder / "index.json").unlink()
        (folder / "index.json").symlink_to("/etc/passwd")

    seen = run_folder.viewer(output).view()

    assert seen.last is not None
    if damage in ("index", "link"):
        assert seen == run_view(events)


def test_what_is_read_does_not_grow_with_age(tmp_path: Path) -> None:
    """The index of a long run has as much as that of a short one."""
    monkey = pytest.MonkeyPatch()
    monkey.setattr(record_segments, "SEGMENT_BYTES", 20_000)
    monkey.setattr("meshwright.planner.whatif.pricing.survival.KEPT_STEPS", 50)
    monkey.setattr("meshwright.planner.whatif.run_status.MOST_POINTS", 50)
    monkey.setattr("meshwright.planner.whatif.run_status.MOST_NOTED", 3)
    sizes = []
    for steps in (300, 900):
        output = tmp_path / str(steps)
        output.mkdir()
        events = run_of(steps)
        written(output, events)
        sizes.append((output / "records" / "index.json").stat().st_size)
        account = run_folder.account_of(output)
        assert account.trained_s == pytest.approx(0.5 * steps)
    monkey.undo()
    assert sizes[1] < 1.3 * sizes[0]
    assert (
        json_line(step_of(1))
        in gzip.decompress(
            (tmp_path / "300" / "records" / "metrics-000001.jsonl.gz").read_bytes()
        ).decode()
    )


@pytest.mark.usefixtures("small")
def test_looks_that_read_what_is_new_see_what_one_reading_sees(tmp_path: Path) -> None:
    """The account is looked at while lines are added, files rotate, and records are removed."""
    events, path = run_of(300, seed=5), run_folder.events_file(tmp_path)
    rotation = Rotation(path, run_folder.metrics_file(tmp_path))
    for number, event in enumerate(events):
        whole = json_line(event).encode()
        with path.open("ab") as file:  # a look may come while a line is written
            file.write(whole[:9])
            file.flush()
            if number % 7 == 0:
                run_folder.account_of(tmp_path)
            file.write(whole[9:])
        if number % 20 == 0:
            rotation.look(now_s=1e6 + number)
        if number % 11 == 0:
            assert run_folder.account_of(tmp_path) == run_folder.viewer(tmp_path).seconds
        if number == 200:
            path.unlink()
            run_folder.append_record(events[1], path)
            assert run_folder.account_of(tmp_path) == run_folder.viewer(tmp_path).seconds
    path.write_bytes(b"")
    assert run_folder.account_of(tmp_path) == run_folder.viewer(tmp_path).seconds
    assert run_folder.expected_of(tmp_path) == events[0]
    assert len(segments(path)) > 1
