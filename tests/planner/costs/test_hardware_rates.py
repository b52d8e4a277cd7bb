"""What hides behind computation, what the host costs, and the assumptions that are named."""

import pytest

from meshwright.planner.calibration.tables.predictions import framework_prediction
from meshwright.planner.catalog import native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.hardware_rates import Rates, assumptions, rates
from meshwright.planner.costs.memory.state_bytes import state_types
from meshwright.planner.documents.framework import with_figures
from meshwright.planner.documents.plan import Job
from meshwright.planner.documents.profile import Birth, Overheads, Profile
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request, pinned_layout

JOB = Job(seq_len=1024, global_batch=8)
NODE = resolve_cluster("8xh100-sxm-80gb")


def profile(**figures: float) -> Profile:
    birth = Birth(
        command="profile",
        date="2026-11-21",
        host="box",
        device="gpu",
        ranks=8,
        threads_per_rank=1,
        software={},
    )
    zeros = {
        "step_s": 0.0,
        "optimizer_s_per_parameter": 0.0,
        "pipeline_action_s": 0.0,
        "shard_unit_s": 0.0,
        "overlap": 0.0,
    }
    return Profile(
        model="m", model_digest="d", birth=birth, layers=(), overheads=Overheads(**zeros | figures)
    )


@pytest.fixture
def quoted() -> Rates:
    return rates(NODE, JOB, None)


@pytest.mark.parametrize(
    ("overlap", "communication_s", "window_s", "seen_s"),
    [
        (1.0, 2.0, 5.0, 0.0),
        (1.0, 5.0, 2.0, 3.0),
        (0.0, 2.0, 5.0, 2.0),
        (0.5, 2.0, 5.0, 1.0),
        (0.5, 8.0, 1.0, 7.0),
    ],
)
def test_of_a_collective_only_what_computation_does_not_hide_is_seen(
    overlap: float, communication_s: float, window_s: float, seen_s: float
) -> None:
    measured = rates(NODE, JOB, profile(overlap=overlap))

    assert measured.exposed_s(communication_s, window_s) == pytest.approx(seen_s)


def test_without_a_profile_an_accelerator_hides_most_and_a_cpu_nothing(quoted: Rates) -> None:
    cpu = Rates(device=quoted.device, curves={}, overheads=None, on_cpu=True, framework=native())

    # 16 of an H100's 132 multiprocessors send meanwhile, for three seconds.
    assert quoted.exposed_s(1.0, 10.0) == pytest.approx(3 * 16 / 132)
    assert quoted.exposed_s(1.0, 10.0, "copies") == pytest.approx(16 / 132)
    assert cpu.exposed_s(1.0, 10.0) == 1.0


def test_four_devices_of_a_node_gain_by_overlap_what_was_measured() -> None:
    """arXiv:2507.03114: computation takes 1.189 times as long, both in turn 1.102 times as long.

    So collectives of 0.31 of the computation cost 0.19 of it.  Within a node they have 24 channels.
    """
    framework = with_figures(native(), {"sharding.channels": 24})
    collective_s = 1.102 * 1.189 - 1
    seen = [
        rates(resolve_cluster(f"4x{device}"), JOB, None, framework).exposed_s(collective_s, 1.0)
        for device in ("a100-sxm-80gb", "h100-sxm-80gb")
    ]

    assert sum(seen) / 2 == pytest.approx(0.189, rel=0.05)


def test_llama_2_7b_under_fsdp_is_a_third_slower_on_two_thousand_devices() -> None:
    """arXiv:2411.13055: two samples a device, 37 % fewer tokens a second from 128 to 2,048."""
    steps = []
    for nodes in (16, 256):
        request = Request.create(
            resolve_model("llama-2-7b"),
            resolve_cluster(f"{nodes}x8xh100-sxm-80gb"),
            seq_len=4096,
            global_batch=16 * nodes,
            pins=Pins(zero=3, micro_batch=2, data=8 * nodes),
            framework="fms-fsdp",
        )
        steps.append(framework_prediction(request, pinned_layout(request)).step_time_s)

    assert 1 - steps[0] / steps[1] == pytest.approx(0.37, abs=0.05)


def test_adamw_moves_forty_bytes_per_parameter(quoted: Rates) -> None:
    memory_bytes_per_s = 3.35e12 * quoted.device.curve.memory

    assert quoted.optimizer_s(1e9, state_types(native(), "bf16")) == pytest.approx(
        40e9 / memory_bytes_per_s
    )


def test_every_fallback_is_named(quoted: Rates) -> None:
    named = [(a.what, a.provenance) for a in assumptions(NODE, None, quoted)]

    assert any("kernels of h100-sxm-80gb" in what for what, _ in named)
    assert any("sustained rate 90%" in what for what, _ in named)
    assert any("links of tier nvlink" in what for what, _ in named)
    assert any("hide" in what and provenance == "assumed" for what, provenance in named)


def test_measured_overheads_are_no_assumption_but_say_where_they_are_from() -> None:
    measured = profile()

    named = list(assumptions(NODE, measured, rates(NODE, JOB, measured)))

    assert not any(a.provenance == "assumed" for a in named)
    assert "2026-11-21 on box" in named[-1].source


def test_devices_of_a_measured_machine_and_of_cpus_wait_for_none_that_is_slower() -> None:
    many = resolve_cluster("64x8xh100-sxm-80gb")
    group = many.groups[0]
    cpu = group.accelerator.model_copy(update={"kind": "cpu"})
    cpus = many.model_copy(update={"groups": (group.model_copy(update={"accelerator": cpu}),)})
    found = {
        "sheets": rates(many, JOB, None).device.slowest,
        "profile": rates(many, JOB, profile()).device.slowest,
        "cpus": rates(cpus, JOB, None).device.slowest,
    }
    said = [one.what for one in assumptions(many, None, rates(many, JOB, None))]

    assert found["sheets"] == pytest.approx(1 / 1.023, abs=1e-3)
    assert (found["profile"], found["cpus"]) == (1.0, 1.0)
    assert "products on the slowest of 512 devices take 2.3% longer than on that of a node" in said
