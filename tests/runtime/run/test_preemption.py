"""A machine that is taken away: the step under way is saved, and nothing of it is done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from meshwright.planner.documents.document import json_line, read
from meshwright.planner.errors import DocumentError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run.environment import messages_beside, place_of
from meshwright.runtime.run.locks_and_signals import signals_interrupt
from meshwright.runtime.run.run_folder import (
    RankRecord,
    account_of,
    metrics_file,
    read_records,
    record_file,
    write_message,
)
from tests.limits import PATIENCE_S
from tests.runtime.rooms import ENOUGH, Room, plan_of

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshwright.runtime.launch.training_loop import token_engine  # noqa: E402
from tests.runtime import cases  # noqa: E402
from tests.runtime.ranks import on_ranks  # noqa: E402


def ended(launcher: subprocess.Popen[str]) -> str:
    _, message = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 1  # of the program that tests start
    return message


def losses(room: Room) -> dict[int, float]:
    return {one.step: one.loss for one in read_records(metrics_file(room.folder / "out"))}


def test_the_first_signal_is_a_notice_and_the_second_ends_all() -> None:
    seen: list[int] = []

    with pytest.raises(KeyboardInterrupt), signals_interrupt(seen.append):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGTERM)


def test_without_somebody_to_notice_the_first_ends_all() -> None:
    for number in notice.SIGNALS:
        with pytest.raises(KeyboardInterrupt), signals_interrupt():
            os.kill(os.getpid(), number)


def test_a_notice_is_a_file_of_the_run_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("a user's")
    output = tmp_path / "out"
    output.mkdir()
    notice.notice_file(output).symlink_to(elsewhere)

    with pytest.raises(DocumentError, match="is a symbolic link"):
        notice.leave_notice(output, signal.SIGTERM)

    assert elsewhere.read_text() == "a user's"


def test_a_notice_and_records_come_where_the_folder_of_the_run_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is a file here, as permissions do not hold root."""
    output = tmp_path / "out"
    output.write_text("no folder")
    monkeypatch.setenv(notice.NOTICE, str(notice.notice_file(output)))
    record = RankRecord(rank=0, stage=0, first_step=1, step_s=(0.5,))
    with pytest.raises(OSError, match="exists"):
        notice.leave_notice(output, signal.SIGTERM)
    with pytest.raises(DocumentError, match="cannot be written"):
        write_message(record, record_file(output, 0))

    def unwritable(part: object, path: Path) -> None:
        if path.is_relative_to(output):
            raise DocumentError("", "cannot be written: Read-only file system")
        path.write_text(json_line(record))

    monkeypatch.setattr("meshwright.runtime.run.run_folder.write_json", unwritable)
    with messages_beside():
        is_noticed = notice.take_notice()
        assert not is_noticed()
        notice.leave_notice(output, signal.SIGTERM)
        assert is_noticed()
        write_message(record, record_file(output, 0))
        place = place_of(record_file(output, 0))
        assert not place.is_relative_to(output)
        assert read(RankRecord, place) == record
    assert not place.parent.exists()
    assert place_of(record_file(output, 0)) == record_file(output, 0)


def asked_to_end(folder: str, schedule: str) -> list[tuple[bool, bool]]:
    """[step] Return what a rank is told of the end: time first, then a notice to rank 1 too."""
    os.environ[notice.NOTICE] = str(Path(folder) / str(dist.get_rank()))
    model = cases.transformer()
    plan = cases.plan(model, pipeline=2, schedule=schedule)
    engine = token_engine(plan, model, device=torch.device("cpu"))
    engine.end_when(lambda: engine.steps >= 1)
    told = []
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            Path(os.environ[notice.NOTICE]).touch()
        result = engine.step(cases.global_tokens(step))
        told.append((result.out_of_time, result.noticed))
    return told


@pytest.mark.ranks
def test_what_one_rank_asks_all_are_told_behind_the_same_step(tmp_path: Path) -> None:
    told = on_ranks(2, asked_to_end, str(tmp_path), "1f1b")

    assert told == 2 * [[(False, False), (True, False), (True, True)]]


@pytest.mark.ranks
def test_a_pipeline_that_never_drains_tells_it_in_its_first_step_too(tmp_path: Path) -> None:
    (tmp_path / "1").touch()

    told = on_ranks(2, asked_to_end, str(tmp_path), "pipedream-2bw")

    assert told == 2 * [[(False, True), (False, True), (True, True)]]


def given_notice(room: Room, saved: Path) -> int:
    """Start a run and take its machine away; return the last step.

    As a scheduler does that signals every process of a job, ranks too.
    """
    launcher = room.start(plan_of(), steps=ENOUGH, checkpoint=saved)
    for rank in room.ranks().values():
        os.kill(rank, signal.SIGTERM)
    launcher.send_signal(signal.SIGTERM)
    message = ended(launcher)
    step = max(losses(room))
    assert f"the run stopped on notice after step {step} of {ENOUGH}" in message
    return step


@pytest.mark.ranks
def test_the_step_under_way_is_saved(room: Room) -> None:
    step = given_notice(room, room.folder / "saved")

    newest = checkpoint.newest(room.folder / "saved")
    assert newest is not None
    assert checkpoint.progress(newest).step == step
    assert room.ranks() == {}
    seconds = account_of(room.folder / "out")
    assert (seconds.attempts, seconds.incidents) == (1, {"notice": 1})
    assert (seconds.failures, seconds.steps_lost) == (0, 0)
    assert 0 < seconds.goodput < 1


@pytest.mark.ranks
@pytest.mark.matrix
def test_what_goes_on_does_no_step_twice_and_trains_as_if_nothing_had_been(room: Room) -> None:
    step = given_notice(room, room.folder / "saved")

    report = room.run(plan_of(), steps=step + 2, checkpoint=room.folder / "saved", resume=True)

    assert report.stopped == "steps"
    together = losses(room)
    assert list(together) == list(range(1, step + 3))
    room.run(plan_of(), steps=step + 2)
    assert losses(room) == together


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("number", notice.SIGNALS)
def test_any_signal_saves_and_while_another_save_is_under_way(
    room: Room, number: signal.Signals, every: int | None
) -> None:
    saved = room.folder / "saved"
    launcher = room.start(plan_of(), steps=ENOUGH, checkpoint=saved, checkpoint_every=every)

    launcher.send_signal(number)
    message = ended(launcher)

    newest = checkpoint.newest(saved)
    assert newest is not None
    assert checkpoint.progress(newest).step == max(losses(room))
    assert f"{number.name}: the step under way is the last one" in message


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_notice_before_the_first_step_saves_the_first(room: Room) -> None:
    saved = room.folder / "saved"
    launcher = room.start(plan_of(), step=0, steps=ENOUGH, checkpoint=saved)
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if "tokens by" in line:  # ranks are about to start
            break

    launcher.send_signal(signal.SIGTERM)
    message = ended(launcher)

    assert "the run stopped on notice after step 1 of" in message or "interrupted before" in message


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_second_signal_ends_at_once_and_the_last_checkpoint_stays(room: Room) -> None:
    saved = room.folder / "saved"
    launcher = room.start(plan_of(), step=5, steps=ENOUGH, checkpoint=saved, checkpoint_every=2)
    for rank in room.ranks().values():
        os.kill(rank, signal.SIGSTOP)  # no rank ends its step

    launcher.send_signal(signal.SIGTERM)
    end = time.monotonic() + PATIENCE_S
    while not notice.notice_file(room.folder / "out").exists():  # two at once would be one
        assert time.monotonic() < end
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    message = ended(launcher)

    assert "interrupted after step" in message
    assert "is complete and can be resumed" in message
    assert room.ranks() == {}
