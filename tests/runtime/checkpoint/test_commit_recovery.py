"""A save whose files were whole when its ranks died counts; one that lacks a byte never does."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshwright.planner.documents.model import ModelGraph  # noqa: E402
from meshwright.planner.documents.plan import Plan  # noqa: E402
from meshwright.planner.errors import LaunchError  # noqa: E402
from meshwright.runtime.checkpoint import checkpoint  # noqa: E402
from meshwright.runtime.checkpoint import commit_recovery as unfinished  # noqa: E402
from meshwright.runtime.checkpoint import shard_manifest as parts  # noqa: E402
from meshwright.runtime.checkpoint.storage import TensorWriter  # noqa: E402
from meshwright.runtime.checkpoint.writer import Saver  # noqa: E402
from meshwright.runtime.engine.engine import Engine  # noqa: E402
from meshwright.runtime.launch.training_loop import token_engine  # noqa: E402
from meshwright.runtime.run import run_folder as run  # noqa: E402
from meshwright.runtime.run.locks_and_signals import alone_in  # noqa: E402
from tests.limits import PATIENCE_S  # noqa: E402
from tests.runtime import cases  # noqa: E402
from tests.runtime.checkpoint.test_weight_export import own, progress  # noqa: E402
from tests.runtime.ranks import on_ranks  # noqa: E402
from tests.runtime.rooms import Room, plan_of  # noqa: E402
from tests.runtime.test_damage import flipped, removed, renamed, truncated, zeroed  # noqa: E402

MOMENTS = {
    "a rank, before it says that it is done": (1, parts, "write"),
    "rank 0, before the index is written": (0, TensorWriter, "finish"),
    "rank 0, before meta.json is written": (0, checkpoint, "finish"),
    "rank 0, before the folder has its name": (0, checkpoint, "let_count"),
}
PENDING = (
    "config.json",
    "model.yaml",
    "plan.yaml",
    "rank-00000.bin",
    "rank-00001.bin",
)
RECORDS = ("meta.json", "part-00000.json", "part-00001.json")


def kill(*_: object, **__: object) -> None:
    """End this process, when the parts of all ranks are on the disk."""
    while len(list(FOLDER.glob(f".step-000002*{parts.SUFFIX}/part-*.json"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def then_kill(action: Callable[..., None]) -> Callable[..., None]:
    def both(*args: object) -> None:
        action(*args)
        kill()

    return both


FOLDER = Path()


def two_steps(plan: Plan, model: ModelGraph, folder: str, moment: str | None) -> None:
    """Save after each of two steps; a rank dies in the second save, at a moment."""
    global FOLDER  # noqa: PLW0603 - of a forked process
    FOLDER = Path(folder)
    engine = token_engine(plan, model, device=torch.device("cpu"))
    saver = Saver(FOLDER, plan=plan, model=model, run="r", config=engine.configuration())
    for step in (1, 2):
        engine.step(own(engine, step))
        if step == 2 and moment is not None:
            saver.finish()
            rank, owner, name = MOMENTS[moment]
            if dist.get_rank() == rank:
                mortal = then_kill(parts.write) if owner is parts else kill
                setattr(owner, name, mortal)
        saver.begin(engine.state(), progress(plan, model).model_copy(update={"step": step}))
    saver.finish()


SAID: list[str] = []


def commit(folder: Path) -> Path | None:
    """Let what is whole count; SAID has what it said."""
    SAID.clear()
    return unfinished.commit(folder, say=SAID.append)


def killed(folder: Path, moment: str) -> None:
    model = cases.transformer("llama", layers=1)
    plan = cases.plan(model, data_shard=2, zero=3)
    with pytest.raises(RuntimeError, match=r"rank \d (died|raised)"):
        on_ranks(2, two_steps, plan, model, str(folder), moment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second checkpoint of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    model = cases.transformer("llama", layers=1)
    on_ranks(2, two_steps, cases.plan(model, data_shard=2, zero=3), model, str(folder), None)
    return folder / "step-000002"


@pytest.fixture(scope="module")
def pending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose ranks died when the files of the second step were whole."""
    folder = tmp_path_factory.mktemp("pending") / "saved"
    killed(folder, "rank 0, before the index is written")
    return folder


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize("moment", MOMENTS)
def test_whole_files_count_as_if_nobody_had_died(tmp_path: Path, whole: Path, moment: str) -> None:
    killed(tmp_path, moment)
    before = [path.name for path in checkpoint.complete(tmp_path)]

    found = commit(tmp_path)

    assert before == ["step-000001"]
    assert found == tmp_path / "step-000002"
    assert checkpoint.newest(tmp_path) == found
    assert checkpoint.verify(found) is None
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        assert (found / name).read_bytes() == (whole / name).read_bytes(), name
    assert not any(tmp_path.glob(".step-*"))
    assert len(SAID) == 1
    assert f"{found}: its ranks died before it counted; all of it (" in SAID[0]
    assert commit(tmp_path) is None
    assert not SAID


@pytest.mark.ranks
@pytest.mark.matrix
def test_what_lacks_a_byte_never_counts(pending: Path, tmp_path: Path) -> None:
    draw = random.Random(11)
    files = [(name, ".step-000002.r") for name in PENDING]
    files += [(name, f".step-000002.r{parts.SUFFIX}") for name in RECORDS]
    for name, place in files:
        for damage in (flipped, flipped, zeroed, truncated, removed, renamed):
            folder = tmp_path / f"{name}-{draw.random()}"
            shutil.copytree(pending, folder)
            damage(folder / place / name, folder, draw)

            assert commit(folder) is None, (name, damage.__name__)
            names = [path.name for path in checkpoint.all_steps(folder)]
            assert names == ["step-000001"], (name, damage.__name__)


@pytest.mark.ranks
def test_parts_of_another_step_or_run_do_not_count(pending: Path, tmp_path: Path) -> None:
    hidden = (".step-000002.r", f".step-000002.r{parts.SUFFIX}")
    for number, new in enumerate((".step-000003.r", ".step-000001.r")):
        folder = tmp_path / str(number)
        shutil.copytree(pending, folder)
        for name in hidden:
            (folder / name).rename(folder / name.replace(hidden[0], new))
        assert commit(folder) is None, new
    newer = tmp_path / "newer"
    shutil.copytree(pending, newer)
    (newer / "step-000001").rename(newer / "step-000002")
    assert commit(newer) is None


@pytest.mark.ranks
def test_a_folder_of_others_is_not_led_away(pending: Path, tmp_path: Path) -> None:
    for name in (".step-000002.r", f".step-000002.r{parts.SUFFIX}"):
        folder = tmp_path / name
        shutil.copytree(pending, folder / "run")
        (folder / "run" / name).rename(folder / "elsewhere")
        (folder / "run" / name).symlink_to(folder / "elsewhere")
        before = sorted(path.name for path in (folder / "elsewhere").iterdir())

        assert commit(folder / "run") is None
        assert sorted(path.name for path in (folder / "elsewhere").iterdir()) == before


@pytest.mark.ranks
def test_a_save_of_a_living_run_is_left_to_it(pending: Path, tmp_path: Path) -> None:
    shutil.copytree(pending, tmp_path / "run")

    with alone_in(tmp_path / "run" / f".step-000002.r{parts.SUFFIX}"):
        assert commit(tmp_path / "run") is None
    assert commit(tmp_path / "run") == tmp_path / "run" / "step-000002"


@pytest.mark.ranks
def test_a_launch_finds_what_a_dead_one_left(pending: Path, room: Room) -> None:
    shutil.copytree(pending, room.folder / "saved")

    with pytest.raises(LaunchError, match="already has a checkpoint of step 2; resume it"):
        room.run(plan_of(), steps=1, checkpoint=room.folder / "saved")


def test_a_script_goes_on_from_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dies(BaseException):
        pass

    class Epoch:
        def __init__(self, number: int) -> None:
            self.number = number

        def state_dict(self) -> int:
            return self.number

        def load_state_dict(self, state: int) -> None:
            self.number = state

    def die(*_: object) -> None:
        raise Dies

    def engine(seed: int) -> Engine:
        return Engine(
            lambda: torch.nn.Linear(3, 3),
            {"seed": seed},
            loss=lambda outputs, batch: (outputs.square().sum(), len(outputs)),
            optimizer=torch.optim.AdamW,
            batch=torch.ones(4, 3),
        )

    trained = engine(0)
    trained.step(torch.ones(4, 3))
    with monkeypatch.context() as patched, contextlib.suppress(Dies):
        patched.setattr(checkpoint, "let_count", die)
        trained.save(tmp_path, extra={"epoch": Epoch(4)})
    assert checkpoint.newest(tmp_path) is None

    other, epoch = engine(1), Epoch(0)
    assert other.resume(tmp_path, extra={"epoch": epoch})

    assert checkpoint.newest(tmp_path) == tmp_path / "step-000001"
    assert "step-000001: its ranks died before it counted" in capsys.readouterr().err
    assert epoch.number == 4
    for name, value in trained.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


RANK_0_DIES = """
import os, signal, sys
if any(word.endswith("orders.yaml") for word in sys.orig_argv) and os.environ.get("RANK") == "0":
    from meshwright.runtime.checkpoint import checkpoint
    finish = checkpoint.finish
    def die(temporary, done, written):
        if done.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(temporary, done, written)
    checkpoint.finish = die
"""


@pytest.mark.ranks
@pytest.mark.matrix
def test_the_launcher_says_that_it_counts_and_the_run_goes_on(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.begin_with(RANK_0_DIES)
    saved = room.folder / "saved"

    launcher = room.start(
        plan_of(data=2), step=0, steps=9, checkpoint=str(saved), checkpoint_every=1
    )
    _, message = launcher.communicate(timeout=PATIENCE_S)

    assert "rank 0 was killed by SIGKILL" in message
    assert f"{saved}/step-000002 is complete and can be resumed" in message
    room.run(plan_of(), steps=4, checkpoint=saved, resume=True)
    room.run(plan_of(), steps=4, output=room.folder / "whole")
    found = list(run.read_records(run.metrics_file(room.folder / "out")))
    wanted = list(run.read_records(run.metrics_file(room.folder / "whole")))
    assert [record.step for record in found] == [1, 2, 3, 4]
    for mine, whole_one in zip(found, wanted, strict=True):
        assert mine.loss == pytest.approx(whole_one.loss, rel=1e-4), mine.step
