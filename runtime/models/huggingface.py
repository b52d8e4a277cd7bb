"""Causal language models of Hugging Face transformers, as chains of layers.

The library's own decoder layers and norms run unchanged; around them stand an embedding, the
rotary tables or masks they ask for (made once, since the length never changes), and the output
projection.  Dropout is off: its masks would depend on the plan.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.head import Head
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD, TensorStyle
from meshwright.runtime.core.mesh import WHOLE, Context
from meshwright.runtime.core.torch_internals import unseen_by_recompute
from meshwright.runtime.models.families import FAMILIES, configuration
from meshwright.runtime.models.family_adapter import Adapter
from meshwright.runtime.parallel import document_attention
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.parallel import softcap_attention as capped
from meshwright.runtime.parallel.context_parallel import attention, for_each_query_head

_STYLES: dict[str, TensorStyle | None] = {
    "colwise": "columns",
    "rowwise": "rows",
    # A norm over one head: replicated weights, as all that no style names are.
    "replicated_with_grad_allreduce": None,
    # The one key that all heads share: each rank makes it whole and uses it for its own heads.
    "mla_kv_a_proj": None,
}
_LATENT_STYLES: dict[str, TensorStyle] = {
    "layer.self_attn": "gather",
    "layer.self_attn.q_proj": "columns",
    "layer.self_attn.q_b_proj": "columns",
    "layer.self_attn.kv_b_proj": "columns",
    "layer.self_attn.o_proj": "rows",
}
"""Styles of latent attention, for which the library's plans are not complete."""

LM_HEAD = "lm_head.weight"
"""Library name of the output projection, which files of tied models leave out."""
_CONTEXT_ATTENTION = "meshwright_context"
"""Library name of our attention over divided sequences."""
_DOCUMENT_ATTENTION = "meshwright_documents"
"""Our attention within documents, without a mask."""
_EQUAL_HEADS = "meshwright_equal_heads"
"""Our attention in 32 bits on a device, for whose kernels key and value heads are repeated."""
_CAPPED_ATTENTION = "meshwright_capped"
"""And our attention with soft-capped scores or sinks."""


class LibraryEmbedding(nn.Module):
    """Token vectors times a scale, and learned position vectors where the family has them."""

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Embedding | None,
        context: Context = WHOLE,
        *,
        scale: float = 1.0,
        rounded: bool = False,
    ) -> None:
        """`rounded`: the scale is rounded to the vectors' type before they are multiplied."""
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.context = context
        self.scale = scale
        self.rounded = rounded

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return [sample, position, hidden]; positions count from `starts` [sample, position]."""
        x = self.tokens(tokens)
        if self.scale != 1.0:
            x = x * (torch.tensor(self.scale, dtype=x.dtype) if self.rounded else self.scale)
        if self.positions is None:
            return x
        if self.context.degree == 1 and starts is None:
            return x + self.positions.weight[: tokens.shape[1]]
        held = self.context.positions(tokens.shape[1] * self.context.degree).to(tokens.device)
        return x + self.positions(held if starts is None else held - starts)


class LibraryBlock(nn.Module):
    """One decoder layer of the library, with the fixed inputs it wants beside the hidden states."""

    def __init__(
        self,
        layer: nn.Module,
        fixed: Mapping[str, Any],
        in_documents: Callable[[Tensor], Mapping[str, Any]],
    ) -> None:
        """`in_documents` says what of it is another where attention stays within documents."""
        super().__init__()
        self.layer = layer
        self.fixed = fixed
        self.in_documents = in_documents

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the residual stream after this layer.

        `starts` [sample, position] says where the document of each position begins.
        """
        if starts is None:
            return self.layer(x, **self.fixed)
        return self.layer(x, **{**self.fixed, **self.in_documents(starts)})


class HuggingFace(Adapter):
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
        documents: bool = False,
    ) -> None:
        super().__init__(model, dtype)
        self.family = FAMILIES[self.architecture.family]
        self.config = configuration(self.architecture, folder)
        name = self.architecture.family
        # Takes seconds to import, so not at the top.
        name = self.family.module or name
        self._modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        self._seq_len, self._device = seq_len, device
        self._context = context
        self._positions = context.positions(seq_len)
        self._held = self._positions.to(device)
        self.most_documents = seq_len
        self._maskless = (
            documents
            and context.degree == 1
            and self.family.hands_on
            and not self.family.own_attention
            and self.architecture.latent is None
            and document_attention.applies(device, dtype)
        )
        if self.family.own_attention:
            self._attend_by(_CAPPED_ATTENTION, _softcap_attention)
        elif context.degree > 1:
            self._attend_by(_CONTEXT_ATTENTION, _over_context)
        elif self._maskless:
            self._attend_by(_DOCUMENT_ATTENTION, _within_documents)
        elif device.type == "cuda" and dtype == torch.float32:
            self._attend_by(_EQUAL_HEADS, _with_equal_heads)
        self._rotary: dict[tuple[str | None, int], Any] = {}
        self._masks: dict[int, Tensor] = {}
        self._of_starts: tuple[weakref.ref[Tensor] | None, dict[Any, Any]] = (None, {})
        """Values that layers share for the micro-batch whose documents begin there."""
        if documents:
            self._refuse_unknown_lengths()

    def _attend_by(self, name: str, attend: Callable[..., Any]) -> None:
        """Let the library's layers call this attention, by a name of ours."""
        from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds to import

        AttentionInterface.register(name, attend)
        self.config._attn_implementation = name

    def layer(self, name: str) -> nn.Module:
        """Return a layer on the meta device."""
        a = self.architecture
        if name == EMBEDDING:
            with torch.device("meta"):
                learned = a.positions == "learned"
                return LibraryEmbedding(
                    nn.Embedding(a.vocab_size, a.hidden_size, self._padding),
                    nn.Embedding(a.max_positions, a.hidden_size) if learned else None,
                    self._context,
                    scale=a.hidden_size**0.5
                    if self.family.scaled_embedding
                    else float(getattr(self.config, "embedding_multiplier", 1.0)),
                    rounded=self.family.scaled_embedding,
                )
        if name == HEAD:
            with torch.device("meta"):
                output = nn.Linear(a.hidden_size, a.vocab_size, bias=a.head_bias)
                cap = getattr(self.config, "final_logit_softcapping", None)
                divisor = float(getattr(self.config, "logits_scaling", 1.0))
                return Head(self._norm(), output, cap, divisor=divisor)
        index = _index(name)
        with torch.device("meta"):
            layer = getattr(self._modeling, self.family.classes + self.family.block)(
                self.config, index
            )
        if a.family == "gpt_oss":
            # The library's own adds biases in place to what selective recompute keeps.
            inner = layer.mlp.experts
            inner.forward = functools.partial(experts.mix_by_all_to_all, inner)
        if not self.family.hands_on and self._context.degree > 1:
            inner = layer.self_attn
            inner.forward = functools.partial(inner.forward, context=self._context)
        return LibraryBlock(
            layer, self._fixed_arguments(index), functools.partial(self._in_documents, index)
        )

    def configuration(self) -> str | None:
        """Return the library's configuration of the model that is trained."""
        settings = self.config.to_dict()
        settings["architectures"] = [f"{self.family.classes}ForCausalLM"]
        return json.dumps(settings, indent=2, default=str)

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Give the values that the library's `_init_weights` would draw."""
        std = self.config.initializer_range
        drawn = name.endswith(("sinks", "router.bias"))
        if name.endswith("bias") and not drawn:
            parameter.zero_()
        elif parameter.ndim == 1 and not drawn:
            parameter.fill_(0.0 if self.family.norms_add_one else 1.0)
        elif self.architecture.family in ("gpt2", "gpt_bigcode") and name.endswith("c_proj.weight"):
            # They scale what enters the residual stream.
            depth = 2 * self.architecture.layers
            parameter.normal_(0.0, std / depth**0.5, generator=generator)
        else:
            parameter.normal_(0.0, std, generator=generator)
            if name == "embedding.tokens.weight" and self._padding is not None:
                parameter[self._padding] = 0.0

    def tensor_plan(self, layer: str) -> Mapping[str, TensorStyle]:
        """Translate the library's own tensor-parallel plan."""
        if layer == EMBEDDING:
            return {"tokens": "vocabulary"}
        if layer == HEAD:
            return {"output": "logits"}
        mixed = self._has_experts(layer)
        latent = self.architecture.latent is not None
        result: dict[str, TensorStyle] = {}
        for path, style in (self.config.base_model_tp_plan or {}).items():
            module = path.removeprefix("layers.*.")
            if module == path or (mixed and module.startswith("mlp.")):
                continue
            if module.startswith(("mlp.experts", "mlp.shared_experts")) or (
                latent and module.startswith("self_attn.")
            ):
                continue
            if style not in _STYLES:
                raise LaunchError(
                    f"transformers asks to divide {path} '{style}', unknown here; "
                    "plan with --layout tp=1"
                )
            translated = _STYLES[style]
            if translated:
                result[f"layer.{module}"] = translated
            if translated == "columns":
                result[f"layer.{module.rpartition('.')[0]}"] = "gather"
        if latent:
            absent = "q_proj" if self.config.q_lora_rank else "q_b_proj"
            result |= {k: v for k, v in _LATENT_STYLES.items() if not k.endswith(f".{absent}")}
        if mixed:
            result |= {"layer.mlp": "mixture", "layer.mlp.experts": "experts"}
            result |= self._shared_styles()
        return result

    def _shared_styles(self) -> dict[str, TensorStyle]:
        """Return the styles of experts that all tokens go to, whose outputs stay partial."""
        routed = self.architecture.experts
        if routed is None or not (routed.shared or routed.shared_ffn_size):
            return {}
        shared = "shared_expert" if self.architecture.family == "qwen2_moe" else "shared_experts"
        return {
            f"layer.mlp.{shared}.gate_proj": "columns",
            f"layer.mlp.{shared}.up_proj": "columns",
            f"layer.mlp.{shared}.down_proj": "part",
        }

    def published_name(self, name: str) -> str:
        """Return the library's own name, as in published checkpoints."""
        family = self.family
        if name in self.tied_names or name.startswith("embedding.tokens"):
            return f"{family.prefix}.{family.embedding}.weight"
        if name.startswith("embedding.positions"):
            return f"{family.prefix}.wpe.weight"
        if name.startswith("head.norm."):
            return f"{family.prefix}.{family.norm}.{name.removeprefix('head.norm.')}"
        if name.startswith("head.output."):
            return f"lm_head.{name.removeprefix('head.output.')}"
        layer = re.fullmatch(r"block\.(\d+)\.layer\.(.+)", name)
        assert layer is not None, name
        return f"{family.prefix}.{family.layers}.{layer[1]}.{layer[2]}"

    def pieces(self, name: str) -> int:
        """Experts keep their gate and up projections in one parameter [expert, 2 ffn, hidden]."""
        transposed = self.architecture.family == "gpt_oss"
        return 2 if name.endswith("experts.gate_up_proj") and not transposed else 1

    @property
    def _padding(self) -> int | None:
        """The token whose vector learns nothing where it is read; GPT-2 has none."""
        none = self.architecture.positions == "learned"
        return None if none else getattr(self.config, "pad_token_id", None)

    def _has_experts(self, layer: str) -> bool:
        routed = self.architecture.experts
        return routed is not None and _index(layer) >= routed.dense_layers

    def _norm(self) -> nn.Module:
        epsilon = getattr(self.config, self.family.norm_epsilon)
        if self.architecture.norm == "layer" and not self.family.norm_class:
            return nn.LayerNorm(self.architecture.hidden_size, eps=epsilon)
        kind = self.family.norm_class or f"{self.family.classes}RMSNorm"
        norm: nn.Module = getattr(self._modeling, kind)(self.architecture.hidden_size, eps=epsilon)
        return norm

    def _rotary_table(self, index: int, *, length: int | None = None) -> Any:
        """Return what a block rotates by in a sequence of `length`: cosines and sines, or both.

        The length is that of the sample unless it is given; some tables depend on it.
        """
        kind = self._rotary_kind(index)
        length = length or self._seq_len
        if (kind, length) not in self._rotary:
            rotary = getattr(self._modeling, f"{self.family.classes}RotaryEmbedding")(self.config)
            positions = torch.arange(length).unsqueeze(0)
            like = torch.zeros(1, dtype=self._dtype)
            table = rotary(like, positions, *([kind] if kind else []))
            self._rotary[kind, length] = tree_map(lambda part: part[0].to(self._device), table)
        return self._rotary[kind, length]

    def _rotary_kind(self, index: int) -> str | None:
        """Return the kind of a block's attention where angles depend on it."""
        return self.config.layer_types[index] if self.family.rotary_of_type else None

    def _short_length(self, index: int) -> int | None:
        """Return up to which length documents turn by other angles than a whole sample.

        None where all angles are those of the sample's length.
        """
        kind = self._rotary_kind(index)
        rope = self.config.rope_parameters[kind] if kind else self.config.rope_parameters
        match rope.get("rope_type"):
            case "longrope":
                limit: int = rope["original_max_position_embeddings"]
            case "dynamic":
                limit = self.config.max_position_embeddings
            case _:
                return None
        return limit if limit < self._seq_len else None

    def _refuse_unknown_lengths(self) -> None:
        """Refuse documents whose angles depend on what is not known where they are needed."""
        if self.architecture.positions != "rotary":
            return
        for index in range(self.architecture.layers):
            limit = self._short_length(index)
            if limit is None:
                continue
            kind = self._rotary_kind(index)
            rope = self.config.rope_parameters[kind] if kind else self.config.rope_parameters
            what = f"rope_type {rope['rope_type']} turns by angles of each document's length"
            if rope["rope_type"] == "dynamic":
                raise LaunchError(
                    f"{self.model.name}: {what} beyond {limit} positions, which samples of "
                    f"several documents have not; plan with seq_len <= {limit}"
                )
            if self._context.degree > 1:
                raise LaunchError(
                    f"{self.model.name}: {what}, which context-parallel ranks do not know; plan "
                    f"with context=1, or with seq_len <= {limit}"
                )

    def _rotary_at(self, index: int, starts: Tensor) -> Any:
        """Return what a block rotates by where documents begin at `starts`, each by itself."""
        table, positions = self._rotary_table(index), self._held - starts
        limit = self._short_length(index)
        if limit is None:
            return tree_map(lambda part: part[positions], table)
        short = self._rotary_table(index, length=limit)
        is_long = document_attention.lengths(starts) > limit
        inside = positions.clamp(max=limit - 1)

        def chosen(whole: Tensor, part: Tensor) -> Tensor:
            return torch.where(is_long.unsqueeze(-1), whole[positions], part[inside])

        return tree_map(chosen, table, short)

    def _fixed_arguments(self, index: int) -> dict[str, Any]:
        has_own_attention = self.family.own_attention  # which is told its window, and makes no mask
        mask = None if has_own_attention else self._mask(index)
        fixed: dict[str, Any] = {"use_cache": False, "attention_mask": mask}
        if self.architecture.positions == "rotary":
            table = self._rotary_table(index)
            fixed["position_embeddings"] = tree_map(
                lambda part: part[self._held].unsqueeze(0), table
            )
        if self._context.degree > 1 or has_own_attention:
            fixed["context"] = self._context
        return fixed

    def _in_documents(self, index: int, starts: Tensor) -> dict[str, Any]:
        """Return the `_fixed_arguments` that change: positions from `starts`, hidden keys.

        Kernels get the ends of documents, where they take them.  Else a mask is written out,
        [sample, 1, query, key], once for all layers of a micro-batch that are alike, and in the
        type of activations: what torch would make of booleans in each layer would be saved for
        backward by each.
        """
        positions = self._held
        changed: dict[str, Any] = {}
        if self.architecture.positions == "rotary":
            changed["position_embeddings"] = self._once(
                starts,
                ("positions", self._rotary_kind(index)),
                lambda: self._rotary_at(index, starts),
            )
        if self.family.own_attention:
            return changed | {"starts": starts}
        window = self._window(index)
        if self._maskless and not window:
            ends = self._once(
                starts,
                ("ends", self.most_documents),
                lambda: document_attention.ends_of(starts, self.most_documents),
            )
            return changed | {"document_ends": ends}

        def seen_keys() -> Tensor:
            keys = torch.arange(self._seq_len, device=starts.device)
            first = torch.maximum(starts, positions - window + 1) if window else starts
            hidden = (keys > positions[:, None]) | (keys < first[:, :, None])
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=starts.device)
            return mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)

        return changed | {"attention_mask": self._once(starts, ("mask", window), seen_keys)}

    def _once(self, starts: Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """Return what is made of `starts`, from the first layer of its micro-batch that asked."""
        of, tables = self._of_starts
        if of is None or of() is not starts:
            tables = {}
            self._of_starts = (weakref.ref(starts), tables)
        if key not in tables:
            tables[key] = unseen_by_recompute(make)
        return tables[key]

    def _window(self, index: int) -> int:
        """Return how many keys a query of a block sees, its own among them; 0 is all."""
        types = getattr(self.config, "layer_types", None)
        if types is not None and types[index] != "sliding_attention":
            return 0
        window = getattr(self.config, "sliding_window", None) or 0
        return window if window < self._seq_len else 0

    def _mask(self, index: int) -> Tensor | None:
        """Return which keys [1, 1, query, key] a sliding layer sees; None is plain causal."""
        window = self._window(index)
        if not window:
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


def _with_equal_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention as `_over_context`, in 32 bits on a device.

    Fused kernels take groups of heads in 16 bits alone; without one there would be scores of every
    pair of positions in memory.
    """
    if key.shape[1] < query.shape[1]:
        key, value = for_each_query_head(query, key, value)
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
    )
    return mixed.transpose(1, 2).contiguous(), None


def _within_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_ends: Tensor | None = None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention as `_over_context`; layers that see a window of keys have a mask."""
    if document_ends is not None:
        mixed = document_attention.attention(query, key, value, document_ends, scale=scaling)
    else:
        key, value = for_each_query_head(query, key, value)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    return mixed.transpose(1, 2).contiguous(), None


def _softcap_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Context,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    starts: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention with soft-capped scores or sinks, called and answering as `_over_context`."""
    mixed = capped.attention(
        query,
        key,
        value,
        context,
        scale=scaling,
        cap=softcap or 0.0,
        window=sliding_window or 0,
        sinks=s_aux,
        starts=starts,
    )
    return mixed.transpose(1, 2).contiguous(), None


def _index(layer: str) -> int:
    """Return which block a layer's name means."""
    return int(layer.rpartition(".")[2])
