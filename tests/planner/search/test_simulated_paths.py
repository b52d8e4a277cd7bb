"""Bounds of the simulated step at given seconds of stages, against the simulator."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from meshwright.planner.documents.plan import Layout
from meshwright.planner.schedules import name_with_ahead, schedule_of
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.simulate import timeline
from meshwright.planner.search.bounds.simulated_cuts import (
    Placed,
    cuts_bound_s,
    drained_backwards,
    rank_ways,
    shorter_s,
)
from meshwright.planner.search.bounds.simulated_step import (
    first_share,
    forward_fill,
    paces,
    transfers,
)
from meshwright.planner.search.partition.stage_counts import shares_of

AHEAD = "1f1b ahead"
"""1F1B with forwards ahead of links, drawn for each step."""
SCHEDULES = ("1f1b", AHEAD, "gpipe", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipe-v")
WHOLE = ("numbers", "joints")
"""What columns have together."""
TRIES = [40, pytest.param(3000, marks=pytest.mark.matrix)]


def alike(layout: Layout, columns: int | None = None) -> dict[str, Any]:
    """What columns have on devices of one type, whose transfers are all alike."""
    count = layout.pipeline if columns is None else columns
    return {
        "number": np.zeros(count, dtype=np.intp),
        "hop_s": np.zeros(count),
        "numbers": (layout.pipeline,),
        "more_s": np.zeros(count),
        "more_in": np.zeros((count, 3, layout.stages), dtype=bool),
    }


class Step:
    """A step with seconds drawn at random: any, near equal, or falling along the ranks."""

    def __init__(self, schedule: str, rng: random.Random) -> None:
        ranks = rng.randint(2, 6)
        folded = schedule in ("zbv", "dualpipe-v")
        virtual = 2 if folded else rng.randint(2, 4) if schedule.startswith("inter") else 1
        count = rng.randint(2 * ranks if schedule == "dualpipe-v" else 1, 5 * ranks)
        if schedule.startswith("inter"):
            count = ranks * rng.randint(1, 5)
        if schedule == AHEAD:
            schedule = name_with_ahead("1f1b", [rng.randint(0, 2) for _ in range(ranks - 1)])
        self.layout = Layout(
            pipeline=ranks, micro_batches=count, schedule=schedule, virtual_stages=virtual
        )
        stages, split = ranks * virtual, schedule_of(schedule).splits_backward
        self.home = rank_of_stage(schedule, stages=stages, virtual_stages=virtual)
        drawn, slope = rng.random(), rng.uniform(-0.7, 0.7)
        each = [
            rng.expovariate(1)
            if drawn < 0.4
            else 1 + slope * (rank / (ranks - 1) - 0.5) * (drawn < 0.7) + rng.uniform(-0.05, 0.05)
            for rank in self.home
        ]
        share = rng.uniform(0.2, 0.5)
        self.seconds = np.zeros((4, stages))
        """[F, B, I, W; stage]"""
        for stage, total_s in enumerate(each):
            forward_s = total_s * share * rng.uniform(0.8, 1.2)
            weight_s = total_s * (1 - share) * rng.uniform(0.2, 0.8) if split else 0.0
            inputs_s = total_s * (1 - share) - weight_s
            self.seconds[:, stage] = forward_s, inputs_s + weight_s, inputs_s, weight_s
        self.transfer_s = rng.choice(
            [0.0, 0.02, 0.4, *([2.0] if schedule.startswith("1f1b") else [])]
        )
        self.sync_s = [rng.choice([0.0, 3.0]) * rng.random() for _ in range(ranks)]

    def changed(self, rng: random.Random, by: float | None = None) -> Step:
        """The same with other seconds: near these, or less on every stage `by` a factor."""
        step, split = copy(self), self.layout.executed_schedule.splits_backward
        factors = np.array(
            [[rng.uniform(0.9, 1.1) if by is None else by for _ in self.home] for _ in range(4)]
        )
        forward_s, whole_s, inputs_s, weight_s = self.seconds * factors
        whole_s = inputs_s + weight_s if split else whole_s
        step.seconds = np.array([forward_s, whole_s, inputs_s, weight_s])
        step.sync_s = [rng.uniform(0.8, 1.0) * late_s for late_s in self.sync_s]
        return step

    @property
    def passes_s(self) -> np.ndarray:
        """[rank] Both passes of a micro-batch."""
        each = self.seconds[0] + self.seconds[1]
        return np.bincount(self.home, each)

    def simulated_s(self) -> float:
        layout, (forward_s, backward_s, _, weight_s) = self.layout, self.seconds.tolist()
        run = timeline(
            orders(
                layout.schedule,
                stages=layout.stages,
                micro_batches=layout.micro_batches,
                virtual_stages=layout.virtual_stages,
            ),
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=weight_s if layout.executed_schedule.splits_backward else None,
            transfer_s=[self.transfer_s] * (layout.stages - 1),
            exposed_s=[0.0] * (layout.stages - 1),
        )
        return max(run.finish_s(rank) + late_s for rank, late_s in enumerate(self.sync_s))

    def placed(self) -> Placed:
        """Nothing to choose: each rank holds one entry of a chain."""
        ranks = np.arange(self.layout.pipeline)
        own = np.array(self.home)[None, :] == ranks[:, None]
        return Placed(
            rank=ranks,
            first=ranks,
            end=ranks + 1,
            seconds=self.seconds[None] * own[:, None, :],
            sync_s=np.array(self.sync_s),
            update_s=np.zeros(len(ranks)),
            **alike(self.layout),
        )

    def placed_in_part(self, rng: random.Random) -> Placed:
        """The same, of whose seconds some are known to be a rank's and not where they lie."""
        placed = self.placed()
        parts = placed.seconds[:, [0, 2, 3]]
        kept = np.array([rng.choice([1.0, 0.2, 0.9]) for _ in range(parts.size)])
        forward_s, inputs_s, weight_s = np.moveaxis(parts * kept.reshape(parts.shape), 1, 0)
        return replace(
            placed,
            seconds=np.stack([forward_s, inputs_s + weight_s, inputs_s, weight_s], axis=1),
            more_s=(parts * (1 - kept.reshape(parts.shape))).sum(axis=(1, 2)),
            more_in=(parts > 0) & (kept.reshape(parts.shape) < 1),
        )


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_is_below_its_pace(schedule: str, tries: int) -> None:
    rng, tight = random.Random(schedule), 0.0
    for _ in range(tries):
        step = Step(schedule, rng)
        layout = step.layout
        shape = layout.pipeline, layout.micro_batches, layout.virtual_stages
        counted_s = step.passes_s.sum() - step.seconds[3].sum()
        simulated_s = step.simulated_s()
        for steady, fill in paces(layout.schedule, *shape):
            bound_s = steady * step.passes_s.max() + fill * counted_s
            if fill and not layout.executed_schedule.splits_backward:
                bound_s += transfers(layout) * step.transfer_s
            assert bound_s <= simulated_s * (1 + 1e-9)
            tight = max(tight, bound_s / simulated_s)
    assert tight > 0.8


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_is_below_what_forwards_before_a_rank_make_of_its_seconds(
    schedule: str, tries: int
) -> None:
    rng, tight = random.Random(schedule), 0.0
    for _ in range(tries):
        step = Step(schedule, rng)
        ranks, count = step.layout.pipeline, step.layout.micro_batches
        share = min(step.seconds[0, 1:ranks] / step.passes_s[1:])
        bound_s = forward_fill(ranks, count, share) * step.passes_s.sum()
        assert bound_s <= step.simulated_s() * (1 + 1e-9)
        tight = max(tight, bound_s / step.simulated_s())
    assert tight > 0.8


@pytest.mark.parametrize("tries", [4, pytest.param(300, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_way_is_shorter_than_those_of_a_like_layout_by_more(schedule: str, tries: int) -> None:
    """Both layouts have two columns a rank, and every way of either is simulated."""
    rng, shares = random.Random(schedule), []
    for _ in range(tries):
        step = Step(schedule, rng)
        others = [step.changed(rng) for _ in range(2)]
        changes = [1 - rng.choice([0.0, 0.01]) * rng.random() for _ in range(2)]
        mine = [other.changed(rng, by) for other, by in zip(others, changes, strict=True)]
        columns, beside = (joined([one.placed() for one in both]) for both in (mine, others))

        less_s = shorter_s(columns, beside, step.layout)

        least_s, beside_s = min(ways_s(mine)), min(ways_s(others))
        assert least_s >= (beside_s - less_s) * (1 - 1e-9)
        shares.append((beside_s - least_s) / less_s if less_s else 1.0)
        assert shorter_s(columns, columns, step.layout) == 0.0
        missing = replace(columns, first=columns.first + 1)
        assert shorter_s(missing, beside, step.layout) == math.inf
    assert max(shares) > 0.2


def joined(columns: Sequence[Placed]) -> Placed:
    """The columns of several layouts as those of one."""
    values: dict[str, Any] = {
        field.name: np.concatenate([getattr(each, field.name) for each in columns])
        for field in fields(Placed)
        if field.name not in WHOLE
    }
    return replace(columns[0], **values)


def ways_s(steps: Sequence[Step]) -> Iterator[float]:
    """The steps in which each rank does as in some of them."""
    ranks, home = range(steps[0].layout.pipeline), np.array(steps[0].home)
    for way in itertools.product(steps, repeat=len(ranks)):
        step = copy(steps[0])
        step.seconds = np.array([way[rank].seconds[:, at] for at, rank in enumerate(home)]).T
        step.sync_s = [way[rank].sync_s[rank] for rank in ranks]
        yield step.simulated_s()


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved-zb", 3), ("zbv", 2)])
def test_no_first_stage_has_a_smaller_share_of_like_layers(schedule: str, virtual: int) -> None:
    ranks = 4
    for alike in range(ranks * virtual - 2, 40):
        kinds = ("embedding", *["block"] * alike, "head")
        shares = shares_of(kinds, schedule, ranks, virtual)
        assert shares is not None
        rest = sum(shares.fewest_entries) - (len(shares.entries) - alike)
        least_share = first_share(shares.run, ranks, virtual)
        for rank in range(1, ranks - (not shares.folded)):
            fewest = shares.fewest_entries[rank]
            for number in range(fewest, alike - (rest - fewest) + 1):
                assert shares.sizes(rank, number)[0] >= least_share * number - 1e-12


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_is_below_the_paths_that_stay_with_a_rank(schedule: str, tries: int) -> None:
    rng, tight = random.Random(schedule), 0.0
    for _ in range(tries):
        step = Step(schedule, rng)
        simulated_s = step.simulated_s()

        bound_s = cuts_bound_s(
            step.layout, rank_ways(step.layout, step.placed()), step.transfer_s, 2 * simulated_s
        )

        assert bound_s <= simulated_s * (1 + 1e-9)
        tight = max(tight, bound_s / simulated_s)
    assert tight > 0.9


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seconds_of_a_rank_that_may_lie_anywhere_raise_no_bound_above_a_step(
    schedule: str, tries: int
) -> None:
    rng, tight = random.Random(schedule), 0.0
    for _ in range(tries):
        step = Step(schedule, rng)
        simulated_s, placed = step.simulated_s(), step.placed_in_part(rng)
        visits = np.array([rng.randint(0, 9) for _ in range(step.seconds.size)], dtype=float)
        visits = visits.reshape(step.seconds.shape)
        if not step.layout.executed_schedule.splits_backward:
            visits[2:] = 0.0

        bound_s = cuts_bound_s(
            step.layout, rank_ways(step.layout, placed), step.transfer_s, 2 * simulated_s
        )

        assert bound_s <= simulated_s * (1 + 1e-9)
        assert np.all(placed.visited_s(visits) <= step.placed().visited_s(visits) * (1 + 1e-9))
        assert np.allclose(placed.passes_s(), step.placed().passes_s())
        tight = max(tight, bound_s / simulated_s)
    assert tight > 0.9


@pytest.mark.matrix
def test_cuts_are_gone_through_as_one_by_one() -> None:
    """All ways to give a chain's entries to ranks, each with the bound of its own columns."""
    rng = random.Random(5)
    for schedule, count in (("1f1b", 9), ("1f1b", 4), ("zb-h1", 6), ("gpipe", 3)):
        ranks, entries = 3, 7
        layout = Layout(pipeline=ranks, micro_batches=count, schedule=schedule)
        columns = [
            (rank, first, end)
            for rank in range(ranks)
            for first, end in itertools.combinations(range(entries + 1), 2)
            for _ in range(2)
        ]
        rank, first, end = np.array(columns).T
        seconds = np.zeros((len(columns), 4, ranks))
        for at, (own, start, stop) in enumerate(columns):
            forward_s, inputs_s, weight_s = ((stop - start) * rng.uniform(0.5, 1.5) for _ in "FIW")
            seconds[at, :, own] = forward_s, inputs_s + weight_s, inputs_s, weight_s
        drawn = np.array([[rng.random(), rng.random()] for _ in columns]).T
        placed = Placed(rank, first, end, seconds, *drawn, **alike(layout, len(columns)))

        found_s = cuts_bound_s(layout, rank_ways(layout, placed), 0.1, 1e6)

        every_s = []
        for one in itertools.product(*(np.flatnonzero(rank == r) for r in range(ranks))):
            at = [int(column) for column in one]
            follow = [0, *end[at].tolist()] == [*first[at].tolist(), entries]
            if follow:
                columns_of = (f.name for f in fields(placed) if f.name not in WHOLE)
                alone = replace(placed, **{name: getattr(placed, name)[at] for name in columns_of})
                every_s.append(cuts_bound_s(layout, rank_ways(layout, alone), 0.1, 1e6))
        # Sync of rank 0 and updates are the least of any column.
        assert found_s <= min(every_s) * (1 + 1e-9)
        assert found_s >= min(every_s) - 3.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_hold_nothing_leaves_no_cut_below_a_limit(rank: int) -> None:
    layout = Layout(pipeline=2, micro_batches=4)
    own = np.array([1 - rank])
    of_one = Placed(
        own, own, own + 1, np.ones((1, 4, 2)), np.zeros(1), np.zeros(1), **alike(layout, 1)
    )

    assert cuts_bound_s(layout, rank_ways(layout, of_one), 0.0, 100.0) == 100.0
    assert (
        cuts_bound_s(layout, rank_ways(layout, replace(of_one, numbers=(1, 1))), 0.0, 100.0)
        == 100.0
    )


def test_what_stands_behind_the_last_way_back_is_that_of_longer_steps_too() -> None:
    for schedule, virtual in (("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2), ("dualpipe-v", 2)):
        for ranks in (2, 3, 4):
            for count in (6 * ranks, 7 * ranks if virtual > 1 else 7 * ranks + 1):
                stages = ranks * virtual
                lists = orders(schedule, stages=stages, micro_batches=count, virtual_stages=virtual)
                behind = np.zeros(stages)
                for order in lists:
                    for action in reversed(order):
                        if action.kind != "W":
                            break
                        behind[action.stage] += 1

                found = drained_backwards(schedule, stages, virtual, count)

                assert found is not None
                assert found[0].tolist() == behind.tolist()
