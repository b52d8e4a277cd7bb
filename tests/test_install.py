"""What an installation fetches is pinned, what builds the package too; no hash is left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.partition("==") for line in lines if not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


def test_what_builds_the_package_is_pinned_to_what_ci_uses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    for requirement in project["build-system"]["requires"]:
        name, _, version = requirement.partition("==")
        assert version, f"{requirement}: pin it"
        assert pinned()[name] == version


def test_every_installation_of_the_makefile_is_constrained() -> None:
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    installs = [line for line in recipe.splitlines() if "pip install" in line]

    assert len(installs) >= 3
    for line in installs:
        assert re.search(r"-c (\$\(OLDEST\)/)?constraints\.txt", line)
        if re.search(r"(-e |')\.", line):
            assert "--build-constraint constraints.txt" in line


def hashes(report: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "hashes.py")]
    text = json.dumps(report)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def package(name: str, **origin: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": "1.0"}, "download_info": {"url": "u", **origin}}


def test_packages_are_printed_with_their_hashes_and_the_folder_itself_is_left_out() -> None:
    archive = {"hashes": {"sha256": "ab" * 32}}
    own = package("meshwright", dir_info={})

    done = hashes({"install": [package("b", archive_info=archive), own]})

    assert done.stdout == f"b==1.0 --hash=sha256:{'ab' * 32}\n"


@pytest.mark.parametrize("origin", [{}, {"archive_info": {}}, {"vcs_info": {"vcs": "git"}}])
def test_a_package_without_a_hash_is_an_error(origin: dict[str, Any]) -> None:
    done = hashes({"install": [package("a", **origin)]})

    assert done.returncode == 1
    assert "a==1.0: the index gives no sha256" in done.stderr
    assert done.stdout == ""
