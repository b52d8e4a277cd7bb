"""Mixtures of experts: tokens to the experts that their router chose, and back.

An experts module has the matrices of all its experts in two parameters, `gate_up_proj` [expert,
2 ffn, hidden] (gate above up) and `down_proj` [expert, hidden, ffn], and an activation `act_fn`;
called with tokens [token, hidden], chosen experts and their weights [token, choice], it returns
each token's weighted sum.  Experts of GPT-OSS have biases too, and transposed matrices
(`_biased_outputs`).  No token is dropped.

Expert parallelism: neighbouring ranks hold the experts in equal parts, and every rank sends each of
its tokens to the ranks of its experts.  Ranks tell one another first how many tokens come, so that
the exchange has the sizes it needs.  While tokens are on the way, the experts that all tokens share
compute; in backward their gradients are made while those of the tokens are on the way back.

Three ways of tokens to experts on other ranks:

    all-to-all       each token to the ranks of its experts, as above (`mix_by_all_to_all`)
    all-gather       `dispatch: allgather`: every rank gets all tokens of the ranks that divide the
                     experts, computes those that chose its own experts, and the sums are reduced
                     and scattered.  Where a token goes is decided on the device, so that the host
                     waits for nothing; the price are buffers of the most tokens that a rank may
                     get: those of all ranks, each min(choices, own experts) times.  Rows that
                     nobody fills are not multiplied (grouped products end at the last offset), and
                     hold nothing.  Megatron-LM has the same choice
                     (`--moe-token-dispatcher-type allgather`).  An all-to-all moves c / n of the
                     bytes, c being the choices of a token and n the ranks, and must know on the
                     host how many come.
    hierarchical     `hierarchical_all_to_all`: a token is sent once to each node that has some of
    its experts.  An
                     expert group of n ranks is cut into neighbours, `hierarchical_all_to_all` of
                     them each, which lie on one node.  A token goes to every node that has some of
                     its experts, to the rank there that stands where its own does, and from there
                     to every rank that has some of them.  On the way back a rank adds up what its
                     experts made of a token, weighed, and the one that handed the token on adds up
                     what came of it, so that one row for each node goes back.  Of a token with c
                     experts on D nodes the slow links carry D copies for c, and D sums for c
                     outputs.

Under `hierarchical_all_to_all` it is sent ahead of tokens where they go, so that the host knows how
many will be handed on while the first are on the way: with what the experts that all tokens share
compute, it waits for no tokens.
Source: DeepSeek-V3, section 3.2.2 (arXiv:2412.19437), and DeepEP, whose kernels send both ways at
once; here one exchange follows the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.collectives import gather
from meshwright.runtime.core.local_parts import on_local_parts
from meshwright.runtime.core.side_effects import deepcopy_module, restore_side_effects
from meshwright.runtime.parallel.tensor_parallel import distribute
from meshwright.runtime.techniques.packed_weights import PackedExperts

HIDDEN_DIM = {"gate_up_proj": 2, "down_proj": 1}
"""Index of the hidden dim of each parameter of an experts module."""
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
"""Bias parameters of the experts of GPT-OSS."""
_SHARED = ("shared", "shared_experts", "shared_expert")
"""Names that mixtures give the experts shared by all tokens."""
_ALIGNMENT_BYTES = 16  # that grouped products ask of every row


def mix_by_all_to_all(
    module: nn.Module,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, [token, hidden].

    With a group, the module has this rank's part of the experts, in the order of ranks, and
    `meanwhile` is called while tokens are on the way to them.
    """
    each = index.shape[1]
    ranks = 1 if group is None else group.size()
    order = index.flatten().argsort(stable=True)
    chosen = hidden[order // each]
    rows = rows_of_experts(index, ranks * count_of(module))
    if group is None:
        returned = outputs(module, chosen, rows)
    else:
        route = _Route.for_rows(rows, group, sent=len(chosen))
        there = Journey(route.arriving, route.leaving, group)
        coming = send_rows(chosen, there)
        meanwhile()
        outputs_here = outputs(module, await_rows(coming, there)[route.by_expert], route.rows)
        back = Journey(route.leaving, route.arriving, group)
        returned = await_rows(send_rows(outputs_here[_inverse(route.by_expert)], back), back)
    weighted = returned * weights.flatten()[order].unsqueeze(-1)
    return weighted[_inverse(order)].unflatten(0, (-1, each)).sum(1).to(hidden.dtype)


def spread(
    module: nn.Module, mesh: DeviceMesh, mix: Callable[..., Tensor] = mix_by_all_to_all
) -> None:
    """Divide an experts module over the ranks of a mesh; values that it has stay with their part.

    `mix` brings tokens to experts and back, as `mix_by_all_to_all` does.
    """
    group = mesh.get_group()
    for name in list(module._parameters):
        whole = cast(Tensor, module._parameters[name])
        distribute(module, name, Shard(0), mesh, {})
        if not whole.is_meta:
            local = cast(DTensor, module._parameters[name]).to_local()
            local.detach().copy_(whole.detach().chunk(group.size())[group.rank()])
    forward: Callable[..., Any] = functools.partial(mix, module, group=group)
    if isinstance(module, PackedExperts):
        forward = functools.partial(module.while_restored, forward)
    module.forward = on_local_parts(module, forward)


def compute_shared_meanwhile(layer: nn.Module) -> None:
    """Let the shared experts of a layer compute while tokens are on the way to the others.

    That is where a mixture calls them behind the routed ones, with its own input; those that come
    before are left there, and so are those around which something else acts.
    """
    for path, routed in modules_of(layer).items():
        mixture = layer.get_submodule(path.rpartition(".")[0])
        shared = next((module for n in _SHARED if (module := getattr(mixture, n, None))), None)
        if shared is not None and not (shared._forward_hooks or shared._forward_pre_hooks):
            shared_ahead = _Ahead(shared)
            mixture.register_forward_pre_hook(shared_ahead.begin)
            routed.forward = _calling(routed.forward, shared_ahead.compute)


def _calling(forward: Callable[..., Any], meanwhile: Callable[[], None]) -> Callable[..., Any]:
    """Return a function, since graphs tell partial objects of one function apart."""

    def calling(*args: Any) -> Any:
        return forward(*args, meanwhile=meanwhile)

    return calling


class _Ahead:
    """A module whose output may be made before it is called."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._input: Tensor | None = None
        self._made: Tensor | None = None
        module.forward = self._call_shared

    def begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Take note of the input that the module will be called with.

        A compiler orders what a graph computes beside its exchanges by itself.
        """
        if not torch.compiler.is_compiling():
            self._input, self._made = args[0], None

    def compute(self) -> None:
        """Make the output, unless it was asked for already."""
        if self._input is not None and not torch.compiler.is_compiling():
            self._made = self._forward(self._input)

    def _call_shared(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._forward(x)
        output, is_known = self._made, x is self._input
        self._input = self._made = None
        return output if output is not None and is_known else self._forward(x)


def modules_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a layer's experts modules by their path."""
    return {
        path: module
        for path, module in layer.named_modules()
        if all(name in module._parameters for name in HIDDEN_DIM)
    }


def are_called_with(args: Sequence[Any]) -> bool:
    """Return whether these are tokens followed by the experts that each has chosen.

    Modules with the same parameters may take something else: those of Llama 4 take tokens alone,
    sorted by expert.
    """
    if len(args) < 2 or not all(
        isinstance(argument, Tensor) and argument.ndim == 2 for argument in args[:2]
    ):
        return False
    hidden, index = args[:2]
    return len(index) == len(hidden) and not index.is_floating_point()


@torch.no_grad()
def check(module: nn.Module, path: str, ranks: int) -> None:
    """Refuse an experts module that ranks cannot share, or whose result is another.

    The result is compared with that of `mix_by_all_to_all`.
    It is tried on random tokens.  Raises LaunchError with its path.
    """
    count = count_of(module)
    if count % ranks:
        raise LaunchError(f"mesh.expert: {ranks} does not divide the {count} experts of {path}")
    gate = "_apply_gate" if _has_biases(module) else "act_fn"
    biases = set(_BIASES) if _has_biases(module) else set()
    if module._parameters.keys() - HIDDEN_DIM.keys() - biases or not hasattr(module, gate):
        raise LaunchError(f"mesh.expert: is {ranks}, and {path} has more than two matrices; use 1")
    hidden = torch.randn(2 * count, hidden_size(module))
    index = torch.stack([torch.randperm(count)[:2] for _ in hidden])
    weights = torch.rand(index.shape)
    with restore_side_effects(module):
        tried = deepcopy_module(module)
        try:
            output = tried(hidden, index, weights)
        except Exception as error:
            raise LaunchError(
                f"mesh.expert: is {ranks}, and {path} does not take tokens, the experts that they "
                f"choose and their weights ({type(error).__name__}); use 1"
            ) from error
    if not torch.allclose(
        output, mix_by_all_to_all(module, hidden, index, weights), rtol=1e-4, atol=1e-5
    ):
        raise LaunchError(
            f"mesh.expert: is {ranks}, and {path} is no sum of act_fn(gate) * up of its experts; "
            "use 1"
        )


def count_of(module: nn.Module) -> int:
    """Return how many experts a module has."""
    return len(cast(Tensor, module.gate_up_proj))


def hidden_size(module: nn.Module) -> int:
    """Return how many values a token has that a module's experts take."""
    return int(cast(Tensor, module.down_proj).shape[2 if _has_biases(module) else 1])


def _has_biases(module: nn.Module) -> bool:
    return all(name in module._parameters for name in _BIASES)


def rows_of_experts(index: Tensor, count: int) -> Tensor:
    """Return how many tokens each of `count` experts is given, [expert]."""
    chosen = index.flatten()
    return index.new_zeros(count).scatter_add_(0, chosen, torch.ones_like(chosen))


class ExpertLoad:
    """Tokens that each expert of a layer got since the counts were last read."""

    def __init__(self, module: nn.Module, count: int, device: torch.device) -> None:
        self._rows = torch.zeros(count, dtype=torch.int64, device=device)
        module.register_forward_pre_hook(self._add)

    def _add(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._rows.add_(rows_of_experts(args[1], len(self._rows)))

    def take_counts(self) -> Tensor:
        """Return the counts [expert] and begin anew.

        Recomputation counts a second time; that changes no ratio.
        """
        rows = self._rows.clone()
        self._rows.zero_()
        return rows


def imbalance(rows: Tensor) -> Tensor:
    """Return the busiest expert's tokens over the mean, averaged over layers, of [layer, expert].

    >>> float(imbalance(torch.tensor([[4, 4, 4, 4], [12, 4, 0, 0]])))
    2.0
    """
    busiest, mean = rows.max(dim=1).values, rows.float().mean(dim=1)
    return (busiest / mean).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """Numbers of tokens sent by this rank to each rank, and received from each."""

    leaving: list[int]
    arriving: list[int]
    rows: Tensor
    """Tokens that each of this rank's experts gets from all ranks."""
    by_expert: Tensor
    """The tokens that arrive, which come rank by rank, in the order of experts."""

    @classmethod
    def for_rows(cls, rows: Tensor, group: dist.ProcessGroup, *, sent: int) -> _Route:
        """Ask the other ranks; `rows` are the `sent` tokens that this rank has, by expert."""
        ranks = group.size()
        count = rows.numel() // ranks
        coming = exchanged_counts(rows, group)
        both = torch.stack((rows, coming)).unflatten(1, (ranks, count))
        leaving, arriving = _by_rank(both.sum(2), sent)
        experts = torch.arange(count, device=rows.device).repeat(ranks)
        by_expert = experts.repeat_interleave(coming, output_size=sum(arriving)).argsort(
            stable=True
        )
        return cls(leaving=leaving, arriving=arriving, rows=both[1].sum(0), by_expert=by_expert)


def _by_rank(rows: Tensor, sent: int) -> list[list[int]]:
    """Return the tokens that leave for each rank, and those that arrive from it."""
    return rows.tolist()


def exchanged_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what every rank tells this one, where `counts` has as much for each of them."""
    ops, sizes = torch.ops._c10d_functional, [len(counts) // group.size()] * group.size()
    return ops.wait_tensor(ops.all_to_all_single(counts, sizes, sizes, group.group_name))


def send_rows(x: Tensor, journey: Journey) -> Tensor:
    """Begin to send rows to every rank of a group; `await_rows` waits for those that come."""
    if torch.compiler.is_compiling():
        name = journey.group.group_name
        return _TokenExchange.apply(x, journey.arriving, journey.leaving, name)
    return _Departure.apply(x, journey)


def await_rows(coming: Tensor, journey: Journey) -> Tensor:
    """Return the rows that `send_rows` announced, when all have come."""
    if torch.compiler.is_compiling():
        return _wait(coming)
    return _Arrival.apply(coming, journey)


class Journey:
    """An exchange of rows that is under way, and back again in backward."""

    def __init__(self, arriving: list[int], leaving: list[int], group: dist.ProcessGroup) -> None:
        self.arriving, self.leaving, self.group = arriving, leaving, group
        self.returning: Tensor | None = None


class _Departure(torch.autograd.Function):
    """Begin to send rows to every rank; their gradients have come when backward ends here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return _begin_exchange(x, journey.arriving, journey.leaving, journey.group.group_name)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        returning, ctx.journey.returning = ctx.journey.returning, None
        return _wait(returning), None


class _Arrival(torch.autograd.Function):
    """Wait for the rows that were sent; backward begins to send their gradients back.

    Autograd wants a gradient of as many rows as have arrived, so those that left go by the journey.
    """

    @staticmethod
    def forward(ctx: Any, coming: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return _wait(coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        journey = ctx.journey
        journey.returning = _begin_exchange(
            grad, journey.leaving, journey.arriving, journey.group.group_name
        )
        return grad, None


class _TokenExchange(torch.autograd.Function):
    """Rows that are on their way from every rank, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arriving: list[int], leaving: list[int], name: str) -> Tensor:
        ctx.sizes, ctx.name = (leaving, arriving), name
        return _begin_exchange(x, arriving, leaving, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arriving, leaving = ctx.sizes
        return _wait(_begin_exchange(grad, arriving, leaving, ctx.name)), None, None, None


def _begin_exchange(x: Tensor, arriving: list[int], leaving: list[int], name: str) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), arriving, leaving, name)


def _wait(coming: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(coming)


def outputs(module: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    """Return what experts make of the tokens x [row, hidden], of which each has `rows` in order."""
    into, out = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    if _has_biases(module):
        return _biased_outputs(module, x, rows)
    act_fn = cast(Callable[[Tensor], Tensor], module.act_fn)
    gate, up = _product(x, into, rows).chunk(2, dim=-1)
    return _product(act_fn(gate) * up, out, rows)


def _biased_outputs(module: Any, x: Tensor, rows: Tensor) -> Tensor:
    """Return the same of GPT-OSS: matrices [expert, input, output], gate and up interleaved.

    Rows behind those of all experts are of none, and what products leave there is not read.
    """
    at = torch.arange(len(x), device=x.device)
    owner = torch.searchsorted(rows.cumsum(0), at, right=True).clamp(max=len(rows) - 1)
    both = _product(x, module.gate_up_proj.transpose(1, 2), rows) + module.gate_up_proj_bias[owner]
    gated = module._apply_gate(both.where((at < rows.sum()).unsqueeze(1), 0))
    output = _product(gated, module.down_proj.transpose(1, 2), rows)
    return output + module.down_proj_bias[owner]


def _product(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Return each expert's rows of x times its matrix of weights [expert, output, input]."""
    if all(size * x.element_size() % _ALIGNMENT_BYTES == 0 for size in weights.shape[1:]):
        ends = rows.cumsum(0, dtype=torch.int32)
        if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
            grouped: Tensor = torch.ops.meshwright.grouped_product(x, weights, ends)
            return grouped
        return functional.grouped_mm(x, weights.transpose(-2, -1), offs=ends)
    parts = x.split(rows.tolist())
    return torch.cat([functional.linear(*pair) for pair in zip(parts, weights, strict=True)])


# torch's own shapes of grouped products in a graph are those of bf16 alone.
@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's rows of x times its matrix of weights [expert, output, input]."""
    return functional.grouped_mm(x, weights.transpose(-2, -1), offs=ends)


@_grouped_product.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@torch.library.custom_op("meshwright::grouped_weights", mutates_args=())
def _grouped_weights(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of each expert's matrix, [expert, output, input]."""
    return functional.grouped_mm(grad.t(), x, offs=ends)


@_grouped_weights.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def _keep_operands(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients_of_product(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weights, ends = ctx.saved_tensors
    grad, ops = grad.contiguous(), torch.ops.meshwright
    into_x = ops.grouped_product(grad, weights.transpose(-2, -1), ends)
    return into_x, ops.grouped_weights(grad, x, ends), None


_grouped_product.register_autograd(_gradients_of_product, setup_context=_keep_operands)


def _inverse(order: Tensor) -> Tensor:
    """Return the order that undoes an order."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order), device=order.device)
    return result


def mix_by_all_gather(
    module: nn.Module,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, [token, hidden].

    The module has this rank's part of the experts, in the order of ranks, and `meanwhile` is
    called while tokens are on the way.
    """
    each, count = index.shape[1], count_of(module)
    coming = _GatheredRows.apply(hidden, group)
    meanwhile()
    tokens, every = _Awaited.apply(coming), _at_once(weights, group)
    expert = _at_once(index, group).flatten() - group.rank() * count
    expert = torch.where((expert >= 0) & (expert < count), expert, count)
    slots = len(tokens) * min(each, count)
    order = expert.argsort(stable=True)[:slots]
    rows = expert.new_zeros(count + 1).scatter_add_(0, expert, torch.ones_like(expert))[:count]
    filled = (torch.arange(slots, device=rows.device) < rows.sum()).unsqueeze(1)
    chosen = tokens[order // each].where(filled, 0)
    # Grouped products leave what is behind the last offset as it was in memory.
    results = outputs(module, chosen, rows).where(filled, 0)
    weighted = results * every.flatten()[order].unsqueeze(1)
    whole = weighted.new_zeros(tokens.shape).index_add(0, order // each, weighted)
    # No view of another tensor: data parallelism hangs hooks on what a unit returns.
    return _SummedRows.apply(whole, group).to(hidden.dtype)


def _at_once(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of x [token, ...], as those of one sample, and wait for them."""
    return gather(x.unsqueeze(0), group).squeeze(0)


class _GatheredRows(torch.autograd.Function):
    """Begin to gather the rows of all ranks; gradients are summed over ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _begin_all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_rows(grad, ctx.group), None


class _SummedRows(torch.autograd.Function):
    """Sum the rows of all ranks and keep those of this one's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _wait(_begin_all_gather(grad, ctx.group)), None


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor) -> Tensor:
        return _wait(coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _begin_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def _reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ops = torch.ops._c10d_functional
    return _wait(ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name))


def mix_by_hierarchical_all_to_all(
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
    count = count_of(module)
    near = count * inside.size()
    to_nodes = _Copies.for_places(index // near, across, of=len(index), parts=across.size())
    going = to_nodes.journey()
    coming = send_rows(hidden[to_nodes.order], going)
    there, shares = to_nodes.exchange_rows(index), to_nodes.exchange_rows(weights)
    first = across.rank() * near
    of_node = torch.where((there >= first) & (there < first + near), there - first, near)
    to_ranks = _Copies.for_places(of_node // count, inside, of=len(index), parts=group.size())
    meanwhile()
    tokens = to_ranks.exchange_rows(await_rows(coming, going))
    there, shares = to_ranks.exchange_rows(of_node), to_ranks.exchange_rows(shares)
    sums = _sums(module, tokens, there - inside.rank() * count, shares, pairs=to_ranks.pairs)
    handed = to_ranks.sum_copies(sums.to(hidden.dtype), len(of_node))
    return to_nodes.sum_copies(handed, len(hidden))


def _sums(module: nn.Module, tokens: Tensor, chosen: Tensor, shares: Tensor, pairs: int) -> Tensor:
    """Return of tokens [row, hidden] the weighted sums over those of their experts that are here.

    Of what they have `chosen` [row, choice] 0 to this rank's experts are its own, `pairs` in all.
    """
    count, each = count_of(module), chosen.shape[1]
    expert = torch.where((chosen >= 0) & (chosen < count), chosen, count).flatten()
    order = _first(pairs, expert.argsort(stable=True))
    results = outputs(module, tokens[order // each], rows_of_experts(expert, count + 1)[:count])
    weighted = results * shares.flatten()[order].unsqueeze(1)
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
    def for_places(
        cls, places: Tensor, group: dist.ProcessGroup, *, of: int, parts: int
    ) -> _Copies:
        """Tell the other ranks what comes; `places` [row, choice] are ranks, others none of them.

        Copies of `of` tokens of each rank then are with as many `parts` of the experts.
        """
        ranks, rows = group.size(), len(places)
        chosen = places.new_zeros(rows, ranks + 1).scatter_add_(1, places, torch.ones_like(places))
        chosen = chosen[:, :ranks]
        goes = chosen > 0
        counts = torch.stack((goes.sum(0), chosen.sum(0)), dim=1)
        coming = exchanged_counts(counts.flatten(), group).view_as(counts)
        both = torch.stack((counts[:, 0], coming[:, 0], coming[:, 1]))
        leaving, arriving, pairs = _copies_by_rank(both, of, parts)
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

    def exchange_rows(self, x: Tensor) -> Tensor:
        """Return the rows that all ranks send to this one, of each their x [row, ...]."""
        there = self.journey()
        return await_rows(send_rows(x[self.order], there), there)

    def sum_copies(self, x: Tensor, rows: int) -> Tensor:
        """Return for each of as many rows the sum of what was made of its copies, x [copy, ...]."""
        back = Journey(self.leaving, self.arriving, self.group)
        return _Added.apply(await_rows(send_rows(x, back), back), self.order, rows)


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


def _copies_by_rank(rows: Tensor, of: int, parts: int) -> list[list[int]]:
    """Return the copies that leave for each rank, those that arrive, and the choices with them.

    They are copies of `of` tokens, which go to as many `parts` of the experts.
    """
    return rows.tolist()
