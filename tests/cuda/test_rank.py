"""How a rank takes its device, without one: what it asks torch for is noted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.checkpoint.writer import Saver, SaveSeconds
from meshwright.runtime.core import process_group
from meshwright.runtime.launch.preflight import cuda_environment
from tests.runtime.run.test_run_report import rank, report


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Note devices by the thread that takes them."""
    taken: list[tuple[str, Any]] = []

    def take(device: object) -> None:
        taken.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", take)
    return taken


def test_communicators_form_on_the_ranks_own_device(
    chosen: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: dict[str, Any] = {}
    near: list[torch.device] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: joined.update(how))
    monkeypatch.setattr(process_group, "bind", near.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("MESHWRIGHT_STORE_FD", raising=False)

    process_group.join("cuda", rank=3, world_size=4, timeout_s=1.0)

    assert joined["device_id"] == torch.device("cuda", 3)
    assert [device for _, device in chosen] == near == [torch.device("cuda", 3)]
    process_group.join("cpu", rank=3, world_size=4, timeout_s=1.0)
    assert joined["device_id"] is None


def test_the_thread_that_saves_is_on_the_ranks_device(chosen: list[tuple[str, Any]]) -> None:
    written: list[int] = []
    saver: Any = SimpleNamespace(_device=3, _write=lambda *_: written.append(len(chosen)))
    blocked = SaveSeconds(step=1, blocked_s=0.5)

    thread = threading.Thread(
        target=Saver._write_in_background, args=(saver, {}, None, blocked), name="saving"
    )
    thread.start()
    thread.join()

    assert chosen == [("saving", 3)]
    assert written == [1]
    assert saver.took.step == 1 and saver.took.written_s >= 0.5


def test_a_report_has_what_ends_a_run_beside_its_tensors() -> None:
    own = [
        rank(0, [1.0, 1.0], 700).model_copy(update={"reserved_memory_bytes": 800}),
        rank(1, [1.0, 1.0], 900).model_copy(
            update={"reserved_memory_bytes": 950, "device_memory_bytes": 990}
        ),
    ]

    stages = report(*own).stages

    assert [stage.reserved_memory_bytes for stage in stages] == [800, 950]
    assert [stage.device_memory_bytes for stage in stages] == [None, 990]


def test_ranks_are_told_the_order_of_devices_and_how_to_allocate() -> None:
    assert cuda_environment({}) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
