"""transformers' Trainer over an Engine: its data, schedule, logging and callbacks, under a plan.

    torchrun --nproc-per-node=2 examples/with_trainer.py zero=3

The Trainer's loop stays; forward, backward, clipping and the update are the Engine's.  Checkpoints
are `engine.save`, and gradient accumulation is the plan's micro-batches.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import meshwright

STEPS, SAMPLES, LENGTH, WORDS = 4, 8, 12, 48
Trained = tuple[list[float], dict[str, Tensor]]


def build() -> nn.Module:
    """Return a small Llama."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def dataset() -> list[dict[str, Tensor]]:
    """Return texts, which are their own targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (STEPS * SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": text, "labels": text} for text in ids]


def loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed loss of next words, and how many they are."""
    logits, targets = outputs["logits"][:, :-1], batch["labels"][:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def arguments(folder: str, samples: int) -> TrainingArguments:
    """Return the Trainer's settings; `samples` are those of one process."""
    return TrainingArguments(
        folder,
        per_device_train_batch_size=samples,
        max_steps=STEPS,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


class EngineTrainer(Trainer):
    """A Trainer whose steps an Engine does."""

    def __init__(self, engine: meshwright.Engine, model: nn.Module, **settings: Any) -> None:
        super().__init__(model=model, optimizers=(engine.optimizer, None), **settings)
        self.engine = engine
        # The Engine has divided the module already, and its optimizer's parameters.
        self.accelerator.prepare_model = lambda model, **_: model
        self.accelerator.prepare_optimizer = lambda optimizer, **_: optimizer
        self.losses: list[float] = []

    def get_train_dataloader(self) -> Any:
        """Return this rank's slices of global batches."""
        return self.engine.loader(self.train_dataset, shuffle=False)

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def training_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """Run forward and backward of this rank's slice; return the loss of the global batch."""
        self.losses.append(self.engine.forward_backward(dict(inputs)).loss)
        return torch.tensor(self.losses[-1])

    def _clip_grad_norm(self, model: nn.Module) -> float:
        # The update is done here.  The Trainer's own, of an optimizer without gradients, does
        # nothing; so `max_grad_norm` must be above 0 (1e9 clips nothing).
        return self.engine.optimizer_step(clip_norm=self.args.max_grad_norm).grad_norm


def plain() -> Trained:
    """Train in one process with nothing but transformers."""
    losses: list[float] = []

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=SAMPLES)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = super().training_step(*args, **kwargs)
            losses.append(float(found))
            return found

    torch.manual_seed(0)
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(folder, SAMPLES)
        Plain(
            model, settings, train_dataset=dataset(), optimizers=(sgd(model.parameters()), None)
        ).train()
    return losses, model.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    data = dataset()
    example = torch.utils.data.default_collate(data[:SAMPLES])
    engine = meshwright.Engine(
        build,
        plan,
        loss=loss,
        optimizer=sgd,
        batch=example,
        inputs=lambda batch: {"input_ids": batch["input_ids"]},
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(folder, SAMPLES // engine.slices)
        trainer = EngineTrainer(engine, build(), args=settings, train_dataset=data)
        trainer.train()
    return trainer.losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
