"""Runs made with known constants tell them again, over predictions of whole steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.calibration.fitting import runs
from meshwright.planner.calibration.fitting.fitted_calibration import calibrate, calibrated_json
from meshwright.planner.calibration.fitting.fitted_constants import with_fitted_constants
from meshwright.planner.calibration.tables.predictions import predict_run
from meshwright.planner.calibration.tables.rows import measured_setups, read_rows
from meshwright.planner.documents.profile import Calibration, TierCalibration
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.setup import Setup

HEADER = (
    "id,source,layers,hidden_size,ffn_size,n_heads,vocab_size,gated_mlp,seq_len,accelerator,"
    "devices_per_node,n_devices,framework,tp,pp,global_batch_size,micro_batch_size,recompute,"
    "step_time_s,peak_memory_gib,memory_kind,inter_gb_per_s_per_device\n"
)
LAYOUTS = [
    (tp, pp, nodes, hidden)
    for tp, pp in ((1, 1), (8, 1), (2, 4), (8, 4), (4, 2))
    for nodes, hidden in ((4, 2048), (4, 6144), (8, 4096))
]


def table(path: Path, truth: Calibration, slack: float = 1.05) -> Path:
    """Write runs whose times are the model's own with other constants."""

    def line(n: int, seen: tuple[float, float] = (1.0, 1.0)) -> str:
        tp, pp, nodes, hidden = LAYOUTS[n]
        return (
            f"r-{n},s,24,{hidden},{4 * hidden},{hidden // 128},32000,1,2048,a100-sxm-80gb,8,"
            f"{8 * nodes},megatron,{tp},{pp},{16 * nodes},1,full,{seen[0]},{seen[1]},reserved,25\n"
        )

    path.write_text(HEADER + "".join(line(n) for n in range(len(LAYOUTS))))
    if truth.source not in TABLES:
        TABLES[truth.source] = predictions(path, truth)
    seen = [(step_s, gib * slack / 1.05) for step_s, gib in TABLES[truth.source]]
    path.write_text(HEADER + "".join(line(n, one) for n, one in enumerate(seen)))
    return path


TABLES: dict[str, list[tuple[float, float]]] = {}
"""Predicted before, by the source of the constants: seconds of a step and GiB of each run."""


def predictions(path: Path, truth: Calibration) -> list[tuple[float, float]]:
    found = []
    for _, setup in measured_setups(read_rows(path)):
        assert isinstance(setup, Setup)
        request = setup.request
        changed = replace(request, cluster=with_fitted_constants(request.cluster, truth))
        told = predict_run(replace(setup, request=changed))
        found.append((told.step_time_s, told.memory_bytes("reserved", "max") / 2**30))
    return found


TRUTH = Calibration(
    accelerator="a100-sxm-80gb",
    matmul=0.55,
    tiers={"network": TierCalibration(bytes_per_s=12e9)},
    runs=1,
    spread=0.1,
    source="a test",
)


@pytest.mark.matrix
def test_rates_of_products_and_of_the_network_are_found_again(tmp_path: Path) -> None:
    observed = runs.of_table(table(tmp_path / "runs.csv", TRUTH, slack=1.2))

    result = calibrate(observed, source="test")

    found = result.calibration
    assert found.matmul == pytest.approx(0.55, rel=0.05)
    assert found.tiers["network"].bytes_per_s == pytest.approx(12e9, rel=0.1)
    assert found.slack == pytest.approx(1.2, rel=0.02)
    told = calibrated_json(result)["quantities"]["step time"]["errors"]
    assert told["left_out"]["median"] < 0.03 < told["before"]["median"]


@pytest.mark.matrix
def test_runs_faster_than_the_peak_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "runs.csv", TRUTH)
    lines = path.read_text().splitlines(keepends=True)
    fast = [line.split(",") for line in lines[1:7]]
    for cells in fast:
        cells[18] = str(float(cells[18]) / 6)
    path.write_text(lines[0] + "".join(",".join(cells) for cells in fast))

    with pytest.raises(DocumentError, match=r"matmul: the runs want .* above 1, .*pulled by r-"):
        calibrate(runs.of_table(path), source="test")


@pytest.mark.matrix
def test_runs_on_two_accelerators_are_not_one_machine(tmp_path: Path) -> None:
    path = table(tmp_path / "runs.csv", TRUTH)
    path.write_text(path.read_text().replace("r-1,s,24", "r-1,s,24").replace("a100", "h100", 1))
    observed = runs.of_table(path)

    with pytest.raises(DocumentError, match="h100-sxm-80gb"):
        calibrate(observed, source="test")
    assert calibrate(runs.runs_on(observed, "a100-sxm-80gb"), source="test").calibration.matmul
