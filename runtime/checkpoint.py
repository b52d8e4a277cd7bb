"""Checkpoints: what a run needs to go on, under this plan or under any other.

    DIR/step-000030/
    ├── .metadata  *.distcp      written by torch.distributed.checkpoint, keyed by parameter name
    └── meta.json                written last: step, position in the data, what was trained

A checkpoint is written under a hidden name and renamed when it is whole, so that a folder
`step-...` with `.metadata` and `meta.json` is complete.  Random numbers need no room: training
seeds them anew in each step from the plan's seed and the step.  Ranks save and load together, in
their process group; the launcher looks for checkpoints without torch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from planner.document import Document, read
from planner.errors import DocumentError, LaunchError
from planner.model import ModelGraph
from planner.plan import Plan
from planner.units import Count, Positive, Text
from runtime.data import Corpus
from runtime.run import write_json

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 2


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

    def check(self, *, plan: Plan, model: ModelGraph, corpus: Corpus, folder: Path) -> None:
        """Refuse to go on with another model, or at a position that means other data."""
        if self.model_digest != model.digest:
            raise DocumentError(
                "model_digest",
                f"is {self.model_digest} ({self.model}), but the plan is for {model.name} with "
                f"{model.digest}; this checkpoint is of another model",
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


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest step first."""
    found = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / ".metadata").is_file() and (path / "meta.json").is_file():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def newest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the latest step."""
    found = complete(folder)
    return found[-1] if found else None


def progress(checkpoint: Path) -> Progress:
    """Return how far a checkpoint has come."""
    return read(Progress, checkpoint / "meta.json")


def save(
    folder: Path, state: Mapping[str, Tensor], done: Progress, *, run: str, keep: int = KEEP
) -> Path:
    """Write a checkpoint together with all ranks; only the last `keep` stay.

    `run` is the same on all ranks and new in each run, so that what a killed run left behind is
    never written to.
    """
    import torch.distributed as dist  # noqa: PLC0415
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    _check_finite(state, done.step)
    target = folder / f"step-{done.step:06}"
    temporary = folder / f".{target.name}.{run}"
    try:
        dcp.save(dict(state), checkpoint_id=str(temporary))
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise LaunchError(f"{target}: the checkpoint cannot be written: {_short(error)}") from error
    # dcp.save ends on rank 0 when every rank has written its part.
    if dist.get_rank() == 0:
        write_json(done, temporary / "meta.json")
        if target.exists():
            _remove(target)
        temporary.rename(target)
        _prune(folder, keep)
    return target


def load(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Fill `state` in place from a checkpoint that any plan wrote."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    try:
        dcp.load(dict(state), checkpoint_id=str(checkpoint))
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise LaunchError(f"{checkpoint}: cannot be loaded: {_short(error)}") from error


def _check_finite(state: Mapping[str, Tensor], step: int) -> None:
    """Refuse to save weights that no training can go on from."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    spoilt = 0.0
    device = torch.device("cpu")
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        device = local.device
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            spoilt = 1.0
    flag = torch.tensor(spoilt, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if float(flag):
        raise LaunchError(
            f"step {step} left weights or optimizer state that are not finite; they are not saved. "
            "Lower the learning rate"
        )


def _short(error: BaseException) -> str:
    """Return one line of an error; a CheckpointException quotes the tracebacks of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = next(iter(failures.items()))
        return f"rank {rank}: {_short(error)}"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is incomplete from the first moment on."""
    (checkpoint / "meta.json").unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _prune(folder: Path, keep: int) -> None:
    for old in complete(folder)[:-keep]:
        _remove(old)
    for left_behind in folder.glob(".step-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
