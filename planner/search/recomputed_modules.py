"""Sets of modules that blocks may recompute under a framework that recomputes modules one by one.

Each set is a framework's option of its own, so each has a search of its own, whose space has
everything that the search without has.  To recompute never shortens the step of a layout: such a
search finds more only where a faster layout does not fit, so the others are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.catalog import framework as framework_called
from meshwright.planner.documents.framework import CHEAP_MODULES
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.search.proof_budget import Effort
from meshwright.planner.search.search import search

if TYPE_CHECKING:
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.framework_space import RecomputeModule
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.requests.request import Request
    from meshwright.planner.search.cluster_parts import PartAnswer

_INSIDE_OF_EXPERTS: frozenset[RecomputeModule] = frozenset({"moe-act", "shared-experts"})
_NO_LIMIT_BYTES = 10**15
_UNPROVEN = Effort(
    likely=1, tried=1, families=0, memory_stages=0, cut_stages=0, layouts=0, solved=0, programs=0
)


def with_modules(request: Request, plain: PartAnswer | None) -> Iterator[Request]:
    """Yield a request under each set of modules that may have a faster plan than the plain answer.

    There are none where the user has asked for none or for all to be recomputed, or where no plan
    would be faster if all of them fitted.
    """
    sets = list(module_sets(request.model, request.framework))
    if request.pins.recompute in ("none", "full") or not sets:
        return
    if plain is not None and not _memory_binds(request, plain.answer.closed_form.objective_s):
        return
    for modules in sets:
        words = (request.framework.name, *(f"recompute-{module}" for module in modules))
        yield replace(request, framework=framework_called("+".join(words)))


def module_sets(model: ModelGraph, framework: Framework) -> Iterator[tuple[RecomputeModule, ...]]:
    """Yield the sets of modules that a search tries: each alone, the cheap ones, those and more."""
    a = model.architecture
    if framework.space is None or a is None or framework.recompute.modules:
        return
    experts, latent = a.experts, a.latent is not None
    has = {
        "layernorm": True,
        "mla-up-proj": latent,
        "mlp": experts is None or experts.dense_layers > 0,
        "moe": experts is not None,
        "moe-act": experts is not None,
        "shared-experts": experts is not None and experts.shared > 0,
    }
    present = [module for module in framework.space.modules if has.get(module, False)]
    cheap = [module for module in present if module in CHEAP_MODULES]
    costly = [module for module in present if module not in CHEAP_MODULES]
    unions = [[module] for module in present]
    unions += [cheap, *([*cheap, module] for module in costly), present]
    yield from dict.fromkeys(tuple(_without_inner(union)) for union in unions if union)


def _without_inner(modules: list[RecomputeModule]) -> list[RecomputeModule]:
    """Return modules without those that are inside of another."""
    inner = _INSIDE_OF_EXPERTS if "moe" in modules else frozenset()
    return [module for module in modules if module not in inner]


def uses_modules(plan: Plan) -> bool:
    """Return True if a layer of the plan recomputes modules."""
    return "+recompute-" in plan.framework and any(
        layer.recompute == "selective" for stage in plan.stages for layer in stage.layers
    )


def recomputed_modules(plan: Plan) -> Iterator[str]:
    """Yield a note of the modules that blocks recompute."""
    if uses_modules(plan):
        words = plan.framework.split("+")
        modules = [word.removeprefix("recompute-") for word in words if "recompute-" in word]
        yield f"blocks recompute {' and '.join(modules)} alone (recompute=selective)"


def _memory_binds(request: Request, closed_form_s: float) -> bool:
    """Return True if a plan would be faster in the closed form if devices had any memory."""
    groups = tuple(
        group.model_copy(
            update={
                "accelerator": group.accelerator.model_copy(
                    update={"memory_bytes": _NO_LIMIT_BYTES}
                )
            }
        )
        for group in request.cluster.groups
    )
    roomy = replace(request, cluster=request.cluster.model_copy(update={"groups": groups}))
    below_s = math.nextafter(closed_form_s, 0.0)
    try:
        search(roomy, below_s=below_s, effort=_UNPROVEN)
    except NoPlanFits:
        return False
    return True
