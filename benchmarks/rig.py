"""Hosts on one machine: network namespaces, each with a cable to one switch, shaped to any rate.

    python benchmarks/rig.py --hosts 2 --rate 100mbit -- COMMAND...

runs COMMAND once in every host, with what `torchrun` tells the process of a node in its environment
(PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT), and ends with the first that fails.

A host has its own network, host name and /etc/hosts; processor, memory and files are the machine's.
Cables are shaped in both directions by a token bucket (tc-tbf).  Messages smaller than the bucket,
128 KiB or 2 ms at the rate, pass at full speed after a pause, so measure with 1 MiB and more.

Needs Linux, iproute2, and root with CAP_NET_ADMIN and CAP_SYS_ADMIN; `refusal` says what lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NETWORK = "10.77.0"
PORT = 29400
LEAST_BUCKET_BYTES = 128 * 2**10
BUCKET_S = 2e-3
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Rig:
    """Some hosts that are up; `down` removes them."""

    def __init__(self, hosts: int, *, prefix: str | None = None) -> None:
        self.hosts = hosts
        self._prefix = prefix or f"mw{os.getpid()}"
        self._switch = f"{self._prefix}-sw"
        self._files = Path(tempfile.mkdtemp(prefix="meshwright-rig-"))
        try:
            self._up()
        except BaseException:
            self.down()
            raise

    def _up(self) -> None:
        (self._files / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address(i)} {self.name(i)} node{i}\n" for i in range(self.hosts))
        )
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for i in range(self.hosts):
            host = self.namespace(i)
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip(*f"-n {self._switch} link add p{i} type veth peer name eth0 netns {host}".split())
            _ip(*f"-n {self._switch} link set p{i} master br0 up".split())
            _ip(*f"-n {host} addr add {address(i)}/24 dev eth0".split())
            _ip(*f"-n {host} link set eth0 up".split())

    def namespace(self, host: int) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._prefix}-h{host}"

    def name(self, host: int) -> str:
        """Return what a host calls itself."""
        return f"rig{host}"

    def shape(self, rate: str | None, hosts: Sequence[int] | None = None) -> None:
        """Limit the cables of some hosts, both directions of each; None takes the limit away.

        A rate is written as tc does: `100mbit`, `1gbit`.
        """
        for i in range(self.hosts) if hosts is None else hosts:
            for namespace, device in ((self.namespace(i), "eth0"), (self._switch, f"p{i}")):
                inside = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
                if rate is None:
                    subprocess.run(
                        [*inside, "del", "dev", device, "root"], capture_output=True, check=False
                    )
                    continue
                bucket = max(LEAST_BUCKET_BYTES, int(bits_per_s(rate) / 8 * BUCKET_S))
                limit = f"root tbf rate {rate} burst {bucket} latency 50ms"
                _run([*inside, "replace", "dev", device, *limit.split()])

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return what runs a command inside a host."""
        inside = f'hostname {self.name(host)}; mount --bind "{self._files}/hosts" /etc/hosts; '
        return [
            "nsenter",
            f"--net=/var/run/netns/{self.namespace(host)}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            inside + 'exec "$@"',
            "_",
            *command,
        ]

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        quiet: bool = False,
    ) -> list[str]:
        """Run one command in every host, as the processes of one job; return their stdout by host.

        The first that fails ends the others, and its stderr is the error.
        """
        outputs = [self._files / f"out-{i}" for i in range(self.hosts)]
        errors = [self._files / f"err-{i}" for i in range(self.hosts)]
        processes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + timeout_s
        try:
            for i in range(self.hosts):
                with outputs[i].open("wb") as out, errors[i].open("wb") as err:
                    processes.append(
                        subprocess.Popen(
                            self.command(i, command),
                            env={**os.environ, **self.job(i), **(environment or {})},
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err if quiet or i else None,
                            start_new_session=True,
                        )
                    )
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            codes = [process.poll() for process in processes]
            _end(processes)
        if any(codes) or None in codes:
            said = "\n".join(
                f"--- host {i}: {'ran too long' if code is None else f'exit {code}'}\n"
                + errors[i].read_text(errors="replace")[-3000:]
                for i, code in enumerate(codes)
            )
            raise RuntimeError(f"{' '.join(command)} failed in the rig:\n{said}")
        return [path.read_text() for path in outputs]

    def job(self, host: int) -> dict[str, str]:
        """Return what torchrun's environment says to the process of a node."""
        return {
            "PET_NNODES": str(self.hosts),
            "PET_NODE_RANK": str(host),
            "PET_MASTER_ADDR": address(0),
            "PET_MASTER_PORT": str(PORT),
        }

    def down(self) -> None:
        """Remove all hosts and the switch."""
        for namespace in (*map(self.namespace, range(self.hosts)), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        shutil.rmtree(self._files, ignore_errors=True)


@contextlib.contextmanager
def rig(hosts: int, rate: str | None = None) -> Iterator[Rig]:
    """Hosts for the length of a `with` block, which SIGTERM ends as Ctrl-C does."""
    made = Rig(hosts)
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if in_main else None
    try:
        if rate is not None:
            made.shape(rate)
        yield made
    finally:
        made.down()
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def address(host: int) -> str:
    """Return a host's address on the switch."""
    return f"{NETWORK}.{host + 1}"


def bits_per_s(rate: str) -> float:
    """Return the bits per second that tc understands.

    >>> bits_per_s("100mbit"), bits_per_s("1gbit")
    (100000000.0, 1000000000.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if match is None:
        raise ValueError(f"'{rate}' is no rate; write 100mbit or 1gbit")
    return float(match[1]) * UNITS[match[2]]


@functools.cache
def refusal() -> str | None:
    """Return why hosts cannot be made here, or None; found out by making one."""
    for tool in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no '{tool}'"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with rig(1, "100mbit") as made:
            probe = made.command(0, ["true"])
            subprocess.run(probe, check=True, capture_output=True, timeout=10)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"a shaped network namespace cannot be made: {str(error)[-200:]}"
    return None


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let what still runs end itself, then kill it and all that it started."""
    for number, grace_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="of every cable: 100mbit, 1gbit; default: not shaped")
    parser.add_argument("--slow", help="HOST=RATE: the cable of one host, as in 1=50mbit")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    why = refusal()
    if why:
        print(f"no hosts here: {why}", file=sys.stderr)
        return 1
    with rig(args.hosts, args.rate) as made:
        if args.slow:
            host, _, rate = args.slow.partition("=")
            made.shape(rate, [int(host)])
        outputs = made.run(args.command, timeout_s=args.timeout)
    for i, output in enumerate(outputs):
        sys.stdout.write("".join(f"[{i}] {line}\n" for line in output.splitlines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
