"""What every test is given."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.doctest import DoctestModule

# Before torch is imported anywhere.  Tests run side by side on few cores, and threads of tiny
# operators that wait for each other cost some tests five times their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Its examples have 0.2 s of wall-clock time otherwise, which a busy machine takes from them.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage while a million objects are made that all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no doctests in `test_*.py`, which have none, and in scripts that train."""
    of_tests = file_path.name.startswith("test_") or "scripts" in file_path.parts
    return [one for one in (yield) if not (of_tests and isinstance(one, DoctestModule))]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as tests of the matrix: those of `@pytest.mark.long(...)`, and most of a spread.

    Raises
    ------
    pytest.UsageError
        A name that no case of the test has.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    # Of a test's cases.
    a_part = config.getoption("lf", False) or any("[" in given for given in config.args)
    for test, cases in tests.items():
        missing = _mark_long(cases)
        if missing and not a_part:
            raise pytest.UsageError(f"{test}: no case is called {', '.join(sorted(missing))}")
        _mark_spread(cases)


def _mark_long(cases: list[pytest.Item]) -> set[str]:
    """Mark the named cases of one test as tests of the matrix; return names that no case has."""
    missing: set[str] = set()
    for item in cases:
        missing |= {name for marker in item.iter_markers("long") for name in marker.args}
    named = frozenset(missing)
    for item in cases:
        case = item.name.partition("[")[2].removesuffix("]")
        missing.discard(case)
        if case in named:
            item.add_marker("matrix")
    return missing


def _mark_spread(cases: list[pytest.Item]) -> None:
    """Leave as many cases of one test as its `spread` says, evenly spread; mark the others."""
    marker = cases[0].get_closest_marker("spread")
    if marker is None:
        return
    short = [item for item in cases if item.get_closest_marker("matrix") is None]
    kept = kept_of(len(short), *marker.args)
    for index, item in enumerate(short):
        if index not in kept:
            item.add_marker("matrix")


def kept_of(cases: int, some: int) -> frozenset[int]:
    """Return the indices of `some` of so many cases, the first and the last among them."""
    if some >= cases:
        return frozenset(range(cases))
    if some == 1:
        return frozenset({0})
    return frozenset(index * (cases - 1) // (some - 1) for index in range(some))


@pytest.fixture(autouse=True)
def job_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nodes of tests a secret of their own; the user's is neither read nor made."""
    monkeypatch.setenv("MESHWRIGHT_SECRET", "nobody guesses this one")


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the user's own defaults out, and COLUMNS."""
    monkeypatch.setenv("MESHWRIGHT_DEFAULTS", "")
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give tests a cache of their own, one for a run; the user's is neither read nor made."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Leave what is there when a module's tests begin out of every later collection of garbage.

    Collections look through a million objects of imported libraries and collected tests, most of
    all before each fork and while tensors are watched: some tests took four times as long.
    """
    gc.freeze()
