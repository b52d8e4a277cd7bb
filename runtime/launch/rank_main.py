"""One rank's process: `python -m meshwright.runtime.launch.rank_main orders.yaml`, given its RANK.

It dies with its launcher, says in a file why it stopped, and leaves the rest to
runtime.launch.training_loop.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.runtime.run import preemption as notice
from meshwright.runtime.run.rank_exit import carried_out, die_with_launcher, leave

if TYPE_CHECKING:
    from meshwright.runtime.run import run_folder as run


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the orders in the file that the command line names."""
    die_with_launcher()
    notice.wait_for_launcher()
    faulthandler.enable()
    # What follows imports torch, which takes seconds in which the launcher may already be gone.
    from meshwright.planner.documents.document import read  # noqa: PLC0415
    from meshwright.runtime.run import run_folder as run  # noqa: PLC0415

    (file,) = sys.argv[1:] if arguments is None else arguments
    orders = read(run.RankOrders, file)
    rank = int(os.environ["RANK"])
    return carried_out(lambda: _train(orders, rank), rank=rank, output=orders.output)


def _train(orders: run.RankOrders, rank: int) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    from meshwright.planner.documents.document import read  # noqa: PLC0415
    from meshwright.planner.documents.plan import Plan  # noqa: PLC0415
    from meshwright.runtime.core.process_group import join  # noqa: PLC0415
    from meshwright.runtime.launch import training_loop as train  # noqa: PLC0415
    from meshwright.runtime.resilience import heartbeat as beacon  # noqa: PLC0415
    from meshwright.runtime.run import run_folder as run  # noqa: PLC0415

    if beacon.BEACONS in os.environ:
        beacon.answer_with_stack(orders.output, rank)
    output = orders.output
    plan = read(Plan, run.plan_file(output))
    world_size = int(os.environ["WORLD_SIZE"])
    join(orders.device, rank=rank, world_size=world_size, timeout_s=plan.timeout_s)
    record = train.train(orders, rank=rank, local_rank=int(os.environ["LOCAL_RANK"]))
    run.write_message(record, run.record_file(output, rank))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    leave(main())
