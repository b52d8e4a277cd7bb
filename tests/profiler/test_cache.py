"""What was measured is found again by its content, and what was cut short goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.profiler import cache as stored
from meshwright.profiler import layers
from meshwright.profiler.cache import Parts
from meshwright.profiler.chain import Case, Chain
from meshwright.profiler.clock import Clock
from tests.runtime import cases

CASES = [Case(tensor=1, micro_batch=size, recompute="none") for size in (1, 2)]


def test_another_model_software_or_machine_is_another_folder(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    first = stored.folder_of({"model": "a", "nodes": [{"cores": 2}]})

    assert first == stored.folder_of({"nodes": [{"cores": 2}], "model": "a"})
    assert first.parent == cache / "profiles"
    assert first != stored.folder_of({"model": "b", "nodes": [{"cores": 2}]})
    assert first != stored.folder_of({"model": "a", "nodes": [{"cores": 4}]})
    monkeypatch.setattr(stored, "versions", lambda _: {"torch": "99"})
    assert first != stored.folder_of({"model": "a", "nodes": [{"cores": 2}]})


def alone(folder: Path) -> Parts:
    return Parts(str(folder), 0, lambda value: value)


def test_a_part_is_measured_once(tmp_path: Path) -> None:
    done: list[int] = []

    for _ in range(3):
        assert alone(tmp_path).once("links", lambda: done.append(1) or [1.5]) == [1.5]

    assert done == [1]


def test_a_part_that_another_rank_lacks_is_measured_again(tmp_path: Path) -> None:
    alone(tmp_path).store("links", 1)
    parts = Parts(str(tmp_path), 0, lambda _: 0.0)

    assert parts.once("links", lambda: 2) == 2


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").write_text("{")

    assert not alone(tmp_path).everywhere_stored("layers")


def test_rounds_that_are_kept_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cases.transformer()
    chain = Chain(model, seq_len=16, precision="fp32", tensor=1, device=torch.device("cpu"))
    trials: list[Case] = []
    trial = layers.trial

    def counted(chain: Chain, case: Case, clock: Clock, *again: dict[str, float]) -> object:
        trials.append(case)
        if len(trials) == 2 + 2 * 2 + 1:  # warm-up twice, two rounds, then a kill
            raise KeyboardInterrupt
        return trial(chain, case, clock, *again)

    monkeypatch.setattr(layers, "trial", counted)
    with pytest.raises(KeyboardInterrupt):
        layers.measurements([chain], CASES, budget_s=0.0, parts=alone(tmp_path))
    trials.clear()
    monkeypatch.setattr(layers, "layer_bytes", lambda *_: pytest.fail("bytes are kept"))

    found = layers.measurements([chain], CASES, budget_s=0.0, parts=alone(tmp_path))

    assert len(trials) == 2 + 2  # warm-up, and the round that was not whole
    assert {m.samples for m in found if m.kind == "block"} == {2 * layers.LEAST_ROUNDS}


def test_cases_beyond_the_budget_are_left_out_from_the_end() -> None:
    chain = Chain(
        cases.transformer(), seq_len=16, precision="fp32", tensor=1, device=torch.device("cpu")
    )

    found = layers.measurements([chain], CASES, budget_s=0.0, least=1)

    assert {m.micro_batch for m in found} == {1}
