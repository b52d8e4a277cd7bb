"""Tokens sent once to each node train like those sent to each expert; bytes are those priced."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.documents.model import Experts
from meshwright.planner.documents.plan import Plan
from meshwright.planner.operators.kernels import MODULES
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import Setting
from meshwright.runtime.core.mesh import Place, place_of
from meshwright.runtime.models import reference_decoder as reference
from meshwright.runtime.parallel import expert_parallel as experts
from tests.runtime import cases
from tests.runtime.parallel.test_expert_parallel import filled
from tests.runtime.ranks import on_ranks
from tests.runtime.test_equality import case, check

SHARED = {"experts": Experts(count=4, per_token=2, ffn_size=24, shared=1, dense_layers=1)}
EIGHT = {"experts": Experts(count=8, per_token=3, ffn_size=24, shared_ffn_size=40)}
HIDDEN = 32
EVERY = Experts(count=8, per_token=2, ffn_size=24)
LIKELY = {
    "as they come": [0.0] * 8,
    "one node": [99.0] * 4 + [0.0] * 4,
    "one rank": [0.0] * 6 + [99.0] * 2,
    "one expert of each node": [99.0, 0.0, 0.0, 0.0, 99.0, 0.0, 0.0, 0.0],
}
"""Added to the scores of experts: ranks and nodes that get nothing, and those that get all."""
COUNTS = (7, 0, 12, 3)
"""Tokens of each rank."""


def place() -> Place:
    """Four ranks with experts of their own, on two nodes of two."""
    plan: Plan = cases.plan(
        cases.transformer(**EIGHT), expert=4, data_shard=4, zero=1, hierarchical_all_to_all=2
    )
    return place_of(plan, torch.device("cpu"))


def part_of(whole: Any, mix: Any, at: Place) -> Any:
    mesh = at.expert_mesh["expert"]
    own = experts.count_of(whole) // mesh.size()
    part = reference.ExpertWeights(
        HIDDEN, Experts(count=own * mesh.size(), per_token=2, ffn_size=24)
    )
    experts.spread(part, mesh, mix)
    mine = slice(mesh.get_local_rank() * own, (mesh.get_local_rank() + 1) * own)
    with torch.no_grad():
        for name in experts.HIDDEN_DIM:
            getattr(part, name).to_local().copy_(getattr(whole, name)[mine])
    return part


def relayed(at: Place) -> Any:
    across, inside = at.relays(2)
    return functools.partial(experts.mix_by_hierarchical_all_to_all, across=across, inside=inside)


def both_exchanges() -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Outputs and all gradients, of the plain exchange and of that by nodes."""
    at, rank = place(), dist.get_rank()
    whole = filled(reference.ExpertWeights(HIDDEN, Experts(count=8, per_token=3, ffn_size=24)))
    found = {}
    for name, likely in LIKELY.items():
        generator = torch.Generator().manual_seed(5 + rank)
        tokens = torch.randn(COUNTS[rank], HIDDEN, generator=generator)
        scores = torch.randn(COUNTS[rank], 8, generator=generator) + torch.tensor(likely)
        weights, index = scores.softmax(-1).topk(3, dim=-1)
        results = []
        for mix in (experts.mix_by_all_to_all, relayed(at)):
            part = part_of(whole, mix, at)
            into = [x.clone().requires_grad_() for x in (tokens, weights)]
            out = part(into[0], index, into[1])
            out.square().sum().backward()
            of_matrices = [getattr(part, one).grad.to_local() for one in experts.HIDDEN_DIM]
            results.append([out.detach(), *(x.grad for x in into), *of_matrices])
        found[name] = list(zip(*results, strict=True))
    return found


@pytest.mark.ranks
def test_by_nodes_each_token_gets_what_it_gets_from_each_expert() -> None:
    for found in on_ranks(4, both_exchanges):
        assert set(found) == set(LIKELY)
        for name, pairs in found.items():
            for plain, by_nodes in pairs:
                torch.testing.assert_close(by_nodes, plain, rtol=1e-5, atol=1e-3, msg=name)


def sent_bytes() -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that leave this rank in a forward and in a backward, by hop.

    Each rank has every choice of two of eight experts once, so that counts are expectations.
    """
    at = place()
    names = dict(zip((g.group_name for g in at.relays(2)), ("across", "inside"), strict=True))
    groups = dict(zip(names, at.relays(2), strict=True))
    part = part_of(filled(reference.ExpertWeights(HIDDEN, EVERY)), relayed(at), at)
    index = torch.tensor(list(itertools.combinations(range(8), 2)))
    tokens = torch.randn(len(index), HIDDEN, requires_grad=True)
    weights = torch.rand(index.shape, requires_grad=True)
    sent = dict.fromkeys(names.values(), 0.0)
    begun = experts._begin_exchange

    def counted(x: Tensor, arriving: list[int], leaving: list[int], name: str) -> Tensor:
        elsewhere = sum(leaving) - leaving[groups[name].rank()]
        sent[names[name]] += elsewhere * math.prod(x.shape[1:]) * x.element_size()
        return begun(x, arriving, leaving, name)

    with mock.patch.object(experts, "_begin_exchange", counted):
        out = part(tokens, index, weights)
        forward = {**sent}
        out.sum().backward()
    return forward, {name: sent[name] - forward[name] for name in sent}


@pytest.mark.ranks
def test_bytes_over_each_tier_are_those_that_are_priced() -> None:
    model = cases.transformer(experts=EVERY)
    assert model.architecture is not None
    assert model.architecture.hidden_size == HIDDEN
    block = next(layer for layer in model.layers if "moe" in layer.kind)
    setting = Setting(
        micro_batch=1,
        seq_len=math.comb(8, 2),
        precision="fp32",
        expert=4,
        hierarchical_all_to_all=2,
        kernels=replace(MODULES, expert_spread=0.0),
    )
    expected = [dict.fromkeys(("across", "inside"), 0.0) for _ in range(2)]
    for operator in table(model, block, setting).operators:
        if operator.axis.startswith("experts_"):
            hop = operator.axis.removeprefix("experts_")
            # Of two ranks one is elsewhere.
            expected[0][hop] += operator.moved_bytes / 2
            expected[1][hop] += operator.backward_moved_bytes / 2

    for forward, backward in on_ranks(4, sent_bytes):
        assert forward == pytest.approx(expected[0])
        assert backward == pytest.approx(expected[1])


def events_of_a_mixture() -> tuple[list[str], list[str]]:
    """What happens in a forward and in a backward; two hops there and two back."""
    a, at = cases.architecture(**EIGHT), place()
    assert a.experts is not None
    part = filled(reference.Mixture(a, a.experts))
    experts.spread(part.experts, at.expert_mesh["expert"], relayed(at))
    events: list[str] = []
    across = at.relays(2)[0].group_name
    begun, arrived, compute = experts._begin_exchange, experts.await_rows, part.shared.forward

    def beginning(x: Tensor, arriving: Any, leaving: Any, name: str) -> Tensor:
        if x.shape[1:] == (a.hidden_size,):
            events.append("to nodes" if name == across else "to ranks")
        return begun(x, arriving, leaving, name)

    def waiting(coming: Tensor, journey: Any) -> Tensor:
        if coming.shape[1:] == (a.hidden_size,):
            events.append("arrived")
        return arrived(coming, journey)

    def computing(x: Tensor) -> Tensor:
        events.append("shared")
        return compute(x)

    part.shared.forward = computing
    part.shared.gate.weight.register_post_accumulate_grad_hook(
        lambda _: events.append("shared gradients")
    )
    experts.compute_shared_meanwhile(part)
    x = torch.randn(2, 8, a.hidden_size, requires_grad=True)
    with (
        mock.patch.object(experts, "_begin_exchange", beginning),
        mock.patch.object(experts, "await_rows", waiting),
    ):
        out = part(x)
        forward = [*events]
        events.clear()
        out.square().sum().backward()
    return forward, events


@pytest.mark.ranks
def test_shared_experts_compute_while_tokens_go_to_nodes() -> None:
    for forward, backward in on_ranks(4, events_of_a_mixture):
        there = ["to nodes", "shared", "arrived", "to ranks", "arrived"]
        assert forward == [*there, "to ranks", "arrived", "to nodes", "arrived"]
        assert backward == ["to nodes", "to ranks", "to ranks", "to nodes", "shared gradients"]


FEW = (
    case(
        "over tensor and data",
        model=SHARED,
        expert=4,
        tensor=2,
        data_shard=2,
        zero=1,
        recompute="selective",
        hierarchical_all_to_all=2,
    ),
)
MORE = (
    case(
        "over data",
        model=SHARED,
        expert=4,
        data_shard=4,
        zero=3,
        recompute="selective",
        hierarchical_all_to_all=2,
    ),
    case(
        "full",
        "mixtral",
        expert=4,
        data_shard=4,
        zero=2,
        recompute="full",
        hierarchical_all_to_all=2,
    ),
    case(
        "over tensor and context",
        "qwen3_moe",
        expert=4,
        tensor=2,
        context=2,
        hierarchical_all_to_all=2,
    ),
    case("over tensor alone", "deepseek_v3", expert=4, tensor=4, hierarchical_all_to_all=2),
    case("over context", "qwen2_moe", expert=4, context=4, zero=1, hierarchical_all_to_all=2),
    case(
        "over context and data",
        "qwen3_moe",
        expert=4,
        context=2,
        data_shard=2,
        zero=3,
        hierarchical_all_to_all=2,
    ),
)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("rows", [FEW, MORE], ids=["few", "more"])
def test_plans_that_relay_train_like_one_process(rows: tuple[Any, ...]) -> None:
    check(rows, 4)
