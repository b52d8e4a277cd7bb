"""Captured micro-batches beside those that run as they are: the same bits, and fewer seconds.

On a CPU, which has no graphs, a list of a pass's operators is run again in their place.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks.gpu.single_device import TINY, Case
from benchmarks.gpu.suite_cases import CHUNKS, EQUAL, ODD_VOCABULARY, Row, Rows, Setting, alone
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques import micro_batch_graphs
from meshwright.runtime.techniques.operator_survey import ReplayedOperators

STEPS = 4
"""The first looks at a pass, the second captures it."""
WAITING = (
    ("gpt2", 1024, Case(micro_batches=8)),
    ("llama-3.2-1b", 2048, Case(micro_batches=1)),
    ("llama-3.2-1b", 2048, Case(micro_batches=1, recompute=("selective",))),
    ("llama-3.2-1b", 2048, Case(micro_batches=4, recompute=("full",))),
)
"""Steps that wait for their host (docs/results/gpu.md)."""


def graphs(at: Setting) -> Rows:
    """Yield whether graphs change a bit of a training, and what they are worth."""
    if at.kind == "cpu":
        micro_batch_graphs.GRAPHS["cpu"] = ReplayedOperators
    small = graph_of(at.small, name="small")
    odd = graph_of(at.small.model_copy(update={"vocab_size": ODD_VOCABULARY}), name="odd")
    compiled = [(small, Case(precision="bf16"), {"compile": "block"})] if not at.tiny else []
    for model, case, how in (
        *((small, case, {}) for case in EQUAL),
        (odd, Case(precision="bf16"), {}),
        (odd, Case(precision="bf16"), {"loss": CHUNKS}),
        *compiled,
    ):

        def same(model: ModelGraph = model, case: Case = case, how: Any = how) -> Row:
            plan = case.plan(model, "device", 128).model_copy(update=how)

            def trained(kind: str) -> Row:
                return alone(lambda: _trained(plan.model_copy(update={"graphs": kind}), model, at))

            plain = trained("none")
            try:
                captured = trained("micro_batch")
            except LaunchError as error:  # a plan that nobody may run
                return {
                    "plain": plain["losses"],
                    "equal": True,
                    "replays": 0,
                    "obstacle": str(error),
                }
            bits = all(torch.equal(v, captured["state"][n]) for n, v in plain["state"].items())
            return {
                "plain": plain["losses"],
                "captured": captured["losses"],
                "equal": bits and plain["losses"] == captured["losses"],
                "replays": captured["replays"],
                "obstacle": captured["obstacle"],
            }

        words = [case.text, *(["odd vocabulary"] if model is odd else []), *how]
        yield f"equal: {', '.join(words)}", same
    for name, seq_len, case in WAITING[: 1 if at.tiny else None]:
        model = graph_of(TINY, name="tiny") if at.tiny else resolve_model(name)
        blocks = ("none",) if at.tiny else ("none", "block")
        for compile_, kind in itertools.product(blocks, ("none", "micro_batch")):

            def step(
                model: ModelGraph = model,
                case: Case = case,
                how: Any = {"compile": compile_, "graphs": kind},  # noqa: B006 - read alone
                length: int = 128 if at.tiny else seq_len,
            ) -> Row:
                plan = case.plan(model, "local:1", length).model_copy(update=how)
                return alone(lambda: _timed(plan, model, at))

            title = "tiny" if at.tiny else name
            yield f"step: {title} {case.text}, compile {compile_}, graphs {kind}", step


def _trained(plan: Plan, model: ModelGraph, at: Setting) -> Row:
    engine = token_engine(plan, model, device=at.device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.architecture.vocab_size if model.architecture else 256
    shape = (plan.global_batch, plan.seq_len + 1)
    losses = [
        engine.step(torch.randint(vocabulary, shape, generator=generator)).loss
        for _ in range(STEPS)
    ]
    captured = engine.graphs
    return {
        "losses": losses,
        "state": {name: value.clone() for name, value in engine.state().items()},
        "replays": captured.replays if captured else 0,
        "obstacle": captured.obstacle if captured else None,
    }


def _timed(plan: Plan, model: ModelGraph, at: Setting) -> Row:
    engine = token_engine(plan, model, device=at.device)
    tokens = torch.zeros(plan.global_batch, plan.seq_len + 1, dtype=torch.int64)
    for _ in range(3):  # which look, and capture
        engine.step(tokens)
    cluster = resolve_cluster("1xh100-sxm-80gb" if at.tiny else "local:1")
    found: Row = {
        "seconds": at.seconds(lambda: engine.step(tokens)),
        "predicted_s": predict(plan, model, cluster).step_time_s,
        "obstacle": engine.graphs.obstacle if engine.graphs else None,
    }
    if at.kind == "cuda":
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found
