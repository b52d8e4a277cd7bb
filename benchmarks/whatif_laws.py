"""Laws of what-if on random perturbations: what should not get worse, and by how much it does.

    python benchmarks/whatif_laws.py [--count 300] [--seed 1]

Each perturbation draws a small study, changes one figure for the better and asks again: a cheaper
price, more memory, bandwidth or compute, faster links, a wider scale-up domain or more devices at
the same price of the whole never cost more; a greater share of hours used never makes a purchase
dearer, nor does less interest.  The worst ratio of each kind is printed; above 1.0001 it is broken.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.planning import Planned, plan_candidate, same_plan
from meshwright.planner.whatif.study import Study

MARGIN = 1e-4
CASES = (
    ("gpt2-xl", "{n}x4xl4", (1, 2, 3), 1024, (48, 64, 96)),
    ("llama-3.2-1b", "{n}x8xa10g", (1, 2), 2048, (64, 128)),
    ("llama-3.1-8b", "{n}x8xh100-sxm-80gb", (1, 2), 4096, (128,)),
    ("llama-3.2-3b", "{n}x8xmi300x", (1, 2), 4096, (128,)),
)
HARDWARE = ("memory", "memory_bandwidth", "compute", "node_links", "network", "domain")
PLANS: dict[tuple[str, ...], Planned] = {}
KINDS = (*HARDWARE, "devices", "price", "utilisation", "interest")


def cost(
    model: str, cluster: str, seq: int, batch: int, offer: dict[str, Any], **said: Any
) -> float:
    """Return the dollars of a run; infinite where nothing fits."""
    asked = Study.of(
        {
            "name": "law",
            "models": [model],
            "work": {"seq_len": seq, "global_batch": batch},
            "goal": {"tokens": 1e10},
            "offers": [{"cluster": cluster, **offer}],
            "assumptions": {"goodput": 0.9, **said},
        }
    )
    [candidate] = candidates_of(asked)
    key = same_plan(asked, model, candidate)
    if key not in PLANS:
        PLANS[key] = plan_candidate(asked, model, candidate)
    outcome = evaluate(asked, model, candidate, PLANS[key])
    return float("inf") if outcome.usd is None else outcome.usd.value


def rent(usd: float) -> dict[str, Any]:
    """Return terms at a price per device and hour."""
    return {"rent": {"usd_per_device_hour": usd, "date": "2026-11", "source": "a quote"}}


def ratio(rng: random.Random, kind: str) -> tuple[float, str]:
    """Return cost after a change for the better over that before, and what was changed."""
    model, text, sizes, seq, batches = rng.choice(CASES)
    n, batch = rng.choice(sizes), rng.choice(batches)
    cluster, factor = text.replace("{n}", str(n)), rng.uniform(1.01, 3.0)
    usd = rng.uniform(0.5, 5.0)
    if kind == "domain":
        n = rng.choice((2, 4, 8))
        cluster, factor = text.replace("{n}", str(n)), 2.0
    if kind in ("utilisation", "interest"):
        buy = {"buy": {"usd_per_device": 1e4 * usd, "date": "2026-11", "source": "a quote"}}
        worse, better = sorted(rng.uniform(0.05, 1.0) for _ in range(2))
        if kind == "interest":
            worse, better = better, worse
        after = cost(model, cluster, seq, batch, buy, **{kind: better})
        return after / cost(model, cluster, seq, batch, buy, **{kind: worse}), cluster
    what = f"{model} on {cluster}, batch {batch}, {kind} x {factor:.3f}"
    before = cost(model, cluster, seq, batch, rent(usd))
    if before == float("inf"):
        return 1.0, what
    if kind == "price":
        return cost(model, cluster, seq, batch, rent(usd / factor)) / before, what
    if kind == "devices":
        more = n + rng.randint(1, n)
        other = text.replace("{n}", str(more))
        return cost(model, other, seq, batch, rent(usd * n / more)) / before, f"{what} {other}"
    changed = {**rent(usd), "change": {kind: factor}}
    return cost(model, cluster, seq, batch, changed) / before, what


def main() -> None:
    """Print the worst of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    worst: dict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    count: dict[str, int] = defaultdict(int)
    broken = 0
    for place in range(asked.count):
        kind = KINDS[place % len(KINDS)]
        try:
            found = ratio(rng, kind)
        except DocumentError as error:
            if "to change" not in str(error):  # a node without links has none
                raise
            continue
        count[kind] += 1
        worst[kind] = max(worst[kind], found)
        if found[0] > 1 + MARGIN:
            broken += 1
            print(f"{kind}: {found[0]:.6f} {found[1]}", flush=True)
    for kind in KINDS:
        print(f"{kind}: {count[kind]} times, worst {worst[kind][0]:.6f}")
    print(f"{sum(count.values())} perturbations, {broken} above 1 + {MARGIN:g}")


if __name__ == "__main__":
    main()
