"""Repeated layers, each compiled as a whole: what autograd and Python do around them stays outside.

What is compiled is a layer's `forward`, with the recomputation inside it, so that the compiler's
partitioner keeps what the plan's recompute choice says.  Hooks of data parallelism, and those that
offload or compress what autograd saves, are around it and see whole buffers.  Alike layers share
one graph, since parameters are its inputs; layers of another kind or recompute choice, and
evaluation, have graphs of their own.

Where nothing can be compiled (no C++ compiler, no Triton), or a layer's forward cannot be traced as
one graph, layers run eager, and `Compiler.fallbacks` says why.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from meshwright.runtime.core.local_parts import local_parts
from meshwright.runtime.core.torch_internals import (
    attention_draws_nothing,
    compile_failures,
    compiled_graphs,
    compiler_lack,
    expect_graphs,
    has_ordered_effect,
)
from meshwright.runtime.techniques.split_backward import act_for, deferring

BACKEND: str | Callable[..., Any] = "inductor"
"""torch's compiler behind the graphs; tests trace, differentiate and partition only."""
MOST_GRAPHS = 64
"""Most graphs of one forward's code: kinds of layers x recompute choices x training and
evaluation."""
Options = dict[str, str | int | bool | Callable[..., Any]]
IN_PIECES: Options = {"_micro_pipeline_tp": True}
"""Options of inductor: gathers and scatters next to products become operators that do both."""
LASTING: Options = {
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}
"""Options of inductor for graphs whose weight gradients wait: their inputs outlast the graph."""
_LONGEST_REASON = 200


class Compiler:
    """Compiles layers of one rank, and notes how long that took and what stayed eager."""

    def __init__(self, device: torch.device, *, pieces: bool = False) -> None:
        """With `pieces` collectives beside products run piece by piece (tensor_parallel.py)."""
        self.seconds = 0.0
        """Seconds of forwards that made a graph, computation included; backwards are left out."""
        self.fallbacks: dict[str, str] = {}
        """Why a layer runs eager, by its name."""
        self._lack = compiler_lack(device) if BACKEND == "inductor" else None
        self._options = IN_PIECES if pieces else {}
        expect_graphs(MOST_GRAPHS)
        attention_draws_nothing()

    def compile(self, name: str, layer: nn.Module) -> None:
        """Let a layer's forward run compiled from its first call on."""
        if self._lack is not None:
            self.fallbacks[name] = self._lack
            return
        eager, failures = layer.forward, compile_failures()
        linears = deferring(layer)
        if linears:
            has_ordered_effect(torch.ops.meshwright.put_off.default)
        options = {**self._options, **(LASTING if linears else {})} or None
        compiled = torch.compile(
            eager,
            fullgraph=True,
            dynamic=False,
            backend=BACKEND,
            options=options if BACKEND == "inductor" else None,
        )
        seen: set[bool] = set()

        def run(*args: Any, **kwargs: Any) -> Any:
            with local_parts(layer):
                result = compiled(*args, **kwargs)
            if linears and torch.is_grad_enabled():
                _node_of(result).register_prehook(lambda grads: act_for(linears))
            return result

        def forward(*args: Any, **kwargs: Any) -> Any:
            trains = torch.is_grad_enabled()
            if name in self.fallbacks:
                return eager(*args, **kwargs)
            if trains in seen:
                return run(*args, **kwargs)
            seen.add(trains)
            graphs, begin_s = compiled_graphs(), time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the compiler's, of what it does itself
                    result = run(*args, **kwargs)
            except failures as error:
                self.fallbacks[name] = str(error).strip().partition("\n")[0][:_LONGEST_REASON]
                return eager(*args, **kwargs)
            if compiled_graphs() > graphs:
                self.seconds += time.perf_counter() - begin_s
            return result

        layer.forward = forward


def _node_of(result: Any) -> torch.autograd.graph.Node:
    """Return the node of autograd's graph that a compiled forward ends in."""
    functions = (leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return next(node for node in functions if node is not None)
