"""`--on ray`: a launcher on each node of an existing Ray cluster, again where a node is lost.

Ray chooses the nodes: one bundle of devices on each (a placement group, STRICT_SPREAD), and in it
an actor that runs the node's launcher.  A run with checkpoints goes on from the newest one, on the
nodes that Ray then has, where a node was lost, or where it failed after it had saved a step.  Nodes
have the same files and the same installation at the same paths.  Only the core of Ray is used.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from meshwright.launch.ssh import HostCommand
from meshwright.launch.ssh_remote import COMMAND, version, wrong_here
from meshwright.planner.errors import DocumentError, HandedOver, LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.planner.framework_configs.job_files import job_settings
from meshwright.runtime.core import checksums
from meshwright.runtime.run.authenticated_channel import SECRET, new_secret
from meshwright.runtime.run.preemption import SIGNALS
from meshwright.runtime.run.rank_exit import end_with_parent

SETTINGS = ("address", "restarts", "wait")
RESTARTS = 3
"""Usual number of starts after the first."""
WAIT_S = 60.0
"""Usual seconds within which the cluster must have room for the run."""
POLL_S = 0.5
LAST_S = 10.0
"""Seconds in which the last output of a launcher that has ended arrives."""
END_S = 30.0
"""Seconds that launchers have to end after a signal."""


class NodeLauncher:
    """The launcher of one node: an actor of Ray."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._output: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._pumps: list[threading.Thread] = []

    def check(self, asked: Mapping[str, Any]) -> list[str]:
        """Return what differs here from what the run needs."""
        try:
            os.chdir(self._folder)
        except OSError as error:
            return [f"{self._folder}: {error.strerror or error}"]
        return list(wrong_here(asked))

    def address(self) -> str:
        """Return HOST:PORT of this node, with a port that is free."""
        host = importlib.import_module("ray").util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self, arguments: Sequence[str], secret: str) -> None:
        """Start the launcher; its secret is in the environment alone."""
        # Ray's number of threads is that of an actor, and not of a rank.
        environment = {
            name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
        }
        self._process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self._folder,
            env={**environment, SECRET: secret},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),  # noqa: PLW1509 - see ssh_remote
        )
        pairs = (("out", self._process.stdout), ("err", self._process.stderr))
        self._pumps = [
            threading.Thread(target=self._pump, args=pair, daemon=True) for pair in pairs
        ]
        for pump in self._pumps:
            pump.start()

    def _pump(self, name: str, source: IO[str]) -> None:
        with source:
            for line in source:
                self._output.put((name, line))

    def poll(self) -> tuple[list[tuple[str, str]], int | None]:
        """Return new output, and the exit status once the launcher has ended."""
        assert self._process is not None, "start comes first"
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(POLL_S)
            for pump in self._pumps:  # what a process that is left behind holds open has its end
                pump.join(LAST_S)
        printed = []
        with contextlib.suppress(queue.Empty):
            while True:
                printed.append(self._output.get_nowait())
        return printed, code

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        if self._process is not None:
            self._process.send_signal(number)


@dataclass(slots=True, eq=False)
class _RayNode:
    """The driver's side of a node."""

    number: int
    actor: Any
    code: int | None = None
    is_lost: bool = False
    has_results: bool = False
    last: str = ""
    """Last line of its launcher's complaints."""
    waiting: Any = field(default=None)

    @property
    def is_over(self) -> bool:
        """True if nothing more comes from it."""
        return self.is_lost or self.code is not None


def on_ray(
    command: HostCommand,
    job: Sequence[str],
    *,
    devices: int,
    saved: Path | None,
    dry_run: bool,
) -> None:
    """Run a command on the nodes of a Ray cluster until it has ended there.

    `devices` are those of a node, and `saved` is the folder of checkpoints that it goes on from.
    Raises HandedOver where a notice ended it, LaunchError where the cluster cannot run it and where
    it failed for good.
    """
    settings = job_settings(job)
    for name in settings:
        if name not in SETTINGS:
            raise DocumentError("job", f"'{name}' is not known; of Ray: {', '.join(SETTINGS)}")
    restarts = _count(settings.get("restarts", str(RESTARTS)), "restarts")
    wait_s = float(_count(settings.get("wait", f"{WAIT_S:g}"), "wait"))
    if dry_run:
        for node in range(command.nodes):
            words = _arguments(command, node, "HOST:PORT")
            print(lines(f"node {node}: {shlex.join(['meshwright', *words])}"))
        return
    ray = _ray()
    address = settings.get("address", os.environ.get("RAY_ADDRESS", "auto"))
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"on: no Ray cluster answers at {address}; start one with `ray start --head`, or name "
            "its address by --job address=HOST:PORT"
        ) from error
    try:
        for attempt in range(restarts + 1):
            before = _newest(saved)
            try:
                _RayAttempt(ray, command, devices, wait_s).run()
                return
            except _NodeLost as lost:
                if attempt == restarts or saved is None:
                    raise LaunchError(f"on: {lost}") from lost
                print(f"meshwright: {lost}; starting again", file=sys.stderr)
            except HandedOver:
                raise
            except LaunchError as error:
                if attempt == restarts or saved is None or _newest(saved) == before:
                    raise
                print(f"meshwright: {lines(str(error))}; starting again", file=sys.stderr)
    finally:
        ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(
            "on: --on ray needs the package ray; install it: pip install ray"
        ) from error


def _count(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise DocumentError("job", f"{name}={text:.20}: is no whole number; write {name}=3")
    return int(text)


def _newest(saved: Path | None) -> str | None:
    """Return the name of the newest checkpoint, None if there is none that is seen from here."""
    from meshwright.runtime.checkpoint.checkpoint import newest  # noqa: PLC0415 - it takes torch

    checkpoint = None if saved is None else newest(saved)
    return None if checkpoint is None else checkpoint.name


def _arguments(command: HostCommand, node: int, rendezvous: str) -> list[str]:
    if command.nodes == 1:
        return list(command.arguments)
    where = ["--nodes", str(command.nodes), "--node", str(node)]
    return [*command.arguments, *where, "--rendezvous", command.rendezvous or rendezvous]


class _NodeLost(Exception):  # noqa: N818 - an end of an attempt, and no error of the user's
    """A node left the cluster, or its actor ended."""


class _RayAttempt:
    """One start of the command on all nodes."""

    def __init__(self, ray: Any, command: HostCommand, devices: int, wait_s: float) -> None:
        self._ray, self._command = ray, command
        self._wait_s = wait_s
        kind = "GPU" if command.devices else "CPU"
        self._bundle = {kind: devices, **({"CPU": 1} if kind == "GPU" else {})}
        self._signals = 0
        self._lost = tuple(
            getattr(ray.exceptions, name) for name in ("RayActorError", "RayTaskError")
        )

    def run(self) -> None:
        """Place, start and follow the command; release what was placed."""
        ray = self._ray
        group = ray.util.placement_group(
            [self._bundle] * self._command.nodes, strategy="STRICT_SPREAD"
        )
        nodes: list[_RayNode] = []
        try:
            if not group.wait(self._wait_s):
                raise LaunchError(self._too_small())
            nodes = [
                _RayNode(number, self._actor(group, number))
                for number in range(self._command.nodes)
            ]
            self._check(nodes)
            self._follow(nodes)
        finally:
            for node in nodes:
                ray.kill(node.actor)
            ray.util.remove_placement_group(group)

    def _actor(self, group: Any, number: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        placed = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        return (
            self._ray.remote(NodeLauncher)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_concurrency=2,
                scheduling_strategy=placed,
            )
            .remote(str(Path.cwd()))
        )

    def _too_small(self) -> str:
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        kind = "GPU" if "GPU" in self._bundle else "CPU"
        there = ", ".join(f"{node.get(kind, 0):g}" for node in alive[:8])
        return (
            f"on: the Ray cluster has no room for {self._command.nodes} nodes with "
            f"{self._bundle[kind]} {kind}s each; its nodes have {there} {kind}s. Wait for other "
            "jobs, add nodes, or plan for what is there"
        )

    def _check(self, nodes: Sequence[_RayNode]) -> None:
        """Raise LaunchError where nodes are not as the run needs them."""
        files = {file: checksums.of_file(Path(file).resolve()) for file in self._command.files}
        asked = {"version": version(), "files": files, "devices": self._command.devices}
        problems = self._results(node.actor.check.remote(asked) for node in nodes)
        wrong = [
            f"node {node.number}: {'; '.join(differences)}"
            for node, differences in zip(nodes, problems, strict=True)
            if differences
        ]
        if wrong:
            raise LaunchError(f"on: {'; '.join(wrong[:8])}")

    def _results(self, asked: Iterator[Any]) -> list[Any]:
        try:
            answers: list[Any] = self._ray.get(list(asked))
        except self._lost as error:
            raise _NodeLost("a node was lost before the run began") from error
        return answers

    def _follow(self, nodes: Sequence[_RayNode]) -> None:
        """Start the launchers and pass on what they print until all have ended."""
        secret = new_secret()
        (address,) = self._results(node.actor.address.remote() for node in nodes[:1])
        self._results(
            node.actor.start.remote(_arguments(self._command, node.number, address), secret)
            for node in nodes
        )
        with self._forwarding_signals(nodes):
            for node in nodes:
                node.waiting = node.actor.poll.remote()
            while left := [node for node in nodes if not node.is_over]:
                self._ray.wait([node.waiting for node in left], timeout=2 * POLL_S)
                for node in left:
                    self._step(node)
                if any(node.is_lost or node.code for node in nodes):
                    break
            failed = [node for node in nodes if node.is_lost or node.code]
            if failed:
                self._end(nodes)
        self._judge(nodes, failed)

    def _step(self, node: _RayNode) -> None:
        """Pass on what a node has printed since, if it has answered."""
        ready, _ = self._ray.wait([node.waiting], timeout=0)
        if not ready:
            return
        try:
            output, node.code = self._ray.get(node.waiting)
        except self._lost:
            node.is_lost = True
            return
        for name, line in output:
            if name == "out":
                node.has_results = True
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                text = lines(line.rstrip("\r\n"))
                node.last = text if text.startswith("meshwright: ") or not node.last else node.last
                print(f"node {node.number}: {text}", file=sys.stderr, flush=True)
        if node.code is None:
            node.waiting = node.actor.poll.remote()

    def _end(self, nodes: Sequence[_RayNode]) -> None:
        """End the launchers that are left: a node that fails ends the run on all."""
        end_s = time.monotonic() + END_S
        for node in nodes:
            if not node.is_over:
                node.actor.signal.remote(int(signal.SIGTERM))
        while (left := [node for node in nodes if not node.is_over]) and time.monotonic() < end_s:
            self._ray.wait([node.waiting for node in left], timeout=POLL_S)
            for node in left:
                self._step(node)

    def _judge(self, nodes: Sequence[_RayNode], failed: Sequence[_RayNode]) -> None:
        """Raise how the attempt ended, unless well.  Nodes that failed first are its cause."""
        if not failed:
            return
        lost = [str(node.number) for node in failed if node.is_lost]
        if lost:
            raise _NodeLost(f"the Ray cluster lost node {', '.join(lost)} of the run")
        if any(node.code == HandedOver.status for node in failed):
            raise HandedOver("a notice ended the run; start it again with --resume")
        reasons = "; ".join(
            f"node {node.number}: {node.last or f'ended with status {node.code}'}"
            for node in failed
        )
        raise LaunchError(f"on: {reasons}")

    @contextlib.contextmanager
    def _forwarding_signals(self, nodes: Sequence[_RayNode]) -> Iterator[None]:
        """Hand signals on to the launchers: the first is a notice, the next ends all at once."""

        def forward_signal(number: int, _: object) -> None:
            self._signals += 1
            sent = signal.SIGTERM if self._signals == 1 else signal.SIGINT
            for node in nodes:
                if not node.is_over:
                    node.actor.signal.remote(int(sent))

        numbers = (signal.SIGINT, *SIGNALS)
        before = {number: signal.signal(number, forward_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
