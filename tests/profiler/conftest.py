"""Profiles of tests are kept where the test ends."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which this test alone keeps what it measures."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder))
    return folder
