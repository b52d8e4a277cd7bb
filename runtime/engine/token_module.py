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

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, LaunchError, MeshwrightError
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.engine.language_model import inputs_and_targets
from meshwright.runtime.engine.module_graph import DEGREES, SAMPLES, Loss, script_model
from meshwright.runtime.engine.user_module import OwnModel
from meshwright.runtime.optim.gradients import Slot
from meshwright.runtime.optim.learning_rate import learning_rate
from meshwright.runtime.optim.sharded_optimizer import ParameterGroup
from meshwright.runtime.optim.update_rules import parameter_groups_of
from meshwright.runtime.parallel.attention_api import SeenKeys, divide_positions
from meshwright.runtime.tracing.tracer import Inputs

MOST_NUMBERS = 256
"""Largest number of distinct tokens that are tried: a module does not state its vocabulary size."""


TRIED_POSITIONS = 16
"""Positions of samples on which units are tried in parts: the division does not depend on
length."""


def samples(seq_len: int, *, numbered: bool = False) -> tuple[Tensor, ...]:
    """Return inputs and targets without data, as many as a recording is of; positions behind."""
    tokens = torch.empty(SAMPLES, seq_len, dtype=torch.int64, device="meta")
    return (tokens, tokens, tokens) if numbered else (tokens, tokens)


def graph_on_tokens(
    module: nn.Module, seq_len: int, *, numbered: bool = False, **how: Any
) -> ModelGraph:
    """Return the ModelGraph of a module on tokens, recorded without data; see `script_model`."""
    return script_model(
        module,
        samples(seq_len, numbered=numbered),
        degrees=DEGREES,
        tried=samples(min(seq_len, TRIED_POSITIONS), numbered=numbered),
        **how,
    )


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
            "",
            f"its own code raised {type(error).__name__} while it was recorded: "
            f"{str(error).rstrip('.')}; give sizes and a --seq-len that it takes, or train it from "
            "a script with meshwright.Engine",
            file=source,
        ) from error


class TokenModel(OwnModel):
    """A module on tokens, as an Engine trains it; batches are those of LanguageModel."""

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
        numbered: bool = False,
        always: bool = False,
        units: Sequence[str] | None = None,
        place: Place | None = None,
    ) -> None:
        """`place` is this rank's if it is not that of all ranks in the plan.

        `numbered` says that `inputs` give the module positions, the third of a batch, and that its
        attention is runtime.parallel.attention_api's; `always`, that it takes them under any plan.
        """
        self._documents, self._always = documents, always
        if self._sees_less(plan):
            what = "documents" if documents else f"mesh.context: is {plan.mesh.context}"
            if not numbered:
                raise LaunchError(
                    f"{what}, and {plan.model.name} gets no positions with its tokens; let its "
                    "forward take tokens and positions, and call meshwright.attention"
                )
        self.vocabulary = _vocabulary(module)
        """Numbers of tokens that all tables know."""
        shape = (plan.global_batch, plan.seq_len)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        self.example: tuple[Tensor, ...] = (tokens, tokens)
        if always or self._sees_less(plan):
            self.example += (torch.arange(plan.seq_len).expand_as(tokens),)
        if documents:
            self.example += (torch.zeros_like(tokens),)
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

    def _trial_batch(self, few: Any) -> Any:
        return tuple(leaf[:, :TRIED_POSITIONS] for leaf in few)

    def groups(self, slots: Sequence[Slot]) -> list[ParameterGroup]:
        """Return what this rank trains by the settings of the plan's training."""
        return parameter_groups_of(
            slots, self.plan.training, device=self._device, offload=self.plan.offload
        )

    def batch(self, given: Any) -> tuple[Tensor, ...]:
        """Return inputs and targets of a row of tokens; see LanguageModel.batch."""
        inputs, targets, starts = inputs_and_targets(
            given, self.plan, self.place, device=self._device
        )
        if (starts is not None) != self._documents:
            raise LaunchError(
                "starts are given if and only if the engine was made for documents; "
                "leave them out, or plan a job with documents"
            )
        batch: tuple[Tensor, ...] = (inputs, targets)
        if self._always or self._sees_less(self.plan):
            places = torch.arange(self.plan.seq_len, device=inputs.device).expand_as(inputs)
            if starts is not None:
                starts = starts.to(inputs.device, non_blocking=True)
                batch += (places - starts, starts)
            else:
                batch += (places,)
        return divide_positions(batch, self.place.context)

    def _sees_less(self, plan: Plan) -> bool:
        return super()._sees_less(plan) or self._documents

    def _seen_keys(self, batch: Any) -> SeenKeys:
        starts = batch[3] if self._documents else None
        return SeenKeys(context=self.place.context, starts=starts, batch=batch)

    def learning_rate(self, steps: int) -> float | None:
        """Return that of the update behind `steps` others."""
        return learning_rate(self.plan.training, steps)


def _vocabulary(module: nn.Module) -> int:
    """Return how many numbers all tables know, and the last product tells apart."""
    parts = list(module.modules())
    tables = [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]
    heads = [part.out_features for part in parts if isinstance(part, nn.Linear)][-1:]
    return min([*tables, *heads, MOST_NUMBERS])
