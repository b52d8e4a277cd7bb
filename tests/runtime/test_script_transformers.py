"""Models of transformers train from a script under any plan like a plain loop of one process.

The plain loop knows nothing of the project: the library's own class, a loss and torch's AdamW.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import library_models
from examples.library_models import MODELS, Trained, plain, train
from tests.parts import some_and_others
from tests.runtime.ranks import on_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch": 4},
    {"micro_batch": 2, "zero": 3, "recompute": "full"},
    {"micro_batch": 2, "pipeline": 2},
    {"micro_batch": 2, "pipeline": 2, "schedule": "zb-h1"},
    {"micro_batch": 4, "zero": 2},
]
ROWS = [(name, at) for name in MODELS for at in range(len(LAYOUTS))]
SOME = [("t5", 2)]


@functools.cache
def plainly(name: str) -> Trained:
    return plain(name)


def trained(rows: list[tuple[str, int]]) -> list[Trained]:
    return [train(name, LAYOUTS[at]) for name, at in rows]


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, SOME))
def test_models_of_transformers_train_like_a_plain_loop(rows: list[tuple[str, int]]) -> None:
    for rank in on_ranks(2, trained, rows):
        for (name, at), (found, state) in zip(rows, rank, strict=True):
            losses, weights = plainly(name)
            assert found == pytest.approx(losses, rel=1e-5), (name, LAYOUTS[at])
            for key, weight in weights.items():
                torch.testing.assert_close(
                    state[key], weight, rtol=1e-4, atol=1e-5, msg=f"{name}, {LAYOUTS[at]}: {key}"
                )


ROOT = Path(__file__).parents[2]


PAGES = {
    "bert": ("encoders", "BERT"),
    "vit": ("encoders", "ViT"),
    "t5": ("encoder-decoders", "T5"),
    "whisper": ("encoder-decoders", "Whisper"),
    "mamba2": ("mamba2", ""),
}
"""The page of each model and the beginning of its section; a page of one model is its section."""


def blocks(name: str, language: str) -> list[str]:
    page, title = PAGES[name]
    text = (ROOT / "docs" / "how-to" / f"train-{page}.md").read_text()
    if title:
        (text,) = [part for part in text.split("\n## ") if part.startswith(title)]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", MODELS)
def test_a_page_has_the_code_and_the_losses_of_its_example(name: str) -> None:
    source = inspect.getsource(library_models)
    losses, _ = plainly(name)
    counts = [int((MODELS[name].batch(at)["targets"] >= 0).sum()) for at in range(len(losses))]

    for block in blocks(name, "python")[:2]:
        assert block in source
    assert blocks(name, "text") == [
        "".join(
            f"step {at} loss {loss:.4f} of {count} targets\n"
            for at, (loss, count) in enumerate(zip(losses, counts, strict=True))
        )
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_commands_of_a_page_print_its_losses(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (commands,) = blocks(name, "bash")
    found = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": ""}

    plan, *trainings = commands.splitlines()
    subprocess.run(plan, shell=True, cwd=tmp_path, env={**os.environ, **found}, check=True)

    assert len(trainings) == 2
    for training in trainings:
        done = subprocess.run(
            training,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, **found},
            check=True,
            capture_output=True,
            text=True,
        )
        shown = [line for line in done.stdout.splitlines() if re.match(r"step \d", line)]
        assert shown == blocks(name, "text")[0].splitlines()
