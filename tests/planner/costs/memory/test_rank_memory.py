"""A rank's peak by walking its order, against the peak of one stage and against hand counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from meshwright.planner.calibration.tables.predictions import predict_run
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layer_strategy import LayerBytes
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.memory import rank_memory
from meshwright.planner.documents.framework import Framework, with_figures, with_options
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup

LAYER = LayerBytes(
    stored=5.0,
    kept=0.0,
    forward=2.0,
    backward=3.0,
    input=3.0,
    moving=0.0,
    parameters=7.0,
    gathered=0.0,
    gradients=4.0,
    gradient_buffers=0.0,
    optimizer=8.0,
    host=0.0,
    bucket=0.0,
    flat=0.0,
    joined=0.0,
    offloaded=False,
    receives=False,
)


@dataclass(frozen=True, kw_only=True)
class Process:
    boundary_bytes: float = 1.0
    keeps_sent: bool = False
    context_bytes: float = 10.0
    slack: float = 1.25
    tight: float = 1.5
    room_share: float = 1.0
    reduce_bytes: float = 0.0
    flat_bytes_at_most: float = 100.0
    has_gradient_buckets: bool = False
    recorded_bytes: float = 0.0
    workspace_bytes: float = 0.0


def test_what_waits_for_a_collective_is_reserved_and_takes_no_room() -> None:
    stage = {0: [LAYER, LAYER]}
    usual, waiting = Process(), Process(recorded_bytes=100.0)

    plain = rank_memory.rank_memory_parts(usual, Layout(), stage, rank=0)
    parts = rank_memory.rank_memory_parts(waiting, Layout(), stage, rank=0)

    assert parts == {**plain, "recorded buffers": 100.0}
    tensors = sum(plain.values()) - plain["context"] - plain["allocator overhead"]
    just = 10.0 + 1.5 * tensors
    assert rank_memory.has_room(just, plain, usual)
    assert rank_memory.has_room(just, parts, waiting)
    assert not rank_memory.has_room(0.99 * just, parts, waiting)


def test_what_backwards_leave_is_there_until_the_last_one_ends() -> None:
    """Of three layers the first goes backward beside what both others have left, 6 bytes each."""
    leaving = LAYER._replace(left=6.0)
    costs, three = Process(), Layout()

    plain = rank_memory.dynamic_parts(costs, three, {0: [LAYER] * 3}, rank=0)
    parts = rank_memory.dynamic_parts(costs, three, {0: [leaving] * 3}, rank=0)

    # All activations at the last layer's, which comes first, or one and what is left.
    assert plain["activations"] + plain["gradients"] == 3 * 5.0
    assert parts["activations"] == 5.0 + 2 * 6.0


def test_the_optimizers_step_may_be_the_peak() -> None:
    """Of two layers it copies 9 bytes each, beside what stays of both and no activations."""
    copied = LAYER._replace(flat=9.0)

    def parts(each: LayerBytes, most: float) -> dict[str, float]:
        costs = Process(flat_bytes_at_most=most)
        return rank_memory.dynamic_parts(costs, Layout(), {0: [each, each]}, rank=0)

    plain, step, cut = parts(LAYER, 100.0), parts(copied, 100.0), parts(copied, 17.0)

    resident = 2 * (7.0 + 8.0 + 4.0)
    assert sum(step.values()) == resident + 18.0
    assert sum(cut.values()) == resident + 17.0
    assert (step["activations"], step["transient"]) == (0.0, 18.0)
    # Freeing whole gradients takes nothing.
    assert parts(LAYER._replace(flat=-5.0), 100.0) == plain


def test_buckets_of_deepspeed_take_room_and_are_allocated() -> None:
    """reduce_bucket_size is 5e8 gradients of 2 bytes, two buckets with overlap_comm: 2 GB."""
    model, machine = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
    layout = Layout(data_shard=8, zero=2, micro_batches=2)

    def parts(name: str, zero: int = 2) -> tuple[dict[str, float], float, float]:
        request = Request.create(model, machine, seq_len=2048, global_batch=16, framework=name)
        setup = Setup(request=request, layout=replace(layout, zero=zero), recompute="full")
        found = predict_run(setup)
        room = rank_memory.room_bytes(80e9, CostTables(request).costs_of(setup.layout))
        return found.stages[0].memory_parts, found.memory_bytes("allocated", "max"), room

    held, allocated, room = parts("deepspeed")
    assert held["reduce buckets"] == 2 * 5e8 * 2
    # ZeRO-3 joins what is in its one bucket to scatter it (coalesced_collectives.py).
    assert parts("deepspeed", 3)[0]["reduce buckets"] == 2 * 5e8 * 2
    assert "reduce buckets" not in parts("deepspeed", 0)[0]
    assert "reduce buckets" not in parts("megatron", 1)[0]
    tensors = sum(held.values()) - held["context"] - held["allocator overhead"]
    assert allocated == pytest.approx(tensors)
    assert room == pytest.approx((80e9 - held["context"] - 2e9) / 1.02)


def test_buffers_of_gradients_lie_beside_all_activations() -> None:
    """What one backward makes comes as its activations go; a buffer is there before."""
    alone = Layout()
    buffered = LAYER._replace(gradients=0.0, gradient_buffers=4.0)

    made = rank_memory.dynamic_parts(Process(), alone, {0: [LAYER, LAYER]}, rank=0)
    there = rank_memory.dynamic_parts(Process(), alone, {0: [buffered, buffered]}, rank=0)

    assert sum(there.values()) == 2 * (7 + 4 + 8) + 2 * 5 + 3
    assert sum(made.values()) == 2 * (7 + 8) + 2 * 5 + 3


def test_tensors_have_the_room_that_the_allocator_leaves_where_memory_is_short() -> None:
    process = Process()
    parts = {"activations": 60.0, "context": 10.0, "allocator overhead": 15.0}

    assert rank_memory.room_bytes(100.0, process) == (100 - 10) / 1.5
    # 60 bytes of tensors are 75 reserved and 85 in all; tight they take 90 and 100.
    assert rank_memory.has_room(100.0, parts, process)
    assert not rank_memory.has_room(99.9, parts, process)


def test_an_eager_adamw_has_roots_of_all_second_moments_at_once() -> None:
    """Of 7.24e9 parameters in 16 bits 10 bytes each, as a run on one device measured: 67.5 GiB."""
    used = with_options(frameworks()["transformers"], ["narrow-states"])
    job = Job(seq_len=4096, global_batch=4)

    def peak_bytes(framework: Framework) -> float:
        request = Request(
            resolve_model("mistral-7b"),
            resolve_cluster("1xa100-sxm-80gb"),
            job,
            framework=framework,
        )
        layout = Layout(micro_batch=4)
        found = predict_run(Setup(request=request, layout=layout, recompute="full"))
        return found.memory_bytes("allocated", "max")

    parameters = resolve_model("mistral-7b").parameters
    fused = with_figures(used, {"optimizer.roots": False})

    assert peak_bytes(used) == pytest.approx(10 * parameters, rel=0.005)
    assert peak_bytes(fused) < peak_bytes(used) - parameters


def test_a_bucket_of_gradients_is_allocated_with_the_first_of_them() -> None:
    """The first layer's backward has 36 MiB of gradients in eight buckets of 5 MiB."""
    mib = 2.0**20
    stage = {0: [LAYER._replace(gradients=4 * mib, stored=3 * mib)] * 10}

    def peak(*, buckets: bool) -> dict[str, float]:
        process = Process(has_gradient_buckets=buckets)
        return rank_memory.dynamic_parts(process, Layout(), stage, rank=0)

    apart, together = peak(buckets=False), peak(buckets=True)

    assert (apart["activations"], apart["gradients"]) == (0.0, 40 * mib)
    assert (together["activations"], together["gradients"]) == (3 * mib, 40 * mib)
