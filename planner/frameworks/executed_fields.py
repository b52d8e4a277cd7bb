"""Which fields of a Layout the runtime executes: for `meshwright launch`, and for a script.

Every field of Layout has a claim of each.  A value other than the field's default that no claim
covers is refused by name: by the search, by `launch` and by `meshwright.Engine` alike.  A field
that is new has no claim, and is refused until somebody executes it.

What goes with what stands in planner.frameworks.native_limits and in the data of its space; nothing
here depends on a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from meshwright.planner.documents.plan import Layout, Mesh


class Claim(NamedTuple):
    """What of a field is executed."""

    executes: Callable[[Layout], bool]
    """Whether a layout's value is; the default always is."""
    otherwise: str = ""
    """What is said of the others, behind the value: why not, and the way out."""


def _any(_: Layout) -> bool:
    return True


def _none(_: Layout) -> bool:
    return False


def _not_by_engine(way_out: str, executes: Callable[[Layout], bool] = _none) -> Claim:
    return Claim(executes, f"which meshwright.Engine does not execute; {way_out}")


UNCLAIMED = Claim(_none, "which nothing here executes; leave it out")

LAUNCH: Mapping[str, Claim] = {
    **dict.fromkeys(
        (
            "pipeline",
            "data_replicate",
            "data_shard",
            "context",
            "expert",
            "tensor",
            "zero",
            "schedule",
            "micro_batch",
            "micro_batches",
            "order",
            "virtual_stages",
            "offload",
            "gradient_wire",
            "prefetch",
            "reshard",
            "scales",
            "weight_wire",
            "dispatch",
            "relay",
            "loss",
            "compile",
            "tensor_overlap",
        ),
        Claim(_any),
    ),
    "expert_tensor": Claim(_none, "and ranks hold whole experts; use 1"),
    "sequence_parallel": Claim(
        lambda layout: layout.tensor == 1,
        "and tensor parallelism divides the residual stream here; use true",
    ),
}
"""By field: what runtime.parallel.data_parallel does with language models and chains of layers."""

SCRIPT: Mapping[str, Claim] = {
    **LAUNCH,
    "tensor_overlap": _not_by_engine("use none"),
    "sequence_parallel": _not_by_engine(
        "leave it out: the styles of your modules say what lies between them",
        lambda layout: layout.tensor == 1,
    ),
}
"""By field: what meshwright.runtime.engine.user_stage does with a module of the user's own."""


def unexecuted_fields(claims: Mapping[str, Claim], layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield (place in a plan, text) of each field with a value that is not executed.

    >>> list(unexecuted_fields(LAUNCH, Layout(tensor=2, sequence_parallel=False)))[0][0]
    'mesh.sequence_parallel'
    """
    for name, default in _DEFAULTS:
        value = getattr(layout, name)
        claim = claims.get(name, UNCLAIMED)
        if value != default and not claim.executes(layout):
            yield _place_of(name), f"is {_shown_value(value)}, {claim.otherwise}"


_DEFAULTS = tuple((field.name, field.default) for field in fields(Layout))


def _place_of(name: str) -> str:
    return f"mesh.{name}" if name in Mesh.model_fields else name


def _shown_value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | int():
            return str(value)
        case tuple():
            return "-".join(map(str, value))
        case _:
            return "set"
