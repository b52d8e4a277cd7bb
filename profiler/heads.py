"""Seconds and bytes of a head whose loss is computed in chunks, run by itself.

In a chain the head returns all logits.  Here its own parameters are multiplied a few rows at a
time, as the runtime does it in training; what it reads is what the layers before it return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from meshwright.planner.documents.profile import ChunkedLoss, LayerMeasurement
from meshwright.profiler.chain import Case, Chain, Division
from meshwright.profiler.clock import Clock
from meshwright.profiler.layer_bytes import bytes_of, least, looks_at
from meshwright.profiler.layers import LayerSamples, in_step, measurement, of_all_ranks
from meshwright.runtime.core.layer_names import HEAD
from meshwright.runtime.techniques.chunked_cross_entropy import in_chunks

WARM_UP, ROUNDS = 1, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCase:
    """One head to measure."""

    division: Division
    micro_batch: int
    loss: ChunkedLoss

    @property
    def case(self) -> Case:
        """The setting of the layers around it; a head recomputes nothing beside its loss."""
        return Case(micro_batch=self.micro_batch, recompute="none", **asdict(self.division))


def heads(chains: Sequence[Chain], wanted: Sequence[HeadCase]) -> list[LayerMeasurement]:
    """Measure each head; all ranks call it together and get the same."""
    by_division = {chain.division: chain for chain in chains}
    return [_head(by_division[one.division], one) for one in wanted]


def _head(chain: Chain, wanted: HeadCase) -> LayerMeasurement:
    clock, found = Clock(chain.device), LayerSamples()
    chain.gradients_exist()
    tokens, targets = chain.batch(wanted.micro_batch)
    hidden = _before_head(chain, tokens)
    with _chunked(chain, wanted.loss, targets) as head:
        for visit in range(WARM_UP + ROUNDS):
            seconds = _passes(head, hidden, clock)
            if visit >= WARM_UP:
                found.forward_s.append(seconds[0])
                found.backward_s.append(seconds[1])
                found.recompute_s.append(0.0)
        looks = [bytes_of(head, [hidden], lambda out: out[0])[0] for _ in range(looks_at(chain))]
        found.held.append(least(looks))
    kind, case = chain.kinds[HEAD], wanted.case
    samples = of_all_ranks({(kind, case): found})[kind, case]
    return measurement(kind, case, samples, chain).model_copy(update={"loss": wanted.loss})


def _passes(head: nn.Module, hidden: Tensor, clock: Clock) -> tuple[float, float]:
    x = hidden.detach().requires_grad_()
    with in_step():
        begin = clock.moment()
        total, _ = head(x)
        middle = clock.moment()
        total.backward()
        end = clock.moment()
    return clock.between_s(begin, middle), clock.between_s(middle, end)


def _before_head(chain: Chain, tokens: Tensor) -> Tensor:
    """Return what the head reads of a micro-batch: [sample, this rank's positions, hidden]."""
    made = tokens
    with torch.no_grad():
        for name, layer in chain.parts.items():
            if name != HEAD:
                made = layer(made)
    return made.detach().clone()


class _OfTargets(nn.Module):
    """A head that makes its loss, with the targets that it takes."""

    def __init__(self, head: nn.Module, targets: Tensor) -> None:
        super().__init__()
        self.head, self.targets = head, targets

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = self.head(x, self.targets)
        return made


@contextmanager
def _chunked(chain: Chain, how: ChunkedLoss, targets: Tensor) -> Iterator[nn.Module]:
    """Let the chain's head compute its loss in chunks, and as before behind this."""
    head = chain.parts[HEAD]
    group = chain.place.axis("tensor").get_group() if chain.division.tensor > 1 else None
    in_chunks(head, how, group)
    try:
        yield _OfTargets(head, targets)
    finally:
        del head.forward  # the class's own comes forward again
