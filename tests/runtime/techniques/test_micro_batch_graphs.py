"""A micro-batch that is captured trains to the same bits as one that runs as it is.

A CPU has no graphs: a list of the pass's operators on fixed memory, run again, stands for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.training import Lora
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques import micro_batch_graphs
from meshwright.runtime.techniques.micro_batch_graphs import MicroBatchGraphs
from meshwright.runtime.techniques.operator_survey import OperatorSurvey, ReplayedOperators
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
STEPS = 4


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(micro_batch_graphs.GRAPHS, "cpu", ReplayedOperators)


# --- whole trainings --------------------------------------------------------------------------


def trained(
    plan: Plan, family: str, graphs: str, device: torch.device = CPU
) -> tuple[list[float], dict[str, Tensor], MicroBatchGraphs | None]:
    """Return the losses of some steps, with what is trained, and the graphs."""
    model = cases.transformer(family, layers=2)
    engine = token_engine(plan.model_copy(update={"graphs": graphs}), model, device=device)
    own = plan.samples_of(engine.slice_rank)
    losses: list[float] = []
    for step in range(STEPS):
        losses.append(engine.step(cases.global_tokens(step)[own.start : own.stop]).loss)
        if step == 2:
            engine.evaluate(cases.global_tokens(9)[own.start : own.stop])
    state = {name: value.clone() for name, value in engine.state().items()}
    return losses, state, engine.graphs


CHUNKS = ChunkedLoss(rows=10)
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("reference", {}, {}),
    "bf16, recomputed": ("reference", {"precision": "bf16", "recompute": "full"}, {}),
    "fp16, selective": ("reference", {"precision": "fp16", "recompute": "selective"}, {}),
    "chunks, one pass": ("reference", {"micro_batches": 1, "precision": "bf16"}, {"loss": CHUNKS}),
}
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "turns": ("reference", {"recompute": ("none", "selective", "full")}, {}),
    "compressed": ("reference", {"activations": "compress"}, {}),
    "optimizer on the host": ("reference", {"offload": "optimizer"}, {}),
    "tf32, four passes": ("qwen3", {"precision": "tf32", "micro_batches": 4}, {}),
    "learned positions": ("gpt2", {"precision": "bf16"}, {"loss": CHUNKS}),
    "post norms": ("gemma2", {"recompute": "full"}, {}),
    "library": ("llama", {"precision": "fp16", "recompute": "selective"}, {}),
    "experts": ("mixtral", {"precision": "bf16"}, {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_graphs_train_to_the_same_bits(name: str) -> None:
    check(*ROWS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("name", MORE)
def test_graphs_train_to_the_same_bits_whatever_else_a_plan_does(name: str) -> None:
    check(*MORE[name])


def check(family: str, layout: dict[str, Any], more: dict[str, Any]) -> None:
    plan = cases.plan(cases.transformer(family, layers=2), **layout).model_copy(update=more)

    losses, state, graphs = trained(plan, family, "micro_batch")

    assert graphs is not None
    # The first pass runs as it is, the second one is looked at, and the next step captures.
    replays = plan.micro_batches * (STEPS - 1) if plan.micro_batches > 1 else STEPS - 2
    assert (graphs.obstacle, graphs.replays) == (None, replays)
    plain, expected, _ = trained(plan, family, "none")
    assert losses == plain
    assert state.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*ROWS, *MORE])
@pytest.mark.parametrize("compiles", ["none", "block"])
def test_graphs_of_a_device_train_to_the_same_bits(name: str, compiles: str) -> None:
    family, layout, more = ROWS.get(name) or MORE[name]
    plan = cases.plan(cases.transformer(family, layers=2), **layout)
    plan = plan.model_copy(update={**more, "compile": compiles})
    cuda = torch.device("cuda", 0)

    losses, state, graphs = trained(plan, family, "micro_batch", cuda)

    plain, expected, _ = trained(plan, family, "none", cuda)
    assert losses == plain
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert graphs is not None
    assert graphs.obstacle is None or graphs.replays == 0


def test_adapters_train_to_the_same_bits() -> None:
    plan = cases.plan(cases.transformer(layers=2), precision="bf16")
    lora = Lora(rank=2, alpha=4)
    training = plan.training.model_copy(update={"lora": lora})

    check("reference", {"precision": "bf16"}, {"training": training})


def test_a_device_without_graphs_runs_passes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(micro_batch_graphs.GRAPHS, "cpu")
    plan = cases.plan(cases.transformer(layers=2), precision="bf16")

    losses, _, graphs = trained(plan, "reference", "micro_batch")

    assert graphs is not None
    assert (graphs.obstacle, graphs.replays) == ("cpu has no graphs", 0)
    assert losses == trained(plan, "reference", "none")[0]


@pytest.mark.parametrize("activations", ["offload"])
def test_what_goes_to_the_host_is_not_captured(activations: str) -> None:
    plan = cases.plan(cases.transformer(layers=2), activations=activations)

    losses, _, graphs = trained(plan, "reference", "micro_batch")

    assert graphs is not None
    assert graphs.obstacle == "activations go to the host inside of a pass"
    assert losses == trained(plan, "reference", "none")[0]


def of_replicas(precision: str, graphs: str) -> tuple[list[float], dict[str, Tensor], int]:
    micro_batch_graphs.GRAPHS["cpu"] = ReplayedOperators
    plan = cases.plan(cases.transformer(layers=2), data_replicate=2, precision=precision)
    losses, state, captured = trained(plan, "reference", graphs)
    return losses, state, captured.replays if captured else 0


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.matrix)])
def test_replicas_train_to_the_same_bits(precision: str) -> None:
    ranks = on_ranks(2, of_replicas, precision, "micro_batch")

    for rank, plain in zip(ranks, on_ranks(2, of_replicas, precision, "none"), strict=True):
        assert rank[0] == plain[0]
        assert all(torch.equal(value, plain[1][name]) for name, value in rank[1].items())
        assert rank[2] == 2 * (STEPS - 1)


# --- single passes ----------------------------------------------------------------------------


class Dropping(nn.Module):
    """Two layers and what is dropped between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(x).relu(), 0.5)
        self.seen += hidden.detach().sum(0)
        last: Tensor = self.last(hidden)
        return last.square().sum()


Run = Callable[[Any], None]
Wrap = Callable[[Run], Run]


def steps(
    module: nn.Module,
    wrapped: Callable[[Run], tuple[Callable[[], None], Run]],
    *,
    samples: Iterable[int] = (3, 3, 3, 3),
    change: Callable[[int], None] = lambda _: None,
) -> list[list[float]]:
    """Return the values of a module behind each of some steps of two micro-batches."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    begin, run = wrapped(lambda x: module(x).backward())
    torch.manual_seed(7)
    numbers = torch.Generator().manual_seed(1)
    values = []
    for step, size in enumerate(samples):
        change(step)
        begin()
        for _ in range(2):
            run(torch.randn(size, 4, generator=numbers))
        optimizer.step()
        optimizer.zero_grad()
        state = [*module.parameters(), *module.buffers()]
        values.append(torch.cat([tensor.detach().flatten() for tensor in state]).tolist())
    return values


def captured(module: nn.Module, kept: list[MicroBatchGraphs]) -> Callable[[Run], Any]:
    def wrap(run: Run) -> tuple[Callable[[], None], Run]:
        graphs = MicroBatchGraphs(
            run,
            settled=lambda: (*module.parameters(), *module.buffers()),
            trained=module.parameters,
            gradient=lambda _: None,
            device=CPU,
        )
        kept.append(graphs)
        return graphs.begin, graphs.run

    return wrap


def plainly(run: Run) -> tuple[Callable[[], None], Run]:
    return lambda: None, run


def test_what_is_drawn_summed_and_updated_is_the_same() -> None:
    kept: list[MicroBatchGraphs] = []
    module = Dropping()

    found = steps(module, captured(module, kept))

    assert found == steps(Dropping(), plainly)
    assert (kept[0].obstacle, kept[0].replays) == (None, 6)


def test_shapes_are_captured_apart_and_too_many_run_as_they_are() -> None:
    kept: list[MicroBatchGraphs] = []
    module, sizes = Dropping(), (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5)

    found = steps(module, captured(module, kept), samples=sizes)

    assert found == steps(Dropping(), plainly, samples=sizes)
    assert (kept[0].obstacle, kept[0].replays) == (None, 4 * 4)


def test_parameters_that_move_are_captured_anew() -> None:
    kept: list[MicroBatchGraphs] = []
    module = Dropping()

    def change(step: int) -> None:
        if step == 3:
            module.first.weight.data = module.first.weight.data.clone()

    found = steps(module, captured(module, kept), samples=[3] * 6, change=change)

    assert found == steps(Dropping(), plainly, samples=[3] * 6)
    assert (kept[0].obstacle, kept[0].replays) == (None, 4 + 4)


class Reading(Dropping):
    """What no graph can have, one way at a time."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.kept = torch.ones(8)

    def change(self, step: int) -> None:
        self.kept = torch.ones(8) * step

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x)
        if self.way == "value" and hidden.sum().item() > 1e9:
            hidden = hidden * 2
        if self.way == "shape":
            hidden = hidden[hidden[:, 0] > 0]
        if self.way == "number":
            hidden = hidden * (1 + self.calls // 3)
        if self.way == "constant":
            hidden = hidden * torch.tensor(float(self.calls))
        if self.way == "anew":
            hidden = hidden * self.kept
        last: Tensor = self.last(hidden)
        return last.square().sum()


OBSTACLES = {
    "value": "aten::_local_scalar_dense reads a value on the host",
    "shape": "makes a shape of values",
    "number": "aten::mul.Tensor follows in one step where aten::mul.Tensor does in another",
    "constant": "aten::lift_fresh follows in one step where aten::lift_fresh does in another",
    "anew": "reads a tensor that is made anew in each step",
}


@pytest.mark.parametrize("way", OBSTACLES)
def test_what_python_decides_by_values_runs_as_it_is(way: str) -> None:
    kept: list[MicroBatchGraphs] = []
    module, plain = Reading(way), Reading(way)

    found = steps(module, captured(module, kept), change=module.change)

    assert found == steps(plain, plainly, change=plain.change)
    assert OBSTACLES[way] in (kept[0].obstacle or "")
    assert kept[0].replays == 0


def test_a_replay_reads_nothing_that_it_does_not_make() -> None:
    module = Dropping()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph, x = ReplayedOperators(CPU), torch.randn(3, 4)
    survey = graph.record(lambda: module(x).backward())
    once = [
        parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None
    ]

    survey.spoil()
    graph.replay()

    assert survey.made_bytes > 0
    # The sample, parameters, their gradients, and a buffer.
    assert len(survey.outside) == 1 + 2 * 4 + 1
    for parameter, first in zip(module.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert not torch.equal(parameter.grad, first)


def test_a_message_is_an_obstacle() -> None:
    assert on_ranks(1, _message) == ["c10d::allreduce_ talks to another process"]


def _message() -> str | None:
    survey = OperatorSurvey(CPU)
    with survey:
        torch.distributed.all_reduce(torch.ones(1))
    return survey.obstacle
