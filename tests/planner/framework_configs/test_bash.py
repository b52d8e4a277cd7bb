"""Scripts are followed as bash follows them: its own words are the oracle."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import Surroundings, ways
from tests.planner.framework_configs.bash_scripts import Script

LAUNCHER = """#!/bin/sh
printf '%s\\0' "$@" >&3
printf '\\1\\0' >&3
"""
BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash")


def words_of_bash(text: str, folder: Path) -> list[tuple[str, ...]]:
    """Return the words of each `launch`, as a restricted bash in an empty folder runs it."""
    script, written = folder / "script.sh", folder / "words"
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    script.write_text(text)
    launcher = folder / "bin" / "launch"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o700)
    with written.open("wb") as words:
        subprocess.run(
            ["bash", "-c", 'exec 3>&1 >/dev/null; exec bash -r "$1"', "bash", str(script)],
            cwd=empty,
            env={"PATH": f"{launcher.parent}:/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
    assert not list(empty.iterdir())
    launches = written.read_text().split("\1\0")[:-1]
    return [tuple(launch.split("\0")[:-1]) for launch in launches]


def followed(text: str) -> list[tuple[str, ...]] | None:
    """Return the same as it is followed here; None if it is refused or depends on what is unknown."""
    try:
        every = ways(text)
    except DocumentError:
        return None
    if len(every) > 1:
        return None
    launches = [words for words in every[0].commands if words[0] == "launch"]
    if any(mark in word for words in launches for word in words for mark in ("${", "$(", "$?")):
        return None
    return [words[1:] for words in launches]


def compare(seeds: range, folder: Path) -> int:
    """Compare scripts; return how many were followed to the end."""
    count = 0
    for seed in seeds:
        text = Script(random.Random(seed)).text()
        ours = followed(text)
        if ours is None:
            continue
        count += 1
        assert ours == list(dict.fromkeys(words_of_bash(text, folder))), f"{seed}:\n{text}"
    return count


@needs_bash
def test_words_are_those_of_bash(tmp_path: Path) -> None:
    assert compare(range(60), tmp_path) > 30


@needs_bash
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(5))
def test_words_of_a_thousand_scripts_are_those_of_bash(part: int, tmp_path: Path) -> None:
    assert compare(range(1000 + 200 * part, 1200 + 200 * part), tmp_path) > 100
