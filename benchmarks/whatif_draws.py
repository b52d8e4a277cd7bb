"""Verdicts of studies against a Monte Carlo of their own inputs, which shares no code with them.

    python -m benchmarks.whatif_draws plans/studies/*.yaml benchmarks/whatif_studies.yaml \
        --csv benchmarks/results/whatif_draws.csv

Each study is planned by the command (`meshwright whatif --json`); an answer that it gave before
(ANSWER.json) is read instead, and `studies` of a file are studies of their own.  From its plain
figures alone (seconds of a step, tokens, goodput, start, prices, share of hours used, delivery,
with their 80 % ranges) 200,000 futures are drawn here: independent normals for each accelerator's
kernels and links, for goodput, starts, each provider's quotes, what owning costs, utilisation,
storage, transfers, power and delivery.  Hours and dollars follow from them, and who fits and is
cheapest, fastest, first by both together, and who fits and keeps deadline, budget and caps.  A line
has the first candidate's probability there and here, and the largest difference of any probability
of the study.

`--forms` states each study of runs as a year of one such job too, for each of its models (as if
nothing were stored and no other work used its hours, without goals and sizes to be found), and says
whether both forms cost the same within 5 % and name the same first.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from meshwright.planner.documents.document import plain

FUTURES = 200_000
TENTH = 1.2815515655
"""Of 100 outcomes of a normal, 10 lie beyond so many standard deviations."""
COLUMNS = ("study", "probabilities", "first", "there", "here", "largest_difference", "of")
SAME = "the same"
"""What is said of two forms with one verdict."""
PLENTY = 1e11
"""Tokens of a run where a study asks of them by the model's size."""
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
    """Steps times seconds, over the share of the clock that trains, after the start."""
    weight, kind = row["link_share"], row["accelerator"]
    both = (1 - weight) * futures.of(f"kernels {kind}") + weight * futures.of(f"links {kind}")
    step_s = stretched(row["step_s"], both / math.sqrt((1 - weight) ** 2 + weight**2))
    steps = row["tokens"] / row["tokens_per_step"]
    training = steps * step_s / 3600 / futures.figure(row["goodput"], "lost hours")
    return np.asarray(training + futures.figure(row["start_hours"], "start"))


def result_hours(row: Row, futures: Futures) -> Draws:
    """Delivery and the run."""
    hours = run_hours(row, futures)
    lead = row["lead_days"]
    return hours if lead is None else hours + 24 * futures.figure(lead, "delivery")


def price_deviations(row: Row, futures: Futures) -> Draws:
    """Standard deviations of a price: of the providers that ask it, and of what owning costs."""
    weight = row["price_quote_weight"]
    asked = (row["price_cause"] or row["price"]).splitlines()
    quotes = np.sum([futures.of(f"asked by {name}") for name in asked], axis=0)
    mean = quotes / math.sqrt(len(asked))
    moves = row["price_moves_weight"]
    mean = math.sqrt(1 - moves**2) * mean + moves * futures.of("moves until a later order")
    return np.asarray(weight * mean + math.sqrt(1 - weight**2) * futures.of("owning"))


def terms_begun(hours: Draws | float, term_hours: float) -> Draws:
    """Whole terms of a contract that hours reach into."""
    return np.maximum(1, np.ceil(np.asarray(hours) / term_hours - 1e-9))


def usd(row: Row, futures: Futures) -> Draws | None:
    """What a run's device-hours cost; None without a price.  What is paid whole is paid whole."""
    if row["usd"] is None:
        return None
    run, deviations = run_hours(row, futures), price_deviations(row, futures)
    term_hours = row["term_hours"]
    if term_hours is None:
        hourly = stretched(row["usd_per_device_hour"], deviations)
        cost = hourly * row["devices"] * np.maximum(run, row["minimum_hours"])
        if row["share_used"] is not None:
            share = row["share_used"]["value"]
            fixed = row["fixed_usd_per_device_hour"]["value"] / share
            part = fixed / row["usd_per_device_hour"]["value"]
            used = futures.figure(row["share_used"], "share of hours used")
            cost *= part * share / used + (1 - part)
    else:
        if row["jobs"]:
            paid: Draws | float = max(term_hours, row["hours"]["value"])
        elif row["term_renews"]:
            paid = term_hours * terms_begun(run, term_hours)
        else:
            paid = np.maximum(term_hours, run)
        whole = stretched(row["fixed_usd_per_device_hour"], deviations) * paid
        used_usd = stretched(row["used_usd_per_device_hour"], deviations) * run
        cost = (whole + used_usd) * row["devices"]
    return np.asarray(cost + data_usd(row, run, futures))


def data_usd(row: Row, run: Draws, futures: Futures) -> Draws:
    """What storage and transfers cost."""
    cost = futures.figure(row["moved_usd"], "price of transfers")
    if row["stored_usd_per_hour"] is not None:
        cost = cost + run * futures.figure(row["stored_usd_per_hour"], "price of storage")
    return cost


def outlay(row: Row, futures: Futures) -> Draws | None:
    """What leaves the budget: each term that is begun, a purchase with its years, or the rent."""
    if row["capital_usd"] is None:
        return usd(row, futures)
    if row["contract_hours"] is None:
        return futures.figure(row["outlay_usd"], "outlay")
    run = run_hours(row, futures)
    kept = max(row["term_hours"], row["hours"]["value"]) if row["jobs"] else run
    price = stretched(row["fixed_usd_per_device_hour"], price_deviations(row, futures))
    price = price / row["fixed_usd_per_device_hour"]["value"]
    terms = terms_begun(kept, row["contract_hours"])
    return np.asarray(row["capital_usd"] * price * terms + data_usd(row, run, futures))


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
            fitting = [row["fit_probability"] for row in mine]
            shares = [f * share for f, share in zip(fitting, first_shares(figures), strict=True)]
            for rank, share in zip(listed, shares, strict=True):
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
    """Return the share of futures in which a plan fits and keeps a goal."""
    if limit == "power cap":  # drawn whatever fits
        return float(np.mean(futures.figure(row["watts"], "power") <= goal["power_cap_w"]))
    kept: NDArray[np.bool_] | None = None
    if limit == "hours of a year":
        kept = run_hours(row, futures) <= 8760
    elif limit == "deadline":
        kept = result_hours(row, futures) <= 24 * goal["deadline_days"]
    elif limit == "budget":
        spent = outlay(row, futures)
        kept = None if spent is None else spent <= goal["budget_usd"]
    elif limit == "emission cap":
        kwh = futures.figure(row["watts"], "power") * run_hours(row, futures) / 1e3
        kept = kwh * row["grams_per_kwh"] / 1e3 <= goal["emission_cap_kg"]
    return None if kept is None else float(row["fit_probability"] * np.mean(kept))


def answer_of(path: Path) -> Mapping[str, Any]:
    """Return what the command says of a study, or said."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        command = [sys.executable, "-m", "meshwright", "whatif", str(path), "--json"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(text))


def studies_of(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Return each study's file; the studies of a list get one each in `folder`."""
    files: list[Path] = []
    for path in paths:
        data = plain_study(path)
        if "studies" not in data:
            files.append(path)
            continue
        for name, study in data["studies"].items():
            files.append(folder / f"{name}.yaml")
            files[-1].write_text(yaml.safe_dump({"format": 1, "name": name, **study}))
    return files


def plain_study(path: Path) -> dict[str, Any]:
    """Return a study's file as plain data; numbers are those of YAML 1.2, as 1.0e12 is one."""
    study: Any = plain(path.read_text(encoding="utf-8"))
    return dict(study)


def as_runs(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the study as one of a run for each of its models, alone on what it takes."""
    goal = study.get("goal", {})
    tokens = goal.get("tokens") or (goal.get("tokens_per_parameter") and PLENTY)
    offers = [
        {k: v for k, v in offer.items() if k != "largest"}
        | ({"n": offer["n"][:1]} if offer.get("largest") else {})
        for offer in study["offers"]
        if "solve" not in offer
    ]
    if study.get("jobs") or not tokens or not offers:
        return []
    left = {"data", "utilisation", "utilisation_factor"}
    alone = {k: v for k, v in study.get("assumptions", {}).items() if k not in left}
    kept = {k: v for k, v in study.items() if k not in ("question", "marginal", "curves")}
    fields = {**kept, "goal": {"tokens": tokens}, "offers": offers, "assumptions": alone}
    return [{**fields, "models": [model]} for model in study["models"]]


def as_a_year(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a study of a run as a year of one such job; None where the forms ask two things.

    A year of jobs has its contracts all year, and no more of them than that.
    """
    offers = run["offers"]
    if any("solve" in offer or "tuning" in offer for offer in offers):
        return None
    if {(offer.get("rent") or {}).get("term_months", 12) for offer in offers} != {12}:
        return None
    job = {"model": run["models"][0], "tokens": run["goal"]["tokens"], "runs_a_year": 1.0}
    return {**run, "models": [], "goal": {}, "jobs": [{"name": "run", **job}]}


def forms_text(path: Path, folder: Path) -> str | None:
    """Say whether both forms of a study cost the same and name one first; None of other studies."""
    texts = []
    for plain_run in as_runs(plain_study(path)) if path.suffix != ".json" else []:
        year = as_a_year(plain_run)
        if year is None:
            continue
        answers = []
        for name, form in (("run", plain_run), ("year", year)):
            file = folder / f"{path.stem}-{name}.yaml"
            file.write_text(yaml.safe_dump(form))
            answers.append(answer_of(file))
        texts.append(same_verdict(*answers))
    return next((text for text in texts if text != SAME), SAME) if texts else None


def same_verdict(run: Mapping[str, Any], year: Mapping[str, Any]) -> str:
    """Say how two answers differ: the same where costs agree within 5 % and the first is one."""
    costs = [
        {row["candidate"]: row["usd"]["value"] for row in answer["outcomes"] if row["usd"]}
        for answer in (run, year)
    ]
    whole = {row["candidate"] for row in run["outcomes"] if row["hours"] and row["fits"]}
    short = {r["candidate"] for r in run["outcomes"] if r["hours"] and r["hours"]["value"] <= 8760}
    for name in sorted(whole & short):
        if name in costs[0] and abs(costs[0][name] / costs[1][name] - 1) > 0.05:
            return f"{name} costs {costs[0][name]:,.0f} as a run, {costs[1][name]:,.0f} as a year"
    ranks = [next(iter(answer["ranks"].values())) for answer in (run, year)]
    if not any(ranks):  # nothing fits in either form
        return SAME
    firsts = [of[0]["candidate"] if of else "none" for of in ranks]
    longer = firsts[0] not in short
    same = firsts[0] == firsts[1] or longer
    return SAME if same else f"{firsts[0]} first as a run, {firsts[1]} as a year"


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
    parser.add_argument("--forms", action="store_true", help="compare both forms of each study")
    asked = parser.parse_args()
    rows, unlike = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for path in studies_of(asked.paths, Path(folder)):
            if asked.forms:
                text = forms_text(path, Path(folder))
                unlike += text not in (None, SAME)
                print(f"{path.stem}: {text or 'has one form'}", flush=True)
                continue
            rows.append(row_of(path.stem, differences(answer_of(path))))
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if asked.csv:
        with asked.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    far = any(float(row.get("largest_difference", 0)) > CLOSE for row in rows)
    return int(far or unlike > 0)


if __name__ == "__main__":
    sys.exit(main())
