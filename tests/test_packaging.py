"""What is released says one version everywhere, and the image copies what a wheel is built of."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["version"] == PROJECT["project"]["version"] == metadata.version("meshwright")
    assert re.fullmatch(r"\d+\.\d+\.\d+", citation["version"])


def test_the_image_copies_what_the_wheel_is_built_of_and_nothing_else() -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (.*) \S+$", recipe, flags=re.MULTILINE)
        for name in line.split()
    }
    packages = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    files = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"]}

    assert copied == packages | files | set(PROJECT["project"]["license-files"])
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in allowed if line.startswith("!")} == copied
    assert "--build-constraint constraints.txt" in recipe and "-c constraints.txt" in recipe
    assert re.search(r"^USER (?!root)", recipe, flags=re.MULTILINE)


def test_an_installation_has_the_files_that_are_no_code() -> None:
    """Data of the catalogue and templates of pages are in the packages that a wheel has."""
    from importlib import resources

    for package, file in (
        ("planner.catalog", "accelerators.yaml"),
        ("planner.catalog", "stacks/native.yaml"),
        ("planner.report", "plan.html"),
    ):
        assert resources.files(package).joinpath(file).is_file()
    assert set(PROJECT["project"]["scripts"]) == {"meshwright"}
