"""Laws of what-if: more of anything at the same price never raises the cost of the best plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.expressions import resolve_cluster, resolve_model
from planner.plan import Job
from planner.search.best_first import search
from planner.whatif.changes import changed
from planner.whatif.study import ChangeName

CASES = [
    ("llama-3.2-1b", "8xa10g", Job(seq_len=2048, global_batch=64)),
    ("llama-3.1-8b", "2x8xh100-sxm-80gb", Job(seq_len=4096, global_batch=128)),
    ("gpt2-xl", "4x4xl4", Job(seq_len=1024, global_batch=64)),
]


@settings(max_examples=12, deadline=None)
@given(
    case=st.sampled_from(CASES),
    change=st.sampled_from(["memory", "memory_bandwidth", "compute", "node_links", "network"]),
    factor=st.floats(1.01, 4.0),
)
def test_a_better_machine_is_never_slower(
    case: tuple[str, str, Job], change: ChangeName, factor: float
) -> None:
    model, text, job = case
    cluster = resolve_cluster(text)
    better = changed(cluster, change, factor)
    if better is None:
        return
    graph = resolve_model(model)
    before = search(graph, cluster, job).certificate.objective_s
    after = search(graph, better, job).certificate.objective_s
    assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("change", ["memory", "compute", "network"])
def test_halves_of_a_change_make_the_whole(change: ChangeName) -> None:
    cluster = resolve_cluster("2x8xh100-sxm-80gb")
    half = changed(cluster, change, 1.5)
    assert half is not None
    assert changed(half, change, 2.0) == changed(cluster, change, 3.0)
