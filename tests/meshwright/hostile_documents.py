"""Files that no argument names: what runs, checkpoints and caches have, weights, tokenizers, data.

Each is read as the project reads it, from a file of its name in the current folder.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshwright.api.defaults import Defaults
from meshwright.launch import watch as watching
from meshwright.planner import catalog
from meshwright.planner.documents import document
from meshwright.planner.documents.framework import Framework
from meshwright.planner.errors import MeshwrightError
from meshwright.planner.report.run_page import page
from meshwright.runtime.checkpoint import checkpoint, tensor_index
from meshwright.runtime.checkpoint import commit_recovery as unfinished
from meshwright.runtime.checkpoint import weight_export as export
from meshwright.runtime.core import checksums
from meshwright.runtime.data import corpus as data
from meshwright.runtime.data.corpus import Corpus, Pretrained
from meshwright.runtime.launch import failure_cause as faults
from meshwright.runtime.run import run_folder as run

TOKENS = np.arange(8, dtype=np.uint16).tobytes()


def _framework() -> Any:
    path = Path(catalog.__file__).parent / "frameworks" / "native.yaml"
    return {"format": 1, **yaml.safe_load(path.read_text())}


def _progress() -> Any:
    return {
        "step": 3, "sample": 24, "epoch": 0, "seq_len": 10, "seed": 5, "model": "toy",
        "model_digest": "sha256:m", "plan_digest": "sha256:p", "corpus": "texts",
        "corpus_digest": "sha256:c", "loss": 1.5, "frozen": "w",
        "files": {"rank-00000.bin": len(TOKENS)},
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


def _part() -> Any:
    return {
        "rank": 0, "ranks": 1, "files": {"rank-00000.bin": len(TOKENS)},
        "checksums": {"rank-00000.bin": checksums.of_bytes(TOKENS)},
        "chunks": [["w", "float32", [2], 0, [0], [2]]],
    }  # fmt: skip


def _orders() -> Any:
    return {
        "format": 1, "data": "/d", "steps": 9, "checkpoint": "/c", "checkpoint_every": 3,
        "training": ["seed=1"], "token": "t", "output": "/o", "corpus": "/p", "device": "cpu",
        "started_unix_s": 1.0, "resumed": "/c/step-000003", "peak_step_s": 0.1,
    }  # fmt: skip


def _rank() -> Any:
    return {
        "format": 1, "rank": 0, "stage": 0, "first_step": 1, "step_s": [0.1, 0.2],
        "untimed_steps": [1], "peak_memory_bytes": 9, "not_compiled": {"a": "b"},
    }  # fmt: skip


def _steps() -> Any:
    return [
        {"step": step, "loss": 1.5, "grad_norm": 0.5, "step_s": 0.1, "epoch": 0, "mfu": 0.4}
        for step in (1, 2, 3)
    ]


def _happened() -> Any:
    step = {"loss": 1.5, "grad_norm": 0.5, "step_s": 0.1, "epoch": 0}
    told: list[dict[str, Any]] = [
        {"event": "expected", "seconds": {"steps": 9.0}, "failures": 0.1, "goodput": 0.9,
         "goodput_low": 0.8, "goodput_high": 1.0},
        {"event": "attempt", "plan": "p", "devices": 2, "predicted_step_s": 0.1},
        {"event": "phase", "phase": "start", "measured_s": 1.0},
        *({"event": "step", "record": step | {"step": at}} for at in (1, 2, 3)),
        {"event": "saved", "step": 2, "blocked_s": 0.1, "written_s": 0.2},
        {"event": "drift", "cause": "data", "rank": 1, "measured_s": 2.0, "predicted_s": 1.0,
         "text": "slow"},
        {"event": "paced", "after_step": 3,
         "ranks": [{"rank": 1, "data_s": 0.1, "work_s": 0.2, "step_s": 0.4}]},
        {"event": "incident", "cause": "crash", "rank": 1, "after_step": 3, "evidence": "SIGKILL"},
        {"event": "decision", "reaction": "restart", "why": "once", "predicted_s": 1.0},
        {"event": "attempt", "plan": "p", "devices": 2, "after_step": 2},
        {"event": "step", "record": step | {"step": 3}},
        {"event": "ended", "stopped": "steps", "after_step": 3},
    ]  # fmt: skip
    return [{"at_unix_s": 100.0 + at} | one for at, one in enumerate(told)]


def _texts() -> Any:
    return [{"text": "roses"}, {"text": "violets are \u0416", "more": {"a": [1, 2.5, None]}}]


def _tokenizer() -> Any:
    import tokenizers

    words = {"<unk>": 0, "</s>": 1, "roses": 2, "violets": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made.add_special_tokens(["</s>"])
    return json.loads(made.to_str())


def _safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + TOKENS[:8]


def _recorded() -> bytes:
    return pickle.dumps({"pg_status": {"0": {"last_enqueued_collective": 7}}, "entries": []})


def _own_state() -> bytes:
    import torch

    written = io.BytesIO()
    torch.save({"seen": 3, "names": ["a"], "moment": torch.ones(2)}, written)
    return written.getvalue()


PENDING = ".step-000003.run"
"""A checkpoint whose ranks died before it counted."""
BASES: dict[str, Callable[[], Any]] = {
    "framework.yaml": _framework,
    "meta.json": _progress,
    "tensors.json": _index,
    "ranks/rank-00000.failure.json": _failure,
    "corpus.json": _corpus,
    f"{PENDING}.parts/part-00000.json": _part,
    f"{PENDING}.parts/meta.json": lambda: _progress() | {"files": {}, "checksums": {}},
    "orders.yaml": _orders,
    "ranks/rank-00000.json": _rank,
    "defaults.yaml": lambda: {"format": 1, "cluster": "8xh100", "precision": "bf16"},
    "metrics.jsonl": _steps,
    "events.jsonl": _happened,
    "rows.jsonl": _texts,
    "tokenizer/tokenizer.json": _tokenizer,
    "tokenizer/tokenizer_config.json": lambda: {"eos_token": {"content": "</s>"}, "a": [1]},
    "weights/model.safetensors.index.json": lambda: {
        "metadata": {"total_size": 8}, "weight_map": {"w": "model.safetensors"}
    },
    "weights/model.safetensors": _safetensors,
    "saved/config.json": lambda: {"model_type": "gpt2", "auto_map": {"a": "b"}, "n_layer": 2},
    "saved/user-00000.pt": _own_state,
    "flight/rank-0": _recorded,
}  # fmt: skip
"""Data, which is changed place by place, or bytes."""
SEALED = ("meta.json", "corpus.json", f"{PENDING}.parts/part-00000.json",
          f"{PENDING}.parts/meta.json")  # fmt: skip
"""Those whose last key is the checksum of the rest."""
DATA: dict[str, bytes] = {
    "rank-00000.bin": TOKENS,
    "tokens.bin": TOKENS,
    "starts.npy": _starts(),
    f"{PENDING}/rank-00000.bin": TOKENS,
    f"{PENDING}.parts/.lock": b"",
}
"""The files that documents speak of."""


def _weights() -> object:
    import torch

    from meshwright.runtime.models.safetensors_weights import Weights

    return Weights(Path("weights")).read("w", torch.Size([2]), None)


def _own() -> object:
    from meshwright.runtime.engine.engine_state import own_state

    return own_state(Path("saved"), 0)


def _metrics() -> object:
    path = Path("metrics.jsonl")
    read = list(run.read_records(path)), run.newest_record(path)
    run.forget_steps_after(1, path)
    return read


def _run() -> object:
    found = watching.watched(Path())
    incidents = [case.number for case in found.view.cases]
    readings = [watching.reading_of(found, number) for number in (None, *incidents)]
    for reading in readings:
        page(watching.without_names(reading))
    return watching.reading_json(readings[0], found)


def _index() -> object:
    checksum = checksums.of_file(Path("tensors.json"))
    return tensor_index.read(Path(), sizes={"rank-00000.bin": len(TOKENS)}, checksum=checksum)


def _pending() -> object:
    return unfinished.commit(Path(), say=print)


def _rows() -> object:
    return data.prepare(data.files(Path("rows.jsonl"))).tokens


READERS: dict[str, Callable[[], object]] = {
    "framework.yaml": lambda: document.read(Framework, "framework.yaml"),
    "meta.json": lambda: (checkpoint.problem(Path()), checkpoint.progress(Path())),
    "tensors.json": _index,
    "ranks/rank-00000.failure.json": lambda: run.read_failures(Path(), 1),
    "corpus.json": lambda: Corpus.open(Path(), verify=True).starts,
    f"{PENDING}.parts/part-00000.json": _pending,
    f"{PENDING}.parts/meta.json": _pending,
    "orders.yaml": lambda: document.read(run.RankOrders, "orders.yaml"),
    "ranks/rank-00000.json": lambda: document.read(run.RankRecord, "ranks/rank-00000.json"),
    "defaults.yaml": lambda: document.read(Defaults, "defaults.yaml"),
    "metrics.jsonl": _metrics,
    "events.jsonl": _run,
    "rows.jsonl": _rows,
    "tokenizer/tokenizer.json": lambda: Pretrained(Path("tokenizer")).tokens(b"roses x"),
    "tokenizer/tokenizer_config.json": lambda: Pretrained(Path("tokenizer")).tokens(b"x"),
    "weights/model.safetensors.index.json": _weights,
    "weights/model.safetensors": _weights,
    "saved/config.json": lambda: export._config_of(Path("saved")),
    "saved/user-00000.pt": _own,
    "flight/rank-0": lambda: faults.behind(Path(), "0"),
}


def read(name: str) -> int:
    """Read a document as the project does; return what a command would end with."""
    try:
        READERS[name]()
    except MeshwrightError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 1
    return 0
