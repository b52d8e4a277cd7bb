"""Published trainings held against what-if's default answer: the fastest public framework of today.

    python -m benchmarks.whatif_facts TRAININGS.csv [--measure device_hours]

`benchmarks/public_facts.py` predicts each with the framework and the layout of its day; here
nothing is told but model, devices, precision, samples and tokens, as a buyer would ask.
Device-hours count the goodput of that size; other measures become seconds of a step.  A row holds
if its figure lies in the 80 % range.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.whole_trainings import causal, model_flops
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.study import Study


def outcome_of(row: Mapping[str, str]) -> CandidateOutcome:
    """Return what what-if says of a row."""
    said = Study.of(
        {
            "name": row["name"],
            "models": [row["model"]],
            "work": {
                "seq_len": int(row["seq_len"]),
                "global_batch": int(row["global_batch"]),
                "precision": row["precision"],
            },
            "goal": {"tokens": float(row["tokens"])} if row["tokens"] else {},
            "offers": [
                {"cluster": f"{row['nodes']}x{row['devices_per_node']}x{row['accelerator']}"}
            ],
        }
    )
    [candidate] = candidates_of(said)
    return evaluate(said, row["model"], candidate)


def published_and_ours(
    row: Mapping[str, str], outcome: CandidateOutcome
) -> tuple[float, tuple[float, float, float]]:
    """Return a published figure and ours with its range, in device-hours or seconds of a step."""
    value, devices = float(row["value"]), outcome.devices
    if row["measure"] == "device_hours":
        assert outcome.hours is not None
        hours = outcome.hours.times(float(devices))
        return value, (hours.low, hours.value, hours.high)
    assert outcome.step_s is not None
    step, batch, seq_len = outcome.step_s, int(row["global_batch"]), int(row["seq_len"])
    ours = (step.low, step.value, step.high)
    match row["measure"]:
        case "step_s":
            return value, ours
        case "tokens_per_s_per_device":
            return batch * seq_len / devices / value, ours
        case "tflops_per_device":
            flops = model_flops(resolve_model(row["model"]), seq_len, batch, causal=causal(row))
            return flops / devices / (value * 1e12), ours
        case other:
            raise ValueError(f"{row['name']}: measure is '{other}'")


def main() -> None:
    """Print a line for each row, and the share that holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--measure", help="Rows of one measure alone: device_hours")
    asked = parser.parse_args()
    held: dict[str, list[bool]] = {}
    with asked.table.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if asked.measure in (None, r["measure"])]
    for row in rows:
        outcome = outcome_of(row)
        if not outcome.fits:
            held.setdefault(row["measure"], []).append(False)
            print(f"{row['name']}: {outcome.binding[:100]}", flush=True)
            continue
        published, (low, value, high) = published_and_ours(row, outcome)
        holds = low <= published <= high
        held.setdefault(row["measure"], []).append(holds)
        print(
            f"{row['name']}: {value:,.4g} ({low:,.4g} to {high:,.4g}) against {published:,.4g}, "
            f"{outcome.framework}: {outcome.layout}{'' if holds else '  <- outside'}",
            flush=True,
        )
    for measure, found in held.items():
        print(f"{measure}: {sum(found)} of {len(found)} in range")
    if not held:
        sys.exit("no rows")


if __name__ == "__main__":
    main()
