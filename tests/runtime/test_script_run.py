"""`meshwright run` starts a script on a plan's ranks, and goes on when a rank is killed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.scripts import run_script
from planner.document import write
from planner.errors import LaunchError
from runtime.script_engine import Engine

SCRIPT = '''
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import meshwright

class Seen:
    """How many steps the loop has done, and what it was told."""
    def __init__(self):
        self.steps = []
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = list(state["steps"])

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)

def loss(out, batch):
    return (out - batch[1]).square().sum(), out.numel()

def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

def train(folder=None, steps=6):
    engine = meshwright.Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    seen = Seen()
    extra = {"seen": seen, "rate": torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)}
    if folder:
        engine.resume(folder, extra=extra)
    while engine.steps < steps:
        killed = folder and engine.steps == 4 and engine.slice_rank == 1
        if killed and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step(engine.slice(batch_of(engine.steps)))
        extra["rate"].step()
        seen.steps.append(engine.steps)
        if folder and engine.steps % 3 == 0:
            engine.save(folder, extra=extra)
    return engine, seen

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    engine, seen = train(folder)
    weights = engine.state_dict()
    if engine.leads:
        left = {"weights": weights, "seen": seen.steps, "told": sys.argv[2:]}
        torch.save(left, folder / "end.pt")
'''


@pytest.mark.ranks
def test_a_killed_rank_costs_no_step_and_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    space: dict[str, object] = {"__name__": "train"}
    exec(compile(SCRIPT, "train.py", "exec"), space)
    plain, _ = space["train"]()  # type: ignore[operator]
    expected = plain.state_dict()
    batch, loss = space["batch_of"](0), space["loss"]  # type: ignore[operator]
    two = meshwright.plan(
        space["build"],  # type: ignore[arg-type]
        "local:2",
        batch=batch,
        loss=loss,  # type: ignore[arg-type]
        global_batch=8,
        fix=["zero=3"],
    )
    assert two.mesh.data_shard == 2
    write(two, tmp_path / "plan.yaml")

    done = run_script(
        str(tmp_path / "plan.yaml"),
        str(script),
        [str(tmp_path), "--more", "3"],
        output=str(tmp_path / "out"),
        restarts=1,
    )

    left = torch.load(tmp_path / "end.pt", weights_only=True)
    assert left["told"] == ["--more", "3"]
    assert left["seen"] == [1, 2, 3, 4, 5, 6]
    for name, value in expected.items():
        torch.testing.assert_close(left["weights"][name], value, rtol=1e-5, atol=1e-6)
    assert done.run.restarts == 1
    assert [record.step for record in done.run.steps] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().err
    assert re.search(r"meshwright: step \d, loss \d+\.\d{4}, \d.* per step\n", said)
    assert f"meshwright: step 6, loss {done.run.steps[-1].loss:.4f}, " in said
    assert "rank 1 was killed by SIGKILL after step 4; starting all ranks again (1 of 1)" in said
    (row,) = done.rows
    assert (row.quantity, row.unit, row.measured) == ("step time", "s", done.run.step_time_s)
    assert row.predicted == meshwright.predict(two).step_time_s


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    layer = Engine(
        lambda: torch.nn.Linear(2, 2),
        loss=lambda out, batch: out.sum(),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        batch=torch.zeros(2, 2),
    )
    write(layer.plan, tmp_path / "plan.yaml")

    with pytest.raises(LaunchError, match="is no file; name the script"):
        run_script(str(tmp_path / "plan.yaml"), str(tmp_path / "none.py"), output=str(tmp_path))
    assert "MESHWRIGHT_PLAN" not in os.environ
