"""A share of a core for every rank, kept by the kernel: none can lend what it does not use.

    with quotas(4) as environment: ...      ranks started with it have 0.45 of a core each

More ranks than cores on one machine lend each other time: one that waits for a message costs
nothing, and bubbles of a pipeline vanish.  Here every rank is in a control group of its own with a
bandwidth limit (cpu.max, or cpu.cfs_quota_us of version 1), in periods so short that waiting within
one is as good as none.  A rank finds its group by itself: `environment` has a folder on PYTHONPATH
whose `sitecustomize` enters it by RANK, before anything else runs.

Needs Linux and the right to make control groups; `refusal` says what lacks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

VERSION_1, VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PERIOD_US = 4000
SHARE = 0.45
"""Of a core: with two ranks a core a tenth is left for the kernel and for who watches."""
ENTER = """
import os
if "RANK" in os.environ:
    with open(os.path.join(os.environ["QUOTA_GROUPS"], "rank-" + os.environ["RANK"],
            "cgroup.procs"), "w") as procs:
        procs.write(str(os.getpid()))
"""


def refusal() -> str | None:
    """Return why ranks cannot be given shares here, None if they can."""
    try:
        with quotas(1):
            return None
    except OSError as error:
        return f"control groups cannot be made: {error}"


@contextlib.contextmanager
def quotas(ranks: int, *, share: float = SHARE) -> Iterator[dict[str, str]]:
    """Make a control group for each rank; yield what their environment needs."""
    parent = _root() / f"meshwright-{os.getpid()}"
    with contextlib.ExitStack() as made, tempfile.TemporaryDirectory() as folder:
        parent.mkdir()
        made.callback(parent.rmdir)
        if parent.parent == VERSION_2:
            (parent / "cgroup.subtree_control").write_text("+cpu")
        for rank in range(ranks):
            group = parent / f"rank-{rank}"
            group.mkdir()
            made.callback(group.rmdir)
            _limit(group, round(share * PERIOD_US))
        Path(folder, "sitecustomize.py").write_text(ENTER)
        yield {"QUOTA_GROUPS": str(parent), "PYTHONPATH": folder}


def _root() -> Path:
    if (VERSION_1 / "cpu.cfs_quota_us").exists() or (VERSION_1 / "cpu.shares").exists():
        return VERSION_1
    if "cpu" not in (VERSION_2 / "cgroup.controllers").read_text().split():
        raise FileNotFoundError(2, "no controller of processor time", str(VERSION_2))
    (VERSION_2 / "cgroup.subtree_control").write_text("+cpu")
    return VERSION_2


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        return
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota_us))
