"""Laws over runs of all kinds: every legal row is predicted, finite, and moves the right way."""

from __future__ import annotations

import math
import random

import pytest

from meshwright.planner.calibration.tables import predictions
from meshwright.planner.calibration.tables.rows import setup_of
from meshwright.planner.catalog import accelerators, frameworks
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.requests.setup import Setup

PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "bf16+quantised-weights", "")
OFFLOADS = ("none", "", "optimizer", "params", "activations", "params+activations")


def row(seed: int) -> dict[str, str]:
    rng = random.Random(seed)
    hidden = rng.choice([512, 1024, 4096, 8192])
    degrees = {name: rng.choice([1, 1, 2, 4]) for name in ("tp", "pp", "cp", "dp")}
    micro_batch = rng.choice([1, 2, 4])
    cells = {name: str(degree) for name, degree in degrees.items()} | {
        "id": "x",
        "source": "made_up",
        "layers": str(rng.choice([4, 16, 32, 80])),
        "hidden_size": str(hidden),
        "n_kv_heads": rng.choice(["", "8", "1"]),
        "attention": rng.choice(["", "gqa", "mqa", "mla"]),
        "gated_mlp": rng.choice(["0", "1", ""]),
        "vocab_size": rng.choice(["", "32000", "256000"]),
        "seq_len": str(rng.choice([512, 4096, 32768])),
        "accelerator": rng.choice(sorted(accelerators())),
        "devices_per_node": rng.choice(["8", "4", ""]),
        "n_devices": str(math.prod(degrees.values())),
        "intra_link": rng.choice(["", "nvlink", "pcie", "xgmi"]),
        "inter_gb_per_s_per_device": rng.choice(["", "50", "1.25"]),
        "micro_batch_size": str(micro_batch),
        "global_batch_size": str(micro_batch * degrees["dp"] * rng.choice([1, 4, 32])),
        "recompute": rng.choice(["none", "full", "selective", "partial", ""]),
        "offload": rng.choice(OFFLOADS),
        "precision": rng.choice(PRECISIONS),
        "zero_stage": rng.choice(["0", "1", "2", "3", "hsdp", ""]),
        "sequence_parallel": rng.choice(["0", "1", ""]),
        "flash_attention": rng.choice(["0", "1", ""]),
        "task": rng.choice(["pretrain", "pretrain", "lora", "qlora", "full_finetune"]),
        "framework": rng.choice([*sorted(frameworks()), "mystery", ""]),
    }
    if rng.random() < 0.3:
        more = {"n_experts": "64", "experts_per_token": "8", "expert_ffn_size": str(hidden // 2)}
        cells |= more | {"n_shared_experts": rng.choice(["", "2"]), "ep": rng.choice(["1", "8"])}
    return cells


def predicted(cells: dict[str, str]) -> Prediction:
    setup = setup_of(cells)
    assert isinstance(setup, Setup), setup
    return predictions.predict_run(setup)


def peak(found: Prediction) -> float:
    return found.memory_bytes("allocated", "max")


@pytest.mark.spread(1)
@pytest.mark.parametrize("seed", range(0, 400, 10))
def test_every_legal_row_is_predicted_and_more_work_takes_longer(seed: int) -> None:
    for each in range(seed, seed + 10):
        cells = row(each)
        found = predicted(cells)

        assert 0 < found.step_time_low_s <= found.step_time_s <= found.step_time_high_s < math.inf
        assert 0 < peak(found) < math.inf
        if not cells["recompute"]:  # what fits decides, and a deeper model may not
            cells["recompute"] = "none"
            found = predicted(cells)
        deeper = predicted({**cells, "layers": str(2 * int(cells["layers"]))})
        fuller = predicted({**cells, "global_batch_size": str(2 * int(cells["global_batch_size"]))})
        faster = predicted({**cells, "inter_gb_per_s_per_device": "400"})
        assert deeper.step_time_s > found.step_time_s, cells
        assert fuller.step_time_s >= 0.999 * found.step_time_s, cells
        assert faster.step_time_s <= 1.001 * found.step_time_s, cells


@pytest.mark.parametrize("offload", ["optimizer", "params", "activations"])
def test_what_lies_on_the_host_takes_no_room_and_no_less_time(offload: str) -> None:
    cells = row(3) | {"task": "pretrain", "recompute": "none", "zero_stage": "1", "pp": "1"}
    cells["n_devices"] = str(int(cells["tp"]) * int(cells["cp"]) * int(cells["dp"]))
    kept, gone = (predicted({**cells, "offload": name}) for name in ("none", offload))

    assert peak(gone) < peak(kept)
    assert gone.step_time_s > 0.99 * kept.step_time_s
    assert gone.step_parts["offload"] >= 0
