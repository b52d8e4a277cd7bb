"""Drift: steps that leave their predicted range, and ranks that are slower than their peers.

A launcher looks at what its ranks have written into their beacons: the seconds of a step that go
into reading the batch, into work of the rank's own, and the whole, of which the rest is waiting
for others.  No message is sent for it.

    50 steps outside the range      the part with the largest miss, and where it is, is named
    z > 5 and > 5 % of a step,      a rank in one part, among ranks of all nodes that have equal
    in 3 windows of 100 steps       work, or beside its own first window where none has

Agents tell each other the middle of each stage's ranks with their standing, so that a rank that is
alone on its node is compared with others too.

z is the distance from the median of the others over 1.4826 times the median of their distances.
Steps are an interquartile mean, so that single long ones do not count.  Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.costs.uncertainty import is_link
from meshwright.planner.documents.document import Part
from meshwright.planner.documents.events import Drift, Paced, RankPart
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import Amount, Count, Positive, seconds_text
from meshwright.runtime.resilience.heartbeat import RankPace
from meshwright.runtime.run.run_clock import unix_now_s

STEPS = 50
"""Outside the range, until that is said."""
WARM_UP_STEPS = 5
WINDOW = 100
WINDOWS = 3
APART = 5.0
"""Robust standard deviations."""
SHARE = 0.05
"""Least slowdown of a straggler, as a share of a step."""
MOST_RANKS = 8
"""Largest number of slow ranks reported, of those that a launcher sees."""
LEAST_SPREAD = SHARE / APART
"""Share of a step that ranks differ by at least: fewer than four say little of their spread."""
NORMAL = 1.4826
"""A standard deviation over the median distance, of normal figures."""
WAITS = ("pipeline",)
"""Predicted parts in which a rank waits, beside those of links."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a rank's step, by part."""

    data: float
    work: float | None
    """Seconds of its own work; None where waiting for others cannot be distinguished from it."""
    whole: float

    @property
    def waiting(self) -> float | None:
        """Seconds that the rank waits for others."""
        return None if self.work is None else max(0.0, self.whole - self.data - self.work)


class StagePace(Part):
    """Median seconds of a node's ranks that train one pipeline stage, in its last window."""

    stage: Count
    ranks: Positive
    data_s: Amount
    work_s: Amount | None = None
    """None where it is not separated from waiting for others."""


def step_seconds(before: RankPace, after: RankPace) -> StepSeconds:
    """Return what a step took on average between two looks.

    >>> begin = RankPace(steps=10, data_s=1.0, work_s=5.0, whole_s=8.0)
    >>> step_seconds(begin, RankPace(steps=20, data_s=2.0, work_s=11.0, whole_s=18.0))
    StepSeconds(data=0.1, work=0.6, whole=1.0)
    """
    steps = max(1, after.steps - before.steps)
    work_s = after.work_s - before.work_s
    return StepSeconds(
        data=(after.data_s - before.data_s) / steps,
        work=work_s / steps if after.work_s else None,
        whole=(after.whole_s - before.whole_s) / steps,
    )


class DriftWatch:
    """Compares the steps of a node's ranks with their prediction, and with each other."""

    def __init__(self, plan: Plan, ranks: Iterable[int], prediction: Prediction | None) -> None:
        self._plan, self._ranks, self._prediction = plan, tuple(ranks), prediction
        self._stage = {rank: plan.pipeline_rank(rank) for rank in self._ranks}
        self._step_s: list[float] = []
        self._left_out = WARM_UP_STEPS
        self._level = 1.0
        """Measured over predicted, as was said last."""
        self._quiet, self._next_quiet = 0, 1
        """Windows in which nothing is said, now and after the next time: twice as many each time,
        so that a machine that others use says little."""
        self._since: Mapping[int, RankPace] = {}
        """Pace of each rank at the start of the steps that are compared with the prediction."""
        self._stragglers = _Stragglers(plan, self._stage)

    @property
    def stage_paces(self) -> tuple[StagePace, ...]:
        """What this node's ranks took in their last window, for other nodes."""
        return self._stragglers.stage_paces

    def look(
        self,
        step_s: Sequence[float],
        paces: Mapping[int, RankPace],
        step: int,
        others: Sequence[StagePace] = (),
    ) -> list[Drift | Paced]:
        """Return what has become of the pace, after steps that were done since the last look.

        `step_s` are rank 0's, and `paces` what ranks have written, by rank; `step` is the last one.
        `others` are what the ranks of other nodes took.
        """
        ranks = [rank for rank in self._ranks if rank in paces]
        events: list[Drift | Paced] = []
        for seconds in step_s:
            if self._left_out:
                self._left_out -= 1
                self._since = dict(paces)
                continue
            self._step_s.append(seconds)
        if len(self._step_s) >= STEPS and self._prediction is not None:
            events += self._slow_steps(self._prediction, paces, step)
            self._step_s, self._since = [], dict(paces)
        if ranks and min(paces[rank].steps for rank in ranks) >= WARM_UP_STEPS:
            events += self._stragglers.look({rank: paces[rank] for rank in ranks}, step, others)
        return events

    def _slow_steps(
        self, prediction: Prediction, paces: Mapping[int, RankPace], step: int
    ) -> list[Drift]:
        """Return that steps have left their range, or are in it again."""
        measured_s, predicted_s = middle_mean(self._step_s), prediction.step_time_s
        is_quiet, self._quiet = self._quiet > 0, max(0, self._quiet - 1)
        low_s, high_s = prediction.step_time_low_s, prediction.step_time_high_s
        if low_s * self._level <= measured_s <= high_s * self._level:
            return []
        if is_quiet:
            return []
        self._quiet, self._next_quiet = self._next_quiet, 2 * self._next_quiet
        within = low_s <= measured_s <= high_s
        self._level = 1.0 if within else measured_s / predicted_s
        said = f"steps take {seconds_text(measured_s)}"
        if within:
            text, cause, rank = f"{said}, as predicted again", "as predicted", None
        else:
            each = {
                rank: step_seconds(self._since[rank], pace)
                for rank, pace in paces.items()
                if rank in self._since and pace.steps > self._since[rank].steps
            }
            slower = measured_s > high_s
            cause, rank, why = self._cause(prediction, each, slower=slower)
            between = f"{seconds_text(low_s)} to {seconds_text(high_s)}"
            text = f"{said}, and {between} were predicted: {why}"
        return [
            Drift(
                at_unix_s=unix_now_s(),
                after_step=step,
                cause=cause,
                rank=rank,
                stage=None if rank is None else self._stage.get(rank),
                measured_s=measured_s,
                predicted_s=predicted_s,
                text=text,
            )
        ]

    def _cause(
        self, prediction: Prediction, each: Mapping[int, StepSeconds], *, slower: bool
    ) -> tuple[str, int | None, str]:
        """Return the part with the largest miss, the rank if it is one's, and both in words."""
        parts = prediction.step_parts
        waits_s = sum(seconds for name, seconds in parts.items() if _is_wait(name))
        works_s = sum(parts.values()) - waits_s
        if not each or any(pace.work is None for pace in each.values()):
            most = max((pace.data for pace in each.values()), default=0.0)
            why = f"ranks read a batch in {seconds_text(most)}; of the rest no part was measured"
            return "not measured", None, why
        work = {rank: pace.work or 0.0 for rank, pace in each.items()}
        data = {rank: pace.data for rank, pace in each.items()}
        sign = 1.0 if slower else -1.0
        chosen = max if slower else min
        wait_s = min(pace.waiting or 0.0 for pace in each.values())
        misses = {
            "data": sign * max(data.values()),
            "work": sign * (chosen(work.values()) - works_s),
            "waiting": sign * (wait_s - waits_s),
        }
        part = max(misses, key=lambda name: misses[name])
        if part == "waiting":
            named = [name for name in parts if _is_wait(name)]
            cause = max(named, key=lambda name: parts[name], default="waiting")
            return cause, None, (
                f"every rank waits {seconds_text(wait_s)} for others, predicted "
                f"{seconds_text(waits_s)}, most of it {cause}"
            )  # fmt: skip
        seconds = data if part == "data" else work
        rank = chosen(seconds, key=lambda one: seconds[one])
        others = [s for other, s in seconds.items() if other != rank]
        alone = bool(others) and (
            abs(_robust_deviation(seconds[rank], others, LEAST_SPREAD * each[rank].whole)[1])
            > APART
        )
        where = _rank_name(self._plan, rank) if alone else "every rank"
        if part == "data":
            return part, rank if alone else None, (
                f"{where} reads a batch in {seconds_text(data[rank])}"
            )  # fmt: skip
        inside = [name for name in parts if not _is_wait(name)]
        cause = max(inside, key=lambda name: parts[name], default="work")
        return cause, rank if alone else None, (
            f"{where} works {seconds_text(work[rank])} a step, predicted "
            f"{seconds_text(works_s)}, most of it {cause}"
        )  # fmt: skip


class _Stragglers:
    """Ranks that are slower than the others with equal work."""

    def __init__(self, plan: Plan, stage: Mapping[int, int]) -> None:
        self._stage, self._plan = stage, plan
        self._alike = plan.mesh.expert == 1 and plan.shares is None
        """True if ranks of a stage have equal work; experts have what is routed to them."""
        self._before: Mapping[int, RankPace] = {}
        self._first: dict[tuple[int, str], float] = {}
        self._suspect: dict[tuple[int, str], int] = {}
        self.stage_paces: tuple[StagePace, ...] = ()

    def look(
        self, paces: Mapping[int, RankPace], step: int, others: Sequence[StagePace]
    ) -> list[Drift | Paced]:
        """Return what ranks took and who was named, where another window is complete."""
        if not self._before or self._before.keys() != paces.keys():
            self._before = dict(paces)
            return []
        if any(pace.steps - self._before[rank].steps < WINDOW for rank, pace in paces.items()):
            return []
        each = {rank: step_seconds(self._before[rank], pace) for rank, pace in paces.items()}
        self._before = dict(paces)
        self.stage_paces = tuple(self._stage_paces(each))
        events: list[Drift | Paced] = [self._pace_event(each, step)]
        for part in ("data", "work"):
            seconds = {
                rank: value
                for rank, pace in each.items()
                if (value := pace.data if part == "data" else pace.work) is not None
            }
            for rank, value in seconds.items():
                key, step_s = (rank, part), each[rank].whole
                first_s = self._first.setdefault(key, value)
                peers = [s for other, s in seconds.items() if self._is_peer(other, rank)]
                peers += self._peers_elsewhere(others, self._stage[rank], part)
                usual_s, apart = _robust_deviation(value, peers or [first_s], LEAST_SPREAD * step_s)
                slow = apart > APART and value - usual_s > SHARE * step_s
                self._suspect[key] = self._suspect.get(key, 0) + 1 if slow else 0
                if self._suspect[key] == WINDOWS:
                    than = "others with equal work" if peers else "at first"
                    events.append(self._drift_of_rank(rank, part, value, than, usual_s, step))
        return events

    def _pace_event(self, each: Mapping[int, StepSeconds], step: int) -> Paced:
        slowest = sorted(each, key=lambda rank: -(each[rank].data + (each[rank].work or 0.0)))
        return Paced(
            at_unix_s=unix_now_s(),
            after_step=step,
            ranks=tuple(
                RankPart(
                    rank=rank,
                    stage=self._stage[rank],
                    data_s=each[rank].data,
                    work_s=each[rank].work,
                    step_s=each[rank].whole,
                )
                for rank in slowest[:MOST_RANKS]
            ),
        )

    def _is_peer(self, other: int, rank: int) -> bool:
        return other != rank and self._alike and self._stage[other] == self._stage[rank]

    def _stage_paces(self, each: Mapping[int, StepSeconds]) -> Iterator[StagePace]:
        """Yield the middle of this node's ranks of each stage."""
        for stage in sorted({self._stage[rank] for rank in each}):
            ranks = [seconds for rank, seconds in each.items() if self._stage[rank] == stage]
            works = [seconds.work for seconds in ranks if seconds.work is not None]
            yield StagePace(
                stage=stage,
                ranks=len(ranks),
                data_s=statistics.median(seconds.data for seconds in ranks),
                work_s=statistics.median(works) if works else None,
            )

    def _peers_elsewhere(
        self, others: Iterable[StagePace], stage: int, part: str
    ) -> Iterator[float]:
        """Yield seconds of ranks on other nodes that have equal work, each that of its middle."""
        for other in others if self._alike else ():
            value = other.data_s if part == "data" else other.work_s
            if other.stage == stage and value is not None:
                yield from [value] * other.ranks

    def _drift_of_rank(
        self, rank: int, part: str, value: float, than: str, usual_s: float, step: int
    ) -> Drift:
        verb = "reads a batch in" if part == "data" else "works"
        return Drift(
            at_unix_s=unix_now_s(),
            after_step=step,
            cause=f"straggler: {part}",
            rank=rank,
            stage=self._stage[rank],
            measured_s=value,
            predicted_s=usual_s,
            text=f"{_rank_name(self._plan, rank)} {verb} {seconds_text(value)} a step, and {than} "
            f"{seconds_text(usual_s)}: all wait for it",
        )


def _is_wait(cause: str) -> bool:
    """Return whether a rank waits for others in a predicted part of a step."""
    return is_link(cause) or cause in WAITS


def _rank_name(plan: Plan, rank: int) -> str:
    """Return what a rank is called, with its stage where there are several."""
    stage = f" (stage {plan.pipeline_rank(rank)})" if plan.is_cut else ""
    return f"rank {rank}{stage}"


def middle_mean(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half.

    >>> middle_mean([1.0, 2.0, 4.0, 100.0])
    3.0
    """
    cut = len(seconds) // 4
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def _robust_deviation(value: float, others: Sequence[float], least: float) -> tuple[float, float]:
    """Return the median of others, and how far a value is above it in robust deviations."""
    middle = statistics.median(others)
    spread = NORMAL * statistics.median([abs(value_of_other - middle) for value_of_other in others])
    return middle, (value - middle) / max(spread, least)
