"""Habits of torch's loops and wrappers: each says what to write with an Engine instead.

Gradients of a plan lie in parts, sums and scales of its own until the update.  So `p.grad` stands
for one that may not be used, an optimizer does not step by itself, and a loss is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshwright.planner.errors import EngineAttributeError, LaunchError, OptimizerError

RUN = "engine.outputs(batch) returns what the module makes, engine.evaluate(batch) its loss"
VALUES = "engine.state_dict() returns the whole model's tensors on every rank; " + RUN
STEP = (
    "engine.step(batch) runs forward, loss, backward and update; engine.forward_backward(batch) "
    "all but the update, which engine.optimizer_step() makes"
)
FILES = "engine.save(folder) writes a checkpoint, and engine.resume(folder) goes on from it"
INSTEAD = {
    "training": "engine.train() and engine.eval() set the mode, and in eval mode " + RUN,
    **dict.fromkeys(
        ("model", "module", "modules", "named_modules", "children", "get_submodule", "buffers",
         "named_buffers"), VALUES,
    ),
    **dict.fromkeys(
        ("parameters", "named_parameters"),
        "engine.weights() has parameters by name, engine.gradients() their gradients; "
        "settings by parameter go into Engine(groups=...), clipping is Engine(clip_norm=...)",
    ),
    **dict.fromkeys(("backward", "train_batch", "train_step", "fit"), STEP),
    **dict.fromkeys(("__call__", "forward", "predict", "eval_batch", "inference", "generate"), RUN),
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "bfloat16", "float", "double"),
        "Engine(device=...) says where it computes, and the plan's precision in which type",
    ),
    **dict.fromkeys(("no_sync", "accumulate", "join"), "call engine.forward_backward(batch) "
        "several times before one engine.optimizer_step()"),
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_norm", "clip_gradients", "unscale_"),
        "Engine(clip_norm=...) or engine.optimizer_step(clip_norm=...) clips gradients"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "get_lr", "set_lr", "param_groups", "lr"),
        "engine.optimizer has param_groups, and goes into any torch.optim.lr_scheduler"),
    **dict.fromkeys(
        ("save_checkpoint", "load_checkpoint", "save_pretrained", "save_model"), FILES
    ),
    **dict.fromkeys(("rank", "world_size", "global_rank"), "engine.slice_rank and engine.slices "
        "divide data, and engine.leads is true on the rank that logs"),
    **dict.fromkeys(("compile", "apply", "requires_grad_", "register_forward_hook", "add_module"),
        "change the module in build(), before the engine divides it"),
}  # fmt: skip
"""The replacement to suggest, by the requested name."""


def missing(name: str, offered: Sequence[str]) -> AttributeError:
    """Return the error of an attribute that an Engine does not have."""
    if name in INSTEAD:
        return EngineAttributeError(f"engine.{name}: an Engine has none; {INSTEAD[name]}")
    return EngineAttributeError(
        f"engine.{name}: an Engine has none; it has {', '.join(sorted(offered))}"
    )


class LossValue(float):
    """The mean loss of a global batch: a number, whose backward was done."""

    def item(self) -> float:
        """Return the plain number."""
        return float(self)

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the backward pass was part of the step."""
        raise LaunchError(
            f"loss.backward(): {self:.4g} is the loss of all ranks, and its backward pass was "
            f"done; {STEP}"
        )


class PendingGradient(Tensor):
    """Stands in `p.grad` between a backward and the update, without memory; any use is refused."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> PendingGradient:
        """Make one of the shape and type of a parameter."""
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        assert isinstance(wrapper, PendingGradient)
        return wrapper

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse what torch is asked to do with it."""
        raise _pending("p.grad")

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse what reaches it past Python."""
        raise _pending("p.grad")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it stands for."""
        return "PendingGradient(see engine.gradients())"


def _pending(what: str) -> OptimizerError:
    return OptimizerError(
        f"{what}: gradients of a plan are summed over ranks, scaled and clipped in one place; "
        "call engine.optimizer_step(clip_norm=...) to update with them, engine.gradients() to look "
        "at or change them, engine.zero_grad() to forget them"
    )


def refuse_step(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Refuse `optimizer.step()` while gradients wait for the engine's update."""
    raise _pending(f"{type(optimizer).__name__}.step()")


def refuse_zero_grad(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Refuse `optimizer.zero_grad()` of one of several while gradients wait."""
    raise _pending(f"{type(optimizer).__name__}.zero_grad()")
