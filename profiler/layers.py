"""Seconds and bytes of each layer kind, measured on the runtime's own modules.

A short chain of the model, its ends and up to two layers of each kind between them, is made
parallel by the runtime exactly as in training, without data parallelism and without a pipeline.
A model that branches is run whole, in the order of its layers.  All ranks run it at the same time,
since what they contend for is part of the truth.

Time.  A trial is a forward and a backward of one micro-batch through the whole chain.  Hooks on the
activations between layers cut it at the layers' borders: a layer's forward ends where the next one
begins, and since autograd runs later operators first, a layer's backward is what happens between
the arrival of its output's gradient and that of its input's.  Gradients of parameters are added to
earlier ones, as in all micro-batches of a step but the first.  The last layer has the loss too.

Memory.  Layers run one by one under LiveMemory.  What is alive when only the graph refers to it is
stored; peaks inside forward and backward above that are transient, as planner.profile defines.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from planner.cluster import Precision
from planner.model import ModelGraph
from planner.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from planner.profile import LayerMeasurement, Recompute
from profiler.clock import Clock, Moment, median, slowest, spread
from profiler.kept import Parts
from profiler.noise import Watch
from runtime import recompute as recomputing
from runtime.adapter import Adapter
from runtime.branches import TOKENS
from runtime.live_memory import LiveMemory
from runtime.mesh import Place
from runtime.parallelize import parallel_stage
from runtime.source import adapter_of

SAME_KIND = 2
"""Layers of one kind in the chain: the second one finds the caches as in a deep model."""
LEAST_ROUNDS = 3
ENOUGH_ROUNDS = 6
"""If nothing spreads by more than the target."""
MOST_ROUNDS = 20
BYTES = 256
"""Numbers of tokens where nothing says how many there are."""
TARGET_SPREAD = 0.1
"""Interquartile range over median of a pass through the chain."""
RECOMPUTED: dict[Recompute, float] = {"none": 1.0, "selective": 1.2, "full": 1.4}
"""Seconds of a pass over those without recomputation, for the estimate of what fits a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One setting under which every layer kind is measured."""

    tensor: int
    micro_batch: int
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What one layer holds, under one case."""

    stored: int
    forward_transient: int
    backward_transient: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Everything measured of one layer kind under one case."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    held: list[Bytes] = field(default_factory=list)


class Chain:
    """A short piece of the model on this rank, divided over a tensor axis."""

    def __init__(
        self,
        model: ModelGraph,
        *,
        seq_len: int,
        precision: Precision,
        tensor: int,
        device: torch.device,
    ) -> None:
        self.seq_len = seq_len
        self.precision = precision
        self.tensor = tensor
        self.device = device
        self.kinds = short_chain(model)
        # Mixed precision belongs to data parallelism in the runtime; here the layers themselves
        # are in the type that they compute in.
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._adapter = adapter_of(
            model,
            source=model.source or model.name,
            seq_len=seq_len,
            dtype=dtype,
            device=device,
            seed=0,
            weights=None,
        )
        plan = plan_of(model, [list(self.kinds)], seq_len=seq_len, mesh=Mesh(tensor=tensor))
        stage = parallel_stage(
            plan, self._adapter, _place(plan, device), stage=0, device=device, weights=None
        )
        self.module = stage.chain.to(dtype)
        names = list(self.kinds)
        before = dict(zip(names, [TOKENS, *names], strict=False))
        of_graph = getattr(self._adapter, "reads", {}) if model.edges else {}
        self.reads: dict[str, tuple[str, ...]] = {
            name: tuple(of_graph.get(name, (before[name],))) for name in names
        }
        """What each layer takes: the tokens, or outputs of layers before it."""
        self.vocabulary = (
            model.architecture.vocab_size if model.architecture else self._least_vocabulary()
        )

    def _least_vocabulary(self) -> int:
        """Return how many numbers all tables know that read tokens, and the last layer predicts."""
        readers = [name for name, reads in self.reads.items() if TOKENS in reads]
        tables = [
            part.num_embeddings
            for name in readers
            for part in self.module.layers[name].modules()
            if isinstance(part, nn.Embedding) and part.num_embeddings > self.seq_len
        ]
        tokens = torch.zeros((1, self.seq_len), dtype=torch.int64)
        predicted = self._adapter.boundary(list(self.kinds)[-1], tokens).shape[-1]
        return min([*tables, predicted, BYTES])

    def done_after(self) -> dict[str, tuple[str, ...]]:
        """Return the outputs that nobody reads behind each layer."""
        last = {read: name for name, reads in self.reads.items() for read in reads}
        result: dict[str, tuple[str, ...]] = dict.fromkeys(self.reads, ())
        for read, name in last.items():
            result[name] += (read,)
        return result

    @property
    def adapter(self) -> Adapter:
        """What made the layers."""
        return self._adapter

    def layers(self, recompute: Recompute) -> dict[str, nn.Module]:
        """Return the layers in order, each recomputing itself as asked."""
        return {
            name: recomputing.wrapped(layer, recompute)
            for name, layer in self.module.layers.items()
        }

    def batch(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of one micro-batch, the same on every rank."""
        generator = torch.Generator().manual_seed(micro_batch)
        shape = (micro_batch, self.seq_len + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator).to(self.device)
        return tokens[:, :-1], tokens[:, 1:]

    def loss_context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the runtime computes a loss over a divided vocabulary."""
        return loss_parallel() if self.tensor > 1 else contextlib.nullcontext()

    def gradients_exist(self) -> None:
        """Let every parameter have a gradient to add to."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def short_chain(model: ModelGraph) -> dict[str, str]:
    """Return kind by layer name: the first layers of each kind in a chain, all of a graph."""
    if model.edges:
        return {name: layer.kind for name, layer in model.chain}
    taken: dict[str, int] = {}
    result = {}
    for name, layer in model.chain:
        if taken.get(layer.kind, 0) < SAME_KIND:
            taken[layer.kind] = taken.get(layer.kind, 0) + 1
            result[name] = layer.kind
    return result


def plan_of(
    model: ModelGraph,
    stages: Sequence[Sequence[str]],
    *,
    seq_len: int,
    mesh: Mesh,
    zero: int = 0,
    micro_batches: int = 1,
) -> Plan:
    """Return a plan with these layers in each stage and micro-batches of one sample."""
    data = mesh.data_shard * mesh.data_replicate
    return Plan(
        model=PlannedModel(name=model.name, source=model.source or model.name, digest=model.digest),
        cluster="local",
        seq_len=seq_len,
        global_batch=data * micro_batches,
        precision="fp32",
        mesh=mesh,
        zero=zero,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=micro_batches,
        stages=tuple(
            Stage(layers=tuple(PlacedLayer(layer=name) for name in stage)) for stage in stages
        ),
    )


_meshes: dict[tuple[str, int], DeviceMesh] = {}


def _place(plan: Plan, device: torch.device) -> Place:
    """Return this rank's place in its own group of `tensor` ranks; other groups do the same."""
    tensor = plan.mesh.tensor
    if tensor == 1:
        return Place(degrees=plan.mesh, mesh=None)
    key = (device.type, tensor)
    if key not in _meshes:
        names = ("copies", "pipeline", "data_replicate", "data_shard", "tensor")
        sizes = (dist.get_world_size() // tensor, 1, 1, 1, tensor)
        _meshes[key] = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return Place(degrees=plan.mesh, mesh=_meshes[key])


def measurements(
    chains: Sequence[Chain],
    cases: Sequence[Case],
    *,
    budget_s: float,
    least: int | None = None,
    parts: Parts | None = None,
    watch: Watch | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[LayerMeasurement]:
    """Measure every kind under each case, in the order of their value, as far as the budget goes.

    All ranks call it together and get the same.  First the bytes of each case, which also warms it
    up; then rounds in changing order, so that a slow second of the machine falls on all alike.
    After the least rounds only cases that still spread are visited, until the budget is used.  The
    first `least` cases (default: all) are measured whatever they take.
    """
    clock = Clock(chains[0].device)
    begin_s = clock.now_s()
    parts = parts or Parts(None, 0, lambda value: value)

    def used_s() -> float:
        return slowest([clock.now_s() - begin_s])[0]

    by_degree = {chain.tensor: chain for chain in chains}
    once_s = {chain.tensor: _once_s(chain, clock) for chain in chains}
    chosen = affordable(
        cases, once_s, budget_s, least=len(cases) if least is None else min(least, len(cases))
    )
    found = _found(parts, chosen, by_degree)
    for index, case in enumerate(chosen):
        chain = by_degree[case.tensor]
        if not found[chain.kinds[next(iter(chain.kinds))], case].held:
            for name, held in layer_bytes(chain, case).items():
                found[chain.kinds[name], case].held.append(held)
        if progress:
            progress((index + 1) / len(chosen) / (LEAST_ROUNDS + 1))
    rounds = 0
    while rounds < MOST_ROUNDS:
        # Samples of a run that was cut short count: a round that is whole is not done again.
        due = [c for c in chosen if _visits(found, by_degree[c.tensor], c) <= rounds]
        if rounds >= LEAST_ROUNDS and used_s() >= budget_s:
            break
        if rounds >= ENOUGH_ROUNDS:
            wide = slowest([_spread(found, by_degree[case.tensor], case) for case in due])
            due = [c for c, width in zip(due, wide, strict=True) if width > TARGET_SPREAD]
            if not due:
                break
        if watch is not None:
            watch.look()
        order = random.Random(rounds).sample(due, len(due))
        for index, case in enumerate(order):
            chain = by_degree[case.tensor]
            for name, (forward_s, backward_s) in trial(chain, case, clock).items():
                samples = found[chain.kinds[name], case]
                samples.forward_s.append(forward_s)
                samples.backward_s.append(backward_s)
            if progress:
                done = (1 + rounds + (index + 1) / len(order)) / (LEAST_ROUNDS + 1)
                progress(min(0.99, done))
        rounds += 1
        parts.put("layers", _plain(found))
    return [
        _measurement(kind, case, samples, by_degree[case.tensor])
        for (kind, case), samples in _of_all_ranks(found).items()
    ]


def affordable(
    cases: Sequence[Case], once_s: Mapping[int, float], budget_s: float, *, least: int
) -> list[Case]:
    """Return the first cases whose least rounds fit in the budget, and the `least` first anyway.

    `once_s` is what one sample takes without recomputation, by tensor degree; larger micro-batches
    take in proportion.  The first pass, which counts bytes, is slower than a timed one by a third.

    >>> cases = [Case(tensor=1, micro_batch=2**i, recompute="none") for i in range(4)]
    >>> [c.micro_batch for c in affordable(cases, {1: 0.3}, budget_s=9.5, least=1)]
    [1, 2, 4]
    """
    passes = LEAST_ROUNDS + 1.3
    result: list[Case] = []
    seconds = 0.0
    for case in cases:
        own_s = passes * once_s[case.tensor] * case.micro_batch * RECOMPUTED[case.recompute]
        if len(result) < least or seconds + own_s <= budget_s:
            seconds += own_s
            result.append(case)
    return result


Found = dict[tuple[str, Case], Samples]


def _found(parts: Parts, cases: Sequence[Case], by_degree: Mapping[int, Chain]) -> Found:
    """Return the samples that all ranks kept of these cases, and empty ones for the others."""
    keys = [
        (kind, case)
        for case in cases
        for kind in dict.fromkeys(by_degree[case.tensor].kinds.values())
    ]
    found: Found = {key: Samples() for key in keys}
    if not parts.has("layers"):
        return found
    kept = {
        (row["kind"], Case(**row["case"])): Samples(
            row["forward_s"], row["backward_s"], [Bytes(**held) for held in row["held"]]
        )
        for row in parts["layers"]
    }
    counts = [float(len(kept[key].forward_s)) if key in kept else 0.0 for key in keys]
    least = [-value for value in slowest([-count for count in counts])]
    for key, count in zip(keys, least, strict=True):
        if count > 0:
            own = kept[key]
            found[key] = Samples(
                own.forward_s[: int(count)], own.backward_s[: int(count)], own.held
            )
    return found


def _plain(found: Found) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "case": asdict(case), **asdict(samples)}
        for (kind, case), samples in found.items()
    ]


def _visits(found: Found, chain: Chain, case: Case) -> int:
    """Return in how many rounds a case was measured."""
    first = next(iter(chain.kinds.values()))
    of_kind = sum(kind == first for kind in chain.kinds.values())
    return len(found[first, case].forward_s) // of_kind


def _spread(found: Found, chain: Chain, case: Case) -> float:
    """Return the spread of a whole pass, layer by layer of each kind together."""
    every = [found[kind, case] for kind in dict.fromkeys(chain.kinds.values())]
    rounds = _visits(found, chain, case)
    totals = []
    for visit in range(rounds):
        total = 0.0
        for samples in every:
            size = len(samples.forward_s) // rounds
            part = slice(visit * size, (visit + 1) * size)
            total += sum(samples.forward_s[part]) + sum(samples.backward_s[part])
        totals.append(total)
    return spread(totals) if totals else 1.0


def trial(chain: Chain, case: Case, clock: Clock) -> dict[str, tuple[float, float]]:
    """Return forward and backward seconds of each layer for one micro-batch, on this rank."""
    chain.gradients_exist()
    tokens, targets = chain.batch(case.micro_batch)
    layers = chain.layers(case.recompute)
    names = list(layers)
    arrived: dict[str, Moment] = {}
    done = chain.done_after()
    with _in_step(), chain.loss_context():
        begin = {names[0]: clock.moment()}
        held = {TOKENS: tokens}
        for name, following in zip(names, [*names[1:], None], strict=True):
            value = layers[name](*(held[read] for read in chain.reads[name]))
            if following is not None:
                begin[following] = clock.moment()
                if value.requires_grad:
                    value.register_hook(_noting(arrived, name, clock))
            held[name] = value
            for read in done[name]:
                del held[read]
        held.clear()
        loss = chain.adapter.loss(value, targets)
        del value
        middle = clock.moment()
        loss.backward()
        end = clock.moment()
    result = {}
    for index, name in enumerate(names):
        last, first = index == len(names) - 1, index == 0
        forward_end = middle if last else begin[names[index + 1]]
        backward_begin = middle if last else arrived.get(name, end)
        backward_end = end if first else arrived.get(names[index - 1], end)
        result[name] = (
            clock.between_s(begin[name], forward_end),
            clock.between_s(backward_begin, backward_end),
        )
    return result


def _noting(moments: dict[str, Moment], name: str, clock: Clock) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        moments[name] = clock.moment()

    return note


def _once_s(chain: Chain, clock: Clock) -> float:
    """Return what one sample takes through the chain, warmed up; the same on every rank."""
    case = Case(tensor=chain.tensor, micro_batch=1, recompute="none")
    trial(chain, case, clock)
    return slowest([clock.seconds(lambda: trial(chain, case, clock))])[0]


@contextlib.contextmanager
def _in_step() -> Iterator[None]:
    """All ranks begin together, and no garbage is collected meanwhile."""
    if dist.is_initialized():
        dist.barrier()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _of_all_ranks(found: dict[tuple[str, Case], Samples]) -> dict[tuple[str, Case], Samples]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    everyone: list[dict[tuple[str, Case], Samples]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return {
        key: Samples(
            [s for of_rank in everyone for s in of_rank[key].forward_s],
            [s for of_rank in everyone for s in of_rank[key].backward_s],
            [b for of_rank in everyone for b in of_rank[key].held],
        )
        for key in found
    }


def _measurement(kind: str, case: Case, samples: Samples, chain: Chain) -> LayerMeasurement:
    both = [f + b for f, b in zip(samples.forward_s, samples.backward_s, strict=True)]
    return LayerMeasurement(
        kind=kind,
        tensor=case.tensor,
        sequence_parallel=case.tensor > 1,
        micro_batch=case.micro_batch,
        seq_len=chain.seq_len,
        precision=chain.precision,
        recompute=case.recompute,
        forward_s=median(samples.forward_s),
        backward_s=median(samples.backward_s),
        stored_bytes=max(held.stored for held in samples.held),
        forward_transient_bytes=max(held.forward_transient for held in samples.held),
        backward_transient_bytes=max(held.backward_transient for held in samples.held),
        spread=spread(both),
        samples=len(both),
    )


def layer_bytes(chain: Chain, case: Case) -> dict[str, Bytes]:
    """Return what each layer of a chain stores and needs beside that for one micro-batch."""
    chain.gradients_exist()
    tokens, targets = chain.batch(case.micro_batch)
    layers = chain.layers(case.recompute)
    result: dict[str, Bytes] = {}
    held = {TOKENS: tokens}
    measured: dict[str, int] = {}
    done = chain.done_after()
    with chain.loss_context():
        for index, (name, layer) in enumerate(layers.items()):
            values = [held[read] for read in chain.reads[name]]
            loss = None
            if index == len(layers) - 1:
                loss = partial(chain.adapter.loss, targets=targets)
            kind = chain.kinds[name]
            if measured.get(kind, 0) < SAME_KIND or loss is not None:
                measured[kind] = measured.get(kind, 0) + 1
                result[name], held[name] = _bytes_of(layer, values, loss)
            else:
                with torch.no_grad():
                    held[name] = layer(*values)
            for read in done[name]:
                del held[read]
    return result


def _bytes_of(
    layer: nn.Module, values: Sequence[Tensor], loss: Callable[..., Tensor] | None
) -> tuple[Bytes, Tensor]:
    """Run one layer forward and backward by itself; return its bytes and its output's value."""
    gc.collect()
    with LiveMemory(existing=values) as live:
        hooks = [p.register_hook(live.leave_out) for p in layer.parameters() if p.requires_grad]
        # The inputs are fresh tensors that no leaf of the graph holds: they live if the layer keeps
        # them.  Token numbers are views of the step's batch, which is there anyway.
        leaves = {
            v.dtype: torch.zeros((), dtype=v.dtype, device=v.device).requires_grad_()
            for v in values
            if v.is_floating_point()
        }
        empty_bytes = live.current_bytes
        inputs = [v + leaves[v.dtype] if v.is_floating_point() else v for v in values]
        live.reset_peak()
        output = layer(*inputs)
        if loss is not None:
            output = loss(output)
        peak_bytes = live.peak_bytes
        with_input_bytes = live.current_bytes
        del inputs
        without_input_bytes = live.current_bytes
        # From here on until backward begins, only this function's own tensors come.
        result = output.detach().clone()
        root = output if loss is not None else _End.apply(output)
        one = torch.ones_like(root)
        own_bytes = live.current_bytes - without_input_bytes
        del output
        if loss is not None:
            own_bytes += root.nbytes
        begin_bytes = live.current_bytes
        live.reset_peak()
        root.backward(one)
        backward_bytes = live.peak_of_rest_bytes - begin_bytes
        for hook in hooks:
            hook.remove()
    stored = begin_bytes - empty_bytes - own_bytes
    output_bytes = without_input_bytes - empty_bytes - stored
    forward_bytes = peak_bytes - empty_bytes - stored - output_bytes
    forward_bytes -= with_input_bytes - without_input_bytes  # an input that is not kept
    return (
        Bytes(
            stored=stored,
            forward_transient=max(0, forward_bytes),
            backward_transient=max(0, backward_bytes),
        ),
        result,
    )


class _End(torch.autograd.Function):
    """A scalar whose backward makes the gradient of an activation, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)
