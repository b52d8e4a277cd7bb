"""First values depend on the run's seed and a parameter's name, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.planner.errors import LaunchError
from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models.family_adapter import Weights
from tests.runtime import cases

CPU = torch.device("cpu")


def first_weights(**changes: object) -> dict[str, torch.Tensor]:
    seed = changes.pop("seed", 0)
    graph = cases.transformer(**changes)
    state = token_engine(cases.plan(graph, seed=seed), graph, device=CPU).state()
    return {name: value for name, value in state.items() if name.startswith("model.")}


def test_no_two_parameters_start_alike() -> None:
    matrices = [w for w in first_weights().values() if w.ndim > 1]

    starts = {tuple(w.flatten()[:4].tolist()) for w in matrices}

    assert len(starts) == len(matrices)


def test_a_layer_starts_alike_in_a_deeper_model() -> None:
    shallow, deep = first_weights(layers=2), first_weights(layers=3)

    assert set(shallow) < set(deep)
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def test_another_seed_starts_elsewhere() -> None:
    name = "model.block.0.mlp.up.weight"

    assert not torch.equal(first_weights(seed=1)[name], first_weights(seed=2)[name])


def test_the_random_state_of_the_process_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)

    first_weights()

    assert torch.equal(torch.rand(1), expected)


def test_a_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    save_file({"transformer.w": whole.bfloat16()}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)

    assert torch.equal(weights.read("transformer.w", whole.shape, None), whole)
    assert torch.equal(weights.read("transformer.w", whole.shape, (1, 2, 3)), whole[:, 4:])
    assert torch.equal(weights.read("transformer.w", whole.shape, (0, 0, 2)), whole[:2])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", r"4 bits \(MXFP4\)"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "8 bits"),
        ("model.layers.0.mlp.down_proj.qweight", "packed integers"),
    ],
)
def test_quantised_files_are_refused_before_anything_is_read(
    tmp_path: Path, name: str, says: str
) -> None:
    save_file({"model.norm.weight": torch.ones(4), name: torch.ones(4)}, tmp_path / "x.safetensors")

    with pytest.raises(LaunchError, match=says) as caught:
        Weights(tmp_path)
    assert "dequantizes" in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"has no \*\.safetensors file"):
        Weights(tmp_path)
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(LaunchError, match="has no tensor 'v'"):
        Weights(tmp_path).read("v", torch.Size([2]), None)
    with pytest.raises(LaunchError, match=r"'w' has shape \[2, 3\], and the model needs \[2\]"):
        Weights(tmp_path).read("w", torch.Size([2]), None)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(LaunchError, match="the weights cannot be read"):
        Weights(tmp_path)
