"""Plans in the words of other frameworks: read back, their degrees multiply to the plan's."""

from __future__ import annotations

import functools
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.document import read
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Plan
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import (
    FRAMEWORKS,
    configuration,
    in_the_script,
)
from meshwright.planner.framework_configs.import_plan import import_plan
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

EXAMPLES = Path(__file__).parents[3] / "plans"
MODEL = resolve_model("llama-3.2-1b")
CLUSTER = resolve_cluster("8xa100-sxm-80gb")


@functools.cache
def planned(*fix: str, allow: tuple[str, ...] = (), precision: str | None = None) -> Plan:
    job = Job(seq_len=4096, global_batch=64, precision=CLUSTER.precision_for(precision))  # type: ignore[arg-type]
    return search(Request(MODEL, CLUSTER, job, pins=read_pins(fix, allow))).plan


def flags(text: str) -> dict[str, str]:
    rows = [line.split(maxsplit=1) for line in text.splitlines()]
    return {row[0]: row[1] if len(row) > 1 else "" for row in rows}


def test_megatron_is_told_degrees_batches_and_recomputation() -> None:
    plan = planned("tp=2", "pp=2", "dp=2", "zero=1", "schedule=1f1b", "recompute=full")

    told = flags(configuration(plan, MODEL, "megatron"))

    assert told["--tensor-model-parallel-size"] == "2"
    assert told["--pipeline-model-parallel-size"] == "2"
    assert int(told["--micro-batch-size"]) == plan.micro_batch
    assert int(told["--global-batch-size"]) == 64
    assert "--use-distributed-optimizer" in told
    assert "--sequence-parallel" in told
    assert (told["--recompute-granularity"], told["--recompute-method"]) == ("full", "uniform")
    first, last = (told.get(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    blocks = [sum(i.layer.startswith("block") for i in stage.layers) for stage in plan.stages]
    assert (first, last) == ((None, None) if blocks == [8, 8] else tuple(map(str, blocks)))


def test_megatron_is_told_how_tokens_go_to_experts_and_sequences_are_divided() -> None:
    model, machine = resolve_model("mixtral-8x7b"), resolve_cluster("4x8xh100-sxm-80gb")
    request = Request.create(
        model,
        machine,
        seq_len=4096,
        global_batch=64,
        pins=read_pins(["ep=8,cp=2,pp=1,tp=2,schedule=1f1b"]),
        framework="megatron+deepep+expert-overlap+ulysses+tp-overlap+narrow-gradients",
    )

    plan = search(request).plan
    told = flags(configuration(plan, model, "megatron", machine))

    assert plan.framework == "megatron+deepep+expert-overlap+ulysses+tp-overlap+narrow-gradients"
    assert told["--moe-token-dispatcher-type"] == "flex"
    assert told["--moe-flex-dispatcher-backend"] == "deepep"
    assert "--overlap-moe-expert-parallel-comm" in told
    assert told["--cp-comm-type"] == "a2a"
    assert {"--grad-reduce-in-bf16", "--tp-comm-overlap"} <= told.keys()
    plain = flags(
        configuration(plan.model_copy(update={"framework": "megatron"}), model, "megatron")
    )
    assert plain["--moe-token-dispatcher-type"] == "alltoall"
    assert {
        flag for flag in plain if flag.startswith(("--moe", "--cp-comm", "--tp-comm", "--grad"))
    } == {"--moe-grouped-gemm", "--moe-token-dispatcher-type"}
    assert {"--lr", "--optimizer"} <= plain.keys()
    bare = flags(configuration(plan, model, "megatron", machine, recipe=False))
    assert not {"--lr", "--optimizer", "--lr-decay-style", "--clip-grad"} & bare.keys()
    assert set(bare) < set(told) and all(told[flag] == value for flag, value in bare.items())
    bridge = yaml.safe_load(configuration(plan, model, "megatron-bridge", machine))["model"]
    assert bridge["moe_grouped_gemm"] is True
    assert bridge["moe_token_dispatcher_type"] == "flex"


def test_torchtitan_alone_is_told_of_asynchronous_tensor_parallelism() -> None:
    plan = planned("tp=4", "dp=2", "zero=3", "recompute=none", "tensor_overlap=async")

    # 0.2.2 has it in the section of parallelism, 0.3.0 in that of its compiler.
    toml = configuration(plan, MODEL, "torchtitan@0.2")
    module = configuration(plan, MODEL, "torchtitan")
    assert tomllib.loads(toml)["parallelism"]["enable_async_tensor_parallel"] is True
    assert "config.compile.enable_async_tensor_parallel = True" in module
    for text in (toml, module):
        again = import_plan(text, "torchtitan", CLUSTER, model=MODEL)
        assert again.plan.tensor_overlap == "async"
        assert not [key for key in again.unknown if "async" in key]
    for other in ("megatron", "fsdp"):
        with pytest.raises(DocumentError, match="collectives of tensor parallelism are async"):
            configuration(plan, MODEL, other)


def test_torchtitan_is_told_every_module_of_every_stage_once() -> None:
    plan = planned("pp=4", "dp=2", "zero=2", "schedule=1f1b", "recompute=none")

    told = tomllib.loads(configuration(plan, MODEL, "torchtitan@0.2"))

    axes = told["parallelism"]
    degrees = [
        axes[f"{name}_degree"]
        for name in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "tensor_parallel",
            "context_parallel",
            "pipeline_parallel",
        )
    ]
    assert math.prod(degrees) == plan.mesh.devices == 8
    parts = axes["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [
        len(stage.layers) + (index == len(plan.stages) - 1)
        for index, stage in enumerate(plan.stages)
    ]
    blocks = [f"layers.{index}" for index in range(16)]
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *blocks,
        "norm",
        "output",
    ]
    assert axes["pipeline_parallel_schedule"] == "1F1B"
    assert told["training"]["local_batch_size"] * 2 == 64


def test_deepspeed_is_told_batches_that_multiply_and_what_is_offloaded() -> None:
    plan = planned(
        "tp=1", "pp=1", "cp=1", "zero=3", "recompute=full", "offload=parameters", allow=("offload",)
    )

    told = json.loads(configuration(plan, MODEL, "deepspeed"))

    micro = told["train_micro_batch_size_per_gpu"] * told["gradient_accumulation_steps"]
    assert micro * plan.mesh.devices == told["train_batch_size"] == 64
    zero = told["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    assert told["bf16"] == {"enabled": True}
    said = in_the_script(plan, MODEL, "deepspeed")
    assert "gradient_checkpointing_enable" in said[0]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_accelerate_is_told_how_data_parallelism_shards(zero: int) -> None:
    plan = planned("tp=1", "pp=1", "cp=1", f"zero={zero}", "recompute=none")

    told = yaml.safe_load(configuration(plan, MODEL, "accelerate", CLUSTER))

    assert told["num_processes"] == 8
    assert told["mixed_precision"] == "bf16"
    assert told["distributed_type"] == ("FSDP" if zero else "MULTI_GPU")
    if zero:
        assert told["fsdp_config"]["fsdp_reshard_after_forward"] is (zero == 3)
        sizes = told["parallelism_config"]
        assert math.prod(sizes.values()) == 8
        assert sizes["parallelism_config_dp_shard_size"] == plan.mesh.data_shard


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("to", "fix", "message"),
    [
        ("megatron", ("pp=2", "schedule=zb-h1"), "schedule zb-h1"),
        ("torchtitan", ("dp=8", "zero=1"), "ZeRO-1"),
        ("torchtitan@0.2", ("tp=2", "dp=4", "zero=0"), "replicas"),
        ("torchtitan@0.2", ("tp=8",), "would train in fp32"),
        ("torchtitan", ("cp=2", "dp=4", "zero=0"), "its context ranks shard"),
        ("accelerate", ("tp=2", "zero=3", "recompute=none"), "that divides the sequence"),
        ("torchtitan", ("dp=8", "zero=3", "recompute=selective"), "selective recompute"),
        ("deepspeed", ("pp=2", "tp=2", "zero=0"), "pipeline degree 2"),
        ("deepspeed", ("tp=1", "pp=1", "recompute=selective"), "selective recompute"),
        ("accelerate", ("pp=2", "tp=2", "zero=0"), "pipeline degree 2"),
        ("megatrn", (), "megatron"),
    ],
)
def test_what_a_framework_has_no_words_for_is_refused(
    to: str, fix: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        configuration(planned(*fix), MODEL, to, CLUSTER)


@pytest.mark.parametrize("to", list(FRAMEWORKS))
def test_every_example_is_written_or_refused_with_a_reason(to: str) -> None:
    for folder in sorted(EXAMPLES.glob("*-on-*")):
        plan, model = read(Plan, folder / "plan.yaml"), read(ModelGraph, folder / "model.yaml")
        try:
            assert configuration(plan, model, to, resolve_cluster(plan.cluster)).strip()
        except DocumentError as error:
            assert f"{to} cannot run this plan: " in error.message


def adapted(*settings: str, framework: str = "transformers", **options: Any) -> Plan:
    machine = resolve_cluster(options.pop("cluster", "1xa100-sxm-80gb"))
    request = Request.create(
        MODEL,
        machine,
        seq_len=2048,
        global_batch=16,
        lora=settings,
        framework=framework,
        pins=read_pins(["zero=0", "recompute=full"] if machine.devices == 1 else ["zero=3"]),
        **options,
    )
    return search(request).plan


ADAPTED = {
    "trl": ("lora_r", "lora_target_modules", ["all-linear"], {"load_in_4bit": True}),
    "axolotl": ("lora_r", "lora_target_linear", True, {"adapter": "qlora"}),
    "llama-factory": ("lora_rank", "lora_target", "all", {"quantization_bit": 4}),
}


@pytest.mark.parametrize("to", ADAPTED)
def test_fine_tuners_are_told_adapters_and_packed_weights(to: str) -> None:
    rank, targets, every, packed = ADAPTED[to]

    plan = adapted("rank=8", "weights=nf4")
    told = yaml.safe_load(configuration(plan, MODEL, to, recipe=False))

    assert (told[rank], told[targets]) == (8, every)
    assert packed.items() <= told.items()
    batch = told.get("per_device_train_batch_size", told.get("micro_batch_size"))
    assert batch * told["gradient_accumulation_steps"] == 16
    # LLaMA-Factory recomputes blocks unless it is told not to.
    checkpoints = told.get("gradient_checkpointing", not told.get("disable_gradient_checkpointing"))
    assert checkpoints is True
    plain = yaml.safe_load(configuration(adapted("rank=8"), MODEL, to))
    assert packed.items().isdisjoint(plain.items())
    sharded = yaml.safe_load(configuration(adapted("rank=8", cluster="8xa100-sxm-80gb"), MODEL, to))
    assert sharded["fsdp_config"]["reshard_after_forward"] is True


def test_scripts_are_told_how_peft_and_bitsandbytes_have_it() -> None:
    plan = adapted("rank=8", "weights=nf4")

    told = "\n".join(in_the_script(plan, MODEL, "transformers"))

    assert "peft.LoraConfig(r=8, lora_alpha=16, target_modules='all-linear'" in told
    assert "load_in_4bit=True, bnb_4bit_quant_type='nf4'" in told


def test_megatron_bridge_has_a_section_of_adapters() -> None:
    plan = adapted("rank=8", "targets=[q_proj,v_proj,down_proj]", framework="megatron")

    told = yaml.safe_load(configuration(plan, MODEL, "megatron-bridge"))

    assert told["peft"]["target_modules"] == ["linear_qkv", "linear_fc2"]
    assert told["peft"]["dim"] == 8
    with pytest.raises(DocumentError, match="adapters are trained"):
        configuration(plan, MODEL, "megatron")


def test_optimizers_without_a_word_are_refused_by_name() -> None:
    request = Request.create(
        MODEL, CLUSTER, seq_len=2048, global_batch=16, optimizer="adamw-8bit-paged",
        masters="none", framework="torchtune",
    )  # fmt: skip
    plan = search(request).plan

    told = yaml.safe_load(configuration(plan, MODEL, "torchtune"))
    assert told["optimizer"]["_component_"] == "bitsandbytes.optim.PagedAdamW8bit"
    arguments = yaml.safe_load(configuration(plan, MODEL, "trl"))
    assert arguments["optim"] == "paged_adamw_8bit"
    with pytest.raises(DocumentError, match="which the script loads"):
        configuration(plan, MODEL, "transformers")
    for to in ("deepspeed", "accelerate", "fsdp", "megatron"):
        with pytest.raises(DocumentError, match="adamw-8bit-paged"):
            configuration(plan, MODEL, to, CLUSTER)
