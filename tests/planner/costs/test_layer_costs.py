"""Figures of layers: many settings at once are what each is alone, nothing is below the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs import compute, layer_seconds
from meshwright.planner.costs.hardware_rates import rates
from meshwright.planner.costs.layer_costs import LayerFigures
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.cluster import ClusterSpec, Precision
from meshwright.planner.documents.document import read
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import ChunkedLoss, Profile
from meshwright.planner.operators import layer_operators as arithmetic
from meshwright.planner.operators.operator_table import ManySettings, Setting
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layouts

MODELS = ["llama-3.1-8b", "deepseek-v3", "mixtral-8x7b", "gpt2", "gemma-2-2b", "bert-large"]


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("divided", [1, 2])
def test_a_table_of_many_settings_is_the_tables_of_each(name: str, divided: int) -> None:
    model = resolve_model(name)
    accelerator = resolve_cluster("8xh100-sxm-80gb").groups[0].accelerator
    device, narrow = (compute.device(accelerator, p, native()) for p in ("bf16", "fp8"))
    each = [
        Setting(micro_batch=b, seq_len=512, tensor=divided * t, context=divided * c, expert=divided)
        for b in (divided, 2 * divided, 6 * divided)
        for t, c in ((1, 1), (2, 1), (1, 4))
        if t * c == 1 or divided > 1
        if (b > 1) == (divided > 1)
    ]

    for layer in model.layers:
        together = arithmetic.table(model, layer, ManySettings.framework(each))
        for index, setting in enumerate(each):
            alone = arithmetic.table(model, layer, setting)
            assert len(alone.operators) == len(together.operators)
            for one, many in zip(alone.operators, together.operators, strict=True):
                assert one.name == many.name
                for seconds, on in (
                    (layer_seconds.forward_s, device),
                    (layer_seconds.backward_s, device),
                    (layer_seconds.forward_s, narrow),
                ):
                    of_all = seconds(many, on, end=False)
                    mine = of_all[index] if hasattr(of_all, "shape") else of_all
                    assert mine == pytest.approx(seconds(one, on, end=False), rel=1e-12)
                for size, sizes in zip(one.outputs.values(), many.outputs.values(), strict=True):
                    mine = sizes[index] if hasattr(sizes, "shape") else sizes
                    assert mine == pytest.approx(size, rel=1e-12)


def test_losses_in_chunks_of_other_rows_have_figures_of_their_own() -> None:
    """Fewer chunks read the head's weights less often, whichever layout is listed first."""
    request = Request(
        resolve_model("llama-3.2-1b"),
        resolve_cluster("8xh100-sxm-80gb"),
        Job(seq_len=4096, global_batch=64),
    )
    few = Layout(data_replicate=8, micro_batch=2, micro_batches=4, loss=ChunkedLoss(rows=4096))
    many = replace(few, loss=ChunkedLoss(rows=1024))
    for order in ((few, many), (many, few)):
        together = CostTables(request).figures_together(order)["head"][0].forward_s
        for place, layout in enumerate(order):
            alone = CostTables(request).figures_together([layout])["head"][0].forward_s
            assert together[place] == pytest.approx(alone, rel=1e-12)
        assert together[order.index(few)] < together[order.index(many)]


@pytest.mark.long("mixtral-8x7b-4x8xh100-sxm-80gb-job0", "deepseek-v3-4x8xh800-sxm-80gb-job1")
@pytest.mark.parametrize(
    ("name", "cluster", "job"),
    [
        ("mixtral-8x7b", "4x8xh100-sxm-80gb", Job(seq_len=2048, global_batch=64)),
        ("deepseek-v3", "4x8xh800-sxm-80gb", Job(seq_len=2048, global_batch=16)),
        ("llama-3.1-8b", "2x8xa100-sxm-40gb", Job(seq_len=2048, global_batch=32)),
    ],
)
def test_the_fewest_seconds_of_many_layouts_are_those_of_each(
    name: str, cluster: str, job: Job
) -> None:
    model, machine = resolve_model(name), resolve_cluster(cluster)
    tables = CostTables(Request(model, machine, job))
    some = list(layouts(Request(model, machine, job, pins=Pins(zero=1))))[::23]

    fastest_s = tables.fastest_s(some)

    assert len(some) > 20
    for index, layout in enumerate(some):
        for kind, parts in enumerate(tables.costs_of(layout).parts.values()):
            least_s = min(p.figures.passes_s for p in parts)
            assert fastest_s[kind, index] == pytest.approx(least_s, rel=1e-12)


@pytest.mark.spread(2)
@pytest.mark.parametrize("framework", ["megatron", "megatron-deepspeed", "nanotron", "torchtitan"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "llama-3.1-8b"])
def test_figures_of_many_layouts_of_any_framework_are_those_of_each(
    name: str, framework: str
) -> None:
    model, machine = resolve_model(name), resolve_cluster("4x8xh100-sxm-80gb")
    request = Request(
        model, machine, Job(seq_len=2048, global_batch=64), framework=frameworks()[framework]
    )
    sequence = request.framework.tensor.sequence_parallel
    some = [
        Layout(
            tensor=t,
            pipeline=p,
            context=c,
            data_shard=32 // (t * p * c),
            micro_batch=b,
            micro_batches=4,
            sequence_parallel=sequence,
        )
        for t in (1, 2, 16)
        for p in (1, 2)
        for c in (1, 2 if t < 16 else 1)
        for b in (1, 2)
    ]
    together, alone = CostTables(request), CostTables(request)

    fastest_s = together.fastest_s(some)

    for index, layout in enumerate(some):
        for kind, parts in enumerate(alone.costs_of(layout).parts.values()):
            least_s = min(p.figures.passes_s for p in parts)
            assert fastest_s[kind, index] == pytest.approx(least_s, rel=1e-12)


def test_what_a_profile_measured_stands_for_the_arithmetic() -> None:
    folder = Path(__file__).parents[3] / "plans" / "demo-4m-on-local"
    machine, profile = (
        read(ClusterSpec, folder / "cluster.yaml"),
        read(Profile, folder / "profile.yaml"),
    )
    model, job = read(ModelGraph, folder / "model.yaml"), Job(seq_len=128, global_batch=16)
    tables = CostTables(Request(model, machine, replace(job, precision="fp32"), profile=profile))
    some = [Layout(micro_batch=b, tensor=t, context=c) for b in (1, 3) for t, c in ((1, 1), (1, 2))]

    fastest_s = tables.fastest_s(some)

    for index, layout in enumerate(some):
        for kind, parts in enumerate(tables.costs_of(layout).parts.values()):
            least_s = min(p.figures.passes_s for p in parts)
            assert fastest_s[kind, index] == pytest.approx(least_s, rel=1e-12)
    block = [m for m in profile.layers if m.kind == "block" and m.micro_batch == 1]
    assert fastest_s[1, 0] == pytest.approx(min(m.forward_s + m.backward_s for m in block))


@pytest.mark.matrix
def test_fp8_is_planned_where_devices_have_it_with_what_its_rounding_costs() -> None:
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")

    def passes_s(precision: Precision, kind: str) -> float:
        job = Job(seq_len=4096, global_batch=8, precision=precision)
        known = LayerFigures(model, cluster, None, rates(cluster, job, None))
        setting = Setting(micro_batch=1, seq_len=4096, precision=precision)
        return known.figures_of(setting, Layout(data_replicate=8))[kind][0].passes_s

    answer = search(Request(model, cluster, Job(seq_len=4096, global_batch=64, precision="fp8")))

    assert passes_s("fp8", "head") == pytest.approx(passes_s("bf16", "head"))
    assert passes_s("fp8", "block") != pytest.approx(passes_s("bf16", "block"), rel=0.01)
    assert answer.plan.precision == "fp8"
    assert any("8 bits" in a.what for a in answer.prediction.assumptions)
