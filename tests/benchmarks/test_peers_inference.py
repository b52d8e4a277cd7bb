"""Inference graphs with colour classes: no placement of all there are has a lower largest load."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import dnn_inference


def drawn(seed: int) -> dict[str, Any]:
    """A graph of at most 7 nodes, some in classes, two accelerators and a CPU."""
    rng = random.Random(seed)
    count = rng.randint(4, 7)
    costs = [rng.randint(0, 4) for _ in range(count)]
    pairs = [p for p in itertools.combinations(range(count), 2) if rng.random() < 0.4]
    return {
        "maxSizePerFPGA": 20.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            {
                "id": at,
                "supportedOnFpga": 1,
                "cpuLatency": 2.0 * ms,
                "fpgaLatency": float(ms),
                "size": float(rng.randint(0, 5)),
                **({"colorClass": rng.randint(0, 2)} if rng.random() < 0.5 else {}),
            }
            for at, ms in enumerate(rng.randint(0, 9) for _ in range(count))
        ],
        "edges": [{"sourceId": a, "destId": b, "cost": float(costs[a])} for a, b in pairs],
    }


def fits_a_row(case: dict[str, Any], device: tuple[int, ...]) -> bool:
    """Whether classes share devices, accelerators have room, and devices wait in no circle."""
    classes: dict[int, set[int]] = {}
    size = [0.0, 0.0, 0.0]
    for node, on in zip(case["nodes"], device, strict=True):
        size[on] += node["size"]
        if "colorClass" in node:
            classes.setdefault(node["colorClass"], set()).add(on)
    if max(size[:2]) > case["maxSizePerFPGA"] or any(len(one) > 1 for one in classes.values()):
        return False
    return any(
        all(
            row.index(device[edge["sourceId"]]) <= row.index(device[edge["destId"]])
            for edge in case["edges"]
        )
        for row in itertools.permutations(range(3))
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_has_a_lower_largest_load(seed: int) -> None:
    case = drawn(seed)
    least_ms = min(
        dnn_inference.max_load_ms(case, held[:2], held[2:])
        for device in itertools.product(range(3), repeat=len(case["nodes"]))
        if fits_a_row(case, device)
        for held in [[[at for at, on in enumerate(device) if on == d] for d in range(3)]]
    )

    load_ms, bound_ms, accelerators, cpus = dnn_inference.best_split(case)

    assert load_ms == pytest.approx(least_ms)
    assert bound_ms == pytest.approx(least_ms)
    assert sorted(node for held in [*accelerators, *cpus] for node in held) == list(
        range(len(case["nodes"]))
    )


@pytest.mark.matrix
def test_problems_that_are_left_over_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dnn_inference, "_WORK", 1)
    monkeypatch.setattr(dnn_inference, "_LEAST", 1)
    open_ends = 0
    for seed in range(12):
        case = drawn(seed)
        with monkeypatch.context() as whole:
            whole.setattr(dnn_inference, "_LEAST", 100)
            best_ms, proven_ms, *_ = dnn_inference.best_split(case)
        assert proven_ms == pytest.approx(best_ms)
        try:
            load_ms, bound_ms, *_ = dnn_inference.best_split(case)
        except ValueError:
            continue  # the only problem that was solved has no split that fits
        assert bound_ms <= best_ms * (1 + 1e-9)
        assert load_ms >= best_ms * (1 - 1e-9)
        open_ends += bound_ms < load_ms * (1 - 1e-9)
    assert open_ends


def test_ungrouped_nodes_are_not_one_group_and_waiting_classes_are() -> None:
    case = drawn(0)
    for at, node in enumerate(case["nodes"]):
        node.pop("colorClass", None)
        if at < 2:
            node["colorClass"] = 1
    case["edges"] = [
        {"sourceId": 0, "destId": 2, "cost": 1.0},
        {"sourceId": 2, "destId": 1, "cost": 1.0},
    ]

    assert dnn_inference.groups(case) == [["0", "1", "2"]]


def test_a_stored_load_that_does_not_come_out_ends_the_comparison(tmp_path: Path) -> None:
    case = drawn(3)
    load_ms, _, accelerators, cpus = dnn_inference.best_split(case)
    split = {
        "fpgas": [{"nodes": nodes} for nodes in accelerators],
        "cpus": [{"nodes": nodes} for nodes in cpus],
        "maxLoad": load_ms,
    }
    (tmp_path / "case.json").write_text(json.dumps(case))
    (tmp_path / "case_split.json").write_text(json.dumps(split))

    (row,) = dnn_inference.compare(tmp_path / "case.json")
    assert row.verdict == "equal"
    assert row.proven == "contiguous splits"
    (tmp_path / "case_split.json").write_text(json.dumps({**split, "maxLoad": load_ms + 1}))
    with pytest.raises(ValueError, match="stored score"):
        dnn_inference.compare(tmp_path / "case.json")
