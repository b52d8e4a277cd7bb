"""A module that is recorded on tokens: what `launch` trains of models without rules of ours.

It trains as a script's module does, with the optimizer of the plan's `training` and batches of
tokens: input and target are one position apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.documents.plan import Plan
from planner.errors import DocumentError, LaunchError, MeshwrightError
from runtime.gradients import Slot
from runtime.language_model import inputs_and_targets
from runtime.learning_rate import learning_rate
from runtime.mesh import Place
from runtime.optimizer import adamw
from runtime.own_model import OwnModel
from runtime.recorder import Inputs
from runtime.script_model import SAMPLES, Loss
from runtime.torch_optimizers import ParameterGroup

MOST_NUMBERS = 256
"""Of tokens that are tried: nothing says how many a module knows."""


def samples(seq_len: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets without data, as many as a recording is of."""
    tokens = torch.empty(SAMPLES, seq_len, dtype=torch.int64, device="meta")
    return tokens, tokens


@contextlib.contextmanager
def recording_of(source: str) -> Iterator[None]:
    """Tell what goes wrong while a model is built and recorded as a DocumentError of its source."""
    try:
        yield
    except DocumentError:
        raise
    except MeshwrightError as error:
        raise DocumentError("", str(error), file=source) from error
    except Exception as error:  # whatever the module's own code says
        raise DocumentError(
            "", f"cannot be recorded: {type(error).__name__}: {error}", file=source
        ) from error


class TokenModel(OwnModel):
    """What an Engine trains of a module on tokens; batches are those of LanguageModel."""

    by_plan = True

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        inputs: Inputs,
        loss: Loss,
        device: torch.device,
        documents: bool,
        units: Sequence[str] | None = None,
        place: Place | None = None,
    ) -> None:
        """`place` is this rank's if it is not that of all ranks in the plan."""
        if documents:
            raise LaunchError(
                f"documents: {plan.model.name} is recorded, and its attention is not kept within "
                "documents; train on text"
            )
        self.vocabulary = _vocabulary(module)
        """Numbers of tokens that all tables know."""
        shape = (plan.global_batch, plan.seq_len)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        self.example = (tokens, tokens)
        self.loss = loss
        super().__init__(
            lambda: module,
            plan,
            loss=loss,
            optimizer=torch.optim.AdamW,
            batch=self.example,
            inputs=inputs,
            groups=None,
            units=units,
            tensor=None,
            device=device,
            place=place,
        )
        self.counts = plan.seq_len

    def groups(self, slots: Sequence[Slot]) -> list[ParameterGroup]:
        """Return what this rank trains by the settings of the plan's training."""
        return adamw(slots, self.plan.training, device=self._device, offload=self.plan.offload)

    def batch(self, given: Any) -> tuple[Tensor, ...]:
        """Return inputs and targets of a row of tokens; see LanguageModel.batch."""
        inputs, targets, starts = inputs_and_targets(
            given, self.plan, self.place, device=self._device
        )
        assert starts is None, "documents are refused"
        return inputs, targets

    def learning_rate(self, steps: int) -> float | None:
        """Return that of the update behind `steps` others."""
        return learning_rate(self.plan.training, steps)


def _vocabulary(module: nn.Module) -> int:
    """Return how many numbers all tables know, and the last product tells apart."""
    parts = list(module.modules())
    tables = [one.num_embeddings for one in parts if isinstance(one, nn.Embedding)]
    heads = [one.out_features for one in parts if isinstance(one, nn.Linear)][-1:]
    return min([*tables, *heads, MOST_NUMBERS])
