"""Plans without a search: a layout's fields, for a module that a script builds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from meshwright.planner.documents.axes import AXIS_NAMES
from meshwright.planner.documents.plan import (
    Mesh,
    PlacedLayer,
    Plan,
    PlannedGroup,
    PlannedModel,
    Share,
    Stage,
)
from meshwright.planner.documents.training import Training
from meshwright.planner.documents.units import name_of
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules import PLAIN
from meshwright.runtime.tracing.tracer import Recorder

_OF_PLAN = (
    "zero",
    "schedule",
    "virtual_stages",
    *AXIS_NAMES,
)
"""Fields of a layout that a plan has under the same names."""
FIELDS = (
    *("pipeline", "tensor", "context", "expert", "data_replicate", "micro_batch", "micro_batches"),
    *("recompute", "activations", "precision", "lora", "shares", "seed", "cuts", *_OF_PLAN),
)
"""Fields of a layout; ranks that no other axis uses are data-parallel."""


def script_plan(
    recorder: Recorder,
    layout: Mapping[str, Any],
    *,
    name: str,
    ranks: int,
    global_batch: int | None,
    device: str,
) -> Plan:
    """Return the plan of a layout: layers in equal numbers on each stage, unless `cuts` says.

    Without `micro_batch` or `micro_batches` a pipeline has two micro-batches for each stage, and
    data parallelism one.  `shares` are the micro-batches of each data-parallel rank, where they
    differ.  Without `global_batch` each rank has batches of its own, which count as samples.
    Raises DocumentError where the fields do not go together.
    """
    unknown = [field for field in layout if field not in FIELDS]
    if unknown:
        raise DocumentError(
            "plan", f"has no field '{unknown[0]}'; a layout has {', '.join(FIELDS)}"
        )
    zero, pipeline = layout.get("zero", 0), layout.get("pipeline", 1)
    data = ranks
    for field in ("pipeline", "tensor", "context"):
        degree = layout.get(field, 1)
        if data % degree:
            raise DocumentError(
                f"plan.{field}", f"{degree} does not divide {ranks} ranks; change either"
            )
        data //= degree
    replicate = layout.get("data_replicate", 1 if zero else data)
    if data % replicate:
        raise DocumentError(
            "plan.data_replicate",
            f"{replicate} does not divide {data} data-parallel ranks; change either",
        )
    if global_batch is None:
        global_batch = data * layout.get("micro_batches", 1)
    if global_batch % data and "shares" not in layout:
        raise DocumentError(
            "batch",
            f"has {global_batch} samples for {data} data-parallel ranks; "
            "give one for each at least, or plan fewer",
        )
    samples = global_batch // data
    cluster = f"{ranks} x {device}"
    shares = layout.get("shares")
    stages = pipeline * layout.get("virtual_stages", 1)
    if shares:
        count = layout.get("micro_batches", max(shares))
        size = layout.get("micro_batch", global_batch // sum(shares))
    elif "micro_batch" in layout:
        size = layout["micro_batch"]
        count = layout.get("micro_batches", samples // size)
    else:
        count = layout.get("micro_batches", min(2 * stages, samples) if pipeline > 1 else 1)
        size = samples // count
    layers = [layer.name for layer in recorder.first.layers]
    if stages > len(layers):
        way_out = f" ({recorder.refused})" if recorder.refused else ""
        raise DocumentError(
            "plan.pipeline",
            f"asks for {stages} stages, and {name} has {len(layers)} layers: "
            f"{', '.join(layers[:4])}{way_out}; ask for fewer, or name modules that a stage may "
            'hold: Engine(units=["net.0", "net.1", ...])',
        )
    least, more = divmod(len(layers), stages)
    cuts = layout.get("cuts") or [least + (stage < more) for stage in range(stages)]
    ends = list(itertools.accumulate(cuts))
    treated = {name: layout[name] for name in ("recompute", "activations") if name in layout}
    placed = [PlacedLayer(layer=name, **treated) for name in layers]
    label = name_of(name)
    return Plan(
        model=PlannedModel(name=label, source=f"script:{label}", digest=recorder.first.digest),
        cluster=cluster,
        groups=(PlannedGroup(name=cluster, devices=ranks),) if shares else None,
        shares=tuple(Share(group=cluster, micro_batches=count) for count in shares)
        if shares
        else None,
        seq_len=1,
        global_batch=global_batch,
        precision=layout.get("precision", "fp32"),
        mesh=Mesh(
            tensor=layout.get("tensor", 1),
            context=layout.get("context", 1),
            expert=layout.get("expert", 1),
            data_replicate=replicate,
            data_shard=data // replicate,
            pipeline=pipeline,
        ),
        micro_batch=size,
        micro_batches=count,
        training=Training(seed=layout.get("seed", 0), lora=layout.get("lora")),
        stages=tuple(
            Stage(layers=tuple(placed[begin:end]))
            for begin, end in zip([0, *ends], ends, strict=False)
        ),
        **{"zero": 0, "schedule": PLAIN}
        | {name: layout[name] for name in _OF_PLAN if name in layout},
    )
