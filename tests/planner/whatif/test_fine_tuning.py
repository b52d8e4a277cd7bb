"""Adapters on few devices: what fits, and what host memory changes."""

from __future__ import annotations

import pytest

from planner.errors import NoPlanFits
from planner.expressions import cluster_of, resolve_cluster, resolve_model
from planner.plan import Job
from planner.request import Request
from planner.whatif.fine_tuning import tuned

JOB = Job(seq_len=2048, global_batch=16)
GB = 10**9


def test_4_bits_fit_where_16_do_not() -> None:
    model, four = resolve_model("llama-2-13b"), cluster_of("rtx-4090", devices_per_node=1)
    quantised = tuned(Request(model, four, JOB), quantised=True)
    assert quantised.fits
    assert "qlora" not in quantised.layout  # the layout says degrees, the study the kind
    peak = quantised.stages[0].peak_memory_bytes
    # 13.0e9 weights at 0.53 bytes are 6.9 GB of it.
    assert 6.9e9 < peak <= four.groups[0].accelerator.memory_bytes
    with pytest.raises(NoPlanFits, match=r"each device has.*host memory is not known"):
        tuned(Request(model, four, JOB), quantised=False)


def test_host_memory_holds_what_devices_cannot() -> None:
    model = resolve_model("llama-3.1-70b")
    small = cluster_of("rtx-4090", devices_per_node=4, host_memory_bytes=128 * GB)
    large = cluster_of("rtx-4090", devices_per_node=4, host_memory_bytes=320 * GB)
    with pytest.raises(NoPlanFits, match="on the host, they need 131"):
        tuned(Request(model, small, JOB), quantised=False)
    found = tuned(Request(model, large, JOB), quantised=False)
    # Half of a host can be pinned.  141 GB of weights in 16 bits, a quarter or so crossing each
    # link twice every micro-batch.
    assert "offload=parameters" in found.layout
    assert found.step_parts["offload"] >= 0
    assert sum(found.step_parts.values()) == pytest.approx(found.step_time_s)


def test_weights_in_8_bits_take_a_byte_each() -> None:
    model, eight = resolve_model("llama-2-70b"), resolve_cluster("8xh200-sxm")
    found = tuned(
        Request(model, eight, Job(seq_len=4096, global_batch=8, precision="fp8")), quantised=False
    )
    # All 69.0e9 weights on each device; in 16 bits they would take 138e9 of its 141e9 bytes.
    assert found.layout.startswith("tp=1 dp=8")
    weights = found.stages[0].memory_parts["parameters"]
    assert weights == pytest.approx(69.0e9, rel=0.01)
