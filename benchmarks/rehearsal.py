"""One rank of a job of any size, rehearsed: the runtime's own code on tensors without data.

Parameters, activations and collectives are fake: an operator gives results of the right shape and
type, and nothing is computed, sent or stored.  What is alive at once is counted as on real
tensors (runtime.core.memory_tracker), so a rank of a thousand shows its peak memory on a laptop.
Not counted is what no operator returns: a device's context, an allocator's slack, buffers inside
kernels and collective libraries.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks import traced_blocks
from benchmarks.torch_internals import fake_store, shapes_found_in
from meshwright.planner.catalog import native
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.operators.expert_routing import routing_of
from meshwright.runtime.core.memory_tracker import ASKS_DEVICE, LiveMemory
from meshwright.runtime.core.mesh import place_of
from meshwright.runtime.core.torch_internals import fsdp_parameters
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.parallel import expert_parallel as experts
from meshwright.runtime.techniques import compile as compiled
from meshwright.runtime.techniques import float8 as eight_bits

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What one rank held at the fullest moment of a step."""

    peak_bytes: int
    parameters_bytes: int
    """Shards, and the whole copies that FSDP held then."""
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def activations_bytes(self) -> int:
        """All else: what forward stored, working memory, what the pipeline received and sent."""
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return self.peak_bytes - states


def rank_at(plan: Plan, stage: int) -> int:
    """Return the first rank of those that stand at this place of the pipeline axis.

    >>> from meshwright.planner.documents.plan import Mesh, Plan
    >>> rank_at(Plan.model_construct(mesh=Mesh(tensor=2, data_replicate=3, pipeline=4)), 2)
    12
    """
    order = plan.mesh.order
    inside = order[: order.index("pipeline")]
    return stage * math.prod(getattr(plan.mesh, axis) for axis in inside)


def rehearse(plan: Plan, model: ModelGraph, *, rank: int) -> Rehearsal:
    """Run three steps of one rank: to set up, to find the fullest moment, and to look into it.

    The process must not be in a process group; for the time of the call it is in a fake one.
    Where the plan counts on documents, samples hold some.
    """
    documents = plan.document_len is not None
    with fake_job(plan, rank=rank, model=model), _traced_blocks(), _as_on_devices():
        engine = token_engine(plan, model, device=CPU, documents=documents)
        samples = plan.micro_batch * plan.micro_batches
        tokens = torch.zeros(samples, plan.seq_len + 1, dtype=torch.int64)
        starts = torch.zeros(samples, plan.seq_len, dtype=torch.int64) if documents else None
        engine.step((tokens, None, starts))
        with LiveMemory(_everything(engine)) as live:
            engine.step((tokens, None, starts))
        found: list[Rehearsal] = []
        look = _Look(engine, found)
        with LiveMemory(_everything(engine), notice=(live.peak_change, look)) as again:
            look.live = again
            engine.step((tokens, None, starts))
    assert found and found[0].peak_bytes == live.peak_bytes, "two steps are not alike"
    return found[0]


def changes(plan: Plan, model: ModelGraph, *, rank: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes that a rank holds before its second step, and what that makes and frees.

    A change is a storage's number and by how many bytes it grows.  The process must not be in a
    process group.
    """
    with fake_job(plan, rank=rank, model=model), _traced_blocks(), _as_on_devices():
        engine = token_engine(plan, model, device=CPU)
        samples = plan.micro_batch * plan.micro_batches
        tokens = torch.zeros(samples, plan.seq_len + 1, dtype=torch.int64)
        engine.step(tokens)
        with LiveMemory(_everything(engine)) as live:
            before = live.current_bytes
            engine.step(tokens)
        return before, live.changes


@contextlib.contextmanager
def fake_job(
    plan: Plan,
    *others: Plan,
    rank: int,
    device: torch.device = CPU,
    model: ModelGraph | None = None,
) -> Iterator[None]:
    """Be one rank of a job of fake tensors, whose collectives and messages send nothing.

    `others` are plans of as many ranks that are run too.  The model is asked for where tokens are
    handed on between experts.
    """
    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.devices, store=fake_store())
    try:
        for each in (plan, *others):
            _make_groups(each, device)
        with _shapes_apart(), _spread_routes(model), FakeTensorMode(), _NoValues():
            yield
    finally:
        dist.destroy_process_group()


def _make_groups(plan: Plan, device: torch.device) -> None:
    """Make the process groups while tensors still have values; the engine finds them again."""
    place = place_of(plan, device)
    if place.mesh is not None:
        place.data.mesh  # noqa: B018 - made on first use, and kept
        if plan.mesh.pipeline > 1:
            place.ends()


@contextlib.contextmanager
def _as_on_devices() -> Iterator[None]:
    """Let products of blocks be those of a device that has them, whose results are in 16 bits."""
    before = eight_bits.multiplies_blocks
    eight_bits.multiplies_blocks = lambda device: True
    try:
        yield
    finally:
        eight_bits.multiplies_blocks = before


@contextlib.contextmanager
def _traced_blocks() -> Iterator[None]:
    """Let compiled blocks keep for backward what the compiler would, and store what kernels do."""
    before = compiled.BACKEND
    compiled.BACKEND = traced_blocks.backend
    try:
        yield
    finally:
        compiled.BACKEND = before


def _shapes_apart() -> contextlib.AbstractContextManager[None]:
    """Let DTensor work out shapes of whole tensors where nobody counts them."""
    return shapes_found_in(_disable_current_modes)


@contextlib.contextmanager
def _spread_routes(model: ModelGraph | None) -> Iterator[None]:
    """Let a rank send as many tokens to each of the others: which they are, nobody knows.

    It gets more than it sends by what a plan adds for the busiest of them.
    """
    before, handed_on = experts._by_rank, experts._copies_by_rank
    spread = native().experts.load_spread
    a = None if model is None else model.architecture
    routing = None if a is None or a.experts is None else routing_of(a.experts)

    def even(rows: Tensor, sent: int) -> list[list[int]]:
        least, more = divmod(sent, rows.shape[1])
        each = [least + (rank < more) for rank in range(rows.shape[1])]
        skew = 1.0
        if a is not None and a.experts is not None:
            skew = routing_of(a.experts, spread).busiest_load(rows.shape[1])
        return [each, [round(skew * count) for count in each]]

    def even_copies(rows: Tensor, of: int, parts: int) -> list[list[int]]:
        assert routing is not None
        leaving, arriving = even(rows, round(of * routing.distinct(parts)))
        return [leaving, arriving, even(rows, of * routing.per_token)[1]]

    experts._by_rank, experts._copies_by_rank = even, even_copies
    try:
        yield
    finally:
        experts._by_rank, experts._copies_by_rank = before, handed_on


class _NoValues(TorchDispatchMode):
    """Answers 1 to whoever asks a fake tensor for its value, and keeps meshes of ranks real.

    Asked for are the report of a step, the count of steps, and torch's vote of a pipeline's ranks
    on whether all of them know their shapes: they do.
    """

    supports_higher_order_operators = True
    """Those that compiled graphs have come by too."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let graphs be made in here, where only their own tensors are."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        # Only meshes are real here, and constants that are about to become fake.
        if args and type(args[0]) is Tensor and func is not torch.ops.aten.lift_fresh.default:
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


class _Look:
    """Tells what is alive by kind, when called in the middle of a step."""

    def __init__(self, engine: Engine, found: list[Rehearsal]) -> None:
        self.live: LiveMemory | None = None
        self._engine = engine
        self._found = found

    def __call__(self) -> None:
        """Note what is alive now."""
        live, state = self.live, self._engine.state()
        assert live is not None
        shards = [value for name, value in state.items() if name.startswith("model.")]
        optimizer = [value for name, value in state.items() if name.startswith("optim.")]
        self._found.append(
            Rehearsal(
                peak_bytes=live.current_bytes,
                parameters_bytes=live.bytes_of([*shards, *_whole_copies(self._engine)]),
                gradients_bytes=live.bytes_of(_gradients(self._engine)),
                optimizer_bytes=live.bytes_of(optimizer),
            )
        )


def _everything(engine: Engine) -> Iterator[Tensor]:
    """Yield what lives from step to step."""
    yield from engine.state().values()
    for layer in engine.units.values():
        yield from layer.buffers()
    yield from _whole_copies(engine)


def _fsdp_parameters(engine: Engine) -> Iterator[Any]:
    """Yield FSDP's own records of the parameters that it divides."""
    for module in (m for part in engine._parts for m in part.module.modules()):
        if isinstance(module, FSDPModule):
            yield from fsdp_parameters(module)


def _whole_copies(engine: Engine) -> Iterator[Tensor]:
    # Only these: a fake parameter that looks into a freed storage would fill it by being touched.
    for parameter in _fsdp_parameters(engine):
        yield from parameter.all_gather_outputs


def _gradients(engine: Engine) -> Iterator[Tensor]:
    owners = [slot.parameter for slot in engine._optimizers.slots]
    for parameter in _fsdp_parameters(engine):
        if parameter.unsharded_accumulated_grad is not None:
            yield parameter.unsharded_accumulated_grad
        if hasattr(parameter, "_unsharded_param"):
            owners.append(parameter._unsharded_param)
    for owner in (*owners, *(slot.local for slot in engine._optimizers.slots)):
        if owner.grad is not None:
            yield owner.grad
