"""A module of the user's own script as a ModelGraph: its recorded layers, and what each costs.

Nothing is computed: parameters and the batch have no data, and figures are of two samples, halved.
A forward that cannot be recorded is one layer, which a plan may train without a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from planner.errors import BatchError, PlanError, RecordError
from planner.model import BatchLeaf, Layer, LayerTrace, ModelGraph
from planner.plan import Plan
from planner.units import name_of
from runtime.batches import samples_in
from runtime.loss import counted
from runtime.recorded_stage import MicroBatch, RecordedStage
from runtime.recorder import Inputs, Recorder, arguments, has_data, unchanged
from runtime.recording import Recording, called_name
from runtime.torch_optimizers import Factory, GroupOf, grouped, state_bytes
from runtime.trace import traced_call

MOST_CHECKED = 200_000_000
"""Parameters of a module whose forward on the host costs seconds at most."""
SAMPLES = 2
"""Of the batch that is priced: with one alone, a norm over samples has no variance."""
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
) -> ModelGraph:
    """Return the ModelGraph of a module whose batch looks like `batch`.

    An `optimizer` is tried for the bytes of its state; without one they are AdamW's.

    Raises RecordError where the forward runs neither without data nor with it, and BatchError where
    the batch has no samples.
    """
    source = f"script:{name}"
    few = few_samples(batch, SAMPLES)
    recorder = Recorder.of(module, few, inputs, units=units)
    recording = recorder.first
    figures = [_halved(figures) for figures in _figures(recorder, few, loss)]
    kinds = _kinds(module, recording, figures)
    counted_once: set[str] = set()
    layers = []
    for layer, kind, trace in zip(recording.layers, kinds, figures, strict=True):
        own = [name for name in layer.parameters if name not in counted_once]
        counted_once |= set(own)
        count = sum(module.get_parameter(name).numel() for name in own)
        layers.append(Layer(name=layer.name, kind=kind, parameters=count, trace=trace))
    return ModelGraph(
        name=name_of(name),
        source=source,
        recording=recording.digest,
        optimizer_bytes=_optimizer_bytes(module, optimizer, groups) if optimizer else None,
        layers=tuple(layers),
    )


def _optimizer_bytes(module: nn.Module, optimizer: Factory, groups: GroupOf | None) -> float:
    """Return the bytes of state per parameter; those that are not trained have none."""
    count = sum(parameter.numel() for parameter in module.parameters())
    listed = grouped(module.named_parameters(), optimizer, groups)
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
    found = recorder.first
    if found.digest != graph.recording:
        planned = {layer.name: layer.parameters for layer in graph.layers}
        here = [layer.name for layer in found.layers]
        named = [name for name in here if name not in planned]
        named += [name for name in planned if name not in here]
        other = f"it differs in {', '.join(named[:3])}" if named else "shapes or calls differ"
        raise PlanError(
            f"{plan.model.source}: the plan was made for another module or batch ({other}); plan "
            "again with meshwright.plan"
        )


def check_replay(module: nn.Module, recorder: Recorder, few: Any) -> None:
    """Refuse a module whose replayed forward makes something else than the module, on real data.

    What a recording cannot see is Python's own state: a counter, a list, a random number of Python.
    `few` is the batch that `recorder` recorded.  A module of more than MOST_CHECKED parameters, and
    one without data, is not tried.
    """
    count = sum(parameter.numel() for parameter in module.parameters())
    if count > MOST_CHECKED or not has_data((*tree_leaves(few), *module.parameters())):
        return
    stage = RecordedStage(module, recorder, 0, len(recorder.first.layers)).train()
    args, kwargs = arguments(recorder.inputs(few))
    # Twice: what counts its calls makes another thing each time.
    runs: list[Callable[[], Any]] = [
        lambda: module(*args, **kwargs),
        lambda: stage(micro=MicroBatch(few)),
        lambda: module(*args, **kwargs),
    ]
    made = []
    for run in runs:
        with torch.no_grad(), unchanged(module), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            made.append(tree_leaves(run()))
    for one, replayed, again in zip(*made, strict=True):
        if not (_same(one, replayed) and _same(replayed, again)):
            raise RecordError(
                f"{type(module).__name__} makes something else than its replayed forward: what it "
                "does depends on Python's own state, between units; keep state in buffers, or name "
                "a unit around it with units="
            )


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


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
    """Return a batch like this one with so many samples, its values those of the first ones.

    Leaves without a dim stay whole.  Raises BatchError if no leaf has samples.
    """
    found = samples_in(batch)
    if not found:
        raise BatchError("batch: has no samples")

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf[[at % found for at in range(samples)]]

    return tree_map(cut, batch)


def _figures(recorder: Recorder, batch: Any, loss: Loss | None) -> Iterator[LayerTrace]:
    """Yield what each layer costs, forward and backward, the loss with the last one."""
    with recorder.without_data(batch) as (module, given):
        passed: tuple[Tensor, ...] = ()
        count = len(recorder.first.layers)
        for at in range(count):
            stage = RecordedStage(module, recorder, at, at + 1)
            taken = tuple(x.detach().requires_grad_(x.requires_grad) for x in passed)
            figures, outputs = _figures_of(
                stage, taken, given, loss=loss if at == count - 1 else None
            )
            yield figures
            passed = outputs


def _figures_of(
    stage: RecordedStage, taken: tuple[Tensor, ...], batch: Any, *, loss: Loss | None
) -> tuple[LayerTrace, tuple[Tensor, ...]]:
    made: list[Any] = []

    def call() -> tuple[Tensor, ...]:
        made.append(stage(*taken, micro=MicroBatch(batch)))
        return tuple(leaf for leaf in tree_leaves(made[0]) if isinstance(leaf, Tensor))

    def total(*_: Tensor) -> Tensor:
        assert loss is not None
        return counted(loss(made[0], batch), SAMPLES).total

    owned = (*stage.parameters(), *stage.buffers())
    return traced_call(call, owned=owned, loss=total if loss is not None else None)


def _halved(figures: LayerTrace) -> LayerTrace:
    return LayerTrace(
        forward_flops=figures.forward_flops / SAMPLES,
        stored_bytes=figures.stored_bytes // SAMPLES,
        transient_bytes=figures.transient_bytes // SAMPLES,
        output_bytes=figures.output_bytes // SAMPLES,
    )


def _kinds(module: nn.Module, recording: Recording, figures: Sequence[LayerTrace]) -> list[str]:
    """Name each layer's kind: the class of its first unit, numbered from the second kind on."""
    names: dict[Any, str] = {}
    used: dict[str, int] = {}
    result = []
    for layer, trace in zip(recording.layers, figures, strict=True):
        parts = [module.get_submodule(unit) for unit in layer.units]
        shapes = tuple(tuple(module.get_parameter(name).shape) for name in layer.parameters)
        nodes = recording.nodes[layer.first : layer.last]
        calls = tuple(called_name(node.call) for node in nodes if node.unit is None)
        identity = (*map(type, parts), shapes, calls, trace)
        if identity not in names:
            called = type(parts[0] if parts else module).__name__
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", called).lower()
            used[name] = used.get(name, 0) + 1
            names[identity] = name if used[name] == 1 else f"{name}_{used[name]}"
        result.append(names[identity])
    return result
