"""A trial moves what is believed of all plans, in closed form, and so decides which is next."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from meshwright.planner.documents.plan import Layout
from meshwright.planner.tuning import posterior as belief
from meshwright.planner.tuning.next_trial import MemoryTrial, Outcome, Tuner, fit_probabilities
from meshwright.planner.tuning.posterior import LAYOUT, NOISE, Belief, Timed
from meshwright.planner.tuning.trial_options import CONSTANTS, TrialOption


def option(step_s: float = 1.0, links: float = 0.1, fit: float = 1.0, **layout: int) -> TrialOption:
    one = Layout(**{"tensor": 2, "data_shard": 4, "zero": 1, **layout})  # type: ignore[arg-type]
    parts = {"forward": (1 - links) * step_s, "tensor communication": links * step_s}
    return TrialOption(
        layout=one, kept="none", step_s=step_s, parts=parts, devices_per_node=8, fit_probability=fit
    )


def test_conditioning_equals_the_one_of_the_joint_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle conditions by adding trials one at a time, from the definition.

    It knows one kind of machine, and constants about which steps are straight lines.
    """
    monkeypatch.setattr(belief, "MACHINES", belief.MACHINES[:1])
    monkeypatch.setattr(belief, "TURNS", 1)
    options = [option(1.0, 0.1 * k, micro_batch=1 + k % 2, tensor=2 ** (k % 3)) for k in range(5)]
    trials = [Timed(option=1, step_s=1.3), Timed(option=4, step_s=0.9, noise=0.05)]
    prior = Belief(options).posterior_after([]).covariance
    at = [trial.option for trial in trials]
    residuals = np.log([trial.step_s for trial in trials])
    seen = prior[np.ix_(at, at)] + np.diag([trial.noise**2 for trial in trials])
    scale = (6 + residuals @ np.linalg.inv(seen) @ residuals) / 8
    mean, covariance = np.zeros(5), scale * prior
    for trial in trials:
        gain = covariance[:, trial.option] / (
            covariance[trial.option, trial.option] + trial.noise**2
        )
        mean = mean + gain * (math.log(trial.step_s) - mean[trial.option])
        covariance = covariance - np.outer(gain, covariance[trial.option])

    found = Belief(options).posterior_after(trials)

    assert found.mean == pytest.approx(mean)
    assert found.covariance == pytest.approx(covariance)


def test_slow_links_make_plans_of_many_collectives_slower_than_others() -> None:
    options = [option(links=0.5), option(links=0.4, pipeline=2), option(links=0.0, pipeline=4)]

    found = Belief(options).posterior_after([Timed(option=0, step_s=1.6)])

    assert found.mean[1] > found.mean[2] > 0
    told = {one.name: one for one in found.constants}
    assert told["inner links"].mean > 0.3
    assert told["inner links"].spread < CONSTANTS["inner links"].spread
    assert told["outer links"].mean == 0  # nobody saw them


@pytest.mark.parametrize("slow", [1.0, 3.0, 10.0])
def test_a_machine_that_is_slower_in_all_moves_plans_that_were_not_tried(slow: float) -> None:
    options = [option(1.0, 0.1 * k, micro_batch=1 + k % 2, tensor=2 ** (k % 3)) for k in range(6)]

    found = Belief(options).posterior_after([Timed(option=k, step_s=slow) for k in range(3)])

    told = {one.name: one for one in found.constants}
    assert told["kernels"].mean == pytest.approx(math.log(slow), abs=0.15)
    assert found.mean[3:] == pytest.approx(math.log(slow), abs=0.15)


@pytest.mark.parametrize("slow", [3.0, 10.0])
def test_links_that_are_slower_are_told_by_seconds_that_add_up(slow: float) -> None:
    """A straight line through the predicted links misses that of slow ones by far."""
    shares = [0.1, 0.2, 0.4, 0.3]
    options = [option(1.0, share, micro_batch=1 + k) for k, share in enumerate(shares)]
    steps = [1 - share + slow * share for share in shares]

    found = Belief(options).posterior_after([Timed(option=k, step_s=steps[k]) for k in range(3)])

    told = {one.name: one for one in found.constants}
    assert told["inner links"].mean == pytest.approx(math.log(slow), abs=0.25)
    assert found.mean[3] == pytest.approx(math.log(steps[3]), abs=0.1)


def test_a_step_moves_with_constants_as_its_sensitivities_say() -> None:
    one = option(1.5, 0.3, tensor=4, pipeline=2, virtual_stages=2, zero=2)
    factors = {name: 1.0 + 0.1 * place for place, name in enumerate(CONSTANTS)}

    for name, size in one.sensitivities(factors).items():
        more = {**factors, name: factors[name] * math.exp(1e-5)}
        moved = math.log(one.moved_s(more) / one.moved_s(factors)) / 1e-5
        narrow = math.log(factors["narrow products"]) * 2  # of its own share, which links move
        assert moved == pytest.approx(size, abs=1e-3 + abs(narrow))


def test_a_measured_plan_is_known_to_its_noise_and_no_better() -> None:
    found = Belief([option(), option(tensor=8)]).posterior_after([Timed(option=0, step_s=1.0)])
    busy = Belief([option(), option(tensor=8)]).posterior_after([Timed(option=0, step_s=20.0)])

    assert NOISE / 2 < found.spread(0) < NOISE
    assert busy.spread(0) < NOISE  # however far the prediction was off
    assert busy.spread(1) > 1.3 * found.spread(1)
    assert busy.mean[1] == pytest.approx(math.log(20), abs=0.1)  # the whole machine is so slow
    assert found.spread(1) > LAYOUT / 2


def test_a_run_out_of_memory_lowers_the_chance_of_others_and_a_fitting_one_raises_it() -> None:
    options = [option(fit=0.6), option(fit=0.7), option(fit=0.999)]
    before = fit_probabilities(options, [])

    less = fit_probabilities(options, [MemoryTrial(option=0, ran=False)])
    more = fit_probabilities(options, [MemoryTrial(option=0, ran=True)])

    assert less[1] < before[1] < more[1]
    assert less.tolist()[0] == 0
    assert more.tolist()[0] == 1


def test_memory_that_was_measured_lower_than_predicted_makes_room() -> None:
    options = [option(), option(fit=0.5)]

    roomy = fit_probabilities(options, [MemoryTrial(option=0, ran=True, ratio=0.8)])
    tight = fit_probabilities(options, [MemoryTrial(option=0, ran=True, ratio=1.2)])

    assert tight[1] < 0.3
    assert roomy[1] > 0.7


def test_a_noisy_trial_is_repeated_until_it_tells_and_a_quiet_one_is_not() -> None:
    """On a busy machine two plans are told apart by more trials of both, not by the luckier one."""
    tuner = Tuner([option(1.0, pipeline=1), option(1.05, pipeline=2)])
    rng, true_s = random.Random(3), (1.1, 1.0)
    for _ in range(2):
        chosen = tuner.next_trial()
        assert chosen is not None
        tuner = tuner.with_outcome(Outcome(option=chosen, step_s=true_s[chosen], noise=0.01))
    assert tuner.next_trial() is None

    tuner = Tuner(tuner.options)
    for _ in range(30):
        chosen = tuner.next_trial()
        if chosen is None or tuner.is_done:
            break
        seen_s = true_s[chosen] * math.exp(rng.gauss(0, 0.1))
        tuner = tuner.with_outcome(Outcome(option=chosen, step_s=seen_s, noise=0.1))

    assert 3 <= len(tuner.outcomes) < 30
    assert tuner.answer == 1
    assert tuner.measured_step(1).step_s == pytest.approx(1.0, abs=0.1)


def test_few_steps_that_are_alike_are_known_no_better_than_those_of_all_trials() -> None:
    options = [option(1.0), option(1.0, pipeline=2)]
    unsteady = Outcome(option=0, step_s=1.0, noise=0.05, steps=16)
    alike = Outcome(option=1, step_s=1.1, noise=0.001, steps=2)
    steady = Outcome(option=0, step_s=1.0, noise=0.002, steps=16)

    assert Tuner(options, [unsteady, alike]).measured_step(1).noise == pytest.approx(
        0.138, abs=0.01
    )
    assert Tuner(options, [steady, alike]).measured_step(1).noise == NOISE
    assert Tuner(options, [unsteady, alike]).sure < Tuner(options, [steady, alike]).sure


@pytest.mark.parametrize(("rival_s", "untried_s"), [(1.2, 1.2), (1.3, 1.1), (2.0, 1.1)])
def test_an_answer_whose_rivals_are_not_near_is_not_tried_again(
    rival_s: float, untried_s: float
) -> None:
    """That its own step may turn out shorter makes the answer no faster."""
    options = [option(1.0), option(1.0, pipeline=2), option(untried_s, pipeline=4)]
    outcomes = [
        Outcome(option=0, step_s=1.0, noise=0.1, steps=10),
        Outcome(option=1, step_s=rival_s, noise=0.1, steps=10),
    ]

    assert Tuner(options, outcomes).next_trial() == 2


def test_trials_end_when_no_other_plan_is_likely_to_be_faster() -> None:
    near = Tuner([option(1.0), option(1.01, pipeline=2)]).with_outcome(
        Outcome(option=0, step_s=1.0)
    )
    far = Tuner([option(1.0), option(3.0, pipeline=2)]).with_outcome(Outcome(option=0, step_s=1.0))

    assert not near.is_done
    assert far.is_done
    assert far.sure > near.sure
    assert not Tuner([option(1.0), option(3.0, pipeline=2)]).is_done  # nothing was measured


def test_a_profile_pays_where_trials_are_long_and_constants_decide() -> None:
    def some(step_s: float, links: Sequence[float]) -> list[TrialOption]:
        return [option(step_s, share, tensor=2**at) for at, share in enumerate(links)]

    assert Tuner(some(60.0, (0.1, 0.3, 0.5))).profile_pays(75.0)
    assert not Tuner(some(0.1, (0.1, 0.3, 0.5))).profile_pays(75.0)  # a trial is over before
    assert not Tuner(some(60.0, (0.3, 0.3, 0.3))).profile_pays(600.0)
    assert not Tuner(some(60.0, (0.3,))).profile_pays(1.0)  # nothing to decide


def test_a_plan_hardly_faster_than_the_answer_is_not_the_answer() -> None:
    tuner = Tuner([option(1.0), option(1.02, pipeline=2)])
    tuner = tuner.with_outcome(Outcome(option=0, step_s=1.0))

    tied = tuner.with_outcome(Outcome(option=1, step_s=0.998))
    faster = tuner.with_outcome(Outcome(option=1, step_s=0.9))

    assert (tied.answer, faster.answer) == (0, 1)


def test_where_trials_mislead_the_next_is_the_one_predicted_fastest() -> None:
    # The first is three times as slow as predicted, the second not: the first taught what is wrong.
    tuner = Tuner([option(1.0 + at / 10, micro_batch=2**at) for at in range(5)])
    for at, step_s in ((0, 3.0), (4, 1.4)):
        tuner = tuner.with_outcome(Outcome(option=at, step_s=step_s))

    assert tuner.next_trial() == 1
    assert Tuner(tuner.options, tuner.outcomes).next_trial() == 1  # as it was read again
