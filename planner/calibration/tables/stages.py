"""Stages of a set-up run: which blocks lie where by its stack's rule, and what each recomputes.

Frameworks recompute blocks, not embeddings and heads.  Where a stack's selective recompute is of
blocks, and where half of a model is recomputed (`partial`), every second block is recomputed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.planner.catalog import accelerators
from meshwright.planner.costs.predict import Placement
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Activations, Layout
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.frameworks.stage_rules import by_products, ends_of
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.requests.setup import Setup

USUAL_LINK_BYTES_PER_S = 3.2e10
"""PCIe 4, of a host link that the catalogue does not know."""


def placements(setup: Setup, layout: Layout) -> list[Placement]:
    """[stage] Layer kinds with their choices, of the stages that a layout has.

    Blocks that do not divide evenly go to the first stages; a stage may have none.
    """
    model, stack = setup.request.model, setup.request.stack
    before, blocks, _ = ends_of(model)
    a = model.architecture
    if stack.pipeline.stages == "by_products" and layout.virtual_stages == 1 and a is not None:
        sizes: Sequence[int] = by_products(a, layout.pipeline)
    else:
        each, more = divmod(blocks, layout.stages)
        sizes = [each + (stage < more) for stage in range(layout.stages)]
    kinds = model.chain_kinds
    cuts = [before]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    ends = [0, *cuts[1:-1], len(kinds)]

    def layer_at(at: int, start: int) -> tuple[str, Recompute, Activations]:
        """The layer at a place of the chain, on a stage whose blocks start at another."""
        if not before <= at < before + blocks:
            return kinds[at], "none", "keep"
        recomputes = _among_first(setup.recomputed_blocks, at - start)
        offloads = _among_first(setup.offloaded_blocks, at - start)
        return (
            kinds[at],
            _recompute(setup, at - before) if recomputes else "none",
            setup.activations if offloads else "keep",
        )

    return [
        tuple(layer_at(at, cut) for at in range(first, end))
        for cut, (first, end) in zip(cuts, pairwise(ends), strict=False)
    ]


def _among_first(count: int | None, at: int) -> bool:
    return count is None or at < count


def recomputes(setup: Setup) -> tuple[Recompute, ...]:
    """Return what layers of a run may recompute, `none` first."""
    choices = {"none", _recompute(setup, 0), _recompute(setup, 1)}
    if setup.recompute is None:
        choices.add("full")
    return tuple(choice for choice in RECOMPUTES if choice in choices)


def _recompute(setup: Setup, block: int) -> Recompute:
    """Return what a block recomputes."""
    kernels, rule = setup.request.stack.kernels, setup.request.stack.recompute
    match setup.recompute:
        case None | "none":
            return "none"
        case "full":
            return "full"
        case "selective" if rule.selective == "attention" and kernels.flash_attention:
            return "none"  # scores that are never stored need no second forward
        case "selective" if rule.selective != "blocks":
            return "selective"
        case _:
            return "full" if block % 2 == 0 else "none"


def with_links(setup: Setup) -> Setup:
    """Return a run whose devices have the links that its stack uses, and one to their host."""
    cluster = setup.request.cluster
    if not setup.request.stack.sharding.bridged:
        cluster = _without_bridge(cluster)
    group = cluster.groups[0]
    if group.host_link_bytes_per_s is None:
        group = group.model_copy(update={"host_link_bytes_per_s": USUAL_LINK_BYTES_PER_S})
        cluster = cluster.model_copy(update={"groups": (group, *cluster.groups[1:])})
    if cluster is setup.request.cluster:
        return setup
    return replace(setup, request=replace(setup.request, cluster=cluster))


def _without_bridge(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster whose cards reach each other over PCIe alone."""
    group, tiers = cluster.groups[0], cluster.tiers
    entry = accelerators().get(group.accelerator.name)
    if entry is None or entry.bridge is None or not tiers or tiers[0].name != entry.bridge.name:
        return cluster
    [pcie] = [tier for tier in entry.tiers if tier.name == "pcie"]
    others = tuple(tier for tier in tiers[1:] if tier.name != "pcie")
    in_node = pcie.model_copy(update={"devices": group.devices_per_node})
    return cluster.model_copy(update={"tiers": (in_node, *others)})
