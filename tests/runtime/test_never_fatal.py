"""Records, logs and loggers never end the run that they are about: lines wait for room."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.planner.documents.events import StepRecord
from meshwright.planner.errors import DocumentError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.rank_processes import Console
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.metrics import Metrics, ScriptRecords


@contextlib.contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Let no file become larger: writes are cut off there, then fail, as on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1.5, grad_norm=0.5, step_s=0.1, samples_per_s=80.0, epoch=0)


def test_lines_without_room_are_written_with_the_next_that_has_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(tmp_path)
    metrics.write(record(1))
    room = max(file.stat().st_size for file in tmp_path.iterdir()) + 20

    with no_room_beyond(room):
        for step in (2, 3):
            metrics.write(record(step))
        kept = (tmp_path / "metrics.jsonl").read_text()

    metrics.write(record(4))
    assert kept.endswith("\n")
    assert [one.step for one in run.read_records(run.metrics_file(tmp_path))] == [1, 2, 3, 4]
    assert [one.step for one in run.steps_of_events(tmp_path, after=0, until=9)] == [1, 2, 3, 4]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, said
    assert all("the run goes on without it" in line for line in said)


def test_a_script_without_room_for_its_records_trains_on(tmp_path: Path) -> None:
    for step in (1, 2):
        run.append_record(record(step), run.metrics_file(tmp_path))
    engine = Engine(
        lambda: nn.Linear(2, 2),
        loss=lambda outputs, batch: (outputs.sum(), len(batch)),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        batch=torch.ones(4, 2),
    )
    records = ScriptRecords(tmp_path)

    with no_room_beyond(0):
        records.write(engine.plan, 2, 1.5, 0.5, 0.1, device=engine.device)
    records.write(engine.plan, 3, 1.5, 0.5, 0.1, device=engine.device)

    assert [one.step for one in run.read_records(run.metrics_file(tmp_path))] == [1, 2, 2, 3]


def test_lines_of_a_file_that_is_removed_are_read_from_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    file = run.metrics_file(output)
    run.append_record(record(1), file)
    added = run.AddedLines(file)
    run.append_record(record(2), file)
    assert len(added.read()) == 1

    file.unlink()
    assert added.read() == []
    output.rmdir()
    for step in (3, 4):
        run.append_record(record(step), file)
    lines = added.read()

    assert [StepRecord.model_validate_json(line).step for line in lines] == [3, 4]
    file.write_text("cut\n")
    assert added.read() == [b"cut"]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"warning: {file}: No such file or directory; the run goes on without it"]


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(DocumentError, match="link"):
        Metrics(tmp_path).write(record(1))

    assert not (tmp_path / "elsewhere").exists()


def test_a_logger_that_fails_is_named_once_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Flaky:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise RuntimeError("no connection")

        def close(self) -> None:
            raise RuntimeError("no connection")

    steps: list[int] = []

    class Kept:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            steps.append(step)

        def close(self) -> None:
            steps.append(0)

    metrics = Metrics(tmp_path, [Flaky(), Kept()])
    for step in (1, 2):
        metrics.write(record(step))
    metrics.close()

    assert steps == [1, 2, 0]
    said = capsys.readouterr().err
    assert said == "warning: Flaky: no connection; the run goes on without it\n"


def test_a_log_without_room_stops_neither_the_console_nor_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "rank-00000.log"
    log.parent.mkdir()
    (out, its_out), (errors, its_errors) = os.pipe(), os.pipe()
    console = Console(os.fdopen(out, "rb"), os.fdopen(errors, "rb"), log)
    os.close(its_errors)
    many = b"a line of a rank\n" * 10_000  # more than a pipe holds

    with no_room_beyond(100):
        with os.fdopen(its_out, "wb") as rank:
            rank.write(many)
        console.finish()

    assert log.stat().st_size == 100
    assert len(capsys.readouterr().out) == len(many)
