"""Hostile inputs to every command end in one of our messages; the watch misses nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import cli
from tests.meshwright import hostile
from tests.meshwright import hostile_documents as documents
from tests.meshwright import hostile_requests as requests

ROOT = Path(__file__).resolve().parents[2]


def found(count: int, *, first: int = 0) -> dict[str, str]:
    """Return what so many cases find, run by a process that can be forked."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-m", hostile.__name__, "--first", str(first), "--count", str(count)],
        env={**os.environ, **one_thread, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["cases"] == count
    print(
        f"{result['cpu_s']:.0f} s of CPU, the slowest cases {result['slowest']}, "
        f"the largest in MiB {result['largest']}"
    )
    return result["findings"]


def test_10_hostile_inputs_end_in_a_message() -> None:
    assert found(10) == {}


@pytest.mark.matrix
def test_3000_hostile_inputs_end_in_a_message() -> None:
    assert found(3000) == {}


def test_every_command_and_option_is_tried() -> None:
    every = hostile.commands()
    rng = random.Random(0)

    assert set(every) == set(hostile.ARGUMENTS)
    assert {"--html", "--csv", "--processes"} <= {option.flag for option in every["whatif"]}
    for option in (option for options in every.values() for option in options):
        words = hostile._option(rng, option)
        assert option.flag is None or words[0] == option.flag


@pytest.mark.parametrize("name", documents.BASES)
def test_documents_that_the_cases_break_are_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    beside = {
        path: hostile._right(path) for path in documents.BASES if hostile._together(path, name)
    }
    for path, content in {**documents.DATA, **beside}.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)

    assert documents.read(name) == 0
    assert not name.startswith(documents.PENDING) or Path("step-000003", "meta.json").exists()


def test_the_same_numbers_give_the_same_case() -> None:
    assert hostile.case(3, 14).arguments == hostile.case(3, 14).arguments
    assert str(hostile.case(3, 14)) == str(hostile.case(3, 14))


def _raises() -> int:
    return 1 // 0


def _runs_code() -> int:
    Path(hostile.CANARY).touch()
    return 0


def _fails_and_writes() -> int:
    Path("half.yaml").touch()
    print("meshwright: no", file=sys.stderr)
    return 1


def _writes_elsewhere() -> int:
    (Path(tempfile.gettempdir()) / "elsewhere").touch()
    return 0


def _leaves_half() -> int:
    Path(".out.yaml.x").touch()
    return 0


@pytest.mark.parametrize(
    ("command", "finding"),
    [
        (_raises, "ZeroDivisionError"),
        (_runs_code, "code was run"),
        (_fails_and_writes, "ended with 1 and left"),
        (_writes_elsewhere, "wrote outside"),
        (_leaves_half, "half-written"),
        (lambda: 3, "ended with 3"),
        (lambda: 1, "said nothing"),
        (lambda: 0, None),
    ],
)
def test_the_watch_sees_what_must_not_be(
    command: Callable[[], int],
    finding: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sys.addaudithook(hostile._audit)  # does nothing but while a case is watched

    seen = hostile.watched(command, work)

    assert (seen is None) if finding is None else seen is not None and finding in seen


def test_a_case_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(made: hostile.Case, parent: Path) -> str | None:
        while made.number == 2:
            pass
        return None

    monkeypatch.setattr(hostile, "run", endless)
    monkeypatch.setattr(hostile, "LIMIT_S", 0.5)

    result = hostile.findings(0, 0, 4)

    assert list(result["findings"]) == [2]
    assert "ended its process: SIGPROF" in result["findings"][2]


DRAWN = {"@model": "config.json", "@cluster": "local:2"}
RIGHT = [
    [name, *(DRAWN.get(word, word) for word in shape)]
    for name, shapes in hostile.ARGUMENTS.items()
    for shape in shapes
    # No checkpoint is made for the cases, and no H100 is here.
    if "@word" not in shape
    and "-o" not in shape
    and shape != ("large.yaml",)
    # Of a table and a model's configuration no setting is understood: an import refuses them.
    and (name != "import" or shape[0] == hostile.CONFIGURATION)
]


@pytest.mark.long(*(" ".join(words) for words in RIGHT if words[0] == "tune"))
@pytest.mark.spread(5)
@pytest.mark.parametrize("arguments", RIGHT, ids=" ".join)
def test_what_the_cases_break_is_right(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(" ".join(arguments))
    made = hostile.Case(number=0, arguments=[*arguments])
    hostile._files(rng, made, hostile=0)
    if "@framework" in arguments:
        hostile._configuration(rng, made, hostile=False)
    (tmp_path / "folder").mkdir()
    for path, make in made.files.items():
        make(Path(path))

    assert cli.main(made.arguments) == 0


def test_requests_to_a_page_that_is_served_find_nothing() -> None:
    assert requests.findings(seed=1, count=40) == []


@pytest.mark.matrix
def test_many_requests_to_a_page_that_is_served_find_nothing() -> None:
    assert requests.findings(seed=2, count=1000) == []
