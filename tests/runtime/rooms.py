"""A tiny model, and a room where launches of it are watched, killed and counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import Architecture, Layer, ModelGraph
from meshwright.planner.documents.plan import Plan, Training
from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.launch.rank_processes import last_lines
from meshwright.runtime.run import run_folder as files_of
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.run_report import RunReport
from tests.limits import PATIENCE_S
from tests.runtime.forked_zygote import ForkedZygote

ROOT = Path(__file__).resolve().parents[2]

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
            "timeout_s": PATIENCE_S,
            "stages": [{"layers": [{"layer": name} for name in stage]} for stage in stages],
        }
    )


SLOW = """
import time
from meshwright.runtime.resilience.heartbeat import Beacon

begin_part = Beacon.begin_part
def slow(self, step, part):
    begin_part(self, step, part)
    time.sleep(SECONDS if part == "step" else 0.0)
Beacon.begin_part = slow
"""


def slow(step_s: float) -> str:
    """Return code that lets each step begin with sleep."""
    return SLOW.replace("SECONDS", str(step_s))


def launched(plan: Path | str, asked: LaunchRun, **options: Any) -> None:
    """Launch as a command does; what goes wrong is its last message."""
    # A shell's background jobs inherit an ignored interrupt; a launch at a terminal not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch(Launch(plan, asked, **options))
    except MeshwrightError as error:
        sys.exit(str(error))


class Forked:
    """A process that was forked: what tests ask of subprocess.Popen."""

    pid: int
    _log: Path

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        raise NotImplementedError

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; subprocess.TimeoutExpired where that takes longer."""
        end_s = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(type(self).__name__, timeout or 0.0)
            time.sleep(0.02)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait until it has ended, and return what it has said."""
        self.wait(timeout)
        return None, self._log.read_text()


class ForkedLaunch(Forked):
    """A launch in a process that is forked from this one."""

    def __init__(self, plan: Path, asked: LaunchRun, log: Path) -> None:
        self.returncode: int | None = None
        self._log = log
        self.pid = os.fork()
        if self.pid == 0:
            self._become(plan, asked)

    def _become(self, plan: Path, asked: LaunchRun) -> NoReturn:
        code = 1
        try:
            warnings.resetwarnings()  # to a test they are errors
            os.dup2(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            with ForkedZygote() as ranks:
                launched(plan, asked, model=MODEL, zygote=ranks)
            code = 0
        except SystemExit as end:
            print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # a forked child must not run the parent's exit handlers

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


@dataclass
class Room:
    """A folder with a text, where plans are launched."""

    folder: Path
    started: list[Any] = field(default_factory=list)
    """Launchers, as subprocess.Popen or like it."""
    python_path: tuple[str, ...] = (str(ROOT),)
    """Of the launches that `start` makes."""

    def begin_with(self, code: str) -> None:
        """Let each process that starts in this room run code before all else."""
        site = self.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(code)
        self.python_path = (str(site), *self.python_path)

    def let_steps_sleep(self, step_s: float) -> None:
        """Let each step begin with sleep, so that it takes long, and no processor."""
        self.begin_with(slow(step_s))

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    def plan(self, plan: Plan) -> Path:
        path = self.folder / f"{plan.digest[7:]}.yaml"
        write(plan, path)
        return path

    def run(self, plan: Plan, **options: object) -> RunReport:
        with ForkedZygote() as ranks:
            return self.run_by(ranks, plan, **options)

    def run_by(self, ranks: Zygote, plan: Plan, **options: object) -> RunReport:
        """Run with a zygote that is there: only a main thread may fork one."""
        settings = {"model": MODEL, "quiet": True, **options}
        record = Launch(self.plan(plan), self.asked(settings), **{"zygote": ranks, **settings})
        report = launch(record)
        assert report is not None
        return report

    def asked(self, options: dict[str, Any]) -> LaunchRun:
        """Take what a run is asked for out of options, beside the text and the output here."""
        fields = {name: options.pop(name) for name in [*options] if name in LaunchRun.model_fields}
        return LaunchRun(**{"data": self.text, "output": self.folder / "out", **fields})

    def start(self, plan: Plan, *, step: int = 3, **options: object) -> Any:
        """Launch from a process of its own and wait for a step; 0 waits for nothing.

        The process is forked from the test's, but where it begins with code of a test.
        """
        told: dict[str, Any] = {**options}
        asked = self.asked(told)
        assert not told
        path = self.plan(plan)
        if self.python_path == (str(ROOT),):
            launcher: Any = ForkedLaunch(path, asked, self.folder / "launcher.log")
        else:
            launcher = self._begun(path, asked)
        self.started.append(launcher)
        if step:
            self.wait_for_step(step, while_running=launcher)
        return launcher

    def _begun(self, plan: Path, asked: LaunchRun) -> subprocess.Popen[str]:
        write(MODEL, self.folder / "model.yaml")
        program = (
            "import sys\n"
            "from meshwright.planner.documents.document import read\n"
            "from meshwright.planner.documents.model import ModelGraph\n"
            "from meshwright.runtime.run.launch_options import LaunchRun\n"
            "from tests.runtime.rooms import launched\n"
            "model = read(ModelGraph, sys.argv[2])\n"
            "launched(sys.argv[1], LaunchRun.model_validate_json(sys.argv[3]), model=model)\n"
        )
        model = str(self.folder / "model.yaml")
        return subprocess.Popen(
            [sys.executable, "-c", program, str(plan), model, asked.model_dump_json()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(self.python_path)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_step(self, step: int, *, while_running: Any) -> None:
        metrics = files_of.metrics_file(self.folder / "out")
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
                return
            if while_running is not None and while_running.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(last_lines(files_of.log_file(self.folder / "out", 0)))

    def ranks(self) -> dict[int, int]:
        """Return the process of each living rank here: the leader of a group with its log."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                log = (process / "fd" / "1").readlink()
                state, *rest = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            lives = state != "Z" and rest[1] == process.name
            if lives and log.is_relative_to(self.folder) and log.name.startswith("rank-"):
                found[int(log.stem.removeprefix("rank-"))] = int(process.name)
        return found

    def wait_until_empty(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.ranks() and time.monotonic() < end:
            time.sleep(0.05)
        assert self.ranks() == {}


ENOUGH = 1_000_000  # steps that no test waits for
