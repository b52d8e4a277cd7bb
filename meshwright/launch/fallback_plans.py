"""A book of plans: what a run goes on with when nodes or devices are lost, solved while it trains.

One process of low priority solves for one, two, four and eight nodes fewer, or devices of a node
that is alone, and of several nodes for one device fewer on each.  It writes each plan with its
predicted seconds and bytes beside the checkpoints, where all nodes find it.  When something is lost
its plan is looked up; only what the book lacks is solved then.

    SAVED/book/with-6.json         what is known of the plan for six that are left
    SAVED/book/with-8x7.json       of the plan for eight nodes with seven devices each
    SAVED/book/plan-for-6.yaml     the plan itself, beside the cluster that it is for
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.launch.replan import for_fewer
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents import document
from meshwright.planner.documents.document import Part, read_text
from meshwright.planner.documents.events import PlanSource
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.units import Amount, Positive, Text
from meshwright.planner.errors import MeshwrightError
from meshwright.planner.system.safe_files import folder_within, open_below, replace_file
from meshwright.runtime.run.launch_options import LaunchRun

FEWER = (1, 2, 4, 8)
"""Numbers of lost nodes or devices for which plans are solved ahead."""
NICE = 19
"""Lowest priority of a process, so that training does not wait for the book."""


class FallbackPlan(Part):
    """A plan for what may be left of a run's nodes or devices."""

    wanted: Text
    """Digest of the plan that it replaces."""
    left: Positive
    """Number of remaining nodes, or devices of one node."""
    each: Positive | None = None
    """Devices of each of several nodes, where one of them has lost some."""
    path: Text
    plan: Text
    """Digest of the plan."""
    devices: Positive
    step_s: Amount
    memory_bytes: Amount
    """Memory of the fullest rank."""


class FallbackPlans:
    """The plans in a folder of checkpoints."""

    def __init__(self, saved: Path) -> None:
        self._saved = saved

    def entry(self, wanted: Plan, left: int, each: int | None = None) -> FallbackPlan | None:
        """Return the entry for a plan of which this number is left; None if nothing does."""
        try:
            entry = FallbackPlan.model_validate_json(read_text(self._file(left, each)))
            plan = document.read(Plan, entry.path)
        except (MeshwrightError, ValueError):
            return None
        stored = entry.wanted, entry.left, entry.each, entry.plan
        is_it = stored == (wanted.digest, left, each, plan.digest)
        return entry if is_it else None

    def solve(self, fit: LaunchablePlan, left: int, each: int | None = None) -> FallbackPlan:
        """Solve for what is left, and write the plan down; LaunchError where no plan fits."""
        folder = self._folder()
        if each is not None:
            folder = folder_within(folder, f"{left}x{each}")
        path = for_fewer(
            fit.movable(),
            fit.graph,
            fit.machine,
            fit.measured,
            left=left,
            each=each,
            folder=folder,
        )
        again = fit.with_plan(str(path))
        predicted = predict(again.plan, fit.graph, again.machine, fit.measured)
        entry = FallbackPlan(
            wanted=fit.plan.digest,
            left=left,
            each=each,
            path=str(path),
            plan=again.plan.digest,
            devices=again.plan.ranks,
            step_s=predicted.step_time_s,
            memory_bytes=max(stage.peak_memory_bytes for stage in predicted.stages),
        )
        replace_file(document.json_line(entry), self._file(left, each))
        return entry

    def entry_or_solution(
        self, fit: LaunchablePlan, left: int, each: int | None = None
    ) -> tuple[FallbackPlan, PlanSource]:
        """Return the entry for what is left, solved now where there is none."""
        entry = self.entry(fit.plan, left, each)
        return (entry, "book") if entry else (self.solve(fit, left, each), "solved")

    def _folder(self) -> Path:
        return folder_within(self._saved, "book")

    def _file(self, left: int, each: int | None = None) -> Path:
        return self._folder() / f"with-{size_text(left, each)}.json"


def size_text(left: int, each: int | None = None) -> str:
    """Return the remaining size as text.

    >>> size_text(6), size_text(8, 7)
    ('6', '8x7')
    """
    return str(left) if each is None else f"{left}x{each}"


def sizes(fit: LaunchablePlan) -> list[tuple[int, int | None]]:
    """Return of what is left when nodes are lost, or devices of one that is alone, or of each."""
    if fit.nodes == 1:
        whole = fit.plan.ranks
        return [(whole - fewer, None) for fewer in FEWER if fewer < whole]
    each = fit.machine.groups[0].devices_per_node
    fewer_nodes = [(fit.nodes - fewer, None) for fewer in FEWER if fewer < fit.nodes]
    return [*fewer_nodes, *([(fit.nodes, each - 1)] if each > 1 else [])]


def fallback(
    fit: LaunchablePlan, left: int, run: LaunchRun, *, each: int | None = None, quiet: bool
) -> LaunchablePlan:
    """Return the same training planned for what is left: out of the book, or solved now.

    These are `left` nodes, with `each` devices where that is given, or devices of one node.
    """
    plans = FallbackPlans(run.checkpoint or Path())
    entry, source = plans.entry_or_solution(fit, left, each)
    return fit.replanned_at(Path(entry.path), source=source, quiet=quiet)


class FallbackSolver:
    """The process that fills a run's book, while a `with` block lasts."""

    def __init__(self, fit: LaunchablePlan, run: LaunchRun) -> None:
        self._fit, self._run = fit, run
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FallbackSolver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def begin(self) -> None:
        """Let plans be solved that the book lacks."""
        from meshwright.runtime.launch.preflight import default_output  # noqa: PLC0415 - the runtime

        assert self._run.checkpoint is not None
        saved = self._run.checkpoint.absolute()
        plans = FallbackPlans(saved)
        lacking = [size for size in sizes(self._fit) if plans.entry(self._fit.plan, *size) is None]
        if self._process is not None or not lacking:
            return
        output = self._run.output or default_output(self._fit.plan)
        log = folder_within(output, "logs") / "book.log"
        profile = [] if self._fit.profile is None else [self._fit.profile]
        with open_below(log, within=output) as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "meshwright.launch.fallback_plans"),
                    *(
                        self._fit.path,
                        str(saved),
                        ",".join(size_text(*size) for size in lacking),
                        *profile,
                    ),
                ],
                env={**os.environ, "MESHWRIGHT_LAUNCHER": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def solve_fallbacks(
    fit: LaunchablePlan, saved: Path, lefts: Iterable[tuple[int, int | None]]
) -> list[FallbackPlan]:
    """Solve for each of what may be left; losses without a plan are reported and skipped."""
    plans = []
    for left, each in lefts:
        with contextlib.suppress(MeshwrightError):
            plans.append(FallbackPlans(saved).solve(fit, left, each))
    return plans


def _read(text: str) -> tuple[int, int | None]:
    left, _, each = text.partition("x")
    return int(left), int(each) if each else None


def main() -> int:
    """Fill a book: PLAN, the folder of checkpoints, what may be left, and a profile."""
    from meshwright.runtime.run.rank_exit import die_with_launcher  # noqa: PLC0415 - the runtime

    die_with_launcher()
    os.nice(NICE)
    plan, saved, lefts, *profile = sys.argv[1:]
    fit = LaunchablePlan.read(plan, profile[0] if profile else None)
    for entry in solve_fallbacks(fit, Path(saved), map(_read, lefts.split(","))):
        print(
            f"{size_text(entry.left, entry.each)} left: {entry.step_s:.3g} s a step in {entry.path}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
