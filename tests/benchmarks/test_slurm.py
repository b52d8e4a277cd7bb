"""A job on a real Slurm is preempted, queued again, and does each step once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import slurm

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.ranks,
    pytest.mark.skipif(slurm.refusal() is not None, reason=str(slurm.refusal())),
]


def test_tuning_on_two_nodes_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with slurm.cluster() as cluster:
        found = slurm.tune(cluster, tmp_path, kills=2, budget="3 trials")

    assert found.kept
    assert found.valid
    assert 0 < len(found.answer["trials"]) <= 3
    assert found.answer["plan"]["mesh"]["devices"] == slurm.NODES
    assert {one["ended"] for one in found.answer["trials"]} <= {"ran", "slower"}


def test_a_job_that_is_preempted_saves_queues_itself_and_loses_no_step(tmp_path: Path) -> None:
    with slurm.cluster() as cluster:
        found = slurm.preempt(cluster, tmp_path)

    first, second = found.attempts
    assert {notice.cause for notice in found.notices} == {"notice"}
    assert first.after_step == 0
    assert second.after_step > 0
    assert found.steps == list(range(1, len(found.steps) + 1))
    assert second.devices == slurm.NODES
    assert found.state == "RUNNING"
