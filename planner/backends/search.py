"""The fastest layout of another framework's space, found by pricing every one of them.

Stacks price a layout in a millisecond and their spaces have thousands, so nothing is
bounded: the certificate says how many were priced, how many do not fit, and that none is faster.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.backends.estimate import Estimate, estimate
from planner.backends.prediction import run_prediction
from planner.backends.runs import Run
from planner.backends.spaces import NOT_LOOKED_AT, flags, layouts, refuse_pins, space_of
from planner.errors import DocumentError, NoPlanFits
from planner.model import ModelGraph
from planner.prediction import Prediction
from planner.request import Request
from planner.units import bytes_text

Told = Callable[[int, int], None]
CLOSE = 8
"""Runners-up that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout of the framework, what it should do, and the flags that ask for it."""

    run: Run
    layout: str
    prediction: Prediction
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendAnswer:
    """The fastest layout that fits, those next to it, and what was looked at."""

    backend: str
    best: Choice
    others: tuple[Choice, ...]
    priced: int
    misfits: int
    search_s: float

    @property
    def ties(self) -> tuple[Choice, ...]:
        """Others whose predicted step lies within the error bar of the best."""
        return tuple(
            other
            for other in self.others
            if other.prediction.step_time_s <= self.best.prediction.step_time_high_s
        )

    @property
    def statement(self) -> str:
        """What is proven."""
        return (
            f"of {self.priced} layouts that {self.backend} can run here none that fits is faster "
            f"as its stack prices them; {self.misfits} do not fit; not looked at: {NOT_LOOKED_AT}"
        )


def backend_search(
    request: Request, *, top: int = CLOSE, told: Told | None = None
) -> BackendAnswer:
    """Return the fastest layout of a framework; NoPlanFits names the one that misses least."""
    started = time.process_time()
    model, cluster, job, pins = request.model, request.cluster, request.job, request.pins
    backend = request.stack.name
    space_of(backend)
    a = model.architecture
    if a is None or a.patches or a.classes:
        raise DocumentError(
            "backend", f"{backend} trains language models; {model.name} is none: use native"
        )
    if cluster.mixed:
        raise DocumentError("cluster", f"has devices that differ; {backend} takes one kind")
    if job.lora is not None:
        raise DocumentError("lora", f"is planned for the native backend, not for {backend}")
    refuse_pins(pins, backend)
    runs = list(layouts(model, cluster, job, pins, backend=backend))
    if not runs:
        raise NoPlanFits(
            f"{backend} has no layout of {model.name} on {cluster.devices} devices with a global "
            f"batch of {job.global_batch}; change the batch or what is fixed"
        )
    fitting: list[tuple[float, int]] = []
    closest: tuple[float, Run] | None = None
    for index, run in enumerate(runs):
        if told is not None and index % 64 == 0:
            told(index, len(runs))
        found = estimate(run)
        if found.fits:
            fitting.append((found.step_time_s, index))
            continue
        need = _need_bytes(found)
        if closest is None or need < closest[0]:
            closest = need, run
    if not fitting:
        assert closest is not None
        need, run = closest
        capacity = cluster.groups[0].accelerator.memory_bytes
        raise NoPlanFits(
            f"no layout of {model.name} fits {cluster.name} under {backend}. The closest, "
            f"{run.layout_text}, needs {bytes_text(need)} and has {bytes_text(capacity)}."
        )
    nearby = [_choice(model, runs[index]) for _, index in heapq.nsmallest(top + 1, fitting)]
    return BackendAnswer(
        backend=backend,
        best=nearby[0],
        others=tuple(nearby[1:]),
        priced=len(runs),
        misfits=len(runs) - len(fitting),
        search_s=time.process_time() - started,
    )


def _need_bytes(found: Estimate) -> float:
    return max(stage.device_bytes for stage in found.stages)


def _choice(model: ModelGraph, run: Run) -> Choice:
    layout = run.layout_text + (f" zero={run.zero}" if run.zero is not None else "")
    return Choice(
        run=run,
        layout=layout,
        prediction=run_prediction(run, model, layout),
        flags=flags(run),
    )


def backend_answer_json(answer: BackendAnswer) -> dict[str, Any]:
    """Return what `plan --backend B --json` prints."""
    best = answer.best.prediction
    return {
        "backend": answer.backend,
        "plan": {"layout": answer.best.layout, "flags": list(answer.best.flags)},
        "step_time_s": best.step_time_s,
        "step_time_low_s": best.step_time_low_s,
        "step_time_high_s": best.step_time_high_s,
        "tokens_per_s": best.tokens_per_s,
        "mfu": best.mfu,
        "peak_memory_bytes": [
            {"peak": stage.peak_memory_bytes, "parts": stage.memory_parts} for stage in best.stages
        ],
        "prediction": best.model_dump(mode="json", exclude_none=True),
        "certificate": {
            "statement": answer.statement,
            "optimal": True,
            "objective_s": best.step_time_s,
            "lower_bound_s": best.step_time_s,
            "gap": 0.0,
            "configurations": answer.priced,
            "counts": {"priced": answer.priced - answer.misfits, "does not fit": answer.misfits},
        },
        "runners_up": [
            {
                "layout": other.layout,
                "step_time_s": other.prediction.step_time_s,
                "tie": other in answer.ties,
            }
            for other in answer.others
        ],
        "search_s": answer.search_s,
    }
