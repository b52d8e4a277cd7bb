"""The accounting rules of each framework, as data: types, sharding, overlap, host time, memory.

A `Rules` says what a framework keeps in which type, what it divides, which communication hides
behind computation, and what its Python costs.  Figures that are fitted say so and are fitted per
framework, never per model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.backends.cells import word
from planner.backends.runs import Run

EIGHT_BITS = ("fp8", "mxfp8", "nvfp4")
"""Recipes in 8 bits and fewer: they keep frozen weights so, and sum gradients in bf16."""

STALLING_NODES = 32
"""Nodes above which nearly every run (93 %, against 7 % on one node) waits at each transfer."""

Split = Literal["even", "by_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one framework trains."""

    name: str
    weight_bytes: int = 2
    gradient_bytes: int = 4
    """Of the buffer in which gradients are summed."""
    fresh_gradient_bytes: int = 0
    """Of gradients in the working type that stay beside the buffer until the reduction."""
    master_bytes: int = 4
    """Of fp32 parameters beside the working ones; 0 where the working ones are fp32."""
    moment_bytes: int = 8
    reduce_bytes: int = 4
    """Of a gradient on the wire."""
    zero: int = 0
    """Where the run does not say."""
    sequence_parallel: bool = False
    """Where the run does not say."""
    flash_attention: bool = True
    """Where the run does not say."""
    reduces_whole: bool = False
    """ZeRO-1 sums all gradients on all ranks before each keeps its share."""
    reduce_calls: float = 1.0
    """Collectives of a layer's gradients, and as many of its updated parameters: how many tensors
    it has where nothing packs them into buckets."""
    reduce_overlap: float = 0.0
    """Share of the gradients' reduction that can hide behind the last micro-batch's backward."""
    gather_overlap: float = 0.0
    """Share of gathering updated parameters that can hide behind the next forward."""
    shard_overlap: float = 0.9
    """Share of ZeRO-3 collectives that can hide behind their neighbours' computation."""
    tensor_overlap: float = 0.0
    """Share of tensor-parallel collectives that hides behind the products around them."""
    pipeline_overlap: float = 0.0
    """Share of transfers between interleaved stages that hides; plain 1F1B waits for each."""
    host_forward_s: float = 0.6e-3
    """Python and launches of one block's forward: the least time it takes."""
    host_backward_s: float = 0.7e-3
    host_experts_s: float = 3.5e-3
    """What routing, permutation and grouped products add to a block, forward and backward: some
    hundred launches and a wait for the counts of tokens."""
    host_tensor_s: float = 0.0
    """What tensor parallelism adds to one block's forward and backward together."""
    host_rank_s: float = 0.0
    """What each further tensor-parallel rank adds: collectives wait for the slowest host."""
    host_pipelined_s: tuple[float, float] = (0.0, 0.0)
    """What one block takes where pipelines run over several nodes: a + b x tensor degree, b a
    quarter more for each further node that the tensor group spans."""
    stalled_transfer_s: float = 0.0
    """What each transfer between stages waits on more than STALLING_NODES nodes."""
    ring_step_s: float = 0.0
    """Latency that a ring over the network has per step beyond that of the catalogue."""
    host_step_s: float = 20e-3
    """Once per step: optimizer launches, norms, logging, data."""
    host_micro_batch_s: float = 1.0e-3
    """Once per micro-batch and stage beside its layers."""
    accumulated_bytes: float = 10.0
    """Traffic per parameter of adding a micro-batch's gradients to the buffer: read the fresh ones
    (2) and the sum (4), write the sum (4).  Where the product itself adds to the buffer, half of
    its reads and writes are taken to hide behind it: 4."""
    attention: Literal["fa1", "fa2", "fa3"] = "fa2"
    """Generation of the fused attention kernel; cuDNN's counts as the third."""
    products: float = 1.0
    """Rate of matrix products over what well-tuned frameworks reach on the same device."""
    hopper_products: float = 1.0
    """Rate of matrix products on Hopper and later where the framework's libraries are older."""
    shard_rate: float = 1.0
    """Rate of ZeRO-3 collectives between nodes over that of large contiguous ones."""
    node_shard_rate: float = 1.0
    """The same within a node, whose links have less latency to hide."""
    bridged: bool = True
    """Bridges between cards are used where the run has them."""
    eight_bit_states: bool = True
    """In 8 bits gradients are summed in bf16 and kept activations are as narrow as products
    (Transformer Engine); else only products are, their inputs kept in bf16 (torchao)."""
    dropout: bool = False
    """In models of the GPT kind (ungated MLPs); Llama's kind trains without."""
    offloaded_share: float = 1.0
    """Of a block's activations where they are on the host."""
    keeps_sent: bool = False
    """Activations sent to the next stage stay until their backward."""
    fused_norm: bool = True
    """Else RMS norms are written out in fp32."""
    fused_gate: bool = True
    """Else SwiGLU is an activation and a product, each with its own tensor."""
    fused_rotary: bool = True
    """Else rotated queries and keys are new tensors beside the projection's output."""
    keeps_gathered: bool = False
    """With sequence parallelism products keep their gathered inputs, not their own share."""
    selective: Literal["attention", "operators", "blocks"] = "attention"
    """What selective recomputation drops: unfused attention's scores; all outputs but attention's
    and every second product's; or every second block's."""
    adapters: Literal["attention", "all"] = "all"
    """Which products of a frozen block have adapters, and so keep their inputs."""
    logit_bytes: float = 10.0
    """Bytes per logit at the loss's peak."""
    fused_softmax: bool = True
    """Else unfused attention keeps scores in 16 and 32 bits."""
    divided_logits: bool = True
    """With tensor parallelism the loss works on its share of the vocabulary; else on all of it."""
    split_transfers: bool = True
    """Between stages each tensor-parallel rank sends its share, whole activations otherwise."""
    split: Split = "even"
    """Layers alike on all stages, or stages alike in parameters with the head counted."""
    reserved: float = 1.05
    """Reserved over allocated bytes of the caching allocator."""
    fit_slack: float = 1.02
    """Share of reserved memory that cannot be used when memory is tight, over allocated."""
    spread: float = 0.15
    """80 of 100 measured steps lie within a factor exp(spread) of the predicted one: residuals of
    the framework's own runs.  `planner.backends.ranges` has those of frameworks without any."""
    pipelined_spread: float = 0.0
    """The same above the prediction where pipelines run over several nodes, if it is larger."""
    context_bytes: float = 1.0e9
    """CUDA context and library buffers outside the allocator."""


MEGATRON = Rules(
    name="megatron",
    spread=0.19,
    sequence_parallel=True,
    reduce_overlap=0.9,
    gather_overlap=0.9,
    tensor_overlap=0.5,
    pipeline_overlap=0.8,
    accumulated_bytes=4.0,
    attention="fa3",
    logit_bytes=6.5,
    dropout=True,
    adapters="attention",
    offloaded_share=0.5,  # inputs of named modules
    zero=1,
)

EAGER = Rules(
    name="eager",
    host_forward_s=0.8e-3,
    host_backward_s=1.2e-3,
    hopper_products=0.88,
    fused_norm=False,
    fused_gate=False,
    fused_rotary=False,
    accumulated_bytes=0.0,
)
"""Modules as PyTorch runs them without a compiler."""

TRANSFORMERS = replace(
    EAGER,
    name="transformers",
    gradient_bytes=2,
    master_bytes=0,
    moment_bytes=4,
    logit_bytes=18.0,
    reserved=1.1,
)
"""Models loaded in bf16 and trained in it, gradients and moments included; DeepSpeed keeps more.
Its loss upcasts, shifts and copies the logits: 2 + 4 + 4, 4 for the softmax, 4 for gradients."""

ZERO_3 = replace(EAGER, name="fsdp", zero=3)
FINE_TUNING = replace(TRANSFORMERS, name="transformers", zero=0)

KNOWN: dict[str, Rules] = {
    "fsdp": ZERO_3,
    "transformers": FINE_TUNING,
    "megatron": MEGATRON,
    "megatron-kwai": replace(MEGATRON, name="megatron-kwai"),
    "megatron-deepspeed": Rules(
        name="megatron-deepspeed",
        reduces_whole=True,
        spread=0.18,
        flash_attention=False,
        host_forward_s=0.9e-3,
        host_backward_s=1.4e-3,
        host_rank_s=0.1e-3,
        host_micro_batch_s=0.5e-3,
        host_step_s=10e-3,
        # DeepSpeed's BF16_Optimizer.update_hp_grads makes an fp32 copy of each fresh gradient (2
        # read, 4 written) and adds that (8 read, 4 written).
        accumulated_bytes=18.0,
        dropout=True,
        keeps_sent=True,
        context_bytes=2.0e9,
    ),
    "deepspeed": Rules(
        name="deepspeed",
        spread=0.39,
        host_forward_s=0.8e-3,
        host_backward_s=1.2e-3,
        zero=3,
        shard_rate=0.1,
        node_shard_rate=0.5,  # between the other rate and that of buckets: no run tells it
    ),
    "nanotron": Rules(
        name="nanotron",
        spread=0.26,
        pipelined_spread=1.3,
        host_tensor_s=2.4e-3,
        host_forward_s=0.8e-3,
        host_backward_s=1.2e-3,
        host_pipelined_s=(4.2e-3, 2.1e-3),
        ring_step_s=55e-6,
        stalled_transfer_s=0.265,
        reduce_calls=6.0,
        sequence_parallel=True,
        split="by_cost",
        fused_gate=False,
        fused_rotary=False,
        fresh_gradient_bytes=2,
        logit_bytes=14.0,
        reserved=1.12,
        fit_slack=1.18,
        zero=1,
    ),
    "aleph-alpha-scaling": replace(
        EAGER,
        name="aleph-alpha-scaling",
        spread=0.16,
        zero=1,
        gradient_bytes=2,
        accumulated_bytes=6.0,
        logit_bytes=18.0,
        divided_logits=False,
        fused_softmax=False,
        keeps_gathered=True,
        fit_slack=1.1,
    ),
    "llm-foundry-fsdp": Rules(
        name="llm-foundry-fsdp",
        spread=0.12,
        attention="fa1",
        hopper_products=0.88,
        logit_bytes=4.0,
        accumulated_bytes=0.0,
        zero=3,
        reduce_bytes=2,
        weight_bytes=2,
        gradient_bytes=4,
    ),
    "internevo": Rules(name="internevo", spread=0.11, zero=1, gradient_bytes=2, reduce_bytes=2),
    "fsdp_qlora": replace(
        TRANSFORMERS, name="fsdp_qlora", spread=0.22, zero=3, shard_overlap=0.0, bridged=False
    ),
    "torchtitan": replace(
        EAGER,
        name="torchtitan",
        zero=3,
        sequence_parallel=True,
        selective="operators",
        eight_bit_states=False,
    ),
    "fms-fsdp": replace(EAGER, name="fms-fsdp", zero=3, selective="blocks"),
    "nemo-automodel": replace(TRANSFORMERS, name="nemo-automodel", zero=3, eight_bit_states=False),
    "litgpt": replace(
        EAGER, name="litgpt", zero=3, gradient_bytes=2, master_bytes=0, moment_bytes=4
    ),
    "ms-swift": replace(TRANSFORMERS, name="ms-swift", zero=3),
}

SAME_AS: dict[str, tuple[str, ...]] = {
    "megatron": (
        "megatron-lm",
        "megatron-core",
        "mcore",
        "megatron-bridge",
        "nemo",
        "nemo-megatron",
    ),
    "transformers": ("huggingface", "hf", "hf-trainer", "trl", "peft", "axolotl", "llama-factory"),
    "fsdp": ("fsdp1", "fsdp2", "pytorch-fsdp", "torch-fsdp", "pytorch-fsdp2"),
    "llm-foundry-fsdp": ("llm-foundry", "composer", "mosaicml"),
    "nemo-automodel": ("automodel",),
    "ms-swift": ("swift",),
    "litgpt": ("lit-gpt",),
    "deepspeed": ("deepspeed-zero",),
}
"""Other names of frameworks, and of those that run the same code."""


def known_name(framework: str) -> str:
    """Return the name under which a framework has rules.

    >>> known_name("Megatron LM"), known_name("fsdp_qlora"), known_name("abacus")
    ('megatron', 'fsdp_qlora', 'abacus')
    """
    if framework.lower() in KNOWN:
        return framework.lower()
    said = word(framework)
    return next((name for name, others in SAME_AS.items() if said in others), said)


UNKNOWN = replace(
    MEGATRON,
    name="usual three-dimensional parallelism",
    products=0.9,
    attention="fa2",
    reduce_overlap=0.5,
    gather_overlap=0.0,
    tensor_overlap=0.0,
    accumulated_bytes=10.0,
    host_forward_s=0.8e-3,
    host_backward_s=1.2e-3,
    host_tensor_s=1.0e-3,
    fused_gate=False,
    fused_rotary=False,
    logit_bytes=12.0,
    reserved=1.1,
    fit_slack=1.06,
)
"""A framework that nothing is known of: Megatron-LM's division with less of its tuning."""


def rules_of(run: Run) -> tuple[Rules, bool]:
    """Return the rules of a run's framework, and whether it is a known one.

    An unknown framework gets the closest rules: those of fine-tuning with `transformers` for
    adapters and single devices, of plain FSDP for ZeRO-3, of three-dimensional parallelism
    otherwise.
    """
    found = KNOWN.get(known_name(run.framework))
    if found is not None:
        if found.name == "ms-swift" and run.zero:
            found = replace(found, gradient_bytes=4, master_bytes=4, moment_bytes=8)
        return found, True
    tuning = run.task != "pretrain"
    if tuning and run.tensor * run.pipeline == 1:
        return (replace(FINE_TUNING, zero=3) if run.zero == 3 else FINE_TUNING), False
    if run.zero == 3:
        return ZERO_3, False
    return UNKNOWN, False
