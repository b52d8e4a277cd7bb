"""torch's own fully_shard: the module is run on as many blocks, without devices."""

from __future__ import annotations

import runpy
from typing import Any

import stand_ins
import torch
import torch.distributed as dist

from benchmarks.torch_internals import fake_store

torch.Tensor.pin_memory = lambda self, *a: self  # pages are pinned for an accelerator


def read(case: dict[str, Any]) -> dict[str, Any]:
    told = runpy.run_path(case["file"])
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=case["world"])
    try:
        model = torch.nn.Module()
        model.embedding = torch.nn.Embedding(64, 64)
        model.blocks = torch.nn.ModuleList(
            torch.nn.Linear(64, 64) for _ in range(case["model"]["layers"])
        )
        told["parallelize"](model, model.blocks, device="cpu")
        groups = told["optimizer"](model).param_groups
        assert len(groups) == 2
    finally:
        dist.destroy_process_group()
    return {
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "expert": 1,
        "data": told["REPLICAS"] * told["SHARDS"],
        "micro_batch": told["MICRO_BATCH"],
        "micro_batches": told["MICRO_BATCHES"],
        "seq_len": told["SEQ_LEN"],
    }


stand_ins.each(read)
