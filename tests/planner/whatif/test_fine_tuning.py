"""Adapters on few devices: what fits, what host memory changes, and that nothing is faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import cluster_of, resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.lora import adapter_parameters
from meshwright.planner.costs.predict import placement_prediction
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.whatif.planning import fastest_fine_tuner

JOB = Job(seq_len=2048, global_batch=16)
GB = 10**9


@pytest.mark.matrix
def test_4_bits_fit_where_16_do_not() -> None:
    model, four = resolve_model("llama-2-13b"), cluster_of("rtx-4090", devices_per_node=1)
    quantised = fastest_fine_tuner(Request(model, four, JOB), quantised=True)
    assert quantised.prediction.fits
    assert quantised.plan.training.lora is not None
    assert quantised.plan.training.lora.packs_weights
    peak = quantised.prediction.stages[0].peak_memory_bytes
    # 13.0e9 weights at 0.53 bytes are 6.9 GB of it.
    assert 6.9e9 < peak <= four.groups[0].accelerator.memory_bytes
    with pytest.raises(NoPlanFits, match=r"transformers: no plan .*\nmegatron: no plan"):
        fastest_fine_tuner(Request(model, four, JOB), quantised=False)


@pytest.mark.matrix
def test_host_memory_holds_what_devices_cannot() -> None:
    model = resolve_model("llama-3.1-70b")
    small = cluster_of("rtx-4090", devices_per_node=4, host_memory_bytes=128 * GB)
    large = cluster_of("rtx-4090", devices_per_node=4, host_memory_bytes=320 * GB)
    with pytest.raises(NoPlanFits, match=r"in each node's host memory, of which 59\.6 GiB"):
        fastest_fine_tuner(Request(model, small, JOB), quantised=False)
    found = fastest_fine_tuner(Request(model, large, JOB), quantised=False)
    # Half of a host can be pinned.  141 GB of weights in 16 bits, a quarter or so crossing each
    # link twice every micro-batch, and 3.3 GB of adapters with all their states in fp32.
    assert found.plan.offload == "parameters"
    assert found.certificate.optimal
    assert 4 * found.prediction.stages[0].host_bytes == pytest.approx(144.3e9, rel=0.01)
    parts = found.prediction.step_parts
    assert sum(parts.values()) == pytest.approx(found.prediction.step_time_s)


def test_weights_in_8_bits_take_a_byte_each() -> None:
    model, eight = resolve_model("llama-2-70b"), resolve_cluster("8xh200-sxm")
    job = Job(seq_len=4096, global_batch=8, precision="fp8")
    found = fastest_fine_tuner(Request(model, eight, job), quantised=False)
    # All 69.0e9 weights on each device; in 16 bits they would take 138e9 of its 141e9 bytes.
    assert (found.plan.framework, found.plan.mesh.tensor) == ("megatron", 1)
    weights = found.prediction.stages[0].memory_parts["parameters"]
    assert weights == pytest.approx(69.0e9, rel=0.01)


def layouts(cluster: ClusterSpec, job: Job) -> Iterator[Layout]:
    """Yield what may run without a pipeline; the rest is for the rules of a framework to refuse."""
    degrees = [1, 2, 4, 8]
    for tensor, context, zero, micro_batch, offload in itertools.product(
        degrees, degrees, (0, 1, 3), (1, 2, 4, 8, 16), ("none", "parameters")
    ):
        data = cluster.devices // (tensor * context)
        if not data or job.global_batch % (data * micro_batch) or (zero and data * context == 1):
            continue
        yield Layout(
            tensor=tensor,
            context=context,
            data_shard=data if zero else 1,
            data_replicate=1 if zero else data,
            zero=zero,
            micro_batch=micro_batch,
            micro_batches=job.global_batch // data // micro_batch,
            offload=offload,
        )


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("devices", "memory_gb", "host_gb", "quantised"),
    [(4, 24, 64, False), (4, 12, 64, False), (4, 24, None, True), (2, 9, 200, True)],
)
def test_no_layout_of_any_tuner_is_faster(
    devices: int, memory_gb: int, host_gb: int | None, quantised: bool
) -> None:
    host = None if host_gb is None else host_gb * GB
    cluster = cluster_of("rtx-4090", devices_per_node=devices, host_memory_bytes=host)
    group = cluster.groups[0]
    card = group.accelerator.model_copy(update={"memory_bytes": memory_gb * GB})
    cluster = cluster.model_copy(
        update={"groups": (group.model_copy(update={"accelerator": card}),)}
    )
    model, job = resolve_model("llama-3.1-8b"), Job(seq_len=1024, global_batch=8)
    best_s = math.inf
    for name, layout in itertools.product(("transformers", "megatron"), layouts(cluster, job)):
        own = replace(job, lora=Lora(rank=16, weights="nf4" if quantised else "full"))
        request = Request(model, cluster, own, framework=frameworks()[name])
        if rules_of(request.framework)(model, cluster, own, layout) is not None:
            continue
        if layout.offload != "none" and host is None:
            continue
        tables = CostTables(request)
        for recompute in ("none", "full"):
            ends = dict.fromkeys(tables.end_kinds, "none")
            placement = tuple((k, ends.get(k, recompute), "keep") for k in model.chain_kinds)
            found = placement_prediction(tables, layout, [placement])
            if found.fits:
                best_s = min(best_s, found.step_time_s)

    request = Request(model, cluster, job, pins=Pins(pipeline=1))
    if math.isinf(best_s):
        with pytest.raises(NoPlanFits):
            fastest_fine_tuner(request, quantised=quantised)
    else:
        answer = fastest_fine_tuner(request, quantised=quantised)
        assert answer.prediction.step_time_s == pytest.approx(best_s, rel=1e-9)
        assert answer.certificate.optimal
        assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("framework", ["megatron", "transformers"])
@pytest.mark.long("megatron")
def test_adapters_of_a_mixture_of_experts_are_planned(framework: str) -> None:
    """Attention's and shared experts' products have them; the routed experts are frozen."""
    model, cluster = resolve_model("mixtral-8x7b"), resolve_cluster("8xh100-sxm-80gb")
    lora = Lora(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    job = Job(seq_len=4096, global_batch=16, lora=lora)

    found = search(Request(model, cluster, job, framework=frameworks()[framework]))

    # 32 blocks of 16 x (4,096 + 4,096 + 2 x (4,096 + 1,024) + 4,096 + 4,096) parameters.
    trained = sum(adapter_parameters(model, layer.kind, lora) for _, layer in model.chain)
    assert trained == 32 * 16 * (4 * 4096 + 2 * (4096 + 1024))
    assert found.prediction.fits
