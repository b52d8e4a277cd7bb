"""Layouts of two stages a rank for chains of unlike layers, and for graphs that have one order.

Where a chain has a long run of like layers, `planner.search.ranks` shares it among ranks by
counts, with any number of stages each.  Without one, ranks have two stages, looped or folded, and
the split is that of `planner.rounds`.  What stages put on the host is not offered here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from planner.costs.crossings import in_order
from planner.costs.rank_memory import dynamic_parts, room_bytes, widest
from planner.costs.seats import branching
from planner.costs.strategy import StrategyCost, StrategyParts
from planner.model import ModelGraph
from planner.pins import Pins
from planner.plan import Layout, Plan, PlannedModel
from planner.rounds.problem import RoundsProblem, RoundsSolution, Spans, moments
from planner.rounds.solve import least_s, solve_rounds
from planner.schedule import obstacle, rank_of_stage, splits_backward
from planner.schedules import PLAIN, SCHEDULES, schedule_of
from planner.search.certificate import (
    BOUNDS,
    COMMUNICATION,
    COMPUTATION,
)
from planner.search.formulation import plan_with, stage_of
from planner.search.layer_options import allowed, option_of
from planner.search.layout_queue import Bound, Bundle, Found, Lost, judged
from planner.search.rank_problem import Crossing
from planner.search.ranked import Ranked, predicted
from planner.search.ranks import run_of
from planner.search.space import Timetable, every_degrees, families
from planner.search.spaces.alike import AlikeSpace
from planner.solver.graph_instance import cuts_along
from planner.tolerances import ROUNDING

MOST_LAYERS = 64
"""Longer chains are not offered two stages a rank: their splits take minutes to try."""
MOST_UNASKED = 20
"""The same where nobody asked for it (by `--fix v=2` or such a schedule): 40 layers take 30 s."""


def unlike(model: ModelGraph) -> bool:
    """Whether a model's layers have one order, and no long run of like ones in it.

    Two stages a rank are of layers that nothing ties to one stage.
    """
    if model.colocated:
        return False
    if not model.edges:
        return run_of(model) is None
    names = [name for name, _ in in_order(model).chain]
    edges = set(model.graph.edges)
    return all(pair in edges for pair in pairwise(names))


class RoundSpace(AlikeSpace):
    """The layouts of two stages a rank of one model on devices that are alike."""

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [(BOUNDS[COMPUTATION], lambda _: 0.0), (BOUNDS[COMMUNICATION], self.bound_s)]

    def bundles(self, _: Counter[str]) -> Iterator[tuple[float, Bundle]]:
        """Yield every layout that keeps what the user fixed, those alike but for sharing in one."""
        c = self.candidates
        asked = c.pins.virtual_stages == 2 or schedule_of(c.pins.schedule or PLAIN).several_stages
        most = MOST_LAYERS if asked else MOST_UNASKED
        if c.pins.virtual_stages not in (None, 2) or len(c.model.chain) > most:
            return
        pins = replace(c.pins, schedule=PLAIN, virtual_stages=None)
        plain = replace(c.request, pins=pins)
        for degrees in every_degrees(plain):
            ranks = degrees.pipeline
            if ranks == 1 or 2 * ranks > len(c.model.chain):
                continue
            for family in families(plain, degrees):
                for timetable in self._timetables(ranks, family.micro_batches, c.pins):
                    part = replace(family, timetables=(timetable,))
                    least = self._computation_s(part.first)
                    yield least, Bundle(part.first, part.size, part.layouts)

    @staticmethod
    def _timetables(ranks: int, count: int, pins: Pins) -> Iterator[Timetable]:
        for name in (name for name, schedule in SCHEDULES.items() if schedule.takes(2)):
            shape = {"stages": 2 * ranks, "micro_batches": count, "virtual_stages": 2}
            if pins.schedule in (None, name) and obstacle(name, **shape) is None:
                yield Timetable(name, 2)

    def _computation_s(self, layout: Layout) -> float:
        """Least seconds by layers alone: mean ranks, mean stages."""
        fastest_s, credits_s = self._tables.passes_s([layout], self.candidates.pins.recompute)
        counts: dict[str, int] = {}
        for layer in self._model.layers:
            counts[layer.kind] = counts.get(layer.kind, 0) + layer.repeat
        order = list(dict.fromkeys(layer.kind for layer in self.candidates.model.layers))
        number = [counts[kind] for kind in order]
        whole_s = sum(n * float(t) for n, t in zip(number, fastest_s[:, 0], strict=True))
        credit_s = sum(n * float(t) for n, t in zip(number, credits_s[:, 0], strict=True))
        split = splits_backward(layout.schedule)
        ranks = layout.pipeline
        mean_s = layout.micro_batches * whole_s / ranks
        stage_s = (whole_s - split * credit_s) / (2 * ranks)
        return (1 - ROUNDING) * (mean_s + (ranks - 1) * stage_s) + self._tables.step_s

    def _choices(self, layout: Layout, kind: str) -> list[StrategyCost]:
        """Return what a layer may choose among."""
        table = self._tables.of(layout).kinds[kind]
        choices = allowed(table, layout, self.candidates.pins.recompute)
        return [cost for cost in choices if cost.activations != "offload"]

    def _parts(self, layout: Layout, kind: str) -> list[StrategyParts]:
        """Return the parts of each of them."""
        costs = self._tables.of(layout)
        part_of = {
            id(cost): part for cost, part in zip(costs.kinds[kind], costs.parts[kind], strict=True)
        }
        return [part_of[id(cost)] for cost in self._choices(layout, kind)]

    def problem(self, layout: Layout) -> RoundsProblem:
        """Return the partition problem of a layout."""
        costs, model = self._tables.of(layout), self._model
        device = self.candidates.cluster.groups[0].accelerator
        split = splits_backward(layout.schedule)
        ranks, chain = layout.pipeline, [layer.kind for _, layer in model.chain]
        numbers = {kind: at for at, kind in enumerate(dict.fromkeys(chain))}
        parts = {kind: self._parts(layout, kind) for kind in numbers}
        held = {kind: [part.layer_bytes for part in own] for kind, own in parts.items()}
        kinds = []
        for kind, own in parts.items():
            kept = min(part.figures.kept_bytes for part in own) if split else 0.0
            kinds.append(
                tuple(
                    replace(
                        option_of(cost),
                        stored_bytes=part.stored_bytes,
                        kept_bytes=kept,
                        resident_bytes=part.states.resident_bytes,
                        transient_bytes=0.0,
                    )
                    for cost, part in zip(self._choices(layout, kind), own, strict=True)
                )
            )
        home = rank_of_stage(layout.schedule, stages=layout.stages, virtual_stages=2)
        exposed_s = [2 * (3 if split else 2) * costs.action_s] * ranks
        # The layers at the ends count an action of their own; of a graph only the last one does.
        for end in home[-1:] if model.edges else (home[0], home[-1]):
            exposed_s[end] -= costs.action_s
        stores_input = any(part.stores_input for kind in set(chain[1:]) for part in parts[kind])
        boundary_bytes = costs.narrowest_bytes if model.edges else costs.boundary_bytes
        crossing = Crossing(model, costs.output_bytes) if model.edges else None
        last = layout.stages - 1
        working = min(
            min(part.forward_transient_bytes, part.backward_transient_bytes)
            for own in parts.values()
            for part in own
        )
        each_bytes = [
            ((stage > 0 and not stores_input) + (stage < last) * costs.keeps_sent) * boundary_bytes
            for stage in range(layout.stages)
        ]

        def used_bytes(rank: int, spans: Spans, options: Sequence[int]) -> float:
            left = iter(options)
            stages = {
                stage: [held[chain[at]][next(left)] for at in range(*span)]
                for stage, span in zip(_stages_of(home, rank), spans, strict=True)
            }
            passing = None
            if crossing is not None:
                passing = widest([crossing.passing(range(a), range(a, b)) for a, b in spans])
            parts = dynamic_parts(costs, layout, stages, rank=rank, passing=passing)
            return sum(parts.values())

        return RoundsProblem(
            layers=tuple(numbers[kind] for kind in chain),
            kinds=tuple(kinds),
            home=home,
            moments=moments(layout.schedule, ranks, layout.micro_batches),
            capacity_bytes=room_bytes(device.memory_bytes, costs),
            fixed_bytes=(4 * boundary_bytes + working,) * ranks,
            passed_bytes=tuple(
                (each_bytes[front], each_bytes[behind])
                for front, behind in (_stages_of(home, rank) for rank in range(ranks))
            ),
            used_bytes=used_bytes,
            exposed_s=tuple(exposed_s),
            micro_batches=layout.micro_batches,
            credits_s=tuple(
                min(part.figures.credit_s for part in costs.parts[kind]) for kind in numbers
            )
            if split
            else (),
            cut_s=self._cuts_s(layout, chain),
        )

    def _cuts_s(self, layout: Layout, chain: Sequence[str]) -> tuple[float, ...]:
        """[position] Seconds of what crosses there."""
        if not self._model.edges:
            return (self._tables.of(layout).transfer_s,) * (len(chain) + 1)
        size_bytes = self._tables.output_bytes(layout)
        each_s = {kind: self._tables.crossing_s(layout, [size_bytes[kind]]) for kind in set(chain)}
        place = {name: at for at, (name, _) in enumerate(self._model.chain)}
        edges = [(place[source], place[target]) for source, target in self._model.graph.edges]
        return cuts_along(edges, [each_s[kind] for kind in chain], range(len(chain)))

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, memory ignored."""
        return least_s(self.problem(layout)) + self._tables.of(layout).step_s

    def solve(self, layout: Layout, cutoff_s: float) -> Found[RoundsSolution] | Lost:
        """Return the best split of a layout."""
        step_s = self._tables.of(layout).step_s
        answer = solve_rounds(
            self.problem(layout), cutoff_s=cutoff_s - step_s, frontiers=self._frontiers
        )
        return judged(answer, layout, cutoff_s, step_s)

    def ranked(self, found: Found[RoundsSolution]) -> Ranked:
        """Return the plan of a split and its prediction."""
        c, layout, split = self.candidates, found.layout, found.split
        chosen = [
            (name, self._choices(layout, layer.kind)[option])
            for (name, layer), option in zip(self._model.chain, split.options, strict=True)
        ]
        stages = tuple(stage_of(chosen[first:end]) for first, end in pairwise(split.cuts))
        plan = plan_with(
            replace(c.request, model=self._model), layout, stages, step_s=found.objective_s
        )
        plan = Plan(**{**dict(plan), "model": PlannedModel.of(c.model)})
        names = [[item.layer for item in stage.layers] for stage in stages]
        seats = branching(self._tables, layout, names) if c.model.edges else None
        return predicted(plan, found.objective_s, c.model, self._tables, seats)


def _stages_of(home: Sequence[int], rank: int) -> tuple[int, int]:
    front, behind = (stage for stage, own in enumerate(home) if own == rank)
    return front, behind
