"""Plans of the library's models, launched as users do it, and how far their losses lie apart."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.document import read, write
from meshwright.planner.documents.events import StepRecord
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan, Training
from meshwright.planner.errors import LaunchError
from meshwright.runtime.data import corpus as data
from meshwright.runtime.launch import launch as launching
from meshwright.runtime.launch import training_loop as train
from meshwright.runtime.launch.launch_config import Launch
from meshwright.runtime.run import run_folder as run
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.run_folder import RankOrders
from tests.limits import PATIENCE_S
from tests.runtime import cases, combinations, library_runs
from tests.runtime.combinations import Bound
from tests.runtime.library_runs import LibraryRun, Settings
from tests.runtime.ranks import Crew

STEPS = 6
TIE = 3e-5
"""Below this a difference of probabilities may be round-off.

AdamW's first steps are of full size however small a gradient is, so rounding grows.  The library's
own run does the same with samples in reverse and other kernels: losses jump by 5e-6 in such steps.
"""
TIED = 1e-4
"""How far losses may lie apart once a token went to another expert by round-off."""
ROUND_OFFS = 4
"""How many times the library's own distance from float64 a gradient norm may be off.

Some steps have a gradient that magnifies rounding a hundredfold, in the library as here.
"""
TEXT = Path(__file__).parents[2] / "LICENSE"
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}
SETTINGS = Settings()
TRAINING = Training(
    learning_rate=SETTINGS.highest,
    warmup_steps=SETTINGS.warmup,
    rate_schedule="cosine",
    rate_steps=SETTINGS.end,
    floor=SETTINGS.floor,
    beta1=SETTINGS.beta1,
    beta2=SETTINGS.beta2,
    epsilon=SETTINGS.epsilon,
    weight_decay=SETTINGS.decay,
    clip_norm=SETTINGS.clip,
)
NAMES = {
    "llama": ("llama", False),
    "tied llama": ("llama", True),
    "gpt2": ("gpt2", True),
    "gemma2": ("gemma2", True),
    "mixtral": ("mixtral", False),
    "qwen3_moe": ("qwen3_moe", False),
}
"""The library's models, each with what a row says of it: family, tied."""


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="library-")


def home() -> Path:
    """Return a folder that goes when this process ends."""
    return Path(_home().name)


@functools.cache
def published(name: str, layers: int, stored: str) -> Path:
    """Return the folder of a published model."""
    folder = home() / f"{name.replace(' ', '-')}-{layers}-{stored}"
    library_runs.save(name, layers, STORED[stored], folder)
    return folder


@functools.cache
def graph_of(folder: Path) -> ModelGraph:
    """Return the model as `plan` reads it from there."""
    return resolve_model(str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(combinations.Row):
    """A combination that trains one of the library's models from weights in files."""

    stored: str = "fp32"
    shares: tuple[int, ...] = ()
    """Micro-batches of each data-parallel rank, where they differ."""

    @property
    def name(self) -> str:
        """The model's name in library_runs."""
        return next(name for name, of in NAMES.items() if of == (self.family, self.tied))

    @property
    def folder(self) -> Path:
        """Where its weights are."""
        return published(self.name, 3 if self.stages <= 4 else 6, self.stored)

    def graph(self) -> ModelGraph:
        """Return the model."""
        return graph_of(self.folder)

    def document(self) -> Plan:
        """Return the plan that is launched."""
        plan = combinations.Row.plan(self)
        if self.shares:
            plan = cases.shared(plan, self.shares)
        return plan.model_copy(update={"training": TRAINING, "timeout_s": PATIENCE_S})

    @property
    def shown(self) -> str:
        """The row as people write it."""
        shares = f", shares {self.shares}" if self.shares else ""
        return f"{self.text}{shares}, stored in {self.stored}"


def row(name: str, stored: str, **choices: Any) -> Row:
    """Return a row by the model's name."""
    family, tied = NAMES[name]
    return Row(family=family, tied=tied, stored=stored, **choices)


@functools.cache
def batches(global_batch: int) -> tuple[torch.Tensor, ...]:
    """Return what each step is fed: all that the oracle is told by this project."""
    corpus = data.prepare(data.files(TEXT), cache=home())
    samples = data.CorpusSamples(corpus, seq_len=cases.SEQ_LEN, seed=TRAINING.seed)
    every = (samples.batch(step * global_batch, global_batch) for step in range(STEPS))
    return tuple(torch.from_numpy(batch.tokens) for batch in every)


@functools.cache
def expected(folder: Path, global_batch: int, *, half: bool, stale: bool) -> LibraryRun:
    """Return what the library's own model does."""
    cast = torch.bfloat16 if half else None
    return library_runs.train(folder, batches(global_batch), SETTINGS, cast=cast, stale=stale)


def oracle(row: Row) -> LibraryRun:
    """Return the library's run that a row is held against."""
    return expected(row.folder, row.global_batch, half=row.precision == "bf16", stale=_stale(row))


@functools.cache
def round_off(folder: Path, global_batch: int, *, stale: bool) -> list[float]:
    """Return how far the library's gradient norms lie from float64, by step, in whichever order."""
    fed = batches(global_batch)
    run = functools.partial(library_runs.train, folder, settings=SETTINGS, stale=stale)
    exact = run(fed, dtype=torch.float64).norms
    others = run(fed).norms, run([batch.flip(0) for batch in fed]).norms
    return [max(abs(a - e), abs(b - e)) / e for e, a, b in zip(exact, *others, strict=True)]


def _stale(row: Row) -> bool:
    return row.schedule[0] == "pipedream-2bw"


@dataclass(frozen=True)
class Found:
    """Losses and gradient norms of a launch, by step."""

    losses: list[float]
    norms: list[float]

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> Found:
        """Read them from a run's metrics."""
        return cls([r.loss for r in records], [r.grad_norm for r in records])


def launched(row: Row, output: Path, **options: Any) -> Found:
    """Launch a row's plan as the command does, and read its metrics."""
    return launched_plan(row.document(), output, weights=row.folder, **options)


def launched_plan(plan: Plan, output: Path, *, weights: Path, **options: Any) -> Found:
    """Launch a plan as the command does, and read its metrics."""
    file = output / "plan.yaml"
    output.mkdir(parents=True)
    write(plan, file)
    asked = {"data": TEXT, "weights": weights, "steps": STEPS, **options}
    launching.launch(
        Launch(file, LaunchRun(output=output / "run", **asked), device="cpu", quiet=True)
    )
    return Found.of(list(run.read_records(run.metrics_file(output / "run"))))


class OnCrew:
    """What starts ranks for a launch, with processes that are there already."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def __call__(self, command: Sequence[str], ranks: Sequence[int], *_: Any, **__: Any) -> None:
        """Let every rank carry out the orders that its command names."""
        assert len(ranks) == self._crew.world
        try:
            self._crew.do(carry_out, command[-1])
        except RuntimeError as error:
            raise LaunchError(str(error)) from error


def carry_out(file: str) -> None:
    """Do what `python -m meshwright.runtime.launch.rank_main` does in a process of its own."""
    orders = read(RankOrders, file)
    rank = dist.get_rank()
    record = train.train(orders, rank=rank, local_rank=rank)
    run.write_json(record, run.record_file(orders.output, rank))


@dataclass(frozen=True)
class Distance:
    """How far a row lies from its oracle: the largest relative distance of any step."""

    row: Row
    loss: float
    norm: float
    beyond: float
    """Of norms too, beyond what round-off explains."""
    tied: float
    """Of losses from the step on in which round-off decides for a token between two experts."""
    steps: int
    """Steps before that one, which the others are of."""

    @property
    def text(self) -> str:
        """The distance with its row."""
        return (
            f"{self.row.ranks} ranks, {self.row.shown}: {self.loss:.1e}, norm {self.norm:.1e}, "
            f"beyond round-off {self.beyond:.1e}, {self.steps} steps, then {self.tied:.1e}"
        )

    def within(self, bound: Bound) -> bool:
        """Tell whether it is small enough."""
        return self.loss <= bound.loss and self.beyond <= bound.norm and self.tied <= TIED


def distance(row: Row, found: Found) -> Distance:
    """Compare a launch with the library's run."""
    wanted = oracle(row)
    norms, noise = wanted.norms, [0.0] * STEPS
    steps = STEPS
    if row.precision == "fp32":
        noise = round_off(row.folder, row.global_batch, stale=_stale(row))
        steps = next((step for step, gap in enumerate(wanted.gaps) if gap < TIE), STEPS)
    if _stale(row):  # which tells the norm of the step before
        norms, noise = [0.0, *norms[:-1]], [0.0, *noise[:-1]]
    losses = [_off(a, b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    off = [_off(a, b) for a, b in zip(found.norms, norms, strict=True)]
    beyond = [a - ROUND_OFFS * b for a, b in zip(off, noise, strict=True)]
    return Distance(
        row,
        loss=max(losses[:steps], default=0.0),
        norm=max(off[:steps], default=0.0),
        beyond=max(beyond[:steps], default=0.0),
        tied=max(losses[steps:], default=0.0),
        steps=steps,
    )


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative distance of any step."""
    return max(_off(a, b) for a, b in zip(found, wanted, strict=True))


def _off(found: float, wanted: float) -> float:
    return abs(found - wanted) / wanted if wanted else abs(found)
