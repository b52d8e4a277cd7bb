"""A pipeline's timeline as a picture (SVG): actions of all ranks, and when the pipeline is full.

Actions of one kind and stage are one path, so that thousands of them stay small; of few, each has a
title of its own.

Pipeline timelines as Chrome trace JSON, for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from meshwright.planner.documents.units import seconds_text
from meshwright.planner.report.mesh_picture import COLOURS

if TYPE_CHECKING:
    from meshwright.planner.schedules.schedule_record import Action
    from meshwright.planner.schedules.simulate import Timeline

SHADES = {
    "F": ("forward", 1.0),
    "B": ("backward", 0.55),
    "I": ("gradients of inputs", 0.55),
    "W": ("gradients of weights", 0.3),
}
"""Names of kinds of actions, and how opaque they are."""
MOST_ACTIONS = 9_000
"""Drawn; of a longer timeline each rank shows its first ones."""
MOST_TITLED = 600
"""Actions of a timeline whose every action has a title and its micro-batch in it."""
WIDTH, LEFT, ROW, TOP = 7200, 560, 200, 300
"""Sizes in tenths of a pixel, so that places are whole numbers."""
ROOM_FOR_NUMBER = 110


@dataclass(frozen=True, slots=True)
class _TimelineSpan:
    rank: int
    start_s: float
    end_s: float
    action: Action
    turn: int
    """Place of the action's stage among its rank's stages, from the model's first on."""


def phases(timeline: Timeline) -> tuple[float, float]:
    """Return until when the pipeline fills, and from when it drains.

    It is full once every rank has begun, and drains once the first rank has done its last action.
    """
    working = [rank for rank in range(len(timeline.orders)) if timeline.orders[rank]]
    filled_s = max(timeline.starts_s[rank][0] for rank in working)
    drained_s = min(timeline.finish_s(rank) for rank in working)
    return min(filled_s, drained_s), max(filled_s, drained_s)


def timeline_picture(timeline: Timeline) -> str:
    """Return the picture: a colour for each of a rank's stages, lighter for backwards."""
    ranks = len(timeline.orders)
    spans = list(_spans(timeline, MOST_ACTIONS // ranks))
    scale = (WIDTH - LEFT) / timeline.makespan_s
    height = TOP + ROW * ranks + 260
    body = _phase_bands(timeline, scale, ROW * ranks)
    body += [
        f'<text x="{LEFT - 60}" y="{TOP + ROW * rank + 140}" text-anchor="end">rank {rank}</text>'
        for rank in range(ranks)
    ]
    titled = len(spans) <= MOST_TITLED
    for (kind, turn), of_kind in _by_kind(spans).items():
        name, opacity = SHADES[kind]
        colour = f'fill="{COLOURS[turn % len(COLOURS)]}" fill-opacity="{opacity:g}"'
        if titled:
            body += [_with_title(span, name, colour, scale) for span in of_kind]
            continue
        path = "".join(_rectangle(span, scale) for span in of_kind)
        title = f"{name}, stage {turn + 1} of the rank" if turn or _turns(spans) > 1 else name
        body.append(f'<path d="{path}" {colour}><title>{escape(title)}</title></path>')
    body.append(
        f'<text x="{LEFT}" y="{height - 60}">0</text><text x="{WIDTH}" y="{height - 60}" '
        f'text-anchor="end">{seconds_text(timeline.makespan_s)}</text>'
    )
    label = f"Pipeline timeline of {ranks} ranks, {seconds_text(timeline.makespan_s)}"
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        + "".join(body)
        + "</svg>"
    )


def timeline_key(timeline: Timeline) -> list[tuple[str, str, float]]:
    """Return (name, colour, opacity) of what the picture's shades mean."""
    spans = list(_spans(timeline, MOST_ACTIONS // len(timeline.orders)))
    several = _turns(spans) > 1
    return [
        (
            f"{SHADES[kind][0]}, stage {turn + 1} of the rank" if several else SHADES[kind][0],
            COLOURS[turn % len(COLOURS)],
            SHADES[kind][1],
        )
        for kind, turn in _by_kind(spans)
    ]


def left_out(timeline: Timeline) -> int:
    """Return the number of actions that are not drawn."""
    most = MOST_ACTIONS // len(timeline.orders)
    return sum(max(0, len(order) - most) for order in timeline.orders)


def _spans(timeline: Timeline, most: int) -> list[_TimelineSpan]:
    spans = []
    for rank in range(len(timeline.orders)):
        turns = {
            stage: turn
            for turn, stage in enumerate(sorted({a.stage for a in timeline.orders[rank]}))
        }
        spans += [
            _TimelineSpan(rank, start_s, end_s, action, turns[action.stage])
            for start_s, end_s, action in timeline.actions(rank)[:most]
        ]
    return spans


def _turns(spans: Sequence[_TimelineSpan]) -> int:
    return 1 + max(span.turn for span in spans)


def _by_kind(spans: Sequence[_TimelineSpan]) -> dict[tuple[str, int], list[_TimelineSpan]]:
    rows: dict[tuple[str, int], list[_TimelineSpan]] = {
        (kind, turn): [] for turn in range(_turns(spans)) for kind in SHADES
    }
    for span in spans:
        rows[span.action.kind, span.turn].append(span)
    return {key: of_kind for key, of_kind in rows.items() if of_kind}


def _place(span: _TimelineSpan, scale: float) -> tuple[int, int, int]:
    """Return left end, top and width; neighbours are a thin line apart."""
    left = round(LEFT + scale * span.start_s)
    right = round(LEFT + scale * span.end_s)
    return left, TOP + ROW * span.rank + 20, max(1, right - left - (right - left > 20))


def _rectangle(span: _TimelineSpan, scale: float) -> str:
    left, top, width = _place(span, scale)
    return f"M{left} {top}h{width}v{ROW - 40}h-{width}z"


def _with_title(span: _TimelineSpan, name: str, colour: str, scale: float) -> str:
    left, top, width = _place(span, scale)
    took = seconds_text(span.end_s - span.start_s)
    title = f"{name}, stage {span.action.stage}, micro-batch {span.action.micro_batch}: {took}"
    number = (
        f'<text x="{left + width // 2}" y="{top + 110}" text-anchor="middle" class="on">'
        f"{span.action.micro_batch}</text>"
        if width > ROOM_FOR_NUMBER
        else ""
    )
    return (
        f'<g><title>{escape(title)}</title><path d="{_rectangle(span, scale)}" {colour}/>'
        f"{number}</g>"
    )


def _phase_bands(timeline: Timeline, scale: float, high: int) -> list[str]:
    filled_s, drained_s = phases(timeline)
    bands = []
    for name, start_s, end_s in (
        ("fills", 0.0, filled_s),
        ("steady", filled_s, drained_s),
        ("drains", drained_s, timeline.makespan_s),
    ):
        left, right = (round(LEFT + scale * at) for at in (start_s, end_s))
        shade = 0 if name == "steady" else 0.15
        bands.append(
            f'<rect x="{left}" y="{TOP}" width="{right - left}" height="{high}" fill="#888" '
            f'fill-opacity="{shade:g}"/>'
            f'<text x="{(left + right) // 2}" y="{TOP - 60}" text-anchor="middle">{name}</text>'
        )
    return bands


KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}


def trace_json(timelines: Sequence[Timeline]) -> str:
    """Return timelines as `traceEvents`: a process a rank, a thread for each of its stages.

    Ranks of several kinds of pipelines are numbered in a row.  Times and durations are in
    microseconds.
    """
    events: list[dict[str, object]] = []
    first = 0
    for number, timeline in enumerate(timelines):
        of_kind = f"pipelines {number}, " if len(timelines) > 1 else ""
        for rank in range(len(timeline.orders)):
            events += _events(timeline, rank, first + rank, f"{of_kind}rank {rank}")
        first += len(timeline.orders)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(timeline: Timeline, rank: int, pid: int, name: str) -> Iterator[dict[str, object]]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    for stage in sorted({action.stage for action in timeline.orders[rank]}):
        of_stage = {"name": f"stage {stage}"}
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": stage, "args": of_stage}
    for start_s, end_s, action in timeline.actions(rank):
        yield {
            "name": str(action),
            "cat": KINDS.get(action.kind, "other"),
            "ph": "X",
            "pid": pid,
            "tid": action.stage,
            "ts": 1e6 * start_s,
            "dur": 1e6 * (end_s - start_s),
            "args": {"stage": action.stage, "micro-batch": action.micro_batch},
        }
