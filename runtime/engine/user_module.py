"""A module of the user's own under a plan: recorded, checked, and cut into this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.planner.documents.document import first_error
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.runtime.core import auxiliary_loss as inner_loss
from meshwright.runtime.core import batches
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.core.local_parts import to_local
from meshwright.runtime.core.mesh import Place, place_of
from meshwright.runtime.core.object_collectives import number_of_ranks
from meshwright.runtime.engine.apply_plan import Staged
from meshwright.runtime.engine.default_plan import script_plan
from meshwright.runtime.engine.losses.loss_check import check_loss
from meshwright.runtime.engine.losses.named_loss import check_chunks, token_loss
from meshwright.runtime.engine.module_graph import (
    SAMPLES,
    changes_by_samples,
    changing_names,
    check_module,
    check_replay,
    few_samples,
    is_recomputed,
    refuse_changing,
    runs_again,
)
from meshwright.runtime.engine.setup import built
from meshwright.runtime.engine.user_stage import (
    adapt,
    check_layers,
    frozen_and_buffers,
    modules_of,
    refuse_plan,
    refuse_scripted,
    refuse_shared_memory,
    refuse_sparse,
    refuse_without_products,
    script_stage,
    tied_groups,
    unlike_holders,
)
from meshwright.runtime.optim.gradients import Slot, copies_of, refuse_changed_copy
from meshwright.runtime.optim.parameter_watch import refuse_hooks
from meshwright.runtime.optim.sharded_optimizer import (
    Factory,
    GroupOf,
    ParameterGroup,
    parameter_groups,
)
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.parallel.attention_api import (
    SeenKeys,
    divide_positions,
    positions_in,
    seeing,
)
from meshwright.runtime.parallel.context_check import check_parts, check_positions
from meshwright.runtime.parallel.data_parallel import activation_type, computes_with_copies
from meshwright.runtime.parallel.holders import Holders
from meshwright.runtime.parallel.sharded_dropout import DividedDraws, Draw
from meshwright.runtime.parallel.tensor_styles import Styles, styles_by_name
from meshwright.runtime.techniques.compile import Compiler
from meshwright.runtime.techniques.lora import store_frozen
from meshwright.runtime.tracing.absent_parameters import mark_absent, mark_replaced
from meshwright.runtime.tracing.module_stage import ModuleStage
from meshwright.runtime.tracing.replayed_stage import Around
from meshwright.runtime.tracing.trace import Node
from meshwright.runtime.tracing.tracer import Inputs, Recorder
from meshwright.runtime.tracing.unused_parameters import Participation


class OwnModel:
    """A module from a function that builds it, as an Engine trains it."""

    counts = 1
    """Count that the loss is expected to have for each sample."""
    by_plan = False
    """True if the optimizer is that of the plan's `training`."""
    divides_logits = False
    """True if the loss gets logits that are divided over the tensor axis."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        wanted: Plan | Mapping[str, Any],
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: Factory,
        batch: Any,
        inputs: Inputs | None,
        groups: GroupOf | None,
        units: Sequence[str] | None,
        tensor: Styles | None,
        by_micro_batch: bool = False,
        local: bool = False,
        device: torch.device,
        place: Place | None = None,
    ) -> None:
        """See Engine; `wanted` is a plan, or fields of a layout, of which a plan is made.

        With `local` the example is one rank's batch, of any structure, and runs whole.

        `place` is this rank's if it is not that of all ranks in the plan.
        """
        module = built(build, wanted)
        refuse_scripted(module)
        refuse_hooks(module.named_parameters())
        refuse_shared_memory(module)
        batches.register_records(batch)
        few = batch if local else few_samples(batch, SAMPLES)
        asked = inner_loss.times_asked()
        recorder = Recorder.of_units(module, few, inputs, units=units)
        self.sums = inner_loss.times_asked() > asked
        """The module asks for sums over the batch."""
        if isinstance(wanted, Plan) and not (local or self._sees_less(wanted)):
            check_module(wanted, recorder)  # others were planned without positions
        samples = None if local else batches.samples_in(batch)
        plan = _plan_for(build, wanted, recorder, type(module), samples, device)
        dtype = activation_type(plan.precision)
        refuse_plan(plan, module, loss, by_plan=self.by_plan)
        refuse_sparse(plan, module)
        if plan.training.lora is not None:
            adapt(plan, module, recorder)
        plain = recorder  # modules are tried in fp32
        if dtype != torch.float32 or plan.training.lora is not None:
            recorder = Recorder.of_units(module, few, inputs, units=units, dtype=dtype)
        check_layers(plan, recorder)
        refuse_without_products(plan, module, recorder)
        self.put_back = self._refuse_changing(plan, module, plain, few, loss, local=local)
        """Buffers that are as before when the next forward of a step begins."""
        if not local:
            loss = check_loss(plan, module, recorder, batch, loss, by_micro_batch=by_micro_batch)
        self._draws: Mapping[Draw, int] = {}
        """Dim with positions in the result of each random draw."""
        self._check_divisions(plan, module, plain, few, loss)
        self.plan = plan
        self.recorder = recorder
        self.aliases: Mapping[str, str] = recorder.aliases
        self.order = tuple(_names(module))
        """Names of parameters and buffers, in the order of the module's own state_dict()."""
        self.participation: Participation | None = Participation()
        self.module = module
        """All of it, on the host, whose parts stages have taken."""
        self._device = device
        self._calls_differ = local and units is None
        """Ranks may call units in other numbers: for each image of a list."""
        self._styles = styles_by_name(plan, module, recorder, tensor, self._trial_batch(few))
        # Last: a plan that no module goes with needs no ranks.
        self.place = place or place_of(plan, device)
        self.loss = loss
        self._make_groups()
        self._groups = parameter_groups(module, optimizer, groups)

    def _make_groups(self) -> None:
        """Make the groups of ranks that hold the same parameters; all ranks call it together."""
        alike = self.place.kinds is None
        self._tied = tied_groups(self.plan, self.recorder, self.place) if alike else {}
        """Ranks of this rank's pipeline that hold a copy each, where pipelines are alike."""
        self._holders = {} if alike else unlike_holders(self.plan, self.recorder, self.place)
        """Ranks that hold a parameter, by its first name, where pipelines differ."""
        if self.own_plan.mesh.pipeline > 1:
            self.recorder.follow(self.module)

    @property
    def own_plan(self) -> Plan:
        """Plan of this rank's kind of pipelines."""
        return self.plan.kinds[self.place.kind]

    def _refuse_changing(
        self,
        plan: Plan,
        module: nn.Module,
        recorder: Recorder,
        few: Any,
        loss: Any,
        *,
        local: bool = False,
    ) -> frozenset[str]:
        """Return the buffers that are as before when the next forward of a step begins.

        Each forward of a step then makes them anew of the same: a codebook of the batch's sums.
        Raises RecordError where a plan would make something else of what forwards change.
        """
        twice = self.sums or isinstance(loss, whole_batch)
        ranks = plan.data_degree
        changing: frozenset[str] = frozenset()
        if plan.is_cut:
            changing = check_replay(module, recorder, few)
        elif runs_again(plan, twice=twice) or ranks > 1 or computes_with_copies(plan):
            changing = changing_names(module, recorder, few)
        names = changing & dict(module.named_parameters()).keys()
        if names and computes_with_copies(plan):
            refuse_changed_copy(min(names), "the forward")
        again = runs_again(plan, twice=False)
        buffers = dict(module.named_buffers()).keys()
        if changing and changing <= buffers and not plan.is_cut:
            alone = plan.most_micro_batches == 1
            if not is_recomputed(plan) and (
                alone
                or not (
                    local or changes_by_samples(module, recorder, few, changing, sums=self.sums)
                )
            ):
                return changing if twice or again else frozenset()
        refuse_changing(
            plan,
            changing,
            twice=twice,
            by_samples=lambda: local or changes_by_samples(module, recorder, few, changing),
        )
        return frozenset()

    def _check_divisions(
        self, plan: Plan, module: nn.Module, recorder: Recorder, few: Any, loss: Any
    ) -> None:
        """Refuse a module whose experts, loss or positions cannot be divided as the plan wants."""
        degree = plan.mesh.expert
        if degree > 1:
            experts_modules = experts.modules_of(module)
            if not experts_modules:
                raise LaunchError(
                    f"mesh.expert: is {degree}, and no module of {type(module).__name__} has "
                    "gate_up_proj and down_proj of several experts; use ZeRO 3, which divides all"
                )
            for path, module_of_experts in experts_modules.items():
                experts.check(module_of_experts, path, degree)
        if self.sums and plan.other_pipelines is not None:
            raise LaunchError(
                "other_pipelines: differ, and the module asks for sums over the batch "
                "(meshwright.batch_sum), which ranks of one stage make together; use pipelines "
                "that are alike"
            )
        if plan.loss is not None:
            check_chunks(plan.loss, module, recorder, few, loss)
        if not self._sees_less(plan):
            return
        why = "documents" if plan.mesh.context == 1 else f"mesh.context: is {plan.mesh.context}"
        check_positions(module, recorder, few, loss, why)
        if plan.mesh.context > 1:
            self._draws = check_parts(module, recorder, few, loss, why)

    @contextmanager
    def _seeing(self, batch: Any, node: Node | None) -> Iterator[None]:
        """Let a node of a micro-batch see and draw what this rank's positions do."""
        place = self.place.context
        with ExitStack() as held:
            held.enter_context(seeing(self._seen_keys(batch)))
            if place.degree > 1 and node is not None and node.draws:
                length = positions_in(batch) * place.degree
                positions = place.positions(length)
                held.enter_context(DividedDraws(node.name, self._draws, positions, length))
            yield

    def _seen_keys(self, batch: Any) -> SeenKeys:
        """Return what attention sees in a micro-batch."""
        return SeenKeys(context=self.place.context, batch=batch)

    def _trial_batch(self, few: Any) -> Any:
        """Return the batch of trials, for the tensor axis, of what is divided there."""
        return few

    def stages(self, compiler: Compiler | None) -> tuple[Staged, ...]:
        """Return this rank's stages, the plan applied."""
        plan = self.own_plan
        numbers = plan.stages_of_rank(self.place.stage)
        assert self.participation is not None
        if plan.training.lora is not None:  # now that all trials, which are in fp32, have run
            store_frozen(self.module, activation_type(plan.precision))
        built = list(self.module.named_parameters())
        parts = tuple(
            script_stage(
                plan,
                stage_names,
                self.recorder,
                self.place,
                stage=stage,
                device=self._device,
                styles=self._styles,
                participation=self.participation,
                loss=self.loss if isinstance(self.loss, token_loss) else None,
                compiler=compiler,
                holders=None if self.place.kinds is None else self._holders_of,
                whole=self._calls_differ,
            )
            for stage, stage_names in zip(
                numbers,
                modules_of(plan, self.module, self.recorder, self.place, numbers),
                strict=True,
            )
        )
        for part in parts:
            part.recorded.around = self.around(plan)
            if isinstance(part.module, ModuleStage):
                part.module.wrap_units(sums=self.sums)
        for module in self.module.modules() if plan.mesh.tensor > 1 else ():
            module.register_load_state_dict_pre_hook(_take_whole_of_other_meshes)
        here = [parameter for part in parts for parameter in part.module.parameters()]
        mark_replaced(built, [*here, *self.module.parameters()])
        if plan.mesh.pipeline > 1:
            mark_absent(self.module, here, parts[0].module.fail)
        return parts

    def _holders_of(self, name: str) -> Holders | None:
        """Return the ranks that hold a parameter of a stage; None of one that nothing reads."""
        return self._holders.get(self.aliases.get(name, name))

    def around(self, plan: Plan) -> Around | None:
        """Return what each call of a stage's nodes is made in, by the batch of its micro-batch."""
        return self._seeing if self._sees_less(plan) or plan.loss is not None else None

    def _sees_less(self, plan: Plan) -> bool:
        """Tell whether attention sees less than a sample: some positions, or a document."""
        return plan.mesh.context > 1

    def slots(self, parts: Sequence[Staged]) -> tuple[Slot, ...]:
        """Return what this rank trains; of a parameter that several stages read, each its copy."""
        slots: dict[str, Slot] = {}
        for part in parts:
            for path, parameter in part.module.named_parameters():
                name = self.aliases.get(path, path)
                if not parameter.requires_grad:
                    continue
                local = to_local(parameter)
                if name in slots:
                    first = slots[name]
                    if parameter is not first.parameter:
                        here = (*first.copies_here, (parameter, local.detach()))
                        slots[name] = replace(first, copies_here=here)
                    continue
                tied, by = self._tied.get(name), self._holders.get(name)
                copies = copies_of(parameter, self.place.copies) * (tied.size() if tied else 1)
                if by is not None and by.tied:
                    tied, copies = by.group, copies_of(parameter, by.ranks)
                slots[name] = Slot(
                    name=name,
                    parameter=parameter,
                    local=local.detach(),
                    copies=copies,
                    partial=name in part.summed,
                    pieces=1,
                    sections=part.sections.get(name, ()),
                    tied=tied,
                    reduced=by is not None,
                    factor=part.factors.get(path, 1.0),
                )
        return tuple(slots.values())

    def groups(self, slots: Sequence[Slot]) -> list[ParameterGroup]:
        """Return what is trained by its settings, equal on all ranks."""
        return self._groups

    def batch(self, given: Any) -> Any:
        """Return what a user's step is given, at this rank's positions."""
        return divide_positions(given, self.place.context)

    def untrained_tensors(self, parts: Sequence[Staged]) -> dict[str, Tensor]:
        """Return what a rank has beside what it trains, by name."""
        return frozen_and_buffers([part.module for part in parts])

    saved_untrained_tensors = untrained_tensors
    """The part of those tensors that a checkpoint has."""

    def learning_rate(self, steps: int) -> float | None:
        """Return None: a scheduler of the user's own says it."""
        return None

    def expert_load(self, parts: Sequence[Staged]) -> float | None:
        """Return None: experts of the user's own are not known."""
        return None

    def configuration(self) -> str | None:
        """Return None: the module is the user's own code."""
        return None


def _take_whole_of_other_meshes(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Make whole what other ranks divide than those of the parameter that it is loaded into."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if not (isinstance(value, DTensor) and isinstance(parameter, DTensor)):
            continue
        if value.device_mesh != parameter.device_mesh:
            state[prefix + name] = value.full_tensor()


def _plan_for(
    build: Callable[[], nn.Module],
    wanted: Plan | Mapping[str, Any],
    recorder: Recorder,
    kind: type[nn.Module],
    samples: int | None,
    device: torch.device,
) -> Plan:
    """Return the plan itself, or that of a layout for what was recorded."""
    if isinstance(wanted, Plan):
        return wanted
    name = getattr(build, "__name__", kind.__name__)
    try:
        return script_plan(
            recorder,
            wanted,
            name=kind.__name__ if name == "<lambda>" else name,
            ranks=number_of_ranks(),
            global_batch=samples,
            device=device.type,
        )
    except ValidationError as error:
        raise first_error(error) from error


def _names(module: nn.Module) -> Iterator[str]:
    """Yield names of parameters and buffers in the order of `state_dict()`."""
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        yield from (prefix + name for name in (*part._parameters, *part._buffers))
