"""Costs of many layouts in arrays are those of each layout alone."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.plan import Job
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.group_memory_bounds import LayersTogether, holding_of
from meshwright.planner.search.bounds.layout_bounds import Candidates

CASES = [
    ("llama-3.2-1b", "2x8xa100-sxm-40gb", Job(seq_len=2048, global_batch=16), ("keep",)),
    ("mixtral-8x7b", "2x8xh100-sxm-80gb", Job(seq_len=2048, global_batch=16), ("keep",)),
    (
        "gpt2",
        "4xv100-sxm-32gb",
        Job(seq_len=1024, global_batch=8),
        ("keep", "compress"),
    ),
]


@pytest.mark.spread(1)
@pytest.mark.long(
    "full-mixtral-8x7b-2x8xh100-sxm-80gb-job1-activations1",
    "None-mixtral-8x7b-2x8xh100-sxm-80gb-job1-activations1",
    "full-llama-3.2-1b-2x8xa100-sxm-40gb-job0-activations0",
)
@pytest.mark.parametrize(("name", "cluster", "job", "activations"), CASES)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.matrix
def test_what_layers_hold_together_is_what_each_layout_says(
    name: str, cluster: str, job: Job, activations: tuple, recompute: Recompute | None
) -> None:
    model, machine = resolve_model(name), resolve_cluster(cluster)
    tables = CostTables(Request(model, machine, job), activations)
    layouts = list(Candidates(Request(model, machine, job)).layouts())
    some = layouts[:: max(1, len(layouts) // 150)]
    figures = tables.figures_together(some)
    held, every = np.array([holding_of(layout) for layout in some]), np.arange(len(some))
    layers = LayersTogether(tables, figures, [some], every[:, None], recompute)

    for kind in figures:
        together = layers.figures_of(kind, held, every)
        for at, layout in enumerate(some):
            costs = tables.costs_without_links(layout)
            action_s = costs.action_s if kind in tables.end_kinds else 0.0
            chosen = [cost for cost in costs.kinds[kind] if recompute in (None, cost.recompute)]
            for choice, cost in enumerate(chosen):
                part = next(
                    part
                    for part in costs.parts[kind]
                    if (part.recompute, part.activations) == (cost.recompute, cost.activations)
                )
                expected = (
                    cost.forward_s + cost.backward_s - action_s,
                    part.stored_bytes,
                    part.figures.kept_bytes,
                )
                assert together[[0, 1, 4], choice, at] == pytest.approx(expected, rel=1e-12)
                assert together[2, choice, at] <= part.states.resident_bytes
                assert together[3, choice, at] <= part.layer_bytes.backward


def test_the_sharing_of_many_layouts_is_that_of_each() -> None:
    model, machine = resolve_model("llama-3.2-1b"), resolve_cluster("2x8xa100-sxm-40gb")
    job = Job(seq_len=2048, global_batch=16)
    tables = CostTables(Request(model, machine, job))
    candidates = Candidates(Request(model, machine, job, pins=Pins(micro_batch=1)))
    candidates.computation_s()
    compared = 0
    for family in candidates.families[::3]:
        for sharings, _ in candidates.rooms_s([family])[0]:
            layouts = [family.layout(sharing, family.timetables[0]) for sharing in sharings]
            moved = tables.moved_together("block", layouts)
            together = tables.parts_together("block", layouts[0], moved)
            for at, layout in enumerate(layouts):
                for one, part in zip(
                    together, tables.parts("block", layout, linked=True), strict=True
                ):
                    for name in ("forward_s", "backward_s", "once_s"):
                        value = getattr(one, name)
                        value = value if isinstance(value, float) else value[at]
                        assert value == pytest.approx(getattr(part, name), rel=1e-12)
                compared += 1
    assert compared > 30


def test_a_group_of_both_losses_has_the_choices_of_either_for_the_head_alone() -> None:
    model, machine = resolve_model("llama-3.2-1b"), resolve_cluster("2x8xa100-sxm-40gb")
    tables = CostTables(Request(model, machine, Job(seq_len=2048, global_batch=16)))
    candidates = Candidates(Request(model, machine, Job(seq_len=2048, global_batch=16)))
    both = [family for family in candidates.families if len(family.losses) >= 2][::40]
    assert len(both) > 5
    each = [
        [family.layout(family.sharings[0], family.timetables[0], place=place) for family in both]
        for place in range(2)
    ]
    alone = []
    for layouts in each:
        settings = np.arange(len(both))[:, None]
        figures = tables.figures_together(layouts)
        losses = [[layout.loss for layout in layouts]]
        alone.append(LayersTogether(tables, figures, layouts, losses, settings, None))
    count = len(both)
    settings = np.stack([np.arange(count), np.arange(count) + count], axis=1)
    figures = tables.figures_together([layout for layouts in each for layout in layouts])
    held, every = np.array([holding_of(layout) for layout in each[0]]), np.arange(count)

    losses = [[layout.loss for layout in layouts] for layouts in each]
    together = LayersTogether(tables, figures, each[0], losses, settings, None)

    for kind in figures:
        found = together.figures_of(kind, held, every)
        plain, chunked = (one.figures_of(kind, held, every) for one in alone)
        if kind == "head":
            assert (plain != chunked).any()
            assert (found == np.concatenate([plain, chunked], axis=1)).all()
        else:
            assert (found == plain).all()
            assert (plain == chunked).all()
