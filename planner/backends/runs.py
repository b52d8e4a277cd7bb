"""A row of a table of real runs, read as what was run: model, cluster, framework and layout.

The table is CSV with a header; cells that are not known are empty and other
columns are ignored.  What a row leaves open is filled in by stated conventions (`Run.assumed` lists
them); a row that lacks what no convention can give becomes a `Skipped` with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner.backends import cells
from planner.backends.cells import Row, degree, flag, number, optional, seen, word
from planner.backends.figures import architecture_of_row
from planner.backends.machines import cluster_of_row
from planner.cluster import ClusterSpec
from planner.document import read_table
from planner.errors import DocumentError
from planner.model import Architecture

Task = Literal["pretrain", "lora", "qlora", "full_finetune"]
Recomputed = Literal["none", "selective", "full", "partial"]

NEEDED = ("id", "source", "layers", "hidden_size", "seq_len", "accelerator", "n_devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: everything that its step time and memory follow from."""

    architecture: Architecture
    cluster: ClusterSpec
    task: Task
    framework: str
    seq_len: int
    global_batch: int
    micro_batch: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Model chunks on each pipeline rank."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    """Data-parallel degree, context parallelism not counted."""
    zero: int | None = None
    sequence_parallel: bool | None = None
    recompute: Recomputed | None = None
    hybrid: bool = False
    """States are divided within a node and copied between nodes."""
    offload: frozenset[str] = frozenset()
    """What lies on the host: optimizer, params, activations."""
    precision: str = "bf16"
    quantised: bool = False
    """Frozen weights in 4 bits."""
    flash_attention: bool | None = None
    compiled: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Ranks of the whole job."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sharding_ranks(self) -> int:
        """Ranks that divide what ZeRO divides: all replicas, or those of one node if hybrid."""
        ranks = self.data * self.context
        others = self.tensor * self.pipeline
        per_node = max(1, self.cluster.groups[0].devices_per_node // others)
        return math.gcd(ranks, per_node) if self.hybrid else ranks

    @property
    def layout_text(self) -> str:
        """The layout as people write it."""
        degrees = {
            "tp": self.tensor,
            "pp": self.pipeline,
            "vpp": self.virtual,
            "cp": self.context,
            "ep": self.expert,
            "dp": self.data,
        }
        named = [
            f"{name}={n}" for name, n in degrees.items() if n > 1 or name in ("tp", "pp", "dp")
        ]
        return " ".join([*named, f"micro_batch={self.micro_batch}", f"recompute={self.recompute}"])

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a step on a rank; the last one may be smaller."""
        return max(1.0, self.global_batch / (self.data * self.micro_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen of a run, and on which of it a prediction may be judged."""

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


def measured_of(row: Row) -> Measured:
    """Return what a row says was seen."""
    out_of_memory = flag(row, "out_of_memory")
    step_time_s = seen(row, "step_time_s")
    memory = seen(row, "peak_memory_gib")

    def judged(column: str, default: bool) -> bool:
        told = flag(row, column)
        return default if told is None else told

    failed = bool(out_of_memory)
    return Measured(
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
        judge_time=judged("judge_time", step_time_s is not None),
        judge_memory=judged("judge_memory", memory is not None),
        judge_rank=judged("judge_rank", bool(row.get("sweep"))),
        sweep=row.get("sweep", ""),
    )


def run_of(row: Row) -> Run | Skipped:
    """Return the run of a row, or why it cannot be told."""
    try:
        return _run(row)
    except DocumentError as error:
        return Skipped(reason=str(error))
    except (ValueError, OverflowError) as error:  # no number, or figures that contradict each other
        return Skipped(reason=f"a cell is not valid: {str(error).splitlines()[-1].strip()[:100]}")


def _run(row: Row) -> Run:
    assumed: list[str] = []
    architecture = architecture_of_row(row, assumed)
    tensor, pipeline, context = degree(row, "tp"), degree(row, "pp"), degree(row, "cp")
    devices = _devices(row, tensor * pipeline * context)
    data = _data_degree(row, devices, tensor * pipeline * context)
    micro_batch, global_batch = _batches(row, data, assumed)
    expert, expert_tensor = _expert_degrees(row, tensor * context * data, assumed)
    precision, quantised = _told(row, "precision", cells.precision, ("bf16", False), None)
    if word(row.get("precision", "")) in cells.EMPTY:
        assumed.append("precision bf16")
    recompute = _told(row, "recompute", cells.recomputed, None, assumed)
    zero = _told(row, "zero_stage", cells.zero_stage, None, assumed)
    task = _told(row, "task", cells.task, "pretrain", None)
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
    return Run(
        architecture=architecture,
        cluster=cluster,
        task=task,
        framework=row.get("framework", "").lower(),
        seq_len=architecture.max_positions,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tensor=tensor,
        pipeline=pipeline,
        virtual=_chunks(row, architecture.layers, pipeline, assumed),
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        data=data,
        zero=zero,
        hybrid=any(part in word(row.get("zero_stage", "")) for part in ("hsdp", "hybrid")),
        sequence_parallel=flag(row, "sequence_parallel"),
        recompute=recompute,
        offload=cells.offloaded(row.get("offload", "")),
        precision=precision,
        quantised=quantised or task == "qlora",
        flash_attention=flag(row, "flash_attention"),
        compiled=bool(flag(row, "compiled")),
        assumed=(*assumed, *of_cluster),
    )


def _told(
    row: Row, column: str, read: Callable[[str], Any], default: Any, assumed: list[str] | None
) -> Any:
    """Return what a word means; the default where it is empty, and where it says nothing known.

    Without a list of assumptions a word that is not known is an error.
    """
    cell = row.get(column, "")
    if word(cell) in cells.EMPTY:
        return default
    found = read(cell)
    if found is not None:
        return found
    if assumed is None:
        raise DocumentError("", f"{column} '{cell[:40]}' is not known")
    assumed.append(f"{column} '{cell[:40]}' taken as not known")
    return default


MOST_CHUNKS = 6


def _chunks(row: Row, layers: int, pipeline: int, assumed: list[str]) -> int:
    """Return model chunks per rank; large Megatron-LM runs that do not say are interleaved."""
    known = optional(row, "vpp")
    each = max(1, layers // pipeline)
    most = -(-(layers + 2) // pipeline)  # embedding and loss may count as layers
    if known is not None and known > most:
        assumed.append(f"{most} chunks on each pipeline rank")
        return most
    if known is not None or pipeline == 1 or word(row.get("framework", "")) != "megatron":
        return max(1, known or 1)
    chunks = next(n for n in range(min(MOST_CHUNKS, each), 0, -1) if each % n == 0)
    assumed.append(f"{chunks} chunks on each pipeline rank")
    return chunks


def _devices(row: Row, others: int) -> int:
    """Return the devices of the job: as the row says, or what its degrees multiply to."""
    devices = optional(row, "n_devices")
    if devices is None and optional(row, "dp"):
        devices = others * (optional(row, "dp") or 1)
    if devices is None:
        raise DocumentError("", "n_devices is not known")
    if devices == 0:
        raise ValueError("n_devices is 0")
    return devices


def _data_degree(row: Row, devices: int, others: int) -> int:
    """Return how many replicas the samples are divided among."""
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


def _batches(row: Row, data: int, assumed: list[str]) -> tuple[int, int]:
    """Return micro-batch and global batch; one sample where neither is known."""
    micro_batch, cell = optional(row, "micro_batch_size"), number(row, "global_batch_size")
    if not micro_batch:
        assumed.append("micro_batch 1")
        micro_batch = 1
    if not cell:
        assumed.append("one micro-batch a step")
        return micro_batch, micro_batch * data
    return micro_batch, max(1, round(cell))


def each(rows: list[Row]) -> Iterator[tuple[Measured, Run | Skipped]]:
    """Yield what was seen and what was run, row by row."""
    for row in rows:
        yield measured_of(row), run_of(row)
