"""The best plan for a framework is proven, and its configuration asks for exactly that plan."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any, NamedTuple

import pytest
import yaml

from meshwright.planner.catalog import framework as catalog_framework
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.framework_configs.configuration import configuration, in_the_script
from meshwright.planner.framework_configs.import_plan import import_plan
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from tests.planner.framework_configs import frameworks

TABLE = (
    ("llama-3.1-8b", "8xh100-sxm-80gb"),
    ("llama-3.1-70b", "8x8xh100-sxm-80gb"),
    ("mixtral-8x7b", "2x8xh100-sxm-80gb"),
    ("deepseek-v3", "256x8xh800-sxm-80gb"),
)
CANNOT = {
    ("nanotron", "mixtral-8x7b"): "its models are dense",
    ("nanotron", "deepseek-v3"): "its models are dense",
    ("megatron-deepspeed", "mixtral-8x7b"): "its models are dense",
    ("megatron-deepspeed", "deepseek-v3"): "its models are dense",
    ("fsdp", "deepseek-v3"): "needs at least",
}
"""What a framework does not train there, and the word that says why."""


class Asked(NamedTuple):
    """What a configuration asks for, or a plan says; None: the framework has no such axis."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    shards: int
    replicas: int
    zero: int
    samples: int
    forwards: int
    blocks: tuple[int, ...]
    """[stage]"""
    recomputed: tuple[int, ...]
    """Which blocks recompute all."""


def blocks_of(plan: Plan, layers: int) -> list[tuple[int, str]]:
    """Return the stage and the recompute choice of every block."""
    every = [
        (index, item.recompute) for index, stage in enumerate(plan.stages) for item in stage.layers
    ]
    assert len(every) == layers + 2
    return every[1:-1]


def said(plan: Plan, layers: int) -> Asked:
    blocks = blocks_of(plan, layers)
    counts = Counter(stage for stage, _ in blocks)
    return Asked(
        plan.mesh.tensor,
        plan.mesh.pipeline,
        plan.mesh.context,
        plan.mesh.expert,
        plan.mesh.data_shard,
        plan.mesh.data_replicate,
        plan.zero,
        plan.micro_batch,
        plan.micro_batches,
        tuple(counts[stage] for stage in range(len(plan.stages))),
        tuple(at for at, (_, choice) in enumerate(blocks) if choice == "full"),
    )


def megatron(text: str, world: int, layers: int) -> Asked:
    flags = text.replace("--deepspeed\n", "").splitlines()
    zero = [line.split()[1] for line in flags if line.startswith("--zero-stage")]
    args = frameworks.megatron("\n".join(f for f in flags if not f.startswith("--zero-stage")))
    step = frameworks.megatron_step(args, world)
    level = int(zero[0]) if zero else int(args.use_distributed_optimizer)
    ranks = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout:
        blocks = list(frameworks.megatron_layout(args.pipeline_model_parallel_layout))
        assert len(blocks) % ranks == 0
    elif args.num_layers_per_virtual_pipeline_stage:
        each = args.num_layers_per_virtual_pipeline_stage
        front = args.account_for_embedding_in_pipeline_split
        back = args.account_for_loss_in_pipeline_split
        blocks = [each] * ((layers + front + back) // each)
        blocks[0] -= front
        blocks[-1] -= back
    elif args.decoder_first_pipeline_num_layers:
        first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        middle = (layers - first - last) // max(1, ranks - 2)
        blocks = [first, *[middle] * (ranks - 2), last]
    else:
        blocks = [layers // ranks] * ranks
    assert sum(blocks) == layers
    return Asked(
        args.tensor_model_parallel_size,
        ranks,
        args.context_parallel_size,
        args.expert_model_parallel_size or 1,
        step.data if level else 1,
        1 if level else step.data,
        level,
        step.forward_samples,
        step.forwards,
        tuple(blocks),
        tuple(range(layers)) if args.recompute_granularity == "full" else (),
    )


def torchtitan(text: str, world: int, layers: int) -> Asked:
    job = frameworks.torchtitan(text, layers=layers)
    step, axes = frameworks.titan_step(job), job["parallelism"]
    shards, context = axes["data_parallel_shard_degree"], axes["context_parallel_degree"]
    again = {"always": 3, "never": 2, "default": 3}[axes["fsdp_reshard_after_forward"]]
    degrees = (
        shards,
        axes["data_parallel_replicate_degree"],
        axes["tensor_parallel_degree"],
        context,
        axes["pipeline_parallel_degree"],
    )
    product = 1
    for degree in degrees:
        product *= degree
    assert product == world
    parts = axes["module_fqns_per_model_part"]
    return Asked(
        axes["tensor_parallel_degree"],
        axes["pipeline_parallel_degree"],
        context,
        axes["expert_parallel_degree"],
        shards,
        axes["data_parallel_replicate_degree"],
        again if shards > 1 else 0,
        step.forward_samples,
        step.forwards,
        tuple(frameworks.titan_stages(job, layers)) if parts else (layers,),
        tuple(range(layers)) if job["activation_checkpoint"]["mode"] == "full" else (),
    )


def deepspeed(text: str, world: int, layers: int) -> Asked:
    told = frameworks.deepspeed(text)
    step = frameworks.deepspeed_step(told, world, seq_len=1)
    zero = told["zero_optimization"]["stage"]
    return _of_data(world, zero, step.forward_samples, step.forwards, layers)


def _of_data(world: int, zero: int, samples: int, forwards: int, layers: int) -> Asked:
    shards, replicas = (world, 1) if zero else (1, world)
    return Asked(1, 1, 1, 1, shards, replicas, zero, samples, forwards, (layers,), ())


def nanotron(text: str, world: int, layers: int) -> Asked:
    told = frameworks.nanotron(text)
    step, axes = frameworks.nanotron_step(told, world), told["parallelism"]
    zero = told["optimizer"]["zero_stage"]
    return Asked(
        axes["tp"],
        axes["pp"],
        1,
        1,
        axes["dp"] if zero else 1,
        1 if zero else axes["dp"],
        zero,
        step.forward_samples,
        step.forwards,
        (),  # it divides blocks itself: by_products in tests/planner/search/test_framework_spaces.py
        tuple(range(layers)) if axes["recompute_layer"] else (),
    )


def fsdp(text: str, world: int, layers: int) -> Asked:
    module: dict[str, Any] = {}
    exec(compile(text, "plan.py", "exec"), module)
    shards, replicas = module["SHARDS"], module["REPLICAS"]
    assert shards * replicas == world
    zero = 3 if '"reshard_after_forward": True' in text else 2
    return Asked(
        1,
        1,
        1,
        1,
        shards,
        replicas,
        zero,
        module["MICRO_BATCH"],
        module["MICRO_BATCHES"],
        (layers,),
        tuple(module["RECOMPUTED"]),
    )


def accelerate(text: str, world: int, layers: int) -> Asked:
    told = yaml.safe_load(text)
    assert told["num_processes"] == world
    sharding, sizes = told["fsdp_config"], told["parallelism_config"]
    return Asked(
        sizes["parallelism_config_tp_size"],
        1,
        1,
        1,
        sizes["parallelism_config_dp_shard_size"],
        sizes["parallelism_config_dp_replicate_size"],
        3 if sharding["fsdp_reshard_after_forward"] else 2,
        0,  # batches are the script's
        0,
        (layers,),
        tuple(range(layers)) if sharding["fsdp_activation_checkpointing"] else (),
    )


READ = {
    "megatron": megatron,
    "megatron-deepspeed": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "nanotron": nanotron,
    "fsdp": fsdp,
    "accelerate": accelerate,
}


def test_the_published_split_of_llama_3_is_asked_of_megatron() -> None:
    """405B: embedding | 126 blocks, one a stage | head, on 16 ranks of 8 stages each."""
    graph, name = resolve_model("llama-3.1-405b"), "1024x8xh100-sxm-80gb"
    machine = resolve_cluster(name)
    pins = read_pins(["tp=8", "pp=16", "v=8", "micro_batch=1"])
    request = Request.create(
        graph,
        machine,
        framework="megatron",
        called=name,
        seq_len=8192,
        global_batch=2048,
        pins=pins,
    )

    answer = search(request)

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert [len(stage.layers) for stage in answer.plan.stages] == [1] * 128
    text = configuration(answer.plan, graph, "megatron", machine)
    assert megatron(text, machine.devices, 126) == said(answer.plan, 126)
    assert megatron(text, machine.devices, 126).blocks == (0, *[1] * 126, 0)


@pytest.mark.spread(1)
@pytest.mark.parametrize("blocks", [(3, 5, 5, 3), (1, 4, 4, 7), (0, 5, 6, 5), (4, 4, 5, 3)])
def test_any_split_of_blocks_is_asked_of_megatron(blocks: tuple[int, ...]) -> None:
    graph, name = resolve_model("llama-3.2-1b"), "4xh100-sxm-80gb"
    request = Request.create(
        graph, resolve_cluster(name), called=name, pins=read_pins(["pp=4,dp=1,recompute=none"])
    )
    plan = search(request).plan
    layers = [layer for stage in plan.stages for layer in stage.layers]
    ends = [0, *itertools.accumulate((blocks[0] + 1, *blocks[1:-1], blocks[-1] + 1))]
    stages = tuple(
        stage.model_copy(update={"layers": tuple(layers[first:end])})
        for stage, (first, end) in zip(plan.stages, itertools.pairwise(ends), strict=True)
    )
    uneven = plan.model_copy(update={"stages": stages, "schedule": "1f1b", "loss": None})

    text = configuration(uneven, graph, "megatron", resolve_cluster(name))

    assert megatron(text, 4, 16).blocks == blocks
    bridge = yaml.safe_load(configuration(uneven, graph, "megatron-bridge"))["model"]
    said_there = bridge.get("pipeline_model_parallel_layout")
    ends_there = tuple(
        bridge.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")
    )
    assert said_there is None or frameworks.megatron_layout(said_there) == blocks
    assert said_there or ends_there == (blocks[0], blocks[-1])
    again = import_plan(text, "megatron", resolve_cluster(name), model=graph, called=name)
    assert [len(stage.layers) for stage in again.plan.stages] == [
        len(stage.layers) for stage in uneven.stages
    ]


@pytest.mark.spread(4)
@pytest.mark.long(
    "native-mixtral-8x7b-2x8xh100-sxm-80gb",
    "native-deepseek-v3-256x8xh800-sxm-80gb",
    "torchtitan-deepseek-v3-256x8xh800-sxm-80gb",
    "megatron-deepseek-v3-256x8xh800-sxm-80gb",
    "native-llama-3.1-70b-8x8xh100-sxm-80gb",
)
@pytest.mark.parametrize(("model", "cluster"), TABLE)
@pytest.mark.parametrize("framework", ["native", *READ])
def test_the_default_plan_is_proven_and_exported(framework: str, model: str, cluster: str) -> None:
    graph, machine = resolve_model(model), resolve_cluster(cluster)
    assert graph.architecture is not None
    layers = graph.architecture.layers
    request = Request.create(graph, machine, framework=framework, called=cluster)
    if (framework, model) in CANNOT:
        with pytest.raises(NoPlanFits, match=CANNOT[framework, model]):
            search(request)
        return

    answer = search(request)

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    plan = Plan.of(json.loads(answer.plan.model_dump_json()))
    assert plan == answer.plan
    assert plan.framework == framework
    prediction = predict(plan, graph, machine)
    assert prediction.fits
    assert prediction.step_time_s == answer.prediction.step_time_s
    if framework == "native":
        return
    assert configuration(plan, graph, framework, machine).strip()
    # What torchtitan 0.3 makes of a plan, itself says: docs/results/exports.md.
    form = {"torchtitan": "torchtitan@0.2"}.get(framework, framework)
    text = configuration(plan, graph, form, machine)
    asked, wanted = READ[framework](text, machine.devices, layers), said(plan, layers)
    if framework == "nanotron":
        wanted = wanted._replace(blocks=())
    if framework == "accelerate":
        said_there = " ".join(in_the_script(plan, graph, framework, machine))
        assert f"micro-batches of {plan.micro_batch}," in said_there
        assert f"gradient_accumulation_steps={plan.micro_batches}" in said_there
        wanted = wanted._replace(samples=0, forwards=0)
    if framework == "deepspeed":
        recomputed = any(choice == "full" for _, choice in blocks_of(plan, layers))
        told = " ".join(in_the_script(plan, graph, framework))
        assert ("gradient_checkpointing_enable" in told) is recomputed
        wanted = wanted._replace(recomputed=())
    assert asked == wanted
    if not catalog_framework(framework).space.recompute_by_layer:  # type: ignore[union-attr]
        assert len({choice for _, choice in blocks_of(plan, layers)}) == 1
