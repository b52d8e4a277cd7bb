"""Growth: ranks end after their next save, so that the run goes on on more nodes.

The launcher with rank 0 leaves a file when nodes are back that pay for it; rank 0 looks for it
where a checkpoint is saved, and tells all others.  Nothing here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.planner.system.safe_files import open_below

GROW = "MESHWRIGHT_GROW"
"""Names, to each rank of a run that may grow, the file that asks for it."""
REASON = "to go on on more nodes, ranks have ended after a save"
"""Message about ranks that ended so that the run can grow."""
TIMES = 2.0
"""Ratio of gain to cost above which a run grows."""


def environment(output: Path) -> dict[str, str]:
    """Return what tells ranks where they are asked, once none is left there of a run before."""
    _file(output).unlink(missing_ok=True)
    return {GROW: str(_file(output.absolute()))}


def request_end(output: Path) -> None:
    """Ask the ranks to end after their next save."""
    open_below(_file(output), within=output).close()


def may_be_asked() -> bool:
    """Return whether this rank's run may grow; the same on all of them.

    >>> may_be_asked()
    False
    """
    return GROW in os.environ


def is_asked() -> bool:
    """Return whether this rank's launcher asks for it."""
    return Path(os.environ[GROW]).exists()


def pays(*, left_s: float, step_s: float, larger_step_s: float, cost_s: float) -> bool:
    """Say whether more nodes gain enough in the time that is left.

    gained = left (1 - larger step / step) > TIMES cost

    Half the step for 100 s that are left gains 50 s:

    >>> [pays(left_s=100.0, step_s=2.0, larger_step_s=1.0, cost_s=cost) for cost in (24.0, 26.0)]
    [True, False]
    """
    return left_s * (1 - larger_step_s / step_s) > TIMES * cost_s


def _file(output: Path) -> Path:
    return output / "grow"
