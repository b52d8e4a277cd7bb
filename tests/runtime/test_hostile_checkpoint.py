"""A checkpoint that somebody else made runs no code, leaves its folder nowhere and takes no memory.

The attacks are on the pickles that earlier checkpoints consist of, as torch wrote them, and on the
files of today's.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import resource
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from meshwright.planner.errors import DocumentError, MeshwrightError  # noqa: E402
from meshwright.runtime.checkpoint import tensor_index  # noqa: E402
from meshwright.runtime.checkpoint import weight_export as export  # noqa: E402
from meshwright.runtime.checkpoint.checkpoint import load, problem, unchecked  # noqa: E402
from meshwright.runtime.core import checksums  # noqa: E402
from meshwright.runtime.launch.preflight import checkpoint_to_resume  # noqa: E402
from meshwright.runtime.run.launch_options import LaunchRun  # noqa: E402

NUMBERS = {
    "model.a": torch.arange(12.0).reshape(3, 4).T,  # its elements do not lie in their order
    "model.b": torch.ones(5, dtype=torch.bfloat16),
    "optim.a.step": torch.tensor(3),
    "optim.none": torch.empty(0, 4),
}
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


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What an attack would make."""
    return tmp_path / "code-ran"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A checkpoint as versions before this one wrote it: pickled, without checksums."""
    folder = tmp_path / "run" / "step-000003"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(NUMBERS), storage_writer=dcp.FileSystemWriter(str(folder)))
    for name in ("plan.yaml", "model.yaml"):
        (folder / name).write_text("x: 1\n")
    list_files(folder)
    return folder


def list_files(folder: Path) -> None:
    (folder / "meta.json").unlink(missing_ok=True)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "meta.json").write_text(json.dumps({**META, "files": sizes}))


def seal(folder: Path) -> None:
    """Write the list of today, as whoever changes a file can do too."""
    (folder / "meta.json").unlink(missing_ok=True)
    files = [path for path in folder.iterdir() if path.is_file()]
    text = json.dumps(
        {
            **META,
            "files": {path.name: path.stat().st_size for path in files},
            "checksums": {path.name: checksums.of_file(path) for path in files},
        }
    )
    (folder / "meta.json").write_text(checksums.sealed(text))


@pytest.fixture
def today(tmp_path: Path) -> Path:
    """A checkpoint in today's files, written by hand after their description."""
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
        source, done = export.found(folder)
        export._parameters(source, done)
        load(source, {"model.a": torch.zeros(2, 3)}, verified=True)
    yield str(exported.value)


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in NUMBERS.items()}


def test_an_earlier_checkpoint_is_read_and_said_to_be_unchecked(earlier: Path) -> None:
    state = empty()
    load(earlier, state)

    assert all(torch.equal(state[name], NUMBERS[name]) for name in NUMBERS)
    said = unchecked(export.found(earlier)[0])
    assert said is not None
    assert "was written without checksums" in said


def test_a_file_after_the_description_is_read(today: Path) -> None:
    state = {"model.a": torch.zeros(2, 3)}
    load(today, state)

    assert state["model.a"].tolist() == [[1.0] * 3] * 2


def test_an_index_that_is_code_does_not_run(earlier: Path, mark: Path) -> None:
    (earlier / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    list_files(earlier)

    for said in refusals(earlier):
        assert ".metadata: is no index of tensors: names pathlib.Path.touch" in said
    assert not mark.exists()


def test_an_index_with_code_in_it_does_not_run(earlier: Path, mark: Path) -> None:
    with (earlier / ".metadata").open("rb") as file:
        whole = pickle.load(file)
    whole.planner_data = Evil(mark)
    (earlier / ".metadata").write_bytes(pickle.dumps(whole, protocol=4))
    list_files(earlier)

    for said in refusals(earlier):
        assert ".metadata: is no index of tensors: names pathlib.Path.touch" in said
    assert not mark.exists()


def test_bytes_in_the_place_of_a_tensor_are_not_unpickled(earlier: Path, mark: Path) -> None:
    with (earlier / ".metadata").open("rb") as file:
        whole = pickle.load(file)
    blob = io.BytesIO()
    torch.save(Evil(mark), blob)
    (earlier / "__0_0.distcp").write_bytes(blob.getvalue())
    whole.state_dict_metadata["model.a"] = dcp.BytesStorageMetadata()
    for info in whole.storage_data.values():
        info.offset, info.length = 0, len(blob.getvalue())
    (earlier / ".metadata").write_bytes(pickle.dumps(whole, protocol=4))
    list_files(earlier)

    for said in refusals(earlier):
        assert ".metadata: is no index of tensors: names" in said
        assert "BytesStorageMetadata" in said
    assert not mark.exists()


def changed(folder: Path, change: Callable[[Any, Any], None]) -> None:
    """Change the first chunk of a tensor of a pickled index, and where it lies."""
    with (folder / ".metadata").open("rb") as file:
        whole = pickle.load(file)
    at, info = next(
        (key, value) for key, value in whole.storage_data.items() if key.fqn == "model.a"
    )
    assert at.offset is not None
    change(whole.state_dict_metadata["model.a"], info)
    (folder / ".metadata").write_bytes(pickle.dumps(whole, protocol=4))
    list_files(folder)


def test_a_tensor_that_is_code_does_not_run(earlier: Path, mark: Path) -> None:
    blob = io.BytesIO()
    torch.save(Evil(mark), blob)

    def whole_file(tensor: Any, info: Any) -> None:
        info.offset, info.length = 0, len(blob.getvalue())

    (earlier / "__0_1.distcp").write_bytes(blob.getvalue())
    changed(earlier, lambda tensor, info: setattr(info, "relative_path", "__0_1.distcp"))
    changed(earlier, whole_file)

    with pytest.raises(MeshwrightError, match="cannot be loaded"):
        load(earlier, empty())
    assert not mark.exists()


def test_a_tensor_that_unfolds_is_refused(earlier: Path) -> None:
    small, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(4, 2**16), small)
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))

    def whole_file(tensor: Any, info: Any) -> None:
        info.relative_path, info.offset, info.length = "__0_1.distcp", 0, packed.tell()

    (earlier / "__0_1.distcp").write_bytes(packed.getvalue())
    changed(earlier, whole_file)

    with pytest.raises(MeshwrightError, match="a tensor that is longer than its bytes"):
        load(earlier, empty())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../secret", "lies in the file ../../secret"),
        ("/etc/passwd", "lies in the file /etc/passwd"),
        ("model.yaml", "lies in the file model.yaml"),
        ("__0_0.distcp\n", "lies in the file"),
    ],
)
def test_a_tensor_outside_the_folder_is_refused(earlier: Path, name: str, message: str) -> None:
    changed(earlier, lambda tensor, info: setattr(info, "relative_path", name))

    for said in refusals(earlier):
        assert message in said


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
    today: Path, changes: dict[str, Any], message: str
) -> None:
    try:
        index(today, **{"chunks": [[0, 0, [0, 0], [2, 3]]], **changes})
    except ValueError:  # json writes no integer of 5,000 digits; a file has them all the same
        index(today, shape=[7])
        text = (today / "tensors.json").read_text().replace("[7]", f"[{'9' * 5000}]")
        (today / "tensors.json").write_text(text)
        seal(today)

    for said in refusals(today):
        assert "tensors.json: is no index of tensors: " in said
        assert message in said
        assert len(said) < 1000


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "{}", "[]", "null", '{"format": 2}', "\0", "é"]
)
def test_what_is_no_index_is_refused(today: Path, text: str) -> None:
    (today / "tensors.json").write_bytes(text.encode("latin-1"))
    seal(today)

    for said in refusals(today):
        assert "tensors.json: is no index of tensors: " in said


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", "x\n", "é"])
def test_a_list_of_files_elsewhere_is_refused(today: Path, name: str) -> None:
    text = json.dumps({**META, "files": {name: 1}, "checksums": {name: f"sha256:{'0' * 64}"}})
    (today / "meta.json").write_text(checksums.sealed(text))

    said = problem(today)

    assert said is not None
    assert said.startswith(f"{today}/meta.json: files")


def test_no_pickle_does_anything_but_be_read_or_refused(earlier: Path, tmp_path: Path) -> None:
    """Mutated indices, and pickles built to blow up: never another error, and no memory."""
    good = (earlier / ".metadata").read_bytes()
    draw = random.Random(11)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(earlier / "__0_0.distcp", copy)
    hostile = [
        b"",
        b"\x80\x04.",
        b"\x80\x04" + b"(" * 200_000 + b".",
        b"\x80\x04N" + b"\x85" * 200_000 + b".",  # tuples in tuples
        b"\x80\x04}(N" + b"\x85" * 200_000 + b"Nu.",  # as a key
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo of 2^31 entries
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",  # bytes without an end
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        b"\x80\x04)" + b"".join(b"\x94h%ch%c\x86" % (i, i) for i in range(99)) + b".",  # doubling
        b"\x80\x04]\x94h\x00a.",  # a list that has itself
        b"cos\nsystem\n(S'true'\ntR.",
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = 0
    for number in range(300 + len(hostile)):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        (copy / ".metadata").write_bytes(hostile[number - 300] if number >= 300 else data)
        try:
            tensor_index.read(copy, sizes=None)
            read += 1
        except DocumentError as error:
            assert "is no index of tensors" in str(error)
            assert len(str(error)) < 600
    assert read < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
