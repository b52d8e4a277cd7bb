"""Each family's adapter against the library's own model, with weights from a published folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError
from meshwright.planner.frameworks import native_limits as native
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models import safetensors_weights as published_weights
from meshwright.runtime.models.families import FAMILIES, configuration, has_config
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
VARIANTS = [
    *((family, {}) for family in cases.COVERED if family not in ("reference", *cases.MIXED)),
    ("gemma2", {"tied_embeddings": True, "sliding_window": 3}),
    ("llama", {"tied_embeddings": True}),
    ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"sliding_window": 5, "sliding_every": 2}),
    ("qwen3", {"sliding_window": 5, "sliding_every": 3}),
]


def library_model(family: str, changes: dict[str, object]) -> torch.nn.Module:
    config = configuration(cases.architecture(family, **changes), None)
    return AutoModelForCausalLM.from_config(config)


def published(family: str, changes: dict[str, object], folder: Path) -> torch.nn.Module:
    """Write a model of the library's own to a folder, with weights that are not the usual first."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        configuration(cases.architecture(family, **changes), None)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", cases.MIXED)
def test_experts_compute_like_the_library(family: str) -> None:
    """Published experts are merged when they are read, so the weights go the other way here."""
    graph = cases.transformer(family)
    engine = token_engine(cases.plan(graph), graph, device=CPU)
    model = library_model(family, {})
    model.load_state_dict(
        {
            name.removeprefix("model."): value.flatten(1, 2) if value.ndim == 4 else value.clone()
            for name, value in engine.state().items()
            if name.startswith("model.")
        }
    )
    tokens = cases.global_tokens(0)
    expected = cases.library_loss(model, tokens).item()

    assert engine.step(tokens).loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_family_trains_like_the_library(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    graph = cases.transformer(family, **changes)
    plan = cases.plan(graph, clip_norm=0.0)
    model = published(family, changes, tmp_path)
    tokens = cases.global_tokens(0)
    expected = cases.library_loss(model, tokens)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    engine = token_engine(plan, graph, device=CPU, weights=tmp_path)

    result = engine.step(tokens)

    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    names = {n.removeprefix("model.") for n in engine.state() if n.startswith("model.")}
    assert names == {name for name, _ in model.named_parameters()}


@pytest.mark.matrix
def test_first_weights_have_the_library_spread() -> None:
    """Standard deviations of our first weights are those of the library's, kind by kind."""
    torch.manual_seed(0)
    for family in sorted(FAMILIES):
        figures = {"hidden_size": 64, "head_dim": 16, "ffn_size": 128, "vocab_size": 256}
        graph = cases.transformer(family, **figures)
        model = AutoModelForCausalLM.from_config(
            configuration(cases.architecture(family, **figures), None)
        )
        state = token_engine(cases.plan(graph), graph, device=CPU).state()

        for name, parameter in model.named_parameters():
            ours = state[f"model.{name}"]
            few = 4 / parameter.numel() ** 0.5  # two draws of few values lie further apart
            assert ours.std(correction=0).item() == pytest.approx(
                parameter.std(correction=0).item(), rel=max(0.15, few)
            ), name
            mean = pytest.approx(parameter.mean().item(), abs=max(5e-3, 0.02 * few))
            assert ours.mean().item() == mean, name


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen3", {"tensor": 2}),
        ("gpt2", {"pipeline": 2}),
        ("gpt2", {"context": 2}),
        ("mixtral", {"expert": 2, "context": 2}),
        ("qwen3_moe", {"expert": 2, "tensor": 2}),
    ],
)
def test_each_rank_reads_its_own_weights(family: str, axes: dict[str, int], tmp_path: Path) -> None:
    graph = cases.transformer(family)
    published(family, {}, tmp_path)
    alone = token_engine(cases.plan(graph), graph, device=CPU, weights=tmp_path)
    expected = alone.step(cases.global_tokens(0)).loss

    losses = on_ranks(2, first_loss, cases.plan(graph, **axes), graph, tmp_path)

    assert losses == pytest.approx([expected, expected], rel=1e-6)


class Counting:
    """An open file of tensors that counts the bytes of what is taken from it."""

    read_bytes = 0

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __enter__(self) -> Counting:
        self._inside = self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> Any:
        return self._inside.keys()

    def get_slice(self, name: str) -> Any:
        whole = self._inside.get_slice(name)

        class Slice:
            get_shape = whole.get_shape

            def __getitem__(self, index: Any) -> torch.Tensor:
                taken = whole[index]
                Counting.read_bytes += taken.nbytes
                return taken

        return Slice()


def loss_and_bytes(plan: Plan, graph: ModelGraph, folder: Path) -> tuple[float, int]:
    opened = published_weights._open_safetensors
    published_weights._open_safetensors = lambda path: Counting(opened(path))
    try:
        engine = token_engine(plan, graph, device=CPU, weights=folder)
    finally:
        published_weights._open_safetensors = opened
    own = cases.global_tokens(0).chunk(engine.slices)[engine.slice_rank]
    return engine.step(own).loss, Counting.read_bytes


@pytest.mark.spread(1)
@pytest.mark.long("qwen3-changes1-layout1")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("llama", {"tied_embeddings": True}, {"data_shard": 2, "zero": 1}),
        ("qwen3", {}, {"data_shard": 2, "zero": 3, "tensor": 2}),
        ("mixtral", {}, {"data_shard": 2, "zero": 3}),
        ("mixtral", {}, {"data_shard": 4, "zero": 3, "expert": 2}),
    ],
)
def test_ranks_of_zero_read_no_more_than_their_shards(
    family: str, changes: dict[str, Any], layout: dict[str, int], tmp_path: Path
) -> None:
    graph = cases.transformer(family, **changes)
    published(family, changes, tmp_path)
    alone, whole_bytes = loss_and_bytes(cases.plan(graph), graph, tmp_path)
    Counting.read_bytes = 0
    plan = cases.plan(graph, **layout)

    ranks = on_ranks(plan.mesh.devices, loss_and_bytes, plan, graph, tmp_path)

    assert [loss for loss, _ in ranks] == pytest.approx([alone] * len(ranks), rel=1e-5)
    # Tensor ranks read norms and the like all of them; such are below 3 % here.
    read = sum(read_bytes for _, read_bytes in ranks)
    assert whole_bytes <= read <= 1.03 * whole_bytes
    assert max(read_bytes for _, read_bytes in ranks) <= 1.1 * whole_bytes / len(ranks)


def first_loss(plan: Plan, graph: ModelGraph, folder: Path) -> float:
    engine = token_engine(plan, graph, device=CPU, weights=folder)
    return engine.step(cases.global_tokens(0)).loss


def test_a_folder_settles_what_figures_leave_open(tmp_path: Path) -> None:
    figures = cases.architecture("llama")
    config = configuration(figures, None)
    config.rope_parameters["rope_theta"] = 500000.0
    config.rms_norm_eps = 1e-3
    config.save_pretrained(tmp_path)

    for place in (tmp_path, tmp_path / "config.json"):
        assert has_config(place)
        found = configuration(figures, place)
        assert found.rope_parameters["rope_theta"] == 500000.0
        assert found.rms_norm_eps == 1e-3
    assert not has_config(tmp_path / "elsewhere")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    published("llama", {}, tmp_path)
    graph = cases.transformer("llama", ffn_size=64)

    with pytest.raises(LaunchError, match="intermediate_size is 48, and the plan's model has 64"):
        token_engine(cases.plan(graph), graph, device=CPU, weights=tmp_path)


def test_figures_that_the_library_would_not_follow_are_refused() -> None:
    graph = cases.transformer("llama", qk_norm=True)

    with pytest.raises(LaunchError, match=r"layer 'block\.0' has \d+ parameters, and \d+ in"):
        token_engine(cases.plan(graph), graph, device=CPU)


def test_each_family_that_is_offered_has_an_adapter() -> None:
    assert {"reference", *FAMILIES} == set(native.FAMILIES)
