"""Checkpoints: what a run needs to go on, under this plan or under any other.

    DIR/step-000030/
    ├── rank-00000.bin ...       elements of the tensors, a file from each rank
    ├── tensors.json             where each tensor lies in them (tensor_index.py)
    ├── plan.yaml  model.yaml    what was trained, and how
    ├── config.json              the model as Hugging Face transformers knows it, if it does
    ├── tokenizer.json, ...      what stands beside a model's weights (tokenizer_files.py), if known
    ├── user-00000.pt ...        of a script: its own state, from each slice of the batch
    └── meta.json                written last: step, position in the data, size and checksum of
                                 every file, and a checksum of itself

A checkpoint is written under a hidden name, put on the disk file by file, and renamed when it is
whole, by its ranks or, where they died before, by who comes next (commit_recovery.py); only then
are old ones hidden again, and deleted.  So a crash at any moment costs no
checkpoint that was complete before, and a folder `step-...` that is not what `meta.json` tells was
damaged later: it is refused by the file's name, and a run that is started again by itself keeps it
aside under another name, says so, and takes the newest one that is whole.

Random numbers need no room: training seeds them anew in each step from the plan's seed and the
step.  Ranks save (writer.py) and load together; the launcher looks for checkpoints without
torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from meshwright.planner.documents.document import (
    MAX_BYTES,
    Document,
    Part,
    open_regular_file,
    unreadable,
    write,
    write_text,
)
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.units import Count, Positive, Text
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint import tensor_index
from meshwright.runtime.checkpoint.shard_manifest import Checksum, FileName, WrittenPart, to_disk
from meshwright.runtime.checkpoint.tensor_index import INDEX, TensorIndex
from meshwright.runtime.core import checksums
from meshwright.runtime.data.corpus import Corpus
from meshwright.runtime.data.sample_digest import SampleDigest

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 2
META = "meta.json"
PLAN, MODEL, CONFIG = "plan.yaml", "model.yaml", "config.json"

_STEP = re.compile(r"step-(\d+)")


class TrainingIdentity(Part):
    """The training that a state belongs to: its model, its data, and the sampling order.

    Whatever state training goes on from, a checkpoint or a copy in memory, is checked by this.
    """

    model: Text
    model_digest: Text
    corpus: Text
    corpus_digest: Text
    seq_len: Positive
    seed: Count
    frozen: Text | None = None
    """Identity of the weights that are not trained."""

    @classmethod
    def of(
        cls, *, plan: Plan, model: ModelGraph, corpus: Corpus, frozen: str | None
    ) -> TrainingIdentity:
        """Return the identity of what a plan trains."""
        return cls(
            model=model.name,
            model_digest=model.digest,
            corpus=corpus.source,
            corpus_digest=corpus.digest,
            seq_len=plan.seq_len,
            seed=plan.training.seed,
            frozen=frozen,
        )

    def check(self, run: TrainingIdentity, *, source: str) -> None:
        """Refuse that a `run` goes on from a state of this identity; `source` says where it is."""
        if self.model_digest != run.model_digest:
            raise DocumentError(
                "model_digest",
                f"is {self.model_digest} ({self.model}), but the plan is for {run.model} with "
                f"{run.model_digest}; this checkpoint belongs to another model",
                file=source,
            )
        if self.frozen != run.frozen:
            raise DocumentError(
                "frozen",
                f"is {self.frozen or 'nothing'}, and this run would freeze "
                f"{run.frozen or 'nothing'}; continue adapters with the weights that they were "
                "trained on (--weights)",
                file=source,
            )
        for name, have, want, other in (
            ("corpus_digest", self.corpus_digest, run.corpus_digest, f"the data ({run.corpus})"),
            ("seq_len", self.seq_len, run.seq_len, "the plan"),
            ("seed", self.seed, run.seed, "the plan"),
        ):
            if have != want:
                raise DocumentError(
                    name,
                    f"is {have}, but {other} has {want}; the position in the data would mean "
                    "other samples: use the same, or train anew",
                    file=source,
                )


class Progress(Document):
    """Progress and identity of a training: the `meta.json` of a checkpoint."""

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
    """Identity of the weights that were not trained and are therefore not in the checkpoint."""
    used: SampleDigest | None = None
    """Digest of the samples before `sample`, noted as batches were read; None for scripts."""
    files: Mapping[FileName, Count] = Field(default_factory=dict)
    """The checkpoint's other files and their bytes."""
    checksums: Mapping[FileName, Checksum] = Field(default_factory=dict)
    """Checksums of the same files."""
    checksum: Checksum | None = None
    """Checksum of this file up to this field."""

    @model_validator(mode="after")
    def _all_files(self) -> Self:
        if set(self.checksums) != set(self.files):
            raise ValueError("files and checksums name different files")
        return self

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
        names = TrainingIdentity.model_fields
        saved = TrainingIdentity(**{name: getattr(self, name) for name in names})
        run = TrainingIdentity.of(plan=plan, model=model, corpus=corpus, frozen=frozen)
        saved.check(run, source=str(folder))
        wrong = "no sample was counted" if self.used is None else self.used.wrong(self.sample)
        if wrong is not None:
            raise DocumentError("used", f"says that {wrong}", file=str(folder))


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
        with open_regular_file(file) as weight_file:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode() + weight_file.read(2**20))
    return f"sha256:{digest.hexdigest()[:16]}"


def all_steps(folder: Path) -> list[Path]:
    """Return what a folder has under the name of a checkpoint, oldest step first."""
    steps = []
    for path in folder.glob("step-*"):
        if match := _STEP.fullmatch(path.name):
            steps.append((int(match[1]), path))
    return [path for _, path in sorted(steps)]


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest step first."""
    return [path for path in all_steps(folder) if problem(path) is None]


def newest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the latest step."""
    return next((path for path in reversed(all_steps(folder)) if problem(path) is None), None)


def to_resume(folder: Path) -> Path | None:
    """Return the checkpoint of the latest step in a folder, None where there is none.

    Raises LaunchError where it is damaged: neither an older one nor a new start was asked for.
    """
    steps = all_steps(folder)
    if not steps:
        return None
    wrong = problem(steps[-1])
    if wrong is not None:
        raise refusal(steps[-1], wrong)
    return steps[-1]


def set_damaged_aside(folder: Path, *, say: Callable[[str], object]) -> None:
    """Give other names to damaged checkpoints behind the newest that is whole, and say so.

    A run that is started again goes on from that one.  Where none is whole all stay as they are:
    `to_resume` refuses them, and nobody starts anew without being asked.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(all_steps(folder)):
        wrong = problem(path)
        if wrong is None:
            break
        damaged.append((path, wrong))
    else:
        return
    for old, wrong in damaged:
        aside = next(
            name
            for number in itertools.count(1)
            if not (name := folder / f"damaged-{old.name}{f'-{number}' * (number > 1)}").exists()
        )
        with contextlib.suppress(OSError):  # then it is refused
            old.rename(aside)
            say(f"warning: {wrong}; it is kept as {aside.name}, and {path} is gone on from")


def problem(checkpoint: Path) -> str | None:
    """Return which file is not what was written, or None if none is seen to be.

    All files are there in their sizes, and those that are not tensors have the checksums that were
    written; `verify` reads the tensors' files too.
    """
    try:
        done = progress(checkpoint)
    except DocumentError as error:
        return str(error)
    match = _STEP.fullmatch(checkpoint.name)
    if match and int(match[1]) != done.step:
        return f"{checkpoint / META}: is of step {done.step}"
    if INDEX not in done.files:
        return f"{checkpoint}: has no index of its tensors"
    wrong = checksums.misplaced_file(checkpoint, done.files, besides=META)
    if wrong is None:
        small = [name for name in (INDEX, PLAN, MODEL, CONFIG) if name in done.files]
        wrong = checksums.differing(checkpoint, done.checksums, small)
    return wrong


def verify(checkpoint: Path) -> str | None:
    """Read every file; return which is not what was written, or None."""
    wrong = problem(checkpoint)
    if wrong is None:
        written = progress(checkpoint).checksums
        threads = os.cpu_count() or 1
        wrong = checksums.differing(checkpoint, written, list(written), threads=threads)
    return wrong


def refusal(checkpoint: Path, wrong: str) -> LaunchError:
    """Return the error that a run cannot go on from a checkpoint, with the way out."""
    name, folder = checkpoint.name, checkpoint.parent
    before = newest_beside(checkpoint)
    if before is not None:
        way = f"move {name} out of {folder} to resume {before}, which is complete"
    else:
        way = f"{folder} has no other complete checkpoint; move {name} out of it to start anew"
    return LaunchError(f"{wrong}; {way}")


def newest_beside(checkpoint: Path) -> Path | None:
    """Return the newest complete checkpoint beside this one, of another step."""
    others = [path for path in complete(checkpoint.parent) if path.name != checkpoint.name]
    return others[-1] if others else None


def progress(checkpoint: Path) -> Progress:
    """Return how far a checkpoint has come."""
    path = checkpoint / META
    try:
        with checksums.open_regular(path) as file:
            text = file.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(error, path) from error
    done = Progress.parse(text, file=str(path))
    if not checksums.seal_holds(text):
        raise DocumentError(
            "",
            "is damaged: its checksum is not that of what was written",
            file=str(path),
        )
    return done


def begin(
    temporary: Path,
    done: Progress,
    *,
    plan: Plan,
    model: ModelGraph | None,
    config: str | None,
    companions: Mapping[str, Path] = MappingProxyType({}),
) -> list[str]:
    """Write what a checkpoint has beside its tensors, and its progress; return the files' names.

    One rank does it.  `companions` are files to be copied, by their names there.
    """
    write(plan, temporary / PLAN)
    names = [PLAN]
    if model is not None:
        write(model, temporary / MODEL)
        names.append(MODEL)
    if config is not None:
        write_text(config, temporary / CONFIG)
        names.append(CONFIG)
    for name, file in companions.items():
        shutil.copyfile(file, temporary / name)
        names.append(name)
    write_text(_meta(done), parts.folder_of(temporary) / META)
    to_disk(parts.folder_of(temporary) / META)
    return names


def finish(temporary: Path, done: Progress, written: Sequence[WrittenPart]) -> None:
    """Complete a checkpoint of which all ranks have their parts on the disk.

    One rank does it, when the index is written.
    """
    to_disk(temporary / INDEX)
    sizes = {INDEX: (temporary / INDEX).stat().st_size}
    checks = {INDEX: checksums.of_file(temporary / INDEX)}
    for part in written:
        sizes |= part.files
        checks |= part.checksums
    lists = {"files": dict(sorted(sizes.items())), "checksums": dict(sorted(checks.items()))}
    whole = done.model_copy(update={**lists, "checksum": None})
    write_text(_meta(whole), temporary / META)
    to_disk(temporary / META)
    to_disk(temporary)


def let_count(temporary: Path, target: Path) -> None:
    """Let a completed checkpoint count, under its own name."""
    if target.exists():  # of this step, from a run that came no further
        target.rename(temporary.with_name(f"{temporary.name}.before"))
    temporary.rename(target)
    to_disk(target.parent)


def _meta(done: Progress) -> str:
    return checksums.with_seal(json.dumps(done.model_dump(mode="json", exclude_none=True)))


def load(checkpoint: Path, state: Mapping[str, Tensor], *, verified: bool = False) -> None:
    """Fill `state` in place from a checkpoint that any plan wrote, with all ranks or alone.

    Together, ranks verify the tensors' files before they read, unless it was done.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    from meshwright.runtime.checkpoint.storage import TensorReader  # noqa: PLC0415 - needs torch

    try:
        done = progress(checkpoint)
        index = _index(checkpoint, done)
        unread = () if verified else index.files
        unread_checksums = {name: done.checksums[name] for name in unread}
        with warnings.catch_warnings():
            # A process without a group reads alone, as it should.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                dict(state), storage_reader=TensorReader(checkpoint, index, verify=unread_checksums)
            )
    except DocumentError as error:
        raise refusal(checkpoint, str(error)) from error
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        damage = _damage(error)
        if damage is not None:
            raise refusal(checkpoint, str(damage)) from error
        raise LaunchError(f"{checkpoint}: cannot be loaded: {short(error)}") from error


def stored_names(checkpoint: Path) -> list[str]:
    """Return the tensors that a checkpoint has."""
    return list(_index(checkpoint, progress(checkpoint)).tensors)


def _index(checkpoint: Path, done: Progress) -> TensorIndex:
    return tensor_index.read(checkpoint, sizes=done.files, checksum=done.checksums[INDEX])


def _damage(error: BaseException) -> LaunchError | None:
    """Return what some rank found to be damaged, if that is why loading failed."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()]
    return next((failure for failure in failures if isinstance(failure, LaunchError)), None)


def short(error: BaseException) -> str:
    """Return one line of an error; a CheckpointException quotes the tracebacks of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = next(iter(failures.items()))
        return f"rank {rank}: {short(error)}"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` complete checkpoints, and what killed runs left."""
    _sweep(folder)
    for old in complete(folder)[:-keep]:
        # Half deleted under its own name it would pass for damaged.
        with contextlib.suppress(OSError):
            old.rename(old.with_name(f".{old.name}.old"))
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Delete what has no name of its own: what killed runs left, and what is old."""
    for left_behind in folder.glob(".step-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
