"""Nodes find their ranks in what starts jobs."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from meshwright.planner.errors import LaunchError
from meshwright.runtime.run import node_rank as nodes
from meshwright.runtime.run.node_rank import node_rank_of


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, "127.0.0.1")),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "7",
            },
            (1, 2, "a", 7),
        ),
        (
            {
                "GROUP_WORLD_SIZE": "3",
                "GROUP_RANK": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "b",
                "MASTER_PORT": "100",
            },
            (2, 3, "b", 101),
        ),
        (
            {
                "SLURM_NNODES": "4",
                "SLURM_NTASKS": "4",
                "SLURM_NODEID": "3",
                "SLURM_PROCID": "3",
                "SLURM_JOB_NODELIST": "gpu[07-09],x1",
                "SLURM_JOB_ID": "1042",
            },
            (3, 4, "gpu07", 29442),
        ),
        ({"SLURM_NNODES": "4"}, (0, 1, "127.0.0.1")),  # a batch script, not a step
        (
            {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "job-0.train"},
            (1, 2, "job-0.train"),
        ),
    ],
)
def test_node_ranks_are_read_from_what_starts_jobs(
    environment: dict[str, str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.runtime.run.node_rank.shutil.which", lambda _: None)

    found = node_rank_of(environment)

    assert (found.node, found.nodes, found.host, found.port)[: len(expected)] == expected


def test_what_is_asked_for_comes_before_the_environment() -> None:
    kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"}

    assert node_rank_of(kubeflow, nodes=3, node=0, rendezvous="b:1").host == "b"
    assert node_rank_of(kubeflow, nodes=1).nodes == 1


@pytest.mark.parametrize(
    ("environment", "asked", "said"),
    [
        ({}, {"nodes": 2}, "--rendezvous"),
        ({}, {"nodes": 2, "node": 0, "rendezvous": "a:70000"}, "ports are 1 to 65535"),
        ({}, {"nodes": 2, "node": 0, "rendezvous": "a b:1"}, "a name or an address"),
        ({}, {"nodes": 2, "node": 0, "rendezvous": ":1"}, "a name or an address"),
        ({}, {"nodes": 2, "node": 2, "rendezvous": "a"}, "nodes count from 0"),
        ({"PET_NNODES": "2:4", "PET_MASTER_ADDR": "a"}, {}, "whole numbers"),
        (
            {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a"},
            {},
            "--nproc-per-node 1",
        ),
        (
            {"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"},
            {},
            "--ntasks-per-node=1",
        ),
        ({"JOB_COMPLETION_INDEX": "0", "NNODES": "2"}, {}, "headless service"),
    ],
)
def test_what_cannot_be_understood_says_what_to_write(
    environment: dict[str, str], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        node_rank_of(environment, **asked)


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(nodes).failed == 0
