"""A stage's layers made parallel: tensor, then recompute, then data; filled layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never, cast

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

from planner.cluster import Precision
from planner.costs.crossings import crossings_of
from planner.errors import LaunchError
from planner.model import ModelGraph
from planner.plan import PlacedLayer, Plan
from planner.schedules import schedule_of
from runtime import activations, experts, gathered_experts, host, lora, recompute, tensor
from runtime.activations import Traffic
from runtime.adapter import EMBEDDING, HEAD, Adapter, Chain, parameter_names
from runtime.branches import TOKENS, Branches
from runtime.chunked_loss import Targets, in_chunks
from runtime.compiled import Compiler
from runtime.eight_bits import products_of
from runtime.experts import Load
from runtime.factory import FactoryModel
from runtime.gradient_wire import narrow
from runtime.initialize import first_buffer, materialize
from runtime.mesh import DataRanks, Place, wants_mesh
from runtime.narrow_gather import NarrowWeights
from runtime.published import Region, Weights
from runtime.torch_internals import act_around, let_go_of_reduced, replicate, share_memory
from runtime.weight_gradients import PLAIN, WeightGradients, defer

_HALVES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "mxfp8": torch.bfloat16,
}
"""Types of computation; 8 bits are of products alone (runtime/eight_bits.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStage:
    """The modules of one stage."""

    chain: Chain
    summed: frozenset[str]
    """Parameters whose gradients are partial over tensor."""
    factors: dict[str, float]
    """Of parameters whose gradients come out too large or small: what to multiply them with.

    An expert's gradient is a sum over the tokens of all ranks that send to it.  Data parallelism
    averages over the ranks with the same experts, n t / e of the n ranks with tokens of their own
    (t the tensor, e the expert degree), where the mean over all tokens wants n.
    """
    loads: dict[str, Load]
    """How many tokens the experts of each layer get."""
    wrapped: bool
    """Data parallelism or mixed precision is at work (the chain is an FSDPModule)."""
    store: WeightGradients | None
    """Where weight gradients wait, if the schedule makes them apart."""
    adapted: int
    """Modules with an adapter; 0 where the whole model is trained."""
    buffers: Mapping[str, torch.Tensor]
    """What a library's layers hold beside parameters, by published name; never divided."""
    replicated: tuple[tuple[nn.Parameter, dist.ProcessGroup], ...]
    """Parameters whose gradients runtime.replicas sums, and over which ranks; in order."""
    narrow: NarrowWeights
    """Weights that are gathered in 8 bits, where the plan says so."""


def activation_type(precision: Precision) -> torch.dtype:
    """Return the type in which layers compute and pass activations on."""
    return _HALVES.get(precision, torch.float32)


def parallel_stage(
    plan: Plan,
    adapter: Adapter,
    place: Place,
    *,
    stage: int,
    device: torch.device,
    weights: Weights | None,
    targets: Targets | None = None,
    compiler: Compiler | None = None,
) -> ParallelStage:
    """Build one of this rank's stages; a loss in chunks reads its `targets`.

    A `compiler` compiles the layers that repeat.
    """
    placed = plan.stages[stage].layers
    layers = {item.layer: adapter.layer(item.layer) for item in placed}
    adapter.tie(layers)
    _check_parameters(layers, adapter)
    adapted = 0
    if plan.training.lora is not None:
        frozen = torch.bfloat16 if plan.precision == "bf16" else torch.float32
        adapted = lora.adapt(layers, plan.training.lora, frozen=frozen)
    store = WeightGradients() if schedule_of(plan.schedule).splits_backward else None
    _choose_products(layers, plan, store)
    loads = _loads(layers, device)
    factors, summed = _divided(layers, plan, adapter, place, device)
    chunked = _chunk(layers, plan, place, targets)
    shared = _shared(layers)
    apart = reduces_apart(plan, place)
    reduces = place.replicas > 1 and not (reduces_in_step(plan) or apart)
    wraps_experts = plan.mesh.expert > 1 and (
        (place.expert_replicas > 1 and not apart) or wants_mesh(plan)
    )
    wraps = place.mesh is not None and (reduces or wants_mesh(plan) or wraps_experts)
    chain = _stage_module(plan, adapter, stage, layers)
    narrow = _narrow_weights(plan, place)
    sharded = wraps and place.sharded and weights is not None
    traffic = Traffic(device)
    done: dict[int, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    ends = activations.row_ends(item.activations for item in placed)
    for at, (item, (first, last)) in enumerate(zip(placed, ends, strict=True)):
        layer = layers[item.layer]
        materialize(
            item.layer,
            layer,
            adapter,
            seed=plan.training.seed,
            device=device,
            weights=weights,
            done=done,
            keeps=_shards(layer, plan, place) if sharded else {},
        )
        buffers |= _settle_buffers(item.layer, layer, adapter, weights, device)
        if wraps_experts:
            for module in experts.modules_of(layer).values():
                over_data(module, plan, place.expert_data, device, root=False)
        if chunked and item.layer == HEAD:  # it keeps gradients, or recomputes by itself
            item = PlacedLayer(layer=HEAD)  # noqa: PLW2901
        packing = activations.packing(layer, item.activations, traffic, first=first, last=last)
        compiles = compiler if repeats(adapter.model, item.layer) else None
        layer = _treated(layer, item, packing, compiles)
        chain.place(item.layer, layer)
        if plan.training.lora is not None and stage == at == 0:
            layer.register_forward_hook(lora.wants_gradient)
        if wraps:
            layer.register_forward_hook(no_view)
            if compiles is not None:
                _act_around(layer)
        if wraps and item.layer not in shared:
            over_data(layer, plan, place.data, device, root=False)
            narrow.take(layer)
    if wraps:
        over_data(chain, plan, place.data, device, root=True)
        _let_go(chain, [chain.get_submodule(item.layer) for item in placed], plan, place)
    prefetch([chain.get_submodule(item.layer) for item in placed], plan.prefetch)
    return ParallelStage(
        chain=chain,
        summed=frozenset(summed),
        factors=factors,
        loads=loads,
        wrapped=wraps,
        store=store,
        adapted=adapted,
        buffers=buffers,
        replicated=tuple(replicated(chain, plan, place)) if apart else (),
        narrow=narrow,
    )


def _choose_products(
    layers: Mapping[str, nn.Module], plan: Plan, store: WeightGradients | None
) -> None:
    """Let Linears multiply in the plan's precision, and put weight gradients off with a store."""
    for name, layer in layers.items():
        end = name in (EMBEDDING, HEAD)
        products = PLAIN if end else products_of(plan.precision, plan.scales)
        if store is not None or products is not PLAIN:
            defer(layer, store, products)


def _narrow_weights(plan: Plan, place: Place) -> NarrowWeights:
    """Return what gathers weights in 8 bits, or leaves them as they are."""
    return NarrowWeights(place.data.sharding.get_group() if plan.weight_wire == "fp8" else None)


def _treated(
    layer: nn.Module, item: PlacedLayer, packing: activations.Packing | None, by: Compiler | None
) -> nn.Module:
    """Return a layer that recomputes, is compiled and packs what it keeps, as its plan says."""
    if by is None:
        layer = recompute.wrapped(layer, item.recompute, packing)
    else:  # the compiler keeps what `selective` does, and autograd's hooks see it
        layer = recompute.wrapped(layer, item.recompute)
        by.compile(item.layer, layer)
    if packing is not None:
        packing.around(layer)
    return layer


def _act_around(layer: nn.Module) -> None:
    """Let FSDP act around a layer for its experts too, since its hooks end a graph."""
    for module in experts.modules_of(layer).values():
        if isinstance(module, FSDPModule):
            act_around(layer, module)


def repeats(model: ModelGraph, name: str) -> bool:
    """Tell whether a layer is one of several alike, or a block: those are worth a compilation."""
    kind = dict(model.chain)[name].kind
    if model.architecture is not None:
        return name not in (EMBEDDING, HEAD)
    return model.chain_kinds.count(kind) > 1


def replicated(
    chain: nn.Module, plan: Plan, place: Place
) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Yield the parameters that other ranks hold too, each with the group of those ranks."""
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


def _loads(layers: dict[str, nn.Module], device: torch.device) -> dict[str, Load]:
    """Count what the experts of each layer get, while the modules still have all of them."""
    return {
        name: Load(module, experts.count_of(module), device)
        for name, layer in layers.items()
        for module in experts.modules_of(layer).values()
    }


def _divided(
    layers: dict[str, nn.Module],
    plan: Plan,
    adapter: Adapter,
    place: Place,
    device: torch.device,
) -> tuple[dict[str, float], set[str]]:
    """Divide all layers over experts and the tensor axis.

    Return what to multiply gradients with, and the parameters whose gradients are partial.
    """
    factors = _over_experts(layers, plan, place) if plan.mesh.expert > 1 else {}
    summed = _over_tensor(layers, plan, adapter, place, device) if plan.mesh.tensor > 1 else set()
    if plan.mesh.expert > 1:  # now that the input of a mixture is what its parts get
        for layer in layers.values():
            experts.compute_shared_meanwhile(layer)
    return factors, summed


def _over_experts(layers: dict[str, nn.Module], plan: Plan, place: Place) -> dict[str, float]:
    """Divide the experts of all layers; return what to multiply their gradients with."""
    factors = {}
    mix = gathered_experts.mixed if plan.dispatch == "allgather" else experts.mixed
    for name, layer in layers.items():
        for path, module in experts.modules_of(layer).items():
            experts.spread(module, place.expert_mesh["expert"], mix)
            for parameter in experts.HIDDEN_DIM:
                factors[f"{name}.{path}.{parameter}"] = plan.mesh.tensor / plan.mesh.expert
    return factors


def _over_tensor(
    layers: dict[str, nn.Module],
    plan: Plan,
    adapter: Adapter,
    place: Place,
    device: torch.device,
) -> set[str]:
    """Divide all layers over the tensor axis; return the parameters with partial gradients."""
    summed = set()
    mesh, pieces = place.axis("tensor"), plan.tensor_overlap == "async"
    if pieces:
        share_memory(mesh.get_group(), device)
    for name, layer in layers.items():
        styles = adapter.tensor_plan(name)
        if plan.mesh.expert > 1:
            styles = tensor.apart(styles)
        partial = tensor.divide(layer, styles, mesh, pieces=pieces)
        summed |= {f"{name}.{parameter}" for parameter in partial}
    adapter.tie(layers)  # again, since `divide` made new parameters
    return summed


def _chunk(
    layers: Mapping[str, nn.Module], plan: Plan, place: Place, targets: Targets | None
) -> bool:
    """Let the head compute its loss in chunks, where a plan says so; say whether it does."""
    if plan.loss is None or HEAD not in layers:
        return False
    assert targets is not None
    group = place.axis("tensor").get_group() if plan.mesh.tensor > 1 else None
    in_chunks(layers[HEAD], plan.loss, targets, group)
    return True


def _stage_module(plan: Plan, adapter: Adapter, stage: int, layers: dict[str, nn.Module]) -> Chain:
    """Return the layers in order, or with what crosses the stage's ends if they form a graph."""
    if not adapter.model.edges:
        return Chain(layers)
    assert isinstance(adapter, FactoryModel), "supported() lets only a user's own graphs through"
    crossing = crossings_of(plan, adapter.model)
    return Branches(
        layers,
        reads=adapter.reads,
        received=crossing[stage - 1] if stage else (TOKENS,),
        sent=crossing[stage] if stage < len(crossing) else tuple(layers)[-1:],
    )


def _check_parameters(layers: dict[str, nn.Module], adapter: Adapter) -> None:
    """Refuse modules that are not what was planned for: a plan's memory rests on their size."""
    planned = dict(adapter.model.chain)
    seen: set[int] = set()
    for name, layer in layers.items():
        fresh = {id(p): p for p in layer.parameters() if id(p) not in seen}
        seen |= set(fresh)
        count = sum(
            fresh[own].numel()
            for full_name, module, attribute in parameter_names(name, layer)
            if (own := id(module._parameters[attribute])) in fresh
            and not (full_name in adapter.tied_names and name != EMBEDDING)
        )
        if count != planned[name].parameters:
            raise LaunchError(
                f"layer '{name}' has {count} parameters, and {planned[name].parameters} in the "
                f"plan's model {adapter.model.name}; plan again with this model's own figures"
            )


def _shared(layers: dict[str, nn.Module]) -> set[str]:
    """Return the layers that share a parameter; data parallelism must hold those in one group."""
    users: dict[int, list[str]] = {}
    for name, layer in layers.items():
        for parameter in layer.parameters():
            users.setdefault(id(parameter), []).append(name)
    return {name for names in users.values() if len(names) > 1 for name in names}


def over_data(
    module: nn.Module,
    plan: Plan,
    ranks: DataRanks,
    device: torch.device,
    *,
    root: bool,
    besides: Iterable[nn.Parameter] = (),
) -> None:
    """Let data parallelism hold a module, but for what it holds already and experts kept apart.

    It leaves out what is `besides` too.
    """
    policy = MixedPrecisionPolicy()
    if plan.precision in _HALVES:
        policy = MixedPrecisionPolicy(
            param_dtype=_HALVES[plan.precision], reduce_dtype=torch.float32
        )
    others = {*besides, *(_of_no_replica(module) if plan.mesh.expert > 1 else ())}
    plain = plan.offload != "parameters" and plan.gradient_wire == "full"
    if plain and not ranks.sharded:
        replicate(module, mesh=ranks.mesh, mp_policy=policy, ignored_params=others)
        return
    match plan.offload:
        case "none" | "optimizer":
            offload = OffloadPolicy()
        case "parameters":
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        case _:
            assert_never(plan.offload)
    fully_shard(
        module,
        mesh=ranks.division if plan.gradient_wire == "full" else ranks.sharding,
        mp_policy=policy,
        reshard_after_forward=_reshards(plan, ranks, root=root),
        shard_placement_fn=_divided_dims(module, ranks.sharding.size()).get,
        offload_policy=offload,
        ignored_params=others,
    )
    if plan.gradient_wire in ("bf16", "fp16"):
        assert isinstance(module, FSDPModule)
        narrow(module, plan.gradient_wire, ranks.replicating.get_group())
    if plan.offload == "parameters":
        for parameter in module.parameters():
            host.settle(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            if device.type == "cpu":
                parameter.register_post_accumulate_grad_hook(_moved_home)


def _reshards(plan: Plan, ranks: DataRanks, *, root: bool) -> bool | int | None:
    """Tell what becomes of parameters behind a forward: FSDP's `reshard_after_forward`."""
    if not gathers_anew(plan, ranks):
        return False
    if root:  # its own parameters are needed again at once; None lets FSDP keep them
        return None
    match plan.reshard:
        case None:
            return True
        case 1:
            return False
        case _:
            return plan.reshard


def prefetch(layers: Sequence[nn.Module], depth: int) -> None:
    """Let each unit of FSDP ask for so many units ahead; 0 leaves that to FSDP."""
    units: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for at, unit in enumerate(units if depth else ()):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(0, at - depth) : at][::-1])


def _let_go(chain: nn.Module, layers: Sequence[nn.Module], plan: Plan, place: Place) -> None:
    """Let what the last reduction of a micro-batch read be gone before the next one's loss.

    In the middle of the forward the reduction has ended, unseen behind half of the layers.
    """
    if plan.mesh.pipeline == 1 and reduces_at_once(plan, place):
        middle = layers[len(layers) // 2]
        middle.register_forward_pre_hook(
            lambda *_: let_go_of_reduced(cast(FSDPModule, chain)), prepend=True
        )


def _moved_home(parameter: torch.Tensor) -> None:
    """Move a gradient to what stands for the host, as FSDP itself does from a device."""
    grad = parameter.grad
    assert isinstance(grad, DTensor)
    local = grad.to_local()
    if not host.on_host(local):
        home = host.to_host(local).wait()
        parameter.grad = DTensor(home, grad._spec, requires_grad=False)


def gathers_anew(plan: Plan, place: Place | DataRanks) -> bool:
    """Tell whether a layer's parameters come to the device for each pass, and leave it behind it.

    Those of ZeRO-3 come from other ranks, those on the host from there, whatever the ZeRO level.
    """
    return plan.offload == "parameters" or (place.sharded and plan.zero == 3)


def reduces_in_step(plan: Plan) -> bool:
    """Tell whether the optimizer's step makes the mean of gradients over replicas, not backward."""
    stale = schedule_of(plan.schedule).stale and plan.mesh.pipeline > 1
    return stale or plan.gradient_wire == "powersgd"


def reduces_apart(plan: Plan, place: Place) -> bool:
    """Tell whether gradients of whole copies are summed by runtime.replicas, without FSDP.

    FSDP would hold a second copy of the parameters, and does what else there is to do.
    """
    plain = plan.precision in ("fp32", "tf32") and plan.gradient_wire == "full"
    plain = plain and plan.offload != "parameters" and not reduces_in_step(plan)
    return plain and not place.sharded and place.replicas > 1


def reduces_at_once(plan: Plan, place: Place) -> bool:
    """Tell whether each micro-batch's gradients leave for their owner: another rank, or the host.

    Where they do not, a rank holds the gradients of all its parameters until the step's last
    backward.
    """
    if plan.offload == "parameters" and place.replicas == 1:
        return True
    return place.sharded and plan.zero >= 2


def _of_no_replica(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts inside a module that no other rank holds."""
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
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert parameter is not None and local is not None
            if local.shape[0] % ranks and local.shape[dim] % ranks == 0:
                dims[parameter] = Shard(dim)
    return dims


def _shards(layer: nn.Module, plan: Plan, place: Place) -> dict[int, Region]:
    """Return what ZeRO will leave to this rank of the parts that it holds, by id of parameters.

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
        for parameter in parameters:
            dim = dims[parameter].dim if parameter in dims else 0
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
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


def _settle_buffers(
    name: str, layer: nn.Module, adapter: Adapter, weights: Weights | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Put a layer's buffers on the device; return those without values, by published name.

    Such are the library's, and get their values here.
    """
    made = {}
    for path, buffer in list(layer.named_buffers()):
        value = buffer
        if buffer.is_meta:
            published = adapter.published_name(f"{name}.{path}")
            value = made[published] = first_buffer(published, buffer, weights).to(device)
        _set_buffer(layer, path, value.to(device))
    return made


def _set_buffer(layer: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    layer.get_submodule(path)._buffers[attribute] = value
