"""Experts on ranks of several nodes, to each of which a token is sent once: `hierarchical_all_to_all`.

An expert group of n ranks is cut into neighbours, `hierarchical_all_to_all` of them each, which lie
on one node.  A token goes to every node that has some of its experts, to the rank there that stands
where its own does, and from there to every rank that has some of them.  On the way back a rank adds
up what its experts made of a token, weighed, and the one that handed the token on adds up what came
of it, so that one row for each node goes back.  Of a token with c experts on D nodes the slow links
carry D copies for c, and D sums for c outputs.  No token is dropped.

Where tokens go is sent ahead of them, so that the host knows how many will be handed on while the
first are on the way: with what the experts that all tokens share compute, it waits for no tokens.
Source: DeepSeek-V3, section 3.2.2 (arXiv:2412.19437), and DeepEP, whose kernels send both ways at
once; here one exchange follows the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.parallel.expert_parallel import (
    Journey,
    arrived,
    count_of,
    departed,
    outputs,
    rows_of_experts,
    told,
)


def mixed(
    module: nn.Module,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    group: dist.ProcessGroup,
    across: dist.ProcessGroup,
    inside: dist.ProcessGroup,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, [token, hidden].

    The module has this rank's part of the experts, in the order of the ranks of `group`; of these
    `inside` are those of this node, and `across` those that stand where this one does, of all
    nodes.  `meanwhile` is called while tokens are on the way to nodes.
    """
    own = count_of(module)
    near = own * inside.size()
    to_nodes = _Copies.of(index // near, across, of=len(index), parts=across.size())
    going = to_nodes.journey()
    coming = departed(hidden[to_nodes.order], going)
    there, shares = to_nodes.sent(index), to_nodes.sent(weights)
    first = across.rank() * near
    of_node = torch.where((there >= first) & (there < first + near), there - first, near)
    to_ranks = _Copies.of(of_node // own, inside, of=len(index), parts=group.size())
    meanwhile()
    tokens = to_ranks.sent(arrived(coming, going))
    there, shares = to_ranks.sent(of_node), to_ranks.sent(shares)
    made = _sums(module, tokens, there - inside.rank() * own, shares, pairs=to_ranks.pairs)
    handed = to_ranks.summed(made.to(hidden.dtype), len(of_node))
    return to_nodes.summed(handed, len(hidden))


def _sums(module: nn.Module, tokens: Tensor, chosen: Tensor, shares: Tensor, pairs: int) -> Tensor:
    """Return of tokens [row, hidden] the weighted sums over those of their experts that are here.

    Of what they have `chosen` [row, choice] 0 to this rank's experts are its own, `pairs` in all.
    """
    own, each = count_of(module), chosen.shape[1]
    expert = torch.where((chosen >= 0) & (chosen < own), chosen, own).flatten()
    order = _first(pairs, expert.argsort(stable=True))
    made = outputs(module, tokens[order // each], rows_of_experts(expert, own + 1)[:own])
    weighted = made * shares.flatten()[order].unsqueeze(1)
    return _Added.apply(weighted, order // each, len(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Rows that are copied to some of the ranks of a group, once to each, and summed on return."""

    order: Tensor
    """The rows that leave, for one rank after the other."""
    leaving: list[int]
    arriving: list[int]
    pairs: int
    """Choices of the rows that arrive which are of this rank."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, places: Tensor, group: dist.ProcessGroup, *, of: int, parts: int) -> _Copies:
        """Tell the other ranks what comes; `places` [row, choice] are ranks, others none of them.

        Copies of `of` tokens of each rank then are with as many `parts` of the experts.
        """
        ranks, rows = group.size(), len(places)
        chosen = places.new_zeros(rows, ranks + 1).scatter_add_(1, places, torch.ones_like(places))
        chosen = chosen[:, :ranks]
        goes = chosen > 0
        counts = torch.stack((goes.sum(0), chosen.sum(0)), dim=1)
        coming = told(counts.flatten(), group).view_as(counts)
        both = torch.stack((counts[:, 0], coming[:, 0], coming[:, 1]))
        leaving, arriving, pairs = _by_rank(both, of, parts)
        order = goes.t().flatten().logical_not().to(torch.uint8).argsort(stable=True)
        return cls(
            order=_first(sum(leaving), order) % rows,
            leaving=leaving,
            arriving=arriving,
            pairs=sum(pairs),
            group=group,
        )

    def journey(self) -> Journey:
        """Return the way of rows to the ranks that they go to."""
        return Journey(self.arriving, self.leaving, self.group)

    def sent(self, x: Tensor) -> Tensor:
        """Return the rows that all ranks send to this one, of each their x [row, ...]."""
        there = self.journey()
        return arrived(departed(x[self.order], there), there)

    def summed(self, x: Tensor, rows: int) -> Tensor:
        """Return for each of as many rows the sum of what was made of its copies, x [copy, ...]."""
        back = Journey(self.leaving, self.arriving, self.group)
        return _Added.apply(arrived(departed(x, back), back), self.order, rows)


class _Added(torch.autograd.Function):
    """Rows added up where an order says; torch's own index_add would keep them for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(order)
        return x.new_zeros(rows, x.shape[1]).index_add_(0, order, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def _first(count: int, x: Tensor) -> Tensor:
    """Return the first of some values; a graph cannot cut where it does not know the length."""
    return x[torch.arange(count, device=x.device)]


def _by_rank(rows: Tensor, of: int, parts: int) -> list[list[int]]:
    """Return the copies that leave for each rank, those that arrive, and the choices with them.

    They are copies of `of` tokens, which go to as many `parts` of the experts.
    """
    return rows.tolist()
