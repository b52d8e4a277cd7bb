"""Documents that no argument names: what runs, checkpoints and caches keep, and stacks.

Each is read as the project reads it, from a file of its name in the current folder.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from planner import catalog, document
from planner.errors import MeshwrightError
from planner.stack import Stack
from runtime import checkpoint, checksums, run, tensor_index
from runtime.data import Corpus

TOKENS = np.arange(8, dtype=np.uint16).tobytes()


def _stack() -> Any:
    path = Path(catalog.__file__).parent / "stacks" / "native.yaml"
    return {"format": 1, **yaml.safe_load(path.read_text())}


def _progress() -> Any:
    return {
        "step": 3, "sample": 24, "epoch": 0, "seq_len": 10, "seed": 5, "model": "toy",
        "model_digest": "sha256:m", "plan_digest": "sha256:p", "corpus": "texts",
        "corpus_digest": "sha256:c", "loss": 1.5, "frozen": "w", "files": {"rank-00000.bin": 8},
        "checksums": {"rank-00000.bin": checksums.of_bytes(TOKENS)},
    }  # fmt: skip


def _index() -> Any:
    return {
        "format": 1,
        "files": ["rank-00000.bin"],
        "tensors": {"w": {"dtype": "float32", "shape": [2], "chunks": [[0, 0, [0], [2]]]}},
    }


def _failure() -> Any:
    return {"rank": 0, "kind": "ValueError", "message": "no", "at_unix_s": 1.0}


def _starts() -> bytes:
    written = io.BytesIO()
    np.save(written, np.array([0, 8], np.int64))
    return written.getvalue()


def _corpus() -> Any:
    return {
        "source": "s", "tokenizer": "bytes", "documents": 1, "tokens": 8, "vocabulary": 257,
        "skipped": 0, "dtype": "uint16", "digest": "sha256:d", "kind": "text", "counted": 0,
        "checksums": {
            "tokens.bin": checksums.of_bytes(TOKENS), "starts.npy": checksums.of_bytes(_starts()),
        },
    }  # fmt: skip


BASES: dict[str, Callable[[], Any]] = {
    "stack.yaml": _stack,
    "meta.json": _progress,
    "tensors.json": _index,
    "ranks/rank-00000.failure.json": _failure,
    "corpus.json": _corpus,
}
SEALED = ("meta.json", "corpus.json")
"""Those whose last key is the checksum of the rest."""
DATA = {"rank-00000.bin": TOKENS, "tokens.bin": TOKENS, "starts.npy": _starts()}
"""The files that documents speak of."""
READERS: dict[str, Callable[[], object]] = {
    "stack.yaml": lambda: document.read(Stack, "stack.yaml"),
    "meta.json": lambda: (checkpoint.problem(Path()), checkpoint.progress(Path())),
    "tensors.json": lambda: tensor_index.read(Path(), sizes={"rank-00000.bin": len(TOKENS)}),
    "ranks/rank-00000.failure.json": lambda: run.read_failures(Path(), 1),
    "corpus.json": lambda: Corpus.open(Path(), verify=True).starts,
}


def read(name: str) -> int:
    """Read a document as the project does; return what a command would end with."""
    try:
        READERS[name]()
    except MeshwrightError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 1
    return 0
