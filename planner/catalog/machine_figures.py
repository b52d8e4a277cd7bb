"""Figures of this machine's processor and memory, measured once and cached with their date.

    CACHE/machine/KEY.json              CACHE is $MESHWRIGHT_CACHE, or ~/.cache/meshwright

A matrix product, a copy, calls of Python and of small array operations are timed in a process of
its own, where numpy takes one thread, by the time that the thread runs; a loopback socket is what
ranks on one host talk over.
Timings differ from call to call.  All ranks of a script and all commands must plan with the same
figures, or their plans differ, so the figures are cached and one process measures while others
wait.  KEY is the machine: its name, its processor, its memory and the versions
of numpy and Python.

Figures are measured again after DAYS.  Where the memory that is free has changed by a factor of
MEMORY_FACTOR, it alone is read again: the seconds of a plan stay the same.  The load at which they
were measured is cached too, and named where other programs ran on all cores.  Where no cache can be
written, each process measures for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from meshwright.planner.documents.document import Part, read_text, write_text
from meshwright.planner.documents.units import Amount, Count, Rate, Text
from meshwright.planner.errors import DocumentError, LaunchError

DAYS = 30
"""Figures that are older are measured again."""
MEMORY_FACTOR = 2
"""Factor by which free memory may differ from the cached figure."""
MEASURE = """
import json, socket, threading, time
import numpy

def best(seconds, work, clock=time.perf_counter):
    tries, end = [], clock() + seconds
    while clock() < end or len(tries) < 5:
        begin = clock()
        work()
        tries.append(clock() - begin)
    return min(tries)

side, size = 384, 32 * 2**20
left, right = (numpy.ones((side, side), numpy.float32) for _ in range(2))
product = numpy.empty_like(left)
matmul_s = best(0.08, lambda: numpy.matmul(left, right, out=product), time.thread_time)
source, target = numpy.ones(size, numpy.uint8), numpy.zeros(size, numpy.uint8)
copy_s = best(0.08, lambda: numpy.copyto(target, source), time.thread_time)

class TimedModule:  # called as torch calls one: keywords, a look for hooks, a method
    def __init__(self):
        self.scale, self.hooks = 2.0, {}

    def __call__(self, *inputs, **named):
        if self.hooks:
            raise ValueError
        return self.forward(*inputs, **named)

    def forward(self, value, shift=0.0):
        return value * self.scale + shift

module, few, count = TimedModule(), numpy.ones(8, numpy.float32), 500
sums = numpy.empty_like(few)

def calls():
    for _ in range(count):
        module(1.0, shift=1.0)

def launches():
    for _ in range(count):
        numpy.add(few, few, out=sums)

calls_s = best(0.08, calls, time.thread_time)
launches_s = best(0.08, launches, time.thread_time)

server = socket.create_server(("127.0.0.1", 0))
here = socket.create_connection(server.getsockname())
there, _ = server.accept()
for end in (here, there):
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
message = 4 * 2**20

def echo():
    buffer = bytearray(message)
    while (count := there.recv_into(buffer, 1)) and buffer[0] == 0:
        there.sendall(buffer[:count])
    while count:
        left = message - count
        while left and (count := there.recv_into(buffer, left)):
            left -= count
        if left == 0:
            there.sendall(b"x")
            count = there.recv_into(buffer, 1)

threading.Thread(target=echo, daemon=True).start()
def ping():
    here.sendall(bytes(1))
    here.recv(1)
body = bytes([1]) * message
def stream():
    here.sendall(body)
    here.recv(1)
round_trip_s = best(0.03, ping)
stream_s = best(0.06, stream)
print(json.dumps({
    "flops": 2 * side**3 / matmul_s,
    "bytes_per_s": 2 * size / copy_s,
    "call_s": calls_s / count,
    "launch_s": launches_s / count,
    "link_latency_s": round_trip_s / 2,
    "link_bytes_per_s": message / stream_s,
}))
"""


class MachineFigures(Part):
    """Rates that one thread of this machine reached, with the time of the measurement."""

    measured: Text
    """Time of the measurement in UTC, as `2026-11-23T20:45:00+00:00`."""
    flops: Rate
    """FLOP per second of a matrix product in fp32."""
    bytes_per_s: Rate
    """Bytes per second, read and written together."""
    call_s: Rate
    """Seconds of a call of a module in Python, as torch calls one."""
    launch_s: Rate
    """Seconds of an operation on a few numbers, started from Python."""
    link_latency_s: Rate
    link_bytes_per_s: Rate
    memory_bytes: Count
    """Bytes of memory that are free on the machine."""
    load: Amount = 0.0
    """Mean number of other running programs over a minute."""
    cores: Count | None = None
    """Number of cores of the machine."""

    @property
    def date(self) -> str:
        """Time of the measurement to the minute, with a note if others used all cores."""
        text = f"{datetime.fromisoformat(self.measured):%Y-%m-%d %H:%M} UTC"
        if self.cores is None or self.load <= self.cores:
            return text
        return f"{text} at load {self.load:.0f} on {self.cores} cores: this figure means little"

    def is_fresh(self, *, now: datetime) -> bool:
        """Return True if the figures are recent enough; a date in the future is not."""
        try:
            age = now - datetime.fromisoformat(self.measured)
        except (TypeError, ValueError):
            return False
        return timedelta() <= age <= timedelta(days=DAYS)

    def with_memory(self, free_bytes: int) -> MachineFigures:
        """Return these figures, with the memory that is free now if that is another amount."""
        changed = max(free_bytes, self.memory_bytes) / max(1, min(free_bytes, self.memory_bytes))
        if changed <= MEMORY_FACTOR:
            return self
        return self.model_copy(update={"memory_bytes": free_bytes})


def cache_folder() -> Path:
    """Return the user's cache folder: $MESHWRIGHT_CACHE, else that of the XDG convention."""
    named = os.environ.get("MESHWRIGHT_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def figures_file() -> Path:
    """Return the file in which the figures of this machine are cached."""
    return cache_folder() / "machine" / f"{_machine_key()}.json"


@cache
def machine_figures() -> MachineFigures:
    """Return the cached figures of this machine; measure them if there are none that count.

    Raises LaunchError where the machine cannot be measured.
    """
    file = figures_file()
    with _lock_file(file.with_suffix(".lock")):
        cached = _read(file)
        figures = _measure() if cached is None else cached.with_memory(available_bytes())
        if figures != cached:
            with contextlib.suppress(DocumentError):  # a cache that cannot be written is none
                write_text(figures.model_dump_json() + "\n", file)
        return figures


def _read(file: Path) -> MachineFigures | None:
    """Return cached figures that count; a file that is not whole is measured again."""
    try:
        figures = MachineFigures.model_validate_json(read_text(file))
    except (DocumentError, ValueError):
        return None
    return figures if figures.is_fresh(now=datetime.now(UTC)) else None


@contextlib.contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Let one process at a time look for figures; the lock ends with the process."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(file, flags, 0o600)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _machine_key() -> str:
    """Return a name for this machine as it is."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    processor = next((line for line in lines if line.startswith("model name")), platform.machine())
    try:
        numpy = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        numpy = ""
    software = [numpy, platform.python_version()]
    what = [platform.node(), processor, _meminfo()["MemTotal"], os.cpu_count(), *software]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


def _measure() -> MachineFigures:
    """Measure what one thread reaches (about 0.7 seconds)."""
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
        "1",
    )
    command = [sys.executable, "-P", "-c", MEASURE]
    try:
        result = subprocess.run(
            command, env=os.environ | one_thread, capture_output=True, timeout=60, check=True
        )
        return MachineFigures(
            **json.loads(result.stdout),
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            memory_bytes=available_bytes(),
            load=os.getloadavg()[0],
            cores=os.cpu_count(),
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise LaunchError(f"this machine could not be measured: {error}") from error


def available_bytes() -> int:
    """Return the memory that this process may still take: of the machine, or of its cgroup."""
    available = int(_meminfo()["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            left = int(Path(limit).read_text("ascii")) - int(Path(used).read_text("ascii"))
        except (OSError, ValueError):  # no such cgroup, or `max`: no limit
            continue
        if left > 0:
            available = min(available, left)
    return available


def _meminfo() -> dict[str, str]:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return dict(line.split(":", 1) for line in lines)
