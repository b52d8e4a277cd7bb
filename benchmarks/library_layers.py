"""Layers of `transformers` models that the runtime does not train, as a chain of like kinds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.model import Architecture
from runtime.adapter import TensorStyle

SAMPLES = 2
"""In a micro-batch."""
CLASSES = {
    "bert": "Bert",
    "bloom": "Bloom",
    "deepseek_v3": "DeepseekV3",
    "falcon": "Falcon",
    "gemma2": "Gemma2",
    "gpt_neox": "GPTNeoX",
    "opt": "OPT",
    "vit": "ViT",
}
"""Prefix of the library's classes."""


class Alone(nn.Module):
    """A module called with fixed arguments beside its input."""

    def __init__(self, module: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.module = module
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's first output."""
        out = self.module(x, **self.fixed)
        return out[0] if isinstance(out, tuple) else out


class Whole(nn.Module):
    """Modules, and a function of them and the input that is the layer."""

    def __init__(self, run: Callable[..., Tensor], **modules: nn.Module | None) -> None:
        super().__init__()
        self.run = run
        self.parts = nn.ModuleDict({name: m for name, m in modules.items() if m is not None})

    def forward(self, x: Tensor) -> Tensor:
        """Return what the function makes."""
        return self.run(self.parts, x)


def layers_of(
    a: Architecture, config: Mapping[str, Any], kinds: Mapping[str, int], *, seq_len: int
) -> dict[str, nn.Module]:
    """Return one module of each kind; `kinds` says which block is the first of its kind."""
    from transformers import AttentionInterface, AutoConfig  # noqa: PLC0415 - seconds to import
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    # What embeds and projects is taken out of a whole model with as few blocks as there are kinds.
    settings = AutoConfig.for_model(**config, bos_token_id=None, eos_token_id=None)
    settings._attn_implementation = "sdpa"
    if a.latent is not None:
        AttentionInterface.register(_FUSED, _fused)
        settings._attn_implementation = _FUSED
    if a.family == "gemma2":
        settings.attn_logit_softcapping = None  # fused kernels cap scores in passing
    settings.use_cache = False
    if a.experts is not None:
        settings._experts_implementation = "grouped_mm"
    for name in dir(settings):
        if "drop" in name and isinstance(getattr(settings, name), float):
            setattr(settings, name, 0.0)
    modeling = importlib.import_module(f"transformers.models.{a.family}.modeling_{a.family}")
    with no_init_weights():  # values are not there to be drawn
        return _LAYERS[a.family](a, modeling, settings, kinds, seq_len)


_FUSED = "meshwright_fused"


def _fused(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """Fused causal attention of heads whose values are narrower than their keys.

    torch has that kernel for CUDA alone; tensors without data need none.
    """
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out = kernel(query, key, value, None, True, 0.0, True, scale=settings["scaling"])[0]
    return out.transpose(1, 2).contiguous(), None


def _rotary(modeling: Any, prefix: str, settings: Any, seq_len: int) -> tuple[Tensor, Tensor]:
    table = getattr(modeling, f"{prefix}RotaryEmbedding")(settings)
    cos, sin = table(torch.zeros(1, dtype=torch.bfloat16), torch.arange(seq_len).unsqueeze(0))
    return cos, sin


def _sliding_mask(seq_len: int, window: int) -> Tensor:
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    return ((distance >= 0) & (distance < window))[None, None]


def _like_llama(
    a: Architecture, modeling: Any, settings: Any, kinds: Mapping[str, int], seq_len: int
) -> dict[str, nn.Module]:
    prefix = CLASSES[a.family]
    rotary = _rotary(modeling, prefix, settings, seq_len)
    result: dict[str, nn.Module] = {}
    tokens = nn.Embedding(a.vocab_size, a.hidden_size)
    if a.family == "gemma2":
        tokens = modeling.Gemma2TextScaledWordEmbedding(
            a.vocab_size, a.hidden_size, None, embed_scale=a.hidden_size**0.5
        )
    result["embedding"] = tokens
    for kind, index in kinds.items():
        mask = _sliding_mask(seq_len, a.sliding_window) if kind == "local_block" else None
        layer = getattr(modeling, f"{prefix}DecoderLayer")(settings, index)
        result[kind] = Alone(layer, position_embeddings=rotary, attention_mask=mask)
    output = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
    if a.tied_embeddings:
        output.weight = tokens.weight
    cap = getattr(settings, "final_logit_softcapping", None)

    def head(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        logits = parts["output"](parts["norm"](x))
        return torch.tanh(logits / cap) * cap if cap else logits

    norm = getattr(modeling, f"{prefix}RMSNorm")(a.hidden_size, eps=settings.rms_norm_eps)
    result["head"] = Whole(head, norm=norm, output=output)
    return result


def _opt(
    a: Architecture, modeling: Any, settings: Any, kinds: Mapping[str, int], seq_len: int
) -> dict[str, nn.Module]:
    settings.num_hidden_layers = 1
    model = modeling.OPTForCausalLM(settings)
    model.tie_weights()
    decoder = model.model.decoder
    block = decoder.layers[0]
    block.fc1, block.fc2 = Samples(block.fc1, SAMPLES), Samples(block.fc2, SAMPLES)
    positions = torch.arange(seq_len).unsqueeze(0)

    def embed(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        tokens, where = parts["tokens"](x), parts["positions"](None, position_ids=positions)
        return (parts["project"](tokens) if "project" in parts else tokens) + where

    def head(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        for name in ("norm", "project"):
            if name in parts:
                x = parts[name](x)
        return parts["output"](x)

    return {
        "embedding": Whole(
            embed,
            tokens=decoder.embed_tokens,
            project=decoder.project_in,
            positions=decoder.embed_positions,
        ),
        "block": Alone(block, attention_mask=None),
        "head": Whole(
            head, norm=decoder.final_layer_norm, project=decoder.project_out, output=model.lm_head
        ),
    }


def _bert(
    a: Architecture, modeling: Any, settings: Any, kinds: Mapping[str, int], seq_len: int
) -> dict[str, nn.Module]:
    settings.num_hidden_layers = 1
    model = modeling.BertForMaskedLM(settings)
    model.tie_weights()
    return {
        "embedding": model.bert.embeddings,
        "block": Alone(model.bert.encoder.layer[0], attention_mask=None),
        "head": model.cls,
    }


def _vit(
    a: Architecture, modeling: Any, settings: Any, kinds: Mapping[str, int], seq_len: int
) -> dict[str, nn.Module]:
    settings.num_hidden_layers = 1
    settings.num_labels = a.classes
    model = modeling.ViTForImageClassification(settings)
    return {
        "embedding": model.vit.embeddings,
        "block": Alone(model.vit.layers[0], attention_mask=None),
        "head": Whole(
            lambda parts, x: parts["output"](parts["norm"](x)[:, 0, :]),
            norm=model.vit.layernorm,
            output=model.classifier,
        ),
    }


def styles_of(a: Architecture, kind: str) -> dict[str, TensorStyle] | None:
    """Return how tensor parallelism treats the modules of a layer; None where it cannot.

    A ViT's positions are odd in number, so that ranks cannot share them alike.
    """
    if a.family == "vit":
        return None
    if kind == "embedding":
        # BERT and OPT add what they look up for all positions to what a rank has of the tokens.
        return None if a.family in ("bert", "opt") else {"": "vocabulary"}
    if kind == "head":
        # BERT's transform runs on all positions, and what is behind it does not gather again;
        # OPT-350M projects down in front.
        return None if a.family == "bert" or a.embedding_size else {"parts.output": "logits"}
    return {f"module.{path}": style for path, style in _BLOCK_STYLES[a.family](kind).items()}


def _llama_styles(kind: str) -> dict[str, TensorStyle]:
    result: dict[str, TensorStyle] = {"self_attn": "gather", "self_attn.o_proj": "rows"}
    result |= {f"self_attn.{name}_proj": "columns" for name in "qkv"}
    return result | _gated_styles("mlp")


def _gated_styles(path: str) -> dict[str, TensorStyle]:
    return {
        path: "gather",
        f"{path}.gate_proj": "columns",
        f"{path}.up_proj": "columns",
        f"{path}.down_proj": "rows",
    }


def _deepseek_styles(kind: str) -> dict[str, TensorStyle]:
    result: dict[str, TensorStyle] = {
        "self_attn": "gather",
        "self_attn.q_b_proj": "columns",
        "self_attn.kv_b_proj": "columns",
        "self_attn.o_proj": "rows",
    }
    if kind == "dense_block":
        return result | _gated_styles("mlp")
    return result | {
        "mlp": "mixture",
        "mlp.experts": "experts",
        "mlp.shared_experts.gate_proj": "columns",
        "mlp.shared_experts.up_proj": "columns",
        "mlp.shared_experts.down_proj": "part",
    }


def _bert_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "attention.self": "gather",
        "attention.self.query": "columns",
        "attention.self.key": "columns",
        "attention.self.value": "columns",
        "attention.output.dense": "rows",
        "intermediate": "gather",
        "intermediate.dense": "columns",
        "output.dense": "rows",
    }


def _opt_styles(kind: str) -> dict[str, TensorStyle]:
    return {
        "self_attn": "gather",
        "self_attn.q_proj": "columns",
        "self_attn.k_proj": "columns",
        "self_attn.v_proj": "columns",
        "self_attn.out_proj": "rows",
        "fc1.inner": "gather",
        "fc1.inner.0": "columns",
        "fc2.inner.0": "rows",
    }


_BLOCK_STYLES: dict[str, Callable[[str], dict[str, TensorStyle]]] = {
    "bert": _bert_styles,
    "deepseek_v3": _deepseek_styles,
    "gemma2": _llama_styles,
    "opt": _opt_styles,
}


class Samples(nn.Module):
    """A Linear of OPT's MLP, whose block flattens samples and positions, on both apart."""

    def __init__(self, linear: nn.Linear, samples: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear)
        self.samples = samples

    def forward(self, x: Tensor) -> Tensor:
        """Return rows again."""
        return self.inner(x.unflatten(0, (self.samples, -1))).flatten(0, 1)


def loss_of(a: Architecture) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a batch's outputs, in fp32."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        if a.classes:
            return functional.cross_entropy(output.float(), targets[:, 0])
        return functional.cross_entropy(output.float().flatten(0, 1), targets.flatten())

    return loss


_LAYERS: dict[str, Callable[..., dict[str, nn.Module]]] = {
    "bert": _bert,
    "deepseek_v3": _like_llama,
    "gemma2": _like_llama,
    "opt": _opt,
    "vit": _vit,
}
