"""Megatron-LM's own parse_args and validate_args."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import stand_ins

stand_ins.cuda()
stand_ins.packages("triton")

from megatron.core.transformer.pipeline_parallel_layer_layout import (  # noqa: E402
    PipelineParallelLayerLayout,
)
from megatron.training.arguments import parse_args, validate_args  # noqa: E402


def read(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(WORLD_SIZE=str(case["world"]), RANK="0")
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(case["environment"])
    told = shlex.split(Path(case["file"]).read_text())
    model = case["model"]
    rest = [
        *("--num-layers", model["layers"], "--hidden-size", model["hidden_size"]),
        *("--num-attention-heads", model["heads"], "--ffn-hidden-size", model["ffn_size"]),
        *("--max-position-embeddings", case["seq_len"], "--vocab-size", model["vocab_size"]),
        *("--tokenizer-type", "NullTokenizer", "--train-iters", 1000),
    ]
    if model["kv_heads"] < model["heads"]:
        rest += ["--group-query-attention", "--num-query-groups", model["kv_heads"]]
    if model["experts"]:
        rest += ["--num-experts", model["experts"], "--moe-router-topk", model["active"]]
    sys.argv = ["pretrain_gpt.py", *told, *map(str, rest)]
    args = parse_args()
    validate_args(args, {})
    if args.pipeline_model_parallel_layout is not None:
        layout = PipelineParallelLayerLayout.from_str(
            args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
        )
        layout.validate_layer_layout(args.num_layers, None)
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        "data": args.data_parallel_size,
        "micro_batch": args.micro_batch_size,
        "micro_batches": args.global_batch_size
        // (args.micro_batch_size * args.data_parallel_size),
        "seq_len": args.seq_length,
        "virtual_stages": args.virtual_pipeline_model_parallel_size or 1,
    }


stand_ins.each(read)
