"""Real runs are scored by what all plans that may be tried were measured to take."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks import tune_real
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.tune.trial import words_of

STORED = sorted((Path(__file__).parents[2] / "plans").glob("*/plan.yaml"))[:3]


def test_regret_is_over_the_least_step_of_every_plan(tmp_path: Path) -> None:
    plans = [document.read(Plan, path) for path in STORED]
    for at, plan in enumerate(plans):
        document.write(plan, tmp_path / f"plan-{at:02}.yaml")
    (tmp_path / "setting.json").write_text('{"ranks": 2, "rate": null}')
    (tmp_path / "rounds.jsonl").write_text("[1.0, 3.0, 1.25]\n[1.2, 2.0, 1.5]\n")
    trials = [{"plan_digest": plans[1].digest, "seconds": 9.0}] * 2
    answer = {"plan": plans[2].model_dump(mode="json"), "layout": "", "sure": 0.9, "device_s": 60}
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "answer.json").write_text(json.dumps({**answer, "trials": trials}))

    found = tune_real.scored(tmp_path)

    (run,) = found["runs"]
    assert (run["trials"], run["seconds"]) == (2, 18.0)
    assert run["regret"] == found["worst_regret"] == pytest.approx(0.25)
    assert run["regret_of_first"] == pytest.approx(1.0)


def test_ranks_on_two_hosts_share_a_cable_and_are_started_on_each() -> None:
    shaped = tune_real.machine(4, "200mbit")

    (group,) = shaped.groups
    assert (group.nodes, group.devices_per_node) == (2, 2)
    assert [tier.devices for tier in shaped.tiers] == [2, 4]
    assert shaped.tiers[1].bytes_per_s == 12.5e6
    words = words_of(tune_real.in_rig("200mbit"), config="c", plan="a b.yaml", output=Path("o"))
    assert "a b.yaml" in words
    assert shlex.join(words).count("{") == 0
