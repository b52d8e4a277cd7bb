"""Host memory: what the system says of processes that it killed for it, and of how much they had.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
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


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
