"""Every field of a family's configuration trains as in the library, or is refused by its name.

The oracle is the library's own class in eval mode, whose loss and gradients an odd value changes or
does not.  `make test` tries the fields that differ here from the library's layers, `make matrix`
odd values of every field of every family.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models import config_fields as library_fields
from tests.runtime import cases, families
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
PADDING = 65
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fields-")


@functools.cache
def published(family: str) -> Path:
    folder = Path(_home().name) / family
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(families.FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def changed(family: str, folder: Path, **fields: Any) -> Path:
    """Copy a model's folder with other fields in its config.json."""
    shutil.copytree(published(family), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def tokens() -> Tensor:
    found = cases.global_tokens(0)
    found[:, ::3] = PADDING
    return found


def library(folder: Path) -> tuple[float, float]:
    """Return loss and gradient norm of the library, its loss of routers too if it has one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    made = model(input_ids=tokens()[:, :-1], use_cache=False)
    loss = functional.cross_entropy(made.logits.flatten(0, 1), tokens()[:, 1:].flatten())
    if isinstance(routers := getattr(made, "aux_loss", None), Tensor):
        loss = loss + model.router_aux_loss_coef * routers
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.nn.utils.get_total_norm(grads).item()


def first_step(plan: Plan, graph: ModelGraph, folder: Path) -> tuple[float, float]:
    engine = token_engine(plan, graph, device=CPU, weights=folder)
    own = plan.samples_of(engine.slice_rank)
    result = engine.step(tokens()[own.start : own.stop])
    return result.loss, result.grad_norm


def ours(folder: Path, **layout: Any) -> tuple[float, float]:
    graph = resolve_model(str(folder))
    return first_step(cases.plan(graph, clip_norm=0.0, **layout), graph, folder)


def alike(found: tuple[float, float], expected: tuple[float, float]) -> bool:
    return found == (pytest.approx(expected[0], rel=1e-6), pytest.approx(expected[1], rel=2e-5))


# --- the class: every field is known ------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_field_of_a_family_is_in_one_set(family: str) -> None:
    config = families.FAMILIES[family]()
    sets = (
        library_fields.SIZES,
        library_fields.EXECUTED,
        library_fields.WITHOUT_EFFECT,
        set(library_fields.DRAWS),
        {"use_bidirectional_attention", "add_cross_attention", "output_router_logits"},
    )

    counts = {f.name: sum(f.name in one for one in sets) for f in dataclasses.fields(config)}

    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_a_field_that_nobody_knows_is_refused_by_name() -> None:
    @dataclasses.dataclass
    class Config:
        vocab_size: int = 8
        z_loss_coef: float = 0.0
        layer_drop: float = 0.0

    assert list(library_fields.unexecuted_fields(Config(), [])) == []
    (said,) = library_fields.unexecuted_fields(Config(z_loss_coef=0.1), [])
    assert said == "z_loss_coef is 0.1, which is not executed here; set it to 0.0"


# --- fields that the library's whole model reads ------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_vector_of_the_padding_learns_as_in_the_library(family: str, tmp_path: Path) -> None:
    folder = changed(family, tmp_path / "model", pad_token_id=PADDING)

    expected = library(folder)

    assert alike(ours(folder), expected)
    assert alike(library(published(family)), expected) == (family == "gpt2")


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data_shard": 2, "zero": 3}])
@pytest.mark.long("layout0")
def test_the_padding_is_on_the_rank_that_has_its_row(
    layout: dict[str, int], tmp_path: Path
) -> None:
    folder = changed("llama", tmp_path / "model", pad_token_id=PADDING)
    graph = resolve_model(str(folder))

    found = on_ranks(2, first_step, cases.plan(graph, clip_norm=0.0, **layout), graph, folder)

    expected = library(folder)
    assert all(alike(one, expected) for one in found)


def test_noise_of_routers_is_off_as_dropout_is(tmp_path: Path) -> None:
    folder = changed("mixtral", tmp_path / "model", router_jitter_noise=0.3, attention_dropout=0.4)

    assert alike(ours(folder), library(folder))
    assert library_fields.drawn({"router_jitter_noise": 0.3, "attn_pdrop": 0.0}) == {
        "router_jitter_noise": 0.3
    }


def test_first_values_of_the_padding_are_zeros(tmp_path: Path) -> None:
    folder = changed("llama", tmp_path / "model", pad_token_id=PADDING)
    (folder / "model.safetensors").unlink()
    graph = resolve_model(str(folder))

    state = token_engine(cases.plan(graph), graph, device=CPU).state()

    vectors = state["model.model.embed_tokens.weight"]
    assert not vectors[PADDING].any()
    assert vectors[PADDING + 1].any()


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("mixtral", {"output_router_logits": True}, "output_router_logits is true, which adds"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits is true, which adds"),
        ("gpt_oss", {"output_router_logits": True}, "output_router_logits is true, which adds"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is Tr"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
        ("llama", {"pad_token_id": 999}, "pad_token_id is 999, and there are 272 tokens"),
        ("qwen3_moe", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config has"),
        ("llama", {"hidden_size": 30}, "transformers refuses the config.json"),
        ("llama", {"tie_word_embeddings": True}, "'lm_head.weight' have different values"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(
    family: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(MeshwrightError, match=said):
        ours(changed(family, tmp_path / "model", **fields))


def test_routers_without_a_factor_have_no_loss(tmp_path: Path) -> None:
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.0}
    folder = changed("mixtral", tmp_path / "model", **fields)

    assert alike(ours(folder), library(folder))


def test_files_of_a_tied_model_may_have_its_one_weight_twice(tmp_path: Path) -> None:
    folder = changed("llama", tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    assert alike(ours(folder), library(folder))


# --- angles that depend on the length of a document ---------------------------------------------


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, counts, starts of rows with short and long documents, and of one alone."""
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(256, (cases.GLOBAL_BATCH, cases.SEQ_LEN + 1), generator=generator)
    starts = torch.zeros(cases.GLOBAL_BATCH, cases.SEQ_LEN + 1, dtype=torch.int64)
    for row, cuts in enumerate([(), (5,), (10,), (9,), (8,), (3, 12), (4, 8), (2, 11)]):
        for cut in cuts:
            starts[row, cut:] = cut
    counts = torch.ones(cases.GLOBAL_BATCH, cases.SEQ_LEN, dtype=torch.bool)
    return found, counts & (starts[:, 1:] == starts[:, :-1]), starts[:, :-1]


def by_document(folder: Path) -> tuple[float, float]:
    """Return the library's loss and norm, each document a batch of its own."""
    found, counts, starts = rows()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.eval()
    total = torch.zeros(())
    for row, kept, begins in zip(found, counts, starts, strict=True):
        for begin in begins.unique().tolist():
            (place,) = torch.where(begins == begin)
            place = place[kept[place]]  # its last token is no input
            if len(place):
                logits = model(row[None, place]).logits[0]
                total = total + functional.cross_entropy(logits, row[place + 1], reduction="sum")
    loss = total / counts.sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return loss.item(), norm.item()


def of_documents(plan: Plan, graph: ModelGraph, folder: Path) -> tuple[float, float]:
    engine = token_engine(plan, graph, device=CPU, weights=folder, documents=True)
    own = plan.samples_of(engine.slice_rank)
    result = engine.step(tuple(whole[own.start : own.stop] for whole in rows()))
    return result.loss, result.grad_norm


def long_rope(family: str, folder: Path) -> Path:
    limit = LONG_ROPE["original_max_position_embeddings"]
    more = {"original_max_position_embeddings": limit} if family == "phi3" else {}
    return changed(family, folder, rope_parameters=LONG_ROPE, **more)


@pytest.mark.parametrize("family", ["phi3", "llama", "mixtral"])
def test_each_document_turns_by_the_factors_of_its_own_length(family: str, tmp_path: Path) -> None:
    folder = long_rope(family, tmp_path / "model")
    graph = resolve_model(str(folder))

    found = of_documents(cases.plan(graph, clip_norm=0.0), graph, folder)

    assert alike(found, by_document(folder))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "layout"), [("phi3", {"pipeline": 2, "recompute": "full"}), ("llama", {"tensor": 2})]
)
@pytest.mark.long("phi3-layout0")
def test_ranks_turn_documents_alike(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    folder = long_rope(family, tmp_path / "model")
    graph = resolve_model(str(folder))

    found = on_ranks(2, of_documents, cases.plan(graph, clip_norm=0.0, **layout), graph, folder)

    expected = by_document(folder)
    assert all(alike(one, expected) for one in found)


def refusal(plan: Plan, graph: ModelGraph, folder: Path) -> str:
    try:
        of_documents(plan, graph, folder)
    except LaunchError as error:
        return str(error)
    return "taken"


@pytest.mark.ranks
def test_context_parallel_ranks_do_not_know_how_long_documents_are(tmp_path: Path) -> None:
    folder = long_rope("llama", tmp_path / "model")
    graph = resolve_model(str(folder))

    said = on_ranks(2, refusal, cases.plan(graph, context=2), graph, folder)

    assert all("plan with context=1, or with seq_len <= 8" in one for one in said)


def test_angles_of_unknown_lengths_are_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = changed(
        "llama", tmp_path / "model", rope_parameters=dynamic, max_position_embeddings=8
    )
    graph = resolve_model(str(folder))

    with pytest.raises(LaunchError, match=r"dynamic turns by angles .* plan with seq_len <= 8"):
        of_documents(cases.plan(graph, clip_norm=0.0), graph, folder)
    assert alike(ours(folder), library(folder))  # one sample is one document


# --- odd values of every field ------------------------------------------------------------------


def odd(name: str, value: Any) -> Iterator[Any]:
    """Yield values that a field does not have."""
    match value:
        case bool():
            yield not value
        case None:
            yield from (PADDING,) if name.endswith("token_id") else (True, 3, 0.5)
        case int():
            yield from (PADDING,) if name.endswith("token_id") else (value + 1, 2 * value)
        case float():
            yield value + 0.25
        case str() if "act" in name:
            yield "relu"
        case list():
            yield value[1:] + value[:1]
        case dict() if "rope_type" in value:
            yield value | {"rope_theta": 3e4}
            yield value | {"rope_type": "linear", "factor": 2.0}
            yield value | {"rope_type": "dynamic", "factor": 2.0}
            yield value | {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_odd_values_train_like_the_library_or_are_refused(family: str, tmp_path: Path) -> None:
    config = families.FAMILIES[family]()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in ("vocab_size", "transformers_version", "dtype"):
        del fields[name]
    tried = [(name, value) for name, old in fields.items() for value in odd(name, old)]
    wrong = []
    for number, (name, value) in enumerate(tried):
        folder = changed(family, tmp_path / str(number), **{name: value})
        try:
            expected = library(folder)
        except Exception:
            continue
        try:
            found = ours(folder)
        except MeshwrightError:
            continue
        if not alike(found, expected):
            wrong.append(f"{name}={value}: {found}, in the library {expected}")
    assert wrong == []
