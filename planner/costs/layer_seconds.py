"""Seconds of one layer on one rank and micro-batch: of its device, its links and its host.

    passes         operators' kernels, forward, backward, and what runs a second time
    collectives    each collective inside the layer, as much of it as computation does not hide
    host_passes    the least that Python and launches take, however small the work

The one place where a framework's operators become seconds, whether one setting is asked or
thousands (`meshwright.planner.operators.operator_table.ManySettings`).  What sharding of states
adds is `meshwright.planner.costs.sharding`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

from meshwright.planner.architectures.parameters import routes
from meshwright.planner.costs import compute
from meshwright.planner.documents.cluster import Collective
from meshwright.planner.operators.operator_table import (
    BACKWARD_OF,
    GroupAxis,
    Operator,
    OperatorTable,
    Setting,
    either,
    larger,
    share,
)
from meshwright.planner.operators.operators import adapter_name

if TYPE_CHECKING:
    from meshwright.planner.costs.compute import DeviceRates
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.profile import Recompute
    from meshwright.planner.operators.expert_routing import Routing

ENDS = ("embedding", "head")
EXPERT_AXES: tuple[GroupAxis, ...] = ("expert", "experts_across", "experts_inside")
"""Over which tokens go to experts."""
BLOCK_COLLECTIVES = {True: 10, False: 4}
"""Collectives of a tensor-parallel block.  With sequence parallelism each of its two products that
divide outputs gathers in the forward and again in the backward, and reduces there; each of the
other two reduces, then gathers.  Without, each of these is a sum, forward or backward."""


class LinkSeconds(Protocol):
    """Seconds of a collective of a number of bytes in the group of an axis."""

    def __call__(
        self,
        operation: Collective,
        size_bytes: float,
        axis: GroupAxis,
        routing: Routing | None = None,
    ) -> float:
        """`routing` is that of an exchange between experts that sends each token once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSeconds:
    """Seconds of kernels, and how many the host starts for a forward and a recomputation."""

    forward_s: float
    backward_s: float
    recompute_s: float
    kernels: float
    kernels_again: float
    attention_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of attention between its projections, in the forward and in the backward."""
    shared_s: tuple[float, float] = (0.0, 0.0)
    """The same of experts that all tokens share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPasses:
    """Seconds of a layer's passes by the host, or with it."""

    forward_s: float
    backward_s: float
    recompute_s: float
    waits_s: float = 0.0
    """Seconds of these in which the device waits, over both passes."""


def with_host(
    kernel_s: KernelSeconds,
    host: HostPasses,
    links_s: float,
    window: Literal["kernels", "layer"],
    *,
    counted: bool = False,
) -> HostPasses:
    """Return the seconds of passes of which each may wait for its host.

    `links_s` are those of the collectives inside the layer.  What a layer waits over both passes
    counts half in each.  Where the host reads what the device `counted` in a forward, it starts
    nothing ahead: small kernels take its seconds, and the products that it starts last take those
    of the device, for which the next count waits.
    """
    if counted:
        back = HostPasses(forward_s=0.0, backward_s=host.backward_s, recompute_s=0.0)
        rest = replace(kernel_s, forward_s=0.0, recompute_s=0.0)
        behind = with_host(rest, back, links_s / 2, window)
        return HostPasses(
            forward_s=kernel_s.forward_s + host.forward_s,
            backward_s=behind.forward_s + behind.backward_s,
            recompute_s=kernel_s.recompute_s + host.recompute_s,
            waits_s=behind.waits_s,
        )
    if window == "kernels":
        return HostPasses(
            forward_s=larger(kernel_s.forward_s, host.forward_s),
            backward_s=larger(kernel_s.backward_s, host.backward_s),
            recompute_s=larger(kernel_s.recompute_s, host.recompute_s),
        )
    busy_s = kernel_s.forward_s + kernel_s.backward_s + kernel_s.recompute_s + links_s
    least_s = host.forward_s + host.backward_s + host.recompute_s
    wait_s = larger(0.0, least_s - busy_s) / 2
    return HostPasses(
        forward_s=kernel_s.forward_s + wait_s,
        backward_s=kernel_s.backward_s + wait_s,
        recompute_s=kernel_s.recompute_s,
        waits_s=2 * wait_s,
    )


def shown_s(communication_s: float, window_s: float, overlap: float) -> float:
    """Seconds of communication that computation of `window_s` beside it does not hide.

        max((1 - o) c, c - w)

    o is the share that can hide at all.
    """
    return larger((1 - overlap) * communication_s, communication_s - window_s)


def passes(table: OperatorTable, recompute: Recompute, on: DeviceRates) -> KernelSeconds:
    """Return the seconds of a layer's kernels."""
    operators, again = table.operators, table.recomputed_operators(recompute)
    end = table.kind in ENDS
    core = [op for op in operators if op.kind == "attention" or op.in_core]
    shared = [op for op in operators if op.name.startswith("shared") and op.name != "shared_sum"]

    def both_s(some: Iterable[Operator]) -> tuple[float, float]:
        there = sum(forward_s(op, on, end=end) for op in some)
        return there, sum(backward_s(op, on, end=end) for op in some)

    return KernelSeconds(
        forward_s=sum(forward_s(op, on, end=end) for op in operators),
        backward_s=sum(backward_s(op, on, end=end) for op in operators),
        recompute_s=sum(forward_s(op, on, end=end) for op in again),
        kernels=sum(_kernels(op, on, end=end) for op in operators),
        kernels_again=sum(_kernels(op, on, end=end) for op in again),
        attention_s=both_s(core),
        shared_s=both_s(shared),
    )


def forward_s(operator: Operator, on: DeviceRates, *, end: bool) -> float:
    """Seconds of an operator's forward; `end`: of embedding or head, which stay in 16 bits."""
    wide_s = compute.forward_s(operator, on)
    if not compute.is_narrow(operator, on, end=end):
        return wide_s
    return either(operator.aligned, compute.narrow_forward_s(operator, on), wide_s)


def backward_s(operator: Operator, on: DeviceRates, *, end: bool) -> float:
    """Seconds of an operator's backward, with those of the forward that it may begin with."""
    again_s = forward_s(operator, on, end=end) if operator.remade else 0.0
    wide_s = compute.backward_s(operator, on) + again_s
    if not compute.is_narrow(operator, on, end=end):
        return wide_s
    return either(operator.aligned, compute.narrow_backward_s(operator, on) + again_s, wide_s)


def _kernels(operator: Operator, on: DeviceRates, *, end: bool) -> float:
    narrow = compute.is_narrow(operator, on, end=end)
    return operator.kernels + ((2 - on.narrow_weights) * on.cast_kernels if narrow else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRule:
    """Shares of a framework's collectives inside layers that are seen."""

    tensor: float = 1.0
    """Share of the collectives of blocks whose residual stream is divided along the sequence."""
    beside: float = 0.0
    """Share of one of these collectives that can hide behind the product beside it."""
    context: float = 0.0
    """Share of what goes round between context-parallel ranks that can hide behind attention."""
    second_gather: float = 0.0
    """Share of gathering a product's input again, for its weights' gradient, that is seen."""
    gathered: float = 1.0
    """Bytes of what tensor-parallel ranks gather in blocks, over those in 16 bits."""
    experts: float = 0.0
    """Share of exchanges between experts that can hide behind another micro-batch."""
    shared: float = 0.0
    """Share of sending tokens to experts, and of bringing their gradients back, that can hide
    behind the experts that all tokens share."""


def link_rule(
    framework: Framework, *, sequence_parallel: bool, eight_bits: bool = False
) -> LinkRule:
    """Return what a framework hides of the collectives inside layers."""
    narrow = eight_bits and "activations" in framework.eight_bit.gathered
    return LinkRule(
        tensor=1 - (framework.tensor.overlap if sequence_parallel else 0.0),
        context=framework.context.overlap,
        second_gather=framework.tensor.second_gather,
        gathered=0.5 if narrow else 1.0,
        experts=framework.experts.overlap,
        shared=framework.experts.shared_overlap,
    )


def collectives(
    table: OperatorTable,
    again: Sequence[Operator],
    link_s: LinkSeconds,
    rule: LinkRule,
    on: DeviceRates,
) -> Iterator[tuple[Operator, float, float]]:
    """Yield each collective and its seconds, forward and backward, then those of recomputation.

    Seconds are what is seen of tensor parallelism's, and all of the others' (`seen_links`).
    """
    end = table.kind in ENDS

    def one_s(kind: Collective, size: float, operator: Operator) -> float:
        narrow = kind == "all_gather" and operator.axis == "tensor" and not (end or operator.wide)
        size = size * rule.gathered if narrow else size
        return link_s(kind, size, operator.axis, operator.routing)

    for operator in table.operators:
        if not operator.communicates:
            continue
        size = operator.moved_bytes
        back = operator.backward_moved_bytes if operator.kind == "all_to_all" else size
        seen = 1.0 if operator.waits else _exposed_s(operator.axis, rule, end=end)
        back_s = one_s(BACKWARD_OF[operator.kind], back, operator)
        there_s = one_s(cast(Collective, operator.kind), size, operator)
        if operator.only == "forward":
            back_s = 0.0 * back_s
        elif operator.only == "backward":
            there_s, back_s = 0.0 * there_s, there_s
        elif operator.ring:
            back_s = back_s + there_s
        elif rule.second_gather and operator.kind == "all_gather" and not (end or operator.waits):
            back_s = back_s + rule.second_gather * there_s
        if rule.beside and operator.axis == "tensor" and not (end or operator.waits):
            window_s, window_back_s = _beside_s(operator, table.operators, on)
            there_s = _left_s(there_s, window_s, rule)
            back_s = _left_s(back_s, window_back_s, rule)
        yield operator, seen * there_s, seen * back_s
    for operator in again:
        if operator.communicates and operator.only != "backward":
            back_s = one_s(cast(Collective, operator.kind), operator.moved_bytes, operator)
            seen = 1.0 if operator.waits else _exposed_s(operator.axis, rule, end=end)
            if rule.beside and operator.axis == "tensor" and not (end or operator.waits):
                back_s = _left_s(back_s, _beside_s(operator, again, on)[0], rule)
            yield operator, 0.0, seen * back_s


def in_pieces(
    table: OperatorTable, again: Sequence[Operator], ranks: float, kernel_s: KernelSeconds
) -> KernelSeconds:
    """Return passes whose products beside collectives run in a piece for each rank.

    Each piece is a kernel of each product, and a copy from or to its rank.
    """

    def more(operators: Sequence[Operator]) -> float:
        products = [
            len(_neighbouring_products(op, operators))
            for op in operators
            if op.axis == "tensor" and not op.waits and _neighbouring_products(op, operators)
        ]
        return (ranks - 1) * sum(products) + ranks * len(products)

    if table.kind in ENDS:
        return kernel_s
    return replace(
        kernel_s,
        kernels=kernel_s.kernels + more(table.operators),
        kernels_again=kernel_s.kernels_again + more(again),
    )


def _neighbouring_products(
    collective: Operator, operators: Iterable[Operator]
) -> list[tuple[Operator, str]]:
    """Return the products in front of which a collective gathers, or behind which it scatters.

    An operator that stands for several has each of them, by what it makes.
    """
    if collective.kind == "all_gather":
        consumers = [op for op in operators if collective.outputs.keys() & set(op.inputs)]
    elif collective.kind == "reduce_scatter":
        consumers = [op for op in operators if op.outputs.keys() & set(collective.inputs)]
    else:
        return []
    return [(op, name) for op in consumers if op.kind == "matmul" for name in op.outputs]


def _beside_s(
    collective: Operator, operators: Iterable[Operator], on: DeviceRates
) -> tuple[float | None, float | None]:
    """Return the seconds of the products that a collective can run beside, forward and backward.

    A gather in front of products goes piece by piece with all of them, and what leaves a product is
    scattered as it is made.  Backward the gradient is gathered in front of that product's other one
    of the same size; in front of a gather it is the sum of what its products make, so that it goes
    with the product only where there is a single one (torch, _inductor/fx_passes,
    micro_pipeline_tp.py).  None: there is no such product.
    """
    beside = _neighbouring_products(collective, operators)
    if not beside:
        return None, None
    each = {op.name: op for op, _ in beside}.values()
    window_s = sum(forward_s(op, on, end=False) for op in each)
    single = collective.kind == "reduce_scatter" or len(beside) == 1
    return window_s, window_s if single else None


def _left_s(communication_s: float, window_s: float | None, rule: LinkRule) -> float:
    """Return what is seen of a collective beside products of given seconds, if there are any."""
    if window_s is None:
        return communication_s
    return shown_s(communication_s, window_s, rule.beside)


def seen_links(
    each: Iterable[tuple[Operator, float, float]], kernel_s: KernelSeconds, rule: LinkRule
) -> tuple[float, float]:
    """Return what is seen of a layer's collectives in its forward and in its backward.

    What goes round between context-parallel ranks hides behind attention, block by block.  Tokens
    on their way to experts may hide behind those that all tokens share.
    Exchanges between experts may hide behind the passes of another micro-batch: of both
    passes together c, behind both passes' w, max((1 - o) c, c - w) is seen.
    """
    forward_s = backward_s = there_all_s = back_all_s = there_ring_s = back_ring_s = 0.0
    for operator, there_s, back_s in each:
        axis, hides = operator.axis, rule.shared if operator.beside_shared else 0.0
        if hides:
            window_s, window_back_s = kernel_s.shared_s
            there_s = shown_s(there_s, window_s, hides)  # noqa: PLW2901 - what is left of it
            back_s = shown_s(back_s, window_back_s, hides)  # noqa: PLW2901
        if axis in EXPERT_AXES and rule.experts:
            there_all_s, back_all_s = there_all_s + there_s, back_all_s + back_s
        elif axis == "context" and rule.context:
            there_ring_s, back_ring_s = there_ring_s + there_s, back_ring_s + back_s
        else:
            forward_s, backward_s = forward_s + there_s, backward_s + back_s
    if rule.context:
        window_s, window_back_s = kernel_s.attention_s
        forward_s = forward_s + shown_s(there_ring_s, window_s, rule.context)
        backward_s = backward_s + shown_s(back_ring_s, window_back_s, rule.context)
    if rule.experts:
        both_s = there_all_s + back_all_s
        window_s = kernel_s.forward_s + kernel_s.backward_s + kernel_s.recompute_s
        seen = share(shown_s(both_s, window_s, rule.experts), both_s)
        forward_s, backward_s = forward_s + seen * there_all_s, backward_s + seen * back_all_s
    return forward_s, backward_s


def _exposed_s(axis: GroupAxis, rule: LinkRule, *, end: bool) -> float:
    return rule.tensor if axis == "tensor" and not end else 1.0


def host_passes(
    framework: Framework,
    table: OperatorTable,
    setting: Setting,
    kernel_s: KernelSeconds,
    *,
    recompute: Recompute,
    devices_per_node: int,
) -> HostPasses:
    """Return the least seconds that the host takes for a layer's passes.

    Each block has Python around it, each kernel a launch; tensor parallelism and experts add to
    both passes, and so do checks of the collectives of a divided block, and recomputation.  A
    captured graph has nothing of it but its kernels, those of a backward twice as many.
    """
    host = framework.host
    if setting.captured:
        return HostPasses(
            forward_s=kernel_s.kernels * host.replay_s,
            backward_s=2 * kernel_s.kernels * host.replay_s,
            recompute_s=kernel_s.kernels_again * host.replay_s,
        )
    each = host.kernel_s
    there, back, again = (
        kernel_s.kernels * each.forward,
        kernel_s.kernels * each.backward,
        kernel_s.kernels_again * each.forward,
    )
    if recompute != "none" and not setting.compiled:
        asked = host.selective_s * (recompute == "selective") * kernel_s.kernels
        there = there + host.checkpoint_s.forward + asked
        again = again + host.checkpoint_s.backward + asked
    if table.kind not in ENDS:
        if setting.compiled:
            there, back = there + host.compiled_s.forward, back + host.compiled_s.backward
        routed_s = host.experts_s if routes(table.kind) else 0.0
        more = routed_s
        if setting.divides_tensors:
            spanned = -(-setting.tensor // devices_per_node)
            checked = host.checked_s * setting.tensor * (0.75 + 0.25 * spanned)
            each_s = (setting.tensor - 1) * host.rank_s + checked
            more = more + BLOCK_COLLECTIVES[setting.sequence_parallel] * each_s
        modules = _adapter_modules(table)
        forward_s = host.layer_s.forward + modules * host.adapter_s.forward
        there = there + forward_s + more / 2
        back = back + host.layer_s.backward + modules * host.adapter_s.backward + more / 2
        again = again + (forward_s + routed_s / 2) * (recompute == "full")
    return HostPasses(forward_s=there, backward_s=back, recompute_s=again)


def _adapter_modules(table: OperatorTable) -> float:
    """Return how many products of a layer have an adapter beside them."""
    names = {operator.name for operator in table.operators}
    return sum(
        operator.kernels
        for operator in table.operators
        if adapter_name(operator.name) in names and not operator.name.startswith("expert")
    )
