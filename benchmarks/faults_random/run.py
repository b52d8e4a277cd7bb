"""Random faults in whole runs, at random moments, judged from outside.

    python -m benchmarks.faults_random.run --runs 15            # about four faults in each
    python -m benchmarks.faults_random.run --only 7 --seed 1    # one of them again

A run is the command line as a user calls it: `launch --elastic` of demo-4m and of a model in a
file, `run --elastic` of a script, on 1, 2 and 3 nodes (launchers on this machine).  Faults come a
random number of steps and seconds after the last one, and a run that ends before its time is
started again by the same command, as a scheduler would.  Nothing of meshwright or its tests is
imported: processes are found in /proc by a variable of their environment, losses, samples and
tensors are read from the documented files, and compared with a run that nothing disturbed.

All of it has a small /dev/shm and mounts of its own, for which it needs to be root.  Launchers have
no privileges, and another host name in some of their starts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).with_name("inside.py")
BATCH, SAVE_EVERY = 8, 20
PATIENCE_S = 300.0
"""Without a new step, which no fault here may cost."""
GONE_S = 20.0
"""Within which processes are gone when their launchers are."""
AFTER_STILL_S = 3.0
"""Behind a standstill; another fault until then comes before copies are stored again."""
WITHOUT_COPIES_S = 2.0
"""Until copies that were removed are there again."""
PRINTED = re.compile(
    r"a rank that is lost costs (\d+) steps \([^)]*\) at most"
    r"(?:, a lost node (\d+), and one that\s+stands still those of\s+(\d+) s more)?"
)
NODES_END = {
    *("launcher killed", "notice", "Ctrl-C", "checkpoint damaged"),
    *("launcher stopped", "rank killed as a spare joins"),
}
"""Faults that cost what is printed for a node."""
MOST_STARTS = 14
OWN_MEMORY = "FAULTS_OWN_MEMORY"
MEMORY_BYTES = 700_000_000
"""Size of /dev/shm, which holds copies of state in memory."""
PLACES = (
    *("in_memory_checkpoint.py", "shared_memory.py", "replication.py", "state_snapshot.py"),
    *("writer.py", "metrics.py", "heartbeat.py", "script_keeper.py", "sharded_optimizer.py"),
)
"""Files in whose calls a rank is killed: between a step and its copy, and within them."""
ELEMENT_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
ERRORS = (
    *("EIO", "ESTALE", "illegal access", "launch failure", "cuBLAS", "NCCL"),
    *("program", "KeyError", "host memory"),
)

OWN = '''
"""A model of one's own, whose steps take a while."""

import os
import time

import torch
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(258, 48)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4)
        )
        self.head = nn.Linear(48, 258)

    def forward(self, tokens):
        if self.training:
            time.sleep(float(os.environ.get("FAULTS_SLEEP_S", "0")))
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
'''
TRAIN = '''
"""A script of one's own, with a loader whose order goes with its state."""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import meshwright


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ.get("FAULTS_SLEEP_S", "0")))
        return self.last(F.gelu(self.first(x)))


def data():
    torch.manual_seed(1)
    x = torch.randn(400, 16)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())


def loss(out, batch):
    return F.cross_entropy(out, batch[1], reduction="sum"), len(out)


def main(steps):
    example = [torch.randn(8, 16), torch.zeros(8).long()]
    engine = meshwright.Engine(Net, loss=loss, optimizer=torch.optim.AdamW, batch=example)
    loader = engine.loader(data(), shuffle=True)
    rate = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.999)
    engine.resume(extra={"loader": loader, "rate": rate})
    while engine.steps < steps:
        for batch in loader:
            engine.step(batch)
            rate.step()
            if engine.steps >= steps:
                break


if __name__ == "__main__":
    main(int(sys.argv[1]))
'''
CLUSTER = """
format: 1
name: loopback-{nodes}
groups:
- name: cpu
  accelerator:
    name: cpu
    kind: cpu
    memory_bytes: 8000000000
    peak_flops: {{fp32: 100000000000}}
    memory_bytes_per_s: 10000000000
    curve: {{launch_s: 0.000002, matmul: 1.0, attention_forward: 0.5, attention_backward: 0.5,
      memory: 1.0, spread: 0.3, provenance: quoted, source: "this benchmark"}}
  nodes: {nodes}
  devices_per_node: 1
  host_memory_bytes: 16000000000
tiers:
- {{name: loopback, devices: {nodes}, latency_s: 0.0001, bytes_per_s: 1000000000}}
"""


# --- what runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """What a run trains, and where."""

    what: str
    """demo-4m, own.py or train.py."""
    nodes: int
    fix: tuple[str, ...] = ()
    steps: int = 60
    sleep_s: float = 0.0
    spare: bool = False

    @property
    def name(self) -> str:
        layout = " ".join(self.fix)
        more = " and a spare" if self.spare else ""
        node = "1 node" if self.nodes == 1 else f"{self.nodes} nodes{more}"
        return f"{self.what} on {node}{f', {layout}' if layout else ''}"


OWN_S, SCRIPT_S = 0.12, 0.15
KINDS = (
    Kind("own.py:Own", 1, ("dp=2",), sleep_s=OWN_S),
    Kind("own.py:Own", 1, ("zero=3",), sleep_s=OWN_S),
    Kind("own.py:Own", 2, ("dp=2",), sleep_s=OWN_S),
    Kind("own.py:Own", 2, ("zero=1",), sleep_s=OWN_S, spare=True),
    Kind("own.py:Own", 3, ("dp=3",), sleep_s=OWN_S),
    Kind("demo-4m", 1, ("tp=2",)),
    Kind("demo-4m", 1, ("pp=2",)),
    Kind("demo-4m", 2, ("zero=3",)),
    Kind("train.py", 1, sleep_s=SCRIPT_S),
    Kind("train.py", 2, sleep_s=SCRIPT_S),
    Kind("train.py", 2, sleep_s=SCRIPT_S, spare=True),
    Kind("train.py", 3, sleep_s=SCRIPT_S),
    Kind("own.py:Own", 1, ("zero=2",), sleep_s=OWN_S),
)
# Scripts and one node come twice, as they have most faults of their own.
ORDERS = {
    "each": tuple(range(len(KINDS))),
    "all": (0, 8, 2, 5, 10, 4, 8, 3, 6, 7, 0, 9, 4, 10, 2, 1, 5, 3, 9, 0),
    "models": (0, 2, 5, 4, 3, 6, 7, 1, 2, 4),
    "scripts": (8, 9, 10, 11),
}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", *words]


def environment(folder: Path, root: Path = ROOT, **more: str) -> dict[str, str]:
    inside = folder / "inside"
    inside.mkdir(exist_ok=True)
    shutil.copyfile(INSIDE, inside / "sitecustomize.py")
    path = os.pathsep.join([str(inside), str(root), os.environ.get("PYTHONPATH", "")])
    rest = {name: value for name, value in os.environ.items() if not name.startswith("FAULTS_")}
    return {
        **rest,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "MESHWRIGHT_SECRET": "a secret of this benchmark alone",
        **more,
    }


class Lab:
    """A folder with models, data, plans and runs that nobody disturbed."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        """Runs with faults have the program of `root`; what they are compared with never has."""
        self.folder, self.root = folder, root
        self.faults: tuple[str, ...] = tuple(FAULTS)
        """Names of the faults that come."""
        (folder / "own.py").write_text(OWN)
        (folder / "train.py").write_text(TRAIN)
        rng = random.Random(0)
        words = [
            bytes(rng.choices(range(97, 123), k=rng.randint(2, 9))).decode() for _ in range(999)
        ]
        for name in ("data.txt", "other.txt"):
            (folder / name).write_text(" ".join(rng.choices(words, k=12_000)) + "\n")
        self._references: dict[Any, tuple[dict[int, float], dict[str, str]]] = {}

    def plan(self, kind: Kind) -> Path:
        """Return the plan of a kind of run, searched by the command line."""
        path = self.folder / f"plan-{re.sub('[^a-z0-9]+', '-', kind.name.lower())}.yaml"
        if path.exists():
            return path
        cluster = "local:2"
        if kind.nodes > 1:
            file = self.folder / f"cluster-{kind.nodes}.yaml"
            file.write_text(CLUSTER.format(nodes=kind.nodes))
            cluster = str(file)
        model = "train.py:Net" if kind.what == "train.py" else kind.what
        if kind.what == "train.py":
            # A script's module by its own loss and batch.
            text = (self.folder / "train.py").read_text()
            if "\nbatch = " not in text:
                text = text.replace(
                    "\n\ndef main(",
                    "\n\nbatch = [torch.randn(8, 16), torch.zeros(8).long()]\n"
                    "optimizer = torch.optim.AdamW\n\n\ndef main(",
                )
                (self.folder / "train.py").write_text(text)
        words = ["plan", model, "--cluster", cluster, "--global-batch", str(BATCH), "-o", str(path)]
        words += [] if kind.what == "train.py" else ["--seq-len", "16"]
        if kind.nodes == 3:
            words[words.index("--global-batch") + 1] = "12"
        for choice in kind.fix:
            words += ["--fix", choice]
        ended = subprocess.run(
            command(*words),
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"{kind.name}: no plan: {ended.stdout}{ended.stderr}")
        return path

    def reference(
        self, kind: Kind, chain: tuple[tuple[str, int, int], ...], saves: Path
    ) -> tuple[dict[int, float], dict[str, str]]:
        """Return losses by step, and checksums of the last weights, without faults.

        The chain has plans with the step behind which each begins and their devices.
        """
        key = kind, chain
        if key in self._references:
            return self._references[key]
        folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self.folder))
        losses: dict[int, float] = {}
        for number, (plan, begin, devices) in enumerate(chain):
            last = chain[number + 1][1] if number + 1 < len(chain) else kind.steps
            nodes = min(kind.nodes, devices)
            run = Run(self, kind, folder, seed=0, steps=last, disturbed=False)
            run.plan_path, run.nodes = Path(plan), nodes
            run.resumes = number > 0
            run.play()
            if run.problems:
                raise SystemExit(f"the reference of {kind.name} failed: {run.problems}")
            losses = {step: loss for step, loss in losses.items() if step <= begin}
            losses |= {step: loss for step, loss in run.losses.items() if step > begin}
        self._references[key] = losses, run.weights()
        return self._references[key]


# --- processes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    words: str
    state: str


def processes(run: str) -> Iterator[Process]:
    """Yield processes that have a run's name in their environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            if f"FAULTS_RUN={run}\0".encode() not in (entry / "environ").read_bytes() + b"\0":
                continue
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if stat[0] != "Z":
                yield Process(int(entry.name), int(stat[1]), words, stat[0])


def ranks(run: str) -> list[Process]:
    """Return processes that train: children of a server of forks, or started as ranks."""
    everybody = {process.pid: process for process in processes(run)}
    return [
        process
        for process in everybody.values()
        if "rank_main" in process.words
        or ("fork_server" in getattr(everybody.get(process.parent), "words", ""))
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- a run ---------------------------------------------------------------------------------------


@dataclass
class Done:
    """A fault that was done, and when."""

    name: str
    step: int
    at_s: float


class Run:
    """A run from its first start until it has ended well, with faults."""

    def __init__(
        self, lab: Lab, kind: Kind, folder: Path, *, seed: int, steps: int, disturbed: bool = True
    ) -> None:
        self.lab, self.kind, self.folder, self.steps = lab, kind, folder, steps
        self.rng = random.Random(seed)
        self.disturbed = disturbed
        self.name = f"{os.getpid()}-{folder.name}-{steps}"
        self.plan_path = lab.plan(kind)
        self.nodes = kind.nodes
        self.resumes = False
        self.losses: dict[int, float] = {}
        """The newest of each step."""
        self.attempts: list[tuple[str, int, int]] = []
        """Plan, step behind which it begins, devices."""
        self.lost: list[tuple[int, int | None, int]] = []
        """Steps done again, what was printed as the most, and what damaged saves may cost."""
        self.problems: list[str] = []
        self.done: list[Done] = []
        self.starts = 0
        self.statuses: list[int | None] = []
        self.silent_s = 0.0
        self.repairs: list[Callable[[], None]] = []
        """Done before the next start, as a person would."""
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._returns: dict[int, float] = {}
        self._read: dict[Path, tuple[int, int]] = {}
        self._newest = 0
        self._seconds: dict[int, float] = {}
        self._begins: tuple[str, int] | None = None
        """Plan and devices of an attempt that has done no step yet."""
        self._moved_s = time.monotonic()
        self._port = free_port()
        self._host_names: dict[int, str] = {}
        self._second: list[subprocess.Popen[bytes]] = []
        """Launches beside the run, into its folders."""
        self.data = folder / "data.txt"
        shutil.copyfile(lab.folder / "data.txt", self.data)
        for name in ("own.py", "train.py"):
            shutil.copyfile(lab.folder / name, folder / name)
        self.saves = folder / "disk" / "saved"
        (folder / "disk").mkdir(exist_ok=True)
        self.output = folder / "out"
        self.slack = 0
        """Steps that faults of the checkpoints themselves may cost."""
        self._node_ends = self._stands_still = False
        """A fault since the last begin was of a node, and one was while a launcher stood still."""
        self._still_until_s = self._bare_until_s = 0.0

    # --- starting ---

    def _words(self, node: int) -> list[str]:
        plan = str(self.plan_path)
        spread = []
        if self.nodes > 1:
            spread = ["--nodes", str(self._launched), "--node", str(node)]
            spread += ["--rendezvous", f"127.0.0.1:{self._port}"]
        common = ["--elastic"] if self.disturbed else []
        common += ["--checkpoint", str(self.saves), "--checkpoint-every", str(SAVE_EVERY)]
        common += ["--scale-up-after", "5"] if self.disturbed else []
        common += ["-o", str(self.output), *spread]
        if self.kind.what == "train.py":
            return ["run", "--plan", plan, *common, str(self.folder / "train.py"), str(self.steps)]
        words = ["launch", plan, "--data", str(self.data), "--steps", str(self.steps), *common]
        words += ["--trust-code"] if self.kind.what.startswith("own") else []
        return words + (["--resume", "--or-start"] if self.resumes else [])

    @property
    def _launched(self) -> int:
        return self.nodes + (self.disturbed and self.kind.spare)

    def _start(self, node: int) -> None:
        log = self.folder / f"node-{node}.log"
        with log.open("ab") as file:
            file.write(f"\n--- start {self.starts}\n".encode())
            file.flush()
            self._launchers[node] = self._launch(node, file)

    def _launch(self, node: int, file: IO[bytes]) -> subprocess.Popen[bytes]:
        words = command(*self._words(node))
        if self.disturbed and os.environ.get(OWN_MEMORY):
            if node not in self._host_names or self.rng.random() < 0.5:
                self._host_names[node] = f"host-{node}-{self.rng.randrange(1000)}"
            words = [
                *("unshare", "--uts", "sh", "-c"),
                'hostname "$0"; exec setpriv --bounding-set=-all --inh-caps=-all "$@"',
                *(self._host_names[node], *words),
            ]
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=environment(
                self.folder,
                self.lab.root if self.disturbed else ROOT,
                FAULTS_RUN=self.name,
                FAULTS_FOLDER=str(self.folder),
                FAULTS_SLEEP_S=str(self.kind.sleep_s if self.disturbed else 0.0),
            ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def _start_all(self) -> None:
        self.starts += 1
        self._port = free_port()
        for node in range(self._launched):
            self._start(node)
        self._moved_s = time.monotonic()

    # --- reading ---

    def _lines(self, file: Path) -> list[dict[str, Any]]:
        """Return complete lines that are new in a file, also where it was begun anew."""
        try:
            with file.open("rb") as opened:
                status = os.fstat(opened.fileno())
                inode, at = self._read.get(file, (status.st_ino, 0))
                if inode != status.st_ino or status.st_size < at:
                    at = 0
                opened.seek(at)
                text = opened.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read[file] = status.st_ino, at + len(whole)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def _look(self) -> None:
        """Read what the run has written since; a step counts where its seconds are new."""
        for record in self._lines(self.output / "metrics.jsonl"):
            step = record["step"]
            if self._seconds.get(step) == record["step_s"]:
                continue  # written anew, and not done again
            self._seconds[step] = record["step_s"]
            self._moved_s = time.monotonic()
            if step <= self._newest or self._begins is not None:
                self._note_begin(step - 1)
            self._newest = step
            self.losses[step] = record["loss"]
        for event in self._lines(self.output / "events.jsonl"):
            if event.get("event") == "attempt":
                self._begins = event["plan"], event["devices"]
                self._keep_plans()

    def _keep_plans(self) -> None:
        """Copy the plans for less: a fault may remove them with the checkpoints."""
        for file in [*self.saves.rglob("plan-for-*.yaml"), *self.saves.rglob("cluster-of-*.yaml")]:
            kept = self.folder / "plans" / file.relative_to(self.saves)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copyfile(file, kept)

    def _put_plans_back(self) -> None:
        for kept in (self.folder / "plans").rglob("*.yaml"):
            file = self.saves / kept.relative_to(self.folder / "plans")
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(kept, file)

    def _note_begin(self, after: int) -> None:
        """Take notice of an attempt that goes on behind a step."""
        if self._newest:
            self.lost.append((max(0, self._newest - after), self._printed_most(), self.slack))
        self.slack = 0
        self._node_ends = self._stands_still = False
        plan, devices = self._begins or (str(self.plan_path), self.nodes)
        self._begins = None
        self.attempts.append((plan, after, devices))

    def _printed_most(self) -> int | None:
        """Return the most steps that the last faults cost as was printed, None before it was."""
        found: list[int] = []
        quickest_s = min(self._seconds.values(), default=1.0)
        for log in self.folder.glob("node-*.log"):
            printed = PRINTED.findall(log.read_text(errors="replace"))
            if not printed:
                continue
            rank, node, still_s = (int(number or 0) for number in printed[-1])
            most = max(rank, node) if self._node_ends or self._stands_still else rank
            found.append(most + (math.ceil(still_s / quickest_s) if self._stands_still else 0))
        return max(found) if found else None

    def weights(self) -> dict[str, str]:
        """Return a checksum of each tensor of the last checkpoint, however it lies in files."""
        index = json.loads((self._last() / "tensors.json").read_text())
        files = [np.memmap(self._last() / name, np.uint8, "r") for name in index["files"]]
        codes = {}
        for name, tensor in index["tensors"].items():
            width = ELEMENT_BYTES[tensor["dtype"]]
            whole = np.zeros([*tensor["shape"], width], np.uint8)
            for file, begin, first, size in tensor["chunks"]:
                count = int(np.prod(size, dtype=np.int64)) * width
                part = files[file][begin : begin + count].reshape([*size, width])
                whole[tuple(slice(f, f + n) for f, n in zip(first, size, strict=True))] = part
            codes[name] = hashlib.sha256(whole.tobytes()).hexdigest()
        return codes

    def _last(self) -> Path:
        return self.saves / f"step-{self.steps:06}"

    # --- playing ---

    def play(self, faults: int = 0) -> None:
        """Let it run to its end with so many faults, and check what it leaves."""
        left = faults
        self._start_all()
        next_s, next_step = self._next_moment()
        try:
            while True:
                time.sleep(0.05)
                self._look()
                for node, due_s in list(self._returns.items()):
                    if time.monotonic() > due_s and self._is_alive():
                        del self._returns[node]
                        self._start(node)
                if self._all_ended():
                    if self._ended_well():
                        break
                    if self.starts >= MOST_STARTS:
                        self.problems.append(f"not done after {self.starts} starts")
                        break
                    self._start_again()
                    next_s, next_step = self._next_moment()
                    continue
                if time.monotonic() - self._moved_s > PATIENCE_S:
                    self.problems.append(f"no step in {PATIENCE_S:g} s behind {self._newest}")
                    break
                due = time.monotonic() > next_s and self._newest >= next_step
                if left and due and self._newest < self.steps - 4:
                    left -= self._do_fault()
                    next_s, next_step = self._next_moment()
        finally:
            self._end_all()
        if not self.problems:
            self._check_end()

    def _next_moment(self) -> tuple[float, int]:
        # Sometimes at once, while the last fault is still being dealt with.
        wait_s = self.rng.choice([0.0, 0.3, 1.0, 2.0, 3.0, 5.0])
        steps = self.rng.choice([0, 1, 2, 5, 9]) if self.done else self.rng.randint(2, 12)
        return time.monotonic() + wait_s, min(self._newest + steps, self.steps - 5)

    def _is_alive(self) -> bool:
        return any(launcher.poll() is None for launcher in self._launchers.values())

    def _all_ended(self) -> bool:
        return not self._is_alive()

    def _ended_well(self) -> bool:
        statuses = [launcher.returncode for launcher in self._launchers.values()]
        self.statuses += statuses
        for launcher in self._second:
            # One that came when the run had ended waits for the other nodes, as it should.
            launcher.terminate()
        self._check_gone()
        self._look()
        is_saved = (self._last() / "meta.json").exists()
        if 0 in statuses and not is_saved:
            self.problems.append(f"status 0 and step {self.steps} is not saved")
        if is_saved and 0 not in statuses:
            # Its launcher was killed behind the last save: the next start has nothing to do.
            return False
        return 0 in statuses

    def _start_again(self) -> None:
        texts = [log.read_text(errors="replace")[-3000:] for log in self.folder.glob("node-*.log")]
        last = "\n".join(texts)
        for launcher in self._second:
            launcher.wait()
        self._second.clear()
        for repair in self.repairs:
            repair()
        self.repairs.clear()
        # What the message asks for, word for word.
        moves = re.findall(r"move (step-\d+) out of (\S+?)[ ;,]", last)
        only = re.findall(r"(\S+) has no other complete checkpoint; move (step-\d+) out", last)
        for name, where in (*moves, *((name, where) for where, name in only)):
            target = Path(where) / name
            if target.exists() and target.is_relative_to(self.folder):
                # Perhaps from a file system of its own.
                shutil.move(target, self.folder / f"aside-{name}-{self.starts}")
        self.resumes = True
        self._launchers.clear()
        self._returns.clear()
        self._start_all()

    def _check_gone(self) -> None:
        """See that no process is left."""
        until_s = time.monotonic() + GONE_S
        while left := list(processes(self.name)):
            if time.monotonic() > until_s:
                self.problems.append(f"orphans: {[process.words[:90] for process in left]}")
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                return
            time.sleep(0.2)

    def _end_all(self) -> None:
        for process in list(processes(self.name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for launcher in (*self._launchers.values(), *self._second):
            launcher.wait()
        for repair in self.repairs:
            repair()
        self.repairs.clear()

    # --- faults ---

    def _do_fault(self) -> bool:
        """Do one of the faults that are possible now; say whether it was done."""
        names = [name for name in self.lab.faults if FAULTS[name][0](self)]
        weights = [FAULTS[name][1] for name in names]
        name = self.rng.choices(names, weights)[0]
        detail = FAULTS[name][2](self)
        if detail is None:
            return False
        self._node_ends |= name in NODES_END
        now_s = time.monotonic()
        self._stands_still |= now_s < self._still_until_s
        if now_s < self._bare_until_s and name != "copies removed":
            self.slack += SAVE_EVERY + 2
        self.done.append(
            Done(f"{name}{f' ({detail})' if detail else ''}", self._newest, time.time())
        )
        return True

    def alive(self) -> list[int]:
        return [node for node, launcher in self._launchers.items() if launcher.poll() is None]

    def a_rank(self) -> Process | None:
        found = ranks(self.name)
        return self.rng.choice(found) if found else None

    def order(self, text: str) -> str | None:
        rank = self.a_rank()
        if rank is None:
            return None
        (self.folder / f"order-{rank.pid}").write_text(text)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGRTMIN + 7)
        return text

    def damage_gradient(self) -> str | None:
        """Let a rank's next gradient be NaN, before it is summed."""
        return self.order("nan gradient")

    def signal_rank(self, number: signal.Signals) -> str | None:
        rank = self.a_rank()
        if rank is None:
            return None
        os.kill(rank.pid, number)
        return ""

    def end_launcher(self, number: signal.Signals) -> str | None:
        alive = self.alive()
        if not alive:
            return None
        node = self.rng.choice(alive)
        self._launchers[node].send_signal(number)
        if self.nodes > 1 and number == signal.SIGKILL and self.rng.random() < 0.7:
            self._returns[node] = time.monotonic() + self.rng.choice([1.0, 4.0, 10.0])
        return f"node {node}"

    def remove(self) -> str | None:
        name = self.rng.choice(["events.jsonl", "metrics.jsonl", "", "logs"])
        path = self.output / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return name or "the output's folder"

    def remove_saves(self) -> str | None:
        if self.rng.random() < 0.5:
            saves = sorted(self.saves.glob("step-*"))
            if not saves:
                return None
            shutil.rmtree(saves[-1], ignore_errors=True)
            return "the newest"
        shutil.rmtree(self.saves, ignore_errors=True)
        self.slack += self.steps
        return "all"

    def replace_data(self) -> str | None:
        """Put other data in their place, and kill a rank: nobody may go on silently."""
        how = self.rng.choice(["by others", "grown", "cut"])
        if how == "by others":
            shutil.copyfile(self.lab.folder / "other.txt", self.data)
        elif how == "grown":
            with self.data.open("a") as file:
                file.write("and more words\n")
        else:
            os.truncate(self.data, self.data.stat().st_size // 2)
        self.repairs.append(self._put_data_back)
        if self.rng.random() < 0.7:
            self.signal_rank(signal.SIGKILL)
        return how

    def _put_data_back(self) -> None:
        shutil.copyfile(self.lab.folder / "data.txt", self.data)

    def damage(self) -> str | None:
        """Damage the newest checkpoint, and let all be started again."""
        saves = sorted(self.saves.glob("step-*"))
        if not saves:
            return None
        files = [file for file in saves[-1].iterdir() if file.is_file() and file.stat().st_size > 8]
        if not files:
            return None
        file = self.rng.choice(files)
        how = self.rng.choice(["cut", "removed", "flipped", "emptied"])
        if how == "removed":
            file.unlink()
        elif how == "emptied":
            file.write_bytes(b"")
        elif how == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            content = bytearray(file.read_bytes())
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            file.write_bytes(content)
        self.slack += 2 * SAVE_EVERY
        number = self.rng.choice([signal.SIGKILL, signal.SIGTERM])
        for node in self.alive():
            self._launchers[node].send_signal(number)
        return f"{file.name} {how}, all launchers {number.name}"

    def fill_disk(self) -> str | None:
        """Fill the file system of checkpoints, or leave less than a save, until a while later."""
        saves = [sum(file.stat().st_size for file in save.iterdir())
                 for save in self.saves.glob("step-*")]  # fmt: skip
        left = self.rng.choice([0.0, 0.5, 0.99, 0.999, 1.1]) * max(saves, default=0)
        return f"{int(left)} bytes are left, {self._fill(self.folder / 'disk', int(left))}"

    def fill_memory(self) -> str | None:
        """Fill /dev/shm, where copies are."""
        left = self.rng.choice([0, 100_000, 1_000_000, 20_000_000])
        return f"{left} bytes are left, {self._fill(Path('/dev/shm'), left)}"

    def _fill(self, disk: Path, left: int) -> str:
        filler = disk / f"filler-{self.rng.randrange(10**9)}"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with contextlib.suppress(OSError), filler.open("wb") as file:
            for _ in range(max(0, free - left) // 2**16 + (left == 0)):
                file.write(bytes(2**16))
        seconds = self.rng.choice(["3", "8", "20"])
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; rm -f '{filler}'"])
        self.repairs.append(lambda: filler.unlink(missing_ok=True))
        return f"for {seconds} s"

    def cut_checkpoint(self) -> str | None:
        """Cut a file of the newest checkpoint off, and let training go on."""
        saves = sorted(self.saves.glob("step-*"))
        files = [file for file in saves[-1].iterdir() if file.stat().st_size > 8] if saves else []
        if not files:
            return None
        file = self.rng.choice(files)
        os.truncate(file, file.stat().st_size // 2)
        self.slack += 2 * SAVE_EVERY
        return file.name

    def make_read_only(self) -> str | None:
        """Take the right to write away from the output's folder, for a while or until a start."""
        if not self.output.is_dir():
            return None
        folders = [self.output, *(path for path in self.output.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        back = f"chmod -R u+w '{self.output}'"
        self.repairs.append(lambda: _run_shell(back))
        seconds = self.rng.choice([3, 10, None])
        if seconds is None:
            return "until the next start"
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; {back}"])
        return f"for {seconds} s"

    def launch_second(self) -> str | None:
        """Launch once more into the same folders while the run lives."""
        node = self.rng.randrange(self._launched)
        with (self.folder / "second.log").open("ab") as file:
            self._second.append(self._launch(node, file))
        return f"node {node}"

    def kill_as_spare_joins(self) -> str | None:
        """Kill a launcher, and a rank as soon as ranks start in its place."""
        if self.end_launcher(signal.SIGKILL) is None:
            return None
        before, seconds = {rank.pid for rank in ranks(self.name)}, self.rng.choice([0.0, 0.5, 2.0])

        def wait_and_kill() -> None:
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s:
                new = [rank for rank in ranks(self.name) if rank.pid not in before]
                if new:
                    time.sleep(seconds)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(new[0].pid, signal.SIGKILL)
                    return
                time.sleep(0.02)

        threading.Thread(target=wait_and_kill, daemon=True).start()
        return f"{seconds:g} s behind its start"

    def kill_helper(self) -> str | None:
        """Kill a process of the run that neither launches nor trains."""
        known = {launcher.pid for launcher in self._launchers.values()}
        known |= {rank.pid for rank in ranks(self.name)}
        helpers = [process for process in processes(self.name) if process.pid not in known]
        if not helpers:
            return None
        helper = self.rng.choice(helpers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(helper.pid, signal.SIGKILL)
        modules = [word for word in helper.words.split() if word.startswith("meshwright.")]
        return modules[0].rpartition(".")[2] if modules else "another"

    def stop_launcher(self) -> str | None:
        """Let a launcher stand still for a while."""
        alive = self.alive()
        if not alive:
            return None
        node = self.rng.choice(alive)
        launcher, seconds = self._launchers[node], self.rng.choice([1, 4, 12])
        launcher.send_signal(signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {launcher.pid}"])
        if self.nodes > 1:
            self._still_until_s = time.monotonic() + seconds + AFTER_STILL_S
        return f"node {node}, {seconds} s"

    def remove_copies(self) -> str | None:
        """Delete the folders of copies in shared memory."""
        removed = None
        for folder in Path("/dev/shm").glob("meshwright-*"):
            with contextlib.suppress(OSError, ValueError):
                about = json.loads((folder / "about.json").read_text())
                if str(self.folder) in about["checkpoints"]:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed = ""
                    self._bare_until_s = time.monotonic() + WITHOUT_COPIES_S
        return removed

    def set_clock(self) -> str | None:
        days = self.rng.choice([-10, -1, 1, 10])
        (self.folder / "clock").write_text(str(86_400 * days))
        return f"{days:+d} days"

    # --- the end ---

    def _check_end(self) -> None:
        meta = json.loads((self._last() / "meta.json").read_text())
        if meta["step"] != self.steps:
            self.problems.append(f"the last checkpoint is of step {meta['step']}")
        if self.kind.what != "train.py":
            samples = self.steps * (12 if self.kind.nodes == 3 else BATCH)
            wanted = {
                "count": samples,
                "total": samples * (samples + 1) // 2,
                "squares": samples * (samples + 1) * (2 * samples + 1) // 6,
            }
            from_0 = {
                "count": samples,
                "total": samples * (samples - 1) // 2,
                "squares": (samples - 1) * samples * (2 * samples - 1) // 6,
            }
            used = {name: meta["used"][name] for name in wanted}
            if used not in (wanted, from_0):
                self.problems.append(f"samples {used} are not {from_0}")
        last = [launcher.returncode for launcher in self._launchers.values()]
        for folder in Path("/dev/shm").glob("meshwright-*"):
            if -signal.SIGKILL in last:
                break  # what a killed launcher leaves is for the next one on its node
            with contextlib.suppress(OSError, ValueError):
                about = json.loads((folder / "about.json").read_text())
                if str(self.folder) in about["checkpoints"]:
                    self.problems.append(f"left behind: {folder}")
        if self.disturbed:
            for lost, most, slack in self.lost:
                if most is not None and lost > most + slack:
                    self.problems.append(f"{lost} steps lost, and {most} at most were printed")

    def chain(self) -> tuple[tuple[str, int, int], ...]:
        """Return the plans that made the state there is, each with the step it began behind."""
        kept: list[tuple[str, int, int]] = []
        for plan, after, devices in self.attempts:
            kept = [part for part in kept if part[1] < after]
            if not kept or kept[-1][::2] != (plan, devices):
                kept.append((plan, after, devices))
        return tuple(kept)

    def compare(self) -> str:
        """Compare losses with those that nothing disturbed; say how they were compared."""
        chain = self.chain()
        devices = max((part[2] for part in chain), default=self.nodes)
        names = [(str(self.plan_path), 0, devices)]
        self._put_plans_back()
        for plan, after, count in chain:
            file = self.plan_path
            # The first attempt has the plan that was given; one for less memory has its devices.
            if count != devices or plan != self.attempts[0][0]:
                books = sorted(self.saves.rglob(f"plan-for-{count}.yaml"))
                if not books:
                    self.problems.append(f"no file of the plan for {count} devices")
                    return "not compared"
                file = books[-1]
            if names[-1][0] != str(file):
                names = [part for part in names if part[1] < after]
                names.append((str(file), after, count))
        losses, weights = self.lab.reference(self.kind, tuple(names), self.saves)
        wrong = [step for step in losses if self.losses.get(step, losses[step]) != losses[step]]
        if wrong:
            step = wrong[0]
            self.problems.append(
                f"loss of step {step} is {self.losses[step]!r}, without faults {losses[step]!r}"
            )
        missing = [step for step in losses if step not in self.losses]
        if len(missing) > self.steps // 2:
            self.problems.append(f"{len(missing)} steps have no record")
        own = self.weights()
        others = sorted(name for name in {*own, *weights} if own.get(name) != weights.get(name))
        if others:
            self.problems.append(f"the last checkpoint has another {others[0]} ({len(others)})")
        return "one plan" if len(names) == 1 else f"{len(names)} plans"


def _run_shell(words: str) -> None:
    subprocess.run(["sh", "-c", words], check=False)


def _in_script(run: Run) -> bool:
    return run.kind.what == "train.py"


def _always(run: Run) -> bool:
    return True


FAULTS: dict[str, tuple[Callable[[Run], bool], float, Callable[[Run], str | None]]] = {
    "rank killed": (_always, 3, lambda run: run.signal_rank(signal.SIGKILL)),
    "rank stopped": (_always, 1, lambda run: run.signal_rank(signal.SIGSTOP)),
    "rank ends": (_always, 2, lambda run: run.order(f"exit {run.rng.choice([0, 1, 3])}")),
    "error": (_always, 4, lambda run: run.order(f"raise {run.rng.choice(ERRORS)}")),
    "NaN": (_always, 2, Run.damage_gradient),
    "killed within": (_always, 3, lambda run: run.order(f"within {run.rng.choice(PLACES)}")),
    "launcher killed": (_always, 2, lambda run: run.end_launcher(signal.SIGKILL)),
    "notice": (_always, 1, lambda run: run.end_launcher(signal.SIGTERM)),
    "Ctrl-C": (_always, 0.5, lambda run: run.end_launcher(signal.SIGINT)),
    "removed": (_always, 1.5, Run.remove),
    "checkpoints removed": (_always, 0.5, Run.remove_saves),
    "data replaced": (lambda run: not _in_script(run), 1, Run.replace_data),
    "checkpoint damaged": (_always, 1.5, Run.damage),
    "disk full": (lambda run: os.path.ismount(run.folder / "disk"), 2, Run.fill_disk),
    "clock": (_always, 1, Run.set_clock),
    "helper killed": (_always, 1, Run.kill_helper),
    "launcher stopped": (_always, 1, Run.stop_launcher),
    "copies removed": (_always, 0.7, Run.remove_copies),
    "memory full": (lambda run: bool(os.environ.get(OWN_MEMORY)), 1, Run.fill_memory),
    "checkpoint cut": (_always, 1, Run.cut_checkpoint),
    "read-only": (lambda run: bool(os.environ.get(OWN_MEMORY)), 1, Run.make_read_only),
    "second launch": (_always, 1, Run.launch_second),
    "rank killed as a spare joins": (
        lambda run: run.kind.spare and len(run.alive()) > run.nodes,
        4,
        Run.kill_as_spare_joins,
    ),
}


# --- all of them ---------------------------------------------------------------------------------


@dataclass
class Table:
    """What came out, of all runs."""

    rows: list[tuple[int, Run, str, float]] = field(default_factory=list)

    def text(self) -> str:
        faults = collections.Counter(
            done.name.partition(" (")[0] for _, run, _, _ in self.rows for done in run.done
        )
        lost = [lost for _, run, _, _ in self.rows for lost, _, _ in run.lost]
        bad = [run for _, run, _, _ in self.rows if run.problems]
        lines = [
            f"{sum(faults.values())} faults in {len(self.rows)} runs: "
            + ", ".join(f"{name} {count}" for name, count in faults.most_common()),
            f"steps done again: {len(lost)} times, mean {sum(lost) / max(1, len(lost)):.1f}, "
            f"most {max(lost, default=0)}",
            f"runs that were wrong: {len(bad)}",
        ]
        return "\n".join(lines)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def play_run(
    lab: Lab, number: int, *, seed: int, faults: int, of: str = "all"
) -> tuple[Run, str, float]:
    """Play one run; return it with how its losses were compared, and its seconds."""
    kind = KINDS[ORDERS[of][number % len(ORDERS[of])]]
    room = lab.folder / f"run-{number:03}"
    (room / "disk").mkdir(parents=True)
    mounted = (
        number % 3 == 2
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(room / "disk")],
            check=False,
            capture_output=True,
        ).returncode
    )
    run = Run(lab, kind, room, seed=seed, steps=kind.steps)
    begin_s = time.monotonic()
    compared = ""
    try:
        run.play(faults)
        if not run.problems:
            compared = run.compare()
    except Exception as error:  # the others are played
        run.problems.append(f"{type(error).__name__}: {error}")
    took_s = time.monotonic() - begin_s
    print(f"run {number}: {kind.name}, {took_s:.0f} s, {run.starts} starts, {compared}")
    for done in run.done:
        print(f"    step {done.step:3}: {done.name}")
    print(f"    lost {run.lost}, statuses {run.statuses}")
    for problem in run.problems:
        print(f"  WRONG {problem}")
    sys.stdout.flush()
    if mounted:
        subprocess.run(["umount", "-l", str(room / "disk")], check=False)
    return run, compared, took_s


def have_own_memory() -> None:
    """Begin again with a /dev/shm and mounts of one's own, where that is allowed."""
    if os.environ.get(OWN_MEMORY) or os.getuid():
        return
    mount = f"mount -t tmpfs -o size={MEMORY_BYTES} tmpfs /dev/shm"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    tried = subprocess.run([*words, mount], check=False, capture_output=True)
    if tried.returncode == 0:
        os.environ[OWN_MEMORY] = "1"
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execvp(words[0], [*words, f'{mount}; exec "$0" "$@"', *again])


def take_signals() -> None:
    """End by SIGTERM and Ctrl-C with all processes of the run.

    A shell's background jobs inherit an ignored interrupt; launches at a terminal do not.
    """
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    take_signals()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--faults", type=int, default=5, help="at most, in each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", choices=ORDERS, default="all", help="what is trained")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="no other; several times")
    parser.add_argument("--only", type=int, help="the number of one run")
    parser.add_argument("--begin", type=int, default=0, help="the number of the first run")
    parser.add_argument("--seconds", type=float, default=9e9, help="behind which no run begins")
    parser.add_argument("--keep", action="store_true", help="leave the folder there")
    args = parser.parse_args()
    have_own_memory()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    lab, table = Lab(folder), Table()
    lab.faults = tuple(args.fault or FAULTS)
    numbers = [args.only] if args.only is not None else range(args.begin, args.begin + args.runs)
    begin_s = time.monotonic()
    for number in numbers:
        if time.monotonic() - begin_s > args.seconds:
            print(f"run {number} and those behind it were not begun")
            break
        seed = 1000 * args.seed + number
        count = random.Random(seed).randint(max(1, args.faults - 2), args.faults)
        count = args.faults if args.fault else count
        run, compared, took_s = play_run(lab, number, seed=seed, faults=count, of=args.of)
        table.rows.append((number, run, compared, took_s))
        if not run.problems and not args.keep:
            shutil.rmtree(run.folder, ignore_errors=True)
    print(table.text())
    wrong = any(run.problems for _, run, _, _ in table.rows)
    if not wrong and not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"kept: {folder}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
