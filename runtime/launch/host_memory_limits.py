"""Host memory: what the system says of processes that it killed for it, and of how much they had.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.planner.documents.units import bytes_text

PYTHON_BYTES = 5 * 10**8
"""Host memory of a rank that has imported torch: 0.25 GB on CPUs alone, and 0.5 GB beside CUDA."""
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_NOW = re.compile(r"^(?:VmRSS|VmSwap):\s+(\d+) kB$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_MOST = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def killed_for_memory(group_file: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """Return how many processes of this one's control group were killed for memory; 0 if unknown.

    Ranks are in the group of their launcher.  Both versions of control groups are read.
    """
    for line in _text(group_file).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            files = [groups / f"{path.lstrip('/')}/memory.events", groups / "memory.events"]
        elif "memory" in controllers.split(","):
            within = groups / "memory"
            files = [
                within / f"{path.lstrip('/')}/memory.oom_control",
                within / "memory.oom_control",
            ]
        else:
            continue
        for file in files:
            if seen := _KILLS.search(_text(file)):
                return int(seen[1])
    return 0


def most_bytes(process: int) -> int:
    """Return the most memory that a process has had so far; 0 where it is gone."""
    seen = _MOST.search(_text(Path(f"/proc/{process}/status")))
    return 1024 * int(seen[1]) if seen else 0


def now_bytes(process: int) -> int:
    """Return the memory that a process has now, and what of it was swapped; 0 where it is gone."""
    text = _text(Path(f"/proc/{process}/status"))
    return 1024 * sum(int(seen[1]) for seen in _NOW.finditer(text))


def available_bytes(
    group_file: Path = OWN_GROUPS, groups: Path = GROUPS, memory: Path = MEMORY
) -> int:
    """Return the memory that the node has yet for us: free, or to the limit of our control group.

    Only the second version of control groups is read.
    """
    seen = _AVAILABLE.search(_text(memory))
    left = 1024 * int(seen[1]) if seen else 0
    for line in _text(group_file).splitlines():
        number, _, rest = line.partition(":")
        path = rest.partition(":")[2].lstrip("/")
        if number == "0":
            for folder in (groups / path, groups):
                most, used = _text(folder / "memory.max"), _text(folder / "memory.current")
                if most.strip().isdecimal() and used.strip().isdecimal():
                    left = min(left, max(0, int(most) - int(used)))
    return left


def memory_problem(
    *, ranks: int, process_bytes: float, copies_bytes: float, available: float
) -> str | None:
    """Return what ranks and launcher of a node should take of its memory, if it has not so much.

    A process takes `process_bytes` beside PYTHON_BYTES of Python and torch; copies of all ranks,
    and of a ward's, lie in the launcher's memory.

    >>> memory_problem(ranks=8, process_bytes=2e9, copies_bytes=70e9, available=200e9)
    >>> memory_problem(ranks=8, process_bytes=2e9, copies_bytes=70e9, available=80e9)
    'ranks should take 18.6 GiB of host memory and copies of their state 65.2 GiB, and 74.5 GiB \
are free on this node'
    """
    each = ranks * (PYTHON_BYTES + process_bytes)
    if each + copies_bytes <= available:
        return None
    copies = f" and copies of their state {bytes_text(copies_bytes)}" if copies_bytes else ""
    return (
        f"ranks should take {bytes_text(each)} of host memory{copies}, and "
        f"{bytes_text(available)} are free on this node"
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
