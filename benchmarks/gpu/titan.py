"""A training step of torchtitan, from its package, as a contestant of versus.py.

Importing this module needs torchtitan (0.3, `pip install torchtitan`).  Its own Trainer runs with
its own defaults: flex attention, the loss in chunks, compiled blocks and CUDA graphs on a device.
Tokens come from the caller, in its loader's form.  torchtitan does not run on CPUs: a dry run
replaces what it asks of a device (its kind, its memory, attention's backward), no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

if not torch.cuda.is_available():
    # Read once, by torchtitan.tools.utils, which takes a machine without devices for one with CUDA.
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

FLAVORS: dict[str, tuple[Any, str]] = {
    "llama-3.2-1b": (llama3, "1B"),
    "llama-3.2-3b": (llama3, "3B"),
    "qwen3-0.6b": (qwen3, "0.6B"),
    "demo-4m": (llama3, "debugmodel"),
}
"""torchtitan's names of models; its debugmodel is of another size and proves the program only."""
LORA_TARGETS = ["wqkv", "wo", "w1", "w2", "w3"]
"""Every matrix of a block."""


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """What the trainer builds where tokens come as numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0


class SampleLoader(BaseDataLoader):  # type: ignore[misc]
    """The same samples in every step, as torchtitan's loaders yield them."""

    samples: Tensor
    """Set before the trainer is built; [sample, position]."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, local_batch_size: int, **_: Any) -> None:
        self.micro_batch = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for part in torch.split(type(self).samples, self.micro_batch):
                inputs = part[:, :-1].contiguous()
                positions = torch.arange(inputs.shape[1]).expand_as(inputs).contiguous()
                yield {"input": inputs, "positions": positions}, part[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def trainer_of(
    model: str,
    tokens: Tensor,
    *,
    micro_batch: int,
    recompute: bool,
    lora_rank: int | None,
    on_cuda: bool,
) -> tuple[Callable[[], None], nn.Module, Any]:
    """Return a step of torchtitan's trainer, its model and its optimizer."""
    if model not in FLAVORS:
        raise LookupError(f"torchtitan has no {model}")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if dist.is_initialized():  # of a micro-batch that did not fit
        dist.destroy_process_group()
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.autograd.set_multithreading_enabled(False)  # as its own start does
    if not on_cuda:
        _replace_device()
    family, flavor = FLAVORS[model]
    converters = None
    if lora_rank is not None:
        adapters = LoRAConverter.Config(
            rank=lora_rank, alpha=float(lora_rank), target_modules=LORA_TARGETS
        )
        converters = [adapters]
    spec = family.model_registry(flavor, converters=converters)
    SampleLoader.samples = tokens
    trainer = Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        optimizer=default_adamw(lr=3e-4),
        tokenizer=NoTokenizer.Config(),
        dataloader=SampleLoader.Config(),
        training=TrainingConfig(
            local_batch_size=micro_batch,
            global_batch_size=len(tokens),
            seq_len=tokens.shape[1] - 1,
            disable_cuda_graphs=not on_cuda,
        ),
        # The default backend registers frozen weights anew, as trained ones (0.3.0).
        parallelism=ParallelismConfig(
            spmd_backend="spmd_types" if lora_rank is None else "partial_dtensor"
        ),
        metrics=metrics.MetricsProcessor.Config(log_freq=10**6),
        activation_checkpoint=FullAC.Config() if recompute else None,
        compile=CompileConfig(enable=on_cuda),
    ).build()
    batches = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    (module,) = trainer.model_parts
    (optimizer,) = trainer.optimizers
    return step, module, optimizer


def _replace_device() -> None:
    """Replace what torchtitan asks of a device and a CPU does not have."""

    class NoMonitor:
        device_name = "cpu"

        def reset_peak_stats(self) -> None:
            pass

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def attention(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Any]:
        made = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=named["enable_gqa"]
        )
        return made, SimpleNamespace(lse=None)

    metrics.build_device_memory_monitor = NoMonitor
    FlexAttention._compiled_flex_attn = staticmethod(attention)
