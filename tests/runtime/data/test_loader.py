"""A loader hands out the same global batches under any plan, and goes on where it was saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.errors import BatchError, LaunchError
from meshwright.runtime.data.loader import Loader
from meshwright.runtime.engine.engine import Engine

DATA = torch.arange(22)


def loader(samples: range = range(8), **changes: Any) -> Loader:
    return Loader(DATA, **{"global_batch": 8, "samples": samples, "seed": 3, **changes})


def epochs(of: Loader, count: int = 2) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in of] for _ in range(count)]


def test_slices_of_ranks_are_the_global_batches_of_one_process() -> None:
    whole = epochs(loader())

    parts = [epochs(loader(range(at, at + 2))) for at in range(0, 8, 2)]

    for epoch, batches in enumerate(whole):
        for at, batch in enumerate(batches):
            assert [sample for part in parts for sample in part[epoch][at]] == batch
    assert [len(batches) for batches in whole] == [2, 2] == [len(loader())] * 2
    for first, second in whole:
        assert len({*first, *second}) == 16
    assert whole[0] != whole[1]
    assert whole != epochs(loader(seed=4))
    assert epochs(loader(shuffle=False))[1] == DATA[:16].view(2, 8).tolist()


def test_a_saved_loader_goes_on_with_the_next_batch() -> None:
    expected = [batch for epoch in epochs(loader(), 3) for batch in epoch]
    for handed_out in range(5):
        first = loader(num_workers=0)
        seen: list[list[int]] = []
        while len(seen) < handed_out:
            for batch in first:
                seen.append(batch.tolist())
                if len(seen) == handed_out:
                    break
        # Another plan: this rank has half of each batch now.
        second = loader(range(4))
        second.load_state_dict(first.state_dict())

        rest: list[list[int]] = []
        while len(rest) + handed_out < len(expected):
            rest += [batch.tolist() for batch in second]
        assert seen == expected[:handed_out]
        assert rest == [batch[:4] for batch in expected[handed_out:]]


def test_what_would_be_another_order_is_refused() -> None:
    with pytest.raises(LaunchError, match="seed is 4, and was 3"):
        loader(seed=4).load_state_dict(loader().state_dict())
    with pytest.raises(BatchError, match="22 samples, fewer than a global batch of 32"):
        loader(global_batch=32)


def test_an_engine_trains_on_its_loader_and_draws_nothing_from_the_script() -> None:
    def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
        return out.square().sum(), len(out)

    data = torch.randn(12, 3)
    engine = Engine(
        lambda: nn.Linear(3, 1),
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        batch=data[:4],
    )
    before = torch.get_rng_state()
    counts = [engine.step(batch).count for batch in engine.loader(data, shuffle=True)]

    assert counts == [4.0] * 3
    assert torch.equal(before, torch.get_rng_state())
