"""Compiled blocks train as eager ones do, keep what the planner says, and say why they are not."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.compiled_blocks import saved_and_planned
from benchmarks.rehearsal import rehearse
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Recompute
from meshwright.runtime.core.torch_internals import compiled_graphs
from meshwright.runtime.engine.engine import Engine, StepResult
from meshwright.runtime.launch.training_loop import _Peak
from meshwright.runtime.techniques import compile as compiled
from meshwright.runtime.techniques.compile import Compiler
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import errors, train

CPU = torch.device("cpu")
TRACED = "aot_eager"
"""Traces and differentiates, and runs the same kernels as eager."""
PARTITIONED = "aot_eager_decomp_partition"
"""Chooses what is kept for backward as inductor does."""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", TRACED)
    logging.disable(logging.WARNING)  # torch's, of what it takes for unusual
    yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


def of_blocks(plan: Plan) -> Plan:
    return plan.model_copy(update={"compile": "block"})


# --- equal to eager -----------------------------------------------------------------------------

LAYOUTS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("reference", {"tensor": 2, "recompute": "selective", "precision": "bf16"}, 0.0),
    (
        "llama",
        {
            "data_shard": 2,
            "zero": 3,
            "recompute": "full",
            "precision": "fp8",
            "weight_gather_dtype": "fp8",
        },
        0.0,
    ),
    ("gpt2", {"context": 2, "recompute": "selective"}, 0.0),
    ("llama", {"pipeline": 2, "activations": "offload"}, 0.0),
    ("llama", {"pipeline": 2, "schedule": "zb-h1", "micro_batches": 4}, 0.0),
    (
        "reference",
        {
            "pipeline": 2,
            "schedule": "interleaved-zb",
            "virtual_stages": 2,
            "precision": "bf16",
            "recompute": "selective",
        },
        0.0,
    ),
    ("mixtral", {"data_shard": 2, "expert": 2, "zero": 1}, 0.0),
    (
        "qwen2_moe",
        {"data_shard": 2, "expert": 2, "zero": 3, "precision": "bf16", "recompute": "full"},
        0.0,
    ),
    # What is packed into 8 bits is what the graph keeps, which is not what eager modules do.
    ("llama", {"data_replicate": 2, "activations": "compress"}, 3e-2),
)
"""More of them are rows of tests/runtime/test_matrix.py."""
PARTS = 9
"""Of which `make test` has the first."""


def eager_and_compiled(part: int) -> list[tuple[dict[str, float], int, dict[str, str]]]:
    found = []
    for family, layout, _ in LAYOUTS[part::PARTS]:
        graph = cases.transformer(family)
        plan = cases.plan(graph, **{"micro_batches": 2, **layout})
        expected = train(plan, graph, 2)
        graphs = compiled_graphs()
        torch._dynamo.reset()
        engines: list[Engine] = []
        own = train(of_blocks(plan), graph, 2, engines=engines)
        compiler = engines[0].compiler
        assert compiler is not None
        found.append((errors([own], expected), compiled_graphs() - graphs, compiler.fallbacks))
    return found


@pytest.mark.ranks
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.matrix) for part in range(1, PARTS))]
)
@pytest.mark.matrix
def test_every_axis_trains_compiled_as_eager_with_one_graph_for_all_blocks(part: int) -> None:
    for of_rank in on_ranks(2, eager_and_compiled, part):
        for (family, layout, bound), (found, graphs, fallbacks) in zip(
            LAYOUTS[part::PARTS], of_rank, strict=True
        ):
            assert max(found.values()) <= bound, (family, layout, found)
            assert not fallbacks, (family, layout, fallbacks)
            assert graphs == 1, (family, layout)


# --- what is kept and held ----------------------------------------------------------------------


@pytest.mark.spread(1)
@pytest.mark.long("llama-fp8-none", "olmo2-fp32-selective")
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("family", "precision", "choice"),
    [
        pytest.param("llama", "bf16", "none", marks=pytest.mark.matrix),
        ("llama", "fp8", "none"),
        ("gpt2", "fp32", "none"),
        ("gemma2", "bf16", "none"),
        ("olmo2", "fp32", "selective"),
        ("reference", "bf16", "full"),
    ],
)
def test_a_compiled_block_keeps_what_the_planner_says(
    family: str, precision: Precision, choice: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", PARTITIONED)

    figures = {"hidden_size": 128, "heads": 4, "kv_heads": 4 if family == "gpt2" else 2,
               "head_dim": 32, "ffn_size": 352, "layers": 1}  # fmt: skip
    graph = cases.transformer(family, **figures)

    saved, planned = saved_and_planned(graph, choice, precision, positions=64)

    assert saved == pytest.approx(planned, rel=0.02)


def rehearsed(rows: list[tuple[Plan, ModelGraph]]) -> list[int]:
    return [rehearse(plan, graph, rank=0).peak_bytes for plan, graph in rows]


@pytest.mark.matrix
@pytest.mark.usefixtures("backend")
def test_a_rehearsed_rank_with_compiled_blocks_peaks_where_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", PARTITIONED)
    figures = {"hidden_size": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn_size": 384}
    graph = cases.transformer("llama", vocab_size=512, layers=4, **figures)
    rows = []
    for layout in (
        {"recompute": "selective"},
        {"data_shard": 2, "zero": 3, "precision": "bf16"},
        {"pipeline": 2, "schedule": "zb-h1", "micro_batches": 4, "precision": "bf16"},
    ):
        plan = of_blocks(cases.plan(graph, **{"global_batch": 32, "micro_batches": 2, **layout}))
        rows.append((plan.model_copy(update={"seq_len": 64}), graph))

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as apart:
        found = apart.submit(rehearsed, rows).result()

    for (plan, _), peak in zip(rows, found, strict=True):
        cluster = resolve_cluster(f"{plan.mesh.devices}xh100-sxm-80gb")
        parts = predict(plan, graph, cluster).stages[0].memory_parts
        predicted = sum(
            size for part, size in parts.items() if part not in ("context", "allocator overhead")
        )
        # What waits for W is counted beside all that its layer has stored.
        split = plan.layout.executed_schedule.splits_backward
        assert predicted == pytest.approx(peak, rel=0.04 if split else 0.01)


# --- what is not compiled -----------------------------------------------------------------------


class Asks(nn.Module):
    """A layer that asks a tensor for its value, which ends a graph."""

    def forward(self, x: Tensor) -> Tensor:
        print(float(x.sum()))
        return 2 * x


@pytest.mark.usefixtures("backend")
def test_a_layer_that_is_no_graph_stays_eager_and_says_why() -> None:
    compiler, layer = Compiler(CPU), Asks()
    compiler.compile("block.0", layer)

    assert torch.equal(layer(torch.ones(2)), torch.full((2,), 2.0))

    assert compiler.fallbacks.keys() == {"block.0"}
    assert compiler.fallbacks["block.0"]


def test_without_a_compiler_layers_stay_eager_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiler_lack", lambda device: f"no compiler for {device}")
    compiler, layer = Compiler(CPU), nn.Linear(2, 2)
    compiler.compile("block.0", layer)

    assert compiler.fallbacks == {"block.0": "no compiler for cpu"}
    assert "forward" not in vars(layer)


def test_a_run_of_compiled_blocks_on_a_cpu_says_that_nobody_counted_its_memory() -> None:
    peak = _Peak("cpu", compiled=True)

    made = peak.of(lambda: StepResult(1.0, 2.0), held={})

    assert made.loss == 1.0
    assert (peak.so_far_bytes(), peak.slows) == (None, False)
    assert "not counted" in peak.source
