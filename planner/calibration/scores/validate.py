"""Predictions compared with a table of real runs, row by row, source by source.

Rows whose inputs are all known (tier A) make the scores; rows with gaps are predicted too and
scored apart.  Sources are scored one by one and then averaged, since large sweeps would drown the
rest.  A row is judged on time, memory and rank only where the table permits it.
"""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.planner.calibration.scores.statistics import (
    ErrorScore,
    OutOfMemoryScore,
    RankScore,
    error_score,
    out_of_memory_score,
    rank_score,
)
from meshwright.planner.calibration.tables.predictions import Tables, predict_run
from meshwright.planner.calibration.tables.rows import (
    NO_KIN,
    MeasuredRun,
    Skipped,
    measured_setups,
    read_rows,
)
from meshwright.planner.documents.framework_space import EVERYTHING, Facts, conflicts
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import GIB
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import cell
from meshwright.planner.requests.setup import Setup
from meshwright.planner.system.gc_pause import pause_collector

Told = Callable[[int, int], None]
Outcome = Literal["ran", "out_of_memory", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("ran", "out_of_memory", "refused")
WORST = 10
ROW_COLUMNS = (
    "id",
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "peak_memory_gib",
    "fits",
    "fit_probability",
    "outcome",
    "reason",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One row: what was seen, and what was predicted or why nothing was."""

    measured: MeasuredRun
    setup: Setup | None
    prediction: Prediction | None
    reason: str = ""
    """Reason why nothing was predicted, or why the run's framework refuses its layout."""

    @property
    def outcome(self) -> Outcome | None:
        """Predicted outcome: the run trains, memory is too small, or its framework refuses it.

        It is None where nothing is predicted.
        """
        if self.prediction is None:
            return None
        if self.reason:
            return "refused"
        return "ran" if self.prediction.fits else "out_of_memory"

    @property
    def step_time_s(self) -> float | None:
        """Predicted seconds of a step."""
        return self.prediction.step_time_s if self.prediction else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Predicted peak in GiB, of the kind and rank that the row names."""
        if self.prediction is None or self.setup is None:
            return None
        seen = self.measured
        reported = self.setup.request.framework.memory.reported
        kind = reported if seen.memory_kind == "unknown" else seen.memory_kind
        return self.prediction.memory_bytes(kind, seen.memory_rank) / GIB

    @property
    def times(self) -> tuple[float, float] | None:
        """Predicted and measured seconds, where both exist."""
        if self.prediction is None or not self.measured.step_time_s:
            return None
        return self.prediction.step_time_s, self.measured.step_time_s

    @property
    def memories(self) -> tuple[float, float] | None:
        """Predicted and measured GiB, where both exist."""
        peak = self.peak_memory_gib
        if peak is None or not self.measured.peak_memory_gib:
            return None
        return peak, self.measured.peak_memory_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Scores of a source's predictions."""

    step_time: ErrorScore | None
    peak_memory: ErrorScore | None
    out_of_memory: OutOfMemoryScore | None
    ranking: RankScore | None
    coverage: float | None
    """Share of measured step times inside the predicted range."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All rows with their predictions, and the scores."""

    rows: tuple[ScoredRow, ...]
    sources: dict[str, Score]
    """Scores by source over complete rows (tier A)."""
    incomplete: dict[str, Score]
    """Scores by source over rows with gaps in their inputs (tier B)."""
    skipped: dict[str, int]
    """Rows that could not be predicted, by reason."""
    fallbacks: dict[str, int]
    """Rows of frameworks that have no rules of their own, by framework."""
    outcomes: dict[Outcome, tuple[int, int]]
    """Rows that ran and rows that ran out of memory, by predicted outcome: to run, not to fit, or
    to be refused."""

    @property
    def worst(self) -> list[ScoredRow]:
        """The rows whose step times are missed most, of each source at most three."""
        taken: Counter[str] = Counter()
        result = []
        for row in sorted(self.rows, key=_time_miss, reverse=True):
            source = row.measured.source
            if row.times and row.measured.judge_time and taken[source] < 3:
                taken[source] += 1
                result.append(row)
        return result[:WORST]


@pause_collector()
def validate(
    path: Path,
    *,
    progress: Told | None = None,
    unknown: Collection[str] = (),
    left_out: bool = False,
    kin: Mapping[str, Collection[str]] = NO_KIN,
) -> Validation:
    """Predict every row of a table of runs and score the predictions.

    `unknown` names frameworks that are left out: their runs are those of an unknown framework.
    `left_out`: each row is predicted without the figures that rest on runs of its own source, or of
    its source and those that `kin` names for it.
    """
    table = read_rows(path)
    sources = {row.get("source", "") for row in table} - {""} if left_out else set()
    rows: list[ScoredRow] = []
    predictions: dict[tuple[tuple[str, str], ...], Prediction] = {}
    tables = Tables()
    for index, (measured, setup) in enumerate(
        measured_setups(table, unknown=unknown, left_out=sources, kin=kin)
    ):
        if progress is not None and index % 16 == 0:
            progress(index, len(table))
        if isinstance(setup, Skipped):
            rows.append(
                ScoredRow(measured=measured, setup=None, prediction=None, reason=setup.reason)
            )
            continue
        key = tuple((k, v) for k, v in table[index].items() if k not in _SEEN)
        if left_out:
            key = (*key, ("source", measured.source))
        try:
            if key not in predictions:
                predictions[key] = predict_run(setup, tables)
        except DocumentError as error:  # a precision that the accelerator has no peak for
            rows.append(
                ScoredRow(measured=measured, setup=None, prediction=None, reason=str(error))
            )
            continue
        rows.append(
            ScoredRow(
                measured=measured, setup=setup, prediction=predictions[key], reason=_refusal(setup)
            )
        )
    if progress is not None:
        progress(len(table), len(table))
    return validation_of(rows)


def _refusal(setup: Setup) -> str:
    """Return why a run's framework refuses the combination of its layout; empty if it does not."""
    request = setup.request
    facts = Facts(request.model, request.cluster, request.job, setup.layout)
    conflict = next(conflicts(request.framework.space or EVERYTHING, facts), None)
    return (
        "" if conflict is None else f"{request.framework.name} refuses it: {conflict.text(facts)}"
    )


_SEEN = frozenset(
    {
        "id",
        "source",
        "source_ref",
        "step_time_s",
        "tokens_per_s_per_device",
        "peak_memory_gib",
        "memory_kind",
        "memory_rank",
        "out_of_memory",
        "inputs_tier",
        "judge_time",
        "judge_memory",
        "judge_rank",
        "sweep",
    }
)
"""Columns that no prediction depends on."""


def validation_of(rows: Sequence[ScoredRow]) -> Validation:
    """Return the scores of predicted rows."""
    complete: dict[str, list[ScoredRow]] = defaultdict(list)
    incomplete: dict[str, list[ScoredRow]] = defaultdict(list)
    for row in rows:
        (complete if row.measured.complete else incomplete)[row.measured.source].append(row)
    fallbacks = Counter(
        row.measured.framework or "not named"
        for row in rows
        if row.prediction and row.setup and not row.setup.known
    )
    return Validation(
        rows=tuple(rows),
        sources={name: score(complete[name]) for name in sorted(complete)},
        incomplete={name: score(incomplete[name]) for name in sorted(incomplete)},
        skipped=dict(Counter(row.reason for row in rows if row.prediction is None)),
        fallbacks=dict(fallbacks),
        outcomes={
            outcome: (
                sum(row.outcome == outcome and not row.measured.out_of_memory for row in rows),
                sum(row.outcome == outcome and bool(row.measured.out_of_memory) for row in rows),
            )
            for outcome in OUTCOMES
        },
    )


def score(rows: Iterable[ScoredRow]) -> Score:
    """Return the scores of the predictions of some rows."""
    rows = list(rows)
    timed = [row for row in rows if row.times and row.measured.judge_time]
    sweeps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.measured.sweep and row.measured.judge_rank and row.times:
            sweeps[row.measured.sweep].append(row.times)
    inside = [
        row.prediction.step_time_low_s <= row.times[1] <= row.prediction.step_time_high_s
        for row in timed
        if row.prediction and row.times
    ]
    return Score(
        step_time=error_score([row.times for row in timed if row.times]),
        peak_memory=error_score(
            [row.memories for row in rows if row.memories and row.measured.judge_memory]
        ),
        out_of_memory=out_of_memory_score(
            [
                (row.prediction.fits, row.measured.out_of_memory)
                for row in rows
                if row.prediction and row.measured.out_of_memory is not None
            ]
        ),
        ranking=rank_score(list(sweeps.values())),
        coverage=sum(inside) / len(inside) if inside else None,
        rows=len(rows),
    )


def macro(scores: Iterable[Score]) -> dict[str, Any]:
    """Return the averages over sources, each with as many sources as have that figure."""
    scores = list(scores)
    result: dict[str, Any] = {}
    for name in ("step_time", "peak_memory", "out_of_memory", "ranking"):
        parts = [asdict(part) for s in scores if (part := getattr(s, name)) is not None]
        result[name] = {
            key: sum(part[key] for part in parts) / len(parts)
            for key in (parts[0] if parts else {})
            if key != "n"
        }
        result[name]["n"] = sum(part["n"] for part in parts)
        result[name]["sources"] = len(parts)
    covered = [s.coverage for s in scores if s.coverage is not None]
    result["coverage"] = sum(covered) / len(covered) if covered else None
    return result


def validation_json(validation: Validation) -> dict[str, Any]:
    """Return the output of `validate --json`; all errors are fractions."""
    return {
        "macro": macro(validation.sources.values()),
        "sources": {name: _score_json(s) for name, s in validation.sources.items()},
        "tier_b": {
            "macro": macro(validation.incomplete.values()),
            "sources": {name: _score_json(s) for name, s in validation.incomplete.items()},
        },
        "rows": len(validation.rows),
        "predicted": sum(row.prediction is not None for row in validation.rows),
        "skipped": validation.skipped,
        "unknown_frameworks": validation.fallbacks,
        "outcomes": {
            name: {"ran": ran, "out_of_memory": failed}
            for name, (ran, failed) in validation.outcomes.items()
        },
        "worst": [worst_json(row) for row in validation.worst],
    }


def _score_json(score: Score) -> dict[str, Any]:
    return asdict(score)


def worst_json(row: ScoredRow) -> dict[str, Any]:
    """Return a row with its predicted parts."""
    assert row.prediction is not None
    return {
        "id": row.measured.id,
        "model": row.measured.model,
        "accelerator": row.measured.accelerator,
        "layout": row.setup.text if row.setup else "",
        "predicted_s": row.prediction.step_time_s,
        "measured_s": row.measured.step_time_s,
        "parts": {name: size for name, size in row.prediction.step_parts.items() if size},
    }


def rows_csv(validation: Validation) -> str:
    """Return the predictions as CSV, one line per row of the table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ROW_COLUMNS)
    for row in validation.rows:
        prediction = row.prediction
        if prediction is None:
            writer.writerow([cell(row.measured.id), *[""] * 7, cell(row.reason)])
            continue
        times = (prediction.step_time_s, prediction.step_time_low_s, prediction.step_time_high_s)
        writer.writerow(
            [
                cell(row.measured.id),
                *(f"{seconds:.6g}" for seconds in times),
                f"{row.peak_memory_gib:.6g}",
                int(prediction.fits),
                f"{prediction.fit_probability or 0.0:.4f}",
                row.outcome or "",
                cell(row.reason),
            ]
        )
    return text.getvalue()


def _time_miss(row: ScoredRow) -> float:
    """Return the error of a predicted time, as a ratio of at least 1."""
    if row.times is None:
        return 0.0
    predicted, measured = row.times
    return max(predicted / measured, measured / predicted)
