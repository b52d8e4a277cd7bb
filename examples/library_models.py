"""BERT, ViT, T5, Whisper and Mamba-2 as transformers has them, trained under any plan.

    python examples/library_models.py whisper --plan plan.yaml pipeline=2
    meshwright run --plan plan.yaml examples/library_models.py whisper
    torchrun --nproc-per-node=2 examples/library_models.py whisper zero=3

A model needs three functions: one that builds it, one that gives a batch, and a loss that returns
its sum and over how many targets it is.  Whatever of a batch is named `targets` is the loss's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import meshwright

STEPS, SAMPLES, LENGTH, WORDS, MASK, LABELS, FRAMES = 4, 8, 6, 32, 1, 5, 12
Batch = dict[str, Tensor]
Trained = tuple[list[float], dict[str, Tensor]]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert() -> nn.Module:
    """Return a masked language model, its decoder tied to its embedding."""
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=16, **SIZES)
    return transformers.BertForMaskedLM(config)


def masked_texts(generator: torch.Generator) -> Batch:
    """Return padded texts, some words of which are masked; of some texts none."""
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    read = torch.arange(LENGTH) < torch.randint(2, LENGTH, (SAMPLES, 1), generator=generator)
    masked = read & (torch.rand(ids.shape, generator=generator) < 0.4)
    return {
        "input_ids": ids.masked_fill(masked, MASK),
        "attention_mask": read.long(),
        "targets": ids.masked_fill(~masked, -100),
    }


def vit() -> nn.Module:
    """Return a classifier of pictures."""
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=LABELS, **SIZES)
    return transformers.ViTForImageClassification(config)


def pictures(generator: torch.Generator) -> Batch:
    """Return pictures and their classes."""
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 8, 8, generator=generator),
        "targets": torch.randint(LABELS, (SAMPLES,), generator=generator),
    }


def t5() -> nn.Module:
    """Return an encoder and a decoder, which read one embedding."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def translations(generator: torch.Generator) -> Batch:
    """Return texts and their translations, which the decoder reads one word behind."""
    target = torch.randint(3, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    return {
        "input_ids": torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator),
        "decoder_input_ids": target[:, :-1],
        "targets": target[:, 1:],
    }


def whisper() -> nn.Module:
    """Return an encoder of sound and a decoder of words."""
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def speech(generator: torch.Generator) -> Batch:
    """Return spectra [sample, mel, frame] and the words that are said in them."""
    words = torch.randint(3, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    return {
        "input_features": torch.randn(SAMPLES, 8, FRAMES, generator=generator),
        "decoder_input_ids": words[:, :-1],
        "targets": words[:, 1:],
    }


def mamba2() -> nn.Module:
    """Return a language model of state-space layers, without attention."""
    config = transformers.Mamba2Config(
        vocab_size=WORDS,
        hidden_size=16,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=2,
        num_hidden_layers=2,
        chunk_size=4,
        use_cache=False,
    )
    return transformers.Mamba2ForCausalLM(config)


def texts(generator: torch.Generator) -> Batch:
    """Return texts; each position's target is the next word."""
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained, and on what."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step."""
        return self.draw(torch.Generator().manual_seed(step))


MODELS = {
    "bert": Model(bert, masked_texts),
    "vit": Model(vit, pictures),
    "t5": Model(t5, translations),
    "whisper": Model(whisper, speech),
    "mamba2": Model(mamba2, texts),
}


def inputs(batch: Batch) -> Batch:
    """Return what the model reads of a batch."""
    return {name: value for name, value in batch.items() if name != "targets"}


def loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed loss of all targets but those of -100, and how many they are."""
    logits, targets = outputs.logits.flatten(0, -2), batch["targets"].flatten()
    return functional.cross_entropy(logits, targets, reduction="sum"), (targets >= 0).sum()


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


def plain(name: str) -> Trained:
    """Train in one process with nothing but transformers and torch."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = MODELS[name].batch(step)
        total, count = loss(model(**inputs(batch)), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total.detach() / count).item())
    return losses, {key: weight.detach() for key, weight in model.named_parameters()}


def train(name: str, plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank; None is that of `meshwright run`, or replicas."""
    engine = meshwright.Engine(
        MODELS[name].build,
        plan,
        loss=loss,
        optimizer=adamw,
        batch=MODELS[name].batch(0),
        inputs=inputs,
    )
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(MODELS[name].batch(step)))
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f} of {result.count:.0f} targets")
    return losses, engine.state_dict()


def planned(name: str, fixed: Mapping[str, int]) -> Any:
    """Return the fastest plan on two processes of this machine, some of its settings fixed."""
    return meshwright.plan(
        MODELS[name].build,
        "local:2",
        batch=MODELS[name].batch(0),
        loss=loss,
        optimizer=adamw,
        inputs=inputs,
        global_batch=SAMPLES,
        fix=[f"{key}={value}" for key, value in fixed.items()],
    )


def main() -> None:
    """Train, or with `--plan FILE` write the plan; `pipeline=2` and the like are settings."""
    name, *words = sys.argv[1:]
    pairs = (word.partition("=") for word in words if "=" in word)
    settings = {key: int(value) for key, _, value in pairs}
    if "--plan" not in words:
        train(name, settings or None)
        return
    plan = planned(name, settings)
    meshwright.save(plan, words[words.index("--plan") + 1])
    print(meshwright.predict(plan).step_time_s)


if __name__ == "__main__":
    main()
