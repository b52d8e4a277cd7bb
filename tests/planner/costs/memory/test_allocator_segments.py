"""What is reserved beside a step's tensors: by hand, and against peaks that were published."""

from dataclasses import replace

import pytest

from meshwright.planner.calibration.tables.predictions import predict_run
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.memory.allocator_segments import Replayed, reserved_beside_bytes
from meshwright.planner.costs.memory.caching_allocator import MIB
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.training import Lora
from meshwright.planner.operators.operator_table import Operator, OperatorTable
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup

TOY = OperatorTable(
    kind="toy",
    operators=(
        Operator(name="a", kind="memory", inputs=("x",), outputs={"a": 30.0 * MIB}, saved=("x",)),
        Operator(name="y", kind="memory", inputs=("a",), outputs={"y": 12.0 * MIB}, saved=("a",)),
    ),
    input_bytes=12.0 * MIB,
    output="y",
)
"""x of 12 MiB, a of 30, y of 12."""

ADAPTERS = Lora(
    rank=64, targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
)


def beside(count: int, *, unit: float = 0.0, logits: float = 20.0) -> float:
    """MiB; `logits` count as many, of 16 bytes each at the peak."""
    block = Replayed(table=TOY, recompute="full", unit_bytes=unit * MIB)
    found = reserved_beside_bytes([block] * count, logits=logits * MIB, bytes_per_logit=16.0)
    return found / MIB


def test_logits_fit_into_no_segment_that_forward_left() -> None:
    """By hand: a's 30 MiB stay in vain, and logits in 16 bits, 40 MiB, leave theirs to no other.

    Allocated at most are x, y and four tensors of 80 MiB.  Each further block stores 12 MiB more,
    and takes a's segment.
    """
    assert beside(1) == 30 + 40
    assert beside(3) == 30 + 40


def test_what_is_gathered_has_segments_of_its_own() -> None:
    """Two units of 50 MiB are in flight, of which one is there at the loss."""
    assert beside(1, unit=50.0) == 30 + 40
    assert beside(3, unit=50.0) == 30 + 40 + 50


@pytest.mark.parametrize(("seq_len", "allocated_gib"), [(512, 8.28), (2048, 9.16)])
def test_published_peaks_of_adapters_beside_a_model_of_16_bits(
    seq_len: int, allocated_gib: float
) -> None:
    """AnswerDotAI/fsdp_qlora at 05ed9f2, benchmarks_03_2024.md: Llama-2 7B, LoRA, two RTX 3090."""
    request = Request.create(
        resolve_model("llama-2-7b"),
        resolve_cluster("2xrtx-3090"),
        seq_len=seq_len,
        global_batch=2,
        framework="fsdp_qlora",
    )
    job = replace(request.job, lora=ADAPTERS)
    request = replace(request, job=job)

    found = predict_run(
        Setup(request=request, layout=Layout(data_shard=2, zero=3), recompute="full")
    )

    assert found.memory_bytes("allocated", "max") / 2**30 == pytest.approx(allocated_gib, rel=0.02)
    reserved = found.memory_bytes("reserved", "max")
    assert found.stages[0].memory_parts["allocator overhead"] > 0
    assert reserved < found.stages[0].memory_capacity_bytes
