"""Every path of the runtime and the profiler runs on a fake CUDA device: in order, in its types.

Kernels do nothing there; what is held is that tensors meet on one device, that streams wait for
each other, how often the host waits, and in which types products are made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.streams import Stream, World
from tests.cuda.walk import COVERED, PATHS

ROOT = Path(__file__).parents[2]
WALK = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # torch must find it when it starts
from tests.cuda.walk import main
main()
"""
REPORT = {
    "copy of pageable memory to cuda at runtime/engine/language_model.py:inputs_and_targets": 1,
    "item at runtime/engine/engine.py:_update": 5,
}
"""What the host waits for in a step: tokens that come, the five figures of its report that go."""


PRODUCTS = {
    "profile: layers in fp32": "float32",
    "profile: layers in bf16": "bfloat16",
    "profile: layers in fp16": "float16",
    "profile: data parallelism in fp32": "float32",
    "profile: data parallelism in bf16": "bfloat16",
    "one device, bf16": "bfloat16",
    "one device, fp16": "float16",
}
"""The type of matrix products, by path."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library with which torch believes in a device."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: autograd asks for a device's guard in C++")
    device = tmp_path_factory.mktemp("cuda") / "device.so"
    torch_folder = Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    command += [str(Path(__file__).with_name("device.cpp")), "-o", str(device)]
    libraries = torch_folder / "lib"
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True, capture_output=True)
    return device


@pytest.fixture(scope="module")
def walked(device: Path) -> dict[str, dict[str, Any]]:
    return walk(device, [name for name in PATHS if name not in COVERED])


def walk(device: Path, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Walk paths in one process that believes in the device."""
    found = subprocess.run(
        [sys.executable, "-c", WALK, str(device), *paths],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return {row["path"]: row for row in rows}


def test_every_path_ends(walked: dict[str, dict[str, Any]]) -> None:
    assert len(walked) == len(PATHS) - len(COVERED) > 20
    assert {name: row["failed"] for name, row in walked.items() if row["failed"]} == {}


@pytest.mark.matrix
def test_paths_of_parts_that_others_walk_end_in_order(device: Path) -> None:
    rows = walk(device, COVERED)

    assert set(rows) == set(COVERED)
    for name, row in rows.items():
        assert (name, row["failed"], row["races"]) == (name, None, {})
        if not name.startswith("profile: "):
            assert row["syncs"] == REPORT, name
        if name in PRODUCTS:
            assert row["products"]["mm"] == [PRODUCTS[name]], name


def test_work_on_one_stream_waits_for_what_it_needs_of_another(
    walked: dict[str, dict[str, Any]],
) -> None:
    assert {name: row["races"] for name, row in walked.items() if row["races"]} == {}
    # Offload is copies between streams: nothing would be held if there were none.
    assert walked["offloaded activations"]["crossings"] > 300


def test_the_host_waits_for_a_step_only_at_its_ends(walked: dict[str, dict[str, Any]]) -> None:
    steps = {name: row["syncs"] for name, row in walked.items() if not name.startswith("profile: ")}
    more = {name: syncs for name, syncs in steps.items() if syncs != REPORT}

    assert set(more) == {
        "offloaded parameters",
        "experts",
        "gathered experts",
        "relayed experts",
        "compiled, experts",
    }
    # What is compiled for CUDA asks inside of its graph.
    assert more["compiled, experts"] == more["experts"]
    # FSDP itself brings gradients that are added up on the host there; the norm is summed there.
    assert {place.split(" at ")[1] for place in more["offloaded parameters"]} == {
        "torch",
        "runtime/core/pinned_memory.py:_add_first",
        "runtime/engine/language_model.py:inputs_and_targets",
        "runtime/engine/engine.py:_update",
        "runtime/optim/sharded_optimizer.py:update_on_device",
        "runtime/optim/gradients.py:_multiply",
        "runtime/optim/gradients.py:_squared_norm",
    }
    # A layer asks in two micro-batches how many tokens go where.
    assert more["experts"] == REPORT | {
        "item at runtime/engine/language_model.py:expert_load": 1,
        "list at runtime/parallel/expert_parallel.py:for_rows": 2,
    }
    # Handed on, they are asked for to nodes and then to ranks.
    assert more["relayed experts"] == REPORT | {
        "item at runtime/engine/language_model.py:expert_load": 1,
        "list at runtime/parallel/expert_parallel.py:for_places": 4,
    }
    # Gathered tokens find their experts on the device.
    assert more["gathered experts"] == REPORT | {
        "item at runtime/engine/language_model.py:expert_load": 1
    }


@pytest.mark.parametrize("path", [path for path in PRODUCTS if path not in COVERED])
def test_products_are_in_the_type_that_is_measured_and_trained(
    walked: dict[str, dict[str, Any]], path: str
) -> None:
    assert walked[path]["products"]["mm"] == [PRODUCTS[path]]


def test_attention_in_32_bits_shares_no_heads(walked: dict[str, dict[str, Any]]) -> None:
    # No fused kernel does both.
    assert walked["one device"]["products"]["attention"] == ["equal float32"]
    assert walked["one device, bf16"]["products"]["attention"] == ["grouped bfloat16"]


def test_a_librarys_attention_in_32_bits_shares_no_heads(
    walked: dict[str, dict[str, Any]],
) -> None:
    assert walked["a library's layers"]["products"]["attention"] == ["equal float32"]


def test_a_profile_in_16_bits_updates_parameters_in_32(walked: dict[str, dict[str, Any]]) -> None:
    assert walked["profile: optimizer"]["products"]["_fused_adamw_"] == ["float32"]


# --- what finds races, held by hand -----------------------------------------------------------


def _two_streams() -> tuple[World, Stream, torch.Tensor]:
    world, tensor = World(), torch.zeros(1)
    world.work("made", world.default, [], [tensor])
    return world, Stream(), tensor


def test_a_read_behind_no_wait_is_a_race() -> None:
    world, side, tensor = _two_streams()

    world.work("read", side, [tensor], [])
    side.wait_stream(world.default)
    world.work("read", side, [tensor], [])

    assert len(world.races) == 1
    assert "read on stream" in world.races[0]


def test_a_write_over_what_another_stream_reads_is_a_race() -> None:
    world, side, tensor = _two_streams()
    side.wait_stream(world.default)
    world.work("read", side, [tensor], [])
    done = side.record_event()

    world.work("write", world.default, [], [tensor])
    world.default.wait_event(done)
    world.work("write", world.default, [], [tensor])

    assert len(world.races) == 1


def test_memory_given_back_while_another_stream_works_on_it_is_a_race() -> None:
    world, side, tensor = _two_streams()
    side.wait_stream(world.default)
    world.work("read", side, [tensor], [])

    del tensor
    world.work("made", world.default, [], [torch.zeros(1)])

    assert "still in use" in world.races[0]


def test_what_the_host_waited_for_is_behind_it() -> None:
    world, side, tensor = _two_streams()

    world.synced("by hand", world.default.clock)
    world.work("read", side, [tensor], [])

    assert world.races == []
