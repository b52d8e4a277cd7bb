"""A tensor axis over traced layers: priced by hand, and searched as every configuration solved."""

from __future__ import annotations

import math

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.model import DividedLayer, Layer, LayerTrace, ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.operators.layer_operators import local_parameters, traced_layer
from meshwright.planner.operators.operator_table import ManySettings, Setting
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.search import search
from meshwright.planner.search.space import complexity
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import Solution

WHOLE = LayerTrace(
    forward_flops=4e12, stored_bytes=2**30, transient_bytes=2**26, output_bytes=2**22
)


def part(tensor: int) -> DividedLayer:
    """Two regions as of attention and MLP; a quarter of what is stored is whole."""
    return DividedLayer(
        tensor=tensor,
        parameters=100_000 + 800_000_000 // tensor,
        trace=LayerTrace(
            forward_flops=4e12 / tensor,
            stored_bytes=2**28 + 3 * 2**28 // tensor,
            transient_bytes=2**26,
            output_bytes=2**22,
        ),
        sums_bytes=(2**22,),
        last_sum_bytes=2**22 if tensor == 2 else 0,
        copies_bytes=(2**22, 2**22) if tensor == 2 else (2**22,),
    )


BLOCK = Layer(
    name="block",
    kind="block",
    repeat=4,
    parameters=800_100_000,
    trace=WHOLE,
    divided=(part(2), part(4)),
)
HEAD = Layer(name="head", kind="head", parameters=1000, trace=WHOLE)
MODEL = ModelGraph(name="own", source="script:build", layers=(BLOCK, HEAD))
JOB = Job(seq_len=1, global_batch=16, precision="bf16")


def test_a_layer_has_its_parts_where_it_is_divided_and_is_whole_elsewhere() -> None:
    for tensor, wanted in ((1, 800_100_000), (2, 400_100_000), (4, 200_100_000), (8, 800_100_000)):
        assert local_parameters(MODEL, BLOCK, tensor=tensor) == (wanted, 0.0)
        assert local_parameters(MODEL, HEAD, tensor=tensor) == (1000, 0.0)
    setting = Setting(micro_batch=3, seq_len=1, precision="bf16", tensor=2)

    table = traced_layer(BLOCK, setting)

    assert table.forward_flops == 3 * 2e12
    # In bf16 half of what was traced in fp32, of three samples.
    assert table.stored_bytes("none") == 3 * (2**28 + 3 * 2**27) / 2
    sums = {op.name: (op.moved_bytes, op.only) for op in table.operators if op.communicates}
    assert sums == {
        "block_sum_0": (3 * 2**21, "forward"),
        "block_gradient_0": (3 * 2**21, "backward"),
        "block_gradient_1": (3 * 2**21, "backward"),
        "block_last_sum": (3 * 2**21, "forward"),
    }
    again = [op.name for op in table.recomputed_operators("full") if op.communicates]
    assert "block_sum_0" in again and "block_last_sum" not in again
    assert not any(op.communicates for op in traced_layer(HEAD, setting).operators)


def test_many_settings_are_priced_as_one_by_one() -> None:
    settings = [
        Setting(micro_batch=micro, seq_len=1, precision="bf16", tensor=tensor)
        for micro in (2, 3)
        for tensor in (2, 4, 8)
    ]
    many = traced_layer(BLOCK, ManySettings.framework(settings))
    for at, setting in enumerate(settings):
        one = {op.name: op for op in traced_layer(BLOCK, setting).operators}
        for operator in many.operators:
            moved, flops = (
                float(getattr(operator, name)[at])
                if hasattr(getattr(operator, name), "shape") and getattr(operator, name).shape
                else float(getattr(operator, name))
                for name in ("moved_bytes", "flops")
            )
            assert (moved, flops) == (one[operator.name].moved_bytes, one[operator.name].flops)


def request() -> Request:
    return Request(MODEL, resolve_cluster("4xv100-sxm-32gb"), JOB)


@pytest.mark.matrix
def test_no_configuration_is_faster() -> None:
    candidates, frontiers = Candidates(request(), refusal), FrontierStore()
    found: dict[Layout, float] = {}
    for layout in candidates.layouts():
        solved = solve(candidates.instance(layout), frontiers=frontiers)
        found[layout] = math.inf
        if isinstance(solved, Solution):
            found[layout] = solved.objective_s + candidates.costs(layout).step_s

    answer = search(request())

    degrees = {layout.tensor for layout, seconds in found.items() if seconds < math.inf}
    assert degrees == {1, 2, 4}
    fastest = min(found, key=lambda layout: (found[layout], complexity(layout)))
    assert answer.closed_form.objective_s == pytest.approx(found[fastest], rel=1e-12)
    assert answer.closed_form.plan.layout == fastest
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)


def test_degrees_that_divide_nothing_are_refused_and_split_backwards_are_not() -> None:
    cluster = resolve_cluster("8xv100-sxm-32gb")
    layout = Layout(tensor=8, micro_batch=2, micro_batches=8)
    assert refusal(MODEL, cluster, JOB, layout) == (
        "mesh.tensor: 8 divides no layer of this module of your own; use 1 or 2 or 4"
    )
    split = Layout(tensor=2, pipeline=2, schedule="zb-h1", micro_batch=2, micro_batches=8)
    assert refusal(MODEL, cluster, JOB, split) is None


def test_working_memory_of_a_traced_layer_is_what_was_traced() -> None:
    setting = Setting(micro_batch=2, seq_len=1, precision="fp32")
    table = traced_layer(BLOCK, setting)
    assert table.backward_transient_bytes("none") == 2 * WHOLE.transient_bytes
    assert table.backward_transient_bytes("selective") == 2 * WHOLE.transient_bytes
    # All that was stored is there again, but for what stays.
    assert table.backward_transient_bytes("full") == 2 * (
        WHOLE.transient_bytes + WHOLE.stored_bytes
    )
    assert table.returned_bytes == 2 * WHOLE.output_bytes
