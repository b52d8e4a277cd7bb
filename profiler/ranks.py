"""Work that several ranks of this machine do together: started, watched, its result brought back.

    FOLDER/
    ├── orders.yaml                          written before the ranks start
    ├── progress                             how far rank 0 is, renewed as it goes on
    ├── logs/rank-00000.log                  all that a rank prints
    ├── ranks/rank-00000.failure.json        why a rank stopped
    └── result.json                          by rank 0, when it is done

`profiler.rank` is what each process runs.  Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from planner.document import Document, write, write_text
from planner.errors import DocumentError, LaunchError
from planner.units import Amount, Positive, Text
from runtime import run
from runtime.preflight import rank_environment
from runtime.run import Device
from runtime.supervise import Ranks, first_cause, free_socket, last_lines

Tell = Callable[[str, float], None]
"""Is told what is being done, and the share of all work that is done."""


class Orders(Document):
    """What every rank is told beside its rank."""

    kind_of_document: ClassVar[str] = "orders of ranks"

    folder: Text
    work: Text
    """`module:function`; called with (arguments, tell), its result is rank 0's answer."""
    arguments: dict[str, Any]
    device: Device
    ranks: Positive
    timeout_s: Amount
    """A collective that waits longer ends the work."""


def result_of(
    work: str,
    arguments: dict[str, Any],
    *,
    ranks: int,
    device: Device,
    title: str,
    quiet: bool = False,
    timeout_s: float = 300.0,
) -> Any:
    """Return what rank 0 of `ranks` processes returned; plain data both ways.

    Progress goes to stderr unless `quiet`.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        for part in ("logs", "ranks"):
            (folder / part).mkdir()
        orders = Orders(
            folder=str(folder),
            work=work,
            arguments=arguments,
            device=device,
            ranks=ranks,
            timeout_s=timeout_s,
        )
        write(orders, folder / "orders.yaml")
        with _shown(folder, title=title, quiet=quiet) as refresh:
            _supervise(folder, ranks=ranks, refresh=refresh)
        return json.loads((folder / "result.json").read_text("utf-8"))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    result = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result


def write_progress(folder: Path, doing: str, share: float) -> None:
    """Note how far the work is, for who shows it."""
    write_text(f"{share:.4f} {doing}", folder / "progress")


def _supervise(folder: Path, *, ranks: int, refresh: Callable[[], None]) -> None:
    listening, port = free_socket()
    own = {"MESHWRIGHT_LAUNCHER": str(os.getpid()), "MESHWRIGHT_STORE_FD": str(listening)}
    environments = [
        {**os.environ, **rank_environment(rank, ranks=ranks, port=port), **own}
        for rank in range(ranks)
    ]
    command = [sys.executable, "-m", "profiler.rank", str(folder / "orders.yaml")]
    logs = [run.log_file(folder, rank) for rank in range(ranks)]
    with contextlib.ExitStack() as held:
        held.callback(os.close, listening)
        started = held.enter_context(
            Ranks(command, environments, logs=logs, rank_0_inherits=[listening])
        )
        bad = started.wait(meanwhile=refresh)
    if not bad:
        return
    ended, failure = first_cause(bad, run.read_failures(folder, ranks))
    if failure is not None and failure.kind == "DocumentError":
        raise DocumentError("", failure.message)
    if failure is not None and failure.kind == "LaunchError":
        raise LaunchError(failure.message)
    how = f"{failure.kind}: {failure.message}" if failure else f"exit {ended.signal or ended.code}"
    log = run.log_file(folder, ended.rank)
    raise LaunchError(f"rank {ended.rank} stopped with {how}. The end of its log:{last_lines(log)}")


@contextlib.contextmanager
def _shown(folder: Path, *, title: str, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show progress on stderr: a bar on a terminal, elsewhere one line per kind of work."""
    console = Console(stderr=True, quiet=quiet, highlight=False, markup=False, soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    task = bar.add_task(f"{title}: starting ranks", total=1.0)
    said = [""]

    def refresh() -> None:
        with contextlib.suppress(FileNotFoundError):
            share, _, doing = (folder / "progress").read_text("utf-8").partition(" ")
            bar.update(task, completed=float(share), description=f"{title}: {doing}")
            if bar.disable and doing != said[0]:
                console.print(f"{title}: {doing}")
                said[0] = doing

    with bar:
        yield refresh
