"""Straight lines through the measured points of a collective: the alpha-beta model by ranges.

    seconds = α + S / W        S bytes, α = latency_s, W = bytes_per_s

Libraries change their algorithm with the size, so one line rarely fits all.  Fitted are as few
lines, each over neighbouring sizes, as bring every point near to its own: within a tenth, or half
of the point's own spread.  Distances are relative, so that small messages count as large ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from meshwright.planner.documents.profile import LinkFit, LinkPiece, LinkPoint

NEAR = 0.1
"""Distance of a point from its line, over the point's seconds, that nobody minds."""
LEAST_POINTS = 2
"""Fewest points of a line."""


def fit_link(points: Sequence[LinkPoint]) -> LinkFit | None:
    """Return the lines through points, None where fewer than two have seconds.

    >>> def point(kib, seconds):
    ...     return LinkPoint(size_bytes=1024 * kib, seconds=seconds, spread=0.0)
    >>> found = fit_link([point(kib, 1e-3 + kib * 1e-5) for kib in (1, 4, 16, 64)])
    >>> [(f"{p.latency_s:.4f}", f"{p.bytes_per_s:.3g}") for p in found.pieces]
    [('0.0010', '1.02e+08')]
    """
    points = [point for point in points if point.seconds > 0]
    count = len(points)
    if count < LEAST_POINTS:
        return None
    best: LinkFit | None = None
    for pieces in range(1, count // LEAST_POINTS + 1):
        for cuts in itertools.combinations(range(LEAST_POINTS, count - 1), pieces - 1):
            ends = (0, *cuts, count)
            parts = [points[a:b] for a, b in itertools.pairwise(ends)]
            if min(map(len, parts)) < LEAST_POINTS:
                continue
            lines = [_line(part) for part in parts]
            worst = max(_distances(points, lines))
            if best is None or worst < best.residual:
                best = LinkFit(pieces=tuple(lines), residual=worst)
        assert best is not None
        far = zip(_distances(points, best.pieces), points, strict=True)
        if all(distance <= max(NEAR, point.spread / 2) for distance, point in far):
            break
    return best


def fitted_s(fit: LinkFit, size_bytes: float) -> float:
    """Seconds at a size: by the line of its range, straight on between two ranges.

    Below the smallest and above the largest measured size the nearest line goes on.
    """
    before = fit.pieces[0]
    for piece in fit.pieces:
        if size_bytes < piece.from_bytes:
            if piece is before:
                break
            low, high = before.to_bytes, piece.from_bytes
            share = (size_bytes - low) / (high - low)
            return (1 - share) * line_s(before, low) + share * line_s(piece, high)
        if size_bytes <= piece.to_bytes:
            return line_s(piece, size_bytes)
        before = piece
    return line_s(before, size_bytes)


def line_s(piece: LinkPiece, size_bytes: float) -> float:
    """Seconds at a size by one line."""
    rate = piece.bytes_per_s
    return piece.latency_s + (size_bytes / rate if rate else 0.0)


def _line(points: Sequence[LinkPoint]) -> LinkPiece:
    """Return the line with the least sum of squared relative distances; none of it negative."""
    sizes = np.array([point.size_bytes for point in points], dtype=float)
    seconds = np.array([point.seconds for point in points])
    both = np.stack([1 / seconds, sizes / seconds], axis=1)
    lines: list[tuple[float, float, float]] = []
    for columns in ([0, 1], [0], [1]):
        solved = np.linalg.lstsq(both[:, columns], np.ones(len(points)), rcond=None)[0]
        if (solved < 0).any():
            continue
        line = np.zeros(2)
        line[columns] = solved
        lines.append((float(np.sum((both @ line - 1) ** 2)), float(line[0]), float(line[1])))
    _, latency_s, byte_s = min(lines)
    return LinkPiece(
        from_bytes=points[0].size_bytes,
        to_bytes=points[-1].size_bytes,
        latency_s=latency_s,
        bytes_per_s=1 / byte_s if byte_s > 0 else None,
    )


def _distances(points: Sequence[LinkPoint], lines: Sequence[LinkPiece]) -> list[float]:
    """Return how far each point is from its line, over its seconds."""
    result = []
    for line in lines:
        on_line = [p for p in points if line.from_bytes <= p.size_bytes <= line.to_bytes]
        result += [abs(line_s(line, point.size_bytes) / point.seconds - 1) for point in on_line]
    return result
