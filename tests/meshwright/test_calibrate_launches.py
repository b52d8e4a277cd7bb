"""Constants are found again from folders that `launch` writes: a real fit, not a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.planner.calibration.fitting.fitted_constants import with_fitted_constants
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents import document
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.documents.profile import Calibration

CLUSTER = "2x8xa100-sxm-80gb"
TRUTH = Calibration(
    accelerator="a100-sxm-80gb",
    matmul=0.5,
    runs=1,
    spread=0.1,
    source="a test",
)


def plan_of(model: ModelGraph, *, tensor: int, zero: int, seq_len: int, recompute: str) -> Plan:
    data = 16 // tensor
    layers = tuple(PlacedLayer(layer=name, recompute=recompute) for name, _ in model.chain)  # type: ignore[arg-type]
    return Plan(
        model=PlannedModel(name=model.name, source=model.name, digest=model.digest),
        cluster=CLUSTER,
        seq_len=seq_len,
        global_batch=2 * data,
        precision="bf16",
        mesh=Mesh(tensor=tensor, data_shard=data),
        zero=zero,  # type: ignore[arg-type]
        schedule="1f1b",
        micro_batch=1,
        micro_batches=2,
        stages=(Stage(layers=layers),),
    )


def record(folder: Path, model: ModelGraph, plan: Plan, step_time_s: float) -> str:
    """Write what a launch leaves behind: what it ran, and what it measured."""
    folder.mkdir()
    document.write(plan, folder / "plan.yaml")
    document.write(model, folder / "model.yaml")
    report = {
        "format": 1,
        "model": model.name,
        "plan_digest": plan.digest,
        "layout": "made up",
        "device": "cuda",
        "ranks": 16,
        "first_step": 1,
        "steps": 20,
        "stopped": "steps",
        "losses": [1.0],
        "grad_norms": [1.0],
        "step_s": [step_time_s],
        "timed_steps": 18,
        "step_time_s": step_time_s,
        "stages": [],
        "wall_s": 60.0,
        "output": "out",
        "metrics": "metrics.jsonl",
        "logs": "logs",
    }
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


@pytest.mark.matrix
def test_folders_of_launches_tell_the_rate_of_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    model = resolve_model("llama-3.2-1b")
    slow = with_fitted_constants(resolve_cluster(CLUSTER), TRUTH)
    plans = [
        plan_of(model, tensor=tensor, zero=zero, seq_len=seq_len, recompute=recompute)
        for tensor, zero in ((1, 1), (1, 3), (8, 1))
        for seq_len, recompute in ((1024, "none"), (8192, "full"))
    ]
    folders = [
        record(tmp_path / f"run-{n}", model, plan, predict(plan, model, slow).step_time_s)
        for n, plan in enumerate(plans)
    ]

    assert main(["calibrate", *folders, "-o", str(tmp_path / "fitted.yaml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert told["calibration"]["matmul"] == pytest.approx(0.5, rel=0.05)
    errors = told["quantities"]["step time"]["errors"]
    assert errors["left_out"]["median"] < 0.03 < errors["before"]["median"]
