"""transformers' Trainer over an Engine: its data, schedule, logging and callbacks, under a plan.

    torchrun --nproc-per-node=2 examples/with_trainer.py zero=3

The Trainer's loop stays; forward, backward, clipping, the update and evaluation are the Engine's.
Checkpoints are `engine.save`, which any plan goes on from, `save_model` writes a folder of
transformers, and gradient accumulation is the plan's micro-batches.
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


def dataset(texts: int = STEPS * SAMPLES, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return texts, which are their own targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (texts, LENGTH), generator=generator)
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
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=samples,
        save_strategy="steps",
        save_steps=STEPS,
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

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss of held-out texts."""
        total = count = 0.0
        for batch in self.engine.loader(eval_dataset or self.eval_dataset, shuffle=False):
            found = self.engine.evaluate(dict(batch))
            total, count = total + found.loss * found.count, count + found.count
        metrics = {f"{metric_key_prefix}_loss": total / count}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        # `engine.resume(folder, extra={"schedule": ...})` goes on from it.
        self.engine.save(self.args.output_dir, extra={"schedule": self.lr_scheduler})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as transformers does."""
        weights = self.engine.state_dict()  # from all ranks
        if self.engine.leads:
            whole = build()
            whole.load_state_dict(weights)
            whole.save_pretrained(output_dir or self.args.output_dir)


def evaluations(trainer: Trainer) -> list[float]:
    """Return the losses of held-out texts."""
    return [told["eval_loss"] for told in trainer.state.log_history if "eval_loss" in told]


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
        trainer = Plain(
            model,
            settings,
            train_dataset=dataset(),
            eval_dataset=dataset(2 * SAMPLES, seed=1),
            optimizers=(sgd(model.parameters()), None),
        )
        trainer.train()
    return [*losses, *evaluations(trainer)], model.state_dict()


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
        trainer = EngineTrainer(
            engine,
            build(),
            args=settings,
            train_dataset=data,
            eval_dataset=dataset(2 * SAMPLES, seed=1),
        )
        trainer.train()
        trainer.save_model(f"{folder}/final")
        weights = engine.state_dict()
        if engine.leads:
            weights = LlamaForCausalLM.from_pretrained(f"{folder}/final").state_dict()
    return [*trainer.losses, *evaluations(trainer)], weights


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
