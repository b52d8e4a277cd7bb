"""Data parallelism of modules: what FSDP wraps, gathers and reduces, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.plan import Plan
from meshwright.planner.schedules import schedule_of
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.layer_names import Region
from meshwright.runtime.core.local_parts import divided_like, to_local
from meshwright.runtime.core.mesh import DataRanks, Place, wants_mesh
from meshwright.runtime.core.torch_internals import (
    let_go_of_reduced,
    replicate,
    staying_near,
    sum_gradients,
)
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.parallel.gradient_compression import narrow
from meshwright.runtime.parallel.holders import Holders

_HALVES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "mxfp8": torch.bfloat16,
}
"""Types of computation; 8 bits are of products alone (runtime/techniques/float8.py)."""


def activation_type(precision: Precision) -> torch.dtype:
    """Return the type in which layers compute and pass activations on."""
    return _HALVES.get(precision, torch.float32)


def replicated(
    chain: nn.Module,
    plan: Plan,
    place: Place,
    holders: Callable[[str], Holders | None] | None = None,
) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Yield the parameters that other ranks hold too, each with the group of those ranks.

    Where pipelines differ, `holders` returns the ranks that hold a parameter, by its name in the
    module; None of one that nothing reads.
    """
    if holders is not None:
        yield from _held_by_unlike(chain, holders)
        return
    spread = {
        parameter
        for module in (experts.modules_of(chain).values() if plan.mesh.expert > 1 else ())
        for parameter in module.parameters(recurse=False)
    }
    whole = place.data.mesh.get_group()  # by all ranks together, also those that train nothing
    for parameter in chain.parameters():
        group = place.expert_data.mesh.get_group() if parameter in spread else whole
        if parameter.requires_grad and group.size() > 1:
            yield parameter, group


def _held_by_unlike(
    chain: nn.Module, holders: Callable[[str], Holders | None]
) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Yield the same where pipelines differ, what is tied first.

    Gradients are sent in one order on all ranks, from the last layer to the first; copies of what
    is tied stand on first and last stages, and are sent behind all others on both.
    """
    held = [
        (parameter, by)
        for name, parameter in chain.named_parameters()
        if parameter.requires_grad and (by := holders(name)) is not None
    ]
    for parameter, by in sorted(held, key=lambda pair: not pair[1].tied):
        yield parameter, by.group


def over_data(
    module: nn.Module,
    plan: Plan,
    ranks: DataRanks,
    device: torch.device,
    *,
    root: bool,
    besides: Iterable[nn.Parameter] = (),
) -> None:
    """Let data parallelism wrap a module, but for what it wraps already and experts apart.

    It leaves out what is `besides` too, and frozen weights that no rank divides.
    """
    policy = MixedPrecisionPolicy()
    if plan.precision in _HALVES:
        policy = MixedPrecisionPolicy(
            param_dtype=_HALVES[plan.precision], reduce_dtype=torch.float32
        )
    others = {
        *besides,
        *whole_frozen_parameters(module, plan, ranks),
        *(_of_no_replica(module) if plan.mesh.expert > 1 else ()),
    }
    plain = plan.offload != "parameters" and plan.gradient_compression == "full"
    if plain and not ranks.sharded:
        replicate(module, mesh=ranks.mesh, mp_policy=policy, ignored_params=others)
        _sum(module, plan)
        return
    match plan.offload:
        case "none" | "optimizer":
            offload = OffloadPolicy()
        case "parameters":
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        case _:
            assert_never(plan.offload)
    with staying_near(ranks.near):
        fully_shard(
            module,
            mesh=ranks.division if plan.gradient_compression == "full" else ranks.sharding,
            mp_policy=policy,
            reshard_after_forward=_reshards(plan, ranks, root=root),
            shard_placement_fn=_divided_dims(module, ranks.sharding.size()).get,
            offload_policy=offload,
            ignored_params=others,
        )
    _sum(module, plan)
    if plan.gradient_compression in ("bf16", "fp16"):
        assert isinstance(module, FSDPModule)
        narrow(module, plan.gradient_compression, ranks.replicating.get_group())
    if plan.offload == "parameters":
        for parameter in (
            parameter for parameter in module.parameters() if parameter not in others
        ):
            host.settle(to_local(parameter))
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)  # by a unit inside
            if hooks or not parameter.requires_grad:
                continue
            if device.type == "cpu":
                parameter.register_post_accumulate_grad_hook(_moved_home)
            else:
                host.sum_at_home(parameter)


def _reshards(plan: Plan, ranks: DataRanks, *, root: bool) -> bool | int | None:
    """Tell what becomes of parameters after a forward: FSDP's `reshard_after_forward`."""
    if not gathers_anew(plan, ranks):
        return False
    if root:  # its own parameters are needed again at once; None lets FSDP keep them
        return None
    match plan.reshard_after_forward:
        case None:
            return True
        case 1:
            return False
        case _:
            return plan.reshard_after_forward


def prefetch(layers: Sequence[nn.Module], depth: int) -> None:
    """Let each unit of FSDP ask for a number of units ahead; 0 leaves that to FSDP."""
    units: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for at, unit in enumerate(units if depth else ()):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, at - depth) : at][::-1])


def let_go_before(layer: nn.Module, root: FSDPModule) -> None:
    """Let what the last reduction of a micro-batch read be gone before the next one's loss.

    Before a layer in the middle of the forward the reduction has ended, unseen behind the others.
    """
    layer.register_forward_pre_hook(lambda *_: let_go_of_reduced(root), prepend=True)


def _moved_home(parameter: torch.Tensor) -> None:
    """Move a gradient to what stands for the host, as FSDP itself does from a device."""
    grad = parameter.grad
    assert isinstance(grad, DTensor)
    local = grad.to_local()
    if not host.on_host(local):
        home = host.to_host(local).wait()
        parameter.grad = divided_like(grad, home)


def gathers_anew(plan: Plan, place: Place | DataRanks) -> bool:
    """Tell whether a layer's parameters come to the device for each pass, and leave it behind it.

    Those of ZeRO-3 come from other ranks, those on the host from there, whatever the ZeRO level.
    """
    return plan.offload == "parameters" or (place.sharded and plan.zero == 3)


def whole_frozen_parameters(module: nn.Module, plan: Plan, ranks: DataRanks) -> set[nn.Parameter]:
    """Return the frozen weights beside adapters that every rank has whole, below ZeRO-3.

    They are stored in the type that they are computed in, so that layers use them where they are:
    FSDP would hold a shard and a copy of each, and gather it anew in every step.
    """
    if plan.training.lora is None or gathers_anew(plan, ranks):
        return set()
    return {parameter for parameter in module.parameters() if not parameter.requires_grad}


def reduces_in_step(plan: Plan) -> bool:
    """Tell whether the optimizer's step makes the mean of gradients over replicas, not backward."""
    stale = schedule_of(plan.schedule).stale and plan.mesh.pipeline > 1
    return stale or plan.gradient_compression == "powersgd"


def reduces_apart(plan: Plan, place: Place) -> bool:
    """Tell whether gradients of whole copies are summed by runtime.parallel.replicas, without FSDP.

    FSDP would hang hooks on each unit, and does what else there is to do.
    """
    plain = plan.offload != "parameters" and not reduces_in_step(plan)
    return plain and not place.sharded and place.replicas > 1


def sums_gradients(plan: Plan) -> bool:
    """Tell whether ranks divide losses and sum gradients: backward sees what one process sees.

    Experts' gradients come from the losses of several ranks, and compressed ones become a mean.
    """
    compresses = plan.gradient_compression != "full"
    return plan.mesh.expert == 1 and not compresses and not reduces_in_step(plan)


def _sum(module: nn.Module, plan: Plan) -> None:
    if sums_gradients(plan):
        sum_gradients(module)


def wraps(plan: Plan, place: Place) -> bool:
    """Tell whether FSDP is at work in this rank's stages, experts aside."""
    apart = reduces_in_step(plan) or reduces_apart(plan, place)
    return place.mesh is not None and ((place.replicas > 1 and not apart) or wants_mesh(plan))


def is_mixed(plan: Plan) -> bool:
    """Tell whether passes compute in another type than that of the parameters that are trained."""
    return plan.precision in _HALVES and plan.training.master_weights == "fp32"


def computes_with_copies(plan: Plan) -> bool:
    """Tell whether passes compute with copies of the parameters that are trained."""
    divides = plan.zero > 0 and plan.mesh.data_shard * plan.mesh.context > 1
    return divides or is_mixed(plan) or plan.offload == "parameters"


def reduces_at_once(plan: Plan, place: Place) -> bool:
    """Tell whether each micro-batch's gradients leave for their owner: another rank, or the host.

    Where they do not, a rank has the gradients of all its parameters until the step's last
    backward.
    """
    if plan.offload == "parameters" and place.replicas == 1:
        return True
    return place.sharded and plan.zero >= 2


def _of_no_replica(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts inside a module that no other rank has."""
    return {
        parameter
        for path, inner in experts.modules_of(module).items()
        if path and not isinstance(inner, FSDPModule)
        for parameter in inner.parameters(recurse=False)
    }


def _divided_dims(module: nn.Module, ranks: int) -> dict[nn.Parameter, Shard]:
    """Return the dim along which ranks divide a parameter, where that is not the first.

    The matrices of experts are divided by their hidden dim where experts do not fill all ranks.
    """
    dims = {}
    for inner in experts.modules_of(module).values():
        for name, dim in experts.HIDDEN_DIM.items():
            parameter = inner._parameters[name]
            local = to_local(parameter)
            assert parameter is not None and local is not None
            if local.shape[0] % ranks and local.shape[dim] % ranks == 0:
                dims[parameter] = Shard(dim)
    return dims


def shards(layer: nn.Module, plan: Plan, place: Place) -> dict[int, Region]:
    """Return what ZeRO will leave to this rank of its parts, by id of parameters.

    FSDP cuts a dim into equal chunks, of which the last ones may be short or empty.
    """
    apart = {
        parameter
        for module in (experts.modules_of(layer).values() if plan.mesh.expert > 1 else ())
        for parameter in module.parameters(recurse=False)
    }
    result = {}
    for ranks, parameters in (
        (place.data, [p for p in layer.parameters() if p not in apart]),
        (place.expert_data if apart else place.data, list(apart)),
    ):
        if not ranks.sharded:
            continue
        parts, index = ranks.sharding.size(), ranks.sharding.get_local_rank()
        dims = _divided_dims(layer, parts)
        whole = whole_frozen_parameters(layer, plan, ranks)
        for parameter in parameters:
            if parameter in whole:
                continue
            dim = dims[parameter].dim if parameter in dims else 0
            local = to_local(parameter)
            if local.ndim > dim:
                chunk = -(-local.shape[dim] // parts)
                begin, end = (min(at * chunk, local.shape[dim]) for at in (index, index + 1))
                result[id(parameter)] = (dim, begin, end)
    return result


def no_view(layer: nn.Module, inputs: object, output: Any) -> Any:
    """Copy outputs that are views.

    FSDP hangs the hook that gathers parameters for backward on the output tensor; if the next layer
    worked in place on a view, autograd would drop the hook in silence.
    """
    return tree_map_only(
        torch.Tensor, lambda one: one.clone() if one._base is not None else one, output
    )
