"""Checkpoints: what a run needs to go on, under this plan or under any other.

    DIR/step-000030/
    ├── .metadata  *.distcp      written by torch.distributed.checkpoint, keyed by parameter name
    ├── plan.yaml  model.yaml    what was trained, and how
    ├── config.json              the model as Hugging Face transformers knows it, if it does
    └── meta.json                written last: step, position in the data, size of every file

A checkpoint is written under a hidden name, put on the disk file by file, and renamed when it is
whole; only then are old ones deleted.  So a folder `step-...` whose files have the sizes that
`meta.json` tells is complete, and a crash at any moment costs no checkpoint that was complete
before.  Random numbers need no room: training seeds them anew in each step from the plan's seed and
the step.  Ranks save (runtime.saving) and load together; the launcher looks for checkpoints without
torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from planner.document import Document, read, write, write_text
from planner.errors import DocumentError, LaunchError
from planner.model import ModelGraph
from planner.plan import Plan
from planner.units import Count, Positive, Text
from runtime.data import Corpus
from runtime.run import write_json

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 2
META = "meta.json"
PLAN, MODEL, CONFIG = "plan.yaml", "model.yaml", "config.json"


class Progress(Document):
    """How far training has come, and of what: the `meta.json` of a checkpoint."""

    kind_of_document: ClassVar[str] = "checkpoint's meta.json"

    step: Positive
    """Done; the learning rate goes on from here too."""
    sample: Count
    """Index of the next sample in the stream."""
    epoch: Count
    seq_len: Positive
    seed: Count
    model: Text
    model_digest: Text
    plan_digest: Text
    corpus: Text
    corpus_digest: Text
    loss: float
    frozen: Text | None = None
    """Of which weights those are that were not trained, and so are not here."""
    files: Mapping[Text, Count] = Field(default_factory=dict)
    """The checkpoint's other files and their bytes."""

    def check(
        self,
        *,
        plan: Plan,
        model: ModelGraph,
        corpus: Corpus,
        folder: Path,
        frozen: str | None = None,
    ) -> None:
        """Refuse to go on with another model, or at a position that means other data."""
        if self.model_digest != model.digest:
            raise DocumentError(
                "model_digest",
                f"is {self.model_digest} ({self.model}), but the plan is for {model.name} with "
                f"{model.digest}; this checkpoint is of another model",
                file=str(folder),
            )
        if self.frozen != frozen:
            raise DocumentError(
                "frozen",
                f"is {self.frozen or 'nothing'}, and this run would freeze {frozen or 'nothing'}; "
                "adapters go on with the weights that they were trained on (--weights)",
                file=str(folder),
            )
        for name, have, want, source in (
            ("corpus_digest", self.corpus_digest, corpus.digest, f"the data ({corpus.source})"),
            ("seq_len", self.seq_len, plan.seq_len, "the plan"),
            ("seed", self.seed, plan.training.seed, "the plan"),
        ):
            if have != want:
                raise DocumentError(
                    name,
                    f"is {have}, but {source} has {want}; the position in the data would mean "
                    "other samples: use the same, or train anew",
                    file=str(folder),
                )


def frozen_weights(plan: Plan, weights: Path | None) -> str | None:
    """Return which weights adapters are trained on, or None where all weights are trained.

    Of a folder of safetensors it tells the sizes of the files, and how each begins: with the list
    of its tensors and the first of them.
    """
    if plan.training.lora is None:
        return None
    if weights is None:
        return f"first values of seed {plan.training.seed}"
    digest = hashlib.sha256()
    for file in sorted(weights.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode() + opened.read(2**20))
    return f"sha256:{digest.hexdigest()[:16]}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest step first."""
    found = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and is_complete(path):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def is_complete(checkpoint: Path) -> bool:
    """Tell whether every file that was written is there in its whole length."""
    if not (checkpoint / ".metadata").is_file() or not (checkpoint / META).is_file():
        return False
    try:
        files = progress(checkpoint).files
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except DocumentError:
        return True  # another format: `progress` says so to whoever wants to go on from here
    except OSError:
        return False


def newest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the latest step."""
    found = complete(folder)
    return found[-1] if found else None


def progress(checkpoint: Path) -> Progress:
    """Return how far a checkpoint has come."""
    return read(Progress, checkpoint / META)


def commit(
    temporary: Path,
    target: Path,
    done: Progress,
    *,
    plan: Plan,
    model: ModelGraph,
    config: str | None,
    keep: int,
) -> None:
    """Make a written checkpoint count: on the disk, under its own name, the oldest gone.

    One rank does it, when all have written their parts and have them on the disk.
    """
    write(plan, temporary / PLAN)
    write(model, temporary / MODEL)
    if config is not None:
        write_text(config, temporary / CONFIG)
    for name in (PLAN, MODEL, *((CONFIG,) if config is not None else ())):
        _to_disk(temporary / name)
    sizes = {path.name: path.stat().st_size for path in temporary.iterdir() if path.is_file()}
    write_json(done.model_copy(update={"files": dict(sorted(sizes.items()))}), temporary / META)
    _to_disk(temporary / META)
    _to_disk(temporary)
    if target.exists():  # of this step, from a run that came no further
        target.rename(temporary.with_name(f"{temporary.name}.before"))
    temporary.rename(target)
    _to_disk(target.parent)
    _prune(target.parent, keep)


def load(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Fill `state` in place from a checkpoint that any plan wrote, with all ranks or alone."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    try:
        with warnings.catch_warnings():
            # A process without a group reads alone, as it should.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(dict(state), checkpoint_id=str(checkpoint))
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise LaunchError(f"{checkpoint}: cannot be loaded: {short(error)}") from error


def short(error: BaseException) -> str:
    """Return one line of an error; a CheckpointException quotes the tracebacks of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = next(iter(failures.items()))
        return f"rank {rank}: {short(error)}"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def _to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is incomplete from the first moment on."""
    (checkpoint / META).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _prune(folder: Path, keep: int) -> None:
    for old in complete(folder)[:-keep]:
        _remove(old)
    for left_behind in folder.glob(".step-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
