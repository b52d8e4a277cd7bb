"""Aceso's problem: its formulas by hand, and no configuration that is tried beats the one found."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.aceso import (
    Configuration,
    Model,
    Placed,
    Profile,
    Search,
    compare,
    read_configuration,
)

LAYER = (
    "enc-1st-layernorm",
    "enc-attention-qkv",
    "enc-attention-score",
    "enc-attention-softmax",
    "enc-attention-dropout",
    "enc-attention-context",
    "enc-attention-dense",
    "enc-post-attention-dropout",
    "enc-2nd-layernorm",
    "enc-MLP-GEMM-1",
    "enc-MLP-gelu",
    "enc-MLP-GEMM-2",
    "enc-post-MLP-dropout",
)
EVERY = ("encoder-embedding", *LAYER, "final-layernorm", "gpt-post-process")
ASKED: dict[str, Any] = {
    "model_name": "gpt",
    "model_size": "tiny",
    "num_layers": 1,
    "num_gpus": 2,
    "num_gpus_per_node": 2,
    "global_batch_size": 8,
    "memory_limit": 100.0,
    "micro_batch_size": [1, 2],
    "profiled_time_path": "profiles",
}


def written(folder: Path, figures: Any) -> Profile:
    """Write a profile as Aceso does; `figures(operator, micro_batch, tensor)` are eight numbers."""
    folder.mkdir(exist_ok=True)
    for micro_batch, tensor, way in product((1, 2), (1, 2), (0, 1)):
        rows = ["op_name,forward-compute,backward-compute,input_size,output_size,weights,..."]
        for name in EVERY:
            row = figures(name, micro_batch, tensor)
            rows.append(",".join([name, *(str(one) for one in row)]))
        path = folder / f"gpt_tiny_mbs{micro_batch}_tp{tensor}_algo{way}.csv"
        path.write_text("\n".join(rows) + "\n")
    for kind in ("all_gather", "all_to_all"):
        (folder / f"prim_gpt_tiny_{kind}_2gpus.csv").write_text("data_size(MB),time(ms)\n4,0.25\n")
    (folder / "p2p_intra_node.csv").write_text("1,2,4\n2.0, 4.0, 8.0\n")
    return Profile(folder, "gpt_tiny")


def flat(name: str, micro_batch: int, tensor: int) -> tuple[float, ...]:
    """1 ms forward and 2 backward, 4 MB in and out, 1 MB of weights, 2 of activations."""
    return (1000.0, 2000.0, 4.0, 4.0, 1.0, 2.0, 3.0, 5.0)


def uniform(counts: tuple[int, ...], recomputed: tuple[bool, ...], tensor: int, data: int) -> Any:
    stages, first = [], 0
    for count in counts:
        stages.append(
            Placed(
                operators=EVERY[first : first + count],
                tensor=(tensor,) * count,
                data=(data,) * count,
                ways=(0,) * count,
                recomputed=recomputed[first : first + count],
            )
        )
        first += count
    return tuple(stages)


def test_an_iteration_is_its_slowest_stage_and_all_of_them_once(tmp_path: Path) -> None:
    model = Model(written(tmp_path / "profiles", flat), ASKED)
    two = Configuration(micro_batch=1, stages=uniform((6, 10), (False,) * 16, 1, 1))

    # 4 MB at 4 GB/s, the rate of 2 to 4 MB, are 1 ms: each stage sends its input and its output.
    assert model.iteration_ms(two) == pytest.approx(7 * (30 + 2) + (18 + 2) + (30 + 2))
    # 6 operators; the softmax shares, the dropout has a half more: 4 + 11 MB twice, 8 reserved.
    assert model.stage_mb(two.stages[0], 1, 1) == pytest.approx(8 * 6 + 2 * (4 + 11) + 8)


def test_what_is_recomputed_saves_all_but_the_last_of_a_run(tmp_path: Path) -> None:
    model = Model(written(tmp_path / "profiles", flat), ASKED)
    again = tuple(name in ("enc-attention-qkv", "enc-attention-score") for name in EVERY)
    [stage] = uniform((16,), again, 1, 1)
    [plain] = uniform((16,), (False,) * 16, 1, 1)

    assert model.stage_ms(stage, 1, 0) - model.stage_ms(plain, 1, 0) == pytest.approx(2.0)
    # 2 MB are saved, and held once while they are computed again.
    for behind in (0, 3):
        saved = model.stage_mb(plain, 1, behind) - model.stage_mb(stage, 1, behind)
        assert saved == pytest.approx(2.0 * (behind + 1) - 2.0)


def test_shares_that_differ_are_gathered_and_split(tmp_path: Path) -> None:
    model = Model(written(tmp_path / "profiles", flat), ASKED)
    [wide] = uniform((16,), (False,) * 16, 2, 1)
    ways = tuple(int(name == "enc-MLP-GEMM-1") for name in EVERY)
    mixed = Placed(
        operators=wide.operators,
        tensor=wide.tensor,
        data=wide.data,
        ways=ways,
        recomputed=wide.recomputed,
    )

    # Rows read shares and give whole tensors: split before, split again behind, gathered backward.
    assert model.stage_ms(mixed, 1, 0) - model.stage_ms(wide, 1, 0) == pytest.approx(2 * 0.25)


@pytest.mark.parametrize("seed", range(3))
def test_no_configuration_that_is_tried_beats_the_one_found(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    base = {name: [rng.uniform(1, 9) for _ in range(8)] for name in EVERY}

    def figures(name: str, micro_batch: int, tensor: int) -> list[float]:
        forward, backward, *sizes = base[name]
        each = [1000 * one * micro_batch / tensor**0.8 for one in (forward, backward)]
        return [*each, *(one * micro_batch / tensor for one in sizes)]

    asked = ASKED | {"memory_limit": rng.choice([650.0, 800.0, 2000.0])}
    model = Model(written(tmp_path / "profiles", figures), asked)

    found = Search(model).best()

    assert found is not None
    assert model.peak_mb(found) <= model.limit_mb
    best_ms = model.iteration_ms(found)
    none = (False,) * 16
    for micro_batch, (tensor, data) in product((1, 2, 4), ((1, 2), (2, 1))):
        if micro_batch // data in (1, 2) and micro_batch % data == 0:
            again = [none]
            again += [
                (False, *(rng.random() < rng.random() for _ in LAYER), False, False)
                for _ in range(150)
            ]
            for recomputed in again:
                stages = uniform((16,), recomputed, tensor, data)
                one = Configuration(micro_batch=micro_batch, stages=stages)
                if model.peak_mb(one) <= model.limit_mb:
                    assert model.iteration_ms(one) >= best_ms * (1 - 1e-9)
    for micro_batch, cut in product((1, 2), range(1, 16)):
        stages = uniform((cut, 16 - cut), none, 1, 1)
        one = Configuration(micro_batch=micro_batch, stages=stages)
        if model.peak_mb(one) <= model.limit_mb:
            assert model.iteration_ms(one) >= best_ms * (1 - 1e-9)


def test_acesos_own_configuration_is_scored_and_ours_stands_beside(tmp_path: Path) -> None:
    model = Model(written(tmp_path / "profiles", flat), ASKED | {"memory_limit": 400.0})
    theirs = {
        "micro_batch_size": 1,
        "num_ops_in_each_stage": [4, 12],
        "model_parallel_size_of_each_op": [[1] * 4, [1] * 12],
        "data_parallel_size_of_each_op": [[1] * 4, [1] * 12],
        "algo_of_each_op": [[0] * 4, [0] * 12],
        "recompute_ops": [[0] * 4, [0] * 12],
    }
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    read = read_configuration(theirs, model)
    answer = {
        "file": "theirs.json",
        "time_ms": model.iteration_ms(read),
        "memory_mb": model.peak_mb(read),
    }
    path = tmp_path / "aceso_tiny.json"
    path.write_text(json.dumps(ASKED | {"memory_limit": 400.0, "answers": [answer]}))

    [row] = compare(path)

    assert row.peer_value == pytest.approx((7 * 38 + 38 + 14) / 1000)
    assert row.verdict == "better"

    answer["time_ms"] += 1
    path.write_text(json.dumps(ASKED | {"memory_limit": 400.0, "answers": [answer]}))
    with pytest.raises(ValueError, match="stored score"):
        compare(path)


def test_ours_stands_beside_milliseconds_whose_configuration_was_not_published(
    tmp_path: Path,
) -> None:
    written(tmp_path / "profiles", flat)
    path = tmp_path / "aceso_tiny.json"
    published = {"memory_limit": 400.0, "answers": [], "published_ms": 5e5}
    path.write_text(json.dumps(ASKED | published))

    [row] = compare(path)

    assert row.peer_value == 500.0
    assert row.verdict == "better"
