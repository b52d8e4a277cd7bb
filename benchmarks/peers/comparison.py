"""One line of a comparison with a public planner, and a table of such lines.

An adapter reads a peer's problem, prices the peer's stored plans by the peer's own formulas (which
must give back the stored scores), solves the same problem and prices the answer the same way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

Answer = TypeVar("Answer")

# Sums of the same terms in two orders differ in the last bits.
SAME = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One problem, the peer's plan for it and ours, on the peer's objective (less is better).

    `peer_value` is None where the peer found no plan, `value` where there is none.  `proven` names
    the space in which no plan is better than ours, or is empty.  `peer_cpu_s` and `peer_wall_s`
    are what is recorded with the peer's plan, measured elsewhere and often under load.
    """

    case: str
    peer: str
    unit: str
    peer_value: float | None
    value: float | None
    proven: str
    cpu_s: float
    peer_cpu_s: float | None = None
    peer_wall_s: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our value by the peer's; 1 where both found that there is no plan."""
        if self.peer_value is None or self.value is None:
            return 1.0 if self.peer_value is self.value else None
        return self.value / self.peer_value

    @property
    def verdict(self) -> str:
        """Say in a word who found the better plan."""
        if self.peer_value is None and self.value is None:
            return "both none"
        if self.peer_value is None:
            return "only ours"
        if self.value is None:
            return "only theirs"
        if math.isclose(self.value, self.peer_value, rel_tol=1e-9):
            return "equal"
        return "better" if self.value < self.peer_value else "worse"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields with the ratio and the verdict."""
        return asdict(self) | {"ratio": self.ratio, "verdict": self.verdict}


def read_case(path: Path) -> dict[str, Any]:
    """Return the peer's problem as it stands in its file."""
    case: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return case


def require_score(what: str, stored: float, ours: float, *, tolerance: float = SAME) -> None:
    """Raise ValueError unless our restatement of a peer's scoring gives back a stored score."""
    if not math.isclose(stored, ours, rel_tol=tolerance):
        raise ValueError(
            f"{what}: its stored score is {stored!r}, the restated formulas give {ours!r}; a "
            "comparison by other formulas than the peer's means nothing"
        )


def timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    """Return the answer and the CPU seconds of this process that it took."""
    start = time.process_time()
    answer = call()
    return answer, time.process_time() - start


def table(rows: Iterable[Comparison]) -> str:
    """Return the comparisons as a table of Markdown."""
    heads = (
        "case",
        "peer",
        "unit",
        "theirs",
        "ours",
        "ours / theirs",
        "",
        "proven best of",
        "our CPU s",
        "their CPU s",
        "their wall s",
    )
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in rows:
        lines.append(
            _line(
                (
                    row.case,
                    row.peer,
                    row.unit,
                    _number(row.peer_value, 7),
                    _number(row.value, 7),
                    _number(row.ratio, 5),
                    row.verdict,
                    row.proven,
                    _number(row.cpu_s, 3),
                    _number(row.peer_cpu_s, 3),
                    _number(row.peer_wall_s, 3),
                )
            )
        )
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}g}"
