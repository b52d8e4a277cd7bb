"""Plan: everything the runtime needs to train, nothing that it can work out, and no times.

A Layout is one point of the search space without cuts and per-layer strategies; a Plan is a Layout
with its stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from meshwright.planner.documents.axes import LAYOUT_AXES, axes_of
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.document import Document, Part, nearest
from meshwright.planner.documents.model import BatchLeaf, ModelGraph, is_own
from meshwright.planner.documents.placement_text import (
    Choice,
    alike_words,
    layout_with,
    placement_words,
)
from meshwright.planner.documents.profile import CHUNK_ROWS, LOSS_WORDS, ChunkedLoss, Recompute
from meshwright.planner.documents.training import (
    SEQUENCES,
    Lora,
    MasterWeights,
    Objective,
    Optimizer,
    Training,
)
from meshwright.planner.documents.units import (
    MOST_DEVICES,
    MOST_SAMPLES,
    MOST_TOKENS,
    Devices,
    Flag,
    Line,
    Name,
    Positive,
    Samples,
    SampleTokens,
    Text,
    Timeout,
)
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import html_table
from meshwright.planner.schedules import PLAIN, SCHEDULES, Schedule, family_of, schedule_of
from meshwright.planner.schedules.schedule import obstacle, rank_of_stage, too_long
from meshwright.planner.schedules.schedule_record import AHEAD


def _known_schedule(name: str) -> str:
    if name not in SCHEDULES:
        raise ValueError(f"is {name[:60]!a}; {nearest(name, list(SCHEDULES))}")
    return name


def _executed_schedule(name: str) -> str:
    try:
        return schedule_of(name).name
    except DocumentError as error:
        if family_of(name) in SCHEDULES:
            raise ValueError(error.message) from None
        return _known_schedule(name)


ScheduleName = Annotated[
    str,
    Field(strict=True, json_schema_extra=lambda schema: schema.update(enum=list(SCHEDULES))),
    AfterValidator(_known_schedule),
]
ExecutedSchedule = Annotated[
    str,
    Field(
        strict=True,
        json_schema_extra=lambda schema: schema.update(
            anyOf=[
                {"enum": list(SCHEDULES)},
                *(
                    {"pattern": f"^{name}{AHEAD}[0-9]+(-[0-9]+)*$"}
                    for name, schedule in SCHEDULES.items()
                    if schedule.with_ahead
                ),
            ]
        ),
    ),
    AfterValidator(_executed_schedule),
]
"""Name of a schedule, with its forwards ahead of each link where there are any."""
Activations = Literal["keep", "offload", "compress"]
"""Treatment of a layer's stored tensors between forward and backward: they stay on the device, move
to pinned host memory, or are packed into 8 bits."""
Offload = Literal["none", "optimizer", "parameters"]
"""States on the host: none, the optimizer's state and step, or parameters and gradients too."""
GradientCompression = Literal["full", "bf16", "fp16", "powersgd"]
"""Form of gradients between data-parallel ranks: unchanged, in 16 bits, or of low rank."""
Scales = Literal["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
"""Granularity of the scales of fp8 operands.  `tensorwise`: one for each operand, from its own
largest value; `delayed`: from those of earlier steps; `rowwise`: one for each row;
`rowwise_with_gw_hp`: the same with gradients of weights in 16 bits (torchao); `blockwise`: one for
each 128 neighbours, and for each 128 x 128 block of weights."""
WeightGatherDtype = Literal["full", "fp8"]
"""Type in which weights of Linears travel to the ranks that divide them: 16 bits, or 8."""
Dispatch = Literal["alltoall", "allgather"]
"""Exchange of tokens with experts on other ranks: each token to its own experts, with counts known
to the host; or all tokens to all ranks, into buffers of the largest possible size."""
Prefetch = Literal[0, 1, 2, 3]
"""Number of ZeRO-3 units whose parameters are gathered ahead of the running one; with 0, forward
gathers each when the host reaches it, and backward gathers one ahead."""
Compile = Literal["none", "block"]
"""Compiled graphs: none, or one for each repeating layer."""
TensorOverlap = Literal["none", "async"]
"""Execution of tensor-parallel collectives: before and after the products of a block, or in pieces
that overlap with them (asynchronous tensor parallelism)."""
Graphs = Literal["none", "micro_batch"]
"""Captured CUDA graphs: none, or one that runs forward and backward of a micro-batch by one launch
of the host."""
Axis = Literal["tensor", "context", "data_shard", "data_replicate", "pipeline"]
INSIDE_OUT: tuple[Axis, ...] = ("tensor", "context", "data_shard", "data_replicate", "pipeline")


MOST_WORDS = 500
"""Largest number of configuration words that were not understood and that a plan keeps."""


def check_size(name: str, value: int, most: int) -> None:
    """Refuse an impossible count of samples or tokens."""
    if not 1 <= value <= most:
        shown = value if abs(value) < 10**15 else "beyond any count"
        raise DocumentError(name, f"is {shown}; it is a whole number from 1 to {most:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work of one step."""

    seq_len: int
    """Tokens of a sample."""
    global_batch: int
    """Samples of a step."""
    precision: Precision = "bf16"
    """Type of matrix products."""
    lora: Lora | None = None
    """Adapters that are trained instead of the model; None trains the whole model."""
    optimizer: Optimizer = "adamw"
    """Update rule of weights."""
    master_weights: MasterWeights = "fp32"
    """Type of the weights that are trained."""
    objective: Objective = "sft"
    """Training objective."""
    document_len: int | None = None
    """Mean over tokens of the length of their document, in tokens: the sum of squared document
    lengths over the sum of lengths.  Attention stays within documents; None: a sample is one
    document."""

    @property
    def sequences(self) -> int:
        """Sequences of a step; a sample of preference training is a pair of them."""
        return self.global_batch * SEQUENCES[self.objective]

    def __post_init__(self) -> None:
        if self.document_len is not None:
            check_size("document-len", self.document_len, self.seq_len)
        check_size("seq-len", self.seq_len, MOST_TOKENS)
        check_size("global-batch", self.global_batch, MOST_SAMPLES)


def loss_text(loss: ChunkedLoss | None) -> str:
    """Return the word for a loss, without the usual number of rows.

    >>> loss_text(ChunkedLoss(rows=512)), loss_text(ChunkedLoss()), loss_text(None)
    ('chunked/512', 'chunked', 'full')
    """
    if loss is None:
        return "full"
    word = LOSS_WORDS[loss.gradients]
    return word if loss.rows == CHUNK_ROWS else f"{word}/{loss.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One configuration: degrees, ZeRO level, schedule and micro-batch.

    `micro_batches` is the number per data-parallel rank and step.
    """

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    zero: int = 0
    schedule: str = PLAIN
    micro_batch: int = 1
    micro_batches: int = 1
    order: tuple[Axis, ...] = INSIDE_OUT
    virtual_stages: int = 1
    """Pipeline stages on each rank."""
    offload: Offload = "none"
    gradient_compression: GradientCompression = "full"
    prefetch: Prefetch = 0
    reshard_after_forward: int | None = None
    """Number of ranks over which ZeRO-3 keeps a layer's parameters divided between forward and
    backward; None: all ranks that divide its states."""
    scales: Scales = "tensorwise"
    weight_gather_dtype: WeightGatherDtype = "full"
    dispatch: Dispatch = "alltoall"
    hierarchical_all_to_all: int | None = None
    """Number of neighbouring ranks of an expert group, those of a node, that receive a token once
    and pass it on among themselves.  None: a token is sent to each of its experts."""
    loss: ChunkedLoss | None = None
    """Chunks of the output projection's loss; None: the loss is computed from all logits."""
    compile: Compile = "none"
    tensor_overlap: TensorOverlap = "none"
    graphs: Graphs = "none"
    expert_tensor: int = 1
    """Number of ranks that divide each expert; they and the expert degree divide tensor x context x
    data.
    """
    sequence_parallel: bool = True
    """With tensor parallelism, the residual stream is divided along the sequence."""

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole job."""
        return self.pipeline * self.virtual_stages

    @property
    def executed_schedule(self) -> Schedule:
        """Schedule that runs; without a pipeline, forwards and backwards alternate."""
        return schedule_of(self.schedule if self.pipeline > 1 else PLAIN)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Forwards ahead of each link of the pipeline; empty: none."""
        return schedule_of(self.schedule).ahead

    @property
    def overlaps_tensors(self) -> bool:
        """True if tensor-parallel collectives run in pieces that overlap with products."""
        return self.tensor_overlap == "async"

    @property
    def data(self) -> int:
        """Data-parallel degree, which divides the samples."""
        return self.data_replicate * self.data_shard

    @property
    def devices(self) -> int:
        """Ranks of the whole job."""
        return self.pipeline * self.data * self.context * self.tensor

    def text(self) -> str:
        """Return the layout as people write it.

        >>> Layout(tensor=8, pipeline=4, data_shard=2, zero=1, micro_batches=16).text()
        'tp=8 pp=4 dp=2 zero=1 1f1b micro_batch=1x16'
        >>> inside = ("pipeline", "context", "tensor", "data_replicate", "data_shard")
        >>> Layout(tensor=8, pipeline=4, data_shard=2, zero=3, order=inside).text()
        'tp=8 pp=4 dp=2 zero=3 1f1b order=pp-tp-dp micro_batch=1x1'
        """
        parts = [f"tp={self.tensor}", f"pp={self.pipeline}", f"dp={self.data}"]
        if self.context > 1:
            parts.append(f"cp={self.context}")
        if self.expert > 1:
            parts.append(f"ep={self.expert}")
        if self.expert_tensor > 1:
            parts.append(f"etp={self.expert_tensor}")
        if self.tensor > 1 and not self.sequence_parallel:
            parts.append("sequence_parallel=off")
        parts.append(f"zero={self.zero}")
        if self.zero and self.data_replicate > 1:
            parts.append(f"shard={self.data_shard}")
        if self.pipeline > 1:
            parts.append(self.schedule)
        if self.virtual_stages > 1:
            parts.append(f"stages={self.virtual_stages}/rank")
        if self.order != INSIDE_OUT:
            parts.append(f"order={self._order_text()}")
        parts += [
            f"{axis.short}={loss_text(self.loss) if axis.name == 'loss' else value}"
            for axis in LAYOUT_AXES
            if (value := getattr(self, axis.name)) != axis.usual
        ]
        return " ".join([*parts, f"micro_batch={self.micro_batch}x{self.micro_batches}"])

    def text_with(self, framework: str, placement: Sequence[str] = ()) -> str:
        """Return the layout with what also decides its figures: the words of its stages, and the
        framework that trains by it, where it has options.

        >>> Layout().text_with("megatron")
        'tp=1 pp=1 dp=1 zero=0 micro_batch=1x1'
        >>> Layout().text_with("megatron+compiled", ["recompute=full"])
        'tp=1 pp=1 dp=1 zero=0 micro_batch=1x1 recompute=full megatron+compiled'
        """
        return " ".join([self.text(), *placement, *([framework] if "+" in framework else ())])

    def _order_text(self) -> str:
        """Return the axes that divide anything, innermost first."""
        hybrid = self.zero and self.data_replicate > 1
        names = {
            "tensor": ("tp", self.tensor),
            "context": ("cp", self.context),
            "data_shard": ("shard" if hybrid else "dp", self.data_shard),
            "data_replicate": ("replicate" if hybrid else "dp", self.data_replicate),
            "pipeline": ("pp", self.pipeline),
        }
        return "-".join(name for name, degree in map(names.__getitem__, self.order) if degree > 1)


class Mesh(Part):
    """Parallel degrees, and the order of the axes; the innermost one uses the fastest links."""

    tensor: Devices = 1
    """Tensor-parallel degree."""
    context: Devices = 1
    """Context-parallel degree, which divides the sequence."""
    data_shard: Devices = 1
    """Number of data-parallel ranks that divide states (ZeRO, FSDP)."""
    data_replicate: Devices = 1
    """Number of replicas of these groups."""
    pipeline: Devices = 1
    """Pipeline-parallel degree."""
    expert: Devices = 1
    """Expert degree, a divisor of data_shard x context x tensor; it takes no ranks of its own."""
    expert_tensor: Devices = 1
    """Number of ranks that divide each expert, a divisor of the same product.  Written only where
    it is above 1."""
    sequence_parallel: Flag = True
    """Tensor parallelism also divides the residual stream.  Written only where it does not."""
    order: tuple[Axis, ...] = INSIDE_OUT
    """All axes, the innermost first; ranks that are neighbours on it are neighbouring devices."""

    @model_serializer(mode="wrap")
    def _brief(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        for name in ("expert_tensor", "sequence_parallel"):
            if fields.get(name) == type(self).model_fields[name].default:
                del fields[name]
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sorted(self.order) != sorted(INSIDE_OUT):
            raise ValueError(f"order is {list(self.order)}; name each of {list(INSIDE_OUT)} once")
        if self.devices > MOST_DEVICES:
            raise ValueError(
                f"has {self.devices} ranks; lower its degrees to at most {MOST_DEVICES:,} ranks"
            )
        return self

    @property
    def devices(self) -> int:
        """Number of ranks of the mesh."""
        return self.tensor * self.context * self.data_shard * self.data_replicate * self.pipeline

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return a rank's place along an axis.

        >>> mesh = Mesh(tensor=2, data_shard=3, pipeline=2)
        >>> [mesh.coordinate(7, axis) for axis in ("tensor", "data_shard", "pipeline")]
        [1, 0, 1]
        """
        for inner in self.order:
            size: int = getattr(self, inner)
            if inner == axis:
                return rank % size
            rank //= size
        return 0


class PlacedLayer(Part):
    """One layer of a stage, and the treatment of its activations."""

    layer: Name
    """Name of the layer in the model."""
    recompute: Recompute = "none"
    """Recomputation of the layer in backward."""
    activations: Activations = "keep"
    """Treatment of the tensors that recomputation leaves to store.  Written only where they do not
    stay on the device."""

    @model_serializer(mode="wrap")
    def _brief(self, written: SerializerFunctionWrapHandler) -> dict[str, str]:
        fields: dict[str, str] = written(self)
        if self.activations == "keep":
            del fields["activations"]
        return fields


class Stage(Part):
    """Consecutive layers on one pipeline rank, in order."""

    layers: tuple[PlacedLayer, ...]
    """Layers of the stage in the order of the model."""
    group: Line | None = None
    """Device group that runs the stage, a name in `Plan.groups`, where devices differ."""


class PlannedGroup(Part):
    """Devices of the cluster that are alike; devices are numbered group by group."""

    name: Line
    """Name of the device group."""
    devices: Devices
    """Number of devices of the group."""


class Share(Part):
    """Device group and micro-batches of one data-parallel rank, where ranks differ."""

    group: Line
    """Device group, a name in `Plan.groups`."""
    micro_batches: Samples
    """Micro-batches of the rank in a step."""


class OtherPipelines(Part):
    """Data-parallel pipelines that differ from the first kind in depth, cuts, recomputation or
    number of micro-batches.

    A kind of one stage has no schedule: forwards and backwards alternate.
    """

    data: Devices
    """Number of data-parallel pipelines of this kind."""
    micro_batches: Samples
    """Micro-batches of each pipeline in a step."""
    stages: tuple[Stage, ...]
    """Stages of each pipeline, one on each pipeline rank."""


class PlannedModel(Part):
    """Model of the plan."""

    name: Name
    """Name of the model."""
    source: Line
    """A catalogue name, a Hugging Face folder or config.json (with `:recorded` where its model is
    recorded), `file.py:factory`, or `script:build`."""
    digest: Line
    """Digest of the model's layers and figures."""
    graph: ModelGraph | None = None
    """Layers and their figures, where computing them would run the user's code; None for other
    models."""

    @classmethod
    def of(cls, model: ModelGraph) -> Self:
        """Return the plan's reference to a model."""
        source = model.source or model.name
        graph = model if is_own(source) else None
        return cls(name=model.name, source=source, digest=model.digest, graph=graph)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.graph is None:
            return self
        if self.graph.digest != self.digest:
            raise ValueError(
                f"its graph has {self.graph.digest}, and digest is {self.digest}; plan again"
            )
        # The file may have moved since it was planned.
        names = [source.rpartition("/")[2] for source in (self.source, self.graph.source or "")]
        if names[0] != names[1]:
            raise ValueError(
                f"its graph is of '{names[1]}', and source is '{self.source}'; plan again"
            )
        return self


class Plan(Document):
    """A way to train one model on one cluster, ready to launch."""

    kind_of_document: ClassVar[str] = "plan"
    schema_file: ClassVar[str | None] = "plan.json"

    model: PlannedModel
    """Model that the plan trains."""
    cluster: Line
    """Cluster that the plan is for: an expression, a file, or a name."""
    framework: Text = "native"
    """Training framework (planner/catalog/frameworks); `planner.catalog.framework` finds it."""
    seq_len: SampleTokens = 1
    """Tokens of a sample; left out where `batch` describes a sample."""
    document_len: SampleTokens | None = None
    """Mean over tokens of the length of their document, in tokens, where samples hold several
    documents.  Written only there."""
    batch: dict[Line, BatchLeaf] | None = None
    """Tensors of one sample of a user-defined batch, by their places in its pytree."""
    global_batch: Samples
    """Samples of a step."""
    precision: Precision
    """Type of matrix products."""
    mesh: Mesh
    """Parallel degrees and their order."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO level: 0 divides nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    schedule: ExecutedSchedule
    """Pipeline schedule.  `1f1b ahead=1-0-0` is 1F1B whose ranks before the first of three links
    run one more forward ahead, so that transfers over a slow link are hidden."""
    virtual_stages: Positive = 1
    """Number of stages on each pipeline rank; `rank_of_stage` of planner.schedules.schedule places
    them."""
    micro_batch: Samples
    """Samples of a micro-batch on each data-parallel rank."""
    micro_batches: Samples
    """Micro-batches per data-parallel rank and step: global_batch = micro_batch x micro_batches x
    data.

    Where `shares` differ, it is the largest share; beside `other_pipelines`, that of the first
    kind.
    """
    offload: Offload = "none"
    """States on the host."""
    gradient_compression: GradientCompression = "full"
    """Form of gradients between data-parallel ranks."""
    prefetch: Prefetch = 0
    """Prefetch depth of ZeRO-3 in units.  Written only where it is not 0."""
    reshard_after_forward: Devices | None = None
    """Number of ranks over which ZeRO-3 keeps parameters divided after forward.  Written only where
    these are not all ranks that divide states."""
    scales: Scales = "tensorwise"
    """Scales of operands with precision fp8.  Written only where they are not tensorwise."""
    weight_gather_dtype: WeightGatherDtype = "full"
    """Type of gathered weights with precision fp8 and ZeRO-3.  Written only where it is not
    full."""
    dispatch: Dispatch = "alltoall"
    """Exchange of tokens with experts on other ranks.  Written only where it is not alltoall."""
    hierarchical_all_to_all: Devices | None = None
    """Number of ranks that receive a token once and pass it on among themselves, with experts on
    ranks of several nodes.  Written only there."""
    loss: ChunkedLoss | None = None
    """Chunks of the output projection's loss; None: the loss is computed from all logits."""
    compile: Compile = "none"
    """Compiled graphs.  Written only where there are any."""
    tensor_overlap: TensorOverlap = "none"
    """Execution of tensor-parallel collectives of compiled blocks.  Written only where it is not
    none."""
    graphs: Graphs = "none"
    """Part of a step, forward and backward, that one launch of a captured CUDA graph runs.  Written
    only where it is not none."""
    training: Training = Training.model_construct()
    """Settings of the optimizer."""
    timeout_s: Timeout = 600.0
    """Seconds after which a waiting collective ends the run."""
    groups: tuple[PlannedGroup, ...] | None = None
    """All device groups of the cluster, where devices differ."""
    shares: tuple[Share, ...] | None = None
    """Shares of the data-parallel ranks in order, where they are on devices that differ."""
    stages: tuple[Stage, ...]
    """Stages in the order in which the model runs through them."""
    other_pipelines: tuple[OtherPipelines, ...] | None = None
    """Data-parallel pipelines beside those of `mesh`, `micro_batches` and `stages`, kind by kind;
    all else is common to all pipelines.  Written only where there are any."""
    read_from: Line | None = None
    """Kind of configuration that the plan was read from, and that its framework runs.  Written only
    where there is one."""
    not_understood: Annotated[tuple[Text, ...], Field(max_length=MOST_WORDS)] = ()
    """Words of that configuration that were not understood and may change seconds or bytes, the
    most important first.  Predictions are wider and never certain.  Written only where there are
    any."""

    @model_serializer(mode="wrap")
    def _brief(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        if self.batch is not None and self.seq_len == 1:
            del fields["seq_len"]
        brief = (axis.name for axis in LAYOUT_AXES if not axis.always_written)
        beside = ("document_len", "other_pipelines", "read_from", "not_understood")
        for name in (*beside, *brief):
            if fields.get(name) == type(self).model_fields[name].default:
                fields.pop(name, None)
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mesh = self.mesh
        if self.batch is None and "seq_len" not in self.model_fields_set:
            raise ValueError("seq_len: is missing; give seq_len or batch")
        if len(self.stages) != mesh.pipeline * self.virtual_stages:
            each = "its stage" if self.virtual_stages == 1 else f"{self.virtual_stages} stages"
            raise ValueError(
                f"stages: there are {len(self.stages)}, and mesh.pipeline is {mesh.pipeline}; "
                f"every pipeline rank needs {each}"
            )
        if self.zero == 0 and mesh.data_shard > 1:
            raise ValueError("zero: is 0, which shards nothing; use mesh.data_replicate")
        if self.other_pipelines is not None:
            self._check_other_pipelines(self.other_pipelines)
        data = mesh.data_shard * mesh.data_replicate
        if self.shares is not None:
            self._check_shares(self.shares, data)
        else:
            self._check_samples(data)
        for path, kind in self.kinds_by_path.items():
            kind._check_stages(path)
        self._check_groups()
        return self

    def _check_samples(self, data: int) -> None:
        """Refuse a global batch that is not that of all data-parallel ranks."""
        counted = f"{self.micro_batches} x data {data}"
        number = self.micro_batches * data
        for at, kind in enumerate(self.other_pipelines or ()):
            number += kind.micro_batches * kind.data
            counted += f" + {kind.micro_batches} x data {kind.data} of other_pipelines[{at}]"
        if self.global_batch != self.micro_batch * number:
            counted = f"({counted})" if self.other_pipelines else counted
            raise ValueError(
                f"global_batch: is {self.global_batch}, but micro_batch {self.micro_batch} x "
                f"micro_batches {counted} is {self.micro_batch * number}"
            )

    def _check_stages(self, path: str) -> None:
        """Refuse a schedule that is not run in the shape of one kind of pipelines, and stages
        without layers or with those of others; `path` is that of the kind."""
        shape = {"stages": len(self.stages), "micro_batches": self.micro_batches}
        if self.mesh.pipeline > 1 or self.virtual_stages > 1:
            reason = obstacle(self.schedule, virtual_stages=self.virtual_stages, **shape)
        else:
            reason = too_long(**shape)
        if reason:
            raise ValueError(f"{path}{reason[0]}: {reason[1]}")
        placed: dict[str, int] = {}
        for index, stage in enumerate(self.stages):
            if not stage.layers:
                raise ValueError(
                    f"{path}stages[{index}].layers: is empty; give every stage a layer"
                )
            for item in stage.layers:
                if item.layer in placed:
                    raise ValueError(
                        f"{path}stages[{index}].layers: layer '{item.layer}' is also in "
                        f"stages[{placed[item.layer]}]; name it in exactly one stage"
                    )
                placed[item.layer] = index

    def _check_other_pipelines(self, others: tuple[OtherPipelines, ...]) -> None:
        """Refuse what is not executed by pipelines that differ.

        Their ranks hold unlike runs of layers.  ZeRO, experts and context divide what all ranks of
        a stage hold, and compressed gradients are of one list of parameters.
        """
        if not others:
            raise ValueError("other_pipelines: is empty; name a kind of pipelines, or leave it out")
        mesh = self.mesh
        for name, value, usual in (
            ("zero", self.zero, 0),
            ("mesh.context", mesh.context, 1),
            ("mesh.expert", mesh.expert, 1),
            ("mesh.expert_tensor", mesh.expert_tensor, 1),
            ("virtual_stages", self.virtual_stages, 1),
            ("offload", self.offload, "none"),
            ("gradient_compression", self.gradient_compression, "full"),
            ("graphs", self.graphs, "none"),
        ):
            if value != usual:
                raise ValueError(
                    f"{name}: is {value}, and pipelines differ (other_pipelines); use {usual}, or "
                    "pipelines that are alike"
                )
        if schedule_of(self.schedule).stale:
            raise ValueError(
                f"schedule: is {self.schedule}, whose updates are late, and pipelines differ "
                "(other_pipelines); use 1f1b, or pipelines that are alike"
            )
        if self.shares is not None:
            raise ValueError(
                "shares: are there beside other_pipelines; give a kind of one stage its data and "
                "micro_batches in place of shares"
            )
        layers = [item.layer for stage in self.stages for item in stage.layers]
        for at, kind in enumerate(others):
            here = [item.layer for stage in kind.stages for item in stage.layers]
            unlike = {*layers} ^ {*here}
            if unlike:
                raise ValueError(
                    f"other_pipelines[{at}].stages: layer '{min(unlike)}' is not in both kinds of "
                    "pipelines; each pipeline has all layers of the model"
                )
            if len(here) == len(layers) and here != layers:
                moved = next(b for a, b in zip(layers, here, strict=True) if a != b)
                raise ValueError(
                    f"other_pipelines[{at}].stages: layer '{moved}' stands elsewhere than in "
                    "stages; all pipelines have the layers in one order"
                )
        if self.ranks > MOST_DEVICES:
            raise ValueError(
                f"other_pipelines: the plan has {self.ranks} ranks; lower data to at most "
                f"{MOST_DEVICES:,} ranks"
            )

    def _check_shares(self, shares: tuple[Share, ...], data: int) -> None:
        """Refuse shares that do not add up, or whose ranks would wait for each other in a step."""
        if len(shares) != data:
            raise ValueError(f"shares: there are {len(shares)}, and data is {data}; give each one")
        counts = [share.micro_batches for share in shares]
        if max(counts) != self.micro_batches:
            raise ValueError(
                f"micro_batches: is {self.micro_batches}; the largest share is {max(counts)}"
            )
        if self.global_batch != self.micro_batch * sum(counts):
            raise ValueError(
                f"global_batch: is {self.global_batch}, but the shares are {sum(counts)} "
                f"micro-batches of {self.micro_batch}"
            )
        if self.mesh.pipeline > 1 or self.zero > 1:
            raise ValueError(
                "shares: need mesh.pipeline 1 and zero 0 or 1; others talk in every micro-batch"
            )
        if self.zero and self.offload == "parameters":
            raise ValueError(
                "shares: with offload parameters need zero 0; ranks that divide parameters gather "
                "them in every micro-batch"
            )
        if self.zero and min(counts) == 1 < max(counts):
            raise ValueError(
                "shares: with zero 1 none may be 1 while others are more; the last micro-batch of "
                "several gathers parameters once more"
            )
        groups = {group.name: group.devices for group in self.groups or ()}
        each = self.mesh.devices // data
        for index, share in enumerate(shares):
            if share.group not in groups:
                raise ValueError(
                    f"shares[{index}].group: is {share.group}; name one of {', '.join(groups)}"
                )
        for name, devices in groups.items():
            needed = each * sum(share.group == name for share in shares)
            if needed > devices:
                raise ValueError(
                    f"shares: those on {name} need {needed} devices, and it has {devices}"
                )

    def _check_groups(self) -> None:
        """Refuse stages whose devices are missing or not named."""
        if self.groups is None or self.shares is not None:
            for path, kind in self.kinds_by_path.items():
                for index, stage in enumerate(kind.stages):
                    if stage.group is not None:
                        why = "has shares" if self.shares else "lists no groups"
                        raise ValueError(
                            f"{path}stages[{index}].group: is {stage.group}, and the plan {why}"
                        )
            return
        sizes = {group.name: group.devices for group in self.groups}
        if len(sizes) < len(self.groups):
            raise ValueError(f"groups: are {list(sizes)}; every group needs its own name")
        needed = dict.fromkeys(sizes, 0)
        for path, kind in self.kinds_by_path.items():
            for group in kind._groups_of_ranks(path, tuple(sizes)):
                needed[group] += kind.mesh.devices // kind.mesh.pipeline
        if self.mesh.order[-1] != "pipeline":
            raise ValueError("mesh.order: where devices differ, pipeline must be the last axis")
        for name, devices in sizes.items():
            if needed[name] > devices:
                raise ValueError(
                    f"stages: those on {name} need {needed[name]} devices, and it has {devices}"
                )

    def _groups_of_ranks(self, path: str, names: tuple[str, ...]) -> list[str]:
        """Return the device group of each pipeline rank of one kind, of these groups."""
        group_of_rank: dict[int, str] = {}
        for index, stage in enumerate(self.stages):
            group, rank = stage.group, self.rank_of_stage(index)
            if group not in names:
                raise ValueError(
                    f"{path}stages[{index}].group: is {group}; name one of {', '.join(names)}"
                )
            if group_of_rank.setdefault(rank, group) != group:
                raise ValueError(
                    f"{path}stages[{index}].group: is {group}, and another stage of the same rank "
                    f"runs on {group_of_rank[rank]}"
                )
        return [group_of_rank[rank] for rank in range(self.mesh.pipeline)]

    @property
    def kinds(self) -> tuple[Plan, ...]:
        """Plans of the kinds of pipelines, each as if it were alone: its own mesh, micro-batches,
        stages and samples.  A plan whose pipelines are alike is its own only kind.
        """
        if self.other_pipelines is None:
            return (self,)
        first = self.mesh.data_replicate * self.mesh.data_shard
        every = (
            (first, self.micro_batches, self.stages),
            *((kind.data, kind.micro_batches, kind.stages) for kind in self.other_pipelines),
        )
        return tuple(self._kind(*kind) for kind in every)

    def _kind(self, data: int, micro_batches: int, stages: tuple[Stage, ...]) -> Plan:
        degrees = {"data_replicate": data, "pipeline": len(stages)}
        return self.model_copy(
            update={
                "mesh": self.mesh.model_copy(update=degrees),
                "schedule": self.schedule if len(stages) > 1 else PLAIN,
                "micro_batches": micro_batches,
                "global_batch": self.micro_batch * micro_batches * data,
                "stages": stages,
                "other_pipelines": None,
            }
        )

    @property
    def kinds_by_path(self) -> dict[str, Plan]:
        """`kinds` by the path of their fields: "" and "other_pipelines[0]."."""
        paths = [
            "",
            *(f"other_pipelines[{at}]." for at, _ in enumerate(self.other_pipelines or ())),
        ]
        return dict(zip(paths, self.kinds, strict=True))

    @property
    def ranks(self) -> int:
        """Ranks of the whole job, of all kinds of pipelines."""
        others = sum(kind.data * len(kind.stages) for kind in self.other_pipelines or ())
        return self.mesh.devices + self.mesh.tensor * others

    @property
    def data_degree(self) -> int:
        """Number of data-parallel ranks, of all kinds of pipelines."""
        first = self.mesh.data_replicate * self.mesh.data_shard
        return first + sum(kind.data for kind in self.other_pipelines or ())

    def kind_of_rank(self, rank: int) -> tuple[int, int]:
        """Return the kind of pipelines of a rank, and the rank's number within the kind.

        Ranks are numbered kind by kind, and within a kind along its mesh.
        """
        for at, kind in enumerate(self.kinds):
            if rank < kind.mesh.devices:
                return at, rank
            rank -= kind.mesh.devices
        raise IndexError(rank)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return the place of a rank of the whole job along an axis of its kind of pipelines."""
        at, inside = self.kind_of_rank(rank)
        return self.kinds[at].mesh.coordinate(inside, axis)

    @property
    def overlaps_tensors(self) -> bool:
        """True if tensor-parallel collectives run in pieces that overlap with products."""
        return self.tensor_overlap == "async"

    @property
    def layout(self) -> Layout:
        """Layout of the plan, without its stages."""
        mesh = self.mesh
        return Layout(
            pipeline=mesh.pipeline,
            data_replicate=mesh.data_replicate,
            data_shard=mesh.data_shard,
            context=mesh.context,
            expert=mesh.expert,
            tensor=mesh.tensor,
            zero=self.zero,
            schedule=self.schedule,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            order=mesh.order,
            virtual_stages=self.virtual_stages,
            expert_tensor=mesh.expert_tensor,
            sequence_parallel=mesh.sequence_parallel,
            **axes_of(self),
        )

    @property
    def layout_text(self) -> str:
        """Layout as people write it, with what its stages have and a framework's options."""
        first = self.kinds[0]
        return " + ".join([layout_with(first.alike_text, first.placement), *self._other_texts])

    @property
    def alike_text(self) -> str:
        """Layout with what all blocks recompute, if they do alike, and a framework's options."""
        chain = [choice for stage in self._choices() for choice in stage]
        return self.layout.text_with(self.framework, alike_words(chain[1:-1]))

    @property
    def placement(self) -> tuple[str, ...]:
        """Words of the layout for stages that are uneven, or layers that are not alike."""
        return tuple(placement_words(self._choices()))

    @property
    def _other_texts(self) -> list[str]:
        """Texts of the pipelines that differ from the first kind, with what differs."""
        texts = []
        for kind in self.kinds[1:]:
            chain = [choice for stage in kind._choices() for choice in stage]
            words = [
                f"pp={kind.mesh.pipeline}",
                f"dp={kind.data_degree}",
                *([kind.schedule] if kind.mesh.pipeline > 1 else []),
                f"micro_batch={kind.micro_batch}x{kind.micro_batches}",
                *alike_words(chain[1:-1]),
            ]
            texts.append(layout_with(" ".join(words), kind.placement))
        return texts

    def _choices(self) -> list[list[Choice]]:
        return [
            [(layer.recompute, layer.activations) for layer in stage.layers]
            for stage in self.stages
        ]

    def with_batch(self, batch: dict[str, BatchLeaf]) -> Self:
        """Return the plan with what one sample of a batch is, in place of a length in tokens."""
        return self.model_copy(update={"batch": batch})

    def __str__(self) -> str:
        """Return the plan as a script prints it: a line for each stage; `repr` has all fields."""
        lines = (
            f"  stage {at}: {count} layers, {span}, recompute {recompute}"
            for at, count, span, recompute in self._rows()
        )
        return "\n".join((self._title, *lines))

    def _repr_html_(self) -> str:
        """Return the plan as notebooks show it: its stages as a table."""
        return html_table(self._title, ("stage", "layers", "from, to", "recompute"), self._rows())

    @property
    def _title(self) -> str:
        return f"{self.model.name} on {self.cluster}: {self.layout_text}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{at} of pipelines {number}" if self.other_pipelines else str(at),
                str(len(stage.layers)),
                f"{stage.layers[0].layer} to {stage.layers[-1].layer}",
                ", ".join(dict.fromkeys(item.recompute for item in stage.layers)),
            )
            for number, kind in enumerate(self.kinds)
            for at, stage in enumerate(kind.stages)
        ]

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        ranks = rank_of_stage(
            self.schedule, stages=len(self.stages), virtual_stages=self.virtual_stages
        )
        return ranks[stage]

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in order."""
        every = range(len(self.stages))
        return tuple(stage for stage in every if self.rank_of_stage(stage) == rank)

    def span_of_stage(self, stage: int) -> tuple[int, int]:
        """Return the numbers of a stage's first layer and of the one behind its last."""
        first = sum(len(earlier.layers) for earlier in self.stages[:stage])
        return first, first + len(self.stages[stage].layers)

    def device_of_rank(self, rank: int) -> int:
        """Return the device of the cluster that a rank uses; both count from 0.

        Ranks are numbered kind by kind of pipelines, and within a kind along the mesh.  Where
        devices differ, each stage, or each data-parallel rank, takes the next devices of its group.
        """
        if self.groups is None:
            return rank
        runs = self._runs_of_ranks()  # in the order of ranks
        taken: dict[str, int] = {}
        for owner, count in runs:
            if rank < count:
                first = 0
                for group in self.groups:
                    if group.name == owner:
                        break
                    first += group.devices
                return first + taken.get(owner, 0) + rank
            taken[owner] = taken.get(owner, 0) + count
            rank -= count
        raise IndexError(rank)

    def _runs_of_ranks(self) -> list[tuple[str, int]]:
        """Return the device groups of ranks in order, each with a number of neighbours on it."""
        if self.shares is not None:
            return [(share.group, self.mesh.devices // len(self.shares)) for share in self.shares]
        names = tuple(group.name for group in self.groups or ())
        return [
            (group, kind.mesh.devices // kind.mesh.pipeline)
            for kind in self.kinds
            for group in kind._groups_of_ranks("", names)
        ]

    def micro_batches_of(self, data_rank: int) -> int:
        """Return the number of micro-batches of a data-parallel rank in a step."""
        if self.shares is not None:
            return self.shares[data_rank].micro_batches
        data_rank -= self.mesh.data_replicate * self.mesh.data_shard
        for kind in self.other_pipelines or ():
            if 0 <= data_rank < kind.data:
                return kind.micro_batches
            data_rank -= kind.data
        return self.micro_batches

    def samples_of(self, data_rank: int) -> range:
        """Return the range of samples of a data-parallel rank in a step."""
        first = self.micro_batch * sum(self.micro_batches_of(rank) for rank in range(data_rank))
        return range(first, first + self.micro_batch * self.micro_batches_of(data_rank))

    @property
    def job(self) -> Job:
        """The work of one step."""
        return Job(
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            precision=self.precision,
            lora=self.training.lora,
            optimizer=self.training.optimizer,
            master_weights=self.training.master_weights,
            objective=self.training.objective,
            document_len=self.document_len,
        )

    def pipeline_rank(self, rank: int) -> int:
        """Return the number of a rank's pipeline rank, counted over the kinds of pipelines."""
        at, inside = self.kind_of_rank(rank)
        kinds = self.kinds
        before = sum(kind.mesh.pipeline for kind in kinds[:at])
        return before + kinds[at].mesh.coordinate(inside, "pipeline")

    def first_stage(self, rank: int) -> int:
        """Return the number of a rank's first stage, counted over the kinds of pipelines."""
        at, inside = self.kind_of_rank(rank)
        kinds = self.kinds
        before = sum(len(kind.stages) for kind in kinds[:at])
        return before + kinds[at].stages_of_rank(kinds[at].mesh.coordinate(inside, "pipeline"))[0]

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Number of the pipeline rank of each stage, counted over the kinds of pipelines."""
        ranks: list[int] = []
        before = 0
        for kind in self.kinds:
            ranks += [before + kind.rank_of_stage(stage) for stage in range(len(kind.stages))]
            before += kind.mesh.pipeline
        return tuple(ranks)

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Stages of all kinds of pipelines, one kind behind the other."""
        others = (stage for kind in self.other_pipelines or () for stage in kind.stages)
        return (*self.stages, *others)

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches of all data ranks in a step; shares count as if all were the largest."""
        return sum(kind.data_degree * kind.micro_batches for kind in self.kinds)

    @property
    def is_cut(self) -> bool:
        """True if any pipeline has several stages on ranks of their own."""
        return any(kind.mesh.pipeline > 1 for kind in self.kinds)

    def check_model(self, model: ModelGraph) -> None:
        """Refuse a plan that was made for another model, or that loses or reorders layers."""
        if self.model.digest != model.digest:
            raise DocumentError(
                "model.digest",
                f"is {self.model.digest}, but {model.name} has {model.digest}; "
                "this plan was made for another model: plan again",
            )
        for path, kind in self.kinds_by_path.items():
            kind._check_layers(model, f"{path}stages")

    def _check_layers(self, model: ModelGraph, path: str) -> None:
        """Refuse stages of one kind of pipelines that lose or reorder layers."""
        expected = [name for name, _ in model.chain]
        placed = [item.layer for stage in self.stages for item in stage.layers]
        if model.edges:
            self._check_graph(model, placed, path)
            return
        for position, (have, want) in enumerate(zip(placed, expected, strict=False)):
            if have != want:
                raise DocumentError(
                    path, f"layer {position} is '{have}'; the model's order has '{want}' there"
                )
        if len(placed) != len(expected):
            raise DocumentError(path, f"place {len(placed)} layers; the model has {len(expected)}")

    def _check_graph(self, model: ModelGraph, placed: list[str], path: str) -> None:
        """Refuse layers that are lost or unknown, and edges that lead back."""
        names = {name for name, _ in model.chain}
        for name in placed:
            if name not in names:
                raise DocumentError(path, f"there is no layer '{name}' in {model.name}")
        for name, _ in model.chain:
            if name not in placed:
                raise DocumentError(
                    path, f"layer '{name}' is in none of them; add it to one of them"
                )
        place = {name: at for at, name in enumerate(placed)}
        for edge in model.edges:
            if place[edge.source] > place[edge.target]:
                raise DocumentError(
                    path,
                    f"layer '{edge.target}' is placed before '{edge.source}', whose output it "
                    "reads; "
                    "put it on the same stage or a later one",
                )
        stage_of = {
            choice.layer: s for s, stage in enumerate(self.stages) for choice in stage.layers
        }
        for group, layers in (model.colocated or {}).items():
            homes = sorted({stage_of[name] for name in layers})
            if len(homes) > 1:
                raise DocumentError(
                    path,
                    f"colocated.{group}: its layers are on stages {homes}; they stay on one",
                )
