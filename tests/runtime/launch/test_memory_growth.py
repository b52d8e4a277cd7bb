"""A process that leaks is named before its node runs out of memory; caches that fill are not."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from meshwright.runtime.launch import memory_growth
from meshwright.runtime.launch.host_memory_limits import available_bytes, now_bytes
from meshwright.runtime.launch.memory_growth import SAMPLE_S, Growth, MemoryGrowth

GB = 10**9


def live(
    monkeypatch: pytest.MonkeyPatch, bytes_at: dict[int, list[int]], *, left_s: float = 1e6
) -> list[tuple[int, Growth]]:
    """Return what is named at which look, of ranks 0 and 1 as processes 10 and 11."""
    watch, found = MemoryGrowth(), []
    monkeypatch.setattr(memory_growth, "available_bytes", lambda: 8 * GB)
    for look in range(len(bytes_at[10])):
        now = {process: values[look] for process, values in bytes_at.items()}
        monkeypatch.setattr(
            memory_growth, "now_bytes", lambda process, now=now: now.get(process, GB)
        )
        for growth in watch.look({0: 10, 1: 11}, left_s=left_s, now_s=look * SAMPLE_S):
            found.append((look, growth))
    return found


def test_a_fast_leak_is_named_within_a_minute_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    leak = [2 * GB + look * GB // 5 for look in range(40)]
    (look, growth), *more = live(monkeypatch, {10: [2 * GB] * 40, 11: leak})
    assert (look, growth.rank, more) == (4, 1, [])
    assert growth.text.startswith("rank 1 takes 762.9 MiB of host memory more each minute and has")
    assert growth.left_s < 8 * GB / (GB / 5 / SAMPLE_S) + 1


def test_a_slow_leak_is_named_hours_before_it_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    slow = [2 * GB + look * 10_000_000 + rng.randrange(1_000_000) for look in range(80)]
    (look, growth), *more = live(monkeypatch, {10: slow, 11: [GB] * 80})
    assert (look, growth.rank) == (64, 0)
    assert not more
    assert 3600 < growth.left_s < 86_400


@pytest.mark.parametrize(
    "values",
    [
        [2 * GB + int(3 * GB * (1 - 0.7**look)) for look in range(80)],  # a cache that fills
        [2 * GB + GB * (look % 7) // 10 for look in range(80)],
        [2 * GB + GB * (look // 10) for look in range(80)],
        [2 * GB] * 80,
    ],
)
def test_what_is_no_leak_is_not_named(monkeypatch: pytest.MonkeyPatch, values: list[int]) -> None:
    assert live(monkeypatch, {10: values, 11: [GB] * 80}) == []


def test_a_leak_that_the_run_outlives_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    leak = [2 * GB + look * GB // 10 for look in range(40)]
    assert live(monkeypatch, {10: leak, 11: [GB] * 40}, left_s=600.0) == []


def test_the_limit_of_a_control_group_is_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/job\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "groups" / "job").mkdir(parents=True)

    def left() -> int:
        return available_bytes(tmp_path / "own", tmp_path / "groups", tmp_path / "meminfo")

    assert left() == 8000 * 1024
    (tmp_path / "groups" / "job" / "memory.max").write_text("max\n")
    (tmp_path / "groups" / "job" / "memory.current").write_text("300000\n")
    assert left() == 8000 * 1024
    (tmp_path / "groups" / "job" / "memory.max").write_text("1000000\n")
    assert left() == 700_000
    assert now_bytes(os.getpid()) > 10**6
