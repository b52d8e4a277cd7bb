"""Launches train like transformers' own classes in a plain loop, which knows nothing of us.

Models have random weights and lie in folders as published ones do, in fp32 and in bf16.  A launch
reads such a folder, a plan document and a text; the library's run (tests/runtime/library_runs.py)
is fed the same tokens in the same order.  `make test` holds plans of one family against it,
`make matrix` a cover of what plans can say, every mesh of 2 and 4 ranks with every ZeRO level, and
every schedule on 2.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.planner.errors import DocumentError
from meshwright.runtime.checkpoint.weight_export import to_huggingface
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch import launch as launching
from tests.parts import some_and_others
from tests.runtime import combinations, library_runs
from tests.runtime.combinations import Bound
from tests.runtime.library_rows import (
    NAMES,
    SETTINGS,
    STORED,
    Distance,
    OnCrew,
    Row,
    apart,
    batches,
    distance,
    launched,
    oracle,
    row,
)
from tests.runtime.ranks import Crew

WEIGHTS = 1e-5
"""Of weights after the last step.  AdamW makes full steps of gradients that are all rounding."""
BOUNDS = {
    # Round-off: the library's own losses lie up to 2e-7 from those of float64, or of the same
    # samples in another order, and its gradient norms up to 4e-7 in most steps; in the others a
    # launch's may lie four times as far off as its own (library_rows.ROUND_OFFS).
    "fp32": Bound(1e-6, 2e-6, WEIGHTS),
    # Twice what the library's own run in bf16 lies from its run in fp32, which is up to 3.1e-4 in
    # losses and 2.3e-2 in norms.  A launch rounds each micro-batch and each rank's part by itself.
    "bf16": Bound(6e-4, 5e-2, 1.0),
}
"""The largest relative distance of any step, by precision."""

ROWS = (
    row("llama", "fp32", tensor=2, data_replicate=2),
    row("llama", "fp32", pipeline=2, recompute="full"),
    row("llama", "fp32", data_replicate=2, offload="optimizer", shares=(3, 1)),
    row("llama", "bf16", data_replicate=2, offload="parameters", shares=(1, 3)),
    row("llama", "bf16", pipeline=2, schedule=("pipedream-2bw", 1)),
    row("llama", "bf16", context=2, zero=1, activations="offload"),
    row("llama", "bf16", data_shard=2, zero=3, precision="bf16"),
    row("tied llama", "fp32", tensor=2, offload="optimizer"),
    row("tied llama", "bf16", pipeline=2, schedule=("interleaved", 2)),
    row("tied llama", "bf16", data_replicate=2, recompute="selective"),
    row("tied llama", "fp32", data_shard=2, zero=2, offload="parameters"),
    row("tied llama", "fp32", data_replicate=2, data_shard=2, zero=2, precision="bf16"),
    row("gpt2", "bf16", pipeline=2, schedule=("gpipe", 1)),
    row("gpt2", "fp32", context=2, zero=3),
    row("gpt2", "fp32", data_replicate=2, precision="bf16"),
    row("gpt2", "fp32", pipeline=2, data_shard=2, zero=1, recompute="mixed", uneven=True),
    row("gemma2", "bf16", tensor=2, precision="bf16"),
    row("gemma2", "fp32", context=2, offload="optimizer"),
    row("gemma2", "fp32", tensor=2, pipeline=2, schedule=("interleaved-zb", 2)),
    row("gemma2", "bf16", data_shard=2, zero=3, recompute="full"),
    row("gemma2", "bf16", pipeline=2, schedule=(combinations.AHEAD, 1)),
    row("mixtral", "fp32", tensor=2),
    row("mixtral", "bf16", tensor=2, expert=2, precision="bf16"),
    row("mixtral", "bf16", pipeline=2, schedule=("zbv", 2)),
    row("mixtral", "fp32", data_shard=4, expert=2, zero=3, offload="optimizer"),
    row("qwen3_moe", "fp32", tensor=2, expert=2),
    row("qwen3_moe", "bf16", data_shard=2, expert=2, zero=1, recompute="selective"),
    row("qwen3_moe", "fp32", data_shard=2, expert=2, zero=3, precision="bf16"),
    row("qwen3_moe", "bf16", context=2, expert=2, zero=2),
    row("qwen3_moe", "bf16", pipeline=2, schedule=("dualpipe-v", 2), recompute="full"),
    row("qwen3_moe", "fp32", pipeline=2, schedule=("zb-h1", 1), offload="optimizer"),
)


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def distances(
    rows: Sequence[Row], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Distance]:
    for one in rows:
        oracle(one)  # so that ranks are forked from a process that has loaded the library
    for ranks in sorted({one.ranks for one in rows}):
        with Crew(ranks) as crew:
            monkeypatch.setattr(launching, "supervise", OnCrew(crew))
            for number, one in enumerate(one for one in rows if one.ranks == ranks):
                yield distance(one, launched(one, folder / f"{ranks}-{number}"))


def check(found: Sequence[Distance]) -> None:
    bad = [one.text for one in found if not one.within(BOUNDS[one.row.precision])]
    assert not bad, f"{len(bad)} of {len(found)} rows:\n" + "\n".join(bad)


SOME = [one for one in ROWS if one.name == "llama" and one.ranks == 2][::4]
"""What `make test` launches; `tests/runtime/test_families.py` launches one plan of each family."""


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, SOME))
def test_a_launch_trains_like_the_library(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(distances(rows, tmp_path, monkeypatch))

    check(found)
    # These few samples have no token that another order of sums sends to another expert.
    assert all(one.tied <= BOUNDS[one.row.precision].loss for one in found)


@pytest.mark.ranks
@pytest.mark.matrix
def test_what_is_exported_is_what_the_library_has_trained(tmp_path: Path) -> None:
    """Ranks are processes of their own here, from `launch` to `export`."""
    one = row("llama", "fp32", tensor=2)

    found = launched(one, tmp_path / "launch", checkpoint=tmp_path / "saved")
    to_huggingface(tmp_path / "saved", tmp_path / "exported")

    check([distance(one, found)])
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    trained = oracle(one).weights
    assert exported.keys() == trained.keys()
    for name, weight in trained.items():
        assert float((exported[name] - weight).norm() / weight.norm()) < WEIGHTS, name


# --- what the oracle is -----------------------------------------------------------------------


def test_the_oracle_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(library_runs.__file__).read_text(encoding="utf-8"))
    named = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "tests"]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }

    assert named.isdisjoint({"planner", "runtime", "profiler", "meshwright", "tests"})


@pytest.mark.parametrize("setting", [field.name for field in fields(library_runs.Settings)])
def test_a_setting_that_is_a_hundredth_off_leaves_the_bound(setting: str) -> None:
    """Or one step off, of settings that count steps; epsilon is so small that it may be ten times.

    Clipping must act in some steps only: AdamW does not see a factor that all gradients have.
    """
    one = row("llama", "fp32")
    value = getattr(SETTINGS, setting)
    off = value + 1 if isinstance(value, int) else value * (10 if setting == "epsilon" else 1.01)
    changed = replace(SETTINGS, **{setting: off})

    found = library_runs.train(one.folder, batches(one.global_batch), changed)

    assert apart(found.losses, oracle(one).losses) > BOUNDS["fp32"].loss


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_bound_of_bf16_is_what_the_library_loses_by_it(name: str) -> None:
    whole, half = (oracle(row(name, "fp32", precision=p)) for p in ("fp32", "bf16"))

    lost = apart(half.losses, whole.losses), apart(half.norms, whole.norms)

    most = BOUNDS["bf16"]
    assert most.loss / 10 < lost[0] < most.loss
    assert most.norm / 100 < lost[1] < most.norm


def test_the_rows_have_every_value() -> None:
    """Whatever plans can say without losing something, from both kinds of files."""
    table = combinations.choices()
    for axis in (*combinations.DEGREES, "expert"):
        assert {one.stored for one in ROWS if getattr(one, axis) > 1} == set(STORED), axis
    for name in ("zero", "schedule", "recompute", "offload"):
        assert {getattr(one, name) for one in ROWS} == set(table[name]), name
    assert {(one.zero, one.stored) for one in ROWS} == {*itertools.product(table["zero"], STORED)}
    assert {(one.name, one.stored) for one in ROWS} == {*itertools.product(NAMES, STORED)}
    assert {(one.name, one.precision) for one in ROWS} == {*itertools.product(NAMES, BOUNDS)}


# --- every mesh -------------------------------------------------------------------------------


def products(name: str, ranks: int) -> Iterator[Row]:
    """Yield every mesh and ZeRO level, on 2 ranks with every schedule from both kinds of files.

    What else a plan can say changes by chance, from a fixed seed.
    """
    rng = random.Random(f"{name} {ranks}")
    table = combinations.choices()
    schedules = table["schedule"] if ranks == 2 else [None]
    files = list(STORED) if ranks == 2 else [None]
    for mesh, zero, schedule, stored in itertools.product(
        combinations.meshes((ranks,)), table["zero"], schedules, files
    ):
        plain = row(name, stored or "fp32", zero=zero, schedule=schedule or ("1f1b", 1), **mesh)
        if not can_run(plain):
            continue
        any_schedule = table["schedule"] if plain.pipeline > 1 else [plain.schedule]
        tried = (
            replace(
                plain,
                schedule=schedule or rng.choice(any_schedule),
                stored=stored or rng.choice(list(STORED)),
                recompute=rng.choice(table["recompute"]),
                offload=rng.choice(table["offload"]),
                activations=rng.choice(("keep", "keep", "offload")),
                precision=rng.choice(("fp32", "fp32", "bf16")),
                several=rng.choice(table["several"]),
                uneven=rng.choice(table["uneven"]),
                outside_in=rng.choice(table["outside_in"]),
            )
            for _ in range(20)
        )
        yield next(filter(can_run, tried), plain)


def can_run(one: Row) -> bool:
    if one.schedule[0] != "pipedream-2bw":
        return combinations.reason(one) is None
    if one.pipeline == 1 or not can_run(replace(one, schedule=("1f1b", 1))):
        return False
    try:
        return unsupported_reason(one.document(), one.graph()) is None
    except DocumentError:
        return False


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.timeout(14400)
@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in (2, 4) for name in NAMES])
def test_every_mesh_trains_like_the_library(
    ranks: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for one in distances(list(products(name, ranks)), tmp_path, monkeypatch):
        print(one.text, flush=True)
        found.append(one)

    check(found)
