"""Causal language models of Hugging Face transformers, as chains of layers.

The library's own decoder layers and norms run unchanged; around them stand an embedding, the
rotary tables or masks they ask for (made once, since the length never changes), and the output
projection.  Dropout is off: its masks would depend on the plan.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from planner.errors import LaunchError
from planner.model import Architecture, ModelGraph
from runtime import capped
from runtime.adapter import EMBEDDING, HEAD, Head, TensorStyle, next_token_loss
from runtime.context import WHOLE, Context, attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of one model family in transformers."""

    classes: str
    """Prefix of its classes."""
    prefix: str = "model"
    """Attribute of the base model in the causal language model; parameter names begin with it."""
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"


FAMILIES = {
    "gemma2": Family(classes="Gemma2"),
    "gpt2": Family(classes="GPT2", prefix="transformer", embedding="wte", layers="h", norm="ln_f"),
    "llama": Family(classes="Llama"),
    "mistral": Family(classes="Mistral"),
    "mixtral": Family(classes="Mixtral"),
    "qwen2": Family(classes="Qwen2"),
    "qwen3": Family(classes="Qwen3"),
    "qwen3_moe": Family(classes="Qwen3Moe"),
}

_STYLES: dict[str, TensorStyle | None] = {
    "colwise": "columns",
    "rowwise": "rows",
    # A norm over one head: replicated weights, as all that no style names are.
    "replicated_with_grad_allreduce": None,
}

_CONTEXT_ATTENTION = "meshwright_context"
"""What the library calls our attention over divided sequences."""
_CAPPED_ATTENTION = "meshwright_capped"
"""And our attention with capped scores."""


class Embedding(nn.Module):
    """Token vectors times a scale, and learned position vectors where the family has them."""

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Embedding | None,
        context: Context = WHOLE,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.context = context
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [sample, position, hidden]."""
        x = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded first, as the library does
        if self.positions is None:
            return x
        if self.context.degree == 1:
            return x + self.positions.weight[: tokens.shape[1]]
        held = self.context.positions(tokens.shape[1] * self.context.degree)
        return x + self.positions(held.to(tokens.device))


class Block(nn.Module):
    """One decoder layer of the library, with the fixed inputs it wants beside the hidden states."""

    def __init__(self, layer: nn.Module, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer = layer
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        return self.layer(x, **self.fixed)


class HuggingFace:
    """Adapter of the families in FAMILIES."""

    def __init__(
        self,
        model: ModelGraph,
        *,
        folder: Path | None,
        seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        context: Context = WHOLE,
    ) -> None:
        assert model.architecture is not None
        self.model = model
        self.architecture = model.architecture
        self.family = FAMILIES[model.architecture.family]
        self.config = configuration(model.architecture, folder)
        self.tied_names = frozenset(
            ("embedding.tokens.weight", "head.output.weight")
            if model.architecture.tied_embeddings
            else ()
        )
        name = model.architecture.family
        # Takes seconds to import, so not at the top.
        self._modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        self._seq_len, self._dtype, self._device = seq_len, dtype, device
        self._context = context
        self._positions = context.positions(seq_len)
        if context.degree > 1:
            from transformers import AttentionInterface  # noqa: PLC0415 - as above

            AttentionInterface.register(_CONTEXT_ATTENTION, _over_context)
            self.config._attn_implementation = _CONTEXT_ATTENTION
        if self.family.classes == "Gemma2":
            from transformers import AttentionInterface  # noqa: PLC0415 - as above

            AttentionInterface.register(_CAPPED_ATTENTION, _capped)
            self.config._attn_implementation = _CAPPED_ATTENTION
        self._rotary = self._rotary_tables()
        self._masks: dict[int, Tensor] = {}

    def layer(self, name: str) -> nn.Module:
        """Return a layer on the meta device."""
        a = self.architecture
        if name == EMBEDDING:
            with torch.device("meta"):
                learned = a.positions == "learned"
                return Embedding(
                    nn.Embedding(a.vocab_size, a.hidden_size),
                    nn.Embedding(a.max_positions, a.hidden_size) if learned else None,
                    self._context,
                    a.hidden_size**0.5 if self.family.classes == "Gemma2" else 1.0,
                )
        if name == HEAD:
            with torch.device("meta"):
                output = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
                cap = getattr(self.config, "final_logit_softcapping", None)
                return Head(self._norm(), output, cap)
        index = _index(name)
        kind = "Block" if self.family.classes == "GPT2" else "DecoderLayer"
        with torch.device("meta"):
            layer = getattr(self._modeling, self.family.classes + kind)(self.config, index)
        return Block(layer, self._fixed(index))

    def configuration(self) -> str | None:
        """Return the library's configuration of the model that is trained."""
        settings = self.config.to_dict()
        settings["architectures"] = [f"{self.family.classes}ForCausalLM"]
        return json.dumps(settings, indent=2, default=str)

    def tie(self, layers: Mapping[str, nn.Module]) -> None:
        """Let the output projection be the token embedding, where both are here."""
        if self.tied_names and EMBEDDING in layers and HEAD in layers:
            output, tokens = layers[HEAD].output, layers[EMBEDDING].tokens
            cast(nn.Linear, output).weight = cast(nn.Embedding, tokens).weight

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Give the values that the library's `_init_weights` would draw."""
        std = self.config.initializer_range
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:  # Gemma's norms add the 1 by themselves
            parameter.fill_(0.0 if self.family.classes == "Gemma2" else 1.0)
        elif name.endswith("c_proj.weight"):  # GPT-2 scales what enters the residual stream
            depth = 2 * self.architecture.layers
            parameter.normal_(0.0, std / depth**0.5, generator=generator)
        else:
            parameter.normal_(0.0, std, generator=generator)

    def tensor_plan(self, layer: str) -> Mapping[str, TensorStyle]:
        """Translate the library's own tensor-parallel plan."""
        if layer == EMBEDDING:
            return {"tokens": "vocabulary"}
        if layer == HEAD:
            return {"output": "logits"}
        result: dict[str, TensorStyle] = {}
        mixed = self._has_experts(layer)
        for path, style in (self.config.base_model_tp_plan or {}).items():
            module = path.removeprefix("layers.*.")
            if module == path or (mixed and module.startswith("mlp.")):
                continue
            if module.startswith("mlp.experts"):
                continue
            if style not in _STYLES:
                raise LaunchError(f"transformers asks to divide {path} '{style}', unknown here")
            translated = _STYLES[style]
            if translated:
                result[f"layer.{module}"] = translated
            if translated == "columns":
                result[f"layer.{module.rpartition('.')[0]}"] = "gather"
        if mixed:
            result |= {"layer.mlp": "mixture", "layer.mlp.experts": "experts"}
        return result

    def published_name(self, name: str) -> str:
        """Return the library's own name, as in published checkpoints."""
        family = self.family
        if name in self.tied_names or name.startswith("embedding.tokens"):
            return f"{family.prefix}.{family.embedding}.weight"
        if name.startswith("embedding.positions"):
            return f"{family.prefix}.wpe.weight"
        if name.startswith("head.norm."):
            return f"{family.prefix}.{family.norm}.{name.removeprefix('head.norm.')}"
        if name == "head.output.weight":
            return "lm_head.weight"
        layer = re.fullmatch(r"block\.(\d+)\.layer\.(.+)", name)
        assert layer is not None, name
        return f"{family.prefix}.{family.layers}.{layer[1]}.{layer[2]}"

    def pieces(self, name: str) -> int:
        """Experts keep their gate and up projections in one parameter [expert, 2 ffn, hidden]."""
        return 2 if name.endswith("experts.gate_up_proj") else 1

    def boundary(self, layer: str, tokens: Tensor) -> Tensor:
        """Every layer but the head returns hidden states."""
        shape = (*tokens.shape, self.architecture.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        """Next-token cross-entropy."""
        return next_token_loss(output, targets)

    def _has_experts(self, layer: str) -> bool:
        experts = self.architecture.experts
        return experts is not None and _index(layer) >= experts.dense_layers

    def _norm(self) -> nn.Module:
        if self.architecture.norm == "layer":
            return nn.LayerNorm(self.architecture.hidden_size, eps=self.config.layer_norm_epsilon)
        made: nn.Module = getattr(self._modeling, f"{self.family.classes}RMSNorm")(
            self.architecture.hidden_size, eps=self.config.rms_norm_eps
        )
        return made

    def _rotary_tables(self) -> tuple[Tensor, Tensor] | None:
        if self.architecture.positions != "rotary":
            return None
        rotary = getattr(self._modeling, f"{self.family.classes}RotaryEmbedding")(self.config)
        cos, sin = rotary(torch.zeros(1, dtype=self._dtype), self._positions.unsqueeze(0))
        return cos.to(self._device), sin.to(self._device)

    def _fixed(self, index: int) -> dict[str, Any]:
        masked = self.family.classes != "Gemma2"  # which is told its window, and makes no mask
        mask = self._mask(index) if masked else None
        fixed: dict[str, Any] = {"use_cache": False, "attention_mask": mask}
        if self._rotary is not None:
            fixed["position_embeddings"] = self._rotary
        if self._context.degree > 1 or not masked:
            fixed["context"] = self._context
        return fixed

    def _mask(self, index: int) -> Tensor | None:
        """Return which keys [1, 1, query, key] a sliding layer sees; None is plain causal."""
        types = getattr(self.config, "layer_types", None)
        if types is not None and types[index] != "sliding_attention":
            return None
        window = getattr(self.config, "sliding_window", None)
        if not window or window >= self._seq_len:
            return None
        if window not in self._masks:
            distance = self._positions[:, None] - torch.arange(self._seq_len)
            self._masks[window] = ((distance >= 0) & (distance < window))[None, None].to(
                self._device
            )
        return self._masks[window]


def _over_context(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Context,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention as the library's layers call it; [sample, position, head, head_dim] comes back."""
    mixed = attention(query, key, value, context, scale=scaling, mask=attention_mask)
    return mixed.transpose(1, 2).contiguous(), None


def _capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Context,
    scaling: float,
    softcap: float,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention with capped scores, called and answering as `_over_context`."""
    window = sliding_window or 0
    mixed = capped.attention(query, key, value, context, scale=scaling, cap=softcap, window=window)
    return mixed.transpose(1, 2).contiguous(), None


def _index(layer: str) -> int:
    """Return which block a layer's name means."""
    return int(layer.rpartition(".")[2])


def has_config(folder: Path) -> bool:
    """Tell whether this is a config.json or a folder that has one."""
    return (folder.suffix == ".json" and folder.is_file()) or (folder / "config.json").is_file()


def configuration(architecture: Architecture, folder: Path | None) -> Any:
    """Return transformers' configuration: a folder's own, or one made of our figures."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import

    a = architecture
    figures = {
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_positions,
        "tie_word_embeddings": a.tied_embeddings,
    }
    experts_only = a.experts if a.family == "mixtral" else None
    if a.family == "gpt2":
        figures["n_inner"] = a.ffn_size
    else:
        figures |= {
            "intermediate_size": experts_only.ffn_size if experts_only else a.ffn_size,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
        }
    if folder is not None:
        # Without a word transformers asks on the terminal whether to run a folder's code.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for name, figure in figures.items():
            known = getattr(config, name, figure)
            if known is not None and known != figure:
                raise LaunchError(f"{folder}: {name} is {known}, and the plan's model has {figure}")
    else:
        figures |= _figures_left_open(a)
        config = AutoConfig.for_model(a.family, **figures, bos_token_id=None, eos_token_id=None)
    if a.family == "gemma2" and (
        not config.attn_logit_softcapping or config.use_bidirectional_attention
    ):
        raise LaunchError(
            f"{folder}: Gemma-2 has causal attention and attn_logit_softcapping here, as published"
        )
    for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    # Fused kernels do not cap scores; the library's own attention does.
    config._attn_implementation = "eager" if a.family == "gemma2" else "sdpa"
    if a.experts is not None:
        config._experts_implementation = "grouped_mm"
    return config


def _figures_left_open(a: Architecture) -> dict[str, Any]:
    """Return what a family's configuration says beside the sizes that all have."""
    result: dict[str, Any] = {}
    if a.family == "llama":
        result |= {"attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}
    if a.family in ("gemma2", "qwen3", "qwen3_moe"):
        result["attention_bias"] = a.qkv_bias
    if a.family == "gemma2":
        # No window is one that is never left.
        result |= {"sliding_window": a.sliding_window or a.max_positions, "layer_types": _types(a)}
        result |= {"query_pre_attn_scalar": a.head_dim, "pad_token_id": None}
    if a.family in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"):
        result["sliding_window"] = a.sliding_window or None
    if a.family in ("qwen2", "qwen3"):
        result |= {"use_sliding_window": a.sliding_window > 0, "layer_types": _types(a)}
    if a.experts is not None:
        result["num_experts_per_tok"] = a.experts.per_token
    if a.family == "mixtral" and a.experts is not None:
        result["num_local_experts"] = a.experts.count
    if a.family == "qwen3_moe" and a.experts is not None:
        result["num_experts"] = a.experts.count
        result["moe_intermediate_size"] = a.experts.ffn_size
        result["mlp_only_layers"] = list(range(a.experts.dense_layers))
        result["norm_topk_prob"] = True
    return result


def _types(architecture: Architecture) -> list[str]:
    """Return each layer's kind of attention."""
    a = architecture
    return [
        "sliding_attention"
        if a.sliding_window and (a.sliding_every == 1 or (index + 1) % a.sliding_every)
        else "full_attention"
        for index in range(a.layers)
    ]
