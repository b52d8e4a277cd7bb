"""Adapters of four models under seven layouts on one, two and four ranks, as peft trains them.

A recorded model, which has no rules of ours, is trained as its own code says; its matrices are
packed where nothing else reads them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import FrozenWeights, Lora
from meshwright.runtime.engine.traced_transformer import graph_of_library
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.optim.learning_rate import learning_rate
from meshwright.runtime.techniques.packed_weights import pack, restore
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import STEPS, train_all
from tests.runtime.techniques.test_frozen_memory import held_bytes

CPU = torch.device("cpu")
RECORDED = "glm4"
SIZES: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0, "use_cache": False},
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "plain": {},
        "one micro-batch": {"micro_batches": 1},
        "eight micro-batches": {"micro_batches": 8},
        "recompute full": {"recompute": "full"},
        "recompute selective": {"recompute": "selective"},
        "activations on the host": {"activations": "offload"},
        "optimizer on the host": {"offload": "optimizer"},
    },
    2: {
        "replicas": {"data_replicate": 2},
        "zero 1": {"data_shard": 2, "zero": 1},
        "zero 2": {"data_shard": 2, "zero": 2},
        "zero 3": {"data_shard": 2, "zero": 3},
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": 2},
        "context": {"context": 2},
    },
    4: {
        "replicas": {"data_replicate": 4},
        "zero 1, pipeline": {"data_shard": 2, "zero": 1, "pipeline": 2},
        "zero 2": {"data_shard": 4, "zero": 2, "recompute": "full"},
        "zero 3": {"data_shard": 4, "zero": 3},
        "tensor, zero 3": {"tensor": 2, "data_shard": 2, "zero": 3},
        "tensor, pipeline": {"tensor": 2, "pipeline": 2},
        "context, zero 3": {"context": 2, "data_shard": 2, "zero": 3},
    },
}


def folder_of(parent: Path, width: int) -> Path:
    """Return a folder with the configuration of the recorded model."""
    path = parent / f"{RECORDED}-{width}"
    if not path.exists():
        sizes = {"hidden_size": width, "head_dim": width // 4, "intermediate_size": 2 * width}
        transformers.AutoConfig.for_model(RECORDED, **SIZES, **sizes).save_pretrained(path)
    return path


@functools.cache
def graph(family: str, parent: Path, width: int = 128) -> ModelGraph:
    """Return a model whose halved rows are whole blocks."""
    if family == RECORDED:
        return graph_of_library(f"{folder_of(parent, width)}:recorded", seq_len=cases.SEQ_LEN)
    sizes = {"hidden_size": width, "heads": 4, "kv_heads": 2, "head_dim": width // 4}
    experts = cases.transformer(family).architecture.experts
    if experts is not None:
        sizes["experts"] = experts.model_copy(update={"ffn_size": width})
    return cases.transformer(family, **sizes, ffn_size=2 * width)


def plan(model: ModelGraph, weights: FrozenWeights, **layout: Any) -> Plan:
    """Return a plan of adapters beside all Linears of the blocks."""
    whole = cases.plan(model, **layout)
    lora = Lora(rank=4, alpha=8.0, weights=weights)
    return whole.model_copy(update={"training": whole.training.model_copy(update={"lora": lora})})


def library_model(model: ModelGraph) -> nn.Module:
    """Return the library's model with the first values that an engine has."""
    whole = token_engine(cases.plan(model), model, device=CPU)
    if model.architecture is None:
        torch.manual_seed(whole.plan.training.seed)
        path = model.source.removesuffix(":recorded")
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(path)
        )
    library = transformers.AutoModelForCausalLM.from_config(whole._model.adapter.config)
    state = whole.state()
    for name, value in library.named_parameters():
        value.data.copy_(state[f"model.{name}"].reshape(value.shape))
    library.tie_weights()
    return library


def peft_losses(
    model: ModelGraph, weights: FrozenWeights, dtype: torch.dtype = torch.float32
) -> list[float]:
    """Return losses of the library's model with peft's adapters in a plain loop.

    Its frozen matrices are those that packing leaves, stored and multiplied in `dtype`; adapters
    are fp32, as peft keeps them.
    """
    adapters = plan(model, weights)
    library = library_model(model)
    inside = [
        (module, name)
        for path, module in library.named_modules()
        for name, value in module._parameters.items()
        if value is not None and "layers." in path
        if (isinstance(module, nn.Linear) and name == "weight") or value.ndim == 3
    ]
    for module, name in inside if weights != "full" else ():
        value = module._parameters[name]
        value.data = restore(pack(value.data.to(dtype), weights), weights, dtype)
    library.to(dtype)
    lora = adapters.training.lora
    names = sorted({path.rpartition(".")[2] for path, m in library.named_modules()
                    if isinstance(m, nn.Linear) and "layers." in path})  # fmt: skip
    adapted = get_peft_model(
        library, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names)
    )
    ours = token_engine(adapters, model, device=CPU).state()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            path = name.removeprefix("base_model.model.").replace(".default.weight", "")
            path = path.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
            parameter.data.copy_(ours[f"model.{path}"])
    trained = [p for p in adapted.parameters() if p.requires_grad]
    settings = adapters.training
    optimizer = torch.optim.AdamW(
        trained,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = cases.library_loss(adapted, cases.global_tokens(step))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


FAMILIES = ("llama", "qwen3", "mixtral", RECORDED)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@functools.cache
def expected_losses(
    family: str, parent: Path, weights: FrozenWeights, dtype: torch.dtype = torch.float32
) -> list[float]:
    return peft_losses(graph(family, parent), weights, dtype)


def check_losses(
    family: str,
    ranks: int,
    names: Iterable[str],
    weights: FrozenWeights,
    parent: Path,
    precision: str = "fp32",
) -> None:
    """Check losses of layouts beside those of peft."""
    model = graph(family, parent)
    dtype, bound = (torch.float32, 1e-5) if precision == "fp32" else (torch.bfloat16, BF16_BOUND)
    rows = [
        (name, plan(model, weights, precision=precision, **LAYOUTS[ranks][name]), model)
        for name in names
    ]

    every = on_ranks(ranks, train_all, rows)

    expected = expected_losses(family, parent, weights, dtype)
    for runs in every:
        for (name, *_), (run, _) in zip(rows, runs, strict=True):
            assert run.losses == pytest.approx(expected, rel=bound), name


BF16_BOUND = math.sqrt(10 * 3) * 2**-9
"""A number in bf16 is within 2^-9 of what was rounded; a block rounds about ten times on the way
to its output, three blocks follow each other, and independent errors add as squares.  The logits
of first values are about 1, as is what their errors move a loss by at most."""


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("family", "ranks", "name"), [("llama", 1, "plain"), ("llama", 2, "zero 3")]
)
def test_packed_weights_train_as_peft_in_a_plain_loop(
    family: str, ranks: int, name: str, parent: Path
) -> None:
    check_losses(family, ranks, [name], "nf4", parent)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["full", "nf4"])
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.matrix
def test_seven_layouts_train_as_peft_in_a_plain_loop(
    family: str, ranks: int, weights: FrozenWeights, precision: str, parent: Path
) -> None:
    check_losses(family, ranks, LAYOUTS[ranks], weights, parent, precision)


@pytest.mark.ranks
@pytest.mark.parametrize("weights", ["full", "nf4"])
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.matrix
def test_frozen_weights_are_on_ranks_once(
    family: str, ranks: int, weights: FrozenWeights, parent: Path
) -> None:
    """The live-memory watch beside counts of parameters, of models that weights outweigh."""
    model = graph(family, parent, 512)
    library = library_model(model)
    packed, rows, others = 0, 0, 0
    for path, module in library.named_modules():
        for name, value in module._parameters.items():
            matrix = isinstance(module, nn.Linear) and name == "weight"
            if value is None:
                continue
            if "layers." in path and weights == "nf4" and (matrix or value.ndim == 3):
                packed, rows = packed + value.numel(), rows + value.numel() // value.shape[-1]
            else:
                others += value.numel()
    whole, scales = packed / 2 + 2 * others, packed / 64 + 4 * rows
    layouts = LAYOUTS[ranks]
    plans = [
        plan(model, weights, precision="bf16", **{"micro_batches": 1, "global_batch": 8, **one})
        for one in layouts.values()
    ]

    every = on_ranks(ranks, held_bytes, plans, model)

    for at, (name, layout) in enumerate(layouts.items()):
        held = [found[at] for found in every]
        divided = layout.get("tensor", 1) * layout.get("pipeline", 1)
        if layout.get("zero") == 3:
            divided *= layout.get("data_shard", 1) * layout.get("context", 1)
        least = most = ranks / divided * whole
        if family == RECORDED:  # what its code says is divided, all else whole on both
            most *= layout.get("tensor", 1)
        frozen = sum(one.frozen for one in held)
        assert 0.98 * least <= frozen <= 1.02 * most, name
        trained = sum(one.trained for one in held)
        between = sum(one.between_steps for one in held)
        if family == RECORDED and "pipeline" in layout:
            continue  # the whole module stays on the host, which is the device here
        # Of adapters a master, moments, a gradient and a copy at most; scales are not divided.
        assert between <= 1.02 * (frozen + ranks * scales) + 5 * trained, name
