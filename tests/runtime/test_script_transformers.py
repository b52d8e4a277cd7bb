"""Models of transformers that are no causal language models train from a script like a plain loop.

The plain loop knows nothing of the project: the library's own class, loss and torch's SGD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from runtime.engine import Engine
from tests.parts import some_and_others
from tests.runtime.ranks import on_ranks

SAMPLES, LENGTH, WORDS, STEPS = 8, 6, 32, 3
LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch": 4},
    {"micro_batch": 2, "zero": 3, "recompute": "full"},
    {"micro_batch": 2, "pipeline": 2},
]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert() -> nn.Module:
    """A masked language model, its decoder tied to its embedding."""
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=16, **SIZES)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=5, **SIZES)
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    """Encoder and decoder, which read one embedding."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def words(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    seen = torch.arange(LENGTH) < torch.randint(2, LENGTH, (SAMPLES, 1), generator=generator)
    hidden = seen & (torch.rand(ids.shape, generator=generator) < 0.4)
    return {
        "input_ids": ids.masked_fill(hidden, 1),
        "attention_mask": seen.long(),
        "targets": ids.masked_fill(~hidden, -100),
    }


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 8, 8, generator=generator),
        "targets": torch.randint(0, 5, (SAMPLES,), generator=generator),
    }


def translations(generator: torch.Generator) -> dict[str, Tensor]:
    target = torch.randint(3, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    return {
        "input_ids": torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator),
        "decoder_input_ids": target[:, :-1],
        "targets": target[:, 1:],
    }


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "bert": (bert, words),
    "vit": (vit, pictures),
    "t5": (t5, translations),
}


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    return dict(CASES[name][1](torch.Generator().manual_seed(step)))


def read(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "targets"}


def loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets = outputs.logits.flatten(0, -2), batch["targets"].flatten()
    return functional.cross_entropy(logits, targets, reduction="sum"), (targets >= 0).sum()


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


@functools.cache
def plainly(name: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = CASES[name][0]()
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = batch_of(name, step)
        total, count = loss(model(**read(batch)), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total.detach() / count).item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


ROWS = [(name, at) for name in CASES for at in range(len(LAYOUTS))]
SOME = [("bert", 2), ("vit", 0), ("t5", 1)]


def trained(rows: list[tuple[str, int]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    made = []
    for name, at in rows:
        build, layout = CASES[name][0], LAYOUTS[at]
        engine = Engine(
            build, layout, loss=loss, optimizer=sgd, batch=batch_of(name, 0), inputs=read
        )
        losses = [engine.step(engine.slice(batch_of(name, step))).loss for step in range(STEPS)]
        made.append((losses, engine.state_dict()))
    return made


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, SOME))
def test_models_of_transformers_train_like_a_plain_loop(rows: list[tuple[str, int]]) -> None:
    for rank in on_ranks(2, trained, rows):
        for (name, at), (found, state) in zip(rows, rank, strict=True):
            losses, weights = plainly(name)
            assert found == pytest.approx(losses, rel=1e-5), (name, LAYOUTS[at])
            for key, weight in weights.items():
                torch.testing.assert_close(
                    state[key], weight, rtol=1e-4, atol=1e-5, msg=f"{name}, {LAYOUTS[at]}: {key}"
                )
