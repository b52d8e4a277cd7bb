"""The consoles on which results and talk are printed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from meshwright.planner.documents.units import whole_number
from meshwright.planner.errors.shown import lines

PIPED, PAGE = 80, 25
"""Default columns and lines."""
NARROWEST = 40
"""Columns; narrower lines break every word."""


class Terminal(Console):
    """A console on which text is text: no markup, no emoji, no codes that steer a terminal.

    Colours come from `rich.text.Text` with a style.  Piped output has the width of COLUMNS, or 80
    columns.
    """

    def __init__(self, **settings: Any) -> None:
        self._asked: int | None = settings.get("width")
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and lines of what is printed on."""
        if self.is_terminal or self._asked is not None:
            return super().size
        columns = whole_number(os.environ.get("COLUMNS", "")) or PIPED
        return ConsoleDimensions(max(columns, NARROWEST), PAGE)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def print(self, *objects: Any, crop: bool = False, **settings: Any) -> None:
        """Print; what is longer than a line and may not be broken is not cut either."""
        super().print(*objects, crop=crop, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return text as it is laid out, so written out before it is measured."""
        return super().render_str(lines(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the output, with every unprintable character written out."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(lines(segment.text), segment.style)
