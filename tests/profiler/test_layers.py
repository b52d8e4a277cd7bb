"""Layers are measured on tiny modules whose seconds and bytes are known beforehand."""

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.documents.profile import (
    ChunkedLoss,
    LayerMeasurement,
    LossGradients,
    Recompute,
)
from meshwright.profiler import layer_bytes, layers
from meshwright.profiler.chain import WHOLE, Case, Chain, short_chain
from meshwright.profiler.clock import Clock
from meshwright.profiler.layer_bytes import MeasuredLayerBytes
from meshwright.profiler.layers import HeadCase, heads
from meshwright.profiler.measurement_plan import RECOMPUTES
from meshwright.runtime.core.torch_internals import compiled_graphs
from meshwright.runtime.techniques import compile as compiled
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
SEQ_LEN = 16


def chain(**changes: Any) -> Chain:
    return Chain(
        cases.transformer(**changes), seq_len=SEQ_LEN, precision="fp32", tensor=1, device=CPU
    )


def bytes_of(layer: nn.Module) -> MeasuredLayerBytes:
    held, _ = layer_bytes.bytes_of(layer, [torch.ones(256)], None)  # 1 KiB, as are all results
    return held


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_a_layer_that_keeps_nothing_stores_nothing() -> None:
    held = bytes_of(Apply(lambda x: (x + 1) * 2))

    # Forward needs x + 1 beside input and output; backward the gradients of both ends.
    assert held == MeasuredLayerBytes(stored=0, forward_transient=1024, backward_transient=2 * 1024)


def test_an_input_that_is_kept_counts_as_stored() -> None:
    held = bytes_of(Apply(lambda x: x.sin()))

    # Backward: the gradient that arrives, cos(x), and their product.
    assert held == MeasuredLayerBytes(stored=1024, forward_transient=0, backward_transient=3 * 1024)


def test_a_kept_output_counts_as_stored_once() -> None:
    held = bytes_of(Apply(lambda x: x.exp()))

    assert held.stored == 1024
    assert held.forward_transient == 0


def test_gradients_of_parameters_do_not_count() -> None:
    torch.manual_seed(0)
    large = nn.Linear(256, 64 * 256, bias=False)

    held = bytes_of(large)

    assert held.stored == 1024
    assert held.backward_transient < 100 * 1024  # the weight's gradient alone is 16 MiB
    assert held.backward_transient >= 65 * 1024  # of the output, and of the input


def test_bytes_are_those_that_autograd_saves() -> None:
    short = chain()
    block = short.layers(Case(tensor=1, micro_batch=1, recompute="none"))["block.1"]
    x = torch.randn(2, SEQ_LEN, 32, requires_grad=True) + 0
    outside = {p.untyped_storage()._cdata for p in short.module.parameters()}
    outside |= {t.untyped_storage()._cdata for t in short.adapter.rotary}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in outside:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)

    case = Case(tensor=1, micro_batch=2, recompute="none")
    assert layer_bytes.layer_bytes(short, case)["block.1"].stored == sum(saved.values())


@pytest.mark.parametrize("gradients", ["precomputed", "recomputed"])
def test_a_head_in_chunks_is_measured_by_itself_and_then_as_before(
    gradients: LossGradients,
) -> None:
    short = chain(vocab_size=512)
    plain, wanted = (
        Case(tensor=1, micro_batch=2, recompute="none"),
        ChunkedLoss(rows=8, gradients=gradients),
    )
    before = layer_bytes.layer_bytes(short, plain)["head"]

    (found,) = heads([short], [HeadCase(division=WHOLE, micro_batch=2, loss=wanted)])

    assert (found.kind, found.loss, found.samples) == ("head", wanted, 6)
    assert found.forward_s > 0 < found.backward_s
    hidden, weight = 4 * 2 * SEQ_LEN * 32, 4 * 512 * 32
    made = hidden + weight if gradients == "precomputed" else hidden
    # The norm before it keeps its input, what it made of it and one number a position; who makes
    # logits anew keeps the targets.
    assert made + hidden <= found.stored_bytes <= made + 2 * hidden + (4 + 8) * 2 * SEQ_LEN
    logits = 4 * 2 * SEQ_LEN * 512
    assert found.forward_transient_bytes < logits < before.stored + before.forward_transient
    assert layer_bytes.layer_bytes(short, plain)["head"] == before


def test_full_recompute_stores_the_input_and_brings_the_rest_back() -> None:
    short = chain()
    none, full = (
        layer_bytes.layer_bytes(short, Case(tensor=1, micro_batch=2, recompute=recompute))[
            "block.0"
        ]
        for recompute in ("none", "full")
    )

    assert full.stored == 2 * SEQ_LEN * 32 * 4
    assert full.backward_transient >= none.stored - full.stored


class Busy(torch.autograd.Function):
    """Takes known seconds of a clock that does not run by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: "HandClock", forward_s: float, back_s: float) -> Tensor:
        clock.seconds_s += forward_s
        ctx.clock, ctx.backward_s = clock, back_s
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.seconds_s += ctx.backward_s
        return grad, None, None, None


class HandClock(Clock):
    seconds_s = 0.0

    def moment(self) -> float:
        return self.seconds_s


def test_seconds_are_given_to_the_layer_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock(CPU)
    short = chain()
    modules = short.layers(Case(tensor=1, micro_batch=1, recompute="none"))
    expected = {}
    for index, (name, module) in enumerate(modules.items()):
        forward_s, backward_s = 2.0**index, 2.0 ** -(index + 1)
        module.forward = functools.partial(busy, module.forward, clock, forward_s, backward_s)
        expected[name] = (forward_s, backward_s)
    monkeypatch.setattr(short, "layers", lambda recompute: modules)

    seconds = layers.trial(short, Case(tensor=1, micro_batch=1, recompute="none"), clock)

    assert seconds == expected


def busy(own: Any, clock: HandClock, forward_s: float, backward_s: float, x: Tensor) -> Tensor:
    return Busy.apply(own(x), clock, forward_s, backward_s)


def test_parts_add_up_to_the_whole_micro_batch() -> None:
    class Ticks(Clock):
        count = 0

        def moment(self) -> float:
            self.count += 1
            return float(self.count)

    clock = Ticks(CPU)
    short = chain()

    seconds = layers.trial(short, Case(tensor=1, micro_batch=1, recompute="full"), clock)

    assert sum(f + b for f, b in seconds.values()) == clock.count - 1
    assert all(f > 0 and b > 0 for f, b in seconds.values())


def test_the_short_chain_has_two_layers_of_each_kind_in_order() -> None:
    kinds = short_chain(cases.transformer(layers=5))

    assert kinds == {
        "embedding": "embedding",
        "block.0": "block",
        "block.1": "block",
        "head": "head",
    }


def measured(
    tensor_degrees: tuple[int, ...], micro_batches: tuple[int, ...]
) -> list[LayerMeasurement]:
    chains = [
        Chain(cases.transformer(), seq_len=SEQ_LEN, precision="fp32", tensor=degree, device=CPU)
        for degree in tensor_degrees
    ]
    cases_wanted = [
        Case(tensor=tensor, micro_batch=micro_batch, recompute=recompute)
        for tensor in tensor_degrees
        for micro_batch in micro_batches
        for recompute in RECOMPUTES
    ]
    return layers.measurements(chains, cases_wanted, budget_s=0.1)


@pytest.mark.ranks
@pytest.mark.spread(1)
@pytest.mark.parametrize("micro_batches", [(2,), (1, 2)], ids=str)
def test_every_kind_is_measured_under_every_case_and_all_ranks_agree(
    micro_batches: tuple[int, ...],
) -> None:
    first, second = on_ranks(2, measured, (1, 2), micro_batches)

    assert first == second
    found = {(m.kind, m.tensor, m.micro_batch, m.recompute) for m in first}
    assert found == {
        (kind, tensor, micro_batch, recompute)
        for kind in ("embedding", "block", "head")
        for tensor in (1, 2)
        for micro_batch in micro_batches
        for recompute in ("none", "selective", "full")
    }
    # Three rounds, two ranks, two blocks.
    assert all(m.samples == (12 if m.kind == "block" else 6) for m in first)
    by_setting = {(m.kind, m.tensor, m.micro_batch, m.recompute): m for m in first}
    whole = by_setting["block", 1, 2, "none"].stored_bytes
    half = by_setting["block", 2, 2, "none"].stored_bytes
    assert 0.5 <= half / whole < 0.75  # what is gathered for the matrices is whole on every rank


def test_bf16_layers_compute_in_bf16() -> None:
    model = cases.transformer()
    narrow = Chain(model, seq_len=SEQ_LEN, precision="bf16", tensor=1, device=CPU)

    wide = layer_bytes.layer_bytes(chain(), Case(tensor=1, micro_batch=1, recompute="full"))
    held = layer_bytes.layer_bytes(narrow, Case(tensor=1, micro_batch=1, recompute="full"))

    assert held["block.0"].stored * 2 == wide["block.0"].stored


@pytest.mark.long("none")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.matrix
def test_compiled_layers_are_measured_beside_eager_ones(
    recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(logging.getLogger("torch._dynamo"), "disabled", True)
    eager, graphs = (
        Case(tensor=1, micro_batch=1, recompute=recompute, compiled=choice)
        for choice in (False, True)
    )
    short, before = chain(), compiled_graphs()

    found = layers.measurements([short], [eager, graphs], budget_s=0.0)

    assert {(m.kind, m.compiled) for m in found} == {
        (kind, choice) for kind in ("embedding", "block", "head") for choice in (False, True)
    }
    assert compiled_graphs() - before == 1  # of both blocks, in all rounds
    assert all(m.recompute_s is None for m in found if m.compiled)
    assert all("forward" not in vars(layer) for layer in short.parts.values())
