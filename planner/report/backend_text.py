"""A plan for another framework as lines for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from planner.backends.search import BackendAnswer
from planner.report.text import assumption_lines, prediction_lines
from planner.report.ties import tie_lines
from planner.units import bytes_text, seconds_text


def backend_answer_text(answer: BackendAnswer) -> RenderableType:
    """Return layout, flags, time, memory, what was priced, and the closest others."""
    best = answer.best.prediction
    lines: list[RenderableType] = [
        Text(f"{answer.backend}: {answer.best.layout}", style="bold"),
        *prediction_lines(best),
        *assumption_lines(best),
        "",
        "flags:",
        *(Text(f"  {flag}") for flag in answer.best.flags),
        "",
        Text(answer.statement, style="bold"),
    ]
    for other in answer.others:
        peak = max(stage.peak_memory_bytes for stage in other.prediction.stages)
        lines.append(
            f"        {other.layout}: {seconds_text(other.prediction.step_time_s)}, "
            f"{bytes_text(peak)}"
        )
    tied = [other.layout for other in answer.ties]
    lines += tie_lines(answer.best.layout, tied, best.step_time_low_s, best.step_time_high_s)
    return Group(*lines)
