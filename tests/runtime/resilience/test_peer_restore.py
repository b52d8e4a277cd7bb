"""State that was copied under one plan is gathered under another, bit by bit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.checkpoint.state_snapshot import Box, boxes
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.resilience import peer_restore
from meshwright.runtime.resilience.in_memory_checkpoint import Mirror
from meshwright.runtime.resilience.shared_memory import Slots, slots_of_node
from tests.runtime.checkpoint.test_state_snapshot import TOKENS, of_tokens, whole
from tests.runtime.ranks import on_ranks


def moved(memory: dict[str, str], layouts: list[dict[str, Any]]) -> list[str]:
    """Return what is another behind a way over all plans and back, each from copies of the last."""
    first, batch = of_tokens(layouts[0])
    for step in range(2):
        first.step(batch(step))
    engine, expected = first, whole(first)
    for number, layout in enumerate((*layouts[1:], layouts[0])):
        node = slots_of_node(memory)
        assert node is not None
        place = {"local_rank": dist.get_rank(), "ranks": dist.get_world_size()}
        mirror = Mirror(node, **place, run=f"a{number}", plan=str(layout))
        used = SampleDigest.of_first(engine.next_sample)
        mirror.copy(engine.snapshot(), used=used, began_s=time.perf_counter(), step_s=1.0)
        dist.barrier()
        engine, own = of_tokens(layout)
        kept = mirror.newest(boxes(engine.state()))
        assert kept is not None
        engine.restore(kept.snapshots)
        assert (engine.steps, engine.next_sample, kept.used) == (2, used.count, used)
        assert wrong_in(engine, expected) == []
    losses = [(one.step(own(2)).loss, one.step(own(3)).grad_norm) for one in (engine, first)]
    wrong = wrong_in(engine, whole(first))
    return wrong if losses[0] == losses[1] else [*wrong, str(losses)]


def wrong_in(engine: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, one in whole(engine).items() if not torch.equal(one, expected[name])]


@pytest.mark.ranks
@pytest.mark.matrix
def test_copies_are_gathered_under_other_plans() -> None:
    with Slots() as slots:
        assert on_ranks(2, moved, slots.environment(2), TOKENS) == [[], []]


def test_a_rank_takes_its_own_replica_before_a_wards_that_lies_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica that was damaged is then found by a comparison behind the restore."""
    monkeypatch.setattr(peer_restore, "own_rank", lambda: 1)
    box = Box((4,), (0,), (4,))
    parts = {
        rank: peer_restore.PartBoxes(place=(7, 56), boxes={"model.a": ("float32", box)})
        for rank in range(2)
    }

    wanted = peer_restore._wanted_boxes(parts, {0: 1, 1: 1}, {"model.a": box})

    assert wanted == [(1, 1, "model.a", (0,), (4,))]
