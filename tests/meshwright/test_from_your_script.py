"""The page "From your script": its diff is that of two scripts, which train alike."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright
from meshwright.planner.documents import document
from meshwright.planner.errors import MeshwrightError
from tests.limits import PATIENCE_S

SCRIPTS = Path(__file__).parent / "scripts"
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
REFERENCE = HOW_TO.parent / "reference"
NANOGPT = SCRIPTS / "nanogpt"
OTHERS = ("engine.py", "fsdp2.py", "with_accelerate.py")
"""What trains nanoGPT's loop on several ranks."""


def difference() -> list[str]:
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in ("ddp.py", "engine.py"))
    return list(difflib.unified_diff(before, after, "before", "after", lineterm="", n=1))


def test_ten_lines_are_new() -> None:
    lines = difference()[2:]
    assert len((SCRIPTS / "ddp.py").read_text().splitlines()) >= 60
    assert sum(line.startswith("+") for line in lines) <= 10


def test_the_page_shows_that_diff() -> None:
    assert "\n".join(difference()[2:]) in (REFERENCE / "script-options.md").read_text()


@pytest.mark.parametrize("other", OTHERS)
def test_the_guide_shows_what_each_way_changes_of_the_loop_of_one_process(other: str) -> None:
    plain, changed = ((NANOGPT / name).read_text().splitlines() for name in ("plain.py", other))
    lines = list(difflib.unified_diff(plain, changed, lineterm="", n=0))[2:]
    page = (HOW_TO / "train-your-script.md").read_text()
    assert "\n".join(lines) in page
    assert sum(line.startswith("+") for line in lines) == 15, "the table says so"


@pytest.mark.ranks
@pytest.mark.long(*OTHERS[1:])
@pytest.mark.parametrize("other", OTHERS)
def test_each_way_trains_the_loop_to_the_weights_of_one_process(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if other == "with_accelerate.py":
        pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(str(NANOGPT))
    monkeypatch.setenv("OUT", str(tmp_path / "plain.pt"))
    runpy.run_path(str(NANOGPT / "plain.py"), run_name="__main__")

    run(f"nanogpt/{other}", OUT=str(tmp_path / "other.pt"), ACCELERATE_USE_CPU="true")

    plain, found = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "other.pt")
    assert found.keys() == plain.keys()
    for name, value in plain.items():  # AdamW makes steps of rounding where gradients are none
        assert (found[name] - value).abs().mean() < 2e-5, name
        assert (found[name] - value).abs().max() < 4e-4, name


def _rank(script: Path, rank: int, environment: dict[str, str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    # A process group that dies with DDP's reducer joins threads while it holds the interpreter,
    # which they may wait for: a rank ends where its group would.
    dist.destroy_process_group = lambda: os._exit(0)
    runpy.run_path(str(script), run_name="__main__")
    os._exit(0)  # a forked child must not run the parent's exit handlers


def run(script: str, **environment: str) -> None:
    """Run a script on two ranks, with what torchrun sets."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    said = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **environment,
    }
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(SCRIPTS / script, at, said)) for at in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(PATIENCE_S)
    assert [one.exitcode for one in ranks] == [0, 0]


def weights(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, as one process without a plan loads it."""
    script = runpy.run_path(str(SCRIPTS / "engine.py"))
    data = script["images"](64)
    engine = meshwright.Engine(
        script["Classifier"],
        loss=lambda out, batch: (out.sum(), len(out)),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
        batch=data[:64],
    )
    engine.load(folder)
    return engine.state_dict()


@pytest.mark.ranks
@pytest.mark.long("replicated", "zero 3")
@pytest.mark.parametrize(
    "fixed",
    [["pp=2"], ["dp=2", "zero=3", "micro_batch=32"], []],
    ids=["staged", "zero 3", "replicated"],
)
def test_both_scripts_train_to_the_same_weights(fixed: list[str], tmp_path: Path) -> None:
    run("ddp.py", OUT=str(tmp_path / "ddp.pt"))
    wanted = torch.load(tmp_path / "ddp.pt")
    said = {}
    if fixed:  # else the script has no plan
        script = runpy.run_path(str(SCRIPTS / "engine.py"))
        example = script["images"](64)[:64]
        plan = meshwright.plan(script["Classifier"], "local:2", batch=example, fix=fixed)
        meshwright.save(plan, tmp_path / "plan.yaml")
        said = {"MESHWRIGHT_PLAN": str(tmp_path / "plan.yaml")}

    run("engine.py", OUT=str(tmp_path / "trained"), **said)

    found = weights(tmp_path / "trained")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_a_plan_of_another_module_is_refused(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPTS / "engine.py"))
    example = script["images"](64)[:64]
    other = meshwright.plan(lambda: script["Classifier"](depth=3), "local:1", batch=example)
    assert isinstance(other, document.Document)
    with pytest.raises(MeshwrightError, match="plan again"):
        meshwright.Engine(
            script["Classifier"],
            other,
            loss=lambda out, batch: (out.sum(), len(out)),
            optimizer=torch.optim.SGD,
            batch=example,
        )
