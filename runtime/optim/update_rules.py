"""Update rules of a plan's training settings, over a rank's part of a language model.

    adamw          torch's fused one, its moments in the type of what is trained
    adamw-bf16     moments in bf16, the update in fp32
    adamw-8bit     torchao's, a scale for each 256 elements of a moment
    adafactor, muon, sgd    torch's; Muon updates matrices of blocks, AdamW the rest
    lion           the sign of a mean of gradients (Chen et al., 2023, arXiv:2302.06675)

Weight decay acts on matrices alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.documents.plan import Offload
from meshwright.planner.documents.training import Optimizer, Training
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.models.family_adapter import Adapter
from meshwright.runtime.optim.gradients import Slot, copies_of
from meshwright.runtime.optim.offloaded_state import host_like
from meshwright.runtime.optim.sharded_optimizer import Factory, ParameterGroup
from meshwright.runtime.parallel.holders import Holders


def slots_of(
    module: nn.Module,
    adapter: Adapter,
    place: Place,
    *,
    ends: dist.ProcessGroup | None = None,
    holders: Callable[[str], Holders | None] | None = None,
    summed: Collection[str] = frozenset(),
    factors: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Slot]:
    """Yield what is trained of a stage, by published name.

    `ends` are the first and last stage, which hold a copy each of a tied weight; where pipelines
    differ, `holders` returns all ranks that hold a parameter.  `summed` and `factors` are by
    parameter: see meshwright.runtime.engine.apply_plan.Staged.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        local = to_local(parameter)
        tied = ends if name in adapter.tied_names else None
        copies = copies_of(parameter, place.copies) * (1 if tied is None else tied.size())
        by = None if holders is None else holders(name)
        if by is not None and by.tied:
            tied, copies = by.group, copies_of(parameter, by.ranks)
        slot = Slot(
            name=adapter.published_name(name),
            parameter=parameter,
            local=local.detach(),
            copies=copies,
            partial=name in summed,
            pieces=adapter.pieces(name),
            tied=tied,
            reduced=by is not None,
            factor=factors.get(name, 1.0),
        )
        _refuse_gaps(slot)
        yield slot


def parameter_groups_of(
    slots: Sequence[Slot], training: Training, *, device: torch.device, offload: Offload = "none"
) -> list[ParameterGroup]:
    """Return groups under the optimizer of a plan."""
    muon = training.optimizer == "muon"
    blocks = {slot.name for slot in slots if muon and _is_of_muon(slot)}
    plain = [slot for slot in slots if slot.name not in blocks]
    usual = _rule("adamw" if muon else training.optimizer, training, device, offload)
    groups = [
        ParameterGroup(
            usual.factory,
            {"weight_decay": training.weight_decay if matrices else 0.0},
            tuple(slot.name for slot in plain if (slot.parameter.ndim > 1) == matrices),
            elementwise=usual.elementwise,
            waits=usual.waits,
        )
        for matrices in (True, False)
    ]
    if blocks:
        rule = _rule("muon", training, device, offload)
        names = tuple(slot.name for slot in slots if slot.name in blocks)
        groups.append(
            ParameterGroup(
                rule.factory,
                {"weight_decay": training.weight_decay},
                names,
                elementwise=rule.elementwise,
                waits=rule.waits,
            )
        )
    return groups


def _is_of_muon(slot: Slot) -> bool:
    """Return whether Muon updates a parameter: a matrix of a block."""
    ends = ("embed_tokens", "wte", "wpe", "lm_head", "tokens", "positions", "output.weight")
    return slot.parameter.ndim == 2 and not any(end in slot.name for end in ends)


class _UpdateRule(NamedTuple):
    """A factory of optimizers, and what it needs."""

    factory: Factory
    elementwise: bool
    waits: bool
    """Its steps do not look at `found_inf`."""


def _rule(
    optimizer: Optimizer, training: Training, device: torch.device, offload: Offload
) -> _UpdateRule:
    betas = training.beta1, training.beta2
    eps = training.epsilon
    rate: dict[str, Any] = {"lr": training.learning_rate}
    muon: dict[str, Any] = {"momentum": training.beta1, "adjust_lr_fn": "match_rms_adamw"}
    rules: dict[Optimizer, tuple[Callable[..., Any], bool, bool]] = {
        "adamw": (functools.partial(_adamw, training, device, offload), True, False),
        "adamw-bf16": (functools.partial(NarrowAdamW, betas=betas, eps=eps, **rate), True, False),
        "lion": (functools.partial(Lion, betas=betas, **rate), True, False),
        "sgd": (functools.partial(torch.optim.SGD, fused=True, **rate), True, False),
        "adafactor": (functools.partial(torch.optim.Adafactor, **rate), False, True),
        "muon": (functools.partial(torch.optim.Muon, **muon, **rate), False, True),
    }
    if optimizer in rules:
        return _UpdateRule(*rules[optimizer])
    if optimizer == "adamw-8bit":
        low_bit = _torchao().AdamW8bit
        return _UpdateRule(functools.partial(low_bit, betas=betas, eps=eps, **rate), True, True)
    raise LaunchError(
        f"training.optimizer: is {optimizer}, whose pages are bitsandbytes' own; use adamw-8bit, "
        "or adamw with offload optimizer"
    )


def _torchao() -> Any:
    """Return torchao's optimizers, an optional part."""
    try:
        return importlib.import_module("torchao.optim")
    except ImportError as error:
        raise LaunchError(
            "training.optimizer: is adamw-8bit, which torchao has, and that is not installed; "
            "pip install torchao, or use adamw-bf16"
        ) from error


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum: w -= lr (sign(b1 m + (1 - b1) g) + decay w), m = b2 m + (1 - b2) g."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {"exp_avg": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        kept = 1 - getattr(self, "found_inf", torch.zeros(()))
        for group in self.param_groups:
            slow, fast = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                share, mean = kept.to(parameter.device), self.state[parameter]["exp_avg"]
                gradient = torch.where(share > 0, parameter.grad, torch.zeros_like(parameter.grad))
                update = mean.lerp(gradient.to(mean.dtype), 1 - slow).sign_()
                update.add_(parameter, alpha=group["weight_decay"])
                parameter.sub_(update.to(parameter.dtype) * (group["lr"] * share))
                mean.lerp_(gradient.to(mean.dtype), (1 - fast) * share.to(mean.dtype))


class NarrowAdamW(torch.optim.Optimizer):
    """AdamW with its moments in bf16; each update is computed in fp32."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            like = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)
            step = torch.zeros((), device=parameter.device)
            self.state[parameter] = {
                "step": step,
                "exp_avg": like,
                "exp_avg_sq": like.clone(),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        kept = 1 - getattr(self, "found_inf", torch.zeros(()))
        for group in self.param_groups:
            slow, fast = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, share = self.state[parameter], kept.to(parameter.device)
                state["step"] += share
                gradient = parameter.grad.float()
                gradient = torch.where(share > 0, gradient, torch.zeros_like(gradient))
                first = state["exp_avg"].float().lerp(gradient, (1 - slow) * share)
                second = state["exp_avg_sq"].float().lerp(gradient.square(), (1 - fast) * share)
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)
                steps = state["step"].clamp(min=1.0)
                first /= 1 - slow**steps
                root = second.div_(1 - fast**steps).sqrt_().add_(group["eps"])
                update = first.div_(root).add_(parameter.float(), alpha=group["weight_decay"])
                parameter.sub_((update * (group["lr"] * share)).to(parameter.dtype))


def _adamw(
    training: Training, device: torch.device, offload: Offload, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        groups, betas=(training.beta1, training.beta2), eps=training.epsilon, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Made now rather than at the first step, so that a checkpoint can load.
            optimizer.state[parameter] = _first_state(parameter, device, offload)
    return optimizer


def _first_state(parameter: Tensor, device: torch.device, offload: Offload) -> dict[str, Tensor]:
    """Return what torch's AdamW keeps of a parameter before its first step."""

    def zeros() -> Tensor:
        if offload == "none" or parameter.device != device:
            return torch.zeros_like(parameter, requires_grad=False)
        return host_like(parameter).zero_()

    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": zeros(),
        "exp_avg_sq": zeros(),
    }


def _refuse_gaps(slot: Slot) -> None:
    """Refuse a parameter that is not alone in its memory: fused updates run through that."""
    alone = torch.empty_like(slot.local, device="meta")
    if _strides(slot.local) != _strides(alone):
        raise LaunchError(
            f"{slot.name}: has strides {slot.local.stride()} in memory, between which others lie, "
            "and AdamW's fused update runs through memory. Let the module keep the parameter "
            "contiguous"
        )


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that elements have; of a dim of one there may be any."""
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
