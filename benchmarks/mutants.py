"""Small faults put into the code one by one, and which test finds each.

    python benchmarks/mutants.py [--rows FIRST:END] [--write FILE]

`benchmarks/mutants.yaml` lists the faults, each with the files of tests that should fail.  A fault
is made in a copy of the repository's tracked files; the doctests of its file and its tests run
there until one fails.  It prints a line for each fault and, last, how many were found, and writes
the lines into `FILE` (CSV) too.
Tests are merged or removed only where the same faults are found before and after.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".yaml")
TIME_OUT_S = 900
COLUMNS = ("in", "is", "found by")


class Mutant(NamedTuple):
    """A fault: the file, text that stands in it once, what it becomes, and its tests."""

    file: str
    was: str
    now: str
    tests: tuple[str, ...]

    def within(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises
        ------
        ValueError
            What is to be replaced does not stand there exactly once.
        """
        if (times := text.count(self.was)) != 1:
            raise ValueError(f"{self.file}: {self.was!r} stands there {times} times, not once")
        return text.replace(self.was, self.now)


def listed(path: Path = LIST) -> list[Mutant]:
    rows = yaml.safe_load(path.read_text())
    return [Mutant(row["in"], row["was"], row["is"], _tests(row["by"])) for row in rows]


def _tests(names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names.split())


def copied(into: Path) -> None:
    """Copy the tracked files, as they are now."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)


def _write(file: Path, text: str) -> None:
    """Write a module; what was compiled of it counts no more, whatever its time and size say."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def found_by(mutant: Mutant, copy: Path) -> str | None:
    """Return the first test that fails with the fault, None if all pass.

    Raises
    ------
    RuntimeError
        The tests could not be run.
    """
    file = copy / mutant.file
    sound = file.read_text()
    try:
        _write(file, mutant.within(sound))
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                mutant.file,
                *mutant.tests,
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=TIME_OUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"more than {TIME_OUT_S} s"
    finally:
        _write(file, sound)
    if ran.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(
            f"{mutant.file}: {' '.join(mutant.tests)}: {(ran.stdout + ran.stderr)[-800:]}"
        )
    return failed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=":", help="some of the list, as FIRST:END")
    parser.add_argument("--write", type=Path, help="write which test found which fault, as CSV")
    asked = parser.parse_args()
    first, end = (int(part) if part else None for part in asked.rows.split(":"))
    chosen = listed()[first:end]
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied(Path(folder))
        for mutant in chosen:
            test = found_by(mutant, Path(folder))
            rows.append((mutant.file, " ".join(mutant.now.split()), test or ""))
            print(f"{mutant.file}: {mutant.now.strip()}: {test or 'NOT FOUND'}", flush=True)
            if asked.write is not None:
                with asked.write.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{sum(bool(test) for *_, test in rows)} of {len(rows)} found")


if __name__ == "__main__":
    main()
