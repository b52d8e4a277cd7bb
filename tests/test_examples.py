"""Every example trains under three plans as its own plain loop does in one process."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.exact_muon import muon_without_rounding
from tests.runtime.ranks import on_ranks

EXAMPLES = (
    "image_classifier",
    "gpt_muon",
    "diffusion_unet",
    "gan",
    "two_towers",
    "masked_lm",
    "dpo",
    "with_trainer",
    *(["with_fabric"] if importlib.util.find_spec("lightning_fabric") else []),
)
PLANS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero 3": {"zero": 3},
    "two stages": {"pipeline": 2},
}
Trained = tuple[list[float], dict[str, Tensor]]


def everywhere() -> dict[str, Trained]:
    found = {}
    for name in EXAMPLES:
        for plan, layout in PLANS.items():
            try:
                found[f"{name}, {plan}"] = importlib.import_module(f"examples.{name}").train(layout)
            except BaseException as error:
                error.add_note(f"{name}, {plan}")
                raise
    return found


@pytest.mark.ranks
def test_examples_train_under_any_plan_as_their_plain_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    muon_without_rounding(monkeypatch)
    expected = {name: importlib.import_module(f"examples.{name}").plain() for name in EXAMPLES}

    for found in on_ranks(2, everywhere):
        for case, (losses, weights) in found.items():
            wanted_losses, wanted = expected[case.partition(",")[0]]
            assert losses == pytest.approx(wanted_losses, rel=1e-5), case
            assert weights.keys() == wanted.keys(), case
            for name, value in wanted.items():
                torch.testing.assert_close(
                    weights[name],
                    value,
                    rtol=1e-5,
                    atol=1e-5,
                    msg=f"{case}: {name}",
                )
