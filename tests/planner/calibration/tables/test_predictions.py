"""Runs priced by framework rules: counts by hand, limits known without the formula, and laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.calibration.tables.predictions import framework_prediction, predict_run
from meshwright.planner.calibration.tables.rows import setup_of
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import cluster_of, resolve_cluster, resolve_model
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.model import Architecture
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import GIB
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Recomputed, Setup
from meshwright.planner.schedules import PLAIN
from meshwright.planner.schedules import pipeline_schedules as looped

GPT = Architecture(
    family="gpt",
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn_size=16384,
    vocab_size=51200,
    gated_mlp=False,
    norm="layer",
    positions="learned",
    max_positions=2048,
    tied_embeddings=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
LLAMA = Architecture(
    family="llama",
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_size=14336,
    vocab_size=128256,
    gated_mlp=True,
)


def setup(
    architecture: Architecture = LLAMA,
    *,
    nodes: int = 1,
    devices: int = 8,
    framework: str = "megatron",
    recompute: Recomputed = "none",
    seq_len: int = 2048,
    global_batch: int = 64,
    precision: Precision = "bf16",
    zero: int | None = None,
    sequence_parallel: bool | None = None,
    **layout: int,
) -> Setup:
    """Return a run; data parallelism takes the devices that are left."""
    priced_as = frameworks()[framework]
    others = [layout.get(name, 1) for name in ("tensor", "pipeline", "context")]
    data = devices // math.prod(others)
    zero = priced_as.sharding.zero if zero is None else zero
    divided = priced_as.tensor.sequence_parallel if sequence_parallel is None else sequence_parallel
    return Setup(
        request=Request(
            graph_of(architecture, name="model"),
            cluster_of("h100-sxm-80gb", nodes=nodes, devices_per_node=devices // nodes),
            Job(seq_len=seq_len, global_batch=global_batch, precision=precision),
            framework=priced_as,
        ),
        layout=Layout(
            data_shard=data if zero else 1,
            data_replicate=1 if zero else data,
            zero=zero,
            micro_batches=global_batch // (data * layout.get("micro_batch", 1)),
            sequence_parallel=divided,
            schedule=looped.INTERLEAVED.name if layout.get("virtual_stages", 1) > 1 else PLAIN,
            **layout,
        ),
        recompute=recompute,
    )


def peak(of: Prediction) -> float:
    return of.memory_bytes("allocated", "max")


def test_no_run_is_faster_than_its_flops_allow() -> None:
    for framework in frameworks():
        of = setup(framework=framework, global_batch=256)
        flops = 6 * 8.0e9 * of.request.job.seq_len * of.request.job.global_batch

        assert predict_run(of).step_time_s > flops / (8 * 989e12)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_recomputing_everything_costs_a_forward_and_saves_memory(tensor: int) -> None:
    none = predict_run(setup(tensor=tensor))
    full = predict_run(setup(tensor=tensor, recompute="full"))

    assert full.step_parts["recompute"] == pytest.approx(none.step_parts["forward"], rel=0.15)
    assert peak(full) < peak(none)


def test_a_faster_network_is_never_slower() -> None:
    slow = setup(nodes=2, devices=16, framework="nanotron", tensor=2, pipeline=2)
    faster = cluster_of("h100-sxm-80gb", nodes=2, devices_per_node=8, network_bytes_per_s=400e9)
    fast = replace(slow, request=replace(slow.request, cluster=faster))

    assert predict_run(fast).step_time_s <= predict_run(slow).step_time_s


LLAMA_8B = resolve_model("llama-3.1-8b")
NODE = resolve_cluster("8xh100-sxm-80gb")
JOB = Job(seq_len=4096, global_batch=64)
ON_NODE = Request(LLAMA_8B, NODE, JOB, framework=frameworks()["megatron"])
TWO_BY_TWO = Layout(tensor=2, pipeline=2, data_shard=2, zero=1, micro_batches=32)


def test_what_a_framework_has_no_rules_for_is_told() -> None:
    with pytest.raises(DocumentError, match="did you mean"):
        Request.create(LLAMA_8B, NODE, framework="megatrn")
    with pytest.raises(DocumentError, match="language models"):
        framework_prediction(replace(ON_NODE, model=resolve_model("vit-l-16")), TWO_BY_TWO)
    with pytest.raises(DocumentError, match="takes 16 devices"):
        too_large = Layout(tensor=8, pipeline=2)
        framework_prediction(ON_NODE, too_large)


FUSED = "flash-attention-2+fused-kernels+fused-cross-entropy+lora-rank-16+lora-attention"
IN_4_BITS = "flash-attention-2+lora-rank-16+lora-attention+bnb-nf4+weights-int4"

LATER = "torch-2.4.1/transformers-4.48.1"


@pytest.mark.parametrize(
    ("cells", "measured_gib"),
    [
        # Reentrant checkpoints leave inputs of frozen blocks under FSDP1, and their gradients.
        ({"n_devices": "1", "options": FUSED}, 46.677),
        ({"n_devices": "2", "options": FUSED}, 55.775),
        ({"n_devices": "4", "options": FUSED}, 52.353),
        # What is not in 4 bits is cast to fp32, unless a plugin goes without.
        (
            {
                "task": "qlora",
                "micro_batch_size": "8",
                "options": IN_4_BITS,
                "release": LATER,
            },
            34.461,
        ),
        (
            {
                "task": "qlora",
                "micro_batch_size": "8",
                "options": IN_4_BITS,
                "framework": "hf-sft-trainer+accelerated-peft-bnb",
                "release": LATER,
            },
            26.461,
        ),
    ],
)
def test_adapters_of_mistral_have_their_published_peaks(
    cells: dict[str, str], measured_gib: float
) -> None:
    """fms-acceleration at 876e2ed, scripts/benchmarks/refs (torch's peak): 7B on A100-80GB."""
    row = {
        "id": "lora-mistral",
        "source": "fms_acceleration",
        "task": "lora",
        "layers": "32",
        "hidden_size": "4096",
        "ffn_size": "14336",
        "n_heads": "32",
        "n_kv_heads": "8",
        "head_dim": "128",
        "vocab_size": "32000",
        "gated_mlp": "1",
        "seq_len": "4096",
        "accelerator": "a100-sxm-80gb",
        "devices_per_node": "8",
        "n_devices": "1",
        "zero_stage": "3" if cells.get("n_devices", "1") > "1" else "0",
        "micro_batch_size": "16",
        "global_batch_size": str(16 * int(cells.get("n_devices", "1"))),
        "recompute": "full",
        "precision": "bf16",
        "framework": "hf-sft-trainer",
        "release": "torch-2.4.1/transformers-4.45.2",
        "loss": "logits",
    }
    setup = setup_of(row | cells)
    assert isinstance(setup, Setup)

    found = predict_run(setup).memory_bytes("allocated", "first") / GIB

    assert found == pytest.approx(measured_gib, rel=0.05)
