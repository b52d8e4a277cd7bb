"""The loss is the mean over what counts, however unequally it lies on micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.planner.catalog import frameworks
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.errors import BatchError, LaunchError
from meshwright.runtime.core.loss import Totals, counted
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
DENSE, SPARSE = cases.transformer(), cases.transformer("mixtral")
LAYOUTS: tuple[tuple[ModelGraph, dict[str, Any]], ...] = (
    (DENSE, {"data_replicate": 2}),
    (DENSE, {"data_shard": 2, "zero": 3}),
    (DENSE, {"context": 2}),
    (DENSE, {"tensor": 2}),
    (DENSE, {"pipeline": 2}),
    (DENSE, {"pipeline": 2, "schedule": "gpipe", "recompute": "full"}),
    (SPARSE, {"data_shard": 2, "expert": 2, "zero": 1}),
    (SPARSE, {"context": 2, "expert": 2}),
)


def counts(step: int) -> Tensor:
    """Return which targets count: of sample 0 none, of sample 7 all, of the others random ones."""
    generator = torch.Generator().manual_seed(step)
    share = torch.linspace(0, 1, cases.GLOBAL_BATCH).unsqueeze(1)
    return torch.rand(cases.GLOBAL_BATCH, cases.SEQ_LEN, generator=generator) < share


def gradients(engine: Engine) -> dict[str, Tensor]:
    """Return what the first step's moments say the gradients were."""
    left = 1 - engine.plan.training.beta1
    return {
        name.removesuffix(".exp_avg"): (v.full_tensor() if isinstance(v, DTensor) else v) / left
        for name, v in engine.state().items()
        if name.endswith(".exp_avg")
    }


def trained(plan: Any, graph: ModelGraph) -> tuple[list[float], float, dict[str, Tensor]]:
    engine = token_engine(plan, graph, device=CPU)
    own = plan.samples_of(engine.slice_rank)
    part = slice(own.start, own.stop)
    losses = [engine.evaluate((cases.global_tokens(0)[part], counts(0)[part])).loss]
    result = engine.step((cases.global_tokens(0)[part], counts(0)[part]))
    found = gradients(engine)
    losses += [result.loss, engine.step((cases.global_tokens(1)[part], counts(1)[part])).loss]
    return losses, result.grad_norm, {name: value.clone() for name, value in found.items()}


def everywhere() -> list[Any]:
    return [trained(cases.plan(g, clip_norm=0.0, **how), g) for g, how in LAYOUTS]


def plainly(graph: ModelGraph) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, norm and gradients of one backward of the whole batch, by torch alone."""
    engine = token_engine(cases.plan(graph), graph, device=CPU)
    layers = engine.units
    tokens, which = cases.global_tokens(0), counts(0)
    logits = nn.Sequential(*layers.values())(tokens[:, :-1])
    loss = functional.cross_entropy(logits[which], tokens[:, 1:][which])
    loss.backward()
    grads = {
        f"optim.{engine._model.adapter.published_name(f'{name}.{path}')}": parameter.grad
        for name, layer in layers.items()
        for path, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    return loss.item(), norm.item(), grads


@pytest.mark.matrix
@pytest.mark.ranks
def test_unequal_counts_give_the_mean_over_all_that_counts_under_any_plan() -> None:
    expected = {graph.name: plainly(graph) for graph in (DENSE, SPARSE)}
    alone = {g.name: trained(cases.plan(g, clip_norm=0.0), g)[0][2] for g in (DENSE, SPARSE)}

    per_rank = on_ranks(2, everywhere)

    for index, (graph, layout) in enumerate(LAYOUTS):
        loss, norm, grads = expected[graph.name]
        seen = {}
        for losses, found_norm, found in (results[index] for results in per_rank):
            assert losses[0] == pytest.approx(loss, rel=1e-6), layout
            assert losses[1] == pytest.approx(loss, rel=1e-6), layout
            assert losses[2] == pytest.approx(alone[graph.name], rel=1e-6), layout
            assert found_norm == pytest.approx(norm, rel=1e-6), layout
            seen |= found
        assert len(seen) == len(grads), layout
        for name, value in seen.items():
            wanted = grads[name].view_as(value)
            assert float((value - wanted).norm() / wanted.norm()) < 2e-6, (layout, name)


def test_a_step_in_which_nothing_counts_moves_nothing() -> None:
    engine = token_engine(cases.plan(DENSE), DENSE, device=CPU)
    before = {name: value.clone() for name, value in engine.state().items()}

    result = engine.step((cases.global_tokens(0), torch.zeros(8, cases.SEQ_LEN, dtype=torch.bool)))

    assert result.skipped
    for name, value in engine.state().items():
        if name != "train.step":
            assert torch.equal(value, before[name]), name


def test_counts_of_another_shape_are_refused() -> None:
    engine = token_engine(cases.plan(DENSE), DENSE, device=CPU)

    with pytest.raises(LaunchError, match=r"counts are booleans of shape \(8, 16\)"):
        engine.step((cases.global_tokens(0), torch.ones(8, 17, dtype=torch.bool)))


def test_a_loss_is_a_sum_and_a_count_or_a_mean_over_samples() -> None:
    value = torch.tensor(3.0)

    assert counted((value, 2), 4).count == 2
    assert float(counted(value, 4).total) == 12.0
    assert counted(value, 4).count == 4.0
    assert counted((value, 2, {"right": 1}), 4).metrics == {"right": 1}
    for wrong, said in (
        (3.0, "returned float"),
        ((3.0, 1), "a sum of type float"),
        (torch.zeros(2), r"has shape \(2,\); it is one number: add .sum()"),
        ((value, 1, 5), "metrics of type int"),
    ):
        with pytest.raises(BatchError, match=said):
            counted(wrong, 4)


def test_totals_add_sums_and_counts_of_metrics_of_their_own() -> None:
    totals = Totals(CPU)

    totals.add(counted((torch.tensor(3.0), 2, {"right": 1, "far": (5.0, 10)}), 4))
    totals.add(counted((torch.tensor(1.0), 6, {"right": 3, "far": (1.0, 2)}), 4))

    assert totals.values.tolist() == [4.0, 8.0]
    assert totals.metrics["right"].tolist() == [4.0, 8.0]
    assert totals.metrics["far"].tolist() == [6.0, 12.0]


@pytest.mark.parametrize(("framework", "held"), [("transformers", False), ("fsdp", True)])
def test_bytes_of_a_logit_are_what_torch_holds_in_backward(framework: str, *, held: bool) -> None:
    """transformers upcasts logits of 16 bits for its loss; a loop may hold the output or not."""
    rows, vocabulary, hidden = 64, 4096, torch.ones(64, 8, dtype=torch.bfloat16)
    weight = torch.ones(vocabulary, 8, dtype=torch.bfloat16, requires_grad=True)
    logits = functional.linear(hidden, weight)
    loss = functional.cross_entropy(logits.float(), torch.zeros(rows, dtype=torch.int64))
    kept = [2 * rows * vocabulary] if held else []
    del logits

    with LiveMemory() as live:
        loss.backward()

    # What log-softmax kept, 4 bytes, was there before.
    assert live.peak_bytes + 4 * rows * vocabulary + sum(kept) == pytest.approx(
        frameworks()[framework].loss.peak_bytes * rows * vocabulary, rel=0.01
    )
