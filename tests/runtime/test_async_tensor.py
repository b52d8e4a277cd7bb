"""Asynchronous tensor parallelism: torch's pass takes each collective that has a product beside it.

What a graph becomes behind the compiler's passes is run by torch's own stand-ins for the operators
of symmetric memory, which gather and scatter over gloo, so that no device is needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core.torch_internals import share_memory
from meshwright.runtime.engine import apply_plan as transforms
from meshwright.runtime.techniques import compile as compiled
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, errors, train

GATHERED, SCATTERED = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
Graphs = list[Counter[str]]


def counted(graph: torch.fx.Graph) -> Counter[str]:
    names = (str(node.target).split(".")[1] for node in graph.nodes if "." in str(node.target))
    return Counter(name for name in names if name in (GATHERED, SCATTERED, GATHER, SCATTER))


@contextlib.contextmanager
def passes_counted() -> Iterator[Graphs]:
    """Let compiled blocks run as the compiler's passes leave them, and count collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of names of its own
        import torch._inductor.compile_fx as inductor
        import torch.distributed._symmetric_memory as symmetric
        from functorch.compile import make_boxed_func
        from torch._inductor.fx_passes.post_grad import (
            post_grad_passes,
            view_to_reshape,
        )

    found: Graphs = []

    def left(graph: torch.fx.GraphModule, _: Any, **how: Any) -> Any:
        view_to_reshape(graph)
        with torch._inductor.virtualized.V.set_fake_mode(
            torch._guards.detect_fake_mode(
                [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
            )
        ):
            post_grad_passes(graph, is_inference=False)
        graph.recompile()
        found.append(counted(graph.graph))
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # Layouts are of the code that inductor writes: a graph that runs as it is forces none.
        patches = {**compiled.IN_PIECES, "keep_output_stride": False}
        return inductor.compile_fx(graph, inputs, inner_compile=left, config_patches=patches)

    own = torch.library.Library("symm_mem", "IMPL")
    own.impl(GATHERED, symmetric._fused_all_gather_matmul_fallback, "CPU")
    own.impl(SCATTERED, symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    with (
        mock.patch.object(compiled, "BACKEND", backend),
        mock.patch.object(transforms, "share_memory"),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        symmetric._test_mode(),
    ):
        logging.disable(logging.WARNING)  # torch's, of what it takes for unusual
        yield found
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()
    own._destroy()


def plain_and_in_pieces(family: str, layout: dict[str, Any]) -> tuple[dict[str, float], Graphs]:
    graph = cases.transformer(family, layers=2)
    plan = cases.plan(graph, **{"tensor": 2, "micro_batches": 2, **layout})
    expected = train(plan, graph, 1)
    asked = plan.model_copy(update={"compile": "block", "tensor_overlap": "async"})
    with passes_counted() as graphs:
        own = train(asked, graph, 1)
    return errors([own], expected), graphs


FORWARD = Counter({GATHERED: 2, SCATTERED: 2})


@pytest.mark.matrix
@pytest.mark.ranks
def test_each_collective_beside_a_product_runs_with_it_and_trains_the_same() -> None:
    # Its projections have biases, and micro-batches one sample.
    found, graphs = on_ranks(2, plain_and_in_pieces, "qwen2", {"micro_batches": 8})[0]

    assert max(found.values()) <= TOLERANCE
    # Backward gathers in front of the products of both scatters; what it scatters is a sum of
    # several products, which no pass knows.
    assert graphs == [FORWARD, Counter({GATHERED: 2, SCATTER: 2})]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "backward", "bound"),
    [
        # All of the forward again, but for its last scatter.
        ({"recompute": "full"}, {GATHERED: 4, SCATTERED: 1, SCATTER: 2}, TOLERANCE),
        # Products are kept, so that what is gathered again has none beside it; 16 bits are
        # rounded once more or less.
        (
            {"recompute": "selective", "precision": "bf16"},
            {GATHERED: 2, GATHER: 2, SCATTER: 2},
            1e-2,
        ),
    ],
)
def test_what_is_computed_again_is_gathered_beside_its_products(
    layout: dict[str, Any], backward: dict[str, int], bound: float
) -> None:
    found, graphs = on_ranks(2, plain_and_in_pieces, "llama", layout)[0]

    assert max(found.values()) <= bound
    assert graphs == [FORWARD, Counter(backward)]


def test_ranks_on_a_processor_share_no_memory() -> None:
    refuse = functools.partial(share_memory, device=torch.device("cpu"))

    with pytest.raises(LaunchError, match="tensor_overlap: is async, which needs memory that"):
        refuse(mock.Mock(spec=dist.ProcessGroup))
