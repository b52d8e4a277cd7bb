"""Experts on ranks of several nodes, to each of which a token is sent once: `relay`.

An expert group of n ranks is cut into neighbours, `relay` of them each, which lie on one node.  A
token goes to every node that has some of its experts, to the rank there that stands where its own
does, and from there to every rank that has some of them.  On the way back a rank adds up what its
experts made of a token, weighed, and the one that handed the token on adds up what came of it, so
that one row for each node goes back.  Of a token with c experts on D nodes the slow links carry D
copies for c, and D sums for c outputs.  No token is dropped.

Where tokens go is told ahead of them, so that the host knows how many will be handed on while the
first are on the way: with what the experts that all tokens share compute, it waits for no tokens.
Source: DeepSeek-V3, section 3.2.2 (arXiv:2412.19437), and DeepEP, whose kernels send both ways at
once; here one exchange follows the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.experts import (
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

    The module holds this rank's part of the experts, in the order of the ranks of `group`; of these
    `inside` are those of this node, and `across` those that stand where this one does, of all
    nodes.  `meanwhile` is called while tokens are on the way to nodes.
    """
    own = count_of(module)
    near = own * inside.size()
    to_nodes = _Hop.of(index // near, across, index)
    going = to_nodes.journey()
    coming = departed(hidden[to_nodes.order], going)
    there, shares = to_nodes.sent(index), to_nodes.sent(weights)
    first = across.rank() * near
    of_node = torch.where((there >= first) & (there < first + near), there - first, near)
    to_ranks = _Hop.of(of_node // own, inside, index)
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
    return weighted.new_zeros(len(tokens), made.shape[1]).index_add(0, order // each, weighted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hop:
    """Rows that are copied to some of the ranks of a group, once to each, and summed on return."""

    order: Tensor
    """The rows that leave, for one rank after the other."""
    leaving: list[int]
    arriving: list[int]
    pairs: int
    """Choices of the rows that arrive which are of this rank."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, places: Tensor, group: dist.ProcessGroup, index: Tensor) -> _Hop:
        """Tell the other ranks what comes; `places` [row, choice] are ranks, others none of them.

        `index` are the choices of this rank's own tokens.
        """
        ranks, rows = group.size(), len(places)
        chosen = places.new_zeros(rows, ranks + 1).scatter_add_(1, places, torch.ones_like(places))
        chosen = chosen[:, :ranks]
        goes = chosen > 0
        counts = torch.stack((goes.sum(0), chosen.sum(0)), dim=1)
        leaving, arriving, pairs = _by_rank(counts, told(counts.flatten(), group), index)
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
        returned = arrived(departed(x, back), back)
        return returned.new_zeros(rows, returned.shape[1]).index_add(0, self.order, returned)


def _first(count: int, x: Tensor) -> Tensor:
    """Return the first of some values; a graph cannot cut where it does not know the length."""
    return x[torch.arange(count, device=x.device)]


def _by_rank(counts: Tensor, coming: Tensor, index: Tensor) -> list[list[int]]:
    """Return the copies that leave for each rank, those that arrive, and the choices with them.

    `counts` [rank, 2] and what is `coming` are copies and choices, `index` this rank's own choices.
    """
    coming = coming.view_as(counts)
    both: list[list[int]] = torch.stack((counts[:, 0], coming[:, 0], coming[:, 1])).tolist()
    return both
