"""Limits of the native framework, our runtime.

This module lists the executed fields, and the limits that depend on more than a few facts: on
divisibility, on devices.  Combinations are in the data of its space, as for every framework
(planner/catalog/frameworks/native.yaml).  Each obstacle has its place in a plan, as `mesh.tensor`,
and a text with the value seen and the way out.  The search asks `refusal` for every layout;
`runtime.engine.unsupported` asks `obstacle` about a plan's layout and adds limits that only a
plan's stages and files show.  A possibility is listed here only after it has trained like one
process in tests/runtime/test_matrix.py, whose rows it then joins.

A model without an adapter cannot be launched, but its plans can be studied, with a `caveat`; what
the runtime cannot execute is refused of every model alike.

Claims: the fields of a Layout that the runtime executes, for `meshwright launch` and for a script.

Every field of Layout has a claim of each.  A value other than the field's default that no claim
covers is refused by name: by the search, by `launch` and by `meshwright.Engine` alike.  A new field
has no claim, and is refused until it is executed.

Claims do not depend on a model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from meshwright.planner.catalog import native
from meshwright.planner.documents.cluster import EIGHT_BITS, ClusterSpec
from meshwright.planner.documents.framework_space import EVERYTHING, Facts, Space, conflicts
from meshwright.planner.documents.model import Architecture, ModelGraph, is_own
from meshwright.planner.documents.plan import Activations, Job, Layout, Mesh
from meshwright.planner.documents.prediction import Assumption
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.schedules import SCHEDULES, schedule, schedule_of


class Claim(NamedTuple):
    """Values of a field that are executed."""

    executes: Callable[[Layout], bool]
    """Function that returns True if a layout's value is executed; the default always is."""
    otherwise: str = ""
    """Message on other values, after the value: the reason, and the way out."""


def _any(_: Layout) -> bool:
    return True


def _none(_: Layout) -> bool:
    return False


def _not_by_engine(way_out: str, executes: Callable[[Layout], bool] = _none) -> Claim:
    return Claim(executes, f"which meshwright.Engine does not execute; {way_out}")


UNCLAIMED = Claim(_none, "which nothing here executes; leave it out")

LAUNCH: Mapping[str, Claim] = {
    **dict.fromkeys(
        (
            "pipeline",
            "data_replicate",
            "data_shard",
            "context",
            "expert",
            "tensor",
            "zero",
            "schedule",
            "micro_batch",
            "micro_batches",
            "order",
            "virtual_stages",
            "offload",
            "gradient_compression",
            "prefetch",
            "reshard_after_forward",
            "scales",
            "weight_gather_dtype",
            "dispatch",
            "hierarchical_all_to_all",
            "loss",
            "compile",
            "tensor_overlap",
            "graphs",
        ),
        Claim(_any),
    ),
    "expert_tensor": Claim(_none, "and ranks hold whole experts; use 1"),
    "sequence_parallel": Claim(
        lambda layout: layout.tensor == 1,
        "and tensor parallelism divides the residual stream here; use true",
    ),
}
"""By field: what runtime.parallel.data_parallel does with language models and chains of layers."""

SCRIPT: Mapping[str, Claim] = {
    **LAUNCH,
    "tensor_overlap": _not_by_engine("use none"),
    "graphs": _not_by_engine("use none"),
    "sequence_parallel": _not_by_engine(
        "leave it out: the styles of your modules say what lies between them",
        lambda layout: layout.tensor == 1,
    ),
}
"""By field: what meshwright.runtime.engine.user_stage does with a module of the user's own."""


def unexecuted_fields(claims: Mapping[str, Claim], layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield (place in a plan, text) of each field with a value that is not executed.

    >>> list(unexecuted_fields(LAUNCH, Layout(tensor=2, sequence_parallel=False)))[0][0]
    'mesh.sequence_parallel'
    """
    for name, default in _DEFAULTS:
        value = getattr(layout, name)
        claim = claims.get(name, UNCLAIMED)
        if value != default and not claim.executes(layout):
            yield _place_of(name), f"is {_shown_value(value)}, {claim.otherwise}"


_DEFAULTS = tuple((field.name, field.default) for field in fields(Layout))


def _place_of(name: str) -> str:
    return f"mesh.{name}" if name in Mesh.model_fields else name


def _shown_value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | int():
            return str(value)
        case tuple():
            return "-".join(map(str, value))
        case _:
            return "set"


FAMILIES = (
    "reference",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Families that the runtime has an adapter for; other models can be planned, not launched."""
DEVICES = ("cuda", "rocm", "cpu")
"""Kinds of devices that the runtime runs on."""
CAVEAT_SOURCE = "planner/frameworks/native_limits.py"
"""Source of an assumption that a plan cannot be launched."""
GROUPED_BYTES = 16
"""Divisor of the row bytes of matrices in torch's grouped product (torch._grouped_mm)."""

BLOCKS_MULTIPLIED = ("blackwell", "blackwell-rtx")
"""Architectures whose products take a scale for each block of 32 (mxfp8)."""

Rules = Callable[[ModelGraph, ClusterSpec, Job, Layout], str | None]
"""Return why no plan is made of a layout, or None if one can be: `refusal` or `limit`."""


class Obstacle(NamedTuple):
    """Why something cannot be executed.

    >>> print(Obstacle("mesh.context", "is 2; use 1"))
    mesh.context: is 2; use 1
    """

    place: str
    """Place in a plan."""
    text: str

    def __str__(self) -> str:
        """Return both, as they are shown to a user."""
        return f"{self.place}: {self.text}"


def obstacle(model: ModelGraph, job: Job, layout: Layout) -> Obstacle | None:
    """Return why the runtime cannot train a model so, or None if it can."""
    reason = next(_adapter_obstacles(model), None) or next(_obstacles(model, job, layout), None)
    return reason or next(_place_obstacles(layout), None)


def script_obstacle(model: ModelGraph, job: Job, layout: Layout) -> Obstacle | None:
    """Return why no module of a script can be trained so, or None; figures do not count."""
    return next(
        itertools.chain(
            _foreign_choices(job),
            (Obstacle(*reason) for reason in unexecuted_fields(SCRIPT, layout)),
            _conflicts(model, job, layout),
            _unit_obstacles(layout),
            _place_obstacles(layout),
            _relay_obstacles(layout, layout.hierarchical_all_to_all)
            if layout.hierarchical_all_to_all is not None
            else (),
            _wire_limits(job, layout) if layout.gradient_compression != "full" else (),
        ),
        None,
    )


def refusal(model: ModelGraph, cluster: ClusterSpec, job: Job, layout: Layout) -> str | None:
    """Return why no plan is made of a layout, or None if one can be.

    Models without an adapter can be planned all the same, with a `caveat`.
    """
    reason = next(_cluster_obstacles(cluster, job, layout), None)
    reason = reason or next(_unplanned_obstacles(model, job, layout, FAMILIES), None)
    reason = reason or next(_obstacles(model, job, layout), None)
    return str(reason) if reason else None


def limit(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    layout: Layout,
    space: Space = EVERYTHING,
) -> str | None:
    """Return why no framework could run a layout as the planner describes it, or None.

    A `space` states whether its framework pads vocabularies and shares heads of keys.
    """
    reason = next(_cluster_obstacles(cluster, job, layout), None)
    reason = reason or next(_unplanned_obstacles(model, job, layout), None)
    reason = reason or next(_limits(model, job, layout, space), None)
    return str(reason) if reason else None


def caveat(model: ModelGraph, cluster: ClusterSpec) -> Assumption | None:
    """Return the warning that a plan of this model can be studied there, not launched, if so."""
    return device_caveat(cluster) or adapter_caveat(model)


def device_caveat(cluster: ClusterSpec) -> Assumption | None:
    """Return the warning that the runtime does not run on these devices, if so."""
    return _studied_only(next(_device_obstacles(cluster), None))


def adapter_caveat(model: ModelGraph) -> Assumption | None:
    """Return the warning that the runtime has no adapter that runs these figures, if so."""
    return _studied_only(next(_adapter_obstacles(model), None))


def _studied_only(reason: Obstacle | None) -> Assumption | None:
    if reason is None:
        return None
    return Assumption(
        what=f"{reason.text}: this plan can be studied, not launched",
        provenance="assumed",
        source=CAVEAT_SOURCE,
    )


def layer_obstacle(layout: Layout, recompute: Recompute, activations: Activations) -> str | None:
    """Return why a layer cannot be treated so, or None if it can.

    A recomputation from 8 bits may choose other experts than the forward did.  On one rank that is
    one more inexactness; over several, uncounted tokens would arrive.  Unfilled rows of gathered
    tokens contain old memory (NaN at times), and 8 bits share a scale between neighbours.
    """
    if layout.expert > 1 and recompute != "none" and activations == "compress":
        return (
            f"recompute {recompute} of compressed activations may send tokens to other experts "
            f"than forward did, which expert={layout.expert} cannot follow; keep or offload them"
        )
    if layout.dispatch == "allgather" and activations == "compress":
        return (
            "activations compress share scales with rows that dispatch allgather leaves unfilled; "
            "keep or offload them, or use dispatch alltoall"
        )
    return None


def _unplanned_obstacles(
    model: ModelGraph, job: Job, layout: Layout, families: tuple[str, ...] = ()
) -> Iterator[Obstacle]:
    """Yield properties that are not priced; the runtime may train it all the same."""
    a = model.architecture
    if a is None:
        yield from _own_limits(model, layout)
    if job.lora is None:
        return
    if a is None:
        yield Obstacle(
            "training.lora",
            "adapters of a recorded model are not planned; give a layout to meshwright.Engine, as "
            '{"zero": 3, "lora": {"rank": 16}}, or leave lora out',
        )
    elif families and a.family not in families:
        yield Obstacle(
            "training.lora", f"adapters are planned for the families {', '.join(families)}"
        )


def _own_limits(model: ModelGraph, layout: Layout) -> Iterator[Obstacle]:
    """Yield properties that the recording of a user's own module did not find."""
    if layout.context > 1 and model.positions is None:
        yield Obstacle(
            "mesh.context",
            f"is {layout.context}, and no attention of {model.name} is known to be divisible over "
            "positions; call meshwright.attention, and give positions with the batch",
        )
    if layout.expert > 1 and model.expert_count % layout.expert:
        yield Obstacle(
            "mesh.expert", f"{layout.expert} does not divide {model.expert_count} experts"
        )
    if layout.expert > 1 and not model.expert_count:
        yield Obstacle("mesh.expert", f"is {layout.expert}, and {model.name} has no experts")
    if layout.loss is not None and not any(layer.logits for layer in model.layers):
        yield Obstacle(
            "loss",
            f"is in chunks, and {model.name} returns no logits of one nn.Linear with "
            "meshwright.token_loss as its loss",
        )


def _cluster_obstacles(cluster: ClusterSpec, job: Job, layout: Layout) -> Iterator[Obstacle]:
    if layout.devices > cluster.devices:
        yield Obstacle(
            "mesh", f"it needs {layout.devices} devices, and the cluster has {cluster.devices}"
        )
    if cluster.is_mixed:
        yield from _group_obstacles(cluster, layout)
    if job.precision in EIGHT_BITS:
        yield from _narrow_obstacles(cluster, job)
    if layout.tensor_overlap != "none":
        yield from _peer_obstacles(cluster, layout)


def _narrow_obstacles(cluster: ClusterSpec, job: Job) -> Iterator[Obstacle]:
    """Yield the devices that have no products in 8 bits, or none of blocks with own scales."""
    for group in cluster.groups:
        device = group.accelerator
        if "fp8" not in device.peak_flops:
            yield Obstacle(
                "precision",
                f"is {job.precision}, and {device.name} has no 8-bit matrix products; use bf16",
            )
        elif job.precision == "mxfp8" and device.architecture not in BLOCKS_MULTIPLIED:
            yield Obstacle(
                "precision",
                f"is mxfp8, and {device.name} has no matrix products with a scale per block; "
                "use fp8 or bf16",
            )


def _peer_obstacles(cluster: ClusterSpec, layout: Layout) -> Iterator[Obstacle]:
    """Yield obstacles to tensor-parallel ranks that read each other's memory."""
    place, asked = "tensor_overlap", layout.tensor_overlap
    inside = layout.order[: layout.order.index("tensor")]
    reach = layout.tensor * math.prod(getattr(layout, axis) for axis in inside)
    for group in cluster.groups:
        if group.accelerator.kind != "cuda":
            yield Obstacle(
                place,
                f"is {asked}, and {group.accelerator.name} has no symmetric memory in torch; "
                "use none",
            )
        elif reach > group.devices_per_node:
            yield Obstacle(
                place,
                f"is {asked}, and the {layout.tensor} tensor ranks span several nodes of "
                f"{group.devices_per_node} devices, which read their own memory alone; use none",
            )


def _group_obstacles(cluster: ClusterSpec, layout: Layout) -> Iterator[Obstacle]:
    """Yield obstacles to placing each stage of a pipeline on one group of devices."""
    each = layout.devices // layout.pipeline
    for group in cluster.groups:
        if group.devices % each:
            yield Obstacle(
                "mesh",
                f"a stage takes {each} devices that are alike, which does not divide the "
                f"{group.devices} of {group.name}",
            )
    if layout.pipeline > 1 and layout.order[-1] != "pipeline":
        yield Obstacle("mesh.order", "where devices differ, pipeline must be the last axis")
    if schedule_of(layout.schedule).stale:
        others = (name for name, schedule in SCHEDULES.items() if not schedule.stale)
        yield Obstacle(
            "schedule",
            f"{layout.schedule} is not planned where devices differ; use {' or '.join(others)}",
        )


def _obstacles(model: ModelGraph, job: Job, layout: Layout) -> Iterator[Obstacle]:
    """Yield limits of the runtime, first those that others do not have."""
    a = model.architecture
    yield from _foreign_choices(job)
    claims = SCRIPT if is_own(model.source or "") else LAUNCH
    yield from (Obstacle(*reason) for reason in unexecuted_fields(claims, layout))
    yield from _conflicts(model, job, layout)
    yield from _unit_obstacles(layout)
    if layout.hierarchical_all_to_all is not None:
        yield from _relay_obstacles(layout, layout.hierarchical_all_to_all)
    if layout.context > 1:
        yield from _context_obstacles(a, model.positions or job.seq_len, layout)
    yield from _limits(model, job, layout, native().space or EVERYTHING)
    if a is not None and a.experts is not None:
        yield from _grouped_obstacles(a.experts.ffn_size, job, layout)
    if layout.stages > 1:
        yield from _schedule_obstacles(a, layout)
    if a is not None and a.positions == "learned" and job.seq_len > a.max_positions:
        yield Obstacle(
            "seq_len", f"is {job.seq_len}; the model has {a.max_positions} learned positions"
        )


def _conflicts(model: ModelGraph, job: Job, layout: Layout) -> Iterator[Obstacle]:
    """Yield refusals by the data of the native space."""
    facts = Facts(model, None, job, layout)
    for conflict in conflicts(native().space or EVERYTHING, facts):
        yield Obstacle(conflict.place or "mesh", conflict.text(facts))


def _unit_obstacles(layout: Layout) -> Iterator[Obstacle]:
    """Yield obstacles to a layout's choice of when ZeRO-3 gathers and frees parameters."""
    asked = {
        "prefetch": layout.prefetch or None,
        "reshard_after_forward": layout.reshard_after_forward,
    }
    for place, value in asked.items():
        if value is None:
            continue
        if layout.zero != 3:
            yield Obstacle(place, f"is {value}, and ZeRO-{layout.zero} gathers once a step")
        if layout.pipeline > 1:
            yield Obstacle(
                place, f"is {value}, and a pipeline keeps what its first backward gathers"
            )
        if layout.expert > 1:
            yield Obstacle(
                place, f"is {value}, and with expert parallelism experts are units of their own"
            )
        if layout.offload == "parameters":
            yield Obstacle(place, f"is {value}, and parameters are offloaded to the host")
    if layout.reshard_after_forward is not None:
        yield from _reshard_obstacles(layout, layout.reshard_after_forward)


def _relay_obstacles(layout: Layout, ranks: int) -> Iterator[Obstacle]:
    """Yield obstacles to ranks that pass on among themselves tokens sent to them once."""
    if layout.expert == 1:
        yield Obstacle(
            "hierarchical_all_to_all",
            f"is {ranks}, and experts have no ranks of their own; leave it out",
        )
    elif layout.dispatch != "alltoall":
        yield Obstacle(
            "hierarchical_all_to_all",
            f"is {ranks}, and {layout.dispatch} brings all tokens to all ranks",
        )
    elif layout.expert % ranks or not 1 < ranks < layout.expert:
        yield Obstacle(
            "hierarchical_all_to_all",
            f"is {ranks}; it divides the {layout.expert} ranks of experts, and is more than 1 and "
            "less than they are",
        )


def _reshard_obstacles(layout: Layout, ranks: int) -> Iterator[Obstacle]:
    if layout.weight_gather_dtype != "full":
        yield Obstacle(
            "reshard_after_forward",
            f"is {ranks}, and weights are gathered as {layout.weight_gather_dtype}",
        )
    if layout.context > 1:
        yield Obstacle(
            "reshard_after_forward", f"is {ranks}, and context-parallel ranks shard states too"
        )
    if layout.tensor > 1 and ranks > 1:  # NotImplementedError of FSDP2
        yield Obstacle(
            "reshard_after_forward", f"is {ranks}, and the tensor axis divides parameters too"
        )
    if layout.data_shard % ranks or ranks >= layout.data_shard:
        yield Obstacle(
            "reshard_after_forward",
            f"is {ranks}; it divides the {layout.data_shard} ranks of data_shard, and is less",
        )


def _grouped_obstacles(ffn_size: int, job: Job, layout: Layout) -> Iterator[Obstacle]:
    """Yield obstacles to torch's product over all experts at once: rows of odd length."""
    width = ffn_size // (layout.tensor if layout.expert == 1 else 1)
    halves = job.precision in ("bf16", "fp16", *EIGHT_BITS)
    multiple = GROUPED_BYTES // (2 if halves else 4)
    if width % multiple:
        yield Obstacle(
            "mesh.tensor",
            f"{layout.tensor} leaves a rank {width} of an expert's {ffn_size} columns; torch's "
            f"grouped product takes multiples of {multiple}",
        )


def _schedule_obstacles(a: Architecture | None, layout: Layout) -> Iterator[Obstacle]:
    home = schedule.rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    if a is not None and a.tied_embeddings and home[0] == home[-1]:
        yield Obstacle(
            "schedule",
            f"{layout.schedule} puts both ends of the model on one rank, as two copies of the tied "
            "embedding; use a schedule with one stage per rank, or interleaved",
        )


def _context_obstacles(a: Architecture | None, length: int, layout: Layout) -> Iterator[Obstacle]:
    place, degree = "mesh.context", layout.context
    if a is not None:  # a module of one's own is tried by the runtime
        if not a.causal or a.patches is not None or a.classes:
            yield Obstacle(place, "context parallelism needs causal attention over tokens; use 1")
        if a.latent is not None or a.positions == "alibi":
            yield Obstacle(
                place, "context parallelism supports neither latent attention nor ALiBi; use 1"
            )
    # Each rank has one chunk from the front and one from the back, divided by tensor ranks again.
    if length % (2 * degree):
        yield Obstacle(place, f"{degree} ranks need 2 x {degree} chunks of seq_len {length}")
    elif a is not None and length // degree % layout.tensor:
        yield Obstacle(
            place,
            f"leaves {length // degree} positions, which tensor={layout.tensor} does not divide",
        )


def _limits(model: ModelGraph, job: Job, layout: Layout, space: Space) -> Iterator[Obstacle]:
    """Yield combinations that no framework can run as the planner describes it."""
    if layout.gradient_compression != "full":
        yield from _wire_limits(job, layout)
    if layout.loss is not None:
        if layout.pipeline > 1 and layout.executed_schedule.stale:
            yield Obstacle(
                "loss", f"is in chunks, which {layout.schedule} does not compute; leave it out"
            )
        is_built_in = model.architecture is not None and not model.edges
        if not (is_built_in or is_own(model.source or "")):
            yield Obstacle("loss", "is in chunks, and the model is no known chain; leave it out")
    shape = {"stages": layout.stages, "micro_batches": layout.micro_batches}
    if layout.stages > 1:
        reason = schedule.obstacle(layout.schedule, virtual_stages=layout.virtual_stages, **shape)
    else:
        reason = schedule.too_long(**shape)
    if reason:
        yield Obstacle(*reason)
    if layout.stages > len(model.chain):
        yield Obstacle(
            "mesh.pipeline",
            f"{layout.stages} stages need as many layers; the model has {len(model.chain)}",
        )
    if layout.zero and layout.data_shard * layout.context == 1 and layout.data > 1:
        yield Obstacle(
            "mesh.data_shard", f"is 1, which leaves ZeRO-{layout.zero} nothing to shard; use more"
        )
    length = model.positions or job.seq_len
    if layout.context > 1 and length % layout.context:
        yield Obstacle("mesh.context", f"{layout.context} does not divide seq_len {length}")
    if layout.expert > 1 and not is_own(model.source or ""):
        yield from _expert_limits(model.architecture, layout.expert)
    if layout.tensor > 1:
        yield from _tensor_limits(model, job, layout, space)


def _foreign_choices(job: Job) -> Iterator[Obstacle]:
    """Yield choices of other frameworks that are neither priced nor run here."""
    if job.precision == "nvfp4":
        yield Obstacle(
            "precision",
            "is nvfp4, and 4-bit matrix products are not supported here; use mxfp8 or fp8",
        )
    yield from _update_obstacles(job)


def _update_obstacles(job: Job) -> Iterator[Obstacle]:
    """Yield optimizers and masters that are not executed."""
    if job.optimizer not in (native().space or EVERYTHING).optimizers:
        yield Obstacle(
            "training.optimizer",
            f"is {job.optimizer}, whose pages are bitsandbytes' own; use adamw-8bit, or adamw with "
            "offload optimizer",
        )
    if job.objective != "sft":
        yield Obstacle(
            "training.objective",
            f"is {job.objective}, and launch trains on the next token alone; plan for TRL with "
            "--framework transformers",
        )
    if job.master_weights == "none" and (job.precision != "bf16" or job.lora is not None):
        yield Obstacle(
            "training.master_weights",
            "is none, and whole models in bf16 alone are trained so; use fp32",
        )


def _wire_limits(job: Job, layout: Layout) -> Iterator[Obstacle]:
    place, wire = "gradient_compression", layout.gradient_compression
    if layout.data * layout.context == 1:
        yield Obstacle(
            place, f"is {wire}, and without data parallelism no gradients are sent; use full"
        )
    if wire != "powersgd":
        return
    if layout.zero or layout.data_shard > 1:
        yield Obstacle(
            place, f"is powersgd, which needs whole gradients on every rank, not ZeRO-{layout.zero}"
        )
    if layout.expert > 1:
        yield Obstacle(
            place, "is powersgd, which does not know that ranks hold different experts; use bf16"
        )
    if layout.offload == "parameters":
        yield Obstacle(place, "is powersgd, which cannot reduce gradients on the host; use bf16")
    if job.precision == "fp16":
        yield Obstacle(
            place, "is powersgd, whose memory does not follow the loss scale of fp16; use bf16"
        )


def _place_obstacles(layout: Layout) -> Iterator[Obstacle]:
    """Yield combinations outside of the search's space, which a plan written by hand may have."""
    ranks = layout.data_shard * layout.context * layout.tensor
    if ranks % layout.expert:
        yield Obstacle(
            "mesh.expert",
            f"{layout.expert} does not divide the {ranks} ranks of data_shard x context x tensor, "
            "over which experts lie",
        )


def _expert_limits(a: Architecture | None, degree: int) -> Iterator[Obstacle]:
    count = a.experts.count if a is not None and a.experts is not None else 0
    if not count or count % degree:
        yield Obstacle("mesh.expert", f"{degree} does not divide {count} experts")


def _tensor_limits(model: ModelGraph, job: Job, layout: Layout, space: Space) -> Iterator[Obstacle]:
    a = model.architecture
    place = "mesh.tensor"
    if a is None:
        degrees = [1, *model.tensor_degrees]
        if layout.tensor not in degrees:
            yield Obstacle(
                place,
                f"{layout.tensor} divides no layer of this module of your own; use "
                f"{' or '.join(map(str, degrees))}",
            )
        return
    if a.patches is not None or a.classes:
        yield Obstacle(place, "tensor parallelism does not divide patches and class heads; use 1")
    figures = {
        "seq_len": job.seq_len // layout.context,
        "heads": a.heads,
        "kv_heads": layout.tensor if _shares_heads(a, layout, space) else a.kv_heads,
        "ffn_size": a.ffn_size,
        "vocab_size": layout.tensor if space.pads_vocabulary else a.vocab_size,
    }
    if a.experts is not None and layout.expert == 1:
        figures["experts.ffn_size"] = a.experts.ffn_size
        figures["experts.shared_ffn_size"] = a.experts.shared_ffn_size
    for name, figure in figures.items():
        if figure % layout.tensor:
            yield Obstacle(place, f"{layout.tensor} does not divide {name} {figure}")


def _shares_heads(a: Architecture, layout: Layout, space: Space) -> bool:
    """Return True if several tensor ranks share each whole head of keys."""
    return space.shares_heads and a.latent is None and layout.tensor % a.kv_heads == 0


def _device_obstacles(cluster: ClusterSpec) -> Iterator[Obstacle]:
    for group in cluster.groups:
        if group.accelerator.kind not in DEVICES:
            yield Obstacle(
                "cluster",
                f"the runtime does not run on {group.accelerator.name}, of kind "
                f"{group.accelerator.kind}; it runs on {', '.join(DEVICES)}",
            )


def _adapter_obstacles(model: ModelGraph) -> Iterator[Obstacle]:
    a = model.architecture
    if a is None:
        return
    if a.family not in FAMILIES:
        yield Obstacle(
            "model.architecture.family",
            f"no adapter runs '{a.family}'; known: {', '.join(FAMILIES)}. Plan it as recorded "
            "(FOLDER:recorded, with its config.json), which launches under data parallelism, ZeRO, "
            "pipelines and a tensor axis, or train it from your own script with meshwright.Engine",
        )
    lack = _lack_of_reference(a) if a.family == "reference" else None
    if lack:
        yield Obstacle("model.architecture", f"the reference transformer has no {lack}")


def _lack_of_reference(a: Architecture) -> str | None:
    """Return the first thing that these figures ask for and the reference does not have."""
    lacks = {
        "layer norm": a.norm != "rms",
        "plain MLP": not a.gated_mlp,
        "positions other than rotary": a.positions != "rotary",
        "query/key norms": a.qk_norm,
        "norms behind attention and MLP": a.post_norms or not a.pre_norm,
        "sliding window": a.sliding_window > 0,
        "bidirectional attention": not a.causal,
        "biases in experts": a.experts is not None and a.mlp_bias,
        "latent attention": a.latent is not None,
        "image patches": a.patches is not None,
        "classification head": a.classes > 0 or a.head_transform,
        "separate embedding width": a.embedding_size not in (0, a.hidden_size),
        "token types": a.token_types > 0,
    }
    return next((name for name, lacking in lacks.items() if lacking), None)
