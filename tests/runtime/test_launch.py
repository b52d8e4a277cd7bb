"""Launches of a tiny model: refused before they start, carried out, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from planner.document import read, write
from planner.errors import DocumentError, LaunchError, MeshwrightError
from planner.model import Architecture, Layer, ModelGraph
from planner.plan import Plan, PlannedModel, Training
from runtime import checkpoint, preflight
from runtime import launch as launching
from runtime import run as files_of
from runtime.launch import launch
from runtime.preflight import cores
from runtime.report import RunReport
from runtime.run import Orders
from runtime.supervise import last_lines

ROOT = Path(files_of.__file__).resolve().parent.parent

MODEL = ModelGraph(
    name="tiny",
    architecture=Architecture(
        family="reference",
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn_size=64,
        vocab_size=258,
        gated_mlp=True,
    ),
    layers=(
        Layer(name="embedding", kind="embedding", parameters=258 * 32),
        Layer(name="block", kind="block", repeat=2, parameters=9280),
        Layer(name="head", kind="head", parameters=32 + 258 * 32),
    ),
)


def plan_of(
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    zero: int = 0,
    training: Training | None = None,
) -> Plan:
    names = [name for name, _ in MODEL.chain]
    cut = len(names) // pipeline
    stages = [names[i * cut : (i + 1) * cut] for i in range(pipeline)]
    return Plan.of(
        {
            "model": {"name": "tiny", "source": "tiny", "digest": MODEL.digest},
            "cluster": "local",
            "seq_len": 16,
            "global_batch": 8,
            "precision": "fp32",
            "mesh": {
                "tensor": tensor,
                "pipeline": pipeline,
                "data_shard" if zero else "data_replicate": data,
            },
            "zero": zero,
            "schedule": "1f1b",
            "micro_batch": 2,
            "micro_batches": 4 // data,
            "training": (training or Training(learning_rate=0.01, warmup_steps=4)).model_dump(),
            "timeout_s": 60.0,
            "stages": [{"layers": [{"layer": name} for name in stage]} for stage in stages],
        }
    )


@dataclass
class Room:
    """A folder with a text, where plans are launched."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    def plan(self, plan: Plan) -> Path:
        path = self.folder / f"{plan.digest[7:]}.yaml"
        write(plan, path)
        return path

    def run(self, plan: Plan, **options: object) -> RunReport:
        settings: dict[str, Any] = {
            "model": MODEL,
            "data": self.text,
            "output": self.folder / "out",
            "quiet": True,
            **options,
        }
        report = launch(self.plan(plan), **settings)
        assert report is not None
        return report

    def start(self, plan: Plan, **options: object) -> subprocess.Popen[str]:
        """Launch from a process of its own and wait for the third step."""
        write(MODEL, self.folder / "model.yaml")
        settings = {"data": str(self.text), "output": str(self.folder / "out"), **options}
        program = (
            "import json, signal, sys\n"
            # A shell's background jobs inherit an ignored interrupt; a launch at a terminal not.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from planner.document import read\n"
            "from planner.errors import MeshwrightError\n"
            "from planner.model import ModelGraph\n"
            "from runtime.launch import launch\n"
            "try:\n"
            "    model = read(ModelGraph, sys.argv[2])\n"
            "    launch(sys.argv[1], model=model, **json.loads(sys.argv[3]))\n"
            "except MeshwrightError as error:\n"
            "    sys.exit(str(error))\n"
        )
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-c",
                program,
                str(self.plan(plan)),
                str(self.folder / "model.yaml"),
                json.dumps(settings),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(launcher)
        self.wait_for_step(3, while_running=launcher)
        return launcher

    def wait_for_step(self, step: int, *, while_running: subprocess.Popen[str] | None) -> None:
        metrics = files_of.metrics_file(self.folder / "out")
        for _ in range(1200):
            if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
                return
            if while_running is not None and while_running.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(last_lines(files_of.log_file(self.folder / "out", 0)))

    def ranks(self) -> dict[int, int]:
        """Return the process of each living rank of the newest run here."""
        token = f"MESHWRIGHT_RUN={read(Orders, self.folder / 'out' / 'orders.yaml').run}"
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().decode(errors="replace")
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            variables = environment.split("\0")
            if token in variables and state != "Z":
                rank = next(v for v in variables if v.startswith("RANK="))
                found[int(rank.removeprefix("RANK="))] = int(process.name)
        return found

    def wait_until_empty(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.ranks() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.ranks() == {}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """Set up a room; whatever runs there at the end of the test is an orphan, and ended."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(preflight, "cuda_devices", lambda: 0)
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 200)
    result = Room(tmp_path)
    yield result
    for launcher in result.started:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()
    if (tmp_path / "out" / "orders.yaml").exists():
        orphans = result.ranks()
        for process in orphans.values():
            os.kill(process, signal.SIGKILL)
        assert orphans == {}


ENOUGH = 1_000_000  # steps that no test waits for


# What is refused before anything starts ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "moon"}, "on: 'moon' is not known here; known: local"),
        ({"steps": 0}, "steps: is 0; it must be more than 0"),
        ({"max_seconds": -1.0}, "max_seconds: is -1.0; it must be more than 0"),
        ({"checkpoint_every": 5}, "checkpoint_every: name the folder of the checkpoints"),
        ({"resume": True}, "resume: name the folder of the checkpoints"),
        ({"data": "nowhere.txt"}, "nowhere.txt: does not exist; give a text file or a folder"),
        ({"weights": "nowhere"}, r"nowhere: is no folder with \*\.safetensors"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    room: Room, options: dict[str, object], message: str
) -> None:
    with pytest.raises(MeshwrightError, match=message):
        room.run(plan_of(), **options)
    assert not (room.folder / "out" / "orders.yaml").exists()


def test_a_plan_for_another_model_is_refused(room: Room) -> None:
    stranger = plan_of().model_copy(
        update={"model": PlannedModel(name="tiny", source="tiny", digest="sha256:other")}
    )

    with pytest.raises(DocumentError, match=r"\.yaml: model\.digest: is sha256:other"):
        room.run(stranger)


def test_a_model_is_looked_up_by_its_source(room: Room) -> None:
    """gpt2 is in the catalogue; this plan's digest is that of the tiny model."""
    plan = plan_of().model_copy(
        update={"model": PlannedModel(name="gpt2", source="gpt2", digest=MODEL.digest)}
    )

    with pytest.raises(DocumentError, match="but gpt2 has sha256:"):
        room.run(plan, model=None)


def test_a_model_that_reads_no_text_is_refused(room: Room) -> None:
    assert MODEL.architecture is not None
    classifier = MODEL.model_copy(
        update={"architecture": MODEL.architecture.model_copy(update={"classes": 10})}
    )
    plan = plan_of().model_copy(
        update={"model": PlannedModel(name="tiny", source="tiny", digest=classifier.digest)}
    )

    with pytest.raises(LaunchError, match="tiny: reads images or predicts classes"):
        room.run(plan, model=classifier)


def test_more_ranks_than_this_machine_carries_are_refused(room: Room) -> None:
    plan = plan_of(data=4, tensor=4, pipeline=cores() // 2 + 1)

    with pytest.raises(LaunchError, match=r"needs \d+ ranks .* at most \d+\. Plan again"):
        room.run(plan)


def test_more_ranks_than_accelerators_are_refused(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "cuda_devices", lambda: 1)

    with pytest.raises(LaunchError, match=r"needs 2 devices .*; this machine has 1"):
        room.run(plan_of(data=2))


def test_a_vocabulary_too_small_for_the_data_is_refused(room: Room) -> None:
    assert MODEL.architecture is not None
    small = MODEL.model_copy(
        update={"architecture": MODEL.architecture.model_copy(update={"vocab_size": 256})}
    )
    plan = plan_of().model_copy(
        update={"model": PlannedModel(name="tiny", source="tiny", digest=small.digest)}
    )

    with pytest.raises(DocumentError, match="vocab_size: is 256, but tokens by bytes reach 256"):
        launch(room.plan(plan), model=small, data=room.text, output=room.folder / "out", quiet=True)


def test_an_output_that_cannot_be_written_is_refused(room: Room) -> None:
    with pytest.raises(LaunchError, match=r"text\.txt: cannot be written"):
        room.run(plan_of(), output=room.text)


def test_a_folder_in_use_is_refused(room: Room) -> None:
    (room.folder / "out").mkdir()

    with (
        launching._alone_in(room.folder / "out"),
        pytest.raises(LaunchError, match="out: another launch is using it"),
    ):
        room.run(plan_of())


def fake_checkpoint(folder: Path, step: int) -> Path:
    """Write what counts as a complete checkpoint."""
    path = folder / f"step-{step:06}"
    path.mkdir(parents=True)
    (path / ".metadata").touch()
    files_of.write_json(
        checkpoint.Progress(
            step=step,
            sample=8 * step,
            epoch=0,
            seq_len=16,
            seed=0,
            model="tiny",
            model_digest=MODEL.digest,
            plan_digest="sha256:x",
            corpus="x",
            corpus_digest="sha256:other",
            loss=1.0,
        ),
        path / "meta.json",
    )
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "already holds a checkpoint of step 30; resume it, or name another"),
        ({"resume": True, "steps": 30}, "step-000030: has done 30 steps and 30 are asked for"),
        ({"resume": True, "steps": 31}, "step-000030: corpus_digest: is sha256:other"),
    ],
)
def test_checkpoints_are_neither_overwritten_nor_misused(
    room: Room, options: dict[str, object], message: str
) -> None:
    fake_checkpoint(room.folder / "saved", 30)

    with pytest.raises(MeshwrightError, match=message):
        room.run(plan_of(), checkpoint=room.folder / "saved", **options)


def test_resuming_nothing_is_refused(room: Room) -> None:
    (fake_checkpoint(room.folder / "saved", 30) / "meta.json").unlink()

    with pytest.raises(LaunchError, match="there is no complete checkpoint to resume"):
        room.run(plan_of(), checkpoint=room.folder / "saved", resume=True)


def test_a_dry_run_prints_one_line_per_rank_and_starts_nothing(
    room: Room, capsys: pytest.CaptureFixture[str]
) -> None:
    result = launch(
        room.plan(plan_of(data=2)),
        model=MODEL,
        data=room.text,
        output=room.folder / "out",
        dry_run=True,
    )

    printed = capsys.readouterr().out.splitlines()
    assert result is None
    assert len(printed) == 2
    for rank, line in enumerate(printed):
        for word in (f"RANK={rank} ", "WORLD_SIZE=2", "PYTHONSAFEPATH=1", "OMP_NUM_THREADS=1"):
            assert word in line
        assert line.endswith(f"-m runtime.rank {room.folder}/out/orders.yaml")
    assert not (room.folder / "out").exists()


def test_launching_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import runtime.launch, runtime.data, runtime.checkpoint, runtime.report, runtime.run\n"
    )

    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )


# What runs --------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.timeout(280)
def test_any_plan_goes_on_from_a_checkpoint_of_two_data_ranks(room: Room) -> None:
    pytest.importorskip("torch")
    whole = room.run(plan_of(data=2), steps=7)
    saved = room.folder / "saved"
    begun = room.run(plan_of(data=2), steps=4, checkpoint=saved, checkpoint_every=2)
    assert begun.checkpoint == str(saved / "step-000004")
    assert begun.losses == pytest.approx(whole.losses[:4], rel=1e-6)

    for number, plan in enumerate((plan_of(), plan_of(tensor=2), plan_of(pipeline=2))):
        copied = room.folder / f"saved-{number}"
        subprocess.run(["cp", "-r", str(saved), str(copied)], check=True)
        rest = room.run(plan, steps=7, checkpoint=copied, resume=True)

        assert rest.first_step == 5
        assert rest.losses == pytest.approx(whole.losses[4:], rel=2e-5), plan.layout.text()
        lines = [r.step for r in files_of.read_records(Path(rest.metrics))]
        assert lines == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.ranks
def test_a_run_reports_what_it_measured(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")

    report = room.run(plan_of(pipeline=2), steps=6, quiet=False)

    assert (report.steps, report.ranks, report.timed_steps, report.stopped) == (6, 2, 4, "steps")
    assert report.step_time_s is not None
    assert report.tokens_per_s == pytest.approx(8 * 16 / report.step_time_s)
    assert report.losses[-1] < report.losses[0]
    weights_bytes = 4 * min(258 * 32 + 9280, 258 * 32 + 32 + 9280)
    for stage in report.stages:
        assert stage.peak_memory_bytes is not None
        # Weights, gradients and two moments in fp32, and some activations.
        assert 4 * weights_bytes < stage.peak_memory_bytes < 40 * weights_bytes
    assert RunReport.parse((room.folder / "out" / "report.json").read_text()) == report
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "step 6/6  loss " in captured.err


@pytest.mark.ranks
def test_a_killed_rank_ends_the_launch_and_is_named(room: Room) -> None:
    pytest.importorskip("torch")
    saved = room.folder / "saved"
    launcher = room.start(plan_of(data=2), steps=ENOUGH, checkpoint=str(saved), checkpoint_every=1)
    ranks = room.ranks()
    assert sorted(ranks) == [0, 1]

    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    _, message = launcher.communicate(timeout=30)

    assert launcher.returncode == 1
    assert time.monotonic() - begin < 30
    assert "rank 1 was killed by SIGKILL" in message
    assert f"; {saved}/step-" in message
    assert "is complete and can be resumed" in message
    assert room.ranks() == {}


@pytest.mark.ranks
def test_a_rank_that_hangs_ends_the_launch_when_the_time_is_over(room: Room) -> None:
    pytest.importorskip("torch")
    plan = plan_of(data=2).model_copy(update={"timeout_s": 5.0})
    launcher = room.start(plan, steps=ENOUGH)

    os.kill(room.ranks()[1], signal.SIGSTOP)
    _, message = launcher.communicate(timeout=30)

    assert launcher.returncode == 1
    assert "rank 0 waited 5 s (the plan's timeout_s) for other ranks (ranks 1 said" in message
    assert room.ranks() == {}


@pytest.mark.ranks
def test_ranks_do_not_outlive_a_launcher_that_is_killed(room: Room) -> None:
    pytest.importorskip("torch")
    launcher = room.start(plan_of(data=2), steps=ENOUGH)
    assert len(room.ranks()) == 2

    launcher.kill()
    launcher.communicate()

    room.wait_until_empty(2.0)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launch_ends_all_and_says_how_far_it_came(
    room: Room, number: signal.Signals
) -> None:
    pytest.importorskip("torch")
    launcher = room.start(plan_of(), steps=ENOUGH)

    launcher.send_signal(number)
    _, message = launcher.communicate(timeout=30)

    assert launcher.returncode == 1
    assert "interrupted after step" in message
    assert "nothing was saved" in message
    assert room.ranks() == {}


@pytest.mark.ranks
def test_nonsense_in_training_is_told_in_one_message(room: Room) -> None:
    pytest.importorskip("torch")
    wild = Training(learning_rate=1e30, clip_norm=0.0)

    with pytest.raises(LaunchError, match=r"^step \d gave loss .*Lower the learning rate"):
        room.run(plan_of(training=wild), steps=9)
    assert room.ranks() == {}


@pytest.mark.ranks
def test_a_launch_from_another_thread_runs_too(room: Room) -> None:
    pytest.importorskip("torch")
    reports: list[RunReport] = []

    thread = threading.Thread(target=lambda: reports.append(room.run(plan_of(), steps=2)))
    thread.start()
    thread.join(120)

    assert [report.steps for report in reports] == [2]
