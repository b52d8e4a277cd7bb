"""Every example trains under three plans as its own plain loop does in one process.

Each under one plan in every run of the suite, under the others in the matrix.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.launch.plan_script import plan_for_script
from meshwright.planner.errors import LaunchError
from tests import notebooks
from tests.parts import some_and_others
from tests.runtime.exact_muon import muon_without_rounding
from tests.runtime.ranks import on_ranks

ROOT = Path(__file__).parents[1]
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


def printed_by_first_engine() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("examples/first_engine.py", run_name="__main__")
    return printed.getvalue()


@pytest.mark.ranks
def test_the_first_example_prints_one_loss_on_any_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    alone = printed_by_first_engine()

    assert re.fullmatch(r"loss \d\.\d{4} on 1 ranks\n", alone)
    assert on_ranks(2, printed_by_first_engine) == [alone.replace("on 1", "on 2"), ""]


@pytest.mark.matrix
def test_a_notebook_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text())
    monkeypatch.chdir(tmp_path)

    assert notebooks.run(notebook) == notebooks.outputs(notebook)
    assert {file.name for file in tmp_path.iterdir()} == {"plan.yaml", "titan.yaml"}


@pytest.mark.matrix
def test_a_script_without_a_plan_is_planned_and_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "run", "--ranks", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}

    done = subprocess.run(
        [*command, str(ROOT / "examples" / "first_engine.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert re.search(r"^loss \d\.\d{4} on 2 ranks$", done.stdout, re.MULTILINE)
    assert (tmp_path / "runs" / "first_engine.plan.yaml").is_file()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise SystemExit('no data here')", "cannot be planned: no data here"),
        ("print('done')", "it ended without making a meshwright.Engine"),
    ],
)
def test_a_script_that_cannot_be_planned_says_why(tmp_path: Path, script: str, words: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)

    with pytest.raises(LaunchError, match=words):
        plan_for_script(file, [], ranks=2, into=tmp_path / "runs" / "plan.yaml")
