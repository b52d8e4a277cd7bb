"""A Slurm cluster of this machine's own: a job is preempted, `tune` is killed, and nothing is lost.

    python benchmarks/slurm.py         # apt-get install slurmctld slurmd slurm-client munge
    python benchmarks/slurm.py tune    # trials by srun on two nodes; killed KILLS times and resumed

A controller and two node daemons of the installed Slurm run from a folder of their own, with their
own key.  A plan of one rank on each of two nodes is submitted by `launch --on slurm`; when it has
trained some steps a job of a more important partition takes both nodes.  Slurm gives notice, the
job saves, hands over and queues itself; when the nodes are free it goes on.  Printed is what
happened, and 0 means that each step counts once.

`tune` is ended by SIGKILL at random moments of its trials and started again.  0 means that after
each end all finished trials are there unchanged, the plan is one that ran, and no job was left.

Needs root and Slurm's binaries; `refusal` says what lacks.  Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.events import Attempt, Event, Incident, StepDone, events_of
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.launch.rank_processes import free_socket
from meshwright.runtime.run import run_folder as run

BINARIES = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "sinfo")
NODES = 2
PATIENCE_S = 150.0
STEPS = 4000
BEFORE = 20
"""Steps that are done before the nodes are taken."""
AFTER = 20
"""Steps that are done when the job has come back."""

CONFIGURATION = """\
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/builtin
SchedulerParameters=requeue_delay=1
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=off
"""


def refusal() -> str | None:
    """Return why there can be no such cluster here, or None."""
    for name in BINARIES:
        if shutil.which(name) is None:
            return f"there is no '{name}'"
    return None if os.geteuid() == 0 else "it needs root"


@dataclass
class Slurm:
    """A cluster that is up."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Bring it up, and wait until its nodes are idle."""
        munge = self.folder / "munge"
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        self.folder.chmod(0o755)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o600)
        self._begin(
            *f"munged --foreground --force --key-file={munge}/key --socket={munge}/sock "
            f"--pid-file={munge}/pid --log-file={munge}/log --seed-file={munge}/seed".split()
        )
        wait((munge / "sock").exists, "munged")
        ports = [_port() for _ in range(NODES + 1)]
        host = os.uname().nodename
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
            for i, port in enumerate(ports[1:])
        )
        text = CONFIGURATION.format(host=host, port=ports[0], folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        self._begin("slurmctld", "-D")
        for i in range(NODES):
            (self.folder / "spool" / f"n{i}").mkdir()
            self._begin("slurmd", "-D", "-N", f"n{i}")
        wait(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split().count("idle") >= NODES, "it")

    def ask(self, *command: str) -> str:
        """Return what one of its commands prints; nothing where it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    def job(self, number: str) -> str:
        """Return a job's state."""
        text = self.ask("scontrol", "show", "job", number)
        return text.partition("JobState=")[2].partition(" ")[0]

    def stop(self) -> None:
        """End it, and all jobs in it."""
        for number in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", "--signal=KILL", "--full", number)
            self.ask("scancel", number)
        deadline = time.monotonic() + 20
        while self.ask("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def _begin(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}-{len(self.processes)}.out").open("wb")
        with log:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(process)


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """A cluster for the length of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="meshwright-slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


def _port() -> int:
    descriptor, port = free_socket()
    os.close(descriptor)
    return port


def wait(until: Callable[[], bool], what: str) -> None:
    """Wait for something; RuntimeError where it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """What became of a job that was preempted."""

    events: tuple[Event, ...]
    state: str
    """Of the job, in the end."""

    @property
    def attempts(self) -> list[Attempt]:
        """Each start of its ranks."""
        return [event for event in self.events if isinstance(event, Attempt)]

    @property
    def steps(self) -> list[int]:
        """Steps as they were done; one that is lost stands here twice."""
        return [event.record.step for event in self.events if isinstance(event, StepDone)]

    @property
    def notices(self) -> list[Incident]:
        """What the launcher was told."""
        return [event for event in self.events if isinstance(event, Incident)]


def two_nodes(folder: Path) -> Path:
    """Write a plan for one rank on each of two nodes of this machine; return its file."""
    from meshwright.api.functions import plan, save  # noqa: PLC0415
    from meshwright.api.inputs import machine_of  # noqa: PLC0415

    local = machine_of("local:2", None)
    (group,) = local.groups
    parts = {"nodes": NODES, "devices_per_node": 1}
    document.write(
        ClusterSpec.of(
            local.model_dump(mode="json", exclude_none=True)
            | {"name": "two", "groups": [group.model_dump(mode="json", exclude_none=True) | parts]}
        ),
        folder / "two.yaml",
    )
    made = plan("demo-4m", str(folder / "two.yaml"), seq_len=32, global_batch=4)
    save(made, folder / "plan.yaml")
    return folder / "plan.yaml"


def preempt(slurm: Slurm, folder: Path) -> Preempted:
    """Train, take the nodes away, give them back; return what is written down of it."""
    path = two_nodes(folder)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    command = [sys.executable, "-m", "meshwright", "launch", str(path), "--on", "slurm"]
    options = f"--steps {STEPS} --data {folder}/text.txt --checkpoint {folder}/saved"
    settings = "--job partition=train --job cpus-per-task=1"
    told = [*options.split(), *settings.split(), "--output", str(folder / "out")]
    environment = {**slurm.environment, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *told], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    job = re.search(r"batch job (\d+)", done.stdout + done.stderr)
    assert job is not None, done.stdout

    def events() -> list[Event]:
        file = run.events_file(folder / "out")
        return list(events_of(file.read_bytes().splitlines(keepends=True))) if file.exists() else []

    def newest() -> int:
        return max((e.record.step for e in events() if isinstance(e, StepDone)), default=0)

    wait(lambda: newest() >= BEFORE, f"step {BEFORE}")
    urgent = slurm.ask(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"),
        "--output=/dev/null",
        *("--wrap", "sleep 3"),
    ).strip()
    wait(lambda: slurm.job(urgent) == "COMPLETED", "the urgent job")
    wait(lambda: len([e for e in events() if isinstance(e, Attempt)]) == 2, "the second attempt")
    again = newest() + AFTER
    wait(lambda: newest() >= again, f"step {again}")
    state = slurm.job(job[1])
    slurm.ask("scancel", job[1])
    return Preempted(events=tuple(events()), state=state)


KILLS = 5
KILLED_AFTER_S = (6.0, 90.0)
"""Of a start of `tune`: planning and a trial or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledTuning:
    """What became of `tune`, which was killed several times."""

    trials: tuple[tuple[str, ...], ...]
    """Lines of finished trials after each end, the last of them its own."""
    plans: tuple[str, ...]
    """Digest of the plan that lay there after each end; empty before the first trial ended."""
    answer: dict[str, Any]
    """What the last start printed."""

    @property
    def kept(self) -> bool:
        """Whether no end lost or changed a finished trial."""
        pairs = zip(self.trials, self.trials[1:], strict=False)
        return all(after[: len(before)] == before for before, after in pairs)

    @property
    def valid(self) -> bool:
        """Whether the plan after each end is of one that had run by then."""
        return all(
            plan in {json.loads(line)["plan_digest"] for line in lines}
            for plan, lines in zip(self.plans, self.trials, strict=True)
            if lines
        )


def tune(
    slurm: Slurm, folder: Path, *, kills: int = KILLS, budget: str = "8 trials"
) -> KilledTuning:
    """Tune on both nodes by srun, end it by SIGKILL and start it again; return what is left."""
    two_nodes(folder)
    python = f"{sys.executable} -P -m meshwright"
    run = f"srun --nodes={NODES} --ntasks-per-node=1 {python} launch {{plan}} --output {{output}}"
    command = [*python.split(), "tune", "demo-4m", "--cluster", str(folder / "two.yaml"), "--json"]
    command += ["--seq-len", "32", "--global-batch", "4", "--budget", budget]
    command += ["--run", f"{run} --steps 42", "-o", str(folder / "best.yaml")]
    environment = {**slurm.environment, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    rng, lines, plans = random.Random(0), list[tuple[str, ...]](), list[str]()

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
        )

    def look() -> None:
        trials, plan = folder / "best-trials" / "trials.jsonl", folder / "best.yaml"
        lines.append(tuple(trials.read_text().splitlines()) if trials.exists() else ())
        plans.append(document.read(Plan, plan).digest if plan.exists() else "")

    for _ in range(kills):
        child = start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(rng.uniform(*KILLED_AFTER_S))
        child.kill()
        child.communicate()
        wait(lambda: not slurm.ask("squeue", "-h").strip(), "the end of the killed trial's job")
        look()
    told, _ = start().communicate()
    look()
    return KilledTuning(trials=tuple(lines), plans=tuple(plans), answer=json.loads(told))


def _tuned(slurm: Slurm, folder: Path) -> int:
    """Print what became of `tune`; 0 if nothing was lost."""
    found = tune(slurm, folder)
    finished = ", ".join(str(len(lines)) for lines in found.trials)
    print(f"finished trials after each of {KILLS} kills and at the end: {finished}")
    print(f"unchanged: {found.kept}; the plan was always one that ran: {found.valid}")
    print(f"{found.answer['layout']}: {found.answer['step_time_s']} s; {found.answer['stopped']}")
    return 0 if found.kept and found.valid else 1


def main() -> int:
    why = refusal()
    if why:
        print(f"no Slurm here: {why}", file=sys.stderr)
        return 1
    if sys.argv[1:] == ["tune"]:
        with tempfile.TemporaryDirectory(prefix="meshwright-tuned-") as name, cluster() as slurm:
            return _tuned(slurm, Path(name))
    with tempfile.TemporaryDirectory(prefix="meshwright-preempted-") as name, cluster() as slurm:
        found = preempt(slurm, Path(name))
    first, second = found.attempts
    lost = len(found.steps) - len(set(found.steps))
    print(f"notice: {', '.join(notice.evidence for notice in found.notices)}")
    print(
        f"went on after step {second.after_step}, {second.at_unix_s - first.at_unix_s:.0f} s later"
    )
    print(f"{len(set(found.steps))} steps done, {lost} of them twice; the job is {found.state}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
