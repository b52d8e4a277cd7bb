"""Samples are checked against the stream written out in full, and batches against each other."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.core import checksums
from meshwright.runtime.data import corpus as data
from meshwright.runtime.data.corpus import Corpus, CorpusSamples, files, prepare


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def poems(tmp_path: Path) -> Path:
    folder = tmp_path / "poems"
    (folder / "old").mkdir(parents=True)
    (folder / "b.txt").write_text("über den Bäumen\n")
    (folder / "a.txt").write_text("roses\n")
    (folder / "old" / "c.md").write_text("violets\n")
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_text("secret")
    (folder / "picture.bin").write_bytes(b"\x89PNG\xff\xfe")
    return folder


def stream(corpus: Corpus, seed: int, epochs: int) -> list[int]:
    """Return the epochs' tokens, one document after the other."""
    samples = CorpusSamples(corpus, seq_len=1, seed=seed)
    result: list[int] = []
    for epoch in range(epochs):
        for document in samples._order(epoch)[0]:
            result += corpus.stream[corpus.starts[document] : corpus.starts[document + 1]].tolist()
    return result


def test_documents_are_the_files_in_order_each_with_its_end(poems: Path, cache: Path) -> None:
    corpus = prepare(files(poems), cache=cache)

    wanted = b"".join((poems / name).read_bytes() for name in ("a.txt", "b.txt", "old/c.md"))
    tokens = corpus.stream.tolist()
    assert bytes(t for t in tokens if t < 256) == wanted
    assert [i for i, t in enumerate(tokens) if t == 256] == [s - 1 for s in corpus.starts[1:]]
    assert (corpus.documents, corpus.tokens, corpus.skipped) == (3, len(wanted) + 3, 1)
    assert corpus.vocabulary == 257


def test_suffixes_choose_the_files(poems: Path) -> None:
    chosen = files(poems, suffixes=[".md"])

    assert [path.name for path in chosen.paths] == ["c.md"]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    texts=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=9), min_size=1, max_size=5),
    seq_len=st.integers(1, 12),
    seed=st.integers(0, 3),
    first=st.integers(0, 9),
)
def test_a_sample_is_its_place_in_the_stream(
    texts: list[str], seq_len: int, seed: int, first: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    corpus = prepare(files(folder), cache=tmp_path_factory.mktemp("cache"))

    batch = CorpusSamples(corpus, seq_len=seq_len, seed=seed).batch(first, 3).tokens

    length = (first + 3) * seq_len + 1
    tokens = stream(corpus, seed, length // corpus.tokens + 1)
    for row, sample in enumerate(batch):
        begin = (first + row) * seq_len
        assert sample.tolist() == tokens[begin : begin + seq_len + 1]


def test_each_epoch_has_every_document_once_in_an_order_of_its_own(
    tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(50):
        (folder / f"{number:02}.txt").write_text(f"text {number}")
    corpus = prepare(files(folder), cache=cache)

    orders = [
        CorpusSamples(corpus, seq_len=8, seed=1)._order(epoch)[0].tolist() for epoch in range(3)
    ]

    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert CorpusSamples(corpus, seq_len=8, seed=2)._order(0)[0].tolist() != orders[0]


def test_the_order_of_an_epoch_never_changes_between_versions(tmp_path: Path, cache: Path) -> None:
    """A checkpoint's position means the same documents under another numpy: a golden order."""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("x")
    corpus = prepare(files(tmp_path), cache=cache)

    assert CorpusSamples(corpus, seq_len=4, seed=7)._order(0)[0].tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [4, 3, 6, 2, 1, 0, 5, 7]


@given(
    seed=st.integers(0, 5),
    step=st.integers(0, 20),
    layouts=st.lists(st.sampled_from([(1, 24), (2, 4), (4, 3), (8, 1), (24, 1), (3, 2)])),
)
@settings(max_examples=30, deadline=None)
def test_every_layout_sees_the_same_batches(
    seed: int, step: int, layouts: list[tuple[int, int]]
) -> None:
    corpus = library()
    samples = CorpusSamples(corpus, seq_len=16, seed=seed)
    whole = samples.batch(step * 24, 24).tokens

    for degree, micro_batch in layouts:
        parts = []
        for rank in range(degree):
            share = 24 // degree
            own = range(step * 24 + rank * share, step * 24 + (rank + 1) * share)
            for begin in range(own.start, own.stop, micro_batch):
                parts.append(samples.batch(begin, micro_batch).tokens)
        assert np.array_equal(np.concatenate(parts), whole)


_LIBRARY: list[Corpus] = []


def library() -> Corpus:
    """Return a few of Python's own sources, prepared once for the module."""
    if not _LIBRARY:
        import tempfile

        source = data.standard_library() / "json"
        _LIBRARY.append(
            prepare(files(source, suffixes=[".py"]), cache=Path(tempfile.mkdtemp(prefix="corpus")))
        )
    return _LIBRARY[0]


def test_the_standard_library_has_python_sources() -> None:
    found = files(data.standard_library(), suffixes=[".py"])

    assert len(found.paths) > 500
    assert not any("site-packages" in path.parts for path in found.paths)


def test_long_files_become_documents_that_join_to_the_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "PIECE_BYTES", 10)
    text = "one\ntwo\nthree äöüßäöüßäöüß and no line end\nlast"
    (tmp_path / "long.txt").write_text(text)

    cut = list(data.pieces(tmp_path / "long.txt"))
    corpus = prepare(files(tmp_path / "long.txt"), cache=cache)

    assert b"".join(cut).decode() == text
    assert cut[0] == b"one\ntwo\n"
    assert max(map(len, cut)) <= 10
    assert corpus.documents == len(cut)


def test_a_corpus_is_prepared_once_and_again_after_a_change(poems: Path, cache: Path) -> None:
    first = prepare(files(poems), cache=cache)
    made = (first.folder / "tokens.bin").stat().st_mtime_ns
    second = prepare(files(poems), cache=cache)
    (poems / "a.txt").write_text("ROSES\n")
    third = prepare(files(poems), cache=cache)

    assert (second.folder, second.digest) == (first.folder, first.digest)
    assert (second.folder / "tokens.bin").stat().st_mtime_ns == made
    assert third.digest != first.digest
    assert not list(cache.glob("corpora/.new.*"))


def test_the_same_text_split_otherwise_has_another_digest(tmp_path: Path, cache: Path) -> None:
    digests = []
    for name, texts in (("one", ["ab", "c"]), ("two", ["a", "bc"])):
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / name / f"{number}.txt").write_text(text)
        digests.append(prepare(files(tmp_path / name), cache=cache).digest)

    assert digests[0] != digests[1]


def tokenizer_folder(folder: Path, *, end: object = "</s>") -> Path:
    """Write a tokenizer of whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "</s>": 1, "roses": 2, "violets": 3, "trees": 70000}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def test_a_tokenizer_folder_gives_the_tokens(poems: Path, tmp_path: Path, cache: Path) -> None:
    folder = tokenizer_folder(tmp_path / "words", end={"content": "</s>"})

    corpus = prepare(files(poems), tokenizer=folder, cache=cache)

    assert corpus.stream.tolist() == [2, 1, 0, 0, 0, 1, 3, 1]
    assert corpus.vocabulary == 4


def test_a_vocabulary_smaller_than_the_tokens_is_refused(poems: Path, cache: Path) -> None:
    corpus = prepare(files(poems), cache=cache)

    corpus.check_vocabulary(257)
    with pytest.raises(DocumentError, match=r"vocab_size: is 256, .* reach 256; .* of 257 or more"):
        corpus.check_vocabulary(256)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nowhere", "nowhere: does not exist; give a text file or a folder"),
        (lambda p: p, "has no files to train on"),
        (lambda p: _fifo(p / "pipe"), "is neither a file nor a folder"),
    ],
)
def test_a_source_without_files_is_refused(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        files(make(tmp_path))


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("content", [b"caf\xe9", b"zero\0byte", b"half \xe2\x82"])
def test_a_single_file_that_is_no_text_is_refused(
    tmp_path: Path, cache: Path, content: bytes
) -> None:
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(DocumentError, match="file: is not UTF-8 text"):
        prepare(files(tmp_path / "file"), cache=cache)
    assert list((cache / "corpora").iterdir()) == []


NAMES = ("chat.json", "a.JSON", "b.csv", "c.tsv", "d.feather", "e.arrow", "text.txt.gz", "f.zst")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["itself", "alone in a folder", "beside text"])
def test_structured_files_are_refused_by_name(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / name
    file.write_text('{"text": "roses"}\n')
    if where == "beside text":
        (tmp_path / "a.txt").write_text("roses\n")

    with pytest.raises(DocumentError, match=f"{name}: is .*, not plain text; write the text .*txt"):
        files(file if where == "itself" else tmp_path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"messages": []}\n{"messages": []}\n', "JSON"),
        (b'\n  {"text": "roses"}', "JSON"),
        (b'[\n  {\n    "text":\n "roses"\n  }\n]\n', "JSON"),
        (b'\xef\xbb\xbf[{"text": "' + b"roses " * 2**18, "JSON"),
        (b"PAR1\x15\x04", "a table"),
        (b"ARROW1\0\0", "a table"),
        (gzip.compress(b"roses", mtime=0), "compressed"),
        (bz2.compress(b"roses"), "compressed"),
        (lzma.compress(b"roses"), "compressed"),
    ],
)
@pytest.mark.parametrize("single", [True, False])
def test_structured_files_are_refused_by_their_content(
    tmp_path: Path, cache: Path, content: bytes, what: str, single: bool
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("roses\n")
    (folder / "b.txt").write_bytes(content)

    with pytest.raises(DocumentError, match=f"b.txt: is {what}"):
        prepare(files(folder / "b.txt" if single else folder), cache=cache)
    assert list((cache / "corpora").iterdir()) == []


@pytest.mark.parametrize("text", ["{roses}\n", "{\n 'a': 1}", '{"a"}\n', "[1]\n", "P\n", "12,3\n"])
def test_text_that_begins_like_structure_is_text(tmp_path: Path, cache: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)

    assert prepare(files(tmp_path), cache=cache).tokens == len(text) + 1


def test_a_folder_without_text_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xff")
    (tmp_path / "b.txt").write_bytes(b"")

    with pytest.raises(DocumentError, match=r"no text to train on \(1 files are not UTF-8\)"):
        prepare(files(tmp_path), cache=cache)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "is no tokenizer"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "is no token"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "is no token"),
    ],
)
def test_a_broken_tokenizer_folder_is_refused(
    poems: Path, tmp_path: Path, cache: Path, spoil, message: str
) -> None:
    folder = tokenizer_folder(tmp_path / "words")
    spoil(folder)

    with pytest.raises(DocumentError, match=message):
        prepare(files(poems), tokenizer=folder, cache=cache)


def test_a_cache_that_cannot_be_written_is_named(poems: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(LaunchError, match="MESHWRIGHT_CACHE names another folder"):
        prepare(files(poems), cache=tmp_path / "file")


def flip(file: Path, place: int) -> None:
    """Change one bit; size and times of change stay."""
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 0.37, 0.999])
@pytest.mark.parametrize("file", ["corpus.json", "tokens.bin", "starts.npy"])
def test_a_flipped_bit_anywhere_in_the_cache_is_refused(
    poems: Path, cache: Path, file: str, place: float
) -> None:
    corpus = prepare(files(poems), cache=cache)
    path = corpus.folder / file
    flip(path, int(place * path.stat().st_size))

    with pytest.raises(LaunchError, match=f"{corpus.folder}.*; delete the folder"):
        prepare(files(poems), cache=cache)
    shutil.rmtree(corpus.folder)
    assert prepare(files(poems), cache=cache).digest == corpus.digest


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(poems: Path, cache: Path) -> None:
    corpus = prepare(files(poems), cache=cache)
    tokens = np.memmap(corpus.folder / "tokens.bin", dtype=corpus.dtype, mode="r+")
    tokens[7] = 60_000
    tokens.flush()
    samples = CorpusSamples(Corpus.open(corpus.folder), seq_len=4, seed=0)

    with pytest.raises(LaunchError, match=r"tokens.bin: token 7 is 60000, .* end at 256"):
        samples.batch(0, corpus.tokens // 4)


@pytest.mark.parametrize("file", ["corpus.json", "tokens.bin", "starts.npy"])
def test_a_damaged_cache_is_named(poems: Path, cache: Path, file: str) -> None:
    corpus = prepare(files(poems), cache=cache)
    (corpus.folder / file).write_text("{}")

    with pytest.raises(LaunchError, match=f"{corpus.folder}.*; delete the folder"):
        prepare(files(poems), cache=cache)


@pytest.mark.parametrize("name", ["corpus.json", "starts.npy", "tokens.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, Path.touch])
def test_a_prepared_corpus_has_regular_files_only(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("abc")
    corpus = prepare(files(tmp_path / "a.txt"), cache=tmp_path / "cache")
    (corpus.folder / name).unlink()
    make(corpus.folder / name)

    with pytest.raises(LaunchError, match="delete the folder"):
        Corpus.open(corpus.folder)


@pytest.mark.parametrize(
    ("key", "value"), [("dtype", "O"), ("tokens", "x"), ("documents", None), ("checksums", [1])]
)
def test_a_corpus_described_anew_is_checked(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    corpus = prepare(files(tmp_path / "a.txt"), cache=tmp_path / "cache")
    about = json.loads((corpus.folder / "corpus.json").read_text())
    del about["checksum"]
    text = checksums.with_seal(json.dumps({**about, key: value}))
    (corpus.folder / "corpus.json").write_text(text)

    with pytest.raises(LaunchError, match="is no prepared corpus"):
        Corpus.open(corpus.folder, verify=True)
