"""Peak memory of ranks of large jobs: the runtime rehearsed on fake tensors against the prediction.

    PYTHONPATH=$PWD python benchmarks/fake_memory.py [MODEL ...] [-o benchmarks/results]

Every row is one layout.  The ranks at the pipeline's two ends run the runtime's own steps on
tensors without data (benchmarks.rehearsal); the planner predicts the same plan.  Left out of the
prediction is what no tensor shows: the device's context, the collective library, the allocator's
slack.  Writes fake_memory.json and docs/results/memory.md; needs neither a GPU nor much memory.
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

from benchmarks.rehearsal import Rehearsal, rank_at, rehearse
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.document import write_text
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.documents.profile import ChunkedLoss
from meshwright.planner.documents.units import bytes_text

DOCUMENT = Path(__file__).parents[1] / "docs" / "results" / "memory.md"
LEFT_OUT = ("context", "allocator overhead")
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
    blocks: int | None = None
    """Of the model, that many; None: all."""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The model as the table names it."""
        return self.model if self.blocks is None else f"{self.model}, {self.blocks} blocks"

    def graph(self) -> ModelGraph:
        """Return the model."""
        model = resolve_model(self.model)
        if self.blocks is None:
            return model
        assert model.architecture is not None
        cut = model.architecture.model_copy(update={"layers": self.blocks})
        return graph_of(cut, name=f"{self.model}-{self.blocks}")

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
            model=PlannedModel(
                name=model.name, source=model.source or model.name, digest=model.digest
            ),
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


ZERO_3 = {"mesh": {"data_shard": 8}, "zero": 3}
TENSOR = {"mesh": {"tensor": 2, "data_shard": 4}, "zero": 1}
PIPELINE = {"mesh": {"pipeline": 2, "data_shard": 4}, "zero": 1, "micro_batches": 6}
SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved-zb", 2),
    ("zbv", 2),
    ("dualpipe-v", 2),
)
FP8 = {"precision": "fp8"}
ROWWISE = {"precision": "fp8", "more": {"scales": "rowwise"}}
NARROW = {"precision": "fp8", "more": {"weight_gather_dtype": "fp8"}}
MXFP8 = {"precision": "mxfp8"}
COMPILED = {"more": {"compile": "block"}}
DOCUMENTS = {"more": {"document_len": 512}}


def chunks(gradients: str, rows: int = 1024) -> dict[str, Any]:
    return {"more": {"loss": ChunkedLoss(rows=rows, gradients=gradients)}}


def ahead(prefetch: int = 0, reshard_after_forward: int | None = None) -> dict[str, Any]:
    return {"more": {"prefetch": prefetch, "reshard_after_forward": reshard_after_forward}}


def mechanisms() -> list[Case]:
    """Return each mechanism beside what it may be combined with, on few blocks of real width."""

    def of(*parts: dict[str, Any], model: str = "llama-3.1-8b", blocks: int = 4) -> Case:
        fields: dict[str, Any] = {"model": model, "blocks": blocks}
        more: dict[str, Any] = {}
        for part in parts:
            more |= part.get("more", {})
            fields |= part
        return Case(**(fields | {"more": more}))

    def each(*parts: dict[str, Any], blocks: int = 4) -> list[Case]:
        return [of(*parts, {"recompute": one}, blocks=blocks) for one in ("none", "full")]

    selective, full = {"recompute": "selective"}, {"recompute": "full"}
    mixtral: dict[str, Any] = {"model": "mixtral-8x7b", "blocks": 2}
    experts = {"mesh": {"data_shard": 8, "expert": 4}, "zero": 1, "more": {"dispatch": "allgather"}}
    losses = [chunks(gradients) for gradients in ("precomputed", "recomputed")]
    return [
        *each(ZERO_3, COMPILED),
        of(ZERO_3, COMPILED, selective),
        of(TENSOR, COMPILED),
        of({"mesh": {"context": 2, "data_shard": 4}, "zero": 1}, COMPILED),
        *(
            of(PIPELINE, {"schedule": name, "virtual_stages": count}, COMPILED, blocks=6)
            for name, count in SCHEDULES
        ),
        of(PIPELINE, COMPILED, selective, blocks=6),
        *(of(where, loss, full) for where in (ZERO_3, TENSOR) for loss in losses),
        *(of(PIPELINE, loss, blocks=6) for loss in losses),
        of(ZERO_3, losses[0], COMPILED),
        *(row for kind in (FP8, ROWWISE, NARROW, MXFP8) for row in each(ZERO_3, kind)),
        of(ZERO_3, MXFP8, selective),
        of(TENSOR, MXFP8),
        of(PIPELINE, FP8, {"schedule": "zb-h1"}, blocks=6),
        *(of(ZERO_3, kind, COMPILED) for kind in (FP8, ROWWISE, NARROW, MXFP8)),
        *(of(ZERO_3, ahead(depth), blocks=6) for depth in range(4)),
        of(ZERO_3, ahead(2), full, blocks=6),
        *(of(ZERO_3, ahead(0, ranks), blocks=6) for ranks in (1, 2, 4)),
        *(of(ZERO_3, ahead(*both), blocks=6) for both in ((1, 1), (2, 1), (2, 2), (3, 4))),
        of(ZERO_3, ahead(2, 2), full, blocks=6),
        *(
            of(ZERO_3, ahead(2, 2), other, blocks=6)
            for other in (COMPILED, MXFP8, losses[1], DOCUMENTS)
        ),
        of(ZERO_3, ahead(2), NARROW, blocks=6),
        of(experts, **mixtral),
        of(experts, selective, **mixtral),
        of(experts, full, **mixtral),
        of(experts, {"zero": 3}, full, **mixtral),
        *(of(experts, other, **mixtral) for other in (COMPILED, FP8, losses[0], DOCUMENTS)),
        *each(ZERO_3, DOCUMENTS),
        of(TENSOR, DOCUMENTS),
        of(PIPELINE, DOCUMENTS, blocks=6),
        of(ZERO_3, DOCUMENTS, COMPILED),
    ]


def named(case: Case, plan: Plan, place: int) -> dict[str, Any]:
    """Return what tells a row from others."""
    more = [case.precision] if case.precision != "bf16" else []
    more += ["documents"] if plan.document_len is not None else []
    return {
        "model": case.title,
        "layout": " ".join([plan.layout.text(), *more]),
        "ranks": plan.mesh.devices,
        "seq_len": case.seq_len,
        "recompute": case.recompute,
        "place": place,
    }


def rehearsed(row: dict[str, Any], plan: Plan, model: ModelGraph) -> dict[str, Any]:
    """Return a row with what its rank held."""
    begin = time.perf_counter()
    found = apart(plan, model, rank_at(plan, row["place"]))
    return {**row, "rehearsed": parts_of(found), "seconds": time.perf_counter() - begin}


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
    """Return docs/results/memory.md."""
    errors = [abs(row["error"]) for row in rows]
    new = [abs(row["error"]) for row in rows if "blocks" in row["model"]]
    lines = [
        "# Peak memory, predicted and rehearsed",
        "",
        "One rank of a large job runs the runtime's own training step on tensors without data: "
        "FSDP2, tensor, context and pipeline parallelism, recomputation and the optimizer are the "
        "code that trains; collectives and sends do nothing; and the bytes of all live tensors are "
        "counted (`benchmarks/rehearsal.py`). The planner predicts the same plan. Its allowance "
        "for the CUDA context, the collective library and the allocator is left out on both sides. "
        "Compiled blocks save what the compiler's partitioner chooses; a chain of elementwise "
        "operators stores only its result, as a generated kernel does "
        "(`benchmarks/traced_blocks.py`). Each rank receives as many expert tokens as a plan "
        "allows for the busiest one.",
        "",
        f"`PYTHONPATH=$PWD python benchmarks/fake_memory.py`, {date}, torch {torch.__version__}: "
        f"{len(rows)} ranks, {figures(errors)}. {len(new)} of them have few blocks of full "
        "width and test one or two features each (compiled blocks, losses in chunks, 8 bits, "
        "prefetch depths, `reshard_after_forward`, all-gathered expert tokens, documents): "
        f"{figures(new)}. With few blocks the effect of a feature, and the error of the planner, "
        "is a larger share of the peak than in a whole model.",
        "",
        "Each pair of bytes is predicted / rehearsed. Parameters that FSDP has gathered count as "
        "parameters if they are live at the rank's peak; the planner counts those of a single "
        "layer as transient, which is in the column of activations here.",
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


def figures(errors: Sequence[float]) -> str:
    return (
        f"median |error| {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"
    )


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
    parser.add_argument("--anew", action="store_true", help="rehearse all that match, keep others")
    parser.add_argument("--again", action="store_true", help="only predict what is there again")
    options = parser.parse_args()
    table = Path(options.output) / "fake_memory.json"
    old = options.more or options.again or options.anew
    rows = json.loads(table.read_text("utf-8"))["rows"] if old else []
    found = {name_of(row): row for row in rows}
    date = datetime.date.today().isoformat()
    rows = []
    for case in [*cases(), *mechanisms()]:
        model = case.graph()
        plan = case.plan(model)
        for place in sorted({0, plan.mesh.pipeline - 1}):
            row = named(case, plan, place)
            matches = case.model in options.models and options.match in row["layout"]
            if name_of(row) in found and not (options.anew and matches):
                rows.append(predicted(found[name_of(row)], plan, model))
                continue
            if matches and not options.again:
                rows.append(predicted(rehearsed(row, plan, model), plan, model))
                seconds = rows[-1]["seconds"]
                print(line(rows[-1]), f"{seconds:.0f} s", file=sys.stderr, flush=True)
                # Those that are not come to yet stay, so that a run can be stopped.
                every = found | {name_of(one): one for one in rows}
                written(table, date, list(every.values()))
    written(table, date, rows)
    write_text(markdown(rows, date), DOCUMENT)


def written(table: Path, date: str, rows: list[dict[str, Any]]) -> None:
    result = {"date": date, "torch": torch.__version__, "rows": rows}
    write_text(json.dumps(result, indent=1) + "\n", table)


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "layout", "seq_len", "recompute", "place"))


if __name__ == "__main__":
    main()
