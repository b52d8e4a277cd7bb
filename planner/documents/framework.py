"""Framework: how a training framework of a version trains, as a document.

It says which types states have, what is sharded, which kernels are fused, what selective
recompute drops, which communication is hidden, and what the host and the allocator take.  Its
figures are data in `planner/catalog/frameworks/`, each with its provenance in `basis`; a formula
reads fields and never a framework's name.  Devices, links and models are not in it.

A field's default is neutral: nothing is sharded, nothing is hidden, a share is 1, a cost is 0; or,
where there is no neutral value, that of mixed precision in plain PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from meshwright.planner.documents.document import Document, Part, nearest
from meshwright.planner.documents.framework_space import ConditionText, Space, StageRule
from meshwright.planner.documents.plan import Scales
from meshwright.planner.documents.units import (
    Amount,
    Count,
    Flag,
    Fraction,
    Overhead,
    Positive,
    Rate,
    Text,
)
from meshwright.planner.errors import DocumentError

Kernel = Literal["module", "fused"]
"""One kernel (its author's, or a compiler's), or the tensor operations that a module writes out."""
Attention = Literal["module", "fa1", "fa2", "fa3"]
Unit = Literal["layer", "flat", "buffer"]
"""FSDP's units hold shards apart from the working copies that they gather: FSDP2's of tensors one
by one (`layer`), FSDP1's of one flat tensor (`flat`); in buffers of whole parameters a shard is a
part of them."""
BackwardPrefetch = Literal["before", "behind"]
Copies = Literal["none", "around_collectives"]
Accumulation = Literal["none", "same_type", "into_sum", "cast_then_add", "in_product"]
Sends = Literal["each", "once"]
SelectiveRecompute = Literal["outputs", "attention", "operators", "blocks", "modules"]
RecomputeModule = Literal[
    "act", "core-attn", "layernorm", "mla-up-proj", "mlp", "moe", "moe-act", "shared-experts"
]
"""Parts of a block that Megatron Core recomputes one by one (transformer_config.py,
recompute_modules): norms, projections up from latents and activations of experts are made again
without their outputs being kept; the others are checkpoints of their own.  `act` is the activation
of a feed-forward without experts."""
CHEAP_MODULES: tuple[RecomputeModule, ...] = ("act", "layernorm", "mla-up-proj", "moe-act")
"""Those that are cheap to make again (DeepSeek-V3, section 3.2.3, arXiv:2412.19437)."""
Reported = Literal["allocated", "reserved"]
Provenance = Literal["derived", "measured", "fitted", "assumed"]


class Types(Part):
    """Bytes of each parameter's states, in 16-bit training."""

    working: Count = 2
    """A weight as layers use it."""
    gradient: Count = 4
    """The buffer in which gradients are summed."""
    fp16_gradient: Count = 2
    """The same in fp16 training, whose reduction is no wider."""
    fresh_gradients: Count = 0
    """Gradients in the working type that stay beside that buffer, where that is of another type."""
    master: Count = 4
    """The fp32 weight beside the working one; 0 where the working one is trained."""
    moments: Count = 8
    """Both moments of AdamW."""
    wire: Count = 4
    """A gradient while it is reduced between ranks."""
    scales: Amount = 4 / 64
    """Of a frozen weight in 4 bits, the scale of its block: bitsandbytes has one of 4 bytes for 64,
    or, itself rounded, one of a byte and a 256th of 4 more."""
    wide_frozen: Flag = False
    """Of a model in 4 bits whose states are not divided, all that is not is cast to fp32: both ends
    and norms, so that blocks hand on fp32."""
    wide_adapters: Flag = False
    """Where states are not divided, adapters are trained in fp32, whatever the model is in."""
    full_with_zero: Flag = False
    """Under ZeRO masters and moments are fp32 whatever a single device trains in, and gradients are
    reduced as they are summed."""


class Sharding(Part):
    """What data-parallel ranks divide, and which of its communication is seen."""

    zero: int = Field(default=0, ge=0, le=3, strict=True)
    """ZeRO level of a run that does not say."""
    unit: Unit = "buffer"
    """What is divided between ranks, gathered and reduced together."""
    ends: Literal["units", "kept"] = "units"
    """Embedding and head are units of their own, and the head's copy may stay until its backward
    (torchtitan, apply_fsdp: the last layers are not resharded).  FSDP1 has both in its root."""
    backward_prefetch: BackwardPrefetch = "before"
    """In backward the next of FSDP1's units is gathered before a unit's gradients are made
    (BACKWARD_PRE), or behind it (BACKWARD_POST)."""
    syncs_each: Flag = True
    """FSDP1 reduces gradients in every micro-batch; else whole ones are summed until the last one
    (no_sync)."""
    reduces_whole: Flag = False
    """ZeRO-1 sums all gradients on all ranks before each keeps its shard (no reduce-scatter)."""
    collectives_per_layer: Rate = 1.0
    """Collectives for one layer's states: its tensors where nothing packs them into buckets."""
    listed_s: Amount = 0.0
    """Seconds of the host for each rank of such a collective whose parts are a list of tensors: a
    view, checks and a copy each, before anything else is started."""
    regathers: Flag = False
    """A block that recomputes all of itself gathers its parameters for that and again for its
    backward, since modules let go of them one by one."""
    overlap: Amount = Field(default=1.0, le=1)
    """Share of ZeRO-3 collectives that runs beside their neighbours' computation: all, where units
    are gathered ahead."""
    channels: Count = 16
    """Multiprocessors that a kernel of the collective library takes, one for each channel, from the
    computation beside it: that is the least of a hidden collective that is seen.  The library has
    16 over eight network cards, up to 24 inside a node of NVSwitch (NVIDIA/nccl, issues 1453 and
    1259)."""
    reduce_overlap: Amount = Field(default=0.0, le=1)
    """Share of the gradients' reduction that runs beside the last micro-batch's backward."""
    gather_overlap: Amount = Field(default=0.0, le=1)
    """Share of the gather of updated parameters that runs beside the next forward."""
    copies: Copies = "none"
    """Whether parameters and gradients are copied between their own tensors and the buffers of
    collectives (FSDP2), or are parts of those buffers."""
    accumulation: Accumulation = "into_sum"
    """How a micro-batch's gradients are added to those before: see
    `meshwright.planner.costs.sharding.accumulated_bytes`."""
    implicit_gathers: Flag = False
    """A forward's gather starts when the host comes by its unit, unless a layout asks for a depth
    of prefetching; else it is always started ahead."""
    bucket_gradients: Amount = 0.0
    """Gradients of a bucket in which ZeRO reduces them, which is a buffer of its own in the type of
    computation; there are two, one of which is reduced."""
    leaves_frozen: Flag = False
    """Frozen weights that every rank has whole are in no unit of FSDP2: they are used where they
    are; else a shard stands beside the copy that it is gathered into."""
    unit_s: Amount = 0.0
    """Seconds of the host for each sharded unit and pass (FSDP2's Python hooks)."""
    registered: Flag = False
    """Buffers of ZeRO-3's collectives are registered with the collective library, whose kernels
    then need no multiprocessors to reach the network."""
    bridged: Flag = True
    """Collectives use bridges between pairs of cards, where a machine has them."""


class Kernels(Part):
    """Which kernels run, and what they reach."""

    norm: Kernel = "fused"
    gate: Kernel = "fused"
    """SwiGLU as one kernel, or an activation and a product with a tensor each."""
    rotary: Kernel = "fused"
    """Else rotated queries and keys are new tensors beside the projection's output."""
    projections: Kernel = "fused"
    """Queries, keys and values are one product, as are gate and up; what is cut from its result
    keeps it whole."""
    backward_traffic: Amount = 0.0
    """Memory traffic of a memory-bound operator's backward over its forward's; 0: each operator's
    own is counted."""
    launches: Literal["every", "products"] = "products"
    """Whose launches count on the device; those of memory-bound kernels hide behind the kernels
    before them, or in `host.layer_s`."""
    softmax: Kernel = "fused"
    """Of written-out attention; else it keeps scores in 16 and in 32 bits."""
    flash_attention: Flag = True
    """Attention is one kernel whose scores never reach memory, where a run does not say."""
    attention: Attention = "fa2"
    """Generation of that kernel; cuDNN's counts as the third.  `module`: torch's own, wherever a
    family's modules call it, at the rate of the device's curve for any length."""
    eight_bit_attention: Flag = False
    """Where products are in 8 bits that kernel is too: its tensors are cast for it and back."""
    core_traffic: Flag = False
    """That kernel's reads and writes count beside its FLOPs, at whose measured rate they are
    hidden."""
    pads_values: Flag = False
    """That kernel has one width of heads: narrower values are padded to the width of queries."""
    dropout: Flag = False
    """Activations are dropped at random in models of the GPT kind (ungated feed-forward)."""
    adapters: Literal["attention", "all"] = "all"
    """Which products of a frozen block have adapters, and so keep their inputs."""
    adapter_rank: Positive = 16
    """Of those adapters, where a run does not say."""
    adapter_targets: tuple[Text, ...] = ("all-linear",)
    """Modules that have them, where a run does not say."""
    adapter_dropout: Flag = False
    """Their inputs are dropped at random: each keeps a copy of its own and a mask."""
    restored_bytes: Amount = 5.0
    """Memory traffic per weight of bringing 4 bits back to 16 before each product: 0.5 read and 2
    written, at half of the bandwidth of a plain copy."""
    restored_indices: Amount = 0.0
    """Bytes of indices for each weight that is restored from 4 bits, of some weights at a time."""
    tuned: Flag = True
    """Products are tuned to their shapes, and reach the device's rate of those; else that of
    torch's own choice, or of the device's measured curve."""
    products: Rate = 1.0
    """Rate of matrix products over what well-tuned frameworks reach on the same device."""
    architecture_products: dict[Text, Rate] = Field(default_factory=dict)
    """The same on architectures that a framework's libraries are older than, by their names."""


class Recipe(Part):
    """Products in 8 bits whose operands have other scales than a framework's usual ones."""

    input_bytes: Amount
    """Memory traffic per element of bringing a product's input to 8 bits, for both of its products.
    """
    gradient_bytes: Amount
    """The same of the gradient of a product's output."""
    weight_bytes: Amount
    """The same of a weight, in each forward and in each backward."""
    rate: Rate = 1.0
    """Rate of products with such scales over that of products with the usual ones."""
    architecture_rates: dict[Text, Rate] = Field(default_factory=dict)
    """The same on architectures, by their names, where it is another."""
    wide_gradients: Flag = False
    """Gradients of weights are products in 16 bits."""
    gathers: Flag = True
    """What a framework gathers in 8 bits is gathered so with these scales too."""


class EightBit(Part):
    """Training with products in 8 bits and fewer."""

    narrow_states: Flag = True
    """Gradients are summed in bf16 and activations stored as narrow as products (Transformer
    Engine); else only products are narrow, their inputs stored in bf16 (torchao)."""
    products: Literal["linears", "all"] = "all"
    """Which products of a block are narrow: those of Linears, or of experts' matrices too."""
    eligible: Literal["aligned", "large"] = "aligned"
    """Which Linears are: all whose sides are multiples of 16, or those that are large too, by the
    sides at which torchao saw a gain on H100 (`auto_filter_small_kn`)."""
    scales: Scales = "tensorwise"
    """Of runs that do not say."""
    large_rate: Flag = True
    """They reach the share of the curve that the device's large products do, else all of it."""
    architecture_rates: dict[Text, Rate] = Field(default_factory=dict)
    """Their rate over that on architectures, by their names, with whose libraries it is another."""
    input_bytes: Amount = 2.0
    """Memory traffic per element of bringing a product's input to 8 bits, as is and transposed for
    the gradient of its weights."""
    gradient_bytes: Amount = 4.0
    """The same of the gradient of a product's output."""
    weight_bytes: Amount = 0.0
    """The same of a weight, in each forward and in each backward; 0 where a step casts it once."""
    recipes: dict[Text, Recipe] = Field(default_factory=dict)
    """By the scales that a layout asks for (`rowwise`), and by precisions that have scales of their
    own (`mxfp8`); others are priced by the figures above."""
    arrived_bytes: Amount = 1.0
    """Of a weight that was gathered in 8 bits, in either pass: one of both reads and writes it in
    another order."""
    gathered: tuple[Literal["activations", "parameters"], ...] = ()
    """What is gathered in 8 bits: activations and their gradients along the sequence between
    tensor-parallel ranks, the blocks' parameters under ZeRO-3."""
    cast_bytes: Amount = 0.0
    """Memory traffic of rounding an operand, per element; 0 where another kernel writes it so."""
    cast_kernels: Count = 0
    """Kernels started to round one operand."""


class Loss(Part):
    """The output projection's loss."""

    kind: Kernel = "fused"
    """One operator with `peak_bytes`, or log-softmax and choice in fp32 as torch has them."""
    peak_bytes: Rate = 10.0
    """Bytes per logit at the loss's peak."""
    divided_bytes: Amount = 0.0
    """The same of a rank's own logits where tensor-parallel ranks divide the loss; 0: as many."""
    fused: Flag = False
    """Softmax and its gradient are one kernel that writes over stored logits."""
    fused_bytes: Amount = 0.0
    """Bytes per logit at the peak of such a kernel; 0: `peak_bytes`."""
    divided: Flag = True
    """With tensor parallelism the loss works on its shard of the vocabulary; else on all of it."""


class RecomputeRule(Part):
    """What recompute drops."""

    selective: SelectiveRecompute = "attention"
    """Selective recompute drops written-out attention's scores; all outputs but attention's and
    every second product's; all outputs but products', attention's and those of collectives that
    shrink; all of every second block; or what belongs to `modules`."""
    modules: tuple[RecomputeModule, ...] = ()
    early_stop: Flag = False
    """Recomputation stops when the last tensor that backward needs is there again."""
    reentrant: Flag = False
    """A block that recomputes all of itself does so on a copy of its input that is the leaf of a
    graph of its own.  FSDP1 hangs a hook of a unit whose parameters are frozen on that leaf, which
    has it and its gradient until the backward of the whole model ends."""


class TensorRule(Part):
    """Tensor parallelism."""

    sequence_parallel: Flag = False
    """The residual stream is sharded along the sequence, where a run does not say."""
    keeps_gathered: Flag = False
    """Products keep their gathered inputs for backward, not their own shard of them."""
    second_gather: Amount = Field(default=0.5, le=1)
    """Of gathering a product's input again for its weights' gradient, the share that is seen beside
    the other product of its backward."""
    copies: Flag = False
    """Micro-batches of several samples are brought into the order of positions around each
    collective; else the sequence is the first dimension of every activation."""
    overlap: Amount = Field(default=0.0, le=1)
    """Share of tensor-parallel collectives that hides behind the products around them."""
    async_overlap: Amount = Field(default=0.0, le=1)
    """Where a layout asks for asynchronous tensor parallelism, the share of a collective beside a
    product that hides behind this product, which then runs in as many pieces as there are ranks."""
    recorded: Amount = 0.0
    """Undivided activations of each block that wait for their collective to end on the device
    before the allocator gives their memory away again (c10d's record_stream), since the host runs a
    pass ahead; the transfers of a pipeline hold it back."""


NATURAL_SPREAD = 0.3
"""How uneven routers load experts where nothing forces them: of runs of one layout with
natural and with forced routing, Qwen3-235B with 16 thousand tokens on 256 H100 takes 1.24 times as
long, with 32 thousand 1.21, for which 0.3 to 0.5 is needed; steps of 4 thousand tokens that nothing
is compared with show 0 to 0.2 (moe_zoo).  Mixtral-8x7B's experts get about 0.6 to 1.6 of their mean
(arXiv:2401.04088, figure 7, from memory), which is 0.17.  Of one layer at a step, not of a whole
training, over which routers are less uneven."""


class ExpertRule(Part):
    """Expert parallelism."""

    shared: Literal["whole", "divided"] = "whole"
    """Beside routed experts on ranks of their own, those that all tokens share are whole on every
    rank, or divided by tensor parallelism as a feed-forward is."""
    moves: Amount = 0.0
    """Memory traffic of sorting tokens by experts and back, in sizes of what is sent to experts; 0:
    of modules that index rows."""
    grouped_share: Fraction = 1.0
    """Rate of products of many experts together over that of one product as large."""
    tile_rows: Count = 0
    """Rows of a tile of grouped products, to which each expert's tokens are filled up; 0: what is
    filled up is in `grouped_share`."""
    sends: Sends = "each"
    """A token is sent to each of its experts (all-to-all of the collective library), or once to
    every node and there once to every rank that has some of them (DeepEP, HybridEP)."""
    narrow_sends: Flag = False
    """Tokens on their way to experts, and gradients on theirs, are in 8 bits where products are;
    what is combined stays in 16."""
    links_rate: Rate = 1.0
    """Rate of these exchanges over that of the collective library's all-to-all."""
    overlap: Amount = Field(default=0.0, le=1)
    """Share of the exchanges that hides behind passes of another micro-batch (DualPipe, Megatron's
    combined 1F1B); the rest is what multiprocessors that send do not compute."""
    shared_overlap: Amount = Field(default=0.0, le=1)
    """Share of sending tokens to experts, and of bringing their gradients back, that hides behind
    the products of experts that all tokens share."""
    load_spread: Amount = NATURAL_SPREAD
    """How uneven natural routers load a layer's experts, from 0, balanced, to 1, where all tokens
    go to the same ones; the busiest rank's load follows from it
    (`meshwright.planner.operators.expert_routing.Routing.busiest_load`)."""
    fused: Flag = False
    """Gates of experts are computed in the products that make them, which read and write nothing
    for them but what the next product reads."""
    counts: Literal["device", "host"] = "device"
    """Where tokens of each expert are counted.  A host that reads the counts waits for all that the
    device has to do before it starts what takes them (Megatron Core, token_dispatcher.py,
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize), so that in a forward neither works
    beside the other.  A backward knows them."""


class ContextRule(Part):
    """Context parallelism."""

    kind: Literal["gather", "ring", "heads"] = "gather"
    """Keys and values of all ranks are gathered before attention; or go round while it works, and
    twice in backward, with gradients; or ranks exchange parts of the sequence for heads, before
    attention and behind it (DeepSpeed-Ulysses)."""
    balanced: Flag = True
    """Each rank has a chunk from the front of the sequence and one from the back (or all of it, by
    heads), so that all attend to as many keys; else the last rank attends to almost all of them."""
    overlap: Amount = Field(default=0.0, le=1)
    """Share of these collectives that hides behind attention."""


class PipelineRule(Part):
    """Pipeline parallelism."""

    overlap: Amount = Field(default=0.0, le=1)
    """Share of transfers between stages that hides: 0 where each is waited for."""
    interleaved_overlap: Amount = Field(default=0.0, le=1)
    """The same between the stages of ranks that have several."""
    divided_transfers: Flag = True
    """Each tensor-parallel rank sends its share of an activation, the whole one otherwise."""
    keeps_sent: Flag = False
    """Activations sent to the next stage stay until their backward."""
    keeps_results: Flag = False
    """So does what the last stage returns, beside its loss."""
    stages: StageRule = "even"
    """How blocks are divided among stages (meshwright.planner.frameworks.stage_rules)."""
    polled_s: Amount = 0.0
    """What the host sleeps between two looks at whether a message has come."""


class PerPass(Part):
    """Seconds of one forward and of one backward."""

    forward: Amount = 0.0
    backward: Amount = 0.0


class Host(Part):
    """Seconds of the host's Python and launches."""

    layer_s: PerPass = PerPass()
    """Least time of a block's pass, however small its work."""
    kernel_s: PerPass = PerPass()
    """For each kernel of a forward, in both passes."""
    compiled_s: PerPass = PerPass()
    """What the call of a compiled block adds: guards, and autograd's side of it."""
    checkpoint_s: PerPass = PerPass()
    """What an eager layer that recomputes adds beside the kernels that it starts again: hooks and
    states of generators."""
    selective_s: Amount = 0.0
    """What recomputation by operator adds to each pass of an eager layer, for each kernel of its
    forward: Python is asked about every operator."""
    graph_s: Amount = 0.0
    """Compilation of one kind of block, before its first step."""
    window: Literal["kernels", "layer"] = "layer"
    """Behind what the host's work on a layer hides: behind the kernels of each pass, or behind all
    that the device does for the layer, collectives of its stream too."""
    experts_s: Amount = 0.0
    """What routing, permutation and grouped products add to a block, both passes."""
    rank_s: Amount = 0.0
    """What each further tensor-parallel rank adds to each of a block's collectives, which wait for
    the slowest host."""
    checked_s: Amount = 0.0
    """What each rank of a tensor-parallel group adds to each of a block's collectives where c10d
    compares them first (TORCH_DISTRIBUTED_DEBUG=DETAIL), a quarter more for each further node that
    the group spans: at its barrier rank 0 meets the others one by one."""
    action_s: Amount = 0.0
    """Each forward and each backward of a micro-batch on a stage, beside its layers."""
    action_of: Literal["stage", "rank"] = "stage"
    """Whose it is where ranks have several stages: each stage's, or all of a rank's together."""
    actions: Literal["always", "pipeline"] = "always"
    """Whether a model of one stage has actions too, or a loop around its layers alone."""
    step_s: Amount = 0.0
    """Once per step: optimizer launches, norms, logging, data."""
    call_s: Amount = 0.0
    """Of the host on which these seconds were measured, as `HostSpeed` of a cluster has it of its
    own; 0: that host is not known."""
    launch_s: Amount = 0.0
    """The same of its other figure."""
    slowest: Overhead = 1.0
    """Times these seconds that the host of a machine may take of which nothing was measured: the
    range of a step reaches to it."""


class OptimizerRule(Part):
    """The optimizer's step."""

    clips: Flag = False
    """Gradients are multiplied by what clips their norm at every step; else only where they are
    too large, which is not counted."""
    zeroed: Flag = True
    """Gradients are set to zero in their buffers; else those are freed."""
    flattens: Flag = False
    """Under ZeRO the step copies the gradients of a rank's shard to a flat tensor in their own
    type, and this to one in fp32 (DeepSpeed, single_partition_of_fp32_groups); not where fresh
    gradients wait beside sums, which lie flat (BF16_Optimizer)."""
    roots: Flag = False
    """The step has the square roots of all second moments of a rank's shard at once
    (torch.optim.adamw._multi_tensor_adamw, exp_avg_sq_sqrt); fused kernels have none."""
    flat_together: Positive | None = None
    """Parameters of a rank's shard whose gradients are copied together under ZeRO-3; None: all."""


class OffloadRule(Part):
    """Offload to the host."""

    updates: Literal["streamed", "on_host"] = "on_host"
    """Where an optimizer on the host steps: its state goes through the device, or the host's
    processors update what it has of the parameters, whose working copies go back."""
    host_share: Fraction = 0.5
    """Of a host's memory, what offloaded states may take.  Half, where torch pins each block: those
    are powers of two, up to twice what they contain; processes and the system need some too."""
    activations_share: Fraction = 1.0
    """Of a block's activations, where they are offloaded."""


class MemoryRule(Part):
    """Memory outside of tensors."""

    reserved: Rate = 1.05
    """Reserved over allocated bytes of the caching allocator."""
    replayed: Flag = False
    """What it reserves beside them follows from the tensors of a step instead, of layouts without
    stages that keep their activations (`meshwright.planner.costs.memory.allocator_segments`)."""
    tight: Rate = 1.02
    """Reserved over allocated bytes where memory is short and the allocator compacts."""
    context_bytes: Amount = 1.0e9
    """CUDA context and library buffers of a process, communicators left out where they are given
    apart."""
    communicator_bytes: Amount = 0.0
    """Buffers of the collective library, of a process with more than one rank."""
    workspaces: dict[Text, Amount] = Field(default_factory=dict)
    """Bytes that matrix-product libraries work in, of the caching allocator, by the architecture of
    a device; `other` of all that are not named."""
    spread: Amount = 0.15
    """Standard deviation of the logarithm of what a run needs over what is predicted: of all
    published runs that say whether they ran, each predicted without its own source, this one has
    the least Brier score (0.10: 0.0222, 0.15: 0.0213, 0.20: 0.0214, 0.30: 0.0246, means over 17
    sources), and 80 of 100 peaks lie within 1.28 of it (docs/results/accuracy.md)."""
    reported: Reported = "allocated"
    """Which peak runs tell that do not name it."""


class Seen(Part):
    """The runs that fitted figures come from."""

    accelerators: tuple[Text, ...]
    parameters: tuple[Amount, Amount]
    devices: tuple[Positive, Positive]
    seq_len: tuple[Positive, Positive]
    pretraining: Flag = True
    tuning: Flag = False
    eight_bits: Flag = False
    releases: dict[Text, Text] = Field(default_factory=dict)
    """The last release of each product, as runs name them: `nemo: "26.08"`."""


class RunsWith(Part):
    """What measured runs had beside the framework, which a table of them does not say."""

    options: tuple[Text, ...]
    when: tuple[ConditionText, ...] = ()
    """All of them hold of such a run's layout."""
    source: Text | None = None
    """The table's source whose runs alone tell it; None where a launch script or code does."""
    why: Text


class Accuracy(Part):
    """What was measured of a framework's runs; `planner.costs.uncertainty` makes ranges of it."""

    seen: Seen | None = None
    runs_with: tuple[RunsWith, ...] = ()


class Versions(Part):
    """Which software a framework speaks of."""

    of: Text
    since: Text | None = None
    until: Text | None = None
    earlier: Text | None = None
    """The framework of the releases before.  FlashAttention is of 2022: a run without fused
    attention of a framework whose releases since then have it is read as one of those."""


class Release(Part):
    """What runs of a release have by default, or in its authors' recipes, where they do not say."""

    of: Text
    """What is counted: `transformers`, `nemo`, `mlperf`."""
    since: Text
    options: tuple[Text, ...] = ()
    source: Text


class OptionChoice(Part):
    """Options of a framework that make a step shorter, and what they ask for."""

    options: tuple[Text, ...]
    when: tuple[ConditionText, ...] = ()
    """All of them hold of a layout that gains by them."""
    needs: Text


class Basis(Part):
    """Where figures come from."""

    fields: tuple[Text, ...]
    """Paths such as `host.layer_s`."""
    provenance: Provenance
    source: Text
    """Source file, paper, machine or table."""
    runs: Positive | None = None
    """How many runs figures were fitted to."""
    why: Text | None = None
    """The mechanism, in a sentence."""

    @model_validator(mode="after")
    def _check_basis(self) -> Self:
        if self.provenance == "fitted" and self.runs is None:
            raise ValueError("is fitted and does not say to how many runs; add it")
        return self


class Framework(Document):
    """How one framework trains."""

    kind_of_document: ClassVar[str] = "framework"
    name: Text
    aliases: tuple[Text, ...] = ()
    extends: Text | None = None
    """The framework whose figures hold where this one gives none."""
    summary: Text
    versions: Versions | None = None
    types: Types = Types()
    sharding: Sharding = Sharding()
    kernels: Kernels = Kernels()
    eight_bit: EightBit = EightBit()
    loss: Loss = Loss()
    recompute: RecomputeRule = RecomputeRule()
    tensor: TensorRule = TensorRule()
    context: ContextRule = ContextRule()
    experts: ExpertRule = ExpertRule()
    pipeline: PipelineRule = PipelineRule()
    host: Host = Host()
    optimizer: OptimizerRule = OptimizerRule()
    offload: OffloadRule = OffloadRule()
    memory: MemoryRule = MemoryRule()
    space: Space | None = None
    """None where layouts are priced and not searched."""
    accuracy: Accuracy = Accuracy()
    releases: tuple[Release, ...] = ()
    """The last of each product that is no later than a run's own."""
    choices: tuple[OptionChoice, ...] = ()
    """Options that a search tries where they are allowed (`--allow framework-options`)."""
    basis: tuple[Basis, ...] = ()

    @model_validator(mode="after")
    def _figures_have_a_basis(self) -> Self:
        counts: dict[str, int] = {}
        figure_names = set(dict(figures(self)))
        for entry in self.basis:
            for path in entry.fields:
                if path not in figure_names:
                    raise ValueError(
                        f"has a basis for '{path:.60}', which is no figure of a framework; "
                        "leave it out"
                    )
                counts[path] = counts.get(path, 0) + 1
        twice = sorted(path for path, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"has two bases for {', '.join(twice)}; keep one")
        return self


GROUPS = (
    "types",
    "sharding",
    "kernels",
    "eight_bit",
    "loss",
    "recompute",
    "tensor",
    "context",
    "experts",
    "pipeline",
    "host",
    "optimizer",
    "offload",
    "memory",
)
"""Groups of figures, which `basis` gives a provenance each."""


def figures(framework: Framework) -> Iterator[tuple[str, object]]:
    """Yield every figure of a framework with its path: `host.layer_s`, PerPass(...)."""
    for group in GROUPS:
        part = getattr(framework, group)
        for name in type(part).model_fields:
            yield f"{group}.{name}", getattr(part, name)
    yield "space", framework.space
    yield "accuracy.seen", framework.accuracy.seen


def with_figures(framework: Framework, values: Mapping[str, object]) -> Framework:
    """Return a framework with other figures, given by their paths (`host.step_s`)."""
    groups: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        group, name = path.split(".")
        groups.setdefault(group, {})[name] = value
    parts = {
        group: getattr(framework, group).model_copy(update=new) for group, new in groups.items()
    }
    return framework.model_copy(update=parts)


ONE_STUDY = (frozenset({"vtrain_multi", "vtrain_single"}),)
"""Sources of one paper, machine and program, which support a figure no more than one does."""
FEWEST_OTHERS = 2
"""Sources that must support a fitted figure for it to stand without one more."""


def resting_on(
    framework: Framework, left: Collection[str], sources: Collection[str]
) -> frozenset[str]:
    """Return the fitted figures that would not stand without the runs of some sources.

    Those that fewer than two other studies of `sources` support, and which runs were measured.
    Their names stand in a basis's `source`; what is derived from code or measured by itself rests
    on no run.
    """
    paths: set[str] = set()
    for entry in framework.basis:
        fields = (
            entry.fields if entry.provenance == "fitted" else {"accuracy.seen"} & {*entry.fields}
        )
        if fields and any(_names(entry.source, source) for source in left):
            others = studies(entry, sources) - {_study(source) for source in left}
            if len(others) < FEWEST_OTHERS:
                paths.update(fields)
    return frozenset(paths)


def studies(entry: Basis, sources: Collection[str]) -> set[frozenset[str]]:
    """Return those of some sources that a basis names, tables of one study together."""
    return {_study(name) for name in sources if _names(entry.source, name)}


def _names(text: str, source: str) -> bool:
    return re.search(rf"\b{re.escape(source)}\b", text) is not None


def _study(source: str) -> frozenset[str]:
    return next((study for study in ONE_STUDY if source in study), frozenset({source}))


def without_sources(
    framework: Framework, left: Collection[str], sources: Collection[str], usual: Framework
) -> Framework:
    """Return a framework as it would stand had nobody seen the runs of the sources that are `left`
    out.

    Fitted figures that rest on it are those of `usual`, of which nothing else is known; what its
    runs alone are known to have had is gone.
    """
    runs_with = tuple(run for run in framework.accuracy.runs_with if run.source not in left)
    dependents = resting_on(framework, left, sources)
    if not dependents and runs_with == framework.accuracy.runs_with:
        return framework
    instead = dict(figures(usual))
    values = {path: instead[path] for path in dependents} | {"accuracy.runs_with": runs_with}
    return with_figures(framework, values)


GRAPH_REPLAY_S = 5e-5
"""One call of `torch.cuda.CUDAGraph.replay` through torch.cuda.make_graphed_callables."""

OPTIONS: Mapping[str, Mapping[str, object]] = {
    "flash": {"kernels.flash_attention": True},
    "eager-attention": {"kernels.flash_attention": False},
    "compiled": {f"kernels.{part}": "fused" for part in ("norm", "gate", "rotary")},
    "fa2": {"kernels.attention": "fa2"},
    "ulysses": {"context.kind": "heads", "context.overlap": 0.0},
    "gathered-context": {"context.kind": "gather", "context.overlap": 0.0},
    "deepep": {"experts.sends": "once", "experts.links_rate": 1.2},
    "expert-overlap": {"experts.overlap": 0.85},
    "shared-expert-overlap": {"experts.shared_overlap": 0.9},
    "tp-overlap": {"tensor.overlap": 0.4},
    "no-tp-overlap": {"tensor.overlap": 0.0, "tensor.async_overlap": 0.0},
    "16-bit-gathers": {"eight_bit.gathered": ("activations",)},
    "fp8-attention": {"kernels.eight_bit_attention": True},
    "auto-filter": {"eight_bit.eligible": "large"},
    "narrow-experts": {"eight_bit.products": "all"},
    "polled-transfers": {"pipeline.polled_s": 0.1},
    # Four messages of 50 µs for each rank: two of ProcessGroupGloo::monitoredBarrier and two of
    # CollectiveFingerPrint::verify (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp).  Of Gloo,
    # one takes 35 µs on an idle CPU and 46 to 63 µs while it checks (measured 2026-11-23).
    "checked-collectives": {"host.checked_s": 0.2e-3},
    "cheap-recompute": {"recompute.selective": "modules", "recompute.modules": CHEAP_MODULES},
    **{
        f"recompute-{module}": {"recompute.selective": "modules", "recompute.modules": (module,)}
        for module in get_args(RecomputeModule)
    },
    "adapter-dropout": {"kernels.adapter_dropout": True},
    "narrow-frozen": {"types.wide_frozen": False},
    "reentrant-recompute": {"recompute.reentrant": True},
    "host-counts": {"experts.counts": "host"},
    "compiled-loss": {"loss.peak_bytes": 4.0, "loss.divided_bytes": 0.0},
    "narrow-gradients": {"types.gradient": 2, "types.wire": 2},
    "wide-gradients": {"types.gradient": 4, "types.wire": 4},
    "narrow-states": {
        "types.gradient": 2,
        "types.master": 0,
        "types.moments": 4,
        "types.wire": 2,
        "types.full_with_zero": False,
    },
    "wide-states": {"types.gradient": 4, "types.master": 4, "types.moments": 8},
    "narrow-moments": {"types.moments": 4},
    "shifted-logits": {"loss.peak_bytes": 14.0, "loss.fused_bytes": 10.0},
    "fused-cross-entropy": {"loss.fused": True},
    "fused-norms": {"kernels.norm": "fused", "kernels.rotary": "fused"},
    "fused-gates": {"kernels.gate": "fused"},
    "liger": {
        **{f"kernels.{part}": "fused" for part in ("norm", "gate", "rotary")},
        "space.chunked_loss": True,
    },
    "fa3": {"kernels.attention": "fa3"},
    "balanced-routing": {"experts.load_spread": 0.0},
    "fused-experts": {"experts.fused": True, "experts.counts": "device"},
    # Reduced gradients are of the type of the shards (torch, fully_shard/_fsdp_collectives.py,
    # foreach_reduce), which accelerate makes fp32 (fsdp_utils.py, fsdp2_prepare_model).
    "layer-units": {
        "sharding.unit": "layer",
        "sharding.copies": "around_collectives",
        "types.gradient": 4,
    },
    "flat-units": {"sharding.unit": "flat", "sharding.copies": "none"},
    "narrow-activations": {"eight_bit.narrow_states": True},
    "8-bit-gathers": {"eight_bit.gathered": ("activations", "parameters")},
    # A graph is launched whole: nothing of a step's Python and launches is left but the optimizer's
    # and the data's (torch.cuda.CUDAGraph.replay is one call).
    "graphed-steps": {
        "host.layer_s": PerPass(),
        "host.kernel_s": PerPass(),
        "host.experts_s": 0.0,
        "host.rank_s": 0.0,
        "host.action_s": 0.0,
    },
    # Attention and the router of each layer and pass are replayed, the experts are launched.
    "graphed-attention": {
        "host.layer_s": PerPass(forward=GRAPH_REPLAY_S, backward=GRAPH_REPLAY_S),
    },
    # A replay of each layer and pass: a Python call, copies of its inputs, one launch.
    "graphed-layers": {
        "host.layer_s": PerPass(forward=GRAPH_REPLAY_S, backward=GRAPH_REPLAY_S),
        "host.kernel_s": PerPass(),
        "host.experts_s": 0.0,
        "host.rank_s": 0.0,
    },
}
"""What a run may say of its kernels beside its framework; in a plan `megatron+eager-attention`."""

OPTION_BASIS: Mapping[str, str] = {
    "deepep": "derived: 1.1 to 1.3 times the all-to-all of the collective library over the same "
    "links (DeepEP, docs/legacy.md, as the framework hai-llm has it)",
    "expert-overlap": "derived: 20 of 132 multiprocessors send (DeepSeek-V3, section 3.2.2)",
    "shared-expert-overlap": "derived: a tenth stays seen, as of collectives beside products",
    "tp-overlap": "fitted to dgxc, megatron_bridge, mlperf",
    "polled-transfers": "derived: nanotron, p2p.py, time.sleep(0.1)",
    "checked-collectives": "derived: four messages, of which Gloo's take 35 to 63 µs; 50 was taken "
    "after 45 and 53 had scored",
    "liger": "derived: Liger-Kernel, transformers/monkey_patch.py (rms_norm, swiglu, rope, "
    "fused_linear_cross_entropy)",
    "compiled-loss": "derived: what a compiler keeps of the loss",
    "shifted-logits": "derived: transformers 4.46 to 4.49, loss_utils.py",
}
"""What figures of options are fitted to, or derived from."""


OF_ROUTERS = ("balanced-routing",)
"""Options that speak of a model's routers, which every framework may have."""


def usual_of_release(framework: Framework, release: str) -> tuple[str, ...]:
    """Return the options that runs of a release have where they do not say.

    A release is what versions it joins: `torch-2.4.1/transformers-4.45.2`.

    >>> later = Release(of="nemo", since="25.11", options=("deepep",), source="its recipes")
    >>> framework = Framework(name="plain", summary="the defaults", releases=(later,))
    >>> usual_of_release(framework, "nemo-26.02.01"), usual_of_release(framework, "nemo-25.09")
    (('deepep',), ())
    """
    versions: dict[str, tuple[int, ...]] = {}
    for part in release.lower().split("/"):
        if match := _RELEASE.match(part):
            versions[match[1]] = _version(match[2])
    options_of: dict[str, Release] = {}
    for entry in sorted(framework.releases, key=lambda entry: _version(entry.since)):
        if entry.of in versions and _version(entry.since) <= versions[entry.of]:
            options_of[entry.of] = entry
    return tuple(option for release in options_of.values() for option in release.options)


def is_newer(framework: Framework, release: str) -> bool:
    """Say whether a release is later than those of a framework's measured runs.

    >>> seen = Seen(accelerators=("h100",), parameters=(1e9, 2e9), devices=(8, 16),
    ...     seq_len=(2048, 4096), releases={"nemo": "26.08"})
    >>> framework = Framework(name="plain", summary="x", accuracy=Accuracy(seen=seen))
    >>> [is_newer(framework, f"nemo-{version}") for version in ("25.11", "26.08", "27.01")]
    [False, False, True]
    """
    newest = framework.accuracy.seen.releases if framework.accuracy.seen else {}
    versions = (_RELEASE.match(part) for part in release.lower().split("/"))
    return any(
        match[1] in newest and _version(match[2]) > _version(newest[match[1]])
        for match in versions
        if match
    )


_RELEASE = re.compile(r"([a-z_]+)-v?(\d{1,5}(?:[.-]\d{1,5})*)")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.split("[.-]", text))


def base_of(name: str) -> str:
    """Return the framework's own name, without options.

    >>> base_of("fsdp+compiled"), base_of("megatron")
    ('fsdp', 'megatron')
    """
    return name.partition("+")[0]


def with_options(framework: Framework, options: Sequence[str]) -> Framework:
    """Return a framework with other kernels, of which its name then tells."""
    for option in options:
        if option not in OPTIONS:
            raise DocumentError(
                "framework", f"'{option:.40}' is no option; {nearest(option, list(OPTIONS))}"
            )
        if base_of(framework.name) == "native" and option not in OF_ROUTERS:
            raise DocumentError(
                "framework",
                f"native has kernels of its own, so no '{option}'; "
                "leave it out, or name another --framework",
            )
        values = dict(OPTIONS[option])
        if "recompute.modules" in values:  # each adds its own to those before
            modules = (*framework.recompute.modules, *OPTIONS[option]["recompute.modules"])  # type: ignore[misc]
            values["recompute.modules"] = tuple(dict.fromkeys(modules))
        changed = with_figures(framework, values)
        if changed != framework:
            framework = changed.model_copy(update={"name": f"{framework.name}+{option}"})
    space = framework.space
    writes_core = space is not None and space.selective_core
    has_core = writes_core and not framework.kernels.flash_attention
    if space is None or not (has_core or framework.recompute.modules):
        return framework
    choices = tuple(dict.fromkeys(("none", "selective", *space.recompute)))
    return framework.model_copy(update={"space": space.model_copy(update={"recompute": choices})})


def without_basis(framework: Framework) -> list[str]:
    """Return the figures that differ from their defaults and say nothing of their provenance."""
    stated = {path for entry in framework.basis for path in entry.fields}
    plain = Framework(name="plain", summary="the defaults")
    defaults = dict(figures(plain))
    return [
        path for path, value in figures(framework) if value != defaults[path] and path not in stated
    ]


def merge_framework_data(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return a framework's data with what a patch gives in its place, group by group.

    The patch's bases come first; those of the base stay for figures that the patch leaves alone.
    """
    result = dict(base)
    for key, value in patch.items():
        if key in GROUPS or key == "accuracy":
            result[key] = {**base.get(key, {}), **value}
        elif key != "basis":
            result[key] = value
    stated = {path for entry in patch.get("basis", ()) for path in entry["fields"]}
    given = {f"{group}.{name}" for group in (*GROUPS, "accuracy") for name in patch.get(group, {})}
    kept = []
    for entry in base.get("basis", ()):
        fields = [path for path in entry["fields"] if path not in stated | given | {"space"}]
        if fields:
            kept.append({**entry, "fields": fields})
    result["basis"] = [*patch.get("basis", ()), *kept]
    return result


def framework_of(data: dict[str, Any], frameworks_data: dict[str, dict[str, Any]]) -> Framework:
    """Return a framework from its data, with the figures of the one that it extends.

    `frameworks_data` has the data of frameworks by name; one level of `extends` is followed.
    """
    base = data.get("extends")
    if base is None:
        return Framework.of(data)
    if not isinstance(base, str) or base not in frameworks_data:
        raise DocumentError(
            "extends", f"is {base!r:.60}; known: {', '.join(sorted(frameworks_data))}"
        )
    if frameworks_data[base].get("extends") is not None:
        raise DocumentError("extends", f"is '{base}', which extends another; name that one")
    whole = {key: value for key, value in frameworks_data[base].items() if key not in NOT_INHERITED}
    return Framework.of(merge_framework_data(whole, data))


NOT_INHERITED = (
    "name",
    "aliases",
    "summary",
    "versions",
    "space",
    "accuracy",
    "releases",
    "choices",
)
"""Of what one extends: its names, what it executes, how far its runs lay from predictions."""
