"""A command's first answer: labelled facts in at most ten lines, whatever the terminal's width.

Facts without room there are left out or cut, and are in the long answer (`--explain`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.errors.shown import lines

MOST_LINES = 10
INDENT = 10
"""Columns of a label."""
LEAST = 20
"""Columns of text, however narrow the terminal is."""
CUT = " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One labelled sentence of an answer."""

    label: str
    text: str
    detail: bool = False
    """True if the fact is left out where lines are short."""
    style: str = ""
    copied: bool = False
    """True if readers copy the text: no word of it is broken, however long."""
    lines: int = 2
    """Largest number of lines, unless the whole text is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactCard:
    """A fact as a card of a page: what is large, and what stands below it."""

    label: str
    value: str
    note: str


def fact_cards(facts: Iterable[Fact]) -> list[FactCard]:
    """Return a card for each fact that no other page element has: its first part is large.

    >>> [card] = fact_cards([Fact(label="step", text="1,200 of 2,000, loss 2.31; saved")])
    >>> card.value, card.note
    ('1,200 of 2,000', 'loss 2.31; saved')
    """
    cards: list[FactCard] = []
    for fact in facts:
        place = min((at for at in map(fact.text.find, (", ", "; ", " (")) if at > 0), default=-1)
        value, note = (fact.text, "") if place < 0 else (fact.text[:place], fact.text[place:])
        if fact.copied:
            value, note = fact.text, ""
        note = note.removeprefix(", ").removeprefix("; ").strip()
        cards.append(FactCard(label=fact.label, value=value, note=note))
    return cards


class Summary:
    """Facts one below the other under a bold head, if any; `most` lines unless they are `whole`."""

    def __init__(
        self, head: str, facts: Iterable[Fact], *, whole: bool = False, most: int = MOST_LINES
    ) -> None:
        self.head = head
        self.facts = tuple(facts)
        self.whole = whole
        self.most = most

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the lines at the width of the console."""
        width = options.max_width
        head = []
        if self.head:
            head = _wrap_text(
                console, self.head, width, style="bold", most=None if self.whole else 2
            )
        blocks = [
            _wrap_text(
                console,
                fact.text,
                width - INDENT,
                style=fact.style,
                most=None if self.whole else fact.lines,
                fold=not fact.copied,
            )
            for fact in self.facts
        ]
        shown = set(range(len(blocks)))
        details = [at for at, fact in enumerate(self.facts) if fact.detail]
        while not self.whole and len(head) + _lines(blocks, shown) > self.most and details:
            shown.discard(details.pop())
        yield from head
        for at in sorted(shown):
            for row, text in enumerate(blocks[at]):
                label = self.facts[at].label if row == 0 else ""
                row_text = Text(f"{label:<{INDENT}}", overflow="ignore", no_wrap=True)
                yield row_text.append_text(text)


def _lines(blocks: list[list[Text]], shown: set[int]) -> int:
    return sum(len(blocks[at]) for at in shown)


def _wrap_text(
    console: Console, text: str, width: int, *, style: str, most: int | None, fold: bool = True
) -> list[Text]:
    """Return text as lines of a width, at most `most`; the last one is marked if it is cut."""
    width = max(width, LEAST)
    if fold:
        rows = list(Text(lines(text), style=style).wrap(console, width))
    else:
        broken = textwrap.wrap(lines(text), width, break_long_words=False, break_on_hyphens=False)
        rows = [Text(row, style=style) for row in broken]
    for row in rows:
        row.rstrip()
    if most is None or len(rows) <= most:
        return rows
    left = " ".join(row.plain for row in rows[most - 1 :])
    rows = rows[:most]
    end = width - len(CUT)
    whole_part = left.rfind(", ", 0, end + 2)
    whole_word = left.rfind(" ", 0, end + 1)
    at = whole_part if 2 * whole_part > width else whole_word if 2 * whole_word > width else end
    rows[-1] = Text(left[:at], style=style)
    rows[-1].append(CUT)
    return rows


def plain_table(*columns: str, right: Iterable[int] = (), title: str | None = None) -> Table:
    """Return an empty table without borders; the columns at `right` have figures."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    figures = set(right)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place in figures else "left", overflow="fold")
    return table
