"""However parameters lie in memory where they come from, they train the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.training import Training
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.models.safetensors_weights import Weights
from tests.runtime import cases, networks
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, train
from tests.runtime.test_adamw import optimizer_of, update

STEPS = 5


# --- as the runtime makes them ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("how", "taken"),
    [
        ({"cut": None}, lambda whole: whole),
        ({"cut": (0, 1, 2)}, lambda whole: whole[4:]),
        ({"cut": (1, 1, 2)}, lambda whole: whole[:, 3:]),
        ({"cut": (1, 0, 3), "keep": (0, 2, 5)}, lambda whole: whole[2:5, :2]),
        ({"cut": None, "keep": (1, 1, 3)}, lambda whole: whole[:, 1:3]),
        ({"cut": (1, 0, 3), "pieces": 2}, lambda whole: whole[:, [0, 3]]),
    ],
    ids=["whole", "rows", "columns", "kept rows", "kept columns", "pieces"],
)
def test_what_is_read_is_contiguous_and_shares_no_memory(
    how: dict[str, Any], taken: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The file is mapped: a view of it would change when another program writes to the file."""
    whole = torch.arange(48).view(8, 6).to(dtype)
    file = tmp_path / "model.safetensors"
    save_file({"weight": whole}, file)

    part = Weights(tmp_path).read("weight", whole.shape, **how)

    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes
    assert torch.equal(part, taken(whole).float())


@pytest.mark.parametrize(
    "how",
    [
        {"cut": None},
        {"cut": (0, 1, 2)},
        {"cut": (1, 1, 2), "pieces": 2},
        {"cut": (2, 1, 2)},
        {"cut": None, "keep": (1, 1, 5)},
        {"cut": None, "keep": (2, 1, 2)},
    ],
    ids=str,
)
def test_experts_are_contiguous(how: dict[str, Any], tmp_path: Path) -> None:
    experts = {
        f"mlp.experts.{expert}.{name}_proj.weight": torch.randn(4, 6)
        for expert in range(2)
        for name in ("gate", "up")
    }
    save_file(experts, tmp_path / "model.safetensors")

    part = Weights(tmp_path).read("mlp.experts.gate_up_proj", torch.Size((2, 8, 6)), **how)

    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes


# --- as a user's modules make them ------------------------------------------------------------


@functools.cache
def graph(name: str) -> ModelGraph:
    return graph_of_factory(f"{networks.__file__}:{name}", seq_len=cases.SEQ_LEN)


@functools.cache
def plain_losses() -> list[float]:
    """Train the same modules with nothing of ours: torch's AdamW, parameter after parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*networks.strided())
    plan = cases.plan(graph("strided"))
    own = plan.training
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": own.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (own.beta1, own.beta2)
    adamw = torch.optim.AdamW(groups, betas=betas, eps=own.epsilon, foreach=False, fused=False)
    losses = []
    for step in range(STEPS):
        for group in adamw.param_groups:
            group["lr"] = own.learning_rate * min(1.0, (step + 1) / own.warmup_steps)
        tokens = cases.global_tokens(step)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), own.clip_norm, foreach=False)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.spread(2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"offload": "optimizer"},
        {"data_replicate": 2},
        {"data_replicate": 2, "precision": "tf32", "offload": "parameters"},
        {"data_shard": 2, "zero": 3, "offload": "optimizer"},
        {"pipeline": 2, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_a_users_strides_train_like_torch_alone(layout: dict[str, Any]) -> None:
    plan = cases.plan(graph("strided"), **layout)

    for run in on_ranks(plan.mesh.devices, train, plan, graph("strided"), STEPS):
        assert run.losses == pytest.approx(plain_losses(), rel=TOLERANCE)


def test_parameters_of_one_memory_are_refused() -> None:
    """Where data parallelism moves parameters they would part, elsewhere each would move both."""
    with pytest.raises(DocumentError, match=r"1\.out\.weight and 0\.table\.weight share memory"):
        graph("one_memory")
    with pytest.raises(DocumentError, match=r"1\.out\.bias: .*several times in the same memory"):
        graph("one_number")


# --- as the optimizer takes them --------------------------------------------------------------


def stepped(parameter: torch.Tensor, grad: torch.Tensor, offload: str = "none") -> None:
    optimizer = optimizer_of([parameter], Training(learning_rate=0.1, clip_norm=0), offload)
    update(optimizer, [grad])


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_gradient_that_lies_in_another_way_updates_the_same_elements(offload: str) -> None:
    rows = torch.randn(4, 6)
    by_columns = torch.randn(6, 4).t()
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for parameter, grad in (
        (rows, by_columns),
        (by_columns, rows.clone()),
        (last, torch.randn(2, 3, 4, 4)),
        (torch.randn(1, 5), torch.randn(5, 1).t()),  # a stride that no element uses is none
    ):
        expected = parameter.clone(memory_format=torch.contiguous_format)

        stepped(parameter, grad.clone(), offload)
        stepped(expected, grad.clone(memory_format=torch.contiguous_format))

        assert torch.equal(parameter, expected)


def test_a_parameter_between_whose_elements_others_lie_is_refused() -> None:
    for parameter in (torch.randn(4, 12)[:, :6], torch.randn(4, 1).expand(4, 6)):
        before = parameter.clone()
        with pytest.raises(LaunchError, match=r"0: .*strides"):
            stepped(parameter, torch.ones(4, 6))
        assert torch.equal(parameter, before)
