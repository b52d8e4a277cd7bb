"""Adapters of low rank as figures: how many parameters they add to a layer on one rank.

An adapter of a matrix with `in` and `out` features has A [rank, in] and B [out, rank].  Tensor
parallelism divides B where it divides the outputs, A where it divides the inputs; the other stays
whole (runtime/lora.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import DocumentError
from planner.model import Architecture, ModelGraph
from planner.training import Lora

EVERY_LINEAR = "all-linear"
_REFERENCE = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""The names of our own reference transformer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer of a block.  `rows`: tensor parallelism divides its inputs."""

    path: str
    inputs: int
    outputs: int
    rows: bool


def linears(a: Architecture, *, experts: bool) -> Iterator[Linear]:
    """Yield the linear layers of one block as the runtime's modules name them.

    The matrices of experts and their router are none of them.
    """
    h, heads, keys = a.hidden_size, a.heads * a.head_dim, a.kv_heads * a.head_dim
    if a.family == "gpt2":
        yield Linear(path="attn.c_attn", inputs=h, outputs=3 * h, rows=False)
        yield Linear(path="attn.c_proj", inputs=h, outputs=h, rows=True)
        yield Linear(path="mlp.c_fc", inputs=h, outputs=a.ffn_size, rows=False)
        yield Linear(path="mlp.c_proj", inputs=a.ffn_size, outputs=h, rows=True)
        return
    shapes = [
        ("self_attn", "q_proj", h, heads, False),
        ("self_attn", "k_proj", h, keys, False),
        ("self_attn", "v_proj", h, keys, False),
        ("self_attn", "o_proj", heads, h, True),
    ]
    if not experts:
        shapes += [
            ("mlp", "gate_proj", h, a.ffn_size, False),
            ("mlp", "up_proj", h, a.ffn_size, False),
            ("mlp", "down_proj", a.ffn_size, h, True),
        ]
    own = a.family == "reference"
    for part, name, inputs, outputs, rows in shapes:
        path = (
            f"{part.replace('self_attn', 'attention')}.{_REFERENCE[name]}"
            if own
            else (f"{part}.{name}")
        )
        yield Linear(path=path, inputs=inputs, outputs=outputs, rows=rows)


def adapter_parameters(model: ModelGraph, kind: str, lora: Lora, *, tensor: int = 1) -> float:
    """Return the parameters of a layer's adapters on a rank; embedding and head have none.

    >>> from planner.expressions import resolve_model
    >>> llama = resolve_model("llama-3.1-8b")
    >>> adapter_parameters(llama, "block", Lora(rank=16, targets=("q_proj", "v_proj")))
    212992.0
    """
    a = model.architecture
    if a is None:
        raise DocumentError("lora", f"{model.name}: adapters are planned for language models")
    if kind in ("embedding", "head"):
        return 0.0
    total = 0.0
    for linear in linears(a, experts=kind == "moe_block"):
        if not is_target(linear.path, lora):
            continue
        inputs = linear.inputs / (tensor if linear.rows else 1)
        outputs = linear.outputs / (1 if linear.rows else tensor)
        total += lora.rank * (inputs + outputs)
    return total


def is_target(path: str, lora: Lora) -> bool:
    """Tell whether a module is aimed at, by the end of its path.

    >>> is_target("layer.self_attn.q_proj", Lora(rank=4, targets=("q_proj",)))
    True
    >>> is_target("layer.self_attn.q_proj", Lora(rank=4, targets=("proj",)))
    False
    """
    ends = (path == target or path.endswith(f".{target}") for target in lora.targets)
    return EVERY_LINEAR in lora.targets or any(ends)
