"""How far are interpolated layer seconds from measured ones?  Settings are left out on purpose.

    python benchmarks/interpolation.py [--profile profile.yaml]

Every measured micro-batch between two others is taken out of a profile in turn, at every tensor
degree and recompute choice; the planner works it out from what is left, as it does for settings
that nobody measured.  Compared are the seconds of a whole pass, forward and backward, through the
model's layers (each kind as often as the model has it), and of every kind by itself.  Stored bytes
are compared too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pathlib import Path
from typing import Any

from meshwright.api.commands import profile as measure_profile
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.hardware_rates import rates
from meshwright.planner.costs.layer_costs import LayerFigures
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import LayerMeasurement, Profile
from meshwright.planner.operators.operator_table import Setting

CHOICES = ("none", "selective", "full")
RESULTS = Path("benchmarks/results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-4m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", default="5min", help="of that profile")
    parser.add_argument("--profile", help="default: measure one first")
    args = parser.parse_args()
    model, cluster = resolve_model(args.model), resolve_cluster(f"local:{args.ranks}")
    if args.profile is None:
        profile = measure_profile(
            args.model,
            f"local:{args.ranks}",
            seq_len=128,
            global_batch=16,
            budget=args.budget,
            fresh=True,
        )
    else:
        profile = document.read(Profile, args.profile)
    rows = left_out(model, cluster, profile)
    passes = [row["pass_error"] for row in rows]
    kinds = [abs(e) for row in rows for e in row["kind_errors"].values()]
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "model": args.model,
        "machine": profile.birth.device,
        "ranks": profile.birth.ranks,
        "settings_left_out": len(rows),
        "pass_worst_abs_error": max(map(abs, passes)),
        "pass_median_abs_error": statistics.median(map(abs, passes)),
        "kind_median_abs_error": statistics.median(kinds),
        "kind_worst_abs_error": max(kinds),
        "stored_bytes_worst_abs_error": max(abs(row["stored_error"]) for row in rows),
        "rows": rows,
    }
    document.write_text(json.dumps(result, indent=1) + "\n", RESULTS / "interpolation.json")
    print({key: value for key, value in result.items() if key != "rows"})


def left_out(model: ModelGraph, cluster: ClusterSpec, profile: Profile) -> list[dict[str, Any]]:
    """Return one row for each setting that lies between two others."""
    settings: dict[tuple[int, str], set[int]] = {}
    for m in undivided(profile):
        settings.setdefault((m.tensor, m.recompute), set()).add(m.micro_batch)
    return [
        compared(model, cluster, profile, tensor, recompute, size)
        for (tensor, recompute), sizes in sorted(settings.items())
        for size in sorted(sizes)[1:-1]
    ]


def undivided(profile: Profile) -> list[LayerMeasurement]:
    """Return what was measured of whole sequences and all experts."""
    return [m for m in profile.layers if m.context == m.expert == 1]


def compared(
    model: ModelGraph,
    cluster: ClusterSpec,
    profile: Profile,
    tensor: int,
    recompute: str,
    micro_batch: int,
) -> dict[str, Any]:
    def is_left_out(m: LayerMeasurement) -> bool:
        return (m.tensor, m.recompute, m.micro_batch) == (tensor, recompute, micro_batch)

    truth = {m.kind: m for m in undivided(profile) if is_left_out(m)}
    rest = profile.model_copy(
        update={
            "layers": tuple(m for m in undivided(profile) if not is_left_out(m)),
            "stages": (),
        }
    )
    one = next(iter(truth.values()))
    job = Job(seq_len=one.seq_len, global_batch=micro_batch, precision=one.precision)
    figures = LayerFigures(model, cluster, rest, rates(cluster, job, rest)).figures_of(
        Setting(
            micro_batch=micro_batch, seq_len=one.seq_len, precision=one.precision, tensor=tensor
        ),
        Layout(tensor=tensor, micro_batch=micro_batch),
    )
    found = {kind: choices[CHOICES.index(recompute)] for kind, choices in figures.items()}
    counts = {layer.kind: 0 for layer in model.layers}
    for layer in model.layers:
        counts[layer.kind] += layer.repeat
    measured_s = sum(counts[k] * (m.forward_s + m.backward_s) for k, m in truth.items())
    said_s = sum(counts[k] * found[k].passes_s for k in truth)
    stored = sum(counts[k] * m.stored_bytes for k, m in truth.items())
    return {
        "tensor": tensor,
        "recompute": recompute,
        "micro_batch": micro_batch,
        "pass_error": said_s / measured_s - 1,
        "spread": max(m.spread for m in truth.values()),
        "kind_errors": {
            k: found[k].passes_s / (m.forward_s + m.backward_s) - 1 for k, m in truth.items()
        },
        "stored_error": sum(counts[k] * found[k].stored_bytes for k in truth) / stored - 1,
    }


if __name__ == "__main__":
    main()
