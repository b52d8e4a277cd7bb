"""A checkpoint that somebody else made leaves its folder nowhere and claims what is there alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshwright.planner.errors import MeshwrightError  # noqa: E402
from meshwright.runtime.checkpoint import weight_export as export  # noqa: E402
from meshwright.runtime.checkpoint.checkpoint import load, problem  # noqa: E402
from meshwright.runtime.core import checksums  # noqa: E402
from meshwright.runtime.launch.preflight import checkpoint_to_resume  # noqa: E402
from meshwright.runtime.run.launch_options import LaunchRun  # noqa: E402

META: dict[str, Any] = {
    "step": 3,
    "sample": 24,
    "epoch": 0,
    "seq_len": 10,
    "seed": 5,
    "model": "toy",
    "model_digest": "sha256:m",
    "plan_digest": "sha256:p",
    "corpus": "texts",
    "corpus_digest": "sha256:c",
    "loss": 1.5,
}


def seal(folder: Path) -> None:
    """Write the list, as whoever changes a file can do too."""
    (folder / "meta.json").unlink(missing_ok=True)
    files = [path for path in folder.iterdir() if path.is_file()]
    text = json.dumps(
        {
            **META,
            "files": {path.name: path.stat().st_size for path in files},
            "checksums": {path.name: checksums.of_file(path) for path in files},
        }
    )
    (folder / "meta.json").write_text(checksums.with_seal(text))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint, written by hand after the description of its files."""
    folder = tmp_path / "run" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "rank-00000.bin").write_bytes(b"\0\0\x80\x3f" * 6)
    index(folder, chunks=[[0, 0, [0, 0], [2, 3]]])
    return folder


def index(folder: Path, **changes: Any) -> None:
    """Write an index of one tensor, and seal the folder."""
    files = changes.pop("files", ["rank-00000.bin"])
    tensor = {"dtype": "float32", "shape": [2, 3], "chunks": [], **changes}
    data = {"format": 1, "files": files, "tensors": {"model.a": tensor}}
    (folder / "tensors.json").write_text(json.dumps(data))
    seal(folder)


def refusals(folder: Path) -> Iterator[str]:
    """Yield what resuming and exporting say."""
    with pytest.raises(MeshwrightError) as resumed:
        found = checkpoint_to_resume(
            LaunchRun(checkpoint=folder.parent, resume=True, or_start=True, steps=9)
        )
        assert found is not None
        load(found, {"model.a": torch.zeros(2, 3)})
    yield str(resumed.value)
    with pytest.raises(MeshwrightError) as exported:
        source, done = export.verified_checkpoint(folder)
        export._parameters(source, done)
        load(source, {"model.a": torch.zeros(2, 3)}, verified=True)
    yield str(exported.value)


def test_a_file_after_the_description_is_read(written: Path) -> None:
    state = {"model.a": torch.zeros(2, 3)}
    load(written, state)

    assert state["model.a"].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ["../../secret"]}, "lies in the file ../../secret"),
        ({"files": ["rank-00000.bin/../../x"]}, "lies in the file"),
        ({"files": ["plan.yaml"]}, "lies in the file plan.yaml"),
        ({"files": []}, "IndexError"),
        ({"chunks": [[-1, 0, [0, 0], [2, 3]]]}, "has -1 where a count belongs"),
        ({"chunks": [[0, -4, [0, 0], [2, 3]]]}, "has -4 where a count belongs"),
        ({"chunks": [[0, 1, [0, 0], [2, 3]]]}, "has 24 bytes, and tensors end at 25"),
        ({"chunks": [[True, 0, [0, 0], [2, 3]]]}, "has True where a count belongs"),
        ({"chunks": [[0, 0, [0, 0], [2, 2]]]}, "do not fill (2, 3)"),
        ({"chunks": [[0, 0, [0, 1], [2, 3]]]}, "a chunk that is not inside (2, 3)"),
        ({"chunks": [[0, 0, [0], [6]]]}, "a chunk of other dimensions than (2, 3)"),
        ({"chunks": [[0, 0, [0, 0], [1, 3]]] * 2}, "do not fill (2, 3)"),
        (
            {"chunks": [[0, 0, [0, 0], [1, 3]], [0, 0, [1, 0], [1, 3]]]},
            "shares bytes of rank-00000.bin",
        ),
        ({"shape": [10**18], "chunks": [[0, 0, [0], [10**18]]]}, "a tensor has at most 8"),
        ({"shape": [0, 10**18], "chunks": []}, "a tensor has at most 8"),
        ({"shape": [10**5000], "chunks": []}, "is no index of tensors"),
        ({"shape": [1] * 5000, "chunks": []}, "a tensor has at most 8"),
        ({"shape": [2.0, 3], "chunks": []}, "has 2.0 where a count belongs"),
        (
            {"shape": [2**40], "chunks": [[0, 0, [0], [2**40]]]},
            "has 24 bytes, and tensors end at 4398046511104",
        ),
        ({"dtype": "object"}, "has the dtype object"),
        ({"dtype": ["float32"]}, "has list where a name belongs"),
        ({"code": "x"}, "has the keys"),
    ],
)
def test_an_index_that_claims_what_is_not_there_is_refused(
    written: Path, changes: dict[str, Any], message: str
) -> None:
    try:
        index(written, **{"chunks": [[0, 0, [0, 0], [2, 3]]], **changes})
    except ValueError:  # json writes no integer of 5,000 digits; a file has them all the same
        index(written, shape=[7])
        text = (written / "tensors.json").read_text().replace("[7]", f"[{'9' * 5000}]")
        (written / "tensors.json").write_text(text)
        seal(written)

    for said in refusals(written):
        assert "tensors.json: is no index of tensors: " in said
        assert message in said
        assert len(said) < 1000


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "{}", "[]", "null", '{"format": 2}', "\0", "é"]
)
def test_what_is_no_index_is_refused(written: Path, text: str) -> None:
    (written / "tensors.json").write_bytes(text.encode("latin-1"))
    seal(written)

    for said in refusals(written):
        assert "tensors.json: is no index of tensors: " in said


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", "x\n", "é"])
def test_a_list_of_files_elsewhere_is_refused(written: Path, name: str) -> None:
    text = json.dumps({**META, "files": {name: 1}, "checksums": {name: f"sha256:{'0' * 64}"}})
    (written / "meta.json").write_text(checksums.with_seal(text))

    said = problem(written)

    assert said is not None
    assert said.startswith(f"{written}/meta.json: files")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(META), "is damaged: its checksum is not"),
        (checksums.with_seal(json.dumps(META)), "has no index of its tensors"),
        (
            checksums.with_seal(json.dumps({**META, "files": {"tensors.json": 1}})),
            "files and checksums name different files",
        ),
    ],
    ids=["no seal", "no list", "no checksums"],
)
def test_files_without_checksums_are_refused(written: Path, text: str, message: str) -> None:
    (written / "meta.json").write_text(text)

    for said in refusals(written):
        assert message in said
