"""Going on with fewer devices: the same training planned again for what is left."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from meshwright.planner.documents import document
from meshwright.planner.documents.axes import LAYOUT_AXES
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Profiles
from meshwright.planner.errors import DocumentError, LaunchError, NoPlanFits
from meshwright.planner.requests.pins import Allowance, Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import schedule_of
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.search import search

VISIBLE = "CUDA_VISIBLE_DEVICES"
TIE = 1.03
"""Plans whose steps are predicted to take at most this times the fastest tie with it."""


def for_fewer(
    wanted: Plan,
    graph: ModelGraph,
    machine: ClusterSpec,
    measured: Profiles,
    *,
    left: int,
    each: int | None = None,
    folder: Path,
) -> Path:
    """Plan the same training for the `left` nodes, or devices of one node; return the plan's file.

    Some of a node's devices may be left out if that is faster, as many of each node.  Nodes have
    `each` devices where that is given: one of them has lost some.
    """
    clusters = _smaller(machine, left, each)
    return planned_again(wanted, graph, clusters, measured, folder=folder)


def planned_again(
    wanted: Plan,
    graph: ModelGraph,
    clusters: Iterable[ClusterSpec],
    measured: Profiles,
    *,
    folder: Path,
) -> Path:
    """Plan the same training for the best of some clusters; return the plan's file.

    The step stays what it was: sequences, global batch, precision, optimizer.  The plan and the
    cluster that it is for are written into `folder`.  LaunchError if no plan fits.
    """
    if schedule_of(wanted.schedule).stale:
        raise LaunchError(
            f"replan: the plan's schedule is {wanted.schedule}, whose stale gradients depend on "
            "the pipeline; plan again by hand"
        )
    best: Answer | None = None
    for cluster in clusters:
        asked = replace(
            Request.of_plan(wanted, graph, cluster, measured),
            pins=Pins(allowed=_allowances(wanted)),
        )
        with contextlib.suppress(NoPlanFits):
            best = search(
                replace(asked, called=str(folder / f"cluster-of-{cluster.devices}.yaml")),
                below_s=math.inf if best is None else best.closed_form.objective_s,
            )
            chosen = cluster
    if best is None:
        raise LaunchError(
            f"replan: no plan of {graph.name} fits what is left of the devices or their memory; "
            "checkpoints can be resumed on more devices"
        )
    plan = least_moved(best, wanted).model_copy(
        update={
            "model": wanted.model,
            "training": wanted.training,
            "timeout_s": wanted.timeout_s,
        }
    )
    document.write(chosen, plan.cluster)
    path = folder / f"plan-for-{chosen.devices}.yaml"
    document.write(plan, path)
    return path


def least_moved(answer: Answer, wanted: Plan) -> Plan:
    """Return the plan that divides the state most like `wanted`, of those that tie for the fastest.

    Axes that differ from those of `wanted` are counted; data ranks are fewer in any case.
    """
    most_s = TIE * answer.prediction.step_time_s
    tied = [
        finalist.plan for finalist in answer.finalists if finalist.prediction.step_time_s <= most_s
    ]
    return min([answer.plan, *tied], key=lambda plan: _unlike(plan, wanted))


def _unlike(plan: Plan, wanted: Plan) -> int:
    axes = ("tensor", "context", "pipeline", "expert")
    pairs = [(getattr(plan.mesh, axis), getattr(wanted.mesh, axis)) for axis in axes]
    pairs += [(plan.zero == 3, wanted.zero == 3), (plan.schedule, wanted.schedule)]
    return sum(value != other for value, other in pairs)


def _smaller(machine: ClusterSpec, left: int, each: int | None) -> Iterator[ClusterSpec]:
    """Yield the cluster with `left` nodes, or its one node with `left` devices, then parts of it.

    Every node that is left takes part, with all of its devices or fewer.
    """
    if machine.is_mixed:
        raise LaunchError(f"replan: {machine.name} has several device types; plan again by hand")
    [group] = machine.groups
    nodes, most = (left, each or group.devices_per_node) if group.nodes > 1 else (1, left)
    for devices in range(most, 0, -1):
        if (nodes, devices) == (group.nodes, group.devices_per_node):
            yield machine
        else:
            yield machine.smaller(nodes=nodes, devices_per_node=devices)


def _allowances(wanted: Plan) -> frozenset[Allowance]:
    """Return the allowances that the plan uses already."""
    treated = {item.activations for stage in wanted.all_stages for item in stage.layers}
    allowed: set[Allowance] = set()
    for word in get_args(Allowance):
        chosen = [axis for axis in LAYOUT_AXES if axis.allowance == word]
        if word in treated or any(getattr(wanted, axis.name) != axis.usual for axis in chosen):
            allowed.add(word)
    return frozenset(allowed)


def leave_out(local_rank: int, devices: int) -> None:
    """Hide a lost device from ranks that are started from now on."""
    seen = os.environ.get(VISIBLE)
    names = seen.split(",") if seen else [str(index) for index in range(devices)]
    if local_rank >= len(names):
        raise DocumentError(VISIBLE, f"is '{seen}', which has no device {local_rank}")
    os.environ[VISIBLE] = ",".join(names[:local_rank] + names[local_rank + 1 :])
