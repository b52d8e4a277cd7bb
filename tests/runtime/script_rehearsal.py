"""One rank of a script's Engine, rehearsed: its own code, with collectives that send nothing.

Unlike benchmarks.rehearsal it computes, since a module of a script may need values; so the module
must fit on this machine.  Counted is what operators return (runtime.core.memory_tracker).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.torch_internals import fake_store, stages_know_shapes
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.core.torch_internals import fsdp_parameters
from meshwright.runtime.engine.engine import Engine


def script_peak_bytes(make: Callable[[Plan], Engine], plan: Plan, batch: Any, *, rank: int) -> int:
    """Return the most bytes that a rank holds in a step on a global batch, behind a first one.

    The process must not be in a process group; for the time of the call it is in a fake one.
    """
    dist.init_process_group("fake", rank=rank, world_size=plan.mesh.devices, store=fake_store())
    try:
        with stages_know_shapes():
            engine = make(plan)
            own = engine.slice(batch)
            _step(engine, own)
            with LiveMemory(_everything(engine)) as live:
                _step(engine, own)
            return live.peak_bytes
    finally:
        dist.destroy_process_group()


def _step(engine: Engine, batch: Any) -> None:
    engine.forward_backward(batch)
    # The ranks of the last stage, who know how much counts, tell nobody here.
    engine._passes.totals.values[1] += 1.0
    engine.optimizer_step()


def _everything(engine: Engine) -> Iterator[Tensor]:
    """Yield what lives from step to step."""
    for part in engine._optimizers._parts.values():
        yield part.plain.data
    for optimizer in engine.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    for module in (part.module for part in engine._passes._parts):
        yield from module.buffers()
        yield from module.parameters()
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                for parameter in fsdp_parameters(inner):
                    yield from parameter.all_gather_outputs
