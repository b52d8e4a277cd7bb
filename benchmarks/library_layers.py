"""Layers of `transformers` models that the runtime does not train, as a chain of like kinds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.architectures.parameters import slides
from meshwright.planner.documents.model import Architecture

SAMPLES = 2
"""In a micro-batch."""
CLASSES = {
    "bert": "Bert",
    "bloom": "Bloom",
    "cohere": "Cohere",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "falcon": "Falcon",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "gpt_neox": "GPTNeoX",
    "opt": "OPT",
    "gpt2": "GPT2",
    "gptj": "GPTJ",
    "glm4_moe": "Glm4Moe",
    "gpt_bigcode": "GPTBigCode",
    "granite": "Granite",
    "mpt": "Mpt",
    "nemotron": "Nemotron",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2_moe": "Qwen2Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "starcoder2": "Starcoder2",
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
    a: Architecture,
    config: Mapping[str, Any],
    kinds: Mapping[str, int],
    *,
    seq_len: int,
    tensor: int = 1,
) -> dict[str, nn.Module]:
    """Return one module of each kind; `kinds` says which block is the first of its kind.

    Modules are whole; `tensor` says of how many ranks one is to run them, where what they are
    called with depends on it.
    """
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
    name = a.family.removesuffix("_text")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    with no_init_weights():  # values are not there to be drawn
        return _LAYERS[a.family](a, modeling, settings, kinds, seq_len, tensor)


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


def _rotary(modeling: Any, prefix: str, settings: Any, seq_len: int, kind: str) -> Any:
    """Return what a block rotates by: cosines and sines, or both in one (DeepSeek-V2)."""
    table = getattr(modeling, f"{prefix}RotaryEmbedding")(settings)
    sliding = {"layer_type": "sliding_attention" if slides(kind) else "full_attention"}
    told = sliding if prefix == "Gemma3" else {}
    places = torch.arange(seq_len).unsqueeze(0)
    return table(torch.zeros(1, dtype=torch.bfloat16), places, **told)


def _sliding_mask(seq_len: int, window: int) -> Tensor:
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    return ((distance >= 0) & (distance < window))[None, None]


def _like_llama(
    a: Architecture,
    modeling: Any,
    settings: Any,
    kinds: Mapping[str, int],
    seq_len: int,
    tensor: int,
) -> dict[str, nn.Module]:
    prefix = CLASSES[a.family]
    result: dict[str, nn.Module] = {}
    tokens = nn.Embedding(a.vocab_size, a.hidden_size)
    if a.family == "gemma2":
        tokens = modeling.Gemma2TextScaledWordEmbedding(
            a.vocab_size, a.hidden_size, None, embed_scale=a.hidden_size**0.5
        )
    result["embedding"] = tokens
    for kind, index in kinds.items():
        mask = _sliding_mask(seq_len, a.sliding_window) if slides(kind) else None
        layer = getattr(modeling, f"{prefix}DecoderLayer")(settings, index)
        rotary = _rotary(modeling, prefix, settings, seq_len, kind)
        result[kind] = Alone(layer, position_embeddings=rotary, attention_mask=mask)
    output = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
    if a.tied_embeddings:
        output.weight = tokens.weight
    cap = getattr(settings, "final_logit_softcapping", None)
    scale = getattr(settings, "logit_scale", None) if a.family == "cohere" else None

    def head(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        logits = parts["output"](parts["norm"](x))
        if scale is not None:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    if a.family == "cohere":
        norm = modeling.CohereLayerNorm(a.hidden_size, eps=settings.layer_norm_eps)
        cap = None
    elif a.family == "nemotron":
        norm = modeling.NemotronLayerNorm1P(a.hidden_size, eps=settings.norm_eps)
    elif a.family == "starcoder2":
        norm = nn.LayerNorm(a.hidden_size, eps=settings.norm_epsilon)
    else:
        norm = getattr(modeling, f"{prefix}RMSNorm")(a.hidden_size, eps=settings.rms_norm_eps)
    result["head"] = Whole(head, norm=norm, output=output)
    return result


def _opt(
    a: Architecture,
    modeling: Any,
    settings: Any,
    kinds: Mapping[str, int],
    seq_len: int,
    tensor: int,
) -> dict[str, nn.Module]:
    settings.num_hidden_layers = 1
    model = modeling.OPTForCausalLM(settings)
    model.tie_weights()
    decoder = model.model.decoder
    block = decoder.layers[0]
    block.fc1, block.fc2 = Samples(block.fc1, SAMPLES), Samples(block.fc2, SAMPLES)
    positions = torch.arange(seq_len // tensor).unsqueeze(0)

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
    a: Architecture,
    modeling: Any,
    settings: Any,
    kinds: Mapping[str, int],
    seq_len: int,
    tensor: int,
) -> dict[str, nn.Module]:
    settings.num_hidden_layers = 1
    model = modeling.BertForMaskedLM(settings)
    model.tie_weights()
    own = model.bert.embeddings
    places = torch.arange(seq_len // tensor).unsqueeze(0)

    def embed(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        types = parts["types"](torch.zeros_like(x[:, : x.shape[1] // tensor]))
        return parts["norm"](parts["tokens"](x) + types + parts["positions"](places))

    divided = Whole(
        embed,
        tokens=own.word_embeddings,
        types=own.token_type_embeddings,
        positions=own.position_embeddings,
        norm=own.LayerNorm,
    )
    return {
        # Whole, it is the library's own; divided, its parts on a rank's positions.
        "embedding": divided if tensor > 1 else own,
        "block": Alone(model.bert.encoder.layer[0], attention_mask=None),
        "head": Whole(
            lambda parts, x: parts["output"](parts["transform"](x)),
            transform=model.cls.predictions.transform,
            output=model.cls.predictions.decoder,
        ),
    }


def _vit(
    a: Architecture,
    modeling: Any,
    settings: Any,
    kinds: Mapping[str, int],
    seq_len: int,
    tensor: int,
) -> dict[str, nn.Module]:
    settings.num_hidden_layers = 1
    settings.num_labels = a.classes
    model = modeling.ViTForImageClassification(settings)
    blocks = {} if tensor > 1 else {"embedding": model.vit.embeddings}
    return blocks | {
        "block": Alone(model.vit.layers[0], attention_mask=None),
        "head": Whole(
            lambda parts, x: parts["output"](parts["norm"](x)[:, 0, :]),
            norm=model.vit.layernorm,
            output=model.classifier,
        ),
    }


def _gpt2(
    a: Architecture,
    modeling: Any,
    settings: Any,
    kinds: Mapping[str, int],
    seq_len: int,
    tensor: int,
) -> dict[str, nn.Module]:
    """GPT-2 with Linears for its Conv1Ds, whose weights lie the other way round."""
    tokens, places = nn.Embedding(a.vocab_size, a.hidden_size), torch.arange(seq_len // tensor)
    output = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
    output.weight = tokens.weight
    block = getattr(modeling, f"{CLASSES[a.family]}Block")(settings, 0)
    for module in (block.attn, block.mlp):
        for name, part in list(module.named_children()):
            if type(part).__name__ == "Conv1D":
                inner, outer = part.weight.shape
                setattr(module, name, nn.Linear(inner, outer))
    return {
        "embedding": Whole(
            lambda parts, x: parts["tokens"](x) + parts["positions"](places.unsqueeze(0)),
            tokens=tokens,
            positions=nn.Embedding(a.max_positions, a.hidden_size),
        ),
        "block": Alone(block, attention_mask=None),
        "head": Whole(
            lambda parts, x: parts["output"](parts["norm"](x)),
            norm=nn.LayerNorm(a.hidden_size),
            output=output,
        ),
    }


def _side_by_side(
    a: Architecture,
    modeling: Any,
    settings: Any,
    kinds: Mapping[str, int],
    seq_len: int,
    tensor: int,
) -> dict[str, nn.Module]:
    """Falcon, GPT-NeoX, GPT-J, Bloom and MPT: blocks of their own between like ends."""
    tokens = nn.Embedding(a.vocab_size, a.hidden_size)
    output = nn.Linear(a.hidden_size, a.vocab_size, bias=a.head_bias)
    if a.tied_embeddings:
        output.weight = tokens.weight
    result: dict[str, nn.Module] = {"embedding": tokens}
    if a.embedding_norm:
        result["embedding"] = Whole(
            lambda parts, x: parts["norm"](parts["tokens"](x)),
            tokens=tokens,
            norm=nn.LayerNorm(a.hidden_size),
        )
    block, fixed = _block_of(a, modeling, settings, seq_len, tensor)
    result["block"] = Alone(block, **fixed)
    result["head"] = Whole(
        lambda parts, x: parts["output"](parts["norm"](x)),
        norm=nn.LayerNorm(a.hidden_size, bias=a.norm_bias),
        output=output,
    )
    return result


def _block_of(
    a: Architecture, modeling: Any, settings: Any, seq_len: int, tensor: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a block and what it is called with beside its input."""
    mask = torch.zeros(1, 1, seq_len, seq_len, dtype=torch.bfloat16)
    if a.family in ("gpt_neox", "falcon", "phi"):
        block = "Layer" if a.family == "gpt_neox" else "DecoderLayer"
        rotary = _rotary(modeling, CLASSES[a.family], settings, seq_len, "block")
        fixed: dict[str, Any] = {"attention_mask": None, "position_embeddings": rotary}
        if a.family == "falcon":
            fixed["alibi"] = None
        return getattr(modeling, CLASSES[a.family] + block)(settings, 0), fixed
    settings._attn_implementation = "eager"
    if a.family == "gptj":
        positions = torch.arange(seq_len).unsqueeze(0)
        return modeling.GPTJBlock(settings, 0), {"attention_mask": mask, "position_ids": positions}
    if a.family == "bloom":
        bias = torch.zeros(SAMPLES * a.heads // tensor, 1, seq_len, dtype=torch.bfloat16)
        return modeling.BloomBlock(settings, 0), {"attention_mask": mask, "alibi": bias}
    bias = torch.zeros(a.heads // tensor, 1, seq_len, dtype=torch.bfloat16)
    return modeling.MptBlock(settings, 0), {"attention_mask": mask > 0, "position_bias": bias}


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
    "deepseek_v2": _like_llama,
    "deepseek_v3": _like_llama,
    "gemma": _like_llama,
    "gemma2": _like_llama,
    "gemma3_text": _like_llama,
    "glm4_moe": _like_llama,
    "granite": _like_llama,
    "nemotron": _like_llama,
    "phi": _side_by_side,
    "phi3": _like_llama,
    "qwen2_moe": _like_llama,
    "seed_oss": _like_llama,
    "smollm3": _like_llama,
    "starcoder2": _like_llama,
    "bloom": _side_by_side,
    "cohere": _like_llama,
    "falcon": _side_by_side,
    "gpt_neox": _side_by_side,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gptj": _side_by_side,
    "mpt": _side_by_side,
    "opt": _opt,
    "vit": _vit,
}
