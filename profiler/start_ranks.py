"""Work that several ranks do together, on one node or more: started, watched, its result returned.

Every node starts its own ranks, in a folder of its own; all of them are one process group.

    FOLDER/
    ├── orders.yaml                          written before the ranks start
    ├── progress                             how far its first rank is, renewed as it goes on
    ├── logs/rank-00000.log                  all that a rank prints
    ├── ranks/rank-00000.failure.json        why a rank stopped
    └── result.json                          by its first rank, when it is done

`meshwright.profiler.rank_main` is what each process runs.  Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from meshwright.planner.documents.document import Document, write, write_text
from meshwright.planner.documents.units import Amount, Count, Positive, Text, seconds_text
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.report.terminal import Terminal
from meshwright.runtime.launch.preflight import rank_environment
from meshwright.runtime.launch.rank_processes import BadEnd, last_lines, supervise
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.node_rank import ALONE
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_folder import Device

Tell = Callable[[str, float], None]
"""Function that receives the current activity and the finished share of all work."""


class MeasurementOrders(Document):
    """Orders that every rank gets beside its rank."""

    kind_of_document: ClassVar[str] = "orders of ranks"

    folder: Text
    work: Text
    """Function, as `module:function`, that is called with (arguments, tell); its result is rank 0's
    answer."""
    arguments: dict[str, Any]
    device: Device
    ranks: Positive
    """Number of ranks of all nodes."""
    first_rank: Count = 0
    """First rank of this node."""
    timeout_s: Amount
    """Seconds after which a waiting collective ends the work."""


def result_of(
    work: str,
    arguments: dict[str, Any],
    *,
    ranks: int,
    device: Device,
    title: str,
    quiet: bool = False,
    timeout_s: float = 300.0,
    rendezvous: Rendezvous | None = None,
    most_s: float = math.inf,
) -> Any:
    """Return the result of rank 0; plain data both ways.

    `ranks` processes run here, and the other nodes run as many as they announce; their ranks follow
    the order of the nodes.  Every node gets the answer of its own first rank, so work that several
    nodes do returns the same on all.  Progress goes to stderr unless `quiet`.
    LaunchError where it takes longer than `most_s`.
    """
    rendezvous = rendezvous or Rendezvous(ALONE)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        for part in ("logs", "ranks"):
            (folder / part).mkdir()
        counts = [int(count) for count in rendezvous.all_gather(ranks)]
        orders = MeasurementOrders(
            folder=str(folder),
            work=work,
            arguments=arguments,
            device=device,
            ranks=sum(counts),
            first_rank=sum(counts[: rendezvous.node_rank.node]),
            timeout_s=timeout_s,
        )
        write(orders, folder / "orders.yaml")
        with _progress(folder, title=title, quiet=quiet) as show:

            def refresh() -> None:
                show()
                if time.monotonic() - begin_s > most_s:
                    raise LaunchError(
                        f"{title}: not all ranks were done in {seconds_text(most_s)}; look at "
                        "the devices, or leave it out"
                    )

            bad = supervise(
                [
                    sys.executable,
                    "-m",
                    "meshwright.profiler.rank_main",
                    str(folder / "orders.yaml"),
                ],
                range(orders.first_rank, orders.first_rank + ranks),
                functools.partial(_environment, first_rank=orders.first_rank, ranks=ranks),
                folder=folder,
                world=orders.ranks,
                rendezvous=rendezvous,
                leads=rendezvous.node_rank.node == 0,
                refresh=refresh,
            )
            if bad is not None:
                raise _error(bad, folder)
            # No node goes before all are done: another node reports what one rank lacks.
            rendezvous.all_gather("done")
        return json.loads((folder / "result.json").read_text("utf-8"))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    result = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result


def write_progress(folder: Path, doing: str, share: float) -> None:
    """Record the progress of the work for display."""
    write_text(f"{share:.4f} {doing}", folder / "progress")


def _environment(rank: int, port: str, *, first_rank: int, ranks: int) -> dict[str, str]:
    """Return the environment of one of this node's ranks."""
    return {**rank_environment(rank - first_rank, ranks=ranks, port=port), "RANK": str(rank)}


def _error(bad: BadEnd, folder: Path) -> Exception:
    """Return the error that names the rank that ended the work, and its end."""
    ended, failure = bad.cause, bad.failure
    if failure is not None and failure.kind == "DocumentError":
        return DocumentError("", failure.message)
    if failure is not None and failure.kind == "LaunchError":
        return LaunchError(failure.message)
    how = f"{failure.kind}: {failure.message}" if failure else f"exit {ended.signal or ended.code}"
    log = run.log_file(folder, ended.rank)
    return LaunchError(
        f"rank {ended.rank} stopped with {how}. The end of its log:{last_lines(log)}"
    )


def _left_text(share: float, passed_s: float) -> str:
    """Return the remaining time at the speed so far.

    >>> _left_text(0.25, 10.0), _left_text(0.0, 1.0)
    (', 30.0 s left', '')
    """
    return f", {seconds_text(passed_s * (1 / share - 1))} left" if 0.02 < share < 1 else ""


@contextlib.contextmanager
def _progress(folder: Path, *, title: str, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show progress on stderr: a bar on a terminal, elsewhere one line per kind of work."""
    console = Terminal(stderr=True, quiet=quiet, soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    task = bar.add_task(f"{title}: starting ranks", total=1.0)
    last_text = [""]
    begin_s = time.monotonic()

    def refresh() -> None:
        with contextlib.suppress(FileNotFoundError):
            share, _, doing = (folder / "progress").read_text("utf-8").partition(" ")
            left = _left_text(float(share), time.monotonic() - begin_s)
            bar.update(task, completed=float(share), description=f"{title}: {doing}{left}")
            if bar.disable and doing != last_text[0]:
                console.print(f"{title}: {doing}{left}")
                last_text[0] = doing

    with bar:
        yield refresh
