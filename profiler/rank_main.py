"""One rank's process: `python -m meshwright.profiler.rank_main orders.yaml`, given its RANK."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

from meshwright.planner.documents.document import read, write_text
from meshwright.profiler.start_ranks import MeasurementOrders, write_progress
from meshwright.runtime.run.rank_exit import carried_out, die_with_launcher, leave


def main() -> int:
    """Carry out the orders in the file that the command line names."""
    die_with_launcher()
    faulthandler.enable()
    (file,) = sys.argv[1:]
    orders = read(MeasurementOrders, file)
    rank = int(os.environ["RANK"])
    folder = Path(orders.folder)
    return carried_out(lambda: _work(orders, rank, folder), rank=rank, output=folder)


def _work(orders: MeasurementOrders, rank: int, folder: Path) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - takes seconds

    from meshwright.runtime.core.process_group import join  # noqa: PLC0415

    join(orders.device, rank=rank, world_size=orders.ranks, timeout_s=orders.timeout_s)

    def report(doing: str, share: float) -> None:
        if rank == orders.first_rank:
            write_progress(folder, doing, share)

    module, _, function = orders.work.partition(":")
    result = getattr(importlib.import_module(module), function)(orders.arguments, report)
    if rank == orders.first_rank:
        write_text(json.dumps(result), folder / "result.json")
    dist.barrier()


if __name__ == "__main__":
    leave(main())
