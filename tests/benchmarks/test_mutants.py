"""The list of faults is of the code that is there, and of tests that are there."""

from __future__ import annotations

from benchmarks.mutants import ROOT, listed


def test_each_fault_can_be_made_and_has_its_tests() -> None:
    for mutant in listed():
        changed = mutant.within((ROOT / mutant.file).read_text())
        assert mutant.now in changed
        assert [test for test in mutant.tests if not (ROOT / test).is_file()] == []
