"""Peak memory of ranks of large jobs: the runtime rehearsed on fake tensors against the prediction.

    PYTHONPATH=$PWD python benchmarks/fake_memory.py [MODEL ...] [-o benchmarks/results]

Every row is one layout.  The ranks at the pipeline's two ends run the runtime's own steps on
tensors without data (runtime.rehearsal); the planner predicts the same plan.  Left out of the
prediction is what no tensor shows: the device's context, the collective library, the allocator's
slack.  Writes fake_memory.json and docs/memory.md; needs neither a GPU nor much memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from planner.document import write_text
from planner.expressions import resolve_cluster, resolve_model
from planner.model import ModelGraph
from planner.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from planner.predict import predict
from planner.units import bytes_text
from runtime.rehearsal import Rehearsal, rank_at, rehearse

DOCUMENT = Path(__file__).parents[1] / "docs" / "memory.md"
LEFT_OUT = ("context", "slack")
STATES = ("parameters", "gradients", "optimizer")
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "mixtral-8x7b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout of a model; stages have equally many layers, give or take one."""

    model: str
    mesh: dict[str, int]
    zero: int = 0
    micro_batch: int = 1
    micro_batches: int = 2
    seq_len: int = 4096
    recompute: str = "none"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    precision: str = "bf16"
    more: dict[str, Any] = field(default_factory=dict)

    def plan(self, model: ModelGraph) -> Plan:
        """Return the plan."""
        mesh = Mesh(**self.mesh)
        data = mesh.data_shard * mesh.data_replicate
        names = [name for name, _ in model.chain]
        count = mesh.pipeline * self.virtual_stages
        least, more = divmod(len(names), count)
        ends = list(itertools.accumulate(least + (s < more) for s in range(count)))
        stages = tuple(
            Stage(layers=tuple(PlacedLayer(layer=n, recompute=self.recompute) for n in held))
            for held in (names[a:b] for a, b in itertools.pairwise([0, *ends]))
        )
        return Plan(
            model=PlannedModel(name=model.name, source=model.source, digest=model.digest),
            cluster="h100",
            seq_len=self.seq_len,
            global_batch=self.micro_batch * self.micro_batches * data,
            precision=self.precision,
            mesh=mesh,
            zero=self.zero,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            stages=stages,
            **self.more,
        )


def cases() -> list[Case]:
    """Return what is run: every axis, ZeRO level, recompute choice and a schedule of each sort."""

    def of(model: str, *rows: dict[str, Any]) -> list[Case]:
        return [Case(model=model, **row) for row in rows]

    return [
        *of(
            "llama-3.1-8b",
            {"mesh": {"data_replicate": 16}, "recompute": "full"},
            {"mesh": {"data_shard": 16}, "zero": 1, "recompute": "selective"},
            {"mesh": {"data_shard": 16}, "zero": 2},
            {"mesh": {"data_shard": 16}, "zero": 3, "micro_batch": 2},
            {"mesh": {"data_shard": 8, "tensor": 2}, "zero": 3, "recompute": "full"},
            {"mesh": {"tensor": 8, "data_shard": 2}, "zero": 1, "recompute": "selective"},
            {"mesh": {"pipeline": 4, "data_shard": 4}, "zero": 1, "micro_batches": 8},
            {
                "mesh": {"pipeline": 4, "data_shard": 4},
                "zero": 3,
                "micro_batches": 8,
                "recompute": "full",
            },
            {
                "mesh": {"pipeline": 4, "data_replicate": 4},
                "schedule": "interleaved",
                "virtual_stages": 2,
                "micro_batches": 8,
                "recompute": "selective",
            },
            {
                "mesh": {"pipeline": 4, "data_shard": 4},
                "zero": 1,
                "schedule": "zbv",
                "virtual_stages": 2,
                "micro_batches": 8,
                "recompute": "full",
            },
            {
                "mesh": {"context": 8, "data_shard": 2},
                "zero": 3,
                "seq_len": 32768,
                "recompute": "full",
            },
            {"mesh": {"data_replicate": 4}, "precision": "fp32", "recompute": "full"},
            {"mesh": {"data_shard": 8}, "zero": 3, "more": {"offload": "optimizer"}},
            {
                "mesh": {"data_shard": 4},
                "zero": 3,
                "recompute": "full",
                "more": {"offload": "parameters"},
            },
        ),
        *of(
            "llama-3.1-70b",
            {"mesh": {"data_shard": 64}, "zero": 3, "recompute": "full"},
            {"mesh": {"tensor": 8, "data_shard": 8}, "zero": 3, "recompute": "selective"},
            {"mesh": {"tensor": 8, "pipeline": 4, "data_shard": 2}, "zero": 1, "micro_batches": 8},
            {
                "mesh": {"tensor": 4, "pipeline": 8, "data_replicate": 2},
                "micro_batches": 16,
                "recompute": "selective",
            },
            {
                "mesh": {"tensor": 8, "pipeline": 4, "data_shard": 2},
                "zero": 1,
                "schedule": "interleaved",
                "virtual_stages": 2,
                "micro_batches": 8,
                "recompute": "full",
            },
            {
                "mesh": {"context": 4, "tensor": 8, "data_shard": 2},
                "zero": 3,
                "seq_len": 32768,
                "recompute": "selective",
            },
        ),
        *of(
            "llama-3.1-405b",
            {
                "mesh": {"tensor": 8, "pipeline": 16, "data_shard": 8},
                "zero": 1,
                "micro_batches": 16,
                "recompute": "full",
            },
            {
                "mesh": {"tensor": 8, "data_shard": 128},
                "zero": 3,
                "micro_batches": 1,
                "recompute": "full",
            },
            {
                "mesh": {"tensor": 8, "pipeline": 16, "data_shard": 8},
                "zero": 3,
                "micro_batches": 16,
                "recompute": "selective",
            },
        ),
        *of(
            "mixtral-8x7b",
            {"mesh": {"data_shard": 16}, "zero": 3, "recompute": "full"},
            {"mesh": {"data_shard": 16}, "zero": 1, "recompute": "selective"},
            {"mesh": {"tensor": 8, "data_shard": 2}, "zero": 1, "recompute": "full"},
            {"mesh": {"pipeline": 4, "data_shard": 8}, "zero": 1, "micro_batches": 8},
            {"mesh": {"data_shard": 16, "expert": 8}, "zero": 3, "recompute": "full"},
            {"mesh": {"data_shard": 16, "expert": 8}, "zero": 1, "recompute": "selective"},
            {"mesh": {"tensor": 2, "data_shard": 8, "expert": 8}, "zero": 1, "recompute": "full"},
            {
                "mesh": {"pipeline": 4, "data_shard": 8, "expert": 8},
                "zero": 1,
                "micro_batches": 8,
            },
        ),
    ]


def rows_of(case: Case, model: ModelGraph) -> list[dict[str, Any]]:
    """Rehearse the ranks at both ends of a plan's pipeline, and predict them."""
    plan = case.plan(model)
    result = []
    for place in sorted({0, plan.mesh.pipeline - 1}):
        begin = time.perf_counter()
        found = apart(plan, model, rank_at(plan, place))
        row = {
            "model": case.model,
            "layout": plan.layout.text(),
            "ranks": plan.mesh.devices,
            "seq_len": case.seq_len,
            "recompute": case.recompute,
            "place": place,
            "rehearsed": parts_of(found),
            "seconds": time.perf_counter() - begin,
        }
        result.append(predicted(row, plan, model))
    return result


def predicted(row: dict[str, Any], plan: Plan, model: ModelGraph) -> dict[str, Any]:
    """Return a row with its prediction."""
    cluster = resolve_cluster(f"{max(1, plan.mesh.devices // 8)}x8xh100-sxm-80gb")
    stage = plan.stages_of_rank(row["place"])[0]
    parts = predict(plan, model, cluster).stages[stage].memory_parts
    parts = {name: size for name, size in parts.items() if name not in LEFT_OUT}
    return {
        **row,
        "error": sum(parts.values()) / row["rehearsed"]["peak"] - 1,
        "predicted": by_kind(parts),
        "predicted_parts": parts,
    }


def apart(plan: Plan, model: ModelGraph, rank: int) -> Rehearsal:
    """Rehearse in a process of its own: torch remembers groups of ranks by name."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(rehearse, plan, model, rank=rank).result()


def parts_of(found: Rehearsal) -> dict[str, float]:
    return {
        "peak": found.peak_bytes,
        "parameters": found.parameters_bytes,
        "gradients": found.gradients_bytes,
        "optimizer": found.optimizer_bytes,
        "activations": found.activations_bytes,
    }


def by_kind(parts: dict[str, float]) -> dict[str, float]:
    """Return predicted bytes by the kinds that a rehearsal tells apart."""
    states = {name: parts[name] for name in STATES}
    peak = sum(parts.values())
    return {"peak": peak, **states, "activations": peak - sum(states.values())}


def markdown(rows: Sequence[dict[str, Any]], date: str) -> str:
    """Return docs/memory.md."""
    errors = [abs(row["error"]) for row in rows]
    lines = [
        "# Peak memory, predicted and rehearsed",
        "",
        "One rank of a large job runs the runtime's own training step on tensors without data: "
        "FSDP2, tensor, context and pipeline parallelism, recomputation and the optimizer are the "
        "code that trains, collectives and sends do nothing, and every tensor that is alive counts "
        "(`runtime/rehearsal.py`). The planner predicts the same plan; its allowance for the "
        "device's context, the collective library and the allocator is left out on both sides.",
        "",
        f"`PYTHONPATH=$PWD python benchmarks/fake_memory.py`, {date}, torch {torch.__version__}, "
        f"bf16 but for one row: {len(rows)} ranks, median |error| "
        f"{100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %.",
        "",
        "Each pair of bytes is predicted / rehearsed. Working copies that FSDP has gathered count "
        "as parameters where the rank holds them at its fullest moment; the planner counts those "
        "of a single layer as transient, which stands under activations here.",
        "",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [
            f"## {model}",
            "",
            "| ranks | layout | seq | recompute | stage | rehearsed | predicted | error | "
            "parameters | gradients | optimizer | activations, transient |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [line(row) for row in rows if row["model"] == model]
        lines.append("")
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    found, expected = row["rehearsed"], row["predicted"]

    def pair(kind: str) -> str:
        return f"{bytes_text(expected[kind])} / {bytes_text(found[kind])}"

    kinds = " | ".join(pair(kind) for kind in (*STATES, "activations"))
    return (
        f"| {row['ranks']} | {row['layout']} | {row['seq_len']} | {row['recompute']} "
        f"| {row['place']} | {bytes_text(found['peak'])} | {bytes_text(expected['peak'])} "
        f"| {100 * row['error']:+.1f} % | {kinds} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("-o", "--output", default="benchmarks/results")
    parser.add_argument("--match", default="", help="only layouts whose text has this")
    parser.add_argument("--more", action="store_true", help="rehearse only what is not there yet")
    parser.add_argument("--again", action="store_true", help="only predict what is there again")
    options = parser.parse_args()
    table = Path(options.output) / "fake_memory.json"
    old = options.more or options.again
    rows = json.loads(table.read_text("utf-8"))["rows"] if old else []
    found = {name_of(row): row for row in rows}
    date = datetime.date.today().isoformat()
    rows = []
    for case in cases():
        model = resolve_model(case.model)
        plan = case.plan(model)
        layout = plan.layout.text()
        names = [
            (case.model, layout, case.seq_len, case.recompute, place)
            for place in sorted({0, plan.mesh.pipeline - 1})
        ]
        if names[0] in found:
            rows += [predicted(found[name], plan, model) for name in names]
        elif not options.again and case.model in options.models and options.match in layout:
            rows += rows_of(case, model)
            for row in rows[-len(names) :]:
                print(line(row), f"{row['seconds']:.0f} s", file=sys.stderr, flush=True)
        result = {"date": date, "torch": torch.__version__, "rows": rows}
        write_text(json.dumps(result, indent=1) + "\n", table)
    write_text(markdown(rows, date), DOCUMENT)


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "layout", "seq_len", "recompute", "place"))


if __name__ == "__main__":
    main()
