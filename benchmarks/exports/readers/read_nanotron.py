"""nanotron's own configuration, beside a model and a number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stand_ins
import yaml

stand_ins.packages("triton", "flash_attn", "grouped_gemm")

import torch.optim  # noqa: E402, F401 - before nanotron, whose modules need each other
from nanotron import logging  # noqa: E402, F401
from nanotron.config import Config, get_config_from_dict  # noqa: E402


def read(case: dict[str, Any]) -> dict[str, Any]:
    told = yaml.safe_load(Path(case["file"]).read_text())
    model = case["model"]
    told["general"] = {"project": "exports", "run": "one", "seed": 1}
    told["tokens"]["train_steps"] = 100
    told["model"] |= {
        "init_method": {"std": 0.02},
        "model_config": {
            "is_llama_config": True,
            "hidden_size": model["hidden_size"],
            "num_hidden_layers": model["layers"],
            "num_attention_heads": model["heads"],
            "num_key_value_heads": model["kv_heads"],
            "intermediate_size": model["ffn_size"],
            "vocab_size": model["vocab_size"],
            "max_position_embeddings": case["seq_len"],
        },
    }
    config = get_config_from_dict(told, config_class=Config)
    axes, tokens = config.parallelism, config.tokens
    assert axes.dp * axes.tp * axes.pp == case["world"]
    return {
        "tensor": axes.tp,
        "pipeline": axes.pp,
        "context": 1,
        "expert": 1,
        "data": axes.dp,
        "micro_batch": tokens.micro_batch_size,
        "micro_batches": tokens.batch_accumulation_per_replica,
        "seq_len": tokens.sequence_length,
        "zero": config.optimizer.zero_stage,
    }


stand_ins.each(read)
