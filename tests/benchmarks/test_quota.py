"""Ranks get their share of a core and no more, and leave no control group behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import quota

BUSY = """
import json, time
begin, own = time.perf_counter(), time.process_time()
while time.process_time() - own < 0.2: pass
print(json.dumps((time.process_time() - own) / (time.perf_counter() - begin)))
"""


@pytest.mark.skipif(quota.refusal() is not None, reason=str(quota.refusal()))
def test_a_rank_gets_no_more_than_its_share() -> None:
    with quota.quotas(2, share=0.25) as environment:
        said = subprocess.run(
            [sys.executable, "-c", BUSY],
            env={**os.environ, **environment, "RANK": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        groups = Path(environment["QUOTA_GROUPS"])
        assert groups.exists()

    assert json.loads(said.stdout) < 0.3  # others on the machine only make it less
    assert not groups.exists()
