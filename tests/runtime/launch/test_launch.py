"""Launches of a tiny model: refused before they start, carried out, killed and resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Plan, PlannedModel
from meshwright.planner.errors import DocumentError, LaunchError, MeshwrightError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.launch import preflight
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.preflight import cores
from meshwright.runtime.run import run_folder as files_of
from meshwright.runtime.run.locks_and_signals import alone_in
from meshwright.runtime.run.run_report import RunReport
from tests.limits import PATIENCE_S
from tests.runtime.forked_zygote import ForkedZygote
from tests.runtime.rooms import ENOUGH, MODEL, ROOT, Room, plan_of

# What is refused before anything starts ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"or_start": True}, "or_start: needs resume"),
        ({"steps": 0}, "steps: is 0; it must be more than 0"),
        ({"max_seconds": -1.0}, "max_seconds: is -1; it must be more than 0"),
        ({"max_seconds": float("nan")}, "max_seconds: is nan; it must be more than 0"),
        ({"steps": 10**18}, r"steps: is 1e\+18; it must be more than 0, at most"),
        ({"training": ["beta1=65537"]}, "beta1: is 65537; input should be less than 1"),
        ({"training": ["beta2=1.0"]}, "beta2: is 1.0; input should be less than 1"),
        ({"checkpoint_every": 5}, "checkpoint_every: name the folder of the checkpoints"),
        ({"resume": True}, "resume: name the folder of the checkpoints"),
        ({"data": "nowhere.txt"}, "nowhere.txt: does not exist; give a text file or a folder"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: is 0; it must be more than 0"),
        ({"evaluate_every": 5}, "evaluate_every: name the held-out text too"),
        ({"evaluate": "nowhere.txt"}, "nowhere.txt: does not exist"),
        ({"training": ["clip=1"]}, "training: has no setting 'clip'"),
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
        launch(Launch(room.plan(plan), room.asked({}), model=small, quiet=True))


def test_an_output_that_cannot_be_written_is_refused(room: Room) -> None:
    with pytest.raises(LaunchError, match=r"text\.txt: cannot be written"):
        room.run(plan_of(), output=room.text)


def test_a_folder_in_use_is_refused(room: Room) -> None:
    (room.folder / "out").mkdir()

    with (
        alone_in(room.folder / "out"),
        pytest.raises(LaunchError, match="out: another launch is using it"),
    ):
        room.run(plan_of())


def fake_checkpoint(folder: Path, step: int) -> Path:
    """Write what counts as a complete checkpoint."""
    path = folder / f"step-{step:06}"
    path.mkdir(parents=True)
    (path / "tensors.json").touch()
    done = checkpoint.Progress(
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
        used=SampleDigest.of_first(8 * step),
    )
    checkpoint.finish(path, done, written=())
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "already has a checkpoint of step 30; resume it, or name another"),
        ({"resume": True, "steps": 30}, "step-000030: has done 30 steps and 30 are requested"),
        ({"resume": True, "steps": 31}, "step-000030: corpus_digest: is sha256:other"),
    ],
)
def test_checkpoints_are_neither_overwritten_nor_misused(
    room: Room, options: dict[str, object], message: str
) -> None:
    fake_checkpoint(room.folder / "saved", 30)

    with pytest.raises(MeshwrightError, match=message):
        room.run(plan_of(), checkpoint=room.folder / "saved", **options)


def test_a_checkpoint_is_not_taken_for_a_folder_of_them(room: Room) -> None:
    saved = fake_checkpoint(room.folder / "saved", 30)

    with pytest.raises(LaunchError, match="step-000030: is a checkpoint; name the folder that it"):
        room.run(plan_of(), checkpoint=saved, resume=True, or_start=True)
    assert not (saved / ".lock").exists()


def test_text_that_is_trained_on_is_not_held_out(room: Room) -> None:
    with pytest.raises(LaunchError, match=r"evaluate: .*text.txt is what is trained on"):
        room.run(plan_of(), evaluate=room.text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tensorboard", True), ("wandb", "p"), ("mlflow", "e"), ("opentelemetry", "http://x")],
)
def test_a_logger_that_is_not_installed_is_refused(
    name: str, value: object, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(LaunchError, match=f"{name}: is not installed; install it with"):
        room.run(plan_of(), **{name: value})


def test_resuming_nothing_is_refused(room: Room) -> None:
    with pytest.raises(LaunchError, match="there is no checkpoint to resume"):
        room.run(plan_of(), checkpoint=room.folder / "saved", resume=True)


def test_a_dry_run_prints_one_line_per_rank_and_starts_nothing(
    room: Room, capsys: pytest.CaptureFixture[str]
) -> None:
    result = launch(
        Launch(
            room.plan(plan_of(data=2)),
            room.asked({}),
            model=MODEL,
            dry_run=True,
        )
    )

    printed = capsys.readouterr().out.splitlines()
    assert result is None
    assert len(printed) == 2
    for rank, line in enumerate(printed):
        for word in (f"RANK={rank} ", "WORLD_SIZE=2", "PYTHONSAFEPATH=1", "OMP_NUM_THREADS=1"):
            assert word in line
        assert line.endswith(
            f"-m meshwright.runtime.launch.rank_main {room.folder}/out/orders.yaml"
        )
    assert not (room.folder / "out").exists()


def test_launching_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import meshwright.runtime.launch.launch, meshwright.runtime.data.corpus\n"
        "import meshwright.runtime.checkpoint.checkpoint\n"
        "import meshwright.runtime.run.run_report, meshwright.runtime.run.run_folder\n"
    )

    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=PATIENCE_S,
    )


# What runs --------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.matrix
def test_another_plan_goes_on_from_a_checkpoint_of_two_data_ranks(room: Room) -> None:
    pytest.importorskip("torch")
    whole = room.run(plan_of(data=2), steps=7)
    saved = room.folder / "saved"
    # What a job that is started again says every time.
    again = {"resume": True, "or_start": True}
    begun = room.run(plan_of(data=2), steps=4, checkpoint=saved, checkpoint_every=2, **again)
    assert begun.checkpoint == str(saved / "step-000004")
    assert begun.losses == pytest.approx(whole.losses[:4], rel=1e-6)

    rest = room.run(plan_of(pipeline=2), steps=7, checkpoint=saved, **again)

    assert rest.first_step == 5
    assert rest.losses == pytest.approx(whole.losses[4:], rel=2e-5)
    lines = [r.step for r in files_of.read_records(Path(rest.metrics))]
    assert lines == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.ranks
def test_a_run_reports_what_it_measured(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")

    held_out = room.folder / "held out.txt"
    held_out.write_text("Every unhappy family is unhappy in its own way. " * 20)

    prediction = predict(plan_of(pipeline=2), MODEL, resolve_cluster("2xh100-sxm-80gb"))
    report = room.run(
        plan_of(pipeline=2),
        steps=6,
        quiet=False,
        training=["learning_rate=0.02", "rate_schedule=linear", "rate_steps=8"],
        evaluate=held_out,
        evaluate_every=3,
        prediction=prediction,
    )

    assert (report.steps, report.ranks, report.timed_steps, report.stopped) == (6, 2, 4, "steps")
    assert [evaluation.step for evaluation in report.evaluations] == [3, 6]
    assert report.evaluations[1].loss < report.evaluations[0].loss
    rates = [r.learning_rate for r in files_of.read_records(Path(report.metrics))]
    assert rates == pytest.approx([0.005, 0.01, 0.015, 0.02, 0.02, 0.015])
    assert report.step_time_s is not None
    assert report.tokens_per_s == pytest.approx(8 * 16 / report.step_time_s)
    at_peak_s = prediction.mfu * prediction.step_time_s
    assert report.mfu == pytest.approx(at_peak_s / report.step_time_s)
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
    assert "held-out loss " in captured.err


@pytest.mark.ranks
def test_a_killed_rank_ends_the_launch_and_is_named(room: Room) -> None:
    pytest.importorskip("torch")
    saved = room.folder / "saved"
    launcher = room.start(plan_of(data=2), steps=ENOUGH, checkpoint=str(saved), checkpoint_every=1)
    ranks = room.ranks()
    assert sorted(ranks) == [0, 1]

    os.kill(ranks[1], signal.SIGKILL)
    _, message = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 1
    assert "rank 1 was killed by SIGKILL" in message
    assert f"; {saved}/step-" in message
    assert "is complete and can be resumed" in message
    assert room.ranks() == {}


FLIPPED = """
import os

if os.environ.get("RANK") == "1":
    from meshwright.runtime.engine.engine import Engine

    step = Engine.step

    def damaged(engine, *args, **kwargs):
        result = step(engine, *args, **kwargs)
        held = engine.state()["model.block.0.mlp.down.weight"].detach()
        held.view(-1).view(dtype=__import__("torch").int32)[5] ^= 1 << 12
        return result

    Engine.step = damaged
"""
"""Of one of two ranks, whose memory has one bit that is another after each step."""


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_bit_that_flips_on_one_rank_ends_the_launch_before_a_checkpoint_has_it(
    room: Room,
) -> None:
    pytest.importorskip("torch")
    room.begin_with(FLIPPED)
    saved = room.folder / "saved"

    launcher = room.start(
        plan_of(data=2), step=0, steps=20, checkpoint=str(saved), checkpoint_every=1
    )
    _, message = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 1
    assert "block.0.mlp.down.weight: ranks 0 and 1 have different values of this" in message
    assert not list(saved.glob("step-*"))
    assert room.ranks() == {}


def patient_start(room: Room) -> tuple[subprocess.Popen[str], int]:
    """Start with a short timeout; where ranks need longer to find each other, with a long one."""
    for timeout_s in (5, 60, 600):
        plan = plan_of(data=2).model_copy(update={"timeout_s": float(timeout_s)})
        with contextlib.suppress(AssertionError):
            return room.start(plan, steps=ENOUGH), timeout_s
    raise AssertionError("ranks do not find each other")


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_rank_that_hangs_ends_the_launch_when_the_time_is_over(room: Room) -> None:
    pytest.importorskip("torch")
    launcher, timeout_s = patient_start(room)

    os.kill(room.ranks()[1], signal.SIGSTOP)
    _, message = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 1
    assert (
        f"rank 0 waited {timeout_s} s (the plan's timeout_s) for other ranks (ranks 1 said"
        in message
    )
    assert room.ranks() == {}


@pytest.mark.ranks
@pytest.mark.matrix  # in every run: test_one_node_faults.py
def test_ranks_do_not_outlive_a_launcher_that_is_killed(room: Room) -> None:
    pytest.importorskip("torch")
    launcher = room.start(plan_of(data=2), steps=ENOUGH)
    assert len(room.ranks()) == 2

    launcher.kill()
    launcher.communicate()

    room.wait_until_empty()


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_folder_that_disappears_ends_the_launch_in_words(room: Room) -> None:
    pytest.importorskip("torch")
    launcher = room.start(plan_of(), steps=ENOUGH)
    (metrics,) = room.folder.rglob("metrics.jsonl")
    ranks = room.ranks()

    metrics.parent.rename(room.folder / "elsewhere")
    _, message = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 1
    assert f"Do not change the folder of the run, {metrics.parent}, while it runs" in message
    assert "Traceback" not in message
    assert not any(Path(f"/proc/{process}").exists() for process in ranks.values())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)]
)
def test_an_interrupted_launch_ends_all_and_says_how_far_it_came(
    room: Room, number: signal.Signals
) -> None:
    pytest.importorskip("torch")
    launcher = room.start(plan_of(), steps=ENOUGH)

    launcher.send_signal(number)
    _, message = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 1
    assert "interrupted after step" in message
    assert "nothing was saved" in message
    assert room.ranks() == {}


WILD = """
from torch import nn

class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("inf")

def factory():
    return [nn.Embedding(258, 8), Head(8, 258)]
"""


@pytest.mark.ranks
def test_nonsense_in_training_is_told_in_one_message(room: Room) -> None:
    pytest.importorskip("torch")
    from meshwright.runtime.engine.factory_module import graph_of_factory

    source = f"{room.folder}/wild.py:factory"
    Path(source.partition(":")[0]).write_text(WILD)
    graph = graph_of_factory(source, seq_len=16)
    names = [{"layer": name} for name, _ in graph.chain]
    plan = Plan.of(
        {
            **plan_of().model_dump(mode="json", exclude_none=True),
            "model": {"name": graph.name, "source": source, "digest": graph.digest},
            "stages": [{"layers": names}],
        }
    )

    with pytest.raises(LaunchError, match=r"^step 1 gave loss .*Lower the learning rate"):
        room.run(plan, model=graph, steps=9)
    assert room.ranks() == {}


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_launch_from_another_thread_runs_too(room: Room) -> None:
    pytest.importorskip("torch")
    reports: list[RunReport] = []

    with ForkedZygote() as ranks:
        thread = threading.Thread(
            target=lambda: reports.append(room.run_by(ranks, plan_of(), steps=2))
        )
        thread.start()
        thread.join(PATIENCE_S)

    assert [report.steps for report in reports] == [2]
