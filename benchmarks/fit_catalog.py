"""Fit the catalogue's device curves and link fractions to measured kernels and collectives.

    python benchmarks/fit_catalog.py FOLDER

FOLDER holds three tables (CSV) extracted from the measurements that github.com/ai-dynamo/
aiconfigurator publishes under Apache-2.0 (systems/data, commit 095f58a, 2026-08-21):

    gemm_bf16_shapes.csv        system, framework, version, m, n, k, latency_ms, tflops
    attention_forward_bf16.csv  system, ..., batch_size, seq_len, n_heads, head_dim, causal_tflops
    nccl_busbw.csv              system, nccl, op, gpus, bytes, us, busbw_GBps

Printed are the figures of planner/catalog/accelerators.yaml whose provenance is `fitted`.

Kernels:      t = launch_s + max(FLOPs / (f P), bytes / (g W)).  A kernel reads memory while it
              computes; the sum of both terms, with any g <= 1, fits matrix products half as well.
              g hardly shows in these shapes; it is the copy rate measured elsewhere.
Collectives:  t = start + rounds α + wire bytes / (f rate), on a ring: all-reduce 2 (n-1) rounds,
              others n - 1; wire bytes = rounds / n x size; from 4 KiB up.  One start and one α for
              all groups, f by members and collective.
All fits minimise the mean absolute relative error.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.planner.catalog import accelerators


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """One system's collectives."""

    start_s: float
    alpha_s: float
    fractions: dict[int, dict[str, float]]
    """By members and collective."""
    error: float


Array = npt.NDArray[np.float64]
SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
CORRUPT = {("b200_sxm", "0.5.10")}
"""Attention rows by (system, version) of which a third exceeds the peak."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
TIE = 1.02
"""Large products say little about the launch: of fits this close to the best, the least launch.
No launch is longer than the shortest product leaves room for."""
FEWEST_HEADS = 16
"""Batch x heads; with fewer, most of a device idles."""


def rows(file: Path) -> Iterator[dict[str, str]]:
    with file.open(newline="") as lines:
        yield from csv.DictReader(lines)


def matmul_fit(folder: Path) -> dict[str, tuple[float, float, float]]:
    """Return (launch_s, fraction of peak, error) by system."""
    shapes: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for row in rows(folder / "gemm_bf16_shapes.csv"):
        if row["system"] in SYSTEMS:
            m, n, k = (float(row[c]) for c in "mnk")
            shapes[row["system"]].append((m, n, k, float(row["latency_ms"]) * 1e-3))
    result = {}
    for system, points in shapes.items():
        device = accelerators()[SYSTEMS[system]]
        m, n, k, seconds = np.array(points).T
        compute_s = 2 * m * n * k / device.peak_flops["bf16"]
        memory_s = 2 * (m * k + k * n + m * n) / device.memory_bytes_per_s / device.curve.memory
        fits = []
        room_s = float(np.min(seconds - compute_s))
        for launch in np.arange(0, room_s, 0.25e-6):
            fraction, least = min(
                (
                    (float(f), error(seconds, launch + np.maximum(compute_s / f, memory_s)))
                    for f in np.arange(0.4, 1.0, 0.005)
                ),
                key=lambda fit: fit[1],
            )
            fits.append((float(launch), fraction, least))
        best = min(fit[2] for fit in fits)
        result[system] = next(fit for fit in fits if fit[2] <= TIE * best)
    return result


def attention_fit(folder: Path, launch_s: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return (fraction of peak over causal FLOPs, error) of fused forward attention by system."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows(folder / "attention_forward_bf16.csv"):
        batch, seq, heads, dim = (
            float(row[c]) for c in ("batch_size", "seq_len", "n_heads", "head_dim")
        )
        kept = dim == 128 and batch * heads >= FEWEST_HEADS and seq >= 2048
        if kept and row["system"] in SYSTEMS and (row["system"], row["version"]) not in CORRUPT:
            flops = 2 * batch * heads * seq * seq * dim
            seconds = flops / (float(row["causal_tflops"]) * 1e12)
            points[row["system"]].append((flops, seconds))
    result = {}
    for system, pairs in points.items():
        flops, measured = np.array(pairs).T
        compute_s = flops / accelerators()[SYSTEMS[system]].peak_flops["bf16"]
        result[system] = min(
            (
                (float(f), error(measured, launch_s[system] + compute_s / f))
                for f in np.arange(0.1, 1.0, 0.005)
            ),
            key=lambda fit: fit[1],
        )
    return result


def collective_fit(folder: Path) -> dict[str, CollectiveFit]:
    """Return one start and one latency for each system, and fractions by members and collective.

    Of the newest NCCL: narrower groups on a switch are up to a third slower per byte, and sums in
    the switch are for whole nodes.
    """
    points: dict[tuple[str, tuple[int, ...], int, str], list[tuple[float, float]]] = defaultdict(
        list
    )
    for row in rows(folder / "nccl_busbw.csv"):
        version = tuple(int(part) for part in row["nccl"].split("."))
        if row["system"] in SYSTEMS and float(row["bytes"]) >= 4096:
            points[row["system"], version, int(row["gpus"]), row["op"]].append(
                (float(row["bytes"]), float(row["us"]) * 1e-6)
            )
    result = {}
    for system, name in SYSTEMS.items():
        newest = max(key[1] for key in points if key[0] == system)
        own = {
            (ranks, operation): np.array(pairs).T
            for (of, version, ranks, operation), pairs in points.items()
            if of == system and version == newest and operation in OPERATIONS
        }
        rate = accelerators()[name].tiers[-1].bytes_per_s
        result[system] = min(
            (
                _with_waits(own, rate, float(start_s), float(alpha_s))
                for start_s in np.arange(0.0, 16e-6, 2e-6)
                for alpha_s in np.arange(0.2e-6, 3.2e-6, 0.3e-6)
            ),
            key=lambda fit: fit.error,
        )
    return result


def _with_waits(
    points: dict[tuple[int, str], Array], rate: float, start_s: float, alpha_s: float
) -> CollectiveFit:
    fractions: dict[int, dict[str, float]] = defaultdict(dict)
    errors = []
    for (ranks, operation), (size, seconds) in sorted(points.items()):
        rounds = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        waited_s = start_s + alpha_s * (1 if operation == "alltoall" else rounds)
        fractions[ranks][operation], best = min(
            (
                (float(f), error(seconds, waited_s + rounds / ranks * size / rate / f))
                for f in np.arange(0.03, 1.1, 0.02)
            ),
            key=lambda fit: fit[1],
        )
        errors.append(best)
    return CollectiveFit(start_s, alpha_s, dict(fractions), float(np.mean(errors)))


def error(measured: Array, predicted: Array) -> float:
    """Return the mean absolute relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


def main(folder: Path) -> None:
    matmul = matmul_fit(folder)
    attention = attention_fit(folder, {system: fit[0] for system, fit in matmul.items()})
    print("accelerator     launch_us  matmul  error  attention  error")
    for system, (launch, fraction, mean) in matmul.items():
        line = f"{SYSTEMS[system]:15} {launch * 1e6:9.2f}  {fraction:6.3f}  {mean:5.3f}"
        if system in attention:
            line += f"  {attention[system][0]:9.3f}  {attention[system][1]:5.3f}"
        print(line)
    print("\naccelerator     start_us  round_us  error  fractions by members")
    for system, fit in collective_fit(folder).items():
        print(
            f"{SYSTEMS[system]:15} {fit.start_s * 1e6:8.1f}  {fit.alpha_s * 1e6:8.1f}  "
            f"{fit.error:5.3f}  {fit.fractions}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
