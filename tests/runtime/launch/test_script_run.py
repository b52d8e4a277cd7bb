"""`meshwright run` starts a script on a plan's ranks, and goes on when a rank is killed."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright
from meshwright import cli
from meshwright.launch.run_script import run_script
from meshwright.planner.documents.document import write
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.runtime.core import object_collectives
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch import script_rank_main as script_rank
from meshwright.runtime.launch import script_run
from meshwright.runtime.launch.rank_processes import BadEnd, Exit
from meshwright.runtime.launch.script_run import ScriptRun
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.environment import OUTPUT_VARIABLE
from meshwright.runtime.run.node_rank import NodeRank
from tests.limits import PATIENCE_S
from tests.runtime.ports import free_port

SCRIPT = '''
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import meshwright

class Seen:
    """How many steps the loop has done, and what it was told."""
    def __init__(self):
        self.steps = []
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = list(state["steps"])

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)

def loss(out, batch):
    return (out - batch[1]).square().sum(), out.numel()

def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

def train(folder=None, steps=6):
    engine = meshwright.Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    seen = Seen()
    extra = {"seen": seen, "rate": torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)}
    if folder:
        engine.resume(folder, extra=extra)
    while engine.steps < steps:
        killed = folder and engine.steps == 4 and engine.slice_rank == 1
        if killed and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step(engine.slice(batch_of(engine.steps)))
        extra["rate"].step()
        seen.steps.append(engine.steps)
        if folder and engine.steps % 3 == 0:
            engine.save(folder, extra=extra)
    return engine, seen

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(f"begun by {os.environ['RANK']}" + chr(10), end="")  # in one write
    print("noted by", os.environ["RANK"], file=sys.stderr)
    engine, seen = train(folder)
    weights = engine.state_dict()
    if engine.leads:
        left = {"weights": weights, "seen": seen.steps, "told": sys.argv[2:]}
        torch.save(left, folder / "end.pt")
'''


@functools.cache
def plain_run() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what the script defines, and the weights that it trains in this process."""
    space: dict[str, Any] = {"__name__": "train"}
    exec(compile(SCRIPT, "train.py", "exec"), space)
    plain, _ = space["train"]()
    return space, plain.state_dict()


@functools.cache
def two_ranks() -> meshwright.Plan:
    space = plain_run()[0]
    two = meshwright.plan(
        space["build"],
        "local:2",
        batch=space["batch_of"](0),
        loss=space["loss"],
        global_batch=8,
        fix=["zero=3"],
    )
    assert two.mesh.data_shard == 2
    return two


def plan_of(folder: Path) -> meshwright.Plan:
    two = two_ranks()
    write(two, folder / "plan.yaml")
    (folder / "train.py").write_text(SCRIPT)
    return two


def check_end(folder: Path, expected: dict[str, torch.Tensor], *told: str) -> None:
    left = torch.load(folder / "end.pt", weights_only=True)
    assert left["told"] == list(told)
    assert left["seen"] == [1, 2, 3, 4, 5, 6]
    for name, value in expected.items():
        torch.testing.assert_close(left["weights"][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
def test_a_script_runs_on_all_ranks_and_the_console_has_what_rank_0_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, expected = plain_run()
    plan = plan_of(tmp_path)
    (tmp_path / "died").touch()  # nobody is killed

    assert cli.main([
        *("run", "--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "out")),
        *(str(tmp_path / "train.py"), str(tmp_path), "--output", "3"),
    ]) == 0  # fmt: skip

    check_end(tmp_path, expected, "--output", "3")
    said, talk = capsys.readouterr()
    assert said.startswith("begun by 0\nloss ")
    assert "noted by 0\n" in talk
    assert "by 1" not in said + talk
    assert "begun by 1\nnoted by 1\n" in (tmp_path / "out/logs/rank-00001.log").read_text()
    assert "begun by 0\n" in (tmp_path / "out/logs/rank-00000.log").read_text()
    steps = tuple(run.read_records(run.metrics_file(tmp_path / "out")))
    seconds = statistics.median(record.step_s for record in steps[2:])
    assert re.search(r"meshwright: step \d, loss \d+\.\d{4}, \d.* per step, .* samples/s\n", talk)
    assert f"meshwright: step 6, loss {steps[-1].loss:.4f}, " in talk
    done = ScriptRun(steps=steps, output=tmp_path, restarts=0, global_batch=8)
    time_row, rate_row = done.comparison(meshwright.predict(plan))
    assert (time_row.quantity, time_row.unit, time_row.measured) == ("step time", "s", seconds)
    assert time_row.predicted == meshwright.predict(plan).step_time_s
    assert (rate_row.unit, rate_row.measured) == ("samples/s", 8 / seconds)
    assert "step time" in said
    assert "samples/s" in said
    # As on a device that counts its memory.
    counted = [record.model_copy(update={"peak_memory_bytes": 2**20}) for record in steps]
    done = ScriptRun(steps=tuple(counted), output=tmp_path, restarts=0, global_batch=8)
    *_, memory = done.comparison(meshwright.predict(plan))
    assert (memory.quantity, memory.measured) == ("stage 0 peak memory", 2**20)
    assert memory.predicted == meshwright.predict(plan).stages[0].peak_memory_bytes


def test_ctrl_c_ends_a_run_with_the_status_of_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    plan_of(tmp_path)
    monkeypatch.setattr(script_run, "_attempt", interrupt)

    words = ["run", "--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "out")]
    assert cli.main([*words, str(tmp_path / "train.py"), str(tmp_path)]) == 130


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_rank_killed_on_one_of_two_nodes_costs_no_step_and_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, expected = plain_run()
    plan_of(tmp_path)
    port = free_port()
    ends: list[ScriptRun | MeshwrightError | None] = [None, None]
    said: list[list[str]] = [[], []]

    def node(number: int) -> None:
        try:
            ends[number] = script_run.run_script(
                tmp_path / "plan.yaml",
                tmp_path / "train.py",
                [str(tmp_path)],
                output=tmp_path / "out",
                restarts=1,
                node_rank=NodeRank(node=number, nodes=2, host="127.0.0.1", port=port),
                nodes=(1, 1),
                say=said[number].append,
            )
        except MeshwrightError as error:
            ends[number] = error

    threads = [threading.Thread(target=node, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    first, second = ends
    assert isinstance(first, ScriptRun), ends
    assert second is None
    check_end(tmp_path, expected)
    assert first.restarts == 1
    assert [record.step for record in first.steps] == [1, 2, 3, 4, 5, 6]
    killed = "rank 1 was killed by SIGKILL (as the system does when host memory runs out)"
    assert f"{killed}; starting all ranks again (1 of 1)" in said[1]
    assert f"node 1: {killed}; starting all ranks again (1 of 1)" in said[0]
    assert (tmp_path / "out/node-00001/logs/rank-00001.log").exists()


def test_nodes_that_the_plan_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of(tmp_path)

    assert cli.main([
        *("run", "--plan", str(tmp_path / "plan.yaml"), "--nodes", "2", "--node", "0"),
        *("--rendezvous", "127.0.0.1", str(tmp_path / "train.py")),
    ]) == 1  # fmt: skip

    assert "the plan is for 1 node (local:2), but the command line gives 2" in (
        capsys.readouterr().err
    )


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    layer = Engine(
        lambda: torch.nn.Linear(2, 2),
        loss=lambda out, batch: out.sum(),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        batch=torch.zeros(2, 2),
    )
    write(layer.plan, tmp_path / "plan.yaml")

    with pytest.raises(LaunchError, match="is no file; name the script"):
        run_script(
            str(tmp_path / "plan.yaml"), str(tmp_path / "none.py"), output=str(tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()
    assert "MESHWRIGHT_PLAN" not in os.environ


@pytest.mark.parametrize(
    ("ends", "code", "how", "said", "logged"),
    [
        ("sys.exit('no data')", 1, "exited with code 1: no data", "no data\n", ""),
        ("sys.exit(3)", 3, "exited with code 3", "", ""),
        ("{}['x']", 1, "stopped with KeyError: 'x'", "train.py", ""),
        (
            "raise RuntimeError('Connection reset by peer')",
            1,
            "stopped with RuntimeError: Connection reset by peer",
            "",
            "RuntimeError: Connection reset by peer",
        ),
    ],
)
def test_a_rank_says_how_its_script_ended_and_a_lost_peer_only_in_its_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: str,
    code: int,
    how: str,
    said: str,
    logged: str,
) -> None:
    for name in ("logs", "ranks"):
        (tmp_path / name).mkdir()
    (tmp_path / "train.py").write_text(f"import sys\n{ends}\n")
    monkeypatch.setattr(sys, "argv", ["script_rank", str(tmp_path / "train.py")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest has its own
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(OUTPUT_VARIABLE, str(tmp_path))

    assert script_rank.main() == code

    ended = Exit(rank=0, code=code)
    (failure,) = run.read_failures(tmp_path, 1)
    bad = BadEnd(seen=(ended,), cause=ended, failure=failure)
    assert script_run._how(bad, tmp_path) == f"rank 0 {how}"
    printed = capsys.readouterr().err
    assert said in printed
    assert "runpy" not in printed
    assert bool(printed) == bool(said)
    log = run.log_file(tmp_path, 0)
    assert logged in (log.read_text() if log.exists() else "")


def test_a_script_that_saved_for_a_notice_ends_well_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "train.py").write_text("import meshwright\nraise meshwright.HandedOver('saved')\n")
    monkeypatch.setattr(sys, "argv", ["script_rank", str(tmp_path / "train.py")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # pytest has its own
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(OUTPUT_VARIABLE, str(tmp_path))

    assert script_rank.main() == 0

    assert run.handed_over(tmp_path, 3).exists()
    assert run.read_failures(tmp_path, 4) == []


def test_a_script_that_does_not_look_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    progress = script_run._ScriptProgress(run.metrics_file(tmp_path), print)
    progress.refresh()
    progress.ends_s = 0.0

    with pytest.raises(KeyboardInterrupt):
        progress.refresh()


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_script_under_notice_saves_hands_over_and_goes_on_without_a_step_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, expected = plain_run()
    plan_of(tmp_path)
    (tmp_path / "died").touch()  # nobody is killed
    noticed = SCRIPT.replace(
        "        engine.step(engine.slice(batch_of(engine.steps)))\n",
        "        if engine.steps == 3 and engine.slice_rank == 1 and folder:\n"
        "            os.kill(os.getppid(), signal.SIGUSR1)\n"
        "            while not Path(os.environ['MESHWRIGHT_NOTICE']).exists(): pass\n"
        "        result = engine.step(engine.slice(batch_of(engine.steps)))\n",
    ).replace(
        "        if folder and engine.steps % 3 == 0:\n"
        "            engine.save(folder, extra=extra)\n",
        "        if folder and result.noticed:\n"
        "            engine.save(folder, extra=extra)\n"
        "            raise meshwright.HandedOver('saved')\n",
    )
    assert noticed.count("HandedOver") == 1
    (tmp_path / "train.py").write_text(noticed)
    command = [
        *("run", "--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "out")),
        *(str(tmp_path / "train.py"), str(tmp_path)),
    ]

    assert cli.main(command) == 75
    assert "the script stopped on notice after step 4" in capsys.readouterr().err
    assert run.account_of(tmp_path / "out").steps_lost == 0
    assert cli.main(command) == 0

    check_end(tmp_path, expected)


def test_words_of_ranks_that_nccl_alone_has_joined_go_through_gloo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert object_collectives.host_group() is None
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        group = object_collectives.host_group()
        assert group is not None
        assert group is object_collectives.host_group()  # made once
        assert object_collectives.host_group(group) is group
        assert object_collectives.all_gather_json({"a": 1}) == [{"a": 1}]
    finally:
        dist.destroy_process_group()
