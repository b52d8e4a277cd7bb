"""The library's own classes, trained in a plain loop that shares nothing with this project.

Only torch and transformers are imported here.  One process takes the whole batch at once, AdamW
goes parameter after parameter, and clipping and learning rates are written out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

VOCABULARY = 272
"""Bytes, the end of a text, and what makes it a multiple of 16."""
SEEN = 64
"""Positions that models have."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": SEEN,
}
_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, Callable[[int], Any]] = {
    "llama": lambda layers: transformers.LlamaConfig(
        **_SIZES, **_ENDS, intermediate_size=48, num_hidden_layers=layers
    ),
    "tied llama": lambda layers: transformers.LlamaConfig(
        **_SIZES,
        **_ENDS,
        intermediate_size=48,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    ),
    "gpt2": lambda layers: transformers.GPT2Config(
        **_ENDS, vocab_size=VOCABULARY, n_positions=SEEN, n_embd=32, n_head=4, n_layer=layers
    ),
    "gemma2": lambda layers: transformers.Gemma2Config(
        **_SIZES,
        **_ENDS,
        intermediate_size=48,
        num_hidden_layers=layers,
        sliding_window=6,
        query_pre_attn_scalar=8,
    ),
    "mixtral": lambda layers: transformers.MixtralConfig(
        **_SIZES,
        **_ENDS,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": lambda layers: transformers.Qwen3MoeConfig(
        **_SIZES,
        **_ENDS,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
}
"""Small configurations by name, given the layers."""
SEEDS = {"mixtral": 71, "qwen3_moe": 7}
"""Of random weights (else 0) with which six steps of 8 samples bring no token nearer to the border
between two experts than 2e-5; from float64 these gaps differ by 1e-7."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """AdamW, clipping, and a learning rate that warms up and then falls down a cosine."""

    highest: float = 3e-3
    warmup: int = 2
    end: int = 8
    floor: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    decay: float = 0.3
    clip: float = 2.0
    """Of the norms of six steps, some above and some below."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, of which the first is 0."""
        if step < self.warmup:
            return self.highest * (step + 1) / self.warmup
        way = (step - self.warmup) / (self.end - self.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * way))
        return self.highest * (self.floor + (1.0 - self.floor) * cosine)


@dataclass(frozen=True)
class LibraryRun:
    """What a run left: by step, and the last weights by the library's names."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gaps: list[float]
    """How much more probable, at least, a token's last chosen expert was than the next one."""


def save(name: str, layers: int, dtype: torch.dtype, folder: Path) -> None:
    """Write a model of random weights as it is published: config.json and safetensors."""
    torch.manual_seed(SEEDS.get(name, 0))
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](layers))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too are not as they begin
            parameter.add_(0.03 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)


def train(
    folder: Path,
    batches: Sequence[Tensor],
    settings: Settings,
    *,
    dtype: torch.dtype = torch.float32,
    cast: torch.dtype | None = None,
    stale: bool = False,
) -> LibraryRun:
    """Train a published model on batches [sample, position + 1].

    Weights, gradients and moments are of type `dtype`.  With `cast` a copy of the weights in that
    type goes forward and backward.  `stale` takes each gradient at the weights before the last.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()  # dropout is off
    named = dict(model.named_parameters())
    parameters = list(named.values())
    worker = copy.deepcopy(model)
    workers = list(worker.parameters())
    if cast is not None:
        for parameter in workers:
            parameter.data = parameter.data.to(cast)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        foreach=False,
        fused=False,
    )
    losses: list[float] = []
    norms: list[float] = []
    gaps: list[float] = []
    _watch_routers(worker, gaps)
    before = [p.detach().clone() for p in parameters]
    for step, batch in enumerate(batches):
        gaps.append(1.0)
        now = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for own, value in zip(workers, before if stale else now, strict=True):
                own.copy_(value)
        before = now
        logits = worker(batch[:, :-1], use_cache=False).logits
        wide = logits if dtype == torch.float64 else logits.float()
        loss = functional.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        grads = []
        for own in workers:
            assert own.grad is not None
            grads.append(own.grad.to(dtype))
            own.grad = None
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad * min(1.0, settings.clip / (norm + 1e-6))
        for group in adamw.param_groups:
            group["lr"] = settings.rate(step)
        adamw.step()
        losses.append(loss.item())
        norms.append(norm)
    weights = {name: p.detach().clone() for name, p in named.items()}
    return LibraryRun(losses, norms, weights, gaps)


def _watch_routers(model: torch.nn.Module, gaps: list[float]) -> None:
    """Let every router of a model lower the last of `gaps` to its own smallest."""

    def look(router: Any, inputs: tuple[Tensor, ...], _: object) -> None:
        logits = functional.linear(inputs[0].detach().flatten(0, -2), router.weight.detach())
        first = logits.softmax(-1).topk(router.top_k + 1).values
        gaps[-1] = min(gaps[-1], float((first[:, -2] - first[:, -1]).min()))

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(look)
