"""One package: files of a user that are called planner, runtime, profiler or tests hide nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKS = ("planner", "runtime", "profiler")
COMMANDS = """\
from meshwright.cli import main

EIGHT = ["--cluster", "8xh100-sxm-80gb"]
for command in (
    ["plan", "gpt2", "--cluster", "2xv100-sxm-16gb", "--global-batch", "8", "-o", "plan.yaml"],
    ["show", "plan.yaml"],
    ["predict", "plan.yaml"],
    ["compare", "plan.yaml", "plan.yaml"],
    ["launch", "--help"],
    ["export", "plan.yaml", "--to", "megatron"],
    ["whatif", "--model", "gpt2", "--clusters", "2xv100-sxm-16gb,1xa100-sxm-80gb"],
    ["catalog", "models"],
    ["watch", "--help"],
    ["tune", "--help"],
    ["profile", "--help"],
    ["import", "--help"],
    ["validate", "--help"],
    ["calibrate", "--help"],
    ["solve", "--help"],
    ["run", "--help"],
):
    assert main(command) == 0, command
"""
SCRIPT = """\
import meshwright
import torch
from torch import nn

plan = meshwright.plan("gpt2", "2xv100-sxm-16gb", global_batch=8)
assert meshwright.predict(plan).step_time_s > 0
batch = torch.randn(4, 3), torch.randn(4, 1)
engine = meshwright.Engine(
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
    loss=lambda output, batch: ((output - batch[1]).square().sum(), output.shape[0]),
    inputs=lambda batch: (batch[0],),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch=batch,
)
assert engine.step(batch).loss > 0
import planner, runtime, profiler  # the user's own
assert planner.MINE and runtime.MINE and profiler.MINE
"""


@pytest.fixture(params=["checkout", "wheel"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder from which meshwright is imported: this one, or all files of a wheel."""
    if request.param == "checkout":
        return ROOT
    folder = tmp_path / "site"
    shutil.copytree(ROOT / "meshwright", folder / "meshwright")  # and what is compiled already
    assert not any((folder / "meshwright" / name).is_symlink() for name in LINKS)
    return folder


@pytest.mark.long("checkout-commands", "wheel-script")
@pytest.mark.parametrize("code", [COMMANDS, SCRIPT], ids=["commands", "script"])
def test_names_of_a_users_files_hide_nothing(site: Path, code: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name in ("runtime", "tests"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("MINE = True\n")
    for name in ("planner.py", "profiler.py"):
        (folder / name).write_text("MINE = True\n")
    (folder / "train.py").write_text(code)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}

    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
