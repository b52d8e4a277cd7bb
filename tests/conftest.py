"""What every test is given."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def job_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nodes of tests a secret of their own; the user's is neither read nor made."""
    monkeypatch.setenv("MESHWRIGHT_SECRET", "nobody guesses this one")
