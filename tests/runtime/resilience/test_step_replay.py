"""What a step gave is compared with what it gives again, and whose own loss differs is named."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from meshwright.planner.documents.plan import Plan  # noqa: E402
from meshwright.runtime.parallel.replicas import Replicas  # noqa: E402
from meshwright.runtime.resilience.step_replay import LEAST_NORMS, NEARLY, Replays, StepDiffered  # noqa: E402
from tests.runtime.ranks import Crew, on_ranks  # noqa: E402
from tests.runtime.rooms import plan_of  # noqa: E402


def compared(plan: Plan, own: list[float], loss: float) -> tuple[str, int | None] | None:
    """Return what ranks find whose own losses were 1, and that of all 2.5."""
    replays = Replays(plan, "cpu")
    replays.took(7, loss=2.5, norm=1.0, gradient=torch.tensor([1.0, 1.0]))
    again = torch.tensor([own[dist.get_rank()], 1.0])
    try:
        replays.compare(7, loss=loss, norm=1.0, gradient=again)
    except StepDiffered as found:
        return str(found), found.suspect
    return None


@pytest.mark.ranks
def test_the_only_rank_whose_own_loss_differs_is_named() -> None:
    plain, tensor = plan_of(data=2), plan_of(tensor=2)
    cases: list[tuple[Plan, list[float], float, Any]] = [
        (plain, [1.0, 1.0], 2.5, ...),
        (plain, [1.0, 1.5], 3.0, 1),
        (plain, [1.5, 1.5], 3.0, None),  # both read weights that one has made wrong
        (plain, [1.0, 1.0], 3.0, None),  # in the sum of all
        (tensor, [1.0, 1.5], 3.0, None),  # ranks of one tensor group have one loss
    ]
    with Crew(2) as crew:
        every = [crew.do(compared, plan, own, loss) for plan, own, loss, _ in cases]

    for found, (*_, suspect) in zip(every, cases, strict=True):
        assert found[0] == found[1]
        assert (found[0] is None) == (suspect is ...)
        if found[0] is not None:
            text, named = found[0]
            assert named == suspect
            assert "step 7 gave loss 2.5 and gradient norm 1, and 3 and 1 when it was done" in text
            assert ("rank 1's memory" if suspect == 1 else "some rank's memory") in text


def damaged(plan: Plan) -> tuple[int | None, bool]:
    """Return who is named where rank 1 makes a wrong gradient once, and whether squares are own."""
    rank = dist.get_rank()
    weight = nn.Parameter(torch.full((3, 2), 2.0))
    mean, replays = Replicas([(weight, dist.group.WORLD)], backwards=1), Replays(plan, "cpu")
    mean.measures_own = True
    for again in (False, True):
        hook = weight.register_hook(lambda grad: 1e3 * grad) if rank == 1 and not again else None
        loss = ((1.0 + rank) * weight).square().sum()
        loss.backward()
        mean.finish()
        if hook is not None:
            hook.remove()
        assert weight.grad is not None
        assert mean.own_square is not None
        norm, own = float(weight.grad.norm()), torch.stack((torch.zeros(()), mean.own_square))
        weight.grad = None
        if not again:
            replays.took(7, loss=2.5, norm=norm, gradient=own)
    right = float(own[1]) == 6 * (2 * (1.0 + rank) ** 2 * 2.0) ** 2
    try:
        replays.compare(7, loss=2.5, norm=norm, gradient=own)
    except StepDiffered as found:
        return found.suspect, right
    return None, right


@pytest.mark.ranks
def test_the_only_rank_whose_own_gradient_differs_is_named() -> None:
    assert on_ranks(2, damaged, plan_of(data=2)) == [(1, True), (1, True)]


def test_sums_of_accelerators_may_differ_a_little() -> None:
    replays = Replays(plan_of(), "cuda")
    replays.took(1, loss=2.0, norm=1.0, gradient=torch.zeros(2))

    replays.compare(1, loss=2.0 * (1 + NEARLY / 2), norm=1.0, gradient=torch.zeros(2))


def test_what_came_again_is_not_doubted_soon() -> None:
    replays = Replays(plan_of(), "cpu")
    doubted = []
    for step in range(1, 400):
        norm = 100.0 if step % 50 == 0 or step == LEAST_NORMS // 2 else 1.0
        replays.took(step, loss=2.0, norm=norm, gradient=torch.zeros(2))
        if replays.doubts(step):
            doubted.append(step)
            replays.came_again(step)

    assert doubted == [50, 200]
