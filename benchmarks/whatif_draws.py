"""Verdicts of studies against a Monte Carlo of their own inputs, which shares no code with them.

    python -m benchmarks.whatif_draws plans/studies/*.yaml --csv benchmarks/results/whatif_draws.csv

Each study is planned by the command (`meshwright whatif --json`); an answer that it gave before
(ANSWER.json) is read instead.  From its plain figures alone
(seconds of a step, tokens, goodput, prices, delivery, with their 80 % ranges) 200,000 futures are
drawn here: independent normals for each accelerator's kernels and links, for goodput, each quote,
what owning costs, storage, transfers, power and delivery.  Hours and dollars follow from them, and
who is cheapest, who is fastest, who is first by both together, and who keeps deadline and budget.
A line has the first candidate's probability there and here, and the largest difference of any
probability of the study.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FUTURES = 200_000
TENTH = 1.2815515655
"""Of 100 outcomes of a normal, 10 lie beyond so many standard deviations."""
COLUMNS = ("study", "probabilities", "first", "there", "here", "largest_difference", "of")
CLOSE = 0.015
"""Sampling error of 10,000 futures there and of as many more here."""

Row = Mapping[str, Any]
Draws = NDArray[np.float64]


class Futures:
    """Normals by what causes them, one array each."""

    def __init__(self, seed: int = 2026) -> None:
        """Draw nothing yet."""
        self._rng = np.random.default_rng(seed)
        self._drawn: dict[str, Draws] = {}

    def of(self, cause: str) -> Draws:
        """Return the standard deviations of one cause."""
        if cause not in self._drawn:
            self._drawn[cause] = self._rng.standard_normal(FUTURES)
        return self._drawn[cause]

    def figure(self, span: Row, cause: str) -> Draws:
        """Return what a figure with an 80 % range becomes."""
        return stretched(span, self.of(cause))


def stretched(span: Row, deviations: Draws) -> Draws:
    """Log-normal to each side: one in ten below `low`, one in ten above `high`."""
    if not span["value"]:
        return np.zeros(FUTURES)
    down = math.log(span["value"] / (span["low"] or span["value"])) / TENTH
    up = math.log(span["high"] / span["value"]) / TENTH
    return np.asarray(span["value"] * np.exp(deviations * np.where(deviations > 0, up, down)))


def run_hours(row: Row, futures: Futures) -> Draws:
    """Steps times seconds, over the share of the clock that trains."""
    weight, kind = row["link_share"], row["accelerator"]
    both = (1 - weight) * futures.of(f"kernels {kind}") + weight * futures.of(f"links {kind}")
    step_s = stretched(row["step_s"], both / math.sqrt((1 - weight) ** 2 + weight**2))
    steps = row["tokens"] / row["tokens_per_step"]
    return np.asarray(steps * step_s / 3600 / futures.figure(row["goodput"], "lost hours"))


def result_hours(row: Row, futures: Futures) -> Draws:
    """Delivery and the run."""
    hours = run_hours(row, futures)
    lead = row["lead_days"]
    return hours if lead is None else hours + 24 * futures.figure(lead, "delivery")


def usd(row: Row, futures: Futures) -> Draws | None:
    """What the run's device-hours cost; None without a price."""
    if row["usd"] is None:
        return None
    weight, quote = row["price_quote_weight"], futures.of(row["price_cause"] or row["price"])
    deviations = weight * quote + math.sqrt(1 - weight**2) * futures.of("owning")
    hourly = stretched(row["usd_per_device_hour"], deviations)
    run = run_hours(row, futures)
    cost = hourly * row["devices"] * np.maximum(run, row["minimum_hours"])
    if row["stored_usd_per_hour"] is not None:
        cost += run * futures.figure(row["stored_usd_per_hour"], "price of storage")
    return np.asarray(cost + futures.figure(row["moved_usd"], "price of transfers"))


def weighted(row: Row, futures: Futures) -> Draws | None:
    """Dollars, and what the days until the result are worth; None without a price or a worth."""
    spent = usd(row, futures)
    if spent is None or row["day_usd"] is None:
        return None
    return np.asarray(spent + row["day_usd"] * result_hours(row, futures) / 24)


def first_shares(figures: Sequence[Draws]) -> list[float]:
    """How often each is the least; equals share a future."""
    table = np.array(figures)
    least = table <= table.min(axis=0) * (1 + 1e-9)
    return [float(share) for share in (least / least.sum(axis=0)).mean(axis=1)]


def differences(found: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return (what, probability there, here) of each candidate of each model."""
    pairs: list[tuple[str, float, float]] = []
    goal = found["study"]["goal"]
    rows = {(row["model"], row["candidate"]): row for row in found["outcomes"] if row["fits"]}
    for model, ranks in found["ranks"].items():
        futures = Futures()
        for by, figure in (("cost", usd), ("time", result_hours), ("weighted", weighted)):
            listed = [rank for rank in ranks if by in rank["probability_first"]]
            mine = [rows[model, rank["candidate"]] for rank in listed]
            if not mine or mine[0]["tokens"] is None:
                continue
            figures = [drawn for row in mine if (drawn := figure(row, futures)) is not None]
            for rank, share in zip(listed, first_shares(figures), strict=True):
                name = f"P({by}) {rank['candidate']} {model}"
                pairs.append((name, rank["probability_first"][by], share))
        for (of_model, name), row in rows.items():
            if of_model != model:
                continue
            for limit, said in row["chances"].items():
                kept = within(limit, row, goal, futures)
                if kept is not None:
                    pairs.append((f"{limit} {name} {model}", said, kept))
    return pairs


def within(limit: str, row: Row, goal: Row, futures: Futures) -> float | None:
    """Return the share of futures that keep a goal."""
    if limit == "hours of a year":
        return float(np.mean(run_hours(row, futures) <= 8760))
    if limit == "deadline":
        return float(np.mean(result_hours(row, futures) <= 24 * goal["deadline_days"]))
    if limit == "power cap":
        return float(np.mean(futures.figure(row["watts"], "power") <= goal["power_cap_w"]))
    if limit != "budget":
        return None
    if row["capital_usd"] is not None:
        return float(np.mean(futures.figure(row["outlay_usd"], "outlay") <= goal["budget_usd"]))
    spent = usd(row, futures)
    return None if spent is None else float(np.mean(spent <= goal["budget_usd"]))


def answer_of(path: Path) -> Mapping[str, Any]:
    """Return what the command says of a study, or said."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        command = [sys.executable, "-m", "meshwright", "whatif", str(path), "--json"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(text))


def row_of(study: str, pairs: Sequence[tuple[str, float, float]]) -> dict[str, str]:
    """Return a study's line: its first candidate's probability, and the largest difference."""
    if not pairs:
        return {"study": study, "probabilities": "0"}
    first, worst = pairs[0], max(pairs, key=lambda pair: abs(pair[1] - pair[2]))
    return {
        "study": study,
        "probabilities": str(len(pairs)),
        "first": first[0],
        "there": f"{first[1]:.4f}",
        "here": f"{first[2]:.4f}",
        "largest_difference": f"{abs(worst[1] - worst[2]):.4f}",
        "of": worst[0],
    }


def main() -> int:
    """Print a line for each study; 1 if a probability differs by more than sampling explains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--csv", type=Path, help="where the lines are written")
    asked = parser.parse_args()
    rows = []
    for path in asked.paths:
        rows.append(row_of(path.stem, differences(answer_of(path))))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if asked.csv:
        with asked.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(any(float(row.get("largest_difference", 0)) > CLOSE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
