"""The command `watch`: a run's folder as a table, a page or JSON, and one incident as a report."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from meshwright.planner.documents import document
from meshwright.planner.documents.document import MAX_BYTES, read_bytes
from meshwright.planner.documents.events import Paced
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.units import bytes_text, seconds_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.report.facts import Fact, Summary, plain_table
from meshwright.planner.report.run_page import RunReading, RunTable
from meshwright.planner.whatif.run_status import IncidentCase, RunView
from meshwright.render.text import LEAST_S
from meshwright.runtime.run.run_folder import (
    RankOrders,
    events_file,
    evidence_folder,
    orders_file,
    plan_file,
    prediction_file,
    viewer,
)

SILENT_STEPS, SILENT_S = 5, 30.0
"""Number of steps, and seconds, without any record after which a run counts as silent."""
MOST_SHOWN = 12
"""Largest number of incidents in a terminal, the newest first."""
EVERY_S = 2.0
"""Seconds between two looks at a running run."""
MOST_FILES = 64
"""Largest number of files left by ranks that are read."""
PATH, HOST, USER = "<path>", "<host>", "<user>"
_CODE = re.compile(r"(?:/[^\s/'\"():,;]+)+/([\w.-]+\.py)\b")
_PATH = re.compile(r"(?<![\w<])(?:~|\.{1,2})?(?:/[^\s/'\"(),;:]+)+/?|[A-Za-z]:\\[^\s'\"]+")
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*)?::"
    r"(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*)?(?![\w:])"
)
_PORT = re.compile(r"\b[A-Za-z][\w-]*(?:\.[\w-]+)*(?=:\d{2,5}\b)")
_DOMAIN = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|com|net|org|io|edu|cloud)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """State of a run, read from its folder."""

    folder: Path
    view: RunView
    plan: Plan | None
    steps: int | None
    """Number of steps that were requested."""
    prediction: Prediction | None
    at_unix_s: float
    """Time of reading in Unix seconds."""

    @property
    def is_over(self) -> bool:
        """True if its last attempt ended as it should."""
        return self.view.ended is not None

    @property
    def state(self) -> str:
        """Current activity in words."""
        view, ago_s = self.view, max(0.0, self.at_unix_s - self.view.at_unix_s)
        if view.ended is not None:
            return f"ended after step {view.ended.after_step} ({view.ended.stopped})"
        if not view.seconds.attempts:
            return "has not begun"
        waits = view.cases and view.cases[-1].lost_s is None
        reactions = [decision.reaction for decision in view.cases[-1].decisions] if waits else []
        if "stop" in reactions:
            return f"stopped after step {view.last.step if view.last else 0}"
        allowed_s = max(SILENT_S, SILENT_STEPS * (view.step_s or view.predicted_step_s or 0.0))
        if ago_s > allowed_s:
            return f"silent for {seconds_text(ago_s)}"
        return "starting again" if reactions else "running"


def read_run(folder: str | Path) -> WatchedRun:
    """Read a run's folder; DocumentError where it is none, or damaged."""
    output = Path(folder)
    if not events_file(output).exists():
        raise DocumentError(
            "",
            "has no events.jsonl; name the folder of a run, as launch -o has it",
            file=str(output),
        )
    orders = _read(RankOrders, orders_file(output))
    return WatchedRun(
        folder=output,
        view=viewer(output).view(),
        plan=_read(Plan, plan_file(output)),
        steps=None if orders is None else orders.steps,
        prediction=_read(Prediction, prediction_file(output)),
        at_unix_s=time.time(),
    )


def _read(kind: type[Any], path: Path) -> Any:
    """Return a document of a run; None where there is none yet."""
    return document.read(kind, path) if path.exists() else None


def reading_of(run: WatchedRun, incident: int | None) -> RunReading:
    """Return the reading of a run, or of one of its incidents by its number."""
    return run_reading(run) if incident is None else incident_reading(run, incident)


def run_reading(run: WatchedRun) -> RunReading:
    """Return the content of a terminal or page on a run."""
    view = run.view
    incidents = RunTable(
        title="Incidents",
        head=("no.", "after step", "cause", "where", "done", "lost"),
        rows=tuple(_incident_row(case) for case in view.cases),
    )
    changes = RunTable(
        title="Pace",
        head=("after step", "what"),
        rows=tuple((str(drift.after_step), drift.text) for drift in view.drifts),
    )
    ranks = RunTable(
        title="Slowest ranks",
        head=("rank", "stage", "reads a batch", "works", "step"),
        rows=_rank_rows(view.paced),
    )
    seconds = RunTable(
        title="Seconds", head=("part", "predicted", "measured"), rows=tuple(_second_rows(view))
    )
    tables = (incidents, changes, ranks, seconds)
    return RunReading(
        title=run.folder.name or str(run.folder),
        facts=tuple(_facts(run)),
        tables=tuple(table for table in tables if table.rows),
        alarm=slowness_text(view.step_s, view.predicted_step_s),
        curve=view.curve,
    )


MANY_TIMES = 3.0
"""Factor by which a step may exceed its prediction before an alarm; no range is as wide."""


def slowness_text(step_s: float | None, predicted_s: float | None) -> str:
    """Say that a run is many times slower than predicted, and where to look; empty where not.

    >>> slowness_text(2.0, 1.0)
    ''
    >>> slowness_text(28.0, 1.0)[:50]
    '28 times slower than predicted (28.0 s for 1 s a s'
    """
    if not step_s or not predicted_s or step_s < MANY_TIMES * predicted_s:
        return ""
    return (
        f"{step_s / predicted_s:.0f} times slower than predicted ({seconds_text(step_s)} for "
        f"{seconds_text(predicted_s)} a step): look at the parts of a step below, at a link that "
        "runs over another network than planned, and at devices that others use"
    )


def _facts(run: WatchedRun) -> Iterator[Fact]:
    view = run.view
    if run.plan is not None:
        ranks = f"{view.devices or run.plan.ranks} devices"
        yield Fact(label="run", text=f"{run.plan.model.name}, {ranks}, {run.plan.layout_text}")
    alarm = slowness_text(view.step_s, view.predicted_step_s)
    if alarm:
        yield Fact(label="SLOW", text=alarm, style="bold red", lines=4)
    yield Fact(label="state", text=run.state)
    if view.last is not None:
        of = f" of {run.steps}" if run.steps else ""
        yield Fact(label="step", text=f"{view.last.step}{of}, loss {view.last.loss:.4f}")
    if view.step_s is not None:
        yield Fact(label="pace", text=_pace_text(run, view.step_s))
    if view.seconds.trained_s:
        text = f"{100 * view.seconds.goodput:.1f} %"
        if view.expected is not None and view.expected.is_of_training:
            low, high = 100 * view.expected.goodput_low, 100 * view.expected.goodput_high
            text += f", {100 * view.expected.goodput:.1f} % predicted ({low:.1f} to {high:.1f})"
        yield Fact(label="goodput", text=text)
    if view.saved is not None:
        blocked = seconds_text(view.saved.blocked_s)
        yield Fact(label="saved", text=f"step {view.saved.step}; training waited {blocked}")
    if view.save_failed is not None:
        yield Fact(label="not saved", text=view.save_failed.text)
    lost = view.seconds.steps_lost
    if view.seconds.incidents:
        counts = ", ".join(f"{count} {_word(c)}" for c, count in view.seconds.incidents.items())
        yield Fact(label="incidents", text=f"{counts}; {lost} steps done again")
    for row in _rank_rows(view.paced)[:1]:
        rank, stage, reads, works, _ = row
        text = f"rank {rank} (stage {stage}): reads a batch in {reads}, works {works}"
        yield Fact(label="slowest", text=text)
    for drift in view.drifts[-1:]:
        yield Fact(label="drift", text=drift.text, style="yellow")


def _pace_text(run: WatchedRun, step_s: float) -> str:
    predicted_s, prediction = run.view.predicted_step_s, run.prediction
    text = f"{seconds_text(step_s)} a step"
    if predicted_s is None:
        return text
    text += f", {seconds_text(predicted_s)} predicted"
    if prediction is not None:
        low, high = (
            seconds_text(prediction.step_time_low_s),
            seconds_text(prediction.step_time_high_s),
        )
        text += f" ({low} to {high})"
    return text


def _incident_row(case: IncidentCase) -> tuple[str, ...]:
    done = " then ".join(dict.fromkeys(decision.reaction for decision in case.decisions)) or "-"
    again = f", {case.steps_lost} steps again" if case.steps_lost else ""
    lost = "-" if case.lost_s is None else f"{seconds_text(case.lost_s)}{again}"
    incident = case.incident
    return (
        str(case.number),
        str(incident.after_step),
        _word(incident.cause),
        _where(incident.rank, incident.node),
        done,
        lost,
    )


def _where(rank: int | None, node: int | None) -> str:
    parts = [f"{name} {at}" for name, at in (("rank", rank), ("node", node)) if at is not None]
    return ", ".join(parts) or "-"


def _word(cause: str) -> str:
    return cause.replace("_", " ")


def _rank_rows(paced: Paced | None) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            str(rank.rank),
            str(rank.stage),
            seconds_text(rank.data_s),
            "-" if rank.work_s is None else seconds_text(rank.work_s),
            seconds_text(rank.step_s),
        )
        for rank in (paced.ranks if paced is not None else ())
    )


def _second_rows(view: RunView) -> Iterator[tuple[str, str, str]]:
    before = view.expected.seconds if view.expected is not None else None
    if view.seconds.trained_s:
        for name, measured in view.seconds.parts_s.items():
            expected = 0.0 if before is None else before.get(name, 0.0)
            if max(expected, measured) >= LEAST_S:
                predicted = "-" if before is None else seconds_text(expected)
                yield name, predicted, seconds_text(measured)


def case_of(run: WatchedRun, number: int) -> IncidentCase:
    """Return an incident by its number; DocumentError where there is none."""
    for case in run.view.cases:
        if case.number == number:
            return case
    numbers = ", ".join(str(case.number) for case in run.view.cases) or "none"
    raise DocumentError("incident", f"is {number}; those of this run are {numbers}")


def incident_reading(run: WatchedRun, number: int) -> RunReading:
    """Return the report of an incident: evidence, decision, what was lost, what is to do."""
    case = case_of(run, number)
    incident = case.incident
    facts = [
        Fact(label="when", text=f"{_when(incident.at_unix_s)}, after step {incident.after_step}"),
        Fact(label="cause", text=_word(incident.cause)),
        Fact(label="where", text=_where(incident.rank, incident.node)),
        Fact(label="evidence", text=incident.evidence, lines=12),
    ]
    for decision in case.decisions:
        facts.append(Fact(label="done", text=f"{decision.reaction}, because {decision.why}"))
        if decision.predicted_s is not None:
            text = f"training should go on in {seconds_text(decision.predicted_s)}"
            facts.append(Fact(label="predicted", text=text))
    lost = "training has not gone on yet"
    if case.lost_s is not None:
        lost = f"{seconds_text(case.lost_s)}, with {case.steps_lost} steps done again"
    facts += [Fact(label="lost", text=lost), Fact(label="to do", text=case.advice)]
    tables = [
        RunTable(
            title="Phases until training went on",
            head=("phase", "predicted", "measured"),
            rows=tuple(
                (
                    phase.phase,
                    "-" if phase.predicted_s is None else seconds_text(phase.predicted_s),
                    seconds_text(phase.measured_s),
                )
                for phase in case.phases
            ),
        ),
        RunTable(
            title="Pace before",
            head=("after step", "what"),
            rows=tuple(
                (str(drift.after_step), drift.text)
                for drift in run.view.drifts
                if drift.at_unix_s <= incident.at_unix_s
            ),
        ),
        _memory_table(run),
    ]
    return RunReading(
        title=f"Incident {case.number} of {run.folder.name}",
        facts=tuple(facts),
        tables=tuple(table for table in tables if table.rows),
        texts=tuple(_left_behind(evidence_folder(run.folder, case.attempt))),
    )


def _when(at_unix_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_unix_s))
    except (OverflowError, ValueError, OSError):  # no date that a calendar has
        return f"{at_unix_s:g} s"


def _memory_table(run: WatchedRun) -> RunTable:
    """Return memory and seconds of the plan as predicted, beside what is known of rank 0."""
    rows: list[tuple[str, str, str]] = []
    if run.prediction is not None:
        measured = "-" if run.view.step_s is None else seconds_text(run.view.step_s)
        rows.append(("step", seconds_text(run.prediction.step_time_s), measured))
        for stage, stage_prediction in enumerate(run.prediction.stages):
            peak = run.view.last.peak_memory_bytes if run.view.last and not stage else None
            parts = ", ".join(
                f"{name} {bytes_text(size)}"
                for name, size in stage_prediction.memory_parts.items()
                if size
            )
            rows.append(
                (
                    f"memory of stage {stage}",
                    f"{bytes_text(stage_prediction.peak_memory_bytes)} ({parts})",
                    "-" if peak is None else bytes_text(peak),
                )
            )
    return RunTable(
        title="Predicted and measured", head=("what", "predicted", "measured"), rows=tuple(rows)
    )


def _left_behind(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield stacks and ends of logs that were stored with an incident."""
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("rank-*"))[:MOST_FILES]:
        rank, _, kind = file.name.removeprefix("rank-").partition(".")
        if rank.isdigit() and kind in ("stack", "log"):
            text = read_bytes(file, most=MAX_BYTES).decode(errors="replace")
            title = "Stack" if kind == "stack" else "End of the log"
            yield f"{title} of rank {int(rank)}", text


def without_names(reading: RunReading) -> RunReading:
    """Return the same without hosts, addresses, paths and the user's name."""
    user = os.environ.get("USER", "")

    def incident_text(text: str) -> str:
        return redact(text, [user])

    return replace(
        reading,
        title=incident_text(reading.title),
        facts=tuple(replace(fact, text=incident_text(fact.text)) for fact in reading.facts),
        tables=tuple(
            replace(table, rows=tuple(tuple(map(incident_text, row)) for row in table.rows))
            for table in reading.tables
        ),
        texts=tuple((incident_text(title), incident_text(text)) for title, text in reading.texts),
    )


def reading_json(reading: RunReading, run: WatchedRun) -> dict[str, Any]:
    """Return the output of `watch --json`: the same, with figures as numbers."""
    view = run.view
    summary: dict[str, Any] = {
        "title": reading.title,
        "state": run.state,
        "step": view.last.step if view.last else 0,
        "steps": run.steps,
        "loss": view.last.loss if view.last else None,
        "step_s": view.step_s,
        "predicted_step_s": view.predicted_step_s,
        "goodput": view.seconds.goodput if view.seconds.trained_s else None,
        "predicted_goodput": view.expected.goodput if view.expected else None,
        "seconds": view.seconds.parts_s,
        "steps_lost": view.seconds.steps_lost,
        "failures": view.seconds.failures,
        "facts": [{"label": fact.label, "text": fact.text} for fact in reading.facts],
    }
    summary["tables"] = {
        table.title: [dict(zip(table.head, row, strict=True)) for row in table.rows]
        for table in reading.tables
    }
    summary["texts"] = dict(reading.texts)
    return summary


def reading_parts(reading: RunReading) -> Iterator[RenderableType]:
    """Yield the same for a terminal: facts, and the newest rows of each table."""
    yield Summary(reading.title, reading.facts, whole=True)
    for table in reading.tables:
        shown = plain_table(*table.head)
        for row in table.rows[-MOST_SHOWN:]:
            shown.add_row(*row)
        left_out = len(table.rows) - MOST_SHOWN
        yield f"\n{table.title}" + (f", without the first {left_out}" if left_out > 0 else "")
        yield shown
    for title, text in reading.texts:
        yield f"\n{title}\n{text}"


def redact(text: str, names: Iterable[str] = ()) -> str:
    r"""Return text without hosts, addresses and paths; of code the file's name stays.

    `names` are further words that must not be in it.

    >>> redact('rank 1 at node7.cluster.local:29500, File "/home/ann/my/train.py", line 3')
    'rank 1 at <host>:29500, File "train.py", line 3'
    >>> redact("10.1.2.3 wrote /data/secret/run-1; see ~/runs/a on fe80::1", ["run"])
    '<host> wrote <path>; see <path> on <host>'
    """
    text = _CODE.sub(lambda match: match[1], text)
    text = _PATH.sub(PATH, text)
    text = _ADDRESS.sub(HOST, text)
    text = _DOMAIN.sub(HOST, text)
    text = _PORT.sub(lambda match: match[0] if match[0].endswith("py") else HOST, text)
    for name in sorted({*names, socket.gethostname(), socket.gethostname().split(".")[0]}):
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", HOST, text)
    return text
