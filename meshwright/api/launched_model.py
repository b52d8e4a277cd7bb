"""Figures of a plan that `launch` runs: of a model without an adapter, recorded ones.

The planner has figures of more families than the runtime has adapters.  The library's own class of
such a model trains as it was recorded, so that plans for our own runtime are made of the recording.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshwright.api.inputs import traced_model
from meshwright.api.plan_options import PlanOptions
from meshwright.planner.catalog import hub
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.document import is_there
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.model import RECORDED, ModelGraph, is_own, is_recorded
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.frameworks.native_limits import adapter_caveat, device_caveat
from meshwright.runtime.models.families import has_config

MOST_TRIED = 2**26
"""Parameters of a layer up to which a model is recorded by default; a larger one may fill
memory."""
TRIED_BYTES = 60
"""Bytes for each parameter of the largest layer while it is recorded, in copies in fp32."""
Options = TypeVar("Options", bound=PlanOptions)
UNRECORDED = "as its own class was recorded, no plan is made: "
"""Begin of the note that a plan uses figures of a model that launch refuses."""


def launched_model(
    graph: ModelGraph, cluster: str, options: Options
) -> tuple[ModelGraph, Options, tuple[str, ...]]:
    """Return the model and options that launch can run, or those given with a note of why not.

    Another framework than ours trains by its own code, of which the figures are.
    """
    given = (graph, options, ())
    is_foreign = base_of(options.framework) != "native" or is_own(graph.source or "")
    if is_foreign or options.lora or adapter_caveat(graph) is None:
        return given
    machine = resolve_cluster(cluster)
    if device_caveat(machine) is not None or launch_need(graph) is not None:
        return given
    seq_len = options.request(graph, machine, None, called=cluster).job.seq_len
    source = graph.source or ""
    try:
        folder = source if is_there(source) else str(hub.config_file(source).parent)
        recorded = traced_model(f"{folder}{RECORDED}", seq_len)
    except DocumentError as error:
        return graph, options, (f"{UNRECORDED}{error}",)
    return recorded, replace(options, seq_len=seq_len), ()


def _sight_of_targets(source: str) -> str | None:
    from meshwright.runtime.engine.traced_transformer import (  # noqa: PLC0415 - needs torch
        sight_of_targets,
    )

    return sight_of_targets(source)


def launch_need(graph: ModelGraph) -> str | None:
    """Return the need of a model without an adapter before its launch; None if nothing."""
    a, source = graph.architecture, graph.source or ""
    if a is None:
        return _sight_of_targets(source) if is_recorded(source) else None
    if a.family == "reference" or not a.causal or a.classes or a.patches is not None:
        decoder = "plan FOLDER:recorded if is_decoder is true in its config.json, or "
        return (
            f"launch trains causal language models alone; {decoder * (a.patches is None)}"
            "train it from your own script with meshwright.Engine "
            "(docs/how-to/train-your-script.md)"
        )
    if not has_config(Path(source)) and (is_there(source) or not hub.is_hub_name(source)):
        return "to launch it, save its config.json in a FOLDER, and: meshwright plan FOLDER"
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        return (
            f"to launch it, plan it again where {' and '.join(lacking)} can be imported: "
            "pip install 'meshwright[torch]'"
        )
    largest = max(layer.parameters for layer in graph.layers)
    if largest > MOST_TRIED:
        return (
            f"to launch it: meshwright plan {source}{RECORDED}, which takes about "
            f"{bytes_text(TRIED_BYTES * largest)} of this machine's memory"
        )
    return None
