"""Stages of a user's own module made parallel: units over data, the rest with the stage."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from meshwright.planner.costs.lora import EVERY_LINEAR
from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.model import Layer, ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Training
from meshwright.planner.errors import LaunchError
from meshwright.planner.frameworks.native_limits import script_obstacle
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.seeds import seed_of
from meshwright.runtime.engine.apply_plan import Script, Staged, apply_plan, is_block
from meshwright.runtime.engine.losses.named_loss import token_loss
from meshwright.runtime.engine.unsupported import foreign
from meshwright.runtime.models.family_adapter import parameter_names
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.parallel.data_parallel import activation_type, computes_with_copies, wraps
from meshwright.runtime.parallel.holders import Holders, holders_of
from meshwright.runtime.parallel.tensor_styles import ScriptStyles
from meshwright.runtime.techniques import lora
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.techniques.packed_weights import (
    expect_packing,
    have_whole_codes,
    is_packed,
    matrices_in,
    pack_values,
)
from meshwright.runtime.tracing.module_stage import ModuleStage
from meshwright.runtime.tracing.parameter_reads import read_by_others
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.tracer import Recorder
from meshwright.runtime.tracing.unused_parameters import Participation


def check_layers(plan: Plan, recorder: Recorder) -> None:
    """Refuse a plan that places other layers than the module has."""
    planned = [item.layer for stage in plan.stages for item in stage.layers]  # of every kind
    names = [layer.name for layer in recorder.first.layers]
    if planned != names:
        at = next((i for i, (a, b) in enumerate(zip(planned, names)) if a != b), len(planned))  # noqa: B905
        raise LaunchError(
            f"the plan has {len(planned)} layers and the module {len(names)}; the first that "
            f"differs is number {at}: {[*planned, 'none'][min(at, len(planned))]} in the plan, "
            f"{[*names, 'none'][min(at, len(names))]} in the module; plan again with this module"
        )


def refuse_plan(plan: Plan, module: nn.Module, loss: object, *, by_plan: bool = False) -> None:
    """Refuse what is not executed for modules of a script, with the way out.

    `by_plan` says that the optimizer is that of the plan's `training`.
    """
    for text in _refusals(plan, module, loss, by_plan=by_plan):
        raise LaunchError(text)


def _refusals(plan: Plan, module: nn.Module, loss: object, *, by_plan: bool) -> Iterator[str]:
    """Yield why each field of a plan is refused, and what to do instead.

    Fields of the layout are claimed in planner.frameworks.native_limits; those beside it are
    here.
    """
    not_by_engine = "which meshwright.Engine does not execute"
    other = foreign(plan)
    if other:
        yield other
    if plan.document_len is not None and not by_plan:
        yield (
            f"document_len: is {plan.document_len}, {not_by_engine}; say it to "
            "meshwright.attention(..., starts=...), or by masks, and leave it out"
        )
    # What is by the plan was asked for by `unsupported_reason`.
    for path, kind in {} if by_plan else plan.kinds_by_path.items():
        obstacle = script_obstacle(planned_model(plan), kind.job, kind.layout)
        if obstacle is not None:
            yield f"{path}{obstacle}"
    for name, field in () if by_plan else Training.model_fields.items():
        value = getattr(plan.training, name)
        if name not in ("seed", "lora") and value != field.default:
            yield (
                f"training.{name}: is {value}, {not_by_engine}; leave it out, and say it in "
                "Engine(optimizer=..., clip_norm=...) or by a scheduler of torch"
            )
    for text in _unequal(plan, module, loss):
        what = "other_pipelines: differ" if plan.shares is None else "shares: are unequal"
        yield f"{what}, {not_by_engine}; {text}"


def planned_model(plan: Plan) -> ModelGraph:
    """Return the figures that a plan has of a module, or its layers' names without figures."""
    names = [item.layer for stage in plan.stages for item in stage.layers]
    return plan.model.graph or ModelGraph(
        name=plan.model.name,
        source=plan.model.source,
        layers=tuple(Layer(name=name, kind="own", parameters=0) for name in names),
    )


def _unequal(plan: Plan, module: nn.Module, loss: object) -> Iterator[str]:
    """Yield what gathers as much from each rank, where ranks take unequal shares or differ."""
    if plan.shares is not None or plan.other_pipelines is not None:
        norms = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
        name = next((name for name, part in module.named_modules() if isinstance(part, norms)), "")
        if name:
            yield (
                f"{name} is a BatchNorm, whose statistics are those of all ranks' micro-batches: "
                "use equal shares or pipelines, or another norm"
            )
        if isinstance(loss, whole_batch):
            yield "a loss over the whole batch gathers as much from each rank: use equal ones"


def refuse_without_products(plan: Plan, module: nn.Module, recorder: Recorder) -> None:
    """Refuse 8 bits where no unit has a Linear inside that would multiply in them."""
    if plan.precision not in EIGHT_BITS:
        return
    units = {node.unit for node in recorder.first.nodes if node.unit is not None}
    parts = (module.get_submodule(unit) for unit in units)
    inside = (child for part in parts if is_block(part) for child in part.modules())
    if not any(type(child) is nn.Linear for child in inside):
        raise LaunchError(
            f"precision: is {plan.precision}, and no unit of {type(module).__name__} has an "
            "nn.Linear inside; name units around them with units=, or use bf16"
        )


def modules_of(
    plan: Plan, module: nn.Module, recorder: Recorder, place: Place, stages: Sequence[int]
) -> list[nn.Module]:
    """[stage of this rank] Return the module that each takes its parts of.

    Data parallelism divides a parameter in each stage by itself: a stage that reads one which an
    earlier stage of the rank reads too gets a module of its own, with copies (Slot.copies_here).

    Raises LaunchError where such a parameter is not trained, or its unit has buffers.
    """
    if not wraps(plan, place):
        return [module] * len(stages)
    seen_names: set[str] = set()
    result = []
    for stage in stages:
        layers = recorder.first.layers[slice(*plan.span_of_stage(stage))]
        read = {recorder.aliases[name] for layer in layers for name in layer.parameters}
        shared = sorted(read & seen_names)
        for name in shared:
            _refuse_untrained(module, recorder, name, plan.schedule)
        result.append(copy.deepcopy(module) if shared else module)
        seen_names |= read
    return result


def _refuse_untrained(module: nn.Module, recorder: Recorder, name: str, schedule: str) -> None:
    units = {node.unit for node in recorder.first.nodes if node.unit is not None}
    holding = [unit for unit in units if name.startswith(f"{unit}.") or not unit]
    buffers = any(True for unit in holding for _ in module.get_submodule(unit).buffers())
    if module.get_parameter(name).requires_grad and not buffers:
        return
    reason = "its module has buffers" if buffers else "is not trained"
    raise LaunchError(
        f"{name}: is read by two stages of one rank, is divided by data parallelism, and {reason}, "
        f"which schedule {schedule} does not go with; use schedule 1f1b"
    )


def unlike_holders(plan: Plan, recorder: Recorder, place: Place) -> dict[str, Holders]:
    """Return the ranks of all kinds of pipelines that hold a parameter, by its first name.

    All ranks call it together, where pipelines differ.  What nothing reads has none.
    """
    readers: dict[str, list[str]] = {}
    for layer in recorder.first.layers:
        for name in layer.parameters:
            readers.setdefault(recorder.aliases[name], []).append(layer.name)
    return holders_of(plan, place, readers)


def tied_groups(plan: Plan, recorder: Recorder, place: Place) -> dict[str, dist.ProcessGroup]:
    """Return the ranks that hold a copy each of a parameter that several stages read, by name.

    All ranks call it together; the groups of a rank are those of its pipeline.
    """
    if place.mesh is None or plan.mesh.pipeline == 1:
        return {}
    layers = iter(recorder.first.layers)
    holders: dict[str, set[int]] = {}
    for stage, placed in enumerate(plan.stages):
        for _ in placed.layers:
            for name in next(layers).parameters:
                holders.setdefault(recorder.aliases[name], set()).add(plan.rank_of_stage(stage))
    result: dict[str, dist.ProcessGroup] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, ranks in sorted(holders.items()):
        at = tuple(sorted(ranks))
        if len(at) == 1:
            continue
        if at not in groups:
            for pipeline in place.pipelines:
                group = dist.new_group([pipeline[rank] for rank in at])
                if dist.get_rank() in pipeline:
                    groups[at] = group
        if place.stage in at:
            result[name] = groups[at]
    return result


def refuse_sparse(plan: Plan, module: nn.Module) -> None:
    """Refuse tables whose gradients are sparse where gradients are summed or cast as dense ones."""
    if plan.ranks == 1 and not computes_with_copies(plan) and plan.offload == "none":
        return
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise LaunchError(
                f"{name or type(child).__name__}: {type(child).__name__}(sparse=True) makes sparse "
                "gradients, which one process in fp32 takes, and which ranks cannot sum; build it "
                "with sparse=False"
            )


def refuse_scripted(module: nn.Module) -> None:
    """Refuse modules of torch.jit: their parameters are not those of Python."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise LaunchError(
                f"{name or type(child).__name__}: is a scripted module, whose parameters cannot be "
                "divided over ranks; build the module itself, and write compile: block in the plan"
            )


def refuse_shared_memory(module: nn.Module) -> None:
    """Refuse numbers that belong to several elements of parameters: plans would tell them apart."""
    seen: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in module.named_parameters():
        if _overlaps_itself(parameter):
            raise LaunchError(
                f"{name}: has elements that stand several times in the same memory; make it "
                "contiguous"
            )
        pairs = zip(parameter.shape, parameter.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in pairs) if parameter.numel() else 0
        begin = int(parameter.storage_offset()) * parameter.element_size()
        end = begin + span * parameter.element_size()
        others = seen.setdefault(parameter.untyped_storage()._cdata, [])
        for other_begin, other_end, other in others:
            if begin < other_end and other_begin < end:
                raise LaunchError(
                    f"{name} and {other} share memory as two parameters; let both modules hold one "
                    "parameter, or clone one of them"
                )
        others.append((begin, end, name))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements of a tensor may be the same in memory.

    They are not if each stride leads beyond all that the smaller ones reach.
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def adapt(plan: Plan, module: nn.Module, recorder: Recorder) -> None:
    """Put the plan's adapters of low rank on a module's Linears, and freeze all else.

    "all-linear" leaves out a Linear that is a unit by itself, such as a head.
    """
    settings = plan.training.lora
    assert settings is not None
    apart = {node.unit for node in recorder.first.nodes if node.unit}
    every = EVERY_LINEAR in settings.targets
    if settings.packs_weights:
        matrices = _packed_matrices(plan, module, recorder, apart)
        if not matrices:
            raise LaunchError(
                f"training.lora.weights: is {settings.weights}, and no unit of "
                f"{type(module).__name__} has a Linear or experts that can be packed; use full"
            )
        expect_packing(matrices, settings.weights, activation_type(plan.precision))
    adapted = lora.adapt({"": module}, settings, besides=apart if every else frozenset())
    if not adapted:
        lora.refuse(settings, type(module).__name__)
    for name, owner, attribute in parameter_names("", module):
        if lora.is_adapters(name):
            value = torch.empty(owner._parameters[attribute].shape)  # type: ignore[union-attr]
            lora.fill(name, value, torch.Generator().manual_seed(seed_of(plan.training.seed, name)))
            owner._parameters[attribute] = nn.Parameter(value)


def _packed_matrices(
    plan: Plan, module: nn.Module, recorder: Recorder, apart: Collection[str]
) -> list[nn.Module]:
    """Return the Linears and experts inside units whose weights their own forward alone reads.

    Rows that do not fill elements of the computation's type stay as they are.
    """
    settings, dtype = plan.training.lora, activation_type(plan.precision)
    assert settings is not None
    others = read_by_others(recorder)
    names = Counter(recorder.aliases.values())
    result: dict[int, nn.Module] = {}
    for unit in sorted(apart) or [""]:
        part = module.get_submodule(unit)
        if not is_block(part):
            continue
        paths = {id(inner): path for path, inner in part.named_modules(prefix=unit)}
        for matrix in matrices_in(part, experts.modules_of(part).values(), settings.weights):
            own = {f"{paths[id(matrix)]}.{name}".lstrip(".") for name in matrix._parameters}
            shared = any(names[recorder.aliases.get(name, name)] > 1 for name in own)
            fits = have_whole_codes(matrix, settings.weights, dtype)
            if fits and not (shared or own & others):
                result[id(matrix)] = matrix
    return list(result.values())


def script_stage(
    plan: Plan,
    module: nn.Module,
    recorder: Recorder,
    place: Place,
    *,
    stage: int,
    device: torch.device,
    styles: ScriptStyles,
    participation: Participation,
    loss: token_loss | None,
    compiler: Compiler | None = None,
    holders: Callable[[str], Holders | None] | None = None,
    whole: bool = False,
) -> Staged:
    """Build one of this rank's stages of a module, on the CPU or the device, and apply the plan.

    `plan` is that of its kind of pipelines; where these differ, `holders` are those of a parameter,
    by its name.  `whole` says that ranks may call units in other numbers.
    """
    unused: Sequence[nn.Parameter] = ()
    if plan.mesh.pipeline == 1:
        module_stage: RecordedStage = ModuleStage(module, recorder)
    else:
        module_stage = RecordedStage(module, recorder, *plan.span_of_stage(stage))
        # What nothing reads lies whole on every rank of the first stage: no gradient ever moves it.
        unused = module_stage.keep_tensors(recorder.unread_names if stage == 0 else (), module)
        # Parts of positions or features, and losses in chunks, have other shapes than recorded.
        module_stage.checks_shapes = (
            plan.mesh.tensor == plan.mesh.context == 1 and plan.loss is None
        )
    if plan.mesh.tensor == plan.mesh.expert == 1:  # what is divided is packed behind it
        for name in module_stage.called_units:  # one is on the device in 16 bits at a time
            pack_values(module_stage.part(name).to(device))
    module_stage.to(device)
    for parameter in module_stage.parameters():
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            # Other memory lies between, and fused updates run through all of it.
            parameter.data = parameter.data.contiguous()
    wrapped = wraps(plan, place)
    if wrapped and (whole or recorder.refused is not None):
        # What runs between units is not known, and ranks may run other units: gathered whole.
        module_stage.units = {}
    return apply_plan(
        Staged(
            plan=plan,
            stage=stage,
            place=place,
            device=device,
            module=module_stage,
            of=Script(
                module=module,
                recorder=recorder,
                styles=styles,
                participation=participation,
                loss=loss,
            ),
            unused=unused,
            compiler=compiler,
            holders=holders,
            wrapped=wrapped,
        )
    )


def frozen_and_buffers(stages: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return what a checkpoint keeps beside trained parameters, by name, sharing live memory.

    Packed weights are not part of it: no step changes them, and their codes depend on the plan.
    """
    result: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            path, _, attribute = name.rpartition(".")
            if not (parameter.requires_grad or is_packed(stage.get_submodule(path), attribute)):
                result[name] = parameter.detach()
        for prefix, part in stage.named_modules():
            for attribute, buffer in part._buffers.items():
                if buffer is not None and attribute not in part._non_persistent_buffers_set:
                    result[f"{prefix}.{attribute}" if prefix else attribute] = buffer
    return result
