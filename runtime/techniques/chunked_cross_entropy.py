"""Cross-entropy of a projection's outputs without the outputs: a few rows of logits at a time.

For rows x [row, hidden] and weights W [vocabulary, hidden], of each chunk of r rows

    z = x W^T / divisor, capped where the model caps     fp32, [r, vocabulary]
    total += sum of (log-sum-exp z - z[target])
    g = softmax(z) - one-hot(target)                     what the sum's gradient for z is
    dx = g W,  dW += g^T x

`precomputed` gradients are made in forward, where the chunk's logits are at hand, and wait for
backward, which multiplies them with the gradient that arrives.  `recomputed` ones are made in
backward from new logits, and nothing but x waits.  Bytes above x and W, of N rows, H hidden and V
outputs of a rank, e bytes an element and l of a logit (4 in fp32; 6 in 16 bits, with what it was
made from or becomes; 4 more where a model caps):

    precomputed     forward e V H + e N H + l r V, saved e V H + e N H, backward no more
    recomputed      forward l r V, saved nothing, backward e V H + e N H + l r V

Over a tensor axis every rank has its part of the vocabulary: per chunk one all-gather of two
numbers a row, and dx is this rank's part of a sum.

Sums of dW run over chunks in the weights' type: with bf16 few large chunks lose less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.documents.profile import ChunkedLoss, LossGradients
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.collectives import gather
from meshwright.runtime.core.head import Head
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.loss import IGNORED
from meshwright.runtime.core.torch_internals import unseen_by_recompute
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.aligned_linear import PARTED, parts


def in_chunks(head: nn.Module, how: ChunkedLoss, group: dist.ProcessGroup | None) -> None:
    """Let a head take targets [sample, position] too, and return its loss as (sum, count).

    `group` are the ranks among which the tensor axis divides its outputs, if it does.
    """
    if not isinstance(head, Head):
        raise LaunchError(
            "loss: is in chunks, and the model's last layer is no output projection; "
            "plan with --fix loss=full"
        )
    output = head.output
    if lora.is_adapted(output):
        raise LaunchError(
            "loss: is in chunks, and the output projection has an adapter; "
            "plan with --fix loss=full, or leave the projection out of training.lora.targets"
        )

    def forward(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden = head.norm(x)
        if group is not None:
            hidden = gather(hidden, group)
        weight, bias = (to_local(output._parameters.get(name)) for name in ("weight", "bias"))
        assert weight is not None
        return chunked_loss(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            rows=how.rows,
            gradients=how.gradients,
            bias=bias,
            cap=head.cap,
            divisor=head.divisor,
            group=group,
        )

    head.forward = forward  # type: ignore[method-assign, assignment]


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: int,
    gradients: LossGradients,
    bias: Tensor | None = None,
    cap: float | None = None,
    divisor: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of targets [row] in fp32 (fp64 of fp64), and their count.

    x [row, hidden], weight [vocabulary, hidden], bias [vocabulary]; of a `group` each rank passes
    its part of the vocabulary, in order, and all of x.  Precomputed gradients are taken once.
    """
    makes = torch.is_grad_enabled() and gradients == "precomputed"
    rule = _Rule(rows=rows, makes=makes, cap=cap, divisor=divisor, group=group)
    return _Chunked.apply(x, weight, bias, targets, rule), (targets != IGNORED).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """The settings with which chunks are computed."""

    rows: int
    makes: bool
    """Gradients are made in forward."""
    cap: float | None
    divisor: float
    group: dist.ProcessGroup | None

    def first(self, weight: Tensor) -> int:
        """Return the number of this rank's first output."""
        return 0 if self.group is None else self.group.rank() * len(weight)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rule: _Rule
    ) -> Tensor:
        ctx.rule = rule
        wanted = ctx.needs_input_grad[:3] if rule.makes else (False, False, False)
        # Logits change in place, which selective recompute must not have saved.
        total, grads = unseen_by_recompute(
            lambda: _sum_over_chunks(x, weight, bias, targets, rule, wanted)
        )
        if rule.makes:
            ctx.save_for_backward(*grads)
        else:
            ctx.save_for_backward(x, weight, bias, targets)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.rule.makes:
            grads = ctx.saved_tensors
        else:
            x, weight, bias, targets = ctx.saved_tensors
            _, grads = _sum_over_chunks(
                x, weight, bias, targets, ctx.rule, ctx.needs_input_grad[:3]
            )
        for grad_part in grads:  # in place: torch refuses a second backward over what forward made
            if grad_part is not None:
                grad_part.mul_(grad.to(grad_part.dtype) if grad_part.ndim else grad)
        return *grads, None, None


@torch.no_grad()
def _sum_over_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rule: _Rule,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the sum over all chunks, and those gradients of it that are wanted."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=exact, device=x.device)
    dx = torch.empty_like(x) if wanted[0] else None
    dw = torch.zeros_like(weight) if wanted[1] else None
    db = torch.zeros_like(bias) if wanted[2] and bias is not None else None
    columns = parts(weight, *weight.shape)
    for start in range(0, len(x), rule.rows):
        part = slice(start, start + rule.rows)
        a, target = x[part], targets[part]
        z = _logits(a, weight, bias, rule, exact)
        index, here = _own_targets(target, rule.first(weight), len(weight))
        at = z.gather(1, index[:, None]).squeeze(1).masked_fill(~here, 0.0)
        slope = None if rule.cap is None or not any(wanted) else _slope(z, rule.cap)
        largest = z.amax(-1)
        z.sub_(largest[:, None]).exp_()  # in place: a chunk of logits exists once
        sums, at = _of_all(z.sum(-1).log_() + largest, at, rule)
        counts = target != IGNORED
        total += torch.where(counts, sums - at, 0.0).sum()
        if not any(wanted):
            del z  # before the next chunk's are made
            continue
        z.mul_((largest - sums).exp_()[:, None])
        z.scatter_add_(1, index[:, None], -here.to(exact)[:, None])
        z.mul_((counts / rule.divisor).to(exact)[:, None])
        if slope is not None:
            z.mul_(slope)
        for at_once in columns:
            g = z[:, at_once].to(x.dtype).contiguous()
            if at_once.stop == len(weight):
                del z, slope
            if dx is not None:
                dx[part].addmm_(g, weight[at_once], beta=int(at_once.start > 0))
            if dw is not None:
                dw[at_once].addmm_(g.t(), a)
            if db is not None:
                db[at_once] += g.sum(0)
            del g
    return total, (dx, dw, db)


def _logits(
    a: Tensor, weight: Tensor, bias: Tensor | None, rule: _Rule, exact: torch.dtype
) -> Tensor:
    z = PARTED.output(a, weight, None, bias).to(exact)
    if rule.divisor != 1.0:
        z = z.div_(rule.divisor)
    return z if rule.cap is None else z.div_(rule.cap).tanh_().mul_(rule.cap)


def _own_targets(target: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return each target's number among this rank's outputs, 0 where it has none, and whether."""
    index = target - first
    here = (index >= 0) & (index < count) & (target != IGNORED)
    return index.masked_fill(~here, 0), here


def _slope(z: Tensor, cap: float) -> Tensor:
    """Return the derivative of the cap at soft-capped logits."""
    return z.div(cap).square_().neg_().add_(1)


def _of_all(sums: Tensor, at: Tensor, rule: _Rule) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of all ranks' logits and the target's logit, [row]."""
    if rule.group is None:
        return sums, at
    both = torch.stack((sums, at))
    ops = torch.ops._c10d_functional
    whole = ops.all_gather_into_tensor(both, rule.group.size(), rule.group.group_name)
    every = ops.wait_tensor(whole).unflatten(0, (rule.group.size(), 2))
    return every[:, 0].logsumexp(0), every[:, 1].sum(0)
