"""What of a module no gradient moves: weights that nothing reads, and buffers that a forward makes.

Both are in `state_dict` and in checkpoints, with the values of one process.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.errors import LaunchError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.engine.engine import Engine
from tests.parts import some_and_others
from tests.runtime.ranks import on_ranks

SAMPLES, WIDTH, STEPS = 8, 6, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero 3": {"zero": 3},
    "zero 2 in bf16": {"zero": 2, "precision": "bf16"},
    "two stages": {"pipeline": 2},
}
UNUSED = {"spare.weight", "spare.bias", "blocks.1.scale", "once", "table", "frozen"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).tanh()


class Spare(nn.Module):
    """Most of what it has is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.spare = nn.Linear(WIDTH, 3)
        self.once = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.blocks[1].register_parameter("scale", nn.Parameter(torch.randn(WIDTH)))
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("passing", torch.randn(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counting(Spare):
    """A buffer follows the samples that this rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Seen()


class Seen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(x.detach().max())
        return super().forward(x)


def batch_of(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def loss(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (outputs - batch.roll(1, 1)).square().sum(), len(outputs)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, eps=1e-4)


new_engine = functools.partial(Engine, loss=loss, optimizer=adamw, batch=batch_of(0))


def plainly() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Spare()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        batch = batch_of(step)
        (loss(model(batch), batch)[0] / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def trained(layout: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state that was trained, and that of another engine that loads it."""
    engine = new_engine(Spare, layout)
    for step in range(STEPS):
        engine.step(engine.slice(batch_of(step)))
    engine.save(folder)
    other = new_engine(Spare, {**layout, "seed": 7})
    other.load(folder)
    return engine.state_dict(), other.state_dict()


def under(names: list[str], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(LAYOUTS[name], Path(folder, name)) for name in names}
    engine = new_engine(Counting, {"zero": 3}, compare_every=0)
    engine.step(batch_of(0)[: SAMPLES // 2])  # of both ranks
    engine.save(Path(folder, "equal"))
    engine.step(engine.slice(batch_of(0)))
    with pytest.raises(LaunchError) as refused:
        engine.save(Path(folder, "unequal"))
    return {**found, "refused": str(refused.value)}


def check(pair: tuple[dict[str, Tensor], ...], name: str) -> None:
    wanted = plainly()
    close = {"rtol": 2e-2, "atol": 2e-2} if "bf16" in name else {"rtol": 1e-5, "atol": 1e-6}
    for state in pair:
        assert state.keys() == wanted.keys(), name
        for key, value in wanted.items():
            if key in UNUSED:
                assert torch.equal(state[key], value), (name, key)
            else:
                torch.testing.assert_close(state[key], value, msg=f"{name}: {key}", **close)


def test_one_process_keeps_what_nothing_reads(tmp_path: Path) -> None:
    check(trained({}, tmp_path), "alone")


@pytest.mark.ranks
@pytest.mark.parametrize("names", some_and_others(LAYOUTS, ["zero 3", "two stages"]))
def test_two_ranks_keep_what_nothing_reads_and_refuse_buffers_that_differ(
    names: list[str],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in on_ranks(2, under, names, folder):
            said = found.pop("refused")
            for name, pair in found.items():
                check(pair, name)
            assert "blocks.2.largest: ranks 0 and 1 have different values" in said
            assert "persistent=False" in said


class Own:
    """State of the script's own, whose calls fail on one rank."""

    def __init__(self, state: Callable[[], Any], fails: int, *, loading: bool = False) -> None:
        self.state, self.fails, self.loading = state, fails, loading

    @property
    def _is_here(self) -> bool:
        return dist.get_rank() == self.fails

    def state_dict(self) -> Any:
        return self.state() if self._is_here and not self.loading else {"at": 1}

    def load_state_dict(self, state: Any) -> None:
        assert state == {"at": 1}
        if self._is_here and self.loading:
            raise KeyError("at")


class Position:
    """A class of the user's own, which is pickled and never read back."""


def raising() -> Any:
    raise ZeroDivisionError("own code")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


FAILURES: dict[str, tuple[Own, str]] = {
    "a state_dict that raises": (Own(raising, 1), "own code"),
    "a state that cannot be pickled": (Own(lambda: lambda: 0, 1), "plain data"),
    "a state that could not be read": (Own(Position, 0), "plain data"),
}


def said_by(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as refused:
        call()
    return str(refused.value)


def one_rank_fails(folder: str) -> dict[str, str]:
    """Return what each failure said on this rank; nobody may wait for the one that failed."""
    path, batch = Path(folder), batch_of(0)
    engine = new_engine(Spare, {"zero": 3})
    said = {}
    engine.step(engine.slice(batch))
    for name, (own, _) in FAILURES.items():
        said[name] = said_by(functools.partial(engine.save, path, extra={"own": own}))
    assert not any(path.glob("step-*"))
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:
            patched.setattr(checkpoint, "let_count", full)
        said["a full disk"] = said_by(lambda: engine.save(path))
    engine.save(path, extra={"own": Own(dict, 2)})
    failing = {"own": Own(dict, 1, loading=True)}
    said["loading"] = said_by(lambda: engine.load(path, extra=failing))
    engine.load(path, extra={"own": Own(dict, 2)})
    engine.step(engine.slice(batch))
    engine.save(path)
    dist.barrier()
    if dist.get_rank() == 0:
        index = path / "step-000002" / "tensors.json"
        index.write_text(index.read_text()[:-1])
    dist.barrier()
    said["a damaged one"] = said_by(lambda: engine.resume(path))
    said["the folder of one"] = said_by(lambda: engine.load(path / "step-000002"))
    assert engine.load(path / "step-000001").name == "step-000001"
    engine.step(engine.slice(batch))
    return said


@pytest.mark.ranks
def test_where_one_rank_fails_to_save_or_load_all_ranks_say_so() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(2, one_rank_fails, folder)
        wanted = {name: text for name, (_, text) in FAILURES.items()} | {
            "a full disk": "No space left",
            "loading": "at",
            "a damaged one": "tensors.json",
            "the folder of one": "tensors.json",
        }
        for rank, said in enumerate(found):
            assert said.keys() == wanted.keys()
            for name, text in wanted.items():
                assert text in said[name], (rank, name)
        assert "rank 1: ZeroDivisionError" in found[0]["a state_dict that raises"]
