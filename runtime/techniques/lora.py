"""LoRA: a frozen model with small trained matrices beside its linear layers (Hu et al., 2021).

An adapted module computes W x + (alpha / rank) B A x, A [rank, in] and B [out, rank].  A begins at
random and B at zero, so that training begins where the frozen model stands.  Under tensor
parallelism B is divided where W has its own part of the output features, A where it has its own
part of the input features; the other is replicated, and its gradient summed.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.costs.lora import EVERY_LINEAR, is_target
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.techniques.packed_weights import PackedLinear

A, B = "lora_a", "lora_b"


def adapt(
    layers: Mapping[str, nn.Module],
    lora: Lora,
    *,
    besides: Collection[str] = (),
) -> int:
    """Freeze the layers, and put adapters on what is aimed at.

    Return how many modules are adapted.  Embedding and head are none of them, nor are those whose
    paths in a layer are `besides`.
    """
    count = 0
    for name, layer in layers.items():
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        if name in (EMBEDDING, HEAD):
            continue
        for path, module in layer.named_modules():
            if _is_linear(module) and is_target(path, lora) and path not in besides:
                _adapt(module, lora)
                count += 1
            elif isinstance(module, nn.TransformerEncoderLayer):
                # In eval mode torch hands whole weights to one kernel of its own, past adapters,
                # but for an unknown activation.
                module.activation_relu_or_gelu = 0
    return count


def store_frozen(layer: nn.Module, dtype: torch.dtype) -> None:
    """Store a layer's frozen weights in the type that they are computed in."""
    for parameter in layer.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def low_rank(module: nn.Module, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return what an adapter adds, with its own matrices or their local parts."""
    scale: float = module.lora_scale  # type: ignore[assignment]
    return functional.linear(functional.linear(x, a), b) * scale


def adapter_output(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a module's adapter adds, with the matrices that it has now."""
    a, b = getattr(module, A), getattr(module, B)
    return low_rank(module, x, a, b)


def is_adapted(module: nn.Module) -> bool:
    """Tell whether a module has an adapter."""
    return A in module._parameters


def is_adapters(name: str) -> bool:
    """Tell whether a parameter belongs to an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Give an adapter's whole matrix its first values in place."""
    if name.endswith(f".{B}"):
        parameter.zero_()
    else:
        bound = 1 / math.sqrt(parameter.shape[1])  # torch's own first values of a Linear
        parameter.uniform_(-bound, bound, generator=generator)


def wants_gradient(layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Let the output of a frozen first layer take part in backward.

    A stage hands the gradient of its input back, also where nothing before it is trained.
    """
    return output if output.requires_grad else output.requires_grad_()


def peft_files(
    tensors: Mapping[str, Tensor], lora: Lora, *, base: str | None, transposed: bool
) -> tuple[dict[str, Tensor], str]:
    """Return adapters as the library peft has them: tensors by name, and adapter_config.json.

    `tensors` are by the library's parameter names; `transposed` says that the frozen weights are.
    """
    named, modules = {}, set()
    for name, tensor in tensors.items():
        path, _, which = name.rpartition(".")
        modules.add(path.rpartition(".")[2])
        named[f"base_model.model.{path}.{'lora_A' if which == A else 'lora_B'}.weight"] = tensor
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    return named, json.dumps(settings, indent=2) + "\n"


def refuse_without_targets(adapted: int, lora: Lora, place: Place, *, model: str) -> None:
    """Refuse targets that no module of the whole model has; every rank tells how many it has."""
    total = torch.tensor(adapted, device=place.mesh.device_type if place.mesh else "cpu")
    if place.mesh is not None:
        dist.all_reduce(total)
    if not total:
        refuse(lora, model)


def refuse(lora: Lora, model: str) -> NoReturn:
    """Refuse targets that no module has."""
    raise LaunchError(
        f"training.lora.targets: no linear layer in {model}'s blocks is named "
        f"{' or '.join(lora.targets)}; '{EVERY_LINEAR}' means every one of them"
    )


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, PackedLinear) or type(module).__name__ == "Conv1D"


def _adapt(module: Any, lora: Lora) -> None:
    weight = module.weight
    out_features, in_features = (
        weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]
    )
    module.__class__ = _adapted_class(type(module))  # type: ignore[arg-type]  # a class can be hashed
    module.lora_scale = lora.alpha / lora.rank
    for name, shape in ((A, (lora.rank, in_features)), (B, (out_features, lora.rank))):
        module.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


@functools.cache
def _adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    class Adapted(cls):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + adapter_output(self, x)

    Adapted.__name__ = f"Adapted{cls.__name__}"
    return Adapted
