"""Holders of a parameter where pipelines differ: the ranks of all kinds that sum its gradient.

A layer is on one stage of each pipeline, but pipelines of another kind are cut elsewhere.  So each
parameter has the group of all ranks whose stage has one of the layers that read it, and layers
between the cuts of all kinds have one group together.  Copies of a tied parameter on several stages
of a pipeline are in its group too: one sum over the group is that over copies and replicas.

Pipelines that are alike need none of it: their groups are those along the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.planner.documents.plan import Plan
from meshwright.runtime.core.mesh import Place, Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Ranks that hold a parameter, on pipelines of all kinds."""

    group: dist.ProcessGroup
    """Those of this rank's part along the tensor axis."""
    ranks: int
    """Number of all ranks, those of other parts included."""
    tied: bool
    """True if several stages of a pipeline hold a copy each."""


def holders_of(
    plan: Plan, place: Place, readers: Mapping[str, Iterable[str]]
) -> dict[str, Holders]:
    """Return the holders of each parameter that this rank has, by its name.

    `readers` are the names of the layers that read a parameter; all ranks call it with the same.
    """
    at = [
        {item.layer: stage for stage, placed in enumerate(kind.stages) for item in placed.layers}
        for kind in plan.kinds
    ]
    homes: dict[str, Stages] = {
        name: tuple(frozenset(of_kind[layer] for layer in layers) for of_kind in at)
        for name, layers in sorted((name, tuple(layers)) for name, layers in readers.items())
    }
    groups = place.holder_groups(homes.values())
    return {
        name: Holders(
            group=groups[stages],
            ranks=groups[stages].size() * place.degrees.tensor,
            tied=any(len(of_kind) > 1 for of_kind in stages),
        )
        for name, stages in homes.items()
        if stages in groups
    }
