"""docs/results/studies.md: the answers to the studies in this folder, written by one command.

python plans/studies/make.py [STUDY.yaml ...]

What a reader thinks of each answer stands in judged.md beside this file, a section for each study.
"""

from __future__ import annotations

import datetime
import io
import re
import sys
from pathlib import Path

from rich.console import Console

from meshwright.planner.report.whatif_text import result_text
from meshwright.studies.study_command import whatif

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs" / "results" / "studies.md"
JUDGED = FOLDER / "judged.md"
WIDTH = 150


def answer(path: Path, judged: str) -> str:
    """Return one study's answer as a section of Markdown, with what a reader thinks of it."""
    found = whatif(str(path))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(result_text(found, whole=False))
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    return f"## {path.stem}\n\n```\n{text}\n```\n\nWould you sign this? {judged}\n"


def judgements() -> dict[str, str]:
    """Return what stands in judged.md by the name of a study."""
    sections = re.split(r"^## ", JUDGED.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name.strip(): text.strip() for name, _, text in (s.partition("\n") for s in sections)}


def main() -> None:
    """Write the page, section by section; of studies that are named, theirs alone."""
    asked = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.yaml"))
    judged = judgements()
    page = PAGE.read_text(encoding="utf-8")
    parts = re.split(r"^(?=## \d\d-)", page, flags=re.MULTILINE)[1:]
    known = {part[3:].partition("\n")[0]: part.rstrip("\n") + "\n" for part in parts}
    for path in asked:
        known[path.stem] = answer(path, judged[path.stem])
        PAGE.write_text(page_of(known), encoding="utf-8")
        print(path.stem, file=sys.stderr)


def page_of(sections: dict[str, str]) -> str:
    """Return the page with all sections in their order."""
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        "# Sixteen questions\n\n"
        f"Written on {today} by `python plans/studies/make.py`; each is one command, "
        "`meshwright whatif plans/studies/NAME.yaml`, and `--html` makes a page of it. Prices are "
        "as old as they say and only of offers that can make the cluster. Each candidate is priced "
        "with the fastest public framework there, and the first ones with our own runtime too; "
        "adapters are those of public fine-tuners. The paragraph after each answer is a reader's."
        "\n\n" + "\n".join(sections[name] for name in sorted(sections))
    )


if __name__ == "__main__":
    main()
