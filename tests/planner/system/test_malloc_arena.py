"""Memory that a process frees and takes again costs no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource, sys
from meshwright.planner.system.gc_pause import keep_freed

def step():
    blocks = [bytearray(2**20) for _ in range(32)]
    last = bytearray(2**18)  # freed behind what lies below it, as the top of the heap
    del blocks, last

step()
if sys.argv[1] == "kept" and not keep_freed():
    sys.exit(77)
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 4)
"""


def faults_a_step(how: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how], check=False, capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("another C library than glibc")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_what_a_step_frees_is_there_for_the_next_without_page_faults() -> None:
    kept = faults_a_step("kept")

    assert faults_a_step("given back") > 1000
    assert kept < 10
