"""Training runs of tests, and how far what they leave lies apart."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases

STEPS = 3
"""Enough for the moments of AdamW, an average of two iterations and what waits a step."""
TOLERANCE = 1e-5
"""Relative, where nothing but the order of sums differs from one process."""


@dataclass(frozen=True)
class Run:
    """What a training run left: losses and norms [step], weights by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def train(
    plan: Plan, model: ModelGraph, steps: int = STEPS, engines: list[Engine] | None = None
) -> Run:
    """Train this rank's part and return the weights it holds, whole; `engines` gets what did it.

    Samples hold several documents where the plan counts on it.
    """
    documents = plan.document_len is not None
    engine = token_engine(plan, model, device=torch.device("cpu"), documents=documents)
    if engines is not None:
        engines.append(engine)
    losses, norms = [], []
    for step in range(steps):
        tokens = cases.global_tokens(step, global_batch=plan.global_batch)
        starts = cases.global_starts(step, global_batch=plan.global_batch) if documents else None
        own = plan.samples_of(engine.slice_rank)
        own = slice(own.start, own.stop)
        result = engine.step((tokens[own], None, None if starts is None else starts[own]))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = {
        name: _whole(value).numpy().copy()
        for name, value in engine.state().items()
        if name.startswith("model.")
    }
    return Run(losses, norms, weights)


def _whole(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.float() if whole.dtype == torch.bfloat16 else whole


def train_all(
    named: Sequence[tuple[str, Plan, ModelGraph]], steps: int = STEPS
) -> list[tuple[Run, float]]:
    """Train one after another in this process; return each run and its seconds."""
    results = []
    for name, plan, model in named:
        start = time.perf_counter()
        try:
            run = train(plan, model, steps)
        except Exception as error:
            error.add_note(f"in the case '{name}'")
            raise
        gc.collect()
        results.append((run, time.perf_counter() - start))
    return results


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Return the distance of `a` from `b` in units of `b`."""
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def errors(runs: list[Run], expected: Run) -> dict[str, float]:
    """Return the largest relative error of losses, norms and weights over all ranks."""
    weights: dict[str, np.ndarray] = {}
    for run in runs:
        weights.update(run.weights)
    assert set(weights) == set(expected.weights)
    return {
        "loss": max(relative(np.array(r.losses), np.array(expected.losses)) for r in runs),
        "norm": max(relative(np.array(r.norms), np.array(expected.norms)) for r in runs),
        "weights": max(
            relative(value, expected.weights[name])
            for run in runs
            for name, value in run.weights.items()
        ),
    }
