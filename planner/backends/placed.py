"""A run's layers on one rank: their work, their parameters, and which stage holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.backends.runs import Run
from planner.cluster import Collective
from planner.costs import memory
from planner.costs.collectives import Levels, collective_s, group_levels, levels
from planner.costs.held import of_experts
from planner.costs.lora import linears
from planner.costs.memory import Sharing, States
from planner.costs.rates import HOST_LINK_SHARE, Rates, rates
from planner.costs.sharding import Links, Traffic, traffic
from planner.layers.architecture import block_kinds, graph_of
from planner.layers.arithmetic import largest_matrix, local_parameters, table
from planner.layers.kernels import kernels_of
from planner.layers.operator_table import GroupAxis, Setting, Table
from planner.model import Architecture
from planner.plan import Axis, Job, Layout
from planner.stack import Stack
from planner.stage_rules import by_products

USUAL_LINK_BYTES_PER_S = 3.2e10
"""PCIe 4, of a host link that the catalogue does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one layer on one rank."""

    dense: float
    routed: float
    adapters: float = 0.0
    """Beside them, and trained in their place."""
    largest: float = 0.0
    """Of one matrix among them."""

    @property
    def count(self) -> float:
        """All of them."""
        return self.dense + self.routed

    def __add__(self, other: Parameters) -> Parameters:
        """Both layers' together."""
        return Parameters(
            dense=self.dense + other.dense,
            routed=self.routed + other.routed,
            adapters=self.adapters + other.adapters,
            largest=max(self.largest, other.largest),
        )


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
    """Layer kinds [rank], those of all its stages together."""
    parameters: list[Parameters]
    """[rank]"""

    def stages_of(self, rank: int) -> dict[int, list[str]]:
        """Return the layer kinds of each stage of a rank, as equal as can be."""
        ranks, virtual, kinds = self.run.pipeline, self.run.virtual, self.stages[rank]
        first, last = kinds[:1] == ["embedding"], kinds[-1:] == ["head"]
        blocks, at = kinds[first : len(kinds) - last], 0
        result = {}
        for chunk in range(virtual):
            size = (len(blocks) + chunk) // virtual
            result[chunk * ranks + rank] = blocks[at : at + size]
            at += size
        result[rank] = kinds[:first] + result[rank]
        end = (virtual - 1) * ranks + rank
        result[end] = result[end] + kinds[len(kinds) - last :]
        return result


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
        parameters=[sum((local[kind] for kind in kinds), NOTHING) for kinds in stages],
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
        if layer.kind == "head" and a.tied_embeddings and run.pipeline > 1:
            dense += a.vocab_size * a.hidden_size / run.tensor
        result[layer.kind] = Parameters(
            dense=dense,
            routed=routed,
            adapters=_adapters(a, run, stack, layer.kind) if is_frozen(run) else 0.0,
            largest=largest_matrix(graph, layer, tensor=run.tensor),
        )
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
    frozen = is_frozen(run)
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
    if is_frozen(run):
        return parameters.adapters / (sharing.shard if sharing.sharded else 1)
    apart = of_experts(sharing, run.tensor, run.expert, run.expert_tensor)
    held = parameters.dense / (sharing.shard if sharing.sharded else 1)
    return held + parameters.routed / (apart.shard if apart.sharded else 1)


def _adapters(a: Architecture, run: Run, stack: Stack, kind: str) -> float:
    """Return the parameters of a layer's adapters on a rank."""
    if kind in ("embedding", "head"):
        return 0.0
    every = stack.kernels.adapters == "all"
    total = 0.0
    for one in linears(a, experts=kind == "moe_block"):
        if every or "attn" in one.path:
            inputs = one.inputs / (run.tensor if one.rows else 1)
            total += inputs + one.outputs / (1 if one.rows else run.tensor)
    return stack.kernels.adapter_rank * total


def states_of(run: Run, stack: Stack, sharing: Sharing, kind: str, own: Parameters) -> States:
    """Return what a layer's parameters take on a rank."""
    apart = of_experts(sharing, run.tensor, run.expert, run.expert_tensor)
    end = kind in ("embedding", "head")
    if not is_frozen(run):
        held = memory.states(own.dense, sharing) + memory.states(own.routed, apart)
    else:
        if end and run.quantised:  # 4 bits are of the blocks' products
            types = memory.state_types(stack, run.precision, zero=sharing.zero)
            sharing = replace(sharing, types=types)
        held = memory.frozen_states(own.dense, sharing) + memory.frozen_states(own.routed, apart)
        held += memory.states(own.adapters, sharing)
    if end and stack.sharding.ends == "root":
        return memory.in_root_unit(held, own.dense, sharing)
    return held


def is_frozen(run: Run) -> bool:
    """Whether only adapters are trained."""
    return run.task in ("lora", "qlora")


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
            frozen=is_frozen(run),
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
    """Return the layer kinds of each rank, all chunks together."""
    kinds = list(block_kinds(run.architecture))
    p, count = run.pipeline, len(kinds)
    if stack.pipeline.stages != "by_products":
        base, more = divmod(count, p)
        sizes = [base + (1 if s < more else 0) for s in range(p)]
    else:
        sizes = by_products(run.architecture, p)
    result, at = [], 0
    for size in sizes:
        result.append(kinds[at : at + size])
        at += size
    result[0].insert(0, "embedding")
    result[-1].append("head")
    return result
