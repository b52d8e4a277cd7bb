"""What `--elastic` costs is measured around the functions that a run has."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from benchmarks.elastic_cost import note_steps
from meshwright.runtime.launch.training_loop import Loop


def test_copies_are_noted_by_what_is_called_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Loop._copy
    monkeypatch.setattr(Loop, "_copy", plain)  # is put back

    note_steps(tmp_path, "forked")

    _, *given = inspect.signature(plain).parameters
    assert Loop._copy is not plain
    assert list(inspect.signature(Loop._copy).parameters)[1:] == given
