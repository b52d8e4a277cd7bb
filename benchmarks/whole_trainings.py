"""Published totals and rates of whole trainings, each predicted with the framework of its day.

A table (CSV) has a row for each training: name, model, accelerator, nodes, devices_per_node,
precision, seq_len, global_batch (samples), tokens, measure, value, layout, certainty, source, and
if need be `framework` and the allocator's peak in `memory_gib`.  `measure` is one of

    device_hours                tokens / (samples of seq_len) steps on all devices
    step_s                      seconds of one step
    tokens_per_s_per_device     samples of a step times seq_len, over step and devices
    tflops_per_device           model FLOPs of a step (see below), over step and devices, in 10^12

A row becomes a row of a table of runs (`planner.calibration.tables.rows`).  What its layout leaves
open is what its team will have tuned: the fastest that fits of micro-batch, chunks and
recomputation; where no degree is told, of the plans that its framework's search finds.  Model FLOPs
are those of `planner.operators.layer_operators.unmasked_step_flops` (PaLM's: attention without
discount for the causal mask); Megatron Core counts half of attention
(megatron/training/training.py, `num_floating_point_operations`), so rates quoted from it are held
against that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.calibration.tables.predictions import Tables, predict_run
from meshwright.planner.calibration.tables.rows import Skipped, setup_of
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.framework import Framework, with_options
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import DocumentError
from meshwright.planner.operators.layer_operators import unmasked_step_flops
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Recomputed, Setup
from meshwright.planner.schedules import schedule_of
from meshwright.planner.search.search import search

OF_2021 = {"flash_attention": "0", "inter_gb_per_s_per_device": "25"}
FRAMEWORKS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (r"torchtitan.*_h200_2025", "torchtitan", {"compiled": "1", "options": "compiled-loss"}),
    (r"torchtitan.*(compiled|fp8|float8)", "torchtitan", {"compiled": "1"}),
    (r"torchtitan", "torchtitan", {}),
    # Selene has eight HDR links a node; table 2 has micro-batches of one sample under PTD-P.
    (r"zero3.*(sc21|narayanan)", "deepspeed@0.3", {**OF_2021}),
    (r"sc21|narayanan", "megatron", {**OF_2021, "micro_batch_size": "1", "vpp": "1"}),
    # Megatron-LM's authors on Selene: MT-NLG under DeepSpeed, and selective recomputation.
    (r"2201\.11990", "megatron-deepspeed", {**OF_2021}),
    (r"2205\.05198", "megatron", {**OF_2021}),
    # bigscience-workshop/bigscience, train/tr11-176B-ml; Jean Zay has four Omni-Path links a node.
    (
        r"bloom",
        "megatron-deepspeed",
        {"recompute": "full", "micro_batch_size": "2", "inter_gb_per_s_per_device": "6.25"},
    ),
    (r"mpt|mosaic|llm-foundry", "llm-foundry-fsdp", {}),
    # Its recipes for mixtures of experts: github.com/NVIDIA-NeMo/Megatron-Bridge, perf_recipes.
    # On B200 they have the collective library's exchange, whose sizes the host reads; on GB200 and
    # GB300 kernels of their own, which are not overlapped (github.com/NVIDIA-NeMo/Megatron-Bridge
    # v0.2.0, scripts/performance/configs/{deepseek,qwen3}/workload_base_configs.py).
    (
        r"qwen3\S*-b200.*megatron bridge.* 25\.11",
        "megatron",
        {"options": "balanced-routing expert-overlap cheap-recompute host-counts"},
    ),
    (
        r"deepseek\S*-b200.*megatron bridge.* 25\.11",
        "megatron",
        {"options": "balanced-routing cheap-recompute host-counts"},
    ),
    (
        r"(deepseek|qwen3).*megatron bridge.* 25\.11",
        "megatron",
        {"options": "balanced-routing deepep cheap-recompute"},
    ),
    (
        r"(deepseek|qwen3|mixtral|moe).*(megatron|nemo)",
        "megatron",
        {"options": "balanced-routing deepep expert-overlap cheap-recompute"},
    ),
    # NVIDIA/NeMo-Framework-Launcher, conf/training/llama/llama2_7b.yaml: ub_tp_comm_overlap: False.
    (r"nemo.* 24\.", "megatron", {"options": "fa2"}),
    # NVIDIA/dgxc-benchmarking v25.04.02, llama3.1/pretrain_llama31.py: nothing is recomputed, and
    # gradients are summed in fp32 but in fp8.  Its models of 70B and 405B have collectives of
    # tensor parallelism beside their products (MegatronCommOverlapCallback with userbuffers_*), as
    # have those of NeMo's and Megatron-Bridge's recipes; that of 8B has none.
    (r"(70b|405b).*nemo.*dgxc", "megatron", {"recompute": "none", "options": "tp-overlap"}),
    (r"nemo.*dgxc", "megatron", {"recompute": "none"}),
    (r"(70b|405b).*(megatron[- ]bridge|nemo)", "megatron", {"options": "tp-overlap"}),
    (r"megatron|nemo", "megatron", {}),
    (r"deepseek", "hai-llm", {}),
    # arXiv:2407.21783, section 3.3.2: 8 thousand tokens without activation checkpointing.
    (r"llama-3\S* .*llama 3 paper", "llama3", {"recompute": "selective"}),
    (r"zero=3", "fsdp", {}),
)
"""What a row's name, source and layout say of its framework, that framework, and what is published
beside the row; first come first served.  Trainings whose framework nobody knows get that of unknown
ones."""

CAUSAL = re.compile(r"megatron[- ](core|bridge)", re.IGNORECASE)
"""Sources that count half of attention's FLOPs."""

FURTHER_TOKENS = {("deepseek-v3", "hai-llm"): 1}
"""Multi-token prediction by model and framework: arXiv:2412.19437, section 2.2.  Public benchmarks
of Megatron Core count and train none: 1,003 TFLOP/s are 4,018 tokens/s of 61 blocks."""

SAME_SCHEDULE = {"dualpipe": "dualpipe-v"}
"""DualPipe has as many bubbles as its V-shaped half, and a second copy of the parameters (DeepSeek,
github.com/deepseek-ai/DualPipe)."""

CHOSEN = ("scales", "tensor_overlap")
"""Fields of a layout that a row of trainings may name and a table of runs does not."""

MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A published figure beside ours."""

    name: str
    measure: str
    published: float
    predicted: float
    least: float
    most: float
    """The predicted 80 % range, in the same unit."""
    framework: str
    layout: str
    step_s: float
    parts: Mapping[str, float]
    samples: float
    """Of a step, for each device."""
    peak_bytes: float
    """Reserved by the allocator of the fullest rank."""
    published_peak_bytes: float | None
    fits: bool

    @property
    def error(self) -> float:
        """Predicted seconds over published ones, less 1: a rate is the inverse of seconds."""
        if self.measure in ("device_hours", "step_s"):
            return self.predicted / self.published - 1
        return self.published / self.predicted - 1

    @property
    def in_range(self) -> bool:
        """Whether the published figure is inside the predicted range."""
        return self.least <= self.published <= self.most


def outcome(row: Mapping[str, str]) -> Outcome:
    """Return what a training took and what it should have taken."""
    found, setup = tuned_run(row)
    request = setup.request
    model = request.model
    devices = int(row["nodes"]) * int(row["devices_per_node"])
    batch, seq_len = int(row["global_batch"]), int(row["seq_len"])

    def figure(step_s: float) -> float:
        match row["measure"]:
            case "device_hours":
                return float(row["tokens"]) / (batch * seq_len) * step_s * devices / 3600
            case "step_s":
                return step_s
            case "tokens_per_s_per_device":
                return batch * seq_len / step_s / devices
            case "tflops_per_device":
                flops = model_flops(model, seq_len, batch, causal=causal(row))
                return flops / step_s / devices / 1e12
            case other:
                raise ValueError(f"measure '{other}' is not known")

    ends = sorted((figure(found.step_time_low_s), figure(found.step_time_high_s)))
    return Outcome(
        name=row["name"],
        measure=row["measure"],
        published=float(row["value"]),
        predicted=figure(found.step_time_s),
        least=ends[0],
        most=ends[1],
        framework=request.framework.name,
        layout=found.layout,
        step_s=found.step_time_s,
        parts=found.step_parts,
        samples=batch / devices,
        peak_bytes=found.memory_bytes("reserved", "max"),
        fits=found.fits,
        published_peak_bytes=float(row["memory_gib"]) * 2**30 if row.get("memory_gib") else None,
    )


def model_flops(model: ModelGraph, seq_len: int, batch: int, *, causal: bool) -> float:
    """Return the model FLOPs of a step, with all of attention or its causal half."""
    whole = unmasked_step_flops(model, seq_len=seq_len, global_batch=batch)
    if not causal:
        return whole
    # What is left at length 1 has no attention to speak of.
    linear = unmasked_step_flops(model, seq_len=1, global_batch=seq_len * batch)
    return linear + (whole - linear) / 2


def layout_text(row: Mapping[str, str]) -> str:
    """Return a row's layout; of one that has none, that which its collector points to.

    >>> layout_text({"layout": "", "certainty": "rate sure (their layout: tp=1,pp=8)"})
    'tp=1,pp=8'
    """
    pointed = re.search(r"layout[^:]*: ((?:[a-z_]+=[\w-]+,?)+)", row.get("certainty", ""))
    return row["layout"] or (pointed[1] if pointed else "")


def causal(row: Mapping[str, str]) -> bool:
    return CAUSAL.search(row["source"]) is not None


def framework_words(row: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the framework of a row's day, and what is known of its kernels."""
    if row.get("framework"):
        return row["framework"], {"options": row["options"]} if row.get("options") else {}
    said = f"{row['name']} {row['source']} {layout_text(row)}".lower()
    for pattern, name, cells in FRAMEWORKS:
        if re.search(pattern, said) and name in frameworks():
            return name, cells
    return "", {}


def tuned_run(row: Mapping[str, str]) -> tuple[Prediction, Setup]:
    """Return the fastest prediction that fits among what a row leaves open, and its run."""
    tables = Tables()
    best: tuple[Prediction, Setup] | None = None
    each = _pinned(row) if re.search(r"\b(tp|pp|dp|zero)=", layout_text(row)) else _searched(row)
    for setup in each:
        try:
            found = predict_run(setup, tables)
        except DocumentError:
            continue
        if best is None or (not found.fits, found.step_time_s) < (
            not best[0].fits,
            best[0].step_time_s,
        ):
            best = found, setup
    if best is None:
        raise DocumentError("", f"{row['name']}: nothing of what is open can be predicted")
    return best


def _cells(row: Mapping[str, str]) -> dict[str, str]:
    """Return a training as a row of a table of runs, with what its layout tells."""
    framework, known = framework_words(row)
    told = dict(part.split("=", 1) for part in layout_text(row).split(",") if part)
    names = {
        "v": "vpp",
        "zero": "zero_stage",
        "micro_batch": "micro_batch_size",
    }
    cells = {names.get(name, name): value for name, value in told.items()}
    devices = int(row["nodes"]) * int(row["devices_per_node"])
    model = resolve_model(row["model"])
    a = model.architecture
    assert a is not None
    return {
        "id": row["name"],
        "source": "facts",
        "model": row["model"],
        "layers": str(a.layers),
        "hidden_size": str(a.hidden_size),
        "seq_len": row["seq_len"],
        "accelerator": row["accelerator"],
        "devices_per_node": row["devices_per_node"],
        "n_devices": str(devices),
        "global_batch_size": row["global_batch"],
        "precision": row["precision"],
        "framework": framework,
        **known,
        **cells,
    }


def _pinned(row: Mapping[str, str]) -> Iterator[Setup]:
    """Yield the runs that the degrees of a row leave open."""
    cells = _cells(row)
    schedule, chosen = cells.pop("schedule", ""), {n: cells.pop(n) for n in CHOSEN if n in cells}
    pipeline = int(cells.get("pp", "1"))
    micro_batches = [cells[n] for n in ("micro_batch_size",) if n in cells] or MICRO_BATCHES
    chunks = [cells[n] for n in ("vpp",) if n in cells] or CHUNKS[: None if pipeline > 1 else 1]
    recomputes = [cells[n] for n in ("recompute",) if n in cells] or ("none", "selective", "full")
    for size, virtual, recompute in itertools.product(micro_batches, chunks, recomputes):
        open_ = {"micro_batch_size": str(size), "vpp": str(virtual), "recompute": str(recompute)}
        setup = setup_of({**cells, **open_})
        if isinstance(setup, Skipped):
            raise DocumentError("", f"{row['name']}: {setup.reason}")
        layout = setup.layout
        if layout.virtual_stages != int(virtual) and not schedule:
            continue
        if int(virtual) > 1 and layout.micro_batches % pipeline:
            continue
        yield replace(
            setup,
            request=_own_model(row, setup.request),
            layout=_chosen(chosen, _named(schedule, layout)),
        )


def _named(schedule: str, layout: Layout) -> Layout:
    """Return a layout under a schedule that a row names."""
    if not schedule:
        return layout
    schedule = SAME_SCHEDULE.get(schedule, schedule)
    return replace(
        layout, schedule=schedule, virtual_stages=schedule_of(schedule).stages_per_rank[0]
    )


def _chosen(chosen: Mapping[str, str], layout: Layout) -> Layout:
    """Return a layout with what a row names of `CHOSEN`; other scales let weights travel wide."""
    layout = replace(layout, **cast(Any, chosen))
    return layout if layout.scales == "tensorwise" else replace(layout, weight_gather_dtype="full")


def _own_model(row: Mapping[str, str], request: Request) -> Request:
    """Return a request for the catalogue's model: a table's row has no window and no family.

    A module that predicts a further token in training counts as a block more.
    """
    options = framework_words(row)[1].get("options", "").split()
    request = replace(request, framework=with_options(request.framework, options))
    model = resolve_model(row["model"])
    more, a = FURTHER_TOKENS.get((row["model"], request.framework.name), 0), model.architecture
    if more and a is not None:
        model = graph_of(a.model_copy(update={"layers": a.layers + more}), name=model.name)
    return replace(request, model=model)


def _searched(row: Mapping[str, str]) -> Iterator[Setup]:
    """Yield the run of the fastest plan of a row's framework."""
    setup = setup_of(_cells(row))
    if isinstance(setup, Skipped):
        raise DocumentError("", f"{row['name']}: {setup.reason}")
    request = _own_model(row, setup.request)
    request = replace(request, framework=searchable(request.framework), pins=read_pins([]))
    plan = search(request).plan
    [recompute] = {item.recompute for stage in plan.stages for item in stage.layers[1:-1]} or {
        "none"
    }
    kinds: dict[str, Recomputed] = {"none": "none", "selective": "selective", "full": "full"}
    yield replace(setup, request=request, layout=plan.layout, recompute=kinds[recompute])


def searchable(framework: Framework) -> Framework:
    """Return a framework with a space: Megatron's where its own layouts are not searched."""
    if framework.space is not None:
        return framework
    return framework.model_copy(update={"space": frameworks()["megatron"].space})
