"""A run as it is set up, predicted: what `planner.costs.predict` has of the plan made of it.

Stages of a set-up run: the placement of blocks by its framework's rule, and their recomputation.

Frameworks recompute blocks, not embeddings and heads.  Where a framework's selective recompute is
of blocks, and where half of a model is recomputed (`partial`), every second block is recomputed
whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.planner.catalog import accelerators
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.predict import Placement, placement_prediction
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.placement_text import alike_words
from meshwright.planner.documents.plan import Activations, Layout, PlacedLayer, Plan, Stage
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.errors import DocumentError
from meshwright.planner.frameworks.stage_rules import block_counts, ends_of
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.requests.request import Request
from meshwright.planner.requests.setup import Setup
from meshwright.planner.search.partition.layout_partition import plan_with

USUAL_LINK_BYTES_PER_S = 3.2e10
"""PCIe 4, of a host link that the catalogue does not know."""


def placements(setup: Setup, layout: Layout) -> list[Placement]:
    """[stage] Layer kinds with their choices, of the stages that a layout has.

    Blocks are divided by `planner.frameworks.stage_rules.block_counts`.
    """
    model, framework = setup.request.model, setup.request.framework
    before, blocks, _ = ends_of(model)
    sizes = block_counts(
        framework.pipeline.stages,
        model,
        ranks=layout.pipeline,
        virtual_stages=layout.virtual_stages,
    )
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
    """Return the recomputations that layers of a run may have, `none` first."""
    choices = {"none", _recompute(setup, 0), _recompute(setup, 1)}
    if setup.recompute is None:
        choices.add("full")
    return tuple(choice for choice in RECOMPUTES if choice in choices)


def _recompute(setup: Setup, block: int) -> Recompute:
    """Return the recomputation of a block."""
    kernels, rule = setup.request.framework.kernels, setup.request.framework.recompute
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
    """Return a run whose devices have the links that its framework uses, and one to their host."""
    cluster = setup.request.cluster
    if not setup.request.framework.sharding.bridged:
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


MOST_TABLES = 256
"""Costs cached at a time."""


class Tables:
    """Costs by which runs are predicted; the runs of a sweep share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], CostTables] = {}

    def costs_of(self, setup: Setup) -> CostTables:
        """Return the costs of a run, cached by model, cluster and framework."""
        request = setup.request
        among = recomputes(setup)
        same = (id(request.model), id(request.cluster), request.job, id(request.framework))
        key = (*same, setup.activations, among)
        tables = self._known.get(key)
        if tables is None:
            if len(self._known) >= MOST_TABLES:
                self._known.clear()
            kept: tuple[Activations, ...] = ("keep",)
            choices = kept if setup.activations == "keep" else (*kept, setup.activations)
            tables = self._known[key] = CostTables(request, choices, among)
        return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """A run with all that it leaves open filled in."""

    request: Request
    layout: Layout
    placements: list[Placement]
    prediction: Prediction


def _choose_recompute(setup: Setup, tables: Tables) -> _Decided:
    """Return a run without stated recomputation with none if that fits, else with full."""
    setup = with_links(setup)
    layout, assumed = setup.layout, list(setup.assumed)
    costs = tables.costs_of(setup)

    def placements_and_prediction(setup: Setup) -> tuple[list[Placement], Prediction]:
        stages = placements(setup, layout)
        return stages, placement_prediction(costs, layout, stages, assumed=assumed)

    if setup.recompute is None:
        assumed.append("nothing recomputed, since that fits")
    stages, prediction = placements_and_prediction(setup)
    if setup.recompute is None and not prediction.fits:
        assumed[-1] = "all blocks recomputed, since nothing else fits"
        stages, prediction = placements_and_prediction(replace(setup, recompute="full"))
    if not 0 < prediction.step_time_s < math.inf:
        raise DocumentError("", "figures are out of all proportion: no step time follows from them")
    return _Decided(request=setup.request, layout=layout, placements=stages, prediction=prediction)


def predict_run(setup: Setup, tables: Tables | None = None) -> Prediction:
    """Return the prediction of a run; of many, those of a sweep share `tables`."""
    return _choose_recompute(setup, tables or Tables()).prediction


def plan_of(setup: Setup) -> Plan:
    """Return a run as a plan, where a plan can express its schedule and stages."""
    run = _choose_recompute(setup, Tables())
    if not all(run.placements):
        raise DocumentError(
            "layout",
            f"has {run.layout.stages} stages, of which stage {run.placements.index(())} has no "
            f"layer of {run.request.model.name}, as {run.request.framework.name} divides it; ask "
            "for fewer stages",
        )
    names = iter(name for name, _ in run.request.model.chain)
    stages = tuple(
        Stage(
            layers=tuple(
                PlacedLayer(layer=next(names), recompute=recompute, activations=activations)
                for _, recompute, activations in placement
            )
        )
        for placement in run.placements
    )
    return plan_with(run.request, run.layout, stages, step_s=run.prediction.step_time_s)


def framework_prediction(request: Request, layout: Layout) -> Prediction:
    """Return the prediction of a layout with the stages of its framework's rule.

    All blocks recompute alike.
    """
    if layout.devices > request.cluster.devices:
        raise DocumentError(
            "layout",
            f"takes {layout.devices} devices, and {request.cluster.name} has "
            f"{request.cluster.devices}",
        )
    pins = request.pins
    words = alike_words([(pins.recompute or "none", pins.activations or "keep")])
    return setup_prediction(_of_pins(request, layout), layout.text_with("", words))


def framework_plan(request: Request, layout: Layout) -> Plan:
    """Return the plan that `framework_prediction` prices."""
    return plan_of(_of_pins(request, layout))


def _of_pins(request: Request, layout: Layout) -> Setup:
    """Return a run whose blocks are as the request pins them."""
    pins = request.pins
    return Setup(
        request=request,
        layout=layout,
        recompute=pins.recompute or "none",
        activations=pins.activations or "keep",
    )


def setup_prediction(setup: Setup, layout: str) -> Prediction:
    """Return the prediction of a run of a language model; `layout` is how it is written."""
    model, framework = setup.request.model, setup.request.framework
    a = model.architecture
    if a is None or a.patches or a.classes:
        raise DocumentError(
            "framework",
            f"{framework.name} trains language models; {model.name} is none: use native",
        )
    return predict_run(setup).model_copy(update={"layout": f"{layout} {framework.name}"})
