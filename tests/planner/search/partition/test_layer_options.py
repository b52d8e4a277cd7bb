"""What layers may choose among is enough: another choice is as good wherever one is left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts, StrategyCost
from meshwright.planner.costs.memory.rank_memory import dynamic_parts
from meshwright.planner.documents.plan import Activations, Job, Layout
from meshwright.planner.frameworks.native_limits import layer_obstacle
from meshwright.planner.requests.request import Request
from meshwright.planner.search.partition.layer_options import allowed_options

EVERY: tuple[Activations, ...] = ("keep", "offload", "compress")


def peak_bytes(costs: LayoutCosts, layout: Layout, kind: str, choices: Sequence[int]) -> float:
    """Bytes of a rank in the middle whose one stage has these choices of one kind's layers."""
    layers = [costs.parts[kind][choice].layer_bytes for choice in choices]
    rank = layout.pipeline // 2
    return sum(dynamic_parts(costs, layout, {rank: layers}, rank=rank).values())


def no_slower(one: StrategyCost, other: StrategyCost) -> bool:
    passes_s = one.forward_s + one.backward_s <= other.forward_s + other.backward_s
    return passes_s and one.sync_s <= other.sync_s and one.host_bytes <= other.host_bytes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral-8x7b", Layout(data_shard=8, micro_batches=8)),
        ("deepseek-v3", Layout(pipeline=2, data_shard=4, micro_batches=16, schedule="gpipe")),
        ("gemma-2-9b", Layout(pipeline=4, data_shard=2, zero=1, micro_batches=32)),
        ("llama-3.1-8b", Layout(pipeline=4, data_shard=2, zero=1, micro_batches=8, micro_batch=4)),
        ("gpt2", Layout(pipeline=4, data_shard=2, micro_batches=32, schedule="zb-h1")),
    ],
)
def test_for_a_choice_that_is_left_out_another_is_no_slower_and_holds_no_more(
    name: str, layout: Layout
) -> None:
    """Alone on a stage, before and behind a layer of any choice."""
    model, node = resolve_model(name), resolve_cluster("8xh100-sxm-80gb")
    samples = layout.micro_batch * layout.micro_batches * layout.data
    job = Job(seq_len=4096 if name != "gpt2" else 1024, global_batch=samples)
    costs = CostTables(Request(model, node, job), EVERY).costs_of(layout)
    left_out = 0
    for kind, table in costs.kinds.items():
        asked = [
            at
            for at, cost in enumerate(table)
            if not layer_obstacle(layout, cost.recompute, cost.activations)
        ]
        free = [at for at in asked if table[at] in allowed_options(table, layout, None, kind)]
        for at in set(asked) - set(free):
            left_out += 1
            others = [other for other in free if no_slower(table[other], table[at])]
            for before, behind in [
                ((), ()),
                *(((n,), ()) for n in asked),
                *(((), (n,)) for n in asked),
            ]:
                size = peak_bytes(costs, layout, kind, (*before, at, *behind))
                assert any(
                    peak_bytes(costs, layout, kind, (*before, other, *behind)) <= size
                    for other in others
                ), (kind, table[at].name, before, behind)

    assert left_out
