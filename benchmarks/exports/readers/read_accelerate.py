"""accelerate's own launcher, its parallelism configuration and its FSDP plugin."""

from __future__ import annotations

import os
from typing import Any

import stand_ins

stand_ins.cuda()

from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402
from accelerate.commands.launch import (  # noqa: E402
    _validate_launch_command,
    launch_command_parser,
)
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402

PARSER = launch_command_parser()
BEFORE = dict(os.environ)


def read(case: dict[str, Any]) -> dict[str, Any]:
    load_config_from_file(case["file"])
    place = ["--machine_rank", "0", "--main_process_ip", "10.0.0.1", "--main_process_port", "29777"]
    args = PARSER.parse_args(["--config_file", case["file"], *place, "train.py"])
    args, _, _ = _validate_launch_command(args)
    os.environ.clear()
    os.environ.update(BEFORE)
    told = prepare_multi_gpu_env(args) if case["world"] > 1 else {}
    os.environ.update(told)
    machines = int(args.num_machines or 1)
    each = int(getattr(args, "nproc_per_node", None) or case["world"] // machines)
    assert each * machines == case["world"], (each, machines)
    axes = {"dp_replicate": case["world"], "dp_shard": 1, "tp": 1, "cp": 1}
    zero = 0
    if told.get("ACCELERATE_USE_FSDP") == "true":
        config = ParallelismConfig()
        axes = {
            "dp_replicate": config.dp_replicate_size,
            "dp_shard": config.dp_shard_size,
            "tp": config.tp_size,
            "cp": config.cp_size,
        }
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        zero = 3 if plugin.reshard_after_forward else 2
    data = axes["dp_replicate"] * axes["dp_shard"]
    assert data * axes["tp"] * axes["cp"] == case["world"]
    return {
        "tensor": axes["tp"],
        "pipeline": 1,
        "context": axes["cp"],
        "expert": 1,
        "data": data,
        "zero": zero,
    }


stand_ins.each(read)
