"""The error that 8-bit activations bring into a gradient: integers against fp8, by group size.

Prints, for tiny models on the CPU, the relative Frobenius error of the whole first gradient when
every layer compresses what it stores.

    PYTHONPATH=. python benchmarks/compression_error.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.planner.documents.model import ModelGraph
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques import activation_offload as activations
from meshwright.runtime.techniques.activation_offload import Compressed
from tests.runtime import cases

LARGEST_FP8 = 448.0  # of float8_e4m3fn


class CompressedFp8:
    """Elements as float8_e4m3fn, each group with a scale that makes its largest element 448."""

    def __init__(self, span: Tensor) -> None:
        self._dtype, self._length = span.dtype, span.numel()
        lacking = -self._length % activations.GROUP
        groups = torch.nn.functional.pad(span.float(), (0, lacking)).view(-1, activations.GROUP)
        self._scale = groups.abs().amax(1, keepdim=True) / LARGEST_FP8
        self._values = (groups / self._scale.clamp(min=1e-38)).to(torch.float8_e4m3fn)

    def whole(self) -> Tensor:
        """Return the elements, rounded."""
        made = (self._values.float() * self._scale).to(self._dtype)
        return made.flatten()[: self._length]


def first_gradient(graph: ModelGraph, how: str) -> Tensor:
    """Return the gradient of the first batch, all parameters in a row."""
    plan = cases.plan(graph, micro_batches=1, activations=how)
    engine = token_engine(plan, graph, device=torch.device("cpu"))
    tokens = cases.global_tokens(0)
    engine.forward_backward(tokens)
    return torch.cat([grad.flatten() for grad in engine.gradients().values()])


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print("| model | group | int8 | fp8 e4m3 |\n|---|---|---|---|")
    for family in ("reference", "gpt2", "mixtral"):
        graph = cases.transformer(family, hidden_size=64, head_dim=16, layers=4)
        exact = first_gradient(graph, "keep")
        for group in (32, 64, 128, 256):
            activations.GROUP = group
            row = []
            for kind in (Compressed, CompressedFp8):
                activations.Compressed = kind
                row.append((first_gradient(graph, "compress") - exact).norm() / exact.norm())
            print(f"| {family} | {group} | " + " | ".join(f"{e:.2%}" for e in row) + " |")


if __name__ == "__main__":
    main()
