"""Experts over ranks train like one process; the reference's mixture is the library's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from meshwright.planner.documents.model import Experts
from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.module_graph import script_model
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models import reference_decoder as reference
from meshwright.runtime.parallel import expert_parallel as experts
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.test_equality import case, check

OUTSIDE_IN = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
EXPERTS = {"experts": Experts(count=4, per_token=2, ffn_size=24)}
SHARED = {"experts": Experts(count=4, per_token=2, ffn_size=24, shared=1, dense_layers=1)}
GATHERED = {"dispatch": "allgather", "recompute": "selective"}
ON_HOST = {"offload": "parameters", "dispatch": "allgather"}
SIX = {"experts": Experts(count=6, per_token=2, ffn_size=24, shared_ffn_size=40)}
WIDE = {"kv_heads": 4, "experts": Experts(count=4, per_token=2, ffn_size=24, shared=2)}
HYBRID = {"data_replicate": 2, "data_shard": 2}
SPLIT = {"schedule": "zbv", "virtual_stages": 2}

TWO = (
    case("zero 3, selective", model=SHARED, expert=2, data_shard=2, zero=3, recompute="selective"),
    case("over context", model=SHARED, expert=2, context=2),
    case("gathered, weights on the host", "mixtral", expert=2, context=2, zero=3, **ON_HOST),
)
FOUR = (
    case("mixture, more ranks than divide experts", model=SIX, data_shard=4, zero=3),
    case("on 4, zero 1", model=SHARED, expert=4, data_shard=4, zero=1),
    case("gathered, on 4", "qwen3_moe", expert=4, tensor=2, context=2, dispatch="allgather"),
    case("three experts on two ranks", model=SIX, expert=2, data_shard=4, zero=3),
    case(
        "hybrid", model=SHARED, expert=2, data_replicate=2, data_shard=2, zero=2, order=OUTSIDE_IN
    ),
    case("pipeline", model=SHARED, expert=2, pipeline=2, data_shard=2, zero=3, **SPLIT),
    case("over tensor and data", model=SHARED, expert=4, tensor=2, data_shard=2, zero=3),
    case("on 2 of 4 tensor ranks", model=WIDE, expert=2, tensor=4),
    case("pipeline, full", "mixtral", expert=2, pipeline=2, tensor=2, recompute="full"),
    case("over tensor and context", "qwen3_moe", expert=4, tensor=2, context=2, zero=1),
)
MORE_ON_TWO = (
    case("over tensor", model=SHARED, expert=2, tensor=2, recompute="full"),
    case("gathered", model=SHARED, expert=2, data_shard=2, zero=3, dispatch="allgather"),
    case("mixture, tensor, selective", model=SHARED, tensor=2, recompute="selective"),
    case("gathered, over tensor", "mixtral", expert=2, tensor=2, **GATHERED),
    case("zero 2", "qwen3_moe", expert=2, data_shard=2, zero=2),
    case("over tensor, selective", "mixtral", expert=2, tensor=2, recompute="selective"),
    case("mixture, zero 3", model=SHARED, data_shard=2, zero=3),
    case("mixture, split backward", model=SHARED, pipeline=2, **SPLIT),
    case("mixture, context", model=SHARED, context=2),
    case("zero 1", model=SHARED, expert=2, data_shard=2, zero=1),
    case("zero 3, full", model=EXPERTS, expert=2, data_shard=2, zero=3, recompute="full"),
    case("over context, zero 3", model=SHARED, expert=2, context=2, zero=3),
    *(
        case(f"over {axis}", family, expert=2, recompute="selective", **{axis: 2}, **zero)
        for family in cases.MIXED
        for axis, zero in (("data_shard", {"zero": 3}), ("tensor", {}), ("context", {"zero": 2}))
    ),
)
MORE_ON_FOUR = (
    case("mixture, tensor x zero 3", model=SIX, tensor=2, data_shard=2, zero=3),
    case("on 4, zero 3", model=EXPERTS, expert=4, data_shard=4, zero=3, recompute="full"),
    *(
        case(f"on 2 of 4, zero {zero}", model=SHARED, expert=2, data_shard=4, zero=zero)
        for zero in (1, 2, 3)
    ),
    *(case(f"hybrid, zero {z}", model=SHARED, expert=2, **HYBRID, zero=z) for z in (1, 3)),
    case("x pipeline", model=SHARED, expert=2, pipeline=2, data_shard=2, zero=1),
    case("over tensor, data", model=SHARED, expert=2, tensor=2, data_replicate=2),
    case("over tensor, zero 3", model=SHARED, expert=2, tensor=2, data_shard=2, zero=3),
    case("over context, zero 3", model=SHARED, expert=2, context=2, data_shard=2, zero=3),
    case("over context and data", model=SHARED, expert=4, context=2, data_shard=2, zero=2),
    case("over tensor x context", model=SHARED, expert=2, tensor=2, context=2),
    case("over tensor x pipeline", model=SHARED, expert=2, tensor=2, pipeline=2),
    case("on 2 of 4, zero 3", "mixtral", expert=2, data_shard=4, zero=3),
    case("over tensor, zero 3", "qwen3_moe", expert=2, tensor=2, data_shard=2, zero=3),
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [pytest.param(2, TWO, id="2"), pytest.param(4, FOUR, id="4", marks=pytest.mark.matrix)],
)
def test_experts_train_like_one_process(ranks: int, rows: tuple[Any, ...]) -> None:
    check(rows, ranks)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "rows"), [(2, MORE_ON_TWO), (4, MORE_ON_FOUR)], ids=["2", "4"])
def test_all_experts_train_like_one_process(ranks: int, rows: tuple[Any, ...]) -> None:
    check(rows, ranks)


def tokens_and_choices(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(10, 32, generator=generator)
    scores = torch.randn(10, count, generator=generator)
    weights, index = scores.softmax(-1).topk(2, dim=-1)
    return tokens, index, weights


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module


@pytest.mark.parametrize("ffn_size", [24, 21], ids=["aligned", "one expert after the other"])
def test_each_token_gets_the_weighted_sum_of_its_experts(ffn_size: int) -> None:
    figures = Experts(count=4, per_token=2, ffn_size=ffn_size)
    module = filled(reference.ExpertWeights(32, figures))
    tokens, index, weights = tokens_and_choices(4)
    expected = torch.zeros_like(tokens)
    for token in range(len(tokens)):
        for choice in range(2):
            expert = index[token, choice]
            gate, up = (module.gate_up_proj[expert] @ tokens[token]).chunk(2)
            made = module.down_proj[expert] @ (functional.silu(gate) * up)
            expected[token] += weights[token, choice] * made

    torch.testing.assert_close(module(tokens, index, weights), expected)


def test_the_mixture_is_mixtrals() -> None:
    a = cases.architecture("mixtral")
    assert a.experts is not None
    ours = filled(reference.Mixture(a, a.experts))
    config = MixtralConfig(
        hidden_size=a.hidden_size,
        intermediate_size=a.experts.ffn_size,
        num_local_experts=a.experts.count,
        num_experts_per_tok=a.experts.per_token,
    )
    config._experts_implementation = "eager"
    theirs = MixtralSparseMoeBlock(config)
    theirs.load_state_dict(
        {name.replace("router", "gate"): value for name, value in ours.state_dict().items()}
    )
    x = torch.randn(2, 8, a.hidden_size, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(ours(x), theirs(x))


def test_shared_experts_are_added_for_every_token() -> None:
    a = cases.architecture(experts=Experts(count=4, per_token=2, ffn_size=24, shared=2))
    assert a.experts is not None
    module = filled(reference.Mixture(a, a.experts))
    x = torch.randn(2, 8, a.hidden_size)
    assert module.shared is not None

    whole = module(x)
    shared = module.shared(x)
    module.shared = None

    torch.testing.assert_close(whole, module(x) + shared)
    assert shared.abs().max() > 0


def send_to_a_few(chosen: list[int]) -> None:
    """All ranks choose only some experts; the others' ranks get nothing, and gradients of zero."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    figures = Experts(count=4, per_token=2, ffn_size=24)
    whole = filled(reference.ExpertWeights(32, figures))
    part = reference.ExpertWeights(32, figures)
    experts.spread(part, mesh)
    rank, own = mesh.get_rank(), 4 // mesh.size()
    mine = slice(rank * own, (rank + 1) * own)
    with torch.no_grad():
        for name in experts.HIDDEN_DIM:
            getattr(part, name).to_local().copy_(getattr(whole, name)[mine])
    tokens, _, weights = tokens_and_choices(4)
    index = torch.tensor(chosen).expand(len(tokens), 2)
    tokens = tokens + rank
    expected = whole(tokens, index, weights)
    found = part(tokens, index, weights)

    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name in experts.HIDDEN_DIM:
        total = getattr(whole, name).grad
        dist.all_reduce(total)
        own = getattr(part, name).grad.to_local()
        torch.testing.assert_close(own, total[mine], rtol=1e-5, atol=1e-3)


@pytest.mark.ranks
@pytest.mark.parametrize("chosen", [[0, 3], [0, 1], [2, 2]], ids=["both", "first", "one"])
def test_any_share_of_the_tokens_may_go_to_a_rank(chosen: list[int]) -> None:
    on_ranks(2, send_to_a_few, chosen)


def call_shared(mixture: Any, args: tuple[Any, ...]) -> None:
    mixture.shared(args[0])


def events_of_a_mixture(shared_first: bool) -> tuple[list[str], list[str], float]:
    """Return what happens in forward and in backward, and how far off one process results are."""
    a = cases.architecture(experts=Experts(count=4, per_token=2, ffn_size=24, shared=2))
    assert a.experts is not None
    whole, part = (filled(reference.Mixture(a, a.experts)) for _ in range(2))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    rank, own = mesh.get_rank(), 4 // mesh.size()
    experts.spread(part.experts, mesh)
    with torch.no_grad():
        for name in experts.HIDDEN_DIM:
            mine = getattr(whole.experts, name)[rank * own : (rank + 1) * own]
            getattr(part.experts, name).to_local().copy_(mine)
    events: list[str] = []
    begun, ended, compute = experts._begin_exchange, experts._wait, part.shared.forward

    def told(what: str, act: Any) -> Any:
        def acting(*args: Any) -> Any:
            events.append(what)
            return act(*args)

        return acting

    part.shared.forward = told("shared", compute)
    part.shared.gate.weight.register_post_accumulate_grad_hook(
        lambda _: events.append("shared gradients")
    )
    experts.compute_shared_meanwhile(part)
    if shared_first:  # as Qwen2's mixture does
        part.register_forward_pre_hook(call_shared)
    generator = torch.Generator().manual_seed(2 + rank)
    x = torch.randn(2, 8, a.hidden_size, generator=generator)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    with (
        mock.patch(
            "meshwright.runtime.parallel.expert_parallel._begin_exchange", told("begun", begun)
        ),
        mock.patch("meshwright.runtime.parallel.expert_parallel._wait", told("ended", ended)),
    ):
        found = part(ours)
        forward = [*events]
        events.clear()
        found.square().sum().backward()
    expected = whole(theirs)
    expected.square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    pairs = ((found.detach(), expected.detach()), (ours.grad, theirs.grad))
    off = max(float((one - other).abs().max()) for one, other in pairs)
    return forward, events, off


@pytest.mark.ranks
def test_shared_experts_compute_while_tokens_are_on_the_way() -> None:
    for forward, backward, off in on_ranks(2, events_of_a_mixture, False):
        assert forward == ["begun", "shared", "ended", "begun", "ended"]
        assert backward == ["begun", "ended", "begun", "shared gradients", "ended"]
        assert off < 1e-3

    for forward, _, off in on_ranks(2, events_of_a_mixture, True):
        assert forward == ["shared", "begun", "ended", "begun", "ended", "shared"]
        assert off < 1e-3


def test_tokens_of_experts_are_counted() -> None:
    index = torch.tensor([[0, 2], [2, 3], [0, 2]])

    assert experts.rows_of_experts(index, 5).tolist() == [2, 0, 3, 1, 0]


def expert_load(plan: Any, graph: Any) -> float | None:
    engine = token_engine(plan, graph, device=torch.device("cpu"))
    batch = cases.global_tokens(0).chunk(engine.slices)[engine.slice_rank]
    return engine.step(batch).expert_load


@pytest.mark.ranks
def test_the_load_of_experts_is_that_of_the_whole_batch() -> None:
    graph = cases.transformer(**SHARED)
    alone = expert_load(cases.plan(graph), graph)
    plan = cases.plan(
        graph, expert=2, pipeline=2, data_shard=2, zero=1, cuts=[2, 3], recompute="full"
    )

    loads = on_ranks(4, expert_load, plan, graph)

    assert alone is not None
    assert 1.0 <= alone <= 4.0
    assert loads == pytest.approx([alone] * 4)
    assert expert_load(cases.plan(cases.transformer()), cases.transformer()) is None


class SortedExperts(torch.nn.Module):
    """Has the parameters of an experts module, and takes tokens alone, which are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 8, 16))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 8, 8))
        self.act_fn = torch.nn.SiLU()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        each = tokens.transpose(0, 1)  # expert, token, hidden
        gate, up = (each @ self.gate_up_proj).chunk(2, -1)
        return ((self.act_fn(gate) * up) @ self.down_proj).transpose(0, 1)


def test_modules_with_the_parameters_of_experts_that_take_something_else_are_no_experts() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), SortedExperts())

    graph = script_model(module, torch.randn(8, 4, 8), units=["0", "1"], name="sorted")

    assert [layer.experts for layer in graph.layers] == [None, None]
    with pytest.raises(LaunchError, match="1 does not take tokens, the experts that they choose"):
        experts.check(module[1], "1", ranks=2)
