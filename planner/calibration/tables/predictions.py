"""A run as it is set up, predicted: what `planner.costs.predict` has of the plan made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.planner.calibration.tables.stages import placements, recomputes, with_links
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import Placement, placement_prediction
from meshwright.planner.documents.plan import Activations, Layout, PlacedLayer, Plan, Stage
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup
from meshwright.planner.search.partition.layout_partition import plan_with

MOST_TABLES = 256
"""Costs cached at a time."""


class Tables:
    """Costs by which runs are predicted; the runs of a sweep share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], CostTables] = {}

    def costs_of(self, setup: Setup) -> CostTables:
        """Return the costs of a run, known ones where model, cluster and stack are those of one."""
        request = setup.request
        among = recomputes(setup)
        same = (id(request.model), id(request.cluster), request.job, id(request.stack))
        key = (*same, setup.activations, among)
        tables = self._known.get(key)
        if tables is None:
            if len(self._known) >= MOST_TABLES:
                self._known.clear()
            kept: tuple[Activations, ...] = ("keep",)
            choices = kept if setup.activations == "keep" else (*kept, setup.activations)
            tables = self._known[key] = CostTables(request, choices, among)
        return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """A run with all that it leaves open filled in."""

    request: Request
    layout: Layout
    placements: list[Placement]
    prediction: Prediction


def _choose_recompute(setup: Setup, tables: Tables) -> _Decided:
    """Return a run that recomputes nothing if that fits, else everything, where nobody says."""
    setup = with_links(setup)
    layout, assumed = setup.layout, list(setup.assumed)
    costs = tables.costs_of(setup)

    def placements_and_prediction(setup: Setup) -> tuple[list[Placement], Prediction]:
        stages = placements(setup, layout)
        return stages, placement_prediction(costs, layout, stages, assumed=assumed)

    if setup.recompute is None:
        assumed.append("nothing recomputed, since that fits")
    stages, prediction = placements_and_prediction(setup)
    if setup.recompute is None and not prediction.fits:
        assumed[-1] = "all blocks recomputed, since nothing else fits"
        stages, prediction = placements_and_prediction(replace(setup, recompute="full"))
    if not 0 < prediction.step_time_s < math.inf:
        raise DocumentError("", "figures are out of all proportion: no step time follows from them")
    return _Decided(request=setup.request, layout=layout, placements=stages, prediction=prediction)


def predict_run(setup: Setup, tables: Tables | None = None) -> Prediction:
    """Return what a run should do; of many, those of a sweep share `tables`."""
    return _choose_recompute(setup, tables or Tables()).prediction


def plan_of(setup: Setup) -> Plan:
    """Return a run as a plan, where its schedule and stages are ones that a plan can say."""
    run = _choose_recompute(setup, Tables())
    names = iter(name for name, _ in run.request.model.chain)
    stages = tuple(
        Stage(
            layers=tuple(
                PlacedLayer(layer=next(names), recompute=recompute, activations=activations)
                for _, recompute, activations in placement
            )
        )
        for placement in run.placements
    )
    return plan_with(run.request, run.layout, stages, step_s=run.prediction.step_time_s)


def backend_prediction(request: Request, layout: Layout) -> Prediction:
    """Return what a layout should do whose stages are those of its stack's rule.

    All blocks recompute alike.
    """
    a = request.model.architecture
    if layout.devices > request.cluster.devices:
        raise DocumentError(
            "layout",
            f"takes {layout.devices} devices, and {request.cluster.name} has "
            f"{request.cluster.devices}",
        )
    if a is not None and layout.pipeline > a.layers:
        raise DocumentError(
            "layout", f"{layout.pipeline} stages need as many blocks; the model has {a.layers}"
        )
    return setup_prediction(_of_pins(request, layout), layout.text())


def backend_plan(request: Request, layout: Layout) -> Plan:
    """Return the plan that `backend_prediction` prices."""
    return plan_of(_of_pins(request, layout))


def _of_pins(request: Request, layout: Layout) -> Setup:
    """Return a run whose blocks are as the request pins them."""
    pins = request.pins
    return Setup(
        request=request,
        layout=layout,
        recompute=pins.recompute or "none",
        activations=pins.activations or "keep",
    )


def setup_prediction(setup: Setup, layout: str) -> Prediction:
    """Return what a run of a language model should do; `layout` is how it is written."""
    model, stack = setup.request.model, setup.request.stack
    a = model.architecture
    if a is None or a.patches or a.classes:
        raise DocumentError(
            "backend", f"{stack.name} trains language models; {model.name} is none: use native"
        )
    return predict_run(setup).model_copy(update={"layout": f"{layout} {stack.name}"})
