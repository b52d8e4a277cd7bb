"""What several tests of the runtime are given."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.runtime.launch import preflight
from meshwright.runtime.techniques import compile as compiled
from tests.runtime.rooms import Room


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace and differentiate graphs, and run the same kernels as eager."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    logging.disable(logging.WARNING)  # torch's, of what it takes for unusual
    yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """Set up a room; whatever runs there at the end of the test is an orphan, and ended."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(preflight, "cuda_devices", lambda: 0)
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 200)
    result = Room(tmp_path)
    yield result
    for launcher in result.started:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()
    if (tmp_path / "out" / "orders.yaml").exists():
        orphans = result.ranks()
        for process in orphans.values():
            os.kill(process, signal.SIGKILL)
        assert orphans == {}
