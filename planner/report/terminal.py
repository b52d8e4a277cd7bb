"""The consoles on which results and talk are printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from planner.shown import lines


class Terminal(Console):
    """A console on which text is text: no markup, no emoji, no codes that steer a terminal.

    Colours come from `rich.text.Text` with a style.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return text as it is laid out, so written out before it is measured."""
        return super().render_str(lines(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what is printed, with every character that is not printable written out."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(lines(segment.text), segment.style)
