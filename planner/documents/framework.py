"""Framework: how a training framework of a version trains, as a document.

The document states the types of states, the sharding, the fused kernels, the tensors that selective
recompute drops, the hidden communication, and the costs of the host and the allocator.  Its figures
are data in `planner/catalog/frameworks/`, each with its provenance in `basis`; a formula reads
fields and never a framework's name.  It contains no devices, links or models.

A field's default is neutral: nothing is sharded, nothing is hidden, a share is 1, a cost is 0; or,
where there is no neutral value, that of mixed precision in plain PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from meshwright.planner.documents.document import Document, Part, nearest
from meshwright.planner.documents.framework_space import (
    ConditionText,
    RecomputeModule,
    Space,
    StageRule,
)
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
"""Implementation of an operator: one kernel, its author's or a compiler's (`fused`), or the tensor
operations that a module writes out (`module`)."""
Attention = Literal["module", "fa1", "fa2", "fa3"]
Unit = Literal["layer", "flat", "buffer"]
"""FSDP's units hold shards apart from the working copies that they gather: FSDP2's of tensors one
by one (`layer`), FSDP1's of one flat tensor (`flat`); in buffers of whole parameters a shard is a
part of them."""
BackwardPrefetch = Literal["before", "behind"]
Copies = Literal["none", "around_collectives"]
Accumulation = Literal["none", "same_type", "into_sum", "cast_then_add", "in_product"]
Sends = Literal["each", "once"]
Biases = Literal["products", "rows", "weighed"]
SelectiveRecompute = Literal["outputs", "attention", "operators", "blocks", "modules"]
CHEAP_MODULES: tuple[RecomputeModule, ...] = ("act", "layernorm", "mla-up-proj", "moe-act")
"""Modules that are cheap to recompute (DeepSeek-V3, section 3.2.3, arXiv:2412.19437)."""
Reported = Literal["allocated", "reserved"]
Provenance = Literal["derived", "measured", "fitted", "assumed"]


class Types(Part):
    """Bytes of each parameter's states, in 16-bit training."""

    working: Count = 2
    """Bytes of a weight as layers use it."""
    gradient: Count = 4
    """Bytes of an element of the buffer in which gradients are summed."""
    fp16_gradient: Count = 2
    """The same in fp16 training, whose reduction is no wider."""
    fresh_gradients: Count = 0
    """Bytes of a gradient in the working type that stays beside that buffer, where the buffer has
    another type; else 0."""
    master: Count = 4
    """Bytes of the fp32 weight beside the working one; 0 where the working one is trained."""
    moments: Count = 8
    """Bytes of both moments of AdamW."""
    wire: Count = 4
    """Bytes of a gradient while it is reduced between ranks."""
    scales: Amount = 4 / 64
    """Bytes of block scales for each frozen weight in 4 bits.  bitsandbytes has a scale of 4 bytes
    for 64 weights or, with rounded scales, of one byte and a 256th of 4 more."""
    wide_frozen: Flag = False
    """With 4-bit weights and undivided states, everything that is not in 4 bits is cast to fp32:
    embedding, head and norms, so that blocks pass fp32 on."""
    wide_adapters: Flag = False
    """Adapters are trained in fp32 where states are not divided, whatever the model's type."""
    full_with_zero: Flag = False
    """Under ZeRO, masters and moments are fp32 whatever a single device trains in, and gradients
    are reduced in the type in which they are summed."""


class Sharding(Part):
    """Sharding of states among data-parallel ranks, and the visible share of its communication."""

    zero: int = Field(default=0, ge=0, le=3, strict=True)
    """ZeRO level of a run that does not name one."""
    unit: Unit = "buffer"
    """Piece of the states that ranks divide, gather and reduce together."""
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
    """A block that recomputes all of itself gathers its parameters for the recomputation and again
    for its backward, since modules free them one by one."""
    overlap: Amount = Field(default=1.0, le=1)
    """Share of ZeRO-3 collectives that overlaps with their neighbours' computation: 1 where units
    are gathered ahead."""
    channels: Count = 16
    """Multiprocessors that a kernel of the collective library takes, one for each channel, from the
    computation beside it; their share is the least of a hidden collective that stays visible.  The
    library has 16 over eight network cards, and up to 24 inside a node of NVSwitch (NVIDIA/nccl,
    issues 1453 and 1259)."""
    reduce_overlap: Amount = Field(default=0.0, le=1)
    """Share of the gradients' reduction that runs beside the last micro-batch's backward."""
    gather_overlap: Amount = Field(default=0.0, le=1)
    """Share of the gather of updated parameters that runs beside the next forward."""
    copies: Copies = "none"
    """Copies of parameters and gradients between their own tensors and the buffers of collectives:
    `around_collectives` (FSDP2), or `none` where the tensors are parts of those buffers."""
    accumulation: Accumulation = "into_sum"
    """Way in which a micro-batch's gradients are added to the earlier ones: see
    `meshwright.planner.costs.sharding.accumulated_bytes`."""
    implicit_gathers: Flag = False
    """A forward's gather starts when the host reaches its unit, unless a layout sets a prefetch
    depth; else it always starts ahead."""
    bucket_gradients: Amount = 0.0
    """Gradients in a bucket that ZeRO reduces.  A bucket is a buffer of its own in the type of
    computation; there are two, and one of them is being reduced."""
    leaves_frozen: Flag = False
    """Frozen weights that every rank has whole are in no unit of FSDP2 and are used where they are;
    else a shard exists beside the copy that it is gathered into."""
    leaves_whole: Flag = False
    """Other weights that every rank has whole are in no unit of FSDP2 either: in mixed precision
    passes compute with copies of them, without hooks of units."""
    unit_s: Amount = 0.0
    """Seconds of the host for each sharded unit and pass (FSDP2's Python hooks)."""
    registered: Flag = False
    """Buffers of ZeRO-3's collectives are registered with the collective library, whose kernels
    then use no multiprocessors to reach the network."""
    bridged: Flag = True
    """Collectives use bridges between pairs of cards, where a machine has them."""


class Kernels(Part):
    """Kernels that run, and the rates that they reach."""

    norm: Kernel = "fused"
    """Norms as one kernel, or as the tensor operations of a module."""
    gate: Kernel = "fused"
    """SwiGLU as one kernel, or as an activation and a product with a tensor each."""
    rotary: Kernel = "fused"
    """Rotary embedding as one kernel; else rotated queries and keys are new tensors beside the
    projection's output."""
    projections: Kernel = "fused"
    """Queries, keys and values are one product, and so are gate and up; a part of its result keeps
    the whole result alive."""
    backward_traffic: Amount = 0.0
    """Memory traffic of a memory-bound operator's backward over its forward's; with 0, each
    operator's own traffic counts."""
    launches: Literal["every", "products"] = "products"
    """Kernels whose launches count on the device.  With `products`, launches of memory-bound
    kernels hide behind the kernels before them, or in `host.layer_s`."""
    softmax: Kernel = "fused"
    """Softmax of written-out attention; a `module` one keeps scores in 16 and in 32 bits."""
    flash_attention: Flag = True
    """Default of a run that names no kernel: attention is one kernel whose scores never reach
    memory."""
    attention: Attention = "fa2"
    """Generation of that kernel; cuDNN's counts as the third.  `module`: torch's own, wherever a
    family's modules call it, at the rate of the device's curve for any length."""
    eight_bit_attention: Flag = False
    """Attention also runs in 8 bits where products do; its tensors are cast before and after it."""
    core_traffic: Flag = False
    """The attention kernel's memory traffic counts beside its FLOPs; else its measured rate
    contains that traffic."""
    pads_values: Flag = False
    """The attention kernel has one head width, so narrower values are padded to the width of
    queries."""
    dropout: Flag = False
    """Models of the GPT kind (ungated feed-forward) drop activations at random."""
    adapters: Literal["attention", "all"] = "all"
    """Products of a frozen block that have adapters, and so keep their inputs."""
    adapter_rank: Positive = 16
    """Rank of the adapters of a run that does not name one."""
    adapter_targets: tuple[Text, ...] = ("all-linear",)
    """Modules that have adapters in a run that does not name them."""
    adapter_dropout: Flag = False
    """Inputs of adapters are dropped at random: each keeps its own copy and a mask."""
    restored_bytes: Amount = 5.0
    """Bytes of memory traffic per weight for unpacking 4 bits to 16 before each product: 0.5 read
    and 2 written, at half of the bandwidth of a plain copy."""
    restored_indices: Amount = 0.0
    """Bytes of indices for each weight that is unpacked from 4 bits; some weights are unpacked at a
    time."""
    tuned: Flag = True
    """Products are tuned to their shapes and reach the device's rate of tuned products; else the
    rate of torch's own choice, or of the device's measured curve."""
    products: Rate = 1.0
    """Rate of matrix products over what well-tuned frameworks reach on the same device."""
    architecture_products: dict[Text, Rate] = Field(default_factory=dict)
    """The same rate by device architecture, where a framework's libraries are older than the
    architecture."""


class Recipe(Part):
    """Products in 8 bits whose operands have other scales than the framework's usual ones."""

    input_bytes: Amount
    """Bytes of memory traffic per element for casting a product's input to 8 bits, for both of its
    products.
    """
    gradient_bytes: Amount
    """The same for the gradient of a product's output."""
    weight_bytes: Amount
    """The same for a weight, in each forward and in each backward."""
    rate: Rate = 1.0
    """Rate of products with such scales over that of products with the usual ones."""
    architecture_rates: dict[Text, Rate] = Field(default_factory=dict)
    """The same rate by device architecture, where it differs."""
    wide_gradients: Flag = False
    """Gradients of weights are products in 16 bits."""
    gathers: Flag = True
    """Tensors that the framework gathers in 8 bits are also gathered in 8 bits with these
    scales."""


class EightBit(Part):
    """Training with products in 8 bits and fewer."""

    narrow_states: Flag = True
    """Gradients are summed in bf16 and activations stored as narrow as products (Transformer
    Engine); else only products are narrow and their inputs are stored in bf16 (torchao)."""
    products: Literal["linears", "all"] = "all"
    """Products of a block that are narrow: those of Linears alone, or those of experts' matrices
    too."""
    eligible: Literal["aligned", "large"] = "aligned"
    """Linears that are narrow: `aligned`, all whose sides are multiples of 16; `large`, those that
    are also large by the sides at which torchao saw a gain on H100 (`auto_filter_small_kn`)."""
    scales: Scales = "tensorwise"
    """Scales of a run that does not name them."""
    large_rate: Flag = True
    """Narrow products reach the share of the curve that the device's large products reach; else all
    of it."""
    architecture_rates: dict[Text, Rate] = Field(default_factory=dict)
    """Rate of narrow products over the usual one, by device architecture, where its libraries reach
    another."""
    input_bytes: Amount = 2.0
    """Bytes of memory traffic per element for casting a product's input to 8 bits, both as it is
    and transposed for the gradient of its weights."""
    gradient_bytes: Amount = 4.0
    """The same for the gradient of a product's output."""
    weight_bytes: Amount = 0.0
    """The same for a weight, in each forward and in each backward; 0 where a step casts it once."""
    recipes: dict[Text, Recipe] = Field(default_factory=dict)
    """Recipes by the scales that a layout asks for (`rowwise`), and by precisions with scales of
    their own (`mxfp8`); the figures above price all others."""
    arrived_bytes: Amount = 1.0
    """Bytes of memory traffic per element of a weight that was gathered in 8 bits: one of the two
    passes reads it and writes it in another order."""
    gathered: tuple[Literal["activations", "parameters"], ...] = ()
    """Tensors that are gathered in 8 bits: activations and their gradients along the sequence
    between tensor-parallel ranks, and the blocks' parameters under ZeRO-3."""
    cast_bytes: Amount = 0.0
    """Bytes of memory traffic per element for rounding an operand; 0 where another kernel writes it
    rounded."""
    cast_kernels: Count = 0
    """Kernels that round one operand."""


class Loss(Part):
    """Loss of the output projection."""

    kind: Kernel = "fused"
    """One operator with `peak_bytes`, or log-softmax and choice in fp32 as in torch."""
    peak_bytes: Rate = 10.0
    """Bytes per logit at the loss's peak."""
    divided_bytes: Amount = 0.0
    """The same for a rank's own logits where tensor-parallel ranks divide the loss; 0 means the
    same number."""
    fused: Flag = False
    """Softmax and its gradient are one kernel that overwrites stored logits."""
    fused_bytes: Amount = 0.0
    """Bytes per logit at the peak of such a kernel; 0: `peak_bytes`."""
    chunks: Literal["rows", "width"] = "rows"
    """A chunked loss has the logits of a layout's number of rows at once, or of so many that their
    elements are no more than its inputs' (Liger)."""
    divided: Flag = True
    """With tensor parallelism the loss works on its shard of the vocabulary; else on all of it."""


class RecomputeRule(Part):
    """Tensors that recomputation drops."""

    selective: SelectiveRecompute = "attention"
    """Selective recompute drops written-out attention's scores; all outputs but attention's and
    every second product's; all outputs but products', attention's and those of collectives that
    shrink; all of every second block; or what belongs to `modules`."""
    modules: tuple[RecomputeModule, ...] = ()
    """Modules that selective recompute of `modules` recomputes."""
    early_stop: Flag = False
    """Recomputation stops when the last tensor that backward needs is there again."""
    reentrant: Flag = False
    """A block that recomputes all of itself does so on a copy of its input that is the leaf of a
    graph of its own.  FSDP1 hangs a hook of a unit whose parameters are frozen on that leaf, which
    has it and its gradient until the backward of the whole model ends."""


class TensorRule(Part):
    """Tensor parallelism."""

    sequence_parallel: Flag = False
    """Default of a run: the residual stream is sharded along the sequence."""
    keeps_gathered: Flag = False
    """Products keep their gathered inputs for backward, not their own shard of them."""
    second_gather: Amount = Field(default=0.5, le=1)
    """Visible share of gathering a product's input again for its weights' gradient, beside the
    other product of its backward."""
    copies: Flag = False
    """Micro-batches of several samples are brought into the order of positions around each
    collective; else the sequence is the first dimension of every activation."""
    overlap: Amount = Field(default=0.0, le=1)
    """Share of tensor-parallel collectives that hides behind the products around them."""
    async_overlap: Amount = Field(default=0.0, le=1)
    """Share of a collective that a product hides under asynchronous tensor parallelism.  The
    product then runs in as many pieces as there are ranks."""
    recorded: Amount = 0.0
    """Undivided activations of each block whose memory the allocator reuses only after their
    collective has ended on the device (c10d's record_stream), since the host runs a pass ahead; a
    pipeline's transfers hold the host back."""


NATURAL_SPREAD = 0.3
"""Imbalance of the experts' load under natural routing.  Of runs of one layout with natural and
with forced routing, Qwen3-235B on 256 H100 takes 1.24 times as long with 16 thousand tokens and
1.21 times with 32 thousand, which needs 0.3 to 0.5; steps of 4 thousand tokens, which have no
counterpart, show 0 to 0.2 (moe_zoo).  Mixtral-8x7B's experts get about 0.6 to 1.6 of their mean
(arXiv:2401.04088, figure 7, from memory), which is 0.17.  The figure is of one layer in one step;
over a whole training routers are less uneven."""


class ExpertRule(Part):
    """Expert parallelism."""

    shared: Literal["whole", "divided"] = "whole"
    """Placement of shared experts where routed experts have ranks of their own: `whole` on every
    rank, or `divided` by tensor parallelism like a feed-forward."""
    moves: Amount = 0.0
    """Memory traffic of sorting tokens by experts and back, as a multiple of the size that is sent
    to experts; 0: the traffic of modules that index rows."""
    grouped_share: Fraction = 1.0
    """Rate of one grouped product of many experts over that of one product of the same size."""
    tile_rows: Count = 0
    """Rows of a tile of grouped products, to which each expert's tokens are padded; 0:
    `grouped_share` contains the padding."""
    sends: Sends = "each"
    """A token is sent to each of its experts (all-to-all of the collective library), or once to
    every node and there once to every rank that has some of them (DeepEP, HybridEP)."""
    narrow_sends: Flag = False
    """Tokens on their way to experts, and gradients on theirs, are in 8 bits where products are;
    combined results stay in 16."""
    links_rate: Rate = 1.0
    """Rate of these exchanges over that of the collective library's all-to-all."""
    overlap: Amount = Field(default=0.0, le=1)
    """Share of the exchanges that hides behind passes of another micro-batch (DualPipe, Megatron's
    combined 1F1B); the rest is computation lost on the multiprocessors that send."""
    shared_overlap: Amount = Field(default=0.0, le=1)
    """Share of sending tokens to experts, and of bringing their gradients back, that hides behind
    the products of experts that all tokens share."""
    load_spread: Amount = NATURAL_SPREAD
    """Imbalance of the experts' load in a layer under natural routing, from 0 (balanced) to 1 (all
    tokens go to the same experts);
    `meshwright.planner.operators.expert_routing.Routing.busiest_load` computes the busiest rank's
    load from it."""
    fused: Flag = False
    """Gates of experts are computed in the products that make them, and cause no memory traffic
    beyond the next product's input."""
    biases: Biases = "products"
    """Way in which experts' biases, of models that have them, come to each token: in the `products`
    themselves; in `rows`, one for each token and expert, which are added to what a product made; or
    `weighed` by the router in fp32 and added to the rows that leave an expert, with the halves of
    a clamped gate cut, clamped and joined (Megatron Core, transformer/moe/experts.py, _apply_bias;
    fusions/fused_bias_geglu.py)."""
    counts: Literal["device", "host"] = "device"
    """Place where the tokens of each expert are counted.  A host that reads the counts first waits
    for all queued work of the device, then starts the operations that need them (Megatron Core,
    token_dispatcher.py, MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize), so that host and
    device do not overlap in a forward.  A backward knows the counts."""


class ContextRule(Part):
    """Context parallelism."""

    kind: Literal["gather", "ring", "heads"] = "gather"
    """Exchange of context parallelism.  `gather`: keys and values of all ranks are gathered before
    attention.  `ring`: they go round while attention works, and twice in backward, with gradients.
    `heads`: ranks exchange parts of the sequence for heads, before and after attention
    (DeepSpeed-Ulysses)."""
    balanced: Flag = True
    """Each rank has a chunk from the front of the sequence and one from the back (with `heads`, all
    of it), so that all attend to equally many keys; else the last rank attends to almost all of
    them."""
    overlap: Amount = Field(default=0.0, le=1)
    """Share of these collectives that hides behind attention."""


class PipelineRule(Part):
    """Pipeline parallelism."""

    overlap: Amount = Field(default=0.0, le=1)
    """Share of transfers between stages that hides behind computation; 0 where each is waited
    for."""
    interleaved_overlap: Amount = Field(default=0.0, le=1)
    """The same between stages where ranks have several."""
    divided_transfers: Flag = True
    """Each tensor-parallel rank sends its share of an activation; else the whole activation."""
    keeps_sent: Flag = False
    """Activations that were sent to the next stage stay in memory until their backward."""
    keeps_results: Flag = False
    """The last stage's outputs, beside its loss, stay in memory until their backward."""
    stages: StageRule = "even"
    """Division of blocks among stages (meshwright.planner.frameworks.stage_rules)."""
    polled_s: Amount = 0.0
    """Seconds that the host sleeps between two checks for a message."""


class PerPass(Part):
    """Seconds of one forward and of one backward."""

    forward: Amount = 0.0
    """Seconds of one forward."""
    backward: Amount = 0.0
    """Seconds of one backward."""


class Host(Part):
    """Seconds of the host's Python and launches."""

    layer_s: PerPass = PerPass.model_construct()
    """Minimum seconds of a block's pass, however small its work."""
    kernel_s: PerPass = PerPass.model_construct()
    """Seconds for each kernel of a forward, in both passes."""
    compiled_s: PerPass = PerPass.model_construct()
    """Seconds that the call of a compiled block adds: guards, and the side of autograd."""
    checkpoint_s: PerPass = PerPass.model_construct()
    """Seconds that an eager layer that recomputes adds beside the kernels that it starts again:
    hooks and states of generators."""
    selective_s: Amount = 0.0
    """Seconds that recomputation by operator adds to each pass of an eager layer, for each kernel
    of its forward, since Python decides for every operator."""
    replay_s: Amount = 0.0
    """Seconds that the launch of a captured graph takes for each of its kernels."""
    graph_s: Amount = 0.0
    """Seconds of compiling one kind of block, before its first step."""
    window: Literal["kernels", "layer"] = "layer"
    """Device work that hides the host's work on a layer: the kernels of each pass, or all work for
    the layer, including collectives of its stream."""
    adapter_s: PerPass = PerPass.model_construct()
    """Seconds that each product with an adapter adds to an eager layer's passes."""
    experts_s: Amount = 0.0
    """Seconds that routing, permutation and grouped products add to a block, over both passes."""
    rank_s: Amount = 0.0
    """Seconds that each further tensor-parallel rank adds to each of a block's collectives, which
    wait for the slowest host."""
    checked_s: Amount = 0.0
    """Seconds that each rank of a tensor-parallel group adds to each of a block's collectives where
    c10d compares them first (TORCH_DISTRIBUTED_DEBUG=DETAIL).  Each further node of the group adds
    a quarter, since rank 0 meets the others one by one at the barrier."""
    action_s: Amount = 0.0
    """Seconds of each forward and each backward of a micro-batch on a stage, beside its layers."""
    action_of: Literal["stage", "rank"] = "stage"
    """Owner of an action where ranks have several stages: each stage, or the rank with all of its
    stages together."""
    actions: Literal["always", "pipeline"] = "always"
    """Models that have actions: all (`always`), or those with several stages (`pipeline`); else one
    loop runs over the layers."""
    step_s: Amount = 0.0
    """Seconds once per step: optimizer launches, norms, logging, data."""
    call_s: Amount = 0.0
    """Seconds of the call in `HostSpeed` on the host where these seconds were measured; 0: nobody
    measured that host."""
    launch_s: Amount = 0.0
    """Seconds of the launch in `HostSpeed` there."""
    slowest: Overhead = 1.0
    """Factor on these seconds for the host of an unmeasured machine at its slowest; the range of a
    step includes it."""


class OptimizerRule(Part):
    """The optimizer's step."""

    clips: Flag = False
    """Every step multiplies gradients by the factor that clips their norm; else only steps whose
    norm is too large do, which is not counted."""
    zeroed: Flag = True
    """Gradients are set to zero in their buffers; else those are freed."""
    flattens: Flag = False
    """Under ZeRO the step copies the gradients of a rank's shard to a flat tensor in their own
    type, and this to one in fp32 (DeepSpeed, single_partition_of_fp32_groups).  It does not where
    fresh gradients wait beside sums, which are flat (BF16_Optimizer)."""
    roots: Flag = False
    """The step holds the square roots of all second moments of a rank's shard at once
    (torch.optim.adamw._multi_tensor_adamw, exp_avg_sq_sqrt); fused kernels hold none."""
    flat_together: Positive | None = None
    """Parameters of a rank's shard whose gradients are copied together under ZeRO-3; None: all of
    them."""


class OffloadRule(Part):
    """Offload to the host."""

    updates: Literal["streamed", "on_host"] = "on_host"
    """Place of the update with an optimizer on the host.  `streamed`: its state passes through the
    device.  `on_host`: the host's processors update their share of the parameters and send the
    working copies back."""
    host_share: Fraction = 0.5
    """Share of a host's memory that offloaded states may take.  It is one half where torch pins
    each block: pinned blocks are powers of two, up to twice their content, and processes and the
    system need memory too."""
    activations_share: Fraction = 1.0
    """Share of a block's activations that moves to the host where they are offloaded."""


class MemoryRule(Part):
    """Memory outside of tensors."""

    reserved: Rate = 1.05
    """Reserved bytes over allocated bytes of the caching allocator."""
    replayed: Flag = False
    """For layouts without stages that keep their activations, reserved bytes follow from the
    tensors of a step instead (`meshwright.planner.costs.memory.allocator_segments`)."""
    tight: Rate = 1.02
    """Reserved bytes over allocated bytes where memory is short and the allocator compacts."""
    context_bytes: Amount = 1.0e9
    """Bytes of a process's CUDA context and library buffers, without communicators where these are
    given apart."""
    communicator_bytes: Amount = 0.0
    """Bytes of the collective library's buffers in a process with more than one rank."""
    workspaces: dict[Text, Amount] = Field(default_factory=dict)
    """Bytes of the caching allocator in which matrix-product libraries work, by device
    architecture; `other` for all architectures that are not named."""
    spread: Amount = 0.15
    """Standard deviation of the logarithm of a run's memory over its prediction.  Over all
    published runs with a known outcome, each predicted without its own source, it has the smallest
    Brier score (0.10: 0.0222, 0.15: 0.0213, 0.20: 0.0214, 0.30: 0.0246, means over 17 sources); 80
    of 100 peaks are within 1.28 of it (docs/results/accuracy.md)."""
    reported: Reported = "allocated"
    """Kind of peak that a run reports where it does not name the kind."""


class Seen(Part):
    """Runs that fitted figures come from."""

    accelerators: tuple[Text, ...]
    """Device types of the runs."""
    parameters: tuple[Amount, Amount]
    """Smallest and largest number of parameters."""
    devices: tuple[Positive, Positive]
    """Smallest and largest number of devices."""
    seq_len: tuple[Positive, Positive]
    """Smallest and largest sequence length in tokens."""
    pretraining: Flag = True
    """The runs include pretraining."""
    tuning: Flag = False
    """The runs include fine-tuning."""
    eight_bits: Flag = False
    """The runs include products in 8 bits."""
    releases: dict[Text, Text] = Field(default_factory=dict)
    """The last release of each product, as runs name them: `nemo: "26.08"`."""


class RunsWith(Part):
    """Options of measured runs beside the framework that the table of the runs does not list."""

    options: tuple[Text, ...]
    """Options of such runs."""
    when: tuple[ConditionText, ...] = ()
    """Conditions that all hold for the layout of such a run."""
    source: Text | None = None
    """Source of the table whose runs alone show the options; None where a launch script or code
    shows them."""
    why: Text
    """Reason to infer the options."""


class Accuracy(Part):
    """Measurements of a framework's runs; `planner.costs.uncertainty` makes ranges of them."""

    seen: Seen | None = None
    """Runs that the fitted figures come from; None: there are none."""
    runs_with: tuple[RunsWith, ...] = ()
    """Options that runs had and their tables do not list."""


class Versions(Part):
    """Software versions that a framework's figures describe."""

    of: Text
    """Name of the software."""
    since: Text | None = None
    """First version that the figures describe."""
    until: Text | None = None
    """Last version that the figures describe."""
    earlier: Text | None = None
    """Framework that describes earlier releases.  FlashAttention dates from 2022: a run without
    fused attention of a framework whose later releases have it is read as a run of that earlier
    framework."""


class Release(Part):
    """Options that runs of a release have by default, or in its authors' recipes."""

    of: Text
    """Product whose versions are counted: `transformers`, `nemo`, `mlperf`."""
    since: Text
    """First version with these options."""
    options: tuple[Text, ...] = ()
    """Default options of runs."""
    source: Text
    """Source of the options."""


class OptionChoice(Part):
    """Options of a framework that shorten a step, and their requirements."""

    options: tuple[Text, ...]
    """Options that are tried together."""
    when: tuple[ConditionText, ...] = ()
    """Conditions that all hold for a layout that gains by the options."""
    needs: Text
    """Requirements of the options, in words."""


class Basis(Part):
    """Provenance of figures."""

    fields: tuple[Text, ...]
    """Paths of figures, such as `host.layer_s`."""
    provenance: Provenance
    """Origin of the figures: derived from code, measured, fitted to runs, or assumed."""
    source: Text
    """Source file, paper, machine or table."""
    runs: Positive | None = None
    """Number of runs that the figures were fitted to."""
    why: Text | None = None
    """Mechanism, in a sentence."""

    @model_validator(mode="after")
    def _check_basis(self) -> Self:
        if self.provenance == "fitted" and self.runs is None:
            raise ValueError("is fitted; add the number of runs")
        return self


class Framework(Document):
    """Figures of how one framework trains."""

    kind_of_document: ClassVar[str] = "framework"
    schema_file: ClassVar[str | None] = "framework.json"
    name: Text
    """Name of the framework."""
    aliases: tuple[Text, ...] = ()
    """Other names of the framework."""
    extends: Text | None = None
    """Framework whose figures hold where this one gives none."""
    summary: Text
    """Description in a sentence."""
    versions: Versions | None = None
    """Software versions that the figures describe."""
    types: Types = Types.model_construct()
    """Number types of tensors."""
    sharding: Sharding = Sharding.model_construct()
    """Sharding of parameters, gradients and optimizer states."""
    kernels: Kernels = Kernels.model_construct()
    """Rates of kernels."""
    eight_bit: EightBit = EightBit.model_construct()
    """8-bit products."""
    loss: Loss = Loss.model_construct()
    """Rules of the loss."""
    recompute: RecomputeRule = RecomputeRule.model_construct()
    """Rules of activation checkpointing."""
    tensor: TensorRule = TensorRule.model_construct()
    """Rules of tensor parallelism."""
    context: ContextRule = ContextRule.model_construct()
    """Rules of context parallelism."""
    experts: ExpertRule = ExpertRule.model_construct()
    """Rules of expert parallelism."""
    pipeline: PipelineRule = PipelineRule.model_construct()
    """Rules of pipelines."""
    host: Host = Host.model_construct()
    """Seconds of the host program."""
    optimizer: OptimizerRule = OptimizerRule.model_construct()
    """Rules of the optimizer."""
    offload: OffloadRule = OffloadRule.model_construct()
    """Rules of offloading to the host."""
    memory: MemoryRule = MemoryRule.model_construct()
    """Rules of memory."""
    space: Space | None = None
    """Space of layouts that is searched; None where layouts are priced and not searched."""
    accuracy: Accuracy = Accuracy.model_construct()
    """Measurements of the framework's runs."""
    releases: tuple[Release, ...] = ()
    """Releases of products; a run has the last one that is no later than its own."""
    choices: tuple[OptionChoice, ...] = ()
    """Options that a search tries where they are allowed (`--allow framework-options`)."""
    basis: tuple[Basis, ...] = ()
    """Provenance of the figures; each figure that differs from its default has one."""

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
"""Groups of figures; `basis` gives each figure its provenance."""


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
"""Sources of one paper, machine and program; together they support a figure as one source."""
FEWEST_OTHERS = 2
"""Number of other sources that must support a fitted figure."""


def resting_on(
    framework: Framework, left: Collection[str], sources: Collection[str]
) -> frozenset[str]:
    """Return the fitted figures that are not supported without the runs of some sources.

    Fewer than two other studies of `sources` support them.  `accuracy.seen`, the measured runs, is
    such a figure too.  A basis's `source` contains their names; what is derived from code or
    measured by itself rests on no run.
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
    """Return a framework as it would be without the runs of the sources that are `left` out.

    Fitted figures that rest on them are those of `usual`, and options that only these runs show are
    removed.
    """
    runs_with = tuple(run for run in framework.accuracy.runs_with if run.source not in left)
    dependents = resting_on(framework, left, sources)
    if not dependents and runs_with == framework.accuracy.runs_with:
        return framework
    instead = dict(figures(usual))
    values = {path: instead[path] for path in dependents} | {"accuracy.runs_with": runs_with}
    return with_figures(framework, values)


GRAPH_REPLAY_S = 5e-5
"""Seconds of one call of `torch.cuda.CUDAGraph.replay` through
torch.cuda.make_graphed_callables."""

OPTIONS: Mapping[str, Mapping[str, object]] = {
    "flash": {"kernels.flash_attention": True},
    "eager-attention": {"kernels.flash_attention": False},
    "compiled": {f"kernels.{part}": "fused" for part in ("norm", "gate", "rotary")},
    "fa2": {"kernels.attention": "fa2"},
    "ulysses": {"context.kind": "heads", "context.overlap": 0.0},
    "gathered-context": {"context.kind": "gather", "context.overlap": 0.0},
    "deepep": {"experts.sends": "once", "experts.links_rate": 1.2, "experts.moves": 3.3},
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
    "unfused-dequantization": {"kernels.restored_bytes": 16.5},
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
    "narrow-loss": {"loss.peak_bytes": 6.0},
    "fused-cross-entropy": {"loss.fused": True},
    "fused-norms": {"kernels.norm": "fused", "kernels.rotary": "fused"},
    "fused-gates": {"kernels.gate": "fused"},
    "liger": {
        **{f"kernels.{part}": "fused" for part in ("norm", "gate", "rotary")},
        "space.chunked_loss": True,
    },
    "fa3": {"kernels.attention": "fa3"},
    "balanced-routing": {"experts.load_spread": 0.0},
    "fused-experts": {
        "experts.fused": True,
        "experts.counts": "device",
        "experts.biases": "products",
    },
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
        "host.layer_s": PerPass.model_construct(),
        "host.kernel_s": PerPass.model_construct(),
        "host.adapter_s": PerPass.model_construct(),
        "host.experts_s": 0.0,
        "host.rank_s": 0.0,
        "host.action_s": 0.0,
    },
    # Attention and the router of each layer and pass are replayed, the experts are launched.
    "graphed-attention": {
        "host.layer_s": PerPass.model_construct(forward=GRAPH_REPLAY_S, backward=GRAPH_REPLAY_S),
    },
    # A replay of each layer and pass: a Python call, copies of its inputs, one launch.
    "graphed-layers": {
        "host.layer_s": PerPass.model_construct(forward=GRAPH_REPLAY_S, backward=GRAPH_REPLAY_S),
        "host.kernel_s": PerPass.model_construct(),
        "host.adapter_s": PerPass.model_construct(),
        "host.experts_s": 0.0,
        "host.rank_s": 0.0,
    },
}
"""Figures by option that a run may have beside its framework; a plan writes
`megatron+eager-attention`."""

OPTION_BASIS: Mapping[str, str] = {
    "deepep": "derived: 1.1 to 1.3 times the all-to-all of the collective library over the same "
    "links (DeepEP, docs/legacy.md, as the framework hai-llm has it); tokens that come once are "
    "read and written for each expert, and what experts return is added before it leaves: about "
    "(1 + 2/3) there and back, since a token of 8 experts goes to 5.3 of 8 ranks; an all-to-all "
    "sorts them twice on each way (Megatron Core, token_dispatcher.py)",
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
    "narrow-loss": "derived: a model's own loss under DeepSpeed, which has no autocast: "
    "log-softmax, its gradient and its input's in 16 bits (3 x 2)",
    "unfused-dequantization": "derived: AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py, forward "
    "while it trains: codes are shifted into int32 (0.5 read, 4 written), cast to int8 (4 and 1), "
    "masked (1 and 1), less their zero (1 and 1), times their scale in 16 bits (1 and 2)",
}
"""Source that the figures of each option are fitted to or derived from."""


OF_ROUTERS = ("balanced-routing",)
"""Options about a model's routers, which every framework may have."""


def usual_of_release(framework: Framework, release: str) -> tuple[str, ...]:
    """Return the default options of runs of a release.

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
    """Return True if a release is later than those of a framework's measured runs.

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
    """Return a framework with other kernels; its name then contains the options."""
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
    """Return the figures that differ from their defaults and have no provenance."""
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


def framework_of(data: dict[str, Any], frameworks_data: Mapping[str, dict[str, Any]]) -> Framework:
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
"""Fields that an extending framework does not inherit: names, executed layouts, and the accuracy of
past runs."""
