"""Training that goes on, under another plan, where devices are fewer than planned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.recovery import planned
from meshwright.api.commands import plan
from meshwright.launch import launch as launches
from meshwright.launch.fallback_plans import fallback
from meshwright.launch.launch import launch
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.launch.replan import for_fewer, least_moved, leave_out
from meshwright.planner.catalog import model_config as resolve_config
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.document import read, write
from meshwright.planner.documents.events import Attempt, Decision, events_of
from meshwright.planner.documents.plan import Job, Plan, PlannedModel
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.runtime.launch.failure_report import RankFailed
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.recovery_policy import RankEnd
from meshwright.runtime.run.run_folder import events_file, metrics_file, read_records
from tests.limits import PATIENCE_S
from tests.runtime.forked_zygote import ForkedZygote
from tests.runtime.rooms import MODEL, ROOT, Room, plan_of

STEPS = 40


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    made = Room(tmp_path)
    made.text.write_text("the quick brown fox jumps over the lazy dog\n" * 200, encoding="utf-8")
    yield made
    for launcher in made.started:
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()


def two_ranks(room: Room) -> Plan:
    write(MODEL, room.folder / "model.yaml")
    source = str(room.folder / "model.yaml")
    planned = PlannedModel(name="tiny", source=source, digest=MODEL.digest)
    return plan_of(data=2).model_copy(update={"model": planned, "cluster": "local:2"})


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_killed_rank_is_done_without_and_losses_stay_the_same(room: Room) -> None:
    pytest.importorskip("torch")
    plan = two_ranks(room)
    command = [sys.executable, "-m", "meshwright", "launch", str(room.plan(plan)), "--replan"]
    command += ["--data", str(room.text), "--steps", str(STEPS), "--output"]
    command += [str(room.folder / "out"), "--checkpoint", str(room.folder / "saved")]
    launcher = subprocess.Popen(
        [*command, "--checkpoint-every", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    room.started.append(launcher)
    room.wait_for_step(3, while_running=launcher)

    os.kill(room.ranks()[1], signal.SIGKILL)
    said, told = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 0, told
    assert "rank 1 was killed by SIGKILL" in told
    assert "planned again for 1 of 2 devices" in told
    assert "going on from" in told
    assert f"step-{STEPS:06}" in said
    losses = {step.step: step.loss for step in read_records(metrics_file(room.folder / "out"))}
    assert sorted(losses) == list(range(1, STEPS + 1))
    alone = Room(room.folder / "alone")
    alone.folder.mkdir()
    expected = alone.run(plan_of(), data=room.text, steps=STEPS).losses
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, abs=1e-4)


def test_a_plan_for_more_nodes_than_there_are_says_so(
    room: Room, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    begun: list[tuple[LaunchablePlan, Launch]] = []
    monkeypatch.setattr(launches, "run_attempt", lambda fit, asked, _: begun.append((fit, asked)))
    run = LaunchRun(output=room.folder / "out", checkpoint=room.folder / "saved")

    launch(str(planned(room, ranks=1)), run, elastic=True)

    ((fit, asked),) = begun
    assert asked.before is not None
    assert (asked.before.reaction, asked.before.devices) == ("shrink", 1)
    assert asked.before.plan == fit.plan.digest
    assert asked.before.why.startswith("the plan is for 3 nodes (")
    assert "this launch is on 1 (--nodes, --hosts or a" in asked.before.why
    assert f"meshwright: shrink, because {asked.before.why}" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.ranks
def test_why_a_run_begins_under_another_plan_stands_before_its_first_attempt(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(launches, "Zygote", ForkedZygote)
    output = room.folder / "out"
    run = LaunchRun(data=room.text, steps=1, output=output, checkpoint=room.folder / "saved")

    launch(str(planned(room, ranks=1)), run, elastic=True)

    events = events_of(events_file(output).read_bytes().splitlines())
    first, then = [one for one in events if isinstance(one, Attempt | Decision)][:2]
    assert isinstance(first, Decision)
    assert isinstance(then, Attempt)
    assert (first.reaction, first.plan) == ("shrink", then.plan)


@pytest.mark.matrix
def test_a_plan_for_fewer_devices_does_the_same_step(tmp_path: Path) -> None:
    graph, machine = resolve_model("gpt2"), resolve_cluster("8xa10g")
    job = Job(seq_len=1024, global_batch=64)
    wanted = search(Request(graph, machine, job, called="8xa10g")).plan
    training = wanted.training.with_settings(["learning_rate=1e-5"])

    path = for_fewer(
        wanted.model_copy(update={"training": training}),
        graph,
        machine,
        None,
        left=7,
        folder=tmp_path,
    )

    plan = read(Plan, path)
    assert (plan.seq_len, plan.global_batch, plan.precision) == (1024, 64, wanted.precision)
    assert plan.training == training
    # 64 sequences do not divide by 7: fewer devices with whole shares are faster.
    fewer = resolve_cluster(plan.cluster)
    assert plan.mesh.devices == fewer.devices <= 7
    fastest = min(
        search(Request(graph, resolve_cluster(f"{n}xa10g"), job)).prediction.step_time_s
        for n in (4, 7)
    )
    again = search(Request(graph, fewer, job)).prediction.step_time_s
    assert again <= fastest * (1 + 1e-9)


@pytest.mark.matrix
def test_a_plan_for_fewer_devices_finds_the_file_beside_the_first_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dict(resolve_config("gpt2"), n_layer=2)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tiny.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / "sub")
    plan("tiny.json", "8xa10g", seq_len=512, global_batch=16, output="plan.yaml")
    monkeypatch.chdir(tmp_path)

    fit = fallback(
        LaunchablePlan.read("sub/plan.yaml", None),
        4,
        LaunchRun(checkpoint=tmp_path / "saved"),
        quiet=True,
    )

    fit.plan.check_model(fit.graph)
    assert Path(fit.plan.model.source) == tmp_path / "sub" / "tiny.json"


def test_of_plans_that_tie_the_one_most_like_the_first_is_taken() -> None:
    """Three per cent of a step are less than moving all weights."""

    def ranked(step_s: float, **mesh: int) -> Any:
        prediction = SimpleNamespace(step_time_s=step_s)
        return SimpleNamespace(plan=plan_of(**mesh), prediction=prediction)

    fastest, tied, slower = ranked(1.0, data=2), ranked(1.02, tensor=2), ranked(1.04, pipeline=2)
    answer: Any = SimpleNamespace(
        plan=fastest.plan, prediction=fastest.prediction, finalists=(fastest, tied, slower)
    )

    assert least_moved(answer, plan_of(tensor=2, data=2)) == tied.plan
    assert least_moved(answer, plan_of(data=4)) == fastest.plan
    assert least_moved(answer, plan_of(pipeline=2)) == fastest.plan
    assert least_moved(answer, plan_of(tensor=2, pipeline=2)) == tied.plan


def test_what_fits_no_fewer_devices_is_refused(tmp_path: Path) -> None:
    graph, machine = resolve_model("llama-3.2-1b"), resolve_cluster("2xrtx-3080")
    wanted = plan_of(data=2)

    with pytest.raises(LaunchError, match=r"replan: no plan of llama-3\.2-1b fits what is left"):
        for_fewer(wanted, graph, machine, None, left=1, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("needed", [None, 1.5])
@pytest.mark.long("1.5")
def test_a_plan_that_ran_out_of_memory_is_replaced_by_one_that_needs_less(
    tmp_path: Path, needed: float | None
) -> None:
    graph, machine = resolve_model("gpt2"), resolve_cluster("2xrtx-3080")
    found = search(Request(graph, machine, Job(seq_len=1024, global_batch=16), called="2xrtx-3080"))
    fit = LaunchablePlan(
        path="plan.yaml", plan=found.plan, graph=graph, machine=machine, measured=None
    )
    end = RankEnd(cause="out_of_memory", rank=0, after_step=1, needed=needed)

    again = fit.with_less_memory(end, LaunchRun(checkpoint=tmp_path), quiet=True)

    before = max(stage.peak_memory_bytes for stage in found.prediction.stages)
    after = predict(again.plan, graph, again.machine, None)
    assert max(stage.peak_memory_bytes for stage in after.stages) < before
    memory = [one.groups[0].accelerator.memory_bytes for one in (again.machine, machine)]
    assert memory[0] <= memory[1] / (needed or 1.0)
    assert again.plan.global_batch == 16


def test_hosts_of_unknown_memory_are_not_planned_for_less(tmp_path: Path) -> None:
    graph, machine = resolve_model("gpt2"), resolve_cluster("2xrtx-3080")
    unknown = machine.model_copy(
        update={
            "groups": tuple(
                group.model_copy(update={"host_memory_bytes": None}) for group in machine.groups
            )
        }
    )
    job = Job(seq_len=1024, global_batch=16)
    plan = search(Request(graph, unknown, job, called="x")).plan
    fit = LaunchablePlan(path="p", plan=plan, graph=graph, machine=unknown, measured=None)
    end = RankEnd(cause="out_of_memory", rank=0, after_step=1, on_host=True)

    with pytest.raises(LaunchError, match="the memory of its hosts is not known"):
        fit.with_less_memory(end, LaunchRun(checkpoint=tmp_path), quiet=True)


def test_a_lost_device_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    leave_out(1, 4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2,3"
    leave_out(2, 3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_replanning_needs_checkpoints(room: Room) -> None:
    path = room.plan(two_ranks(room))
    with pytest.raises(DocumentError, match="add --checkpoint FOLDER"):
        launch(str(path), LaunchRun(), replan=True)


def test_a_run_that_stops_says_why(
    room: Room, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = room.folder / "out"
    output.mkdir()
    end = RankEnd(cause="hang", rank=1, after_step=7)

    def hangs(*_: Any) -> None:
        raise RankFailed("it hangs", output=output, end=end)

    monkeypatch.setattr(launches, "run_attempt", hangs)

    with pytest.raises(RankFailed, match="it hangs"):
        launch(
            str(room.plan(two_ranks(room))),
            LaunchRun(checkpoint=room.folder / "saved"),
            elastic=True,
        )

    assert "meshwright: stop, because it ended 3 times after the same step" in (
        capsys.readouterr().err
    )
    with events_file(output).open("rb") as lines:
        reactions = [one.reaction for one in events_of(lines) if isinstance(one, Decision)]
    assert reactions == ["restart", "restart", "stop"]
