"""A choice that one part of the project does not know is refused there, not taken for another.

mypy says the same of a new value before anything runs: each `match` ends in `assert_never`.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from meshwright.planner.catalog import native
from meshwright.planner.costs.activations import activation_cost
from meshwright.planner.costs.memory.state_bytes import StateSharding, state_types, states
from meshwright.planner.operators.operator_table import OperatorTable
from meshwright.planner.search.offload_choices import Saving, offload_s
from meshwright.runtime.engine import engine
from meshwright.runtime.techniques import activation_checkpointing as recompute
from meshwright.runtime.techniques import activation_offload as activations

NEW: Any = "new"
UNUSED: Any = None
FIGURES: Any = SimpleNamespace(stored_bytes=1.0)
BF16 = state_types(native(), "bf16")
SHARING = StateSharding(types=BF16, zero=3, shard=8, data=8, pipelined=False, accumulated=True)
TABLE = OperatorTable(kind="mlp", operators=(), input_bytes=1.0, output="x")


def reduction(wire: Any) -> object:
    """What an engine would sum gradients with over two replicas."""
    replicating = SimpleNamespace(get_group=lambda: None)
    place = SimpleNamespace(replicas=2, data=SimpleNamespace(replicating=replicating))
    of_two: Any = SimpleNamespace(plan=SimpleNamespace(gradient_compression=wire), _place=place)
    with patch.object(engine, "reduces_in_step", return_value=True):
        return engine.Engine._mean_over_replicas(of_two)


@pytest.mark.parametrize(
    "decide",
    [
        lambda: activation_cost(NEW, FIGURES, UNUSED, passed=0.0),
        lambda: activations.packing(nn.Identity(), NEW, UNUSED, first=True, last=True),
        lambda: TABLE.recomputed_operators(NEW),
        lambda: TABLE.stored_tensors(NEW),
        lambda: recompute.wrapped(nn.Identity(), NEW),
        lambda: states(8.0, replace(SHARING, offload=NEW)),
        lambda: offload_s(Saving(NEW, "full"), 1.0, UNUSED, UNUSED),
        lambda: replace(SHARING, wire=NEW).wire_bytes,
        lambda: reduction(NEW),
    ],
)
def test_a_choice_that_nobody_knows_is_refused(decide: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match="new"):
        decide()
