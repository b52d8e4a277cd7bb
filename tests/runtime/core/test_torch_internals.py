"""The runtime needs no name that torch 2.11 lacks; 'make oldest' runs it there."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from benchmarks.torch_internals import shapes_found_in
from meshwright.runtime.core.torch_internals import (
    KeptByCall,
    fsdp_parameters,
    reduce_scatter,
    unseen_by_recompute,
)
from meshwright.runtime.techniques.activation_checkpointing import checkpoint_call

ROOT = Path(__file__).parents[3]

LACKING = """
import torch.distributed as dist
from torch.distributed.pipelining import _utils, stage
from torch.distributed.tensor._sharding_prop import ShardingPropagator

gone = [
    (dist, "reduce_scatter_single"),
    (dist, "all_gather_single"),
    (_utils, "_make_tensor_from_meta"),
    (_utils, "InferenceMode"),
    (stage.PipelineStage, "_setup_forward_recv_info"),
    (stage.PipelineStage, "_warmup_forward_vote"),
    (ShardingPropagator, "_fake_mode_lock"),
]
for owner, name in gone:
    if hasattr(owner, name):
        delattr(owner, name)
import meshwright.runtime.engine.engine, meshwright.runtime.launch.training_loop
import benchmarks.rehearsal
"""


@pytest.mark.matrix
def test_the_runtime_imports_without_what_torch_2_11_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LACKING], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


class _Doubled(KeptByCall):
    def __setitem__(self, call: int, kept: Any) -> None:
        super().__setitem__(call, 2 * kept)

    def get(self, call: int, default: Any = None) -> Any:
        return super().get(call, default) // 2


def test_kept_results_come_back_by_number_and_in_order() -> None:
    kept: defaultdict[str, _Doubled] = defaultdict(_Doubled)

    kept["2.13"][0] = 3
    kept["2.13"][1] = 5
    for value in (3, 5, 7):
        kept["2.11"].append(value)

    assert [kept["2.13"].get(call) for call in (1, 0)] == [5, 3]
    assert [kept["2.11"].pop(0) for _ in range(2)] == [3, 5]
    assert dict(kept["2.11"]) == {2: 14}
    assert len(kept["2.11"]) == 1
    assert kept["2.11"].pop(0) == 7
    assert len(kept["2.11"]) == 0


@pytest.mark.parametrize("below", [False, True])
def test_parameters_are_found_in_one_group_or_several(
    below: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = SimpleNamespace(_fsdp_param_group=SimpleNamespace(fsdp_params=["a", "b"]))
    none = SimpleNamespace(_fsdp_param_group=None)
    several = SimpleNamespace(
        _fsdp_param_groups=[SimpleNamespace(fsdp_params=[name]) for name in "cd"]
    )
    states = {"2.11": [one, none], "2.13": [several]}
    for mine in states.values():
        mine[0]._state_ctx = SimpleNamespace(all_states=mine)

    def found(version: str) -> list[Any]:
        monkeypatch.setattr(fully_shard, "state", lambda _: states[version][0])
        return list(fsdp_parameters(object(), below=below))  # type: ignore[arg-type]

    assert (found("2.11"), found("2.13")) == (["a", "b"], ["c", "d"])


def test_gradients_are_scattered_under_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(
            dist, name, lambda *_, group, name=name: called.append(name), raising=False
        )

    reduce_scatter(None, None, group=None)  # type: ignore[arg-type]
    monkeypatch.delattr(dist, "reduce_scatter_single")
    reduce_scatter(None, None, group=None)  # type: ignore[arg-type]

    assert called == ["reduce_scatter_single", "reduce_scatter_tensor"]


def test_shapes_are_found_inside_the_context_and_only_so_long() -> None:
    before = ShardingPropagator._propagate_tensor_meta_non_cached
    entered: list[str] = []

    class Entered:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    schema = SimpleNamespace(op=torch.ops.aten.equal.default)
    with shapes_found_in(Entered):
        assert ShardingPropagator()._propagate_tensor_meta_non_cached(schema) is None

    assert entered == ["in", "out"]
    assert ShardingPropagator._propagate_tensor_meta_non_cached is before


def test_what_layers_share_may_be_made_by_another_one_in_backward() -> None:
    """The first layer makes it in forward, and the last one in backward, which runs first."""
    shared: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        if not shared:
            shared.append(unseen_by_recompute(lambda: torch.arange(3.0) - 1))
        return (x * shared[0]).exp()

    def gradient(call: Any) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        made = call(call(x))
        shared.clear()
        made.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(checkpoint_call(layer, "selective")), gradient(layer))
