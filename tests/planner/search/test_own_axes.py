"""Positions, experts and chunks of logits of a traced model: priced by hand, and searched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.model import (
    Layer,
    LayerTrace,
    ModelGraph,
    TracedExperts,
    TracedLogits,
)
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.operators.expert_routing import routing_of
from meshwright.planner.operators.layer_operators import local_parameters, traced_layer
from meshwright.planner.operators.layer_operators import table as table_of
from meshwright.planner.operators.operator_table import Operator, OperatorTable, Setting
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

TRACE = LayerTrace(
    forward_flops=4e11, stored_bytes=2**28, transient_bytes=2**26, output_bytes=2**22
)
EXPERTS = TracedExperts(count=8, hidden=1024, parameters=60_000_000, exchanged_bytes=2**23)
BLOCK = Layer(
    name="block",
    kind="mixture",
    repeat=4,
    parameters=64_000_000,
    trace=TRACE,
    keys_bytes=2**21,
    experts=EXPERTS,
)
LOGITS = TracedLogits(
    rows=1024,
    width=1024,
    outputs=50_000,
    trace=LayerTrace(
        forward_flops=2.0 * 1024 * 1024 * 50_000,
        stored_bytes=4 * 1024 * 1024,
        transient_bytes=2**28,
        output_bytes=4 * 1024 * 50_000,
    ),
)
HEAD = Layer(
    name="head",
    kind="linear",
    parameters=51_200_000,
    trace=LayerTrace(
        forward_flops=LOGITS.flops,
        stored_bytes=4 * 1024 * (1024 + 50_000),
        transient_bytes=2**28,
        output_bytes=4 * 1024 * 50_000,
    ),
    logits=LOGITS,
)
MODEL = ModelGraph(name="own", source="script:build", layers=(BLOCK, HEAD), positions=1024)
JOB = Job(seq_len=1, global_batch=8, precision="bf16")
CLUSTER = resolve_cluster("8xa100-sxm-80gb")
NODES = resolve_cluster("16xa100-sxm-80gb")


def setting(**fields: object) -> Setting:
    return replace(Setting(micro_batch=2, seq_len=1, precision="bf16"), **fields)  # type: ignore[arg-type]


def test_a_rank_has_its_positions_and_all_keys() -> None:
    table = traced_layer(BLOCK, setting(context=4))

    (gathered,) = (op for op in table.operators if op.axis == "context")
    assert table.forward_flops == 2 * 4e11 / 4
    assert gathered.kind == "all_gather"
    assert gathered.moved_bytes == 2 * 2**21 / 2  # of two samples, in bf16
    assert table.stored_bytes("none") == 2 * 2**28 / 2 / 4 + gathered.moved_bytes


def test_tokens_go_to_experts_and_come_back() -> None:
    table = traced_layer(BLOCK, setting(expert=4, context=2))

    sent = [op.moved_bytes for op in table.operators if op.axis == "expert"]
    assert sent == [2 * 2**23 / 2 / 2] * 2  # of a rank's positions
    # What arrives and returns is what experts read and weights multiply: the trace has both.
    alone = traced_layer(BLOCK, setting(context=2))
    assert table.stored_bytes("none") == alone.stored_bytes("none")
    assert local_parameters(MODEL, BLOCK, expert=4) == (4_000_000, 15_000_000)
    assert local_parameters(MODEL, BLOCK) == (64_000_000, 0.0)


@pytest.mark.parametrize("fields", [{"dispatch": "allgather"}, {"hierarchical_all_to_all": 2}])
def test_tokens_go_as_those_of_a_mixture_that_is_known(fields: dict[str, object]) -> None:
    model = resolve_model("mixtral-8x7b")
    a = model.architecture
    assert a is not None and a.experts is not None
    own = EXPERTS.model_copy(
        update={
            "hidden": a.hidden_size,
            "per_token": a.experts.per_token,
            "exchanged_bytes": 512 * a.experts.per_token * a.hidden_size * 4,
        }
    )
    how = setting(seq_len=512, expert=4, tensor=1, **fields)
    known = next(layer for layer in model.layers if layer.kind == "moe_block")

    of_traced, of_known = (
        {(op.kind, op.axis, index): op.moved_bytes for index, op in enumerate(_on_links(table))}
        for table in (
            traced_layer(BLOCK.model_copy(update={"experts": own}), how),
            table_of(model, known, how),
        )
    )

    assert of_traced.keys() == of_known.keys()
    for key, size in of_traced.items():
        # Routers of known models are not balanced, and choices are sent too.
        routing = routing_of(a.experts, how.kernels.expert_spread)
        skew = routing.busiest_load(how.expert) if key[0] == "all_to_all" else 1.0
        assert skew * size == pytest.approx(of_known[key], rel=0.01), key


def _on_links(table: OperatorTable) -> list[Operator]:
    return [one for one in table.operators if one.axis.startswith("expert")]


@pytest.mark.parametrize("gradients", ["precomputed", "recomputed"])
def test_chunks_hold_no_logits_and_compute_as_much(gradients: str) -> None:
    how = ChunkedLoss(rows=64, gradients=gradients)  # type: ignore[arg-type]

    whole, chunks = (traced_layer(HEAD, setting(loss=loss)) for loss in (None, how))

    logits = 2 * 1024 * 50_000 * 2  # of two samples, in bf16
    assert chunks.forward_flops == whole.forward_flops
    held = 2 * 1024 * 1024 * 2 + (1024 * 50_000 * 2 if gradients == "precomputed" else 0)
    assert chunks.stored_bytes("none") == held
    assert whole.stored_bytes("none") >= logits
    assert traced_layer(BLOCK, setting(loss=how)) == traced_layer(BLOCK, setting())


@pytest.mark.parametrize(
    ("without", "layout", "said"),
    [
        ({"positions": None}, Layout(context=2), "mesh.context: is 2, and no attention of own"),
        (
            {"positions": 6},
            Layout(context=2),
            "mesh.context: 2 ranks need 2 x 2 chunks of seq_len 6",
        ),
        ({}, Layout(data_shard=3, expert=3, zero=1), "mesh.expert: 3 does not divide 8 experts"),
        (
            {"layers": (BLOCK.model_copy(update={"experts": None}), HEAD)},
            Layout(data_shard=2, expert=2, zero=1),
            "mesh.expert: is 2, and own has no experts",
        ),
        (
            {"layers": (BLOCK, HEAD.model_copy(update={"logits": None}))},
            Layout(loss=ChunkedLoss()),
            "loss: is in chunks, and own returns no logits",
        ),
    ],
)
def test_what_was_not_found_in_a_module_is_refused(
    without: dict[str, object], layout: Layout, said: str
) -> None:
    model = MODEL.model_copy(update=without)

    found = refusal(model, CLUSTER, JOB, layout)

    assert found is not None
    assert found.startswith(said)


@pytest.mark.matrix
def test_the_search_chooses_among_them() -> None:
    found = {
        fix: search(Request(MODEL, CLUSTER, JOB, pins=read_pins([fix], ())))
        for fix in ("context=4", "expert=8", "loss=chunked-recompute/256")
    }
    gathered = Request(MODEL, CLUSTER, JOB, pins=read_pins(["expert=4", "dispatch=allgather"], ()))
    found["allgather"] = search(gathered)
    relayed = Request(
        MODEL, NODES, JOB, pins=read_pins(["expert=8", "hierarchical_all_to_all=4"], ())
    )
    assert search(relayed).plan.hierarchical_all_to_all == 4

    assert found["context=4"].plan.mesh.context == 4
    assert found["expert=8"].plan.mesh.expert == 8
    assert found["allgather"].plan.dispatch == "allgather"
    assert found["loss=chunked-recompute/256"].plan.loss == ChunkedLoss(
        rows=256, gradients="recomputed"
    )
    free = search(Request(MODEL, CLUSTER, JOB))
    for answer in found.values():
        assert free.prediction.step_time_s <= answer.prediction.step_time_s * (1 + 1e-9)


def test_logits_that_do_not_fit_are_made_in_chunks() -> None:
    def longer(trace: LayerTrace) -> LayerTrace:
        return LayerTrace(**{name: 512 * value for name, value in trace})  # type: ignore[arg-type]

    assert HEAD.trace is not None
    logits = LOGITS.model_copy(update={"rows": 512 * 1024, "trace": longer(LOGITS.trace)})
    head = HEAD.model_copy(update={"trace": longer(HEAD.trace), "logits": logits})
    model = MODEL.model_copy(update={"layers": (BLOCK, head), "positions": None})

    assert search(Request(model, CLUSTER, JOB)).plan.loss is not None


def test_divided_positions_take_less_memory_and_time_to_gather() -> None:
    tables = CostTables(Request(MODEL, CLUSTER, JOB))
    alone = Layout(micro_batch=1, micro_batches=8)
    over = replace(alone, context=4)

    one, four = (tables.costs_of(layout).kinds["mixture"][0] for layout in (alone, over))

    assert four.forward_s < one.forward_s
    assert four.forward_s > one.forward_s / 4  # keys come from the others
    assert tables.output_bytes(over)["mixture"] == tables.output_bytes(alone)["mixture"] / 4
