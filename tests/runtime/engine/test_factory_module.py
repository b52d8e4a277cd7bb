"""A user's own chain: its ModelGraph, what is refused, and that it trains alike under any plan."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import PlacedLayer, Stage
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases, chains
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, Run, errors, train

CPU = torch.device("cpu")
FILE = str(Path(__file__).parents[1] / "chains.py")
W, V, S = chains.WIDTH, chains.VOCABULARY, cases.SEQ_LEN


@functools.cache
def graph(name: str = "factory") -> ModelGraph:
    return graph_of_factory(f"{FILE}:{name}", seq_len=S)


def test_alike_modules_are_one_kind() -> None:
    layers = graph().layers

    assert [(layer.name, layer.kind) for layer in layers] == [
        ("0", "embed"),
        ("1", "causal_mix"),
        ("2", "causal_mix"),
        ("3", "causal_mix"),
        ("4", "causal_mix_2"),
        ("5", "linear"),
    ]
    assert [layer.parameters for layer in layers] == [
        V * W,
        *3 * (2 * W + (W + 1) * 32 + (32 + 1) * W,),
        2 * W + (W + 1) * 48 + (48 + 1) * W,
        (W + 1) * V,
    ]


def test_a_last_layer_and_its_loss_cost_what_arithmetic_says() -> None:
    trace = graph().layers[-1].trace

    assert trace is not None
    assert trace.forward_flops == 2 * S * W * V
    # Its input; of the loss the logarithms, the targets and of two samples one number.
    assert trace.stored_bytes == 4 * S * W + 4 * S * V + 8 * S + 4 // 2
    assert trace.output_bytes == 4 * S * V
    # Backward makes the gradient of the logarithms, and out of it that of the logits.
    assert trace.transient_bytes == 2 * 4 * S * V


def test_a_block_stores_what_autograd_saves() -> None:
    trace = graph().layers[1].trace

    assert trace is not None
    assert trace.forward_flops == 2 * 2 * S * W * 32
    # The norm's input with its mean and 1/std, of two samples a divisor (int64), the mean over
    # positions, and both sides of the gelu.  The scale is a buffer.
    assert trace.stored_bytes == 4 * (S * W + S + S + S + S * W + S * 32 + S * 32)


@pytest.mark.matrix
def test_a_shared_weight_counts_once() -> None:
    tied = graph("tied")

    assert [layer.parameters for layer in tied.layers][0::2] == [V * W, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "raised ValueError: no luck"),
        ("number", r"number\(\) must return a module, a list of modules, or a dict"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_what_is_no_chain_is_refused(name: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        graph(name)


def test_a_users_folder_comes_last_and_may_not_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef factory(): return [torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)]\n"
    )
    before = list(sys.path)
    assert graph_of_factory(f"{tmp_path}/mine.py:factory", seq_len=4).parameters == 72
    assert sys.path == before
    (tmp_path / "planner.py").write_text("")
    assert graph_of_factory(f"{tmp_path}/mine.py:factory", seq_len=4).parameters == 72
    (tmp_path / "meshwright.py").write_text("")

    with pytest.raises(DocumentError, match=r"meshwright\.py has the name of Meshwright's package"):
        graph_of_factory(f"{tmp_path}/mine.py:factory", seq_len=4)
    with pytest.raises(DocumentError, match="there is no file"):
        graph_of_factory(f"{tmp_path}/other.py:factory", seq_len=4)


def test_a_file_may_bring_its_own_loss(tmp_path: Path) -> None:
    file = tmp_path / "squares.py"
    file.write_text(
        "import torch\n"
        "def factory(): return [torch.nn.Embedding(64, 4), torch.nn.Linear(4, 1)]\n"
        "def loss(output, targets): return (output.squeeze(-1) - targets).square().mean()\n"
    )
    squares = graph_of_factory(f"{file}:factory", seq_len=S)
    engine = token_engine(cases.plan(squares), squares, device=CPU)
    embedding, linear = engine.units.values()
    tokens = cases.global_tokens(0)
    expected = (linear(embedding(tokens[:, :-1])).squeeze(-1) - tokens[:, 1:]).square().mean()

    assert engine.step(tokens).loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_tensor_axis_divides_what_parts_add_up_to() -> None:
    assert 2 in graph().tensor_degrees
    assert unsupported_reason(cases.plan(graph(), tensor=2), graph()) is None
    assert "divides no layer of this module of your own" in str(
        unsupported_reason(cases.plan(graph(), tensor=3), graph())
    )


def test_a_chain_of_another_length_is_refused() -> None:
    whole = graph()
    other = ModelGraph(
        name="short", source=whole.source, files=whole.files, layers=whole.layers[1:]
    )

    with pytest.raises(LaunchError, match="the plan has 5 layers and the module 6"):
        token_engine(cases.plan(other), other, device=CPU)


def test_published_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="gives its parameters their values by itself"):
        token_engine(cases.plan(graph()), graph(), device=CPU, weights=tmp_path)


TRAINED = ("tied", "dropping", "flattened", "normalised")


def all_trained(layouts: list[dict[str, Any]]) -> list[Run]:
    return [
        train(cases.plan(graph(name), **layout), graph(name), 3)
        for layout in layouts
        for name in TRAINED
    ]


@pytest.mark.ranks
def test_ties_draws_and_modules_without_parameters_train_like_one_process() -> None:
    """A weight of both ends, masks of Dropout, a module that belongs to another's layer, statistics
    of a micro-batch."""
    for name in TRAINED:  # once, for all ranks that are forked
        graph(name)
    (alone,) = on_ranks(1, all_trained, [{"micro_batches": 4}])

    every = on_ranks(2, all_trained, [{"micro_batches": 4, "pipeline": 2}])

    for at, expected in enumerate(alone):
        found = errors([runs[at] for runs in every], expected)
        assert all(error < TOLERANCE for error in found.values()), (at, found)


def test_modules_are_run_in_the_order_of_a_plan() -> None:
    model = graph("flattened")
    assert [(edge.source, edge.target) for edge in model.edges] == [
        ("words", "both"),
        ("other", "both"),
    ]
    names = ["other", "words", "both"]
    plan = cases.plan(model)
    stage = Stage(layers=tuple(PlacedLayer(layer=name) for name in names))
    engine = token_engine(plan.model_copy(update={"stages": (stage,)}), model, device=CPU)

    assert [layer.name for layer in engine._parts[0].module.layers] == names
    expected = token_engine(plan, model, device=CPU).step(cases.global_tokens(0))
    assert engine.step(cases.global_tokens(0)).loss == pytest.approx(expected.loss, rel=1e-6)
