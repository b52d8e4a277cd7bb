"""Everything that a plan does to one stage, in the order in which it is done.

`apply_plan` is that order; each function behind it is one technique, and does nothing where the
plan does not ask for it.  A stage of a language model has the rules of its family (styles, first
values, names); one of a user's own module has the styles that were given or derived, and has
values already.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import PlacedLayer, Plan
from meshwright.planner.errors import LaunchError
from meshwright.planner.schedules import schedule_of
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD
from meshwright.runtime.core.mesh import Place, wants_mesh
from meshwright.runtime.core.torch_internals import act_around, fsdp_parameters, share_memory
from meshwright.runtime.engine.losses.named_loss import ChunkedHead, head_of, token_loss
from meshwright.runtime.engine.losses.named_loss import in_chunks as module_in_chunks
from meshwright.runtime.models.family_adapter import (
    Adapter,
    first_buffer,
    materialize,
    parameter_names,
)
from meshwright.runtime.models.layer_stage import LayerStage
from meshwright.runtime.models.safetensors_weights import Weights
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.parallel import tensor_parallel as tensor
from meshwright.runtime.parallel.data_parallel import (
    activation_type,
    is_mixed,
    let_go_before,
    no_view,
    over_data,
    prefetch,
    reduces_apart,
    reduces_at_once,
    replicated,
    shards,
    wraps,
)
from meshwright.runtime.parallel.expert_parallel import (
    ExpertLoad,
    mix_by_all_gather,
    mix_by_hierarchical_all_to_all,
)
from meshwright.runtime.parallel.holders import Holders
from meshwright.runtime.parallel.tensor_styles import ScriptStyles, divide
from meshwright.runtime.techniques import activation_offload as activations
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.activation_checkpointing import wrapped
from meshwright.runtime.techniques.activation_offload import HostTraffic
from meshwright.runtime.techniques.aligned_linear import products_for, reads_on_grid
from meshwright.runtime.techniques.chunked_cross_entropy import in_chunks
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.techniques.float8 import NarrowWeights, products_of
from meshwright.runtime.techniques.packed_weights import expect_packing, matrices_in, pack_values
from meshwright.runtime.techniques.split_backward import PLAIN, WeightGradients, defer
from meshwright.runtime.techniques.working_copies import Gradients, WorkingCopies, cast_inputs
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import ModelStage
from meshwright.runtime.tracing.tracer import Recorder
from meshwright.runtime.tracing.unused_parameters import BackwardOrder, Participation


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRules:
    """The rules of a language model, where a stage is of one."""

    adapter: Adapter
    weights: Weights | None
    """Published values; None draws the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The facts about a user's own module, where a stage is cut from one."""

    module: nn.Module
    recorder: Recorder
    styles: ScriptStyles
    participation: Participation
    loss: token_loss | None
    """The loss that may be computed in chunks."""


@dataclass(slots=True, kw_only=True)
class Staged:
    """One of this rank's stages: its module, and what the techniques declare of it."""

    plan: Plan
    stage: int
    place: Place
    device: torch.device
    module: ModelStage
    of: LanguageRules | Script
    compiler: Compiler | None
    """The compiler of repeated layers, if the plan lets any be compiled."""
    wrapped: bool = False
    """Ranks divide parameters, or have them on the host (the module is an FSDPModule)."""
    copies: WorkingCopies | None = None
    """Copies that passes use in place of parameters that this rank holds whole."""
    store: WeightGradients | None = None
    """Store in which weight gradients wait, if the schedule computes them separately."""
    unused: Sequence[nn.Parameter] = ()
    """Parameters that nothing reads, on the stage that has them."""
    adapted: int = 0
    """Modules with an adapter; 0 where the whole model is trained."""
    summed: set[str] = field(default_factory=set)
    """Parameters whose gradients are partial over tensor."""
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes of matrices that lie one behind the other in dim 0 of a parameter, divided apart."""
    factors: dict[str, float] = field(default_factory=dict)
    """Factors, by parameter, that correct gradients which come out too large or small.

    An expert's gradient is a sum over the tokens of all ranks that send to it.  Data parallelism
    averages over the ranks with the same experts, n t / e of the n ranks with tokens of their own
    (t the tensor, e the expert degree), where the mean over all tokens wants n.
    """
    loads: dict[str, ExpertLoad] = field(default_factory=dict)
    """Token counts of the experts of each layer."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of a library's layers beside parameters, by published name; never divided."""
    replicated: tuple[tuple[nn.Parameter, dist.ProcessGroup], ...] = ()
    """Parameters whose gradients runtime.parallel.replicas sums, and over which ranks; in order."""
    holders: Callable[[str], Holders | None] | None = None
    """Returns the ranks that hold a parameter, by its name in the module, where pipelines differ;
    None of one that nothing reads."""
    chunked: ChunkedHead | None = None
    """The head of a user's own module, where it returns its loss."""
    traffic: HostTraffic | None = None
    """Copies to the host and back, of all layers whose stored tensors do not stay."""
    narrow: NarrowWeights | None = None
    """Weights that are gathered in 8 bits, where the plan says so."""

    @property
    def placed_layers(self) -> tuple[PlacedLayer, ...]:
        """The plan's layers of this stage."""
        return self.plan.stages[self.stage].layers

    @property
    def recorded(self) -> RecordedStage:
        """The stage of a user's own module."""
        assert isinstance(self.module, RecordedStage)
        return self.module

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers of a language model, which are units, by name and in order."""
        return {item.layer: self.module.part(item.layer) for item in self.placed_layers}

    @property
    def units(self) -> dict[str, nn.Module]:
        """The modules that techniques act on one by one."""
        return self.layers if isinstance(self.of, LanguageRules) else self.module.units

    def is_block(self, name: str) -> bool:
        """Tell whether products inside of a unit may be in 8 bits: it is neither end of a model."""
        if isinstance(self.of, LanguageRules):
            return name not in (EMBEDDING, HEAD)
        return is_block(self.module.part(name))

    @property
    def routes(self) -> bool:
        """True if layers of a language model send tokens to experts, whose load is counted."""
        of = self.of
        return isinstance(of, LanguageRules) and of.adapter.architecture.experts is not None

    @property
    def chunks_loss(self) -> bool:
        """True if the head of this stage returns its loss, computed in chunks."""
        return self.plan.loss is not None and HEAD in (item.layer for item in self.placed_layers)

    def keeps_gradients(self, item: PlacedLayer) -> bool:
        """Tell whether a layer is a head that keeps gradients, or recomputes by itself."""
        return item.layer == HEAD and self.chunks_loss

    def compiles(self, name: str) -> bool:
        """Tell whether a layer of a language model is compiled."""
        of = self.of
        return (
            self.compiler is not None
            and isinstance(of, LanguageRules)
            and repeats(of.adapter.model, name)
        )


def language_stage(
    plan: Plan,
    adapter: Adapter,
    place: Place,
    *,
    stage: int,
    device: torch.device,
    weights: Weights | None = None,
    compiler: Compiler | None = None,
    holders: Callable[[str], Holders | None] | None = None,
) -> Staged:
    """Build one of this rank's stages of a language model, and apply the plan to it.

    `plan` is that of its kind of pipelines; where these differ, `holders` are those of a parameter,
    by its name.
    """
    layers = {item.layer: adapter.layer(item.layer) for item in plan.stages[stage].layers}
    adapter.tie(layers)
    _check_parameters(layers, adapter)
    module = LayerStage(layers, adapter, plan, stage)
    return apply_plan(
        Staged(
            plan=plan,
            stage=stage,
            place=place,
            device=device,
            module=module,
            of=LanguageRules(adapter=adapter, weights=weights),
            compiler=compiler,
            holders=holders,
            wrapped=wraps(plan, place) or (place.mesh is not None and _wraps_experts(plan, place)),
        )
    )


def _wraps_experts(plan: Plan, place: Place) -> bool:
    """Tell whether data parallelism wraps experts by themselves."""
    apart = place.expert_replicas > 1 and not reduces_apart(plan, place)
    return plan.mesh.expert > 1 and (apart or wants_mesh(plan))


def _check_parameters(layers: Mapping[str, nn.Module], adapter: Adapter) -> None:
    """Refuse modules that are not what was planned for: a plan's memory rests on their size."""
    planned = dict(adapter.model.chain)
    seen: set[int] = set()
    for name, layer in layers.items():
        fresh = {id(p): p for p in layer.parameters() if id(p) not in seen}
        seen |= set(fresh)
        count = sum(
            fresh[identity].numel()
            for full_name, module, attribute in parameter_names(name, layer)
            if (identity := id(module._parameters[attribute])) in fresh
            and not (full_name in adapter.tied_names and name != EMBEDDING)
        )
        if count != planned[name].parameters:
            raise LaunchError(
                f"layer '{name}' has {count} parameters, and {planned[name].parameters} in the "
                f"plan's model {adapter.model.name}; plan again with this model's own figures"
            )


def apply_plan(staged: Staged) -> Staged:
    """Apply a plan to a stage, each technique where the plan asks for it.

    Positions of context parallelism are divided in its batch.
    """
    plan, place, described = staged.plan, staged.place, isinstance(staged.of, LanguageRules)
    adapts = plan.training.lora is not None and described
    otherwise = plan.precision in EIGHT_BITS or reads_on_grid(staged.device)
    multiplies = otherwise or schedule_of(plan.schedule).splits_backward
    spreads = plan.mesh.expert > 1
    for asked, technique in (
        (adapts, _adapters),  # adds parameters and freezes others
        (plan.training.master_weights == "none", _working_weights),
        (multiplies, _products),  # sees every Linear before anything acts around it
        (spreads or staged.routes, _experts),  # before tensor, which leaves alone what they hold
        (spreads or plan.mesh.tensor > 1, _tensor),
        (plan.loss is not None, _loss),  # over the divided vocabulary
        (plan.weight_gather_dtype == "fp8", _narrow_weights),
        (plan.training.lora is not None and not described, _packed_values),  # of divided matrices
    ):
        if asked:
            technique(staged)
    done: dict[int, nn.Parameter] = {}
    for at, item in enumerate(staged.placed_layers):
        packing: activations.Packing | None = None
        if described:
            _first_values(staged, item, done)  # whole for one layer at a time
        if item.activations != "keep":
            packing = _packing(staged, at)
        if item.recompute != "none":
            _recomputation(staged, item, packing)
        if staged.compiler is not None:
            _compilation(staged, at)  # around recomputation, inside of hooks
        if packing is not None:
            _activations(staged, item, packing)  # around graphs, on what autograd saves
        if staged.wrapped:
            _data(staged, at)  # holds what is left
    if staged.wrapped:
        _root(staged)
    if is_mixed(plan):
        _working_copies(staged)
    if place.replicas > 1:
        _replicas(staged)
    return staged


def is_block(unit: nn.Module) -> bool:
    """Tell whether a unit of a script has parts: a Linear that is one by itself is an end."""
    return any(True for _ in unit.children())


def repeats(model: ModelGraph, name: str) -> bool:
    """Tell whether a layer is one of several alike, or a block: those are worth a compilation."""
    kind = dict(model.chain)[name].kind
    if model.architecture is not None:
        return name not in (EMBEDDING, HEAD)
    return model.chain_kinds.count(kind) > 1


# --- once for all layers --------------------------------------------------------------------------


def _adapters(staged: Staged) -> None:
    """LoRA: matrices of low rank beside frozen ones; a script's module has them when recorded."""
    plan, layers = staged.plan, staged.layers
    assert plan.training.lora is not None
    frozen = activation_type(plan.precision)
    if plan.training.lora.packs_weights:
        for name, layer in layers.items():
            if staged.is_block(name):
                routed, weights = experts.modules_of(layer).values(), plan.training.lora.weights
                expect_packing(matrices_in(layer, routed, weights), weights, frozen)
    staged.adapted = lora.adapt(layers, plan.training.lora)
    for layer in layers.values():
        lora.store_frozen(layer, frozen)
    if staged.stage == 0:
        next(iter(layers.values())).register_forward_hook(lora.wants_gradient)


def _working_weights(staged: Staged) -> None:
    """Train the weights in the type of the computation, which no fp32 copy stands beside."""
    for parameter in staged.module.parameters():
        parameter.data = parameter.data.to(activation_type(staged.plan.precision))


def _products(staged: Staged) -> None:
    """Let Linears multiply in the plan's precision, and put weight gradients off."""
    plan = staged.plan
    if schedule_of(plan.schedule).splits_backward:
        staged.store = WeightGradients()
    for name in staged.module.called_units:
        unit = staged.module.part(name)
        products = products_of(plan.precision, plan.scales) if staged.is_block(name) else PLAIN
        if products is PLAIN and reads_on_grid(staged.device):
            products = products_for(unit, plan.mesh.tensor)
        store = staged.store if name in staged.units else None
        if store is not None or products is not PLAIN:
            defer(unit, store, products)


def _experts(staged: Staged) -> None:
    """Divide experts over their ranks, and count how many tokens each gets."""
    plan, place = staged.plan, staged.place
    mix: Callable[..., Tensor] = experts.mix_by_all_to_all
    if plan.dispatch == "allgather":
        mix = mix_by_all_gather
    elif plan.hierarchical_all_to_all is not None:
        across, inside = place.relays(plan.hierarchical_all_to_all)
        mix = functools.partial(mix_by_hierarchical_all_to_all, across=across, inside=inside)
    for name in staged.module.called_units:
        for path, module in experts.modules_of(staged.module.part(name)).items():
            if isinstance(staged.of, LanguageRules):
                staged.loads[name] = ExpertLoad(module, experts.count_of(module), staged.device)
            if plan.mesh.expert > 1:
                experts.spread(module, place.expert_mesh["expert"], mix)
                for parameter in module._parameters:
                    full_name = ".".join(filter(None, (name, path, parameter)))
                    staged.factors[full_name] = plan.mesh.tensor / plan.mesh.expert


def _tensor(staged: Staged) -> None:
    """Divide modules over the tensor axis, as the family's styles say, or given or derived ones."""
    plan, of = staged.plan, staged.of
    if isinstance(of, Script):
        if of.styles:
            staged.summed, staged.sections = divide(
                staged.recorded, of.styles, staged.place.axis("tensor")
            )
        return
    layers = staged.layers
    if plan.mesh.tensor > 1:
        mesh, pieces = staged.place.axis("tensor"), plan.tensor_overlap == "async"
        if pieces:
            share_memory(mesh.get_group(), staged.device)
        for name, layer in layers.items():
            styles = of.adapter.tensor_plan(name)
            if plan.mesh.expert > 1:
                styles = tensor.without_experts(styles)
            partial = tensor.divide(layer, styles, mesh, pieces=pieces)
            staged.summed |= {f"{name}.{parameter}" for parameter in partial}
        of.adapter.tie(layers)  # again, since `divide` made new parameters
    if plan.mesh.expert > 1:  # now that the input of a mixture is what its parts get
        for layer in layers.values():
            experts.compute_shared_meanwhile(layer)


def _loss(staged: Staged) -> None:
    """Let the head return its loss, made in chunks."""
    plan, of = staged.plan, staged.of
    if isinstance(of, Script):
        if plan.loss is not None and staged.stage == len(plan.stages) - 1:
            assert of.loss is not None, "refused by check_chunks"
            head = head_of(of.recorder.first, of.module)
            unit = staged.module.part(head)
            staged.chunked = module_in_chunks(unit, head, plan.loss, of.loss)
        return
    if staged.chunks_loss:
        assert plan.loss is not None
        group = staged.place.axis("tensor").get_group() if plan.mesh.tensor > 1 else None
        in_chunks(staged.module.part(HEAD), plan.loss, group)


def _narrow_weights(staged: Staged) -> None:
    """Gather weights in 8 bits."""
    staged.narrow = NarrowWeights(staged.place.data.sharding.get_group())


def _packed_values(staged: Staged) -> None:
    """Pack a script's frozen matrices, which have values already."""
    for name in staged.module.called_units:
        pack_values(staged.module.part(name))


# --- layer by layer -------------------------------------------------------------------------------


def _first_values(staged: Staged, item: PlacedLayer, done: dict[int, nn.Parameter]) -> None:
    """Put a layer of a language model on the device, with drawn or published values."""
    of, device = staged.of, staged.device
    assert isinstance(of, LanguageRules)
    layer = staged.module.part(item.layer)
    adapters = staged.plan.training.lora
    packs = adapters is not None and adapters.packs_weights  # by the whole rows
    only_shards = staged.wrapped and staged.place.sharded and of.weights is not None and not packs
    materialize(
        item.layer,
        layer,
        of.adapter,
        seed=staged.plan.training.seed,
        device=device,
        weights=of.weights,
        done=done,
        keeps=shards(layer, staged.plan, staged.place) if only_shards else {},
    )
    if packs:
        pack_values(layer)
    for path, buffer in list(layer.named_buffers()):
        value = buffer
        if buffer.is_meta:  # the library's own, whose values are not drawn
            published = of.adapter.published_name(f"{item.layer}.{path}")
            value = first_buffer(published, buffer, of.weights).to(device)
            staged.buffers[published] = value
        owner, _, attribute = path.rpartition(".")
        layer.get_submodule(owner)._buffers[attribute] = value.to(device)


def _packing(staged: Staged, at: int) -> activations.Packing | None:
    """Return what becomes of a layer's stored tensors, if they do not stay."""
    item = staged.placed_layers[at]
    if staged.keeps_gradients(item):
        return None
    if staged.traffic is None:
        staged.traffic = HostTraffic(staged.device)
    first, last = activations.row_ends(layer.activations for layer in staged.placed_layers)[at]
    choice, traffic = item.activations, staged.traffic
    return staged.module.packing(item.layer, choice, traffic, first=first, last=last)


def _recomputation(staged: Staged, item: PlacedLayer, packing: activations.Packing | None) -> None:
    """Recompute a layer: inside its one unit, or where the stage replays what is around units."""
    if staged.keeps_gradients(item):
        return
    if isinstance(staged.of, Script):
        staged.recorded.recompute[item.layer] = item.recompute
    else:  # a graph keeps what `selective` does, and autograd's hooks see it
        inside = None if staged.compiles(item.layer) else packing
        wrapped(staged.module.part(item.layer), item.recompute, inside)


def _compilation(staged: Staged, at: int) -> None:
    """Compile the units of a layer that repeat; one that is recomputed is so inside its graph.

    Units of a script that draw stay eager: their numbers follow the sample.
    """
    compiler, of, name = staged.compiler, staged.of, staged.placed_layers[at].layer
    assert compiler is not None
    if isinstance(of, LanguageRules):
        if staged.compiles(name):
            compiler.compile(name, staged.module.part(name))
        return
    recording, layer = of.recorder.first, staged.recorded.layers[at]
    calls = Counter(node.unit for node in recording.nodes if node.unit is not None)
    alike = Counter(type(of.module.get_submodule(unit)) for unit in calls)
    inside = [
        recording.nodes[node]
        for node in range(layer.first, layer.last)
        if node not in recording.derived
    ]
    for node in inside:
        unit = staged.recorded.unit(node.unit) if node.unit is not None else None
        if unit is None or alike[type(unit)] == 1 or not any(True for _ in unit.children()):
            continue
        path, choice = str(node.unit), staged.recorded.recompute.get(name, "none")
        if node.draws:
            compiler.fallbacks[path] = "it draws random numbers, which follow the sample"
        elif calls[path] > 1:
            compiler.fallbacks[path] = "the forward calls it more than once"
        elif choice != "none" and len(inside) > 1:
            compiler.fallbacks[path] = "it is recomputed together with what runs beside it"
        else:
            wrapped(unit, "full" if choice == "selective" and node.changed else choice)
            staged.recorded.recompute[name] = "none"
            compiler.compile(path, unit)


def _activations(staged: Staged, item: PlacedLayer, packing: activations.Packing) -> None:
    """Offload or compress what a layer stores."""
    if isinstance(staged.of, Script):
        staged.recorded.pack(item.layer, packing)
    else:
        packing.around(staged.module.part(item.layer))


def _data(staged: Staged, at: int) -> None:
    """Let data parallelism hold the units of a layer, experts by themselves."""
    plan, place, device = staged.plan, staged.place, staged.device
    for name in staged.module.layers[at].units:
        inner = _experts_apart(staged, name)
        for module in inner:
            over_data(module, plan, place.expert_data, device, root=False)
        if staged.compiles(name):  # hooks of experts end a graph
            for module in inner:
                act_around(staged.module.part(name), cast(FSDPModule, module))
        unit = staged.module.units.get(name)
        if unit is not None and not isinstance(unit, FSDPModule):
            _make_contiguous(unit)
            unit.register_forward_hook(no_view)
            over_data(
                unit, plan, place.data, device, root=False, besides=unsharded_parameters(staged)
            )
            if staged.narrow is not None:
                staged.narrow.gather_in_8_bits(unit)


def _experts_apart(staged: Staged, name: str) -> list[nn.Module]:
    """Return the experts modules of a unit that data parallelism wraps by themselves."""
    if not _wraps_experts(staged.plan, staged.place):
        return []
    modules = experts.modules_of(staged.module.part(name)).values()
    return [module for module in modules if not isinstance(module, FSDPModule)]


# --- the stage as a whole -------------------------------------------------------------------------


def _root(staged: Staged) -> None:
    """Let data parallelism hold what no unit has, and say when it gathers and reduces."""
    plan, place, module, of = staged.plan, staged.place, staged.module, staged.of
    _make_contiguous(module)
    module.register_forward_hook(no_view)
    over_data(
        module, plan, place.data, staged.device, root=True, besides=unsharded_parameters(staged)
    )
    root = cast(FSDPModule, module)
    units = [unit for unit in module.units.values() if isinstance(unit, FSDPModule)]
    if isinstance(of, Script):
        for child in module.modules():
            if isinstance(child, FSDPModule):
                of.participation.watch(child)
                type(child).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        module.order = BackwardOrder(root, units)
    elif plan.mesh.pipeline == 1 and reduces_at_once(plan, place):
        layers = list(staged.layers.values())
        let_go_before(layers[len(layers) // 2], root)
    prefetch(list(module.units.values()), plan.prefetch)


def _refuse_copy(divided: FSDPModule, _: object) -> None:
    """Refuse what FSDP does not support, in the words of a training loop that wants an average."""
    raise LaunchError(
        f"{type(divided).__name__.removeprefix('FSDP')}: is copied, and ranks divide its "
        "parameters; let an average follow by engine.averaged(decay), or copy it before the Engine "
        "is made and load engine.state_dict() into the copy"
    )


def _working_copies(staged: Staged) -> None:
    """Let passes compute in 16 bits where FSDP does not see to it, which casts what it gathers."""
    module, of = staged.module, staged.of
    dtype, plan = activation_type(staged.plan.precision), staged.plan
    gradients: Gradients = "once"
    if staged.store is not None or plan.micro_batches_of(staged.place.data_rank) > 1:
        gradients = "added"
    if staged.store is None and reduces_apart(plan, staged.place):
        gradients = "collected"
    wrapped = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
    records = itertools.chain.from_iterable(map(fsdp_parameters, wrapped))
    besides = [*unsharded_parameters(staged), *(record.sharded_param for record in records)]
    staged.copies = WorkingCopies(
        module,
        dtype,
        gradients=gradients,
        besides=besides,
        changed=of.participation.note_change if isinstance(of, Script) else None,
    )
    for name in module.called_units:
        unit = module.part(name)
        if not isinstance(unit, FSDPModule):
            cast_inputs(unit, dtype)


def _replicas(staged: Staged) -> None:
    """Name the parameters whose gradients replicas sums over copies: FSDP does not."""
    unused = {id(parameter) for parameter in staged.unused}
    shared: Iterable[tuple[nn.Parameter, dist.ProcessGroup]] = ()
    if reduces_apart(staged.plan, staged.place):
        shared = replicated(staged.module, staged.plan, staged.place, staged.holders)
    elif staged.wrapped and isinstance(staged.of, Script):
        group = staged.place.replica_group
        shared = [
            (parameter, group)
            for parameter in unsharded_parameters(staged)
            if parameter.requires_grad
        ]
    copies = staged.copies
    staged.replicated = tuple(
        (parameter if copies is None else copies.of(parameter), by)
        for parameter, by in shared
        if id(parameter) not in unused
    )


def unsharded_parameters(staged: Staged) -> list[nn.Parameter]:
    """Return what FSDP leaves whole: what has no dim, and what no gradient ever moves."""
    scalars = [parameter for parameter in staged.module.parameters() if not parameter.ndim]
    return [*scalars, *staged.unused]


def _make_contiguous(module: nn.Module) -> None:
    """FSDP divides parameters through memory."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.contiguous()
