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
    from meshwright.library import (
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
    from planner.documents.cluster import ClusterSpec
    from planner.documents.model import ModelGraph
    from planner.documents.plan import Plan
    from planner.documents.prediction import Certificate, Prediction
    from planner.documents.profile import Profile
    from planner.documents.stack import Stack
    from planner.errors import (
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
    from planner.search.answer import Answer
    from planner.whatif.study import Study
    from runtime.engine import Engine, StepResult
    from runtime.inner_loss import add_loss, batch_sum
    from runtime.named_attention import attention
    from runtime.token_loss import token_loss
    from runtime.whole_batch import whole_batch

__all__ = [
    "Answer",
    "BatchError",
    "Certificate",
    "ClusterSpec",
    "DocumentError",
    "Engine",
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
    "Stack",
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
    "Answer": "planner.search.answer",
    "BatchError": "planner.errors",
    "Certificate": "planner.documents.prediction",
    "ClusterSpec": "planner.documents.cluster",
    "DocumentError": "planner.errors",
    "Engine": "runtime.engine",
    "HandedOver": "planner.errors",
    "LaunchError": "planner.errors",
    "MeshwrightError": "planner.errors",
    "ModelGraph": "planner.documents.model",
    "NoPlanFits": "planner.errors",
    "OptimizerError": "planner.errors",
    "Plan": "planner.documents.plan",
    "PlanError": "planner.errors",
    "Prediction": "planner.documents.prediction",
    "Profile": "planner.documents.profile",
    "RecordError": "planner.errors",
    "Stack": "planner.documents.stack",
    "StepResult": "runtime.engine",
    "Study": "planner.whatif.study",
    "add_loss": "runtime.inner_loss",
    "attention": "runtime.named_attention",
    "batch_sum": "runtime.inner_loss",
    "token_loss": "runtime.token_loss",
    "whole_batch": "runtime.whole_batch",
}
"""Where what is not in meshwright.library stands."""


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    found = getattr(importlib.import_module(_FILES.get(name, "meshwright.library")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List what there is, imported or not."""
    return __all__
