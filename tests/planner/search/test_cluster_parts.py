"""No answer is slower than that of a part of the cluster, found by a loop of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.requests.request import Request
from meshwright.planner.search.cluster_parts import PartAnswer, search_parts
from meshwright.planner.search.plan_preference import Prefer, with_preference
from meshwright.planner.search.search import search

MODELS = ("gpt2-small", "llama-3.2-1b")
DEVICES = ("h100-sxm-80gb", "a100-sxm-40gb", "rtx-4090", "l40s")
COUNTS = (3, 5, 6, 7, 9, 10, 12)
FEW = 3
"""In every run, on three or five devices: each part is searched for itself."""


def request_of(cluster: str, model: str, batch: int, seq_len: int = 1024) -> Request:
    return Request.create(
        resolve_model(model),
        resolve_cluster(cluster),
        seq_len=seq_len,
        global_batch=batch,
        called=cluster,
        fit_probability=0.95,
    )


def drawn(seed: int, counts: tuple[int, ...] = COUNTS) -> tuple[Request, Prefer]:
    """Return a request on up to 12 devices, which often do not divide its batch."""
    draw = random.Random(seed)
    count = draw.choice(counts)
    each = draw.choice([size for size in (1, 2, 3, 4, 5, 6, 7, 8) if count % size == 0])
    nodes = f"{count // each}x" if count > each else ""
    cluster = f"{nodes}{each}x{draw.choice(DEVICES)}"
    prefer: Prefer = draw.choice(("simplest", "fastest"))
    batch = draw.choice((4, 8, 16, 24, 30))
    return request_of(cluster, draw.choice(MODELS), batch, draw.choice((512, 1024))), prefer


def steps_of_parts(request: Request, prefer: Prefer) -> dict[str, float]:
    """Return the step of the answer of each part that has one, each searched for itself."""
    [group] = request.cluster.groups
    steps: dict[str, float] = {}
    for nodes, each in product(range(1, group.nodes + 1), range(1, group.devices_per_node + 1)):
        called = f"{request.cluster_name}:{nodes}x{each}"
        part = replace(request, cluster=resolve_cluster(called), called=called)
        try:
            answer = with_preference(part, search(part, below_s=1e9), prefer)
        except (NoPlanFits, DocumentError):
            continue
        steps[called] = answer.prediction.step_time_s
    return steps


def answer_or_none(request: Request, prefer: Prefer) -> PartAnswer | None:
    try:
        return search_parts(request, prefer)
    except NoPlanFits:
        return None


def check(seed: int, counts: tuple[int, ...] = COUNTS) -> None:
    request, prefer = drawn(seed, counts)
    steps, answer = steps_of_parts(request, prefer), answer_or_none(request, prefer)
    assert (answer is None) == (not steps)
    if answer is not None:
        least_s = min(steps.values())
        assert answer.answer.prediction.step_time_s <= least_s * (1 + 1e-9), steps
        assert answer.answer.certificate.lower_bound_s <= least_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(FEW))
def test_no_answer_is_slower_than_that_of_a_part(seed: int) -> None:
    check(seed, COUNTS[:2])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(300))
def test_no_answer_is_slower_than_that_of_a_part_of_many_clusters(seed: int) -> None:
    check(seed)
