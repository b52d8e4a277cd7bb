"""A row of a table of real runs, read as what was run: model, cluster, framework and layout.

The table is CSV with a header; cells that are not known are empty and other
columns are ignored.  What a row leaves open is filled in by stated conventions (`Run.assumed` lists
them); a row that lacks what no convention can give becomes a `Skipped` with its reason.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from planner.catalog import accelerators
from planner.cluster import ClusterSpec
from planner.document import unreadable
from planner.errors import DocumentError
from planner.expressions import cluster_of
from planner.model import Architecture, Experts, LatentAttention

Task = Literal["pretrain", "lora", "qlora", "full_finetune"]
Recomputed = Literal["none", "selective", "full", "partial"]

NEEDED = ("id", "source", "layers", "hidden_size", "seq_len", "accelerator", "n_devices")

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
DEFAULT_HEAD_DIM = 128
DEFAULT_VOCABULARY = 32000
MOST = 1e15
"""Above every count that a table can mean."""


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
    offload: str = "none"
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


Row = Mapping[str, str]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table; DocumentError where its header lacks what every run needs."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            missing = [name for name in NEEDED if name not in header]
            if missing:
                raise DocumentError(
                    "header",
                    f"lacks {', '.join(missing)}; a table of runs has the columns "
                    f"{', '.join(NEEDED)}, ...",
                    file=str(path),
                )
            return [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise unreadable(error, path) from error


def measured_of(row: Row) -> Measured:
    """Return what a row says was seen."""
    out_of_memory = row.get("out_of_memory", "")
    step_time_s = _seen(row, "step_time_s")
    memory = _seen(row, "peak_memory_gib")

    def judged(column: str, default: bool) -> bool:
        cell = row.get(column, "")
        return cell == "1" if cell else default

    failed = out_of_memory == "1"
    return Measured(
        id=row["id"],
        source=row["source"],
        model=row.get("model", ""),
        accelerator=row.get("accelerator", ""),
        framework=row.get("framework", ""),
        step_time_s=None if failed else step_time_s,
        peak_memory_gib=None if failed else memory,
        memory_kind=row.get("memory_kind", "") or "unknown",
        memory_rank=row.get("memory_rank", "") or "unknown",
        out_of_memory=None if out_of_memory == "" else failed,
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
    except _UnknownError as error:
        return Skipped(reason=str(error))
    except DocumentError as error:
        return Skipped(reason=error.message)
    except ValueError as error:  # a cell that is no number, or figures that contradict each other
        return Skipped(reason=f"a cell is not valid: {str(error).splitlines()[-1].strip()[:100]}")


class _UnknownError(Exception):
    """A figure that no convention gives."""


def _run(row: Row) -> Run:
    assumed: list[str] = []
    architecture = _architecture(row)
    devices = _whole(row, "n_devices")
    tensor, pipeline = _whole(row, "tp", 1), _whole(row, "pp", 1)
    context = _whole(row, "cp", 1)
    data = _data_degree(row, devices, tensor * pipeline * context)
    micro_batch, global_batch = _batches(row, data, assumed)
    precision, _, extra = (row.get("precision", "") or "bf16").lower().partition("+")
    precision = next((known for known in PRECISIONS if precision.startswith(known)), precision)
    if precision not in PRECISIONS:
        raise _UnknownError(f"precision '{precision}' is not known")
    if not row.get("precision"):
        assumed.append("precision bf16")
    recompute = row.get("recompute", "") or None
    if recompute not in (None, "none", "selective", "full", "partial"):
        raise _UnknownError(f"recompute '{recompute}' is not known")
    return Run(
        architecture=architecture,
        cluster=_cluster(
            row.get("accelerator", ""),
            devices,
            _whole(row, "devices_per_node", 8),
            row.get("intra_link", ""),
            _number(row, "inter_gb_per_s_per_device"),
        ),
        task=_task(row),
        framework=row.get("framework", "").lower(),
        seq_len=_whole(row, "seq_len"),
        global_batch=global_batch,
        micro_batch=micro_batch,
        tensor=tensor,
        pipeline=pipeline,
        virtual=_chunks(row, architecture.layers, pipeline, assumed),
        context=context,
        expert=_whole(row, "ep", 1),
        expert_tensor=_whole(row, "etp", 1),
        data=data,
        zero=_optional(row, "zero_stage"),
        sequence_parallel=_flag(row, "sequence_parallel"),
        recompute=recompute,  # type: ignore[arg-type]
        offload=row.get("offload", "") or "none",
        precision=precision,
        quantised="quantised" in extra or row.get("task") == "qlora",
        flash_attention=_flag(row, "flash_attention"),
        compiled=bool(_flag(row, "compiled")),
        assumed=tuple(assumed),
    )


MOST_CHUNKS = 6


def _chunks(row: Row, layers: int, pipeline: int, assumed: list[str]) -> int:
    """Return model chunks per rank; large Megatron-LM runs that do not say are interleaved."""
    known = _optional(row, "vpp")
    if known is not None or pipeline == 1 or row.get("framework", "").lower() != "megatron":
        return max(1, known or 1)
    each = layers // pipeline
    chunks = next(n for n in range(min(MOST_CHUNKS, max(1, each)), 0, -1) if each % n == 0)
    assumed.append(f"{chunks} chunks on each pipeline rank")
    return chunks


def _task(row: Row) -> Task:
    task = row.get("task", "") or "pretrain"
    if task not in ("pretrain", "lora", "qlora", "full_finetune"):
        raise _UnknownError(f"task '{task}' is not known")
    return task  # type: ignore[return-value]


def _data_degree(row: Row, devices: int, others: int) -> int:
    """Return how many replicas the samples are divided among."""
    data = _optional(row, "dp")
    if data is not None and data * others == devices:
        return data
    if devices % others:
        raise _UnknownError("tp x pp x cp does not divide n_devices")
    return devices // others


def _batches(row: Row, data: int, assumed: list[str]) -> tuple[int, int]:
    """Return micro-batch and global batch; one sample where neither is known."""
    micro_batch, global_batch = _optional(row, "micro_batch_size"), None
    cell = _number(row, "global_batch_size")
    if cell is not None:
        global_batch = max(1, round(cell))
    if micro_batch is None:
        assumed.append("micro_batch 1")
        micro_batch = 1
    if global_batch is None:
        assumed.append("one micro-batch a step")
        global_batch = micro_batch * data
    return max(1, micro_batch), global_batch


def _architecture(row: Row) -> Architecture:
    """Return the figures of a decoder as the table gives them.

    The table does not say norms, positions and biases: gated MLPs come with RMS norms, rotary
    positions and no biases (Llama), others with layer norms, biases and learned positions (GPT).
    """
    hidden = _whole(row, "hidden_size")
    heads = _optional(row, "n_heads") or None
    head_dim = _optional(row, "head_dim") or None
    if heads is None:
        heads = max(1, hidden // (head_dim or DEFAULT_HEAD_DIM))
    head_dim = head_dim or max(1, hidden // heads)
    kv_heads = _optional(row, "n_kv_heads") or heads
    if heads % kv_heads:
        kv_heads = heads
    gated = _flag(row, "gated_mlp")
    gated = True if gated is None else gated
    ffn = _optional(row, "ffn_size") or 4 * hidden
    attention = row.get("attention", "")
    return _architecture_of(
        gated=gated,
        hidden=hidden,
        layers=_whole(row, "layers"),
        heads=heads,
        kv_heads=1 if attention == "mqa" else kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocabulary=_whole(row, "vocab_size", DEFAULT_VOCABULARY),
        tied=bool(_flag(row, "tied_embeddings")),
        latent=attention == "mla",
        experts=(
            _whole(row, "n_experts", 0),
            _whole(row, "experts_per_token", 1),
            _optional(row, "expert_ffn_size") or ffn,
            _whole(row, "n_shared_experts", 0),
            _whole(row, "n_dense_layers", 0),
        ),
        positions=_whole(row, "seq_len"),
    )


@lru_cache(maxsize=1024)
def _architecture_of(
    *,
    gated: bool,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocabulary: int,
    tied: bool,
    latent: bool,
    experts: tuple[int, int, int, int, int],
    positions: int,
) -> Architecture:
    count, per_token, expert_ffn, shared, dense_layers = experts
    return Architecture(
        family="llama" if gated else "gpt",
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocabulary,
        gated_mlp=gated,
        norm="rms" if gated else "layer",
        positions="rotary" if gated else "learned",
        max_positions=positions,
        tied_embeddings=tied,
        qkv_bias=not gated,
        output_bias=not gated,
        mlp_bias=not gated,
        experts=Experts(
            count=count,
            per_token=min(per_token, count),
            ffn_size=expert_ffn,
            shared=shared,
            dense_layers=dense_layers,
        )
        if count > 1
        else None,
        latent=_latent(hidden) if latent else None,
    )


def _latent(hidden: int) -> LatentAttention:
    """Return the ranks of latent attention: DeepSeek's by width, Megatron-LM's defaults if small.

    The table has no columns for them.  Sources: DeepSeek-V2 and V3 configurations; Megatron-LM,
    MLATransformerConfig.
    """
    if hidden < 2048:
        return LatentAttention(
            q_rank=512, kv_rank=512, rope_head_dim=64, nope_head_dim=128, value_head_dim=128
        )
    return LatentAttention(
        q_rank=1536 if hidden >= 5120 else 0,
        kv_rank=512,
        rope_head_dim=64,
        nope_head_dim=128,
        value_head_dim=128,
    )


@lru_cache(maxsize=512)
def _cluster(
    accelerator: str, devices: int, per_node: int, intra_link: str, network: float | None
) -> ClusterSpec:
    entry = accelerators().get(accelerator)
    if entry is not None and per_node > devices:
        per_node = devices
    if devices % per_node:
        per_node = next(n for n in range(per_node, 0, -1) if devices % n == 0)
    return cluster_of(
        accelerator,
        nodes=devices // per_node,
        devices_per_node=per_node,
        intra_link=intra_link or None,
        network_bytes_per_s=network * 1e9 if network else None,
    )


def _seen(row: Row, column: str) -> float | None:
    """Return a measurement; None where the cell holds none above 0."""
    try:
        value = _number(row, column)
    except ValueError:
        return None
    return value if value else None


def _number(row: Row, column: str) -> float | None:
    cell = row.get(column, "")
    if not cell:
        return None
    value = float(cell)
    if not 0 <= value < MOST:
        raise ValueError(f"{column} is {cell}")
    return value


def _optional(row: Row, column: str) -> int | None:
    value = _number(row, column)
    return None if value is None else round(value)


def _whole(row: Row, column: str, default: int | None = None) -> int:
    value = _optional(row, column)
    if value is not None:
        if value == 0 and default != 0:
            raise ValueError(f"{column} is 0")
        return value
    if default is None:
        raise _UnknownError(f"{column} is not known")
    return default


def _flag(row: Row, column: str) -> bool | None:
    cell = row.get(column, "")
    return None if cell == "" else cell in ("1", "1.0", "true", "True")


def each(rows: list[Row]) -> Iterator[tuple[Measured, Run | Skipped]]:
    """Yield what was seen and what was run, row by row."""
    for row in rows:
        yield measured_of(row), run_of(row)
