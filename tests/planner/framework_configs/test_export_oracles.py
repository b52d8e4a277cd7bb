"""Exported configurations train the plan's batch at the plan's rates, by each framework's rules."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Mesh,
    PlacedLayer,
    Plan,
    PlannedModel,
    Stage,
)
from meshwright.planner.documents.training import Training
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import configuration, in_the_script
from meshwright.runtime.optim.learning_rate import learning_rate
from tests.planner.framework_configs import frameworks

MODEL = resolve_model("llama-3.2-1b")
BLOCKS = 16
SEEDS = range(400)


def random_training(rng: random.Random) -> Training:
    schedule = rng.choice(("constant", "cosine", "linear", "wsd"))
    warmup = rng.choice((0, 1, 3, 10))
    falls = schedule != "constant"
    end = warmup + rng.randint(2, 30) if falls else 0
    return Training(
        learning_rate=rng.choice((3e-4, 1e-3, 0.02)),
        warmup_steps=warmup,
        beta1=rng.choice((0.9, 0.8)),
        beta2=rng.choice((0.95, 0.99)),
        epsilon=rng.choice((1e-8, 1e-6)),
        weight_decay=rng.choice((0.0, 0.1, 0.3)),
        clip_norm=rng.choice((0.0, 1.0, 0.5)),
        rate_schedule=schedule,  # type: ignore[arg-type]
        rate_steps=end,
        decay_steps=rng.randint(1, end - warmup) if schedule == "wsd" else 0,
        floor=rng.choice((0.0, 0.1)) if falls else 0.0,
    )


def random_plan(seed: int) -> Plan | None:
    """Return any plan of a small model, or None where the draw is no plan."""
    rng = random.Random(seed)
    simple = rng.random() < 0.4
    pipeline = 1 if simple else rng.choice((1, 2, 4))
    schedule, virtual = rng.choice(
        (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved-zb", 2), ("zbv", 2))
        if pipeline > 1
        else (("1f1b", 1),)
    )
    zero = rng.choice((0, 1, 2, 3))
    shard = rng.choice((2, 4, 8)) if zero else 1
    replicate = rng.choice((1, 1, 2, 4))
    micro_batch, micro_batches = rng.choice((1, 2, 4)), pipeline * rng.choice((1, 2, 4))
    names = [name for name, _ in MODEL.chain]
    blocks = BLOCKS // (pipeline * virtual)
    cuts = [0, *(1 + blocks * n for n in range(1, pipeline * virtual)), len(names)]
    recompute = rng.choice(("none", "none", "full", "selective"))
    mesh = Mesh(
        tensor=1 if simple else rng.choice((1, 2)),
        context=1 if simple else rng.choice((1, 1, 2)),
        data_shard=shard,
        data_replicate=replicate,
        pipeline=pipeline,
        order=INSIDE_OUT,
    )
    try:
        return Plan(
            model=PlannedModel(name=MODEL.name, source=MODEL.name, digest=MODEL.digest),
            cluster="64x8xh100-sxm-80gb",
            seq_len=4096,
            global_batch=micro_batch * micro_batches * shard * replicate,
            precision=rng.choice(("bf16", "fp32")),
            mesh=mesh,
            zero=zero,  # type: ignore[arg-type]
            schedule=schedule,  # type: ignore[arg-type]
            virtual_stages=virtual,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            stages=tuple(
                Stage(
                    layers=tuple(
                        PlacedLayer(layer=name, recompute=recompute)  # type: ignore[arg-type]
                        for name in names[first:last]
                    )
                )
                for first, last in pairwise(cuts)
            ),
            training=random_training(rng),
        )
    except ValidationError:
        return None


def written(to: str) -> list[tuple[Plan, str]]:
    """Return random plans with their configurations, as far as the framework runs them."""
    found = []
    for plan in map(random_plan, SEEDS):
        if plan is None:
            continue
        try:
            machine = resolve_cluster(plan.cluster)
            found.append((plan, configuration(plan, MODEL, to, machine)))
        except DocumentError:
            continue
    assert len(found) >= 20, f"only {len(found)} plans could be written for {to}"
    return found


def asked(plan: Plan) -> frameworks.Step:
    layout = plan.layout
    return frameworks.Step(plan.micro_batch, plan.micro_batches, layout.data, plan.seq_len)


def check_step(step: frameworks.Step, plan: Plan) -> None:
    assert step.tokens == plan.global_batch * plan.seq_len
    assert step == asked(plan)


def check_rates(rate: Callable[[int], float], plan: Plan, *, last: int, early: float = 0.0) -> None:
    """Compare rates step by step; `early` is how far one may be off while they warm up."""
    training = plan.training
    for step in range(last):
        off = early * training.learning_rate if step < training.warmup_steps else 0.0
        wanted = learning_rate(training, step)
        assert rate(step) == pytest.approx(wanted, rel=1e-9, abs=off + 1e-12), (step, training)


def last_of(plan: Plan) -> int:
    return max(plan.training.rate_steps, plan.training.warmup_steps) + 4


def test_megatron_trains_the_plans_batch_at_the_plans_rates() -> None:
    for plan, text in written("megatron"):
        args = frameworks.megatron(text)
        check_step(frameworks.megatron_step(args, plan.mesh.devices), plan)
        warmup = max(1, plan.training.warmup_steps)
        check_rates(
            lambda step, a=args: frameworks.megatron_rate(a, step),
            plan,
            last=last_of(plan),
            early=(1 - 1 / warmup) / warmup,
        )
        t = plan.training
        assert (args.adam_beta1, args.adam_beta2, args.adam_eps) == (t.beta1, t.beta2, t.epsilon)
        assert (args.weight_decay, args.clip_grad) == (t.weight_decay, t.clip_norm)
        copies = plan.layout.data * plan.mesh.context > 1
        assert args.overlap_grad_reduce is copies
        assert args.overlap_param_gather is (copies and plan.zero > 0)


def test_torchtitan_trains_the_plans_batch_at_the_plans_rates() -> None:
    for plan, text in written("torchtitan@0.2"):
        job = frameworks.torchtitan(text, layers=BLOCKS)
        check_step(frameworks.titan_step(job), plan)
        ends = plan.training.rate_schedule != "constant"
        last = plan.training.rate_steps if ends else last_of(plan)
        check_rates(lambda step, j=job: frameworks.titan_rate(j, step), plan, last=last)
        if ends:
            assert job["training"]["steps"] == plan.training.rate_steps
        t, optimizer = plan.training, job["optimizer"]
        assert (optimizer["name"], optimizer["weight_decay"]) == ("AdamW", t.weight_decay)
        told = (optimizer["beta1"], optimizer["beta2"], optimizer["eps"])
        assert told == (t.beta1, t.beta2, t.epsilon)
        assert job["training"]["max_norm"] == (t.clip_norm or math.inf)
        assert frameworks.titan_stages(job, BLOCKS) in (
            [BLOCKS],
            [sum(item.layer.startswith("block") for item in stage.layers) for stage in plan.stages],
        )


def test_deepspeed_trains_the_plans_batch() -> None:
    for plan, text in written("deepspeed"):
        told = frameworks.deepspeed(text)
        check_step(frameworks.deepspeed_step(told, plan.mesh.devices, plan.seq_len), plan)
        t, optimizer = plan.training, told["optimizer"]
        assert told["gradient_clipping"] == t.clip_norm
        assert optimizer == {
            "type": "AdamW",
            "params": {
                "lr": t.learning_rate,
                "betas": [t.beta1, t.beta2],
                "eps": t.epsilon,
                "weight_decay": t.weight_decay,
            },
        }
        said = " ".join(in_the_script(plan, MODEL, "deepspeed"))
        changes = t.rate_schedule != "constant" or t.warmup_steps > 0
        assert ("learning rate" in said) is changes


@functools.cache
def launcher() -> Any:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


def launched(text: str, folder: Path) -> Any:
    """Return the arguments that accelerate's own launcher makes of a configuration."""
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = folder / "accelerate.yaml"
    file.write_text(text)
    place = ["--machine_rank", "0", "--main_process_ip", "10.0.0.1", "--main_process_port", "29777"]
    args = launcher().parse_args(["--config_file", str(file), *place, "train.py"])
    args, _, _ = _validate_launch_command(args)
    args.environment = prepare_multi_gpu_env(args)
    return args


def test_accelerate_starts_the_plans_ranks_on_the_plans_nodes(tmp_path: Path) -> None:
    nodes = set()
    for plan, text in written("accelerate")[:24]:
        args = launched(text, tmp_path)
        devices = plan.mesh.devices
        nodes.add(args.num_machines)
        assert args.num_machines == max(1, devices // 8)
        ranks = int(args.nproc_per_node) * args.num_machines
        assert ranks == devices
        assert args.num_machines == 1 or (args.nproc_per_node, args.nnodes) == (
            "8",
            str(devices // 8),
        )
        said = " ".join(in_the_script(plan, MODEL, "accelerate", resolve_cluster(plan.cluster)))
        assert f"micro-batches of {plan.micro_batch}," in said
        assert f"gradient_accumulation_steps={plan.micro_batches}" in said
        assert f"betas=({plan.training.beta1:g}, {plan.training.beta2:g})" in said
        sharding = args.environment
        data = devices
        if plan.zero:
            data = math.prod(
                int(sharding[f"PARALLELISM_CONFIG_DP_{kind}_SIZE"])
                for kind in ("REPLICATE", "SHARD")
            )
        step = frameworks.Step(plan.micro_batch, plan.micro_batches, data, plan.seq_len)
        check_step(step, plan)
    assert len(nodes) > 2


def test_accelerate_cannot_leave_devices_of_its_last_node_idle() -> None:
    plan, _ = next(pair for pair in written("accelerate") if pair[0].mesh.devices == 16)
    odd = resolve_cluster(f"{plan.mesh.devices}x5xh100-sxm-80gb")

    with pytest.raises(DocumentError, match="16 ranks on nodes of 5; it starts"):
        configuration(plan, MODEL, "accelerate", odd)


def test_nanotron_trains_the_plans_batch_at_the_plans_rates() -> None:
    for plan, text in written("nanotron"):
        told = frameworks.nanotron(text)
        check_step(frameworks.nanotron_step(told, plan.mesh.devices), plan)
        warmup = max(1, plan.training.warmup_steps)
        check_rates(
            lambda step, c=told: frameworks.nanotron_rate(c, step),
            plan,
            last=last_of(plan),
            early=(1 + 1e-9) / warmup,
        )
        t, optimizer = plan.training, told["optimizer"]
        assert (optimizer["weight_decay"], optimizer["clip_grad"]) == (
            t.weight_decay,
            t.clip_norm or None,
        )
        factory = optimizer["optimizer_factory"]
        assert (factory["adam_beta1"], factory["adam_beta2"]) == (t.beta1, t.beta2)
        assert factory["adam_eps"] == t.epsilon


def test_torch_shards_a_model_as_a_plan_for_fsdp_says() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen = set()
    for plan, text in [pair for pair in written("fsdp") if pair[0].mesh.devices > 1][:8]:
        module: dict[str, Any] = {}
        exec(compile(text, "plan.py", "exec"), module)
        devices = plan.mesh.devices
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        try:
            blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(BLOCKS))
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), blocks)
            module["parallelize"](model, blocks, device="cpu")
            assert all(isinstance(block, FSDPModule) for block in blocks)
            wrapped = sum(isinstance(block, CheckpointWrapper) for block in blocks)
            recomputed = {item.recompute for item in plan.stages[0].layers}
            assert wrapped == (BLOCKS if recomputed == {"full"} else 0)
            [weight, *_] = model[0].parameters()
            mesh = weight.device_mesh
            shape = (plan.mesh.data_replicate, plan.mesh.data_shard)
            assert tuple(mesh.shape) == (shape if shape[0] > 1 else shape[1:])
            made = module["optimizer"](model).param_groups[0]
            t = plan.training
            assert (made["lr"], made["betas"]) == (t.learning_rate, (t.beta1, t.beta2))
            assert (made["eps"], made["weight_decay"]) == (t.epsilon, t.weight_decay)
        finally:
            dist.destroy_process_group()
        step = (module["MICRO_BATCH"], module["MICRO_BATCHES"], module["SEQ_LEN"])
        assert step == (plan.micro_batch, plan.micro_batches, plan.seq_len)
        seen.add((plan.zero, *shape))
    assert len(seen) > 3
