"""Megatron-Bridge's own overrides of a configuration, and its validate."""

from __future__ import annotations

import os
from typing import Any

import stand_ins

stand_ins.cuda()
stand_ins.packages(
    "triton",
    "megatron.energon",
    "webdataset",
    "transformer_engine",
    "transformer_engine_torch",
    "mamba_ssm",
    "causal_conv1d",
    "flash_attn",
    "modelopt",
    "nvidia_resiliency_ext",
)
import megatron  # noqa: E402

megatron.__path__ = [os.environ["MEGATRON_LM"], os.environ["MEGATRON_BRIDGE"]]

from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.mixed_precision import get_mixed_precision_config  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import (  # noqa: E402
    process_config_with_overrides,
)


def read(case: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(WORLD_SIZE=str(case["world"]), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    figures = case["model"]
    experts: dict[str, Any] = {}
    if figures["experts"]:
        experts = {
            "num_moe_experts": figures["experts"],
            "moe_router_topk": figures["active"],
        }
    config = ConfigContainer(
        train=TrainingConfig(micro_batch_size=1, global_batch_size=8, train_iters=1000),
        model=GPTModelProvider(
            num_layers=figures["layers"],
            hidden_size=figures["hidden_size"],
            ffn_hidden_size=figures["ffn_size"],
            num_attention_heads=figures["heads"],
            num_query_groups=figures["kv_heads"],
            vocab_size=figures["vocab_size"],
            seq_length=case["seq_len"],
            **experts,
        ),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3),
        ddp=DistributedDataParallelConfig(),
        scheduler=SchedulerConfig(lr_decay_style="cosine"),
        dataset=MockGPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=case["seq_len"],
            num_dataset_builder_threads=1,
        ),
        logger=LoggerConfig(),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=figures["vocab_size"]),
        checkpoint=CheckpointConfig(),
        mixed_precision="bf16_mixed",
    )
    process_config_with_overrides(config, config_filepath=case["file"])
    if config.mixed_precision is not None:
        config.mixed_precision = get_mixed_precision_config(config.mixed_precision)
        config.mixed_precision.finalize()
        config.mixed_precision.setup(config.model, config.optimizer, config.ddp)
    config.validate()
    model, train = config.model, config.train
    at_once = train.micro_batch_size * config.data_parallel_size
    assert train.global_batch_size % at_once == 0
    return {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "context": model.context_parallel_size,
        "expert": model.expert_model_parallel_size,
        "data": config.data_parallel_size,
        "micro_batch": train.micro_batch_size,
        "micro_batches": train.global_batch_size // at_once,
        "seq_len": model.seq_length,
        "virtual_stages": model.virtual_pipeline_model_parallel_size or 1,
    }


stand_ins.each(read)
