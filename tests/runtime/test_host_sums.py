"""pinned_memory.py: gradients that arrive on the host are summed there, whenever copies end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.runtime.core import pinned_memory as host


@dataclass
class Copies:
    """Stands for a stream and its events: copies end at once, or only when they are waited for."""

    ended: bool
    waits: int = 0

    def record_event(self) -> Copies:
        return self

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def parameters(tmp_path: Path) -> Iterator[list[nn.Parameter]]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    mesh = init_device_mesh("cpu", (1,))
    yield [
        nn.Parameter(DTensor.from_local(torch.zeros(size, 2), mesh, [Shard(0)])) for size in (3, 5)
    ]
    host.forget_sums()
    dist.destroy_process_group()


def arrive(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter its gradient as FSDP does behind a micro-batch."""
    assert parameter.grad is None  # else FSDP would copy while the host waits
    assert isinstance(parameter.data, DTensor)
    mesh = parameter.data.device_mesh
    parameter.grad = DTensor.from_local(value.clone(), mesh, [Shard(0)])
    for hook in parameter._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
        hook(parameter)


@pytest.mark.parametrize("ended", [True, False])
def test_gradients_of_micro_batches_are_summed(
    parameters: list[nn.Parameter], ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(ended)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: copies)
    for parameter in parameters:
        host.sum_at_home(parameter)
    made = [[torch.randn(*parameter.shape) for parameter in parameters] for _ in range(3)]

    with torch.no_grad():
        for gradients in made:
            for parameter, value in zip(parameters, gradients, strict=True):
                arrive(parameter, value)
    host.sum_gradients()

    for parameter, values in zip(parameters, zip(*made, strict=True), strict=True):
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.grad.to_local(), values[0] + values[1] + values[2])
    assert copies.waits == 4  # for each sum, and for none that FSDP waits for itself


def test_what_a_failed_step_left_is_in_no_other(
    parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Copies(ended=False))
    parameter = parameters[0]
    host.sum_at_home(parameter)
    with torch.no_grad():
        for _ in range(2):
            arrive(parameter, torch.ones(3, 2))

        host.forget_sums()
        arrive(parameter, torch.full((3, 2), 5.0))
    host.sum_gradients()

    assert isinstance(parameter.grad, DTensor)
    assert torch.equal(parameter.grad.to_local(), torch.full((3, 2), 5.0))
