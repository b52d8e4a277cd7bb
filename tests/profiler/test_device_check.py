"""Before a run its devices and links are timed, and slow ones named."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshwright.launch import device_checks
from meshwright.planner.documents.profile import MeasuredDevice, NodePair
from meshwright.profiler import device_check, start_ranks
from meshwright.profiler.device_check import (
    DeviceCheck,
    check_devices,
    findings,
    slow_processors,
)
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.node_rank import ALONE
from meshwright.runtime.run.rendezvous import Rendezvous

NAMES = ["a, rank 0", "a, rank 1", "b, rank 2", "b, rank 3"]


def device(rank: int, flops: float = 100.0, to_host: float = 10.0) -> MeasuredDevice:
    return MeasuredDevice(
        name="gpu",
        rank=rank,
        flops=flops,
        host_to_device_bytes_per_s=10.0,
        device_to_host_bytes_per_s=to_host,
    )


def links(slow: tuple[int, int] | None = None) -> list[NodePair]:
    return [
        NodePair(
            source=source,
            target=target,
            bytes_per_s=4e9 if (source, target) == slow else 1e10,
            latency_s=1e-5,
            spread=0.0,
        )
        for source in range(4)
        for target in range(4)
        if source != target
    ]


def texts(devices: list[MeasuredDevice], pairs: list[NodePair]) -> list[str]:
    return [finding.text for finding in findings(devices, pairs, NAMES, NAMES)]


def test_a_slow_device_copy_or_link_is_named() -> None:
    even = [device(rank) for rank in range(4)]

    assert texts(even, links()) == []
    (slow,) = texts([*even[:3], device(3, flops=70.0)], links())
    assert slow.startswith("rank 3 on b computes at 70% of its peers")
    (slow,) = texts([device(0, to_host=5.0), *even[1:]], links())
    assert slow == "a, rank 0 copies to its host at 50% of its peers"
    (slow,) = texts(even, links((1, 2)))
    assert slow.startswith("from a, rank 1 to b, rank 2 go ")


def test_a_rank_that_gets_less_of_a_processor_is_named() -> None:
    assert list(slow_processors([0.5, 0.52, 0.45, 0.5], NAMES)) == []
    assert list(slow_processors([0.3], NAMES[:1])) == []
    (slow,) = slow_processors([1.0, 1.0, 0.3, 0.9], NAMES)
    assert slow.subject == "b, rank 2"
    assert slow.text.startswith("b, rank 2 gets 30% of a processor, and its peers 100%")


def test_the_share_of_a_processor_is_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """By two clocks that are set by hand: this thread runs in a quarter of the time."""
    now = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now) / 10)
    monkeypatch.setattr(time, "thread_time", lambda: next(now) / 40)

    assert device_check.processor_share(5.0) == pytest.approx(0.25, rel=0.05)


@pytest.mark.ranks
@pytest.mark.matrix
def test_two_ranks_time_each_other() -> None:
    with Rendezvous(ALONE) as rendezvous:
        check = check_devices(ranks=2, device="cpu", rendezvous=rendezvous, quiet=True)

    assert (check.devices, check.links) == (2, 1)
    assert check.seconds < device_check.MOST_S
    assert check.text.startswith("preflight: 2 devices and 1 links in ")


def test_ranks_that_do_not_answer_in_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(*_: Any, refresh: Any, **__: Any) -> None:
        time.sleep(0.002)
        refresh()

    monkeypatch.setattr(start_ranks, "supervise", supervise)

    with pytest.raises(Exception, match="preflight: not all ranks were done in 1 ms;"):
        start_ranks.result_of(
            "module:work", {}, ranks=1, device="cpu", title="preflight", quiet=True, most_s=1e-3
        )


def test_a_check_that_fails_ends_no_run_and_what_is_slow_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tuple(findings([device(0), device(1, flops=50.0)], [], NAMES[:2], []))
    result = DeviceCheck(devices=2, links=1, seconds=3.0, findings=found)
    monkeypatch.setattr(device_checks, "check_devices", lambda **_: result)
    machine: Any = type("Machine", (), {"groups": [type("Group", (), {"devices_per_node": 2})]})
    plan: Any = type("Plan", (), {"ranks": 2})
    fit: Any = type("Fit", (), {"machine": machine, "plan": plan})

    device_checks.check_before_run(fit, LaunchRun(), ALONE, quiet=False)

    said = capsys.readouterr().err
    assert "warning: preflight: rank 1 on a computes at 50% of its peers" in said
    assert "preflight: 2 devices and 1 links in 3 s: 1 is slow" in said
