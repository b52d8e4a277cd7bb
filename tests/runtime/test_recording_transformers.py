"""Models of transformers are recorded as they are, and replayed bit by bit in two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.tracer import Recorder

TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False
        )
    )


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=32,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
        )
    )


def clip() -> nn.Module:
    text = {key: value for key, value in TEXT.items() if key != "use_cache"}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)
    )


def convnext() -> nn.Module:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 2], num_stages=2)
    )


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False
        )
    )


def of_text(model: str, config: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        settings = getattr(transformers, config)(**{**TEXT, **changes})
        made: nn.Module = getattr(transformers, model)(settings)
        return made

    return build


def text() -> dict[str, Tensor]:
    seen = torch.arange(8) < torch.randint(3, 9, (2, 1))
    return {"input_ids": torch.randint(3, 32, (2, 8)), "attention_mask": seen.long()}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 32, (2, 8))}


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "bert": (of_text("BertForMaskedLM", "BertConfig"), text),
    "llama": (of_text("LlamaForCausalLM", "LlamaConfig"), text),
    "gpt2": (gpt2, text),
    "qwen3": (of_text("Qwen3ForCausalLM", "Qwen3Config"), text),
    "gemma3": (of_text("Gemma3ForCausalLM", "Gemma3TextConfig"), text),
    "vit": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)),
        pictures,
    ),
    "t5": (t5, lambda: {**text(), "decoder_input_ids": torch.randint(3, 32, (2, 6))}),
    "whisper": (
        whisper,
        lambda: {
            "input_features": torch.randn(2, 8, 32),
            "decoder_input_ids": torch.randint(3, 32, (2, 6)),
        },
    ),
    "clip": (clip, lambda: {**text(), **pictures()}),
    "convnext": (convnext, pictures),
    "mamba": (mamba, tokens),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", MODELS)
def test_two_stages_equal_the_model(family: str) -> None:
    torch.manual_seed(0)
    build, example = MODELS[family]
    model = build().eval()
    recorder = Recorder(model, example())
    count = len(recorder.first.layers)
    stages = [
        RecordedStage(model, recorder, first, last).eval()
        for first, last in ((0, count // 2), (count // 2, count))
    ]
    batch = example()

    hidden = stages[0](micro=MicroBatch(batch))
    replayed = tree_leaves(stages[1](*hidden, micro=MicroBatch(batch)))

    assert count >= 3
    for one, other in zip(replayed, tree_leaves(model(**batch)), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
