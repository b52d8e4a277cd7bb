"""Damaged checkpoints are refused by the file's name, and the one before is offered."""

from __future__ import annotations

import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwright.planner.documents.model import ModelGraph  # noqa: E402
from meshwright.planner.documents.plan import Plan  # noqa: E402
from meshwright.planner.errors import MeshwrightError  # noqa: E402
from meshwright.runtime.checkpoint import checkpoint  # noqa: E402
from meshwright.runtime.checkpoint import weight_export as export  # noqa: E402
from meshwright.runtime.checkpoint.commit_recovery import prepare_folder  # noqa: E402
from meshwright.runtime.checkpoint.writer import Saver  # noqa: E402
from meshwright.runtime.launch.preflight import checkpoint_to_resume  # noqa: E402
from meshwright.runtime.launch.training_loop import token_engine  # noqa: E402
from meshwright.runtime.run.launch_options import LaunchRun  # noqa: E402
from tests.runtime import cases  # noqa: E402
from tests.runtime.checkpoint.test_weight_export import own, progress  # noqa: E402
from tests.runtime.ranks import on_ranks  # noqa: E402

State = dict[str, torch.Tensor]
FILES = (
    "config.json",
    "meta.json",
    "model.yaml",
    "plan.yaml",
    "rank-00000.bin",
    "rank-00001.bin",
    "tensors.json",
)


def two_checkpoints(plan: Plan, model: ModelGraph, folder: str) -> None:
    """Train two steps and save after each."""
    engine = token_engine(plan, model, device=torch.device("cpu"))
    saver = Saver(Path(folder), plan=plan, model=model, run="r", config=engine.configuration())
    for step in (1, 2):
        engine.step(own(engine, step))
        saver.begin(engine.state(), progress(plan, model).model_copy(update={"step": step}))
    saver.finish()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with its two checkpoints, of two ranks."""
    folder = tmp_path_factory.mktemp("run") / "saved"
    model = cases.transformer("llama", layers=1)
    on_ranks(2, two_checkpoints, cases.plan(model, data_shard=2, zero=3), model, str(folder))
    return folder


@pytest.fixture(scope="module")
def empty(saved: Path) -> State:
    """Tensors that a checkpoint of the run fills."""
    model = cases.transformer("llama", layers=1)
    return token_engine(cases.plan(model), model, device=torch.device("cpu")).state()


def flipped(file: Path, _: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def zeroed(file: Path, _: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    size = min(64, len(data))
    starts = [s for s in range(len(data) - size + 1) if any(data[s : s + size])]
    start = draw.choice(starts)
    data[start : start + size] = bytes(size)
    file.write_bytes(data)


def truncated(file: Path, _: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def swapped(file: Path, before: Path, draw: random.Random) -> None:
    """Exchange with the same file of the step before, or with another where they are equal."""
    other = before / file.name
    if other.read_bytes() == file.read_bytes():
        other = file.with_name(draw.choice([name for name in FILES if name != file.name]))
    first, second = file.read_bytes(), other.read_bytes()
    assert first != second
    file.write_bytes(second)
    other.write_bytes(first)


def removed(file: Path, _: Path, draw: random.Random) -> None:
    file.unlink()


def renamed(file: Path, _: Path, draw: random.Random) -> None:
    file.rename(file.with_name(f"{file.name}.bak"))


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    flipped,
    zeroed,
    truncated,
    swapped,
    removed,
    renamed,
)
CASES = [(file, damage) for file in FILES for damage in DAMAGES]


def refusals(folder: Path, empty: State) -> tuple[str, str]:
    """Return what export and resuming say to the newest checkpoint of a folder."""
    with pytest.raises(MeshwrightError) as exported:
        export.verified_checkpoint(folder)
    with pytest.raises(MeshwrightError) as resumed, warnings.catch_warnings():
        warnings.simplefilter("error")
        going_on = checkpoint_to_resume(
            LaunchRun(checkpoint=folder, resume=True, or_start=True, steps=9)
        )
        assert going_on is not None, "starts anew"
        checkpoint.load(going_on, empty)
    return str(exported.value), str(resumed.value)


def test_forty_two_damaged_checkpoints_are_refused_by_name(
    saved: Path, empty: State, tmp_path: Path
) -> None:
    draw = random.Random(7)
    assert len(CASES) >= 40

    for number, (file, damage) in enumerate(CASES):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        damage(folder / "step-000002" / file, folder / "step-000001", draw)

        for said in refusals(folder, empty):
            assert "step-000002/" in said, (file, damage.__name__, said)
            if damage is not swapped:  # of two damaged files the other may be told
                assert f"step-000002/{file}: " in said, (file, damage.__name__, said)
                assert f"{folder}/step-000001" in said, (file, damage.__name__, said)


def test_what_is_not_damaged_is_taken(saved: Path, empty: State) -> None:
    source, done = export.verified_checkpoint(saved)
    checkpoint.load(source, empty)

    assert (source.name, done.step) == ("step-000002", 2)
    assert sorted(path.name for path in source.iterdir()) == sorted(FILES)


def test_no_bit_of_the_list_can_change(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step-000002", tmp_path / "step-000002")
    list_file = tmp_path / "step-000002" / "meta.json"
    good = list_file.read_bytes()

    for place in range(0, len(good), 5):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        list_file.write_bytes(bad)
        wrong = checkpoint.problem(tmp_path / "step-000002")
        assert wrong is not None, good[place - 20 : place + 20]
        assert wrong.startswith(str(list_file))


def test_two_checkpoints_that_changed_names_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step-000001", tmp_path / "step-000003")

    assert checkpoint.problem(tmp_path / "step-000003") == (
        f"{tmp_path}/step-000003/meta.json: is of step 1"
    )


@pytest.mark.parametrize("name", ["notes.txt", ".metadata", "rank-00002.bin"])
def test_a_file_that_was_not_written_is_refused(
    saved: Path, empty: State, tmp_path: Path, name: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "step-000002" / name).write_bytes(b"x")

    for said in refusals(tmp_path / "run", empty):
        assert f"step-000002/{name}: is none of the files that were written" in said


@pytest.mark.parametrize("name", ["rank-00001.bin", "plan.yaml", "meta.json"])
@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    saved: Path, empty: State, tmp_path: Path, name: str, what: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    file = tmp_path / "run" / "step-000002" / name
    file.rename(tmp_path / "elsewhere")
    if what == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()

    for said in refusals(tmp_path / "run", empty):
        assert re.search(rf"step-000002/{name}: .*is a link, folder or device", said), said


def test_a_run_does_not_start_anew_beside_a_damaged_checkpoint(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved / "step-000002", folder / "step-000002")
    (folder / "step-000002" / "rank-00000.bin").unlink()

    for resume in (True, False):
        with pytest.raises(
            MeshwrightError,
            match=r"no other complete checkpoint; move step-000002 out of it",
        ):
            checkpoint_to_resume(
                LaunchRun(checkpoint=folder, resume=resume, or_start=resume, steps=9)
            )
    (folder / "step-000002").rename(tmp_path / "step-000002")
    again = LaunchRun(checkpoint=folder, resume=True, or_start=True, steps=9)
    assert checkpoint_to_resume(again) is None


@pytest.mark.parametrize("damage", ["empty", "half copied", "cut off", "two"])
def test_a_run_that_is_started_again_takes_the_newest_whole_one(
    saved: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    whole = checkpoint.newest(folder)
    assert whole is not None
    bad = folder / "step-000007"
    bad.mkdir()
    if damage == "half copied":
        shutil.copy(whole / "plan.yaml", bad)
    if damage == "cut off":
        shutil.copytree(whole, bad, dirs_exist_ok=True)
        (bad / "meta.json").write_bytes((whole / "meta.json").read_bytes()[:-30])
    if damage == "two":
        (folder / "step-000008").mkdir()
        (folder / "damaged-step-000008").mkdir()
    before = sorted(file.name for file in bad.iterdir())
    said: list[str] = []
    by_hand = LaunchRun(checkpoint=folder, resume=True, steps=9)
    again = LaunchRun(checkpoint=folder, resume=True, or_start=True, steps=9)

    prepare_folder(by_hand, say=said.append)
    with pytest.raises(MeshwrightError, match=r"to resume .*, which is complete"):
        checkpoint_to_resume(by_hand)
    assert said == []
    prepare_folder(again, say=said.append)
    assert checkpoint_to_resume(again) == whole

    assert len(said) == 1 + (damage == "two")
    assert f"it is kept as damaged-step-000007, and {whole} is gone on from" in said[-1]
    assert sorted(file.name for file in (folder / "damaged-step-000007").iterdir()) == before
    assert (folder / "damaged-step-000008-2").exists() == (damage == "two")


def what_a_rank_says(folder: str) -> str:
    """Go on from a checkpoint on one of several ranks; return what is said against it."""
    model = cases.transformer("llama", layers=1)
    state = token_engine(cases.plan(model, tensor=2), model, device=torch.device("cpu")).state()
    weights = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(MeshwrightError) as raised:
        checkpoint.load(Path(folder), state)
    # None takes a tensor before all have looked.
    assert all(torch.equal(_local(state[name]), _local(weights[name])) for name in state)
    return str(raised.value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.ranks
def test_ranks_share_the_files_and_all_refuse_what_one_finds(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    file = tmp_path / "run" / "step-000002" / "rank-00001.bin"
    flipped(file, file, random.Random(1))

    said = on_ranks(2, what_a_rank_says, str(file.parent))

    for words in said:
        assert words.startswith(f"{file}: is damaged: its checksum is sha256:")
        assert words.endswith(f"to resume {tmp_path}/run/step-000001, which is complete")
