"""Commands of the pages run from an empty folder and print what the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.page_commands import (
    DOCS,
    INSTEAD,
    NOT_HERE,
    PAGES,
    ROOT,
    commands_of,
    difference,
    run_page,
)

EVERY = [command for page in PAGES for command in commands_of(page)]
THIN = (DOCS / "reference" / "problem.md", DOCS / "how-to" / "extend.md")
"""Pages whose commands take a second, and print something."""


def test_every_reason_and_every_shorter_form_is_of_some_command() -> None:
    unused = [what for what in NOT_HERE if not any(re.search(what, c.text) for c in EVERY)]
    unused += [what for what, _ in INSTEAD if not any(re.search(what, c.text) for c in EVERY)]

    assert unused == []
    run = [command for command in EVERY if command.reason is None]
    assert len(EVERY) > 90 and len(run) > 60
    assert {command.page for command in run} >= {"README.md", "docs/tutorial/first-plan.md"}


def test_what_a_page_shows_otherwise_is_found() -> None:
    printed = "time      6.82 s a step\nmemory    72.1 GiB\nnext      launch\n"

    assert difference(["time 6.82 s a step", "...", "next launch"], printed, measured=False) == ""
    assert "6.81" in difference(["time 6.81 s a step"], printed, measured=False)
    assert "time" in difference(["next launch", "...", "time 6.82 s"], printed, measured=False)
    assert difference(["time 12 ms a step"], printed, measured=True) == ""
    assert "fits" in difference(["time 12 ms a step", "fits"], printed, measured=True)


@pytest.mark.parametrize("page", THIN, ids=lambda page: page.stem)
def test_the_commands_of_a_short_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    outcomes = list(run_page(page, tmp_path))

    assert [(o.command.text, o.detail) for o in outcomes if not o.is_good] == []
    assert any(outcome.word == "compared" for outcome in outcomes)


@pytest.mark.matrix
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    outcomes = list(run_page(page, tmp_path))

    assert [(o.command.text, o.detail) for o in outcomes if not o.is_good] == []
