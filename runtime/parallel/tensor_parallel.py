"""Tensor parallelism with sequence parallelism, inside one layer.

Parameters become DTensors on the tensor axis, so that storage, checkpoints and data parallelism
know their shape; computation runs on plain local tensors, which costs nothing of DTensor's.

Between modules each rank has its part of the positions.  Styles of a module (Megatron-LM's,
Korthikanti et al., 2022):
    gather      its input is collected along the positions
    columns     a Linear that makes its own part of the output features
    rows        a Linear that reads its own part of the input features; partial outputs are summed
                and scattered along the positions
    vocabulary  an Embedding of its own rows; outputs are summed and scattered
    logits      gather, then columns; the output is a DTensor divided along the vocabulary
    experts     every expert makes its own part of the inner features; outputs are partial
    part        a Linear that reads its own part of the input features; outputs stay partial
    mixture     a router with experts: gather in front, and behind the partial outputs are summed
                and scattered
Every other parameter is replicated.  It sees only this rank's positions or heads, so its gradient
must be summed over the tensor axis: `divide` returns which those are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.collectives import gather, scatter
from meshwright.runtime.core.layer_names import TensorStyle
from meshwright.runtime.core.local_parts import local_part, on_local_parts
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.split_backward import linear

SHARDS: dict[TensorStyle, dict[str, int]] = {
    "columns": {"weight": 0, "bias": 0, lora.B: 0},
    "rows": {"weight": 1, lora.A: 1},
    "vocabulary": {"weight": 0},
    "logits": {"weight": 0, "bias": 0},
    "part": {"weight": 1, lora.A: 1},
    "experts": {"gate_up_proj": 1, "down_proj": 2},
}
"""Index of the dim that a style divides, by parameter.

Where a dim has several matrices one above the other (Adapter.pieces), each is divided and a rank
has its part of each: DTensor has no placement for that, so only `Optimizer.state`, which gives them
a dim of their own, may put such a parameter together.
"""


def divide(
    layer: nn.Module, plan: Mapping[str, TensorStyle], mesh: DeviceMesh, *, pieces: bool = False
) -> set[str]:
    """Divide a layer over the tensor axis; return the parameters whose gradients need a sum.

    With `pieces` its collectives can run beside its products, once it is compiled.  Parameters may
    be on the meta device.  One that two modules share stays shared, and one that is divided already
    (experts over their own axis) stays as it is.
    """
    done: dict[int, nn.Parameter] = {}
    for path, style in plan.items():
        module = layer.get_submodule(path)
        for attribute, dim in SHARDS.get(style, {}).items():
            distribute(module, attribute, Shard(dim), mesh, done)
        _run_in_style(module, style, mesh.get_group(), pieces=pieces)
    replicated = set()
    for path, module in layer.named_modules():
        whole = [
            attribute
            for attribute, parameter in module._parameters.items()
            if parameter is not None and not isinstance(parameter, DTensor)
        ]
        for attribute in whole:
            distribute(module, attribute, Replicate(), mesh, done)
            replicated.add(f"{path}.{attribute}" if path else attribute)
        if whole and plan.get(path) != "rows":  # `rows` adds its bias by itself
            module.forward = on_local_parts(module, module.forward)
    return replicated


def distribute(
    module: nn.Module,
    attribute: str,
    placement: Placement,
    mesh: DeviceMesh,
    done: dict[int, nn.Parameter],
) -> None:
    """Replace a parameter by a DTensor of this rank's part of it, not yet filled."""
    parameter = module._parameters.get(attribute)
    if parameter is None:
        return
    if id(parameter) not in done:
        shape = list(parameter.shape)
        if isinstance(placement, Shard):
            if shape[placement.dim] % mesh.size():
                raise LaunchError(
                    f"tensor={mesh.size()} does not divide {type(module).__name__}.{attribute} "
                    f"{tuple(parameter.shape)} along dim {placement.dim}"
                )
            shape[placement.dim] //= mesh.size()
        local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        done[id(parameter)] = nn.Parameter(
            DTensor.from_local(local, mesh, [placement], run_check=False),
            requires_grad=parameter.requires_grad,
        )
        done[id(done[id(parameter)])] = done[id(parameter)]
    module._parameters[attribute] = done[id(parameter)]


def without_experts(plan: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """Return a layer's plan where experts are on ranks of their own.

    Then each rank routes the positions that it has, and what stands beside the experts is whole.

    >>> without_experts({"mlp": "mixture", "mlp.experts": "experts", "attention": "gather"})
    {'attention': 'gather'}
    """
    mixtures = [path for path, style in plan.items() if style == "mixture"]
    return {
        path: style
        for path, style in plan.items()
        if not any(path == mixture or path.startswith(f"{mixture}.") for mixture in mixtures)
    }


def _run_in_style(
    module: nn.Module, style: TensorStyle, group: dist.ProcessGroup, *, pieces: bool
) -> None:
    if style in ("gather", "mixture"):
        module.register_forward_pre_hook(
            lambda _, args, kwargs: _gather_inputs(args, kwargs, group, pieces=pieces),
            with_kwargs=True,
        )
        if style == "mixture":
            module.register_forward_hook(
                lambda _, args, output: scatter(output, group, pieces=pieces)
            )
    elif style in ("columns", "experts", "part"):
        forward = module.forward
        if pieces and type(module) is nn.Linear and module.bias is not None:
            forward = functools.partial(_bias_behind, module)
        module.forward = on_local_parts(module, forward)
    elif style == "rows":
        module.forward = lambda x: _rows(module, x, group, pieces=pieces)
    elif style == "vocabulary":
        module.forward = lambda tokens: _vocabulary(module, tokens, group)
    else:
        project = on_local_parts(module, module.forward)
        module.forward = lambda x: DTensor.from_local(
            project(gather(x, group)), _mesh_of(module), [Shard(-1)], run_check=False
        )


def _bias_behind(module: nn.Linear, x: Tensor) -> Tensor:
    """Return x W^T + b as a product and a sum: with both in one the compiler's pass knows neither.

    Its patterns have `mm`, and no `addmm`.
    """
    return functional.linear(x, module.weight) + module.bias


def _gather_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, *, pieces: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (gather(args[0], group, pieces=pieces), *args[1:]), kwargs
    whole = gather(kwargs["hidden_states"], group, pieces=pieces)
    return args, {**kwargs, "hidden_states": whole}


def _rows(module: nn.Module, x: Tensor, group: dist.ProcessGroup, *, pieces: bool) -> Tensor:
    weight, bias = local_part(module, "weight"), local_part(module, "bias")
    assert weight is not None
    whole = linear(module, x, weight)
    if lora.is_adapted(module):
        a, b = (local_part(module, name) for name in (lora.A, lora.B))
        assert a is not None
        assert b is not None
        whole = whole + lora.low_rank(module, x, a, b)
    part = scatter(whole, group, pieces=pieces)
    return part if bias is None else part + bias


def _vocabulary(module: nn.Module, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    weight = local_part(module, "weight")
    assert weight is not None
    padding: int | None = getattr(module, "padding_idx", None)
    return scatter(table_rows(tokens, weight, group.rank(), padding), group)


def table_rows(tokens: Tensor, weight: Tensor, rank: int, padding: int | None) -> Tensor:
    """Return the rows of a table of which `weight` is this rank's part; 0 for those of others."""
    index = tokens - rank * weight.shape[0]
    elsewhere = (index < 0) | (index >= weight.shape[0])
    if padding is not None:
        padding -= rank * weight.shape[0]
        padding = padding if 0 <= padding < weight.shape[0] else None
    rows = functional.embedding(index.masked_fill(elsewhere, 0), weight, padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _mesh_of(module: nn.Module) -> DeviceMesh:
    weight = module._parameters["weight"]
    assert isinstance(weight, DTensor)
    return weight.device_mesh
