"""Names of torch that are not public, of what nothing that trains runs: rehearsals and figures.

What trains has its own in runtime/core/torch_internals.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor._sharding_prop import ShardingPropagator


def compiled_code(run: Callable[[], None]) -> list[str]:
    """Return the code of every graph that `run` compiles, in order."""
    from torch._inductor.utils import run_and_get_code  # noqa: PLC0415

    return list(run_and_get_code(run)[1])


def divided_graphs(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend of torch.compile that hands on graphs of forward and of backward.

    They are decomposed and divided as inductor does it, which decides what is saved for backward.
    """
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415
    from torch._functorch import config  # noqa: PLC0415
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: PLC0415
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    divided = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        decompositions=select_decomp_table,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )

    def backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        with config.patch(unlift_effect_tokens=True):
            return divided(graph, inputs)

    return backend


def fake_store() -> dist.Store:
    """Return the store of a process group that sends nothing."""
    # Part of torch's tests, which a training image may have left out.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    store: dist.Store = FakeStore()
    return store


@contextlib.contextmanager
def stages_know_shapes() -> Iterator[None]:
    """Let the ranks of a pipeline agree that all know their shapes, without asking the others."""
    voted = PipelineStage._warmup_backward_result

    def agreed(stage: PipelineStage, received_result: Tensor | None = None) -> Tensor:
        return torch.ones_like(voted(stage, received_result=received_result))

    PipelineStage._warmup_backward_result = agreed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PipelineStage._warmup_backward_result = voted  # type: ignore[method-assign]


@contextlib.contextmanager
def shapes_found_in(
    context: Callable[[], contextlib.AbstractContextManager[object]],
) -> Iterator[None]:
    """Let DTensor work out the shapes of whole tensors inside a context of its own."""
    before = ShardingPropagator._propagate_tensor_meta_non_cached

    def inside(propagator: Any, op_schema: Any) -> Any:
        with context():
            return before(propagator, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = inside  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = before  # type: ignore[method-assign]
