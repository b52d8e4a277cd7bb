"""Experts that read what a router chose are recorded without data, and read values nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import RecordError
from meshwright.runtime.engine.module_graph import script_model
from meshwright.runtime.tracing.tracer import Recorder

EXPERTS, WIDTH, TOKENS = 4, 8, 6


class Sorted(nn.Module):
    """Goes through its experts by how many tokens each has."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = self.router(rows).argmax(-1)
        sizes = functional.one_hot(chosen, EXPERTS).sum(0).tolist()
        parts = rows[chosen.argsort()].split(sizes, dim=0)
        made = torch.cat([part @ self.weight[at] for at, part in enumerate(parts)])
        return torch.zeros_like(rows).index_copy(0, chosen.argsort(), made).view_as(x)


class Looping(nn.Module):
    """Goes through the experts that were hit, as transformers' own do without other products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, at = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ self.gate_up_proj[expert].T).chunk(2, -1)
            part = (self.act_fn(gate) * up) @ self.down_proj[expert].T
            made.index_add_(0, tokens, part * top_k_weights[tokens, at, None])
        return made


class Masked(nn.Module):
    """Goes through the experts of a one-hot mask, with weights of names of its own (DBRX)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS * WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.zeros_like(hidden_states)
        mask = functional.one_hot(top_k_index, EXPERTS + 1).permute(2, 1, 0)
        for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            expert = hit[0]
            at, tokens = torch.where(mask[expert])
            up, down = (part.view(-1, WIDTH, WIDTH)[expert] for part in (self.up, self.down))
            part = (hidden_states[tokens] @ up.T).relu() @ down
            made.index_add_(0, tokens, part * top_k_weights[tokens, at, None])
        return made


class Routed(nn.Module):
    def __init__(self, experts: Callable[[], nn.Module] = Looping) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        made: Tensor = self.experts(rows, chosen, weights)
        return made.view_as(x)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        made: Tensor = self.head(x)
        return made


@pytest.mark.parametrize(
    ("block", "products"), [(Sorted, 1), (Routed, 6), (lambda: Routed(Masked), 4)]
)
def test_experts_are_recorded_without_data_and_cost_what_their_tokens_do(
    block: Callable[[], nn.Module], products: int
) -> None:
    with torch.device("meta"):
        module = Model(block)
        batch = (torch.empty(2, TOKENS, WIDTH), torch.empty(2))

    graph = script_model(module, batch, name="routed")

    assert [layer.name for layer in graph.layers] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    trace = graph.layers[0].trace
    router = 2 * TOKENS * WIDTH * EXPERTS
    assert trace is not None
    assert trace.forward_flops == router + products * 2 * TOKENS * WIDTH * WIDTH


class Counting(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        sizes = self.router(x).argmax(-1).flatten().tolist()
        return x * sum(sizes)


class Indexing(Sorted):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.router(x).argmax(-1).flatten().tolist()[0]


class Outside(Model):
    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0, 0].long().tolist()[0]
        return super().forward(x * first)


@pytest.mark.parametrize("build", [lambda: Model(Counting), lambda: Model(Indexing)])
def test_lists_of_values_that_are_read_for_something_else_are_refused(
    build: Callable[[], nn.Module],
) -> None:
    with torch.device("meta"), pytest.raises(RecordError, match="DataDependentOutputException"):
        Recorder(build(), (torch.empty(2, TOKENS, WIDTH),))


def test_a_list_of_values_between_units_is_refused() -> None:
    with torch.device("meta"), pytest.raises(RecordError, match="tolist reads the value"):
        Recorder(Outside(Sorted), (torch.empty(2, TOKENS, WIDTH),))
