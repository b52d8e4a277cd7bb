"""A replay sees a row only when it tries it, and scores each source by itself."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from benchmarks import tune_replay
from benchmarks.tune_replay import AFTER, Score, Sweep, by_source, counted, replay, result
from meshwright.planner.documents.plan import Layout
from meshwright.planner.tuning.next_trial import Tuner
from meshwright.planner.tuning.trial_options import TrialOption


def sweep(*factors: float, source: str = "a", lost: tuple[int, ...] = ()) -> Sweep:
    """Layouts predicted to take 1.00, 1.01, ... s whose steps take a factor longer."""
    options = tuple(
        TrialOption(
            layout=Layout(pipeline=1 + at, micro_batches=8),
            kept="none",
            step_s=1 + at / 100,
            parts={"forward": 1 + at / 100},
            devices_per_node=8,
        )
        for at in range(len(factors))
    )
    steps = [(one.step_s * factor,) for one, factor in zip(options, factors, strict=True)]
    return Sweep(
        source=source,
        name="x",
        options=options,
        steps_s=tuple(() if at in lost else step for at, step in enumerate(steps)),
        ratios=(None,) * len(options),
    )


def test_perfect_predictions_leave_no_regret_at_any_time() -> None:
    scores = by_source([sweep(*[1.0] * 12)], None)

    assert {count: regret for count, (regret,) in scores["a"].regret.items()} == dict.fromkeys(
        AFTER, 0.0
    )
    assert scores["a"].trials == [0]


def test_an_answer_without_memory_is_the_worst_there_is() -> None:
    assert sweep(1.0, 1.0, 1.0, lost=(0,)).regret(0) == 1.0
    score = Score()

    replay(sweep(1.0, 1.0, 1.0, lost=(0,)), 0, score, tune_replay.POLICIES["predicted order"])

    assert score.regret[0] == [1.0]
    assert score.regret[3] == [0.0]
    assert (score.out_of_memory, score.tried) == (1, 3)


@pytest.mark.parametrize("name", ["predicted order", "DeepSpeed's order", "random"])
def test_every_order_tries_each_layout_once(name: str) -> None:
    one = sweep(3.0, 2.0, 1.0, 2.0, 2.5)
    tried = [
        outcome.option
        for _, outcome in tune_replay.POLICIES[name](one, random.Random(0))
        if outcome is not None
    ]

    assert sorted(tried) == [0, 1, 2, 3, 4]


def test_no_row_is_looked_at_before_it_is_tried() -> None:
    """Whatever the rows not tried say, the trials up to there are the same."""
    rng = random.Random(1)
    factors = [rng.uniform(0.8, 1.4) for _ in range(12)]
    tuner = Tuner(sweep(*factors).options)
    order = []
    for _ in range(4):
        chosen = tuner.next_trial()
        assert chosen is not None
        order.append(chosen)
        tuner = tuner.with_outcome(sweep(*factors).trial(chosen, rng))

    other = [factor if at in order[:3] else 1 / factor for at, factor in enumerate(factors)]
    seen: list[int] = []
    answers = tune_replay._learning(Score())(sweep(*other), random.Random(0))
    for _, outcome in answers:
        if outcome is not None:
            seen.append(outcome.option)
        if len(seen) == 4:
            break

    assert seen == order


def test_the_mean_is_over_sources_with_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = [
        sweep(*[1.0] * 12),
        sweep(*[1.5, *[1.0] * 11], source="b"),
        sweep(1, 1, 1, source="c"),
    ]
    monkeypatch.setattr(tune_replay, "sweeps_of", lambda table: sweeps)

    found = result(Path("table.csv"), optuna=False)

    assert counted(sweeps) == ["a", "b"]
    assert set(found["regret"]) == {"0", "1", "3", "5", "8"}
    assert found["regret"]["0"] == pytest.approx(statistics.mean([0.0, 1.5 / 1.01 - 1]))
    assert found["regret"]["8"] <= 0.01  # neighbours of the plan that is slow are believed slow
    assert not found["sources"]["c"]["counted"]
    assert found["policies"]["predicted order"]["regret"]["0"] == found["regret"]["0"]
