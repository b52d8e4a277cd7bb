"""What `plan` answers, `launch` runs: of each family, `next` says launch if launch accepts it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.api import launched_model
from meshwright.api.launched_model import launch_need
from meshwright.cli import app
from meshwright.planner.architectures.architecture import SUPPORTED
from meshwright.planner.catalog import models
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.runtime.models.families import FAMILIES
from tests.runtime import families

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 32, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}
_HEAD = {**SIZES, "head_dim": 8}
_GPTJ = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32}
_MPT = {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}
WITHOUT_ADAPTER: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_head": 4, "n_layer": 2},
    "cohere": _HEAD,
    "falcon": SIZES,
    "gpt_neox": SIZES,
    "gptj": {**_GPTJ, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 1},
    "llama4_text": {
        **{**SIZES, "intermediate_size": 48, "intermediate_size_mlp": 64, "num_local_experts": 2},
        **{"interleave_moe_layer_step": 1, "attention_chunk_size": 16},
    },
    "minimax_m2": {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "mpt": _MPT,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "vit": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
}
"""Sizes of each family that is planned and has no adapter."""
RECORDED = [name for name in WITHOUT_ADAPTER if name not in ("bert", "vit")]


def folder_of(family: str, path: Path) -> Path:
    """Return a folder with the config.json of a small model of the library."""
    import transformers

    if family in families.FAMILIES:
        config = families.FAMILIES[family]()
    else:
        config = transformers.AutoConfig.for_model(family, **WITHOUT_ADAPTER[family])
    config.save_pretrained(path / family)
    return path / family


def next_after(model: str, output: Path, *more: str) -> str:
    """Return what `plan` says to do next, in one line."""
    words = ["plan", model, "--cluster", "local:2", "--seq-len", "16", "-o", str(output), *more]
    answer = CliRunner().invoke(app(), words)
    assert answer.exit_code == 0, answer.exception
    return " ".join(answer.output.rpartition("\nnext ")[2].split())


def is_launched(plan: Path) -> bool:
    """Tell whether launch accepts a plan, as far as it looks before a rank starts."""
    return (
        CliRunner().invoke(app(), ["launch", str(plan), "--dry-run", "--steps", "1"]).exit_code == 0
    )


def test_every_family_that_is_planned_is_in_a_table() -> None:
    assert set(SUPPORTED) - set(FAMILIES) == set(WITHOUT_ADAPTER)
    assert set(FAMILIES) <= set(families.FAMILIES)


def _check_next(family: str, path: Path) -> str:
    plan = path / "plan.yaml"
    then = next_after(str(folder_of(family, path)), plan)
    assert then.startswith("meshwright launch") == is_launched(plan), then
    return then


@pytest.mark.parametrize("family", ["falcon", "bert", "vit", "llama", "gpt2"])
def test_next_says_launch_if_launch_accepts_the_plan(family: str, tmp_path: Path) -> None:
    then = _check_next(family, tmp_path)

    assert then.startswith("meshwright launch") == (family not in ("bert", "vit"))


@pytest.mark.matrix
@pytest.mark.parametrize("family", sorted({*FAMILIES, *RECORDED} - {"falcon", "llama", "gpt2"}))
def test_next_says_launch_of_every_other_family(family: str, tmp_path: Path) -> None:
    assert _check_next(family, tmp_path).startswith("meshwright launch")


def _hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make modules look as if they were not installed."""
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *at: None if name in names else find(name, *at)
    )


@pytest.mark.parametrize("lacking", [("torch",), ("transformers",), ("torch", "transformers")])
def test_a_family_that_cannot_be_recorded_here_says_what_launch_needs(
    lacking: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("falcon", tmp_path)
    _hide(monkeypatch, *lacking)

    then = next_after(str(folder), tmp_path / "plan.yaml")

    assert f"where {' and '.join(lacking)} can be imported" in then
    assert not is_launched(tmp_path / "plan.yaml")


def test_a_large_layer_is_recorded_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("falcon", tmp_path)
    monkeypatch.setattr(launched_model, "MOST_TRIED", 1000)

    then = next_after(str(folder), tmp_path / "plan.yaml")

    assert f"to launch it: meshwright plan {folder}:recorded" in then
    assert not is_launched(tmp_path / "plan.yaml")


def test_what_the_library_refuses_is_planned_by_its_figures_with_the_reason(tmp_path: Path) -> None:
    folder = folder_of("falcon", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_dropout": "much"}))

    then = next_after(str(folder), tmp_path / "plan.yaml", "--explain")

    assert then.startswith("meshwright show")
    assert not is_launched(tmp_path / "plan.yaml")


@pytest.mark.matrix
def test_a_recorded_encoder_is_not_offered_to_launch(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = {"model_type": "bert", "intermediate_size": 16, "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = f"{tmp_path}:recorded"
    then = next_after(source, tmp_path / "plan.yaml", "--seq-len", "16")
    assert "set is_decoder: true" in then
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    then = next_after(source, tmp_path / "plan.yaml", "--seq-len", "16")
    assert then.startswith("meshwright launch")


def test_names_of_the_catalogue_say_which_file_is_lacking() -> None:
    """Of every name: a need for each family without an adapter, and for no other."""
    for name in models():
        graph = resolve_model(name)
        family = graph.architecture.family if graph.architecture else ""
        if family in FAMILIES:
            continue
        need = launch_need(graph) or ""
        assert ("config.json" if family not in ("bert", "vit") else "own script") in need, name


def test_plans_for_other_frameworks_are_of_figures(tmp_path: Path) -> None:
    then = next_after(
        str(folder_of("gpt_neox", tmp_path)), tmp_path / "p.yaml", "--framework", "megatron"
    )

    assert then.startswith("meshwright export")
    assert ":recorded" not in (tmp_path / "p.yaml").read_text()
