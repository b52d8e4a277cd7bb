"""What an optimizer of whole matrices sends in a step is what the planner prices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright
from benchmarks.torch_internals import fake_store
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.memory.resident_states import ResidentStates, matrices_bytes
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.runtime.core.batches import samples_in
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.module_graph import script_model
from tests.runtime.parallel.test_tensor_styles import Model, batch_of, loss

RANKS = 4
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "zero 1": (
        Layout(zero=1, data_shard=RANKS, micro_batch=2, micro_batches=1),
        {"zero": 1},
    ),
    "zero 3": (
        Layout(zero=3, data_shard=RANKS, micro_batch=2, micro_batches=1),
        {"zero": 3},
    ),
    "replicated": (Layout(data_replicate=RANKS, micro_batch=2, micro_batches=1), {}),
    "tensor": (
        Layout(tensor=RANKS, micro_batch=8, micro_batches=1),
        {"tensor": RANKS},
    ),
}


class Sent(TorchDispatchMode):
    """Bytes of what collectives make, by name; each step's own all-reduce left out."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "_c10d_functional::all_gather_into_tensor":
            self._add("all_gather", made)
        if name == "c10d::broadcast_":
            self._add("broadcast", args[0][0])
        return made

    def _add(self, name: str, tensor: Tensor) -> None:
        self.by_name[name] = self.by_name.get(name, 0) + tensor.nbytes


def graph(optimizer: Any) -> ModelGraph:
    return script_model(
        Model(), batch_of(0), loss=loss, name="build", optimizer=optimizer, degrees=(RANKS,)
    )


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_gathers_and_broadcasts(name: str) -> None:
    layout, fields = LAYOUTS[name]
    model = graph(torch.optim.Adafactor)
    request = Request(model, resolve_cluster("4xa100-sxm-80gb"), request_job())
    sharing = ResidentStates(model, request.job, request.framework).sharing(layout)
    wanted = sum(sum(matrices_bytes(layer, sharing, layout.tensor)) for _, layer in model.chain)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=fake_store())
    try:
        engine = Engine(
            Model, fields, loss=loss, optimizer=torch.optim.Adafactor, batch=batch_of(0)
        )
        engine.forward_backward(engine.slice(batch_of(0)))
        engine.gradients()
        with Sent() as sent:
            engine.optimizer_step()
    finally:
        dist.destroy_process_group()

    # FSDP divides along the first dim, whose rows are filled up to a multiple of the ranks.
    filled = sum(
        4 * p.numel() // p.shape[0] * (-(-p.shape[0] // RANKS) * RANKS - p.shape[0])
        for p in Model().parameters()
        if name.startswith("zero")
    )
    assert sent.by_name.get("all_gather", 0) == 2 * (wanted + filled)
    assert sent.by_name.get("broadcast", 0) == wanted
    assert (wanted > 0) == (name != "replicated")


def request_job() -> Any:

    return Job(seq_len=1, global_batch=samples_in(batch_of(0)), precision="fp32")


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["zero 1", "tensor"])
@pytest.mark.matrix
def test_they_take_their_time_once_per_step(name: str) -> None:
    layout, _ = LAYOUTS[name]
    found = {}
    for optimizer in (torch.optim.Adafactor, torch.optim.Adagrad):
        tables = CostTables(
            Request(graph(optimizer), resolve_cluster("4xa100-sxm-80gb"), request_job())
        )
        costs = tables.costs_of(layout)
        found[optimizer] = sum(costs.parts[layer.kind][0].sync_s for _, layer in tables.model.chain)
    model = graph(torch.optim.Adafactor)
    axis = 0 if name == "tensor" else None
    group = (
        tables._figures._groups_of(layout)[axis]
        if axis is not None
        else tables._parts.links(layout).shard
    )
    sharing = tables.sharing(layout)
    link: Callable[..., float] = tables.rates.link_s
    wanted = sum(
        2 * link("all_gather", size, group) + link("broadcast", size, group)
        for _, layer in model.chain
        for size in matrices_bytes(layer, sharing, layout.tensor)
    )
    more = found[torch.optim.Adafactor] - found[torch.optim.Adagrad]
    assert more == pytest.approx(wanted, rel=1e-9)


@pytest.mark.matrix
def test_the_owner_keeps_whole_matrices() -> None:
    told = {}
    for optimizer in (torch.optim.Adafactor, torch.optim.Adagrad):
        plan = meshwright.plan(
            Model,
            "4xa100-sxm-80gb",
            batch=batch_of(0),
            loss=loss,
            optimizer=optimizer,
            fix=["dp=4", "zero=1", "shard=4"],
        )
        told[optimizer] = meshwright.predict(plan).stages[0].memory_parts["optimizer"]
    count = sum(p.numel() for p in Model().parameters())
    # Adagrad keeps 4 bytes a parameter; Adafactor a row and a column of each matrix, whole vectors,
    # and at its owner the matrix itself.
    kept = sum(4 * (sum(p.shape) if p.ndim > 1 else p.numel()) for p in Model().parameters())
    assert told[torch.optim.Adagrad] == pytest.approx(4 * count / 4)
    assert told[torch.optim.Adafactor] == pytest.approx((kept + 4 * count) / 4)
