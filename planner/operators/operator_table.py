"""Operators of a layer on one rank, and the tensors between them.

A table lists operators in forward order with their FLOPs, the bytes they move through memory or
over links, the tensors they make and the tensors that their backward needs.  Shapes are local: one
rank, one micro-batch, after tensor, context and expert parallelism.  Stored bytes under a recompute
choice, and a layer's working memory beyond these, are computed from the table by following every
tensor from its birth to its last use.

`planner.operators.layer_operators` lists the operators of a transformer; seconds are in
`meshwright.planner.costs.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, assert_never, cast

import numpy as np

from meshwright.planner.operators.kernels import MODULES, KernelSettings

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import Collective, Precision
    from meshwright.planner.documents.framework import SelectiveRecompute
    from meshwright.planner.documents.framework_space import RecomputeModule
    from meshwright.planner.documents.plan import Dispatch, Scales
    from meshwright.planner.documents.profile import ChunkedLoss, Recompute
    from meshwright.planner.operators.expert_routing import Routing

OperatorKind = Literal[
    "matmul", "attention", "memory", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
]
Pass = Literal["forward", "backward"]
GroupAxis = Literal[
    "tensor", "context", "expert", "expert_tensor", "experts_across", "experts_inside"
]
"""Group of ranks of a collective.  Experts also have the groups of ranks that a token is sent to
once (`experts_across`), and of those that pass it on among themselves (`experts_inside`)."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
KEPT_BY_SELECTIVE: frozenset[OperatorKind] = frozenset(
    {"matmul", "attention", "reduce_scatter", "all_to_all"}
)
"""Kinds of operators whose outputs selective recompute keeps; all others run a second time in
backward."""

UP_FROM_LATENTS = frozenset({"q_linear", "kv_up", "rotary", "q_latent", "kv_latent"})
"""Operators of Megatron-LM's module mla_up_proj, which exists only in families with latents."""
_WITHOUT_OUTPUT = ("act", "layernorm", "mla-up-proj", "moe-act")
"""Modules whose outputs are not kept (Megatron Core, CheckpointWithoutOutput)."""
_BESIDE_ACTIVATION = ("norm", "post_norm", "residual", "gather", "scatter", "sum")
"""Suffixes of the names of a feed-forward's operators that move bytes and are no activation."""
_BEHIND_MLP = ("residual", "post_norm")
"""Suffixes of the names of a block's operators after its MLP."""

BACKWARD_OF: dict[str, Collective] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}
"""Collective of the backward of each communication operator."""

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Division of a layer, shape of one micro-batch, and kernels that run.

    Comparisons of settings ignore the kernels, which come from one framework there.
    """

    micro_batch: float
    seq_len: int
    precision: Precision = "bf16"
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that divide each expert, where experts are on several."""
    sequence_parallel: bool = True
    """Tensor parallelism divides the residual stream along the sequence."""
    loss: ChunkedLoss | None = None
    """Chunks of the head's loss; None: the loss is computed from all logits."""
    gathers_heads: bool = False
    """True if there are fewer heads of keys than tensor ranks: outputs of their projection are
    gathered, and each rank takes its own."""
    compiled: bool = False
    """Blocks are compiled, each as one graph."""
    captured: bool = False
    """The host starts a micro-batch's kernels together, as one captured graph."""
    overlaps_tensors: bool = False
    """Collectives between tensor-parallel ranks run in pieces beside the products around them."""
    document_len: int | None = None
    """Mean over tokens of the length of their document, in tokens; None: samples are not
    divided."""
    scales: Scales = "tensorwise"
    """Scales of the operands of 8-bit products."""
    dispatch: Dispatch = "alltoall"
    """Exchange of tokens with experts on other ranks."""
    hierarchical_all_to_all: int = 0
    """Number of ranks that pass on tokens sent to them once; 0: each token is sent to each of its
    experts."""
    narrow_weights: bool = False
    """True if weights of Linears arrive in 8 bits."""
    kernels: KernelSettings = field(default=MODULES, compare=False)

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch inside the tensor-parallel regions of a rank."""
        return self.micro_batch * self.seq_len / self.context

    @property
    def attended_len(self) -> int:
        """Mean over tokens of the number of tokens that attention treats as one sequence."""
        return self.seq_len if self.document_len is None else self.document_len

    @property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream on a rank: sequence parallelism divides them further."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens

    @property
    def branches(self) -> tuple[bool | int | str, ...]:
        """Properties that change which operators a layer has, and not only their figures."""
        return (
            self.divides_tensors,
            self.divides_sequence,
            self.spreads_experts,
            self.is_batched,
            self.sequence_parallel,
            0 if self.loss is None else self.loss.rows,
            self.loss is not None and self.loss.gradients == "recomputed",
            self.compiled,
            self.captured,
            self.overlaps_tensors,
            self.gathers_heads,
            self.scales,
            self.narrow_weights,
            self.dispatch == "allgather",
            self.relays,
            self.divides_experts,
        )

    @property
    def divides_tensors(self) -> bool:
        """True if tensor parallelism divides the layer."""
        return self.tensor > 1

    @property
    def divides_sequence(self) -> bool:
        """True if context parallelism divides the sequence."""
        return self.context > 1

    @property
    def spreads_experts(self) -> bool:
        """True if experts are on several ranks."""
        return self.expert > 1

    @property
    def divides_experts(self) -> bool:
        """True if experts are on several ranks and several ranks divide each expert."""
        return self.expert > 1 and self.expert_tensor > 1

    @property
    def relays(self) -> bool:
        """True if tokens are sent once to ranks that pass them on."""
        return self.hierarchical_all_to_all > 0

    @property
    def is_batched(self) -> bool:
        """True if a micro-batch has several samples."""
        return self.micro_batch > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ManySettings(Setting):
    """Settings that differ in figures alone: every operator of their table has arrays [setting].

    Its integers are arrays too.  A table is built by arithmetic on them, and branches only on the
    properties below; so one pass over the operators of a layer serves thousands of settings.
    """

    taken: tuple[bool | int | str, ...]

    @classmethod
    def framework(cls, settings: Sequence[Setting]) -> ManySettings:
        """Return settings of one sequence, one precision and the same branches as one."""
        some = settings[0]
        assert len({(s.seq_len, s.precision, s.branches) for s in settings}) == 1

        def column(name: str) -> int:
            return cast(int, np.array([getattr(s, name) for s in settings], dtype=float))

        return cls(
            micro_batch=column("micro_batch"),
            seq_len=some.seq_len,
            precision=some.precision,
            tensor=column("tensor"),
            context=column("context"),
            expert=column("expert"),
            expert_tensor=column("expert_tensor"),
            sequence_parallel=some.sequence_parallel,
            gathers_heads=some.gathers_heads,
            compiled=some.compiled,
            captured=some.captured,
            overlaps_tensors=some.overlaps_tensors,
            loss=some.loss,
            document_len=some.document_len,
            scales=some.scales,
            narrow_weights=some.narrow_weights,
            dispatch=some.dispatch,
            hierarchical_all_to_all=column("hierarchical_all_to_all"),
            kernels=some.kernels,
            taken=some.branches,
        )

    @property
    def divides_tensors(self) -> bool:
        """True if tensor parallelism divides the layer."""
        return bool(self.taken[0])

    @property
    def divides_sequence(self) -> bool:
        """True if context parallelism divides the sequence."""
        return bool(self.taken[1])

    @property
    def spreads_experts(self) -> bool:
        """True if experts are on several ranks."""
        return bool(self.taken[2])

    @property
    def divides_experts(self) -> bool:
        """True if several ranks divide each expert."""
        return bool(self.taken[-1])

    @property
    def relays(self) -> bool:
        """True if tokens are sent once to ranks that pass them on."""
        return bool(self.taken[-2])

    @property
    def is_batched(self) -> bool:
        """True if a micro-batch has several samples."""
        return bool(self.taken[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One step of a layer's forward pass on one rank.

    For communication `moved_bytes` is the size in the sense of nccl-tests: gathered output,
    scattered input, reduced buffer; a backward's size differs in all-to-alls alone, which have
    `backward_moved_bytes`.
    """

    name: str
    kind: OperatorKind
    inputs: tuple[str, ...]
    outputs: dict[str, float]
    """Bytes of each output tensor."""
    saved: tuple[str, ...] = ()
    """Tensors that its backward needs."""
    flops: float = 0.0
    moved_bytes: float = 0.0
    backward_moved_bytes: float = 0.0
    kernels: float = 1
    workspace_bytes: float = 0.0
    """Bytes that exist only inside the operator, beside its outputs."""
    holds: tuple[str, ...] = ()
    """Tensors that a variable of the caller keeps alive until the operator is done."""
    copied_bytes: float = 0.0
    """Memory traffic of a communication that must reorder its buffers, one direction."""
    axis: GroupAxis = "tensor"
    fp32: tuple[str, ...] = ()
    """Outputs in fp32, whatever the precision."""
    weights: float = 0.0
    """Elements of the matrices that a product multiplies by."""
    frozen: bool = False
    """True if a product's weights have no gradient, so that its backward has one product."""
    remade: bool = False
    """True if the backward begins with the forward, whatever the layer recomputes."""
    share: float = 1.0
    """Rate over that of one product of the same size."""
    routing: Routing | None = None
    """Routing of an exchange that sends each token once to every node and rank with some of its
    experts; `moved_bytes` are then those of one copy of each token."""
    beside_shared: bool = False
    """True if a framework can compute the shared experts during an exchange."""
    only: Pass | None = None
    """The only pass in which a collective runs; None: both."""
    ring: bool = False
    """True if a gather goes round the ranks while its result is used; the backward goes round
    twice, once with gradients."""
    aligned: bool = True
    """True if a product's dimensions are multiples of those that 8-bit kernels take."""
    wide: bool = False
    """True if gathered values are needed in 16 bits, whatever the type of products."""
    waits: bool = False
    """True if nothing hides a collective and no pass repeats it."""
    in_core: bool = False
    """True for written-out attention between its projections: scores, softmax, dropout, values."""

    @property
    def communicates(self) -> bool:
        """True if the operator moves bytes over links."""
        return self.kind in BACKWARD_OF


R = TypeVar("R")


def known_by_choice(
    method: Callable[[OperatorTable, Recompute], R],
) -> Callable[[OperatorTable, Recompute], R]:
    """Keep what a method of a table returns for each choice, which nobody may change."""
    name = f"_known_{method.__name__}"

    @wraps(method)
    def result_of(table: OperatorTable, recompute: Recompute) -> R:
        results: dict[Recompute, R] = table.__dict__.setdefault(name, {})
        if recompute not in results:
            results[recompute] = method(table, recompute)
        return results[recompute]

    return result_of


class BackwardMoment(NamedTuple):
    """The backward of one operator of a table."""

    place: int
    """Place of the operator in forward order."""
    live_bytes: float
    """Gradients of activations, and what it reads."""
    gone: list[float]
    """Bytes of the gradients that it is the last to read."""
    read_last: list[str]
    """Saved tensors that no later backward reads."""


@dataclass(frozen=True)
class OperatorTable:
    """The operators of one layer in forward order, and the tensors between them."""

    kind: str
    operators: tuple[Operator, ...]
    input_bytes: float
    """Bytes of the activation that enters the layer, the tensor `x`."""
    output: str
    outside: int = 0
    """Number of trailing operators, those of the loss, that are not the layer's own and never
    recomputed."""
    selective: SelectiveRecompute = "outputs"
    """Tensors that selective recompute drops: see `planner.documents.framework.RecomputeRule`."""
    modules: tuple[RecomputeModule, ...] = ()
    """Modules that selective recompute of `modules` recomputes."""
    early_stop: bool = True
    """Recomputation stops when the last tensor that backward needs is there again."""
    keeps_needed: bool = False
    """True if only those of the kept outputs are saved that backward needs: a compiler knows them
    before the first step."""
    backward_peak: float | None = None
    """Peak bytes inside backward of a traced layer, including its output's gradient; None: computed
    from the operators."""

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bytes of every tensor by name."""
        result = {"x": self.input_bytes}
        for operator in self.operators:
            result |= operator.outputs
        return result

    @property
    def output_bytes(self) -> float:
        """Bytes that leave the layer."""
        return self.sizes[self.output]

    @property
    def returned_bytes(self) -> float:
        """Bytes of what the layer's own operators return: logits, where the loss is outside."""
        if self.backward_peak is not None:  # what a traced layer keeps is among its outputs
            return self.output_bytes
        return sum(self._inside[-1].outputs.values())

    def returned_anew_bytes(self, recompute: Recompute) -> float:
        """Bytes of what the layer's own operators return that backward does not keep anyway."""
        if self.backward_peak is not None:
            return self.output_bytes
        stored = self.stored_tensors(recompute)
        returned = self._inside[-1].outputs.items()
        return sum((size for name, size in returned if name not in stored), 0.0)

    @property
    def forward_flops(self) -> float:
        """FLOPs of one forward pass."""
        return sum(operator.flops for operator in self.operators)

    @known_by_choice
    def recomputed_operators(self, recompute: Recompute) -> tuple[Operator, ...]:
        """Return the operators that run a second time in backward."""
        match recompute:
            case "none":
                return ()
            case "full":
                return self._inside[: self._needed_again]
            case "selective":
                if self.selective == "attention":
                    return tuple(op for op in self._inside if op.in_core)
                if self.selective == "modules":
                    return self._of_modules
                again = self._inside[: self._needed_again]
                kept = self._kept_outputs
                return tuple(op for op in again if op.name not in kept)
            case _:
                assert_never(recompute)

    @known_by_choice
    def stored_tensors(self, recompute: Recompute) -> dict[str, float]:
        """Return name and bytes of the tensors saved for backward."""
        match recompute:
            case "none":
                names = _saved_tensors(self.operators)
            case "full" | "selective":
                names = {"x"} | (_saved_tensors(self._outside) - _outputs(self._inside))
                if recompute == "selective" and self.selective == "modules":
                    names = self._stored_beside_modules
                elif recompute == "selective" and self.selective == "attention":
                    core = [op for op in self._inside if op.in_core]
                    names = _saved_tensors(self.operators) - (_outputs(core[:-1]))
                elif recompute == "selective":
                    kept = self._kept_outputs
                    kept_outputs = _outputs(op for op in self._inside if op.name in kept)
                    names |= (
                        kept_outputs & self._asked_for(kept_outputs)
                        if self.keeps_needed
                        else kept_outputs
                    )
            case _:
                assert_never(recompute)
        # Sorted: sums in the order of a set differ in the last bits from run to run.
        return {name: self.sizes[name] for name in sorted(names)}

    def stored_bytes(self, recompute: Recompute) -> float:
        """Bytes saved for backward by one micro-batch in flight."""
        return sum(self.stored_tensors(recompute).values())

    def own_bytes(self, recompute: Recompute) -> float:
        """Bytes saved by the layer's own operators; what the loss saves stays where it is."""
        return sum(self._stored_by_layer(recompute).values())

    def _stored_by_layer(self, recompute: Recompute) -> dict[str, float]:
        beside = _saved_tensors(self._outside) - _saved_tensors(self._inside)
        return {n: size for n, size in self.stored_tensors(recompute).items() if n not in beside}

    def packable(self, recompute: Recompute, element_bytes: int) -> tuple[float, float]:
        """Return bytes and elements of the layer's own floating tensors; token ids are not."""
        wide = {name for operator in self.operators for name in operator.fp32}
        sizes = self._stored_by_layer(recompute)
        if self.kind == "embedding":
            sizes.pop("x", None)
        elements = sum(
            size / (FP32 if name in wide else element_bytes) for name, size in sizes.items()
        )
        return sum(sizes.values()), elements

    def forward_transient_bytes(self, recompute: Recompute) -> float:
        """Peak inside forward above what is stored at its end, beyond the layer's output."""
        stored = self.stored_tensors(recompute)
        last_use = {n: i for i, op in enumerate(self.operators) for n in (*op.inputs, *op.holds)}
        dying: list[list[str]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for name in operator.outputs:
                if name != self.output and name not in stored:
                    dying[last_use.get(name, index)].append(name)
        alive = self.input_bytes
        peak = 0.0
        for operator, names in zip(self.operators, dying, strict=True):
            alive = alive + sum(operator.outputs.values())
            peak = larger(peak, alive + operator.workspace_bytes)
            for name in names:
                alive = alive - self.sizes[name]
        beyond = sum(size for name, size in stored.items() if name != self.output)
        held_input = 0.0 if "x" in stored else self.input_bytes
        return larger(0.0, peak - beyond - self.output_bytes - held_input)

    def backward_transient_bytes(
        self,
        recompute: Recompute,
        *,
        weight_bytes: float = 0.0,
        late: Collection[str] = (),
    ) -> float:
        """Peak inside backward above what was stored at its begin.

        Gradients of activations count, the output's included.  Those of weights count where an
        element has `weight_bytes`, from the product that makes them on.  Operators that are `late`
        make theirs another time, and keep what they need for it.  Recomputation starts when
        backward enters the layer's own operators.
        """
        if self.backward_peak is not None:
            return self.backward_peak + larger(0.0, self.recomputed_bytes(recompute))
        waits = {
            name for operator in self.operators if operator.name in late for name in operator.saved
        }
        inside, sizes = len(self._inside), self.sizes
        again = self.recomputed_bytes(recompute)
        freed = peak = left = 0.0
        for place, live_bytes, gone, read_last in self._backward_moments:
            operator = self.operators[place]
            back = again if place < inside else 0.0
            if operator.name not in late and not operator.frozen:
                left = left + weight_bytes * operator.weights
            peak = larger(peak, live_bytes + back + left - freed)
            if operator.name in late:
                for size in gone:
                    left = left + size
            freed += sum(sizes[name] for name in read_last if name not in waits)
        return peak

    @cached_property
    def _backward_moments(self) -> list[BackwardMoment]:
        """What each operator's backward has, in the order in which they run."""
        first_save: dict[str, int] = {}
        for index, operator in enumerate(self.operators):
            for name in operator.saved:
                first_save.setdefault(name, index)
        gradients = {self.output: self.output_bytes}
        moments = []
        for index in range(len(self.operators) - 1, -1, -1):
            operator = self.operators[index]
            if gradients.keys().isdisjoint(operator.outputs):
                continue
            live_bytes = (
                sum(self.sizes[name] for name in operator.inputs) + operator.workspace_bytes
            )
            live_bytes = sum(gradients.values()) + live_bytes
            gradients |= {name: self.sizes[name] for name in operator.inputs}
            gone = [gradients.pop(name, 0.0) for name in operator.outputs]
            read_last = [n for n in dict.fromkeys(operator.saved) if first_save[n] == index]
            moments.append(BackwardMoment(index, live_bytes, gone, read_last))
        return moments

    @known_by_choice
    def recomputed_bytes(self, recompute: Recompute) -> float:
        """Bytes that recomputation brings back beyond what is saved.

        Tensors that selective recompute saved and recomputation never reaches stay as well.
        """
        if recompute == "none":
            return 0.0
        kept = self.stored_tensors(recompute)
        needed = _saved_tensors(self.operators) | {"x"}
        passed = _outputs(self._inside[: self._needed_again]) - needed
        again = sum(self.sizes[name] for name in sorted(needed - kept.keys()))
        return again - sum(size for name, size in kept.items() if name in passed)

    @cached_property
    def _of_modules(self) -> tuple[Operator, ...]:
        """Operators of the modules that are recomputed, and copies of theirs in 8 bits."""
        return tuple(op for op in self._inside if op.name in self._module_by_operator)

    @cached_property
    def _module_by_operator(self) -> dict[str, RecomputeModule]:
        """The recomputed module that each operator of one belongs to, by the operator's name."""
        names = [op.name for op in self._inside]
        norms = [at for at, name in enumerate(names) if name.startswith("mlp_norm")]
        behind_norm = frozenset(names[norms[-1] + 1 :] if norms else ())
        whole: RecomputeModule = "moe" if "router" in names else "mlp"
        result: dict[str, RecomputeModule] = {}
        for op in self._inside:
            name = op.name.removesuffix("_narrow")
            first, _, last = name.partition("_")
            moves_bytes = op.kind == "memory" or name != op.name
            is_activation = moves_bytes and last not in _BESIDE_ACTIVATION
            is_of: dict[RecomputeModule, bool] = {
                "act": is_activation and first in ("mlp", "shared"),
                "core-attn": op.in_core,
                "layernorm": name.startswith(("attention_norm", "mlp_norm")),
                "mla-up-proj": "kv_up" in names and name in UP_FROM_LATENTS,
                whole: name in behind_norm and last not in _BEHIND_MLP,
                "moe-act": is_activation and first == "expert",
                "shared-experts": first == "shared" and last != "sum",
            }
            module = next((module for module in self.modules if is_of.get(module)), None)
            if module is not None:
                result[op.name] = module
        return result

    @property
    def _stored_beside_modules(self) -> set[str]:
        """Names of the tensors stored beside recomputed modules, whose inputs are among them.

        A module that is a checkpoint of its own keeps what others read of it.
        """
        again = self._of_modules
        places = {id(op) for op in again}  # operators of many settings at once are not comparable
        others = [op for op in self.operators if id(op) not in places]
        outputs = _outputs(again)
        needed = {name for op in again for name in (*op.inputs, *op.saved)} - outputs
        passed = {
            name
            for op in again
            if self._module_by_operator[op.name] not in _WITHOUT_OUTPUT
            for name in op.outputs
            if any(name in (*other.inputs, *other.saved) for other in others)
        }
        return (_saved_tensors(others) | needed) - (outputs - passed)

    @cached_property
    def _kept_outputs(self) -> frozenset[str]:
        """Names of the operators whose outputs selective recompute keeps.

        `operators` keeps attention's, every second product's and what was scattered.
        """
        if self.selective != "operators":
            return frozenset(op.name for op in self._inside if op.kind in KEPT_BY_SELECTIVE)
        products = [op.name for op in self._inside if op.kind == "matmul" and not op.in_core]
        others = [
            op.name
            for op in self._inside
            if op.kind in ("attention", "reduce_scatter") or (op.in_core and op.kind == "matmul")
        ]
        return frozenset((*products[::2], *others))

    def _asked_for(self, kept: set[str]) -> set[str]:
        """Return the tensors that backward reads, and those from which it makes what is not saved.

        None is looked for behind one of `kept`.
        """
        names: set[str] = set()
        waiting = _saved_tensors(self._inside)
        made_by = {name: op for op in self._inside for name in op.outputs}
        while waiting:
            name = waiting.pop()
            if name in names:
                continue
            names.add(name)
            if name not in kept and name in made_by:
                waiting |= set(made_by[name].inputs)
        return names

    @cached_property
    def _needed_again(self) -> int:
        """Number of leading operators that produce everything the layer's own backward needs.

        It is the number of all of them where recomputation does not stop early.
        """
        if not self.early_stop:
            return len(self._inside)
        needed = _saved_tensors(self._inside)
        indices = [i for i, op in enumerate(self._inside) if not needed.isdisjoint(op.outputs)]
        return max(indices, default=-1) + 1

    @cached_property
    def _inside(self) -> tuple[Operator, ...]:
        return self.operators[: len(self.operators) - self.outside]

    @cached_property
    def _outside(self) -> tuple[Operator, ...]:
        return self.operators[len(self.operators) - self.outside :]


def larger(first: float, other: float) -> float:
    """Return the larger, element by element where settings are many."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return cast(float, np.maximum(first, other))
    return max(first, other)


def smaller(first: float, other: float) -> float:
    """Return the smaller, element by element where settings are many."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        return cast(float, np.minimum(first, other))
    return min(first, other)


def either(condition: bool, yes: float, other: float) -> float:
    """Return `yes` where the condition is true, element by element where settings are many."""
    if isinstance(condition, np.ndarray):
        return cast(float, np.where(condition, yes, other))
    return yes if condition else other


def share(part: float, whole: float) -> float:
    """Return part / whole, 0 of nothing; element by element where settings are many."""
    if not isinstance(whole, np.ndarray):
        return part / whole if whole else 0.0
    return cast(float, np.divide(part, whole, out=np.zeros(whole.shape), where=whole != 0))


def _saved_tensors(operators: Iterable[Operator]) -> set[str]:
    return {name for operator in operators for name in operator.saved}


def _outputs(operators: Iterable[Operator]) -> set[str]:
    return {name for operator in operators for name in operator.outputs}
