"""Our orders of actions against those of torch's own schedule classes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.schedule_record import Order, read_action


class _Stage:
    """What torch's classes ask of a stage to write their orders."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_rank = 0
        self.group_size = ranks
        self.submod = None
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_orders(
    name: str, ours: str, ranks: int, virtual_stages: int, micro_batches: int
) -> tuple[Order, ...]:
    stages = ranks * virtual_stages
    rank_of = rank_of_stage(ours, stages=stages, virtual_stages=virtual_stages)
    mine = [_Stage(s, stages, ranks) for s in range(stages) if rank_of[s] == 0]
    made: Any = torch_schedules.get_schedule_class(name)(
        mine, micro_batches, loss_fn=lambda output, target: None
    )
    return tuple(
        tuple(
            read_action(str(a))
            for action in made.pipeline_order[rank]
            if action is not None
            for a in (action.sub_actions or (action,))
        )
        for rank in range(ranks)
    )


@pytest.mark.parametrize(
    ("name", "ours", "virtual_stages"),
    [
        ("Interleaved1F1B", "interleaved", 2),
        ("Interleaved1F1B", "interleaved", 3),
        ("InterleavedZeroBubble", "zb-h1", 1),
        ("InterleavedZeroBubble", "interleaved-zb", 2),
        ("InterleavedZeroBubble", "interleaved-zb", 3),
        ("ZBVZeroBubble", "zbv", 2),
        ("DualPipeV", "dualpipe-v", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 6), (3, 9), (4, 8), (4, 12)])
def test_an_order_is_torchs_own(
    name: str, ours: str, virtual_stages: int, ranks: int, micro_batches: int
) -> None:
    written = orders(
        ours,
        stages=ranks * virtual_stages,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
    )

    assert written == torch_orders(name, ours, ranks, virtual_stages, micro_batches)
