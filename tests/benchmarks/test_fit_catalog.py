"""The fit of the catalogue's curves gets back the figures that made a table."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import pytest

from benchmarks import fit_catalog as fit
from meshwright.planner.catalog import accelerators

SYSTEM, DEVICE = "h100_sxm", accelerators()["h100-sxm-80gb"]


def write_table(file: Path, rows: list[dict[str, object]]) -> None:
    with file.open("w", newline="") as lines:
        table = csv.DictWriter(lines, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def test_launch_and_fraction_of_products_come_back(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for m, n, k in product([1024, 4096, 16384], [512, 2048, 8192], [512, 2048, 8192]):
        compute_s = 2 * m * n * k / (0.7 * DEVICE.peak_flops["bf16"])
        moved = 2 * (m * k + k * n + m * n)
        memory_s = moved / (DEVICE.curve.memory * DEVICE.memory_bytes_per_s)
        milliseconds = 1e3 * (3e-6 + max(compute_s, memory_s))
        rows.append({"system": SYSTEM, "m": m, "n": n, "k": k, "latency_ms": milliseconds})
    write_table(tmp_path / "gemm_bf16_shapes.csv", rows)

    launch_s, fraction, error = fit.matmul_fit(tmp_path)[SYSTEM]

    assert launch_s == pytest.approx(3e-6, abs=0.3e-6)
    assert fraction == pytest.approx(0.7, abs=0.006)
    assert error < 0.02


def test_the_fraction_of_attention_comes_back_and_corrupt_rows_stay_out(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for batch, seq_len in product([1, 4], [512, 2048, 8192]):
        flops = 2 * batch * 32 * seq_len**2 * 128
        seconds = 3e-6 + flops / (0.5 * DEVICE.peak_flops["bf16"])
        common = {"batch_size": batch, "seq_len": seq_len, "n_heads": 32, "head_dim": 128}
        rows.append(
            {"system": SYSTEM, "version": "1", **common, "causal_tflops": flops / seconds / 1e12}
        )
        rows.append({"system": "b200_sxm", "version": "0.5.10", **common, "causal_tflops": 1e6})
    write_table(tmp_path / "attention_forward_bf16.csv", rows)

    fits = fit.attention_fit(tmp_path, {SYSTEM: 3e-6})

    assert list(fits) == [SYSTEM]
    assert fits[SYSTEM][0] == pytest.approx(0.5, abs=0.006)


def test_the_round_and_the_fractions_of_collectives_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"all_reduce": 0.91, "all_gather": 0.61, "reduce_scatter": 0.71, "alltoall": 0.51}
    narrow = {2: 0.7, 8: 1.0}
    rows: list[dict[str, object]] = []
    for (operation, fraction), gpus, power in product(made.items(), narrow, range(13, 30, 4)):
        rounds = (2 if operation == "all_reduce" else 1) * (gpus - 1)
        wire_s = rounds / gpus * 2**power / DEVICE.tiers[-1].bytes_per_s
        waits = 1 if operation == "alltoall" else rounds
        seconds = 6e-6 + waits * 1.1e-6 + wire_s / (fraction * narrow[gpus])
        common = {"system": SYSTEM, "op": operation, "gpus": gpus, "bytes": 2**power}
        rows.append({**common, "nccl": "2.27", "us": 9e6 * seconds})
        rows.append({**common, "nccl": "2.29.2", "us": 1e6 * seconds})
    write_table(tmp_path / "nccl_busbw.csv", rows)
    monkeypatch.setattr(fit, "SYSTEMS", {SYSTEM: "h100-sxm-80gb"})

    found = fit.collective_fit(tmp_path)[SYSTEM]

    assert found.start_s == pytest.approx(6e-6, abs=0.1e-6)
    assert found.alpha_s == pytest.approx(1.1e-6, abs=0.05e-6)
    assert found.fractions[8] == pytest.approx(made, abs=0.021)
    assert found.fractions[2]["all_reduce"] == pytest.approx(0.7 * 0.91, abs=0.021)
    assert found.error < 0.02
