"""A row of a table of real runs, read as what was run: model, cluster, framework and layout.

The table is CSV with a header; unknown cells are empty and other columns are ignored.  Stated
conventions fill in missing cells of a row (`Setup.assumed` lists them); a row that lacks what no
convention can give becomes a `Skipped` with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.planner.architectures.architecture import graph_of
from meshwright.planner.calibration.tables import cells
from meshwright.planner.calibration.tables.cells import (
    NOT_KNOWN,
    Row,
    degree,
    flag,
    measurement,
    number,
    optional,
    word,
)
from meshwright.planner.calibration.tables.figures import architecture_of_row
from meshwright.planner.calibration.tables.machines import cluster_of_row
from meshwright.planner.calibration.tables.options import RunOptions, options_of_row
from meshwright.planner.calibration.tables.unread import unread_cells
from meshwright.planner.catalog import framework_name, frameworks
from meshwright.planner.documents.cluster import EIGHT_BITS, ClusterSpec, Precision
from meshwright.planner.documents.document import read_table
from meshwright.planner.documents.framework import (
    Framework,
    is_newer,
    usual_of_release,
    with_figures,
    with_options,
    without_sources,
)
from meshwright.planner.documents.framework_space import EVERYTHING, Facts, condition_of
from meshwright.planner.documents.model import Architecture, ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup
from meshwright.planner.schedules import PLAIN
from meshwright.planner.schedules import pipeline_schedules as looped

NEEDED = ("id", "source", "layers", "hidden_size", "seq_len", "accelerator", "n_devices")
NO_KIN: Mapping[str, Collection[str]] = {}
PARAMETERS_DIFFER = 0.1
"""Relative difference of a stated number of parameters from that of figures that is named."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Modules with adapters where a framework adapts attention alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measurements of a run, and the ones by which a prediction may be judged."""

    id: str
    source: str
    model: str
    accelerator: str
    framework: str
    step_time_s: float | None
    peak_memory_gib: float | None
    memory_kind: str
    memory_rank: str
    out_of_memory: bool | None
    complete: bool
    """Everything needed to predict the run is known (inputs tier A)."""
    judge_time: bool
    judge_memory: bool
    judge_rank: bool
    sweep: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that cannot be predicted."""

    reason: str


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table; DocumentError where its header lacks what every run needs."""
    header, rows = read_table(path)
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise DocumentError(
            "header",
            f"lacks {', '.join(missing)}; a table of runs has the columns {', '.join(NEEDED)}, ...",
            file=str(path),
        )
    return list(rows)


def measured_of(row: Row) -> MeasuredRun:
    """Return the measurements of a row."""
    out_of_memory = flag(row, "out_of_memory")
    step_time_s = measurement(row, "step_time_s")
    memory = measurement(row, "peak_memory_gib")

    def is_flagged(column: str, default: bool) -> bool:
        answer = flag(row, column)
        return default if answer is None else answer

    failed = bool(out_of_memory)
    return MeasuredRun(
        id=row["id"],
        source=row["source"],
        model=row.get("model", ""),
        accelerator=row.get("accelerator", ""),
        framework=row.get("framework", ""),
        step_time_s=None if failed else step_time_s,
        peak_memory_gib=None if failed else memory,
        memory_kind=word(row.get("memory_kind", "")) or "unknown",
        memory_rank=word(row.get("memory_rank", "")) or "unknown",
        out_of_memory=out_of_memory,
        complete=row.get("inputs_tier", "A") in ("", "A"),
        judge_time=is_flagged("judge_time", step_time_s is not None),
        judge_memory=is_flagged("judge_memory", memory is not None),
        judge_rank=is_flagged("judge_rank", bool(row.get("sweep"))),
        sweep=row.get("sweep", ""),
    )


def setup_of(
    row: Row,
    *,
    unknown: Collection[str] = (),
    left_out: Collection[str] = (),
    kin: Mapping[str, Collection[str]] = NO_KIN,
) -> Setup | Skipped:
    """Return the setup of a row, or why it cannot be determined.

    `unknown` names frameworks that are left out: what they trained is read as an unknown
    framework's. `left_out` names all sources of its table: what rests on the row's own is left out,
    and on those that `kin` names for it.
    """
    try:
        return _setup(row, unknown, left_out, kin)
    except DocumentError as error:
        return Skipped(reason=str(error))
    except (ValueError, OverflowError) as error:  # no number, or figures that contradict each other
        return Skipped(reason=f"a cell is not valid: {str(error).splitlines()[-1].strip()[:100]}")


def _setup(
    row: Row,
    unknown: Collection[str],
    left_out: Collection[str],
    kin: Mapping[str, Collection[str]],
) -> Setup:
    assumed: list[str] = []
    architecture = architecture_of_row(row, assumed)
    tensor, pipeline, context = degree(row, "tp"), degree(row, "pp"), degree(row, "cp")
    devices = _devices(row, tensor * pipeline * context)
    data = _data_degree(row, devices, tensor * pipeline * context)
    micro_batch, micro_batches, global_batch = _batches(row, data, assumed)
    expert, expert_tensor = _expert_degrees(row, tensor * context * data, assumed)
    precision, quantised = _word_or_default(
        row, "precision", cells.precision, ("bf16", False), None
    )
    if word(row.get("precision", "")) in cells.EMPTY:
        assumed.append("precision bf16")
    had = options_of_row(row)
    precision = _precision_with_options(row, precision, had, assumed)
    recompute = _word_or_default(row, "recompute", cells.recompute_of_text, None, assumed)
    if recompute in (None, "partial") and had.recompute is not None:
        recompute = had.recompute
    zero = _word_or_default(row, "zero_stage", cells.zero_stage, None, assumed)
    task = _word_or_default(row, "task", cells.task, "pretrain", None)
    memory_gb = number(row, "accelerator_memory_gb")
    network = number(row, "inter_gb_per_s_per_device")
    cluster, of_cluster = cluster_of_row(
        row.get("accelerator", ""),
        devices,
        optional(row, "devices_per_node") or 8,
        memory_gb=memory_gb or None,
        intra_link=row.get("intra_link", ""),
        network_bytes_per_s=network * 1e9 if network else None,
    )
    assumed += of_cluster
    name = row.get("framework", "").lower()
    fused = flag(row, "flash_attention")
    framework, version = closest_framework(
        name,
        zero=zero,
        alone=task != "pretrain" and tensor * pipeline == 1,
        fused=fused,
        precision=precision,
        unknown=unknown,
    )
    if left_out:
        framework = _without_sources(
            framework.name, frozenset(kin.get(row["source"], (row["source"],))), frozenset(left_out)
        )
    if not version:
        name = "" if name and _own_framework(name) else name
        assumed.append(f"framework '{name}' priced as {framework.name}")
    assumed += _assumed_of_options(row, had, framework)
    divided = flag(row, "sequence_parallel")
    zero = framework.sharding.zero if zero is None else zero
    shard, zero_text = data if zero else 1, word(row.get("zero_stage", ""))
    if zero and (had.hybrid or any(part in zero_text for part in ("hsdp", "hybrid"))):
        shard = _shard_in_node(cluster, data, context, others=tensor * pipeline)
    virtual = _chunks(row, architecture.layers, pipeline, micro_batches, assumed)
    on_host = cells.offloaded_states(row.get("offload", "")) | had.offload
    if had.offloaded_blocks:
        on_host |= {"activations"}
    job = Job(
        seq_len=architecture.max_positions,
        global_batch=global_batch,
        precision=precision,
        optimizer=had.optimizer,
        lora=_adapters(task, framework, had, quantised=quantised),
    )
    space = framework.space or EVERYTHING
    scales = (had.scales or framework.eight_bit.scales) if precision == "fp8" else "tensorwise"
    compiled = bool(flag(row, "compiled"))
    if "compiled" in row and flag(row, "compiled") is None and "block" in space.compile:
        assumed.append("not compiled")
    as_graph = compiled and "block" in space.compile
    asynchronous = "async" in space.tensor_overlaps
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        data_shard=shard,
        data_replicate=data // shard,
        zero=zero,
        schedule=looped.INTERLEAVED.name if virtual > 1 else PLAIN,
        virtual_stages=virtual,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        offload="parameters"
        if "params" in on_host
        else "optimizer"
        if "optimizer" in on_host
        else "none",
        sequence_parallel=framework.tensor.sequence_parallel if divided is None else divided,
        scales=scales,
        weight_gather_dtype=space.usual_gather_dtype(precision, scales) if zero == 3 else "full",
        compile="block" if as_graph else "none",
        loss=had.loss,
        dispatch="allgather" if had.gathers_tokens and expert > 1 else "alltoall",
        tensor_overlap="async"
        if "tp-overlap" in had.framework and tensor > 1 and asynchronous
        else "none",
    )
    facts = Facts(_graph(architecture), cluster, job, layout)
    further = _options_of_run(row, framework, facts, had, assumed)
    return Setup(
        request=Request(
            facts.model,
            cluster,
            job,
            framework=_with_options(
                framework,
                fused,
                compiled=compiled and not as_graph,
                further=further,
                offloaded=cells.offloaded_share(row.get("offload", "")),
            ),
        ),
        layout=layout,
        recompute=recompute,
        recomputed_blocks=had.recomputed_blocks,
        offloaded_blocks=had.offloaded_blocks,
        activations="offload" if "activations" in on_host else "keep",
        known=version,
        assumed=tuple(assumed),
    )


def _precision_with_options(
    row: Row, precision: Precision, had: RunOptions, assumed: list[str]
) -> Precision:
    """Return the type of products, which a word of the options may narrow."""
    if had.precision is None or had.precision == precision:
        return precision
    if precision in EIGHT_BITS or word(row.get("precision", "")) in cells.EMPTY:
        return had.precision
    assumed.append(f"products in {precision}, though the options say {had.precision}")
    return precision


def _assumed_of_options(row: Row, had: RunOptions, framework: Framework) -> Iterator[str]:
    """Yield unknown options of a run, and options that its table infers."""
    yield from (f"{each:.60}{NOT_KNOWN}" for each in had.unread)
    if "options" in row and not had.is_stated:
        yield "options as usual of its framework and release"
    if is_newer(framework, row.get("release", "")):
        yield f"release {row['release']:.40} later than any of measured runs"
    for entry in row.get("basis", "").split(";"):
        cell, _, how = entry.partition("=")
        if how.strip() == "inferred" and cell.strip() in ("options", "loss"):
            yield f"{cell.strip()} inferred"


def _shard_in_node(cluster: ClusterSpec, data: int, context: int, *, others: int) -> int:
    """Return among how many replicas states are divided that are divided within nodes."""
    in_node = max(1, cluster.groups[0].devices_per_node // others)
    return max(1, math.gcd(data * context, in_node) // context)


def _not_as_stated(row: Row, framework: Framework, facts: Facts) -> Iterator[str]:
    """Yield a row's properties that differ from the priced ones: parameters, 8-bit scales, and all
    that its cells say beyond what is read of them."""
    model, scales, rule = (
        facts.model,
        facts.layout.scales if facts.layout else "",
        framework.eight_bit,
    )
    if scales not in ("", "tensorwise", rule.scales, *rule.recipes):
        yield f"{scales} scales priced as {rule.scales} ones"
    stated = number(row, "n_params")
    if stated and abs(model.parameters / stated - 1) > PARAMETERS_DIFFER:
        yield f"{model.parameters:.3g} parameters by the figures, though n_params is {stated:.3g}"
    has_experts = model.architecture is not None and model.architecture.experts is not None
    adapted = facts.job.lora is not None
    yield from unread_cells(row, has_experts=has_experts, has_adapters=adapted)


def _adapters(task: str, framework: Framework, had: RunOptions, *, quantised: bool) -> Lora | None:
    """Return the adapters of a task; rank and matrices are the framework's if a row names none."""
    if task not in ("lora", "qlora"):
        return None
    of_attention = (had.adapters or framework.kernels.adapters) == "attention"
    return Lora(
        rank=had.adapter_rank or framework.kernels.adapter_rank,
        targets=ATTENTION if of_attention else framework.kernels.adapter_targets,
        weights="nf4" if quantised or task == "qlora" else "full",
    )


def _options_of_run(
    row: Row, framework: Framework, facts: Facts, had: RunOptions, assumed: list[str]
) -> tuple[str, ...]:
    """Return the options of a run: those of its framework's runs and release, and its own.

    Later options change earlier ones.
    """
    options = [
        *_runs_with(framework, facts),
        *usual_of_release(framework, row.get("release", "")),
        *had.framework,
    ]
    assumed += [text for text in _not_as_stated(row, framework, facts) if text not in assumed]
    accelerator = facts.cluster.groups[0].accelerator if facts.cluster else None
    measured = accelerator.kernels.eight_bit_attention if accelerator else {}
    if "fp8-attention" in options and facts.job.precision not in measured:
        options.remove("fp8-attention")
        assumed.append(f"attention in 16 bits, since no rate in {facts.job.precision} is measured")
    return tuple(options)


def closest_framework(
    name: str,
    *,
    zero: int | None,
    alone: bool,
    fused: bool | None = None,
    precision: Precision = "bf16",
    unknown: Collection[str] = (),
) -> tuple[Framework, bool]:
    """Return the framework of a name, and whether the name is its own.

    Attention that is not `fused` implies releases before 2022, where those have a document.  An
    unknown framework gets the closest: that of fine-tuning with `transformers` for fine-tuning
    whose layers are whole on each device (`alone`), of plain FSDP for ZeRO-3, else `unknown`.  For
    fine-tuning in 8 bits, in which the former does not train, kernels are Transformer Engine's:
    `megatron`.
    """
    framework = _own_framework(name)
    if (
        framework is not None
        and fused is False
        and framework.versions
        and framework.versions.earlier
    ):
        framework = frameworks()[framework.versions.earlier]
    if framework is not None and framework.name not in unknown:
        return framework, True
    close = frameworks()["transformers" if alone else "fsdp" if zero == 3 else "unknown"]
    trains_in = close.space.precisions if close.space else None
    if trains_in is not None and precision in EIGHT_BITS and precision not in trains_in:
        return frameworks()["megatron" if alone else "unknown"], False
    return close, False


def _runs_with(framework: Framework, facts: Facts) -> tuple[str, ...]:
    """Return the known options of a framework's runs; its name contains them."""
    return tuple(
        option
        for runs in framework.accuracy.runs_with
        if all(condition_of(text).is_fulfilled(facts) for text in runs.when)
        for option in runs.options
    )


def _own_framework(name: str) -> Framework | None:
    """Return the framework that a name or alias stands for; None for an unknown one."""
    try:
        framework = frameworks()[framework_name(name.partition("+")[0])]
    except DocumentError:
        return None
    return None if framework.name == "unknown" else framework


@lru_cache(maxsize=256)
def _without_sources(name: str, left: frozenset[str], sources: frozenset[str]) -> Framework:
    """Return a framework without what rests on some of a table's sources."""
    return without_sources(frameworks()[name], left, sources, frameworks()["unknown"])


_KNOWN: dict[tuple[int, tuple[str, ...], float | None], tuple[Framework, Framework]] = {}
"""Cached values by a framework's id and options; the framework stays alive so that its id stays its
own."""


def _with_options(
    framework: Framework,
    flash_attention: bool | None,
    *,
    compiled: bool,
    further: tuple[str, ...],
    offloaded: float | None = None,
) -> Framework:
    """Return a framework with the kernels that a row names, and `further` options of its runs.

    Rows alike share one.  `native` has no kernels to choose.
    """
    if framework.name == "native":
        return framework
    options = [] if flash_attention is None else ["flash" if flash_attention else "eager-attention"]
    options += [*(["compiled"] if compiled else []), *further]
    key = id(framework), tuple(options), offloaded
    if key not in _KNOWN:
        own = framework
        if offloaded is not None:
            own = with_figures(own, {"offload.activations_share": offloaded})
        _KNOWN[key] = framework, with_options(own, options)
    return _KNOWN[key][1]


@lru_cache(maxsize=1024)
def _graph(architecture: Architecture) -> ModelGraph:
    return graph_of(architecture, name="model")


def _word_or_default(
    row: Row, column: str, read: Callable[[str], Any], default: Any, assumed: list[str] | None
) -> Any:
    """Return the meaning of a word; the default where it is empty or unknown.

    Without a list of assumptions an unknown word is an error.
    """
    cell = row.get(column, "")
    if word(cell) in cells.EMPTY:
        return default
    value = read(cell)
    if value is not None:
        return value
    if assumed is None:
        raise DocumentError("", f"{column} '{cell[:40]}' is not known")
    assumed.append(f"{column} '{cell[:40]}'{NOT_KNOWN}")
    return default


MOST_CHUNKS = 6


def _chunks(row: Row, layers: int, pipeline: int, micro_batches: int, assumed: list[str]) -> int:
    """Return model chunks per rank.

    Megatron-LM runs without a schedule are interleaved, if their micro-batches fit its rounds.
    """
    virtual = optional(row, "vpp")
    each = max(1, layers // pipeline)
    most = -(-(layers + 2) // pipeline)  # embedding and loss may count as layers
    if virtual is not None and virtual > most:
        assumed.append(f"{most} chunks on each pipeline rank")
        return most
    rounds = pipeline > 1 and micro_batches % pipeline == 0
    if virtual is not None or not rounds or word(row.get("framework", "")) != "megatron":
        return max(1, virtual or 1)
    chunks = next(n for n in range(min(MOST_CHUNKS, each), 0, -1) if each % n == 0)
    assumed.append(f"{chunks} chunks on each pipeline rank")
    return chunks


def _devices(row: Row, others: int) -> int:
    """Return the devices of the job: as stated in the row, or the product of its degrees."""
    devices = optional(row, "n_devices")
    if devices is None and optional(row, "dp"):
        devices = others * (optional(row, "dp") or 1)
    if devices is None:
        raise DocumentError("", "n_devices is not known")
    if devices == 0:
        raise ValueError("n_devices is 0")
    return devices


def _data_degree(row: Row, devices: int, others: int) -> int:
    """Return the number of replicas among which samples are divided."""
    data = optional(row, "dp")
    if data is not None and data * others == devices:
        return data
    if devices % others:
        raise DocumentError("", "tp x pp x cp does not divide n_devices")
    return devices // others


def _expert_degrees(row: Row, ranks: int, assumed: list[str]) -> tuple[int, int]:
    """Return the degrees that divide experts and each of them, among the ranks of one stage."""
    expert, expert_tensor = degree(row, "ep"), degree(row, "etp")
    if ranks % (expert * expert_tensor):
        expert_tensor = math.gcd(expert_tensor, ranks)
        expert = math.gcd(expert, ranks // expert_tensor)
        assumed.append(f"experts divided among {expert} x {expert_tensor} ranks")
    return expert, expert_tensor


def _batches(row: Row, data: int, assumed: list[str]) -> tuple[int, int, int]:
    """Return micro-batch, micro-batches and global batch; one sample where neither is known.

    A last micro-batch with fewer samples counts as a whole one.
    """
    micro_batch, cell = optional(row, "micro_batch_size"), number(row, "global_batch_size")
    if not micro_batch:
        assumed.append("micro_batch 1")
        micro_batch = 1
    if not cell:
        assumed.append("one micro-batch a step")
        return micro_batch, 1, micro_batch * data
    global_batch = max(1, round(cell))
    share = -(-global_batch // data)
    micro_batch = min(micro_batch, share)
    count = -(-share // micro_batch)
    if count * micro_batch * data != global_batch:
        assumed.append(f"{count} whole micro-batches on each of {data} ranks")
    return micro_batch, count, global_batch


def measured_setups(
    rows: list[Row],
    *,
    unknown: Collection[str] = (),
    left_out: Collection[str] = (),
    kin: Mapping[str, Collection[str]] = NO_KIN,
) -> Iterator[tuple[MeasuredRun, Setup | Skipped]]:
    """Yield measurements and setups, row by row."""
    for row in rows:
        yield measured_of(row), setup_of(row, unknown=unknown, left_out=left_out, kin=kin)
