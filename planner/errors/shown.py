"""Text of others, made safe where it is shown: on a terminal, in a table's cell, in a picture.

Names in documents, messages of schedulers and the ends of logs may hold anything.  Documents keep
what they hold; only what is shown changes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Characters that a spreadsheet takes for the begin of a formula."""


def one_line(text: str) -> str:
    r"""Write out what would break a line or steer a terminal.

    >>> print(one_line("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines(text: str) -> str:
    r"""Write out what would steer a terminal; ends of lines and tabs stay.

    >>> print(lines("a\x1b[2J\nb"))
    a\x1b[2J
    b
    """
    return "".join(c if c in "\n\t" else one_line(c) for c in text)


_VERBS = (
    *("is", "are", "was", "were", "has", "have", "had", "does", "do", "cannot", "can", "may"),
    *("must", "needs", "need", "takes", "take", "goes", "go", "lacks", "names", "runs", "trains"),
    *("continues", "contains", "divides", "starts", "begins", "ends", "counts", "belongs", "asks"),
    *("gives", "reads", "holds", "differs", "plans", "saves", "makes", "wants", "exceeds", "means"),
)
"""Verbs by which messages go on whose subject is the place before their colon."""
_SUBJECT = re.compile(rf"((?:[^:\n]+: )?[^:\n]*[^:\s]): (?=(?:{'|'.join(_VERBS)}) )")


def sentence(text: str) -> str:
    """Return an error as a sentence: the place that it names first is the subject.

    >>> sentence("plan.yaml: zero: is 9; write 0 to 3")
    'plan.yaml: zero is 9; write 0 to 3'
    >>> sentence("job: 'partition': write NAME=VALUE")
    "job: 'partition': write NAME=VALUE"
    """
    match = _SUBJECT.match(text)
    return text if match is None else f"{match[1]} {text[match.end() :]}"


def cell(value: object) -> object:
    """Return a value for a CSV table: text that a spreadsheet would compute begins with `'`.

    >>> [cell(v) for v in ("=1+1", "-x", "-1.5", -1.5, "gpt2", "")]
    ["'=1+1", "'-x", '-1.5', -1.5, 'gpt2', '']
    """
    if not isinstance(value, str) or not value.startswith(FORMULA) or _is_number(value):
        return value
    return f"'{value}"


def html_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """Return a table as a notebook shows it, with all text escaped.

    >>> html_table("<x>", ("a",), [("1 & 2",)])
    '<p><b>&lt;x&gt;</b></p><table><tr><th>a</th></tr><tr><td>1 &amp; 2</td></tr></table>'
    """

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{_escape(text)}</{tag}>" for text in cells)

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    paragraphs = "".join(f"<p>{_escape(note)}</p>" for note in notes)
    table = f"<table><tr>{row(head, 'th')}</tr>{body}</table>"
    return f"<p><b>{_escape(title)}</b></p>{table}{paragraphs}"


def _escape(text: str) -> str:
    return html.escape(one_line(text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isprintable()
