"""Hardware whose stack nobody measured says so beside the verdict, and has a wider range."""

from __future__ import annotations

import math

import pytest

from meshwright.planner.whatif.conclusions import verdicts
from meshwright.planner.whatif.run_study import run
from tests.planner.whatif.test_study import PRICE, study

OFFERS = [{"cluster": "8xmi355x", "rent": PRICE}, {"cluster": "8xb200", "rent": PRICE}]


def test_a_stack_that_nobody_measured_says_so_beside_the_verdict() -> None:
    """MLPerf Training 5.1 has MI355X 18 % behind B200: the ranges allow it, whoever is first."""
    result = run(study(offers=OFFERS, work={"framework": "megatron"}), processes=1)

    amd, nvidia = result.outcomes
    assert (amd.unmeasured, nvidia.unmeasured) == (True, False)
    assert amd.step_s is not None and nvidia.step_s is not None
    assert amd.step_s.high > 1.18 * nvidia.step_s.low
    said = [text for text in verdicts(result) if "trained on mi355x" in text]
    assert len(said) == 1
    assert "b200" not in said[0]


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("8xh200-sxm", False),
        ("2xrtx-3090", False),  # of a generation whose kernels were timed
        ("8xgaudi2", True),
        ("8xmi300x", True),
    ],
)
@pytest.mark.long("2xrtx-3090-False", "8xgaudi2-True")
def test_what_is_measured_is_a_generation(cluster: str, expected: bool) -> None:
    asked = study(offers=[{"cluster": cluster, "rent": PRICE}], work={"framework": "native"})
    [outcome] = run(asked, processes=1).outcomes
    assert outcome.unmeasured is expected
    if expected:
        assert outcome.step_s is not None
        assert outcome.step_s.high > math.exp(0.3) * outcome.step_s.value
