"""Ranges are those of a framework's own runs among them, and of sources left out elsewhere."""

from __future__ import annotations

import math

import pytest

from planner.backends.estimate import Estimate, estimate
from planner.catalog import accelerators, stacks
from planner.costs.uncertainty import UNMEASURED_ABOVE, UNMEASURED_BELOW
from planner.setup import Setup
from planner.tables.rows import setup_of

ROW = {
    "id": "x",
    "source": "made_up",
    "layers": "32",
    "hidden_size": "4096",
    "ffn_size": "14336",
    "n_heads": "32",
    "n_kv_heads": "8",
    "vocab_size": "128256",
    "seq_len": "4096",
    "accelerator": "h100-sxm-80gb",
    "n_devices": "64",
    "tp": "2",
    "micro_batch_size": "1",
    "global_batch_size": "256",
    "recompute": "none",
    "precision": "bf16",
    "framework": "nanotron",
}


def predicted(**cells: str) -> Estimate:
    setup = setup_of(ROW | cells)
    assert isinstance(setup, Setup)
    return estimate(setup)


def widths(found: Estimate) -> tuple[float, float]:
    step_s = found.step_time_s
    return math.log(step_s / found.low_s), math.log(found.high_s / step_s)


def test_a_run_among_the_measured_ones_has_its_frameworks_residuals() -> None:
    found = predicted()

    assert found.beyond == ()
    assert widths(found) == pytest.approx((stacks()["nanotron"].accuracy.spread,) * 2)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"accelerator": "l40s"}, "l40s"),
        ({"layers": "126", "hidden_size": "16384"}, "B parameters"),
        ({"seq_len": "65536"}, "sequences of 65536"),
        ({"task": "lora"}, "lora"),
        ({"framework": "torchtitan"}, "framework 'torchtitan'"),
        ({"framework": "mystery"}, "framework 'mystery'"),
    ],
)
def test_what_was_never_measured_has_a_wider_range_and_says_so(
    cells: dict[str, str], said: str
) -> None:
    found = predicted(**cells)
    below, above = widths(found)

    assert any(said in each for each in found.beyond)
    assert below >= UNMEASURED_BELOW - 1e-9
    assert above >= UNMEASURED_ABOVE - 1e-9


def test_what_was_measured_names_frameworks_and_accelerators_that_exist() -> None:
    seen = [stack.accuracy.seen for stack in stacks().values() if stack.accuracy.seen]

    assert set().union(*(one.accelerators for one in seen)) <= accelerators().keys()
