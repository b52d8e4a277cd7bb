"""A layout of a model priced by another framework's stack, as the Prediction of `predict`."""

from __future__ import annotations

from planner.backends.estimate import estimate
from planner.errors import DocumentError
from planner.plan import Layout
from planner.prediction import Assumption, Prediction
from planner.request import Request
from planner.setup import Setup


def backend_prediction(request: Request, layout: Layout) -> Prediction:
    """Return what a layout should do under a framework's stack, all blocks recomputed alike."""
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
    setup = Setup(
        request=request,
        layout=layout,
        recompute=request.pins.recompute or "none",
        framework=request.stack.name,
    )
    return setup_prediction(setup, layout.text())


def setup_prediction(setup: Setup, layout: str) -> Prediction:
    """Return what a run should do by the stack that trains it; `layout` is how it is written."""
    model, stack = setup.request.model, setup.request.stack
    a = model.architecture
    if a is None or a.patches or a.classes:
        raise DocumentError(
            "backend", f"{stack.name} trains language models; {model.name} is none: use native"
        )
    result = estimate(setup)
    range_of = "its own residuals"
    if result.beyond:
        range_of = f"sources left out of the fit, since outside it are {', '.join(result.beyond)}"
    sources = [f"stack {stack.name}; range of {range_of} (docs/accuracy.md)"]
    found = result.prediction
    own = tuple(
        Assumption(what=what, provenance="quoted", source=f"backend {setup.framework}")
        for what in (*sources, *result.assumptions)
    )
    return found.model_copy(
        update={
            "layout": f"{layout} {setup.framework}",
            "step_time_low_s": result.low_s,
            "step_time_high_s": result.high_s,
            "assumptions": (*own, *found.assumptions),
        }
    )
