"""meshwright finds the fastest way to train your model on your machines, proves it, and runs it.

    import meshwright

    plan = meshwright.plan(build, "local:2", batch=example, loss=loss, global_batch=64)
    engine = meshwright.Engine(build, plan, loss=loss, optimizer=sgd, batch=example)
    for batch in loader:
        result = engine.step(engine.slice(batch))

One function here, and one command, for each thing a user asks.  Nothing is imported before it is
used: torch only by `Engine`, and by `plan` of a module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.functions import (
        compare,
        export,
        import_plan,
        load,
        plan,
        predict,
        profile,
        save,
        search,
        tensor_styles,
        whatif,
    )
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Plan
    from meshwright.planner.documents.prediction import Certificate, Prediction
    from meshwright.planner.documents.profile import Profile
    from meshwright.planner.errors import (
        BatchError,
        DocumentError,
        HandedOver,
        LaunchError,
        MeshwrightError,
        NoPlanFits,
        OptimizerError,
        PlanError,
        RecordError,
    )
    from meshwright.planner.search.answer import Answer
    from meshwright.planner.whatif.study import Study
    from meshwright.runtime.core.auxiliary_loss import add_loss, batch_sum
    from meshwright.runtime.core.global_batch_loss import whole_batch
    from meshwright.runtime.engine.engine import Engine, StepResult
    from meshwright.runtime.engine.losses.named_loss import token_loss
    from meshwright.runtime.parallel.attention_api import attention

__all__ = [
    "Answer",
    "BatchError",
    "Certificate",
    "ClusterSpec",
    "DocumentError",
    "Engine",
    "Framework",
    "HandedOver",
    "LaunchError",
    "MeshwrightError",
    "ModelGraph",
    "NoPlanFits",
    "OptimizerError",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "RecordError",
    "StepResult",
    "Study",
    "add_loss",
    "attention",
    "batch_sum",
    "compare",
    "export",
    "import_plan",
    "load",
    "plan",
    "predict",
    "profile",
    "save",
    "search",
    "tensor_styles",
    "token_loss",
    "whatif",
    "whole_batch",
]

_FILES = {
    "Answer": "meshwright.planner.search.answer",
    "BatchError": "meshwright.planner.errors",
    "Certificate": "meshwright.planner.documents.prediction",
    "ClusterSpec": "meshwright.planner.documents.cluster",
    "DocumentError": "meshwright.planner.errors",
    "Engine": "meshwright.runtime.engine.engine",
    "HandedOver": "meshwright.planner.errors",
    "LaunchError": "meshwright.planner.errors",
    "MeshwrightError": "meshwright.planner.errors",
    "ModelGraph": "meshwright.planner.documents.model",
    "NoPlanFits": "meshwright.planner.errors",
    "OptimizerError": "meshwright.planner.errors",
    "Plan": "meshwright.planner.documents.plan",
    "PlanError": "meshwright.planner.errors",
    "Prediction": "meshwright.planner.documents.prediction",
    "Profile": "meshwright.planner.documents.profile",
    "RecordError": "meshwright.planner.errors",
    "Framework": "meshwright.planner.documents.framework",
    "StepResult": "meshwright.runtime.engine.engine",
    "Study": "meshwright.planner.whatif.study",
    "add_loss": "meshwright.runtime.core.auxiliary_loss",
    "attention": "meshwright.runtime.parallel.attention_api",
    "batch_sum": "meshwright.runtime.core.auxiliary_loss",
    "token_loss": "meshwright.runtime.engine.losses.named_loss",
    "whole_batch": "meshwright.runtime.core.global_batch_loss",
}
"""Modules of the names that are not in meshwright.api.functions."""


def __getattr__(name: str) -> Any:
    """Import a name on its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    value = getattr(importlib.import_module(_FILES.get(name, "meshwright.api.functions")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what there is, imported or not."""
    return __all__
