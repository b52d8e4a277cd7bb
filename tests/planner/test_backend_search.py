"""Plans for other frameworks: the best of a space that is listed, and flags that say the same."""

import tomllib

import pytest

from planner.backends.estimate import estimate
from planner.backends.search import backend_answer_json, backend_search
from planner.backends.spaces import flags, layouts, space_of
from planner.catalog import stacks
from planner.errors import DocumentError, NoPlanFits
from planner.expressions import resolve_cluster, resolve_model
from planner.pins import Pins
from planner.plan import Job
from planner.request import Request

JOB = Job(seq_len=4096, global_batch=64, precision="bf16")


SEARCHED = [name for name, stack in stacks().items() if stack.space]


@pytest.mark.parametrize("backend", SEARCHED)
def test_no_layout_of_the_space_that_fits_is_faster(backend: str) -> None:
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")

    answer = backend_search(Request(model, cluster, JOB, stack=stacks()[backend]))

    every = [estimate(run) for run in layouts(model, cluster, JOB, Pins(), backend=backend)]
    fastest = min(found.step_time_s for found in every if found.fits)
    assert answer.best.prediction.step_time_s == pytest.approx(fastest)
    assert answer.best.prediction.fits
    assert answer.priced == len(every)
    assert answer.misfits == sum(not found.fits for found in every)


@pytest.mark.parametrize("backend", SEARCHED)
def test_layouts_use_all_devices_and_divide_the_model(backend: str) -> None:
    model, cluster = resolve_model("mixtral-8x7b"), resolve_cluster("4x8xh100-sxm-80gb")

    for run in layouts(model, cluster, JOB, Pins(), backend=backend):
        assert run.devices == cluster.devices
        assert run.global_batch == run.data * run.micro_batch * run.micro_batches
        assert run.architecture.layers >= run.pipeline * run.virtual
        assert run.zero in space_of(backend).zero
        assert (run.data * run.context * run.tensor) % run.expert == 0


def test_what_is_fixed_holds() -> None:
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("2x8xh100-sxm-80gb")
    pins = Pins(tensor=4, pipeline=2, recompute="full")

    best = backend_search(
        Request(model, cluster, JOB, pins=pins, stack=stacks()["megatron"])
    ).best.run

    assert (best.tensor, best.pipeline, best.data, best.recompute) == (4, 2, 2, "full")
    with pytest.raises(DocumentError, match="schedule=zbv"):
        backend_search(
            Request(model, cluster, JOB, pins=Pins(schedule="zbv"), stack=stacks()["megatron"])
        )


def test_what_fits_nowhere_is_told_with_the_closest() -> None:
    model, cluster = resolve_model("llama-3.1-405b"), resolve_cluster("1x8xh100-sxm-80gb")

    with pytest.raises(NoPlanFits, match=r"The closest, tp=\d.* needs .* and has"):
        backend_search(
            Request(model, cluster, JOB, pins=Pins(micro_batch=1), stack=stacks()["megatron"])
        )


def test_torchtitan_reads_its_flags() -> None:
    model, cluster = resolve_model("llama-3.1-70b"), resolve_cluster("8x8xh100-sxm-80gb")

    for run in layouts(model, cluster, JOB, Pins(micro_batch=1), backend="torchtitan"):
        read = tomllib.loads("\n".join(flags(run)))
        parallel = read["parallelism"]
        degrees = [value for name, value in parallel.items() if name.endswith("degree")]
        product = 1
        for degree in degrees:
            product *= degree
        assert product == cluster.devices
        assert read["activation_checkpoint"]["mode"] == run.recompute


def test_megatron_is_told_everything_that_the_layout_has() -> None:
    model, cluster = resolve_model("mixtral-8x7b"), resolve_cluster("2x8xh100-sxm-80gb")
    pins = Pins(tensor=2, pipeline=2, virtual_stages=4, expert=4, recompute="full", zero=1)
    [run, *_] = layouts(model, cluster, JOB, pins, backend="megatron")

    told = set(flags(run))

    assert {
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--num-layers-per-virtual-pipeline-stage 4",
        "--expert-model-parallel-size 4",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--recompute-granularity full",
    } <= told


def test_others_within_the_bar_are_ties() -> None:
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("2x8xh100-sxm-80gb")

    answer = backend_search(Request(model, cluster, JOB, stack=stacks()["megatron"]))

    high_s = answer.best.prediction.step_time_high_s
    told = backend_answer_json(answer)["runners_up"]
    assert all(each["tie"] == (each["step_time_s"] <= high_s) for each in told)
    assert any(each["tie"] for each in told)
