"""Bytes that a layer's parameters, gradients and optimizer state take on a rank of any framework.

Activations stand in `meshwright.planner.operators.layer_operators`, a rank's bytes beside layers in
`planner.costs.layout_costs`, units of FSDP1 in `planner.costs.memory.resident_states`.

Symbols: N parameters of the layer on the rank after tensor parallelism, d shard degree; of each
parameter e bytes in computation, m of its fp32 master (0 where what is computed with is trained),
g of the sum of its gradients, f of fresh gradients that wait beside that sum, o of both moments,
w of its gradient in a reduction.  In bf16 e, m, g, f, o, w are usually 2, 4, 4, 0, 8, 4.

Buffers.  Working parameters lie in whole buffers, the optimizer has its own shards:

                       parameters           gradients       optimizer
    ZeRO-0             e N                  (g + f) N       (m + o) N
    ZeRO-1             e N                  (g + f) N       (m + o) N/d
    ZeRO-2             e N                  (g/d + f) N     (m + o) N/d
    ZeRO-3             (m or e) N/d         (g/d + f) N     o N/d

Layers.  FSDP2 wraps every layer as a unit, whose shard is the master, s = m or e bytes each, and
which adds a working copy wherever it wraps a layer.  Whole copies it does not wrap here: their
gradients are summed without it (runtime/parallel/replicas.py), and in mixed precision passes have
copies of them (runtime/techniques/working_copies.py):

                       parameters      gradients       optimizer
    ZeRO-0, s = e      e N             g N             o N
    ZeRO-0, else       s N + e N       g N             o N
    ZeRO-1             s N/d + e N     g N  (1)        o N/d
    ZeRO-2             s N/d + e N     g N/d  (2)      o N/d
    ZeRO-3             s N/d  (3)      g N/d  (2)      o N/d

(1) Gradients are reduced once, after the last micro-batch; with a single one they are g N/d.
(2) Under a pipeline torch reduces once per step too, so g N.
(3) Under a pipeline what a backward gathered stays until the next forward of its layer: + e N when
    a backward is done, that is, when a micro-batch's activations are gone.

Offload.  `optimizer`: the moments, o N/d, are on the host, and the step brings them to the device
through three buckets, each as large as the largest parameter's moments and at least BUCKET_BYTES.
`parameters`: the (s + g + o) N/d of parameters, gradients and moments are on the host; the device
has the working copy, e N (ZeRO-3: while the unit works), gradients that wait whole for their
reduction, and while a shard is copied its s N/d and, narrowed, e N/d.
Gradients on the wire.  In 16 bits the reduction's input is 2 N; PowerSGD keeps what it left out of
the last step, 4 N, and its factors.

While a unit works it needs in forward, ZeRO-3 only, 3 e N (its copy, the gathered buffer it came
from, the next unit's buffer), and in backward its fresh gradients e N, the reduction's input w N
(not in a pipeline, which reduces when no activations are left), and for ZeRO-3 again copy and next
buffer.  The optimizer is fused and needs no temporaries.

Where whole gradients are summed over micro-batches, fresh ones are in the sum before its reduction
begins.  A loss has its logits several times over, and lets go of them before its weight's
gradient is made: gathered copies, fresh gradients and the reduction's input come after it.

Sources: torch 2.13, distributed/fsdp/_fully_shard (_fsdp_param_group.py, _fsdp_collectives.py);
Rajbhandari et al., 2020 (ZeRO) for the stages; Megatron-LM, distributed optimizer: 6 + 12 / d.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, assert_never

from meshwright.planner.documents.cluster import EIGHT_BITS

if TYPE_CHECKING:
    from meshwright.planner.documents.framework import Framework, OptimizerRule, Types, Unit
    from meshwright.planner.documents.plan import GradientCompression, Offload
    from meshwright.planner.documents.training import FrozenWeights, MasterWeights, Optimizer

PACKED_BYTES: dict[FrozenWeights, float] = {"nf4": 0.5, "mxfp4": 0.5, "int8": 1.0, "fp8": 1.0}
"""Bytes of a packed parameter, without its scale."""
BLOCK_SCALES: dict[FrozenWeights, float] = {"mxfp4": 1 / 32, "int8": 4 / 128, "fp8": 4 / 128}
"""Bytes of scales beside it: an exponent for 32 weights (OCP Microscaling Formats, v1.0), or an
fp32 number for 128; those of nf4 are a framework's own."""
STATE_BLOCK = 256
"""Elements of a moment in 8 bits that share a scale of 4 bytes (bitsandbytes, optim/optimizer.py,
Optimizer2State; torchao, optim/adam.py, _AdamBase)."""
NEWTON_SCHULZ_STEPS = 5
"""Newton-Schulz iterations of Muon's update of a matrix (Jordan et al., 2024)."""
FP32 = 4
"""Bytes of an element in full precision."""
NARROW = 1.0
"""Bytes of a parameter that is gathered in 8 bits."""
BUCKETS = 3
BUCKET_BYTES = 64 * 2**20
"""Number of buckets, and least bytes of each: of moments that come to the device together, those in
use, and those that go back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateTypes:
    """Bytes of each parameter's states in one precision, and what they are divided by.

    `state_types` makes one of each kind, so that they are equal only if they are the same.
    """

    working: float
    frozen: float
    """Bytes of a parameter that is not trained, in computation."""
    frozen_stored: float
    """Bytes in its shard, which FSDP casts as it gathers: a model loaded in fp32 is in fp32
    there."""
    scales: float
    """Beside it, of scales of blocks that it was rounded by, which are no parameters."""
    master: float
    """Beside the working one; 0 where that is trained."""
    gradient: float
    fresh: float
    """Bytes of a gradient that waits beside the sum until the reduction."""
    moments: float
    wire: float
    unit: Unit
    by_tensor: bool = False
    """Each tensor of a layer is gathered and reduced by itself."""
    flattens: bool = False
    """The step copies a shard's gradients, as they are and in fp32."""
    roots: bool = False
    """The step takes the square roots of a shard's second moments beside them."""

    @property
    def stored_bytes(self) -> float:
        """Bytes of the parameter that the optimizer updates."""
        return self.master or self.working


def state_types(
    framework: Framework,
    precision: str,
    *,
    zero: int = 0,
    weights: FrozenWeights = "full",
    moments: float | None = None,
    masters: MasterWeights = "fp32",
) -> StateTypes:
    """Return the types of a framework in one precision; frozen parameters may be packed.

    `moments` are bytes of another optimizer's state, in place of AdamW's.  Without `masters` the
    weights of the computation are trained, with gradients and moments in their type.

    >>> from meshwright.planner.catalog import frameworks
    >>> found = state_types(frameworks()["megatron"], "bf16")
    >>> found.working + found.gradient, found.master + found.moments
    (6.0, 12.0)
    """
    types = framework.types
    if types.full_with_zero and zero:
        types = types.model_copy(update={"master": 4, "moments": 8, "wire": types.gradient})
    if masters == "none":
        types = types.model_copy(
            update={
                "master": 0,
                "gradient": types.working,
                "fp16_gradient": types.working,
                "moments": 2 * types.working,
                "wire": min(types.wire, types.working) if zero == 0 else types.wire,
                "fresh_gradients": 0,
            }
        )
    narrow = precision in EIGHT_BITS and framework.eight_bit.narrow_states
    rule = framework.sharding
    return _state_types(
        types,
        framework.sharding.unit,
        precision,
        narrow=narrow,
        weights=weights,
        own_moments=moments,
        by_tensor=framework.sharding.collectives_per_layer > 1,
        flattens=framework.optimizer.flattens and zero > 0,
        roots=framework.optimizer.roots and moments is None,
        loaded_wide=rule.unit != "buffer"
        and not (rule.leaves_frozen or framework.types.full_with_zero)
        and weights == "full",
    )


@cache
def _state_types(
    types: Types,
    unit: Unit,
    precision: str,
    *,
    narrow: bool,
    weights: FrozenWeights,
    own_moments: float | None,
    by_tensor: bool,
    flattens: bool,
    roots: bool,
    loaded_wide: bool,
) -> StateTypes:
    if precision in ("fp32", "tf32"):
        working, master, gradient, moments, wire = float(FP32), 0.0, 4.0, 8.0, 4.0
    else:
        working, master = float(types.working), float(types.master)
        gradient, moments, wire = float(types.gradient), float(types.moments), float(types.wire)
        if narrow or precision == "fp16":
            gradient = 2.0 if narrow else float(types.fp16_gradient)
            wire = min(wire, gradient)
    frozen = PACKED_BYTES.get(weights, working)
    scales = BLOCK_SCALES.get(weights, types.scales if weights == "nf4" else 0.0)
    fresh = float(types.fresh_gradients) if gradient != working else 0.0
    return StateTypes(
        working=working,
        frozen=1.0 if narrow else frozen,
        frozen_stored=1.0 if narrow else max(frozen, master) if loaded_wide else frozen,
        scales=0.0 if narrow else scales,
        master=master,
        gradient=gradient,
        fresh=fresh,
        moments=moments if own_moments is None else own_moments,
        wire=wire,
        unit=unit,
        by_tensor=by_tensor,
        flattens=flattens and not fresh,
        roots=roots,
    )


def moments_bytes(optimizer: Optimizer, adamw: float, *, matrices: bool) -> float | None:
    """Return the bytes of an optimizer's state for each parameter; None where they are AdamW's.

    `adamw` are those of both of its moments in a framework, `matrices` whether Muon updates the
    parameters: embedding and output projection are AdamW's.  Adafactor has a row and a column of
    each matrix, which is next to nothing.

    >>> moments_bytes("adamw-8bit", 8.0, matrices=True)
    2.03125
    """
    match optimizer:
        case "adamw":
            return None
        case "adamw-bf16":
            return 4.0
        case "adamw-8bit" | "adamw-8bit-paged":
            return 2 * (1 + FP32 / STATE_BLOCK)
        case "lion":
            return adamw / 2
        case "muon":
            return adamw / 2 if matrices else None
        case "adafactor" | "sgd":
            return 0.0
        case _:
            assert_never(optimizer)


def orthogonalized_flops(rows: float, columns: float) -> float:
    """Return the arithmetic of Muon's update of one matrix.

    A step of Newton-Schulz makes A = X X^T of the shorter side, A A and (b A + c A A) X.

    >>> orthogonalized_flops(2, 4) / 5
    80.0
    """
    short, long = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)


def updated_bytes(types: StateTypes, rule: OptimizerRule) -> float:
    """Return the memory traffic per parameter of one step of fused AdamW.

    Of a parameter p that is updated, its gradient g and its moments m:

        p + g + m read, p + m written    the update
        e written                        the working copy, in buffers; units make theirs as they
                                         gather
        g read                           the norm
        g read, g written                clipping, where every step clips
        g written                        zeroing, where buffers stay

    >>> from meshwright.planner.catalog import frameworks
    >>> [updated_bytes(state_types(frameworks()[name], "bf16"), frameworks()[name].optimizer)
    ...     for name in ("megatron", "native")]
    [38.0, 40.0]
    """
    p, g, m = types.stored_bytes, types.gradient, types.moments
    copy = types.working if types.master and types.unit == "buffer" else 0.0
    return 2 * (p + m) + copy + g * (2 + 2 * rule.clips + rule.zeroed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSharding:
    """Division of a layer's states, and when its gradients are reduced."""

    types: StateTypes
    zero: int
    shard: int
    """Ranks that divide the states."""
    data: int
    """Ranks that hold gradients of the same parameters, the shard degree included."""
    pipelined: bool
    accumulated: bool
    """A step has several micro-batches."""
    captured: bool = False
    """Passes are captured graphs, beside which nothing is reduced."""
    offload: Offload = "none"
    wire: GradientCompression = "full"
    prefetch: int = 0
    """Units that are asked for ahead of the one that runs."""
    reshard_after_forward: int | None = None
    """Ranks among which parameters are divided between forward and backward; None: `shard`."""
    versions: int = 1
    """Copies of the parameters: twice where a pipeline never drains."""
    narrow: bool = False
    """True if ZeRO-3 gathers blocks in 8 bits, experts aside."""
    gathers_before: bool = True
    """The next of FSDP1's units is gathered before a unit's gradients are made."""
    syncs_each: bool = True
    """FSDP1's units are reduced in every micro-batch; else in the last one alone."""
    leaves_frozen: bool = False
    """FSDP2's units have no frozen parameters that every rank has whole."""
    leaves_whole: bool = False
    """FSDP2 wraps nothing that every rank has whole."""

    @property
    def is_wrapped(self) -> bool:
        """True if FSDP2 wraps the layer.

        It does for divided states and for parameters on the host; in some frameworks also for mixed
        precision and sums in 16 bits.
        """
        if self.types.unit == "buffer":
            return False
        if self.leaves_whole:
            return self.offload == "parameters" or self.is_sharded
        needed = self.is_mixed or self.offload == "parameters"
        return needed or (self.data > 1 and (self.is_sharded or self.wire in ("bf16", "fp16")))

    @property
    def has_buckets(self) -> bool:
        """True if whole gradients, which FSDP2 does not wrap, lie in buckets of several."""
        apart = self.wire == "powersgd"  # the optimizer's step makes their mean
        return self.leaves_whole and self.data > 1 and not (self.is_wrapped or apart)

    @property
    def is_mixed(self) -> bool:
        """True if passes compute in another type than that of the parameters that are trained."""
        return self.types.working != self.types.stored_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes of a gradient in its reduction, where it is not of low rank."""
        match self.wire:
            case "bf16" | "fp16":
                return 2.0
            case "full" | "powersgd":
                return self.types.wire
            case _:
                assert_never(self.wire)

    @property
    def is_sharded(self) -> bool:
        """True if states are divided at all."""
        return self.zero > 0 and self.shard > 1

    @property
    def gathers_again(self) -> bool:
        """True if parameters are freed between a layer's forward and backward.

        Those on the host are, whatever the ZeRO level (runtime/parallel/data_parallel.py,
        `gathers_anew`).
        """
        return (self.is_sharded and self.zero == 3) or self.comes_from_host

    @property
    def has_whole_frozen(self) -> bool:
        """True if every rank has frozen parameters whole and uses them where they are.

        Nothing updates them, so that no shard of them has to be gathered before a step.
        """
        if self.types.unit == "buffer":
            return self.zero < 3
        if self.gathers_again or not self.is_wrapped:
            return not self.gathers_again
        return self.leaves_frozen or not self.is_sharded

    @property
    def between(self) -> int | None:
        """Among how many ranks a unit's parameters are divided between its forward and backward.

        None where they are as between steps.
        """
        return self.reshard_after_forward if self.gathers_again and not self.pipelined else None

    @property
    def pipelined_units(self) -> bool:
        """True if gradients wait for a pipeline's last backward, and what a backward gathered stays
        until the next forward, table's note (3): a pipeline's step keeps FSDP's units."""
        return self.pipelined and self.types.unit != "buffer"

    @property
    def reduces_each_micro_batch(self) -> bool:
        """True if a step reduces gradients several times, in every micro-batch's backward.

        With a single one ZeRO-2 is ZeRO-1, to the last bit.
        """
        each = self.syncs_each and not self.pipelined_units
        leaves = self.is_sharded and self.zero >= 2
        leaves = leaves or (self.comes_from_host and self.data == self.shard)
        return leaves and self.accumulated and each

    @property
    def comes_from_host(self) -> bool:
        """True if FSDP2's units fetch their parameters from the host for every pass."""
        return self.offload == "parameters" and self.types.unit == "layer"

    @property
    def copies_directly(self) -> bool:
        """True if a rank alone copies them straight into place, without a collective's buffers.

        Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, wait_for_unshard
        with a group of one rank.
        """
        return self.comes_from_host and not self.is_sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLayer:
    """Differences of the layer with the loss, whose backward comes first."""

    before: float
    """Parameters of the layer before it, which its backward asks for ahead."""
    logits: bool
    """All of them are made, and when the loss runs the layer's parameters have been let go of."""
    kept: bool = False
    """Its gathered copy stays until its backward, and so does the buffer that it came in."""
    holds_gradient: bool = False
    """The gradient of its weight waits since forward, and is among what the layer stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayer:
    """Differences of the first layer, whose backward comes last."""

    behind: float
    """Parameters of the layer behind it, which is reduced while its backward runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one layer on one rank."""

    parameters_bytes: float
    gathered_bytes: float
    """Copies that a pipeline's backward gathers while activations go, note (3)."""
    gradients_bytes: float
    optimizer_bytes: float
    forward_transient_bytes: float
    backward_transient_bytes: float
    host_bytes: float = 0.0
    bucket_bytes: float = 0.0
    """Bytes of the largest moments on the host that come to the device together."""
    after_backward_bytes: float = 0.0
    """Bytes left when the layer's own working memory is gone: its gradients on their way."""
    waiting_gradients: float = 0.0
    """1 if fresh gradients of weights wait for the end of the layer's backward, else 0."""
    gradient_buffers_bytes: float = 0.0
    """Bytes of gradients that are there from the start, however much of them has been made."""
    between_bytes: float = 0.0
    """Bytes of parameters that stay from a layer's forward to its backward."""
    flat_bytes: float = 0.0
    """Bytes of gradients that the optimizer's step copies, beyond those that it lets go of."""
    joined_bytes: float = 0.0
    """Bytes of these copies in tensors larger than any that was freed before them, for which the
    allocator reserves anew."""

    @property
    def resident_bytes(self) -> float:
        """Bytes that stay for the whole step."""
        whole = self.parameters_bytes + self.gathered_bytes
        gradients = self.gradients_bytes + self.gradient_buffers_bytes
        return whole + gradients + self.optimizer_bytes

    def __add__(self, other: States) -> States:
        """Both together, as one unit."""
        return States(
            parameters_bytes=self.parameters_bytes + other.parameters_bytes,
            gathered_bytes=self.gathered_bytes + other.gathered_bytes,
            gradients_bytes=self.gradients_bytes + other.gradients_bytes,
            optimizer_bytes=self.optimizer_bytes + other.optimizer_bytes,
            forward_transient_bytes=self.forward_transient_bytes + other.forward_transient_bytes,
            backward_transient_bytes=self.backward_transient_bytes + other.backward_transient_bytes,
            host_bytes=self.host_bytes + other.host_bytes,
            bucket_bytes=max(self.bucket_bytes, other.bucket_bytes),
            after_backward_bytes=self.after_backward_bytes + other.after_backward_bytes,
            waiting_gradients=max(self.waiting_gradients, other.waiting_gradients),
            gradient_buffers_bytes=self.gradient_buffers_bytes + other.gradient_buffers_bytes,
            between_bytes=self.between_bytes + other.between_bytes,
            flat_bytes=self.flat_bytes + other.flat_bytes,
            joined_bytes=self.joined_bytes + other.joined_bytes,
        )


def padded_parameters(parameters: float, pieces: int, shard: int) -> float:
    """Return parameters with what FSDP adds to divide them along a dim of `pieces`.

    It gives each of `shard` ranks ceil(pieces / shard) of them, so that ranks hold more than their
    share, and what is gathered has all ranks' pieces.  Source: torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param.py (padded_sharded_param_size).

    >>> padded_parameters(8e9, pieces=8, shard=16) / 16
    1000000000.0
    """
    return parameters * -(-pieces // shard) * shard / pieces


def states(
    parameters: float,
    sharing: StateSharding,
    *,
    largest: float = 0.0,
    factors: float = 0.0,
    pieces: int = 0,
    end: LastLayer | FirstLayer | None = None,
) -> States:
    """Return the bytes of a layer with this many parameters on the rank; the table is above.

    `largest` is its largest single parameter, whose fresh gradient waits to be added where FSDP2
    does not hold it; `factors` are the elements of its gradients' low-rank factors.  Its
    parameters are divided into `pieces` at most, 0 being as many as one likes.  `end` says what is
    different of the first and the last layer.  In buffers `largest` alone counts.

    >>> from meshwright.planner.catalog import native
    >>> eight = StateSharding(types=state_types(native(), "bf16"), zero=3, shard=8, data=8,
    ...     pipelined=False, accumulated=True)
    >>> states(8e9, eight).resident_bytes / 8e9 * 8
    16.0
    """
    types, d = sharing.types, sharing.shard if sharing.is_sharded else 1
    if types.unit == "buffer":
        return _buffers(parameters, sharing, largest)
    n, e = parameters, types.working
    moments, on_host = types.moments * n / d, 0.0
    match sharing.offload:
        case "optimizer":
            moments, on_host = 0.0, moments
        case "none" | "parameters":  # moments on the host go with the parameters, below
            pass
        case _:
            assert_never(sharing.offload)
    bucket = max(BUCKET_BYTES, types.moments * min(largest, n) / d) if on_host else 0.0
    if not sharing.is_wrapped:
        if sharing.wire == "powersgd":
            moments += FP32 * (n + factors)
        added = sharing.accumulated or sharing.data > 1 or sharing.is_mixed
        fresh = e * largest if added and not _holds_gradient(end) else 0.0
        apart = isinstance(end, LastLayer) and end.logits
        return States(
            parameters_bytes=sharing.versions * (types.stored_bytes + e * sharing.is_mixed) * n,
            gathered_bytes=0.0,
            gradients_bytes=types.gradient * n,
            optimizer_bytes=moments,
            forward_transient_bytes=0.0,
            backward_transient_bytes=0.0 if apart else fresh,
            after_backward_bytes=fresh if apart else 0.0,
            host_bytes=on_host,
            bucket_bytes=bucket,
            flat_bytes=roots_bytes(types, sharing, types.moments * n),
        )
    once = sharing.pipelined or sharing.accumulated
    whole_gradients = not sharing.reduces_each_micro_batch and (once or not sharing.is_sharded)
    whole = padded_parameters(n, pieces, d) if pieces and sharing.is_sharded else n
    moments, on_host, bucket = (
        size * whole / n if n else 0.0 for size in (moments, on_host, bucket)
    )
    gathered = (NARROW if sharing.narrow else e) * whole if sharing.gathers_again else 0.0
    masters = types.stored_bytes * whole / d
    gradients = types.gradient * (n if whole_gradients else whole / d)
    arriving = 0.0
    if sharing.offload == "parameters":
        on_host = (types.stored_bytes + types.gradient + types.moments) * whole / d
        moments = masters = 0.0
        arriving = _arriving(largest if sharing.copies_directly else whole / d, types)
        gradients = gradients if whole_gradients and once else 0.0
    if sharing.wire == "powersgd":
        moments += FP32 * (n + factors)
    # A head's shard comes from the host before logits are made.
    at_loss = 0.0 if isinstance(end, LastLayer) and end.logits else arriving
    at_end = None if sharing.pipelined else end
    ahead = _gathered_ahead(gathered, sharing, at_end, gathered / whole if whole else 0.0)
    fresh = 0.0 if _holds_gradient(end) else e * n
    behind, after = _reductions(fresh, whole, sharing, end, summed=once and whole_gradients)
    beside = behind + ahead.backward
    if isinstance(end, LastLayer) and end.logits:
        after = max(after, fresh + (2 * gathered if sharing.pipelined else ahead.backward))
        beside = 2 * gathered if end.kept and not sharing.pipelined else 0.0
        ahead = ahead._replace(forward=0.0)
    else:
        after = max(after, fresh + beside)
        beside += fresh if isinstance(end, LastLayer) else 0.0  # chunks add to it from the first on
    if isinstance(end, FirstLayer) and sharing.reduces_each_micro_batch:
        # What the reduction of the micro-batch before reads (runtime/parallel/data_parallel.py).
        ahead = ahead._replace(forward=ahead.forward + sharing.wire_bytes * whole)
    return States(
        parameters_bytes=sharing.versions * (masters + (0.0 if gathered else e * whole)),
        gathered_bytes=gathered if sharing.pipelined else 0.0,
        gradients_bytes=gradients,
        optimizer_bytes=moments,
        forward_transient_bytes=ahead.forward + at_loss,
        backward_transient_bytes=beside + at_loss,
        host_bytes=on_host,
        bucket_bytes=bucket,
        flat_bytes=roots_bytes(types, sharing, types.moments * whole / d),
        between_bytes=ahead.between,
        after_backward_bytes=after + arriving,
        waiting_gradients=0.0 if isinstance(end, LastLayer) else 1.0,
    )


def roots_bytes(types: StateTypes, sharing: StateSharding, moments: float) -> float:
    """Return bytes of the square roots of second moments, half of both, that the step has at once.

    torch.optim.adamw, _multi_tensor_adamw: exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs), a
    tensor beside each second moment until all parameters are updated.  So 7.24e9 parameters, all
    states in 16 bits on one device, take 10 bytes each and not 8: 67.4 GiB.
    """
    return moments / 2 if types.roots and sharing.offload == "none" else 0.0


def _reductions(
    fresh: float,
    whole: float,
    sharing: StateSharding,
    end: LastLayer | FirstLayer | None,
    *,
    summed: bool,
) -> tuple[float, float]:
    """Return bytes of the reduction beside a layer's backward, and of its own with fresh gradients.

    A reduction reads `whole` elements; while a layer works that of the layer behind it is under
    way, about as large.  With sums over micro-batches fresh gradients are in the sum by then.
    """
    wire = 0.0 if sharing.pipelined else sharing.wire_bytes
    if summed:
        return 0.0, wire * whole
    behind = whole
    if end is not None and not sharing.pipelined:
        behind = end.behind if isinstance(end, FirstLayer) else 0.0
    return wire * behind, fresh + wire * whole


class _GatheredBytes(NamedTuple):
    """Bytes of gathered parameters: working ones of both passes, and what stays between them."""

    forward: float
    backward: float
    between: float


def _holds_gradient(end: LastLayer | FirstLayer | None) -> bool:
    return isinstance(end, LastLayer) and end.holds_gradient


def _arriving(parameters: float, types: StateTypes) -> float:
    """Return bytes on the device of parameters that come from the host, before and after a cast."""
    return (
        types.stored_bytes + (types.working if types.working != types.stored_bytes else 0.0)
    ) * parameters


def _gathered_ahead(
    gathered: float,
    sharing: StateSharding,
    end: LastLayer | FirstLayer | None = None,
    each: float = 0.0,
) -> _GatheredBytes:
    """Return what a unit of G gathered bytes contains of its own and of those asked for ahead.

    With A bytes asked for ahead and k ranks that divide it between its passes:

        forward     2 G + A            it, the buffer that it came in, and those ahead
        backward    G + A              it and those ahead
        between     G / k              from forward to backward

    Of depth p of prefetching (p = 0 acts like 1) A = p G.  Nothing is ahead of the last unit in
    forward, nor of the first one in backward; elsewhere p units of their neighbour's parameters,
    of `each` gathered bytes, are.  When a unit's gradients are reduced the next one runs, so that
    nothing of both is left; with k = 1 they are there as a whole, and backward gathers nothing.
    Counted on tensors without data (`benchmarks.rehearsal`).
    """
    if sharing.copies_directly:
        return _GatheredBytes(gathered, gathered, 0.0)
    depth, ranks = max(1, sharing.prefetch), sharing.between
    forward = backward = depth * gathered
    match end:
        case FirstLayer():
            forward, backward = depth * each * end.behind, 0.0
        case LastLayer():
            forward, backward = 0.0, depth * each * end.before
    if ranks is None:
        return _GatheredBytes(2 * gathered + forward, gathered + backward, 0.0)
    between = gathered / ranks
    if ranks == 1:
        return _GatheredBytes(gathered + forward, -between if end is None else 0.0, between)
    stayed = 2 * between if end is None else (gathered + backward) / ranks
    return _GatheredBytes(2 * gathered + forward, gathered + backward - stayed, between)


def _buffers(n: float, sharing: StateSharding, largest: float) -> States:
    """Return a layer's bytes in buffers; with the optimizer on the host masters are there too.

    From ZeRO-2 on so are gradients, as they are reduced (Ren et al., 2021, ZeRO-Offload).  Under
    ZeRO-3 its copy and the next one's are there while it works, and the reduction's input; where
    each tensor is gathered by itself, and let go of by its module, those of the `largest`.

    DeepSpeed's step copies a shard's gradients of g bytes to a flat tensor and this to one in fp32:
    (g + 4) N/d, or g N/d where they are fp32.  Before that ZeRO-1 lets go of all but the shard's,
    g N (1 - 1/d) (runtime/zero/stage_1_and_2.py, step; runtime/zero/stage3.py,
    _prepare_fp32_grad_for_sub_group).
    """
    types, zero = sharing.types, sharing.zero
    d = sharing.shard if sharing.is_sharded else 1
    parameters = types.stored_bytes * n / d if zero == 3 else types.working * n
    gradients = types.gradient * n / (d if zero >= 2 else 1) + types.fresh * n
    optimizer = ((0.0 if zero == 3 else types.master) + types.moments) * n / d
    flat = joined = 0.0
    if types.flattens and sharing.offload == "none":
        g = types.gradient
        joined = (g + (FP32 if g != FP32 else 0.0)) * n / d
        flat = joined - (g * n * (1 - 1 / d) if zero < 2 else 0)
    flat += roots_bytes(types, sharing, types.moments * n / d)
    on_host = 0.0
    match sharing.offload:
        case "none":
            pass
        case "optimizer":
            on_host, optimizer = optimizer, 0.0
            if zero >= 2:
                on_host, gradients = on_host + gradients, 0.0
        case "parameters":
            on_host, parameters = parameters + optimizer, types.working * n * (zero < 3)
            optimizer = 0.0
            if zero >= 2:
                on_host, gradients = on_host + gradients, 0.0
        case _:
            assert_never(sharing.offload)
    together = min(n, largest) if types.by_tensor and largest else n
    gathered = 2 * types.working * together if sharing.gathers_again else 0.0
    reduced = sharing.wire_bytes * together if sharing.gathers_again else 0.0
    return States(
        parameters_bytes=sharing.versions * parameters,
        gathered_bytes=0.0,
        gradients_bytes=0.0,
        optimizer_bytes=optimizer,
        forward_transient_bytes=gathered,
        backward_transient_bytes=gathered + reduced,
        host_bytes=on_host,
        gradient_buffers_bytes=gradients,
        flat_bytes=flat,
        joined_bytes=joined if zero < 3 else 0.0,
    )


def in_root(held: States, shared: float, sharing: StateSharding) -> States:
    """Return a layer's bytes under ZeRO-3 whose matrix of `shared` parameters another one uses.

    FSDP2 wraps what layers share in its root, and the root is gathered from before the first layer
    until the backward ends; autograd keeps the gradient of the later use until the earlier one's
    has come.  So a copy and a gradient, e N each, are there beside all other layers, and no more
    come while the layer itself runs; what is there after its backward has that gradient in it.
    """
    copy = sharing.types.working * shared
    return replace(
        held,
        parameters_bytes=held.parameters_bytes + copy,
        gradients_bytes=held.gradients_bytes + copy,
        forward_transient_bytes=held.forward_transient_bytes - 2 * copy,
        backward_transient_bytes=held.backward_transient_bytes - 2 * copy,
        after_backward_bytes=max(0.0, held.after_backward_bytes - copy),
    )


def frozen_states(parameters: float, sharing: StateSharding) -> States:
    """Return what a layer's frozen parameters hold: no gradients and no optimizer state.

    They are stored in the type of the computation, or narrower, e bytes each
    (runtime/techniques/lora.py):

        ZeRO-0                 e N
        ZeRO-1 and 2           e N, as nothing updates them; where FSDP2 divides them e N/d + e N
        FSDP, loaded in fp32   4 N/d + e N, below ZeRO-3
        ZeRO-3                 e N/d or 4 N/d, and while a unit works what trained ones need too

    With parameters on the host the shard is there, and comes as it is.  Scales of 4-bit weights are
    attributes of modules: no rank shares them, and none has them on the host.

    >>> from meshwright.planner.catalog import native
    >>> eight = StateSharding(types=state_types(native(), "bf16"), zero=3, shard=8, data=8,
    ...     pipelined=False, accumulated=True)
    >>> frozen_states(8e9, eight).resident_bytes / 8e9 * 8
    2.0
    """
    n, e, d = parameters, sharing.types.frozen, sharing.shard if sharing.is_sharded else 1
    s, gathered = sharing.types.frozen_stored, 0.0
    if sharing.has_whole_frozen and s == e:
        held = e * n
    elif sharing.types.unit == "buffer":
        held = e * n / d
    else:
        gathered = e * n if sharing.gathers_again else 0.0
        held = s * n / d + (0.0 if gathered else e * n)
    on_host = s * n / d if sharing.offload == "parameters" else 0.0
    ahead = _gathered_ahead(gathered, sharing)
    return States(
        parameters_bytes=held - on_host + sharing.types.scales * n,
        gathered_bytes=gathered if sharing.pipelined else 0.0,
        gradients_bytes=0.0,
        optimizer_bytes=0.0,
        forward_transient_bytes=ahead.forward + on_host,
        backward_transient_bytes=ahead.backward + on_host,
        host_bytes=on_host,
        between_bytes=ahead.between,
    )
