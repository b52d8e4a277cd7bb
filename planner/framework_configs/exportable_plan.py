"""A plan beside its model, in the words that frameworks share; what none has words for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from meshwright.planner.documents.axes import LAYOUT_AXES
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import INSIDE_OUT, Plan
from meshwright.planner.schedules import schedule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkPlan:
    """A plan beside its model, in the words that frameworks share."""

    plan: Plan
    model: ModelGraph
    cluster: ClusterSpec | None
    recipe: bool = True
    """True if optimizer, learning rates and clipping are written too, in place of the other
    framework's own."""
    has_job: bool = False
    """True if a job starts the ranks, so that nobody has to."""

    @property
    def recomputes(self) -> Counter[str]:
        """Number of blocks by recomputation; embedding and head do not count."""
        kinds = {name: layer.kind for name, layer in self.model.chain}
        return Counter(
            item.recompute
            for stage in self.plan.stages
            for item in stage.layers
            if kinds[item.layer] not in ("embedding", "head")
        )

    @property
    def blocks(self) -> list[int]:
        """Number of blocks of each stage."""
        kinds = {name: layer.kind for name, layer in self.model.chain}
        return [
            sum(kinds[item.layer] not in ("embedding", "head") for item in stage.layers)
            for stage in self.plan.stages
        ]

    @property
    def data(self) -> int:
        """Number of data-parallel ranks."""
        return self.plan.mesh.data_replicate * self.plan.mesh.data_shard

    @property
    def ranks_of_nodes(self) -> list[int]:
        """Number of ranks on each node that has any; ranks fill node after node."""
        assert self.cluster is not None, "frameworks of NEED_NODES are given a cluster"
        left, counts = self.plan.mesh.devices, []
        for group in self.cluster.groups:
            for _ in range(group.nodes):
                counts.append(min(left, group.devices_per_node))
                left -= counts[-1]
        return [count for count in counts if count]

    @property
    def changes_rate(self) -> bool:
        """True if the learning rate is not constant."""
        return bool(self.plan.training.warmup_steps) or self.falls

    @property
    def falls(self) -> bool:
        """The learning rate falls behind its warm-up."""
        return self.plan.training.rate_schedule != "constant"


def rate_text(wanted: FrameworkPlan) -> str:
    """Return the learning rates of a run in words."""
    t = wanted.plan.training
    parts = [f"the learning rate: {t.learning_rate:g}"]
    if t.warmup_steps:
        parts.append(f"warmed up over {t.warmup_steps} steps")
    if wanted.falls:
        steps = f" over its last {t.decay_steps} steps" if t.rate_schedule == "wsd" else ""
        parts.append(
            f"then {t.rate_schedule}{steps} down to {t.floor * t.learning_rate:g} at step "
            f"{t.rate_steps}"
        )
    return ", ".join(parts)


def script_text(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the parameters without weight decay."""
    if wanted.plan.training.weight_decay:
        yield "parameter groups: no weight decay on norms and biases"


def own_text(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties that count in memory and time and that no configuration contains."""
    loss, prefetch = wanted.plan.loss, wanted.plan.prefetch
    if loss is not None:
        yield f"loss: computed from {loss.rows} rows of logits at a time, or it takes more memory"
    if prefetch:
        yield f"parameters of {prefetch} layers are gathered ahead, where that can be set"
    if wanted.plan.graphs != "none":
        yield "micro-batches are captured CUDA graphs in the plan, and run as they are there"


def compile_text(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield that blocks are compiled, which the training script does."""
    if wanted.plan.compile == "block":
        yield "each block is compiled: block.compile()"


_WRITTEN = {
    *("format", "model", "cluster", "framework", "seq_len", "global_batch", "precision", "mesh"),
    *("zero", "schedule", "virtual_stages", "micro_batch", "micro_batches"),
    *("training", "timeout_s", "groups", "shares", "stages"),
    *("read_from", "not_understood"),
    *(axis.name for axis in LAYOUT_AXES if axis.exported is None),
}
"""Fields of a plan that configurations contain, or that are refused by name."""
_UNSUPPORTED = {
    **{axis.name: axis.exported for axis in LAYOUT_AXES if axis.exported is not None},
    "document_len": "attention stays within documents of {} tokens, which the data says there",
    "batch": "its batches are a script's own",
    "other_pipelines": "its pipelines differ from one another",
}
"""Refusals of the other fields, where a plan uses them."""


def for_all(wanted: FrameworkPlan, says: Collection[str]) -> Iterator[str]:
    """Yield properties that no framework can express, except for fields that this one `says`."""
    plan = wanted.plan
    treated = {item.activations for stage in plan.stages for item in stage.layers}
    if plan.groups is not None or plan.shares is not None:
        yield "its devices differ"
    for name, field in Plan.model_fields.items():
        value = getattr(plan, name)
        is_written = name in _WRITTEN or name in says
        if not is_written and value != field.get_default(call_default_factory=True):
            yield _UNSUPPORTED.get(name, f"{name.replace('_', ' ')} {{}}").format(value)
    if treated - {"keep"}:
        yield f"activations are saved by {', '.join(sorted(treated - {'keep'}))}"
    if schedule_of(plan.schedule).stale:
        yield "its gradients are one step old"
    if plan.mesh.order != INSIDE_OUT:
        yield f"its axes lie in another order ({plan.layout.text()})"
    if plan.training.lora is not None and "lora" not in says:
        yield "adapters are trained, which is set in the training script"
    if plan.training.optimizer != "adamw" and "optimizer" not in says:
        yield f"weights are updated by {plan.training.optimizer}"
    if plan.training.objective != "sft" and "objective" not in says:
        yield f"its objective is {plan.training.objective}"
    if plan.training.master_weights == "none" and "master_weights" not in says:
        yield "16-bit weights are trained without an fp32 copy"


def degrees_above(wanted: FrameworkPlan, **most: int) -> Iterator[str]:
    """Yield degrees above what a framework has."""
    mesh = wanted.plan.mesh
    for name, limit in most.items():
        degree = getattr(mesh, name)
        if degree > limit:
            yield f"{name} degree {degree}"


def other_schedule(wanted: FrameworkPlan, framework: str) -> Iterator[str]:
    """Yield a schedule that a framework does not have."""
    plan = wanted.plan
    if plan.mesh.pipeline > 1 and framework not in schedule_of(plan.schedule).names:
        yield f"schedule {plan.schedule}"


def whole_experts(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield experts that ranks divide."""
    if wanted.plan.mesh.expert_tensor > 1:
        yield f"experts divided among {wanted.plan.mesh.expert_tensor} ranks"


def mixed_recompute(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield if blocks are recomputed differently."""
    choices = wanted.recomputes
    if len(choices) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in choices.most_common())
        yield f"recompute differs between blocks ({counts}); plan with --fix recompute=..."


def of_one_kind(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties that a configuration with one setting for all blocks does not support."""
    if wanted.plan.precision not in ("bf16", "fp16", "fp32"):
        yield f"precision {wanted.plan.precision}"
    if "selective" in wanted.recomputes:
        yield "selective recompute, which its configuration does not support"
    yield from mixed_recompute(wanted)


def of_fsdp(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield limits of FSDP: it shards gradients with states, and offloads all or nothing."""
    if wanted.plan.offload == "optimizer":
        yield "the optimizer alone on the host"
    if wanted.plan.zero == 1:
        yield "ZeRO-1: it shards gradients too"


def recompute_of(wanted: FrameworkPlan) -> str:
    """Return the choice of all blocks."""
    return next(iter(wanted.recomputes), "none")
