"""Host memory: what the system says of processes that it killed for it, and of how much they had.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from pathlib import Path

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


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
