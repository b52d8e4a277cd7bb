"""One case of suite.py, in a process of its own: a line for each row, as it comes.

A row that fails says so in its line and does not end its case; rows whose keys are known already
are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import suite_backends, suite_cases, suite_graphs, suite_ranks
from benchmarks.gpu.suite_cases import Rows, Setting

RUNS: dict[str, Callable[[Setting], Rows]] = {
    "machine": suite_cases.machine,
    "equality": suite_cases.equality,
    "graphs": suite_graphs.graphs,
    "backends": suite_backends.backends,
    "plans": suite_cases.plans,
    "products": suite_cases.products,
    "kernels": suite_cases.kernels,
    "collectives": suite_ranks.collectives,
    "ranks": suite_ranks.ranks,
    "shared device": suite_ranks.shared_device,
    "edge": suite_cases.edge,
    "compile": suite_cases.compiled,
    "loss": suite_cases.loss,
    "launches": suite_cases.launches,
    "layouts": suite_ranks.layouts,
    "two nodes": suite_ranks.two_nodes,
    "ends": suite_ranks.ends,
    "profile": suite_cases.profiled,
    "walk": suite_cases.walk,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=RUNS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--known", default="[]")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    known = set(json.loads(args.known))
    at = Setting(device=args.device, devices=args.devices, tiny=args.tiny, out=args.out)
    if args.device == "cpu":
        torch.set_num_threads(1)
    for key, find in RUNS[args.case](at):
        if key in known:
            continue
        begin = time.monotonic()
        try:
            found = find()
        except Exception:
            found = {"failed": traceback.format_exc()[-1500:]}
        line = {"key": key, "took_s": round(time.monotonic() - begin, 2), **found}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
    # Threads of communication libraries may wait for peers that are gone.
    sys.stdout.flush()
    os._exit(0)
