"""Launchers that are forked, and their zygotes with them, from a process that has imported all.

    with nursery(folder) as forks:
        launcher = ForkedLauncher(forks, ["launch", plan, "--elastic"], environment, log=log)

A launcher, its zygote and its ranks each import for seconds of processor time what all of them
have in common; forks have it.  Apart from that they run as they are: the launcher by the command
line, the zygote and ranks by their own functions, each a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.__main__ import main as run_command
from meshwright.launch import launch as launches
from meshwright.launch import multi_node
from meshwright.runtime.launch import rank_main as rank
from meshwright.runtime.launch.fork_server import Zygote
from tests.runtime.forked_zygote import ForkedZygote
from tests.runtime.rooms import ROOT, Forked

IMPORTS = (
    "torch.distributed", "meshwright.runtime.launch.training_loop",
    "meshwright.runtime.launch.launch",
    "meshwright.cli", "meshwright.api.commands", "meshwright.render.text",
    "meshwright.render.json_output", "tests.runtime.nursery",
)  # fmt: skip
_rank_main = rank.main


def nursery(folder: Path) -> Zygote:
    """Return the process that forks launchers; `folder` gets its log."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    forks = Zygote(imports=IMPORTS)
    forks.warm(_with_ours(common_environment()), log=folder / "logs" / "launcher.log")
    return forks


def _with_ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


def common_environment() -> dict[str, str]:
    """Return an environment that is the same in all tests, but for names of MESHWRIGHT_."""
    names = [name for name in os.environ if not name.startswith(("PYTEST", "COLUMNS"))]
    return {**{name: os.environ[name] for name in names}, "OMP_NUM_THREADS": "1"}


class ForkedLauncher(Forked):
    """A launcher that was forked."""

    def __init__(
        self,
        forks: Zygote,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path,
        begins_with: str = "",
    ) -> None:
        """Start it; it runs `begins_with` before all else, and so do its ranks."""
        self._log = log
        self._fork = forks.start([begins_with, *arguments], _with_ours(environment), log=log)
        while not self._fork.pid and self._fork.poll() is None:
            forks.await_news()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._fork.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._fork.poll()

    def poll(self) -> int | None:
        return self._fork.poll()


def main(arguments: Sequence[str]) -> int:
    """Be a launcher: run a command, whose first argument is what is run before."""
    rank.main = _rank_main
    rank.die_with_launcher()
    for module in (launches, multi_node):
        module.Zygote = ForkedZygote  # type: ignore[attr-defined]
    begins_with, *command = arguments
    exec(begins_with, {})
    sys.argv = ["meshwright", *command]
    return run_command()
