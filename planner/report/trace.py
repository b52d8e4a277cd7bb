"""Pipeline timelines as Chrome trace JSON, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json

from planner.simulate import Timeline


def trace_json(timeline: Timeline) -> str:
    """Return the timeline as `traceEvents`: one process a rank, durations in microseconds."""
    events: list[dict[str, object]] = []
    for rank in range(len(timeline.orders)):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"stage {rank}"}}
        )
        events += [
            {
                "name": str(action),
                "cat": "forward" if action.kind == "F" else "backward",
                "ph": "X",
                "pid": rank,
                "tid": 0,
                "ts": 1e6 * start_s,
                "dur": 1e6 * (end_s - start_s),
            }
            for start_s, end_s, action in timeline.actions(rank)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
