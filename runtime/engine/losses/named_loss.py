"""Cross-entropy of a module's logits by name, which a plan may compute a few rows at a time.

    engine = Engine(..., loss=meshwright.token_loss(lambda batch: batch["targets"]))

The loss of any module is its user's own function.  Of this one a plan's `loss` knows that logits
are made by one nn.Linear, read by nothing else, and compared with targets: the Linear then returns
the sum of losses in their place (runtime/techniques/chunked_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.loss import IGNORED
from meshwright.runtime.core.side_effects import deepcopy_module, restore_side_effects
from meshwright.runtime.models.family_adapter import next_token_loss
from meshwright.runtime.parallel.attention_api import SeenKeys, seeing, seen_now
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.chunked_cross_entropy import chunked_loss
from meshwright.runtime.techniques.split_backward import DeferredLinear
from meshwright.runtime.tracing.trace import Recording, Value, values_of
from meshwright.runtime.tracing.tracer import Recorder, arguments, can_be_tried


class token_loss:  # noqa: N801 - read as the function that it is to its user
    """The summed cross-entropy of logits [sample, position, vocabulary], and its count.

    `targets(batch)` are [sample, position], -100 where a position does not count; `logits(outputs)`
    are the module's outputs themselves, or what they call logits, unless it is given.
    """

    def __init__(
        self,
        targets: Callable[[Any], Tensor],
        logits: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.targets = targets
        self._logits = logits or _logits_in

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and how many there are."""
        logits, targets = self._logits(outputs), self.targets(batch)
        if logits.ndim:
            return next_token_loss(logits, targets)
        return logits, (targets != IGNORED).sum()  # the sum already


def _logits_in(outputs: Any) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    logits = outputs["logits"] if logits is None else logits
    assert isinstance(logits, Tensor)
    return logits


class ChunkedHead:
    """Replaces the forward of a Linear: returns the loss of the logits it would compute."""

    def __init__(self, head: nn.Linear, how: ChunkedLoss, loss: token_loss) -> None:
        self._head, self._how, self._loss = head, how, loss
        self._plain = head.forward
        self.active = True
        """True if the loss is wanted instead of the logits."""
        head.forward = self  # type: ignore[assignment, method-assign]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of losses of the micro-batch under way, of hidden states x."""
        if not self.active:
            return self._plain(x)
        total, _ = chunked_loss(
            x.flatten(0, -2),
            self._head.weight,
            self._loss.targets(seen_now().batch).flatten(),
            rows=self._how.rows,
            gradients=self._how.gradients,
            bias=self._head.bias,
        )
        return total


def head_of(recording: Recording, module: nn.Module) -> str:
    """Return the path of the Linear whose output is the module's and is read by nothing else.

    Raises LaunchError where there is no one such Linear.
    """
    read = {at for node in recording.nodes for at in values_of(node.leaves)}
    ends = {leaf.at for leaf in recording.result if isinstance(leaf, Value)} - read
    heads = [
        node.unit
        for node in recording.nodes
        if node.unit
        and type(module.get_submodule(node.unit)) in (nn.Linear, DeferredLinear)
        and ends & {value for _, value in node.made}
    ]
    if len(heads) != 1:
        raise LaunchError(
            f"loss: is in chunks, and {type(module).__name__} does not return what one nn.Linear "
            "makes, as it is; leave it out"
        )
    return heads[0]


@torch.no_grad()
def check_chunks(
    how: ChunkedLoss, module: nn.Module, recorder: Recorder, few: Any, loss: Any
) -> None:
    """Refuse a module or a loss that cannot be computed in chunks; `few` is what was recorded.

    The sum is compared with that of whole logits.  A module that is too large for a trial is not
    tried.
    """
    if not isinstance(loss, token_loss):
        raise LaunchError(
            "loss: is in chunks, and Engine(loss=...) is a function of logits; give "
            "meshwright.token_loss(lambda batch: targets), or leave it out of the plan"
        )
    name = head_of(recorder.first, module)
    if lora.is_adapted(module.get_submodule(name)):
        raise LaunchError(f"loss: is in chunks, and {name} has an adapter; leave it out")
    if not can_be_tried(module, few):
        return
    with restore_side_effects(module, recorder.inputs, loss):
        twin = deepcopy_module(module).eval()
        args, kwargs = arguments(recorder.inputs(few))
        whole = loss(twin(*args, **kwargs), few)[0]
        head = twin.get_submodule(name)
        assert isinstance(head, nn.Linear)
        ChunkedHead(head, how, loss)
        with seeing(SeenKeys(batch=few)):
            total = loss(twin(*args, **kwargs), few)[0]
    if not torch.allclose(total.float(), whole.float(), rtol=1e-4):
        raise LaunchError(
            f"loss: is in chunks, and the loss of what {name} makes is not that of the module's "
            "outputs; leave it out"
        )


def in_chunks(head: nn.Module, path: str, how: ChunkedLoss, loss: token_loss) -> ChunkedHead:
    """Let a module's head return its loss; it is whole on each rank."""
    assert isinstance(head, nn.Linear)
    if isinstance(head.weight, DTensor):
        raise LaunchError(
            f"loss: is in chunks, and tensor= divides {path}, whose logits it needs whole; leave "
            "one of the two out"
        )
    return ChunkedHead(head, how, loss)
