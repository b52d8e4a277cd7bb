"""A set-up run as the formulas of other frameworks' stacks read it: plain figures on one object."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster import ClusterSpec
from planner.errors import DocumentError
from planner.model import Architecture
from planner.setup import Recomputed, Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: everything that its step time and memory follow from."""

    architecture: Architecture
    cluster: ClusterSpec
    task: str
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
    data_shard: int | None = None
    """Of the data-parallel ranks those that divide states; None: all, and no other copies them."""
    offload: frozenset[str] = frozenset()
    """What lies on the host: optimizer, params, activations."""
    precision: str = "bf16"
    quantised: bool = False
    """Frozen weights in 4 bits."""
    flash_attention: bool | None = None
    compiled: bool = False

    @property
    def devices(self) -> int:
        """Ranks of the whole job."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def sharding_ranks(self) -> int:
        """Ranks that divide what ZeRO divides."""
        return (self.data_shard or self.data) * self.context

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a step on a rank; the last one may be smaller."""
        return max(1.0, self.global_batch / (self.data * self.micro_batch))


def run_of(setup: Setup) -> Run:
    """Return a run as formulas read it; DocumentError where its model is no language model."""
    request, layout = setup.request, setup.layout
    job, a = request.job, request.model.architecture
    if a is None or a.patches or a.classes:
        raise DocumentError(
            "backend",
            f"{request.stack.name} trains language models; {request.model.name} is none: use "
            "native",
        )
    return Run(
        architecture=a,
        cluster=request.cluster,
        task=setup.task,
        framework=setup.framework,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        micro_batch=layout.micro_batch,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual=layout.virtual_stages,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        data=layout.data,
        data_shard=layout.data_shard if layout.zero else None,
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        recompute=setup.recompute,
        offload=_on_host(setup),
        precision=job.precision,
        quantised=job.lora is not None and job.lora.quantised,
    )


def _on_host(setup: Setup) -> frozenset[str]:
    """Return what lies on the host; with parameters their optimizer does too, where they train."""
    found = set()
    if setup.layout.offload == "parameters":
        found.add("params")
    if setup.layout.offload != "none" and setup.request.job.lora is None:
        found.add("optimizer")
    if setup.activations == "offload":
        found.add("activations")
    return frozenset(found)
