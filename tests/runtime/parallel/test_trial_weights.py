"""Memory of trials of divided units, and what they tell of large weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.runtime.core.side_effects import deepcopy_module
from meshwright.runtime.parallel import tensor_check, trial_weights
from meshwright.runtime.parallel.tensor_styles_search import DerivedStyles
from meshwright.runtime.tracing.tracer import Recorder

HIDDEN, WIDE, EXPERTS = 64, 256, 16


class Experts(nn.Module):
    """A stack of matrices, each of which is read by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return sum((x @ self.weight[at] for at in range(EXPERTS)), torch.zeros_like(x))


class Block(nn.Module):
    """An MLP beside its input; one that is `crossed` mixes features between its products.

    One that is `stacked` has experts too, whose matrices it reads itself if it is `reading`.
    """

    def __init__(
        self,
        *,
        crossed: bool = False,
        viewed: bool = False,
        stacked: bool = False,
        reading: bool = False,
    ) -> None:
        super().__init__()
        self.experts, self.reading = Experts() if stacked else None, reading
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.crossed, self.viewed = crossed, viewed

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.up(x))
        if self.crossed:
            inner = inner / (1 + inner.mean(-1, keepdim=True))
        if self.viewed:
            x = x + self.up.weight.view(-1)[:0].sum()
        if self.experts is not None:
            x = x + (x @ self.experts.weight[0] if self.reading else self.experts(x))
        return x + self.down(inner)


class Fused(nn.Module):
    """An MLP whose gate and product are rows of one weight, which it may read itself too."""

    def __init__(self, *, reading: bool = False, swapped: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * WIDE), nn.Linear(WIDE, HIDDEN)
        self.reading, self.swapped = reading, swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, inner = self.up(x).chunk(2, -1)
        if self.reading:
            x = x * (1 + self.up.weight.square().sum() * 0)
        return x + self.down(torch.relu(gate) * (inner.flip(-1) if self.swapped else inner))


class Model(nn.Module):
    def __init__(self, blocks: int, **how: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(512, HIDDEN)
        self.blocks = nn.ModuleList(Block(**how) for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MaterialisedBytes(TorchDispatchMode):
    """Counts the bytes of new tensors with data, and those of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in taken:
                    self.total += storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
        return result


def styles(blocks: int, **how: bool) -> DerivedStyles:
    with torch.device("meta"):
        module, batch = Model(blocks, **how), torch.empty(2, 4, dtype=torch.int64)
    return DerivedStyles(module, Recorder.of_units(module, batch), batch)


def trial_bytes(blocks: int) -> int:
    derived = styles(blocks)
    with MaterialisedBytes() as counted:
        assert derived.units_at(2)[f"blocks.{blocks - 1}"].regions
    return counted.total


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of this size be large ones, whose numbers repeat as often as theirs."""
    monkeypatch.setattr(trial_weights, "LARGE", 4096)
    monkeypatch.setattr(trial_weights, "PERIOD", 29)


@pytest.mark.usefixtures("large")
def test_twice_the_layers_materialise_no_more() -> None:
    first = trial_bytes(2)
    assert first
    assert trial_bytes(4) == first


@pytest.mark.usefixtures("large")
def test_copies_of_a_unit_share_its_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = tensor_check._with_random_numbers(Block())
    with MaterialisedBytes() as shared:
        copies = [trial_weights.deepcopy_unit(unit) for _ in range(3)]
    with MaterialisedBytes() as own:
        deepcopy_module(unit)
    weights = 4 * 2 * HIDDEN * WIDE
    assert shared.total < weights / 4 < weights <= own.total
    assert all(torch.equal(copy.up.weight, unit.up.weight) for copy in copies)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("how", "divided"),
    [
        ({}, True),
        ({"viewed": True}, True),
        ({"crossed": True}, False),
        ({"stacked": True}, True),
        ({"stacked": True, "crossed": True}, False),
    ],
)
def test_large_weights_are_divided_as_dense_ones_are(
    how: dict[str, bool], divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = styles(1, **how).units_at(4)
    assert bool(large["blocks.0"].regions) == divided
    monkeypatch.setattr(trial_weights, "LARGE", 1 << 40)
    assert styles(1, **how).units_at(4) == large


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("reading", [False, True])
def test_rows_of_several_matrices_in_one_are_divided_without_a_copy(reading: bool) -> None:
    unit = Fused(reading=reading)
    trial = tensor_check.DivisionTrial(unit, lambda: ((torch.randn(4, HIDDEN),), {}), {})
    with MaterialisedBytes() as counted:
        (region,) = trial.division(2).regions
    assert region.columns["up"] == (WIDE, WIDE)
    assert reading or counted.largest < 4 * HIDDEN * 2 * WIDE / 2


@pytest.mark.usefixtures("large")
def test_a_part_whose_features_pair_with_others_than_in_the_whole_is_refused() -> None:
    unit = Fused(swapped=True)
    trial = tensor_check.DivisionTrial(unit, lambda: ((torch.randn(4, HIDDEN),), {}), {})
    assert not trial.division(4).regions


@pytest.mark.usefixtures("large")
def test_a_weight_of_a_multiple_of_the_period_has_numbers_of_its_own() -> None:
    assert trial_weights.is_overlapping(trial_weights.random_weight((256, 64)))
    assert not trial_weights.is_overlapping(trial_weights.random_weight((29 * 8, 64)))


@pytest.mark.usefixtures("large")
def test_gradients_of_a_stack_are_not_made() -> None:
    derived = styles(1, stacked=True)
    with MaterialisedBytes() as counted:
        assert derived.units_at(2)["blocks.0"].regions
    assert counted.largest < 4 * EXPERTS * HIDDEN * HIDDEN


@pytest.mark.usefixtures("large")
def test_a_stack_that_is_read_outside_of_its_module_has_weights_of_its_own() -> None:
    derived = styles(1, stacked=True, reading=True)
    with MaterialisedBytes() as counted:
        assert derived.units_at(2)["blocks.0"].regions
    assert counted.largest == 4 * EXPERTS * HIDDEN * HIDDEN


def test_sums_of_gradients_are_those_of_their_parts() -> None:
    torch.manual_seed(0)
    grad = torch.randn(24, 40, 3)
    whole = trial_weights.WeightGradient.summed(grad)
    for dim in (0, 1):
        for at, part in enumerate(grad.chunk(4, dim)):
            sums = trial_weights.WeightGradient.summed(part).along(dim)
            torch.testing.assert_close(sums, whole.along(dim).chunk(4, dim)[at])
    other = grad.clone()
    other[3, 5, 1] += 0.1
    changed = trial_weights.WeightGradient.summed(other)
    assert not torch.allclose(changed.along(0), whole.along(0))
    assert not torch.allclose(changed.along(1), whole.along(1))


def test_gradients_of_the_rows_of_a_table_are_summed_as_the_whole_one() -> None:
    table = nn.Embedding(64, 32)
    table.weight = nn.Parameter(torch.randn(63 * 17 + 32).as_strided((64, 32), (17, 1)))
    tokens = torch.tensor([[1, 5], [5, 63]])
    scale = torch.randn(2, 2, 32)
    with trial_weights.noted_gradients(table, frozenset({"weight"})) as noted:
        (table(tokens) * scale).sum().backward()
    dense = table.weight.detach().clone().requires_grad_()
    (nn.functional.embedding(tokens, dense) * scale).sum().backward()
    assert dense.grad is not None
    expected = trial_weights.WeightGradient.summed(dense.grad)
    gradient = noted["weight"]
    assert gradient is not None
    for dim in (0, 1):
        torch.testing.assert_close(gradient.along(dim), expected.along(dim))


@pytest.mark.usefixtures("large")
def test_products_with_large_weights_note_sums_of_the_gradients_of_dense_ones() -> None:
    torch.manual_seed(0)
    unit = tensor_check._with_random_numbers(Block())
    dense = deepcopy_module(unit)
    x = torch.randn(2, 8, HIDDEN)
    large = frozenset({"up.weight", "down.weight"})
    with trial_weights.noted_gradients(unit, large) as noted, MaterialisedBytes() as counted:
        made = unit(unit(x))
        made.square().sum().backward()
    (wanted := dense(dense(x))).square().sum().backward()
    torch.testing.assert_close(made, wanted)
    assert counted.largest < 4 * HIDDEN * WIDE
    for name, parameter in dense.named_parameters():
        gradient = noted[name]
        assert gradient is not None and parameter.grad is not None
        if not name.endswith("weight"):
            torch.testing.assert_close(gradient.exact, parameter.grad, rtol=1e-4, atol=1e-2)
            continue
        expected = trial_weights.WeightGradient.summed(parameter.grad)
        assert expected.largest <= 2 * gradient.largest
        for dim in (0, 1):
            torch.testing.assert_close(
                gradient.along(dim), expected.along(dim), rtol=1e-4, atol=1e-2
            )


@pytest.mark.usefixtures("large")
def test_large_stacks_slide_over_few_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = trial_weights.random_weight((8, 64, 64))
    assert stack.untyped_storage().nbytes() < 4 * 64 * 64
    assert trial_weights.is_overlapping(stack)
    assert len({tuple(matrix[0].tolist()) for matrix in stack}) == 8


@pytest.mark.usefixtures("large")
def test_groups_of_rows_are_multiplied_with_large_stacks_as_with_dense_ones() -> None:
    unit = nn.Module()
    stack = trial_weights.random_weight((4, 64, 64))
    unit.weight = nn.Parameter(stack, requires_grad=False)
    x, ends = torch.randn(6, 64, requires_grad=True), torch.tensor([2, 2, 5, 5], dtype=torch.int32)
    with trial_weights.windowed_products(unit):
        made = nn.functional.grouped_mm(x, unit.weight.transpose(1, 2), offs=ends)
    made[:5].sum().backward()

    parts = [x[:2] @ stack[0].t(), x[2:5] @ stack[2].t()]
    torch.testing.assert_close(made[:5], torch.cat(parts))
    (expected,) = torch.autograd.grad(torch.cat(parts).sum(), x)
    torch.testing.assert_close(x.grad, expected)


class Tokens(nn.Module):
    """A table and a product of it, in one unit."""

    def __init__(self, rows: int, features: int) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(rows, 8), nn.Linear(8, features)
        self.down = nn.Linear(features, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.table(tokens))))


def test_units_of_tokens_are_refused_by_their_products_and_not_by_their_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_check, "MOST_CHECKED_FLOPS", 2.0 * 64 * 2 * 8 * 256)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    few, many = (
        tensor_check.DivisionTrial(Tokens(1 << 16, features), lambda: ((tokens,), {}), {})
        for features in (256, 258)
    )
    assert few.division(2).regions
    refused = many.division(2)
    assert not refused.regions
    assert "too long to be checked" in refused.whole["up"]
