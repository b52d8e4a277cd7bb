"""The chunked loss is the plain one: in value, in gradients, by finite differences, over ranks."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.rehearsal import rehearse
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.compute import DeviceRates
from meshwright.planner.costs.layer_seconds import passes
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import DeviceCurve
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import ChunkedLoss, LossGradients
from meshwright.planner.operators import embedding_and_head as ends
from meshwright.planner.operators.operator_table import Setting
from meshwright.runtime.core.loss import IGNORED
from meshwright.runtime.core.memory_tracker import LiveMemory
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques.activation_checkpointing import checkpoint_call
from meshwright.runtime.techniques.chunked_cross_entropy import chunked_loss
from tests.parts import some_and_others
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

GRADIENTS: tuple[LossGradients, ...] = ("precomputed", "recomputed")


def setting(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, weights, bias and targets, of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 6, generator=generator, dtype=dtype)
    weight = torch.randn(10, 6, generator=generator, dtype=dtype)
    bias = torch.randn(10, generator=generator, dtype=dtype)
    targets = torch.randint(10, (13,), generator=generator)
    targets[[2, 7]] = IGNORED
    return x, weight, bias, targets


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    cap: float | None = None,
    divisor: float = 1.0,
) -> Tensor:
    logits = functional.linear(x, weight, bias) / divisor
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_chunks_are_part_of_a_selective_recomputation(gradients: LossGradients) -> None:
    """Logits change in place: recomputation must not have saved the product that makes them."""
    x, weight, _, targets = setting()

    def loss(x: Tensor) -> Tensor:
        total, _ = chunked_loss(x.tanh(), weight, targets, rows=5, gradients=gradients)
        return total

    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    checkpoint_call(loss, "selective")(found).backward()
    plain(wanted.tanh(), weight, None, targets).backward()

    torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("more", [{}, {"cap": 2.0}, {"divisor": 3.0}, {"cap": 1.5, "divisor": 0.5}])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_loss_and_gradients_are_those_of_all_logits(
    gradients: LossGradients, more: dict[str, float], rows: int
) -> None:
    x, weight, bias, targets = setting()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    total, count = chunked_loss(
        x, weight, targets, rows=rows, gradients=gradients, bias=bias, **more
    )

    assert int(count) == 11
    expected = plain(x, weight, bias, targets, **more)
    torch.testing.assert_close(total, expected)
    found = torch.autograd.grad(total * 3.0, leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected * 3.0, leaves))


def test_gradients_are_those_of_finite_differences() -> None:
    x, weight, bias, targets = setting()

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        how: LossGradients = "recomputed"  # precomputed ones are taken once
        found, _ = chunked_loss(x, weight, targets, rows=4, gradients=how, bias=bias, cap=3.0)
        return found

    leaves = tuple(t.requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(loss, leaves, check_batched_grad=False)


def test_in_16_bits_the_error_is_that_of_16_bits() -> None:
    x, weight, _, targets = setting()
    exact = [t.requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(plain(x, weight, None, targets), exact)
    half = [t.detach().to(torch.bfloat16).requires_grad_() for t in exact]

    total, _ = chunked_loss(*half, targets, rows=5, gradients="precomputed")

    assert total.dtype == torch.float32
    for found, wanted in zip(torch.autograd.grad(total, half), expected, strict=True):
        assert found.dtype == torch.bfloat16
        assert float((found - wanted).norm() / wanted.norm()) < 0.01


def test_what_forward_made_is_taken_once() -> None:
    x, weight, _, targets = setting()
    total, _ = chunked_loss(x.requires_grad_(), weight, targets, rows=4, gradients="precomputed")
    total.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_frozen_weights_get_no_gradient_and_evaluation_makes_none() -> None:
    x, weight, _, targets = setting()

    total, _ = chunked_loss(x.requires_grad_(), weight, targets, rows=4, gradients="precomputed")

    assert [t is None for t in total.grad_fn.saved_tensors] == [False, True, True]  # type: ignore[union-attr]
    with torch.no_grad():
        alone, _ = chunked_loss(x, weight, targets, rows=4, gradients="precomputed")
    assert not alone.requires_grad
    torch.testing.assert_close(alone, total.detach())


def of_a_rank(gradients: LossGradients) -> list[Any]:
    x, weight, bias, targets = setting()
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [t.chunk(world)[rank].clone().requires_grad_() for t in (weight, bias)]
    x.requires_grad_()
    total, _ = chunked_loss(
        x,
        own[0],
        targets,
        rows=5,
        gradients=gradients,
        bias=own[1],
        cap=2.0,
        group=dist.group.WORLD,
    )
    total.backward()
    grads = [t.grad for t in (x, *own)]
    return [float(total.detach()), *(g.tolist() for g in grads if g is not None)]


@pytest.mark.ranks
def test_ranks_with_parts_of_the_vocabulary_find_the_same() -> None:
    x, weight, bias, targets = setting()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    expected = plain(x, weight, bias, targets, cap=2.0)
    dx, dw, db = torch.autograd.grad(expected, leaves)

    for gradients in GRADIENTS:
        first, second = on_ranks(2, of_a_rank, gradients)

        assert first[0] == second[0] == pytest.approx(float(expected.detach()), rel=1e-12)
        parts = [torch.tensor(r[1], dtype=torch.float64) for r in (first, second)]
        torch.testing.assert_close(sum(parts), dx)
        for place, whole in ((2, dw), (3, db)):
            parts = [torch.tensor(r[place], dtype=torch.float64) for r in (first, second)]
            torch.testing.assert_close(torch.cat(parts), whole)


# --- in training ------------------------------------------------------------------------------


def trained(plan: Plan, graph: ModelGraph) -> list[tuple[float, float]]:
    """Return loss and gradient norm of some steps, and the loss of evaluation."""
    engine = token_engine(plan, graph, device=torch.device("cpu"))
    own = plan.samples_of(engine.slice_rank)
    found = []
    for step in range(2):
        result = engine.step(cases.global_tokens(step)[own.start : own.stop])
        found.append((result.loss, result.grad_norm))
    tokens = cases.global_tokens(9)[own.start : own.stop]
    return [*found, (engine.evaluate(tokens).loss, 0.0)]


def chunked(plan: Plan, gradients: LossGradients) -> Plan:
    return plan.model_copy(update={"loss": ChunkedLoss(rows=10, gradients=gradients)})


def near(found: list[tuple[float, float]], expected: list[tuple[float, float]], rel: float) -> None:
    for one, wanted in zip(found, expected, strict=True):
        assert one == pytest.approx(wanted, rel=rel)


@pytest.mark.parametrize(
    ("gradients", "family", "layout"),
    [
        ("recomputed", "reference", {"recompute": "selective"}),
        # Tied; what is compressed is not what the loss made.
        ("precomputed", "gpt2", {"activations": "compress"}),
        ("precomputed", "gemma2", {"recompute": "full"}),  # capped
    ],
)
def test_a_model_trains_in_chunks_as_on_all_logits(
    gradients: LossGradients, family: str, layout: dict[str, Any]
) -> None:
    graph = cases.transformer(family)
    plan = cases.plan(graph, **layout)
    head = plan.stages[0].layers[-1].model_copy(update={"activations": "keep"})
    stage = plan.stages[0].model_copy(update={"layers": (*plan.stages[0].layers[:-1], head)})
    plan = plan.model_copy(update={"stages": (stage,)})

    near(trained(chunked(plan, gradients), graph), trained(plan, graph), 2e-6)


LAYOUTS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("reference", {"data_shard": 2, "zero": 3}, 2e-6),
    ("gpt2", {"data_shard": 2, "zero": 3}, 2e-6),
    ("reference", {"data_replicate": 2}, 2e-6),
    ("reference", {"tensor": 2}, 2e-6),
    ("llama", {"tensor": 2}, 2e-6),
    ("reference", {"context": 2}, 2e-6),
    ("reference", {"data_shard": 2, "zero": 2, "precision": "bf16"}, 5e-3),
    ("reference", {"pipeline": 2}, 2e-6),
    ("gpt2", {"pipeline": 2, "schedule": "gpipe"}, 2e-6),
    ("gemma2", {"pipeline": 2, "schedule": "interleaved-zb", "virtual_stages": 2}, 2e-6),
)


def under(places: list[int]) -> list[list[tuple[float, float]]]:
    found = []
    for place in places:
        family, layout, _ = LAYOUTS[place]
        graph = cases.transformer(family)
        plan = cases.plan(graph, **layout)
        found.append(trained(chunked(plan, GRADIENTS[place % 2]), graph))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("places", some_and_others(range(len(LAYOUTS)), [1, 3, 5, 9]))
def test_every_axis_trains_in_chunks_as_one_process_on_all_logits(places: list[int]) -> None:
    first, second = on_ranks(2, under, places)

    assert first == second
    whole = {f: trained(cases.plan(cases.transformer(f)), cases.transformer(f)) for f in
             {LAYOUTS[place][0] for place in places}}  # fmt: skip
    for found, (family, _, rel) in zip(first, [LAYOUTS[at] for at in places], strict=True):
        near(found, whole[family], rel)


def test_stale_weights_refuse_chunks() -> None:
    graph = cases.transformer()
    plan = chunked(cases.plan(graph, pipeline=2, schedule="pipedream-2bw"), "precomputed")

    assert "loss: is in chunks, which pipedream-2bw" in (unsupported_reason(plan, graph) or "")


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [256, 1024])
def test_bytes_are_those_of_the_formula(dtype: torch.dtype, rows: int) -> None:
    count, hidden, outputs = 8192, 4096, 128256
    states = (outputs * hidden + count * hidden) * dtype.itemsize
    working = (4 if dtype == torch.float32 else 6) * rows * outputs
    found = {}
    for gradients in GRADIENTS:
        with FakeTensorMode():
            x = torch.zeros(count, hidden, dtype=dtype, requires_grad=True)
            weight = torch.zeros(outputs, hidden, dtype=dtype, requires_grad=True)
            targets = torch.zeros(count, dtype=torch.int64)
            with LiveMemory([x, weight, targets]) as live:
                begin = live.current_bytes
                total, _ = chunked_loss(x, weight, targets, rows=rows, gradients=gradients)
                forward, held = live.peak_bytes - begin, live.current_bytes - begin
                live.reset_peak()
                total.backward()
                found[gradients] = (forward, held, live.peak_bytes - begin)

    for one, expected in (
        ("precomputed", (states + working, states, states)),
        ("recomputed", (working, 0, states + working)),
    ):
        assert found[one] == pytest.approx(expected, rel=0.01, abs=10_000)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("gradients", "layout", "near"),
    [
        pytest.param(
            *(gradients, layout, near),
            marks=[pytest.mark.matrix] if gradients == "recomputed" and layout else [],
        )
        for gradients in GRADIENTS
        for layout, near in (({}, 0.01), ({"data_shard": 2, "zero": 3, "precision": "bf16"}, 0.05))
    ],
)
@pytest.mark.matrix
def test_a_rehearsed_rank_peaks_where_predicted(
    gradients: LossGradients, layout: dict[str, Any], near: float
) -> None:
    figures = {"hidden_size": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn_size": 384}
    graph = cases.transformer("reference", vocab_size=16384, layers=2, **figures)
    plan = cases.plan(graph, global_batch=32, micro_batches=2, **layout)
    how = ChunkedLoss(rows=256, gradients=gradients)
    plan = plan.model_copy(update={"seq_len": 64, "loss": how})
    (stage,) = predict(plan, graph, resolve_cluster(f"{plan.mesh.devices}xh100-sxm-80gb")).stages
    parts = stage.memory_parts
    predicted = sum(
        size for part, size in parts.items() if part not in ("context", "allocator overhead")
    )

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as apart:
        found = apart.submit(rehearse, plan, graph, rank=0).result()

    assert predicted == pytest.approx(found.peak_bytes, rel=near)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_a_head_is_priced_for_the_products_that_its_loss_runs(gradients: LossGradients) -> None:
    """torch counts those of both passes; a device without anything but products takes as long."""
    model = resolve_model("llama-3.2-1b")
    architecture = model.architecture
    assert architecture is not None
    hidden, outputs, rows = architecture.hidden_size, 400, 96
    small = architecture.model_copy(update={"vocab_size": outputs})
    x = torch.randn(rows, hidden, requires_grad=True)
    weight = torch.randn(outputs, hidden, requires_grad=True)

    def in_place(_: Any, a: tuple[int, int], b: tuple[int, int], **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]  # torch counts no products that are added in place

    rules = {torch.ops.aten.addmm_: in_place}
    with FlopCounterMode(display=False, custom_mapping=rules) as counted:
        total, _ = chunked_loss(x, weight, torch.arange(rows), rows=32, gradients=gradients)
        total.backward()  # type: ignore[no-untyped-call]

    loss = ChunkedLoss(rows=32, gradients=gradients)
    head = ends.head(small, Setting(micro_batch=1, seq_len=rows, loss=loss))
    curve = DeviceCurve(
        launch_s=0,
        matmul=1,
        attention_forward=1,
        attention_backward=1,
        memory=1,
        spread=0,
        provenance="quoted",
        source="none",
    )
    only_products = DeviceRates(peak_flops=1, memory_bytes_per_s=1e30, curve=curve)
    found = passes(head, "none", only_products)
    assert found.forward_s + found.backward_s == pytest.approx(counted.get_total_flops(), rel=1e-3)


def test_logits_in_two_parts_are_copied_together_and_apart_again() -> None:
    sized = cases.transformer(layers=1).architecture
    assert sized is not None

    def moved(vocabulary: int) -> tuple[float, float]:
        a = sized.model_copy(update={"vocab_size": vocabulary})
        table = ends.head(a, Setting(micro_batch=2, seq_len=64, precision="bf16"))
        [product] = [one for one in table.operators if one.name == "logits"]
        by_hand = 2 * (128 * a.hidden_size + vocabulary * a.hidden_size + 128 * vocabulary)
        return product.moved_bytes - by_hand, product.backward_moved_bytes - 2 * by_hand

    assert moved(50264) == (0, 0)
    assert moved(50257) == (2 * 2 * 128 * 50257, 2 * 2 * 128 * 50257)
