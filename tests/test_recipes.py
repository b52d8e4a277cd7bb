"""The recipes of extend.md, extending.md and CONTRIBUTING.md speak of what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = (ROOT / "docs" / "reference" / "extending.md").read_text()


@pytest.mark.parametrize(
    "page", ["docs/how-to/extend.md", "docs/reference/extending.md", "CONTRIBUTING.md"]
)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    words = re.findall(r"`([\w./-]+)`", (ROOT / page).read_text())
    files = [word for word in words if "/" in word and "NAME" not in word]

    assert len(files) > 5
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("choice", ["activations", "recompute"])
def test_a_recipe_names_each_file_that_decides_by_a_choice(choice: str) -> None:
    deciding = [
        file.relative_to(ROOT).as_posix()
        for package in ("planner", "runtime")
        for file in sorted((ROOT / package).rglob("*.py"))
        if f"assert_never({choice})" in file.read_text()
    ]

    assert len(deciding) == 2
    assert [file for file in deciding if f"`{file}`" not in RECIPES] == []
