"""A rank runs on the cores near its device, and on no others than it was given."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.runtime.core import process_group


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Two sockets of four cores and a device near each; returns the cores that this rank has."""
    for bus, cores in (("1b", "0-1,4-5"), ("9d", "2-3,6-7")):
        folder = tmp_path / f"0000:{bus}:00.0"
        folder.mkdir()
        (folder / "local_cpulist").write_text(f"{cores}\n")
    own = set(range(8))

    def bound(_: int, cores: frozenset[int]) -> None:
        own.intersection_update(cores)

    buses = {0: 0x1B, 1: 0x9D, 2: 0xFF}
    monkeypatch.setattr(process_group, "cores_of", _reading(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", bound)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=buses[device.index], pci_device_id=0
        ),
    )
    return own


def _reading(folder: Path) -> object:
    plain = process_group.cores_of
    return lambda address: plain(address, devices=folder)


@pytest.mark.parametrize(("index", "cores"), [(0, {0, 1, 4, 5}), (1, {2, 3, 6, 7})])
def test_a_rank_keeps_to_the_cores_of_its_socket(
    machine: set[int], index: int, cores: set[int]
) -> None:
    assert process_group.bind(torch.device("cuda", index)) == cores
    assert machine == cores


def test_cores_that_the_job_was_not_given_stay_outside(machine: set[int]) -> None:
    machine -= {0, 1, 2, 3, 4}

    assert process_group.bind(torch.device("cuda", 0)) == {5}


@pytest.mark.parametrize("given", [{2, 3}, {0, 1}])
def test_a_job_with_no_core_near_or_none_far_is_left_as_it_is(
    machine: set[int], given: set[int]
) -> None:
    machine &= given

    assert process_group.bind(torch.device("cuda", 0)) is None
    assert machine == given


def test_a_device_that_the_kernel_does_not_list_changes_nothing(machine: set[int]) -> None:
    assert process_group.bind(torch.device("cuda", 2)) is None
    assert process_group.bind(torch.device("cpu")) is None
    assert machine == set(range(8))
