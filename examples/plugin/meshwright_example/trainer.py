"""Plans as the configuration of a trainer that knows data parallelism and recomputation alone."""

from collections.abc import Iterator

import yaml

from meshwright.planner.framework_configs.configuration import Written
from meshwright.planner.framework_configs.exportable_plan import FrameworkPlan


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what the trainer does not do."""
    if wanted.plan.mesh.pipeline > 1:
        yield "it has no pipeline"


def text(wanted: FrameworkPlan) -> str:
    """Return the trainer's configuration."""
    plan = wanted.plan
    return yaml.safe_dump(
        {
            "replicas": plan.layout.data,
            "samples": plan.job.global_batch,
            "recompute": sorted(
                {layer.recompute for stage in plan.stages for layer in stage.layers}
            ),
        }
    )


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what is set in the trainer's own script."""
    yield f"precision {wanted.plan.job.precision}"


WRITTEN = Written(obstacles, text, outside)
