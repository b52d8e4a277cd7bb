"""Training data: text on disk to batches of tokens, the same batches under every plan.

A corpus is prepared once: its documents are tokenised, one after the other, into one file of tokens
that training maps into memory.  The stream of training is epoch after epoch of all documents, each
epoch in its own seeded order; sample i is the tokens [i L, i L + L] of that stream, L = seq_len, so
each token is predicted once per epoch, and a sample depends on nothing but corpus, seed and i.

Files of rows (JSON lines, parquet) hold texts, or conversations.  Of those the tokens that the loss
counts are marked beside the tokens, and meshwright.runtime.data.packing lays them into samples.

What is done with the tokens, and on how many ranks, is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sysconfig
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from meshwright.planner.catalog.machine_figures import cache_folder
from meshwright.planner.documents.document import (
    first_error,
    is_file,
    is_folder,
    is_there,
    json_data,
    read_text,
)
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.system.safe_files import folder_within
from meshwright.runtime.core import checksums
from meshwright.runtime.data import row_readers as records
from meshwright.runtime.data.chat import Conversations

END_OF_BYTES = 256
"""The token after each document when bytes are the tokens."""
PIECE_BYTES = 2**20
"""Longer files become several documents: memory stays small, and one file can be shuffled."""
NO_TEXT = ("__pycache__", "site-packages")
"""Folders that hold caches and other people's programs rather than the text of a corpus."""
STRUCTURED = {
    "JSON": (".json", ".ipynb"),
    "a table": (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx"),
    "compressed": (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz"),
}
"""Endings of files that hold text among other things, which a model would learn too."""
FIRST = 4096
FIRST_BYTES = {
    b"PAR1": "a table (parquet)",
    b"ARROW1": "a table (arrow)",
    b"Obj\x01": "a table (avro)",
    b"\x1f\x8b": "compressed (gzip)",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ\0": "compressed (xz)",
    b"\x28\xb5\x2f\xfd": "compressed (zstd)",
    b"PK\x03\x04": "compressed (zip)",
}
TOKENS = "tokens.bin"
TOKEN_TYPES = ("uint16", "uint32")
_FORMAT = 3


class Tokenizer(Protocol):
    """A converter from text to token numbers."""

    name: str
    end: int
    dtype: np.dtype[Any]

    def tokens(self, text: bytes) -> NDArray[Any]:
        """Return the tokens of valid UTF-8 text."""
        ...


class ByteTokenizer:
    """Each byte is a token; 256 ends a document."""

    name = "bytes"
    end = END_OF_BYTES
    dtype: np.dtype[Any] = np.dtype(np.uint16)

    def tokens(self, text: bytes) -> NDArray[Any]:
        """Return the text's bytes."""
        return np.frombuffer(text, np.uint8).astype(self.dtype)


class Pretrained:
    """The tokenizer in a Hugging Face folder: `tokenizer.json` and its end-of-text token."""

    def __init__(self, folder: Path) -> None:
        import tokenizers  # noqa: PLC0415 - comes with transformers, which planning does not need

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DocumentError(
                "tokenizer", "has no tokenizer.json; save a fast tokenizer there", file=str(folder)
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a broken file
            raise DocumentError("", f"is no tokenizer: {error}", file=str(file)) from error
        self.end = self._end(folder)
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
        self.name = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    def tokens(self, text: bytes) -> NDArray[Any]:
        """Return the text's tokens, without the marks a tokenizer may put around a text."""
        encoding = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def _end(self, folder: Path) -> int:
        """Return the token that ends a text, by the names that configurations have for it."""
        file = folder / "tokenizer_config.json"
        try:
            settings = json_data(read_text(file)) if is_there(file) else {}
        except DocumentError as error:
            raise error.in_file(str(file)) from error
        for key in ("eos_token", "sep_token"):
            named = settings.get(key) if isinstance(settings, dict) else None
            content = named.get("content") if isinstance(named, dict) else named
            token = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
            if token is not None:
                return int(token)
        raise DocumentError(
            "eos_token",
            "is no token of the tokenizer; name the token that ends a text",
            file=str(file),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The text files of a corpus, in order, before anything is read."""

    source: Path
    paths: tuple[Path, ...]
    single: bool
    """The user named this one file, so it must be text."""
    rows: bool = False
    """They hold rows (meshwright.runtime.data.row_readers) rather than plain text."""


def standard_library() -> Path:
    """Return the folder of Python's own sources: text that every machine with Python has."""
    return Path(sysconfig.get_paths()["stdlib"])


def files(source: Path, *, suffixes: Sequence[str] = ()) -> Files:
    """Return the files of a corpus, sorted by their path; an empty corpus is an error.

    Hidden files and folders are left out, and so are the folders of NO_TEXT.  A file whose name
    says that it is structured is refused, in a folder too: the rest may be its description alone.
    """
    if is_file(source):
        refuse_structured(source)
        return Files(source=source, paths=(source,), single=True, rows=_has_rows(source))
    if not is_there(source):
        raise DocumentError(
            "", "does not exist; give a text file or a folder of them", file=str(source)
        )
    if not is_folder(source):
        raise DocumentError(
            "", "is neither a file nor a folder; give one of them", file=str(source)
        )
    paths = [path for path in _walk(source) if not suffixes or path.suffix in suffixes]
    if not paths:
        kind = f"files that end in {', '.join(suffixes)}" if suffixes else "files"
        raise DocumentError(
            "", f"has no {kind} to train on; give a folder that has some", file=str(source)
        )
    for path in paths:
        refuse_structured(path)
    of_rows = [path for path in paths if _has_rows(path)]
    if of_rows and len(of_rows) < len(paths):
        other = next(path for path in paths if path not in of_rows)
        raise DocumentError(
            "",
            f"has rows ({of_rows[0].name}) and other files ({other.name}); name a folder of one "
            "kind, or one file",
            file=str(source),
        )
    return Files(source=source, paths=tuple(paths), single=False, rows=bool(of_rows))


def _has_rows(path: Path) -> bool:
    return path.suffix.lower() in records.ENDINGS


def refuse_structured(path: Path) -> None:
    """Refuse a file that is no plain text by its name."""
    for what, endings in STRUCTURED.items():
        if path.suffix.lower() in endings:
            raise _structure_error(path, what)


def _structure_error(path: Path, what: str) -> DocumentError:
    return DocumentError(
        "",
        f"is {what}, not plain text; write the text that it contains to a .txt file and name that, "
        "or its rows as lines of JSON (.jsonl), or move it out of the folder",
        file=str(path),
    )


def _refuse_disguised(path: Path, begin: bytes) -> None:
    """Refuse a file that is no plain text by its first bytes, whatever its name."""
    for magic, what in FIRST_BYTES.items():
        if begin.startswith(magic):
            raise _structure_error(path, what)
    first_key = rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*\"[^\"\n]*\"\s*:"
    if re.match(first_key, begin):
        raise _structure_error(path, "JSON")


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DocumentError("", f"cannot be read: {error.strerror}", file=error.filename)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in NO_TEXT)
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A prepared corpus: `tokens.bin`, `starts.npy` and `corpus.json` in one folder."""

    folder: Path
    source: str
    tokenizer: str
    documents: int
    tokens: int
    """Tokens of one epoch, ends of documents included."""
    vocabulary: int
    """One more than the largest token that occurs."""
    skipped: int
    """Files of the folder that are not UTF-8 text, or conversations in which nothing counts."""
    dtype: str
    digest: str
    """Digest of the tokens and of the starts of documents."""
    checksums: Mapping[str, str]
    """Checksums of the corpus files, by name (meshwright.runtime.core.checksums)."""
    kind: records.Kind = "text"
    counted: int = 0
    """Tokens of conversations that the loss counts."""

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> Corpus:
        """Read what `prepare` wrote: its description as it was written, and files of their sizes.

        With `verify` every byte of the files is compared with what was written.
        """
        try:
            text = read_text(folder / "corpus.json")
            if not checksums.seal_holds(text):
                raise ValueError("corpus.json has another checksum than was written")
            about = json_data(text)
            del about["checksum"]
            try:
                corpus = TypeAdapter(cls).validate_python({**about, "folder": folder})
            except ValidationError as error:
                raise first_error(error) from None
            if verify:
                corpus.verify()
            have = (folder / TOKENS).stat().st_size
            if corpus.dtype not in TOKEN_TYPES:
                raise ValueError(f"its tokens are of type {corpus.dtype!a:.20}")
            want = corpus.tokens * np.dtype(corpus.dtype).itemsize
            if have != want or len(corpus.starts) != corpus.documents + 1:
                raise ValueError(f"tokens.bin has {have} bytes, not {want}")
        except (DocumentError, OSError, ValueError, TypeError, EOFError, MemoryError) as error:
            raise LaunchError(
                f"{folder}: is no prepared corpus ({error}); delete the folder"
            ) from None
        return corpus

    def verify(self) -> None:
        """Refuse files with other bytes than were written.

        Every byte is read once, on one thread: 1 to 2 GB/s where the processor has instructions
        for SHA-256.  A launcher does it once for all ranks of its node.
        """
        wrong = checksums.differing(self.folder, self.checksums, list(self.checksums))
        if wrong is not None:
            raise LaunchError(f"{wrong}; delete the folder {self.folder} to prepare the text again")

    def read(self, begin: int, count: int) -> NDArray[Any]:
        """Return tokens of `stream`, all of them in the vocabulary."""
        tokens = self.stream[begin : begin + count]
        if len(tokens) and int(tokens.max()) >= self.vocabulary:
            place = int(np.argmax(tokens >= self.vocabulary))
            raise LaunchError(
                f"{self.folder / TOKENS}: token {begin + place} is {int(tokens[place])}, and the "
                f"tokens that were written end at {self.vocabulary - 1}; the file is damaged: "
                f"delete the folder {self.folder} to prepare the text again"
            )
        return tokens

    @cached_property
    def stream(self) -> NDArray[Any]:
        """All tokens of one epoch in the order of the files, mapped from disk  [token]."""
        return np.memmap(self.folder / TOKENS, dtype=self.dtype, mode="r")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Start of each document in `stream`, and the end of `stream`  [document + 1]."""
        with checksums.open_regular(self.folder / "starts.npy") as file:
            starts: NDArray[np.int64] = np.load(file)
        return starts

    @cached_property
    def counts(self) -> NDArray[np.bool_]:
        """Mask of the tokens of conversations that the loss counts, mapped from disk  [token]."""
        return np.memmap(self.folder / "counts.bin", dtype=np.bool_, mode="r")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a model whose embedding has no row for some token."""
        if vocab_size < self.vocabulary:
            raise DocumentError(
                "vocab_size",
                f"is {vocab_size}, but tokens by {self.tokenizer} reach {self.vocabulary - 1}; the "
                f"model needs a vocabulary of {self.vocabulary} or more, or another tokenizer",
            )


def prepare(corpus: Files, *, tokenizer: Path | None = None, cache: Path | None = None) -> Corpus:
    """Tokenise a corpus into the cache, or find it there if no file has changed since.

    `tokenizer` is a Hugging Face folder; without one, bytes are tokens.  Only one piece of one
    document is in memory at a time.
    """
    kind = _kind(corpus) if corpus.rows else "text"
    chosen: Tokenizer | Conversations
    if kind == "conversations":
        chosen = _conversations(corpus, tokenizer)
    else:
        chosen = ByteTokenizer() if tokenizer is None else Pretrained(tokenizer)
    parent = (cache_folder() if cache is None else cache) / "corpora"
    folder = parent / _key(corpus, chosen.name)
    if folder.is_dir():
        return Corpus.open(folder, verify=True)
    temporary = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder_within(parent.parent, parent.name)
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=".new."))
        if isinstance(chosen, Conversations):
            _tokenise_conversations(corpus, chosen, temporary)
        else:
            _tokenise(corpus, chosen, temporary)
        try:
            temporary.rename(folder)
        except OSError:
            # Another launch prepared the same corpus meanwhile; its tokens are the same.
            if not folder.is_dir():
                raise
    except OSError as error:
        raise LaunchError(
            f"{error.filename or parent}: the corpus cannot be prepared: {error.strerror}; "
            "MESHWRIGHT_CACHE names another folder for it"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return Corpus.open(folder, verify=True)


def _key(corpus: Files, tokenizer: str) -> str:
    """Return a name for these files as they are now, read this way."""
    listing = []
    for path in corpus.paths:
        stat = path.stat()
        listing.append((str(path.relative_to(corpus.source)), stat.st_size, stat.st_mtime_ns))
    what = [_FORMAT, PIECE_BYTES, str(corpus.source.resolve()), tokenizer, listing]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


def _tokenise(corpus: Files, tokenizer: Tokenizer, folder: Path) -> None:
    starts = array("q", [0])
    largest, skipped = tokenizer.end, 0
    digest = hashlib.sha256()
    with (folder / TOKENS).open("wb") as out:
        for path in corpus.paths:
            begin, lengths = out.tell(), array("q")
            file_digest = hashlib.sha256()
            try:
                for piece in _texts(path) if corpus.rows else pieces(path):
                    tokens = tokenizer.tokens(piece)
                    tokens = np.append(tokens, np.array(tokenizer.end, tokenizer.dtype))
                    largest = max(largest, int(tokens.max()))
                    lengths.append(len(tokens))
                    file_digest.update(tokens.tobytes())
                    out.write(tokens.tobytes())
            except UnicodeDecodeError as error:
                if corpus.single:
                    raise DocumentError(
                        "", "is not UTF-8 text; save it as UTF-8", file=str(path)
                    ) from error
                out.seek(begin)
                out.truncate()
                skipped += 1
                continue
            for length in lengths:
                starts.append(starts[-1] + length)
            digest.update(file_digest.digest() + lengths.tobytes())
    if len(starts) == 1:
        raise DocumentError(
            "",
            f"has no text to train on ({skipped} files are not UTF-8); save them as UTF-8",
            file=str(corpus.source),
        )
    _describe(
        corpus,
        folder,
        starts,
        tokenizer=tokenizer.name,
        vocabulary=largest + 1,
        skipped=skipped,
        dtype=tokenizer.dtype.name,
        digest="sha256:" + digest.hexdigest()[:16],
    )


def _describe(corpus: Files, folder: Path, starts: array[int], **more: str | int) -> None:
    """Write where documents start and what a prepared corpus is, with checksums of its files."""
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    about = {
        "source": str(corpus.source),
        "documents": len(starts) - 1,
        "tokens": starts[-1],
        **more,
    }
    files = {path.name: checksums.of_file(path) for path in sorted(folder.iterdir())}
    text = checksums.with_seal(json.dumps({**about, "checksums": files}))
    (folder / "corpus.json").write_text(text, encoding="utf-8")


def _kind(corpus: Files) -> records.Kind:
    """Return what the rows of a corpus are, by the first of them."""
    for path in corpus.paths:
        for place, row in records.rows(path):
            return records.kind_of(row, place, path)
    raise DocumentError(
        "", "has no rows to train on; give a table with rows", file=str(corpus.source)
    )


def _texts(path: Path) -> Iterator[bytes]:
    """Yield the texts of a file's rows."""
    for place, row in records.rows(path):
        text = row.get("text")
        if not isinstance(text, str):
            raise DocumentError(
                place, "has no 'text', as earlier rows have; write all rows alike", file=str(path)
            )
        yield text.encode()


def _conversations(corpus: Files, tokenizer: Path | None) -> Conversations:
    if tokenizer is None:
        raise DocumentError(
            "tokenizer",
            "is needed for conversations, whose chat template writes them: name its folder "
            "(--tokenizer), or plan from a model's folder that has one",
            file=str(corpus.source),
        )
    return Conversations(tokenizer)


def _tokenise_conversations(corpus: Files, chosen: Conversations, folder: Path) -> None:
    starts = array("q", [0])
    largest, skipped, counted = chosen.end, 0, 0
    dtype = np.dtype(np.uint16 if chosen.size <= 2**16 else np.uint32)
    digest = hashlib.sha256()
    with (folder / TOKENS).open("wb") as out, (folder / "counts.bin").open("wb") as marks:
        for path in corpus.paths:
            for place, row in records.rows(path):
                if records.kind_of(row, place, path) != "conversations":
                    raise DocumentError(
                        place,
                        "is no conversation, as earlier rows are; write all rows alike",
                        file=str(path),
                    )
                tokens, counts = chosen.tokens(row, place, path)
                if not any(counts[1:]):
                    skipped += 1
                    continue
                written = np.array(tokens, dtype), np.array(counts, np.bool_)
                largest = max(largest, int(written[0].max()))
                counted += int(written[1].sum())
                for one, file in zip(written, (out, marks), strict=True):
                    file.write(one.tobytes())
                    digest.update(one.tobytes())
                starts.append(starts[-1] + len(tokens))
    if len(starts) == 1:
        raise DocumentError(
            "",
            f"has nothing that an assistant says ({skipped} conversations without); "
            "give conversations with answers of the role assistant",
            file=str(corpus.source),
        )
    digest.update(starts.tobytes())
    _describe(
        corpus,
        folder,
        starts,
        tokenizer=chosen.name,
        vocabulary=largest + 1,
        skipped=skipped,
        dtype=dtype.name,
        digest="sha256:" + digest.hexdigest()[:16],
        kind="conversations",
        counted=counted,
    )


def pieces(path: Path) -> Iterator[bytes]:
    """Yield a text file in pieces of at most PIECE_BYTES, cut after a line where there is one.

    Raises UnicodeDecodeError where the file is not UTF-8 text; a zero byte is not text either.
    """
    with path.open("rb") as file:
        _refuse_disguised(path, file.read(FIRST))
        file.seek(0)
        rest = b""
        while block := file.read(PIECE_BYTES - len(rest)):
            rest += block
            if len(rest) < PIECE_BYTES:
                continue
            cut = rest.rfind(b"\n") + 1 or _last_character(rest)
            yield _text(rest[:cut])
            rest = rest[cut:]
        if rest:
            yield _text(rest)


def _last_character(text: bytes) -> int:
    """Return where the last, perhaps unfinished, UTF-8 character of a text starts."""
    start = len(text) - 1
    while start > max(0, len(text) - 4) and text[start] & 0b1100_0000 == 0b1000_0000:
        start -= 1
    return start


def _text(piece: bytes) -> bytes:
    piece.decode()
    zero = piece.find(b"\0")
    if zero >= 0:
        raise UnicodeDecodeError("utf-8", piece, zero, zero + 1, "zero byte")
    return piece


class Batch(NamedTuple):
    """Samples, and where they hold documents what counts in them and where each begins."""

    tokens: NDArray[np.int64]
    """[sample, seq_len + 1]"""
    counts: NDArray[np.bool_] | None = None
    """Mask of the tokens, without the first, that the loss counts  [sample, seq_len]."""
    starts: NDArray[np.int64] | None = None
    """Start in the sample of each token's document, without the last token  [sample, seq_len]."""


class CorpusSamples:
    """The samples of a corpus, by their index in the endless stream."""

    def __init__(self, corpus: Corpus, *, seq_len: int, seed: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def batch(self, first: int, count: int) -> Batch:
        """Return samples first, first + 1, ..., `count` of them."""
        result = np.empty((count, self.seq_len + 1), np.int64)
        for row in range(count):
            self._read((first + row) * self.seq_len, result[row])
        return Batch(result)

    def epoch(self, sample: int) -> int:
        """Return how many epochs are complete before a sample."""
        return sample * self.seq_len // self.corpus.tokens

    def _read(self, position: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the stream's tokens from `position` on."""
        done = 0
        while done < len(out):
            epoch, offset = divmod(position + done, self.corpus.tokens)
            order, ends = self._order(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            left = int(ends[place]) - offset
            begin = int(self.corpus.starts[order[place] + 1]) - left
            count = min(len(out) - done, left)
            out[done : done + count] = self.corpus.read(begin, count)
            done += count

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return an epoch's documents in their order, and where each ends in the epoch."""
        if epoch not in self._epochs:
            order = permutation(self.corpus.documents, self.seed, epoch)
            ends = np.cumsum(np.diff(self.corpus.starts)[order])
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = (order, ends)
        return self._epochs[epoch]


def permutation(count: int, *seeds: int) -> NDArray[np.int64]:
    """Return 0, 1, ... in an order that depends on the seeds alone.

    Sorted by keys from Philox, whose raw stream numpy promises not to change.
    """
    keys = np.random.Philox(np.random.SeedSequence(seeds))
    order: NDArray[np.int64] = np.argsort(keys.random_raw(count), kind="stable")
    return order
