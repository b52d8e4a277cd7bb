"""Plans of a large cluster tried in small: on fewer nodes, with fewer stages and layers.

A stand-in keeps what a device does with a micro-batch: tensor, context and expert degrees and so
the shapes of products, the micro-batch, ZeRO level, recomputation, and over which tier of links
each axis goes.  It has fewer data-parallel ranks and stages, micro-batches in proportion to stages,
so that pipelines idle alike, and as many layers on a stage as fit, up to those of the plan.  Such
trials do not show the growth of steps with devices, or links that the smaller cluster lacks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.planner.architectures.architecture import architecture_of
from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog import model_config
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import is_folder, plain, read_text
from meshwright.planner.documents.model import ModelGraph, is_own
from meshwright.planner.documents.plan import Layout, Plan
from meshwright.planner.documents.units import name_of
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.requests.pins import LIKE_LAYOUTS, Pins
from meshwright.planner.requests.request import SURE_TO_FIT, Request
from meshwright.planner.schedules import PLAIN
from meshwright.planner.search.search import search
from meshwright.planner.tuning.candidates import TrialCandidate, trial_candidate

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers")
"""Names of the number of blocks in configurations."""
AXES = ("tensor", "context", "data", "pipeline")
MOST_MICRO_BATCHES = 32
"""Largest number of micro-batches of a stand-in's rank: more of them make its steps longer and show
nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTrial:
    """A plan that is tried on the smaller cluster, and the request that it answers."""

    candidate: TrialCandidate
    request: Request
    config: dict[str, Any] | None
    """Configuration of a model with fewer layers; None: the model is the plan's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InSmall:
    """Plans that may be the answer, with their stand-ins on a smaller cluster."""

    candidates: tuple[TrialCandidate, ...]
    stand_ins: tuple[SmallTrial, ...]
    unseen: tuple[str, ...]
    """Tiers of links that the plans use and the smaller cluster does not have."""


def check_smaller(small: ClusterSpec, large: ClusterSpec) -> None:
    """Refuse mixed clusters, another kind of devices, and a cluster that is no smaller."""
    if small.is_mixed or large.is_mixed:
        raise DocumentError(
            "trial-cluster", "has devices that differ; trials in small need devices alike"
        )
    mine, theirs = (cluster.groups[0].accelerator.name for cluster in (small, large))
    if mine != theirs:
        raise DocumentError(
            "trial-cluster", f"has {mine}, and the cluster {theirs}; trials need the same"
        )
    if small.devices >= large.devices:
        raise DocumentError(
            "trial-cluster",
            f"has {small.devices} devices, the cluster {large.devices}; name a smaller one",
        )


def in_small(
    request: Request, candidates: Sequence[TrialCandidate], small: ClusterSpec, called: str
) -> InSmall:
    """Return the plans with what is tried for them; DocumentError if none can be."""
    large = request.cluster
    trials: dict[str, SmallTrial] = {}
    for candidate in candidates:
        stand_in = _stand_in(request, candidate.plan, small, called)
        if stand_in is not None:
            trials.setdefault(stand_in.candidate.plan.digest, stand_in)
    if not trials:
        raise DocumentError(
            "trial-cluster",
            f"has {small.devices} devices, on which no plan of {large.name} can be tried in small; "
            "give more, or a smaller model by --model",
        )
    tier_names = {tier.name for tier in small.tiers}
    used = [
        {axis: _tier(candidate.plan.layout, axis, large) for axis in AXES}
        for candidate in candidates
    ]
    missing = {tier.name for tier in large.tiers} - tier_names
    doublings = math.log2(large.devices / small.devices)
    return InSmall(
        candidates=tuple(
            replace(
                candidate,
                option=replace(
                    candidate.option,
                    doublings=doublings,
                    unseen_links=tiers["data"] in missing,
                ),
            )
            for candidate, tiers in zip(candidates, used, strict=True)
        ),
        stand_ins=tuple(trials.values()),
        unseen=tuple(
            tier.name
            for tier in large.tiers
            if tier.name in missing and any(tier.name in tiers.values() for tiers in used)
        ),
    )


def _stand_in(request: Request, plan: Plan, small: ClusterSpec, called: str) -> SmallTrial | None:
    """Return the stand-in of a plan, with as many layers as fit; None where nothing does."""
    layout = small_layout(plan.layout, request.cluster, small)
    if layout is None:
        return None
    job = replace(request.job, global_batch=layout.micro_batch * layout.micro_batches * layout.data)
    for model, config in _shorter(request.model, plan, layout):
        asked = replace(
            request,
            model=model,
            cluster=small,
            job=job,
            pins=_pins(plan, layout),
            called=called,
            fit_probability=SURE_TO_FIT,
        )
        try:
            answer = search(asked)
        except (NoPlanFits, DocumentError):
            continue
        trained_as = answer.plan.model_copy(update={"training": plan.training})
        return SmallTrial(
            candidate=trial_candidate(asked, trained_as, answer.prediction),
            request=asked,
            config=config,
        )
    return None


def small_layout(layout: Layout, large: ClusterSpec, small: ClusterSpec) -> Layout | None:
    """Return a layout as it is tried on fewer devices; None where they are too few.

    No axis goes over other links than the large one's where the smaller cluster has those.  Among
    the remaining layouts, it is the one that shows most axes over their own links, on most devices.
    """
    tier_names = {tier.name for tier in small.tiers}
    wanted = {axis: _tier(layout, axis, large) for axis in AXES}

    def degrees_shown(layout: Layout) -> tuple[int, ...]:
        same = sum(_tier(layout, axis, small) == wanted[axis] for axis in AXES)
        return same, layout.devices, layout.pipeline, layout.data_shard

    def wrong(layout: Layout) -> bool:
        return any(
            _tier(layout, a, small) not in (None, wanted[a])
            for a in AXES
            if wanted[a] in tier_names
        )

    every = (smaller for smaller in _fewer(layout, small.devices) if not wrong(smaller))
    return max(every, key=degrees_shown, default=None)


def _fewer(layout: Layout, devices: int) -> Iterator[Layout]:
    """Yield the layouts of at most `devices` that keep the shapes of products."""
    inner = layout.tensor * layout.context
    divided = layout.expert * layout.expert_tensor
    pipelines, shards, replicas = (
        [n for n in _divisors(degree) if n * inner <= devices]
        for degree in (layout.pipeline, layout.data_shard, layout.data_replicate)
    )
    for pipeline, shard, replicate in itertools.product(pipelines, shards, replicas):
        if inner * pipeline * shard * replicate > devices or inner * shard % divided:
            continue
        if layout.zero and shard == 1 < replicate:
            continue  # states that are divided among one rank are whole
        share = math.ceil(layout.micro_batches * pipeline / layout.pipeline)
        count = min(MOST_MICRO_BATCHES, share)
        yield replace(
            layout,
            pipeline=pipeline,
            data_shard=shard,
            data_replicate=replicate,
            schedule=layout.schedule if pipeline > 1 else PLAIN,
            virtual_stages=layout.virtual_stages if pipeline > 1 else 1,
            micro_batches=-(-count // pipeline) * pipeline,
            reshard_after_forward=None
            if (layout.reshard_after_forward or shard) >= shard
            else layout.reshard_after_forward,
        )


def _divisors(most: int) -> Iterator[int]:
    """Yield the divisors of a degree, 1 first.

    >>> list(_divisors(12))
    [1, 2, 3, 4, 6, 12]
    """
    yield from (n for n in range(1, most + 1) if most % n == 0)


def _tier(layout: Layout, axis: str, cluster: ClusterSpec) -> str | None:
    """Return the tier that ranks of an axis need to reach each other; None: it has one rank."""
    if getattr(layout, axis) == 1:
        return None
    members = ("data_shard", "data_replicate") if axis == "data" else (axis,)
    last = max(place for place, name in enumerate(layout.order) if name in members)
    reach = math.prod(getattr(layout, name) for name in layout.order[: last + 1])
    return next(tier.name for tier in cluster.tiers if tier.devices >= reach)


def _shorter(
    model: ModelGraph, plan: Plan, layout: Layout
) -> Iterator[tuple[ModelGraph, dict[str, Any] | None]]:
    """Yield the model with fewer and fewer blocks, of each kind one at least.

    A user's own model is what its code makes: it keeps its layers.
    """
    source = model.source or model.name
    a = model.architecture
    if is_own(source) or a is None or model.edges:
        yield model, None
        return
    config = _config(source)
    key = next((name for name in LAYER_KEYS if name in config), None)
    if key is None:
        yield model, None
        return
    each = a.layers / plan.layout.stages
    blocks = min(a.layers, max(1, round(each)) * layout.stages)
    kinds = {layer.kind for layer in model.layers}
    while blocks >= layout.stages:
        short = _with_blocks(config, key, blocks)
        name = name_of(f"{model.name[:150]}-of-{blocks}-layers")
        try:
            graph = graph_of(architecture_of(short, name=name), name=name, source=name)
        except DocumentError:
            return
        if {layer.kind for layer in graph.layers} != kinds:
            return
        yield graph, short
        blocks = (blocks // layout.stages // 2) * layout.stages


def _config(source: str) -> dict[str, Any]:
    """Return the configuration that a model is named by."""
    path = Path(source)
    if is_folder(path) or path.suffix == ".json":
        data = plain(read_text(path / "config.json" if is_folder(path) else path))
        return data if isinstance(data, dict) else {}
    return model_config(source)


def _with_blocks(config: dict[str, Any], key: str, blocks: int) -> dict[str, Any]:
    """Return a configuration with its first blocks alone; what is listed by block is cut too."""
    before = config[key]
    return {
        name: value[:blocks] if isinstance(value, list) and len(value) == before else value
        for name, value in config.items()
    } | {key: blocks}


def _pins(plan: Plan, layout: Layout) -> Pins:
    """Return the pins that leave only the cuts of a stand-in's stages open."""
    placed = Counter(
        (layer.recompute, layer.activations) for stage in plan.stages for layer in stage.layers
    )
    (recompute, activations), _ = placed.most_common(1)[0]
    axes = {name: getattr(layout, name) for name in LIKE_LAYOUTS}
    return Pins(
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        pipeline=layout.pipeline,
        data=layout.data,
        data_shard=layout.data_shard if layout.zero else None,
        zero=layout.zero if layout.data > 1 else None,
        micro_batch=layout.micro_batch,
        schedule=layout.schedule if layout.pipeline > 1 else None,
        virtual_stages=layout.virtual_stages if layout.pipeline > 1 else None,
        recompute=recompute,
        activations=activations,
        loss=layout.loss or "full",
        order=layout.order,
        allowed=frozenset(("stale", "compress", "offload", "async-tensor")),
        **axes,
    )
