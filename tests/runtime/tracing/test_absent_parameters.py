"""What a training loop does with parameters that another stage of a pipeline trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.errors import LaunchError
from meshwright.runtime.tracing.absent_parameters import (
    forget_absent_memory,
    mark_absent,
    refuse_absent_memory,
)


def absent_and_here() -> tuple[nn.Linear, nn.Linear, list[Exception]]:
    module = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    student, teacher = module["student"], module["teacher"]
    assert isinstance(student, nn.Linear)
    assert isinstance(teacher, nn.Linear)
    noticed: list[Exception] = []
    forget_absent_memory()
    mark_absent(module, teacher.parameters(), noticed.append)
    return student, teacher, noticed


def bind_anew(student: nn.Linear, teacher: nn.Linear) -> None:
    teacher.weight.data = 0.9 * teacher.weight.data + 0.1 * student.weight.data
    refuse_absent_memory([teacher.weight])


FOLLOWS: dict[str, Callable[[nn.Linear, nn.Linear], object]] = {
    "copy": lambda student, teacher: teacher.weight.copy_(student.weight),
    "lerp": lambda student, teacher: teacher.weight.lerp_(student.weight, 0.1),
    "data": lambda s, t: t.weight.data.mul_(0.9).add_(0.1 * s.weight.detach()),
    "foreach": lambda s, t: torch._foreach_lerp_([t.weight], [s.weight], 0.1),
    "state": lambda student, teacher: teacher.load_state_dict(student.state_dict()),
    "bound anew": bind_anew,
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_values_that_go_into_what_is_here_are_noticed_and_leave_it(name: str) -> None:
    student, teacher, noticed = absent_and_here()
    before = teacher.weight.clone()
    with torch.no_grad():
        FOLLOWS[name](student, teacher)
    assert "student.weight: is read by the training loop" in str(noticed[0])
    if name not in ("bound anew", "data"):  # what was done first in them is done
        assert torch.equal(teacher.weight, before)


LOOKS: dict[str, Callable[[Tensor, Path], object]] = {
    "float": lambda weight, _: float(weight.detach().norm()),
    "bool": lambda weight, _: bool((weight > 0).any()),
    "numpy": lambda weight, _: weight.detach().numpy(),
    "file": lambda weight, folder: torch.save({"weight": weight}, folder / "weight.pt"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_values_that_are_looked_at_are_refused(name: str, tmp_path: Path) -> None:
    student, _, noticed = absent_and_here()
    with pytest.raises(LaunchError, match=r"student\.weight: is read"):
        LOOKS[name](student.weight, tmp_path)
    assert not noticed


def test_what_is_done_to_all_parameters_alike_is_let_alone() -> None:
    student, teacher, noticed = absent_and_here()
    both = nn.ModuleList([student, teacher])
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.data.clamp_(-0.1, 0.1)
            parameter.mul_(0.5)
        torch._foreach_mul_(list(both.parameters()), 0.5)
        student.weight.copy_(teacher.weight)
    bound = {parameter.shape for parameter in both.parameters()}
    assert bound == {(2, 2), (2,)}
    assert teacher.weight.detach().abs().max().item() <= 0.0251
    assert not noticed
