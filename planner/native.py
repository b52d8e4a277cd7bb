"""What the native backend, our runtime, can execute: the reason why it refuses a layout."""

from __future__ import annotations

from collections.abc import Iterator

from planner.cluster import ClusterSpec
from planner.model import Architecture, ModelGraph
from planner.plan import Job, Layout
from planner.prediction import Assumption
from planner.schedule import obstacle, rank_of_stage

FAMILIES = frozenset(
    {"reference", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
)
"""Families that the runtime has an adapter for; other models can be planned, not launched."""
WITHOUT_TENSOR_PLAN = frozenset({"gpt2"})
"""Families for which `transformers` says no way to divide them by tensor parallelism."""


def caveat(model: ModelGraph) -> Assumption | None:
    """Return the warning that a plan of this model can be studied but not launched, if so."""
    if model.architecture is None or model.architecture.family in FAMILIES:
        return None
    return Assumption(
        what=f"the runtime has no adapter for the family {model.architecture.family}: "
        "this plan can be studied, not launched",
        provenance="assumed",
        source="planner/native.py",
    )


def refusal(model: ModelGraph, cluster: ClusterSpec, job: Job, layout: Layout) -> str | None:
    """Return why the native backend cannot run a layout, or None if it can."""
    return next(_obstacles(model, cluster, job, layout), None)


def _obstacles(model: ModelGraph, cluster: ClusterSpec, job: Job, layout: Layout) -> Iterator[str]:
    if job.precision not in ("fp32", "tf32", "bf16"):
        yield f"precision {job.precision} cannot be trained; use bf16, tf32 or fp32"
    if layout.devices > cluster.devices:
        yield f"it needs {layout.devices} devices, and the cluster has {cluster.devices}"
    if any(group.accelerator != cluster.groups[0].accelerator for group in cluster.groups):
        yield "devices that differ cannot share one job"
    if layout.context > 1:
        yield "context parallelism cannot be executed"
    if layout.expert > 1:
        yield "expert parallelism cannot be executed"
    if layout.offload != "none":
        yield f"offload of {layout.offload} cannot be executed"
    if layout.gradient_wire != "full":
        yield f"gradients cannot travel as {layout.gradient_wire}"
    if layout.pipeline > 1:
        yield from _schedule_obstacles(model, layout)
    if model.edges:
        yield "the model's graph is not a chain"
    if layout.stages > len(model.chain):
        yield f"{layout.stages} stages need as many layers; the model has {len(model.chain)}"
    if layout.zero and layout.data_shard == 1 and layout.data > 1:
        yield f"ZeRO-{layout.zero} needs data_shard > 1"
    if layout.tensor > 1:
        yield from _tensor_obstacles(model.architecture, job, layout.tensor)


def _schedule_obstacles(model: ModelGraph, layout: Layout) -> Iterator[str]:
    shape = {
        "stages": layout.stages,
        "micro_batches": layout.micro_batches,
        "virtual_stages": layout.virtual_stages,
    }
    found = obstacle(layout.schedule, **shape)
    if found:
        yield f"{found[0]} {found[1]}"
        return
    if layout.schedule == "pipedream-2bw":
        yield "pipedream-2bw does not train like one process"
    home = rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    a = model.architecture
    if a is not None and a.tied_embeddings and home[0] == home[-1]:
        yield f"{layout.schedule} puts both ends of the tied embedding on one rank"


def _tensor_obstacles(a: Architecture | None, job: Job, degree: int) -> Iterator[str]:
    if a is None:
        yield "a user's own modules cannot be divided by tensor parallelism"
        return
    if a.family in WITHOUT_TENSOR_PLAN:
        yield f"{a.family} cannot be divided by tensor parallelism"
    if a.latent is not None:
        yield "latent attention cannot be divided by tensor parallelism"
    if a.patches is not None or a.classes:
        yield "patches and class heads cannot be divided by tensor parallelism"
    figures = {
        "seq_len": job.seq_len,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "ffn_size": a.ffn_size,
        "vocab_size": a.vocab_size,
    }
    if a.experts is not None:
        figures["expert ffn_size"] = a.experts.ffn_size
    for name, figure in figures.items():
        if figure % degree:
            yield f"tensor parallelism does not divide {name} {figure}"
