"""What every test is given."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest

# Before torch is imported anywhere.  Tests run side by side on few cores, and threads of tiny
# operators that wait for each other cost some tests five times their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Its examples have 0.2 s of wall-clock time otherwise, which a busy machine takes from them.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that `@pytest.mark.long(...)` names as tests of the matrix.

    Raises
    ------
    pytest.UsageError
        A name that no case of the test has.
    """
    named: dict[str, set[str]] = {}
    for item in items:
        cases = {case for marker in item.iter_markers("long") for case in marker.args}
        if not cases:
            continue
        case = item.name.partition("[")[2].removesuffix("]")
        named.setdefault(item.nodeid.partition("[")[0], set(cases)).discard(case)
        if case in cases:
            item.add_marker("matrix")
    if any("[" in given for given in config.args):
        return  # a part of a test's cases
    for test, missing in named.items():
        if missing:
            raise pytest.UsageError(f"{test}: no case is called {', '.join(sorted(missing))}")


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
