"""What counts as a checkpoint, what is kept, and what is refused."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshwright.planner.documents.document import read  # noqa: E402
from meshwright.planner.documents.model import Layer, ModelGraph  # noqa: E402
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage, Training  # noqa: E402
from meshwright.planner.errors import DocumentError, LaunchError  # noqa: E402
from meshwright.runtime.checkpoint.checkpoint import (  # noqa: E402
    Progress,
    complete,
    load,
    newest,
    problem,
    progress,
)
from meshwright.runtime.checkpoint.writer import Saver  # noqa: E402
from meshwright.runtime.data.corpus import Corpus  # noqa: E402
from meshwright.runtime.data.sample_digest import SampleDigest  # noqa: E402
from meshwright.runtime.launch.training_loop import token_engine  # noqa: E402
from tests.limits import PATIENCE_S  # noqa: E402
from tests.runtime import cases  # noqa: E402
from tests.runtime.ranks import on_ranks  # noqa: E402

MODEL = ModelGraph(name="toy", layers=(Layer(name="a", kind="block", parameters=3),))
PLAN = Plan(
    model=PlannedModel(name="toy", source="toy", digest=MODEL.digest),
    cluster="local",
    seq_len=10,
    global_batch=1,
    precision="fp32",
    mesh=Mesh(),
    zero=0,
    schedule="1f1b",
    micro_batch=1,
    micro_batches=1,
    training=Training(seed=5),
    stages=(Stage(layers=(PlacedLayer(layer="a"),)),),
)
CORPUS = Corpus(
    folder=Path("corpus"),
    source="texts",
    tokenizer="bytes",
    documents=1,
    tokens=100,
    vocabulary=257,
    skipped=0,
    dtype="uint16",
    digest="sha256:texts",
    checksums={},
)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Join a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def done(step: int, **changes: object) -> Progress:
    values: dict[str, object] = {
        "step": step,
        "sample": 8 * step,
        "epoch": 0,
        "seq_len": 10,
        "seed": 5,
        "model": "toy",
        "model_digest": MODEL.digest,
        "plan_digest": PLAN.digest,
        "corpus": "texts",
        "corpus_digest": "sha256:texts",
        "loss": 1.5,
        "used": SampleDigest.of_first(8 * step).model_dump(),
    }
    return Progress.of({**values, **changes})


def save(folder: Path, state: dict[str, torch.Tensor], done: Progress, *, run: str) -> Path:
    saver = Saver(folder, plan=PLAN, model=MODEL, run=run)
    saver.begin(state, done)
    saved = saver.finish()
    assert saved is not None
    return saved


def state(value: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3,), value), "optim.steps": torch.tensor(int(value))}


def test_what_was_saved_is_loaded_in_place(tmp_path: Path) -> None:
    saved = save(tmp_path, state(7.0), done(3), run="r")
    target = state(0.0)
    weights = target["model.a"]

    load(saved, target)

    assert weights.tolist() == [7.0, 7.0, 7.0]
    assert int(target["optim.steps"]) == 7
    lists = {"files": {}, "checksums": {}, "checksum": None}
    assert progress(saved).model_copy(update=lists) == done(3)
    assert read(Plan, saved / "plan.yaml") == PLAN
    assert read(ModelGraph, saved / "model.yaml") == MODEL


def test_the_newest_complete_checkpoint_counts_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (1_000_000, 999_999):
        save(tmp_path, state(1.0), done(step), run="r")

    assert newest(tmp_path) == tmp_path / "step-1000000"


@pytest.mark.parametrize("missing", ["tensors.json", "meta.json"])
def test_a_checkpoint_without_its_last_files_does_not_count(tmp_path: Path, missing: str) -> None:
    first = save(tmp_path, state(1.0), done(1), run="r")
    second = save(tmp_path, state(2.0), done(2), run="r")
    (second / missing).unlink()

    assert newest(tmp_path) == first


def test_no_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None


def test_the_last_two_stay_and_what_killed_runs_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".step-000002.killed").mkdir()
    (tmp_path / "notes").mkdir()

    for step in (1, 2, 3):
        save(tmp_path, state(step), done(step), run="r")

    assert [path.name for path in complete(tmp_path)] == ["step-000002", "step-000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step-000002",
        "step-000003",
    ]


def test_a_crash_while_old_ones_are_deleted_leaves_none_that_seems_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **options: object) -> None:
        for first in sorted(path.iterdir())[:1]:
            first.unlink()

    monkeypatch.setattr(shutil, "rmtree", killed)
    for step in (1, 2, 3):
        save(tmp_path, state(step), done(step), run="r")

    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]
    assert all(problem(path) is None for path in tmp_path.glob("step-*"))


def test_an_incomplete_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    saved = save(tmp_path, state(1.0), done(1), run="r")
    (saved / "meta.json").unlink()

    save(tmp_path, state(2.0), done(1), run="s")

    target = state(0.0)
    load(saved, target)
    assert float(target["model.a"][0]) == 2.0


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, spoilt: float) -> None:
    bad = {"model.a": torch.tensor([1.0, spoilt])}

    with pytest.raises(LaunchError, match=r"step 4 left weights .* not finite"):
        save(tmp_path, bad, done(4), run="r")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(LaunchError, match=r"file/step-000001: the checkpoint cannot be written: "):
        save(tmp_path / "file", state(1.0), done(1), run="r")


def test_a_state_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    saved = save(tmp_path, state(1.0), done(1), run="r")

    with pytest.raises(LaunchError, match=r"step-000001: cannot be loaded: .*model\.b"):
        load(saved, {**state(0.0), "model.b": torch.zeros(2)})


def test_a_shape_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path, state(1.0), done(1), run="r")

    with pytest.raises(LaunchError, match=r"cannot be loaded: .*Size mismatch"):
        load(saved, {**state(0.0), "model.a": torch.zeros(4)})


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path, state(1.0), done(1), run="r")
    for file in saved.glob("*.bin"):
        file.write_bytes(b"")

    with pytest.raises(LaunchError, match=r"step-000001/rank-00000\.bin: is damaged"):
        load(saved, state(0.0))


def test_the_same_work_may_go_on(tmp_path: Path) -> None:
    done(3).check(plan=PLAN, model=MODEL, corpus=CORPUS, folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_digest": "sha256:other"}, "model_digest: is sha256:other .*to another model"),
        ({"corpus_digest": "sha256:other"}, r"corpus_digest: .* the data \(texts\) has sha256:tex"),
        ({"seq_len": 20}, "seq_len: is 20, but the plan has 10"),
        ({"seed": 6}, "seed: is 6, but the plan has 5"),
    ],
)
def test_other_work_may_not(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        done(3, **changes).check(plan=PLAN, model=MODEL, corpus=CORPUS, folder=tmp_path)


def test_a_meta_file_of_another_format_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path, state(1.0), done(1), run="r")
    (saved / "meta.json").write_text('{"format": 2}')

    with pytest.raises(DocumentError, match=r"meta\.json: format"):
        progress(saved)


def steps_of_an_optimizer_with_empty_parts(folder: str) -> list[float]:
    """Train two steps where a matrix of one row is divided by two ranks, save, load, look."""
    model = cases.transformer(ffn_size=1)
    plan = cases.plan(model, data_shard=2, zero=1)
    trained = token_engine(plan, model, device=torch.device("cpu"))
    for step in range(2):
        own = trained.slice_rank * 4
        trained.step(cases.global_tokens(step)[own : own + 4])
    save(Path(folder), trained.state(), done(2), run="r")
    loaded = token_engine(plan, model, device=torch.device("cpu"))
    load(Path(folder, "step-000002"), loaded.state())
    return [float(value) for key, value in loaded.state().items() if key.endswith(".step")]


@pytest.mark.ranks
def test_steps_survive_where_a_rank_holds_none_of_a_parameter(tmp_path: Path) -> None:
    dist.destroy_process_group()
    try:
        per_rank = on_ranks(2, steps_of_an_optimizer_with_empty_parts, str(tmp_path))
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    assert [set(steps) for steps in per_rank] == [{2.0}, {2.0}]


def test_training_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_disk, disk = threading.Event(), threading.Event()
    to_disk = os.fsync

    def slow(handle: int) -> None:
        at_the_disk.set()
        assert disk.wait(PATIENCE_S)
        to_disk(handle)

    monkeypatch.setattr(os, "fsync", slow)
    saver = Saver(tmp_path, plan=PLAN, model=MODEL, run="r")
    trained = state(1.0)

    saver.begin(trained, done(1))
    trained["model.a"].fill_(2.0)
    assert at_the_disk.wait(PATIENCE_S)
    before = newest(tmp_path)
    disk.set()
    saved = saver.finish()

    target = state(0.0)
    load(tmp_path / "step-000001", target)
    assert before is None
    assert saved == tmp_path / "step-000001"
    assert target["model.a"].tolist() == [1.0, 1.0, 1.0]


def test_a_disk_that_fails_is_told_at_the_next_look_and_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(tmp_path, state(1.0), done(1), run="r")
    saver = Saver(tmp_path, plan=PLAN, model=MODEL, run="s", keep=1)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saver.begin(state(2.0), done(2))

    with pytest.raises(LaunchError, match=r"step-000002: the checkpoint .*No space left"):
        saver.finish()
    assert complete(tmp_path) == [first]


def test_a_file_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    first = save(tmp_path, state(1.0), done(1), run="r")
    second = save(tmp_path, state(2.0), done(2), run="r")
    (file,) = second.glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])

    assert newest(tmp_path) == first
