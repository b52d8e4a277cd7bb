"""Every example trains under three plans as its own plain loop does in one process.

Each under one plan in every run of the suite, under the others in the matrix.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parts import some_and_others
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


ROWS = list(itertools.product(EXAMPLES, PLANS))
SOME = [(name, list(PLANS)[at % len(PLANS)]) for at, name in enumerate(EXAMPLES[::3])]


def everywhere(rows: list[tuple[str, str]]) -> dict[str, Trained]:
    found = {}
    for name, plan in rows:
        try:
            train = importlib.import_module(f"examples.{name}").train
            found[f"{name}, {plan}"] = train(PLANS[plan])
        except BaseException as error:
            error.add_note(f"{name}, {plan}")
            raise
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, SOME))
def test_examples_train_under_any_plan_as_their_plain_loops(
    rows: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    muon_without_rounding(monkeypatch)
    expected = {name: importlib.import_module(f"examples.{name}").plain() for name in dict(rows)}

    for found in on_ranks(2, everywhere, rows):
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
