"""Frozen weights in few bits: their codes, and training with them under every plan alike."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import FrozenWeights, Lora
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.techniques.packed_weights import PackedLinear, pack, restore
from tests.parts import some_and_others
from tests.planner.costs.test_predict_peaks import cluster
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import train_all
from tests.runtime.techniques.test_frozen_memory import held_bytes, wide
from tests.runtime.techniques.test_frozen_memory import plan as memory_plan

CPU = torch.device("cpu")
ENDS = EMBEDDING, HEAD
# bitsandbytes, functional.py, get_4bit_type("nf4"): its table, by which 4 bits are read.
BITSANDBYTES_NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]


def test_four_bits_restore_what_the_published_table_says() -> None:
    """Nearest levels of each 64 weights over their largest, but for scales rounded to 8 bits."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    blocks = weight.unflatten(-1, (4, 64))
    largest = blocks.abs().amax(-1, keepdim=True)
    levels = torch.tensor(BITSANDBYTES_NF4)
    nearest = (blocks.unsqueeze(-1) / largest.unsqueeze(-1) - levels).abs().argmin(-1)
    expected = (levels[nearest] * largest).flatten(-2)

    restored = restore(pack(weight, "nf4"), "nf4", torch.float32)

    rows = weight.abs().amax(-1, keepdim=True)
    same = (restored - expected).abs() <= rows / 255
    assert same.float().mean() > 0.995  # others lie at the border of two levels
    assert (restored - weight).norm() / weight.norm() == pytest.approx(0.0926, rel=0.02)


def test_a_level_of_every_code_comes_back() -> None:
    levels = torch.tensor(BITSANDBYTES_NF4).repeat(4, 4)

    assert torch.equal(restore(pack(levels, "nf4"), "nf4", torch.float32), levels)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
def test_mxfp4_has_the_values_of_its_standard(value: float) -> None:
    """OCP Microscaling Formats v1.0: E2M1 with a power of two for each 32."""
    block = torch.full((1, 32), -value)
    block[0, 0] = 6.0
    for scale in (0.25, 1.0, 8.0):
        assert torch.equal(
            restore(pack(scale * block, "mxfp4"), "mxfp4", torch.float32), scale * block
        )


@pytest.mark.parametrize(
    ("weights", "bytes_each", "error"),
    [("nf4", 0.5 + 1 / 64, 0.1), ("mxfp4", 0.5 + 1 / 32, 0.13), ("int8", 1 + 4 / 128, 0.01),
     ("fp8", 1 + 4 / 128, 0.03)],
)  # fmt: skip
def test_codes_and_scales_take_their_bytes(
    weights: FrozenWeights, bytes_each: float, error: float
) -> None:
    weight = torch.randn(2, 64, 8192, generator=torch.Generator().manual_seed(1))

    packed = pack(weight, weights)

    size = sum(part.nbytes for part in packed if part is not None)
    assert size / weight.numel() == pytest.approx(bytes_each, rel=0.002)
    restored = restore(packed, weights, torch.float32)
    assert (restored - weight).norm() < error * weight.norm()
    again = restore(pack(restored, weights), weights, torch.float32)
    assert torch.allclose(again, restored, atol=0.02 * float(weight.abs().max()))


def test_zeros_stay_zeros() -> None:
    for weights in ("nf4", "mxfp4", "int8", "fp8"):
        assert not restore(pack(torch.zeros(2, 128), weights), weights, torch.float32).any()


def plan(model: ModelGraph, weights: FrozenWeights = "nf4", **layout: Any) -> Plan:
    made = cases.plan(model, **layout)
    lora = Lora(rank=4, alpha=8.0, weights=weights)
    training = made.training.model_copy(update={"lora": lora})
    return made.model_copy(update={"training": training})


ROWS: dict[str, tuple[str, FrozenWeights, dict[str, Any]]] = {
    "zero 3, recompute full": (
        "mixtral", "nf4", {"data_shard": 2, "zero": 3, "recompute": "full"}
    ),
    "tensor": ("llama", "nf4", {"tensor": 2}),
    "zero 1": ("llama", "mxfp4", {"data_shard": 2, "zero": 1}),
    "zero 2": ("qwen3", "int8", {"data_shard": 2, "zero": 2}),
    "zero 3": ("qwen3", "nf4", {"data_shard": 2, "zero": 3}),
    "replicas": ("reference", "nf4", {"data_replicate": 2}),
    "pipeline": ("mixtral", "nf4", {"pipeline": 2}),
    "zbv": ("llama", "nf4", {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2}),
    "context": ("llama", "fp8", {"context": 2}),
    "mixtral, tensor": ("mixtral", "nf4", {"tensor": 2}),
    "experts": ("mixtral", "nf4", {"data_shard": 2, "zero": 1, "expert": 2}),
    "experts, zero 3": (
        "mixtral", "int8", {"data_shard": 2, "zero": 3, "expert": 2, "recompute": "full"}
    ),
    "mixtral, mxfp4, selective": (
        "mixtral", "mxfp4", {"data_shard": 2, "zero": 3, "recompute": "selective"}
    ),
}  # fmt: skip


@functools.cache
def graph(family: str) -> ModelGraph:
    """Return a model whose halved rows are whole blocks."""
    sizes = {"hidden_size": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_size": 256}
    model = cases.transformer(family)
    experts = model.architecture.experts
    if experts is not None:
        sizes["experts"] = experts.model_copy(update={"ffn_size": 128})
    return cases.transformer(family, **sizes)


@pytest.mark.ranks
@pytest.mark.parametrize("names", some_and_others(ROWS, ["zero 3, recompute full", "tensor"]))
def test_every_plan_trains_beside_packed_weights_like_one_process(names: list[str]) -> None:
    rows = [
        (name, plan(graph(ROWS[name][0]), ROWS[name][1], **ROWS[name][2]), graph(ROWS[name][0]))
        for name in names
    ]
    alone_of = {
        name: train_all([(name, plan(graph(family), weights), graph(family))])[0][0]
        for name, (family, weights, _) in ROWS.items()
        if name in names
    }

    for rank in on_ranks(2, train_all, rows):
        for name, (found, _) in zip(names, rank, strict=True):
            alone = alone_of[name]
            assert found.losses == pytest.approx(alone.losses, rel=1e-5), name
            assert found.norms == pytest.approx(alone.norms, rel=1e-4), name


def test_losses_are_those_of_a_plain_model_with_the_restored_weights() -> None:
    """The adapters are zero at first, so that the loss is the frozen model's."""
    model = graph("mixtral")
    batch = cases.global_tokens(0)
    packed = token_engine(plan(model, recompute="full"), model, device=CPU)
    whole = token_engine(cases.plan(model), model, device=CPU)
    plain = whole.evaluate(batch).loss
    head = whole._parts[0].module.part("head").output
    for module in whole._parts[0].module.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or name == "bias" or module is head:
                continue
            if isinstance(module, torch.nn.Linear) or parameter.ndim == 3:
                parameter.data = restore(pack(parameter.data, "nf4"), "nf4", torch.float32)
    linears = [m for m in packed._parts[0].module.modules() if isinstance(m, PackedLinear)]

    assert len(linears) == 4 * model.architecture.layers
    assert packed.evaluate(batch).loss != pytest.approx(plain, rel=1e-4)
    assert packed.evaluate(batch).loss == pytest.approx(whole.evaluate(batch).loss, rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "rows",
    [
        [("nf4", "none", 0.5)],
        pytest.param(
            [("mxfp4", "full", 0.5), ("fp8", "none", 1.0)], id="others", marks=pytest.mark.matrix
        ),
    ],
)
def test_packed_weights_are_there_once_and_restored_ones_while_they_multiply(
    rows: list[tuple[FrozenWeights, str, float]],
) -> None:
    """The live-memory watch beside the prediction, of a model whose weights outweigh all else."""
    model = wide()
    lora = Lora(rank=2, targets=("query", "value"))
    plans = [
        memory_plan(
            model, lora.model_copy(update={"weights": weights}), precision="bf16", recompute=again
        )
        for weights, again, _ in rows
    ]

    (held,) = on_ranks(1, held_bytes, plans, model)

    blocks = sum(layer.parameters for name, layer in model.chain if name not in ENDS)
    for made, found, (*_, each) in zip(plans, held, rows, strict=True):
        ends = sum(layer.parameters for _, layer in model.chain) - blocks
        assert found.frozen == pytest.approx(each * blocks + 2 * ends, rel=0.01)
        [stage] = predict(made, model, cluster()).stages
        assert stage.peak_memory_bytes == pytest.approx(found.peak, rel=0.02)


FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("llama", {"data_replicate": 4}),
    "zero 1": ("qwen3", {"data_shard": 4, "zero": 1}),
    "zero 2": ("mixtral", {"data_shard": 4, "zero": 2}),
    "zero 3": ("llama", {"data_shard": 4, "zero": 3}),
    "hybrid": ("qwen3", {"data_shard": 2, "data_replicate": 2, "zero": 3}),
    "tensor, pipeline": ("llama", {"tensor": 2, "pipeline": 2}),
    "tensor, zero 3": ("mixtral", {"tensor": 2, "data_shard": 2, "zero": 3}),
    "experts on two, zero 3": ("mixtral", {"data_shard": 4, "zero": 3, "expert": 2}),
    "experts, pipeline": ("mixtral", {"data_shard": 2, "zero": 1, "pipeline": 2, "expert": 2}),
    "context, pipeline": ("qwen3", {"context": 2, "pipeline": 2}),
}


@pytest.mark.ranks
@pytest.mark.matrix
def test_four_ranks_train_beside_packed_weights_like_one_process() -> None:
    rows = [(name, plan(graph(f), **layout), graph(f)) for name, (f, layout) in FOUR.items()]
    alone = {f: train_all([(f, plan(graph(f)), graph(f))])[0][0] for f, _ in FOUR.values()}

    for rank in on_ranks(4, train_all, rows):
        for (name, (family, _)), (found, _) in zip(FOUR.items(), rank, strict=True):
            assert found.losses == pytest.approx(alone[family].losses, rel=1e-5), name
            assert found.norms == pytest.approx(alone[family].norms, rel=1e-4), name
