"""What is named as a remedy was tried, and is the least of its kind that helps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.planner.search.remedies import ways_out

ASKED = Request(
    resolve_model("llama-3.2-1b"),
    resolve_cluster("4xa100-sxm-40gb"),
    Job(seq_len=4096, global_batch=8),
)


@pytest.mark.parametrize(
    ("cluster", "needed", "said"),
    [
        ("4xa100-sxm-40gb", 5, 8),
        ("4xa100-sxm-40gb", 16, 16),
        ("4xa100-sxm-40gb", 33, 64),
        ("1xrtx-4090", 3, 4),
        ("1xrtx-4090", 9, 16),
    ],
)
def test_devices_are_doubled_until_a_plan_fits(cluster: str, needed: int, said: int) -> None:
    def fitting(request: Request) -> Layout | None:
        assert request.cluster.tiers or request.cluster.devices == 1
        return Layout() if request.cluster.devices >= needed else None

    asked = replace(ASKED, cluster=resolve_cluster(cluster))
    assert ways_out(asked, fitting) == f"It would fit on {said} such devices."


def test_where_nothing_helps_it_is_said_how_far_was_looked() -> None:
    assert ways_out(ASKED, lambda _: None).startswith(
        "Up to 16 times the devices, or a sequence up to 16 times shorter, does not"
    )
