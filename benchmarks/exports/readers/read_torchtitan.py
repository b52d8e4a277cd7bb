"""torchtitan's own ConfigManager, its mesh and its pipeline schedules."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import stand_ins

stand_ins.cuda()
stand_ins.packages("triton", "torchao")

from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402


def read(case: dict[str, Any]) -> dict[str, Any]:
    config = _parsed(case)
    axes, training = config.parallelism, config.training
    names = {
        "dp_replicate": axes.data_parallel_replicate_degree,
        "dp_shard": axes.data_parallel_shard_degree,
        "cp": axes.context_parallel_degree,
        "tp": axes.tensor_parallel_degree,
        "pp": axes.pipeline_parallel_degree,
        "ep": axes.expert_parallel_degree,
        "world_size": case["world"],
    }
    if "etp" in ParallelDims.__dataclass_fields__:
        names["etp"] = axes.expert_tensor_parallel_degree
    dims = ParallelDims(**names)
    data = dims.dp_replicate * dims.dp_shard
    local = training.local_batch_size
    assert training.global_batch_size % (local * data) == 0
    samples, forwards = local, training.global_batch_size // (local * data)
    stages = 1
    if dims.pp > 1:
        get_schedule_class(axes.pipeline_parallel_schedule)
        samples = axes.pipeline_parallel_microbatch_size
        assert local % samples == 0
        forwards *= local // samples
        stages = len(axes.module_fqns_per_model_part)
        assert stages % dims.pp == 0
        if getattr(config, "model_spec", None) is not None:
            _check_modules(config.model_spec.model, axes.module_fqns_per_model_part)
    return {
        "tensor": dims.tp,
        "pipeline": dims.pp,
        "context": dims.cp,
        "expert": dims.ep,
        "data": data,
        "micro_batch": samples,
        "micro_batches": forwards,
        "seq_len": training.seq_len,
        "virtual_stages": stages // dims.pp,
    }


def _parsed(case: dict[str, Any]) -> Any:
    file = Path(case["file"])
    if file.suffix == ".toml":
        return ConfigManager().parse_args(["--job.config_file", str(file)])
    module = f"planned_{case['number']}"
    folder = Path(sys.argv[2]).parent / "modules"
    folder.mkdir(exist_ok=True)
    target = folder / f"{module}.py"
    shutil.copy(file, target)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    name = case["function"]
    if name is None:  # a model that it does not configure: another one, with these settings
        with target.open("a") as extended:
            extended.write(
                "\n\nfrom torchtitan.models.llama3 import config_registry\n\n\n"
                "def other():\n"
                "    config = planned(config_registry.llama3_debugmodel())\n"
                "    config.model_spec = None\n"
                "    return config\n"
            )
        name = "other"
    return ConfigManager().parse_args(["--module", module, "--config", name])


def _check_modules(model: Any, parts: list[list[str]]) -> None:
    """Compare the modules of all stages with those that the model has."""
    wanted = ["tok_embeddings", *(f"layers.{n}" for n in range(len(model.layers)))]
    assert [name for part in parts for name in part] == [*wanted, "norm", "lm_head"]


stand_ins.each(read)
