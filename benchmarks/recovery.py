"""From a fault to the next step: ranks and nodes are killed in turn, on hosts of two ranks each.

    python -m benchmarks.recovery --rounds 2          # 20 recoveries of sleeping ranks
    python -m benchmarks.recovery --silent            # nodes stand still instead of being killed

Launchers, their zygotes and ranks are forked from a process that has imported what they need, so
that a round costs half a minute of processor time and not several.  Each launcher is a node, in a
network namespace of its own where those can be made
(`benchmarks.rig`) and else on loopback.  Steps are those of a tiny model, and sleep, so that what
is measured is the protocol and not the contention of training.  In a round each rank of three nodes
is killed once, which is restarted in place; then nodes are killed, the lead first, as long as there
are spares, which take their places; then without.  What is left behind is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig import Rig, address, refusal, rig
from meshwright.api.inputs import machine_of
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import write
from meshwright.planner.documents.events import Decision, Event, Incident, StepDone, events_of
from meshwright.planner.documents.plan import Plan, PlannedModel
from meshwright.runtime.launch.fork_server import Zygote
from meshwright.runtime.resilience.hang_detector import is_stopped
from meshwright.runtime.resilience.node_agent import Register
from meshwright.runtime.run.run_folder import account_of, events_file
from tests.runtime.forked import ForkedLauncher, common_environment, nursery
from tests.runtime.ports import free_port
from tests.runtime.rooms import MODEL, Room, plan_of, slow

NODES, RANKS = 3, 2
PATIENCE_S = 400.0
EVERY = 50
START_S = 60.0
"""How long ranks may take until two steps are done; one that stands still is found after that."""
CLONE_NEWNET = 0x40000000
BATCH = 12
STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and what followed."""

    kind: str
    named_s: float
    """From the fault until it was written down."""
    step_s: float
    """From the fault to the end of the next step."""
    lost: int
    """Steps that were done again."""


class Job:
    """A run on nodes that are launchers."""

    def __init__(
        self,
        folder: Path,
        hosts: Rig | None,
        forks: Zygote,
        *,
        nodes: int,
        step_s: float,
        ranks: int = RANKS,
        steps: int = STEPS,
        every: int = EVERY,
        plan: Path | None = None,
        environment: Mapping[str, str] | None = None,
        begins_with: str = "",
    ) -> None:
        """Start a run on three `nodes`, of which the others are spares, by `forks`.

        It is saved `every` so many steps.  `plan` is one of `planned`, of so many `ranks`; one is
        made otherwise.  Launchers, and so their ranks, run `begins_with` before all else.
        """
        self.room, self._hosts, self._nodes = Room(folder), hosts, nodes
        self._ranks, self._steps, self._step_s, self._every = ranks, steps, step_s, every
        self._forks, self._begins_with = forks, begins_with
        self._environment = environment or {
            **common_environment(),
            "MESHWRIGHT_SECRET": "a secret of this benchmark alone",
        }
        (folder / "logs").mkdir()
        self.more: tuple[str, ...] = ()
        """Options of launchers that are started from now on."""
        self.room.text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        self._plan = plan or planned(self.room, ranks)
        self._port = free_port()
        self.launchers = [self.start(node) for node in range(nodes)]

    def start(self, node: int) -> ForkedLauncher:
        """Start a node's launcher."""
        lead = "127.0.0.1" if self._hosts is None else address(0)
        folder = self.room.folder
        arguments = [
            *("launch", str(self._plan), "--elastic"),
            *(
                "--data",
                str(self.room.text),
                "--steps",
                str(self._steps),
                "--scale-up-after",
                "1e9",
            ),
            *("--checkpoint-every", str(self._every), "--checkpoint", str(folder / "saved")),
            *("--output", str(folder / "out"), "--nodes", str(self._nodes)),
            *("--node", str(node), "--rendezvous", f"{lead}:{self._port}", *self.more),
        ]
        inside = "" if self._hosts is None else _inside(self._hosts.namespace(node))
        launcher = ForkedLauncher(
            self._forks,
            arguments,
            self._environment,
            log=self.log(node),
            begins_with=inside + slow(self._step_s) + self._begins_with,
        )
        self.room.started.append(launcher)
        return launcher

    def log(self, node: int) -> Path:
        """Return what a node's launcher says."""
        return self.room.folder / "logs" / f"launcher-{node}.log"

    def events(self) -> list[Event]:
        """Return what has happened."""
        file = events_file(self.room.folder / "out")
        if not file.exists():
            return []
        with file.open("rb") as lines:
            return list(events_of(lines))

    def step_after(self, number: int) -> float | None:
        """Return when the first step was done behind the decision of this number."""
        decisions = 0
        for event in self.events():
            decisions += isinstance(event, Decision) and event.reaction != "interval"
            if decisions >= number and isinstance(event, StepDone):
                return event.at_unix_s
        return None

    def members(self) -> list[int]:
        """Return the nodes that train, by their places."""
        epoch = Register(self.room.folder / "saved").newest()
        assert epoch is not None
        return [one.node for one in epoch.members]

    def recovery(self, kind: str, number: int, fault: Callable[[], None]) -> Recovery:
        """Let something go wrong, and wait for the first step after that."""
        lost = account_of(self.room.folder / "out").steps_lost
        begin_s = time.time()
        fault()
        self.wait(lambda: self.step_after(number) is not None, kind)
        incidents = [event for event in self.events() if isinstance(event, Incident)]
        done_s = self.step_after(number)
        assert done_s is not None
        return Recovery(
            kind=kind,
            named_s=incidents[-1].at_unix_s - begin_s,
            step_s=done_s - begin_s,
            lost=account_of(self.room.folder / "out").steps_lost - lost,
        )

    def wait(self, until: Callable[[], object], what: str) -> None:
        """Wait for something, while some launcher runs."""
        end = time.monotonic() + PATIENCE_S
        while not until():
            if time.monotonic() > end:
                logs = sorted(self.room.folder.glob("launcher-*.log"))
                said = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
                raise TimeoutError(f"{what}: nothing came in {PATIENCE_S:g} s\n{said}")
            time.sleep(0.1)

    def kill_rank(self, rank: int) -> None:
        os.kill(self.room.ranks()[rank], signal.SIGKILL)

    def kill_node(self, node: int) -> None:
        self.launchers[node].kill()
        self.launchers[node].wait()

    def stop_node(self, node: int) -> None:
        """Let a node stand still, its ranks too."""
        self.launchers[node].send_signal(signal.SIGSTOP)
        members = self.members()
        for rank, process in self.room.ranks().items():
            if rank // self._ranks < len(members) and members[rank // self._ranks] == node:
                os.kill(process, signal.SIGSTOP)

    def end(self) -> list[str]:
        """End what runs by a notice; return what is left behind."""
        for node in self.members():
            with contextlib.suppress(ProcessLookupError):
                self.launchers[node].send_signal(signal.SIGTERM)
        for launcher in self.launchers:
            if is_stopped(launcher.pid):
                launcher.kill()
        for launcher in self.launchers:
            launcher.wait(timeout=PATIENCE_S)
        return left_behind(self.room.folder)


def planned(room: Room, ranks: int) -> Path:
    """Write a plan for so many ranks on each of three nodes, with its model and cluster."""
    folder = room.folder
    write(MODEL, folder / "model.yaml")
    machine = machine_of("local:2", None)
    (group,) = machine.groups
    data = group.model_dump(mode="json", exclude_none=True)
    nodes = [{**data, "nodes": NODES, "devices_per_node": ranks}]
    tiers = machine.model_dump(mode="json", exclude_none=True)
    for tier in tiers["tiers"]:
        tier["devices"] = NODES * ranks
    path = folder / "cluster.yaml"
    write(ClusterSpec.of({**tiers, "name": "three", "groups": nodes}), path)
    source = str(folder / "model.yaml")
    model = PlannedModel(name="tiny", source=source, digest=MODEL.digest)
    plan = plan_of(data=2).model_dump(mode="json", exclude_none=True)
    plan["mesh"]["data_replicate"] = NODES * ranks
    own = BATCH // (NODES * ranks)
    plan |= {"global_batch": BATCH, "micro_batches": 1, "micro_batch": own}
    plan |= {"timeout_s": START_S}
    plan |= {"model": model.model_dump(exclude_none=True), "cluster": str(path)}
    return room.plan(Plan.of(plan))


def left_behind(folder: Path) -> list[str]:
    """Return processes and unnamed files that a run has left."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            log = (process / "fd" / "1").readlink()
            if log.is_relative_to(folder):
                found.append(f"process {process.name}: {log.name}")
    return [*found, *(str(path) for path in (folder / "saved").glob(".*"))]


def _inside(namespace: str) -> str:
    """Return code by which a process goes into a network namespace."""
    return (
        "import ctypes, os\n"
        f"descriptor = os.open('/var/run/netns/{namespace}', os.O_RDONLY)\n"
        f"assert ctypes.CDLL(None).setns(descriptor, {CLONE_NEWNET}) == 0\n"
        "os.close(descriptor)\n"
    )


def round_of(
    folder: Path, forks: Zygote, *, step_s: float, spares: int, seed: int, silent: bool
) -> tuple[list[Recovery], list[str]]:
    """Return one round's recoveries, and what it has left behind."""
    rng = random.Random(seed)
    nodes = NODES + spares
    with contextlib.ExitStack() as held:
        hosts = held.enter_context(rig(nodes)) if refusal() is None else None
        job = Job(folder, hosts, forks, nodes=nodes, step_s=step_s)
        held.callback(_end_all, job.launchers)
        job.wait(lambda: len([e for e in job.events() if isinstance(e, StepDone)]) > 5, "the start")
        found = []

        def recovered(kind: str, fault: Callable[[], None]) -> None:
            time.sleep(rng.uniform(2.0, 3.0))  # some steps, of which copies are on their way
            found.append(job.recovery(kind, len(found) + 1, fault))
            print(f"  {found[-1]}", flush=True)

        end_node = job.stop_node if silent else job.kill_node
        for rank in () if silent else rng.sample(range(NODES * RANKS), NODES * RANKS):
            recovered("in place", lambda rank=rank: job.kill_rank(rank))
        for number in range(spares):
            node = job.members()[0 if number == 0 else rng.randrange(NODES)]
            recovered("spare", lambda node=node: end_node(node))
        for number in range(NODES - 1):
            members = job.members()
            node = members[0 if number == 0 else rng.randrange(len(members))]
            recovered("shrink", lambda node=node: end_node(node))
        return found, job.end()


def _end_all(launchers: Sequence[ForkedLauncher]) -> None:
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def rows(found: Sequence[Recovery]) -> Iterator[str]:
    """Yield a line for each kind of recovery."""
    for kind in dict.fromkeys(one.kind for one in found):
        alike = [one for one in found if one.kind == kind]
        for name, seconds in (
            ("named after", sorted(one.named_s for one in alike)),
            ("next step after", sorted(one.step_s for one in alike)),
        ):
            middle, most = statistics.median(seconds), seconds[round(0.95 * (len(seconds) - 1))]
            most_of_all = seconds[-1]
            yield f"{kind}: {name} {middle:.1f} s, p95 {most:.1f} s, most {most_of_all:.1f} s"
        lost = [one.lost for one in alike]
        mean = statistics.mean(lost)
        yield f"{kind}: {len(alike)} times, steps lost {mean:.1f}, most {max(lost)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--spares", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step sleeps")
    parser.add_argument("--silent", action="store_true", help="nodes stand still, none is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append each recovery here")
    args = parser.parse_args()
    why = refusal()
    print(f"hosts: {NODES} of {RANKS} ranks, {f'on loopback: {why}' if why else 'in namespaces'}")
    found, left = [], []
    for number in range(args.rounds):
        print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
        with tempfile.TemporaryDirectory() as name, nursery(Path(name, "forks")) as forks:
            (folder := Path(name, "run")).mkdir()
            more, behind = round_of(
                folder,
                forks,
                step_s=args.step,
                spares=args.spares,
                seed=args.seed + number,
                silent=args.silent,
            )
        found += more
        left += behind
        if args.json is not None:
            with args.json.open("a") as out:
                for one in more:
                    out.write(
                        json.dumps({name: getattr(one, name) for name in one.__slots__}) + "\n"
                    )
    print("\n".join(rows(found)))
    print(f"left behind: {len(left)}", *left, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
