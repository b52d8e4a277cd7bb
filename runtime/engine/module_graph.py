"""A module of the user's own script as a ModelGraph: its recorded layers, and what each costs.

Nothing is computed: parameters and the batch have no data, and figures are of two samples, halved.
A forward that cannot be recorded is one layer, which a plan may train without a pipeline.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from meshwright.planner.documents.model import (
    BatchLeaf,
    DividedLayer,
    Edge,
    Layer,
    LayerTrace,
    ModelGraph,
    TracedExperts,
    TracedLogits,
)
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.units import name_of
from meshwright.planner.errors import BatchError, LaunchError, PlanError, RecordError
from meshwright.planner.system import progress
from meshwright.runtime.core import auxiliary_loss as inner_loss
from meshwright.runtime.core.auxiliary_loss import BatchSums, InnerLosses, running
from meshwright.runtime.core.batches import samples_in
from meshwright.runtime.core.loss import loss_sum_of
from meshwright.runtime.core.side_effects import (
    Changes,
    PythonNumbers,
    deepcopy_module,
    restore_side_effects,
    seed_all,
)
from meshwright.runtime.engine.losses.named_loss import check_chunks, head_of, token_loss
from meshwright.runtime.optim.sharded_optimizer import (
    Factory,
    GroupOf,
    gathered_names,
    parameter_groups,
    state_bytes,
)
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.parallel.attention_api import bytes_of, note_keys_bytes, positions_in
from meshwright.runtime.parallel.context_check import check_parts, check_positions
from meshwright.runtime.parallel.tensor_check import DividedUnit
from meshwright.runtime.parallel.tensor_regions import take_parts
from meshwright.runtime.parallel.tensor_styles_search import DerivedStyles
from meshwright.runtime.tracing.meta_costs import identities, traced_call
from meshwright.runtime.tracing.meta_twin import EqualOperators, MetaTwin, empty_twin
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.trace import Recording, called_name
from meshwright.runtime.tracing.tracer import Inputs, Recorder, arguments, can_be_tried, own_tensors

SAMPLES = 2
"""Samples of the batch that is priced: with only one, a norm over samples has no variance."""
DEGREES = (2, 4, 8)
"""Degrees of a tensor axis for which a plan tries a module: within a node, on any cluster."""
Loss = Callable[[Any, Any], Any]
"""`loss(outputs, batch)`: a sum and a count, with or without metrics, or one mean."""


def script_model(
    module: nn.Module,
    batch: Any,
    inputs: Inputs | None = None,
    *,
    loss: Loss | None = None,
    units: Sequence[str] | None = None,
    name: str,
    optimizer: Factory | None = None,
    groups: GroupOf | None = None,
    degrees: Sequence[int] = (),
    tried: Any = None,
    branches: bool = False,
    named: bool = True,
    rebuild: Callable[[], nn.Module] | None = None,
) -> ModelGraph:
    """Return the ModelGraph of a module whose batch looks like `batch`.

    An `optimizer` is tried for the bytes of its state; without one they are AdamW's.  `degrees`
    are those of a tensor axis, for which units are tried on random numbers, of a batch like `tried`
    if one is given.  With `branches` the layers form a graph: the module takes its units in any
    order that a plan chose.  `named` says that attention is by name under a plan that divides
    positions, or that the module calls it so.  `rebuild` builds a module without data with data,
    for trials that need some.

    Raises RecordError where the forward runs neither without data nor with it, and BatchError where
    the batch has no samples.
    """
    with (
        progress.running(f"records {name} and prices its layers"),
        restore_side_effects(module, inputs, loss, optimizer, groups),
    ):
        few = few_samples(batch, SAMPLES)
        with note_keys_bytes() as of_ours:
            recorder = Recorder.of_units(module, few, inputs, units=units, rebuild=rebuild)
        # The check of a module with data would say so; it is built once more for others alone.
        named = named and bool(of_ours or rebuild is None)
        return _graph_of(
            module,
            few,
            recorder,
            loss=loss,
            name=name,
            optimizer=optimizer,
            groups=groups,
            degrees=degrees,
            tried=few if tried is None else tried,
            branches=branches,
            named=named,
            rebuild=rebuild,
        )


def _graph_of(
    module: nn.Module,
    few: Any,
    recorder: Recorder,
    *,
    loss: Loss | None,
    name: str,
    optimizer: Factory | None,
    groups: GroupOf | None,
    degrees: Sequence[int],
    tried: Any,
    branches: bool,
    named: bool,
    rebuild: Callable[[], nn.Module] | None,
) -> ModelGraph:
    recording = recorder.first
    # What a module with data costs may depend on its values.
    kinds: list[Hashable] = (
        identities(module, recording) if recorder.is_fake else list(range(len(recording.layers)))
    )
    traced = _figures(recorder, few, loss, kinds)
    shared = [layer.shares for layer in traced]
    figures = [_halve(layer.trace) for layer in traced]
    if branches:  # what a layer passes on of others is theirs
        figures = [
            trace.model_copy(update={"output_bytes": size // SAMPLES})
            for trace, size in zip(figures, recording.output_bytes(), strict=True)
        ]
    gathered = (
        gathered_names(parameter_groups(module, optimizer, groups)) if (optimizer) else frozenset()
    )
    styles = DerivedStyles(module, recorder, tried) if degrees else None
    divided = _divided_layers(module, recorder, few, loss, degrees, styles, gathered, kinds, traced)
    if branches:
        divided = [
            parts and tuple(_handing_on(part, trace.output_bytes) for part in parts)
            for parts, trace in zip(divided, figures, strict=True)
        ]
    own_parameters = _own_parameters(recording)
    matrices = [
        tuple(module.get_parameter(name).numel() for name in names if name in gathered)
        for names in own_parameters
    ]
    counts = [_count(module, names) for names in own_parameters]
    logits = [None] * (len(own_parameters) - 1) + [_logits(module, recorder, few, loss, shared[-1])]
    beside = list(zip(counts, matrices, shared, strict=True))
    names_of_kinds = _kinds(module, recording, figures, beside)
    layers = [
        Layer(
            name=layer.name,
            kind=kind,
            parameters=count,
            trace=trace,
            divided=parts,
            tied=_count(module, (name for name in layer.parameters if name not in names)) or None,
            largest=max((module.get_parameter(name).numel() for name in names), default=0),
            whole_matrices=whole or None,
            keys_bytes=also.keys_bytes // SAMPLES or None,
            experts=also.experts,
            logits=product,
        )
        for layer, kind, trace, names, count, parts, whole, also, product in zip(
            recording.layers,
            names_of_kinds,
            figures,
            own_parameters,
            counts,
            divided,
            matrices,
            shared,
            logits,
            strict=True,
        )
    ]
    return ModelGraph(
        name=name_of(name),
        source=f"script:{name}",
        recording=None if branches else recording.digest,
        positions=_positions(module, recorder, few, loss, shared, rebuild) if named else None,
        optimizer_bytes=_optimizer_bytes(module, optimizer, groups) if optimizer else None,
        layers=tuple(layers),
        edges=_edges(recording) if branches else (),
    )


def _positions(
    module: nn.Module,
    recorder: Recorder,
    few: Any,
    loss: Loss | None,
    shared: Sequence[RankShares],
    rebuild: Callable[[], nn.Module] | None,
) -> int | None:
    """Return how many positions a sample has, where ranks can have some of them each."""
    if loss is None or not any(shares.keys_bytes for shares in shared):
        return None
    try:
        module = module if rebuild is None else rebuild()
        check_positions(module, recorder, few, loss, "mesh.context")
        check_parts(module, recorder, few, loss, "mesh.context")
        return positions_in(few)
    except LaunchError:
        return None


def _logits(
    module: nn.Module, recorder: Recorder, few: Any, loss: Loss | None, last: RankShares
) -> TracedLogits | None:
    """Return the product of the last layer whose loss can be made in chunks, if there is one."""
    if not isinstance(loss, token_loss) or last.without_loss is None:
        return None
    try:
        check_chunks(ChunkedLoss(), module, recorder, few, loss)
        path = head_of(recorder.first, module)
    except LaunchError:
        return None
    recording, head = recorder.first, module.get_submodule(path)
    assert isinstance(head, nn.Linear)
    if path not in recording.layers[-1].units:
        return None
    (values,) = (node.made for node in recording.nodes if node.unit == path)
    return TracedLogits(
        rows=recording.values[values[0][1]].shape.numel() // head.out_features // SAMPLES,
        width=head.in_features,
        outputs=head.out_features,
        trace=_halve(last.without_loss),
    )


def _edges(recording: Recording) -> tuple[Edge, ...]:
    """Return which layers read which."""
    pairs = (
        (source.name, layer.name)
        for layer in recording.layers
        for source in recording.layers
        if source is not layer and recording.made_by(source) & recording.read_by(layer)
    )
    return tuple(Edge(source=source, target=target) for source, target in pairs)


def _optimizer_bytes(module: nn.Module, optimizer: Factory, groups: GroupOf | None) -> float:
    """Return the bytes of state per parameter; those that are not trained have none."""
    count = sum(parameter.numel() for parameter in module.parameters())
    listed = parameter_groups(module, optimizer, groups)
    kept = (
        state_bytes(group, [module.get_parameter(name).shape for name in group.names])
        for group in listed
    )
    return sum(kept) / count if count else 0.0


def check_module(plan: Plan, recorder: Recorder) -> None:
    """Refuse a module that does something else than the one that was planned.

    `recorder` has recorded it in fp32, with SAMPLES of a batch.  What counts is names, shapes and
    calls, not the text of the source: a comment changes nothing.
    """
    graph = plan.model.graph
    if graph is None or graph.recording is None:
        return
    recording = recorder.first
    if recording.digest != graph.recording:
        planned = {layer.name: layer.parameters for layer in graph.layers}
        here = [layer.name for layer in recording.layers]
        named = [name for name in here if name not in planned]
        named += [name for name in planned if name not in here]
        other = f"it differs in {', '.join(named[:3])}" if named else "shapes or calls differ"
        raise PlanError(
            f"{plan.model.source}: the plan was made for another module or batch ({other}); plan "
            "again with meshwright.plan"
        )


def changing_names(module: nn.Module, recorder: Recorder, few: Any) -> frozenset[str]:
    """Return the names of attributes, parameters and buffers that every forward changes anew.

    `few` is the batch that `recorder` recorded.  A module of more than MOST_CHECKED parameters, and
    one without data, is not tried.
    """
    if not can_be_tried(module, few):
        return frozenset()
    return _trial_of_module(module, recorder, few)[1]


def check_replay(module: nn.Module, recorder: Recorder, few: Any) -> frozenset[str]:
    """Refuse a module whose replayed forward does something else than the module, on real data.

    What a recording cannot see is Python's own state between units: a counter, a list, a random
    number of Python, or what only a backward does.  Both run on copies: outputs, attributes that
    change, random numbers that are drawn and gradients must be the same.  Returns `changing_names`.
    """
    if not can_be_tried(module, few):
        return frozenset()
    # One unit is replayed as the module itself.
    backward = recorder.refused is None
    once, changing, unnamed, buffers = _trial_of_module(module, recorder, few, backward=backward)
    with restore_side_effects(module, recorder.inputs), torch.enable_grad():
        other = _in_training(module)
        before = deepcopy_module(other)
        stage = RecordedStage(other, recorder, 0, len(recorder.first.layers)).train()
        replayed = _ForwardTrial.of(
            other, lambda: stage(micro=MicroBatch(own_tensors(few))), backward=backward
        )
        here = _changed_buffers(recorder, before, other)
    for parameter in module.parameters():
        parameter.grad = None  # a forward that was replaced by a function runs the module itself
    apart = sorted(once.changes ^ replayed.changes)
    if apart or unnamed or not once.makes_as(replayed):
        what = f" ('{apart[0]}' changes in one of them only)" if apart else ""
        raise RecordError(
            f"{type(module).__name__} makes something else than its replayed forward{what}: "
            "what it does depends on Python's own state, between units; keep state in buffers, or "
            "name a unit around it with units="
        )
    if bound := sorted(buffers ^ here):
        raise RecordError(
            f"{bound[0]}: is bound anew by the forward, between units, and a stage has the tensor "
            f"that was there before: change it in place ({bound[0]}.copy_(...)), name a unit "
            "around it with units=, or use a plan without pipeline"
        )
    if (name := once.learns_apart(replayed)) is not None:
        raise RecordError(
            f"{type(module).__name__} gives '{name}' another gradient than its replayed forward: "
            "what changes a backward (a hook, torch.autograd.graph.saved_tensors_hooks) stands "
            "between units; put it inside one, or name a unit around it with units="
        )
    return changing


def _trial_of_module(
    module: nn.Module, recorder: Recorder, few: Any, *, backward: bool = False
) -> tuple[_ForwardTrial, frozenset[str], bool, set[str]]:
    """Run a copy of a module twice; return the first trial, and the names of what changes anew.

    The third says that the second forward made something else and nothing has changed by name, the
    fourth which buffers the first one changed.
    """
    with restore_side_effects(module, recorder.inputs), torch.enable_grad():
        twin = _in_training(module)
        before = deepcopy_module(twin)
        once = _ForwardTrial.of(twin, lambda: _forward_of(twin, recorder, few), backward=backward)
        changed = _changed_names(recorder, before.named_parameters(), twin.named_parameters())
        buffers = _changed_buffers(recorder, before, twin)
        between = [(name, buffer.clone()) for name, buffer in twin.named_buffers()]
        again = _ForwardTrial.of(twin, lambda: _forward_of(twin, recorder, few))
        moving = _changed_names(recorder, between, twin.named_buffers())
    slow = buffers - _statistics(module)
    if not once.makes_as(again):  # statistics that no training forward reads are none of these
        changed |= slow
    elif slow and _reads(twin, recorder, few, slow):  # a spectral norm's
        moving &= slow
        derived = slow - moving  # tables of a length that a first forward makes
        if derived and changes_by_samples(module, recorder, few, derived):  # a first batch's mean
            moving |= derived
        changed |= moving
    for parameter in module.parameters():
        parameter.grad = None  # a forward that was replaced by a function runs the module itself
    unnamed = not (again.changes or changed or once.makes_as(again))
    return once, again.changes | frozenset(changed), unnamed, buffers


@torch.no_grad()
def _in_training(module: nn.Module) -> nn.Module:
    """Return a copy whose weights are others than when it was made, as in a later step.

    A copy of weights, a gate of zeros or settled vectors hide in the first step what they are for.
    """
    twin = deepcopy_module(module)
    for seed, weight in enumerate(twin.parameters()):
        if weight.is_floating_point():
            drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
            weight.mul_(1 + 0.1 * drawn.to(weight)).add_(0.02 * drawn.to(weight))
    return twin


def _statistics(module: nn.Module) -> set[str]:
    """Return the names of running statistics, which no training forward reads."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for name in part._buffers
    }


def _reads(module: nn.Module, recorder: Recorder, few: Any, names: Collection[str]) -> bool:
    """Return whether a forward makes something else of other values of these buffers."""
    with restore_side_effects(module, recorder.inputs), torch.enable_grad():
        before, other = deepcopy_module(module), deepcopy_module(module)
        for name, buffer in dict(other.named_buffers()).items():
            if name in names and buffer.is_floating_point():
                sizes = torch.linspace(0.5, 1.5, buffer.numel(), dtype=buffer.dtype)
                path, _, attribute = name.rpartition(".")
                other.get_submodule(path)._buffers[attribute] = buffer * sizes.view(buffer.shape)
        trials = [
            _ForwardTrial.of(part, functools.partial(_forward_of, part, recorder, few))
            for part in (before, other)
        ]
    return not trials[0].makes_as(trials[1])


def _changed_names(
    recorder: Recorder, before: Iterable[tuple[str, Tensor]], now: Iterable[tuple[str, Tensor]]
) -> set[str]:
    """Return the names of tensors that have other values now."""
    here = dict(now)
    return {
        recorder.aliases.get(name, name)
        for name, then in before
        if name in here and not _is_same(then, here[name])
    }


def _is_same(then: Tensor, now: Tensor) -> bool:
    """Return whether a tensor has not changed at all: what is slow moves on from step to step."""
    return then.shape == now.shape and bool(((then == now) | then.isnan()).all())


def _changed_buffers(recorder: Recorder, before: nn.Module, now: nn.Module) -> set[str]:
    """Return the names of buffers that have other values now, or are there only now."""
    there, here = dict(before.named_buffers()), dict(now.named_buffers())
    changed = _changed_names(recorder, there.items(), here.items())
    return changed | (here.keys() - there.keys())


def refuse_changing(
    plan: Plan, changing: Collection[str], *, twice: bool, by_samples: Callable[[], bool]
) -> None:
    """Refuse a module that every forward changes, under a plan that makes something else of it.

    `changing` are the names of `check_replay`; `twice` says that losses need another forward.  What
    does not change `by_samples` (a spectral norm's vectors) is the same on every rank, so that each
    may make it once in a step.
    """
    ranks, again = plan.data_degree, runs_again(plan, twice=twice)
    if changing and (again or (ranks > 1 and by_samples())):
        reason = "more than one forward"
        if ranks > 1:
            reason = f"{ranks} ranks for the data"
        if any(kind.micro_batches > 1 for kind in plan.kinds):
            reason = f"{plan.most_micro_batches} micro-batches"
        one_rank = "one rank for the data, " if not again or by_samples() else ""
        raise RecordError(
            f"{min(changing)}: is changed by every forward, and a step of this plan has "
            f"{reason}, so that training would depend on the plan; change it in the training "
            f"loop, or plan with {one_rank}micro_batches 1 and recompute none"
        )


def runs_again(plan: Plan, *, twice: bool) -> bool:
    """Tell whether a rank runs several forwards in a step; `twice`, that losses need another."""
    several = any(kind.micro_batches > 1 for kind in plan.kinds)
    return several or is_recomputed(plan) or twice


def is_recomputed(plan: Plan) -> bool:
    """Tell whether some layer runs again in backward."""
    return any(item.recompute != "none" for stage in plan.all_stages for item in stage.layers)


def changes_by_samples(
    module: nn.Module,
    recorder: Recorder,
    few: Any,
    changing: Collection[str],
    *,
    sums: bool = False,
) -> bool:
    """Return whether a forward's changes depend on samples, on how many there are, or on draws.

    With `sums` what the module sums over the batch is that of one batch, whatever its samples.
    What is neither a tensor nor a number of the module is taken to depend on them.
    """
    other = tree_map(_of_first_sample, few)
    if all(map(_equal, tree_leaves(few), tree_leaves(other))):
        return True
    batches = [few, other, few_samples(few, 2 * SAMPLES)]
    rounds: list[list[Any]] = []
    of_batch = BatchSums() if sums else None
    for seed, batch in enumerate([few, *batches] if sums else batches):
        with (
            restore_side_effects(module, recorder.inputs),
            torch.enable_grad(),
            running(InnerLosses(lambda _: None, None, of_batch)),
        ):
            twin = deepcopy_module(module)
            seed_all(seed)
            inner_loss.begin("")
            try:
                _forward_of(twin, recorder, batch)
                values = [operator.attrgetter(name)(twin) for name in sorted(changing)]
            except Exception:  # it takes no such samples, or what changes is not the module's
                return True
            if of_batch is not None and of_batch.adding:
                of_batch.finish(lambda value: value)
                continue
        rounds.append(tree_leaves(values))
    return not all(
        isinstance(first, Tensor | int | float) and _equal(first, value)
        for leaves in rounds[1:]
        for first, value in itertools.zip_longest(rounds[0], leaves)
    )


def _of_first_sample(leaf: Any) -> Any:
    """Return a leaf of a batch whose samples are copies of the first, halved where they can be."""
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    samples = leaf[:1].expand_as(leaf)
    return samples / 2 if leaf.is_floating_point() else samples.clone()


def _forward_of(module: nn.Module, recorder: Recorder, few: Any) -> Any:
    args, kwargs = arguments(recorder.inputs(own_tensors(few)))
    return module(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _ForwardTrial:
    """The results and side effects of a forward."""

    leaves: list[Any]
    changes: frozenset[str]
    """Names of what it changed outside of parameters and buffers."""
    numbers: PythonNumbers
    gradients: Mapping[str, tuple[float, float]]
    """Two numbers for each parameter that follow from its gradient: its norm, and a projection."""

    @classmethod
    def of(
        cls, module: nn.Module, run: Callable[[], Any], *, backward: bool = False
    ) -> _ForwardTrial:
        """Run a forward of a module from the same random numbers as any other."""
        seed_all(0)
        before = Changes((module,))
        leaves = tree_leaves(run())
        changes, numbers = before.changes(), PythonNumbers()
        gradients = _gradients(module, leaves) if backward else {}
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(leaves, changes, numbers, gradients)

    def makes_as(self, other: _ForwardTrial) -> bool:
        """Tell whether both made the same, and drew as many random numbers of Python's own."""
        return (
            len(self.leaves) == len(other.leaves)
            and all(map(_equal, self.leaves, other.leaves))
            and self.numbers.drew_as(other.numbers)
        )

    def learns_apart(self, other: _ForwardTrial) -> str | None:
        """Return a parameter that both give other gradients, if there is one."""
        if not (self.gradients and other.gradients):
            return None
        for name, (norm, projected) in self.gradients.items():
            there = other.gradients.get(name, (0.0, 0.0))
            # Rounding is that of the largest gradient: one of zeros may be all rounding.
            close = 1e-3 * norm + 1e-5 * max(size for size, _ in self.gradients.values())
            gaps = (abs(norm - there[0]), abs(projected - there[1]))
            if math.isfinite(norm) and not max(gaps) <= close:
                return name
        return None


def _gradients(module: nn.Module, leaves: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Return what tells the gradients of a fixed sum of outputs apart, by parameter.

    Empty where the module has no backward here, which its training would say.
    """
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    weights = [_pattern(output) for output in outputs]
    try:
        torch.autograd.backward(outputs, weights)
    except Exception:
        return {}
    grads = {}
    for name, parameter in module.named_parameters():
        grad, parameter.grad = parameter.grad, None
        if grad is not None and not grad.is_sparse:
            grads[name] = (float(grad.norm()), float((grad * _pattern(grad)).sum()))
    return grads


def _pattern(like: Tensor) -> Tensor:
    """Return numbers of a tensor's shape of which hardly any two are alike."""
    return torch.arange(like.numel(), device=like.device).cos().to(like.dtype).view(like.shape)


def _equal(first: Any, other: Any) -> bool:
    if not (isinstance(first, Tensor) and isinstance(other, Tensor)):
        return bool(first == other)
    if first.shape != other.shape:
        return False
    # Equal as a rule, which is told in a tenth of the time.
    return torch.equal(first, other) or torch.allclose(
        first, other, rtol=1e-4, atol=1e-6, equal_nan=True
    )


def batch_leaves(batch: Any) -> dict[str, BatchLeaf]:
    """Return shape and type of one sample's leaves, by their place in the batch.

    >>> leaves = batch_leaves({"x": torch.ones(8, 3), "beta": torch.tensor(0.5), "name": "a"})
    >>> [(place, leaf.shape, leaf.dtype) for place, leaf in leaves.items()]
    [("['x']", (3,), 'float32'), ("['beta']", None, 'float32')]
    """
    return {
        keystr(path) or "batch": BatchLeaf(
            shape=tuple(leaf.shape[1:]) if leaf.ndim else None,
            dtype=str(leaf.dtype).removeprefix("torch."),
        )
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, Tensor)
    }


def few_samples(batch: Any, samples: int) -> Any:
    """Return a batch like this one with fewer samples, its values those of the first ones.

    Leaves without a dim stay whole.  Raises BatchError if no leaf has samples.
    """
    found = samples_in(batch)
    if not found:
        raise BatchError("batch: has no samples; give one sample or more")

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.ndim:
            return leaf.clone()
        return leaf[[at % found for at in range(samples)]]

    return tree_map(cut, batch)


@dataclass(frozen=True, slots=True)
class RankShares:
    """Parts of a layer that ranks can share beside its positions and its matrices' features."""

    keys_bytes: int
    """Bytes of keys and values of SAMPLES."""
    experts: TracedExperts | None
    without_loss: LayerTrace | None = None
    """Trace of the last layer without the loss, for SAMPLES."""


_Figures = tuple[LayerTrace, "_TensorSums", tuple[Tensor, ...], int]
"""Figures of a layer, what it sums over the tensor axis, what it hands on, a hash of what ran."""


@dataclass(frozen=True, slots=True)
class _TracedLayer:
    """The costs of a layer for SAMPLES."""

    trace: LayerTrace
    shares: RankShares
    passed: tuple[Tensor, ...]
    """Outputs of the layer, without data unless the module needs it."""
    on_meta: bool
    """Its operators cost the same on the meta device."""


def _figures(
    recorder: Recorder, batch: Any, loss: Loss | None, kinds: Sequence[Hashable]
) -> list[_TracedLayer]:
    """[layer] What each costs, forward and backward, the loss with the last one.

    Layers of one of `kinds` are computed once.
    """
    count, recording = len(kinds), recorder.first
    layers: list[_TracedLayer] = []
    traces: dict[Hashable, _TracedLayer] = {}
    equal = EqualOperators(recording)
    with recorder.without_data(batch) as (module, given):
        twin = MetaTwin(module, given) if recorder.is_fake else None
        exchanged = _exchanges(module, *(() if twin is None else (twin.module,)))
        with note_keys_bytes() as named, _KeysOfAttention() as any_attention:
            for at, kind in enumerate(kinds):
                if kind in traces:
                    layers.append(traces[kind])
                    continue
                taken = layers[-1].passed if layers else ()
                layer, is_last = recording.layers[at], at == count - 1
                trace_on = functools.partial(
                    _figures_at, recorder, at, loss=loss if is_last else None
                )
                believed = twin is not None and equal.cover(layer)
                figures = twin.result(trace_on, taken) if twin and believed else None
                if figures is not None:
                    trace, _, passed, ran = figures
                    passed = tuple(empty_twin(tensor, "cpu") for tensor in passed)
                else:
                    for notes in (named, any_attention.sizes, exchanged):
                        notes.clear()
                    trace, _, passed, ran = trace_on(module, taken, given)
                shares = RankShares(
                    sum(named) or sum(any_attention.sizes),
                    _experts(module, layer.units, exchanged),
                )
                if twin is not None and equal.are_open(layer):
                    there = twin.result(trace_on, taken)
                    alike = there is not None and (there[0], there[-1]) == (trace, ran)
                    equal.note(layer, equal=alike)
                for notes in (named, any_attention.sizes, exchanged):
                    notes.clear()
                if is_last and isinstance(loss, token_loss):
                    shares = replace(shares, without_loss=_last(module, recorder, given))
                traces[kind] = _TracedLayer(trace, shares, passed, equal.cover(layer))
                layers.append(traces[kind])
    return layers


def _figures_at(
    recorder: Recorder,
    at: int,
    module: nn.Module,
    taken: tuple[Tensor, ...],
    batch: Any,
    *,
    loss: Loss | None,
    across: _Counting | None = None,
) -> _Figures:
    """Return the figures of one layer, whose module and tensors are on one device."""
    return _figures_of(
        RecordedStage(module, recorder, at, at + 1), taken, batch, loss=loss, across=across
    )


def _last(module: nn.Module, recorder: Recorder, batch: Any) -> LayerTrace:
    """Return what the last layer costs without the loss."""
    count = len(recorder.first.layers)
    stage = RecordedStage(module, recorder, count - 1, count)
    device = next(iter(module.parameters())).device
    taken = tuple(
        torch.empty_like(x, device=device).requires_grad_(x.is_floating_point())
        for x in stage.received(recorder.first)
    )
    return _figures_of(stage, taken, batch, loss=None)[0]


class _KeysOfAttention(TorchFunctionMode):
    """Notes the bytes of keys and values of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self.sizes.append(bytes_of(given["key"], given["value"]))
        return func(*args, **(kwargs or {}))


def _exchanges(*modules: nn.Module) -> dict[str, tuple[int, int]]:
    """Return bytes of the tokens chosen for each experts module, once they were called.

    Behind them stands how many experts each token has chosen.  Modules are copies of one another.
    """
    spans: dict[str, tuple[int, int]] = {}

    def note(path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if not experts.are_called_with(args):
            return
        hidden, index = args[:2]
        size = index.numel() * hidden.shape[-1] * hidden.element_size()
        spans[path] = size, index.shape[1]

    for module in modules:
        for path, module_of_experts in experts.modules_of(module).items():
            module_of_experts.register_forward_pre_hook(functools.partial(note, path))
    return spans


def _experts(
    module: nn.Module, units: Sequence[str], exchanged: Mapping[str, tuple[int, int]]
) -> TracedExperts | None:
    """Return the experts inside a layer's units that were called."""
    inside = [path for path in exchanged if any(f"{path}.".startswith(f"{u}.") for u in units)]
    if not inside:
        return None
    parts = [module.get_submodule(path) for path in inside]
    return TracedExperts(
        count=math.gcd(*map(experts.count_of, parts)),
        hidden=experts.hidden_size(parts[0]),
        parameters=sum(p.numel() for part in parts for p in part.parameters()),
        exchanged_bytes=sum(size for size, _ in exchanged.values()) // SAMPLES,
        per_token=max(choices for _, choices in exchanged.values()),
    )


def _figures_of(
    stage: RecordedStage,
    taken: tuple[Tensor, ...],
    batch: Any,
    *,
    loss: Loss | None,
    across: _Counting | None = None,
) -> _Figures:
    """Return the figures of a stage, what it sums over `across`, and what it hands on."""
    results: list[Any] = []
    sums = _TensorSums()
    given = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in taken)

    def call() -> tuple[Tensor, ...]:
        nonlocal sums
        results.append(stage(*given, micro=MicroBatch(batch)))
        if across is not None:
            sums = across.take_sums()
        return tuple(leaf for leaf in tree_leaves(results[0]) if isinstance(leaf, Tensor))

    def total(*_: Tensor) -> Tensor:
        assert loss is not None
        return loss_sum_of(loss(results[0], batch), SAMPLES).total

    trace, passed, ran = traced_call(
        call,
        owned=(*stage.parameters(), *stage.buffers()),
        loss=total if loss is not None else None,
        saving=across.save if across is not None else lambda: None,
    )
    handed_on = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in passed)
    return trace, sums, handed_on, ran


def _own_parameters(recording: Recording) -> list[list[str]]:
    """[layer] Names of parameters, those that several layers read in the first."""
    names: set[str] = set()
    result = []
    for layer in recording.layers:
        result.append([name for name in layer.parameters if name not in names])
        names |= set(layer.parameters)
    return result


def _count(module: nn.Module, names: Iterable[str]) -> int:
    return sum(module.get_parameter(name).numel() for name in names)


# --- over a tensor axis --------------------------------------------------------------------------


def _divided_layers(
    module: nn.Module,
    recorder: Recorder,
    batch: Any,
    loss: Loss | None,
    degrees: Sequence[int],
    styles: DerivedStyles | None,
    gathered: frozenset[str],
    kinds: Sequence[Hashable],
    traced: Sequence[_TracedLayer],
) -> list[tuple[DividedLayer, ...] | None]:
    """[layer] What a rank has of each layer, at each degree that divides it.

    `kinds` are those of whole layers, whose figures are `traced`.
    """
    recording = recorder.first
    sizes = [
        tuple((name, module.get_parameter(name).numel(), name in gathered) for name in names)
        for names in _own_parameters(recording)
    ]
    found: list[list[DividedLayer]] = [[] for _ in recording.layers]
    for degree in degrees:
        assert styles is not None
        units = {name: unit for name, unit in styles.units_at(degree).items() if unit.regions}
        if not units:
            continue
        by_identity: dict[Hashable, DividedLayer] = {}
        with recorder.without_data(batch) as (part, given):
            twin = MetaTwin(part, given) if any(layer.on_meta for layer in traced) else None
            for at, layer in enumerate(recording.layers):
                inside = {name: units[name] for name in layer.units if name in units}
                if not inside:
                    continue
                unit_sizes = tuple(of[1:] for of in sizes[at])
                kind = kinds[at], unit_sizes, tuple(id(units.get(name)) for name in layer.units)
                if kind not in by_identity:
                    taken = traced[at - 1].passed if at else ()

                    trace_on = functools.partial(
                        _part_figures_at,
                        recorder,
                        at,
                        inside,
                        loss=loss if layer is recording.layers[-1] else None,
                    )
                    believed = twin is not None and traced[at].on_meta
                    figures = twin.result(trace_on, taken) if twin and believed else None
                    here = twin.module if twin and figures else part
                    trace, sums, *_ = figures or trace_on(part, taken, given)
                    by_identity[kind] = _divided_layer(here, sizes[at], degree, trace, sums)
                found[at].append(by_identity[kind])
    return [tuple(layers) or None for layers in found]


def _part_figures_at(
    recorder: Recorder,
    at: int,
    units: Mapping[str, DividedUnit],
    whole: nn.Module,
    taken: tuple[Tensor, ...],
    batch: Any,
    *,
    loss: Loss | None,
) -> _Figures:
    """Return the figures of a rank's part of a layer, whose `units` are divided in `whole`."""
    across = _Counting(next(iter(units.values())).degree)
    for name, unit in units.items():
        take_parts(whole.get_submodule(name), unit.regions, 0, unit.degree)
        unit.apply(whole.get_submodule(name), across)
    return _figures_at(recorder, at, whole, taken, batch, loss=loss, across=across)


def _divided_layer(
    part: nn.Module,
    sizes: Sequence[tuple[str, int, bool]],
    degree: int,
    trace: LayerTrace,
    sums: _TensorSums,
) -> DividedLayer:
    """Return what a rank has of a layer, of a module whose units of this layer are in parts.

    `sizes` are name, size and whether it is gathered whole, of each of the layer's parameters.
    """
    here = [part.get_parameter(name).numel() for name, _, _ in sizes]
    return DividedLayer(
        tensor=degree,
        parameters=sum(here),
        largest=max(here, default=0),
        whole_matrices=tuple(
            whole
            for (_, whole, gathered), size in zip(sizes, here, strict=True)
            if gathered and size < whole
        ),
        trace=_halve(trace),
        sums_bytes=tuple(size // SAMPLES for size in sums.again),
        last_sum_bytes=sums.last // SAMPLES,
        copies_bytes=tuple(size // SAMPLES for size in sums.copies),
    )


def _handing_on(layer: DividedLayer, output_bytes: int) -> DividedLayer:
    return layer.model_copy(
        update={"trace": layer.trace.model_copy(update={"output_bytes": output_bytes})}
    )


@dataclass(slots=True)
class _TensorSums:
    """Bytes that a layer sums over the tensor axis."""

    again: list[int] = field(default_factory=list)
    last: int = 0
    copies: list[int] = field(default_factory=list)


class _Counting:
    """A rank of a tensor axis without the others: counts what it would send."""

    rank = 0

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.sums: list[tuple[int, int]] = []
        """Bytes of each, and how many tensors were saved for backward before."""
        self.copies: list[int] = []
        self.saved = 0

    def copy(self, x: Tensor) -> Tensor:
        """Return x; its gradient is counted, and takes the memory of a sum."""
        self.copies.append(x.numel() * x.element_size())
        return _CopiedGradient.apply(x)

    def sum(self, x: Tensor) -> Tensor:
        """Return x, counted, in memory of its own."""
        self.sums.append((x.numel() * x.element_size(), self.saved))
        return x.clone()

    def save(self) -> None:
        """Count a tensor that is saved for backward."""
        self.saved += 1

    def take_sums(self) -> _TensorSums:
        """Return what was counted since the last time."""
        sizes = [size for size, _ in self.sums]
        stops = bool(self.sums) and self.saved == self.sums[-1][1]
        sums = (
            _TensorSums(sizes[:-1], sizes[-1], self.copies)
            if stops
            else _TensorSums(sizes, 0, self.copies)
        )
        self.sums, self.copies, self.saved = [], [], 0
        return sums


class _CopiedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def _halve(figures: LayerTrace) -> LayerTrace:
    return LayerTrace(
        forward_flops=figures.forward_flops / SAMPLES,
        stored_bytes=figures.stored_bytes // SAMPLES,
        transient_bytes=figures.transient_bytes // SAMPLES,
        output_bytes=figures.output_bytes // SAMPLES,
    )


def _kinds(
    module: nn.Module,
    recording: Recording,
    figures: Sequence[LayerTrace],
    besides: Sequence[object],
) -> list[str]:
    """Name each layer's kind: the class of its first unit, numbered from the second kind on."""
    names: dict[Any, str] = {}
    used: dict[str, int] = {}
    result = []
    for layer, trace, beside in zip(recording.layers, figures, besides, strict=True):
        parts = [module.get_submodule(unit) for unit in layer.units]
        shapes = tuple(tuple(module.get_parameter(name).shape) for name in layer.parameters)
        nodes = recording.nodes[layer.first : layer.last]
        calls = tuple(called_name(node.call) for node in nodes if node.unit is None)
        identity = (*map(type, parts), shapes, calls, trace, beside)
        if identity not in names:
            called = type(parts[0] if parts else module).__name__
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", called).lower()
            used[name] = used.get(name, 0) + 1
            names[identity] = name if used[name] == 1 else f"{name}_{used[name]}"
        result.append(names[identity])
    return result
