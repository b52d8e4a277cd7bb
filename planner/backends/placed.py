"""A run's layers on one rank: their work, their parameters, and which stage holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.backends.runs import Run
from planner.cluster import Collective
from planner.costs import memory
from planner.costs.collectives import Levels, collective_s, group_levels, levels
from planner.costs.held import of_experts
from planner.costs.memory import Sharing, States
from planner.costs.rates import HOST_LINK_SHARE, Rates, rates
from planner.costs.sharding import Links, Traffic, traffic
from planner.layers.architecture import block_kinds, graph_of
from planner.layers.arithmetic import local_parameters, table
from planner.layers.kernels import kernels_of
from planner.layers.operator_table import GroupAxis, Setting, Table
from planner.model import Architecture
from planner.plan import Axis, Job, Layout
from planner.stack import Stack
from planner.tolerances import SLACK

USUAL_LINK_BYTES_PER_S = 3.2e10
"""PCIe 4, of a host link that the catalogue does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one layer on one rank."""

    dense: float
    routed: float

    @property
    def count(self) -> float:
        """All of them."""
        return self.dense + self.routed

    def __add__(self, other: Parameters) -> Parameters:
        """Both layers' together."""
        return Parameters(dense=self.dense + other.dense, routed=self.routed + other.routed)


NOTHING = Parameters(dense=0.0, routed=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Everything about a run that neither time nor memory has to work out again."""

    run: Run
    stack: Stack
    setting: Setting
    used: Rates
    sharing: Sharing
    moving: dict[str, Traffic]
    """By layer kind, of sharding its states."""
    tables: dict[str, Table]
    groups: dict[GroupAxis, Levels]
    """Of the collectives inside layers."""
    local: dict[str, Parameters]
    stages: list[list[str]]
    """Layer kinds [stage]."""
    parameters: list[Parameters]
    """[stage]"""


def priced(run: Run, stack: Stack) -> Priced:
    """Return a run's layers by the stack of its framework."""
    setting = setting_of(run, stack)
    graph = graph_of(run.architecture, name="model")
    local = by_kind(run.architecture, run, stack)
    stages = _layers(run, stack)
    used, sharing = rates_of(run, stack), sharing_of(run, stack)
    return Priced(
        run=run,
        stack=stack,
        setting=setting,
        used=used,
        sharing=sharing,
        moving={kind: _moving(run, sharing, own, used) for kind, own in local.items()},
        tables={layer.kind: table(graph, layer, setting) for layer in graph.layers},
        groups={
            "tensor": group(run, ("tensor",)),
            "context": group(run, ("context",)),
            "expert": _expert_group(run),
        },
        local=local,
        stages=stages,
        parameters=[
            _stage_parameters(run, kinds, local, s, len(stages)) for s, kinds in enumerate(stages)
        ],
    )


def sharing_of(run: Run, stack: Stack) -> Sharing:
    """Return among how many ranks a run divides states."""
    zero = stack.sharding.zero if run.zero is None else run.zero
    offload = run.offload
    return Sharing(
        types=memory.state_types(stack, run.precision, zero=zero, quantised=run.quantised),
        zero=zero,
        shard=run.sharding_ranks if zero else 1,
        data=run.data * run.context,
        pipelined=run.pipeline > 1,
        accumulated=run.micro_batches > 1,
        offload="parameters"
        if "params" in offload
        else "optimizer"
        if "optimizer" in offload
        else "none",
    )


def by_kind(a: Architecture, run: Run, stack: Stack) -> dict[str, Parameters]:
    """Return the parameters of every layer kind on a rank."""
    graph = graph_of(a, name="model")
    result = {}
    for layer in graph.layers:
        dense, routed = local_parameters(
            graph,
            layer,
            tensor=run.tensor,
            expert=run.expert,
            expert_tensor=run.expert_tensor,
            shared_whole=stack.experts.shared == "whole",
        )
        result[layer.kind] = Parameters(dense=dense, routed=routed)
    return result


def rates_of(run: Run, stack: Stack) -> Rates:
    """Return how fast a run's cluster does what is not a layer's computation."""
    job = Job(
        seq_len=run.seq_len,
        global_batch=run.global_batch,
        precision=run.precision,  # type: ignore[arg-type]
    )
    found = rates(run.cluster, job, None, stack, head_dim=run.architecture.head_dim)
    if found.host_link_bytes_per_s is None:
        found = replace(found, host_link_bytes_per_s=HOST_LINK_SHARE * USUAL_LINK_BYTES_PER_S)
    return found


def group(run: Run, axes: tuple[Axis, ...]) -> Levels:
    """Return the levels of a run's group along some axes."""
    replicas = run.data * run.context // run.sharding_ranks
    layout = Layout(
        tensor=run.tensor,
        context=run.context,
        data_shard=max(1, run.data // replicas),
        data_replicate=min(replicas, run.data),
        pipeline=run.pipeline,
    )
    return group_levels(run.cluster.tiers, layout, axes)


def _moving(run: Run, sharing: Sharing, parameters: Parameters, used: Rates) -> Traffic:
    """Return the traffic of a layer's states."""
    frozen = run.task in ("lora", "qlora")
    links = Links(
        shard=group(run, ("data_shard", "context")),
        replicate=group(run, ("data_replicate",)),
        neighbours=(),
    )
    apart = of_experts(sharing, run.tensor, run.expert, run.expert_tensor)
    if apart is sharing or not parameters.routed:
        count = parameters.count
        return traffic(count, sharing, links, used, frozen=count * frozen)
    steps = [(apart.data, run.expert * run.expert_tensor)]
    among = levels(run.cluster.tiers, steps if apart.data > 1 else [], devices=run.devices)
    same = Links(shard=among, replicate=(), neighbours=())
    dense, routed = parameters.dense, parameters.routed
    moving = traffic(dense, sharing, links, used, frozen=dense * frozen)
    return moving + traffic(routed, apart, same, used, frozen=routed * frozen)


def optimized(run: Run, sharing: Sharing, parameters: Parameters) -> float:
    """Return the parameters of a stage that a rank's optimizer updates."""
    if run.task in ("lora", "qlora"):
        return 0.0
    apart = of_experts(sharing, run.tensor, run.expert, run.expert_tensor)
    held = parameters.dense / (sharing.shard if sharing.sharded else 1)
    return held + parameters.routed / (apart.shard if apart.sharded else 1)


def states_of(run: Run, sharing: Sharing, parameters: Parameters) -> States:
    """Return what a stage's parameters take on a rank."""
    of_one = memory.frozen_states if run.task in ("lora", "qlora") else memory.states
    apart = of_experts(sharing, run.tensor, run.expert, run.expert_tensor)
    return of_one(parameters.dense, sharing) + of_one(parameters.routed, apart)


def setting_of(run: Run, stack: Stack) -> Setting:
    """Return how a run divides its layers, and the kernels that run."""
    own = run.sequence_parallel
    return Setting(
        micro_batch=min(run.micro_batch, run.global_batch / run.data),
        seq_len=run.seq_len,
        precision=run.precision,  # type: ignore[arg-type]
        tensor=run.tensor,
        context=run.context,
        expert=run.expert,
        expert_tensor=run.expert_tensor,
        sequence_parallel=stack.tensor.sequence_parallel if own is None else own,
        kernels=kernels_of(
            stack,
            run.precision,
            compiled=run.compiled,
            flash_attention=run.flash_attention,
            frozen=run.task in ("lora", "qlora"),
            quantised=run.quantised,
        ),
    )


def link_s(priced: Priced, operation: Collective, size_bytes: float, axis: GroupAxis) -> float:
    """Seconds of a collective inside a layer.

    What rings over the network wait at each step counts with the half of a region that adds up.
    """
    among = priced.groups[axis]
    seconds = collective_s(operation, size_bytes, among)
    if axis == "tensor" and len(among) > 1 and operation != "all_gather":
        seconds += 2 * (priced.run.tensor - 1) * priced.stack.host.ring_step_s
    return seconds


def _expert_group(run: Run) -> Levels:
    if run.expert == 1:
        return ()
    layout = Layout(
        tensor=run.expert_tensor,
        data_shard=run.expert,
        data_replicate=max(1, run.devices // (run.pipeline * run.expert_tensor * run.expert)),
        pipeline=run.pipeline,
    )
    return group_levels(run.cluster.tiers, layout, ("data_shard",))


def _layers(run: Run, stack: Stack) -> list[list[str]]:
    """Return the layer kinds of each stage, all chunks together."""
    kinds = list(block_kinds(run.architecture))
    p, count = run.pipeline, len(kinds)
    if stack.pipeline.stages == "even":
        base, more = divmod(count, p)
        sizes = [base + (1 if s < more else 0) for s in range(p)]
    else:
        sizes = _by_cost(run, count)
    result, at = [], 0
    for size in sizes:
        result.append(kinds[at : at + size])
        at += size
    result[0].insert(0, "embedding")
    result[-1].append("head")
    return result


def _by_cost(run: Run, count: int) -> list[int]:
    """Return blocks per stage as nanotron divides them.

    Blocks and the output projection count by their products, the embedding nothing; a stage is full
    once the running sum passes its share.  Source: nanotron, get_block_compute_costs and
    init_on_device_and_dtype (parallel/pipeline_parallel).
    """
    a = run.architecture
    gates = 3 if a.gated_mlp else 2
    block_cost = 4 * a.heads * a.head_dim * a.hidden_size + gates * a.ffn_size * a.hidden_size
    total = count * block_cost + a.vocab_size * a.hidden_size
    sizes, stage, sums = [0] * run.pipeline, 0, 0.0
    for _ in range(count):
        sums += block_cost
        sizes[stage] += 1
        if stage < run.pipeline - 1 and sums >= total * (stage + 1) / run.pipeline * (1 - SLACK):
            stage += 1
    return sizes


def _stage_parameters(
    run: Run, kinds: Sequence[str], local: dict[str, Parameters], stage: int, stages: int
) -> Parameters:
    total = NOTHING
    for kind in kinds:
        total += local[kind]
    a = run.architecture
    if a.tied_embeddings and stages > 1 and stage == stages - 1:
        total += Parameters(dense=a.vocab_size * a.hidden_size / run.tensor, routed=0.0)
    return total
