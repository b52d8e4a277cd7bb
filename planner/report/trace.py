"""Pipeline timelines as Chrome trace JSON, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json

from meshwright.planner.schedules.simulate import Timeline

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}


def trace_json(timeline: Timeline) -> str:
    """Return the timeline as `traceEvents`: a process a rank, a thread for each of its stages.

    Times and durations are in microseconds.
    """
    events: list[dict[str, object]] = []
    for rank in range(len(timeline.orders)):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for stage in sorted({action.stage for action in timeline.orders[rank]}):
            name = {"name": f"stage {stage}"}
            events.append(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": stage, "args": name}
            )
        events += [
            {
                "name": str(action),
                "cat": KINDS.get(action.kind, "other"),
                "ph": "X",
                "pid": rank,
                "tid": action.stage,
                "ts": 1e6 * start_s,
                "dur": 1e6 * (end_s - start_s),
                "args": {"stage": action.stage, "micro-batch": action.micro_batch},
            }
            for start_s, end_s, action in timeline.actions(rank)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
