"""docs/studies.md: the answers to the studies in this folder, written by one command.

python plans/studies/make.py [STUDY.yaml ...]
"""

from __future__ import annotations

import datetime
import io
import sys
from pathlib import Path

from rich.console import Console

from meshwright.studies import whatif
from planner.report.whatif_text import result_text

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs" / "studies.md"
WIDTH = 150


def answer(path: Path) -> str:
    """Return one study's answer as a section of Markdown."""
    found = whatif(str(path))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(result_text(found))
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    return f"## {path.stem}\n\n```\n{text}\n```\n"


def main() -> None:
    """Write the page."""
    asked = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.yaml"))
    sections = [answer(path) for path in asked]
    today = datetime.datetime.now(datetime.UTC).date()
    PAGE.write_text(
        "# Twelve questions\n\n"
        f"Written on {today} by `python plans/studies/make.py`; each is one command, "
        "`meshwright whatif plans/studies/NAME.yaml`, and `--html` makes a page of it. Prices are "
        "as old as they say; plans are those of the native backend, or of public fine-tuners where "
        "adapters are trained.\n\n" + "\n".join(sections),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
