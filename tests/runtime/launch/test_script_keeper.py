"""`meshwright run --elastic --checkpoint`: a script goes on bit for bit, with its own state."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright
from meshwright.api.inputs import machine_of
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import write
from meshwright.planner.errors import HandedOver, LaunchError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.engine import engine_state
from meshwright.runtime.launch.script_keeper import DoubtfulStep, ScriptKeeper
from meshwright.runtime.run import run_folder as run
from tests.limits import PATIENCE_S
from tests.runtime.ports import free_port
from tests.runtime.rooms import ROOT

SCRIPT = '''
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import meshwright

class Seen:
    """What a loop has trained on; not iterated over."""
    def __init__(self):
        self.samples = []
    def state_dict(self):
        return {"samples": self.samples}
    def load_state_dict(self, state):
        self.samples = list(state["samples"])

class Foreign:
    """A loader of somebody else's: it knows what it gave away."""
    def __init__(self, batches):
        self.batches, self.given = batches, 0
    def __iter__(self):
        while self.given < 1000:
            self.given += 1
            yield self.batches(self.given)
    def state_dict(self):
        return {"given": self.given}
    def load_state_dict(self, state):
        self.given = state["given"]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(2, generator=generator)

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def batch_of(number):
    return torch.utils.data.default_collate([Data()[(8 * number + i) % 80] for i in range(8)])

def loss(out, batch):
    return (out - batch[1]).square().sum(), out.numel()

def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

def fault(name, at, engine, batch):
    if engine.slice_rank != engine.slices - 1 or engine.steps != at or Path("did").exists():
        return
    Path("did").touch()
    if name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "eio":
        raise OSError(5, "Input/output error")
    if name == "bug":
        raise ZeroDivisionError("a bug")
    if name == "data":
        Path("did").unlink()
    if name in ("nan", "data"):
        batch[0].mul_(float("nan"))

def begin(foreign):
    engine = meshwright.Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    own = Foreign(lambda number: engine.slice(batch_of(number)))
    extra = {
        "loader": own if foreign else engine.loader(Data(), shuffle=True),
        "seen": Seen(),
        "rate": torch.optim.lr_scheduler.StepLR(engine.optimizer, 3, 0.9),
    }
    return engine, extra

def train(engine, extra, steps, name="", at=0):
    while engine.steps < steps:
        for batch in extra["loader"]:
            fault(name, at, engine, batch)
            engine.step(batch)
            extra["rate"].step()
            extra["seen"].samples.append(float(batch[0].sum()))
            if name:
                time.sleep(0.03)
            if engine.steps == steps:
                break

if __name__ == "__main__":
    name, at = sys.argv[1], int(sys.argv[2])
    engine, extra = begin(foreign=False)
    engine.resume(extra=extra)
    train(engine, extra, 40, name, at)
    weights = engine.state_dict()
    if engine.leads:
        left = {"weights": weights, "seen": extra["seen"].samples, "rate": extra["rate"].get_last_lr()}
        torch.save(left, "end.pt")
'''  # noqa: E501


@pytest.fixture
def script() -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "train"}
    exec(compile(SCRIPT, "train.py", "exec"), space)
    return space


@pytest.fixture(autouse=True)
def keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ScriptKeeper]]:
    """Every engine of a test is kept, and saved after each third step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CHECKPOINT", str(tmp_path / "saved"))
    monkeypatch.setenv("MESHWRIGHT_CHECKPOINT_EVERY", "3")
    made: list[ScriptKeeper] = []

    def keeper_of(engine: Any) -> ScriptKeeper:
        engine_state.keep_first_engine_by(keeper_of)  # and the next one
        made.append(ScriptKeeper(engine))
        return made[-1]

    engine_state.keep_first_engine_by(keeper_of)
    yield made
    engine_state._factories.clear()


def ended(engine: Any, extra: dict[str, Any]) -> tuple[Any, ...]:
    weights = {name: value.tolist() for name, value in engine.state_dict().items()}
    return weights, extra["seen"].samples, extra["rate"].get_last_lr()


@pytest.mark.parametrize("foreign", [False, True])
def test_a_script_that_is_cut_off_goes_on_with_the_state_of_one_moment(
    script: dict[str, Any], tmp_path: Path, *, foreign: bool
) -> None:
    """The scheduler is stepped and samples are noted behind a step; a loader reads before it."""
    engine, extra = script["begin"](foreign)
    assert not engine.resume(extra=extra)
    script["train"](engine, extra, 14)
    expected = ended(engine, extra)
    saved = checkpoint.newest(tmp_path / "saved")
    assert saved is not None
    assert checkpoint.progress(saved).step == 12

    again, extra = script["begin"](foreign)
    assert again.resume(extra=extra)
    assert again.steps == 12
    script["train"](again, extra, 14)
    assert ended(again, extra) == expected


def test_what_was_done_last_is_saved_at_the_end(
    script: dict[str, Any], tmp_path: Path, keepers: list[ScriptKeeper]
) -> None:
    engine, extra = script["begin"](False)
    engine.resume(extra=extra)
    script["train"](engine, extra, 5)

    keepers[0].finish()

    saved = checkpoint.newest(tmp_path / "saved")
    assert saved is not None
    assert checkpoint.progress(saved).step == 5


def test_the_last_save_ends_well_or_not_at_all(
    script: dict[str, Any],
    tmp_path: Path,
    keepers: list[ScriptKeeper],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A save before it is tried again; the last state is copied into memory, and then it ends."""
    engine, extra = script["begin"](False)
    engine.resume(extra=extra)
    copied: list[int] = []
    keepers[0]._mirror = SimpleNamespace(is_due=lambda step: False)  # type: ignore[assignment]
    monkeypatch.setattr(keepers[0], "_copy", lambda mirror, step, states: copied.append(step))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise LaunchError("No space left on device")

    monkeypatch.setattr(engine, "save", fail)
    script["train"](engine, extra, 5)
    assert "No space left on device; training continues" in capfd.readouterr().err
    assert copied == []
    with pytest.raises(LaunchError, match="No space left"):
        keepers[0].finish()
    assert copied == [5]


def test_a_step_that_ruins_parameters_is_not_saved(script: dict[str, Any], tmp_path: Path) -> None:
    """A loss alone that is no number ruins nothing; done again, a step may be well."""
    engine, extra = script["begin"](False)
    engine.resume(extra=extra)
    script["train"](engine, extra, 6)
    batch = script["batch_of"](0)
    assert not math.isfinite(float(engine.step([batch[0], batch[1] * 1e19]).loss))
    with pytest.raises(DoubtfulStep, match="step 8 gave loss nan"):
        engine.step([batch[0], batch[1] * math.nan])

    saved = checkpoint.newest(tmp_path / "saved")
    assert saved is not None
    assert checkpoint.progress(saved).step == 6


def test_another_folder_or_global_batch_is_refused(script: dict[str, Any], tmp_path: Path) -> None:
    engine, extra = script["begin"](False)
    with pytest.raises(LaunchError, match="meshwright run saves in"):
        engine.resume(tmp_path / "other", extra=extra)
    engine.resume(extra=extra)
    script["train"](engine, extra, 4)
    half = [torch.randn(4, 4), torch.randn(4, 2)]
    other = meshwright.Engine(
        script["build"], loss=script["loss"], optimizer=script["sgd"], batch=half
    )
    with pytest.raises(LaunchError, match="a global batch of 8, and the plan has 4"):
        other.resume(extra={"rate": extra["rate"]})


def test_a_notice_saves_and_hands_over(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "notice"
    monkeypatch.setenv("MESHWRIGHT_NOTICE", str(file))
    engine, extra = script["begin"](False)
    engine.resume(extra=extra)
    script["train"](engine, extra, 1)
    file.touch()
    with pytest.raises(HandedOver, match="after step 2"):
        script["train"](engine, extra, 9)
    saved = checkpoint.newest(tmp_path / "saved")
    assert saved is not None
    assert checkpoint.progress(saved).step == 2


def test_a_run_that_grows_ends_behind_a_save(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_GROW", str(tmp_path / "grow"))
    engine, extra = script["begin"](False)
    engine.resume(extra=extra)
    script["train"](engine, extra, 4)
    (tmp_path / "grow").touch()

    with pytest.raises(HandedOver, match="more nodes"):
        script["train"](engine, extra, 9)

    saved = checkpoint.newest(tmp_path / "saved")
    assert saved is not None
    assert checkpoint.progress(saved).step == engine.steps == 6


def started(folder: Path, name: str, at: int = 21) -> subprocess.CompletedProcess[str]:
    words = ("run", "--plan", "plan.yaml", "--elastic", "--checkpoint", "saved", "-o", "out")
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words, "train.py", name, str(at)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
        check=False,
    )


def environment() -> dict[str, str]:

    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHWRIGHT")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["kill", "stop", "eio", "nan", "bug", "data"])
def test_under_a_script_faults_cost_what_they_cost_under_launch(
    script: dict[str, Any], tmp_path: Path, name: str
) -> None:
    engine_state._factories.clear()
    plan = meshwright.plan(
        script["build"],
        "local:2",
        batch=script["batch_of"](0),
        loss=script["loss"],
        global_batch=8,
        fix=["zero=3"],
    )
    write(plan, tmp_path / "plan.yaml")
    (tmp_path / "train.py").write_text(SCRIPT)

    done = started(tmp_path, name)

    saved = checkpoint.newest(tmp_path / "saved")
    assert saved is not None
    if name == "data":
        assert done.returncode == 1
        assert done.stderr.count("restart, because") == 1
        assert "stop, because the same step gave no number again" in done.stderr
        assert 3 <= checkpoint.progress(saved).step <= 21  # the newest copy
        return
    if name == "bug":
        assert done.returncode == 1
        assert 3 <= checkpoint.progress(saved).step <= 21
        assert f"{saved} is complete" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "restart, because" in done.stderr
        assert "resuming from the copy in memory of step" in done.stderr
    faulty = torch.load(tmp_path / "end.pt") if name != "bug" else None
    if faulty is None:
        assert started(tmp_path, "none", 0).returncode == 0
        faulty = torch.load(tmp_path / "end.pt")
    folder = tmp_path / "saved"
    folder.rename(tmp_path / "before")
    assert started(tmp_path, "none", 0).returncode == 0
    plain = torch.load(tmp_path / "end.pt")
    assert faulty["seen"] == plain["seen"]
    assert faulty["rate"] == plain["rate"]
    assert all(
        torch.equal(faulty["weights"][key], plain["weights"][key]) for key in plain["weights"]
    )


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_spare_takes_the_place_of_a_node_under_a_script_and_one_node_goes_on_alone(
    script: dict[str, Any], tmp_path: Path
) -> None:
    """Node 1 is killed, then the lead: a spare comes, then the plan is one for a single rank."""
    engine_state._factories.clear()
    one = machine_of("local:1", None).model_dump(mode="json", exclude_none=True)
    groups = [{**group, "nodes": 2} for group in one["groups"]]
    tiers = [{"name": "net", "devices": 2, "latency_s": 1e-4, "bytes_per_s": 1e9}]
    cluster = tmp_path / "cluster.yaml"
    write(ClusterSpec.of({**one, "name": "two", "groups": groups, "tiers": tiers}), cluster)
    plan = meshwright.plan(
        script["build"],
        str(cluster),
        batch=script["batch_of"](0),
        loss=script["loss"],
        global_batch=8,
        fix=["zero=3"],
    )
    write(plan, tmp_path / "plan.yaml")
    (tmp_path / "train.py").write_text(SCRIPT.replace("time.sleep(0.03)", "time.sleep(0.3)"))
    port = free_port()

    def node(number: int) -> subprocess.Popen[bytes]:
        words = ("run", "--plan", "plan.yaml", "--elastic", "--checkpoint", "saved", "-o", "out")
        nodes = ("--nodes", "3", "--node", str(number), "--rendezvous", f"127.0.0.1:{port}")
        with (tmp_path / f"node-{number}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "meshwright", *words, *nodes, "train.py", "slow", "99"],
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                env={**environment(), "MESHWRIGHT_SECRET": "a secret of this test alone"},
            )

    def wait_for_step(step: int) -> None:
        until_s = time.monotonic() + PATIENCE_S
        file = tmp_path / "out" / "metrics.jsonl"
        while not (file.exists() and f'"step": {step},' in file.read_text()):
            assert time.monotonic() < until_s
            time.sleep(0.1)

    nodes = [node(number) for number in range(3)]
    try:
        wait_for_step(6)
        nodes[1].kill()
        wait_for_step(16)
        nodes[0].kill()
        assert nodes[2].wait(PATIENCE_S) == 0, (tmp_path / "node-2.log").read_text()
    finally:
        for launcher in nodes:
            launcher.kill()
            launcher.wait()
    decisions = [
        event.reaction for event in run.events(tmp_path / "out") if event.event == "decision"
    ]
    assert [reaction for reaction in decisions if reaction != "interval"] == ["spare", "shrink"]
    faulty = torch.load(tmp_path / "end.pt")
    assert len(faulty["seen"]) == 40
    (tmp_path / "saved").rename(tmp_path / "before")
    two = meshwright.plan(
        script["build"],
        "local:2",
        batch=script["batch_of"](0),
        loss=script["loss"],
        global_batch=8,
        fix=["zero=3"],
    )
    write(two, tmp_path / "plan.yaml")
    assert started(tmp_path, "none", 0).returncode == 0
    plain = torch.load(tmp_path / "end.pt")
    # Of each step rank 0 notes its own samples, which are all once it is alone.
    assert faulty["seen"][:6] == plain["seen"][:6]
    assert faulty["rate"] == plain["rate"]
    for key, value in plain["weights"].items():  # the last steps are one rank's
        torch.testing.assert_close(faulty["weights"][key], value, rtol=1e-5, atol=1e-6)
