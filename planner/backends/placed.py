"""A run's layers on one rank: their operators, their states, and which stage holds them."""

from __future__ import annotations

from dataclasses import dataclass

from planner.backends.runs import Run
from planner.cluster import Collective
from planner.costs.collectives import Levels, collective_s, group_levels
from planner.costs.held import Held
from planner.costs.layout_costs import CostTables
from planner.costs.memory import Sharing
from planner.costs.rates import Rates
from planner.costs.sharding import Traffic
from planner.layers.architecture import block_kinds
from planner.layers.arithmetic import table
from planner.layers.kernels import kernels_of
from planner.layers.operator_table import GroupAxis, Setting, Table
from planner.plan import Axis, Layout
from planner.setup import Setup
from planner.stack import Stack
from planner.stage_rules import by_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Everything about a run that neither time nor memory has to work out again."""

    run: Run
    stack: Stack
    layout: Layout
    costs: CostTables
    setting: Setting
    used: Rates
    sharing: Sharing
    held: dict[str, Held]
    """By layer kind, its states on a rank."""
    moving: dict[str, Traffic]
    """Of sharing them."""
    tied_s: dict[str, float]
    """Of summing a tied weight's gradients."""
    tables: dict[str, Table]
    groups: dict[GroupAxis, Levels]
    """Of the collectives inside layers."""
    stages: list[list[str]]
    """Layer kinds [rank], those of all its stages together."""

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


def priced(setup: Setup, run: Run) -> Priced:
    """Return a run's layers by the stack of its framework."""
    stack, layout, model = setup.request.stack, setup.layout, setup.request.model
    costs, setting = CostTables(setup.request), setting_of(run, stack)
    moved = {layer.kind: costs.moved(layer.kind, layout) for layer in model.layers}
    return Priced(
        run=run,
        stack=stack,
        layout=layout,
        costs=costs,
        setting=setting,
        used=costs.rates,
        sharing=costs.sharing(layout),
        held={kind: held for kind, (held, _, _) in moved.items()},
        moving={kind: moving for kind, (_, moving, _) in moved.items()},
        tied_s={kind: tied_s for kind, (_, _, tied_s) in moved.items()},
        tables={layer.kind: table(model, layer, setting) for layer in model.layers},
        groups={
            "tensor": group(run, ("tensor",)),
            "context": group(run, ("context",)),
            "expert": _expert_group(run),
        },
        stages=_layers(run, stack),
    )


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
        pipelined=run.pipeline > 1 and run.cluster.groups[0].nodes > 1,
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
