"""`--hosts a,b[0-63]`: one launcher on each host over ssh, after all hosts were checked together.

Each host has the same folder, files and installation, at the same paths; errors are reported with
their host before anything starts.  Hosts beyond the plan's nodes are spares under `--elastic`, also
in the place of hosts that do not answer.  Output of hosts on stderr has their name before it; the
results come from the one that leads.  `meshwright.launch.ssh_remote` is the other side.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.launch.ssh_remote import CHUNK_BYTES, MARK, version
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.errors import DocumentError, HandedOver, LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.runtime.core import checksums
from meshwright.runtime.run.authenticated_channel import new_secret
from meshwright.runtime.run.node_rank import PORT
from meshwright.runtime.run.preemption import SIGNALS

SSH = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ServerAliveInterval=15")
REMOTE = "-P -m meshwright.launch.ssh_remote"
"""Arguments of Python on a host."""
ANSWER_S = 60.0
"""Seconds within which hosts must answer."""
MOST_HOSTS = 16_384
MOST_NAMED = 8
LAST_LINES = 12
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9.:][A-Za-z0-9.:_-]*")
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def hosts_of(text: str) -> list[str]:
    """Return the hosts of a list as Slurm writes them; DocumentError for what is none.

    >>> hosts_of("a,b[0-1,07]"), hosts_of("user@rack[1-2]-n[8-9]")[-1]
    (['a', 'b0', 'b1', 'b07'], 'user@rack2-n9')
    """
    hosts = [host for word in re.split(r",(?![^\[]*\])", text) for host in _hosts_of_word(word)]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise DocumentError("hosts", f"{host!a} is no name of a host; write a,b[0-63]")
    double = [host for host, count in collections.Counter(hosts).items() if count > 1]
    if double:
        raise DocumentError("hosts", f"{double[0]} is named twice; one launcher runs on each")
    return hosts


def _hosts_of_word(word: str) -> list[str]:
    numbers = [_numbers(inside) for inside in _PART.findall(word)]
    count = 1
    for number in numbers:
        count *= len(number)
    if count > MOST_HOSTS:
        raise DocumentError("hosts", f"{word!a} are more than {MOST_HOSTS} hosts; write fewer")
    between = _PART.sub("\0", word).split("\0")
    return [
        "".join(part for pair in zip(between, (*chosen, ""), strict=True) for part in pair)
        for chosen in itertools.product(*numbers)
    ]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise DocumentError("hosts", f"[{text}] is no list of numbers; write [0-63] or [1,4]")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """Command that is started on hosts."""

    arguments: tuple[str, ...]
    """Arguments of `meshwright`, without the number of the node."""
    files: tuple[str, ...]
    """Files that each host must have."""
    devices: int
    """Number of devices that each host needs."""
    nodes: int
    """Number of hosts that must answer."""
    spares: bool
    """True if further hosts are useful, and the command goes on without this client."""
    rendezvous: str | None = None
    """HOST:PORT of the rendezvous, where the first host's own name is not reachable."""

    @classmethod
    def of(
        cls,
        machine: ClusterSpec,
        arguments: Iterable[str],
        files: Iterable[str],
        *,
        spares: bool,
        rendezvous: str | None,
    ) -> HostCommand:
        """Return a command for a launcher on each node of a machine."""
        groups = machine.groups
        on_cpu = groups[0].accelerator.kind == "cpu"
        return cls(
            arguments=tuple(arguments),
            files=tuple(files),
            devices=0 if on_cpu else min(group.devices_per_node for group in groups),
            nodes=sum(group.nodes for group in groups),
            spares=spares,
            rendezvous=rendezvous,
        )


@dataclass(slots=True, eq=False)
class _SshHost:
    """One host and its output."""

    name: str
    process: asyncio.subprocess.Process
    last: collections.deque[str]
    """Last lines of its output."""
    node: int | None = None
    """Number of its node; None before it is started."""
    has_results: bool = False
    code: int | None = None
    follows: bool = False
    """True if it was asked to end since another had failed."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    @property
    def why(self) -> str:
        """Last line of its output, preferably one of meshwright's own."""
        ours = [line for line in self.last if line.startswith("meshwright: ")]
        return next(reversed(ours or self.last), f"ended with status {self.code}")


def nodes_text(count: int) -> str:
    """Return a number of nodes in words.

    >>> nodes_text(1), nodes_text(2)
    ('1 node', '2 nodes')
    """
    return f"{count} node{'s' * (count != 1)}"


def on_hosts(hosts: Sequence[str], command: HostCommand, *, dry_run: bool = False) -> None:
    """Run a command on hosts until it has ended on all of them.

    Raises HandedOver where a notice ended it, LaunchError where hosts are not as they have to be
    and where it failed.
    """
    ssh = shutil.which("ssh")
    if len(hosts) < command.nodes or (len(hosts) > command.nodes and not command.spares):
        more = "; hosts beyond them are of use with --elastic" if len(hosts) > command.nodes else ""
        raise LaunchError(
            f"hosts: are {len(hosts)}, and the plan is for {nodes_text(command.nodes)}{more}"
        )
    if dry_run:
        for node, host in enumerate(hosts):
            words = shlex.join(["meshwright", *_arguments(command, hosts, node)])
            print(lines(f"{shlex.join(['ssh', *SSH, host])} {words}"))
        return
    if ssh is None:
        raise LaunchError("hosts: ssh is not on this machine; install an OpenSSH client")
    asyncio.run(_SshHosts(ssh, hosts, command).run())


def _arguments(command: HostCommand, hosts: Sequence[str], node: int) -> list[str]:
    if len(hosts) == 1:
        return list(command.arguments)
    first = hosts[0].rpartition("@")[2]
    usual = f"[{first}]:{PORT}" if ":" in first else f"{first}:{PORT}"
    where = ["--nodes", str(len(hosts)), "--node", str(node)]
    return [*command.arguments, *where, "--rendezvous", command.rendezvous or usual]


class _SshHosts:
    """All hosts of one command."""

    def __init__(self, ssh: str, names: Sequence[str], command: HostCommand) -> None:
        self._ssh, self._names, self._command = ssh, names, command
        self._hosts: list[_SshHost] = []
        self._signalled = 0

    async def run(self) -> None:
        """Look at all hosts, start the command on them, and wait for its end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, *SIGNALS):
            loop.add_signal_handler(number, self._notice)
        try:
            self._hosts = await asyncio.gather(*map(self._connect, self._names))
            ready = self._ready(await asyncio.gather(*map(self._answer, self._hosts)))
            secret = new_secret()
            names = [host.name for host in ready]
            for node, host in enumerate(ready):
                host.node = node
                arguments = _arguments(self._command, names, node)
                stays = self._command.spares
                host.send({"secret": secret, "arguments": arguments, "stays": stays})
            await asyncio.gather(*(self._results(host) for host in ready))
            self._judge(ready)
        finally:
            for host in self._hosts:
                if host.process.returncode is None:
                    host.process.kill()
                    await host.process.wait()
                for task in host.tasks:
                    await task

    def _notice(self) -> None:
        """Hand a signal on: the first is a notice, the next ends all at once."""
        self._signalled += 1
        started = [host for host in self._hosts if host.node is not None]
        for host in started:
            host.send({"signal": "SIGTERM" if self._signalled == 1 else "SIGINT"})
        if not started:
            for host in self._hosts:
                host.process.kill()

    async def _connect(self, name: str) -> _SshHost:
        """Connect to a host, and ask what is there."""
        folder, python = shlex.quote(str(Path.cwd())), shlex.quote(sys.executable)
        remote = f"cd {folder} && exec {python} {REMOTE}"
        process = await asyncio.create_subprocess_exec(
            *(self._ssh, *SSH, "--", name, remote),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2**20,
            start_new_session=True,
        )
        host = _SshHost(name, process, collections.deque(maxlen=LAST_LINES))
        host.tasks.append(asyncio.create_task(self._complaints(host)))
        files = {file: checksums.of_file(Path(file).resolve()) for file in self._command.files}
        host.send({"version": version(), "files": files, "devices": self._command.devices})
        return host

    async def _answer(self, host: _SshHost) -> list[str]:
        """Return the errors of a host."""
        assert host.process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                while line := await host.process.stdout.readline():
                    if line.startswith(MARK.encode()):
                        return [str(problem) for problem in json.loads(line[len(MARK) :])["wrong"]]
                host.code = await host.process.wait()
                await asyncio.gather(*host.tasks)
        except TimeoutError:
            return [f"did not answer within {ANSWER_S:g} s"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ["does not answer as a meshwright of this version does"]
        return [host.why]

    def _ready(self, wrong: Iterable[Sequence[str]]) -> list[_SshHost]:
        """Return the hosts that are as they have to be; LaunchError where they are too few."""
        if self._signalled:
            raise LaunchError("interrupted before the command was started; give it again")
        pairs = list(zip(self._hosts, wrong, strict=True))
        refusals = [f"{host.name}: {'; '.join(problems)}" for host, problems in pairs if problems]
        ready = [host for host, problems in pairs if not problems]
        if len(ready) < self._command.nodes:
            more = f"; {len(refusals) - MOST_NAMED} more" if len(refusals) > MOST_NAMED else ""
            raise LaunchError(f"hosts: {'; '.join(refusals[:MOST_NAMED])}{more}")
        for refusal in refusals:
            print(f"meshwright: left out {lines(refusal)}", file=sys.stderr)
        return ready

    async def _complaints(self, host: _SshHost) -> None:
        """Pass on a host's stderr, line by line."""
        assert host.process.stderr is not None
        rest = b""
        while chunk := await host.process.stderr.read(CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[-CHUNK_BYTES:]
            self._print_lines(host, whole)
        self._print_lines(host, [rest] if rest else [])

    def _print_lines(self, host: _SshHost, output_lines: Iterable[bytes]) -> None:
        for line in output_lines:
            text = lines(line.decode(errors="replace").rstrip("\r"))
            host.last.append(text)
            if host.node is not None:
                print(f"{host.name}: {text}", file=sys.stderr, flush=True)

    async def _results(self, host: _SshHost) -> None:
        """Pass on a host's stdout until the host has ended."""
        assert host.process.stdout is not None
        while chunk := await host.process.stdout.read(CHUNK_BYTES):
            host.has_results = True
            sys.stdout.write(chunk.decode(errors="replace"))
            sys.stdout.flush()
        host.code = await host.process.wait()
        if host.code and not self._command.spares:  # nodes end together, whatever ends one of them
            for other in self._hosts:
                if other.node is not None and other.code is None:
                    other.follows = True
                    other.send({"signal": "SIGTERM"})

    def _judge(self, hosts: Sequence[_SshHost]) -> None:
        """Raise how the command ended, unless well: the host that leads has results.

        The end of hosts that were asked to end does not count, since it has another cause.
        """
        if any(host.code == 0 and host.has_results for host in hosts):
            return
        causes = [host for host in hosts if not host.follows]
        if any(host.code == HandedOver.status for host in causes):
            raise HandedOver("a notice ended the run; start it again with --resume")
        failed = [host for host in causes if host.code] or list(hosts)
        reasons = "; ".join(f"{host.name}: {host.why}" for host in failed[:MOST_NAMED])
        raise LaunchError(f"hosts: {reasons}")
