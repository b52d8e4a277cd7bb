"""What the native framework refuses, and the reason that it gives."""

from dataclasses import replace

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.cluster import ClusterSpec, Precision
from meshwright.planner.documents.framework_space import EVERYTHING
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.frameworks.native_limits import caveat, limit, obstacle, refusal

JOB = Job(seq_len=4096, global_batch=64)


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    return resolve_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(context=3), "3 ranks need 2 x 3 chunks of seq_len 4096"),
        (Layout(expert=2), "expert"),
        (Layout(tensor=3), "does not divide"),
        (Layout(tensor=16), "it needs 16 devices"),
        (Layout(data_replicate=2, zero=2), "data_shard"),
        (Layout(tensor=2, expert_tensor=2), "mesh.expert_tensor: is 2"),
        (Layout(tensor=2, sequence_parallel=False), "mesh.sequence_parallel: is false"),
    ],
)
def test_what_the_runtime_cannot_run_is_refused_with_the_reason(
    llama: ModelGraph, node: ClusterSpec, layout: Layout, reason: str
) -> None:
    assert reason in (refusal(llama, node, JOB, layout) or "")


def test_what_the_runtime_can_run_is_not_refused(llama: ModelGraph, node: ClusterSpec) -> None:
    layout = Layout(tensor=2, pipeline=2, data_shard=2, zero=1, micro_batches=16)

    assert refusal(llama, node, JOB, layout) is None


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (replace(JOB, precision="nvfp4"), "precision: is nvfp4"),
    ],
)
def test_what_other_frameworks_train_in_is_refused_by_name(
    llama: ModelGraph, node: ClusterSpec, job: Job, reason: str
) -> None:
    assert reason in (refusal(llama, node, job, Layout(data_replicate=8)) or "")
    assert reason in str(obstacle(llama, job, Layout(data_replicate=8)))


def test_eight_bits_are_refused_where_devices_lack_them(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    job = Job(seq_len=4096, global_batch=64, precision="fp8")
    older = resolve_cluster("8xa100-sxm-80gb")

    assert refusal(llama, node, job, Layout()) is None
    assert "a100-sxm-80gb has no 8-bit matrix products; use bf16" in (
        refusal(llama, older, job, Layout()) or ""
    )


def test_blocks_with_scales_of_their_own_are_multiplied_on_blackwell_alone(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    job = replace(JOB, precision="mxfp8")

    assert refusal(llama, resolve_cluster("8xb200"), job, Layout()) is None
    assert "no matrix products with a scale per block; use fp8 or bf16" in (
        refusal(llama, node, job, Layout()) or ""
    )


@pytest.mark.parametrize(
    ("precision", "layout", "reason"),
    [
        ("bf16", Layout(scales="rowwise"), "scales: is rowwise, and products in bf16 have no"),
        ("fp8", Layout(scales="blockwise"), "scales: is blockwise, by which nothing is rounded"),
        (
            "bf16",
            Layout(data_shard=8, zero=3, weight_gather_dtype="fp8"),
            "products in bf16 want their",
        ),
        (
            "fp8",
            Layout(data_shard=8, zero=2, weight_gather_dtype="fp8"),
            "with ZeRO-2 the optimizer",
        ),
        (
            "fp8",
            Layout(data_shard=8, zero=3, weight_gather_dtype="fp8", scales="rowwise"),
            "forward and backward scale other rows of a weight",
        ),
        (
            "fp8",
            Layout(data_shard=8, zero=3, weight_gather_dtype="fp8", offload="parameters"),
            "parameters on the host come from there in their own type",
        ),
    ],
)
def test_choices_of_eight_bits_that_cannot_be_kept_are_refused(
    llama: ModelGraph, node: ClusterSpec, precision: Precision, layout: Layout, reason: str
) -> None:
    assert reason in (refusal(llama, node, replace(JOB, precision=precision), layout) or "")


@pytest.mark.parametrize(("name", "reason"), [("gpt2", "gpt2"), ("vit-l-16", "patches")])
def test_models_that_cannot_be_divided_say_so(node: ClusterSpec, name: str, reason: str) -> None:
    layout = Layout(tensor=2, data_replicate=4, micro_batches=16)

    assert reason in (refusal(resolve_model(name), node, JOB, layout) or "")


@pytest.mark.parametrize(
    ("framework", "tensor", "refused"),
    [
        ("megatron", 8, False),  # two ranks have each of the four heads of keys
        ("nanotron", 8, True),
        ("torchtitan", 8, True),
        ("native", 8, True),
    ],
)
def test_heads_of_keys_are_shared_by_ranks_where_a_framework_gathers_them(
    framework: str, tensor: int, refused: bool
) -> None:
    model, cluster = resolve_model("smollm3-3b"), resolve_cluster("8xh100-sxm-80gb")
    layout = Layout(tensor=tensor, data_shard=8 // tensor, micro_batches=64)

    found = rules_of(frameworks()[framework])(model, cluster, JOB, layout)

    assert (found is not None) == refused, found
    assert not refused or "heads" in str(found)


def test_devices_that_the_runtime_does_not_run_on_are_planned_with_a_caveat(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    tpus = resolve_cluster("8xtpu-v5p")

    assert refusal(llama, tpus, JOB, Layout(data_replicate=8, micro_batches=8)) is None
    assert "does not run on tpu-v5p" in caveat(llama, tpus).what
    assert caveat(llama, node) is None


def test_positions_that_a_model_never_learned_are_refused(node: ClusterSpec) -> None:
    reason = refusal(resolve_model("gpt2"), node, JOB, Layout())

    assert reason == "seq_len: is 4096; the model has 1024 learned positions"


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(context=3), "3 does not divide seq_len 4096"),
        (Layout(expert=2, data_shard=2, zero=1), "2 does not divide 0 experts"),
        (Layout(tensor=3), "3 does not divide"),
    ],
)
def test_what_divides_nothing_is_beyond_every_framework(
    llama: ModelGraph, node: ClusterSpec, layout: Layout, reason: str
) -> None:
    assert reason in str(limit(llama, node, JOB, layout, EVERYTHING))


def test_parameters_stay_with_some_ranks_where_zero_alone_divides_them(llama: ModelGraph) -> None:
    """FSDP2 has no smaller mesh for a parameter that another axis divides."""
    layout = Layout(data_replicate=2, data_shard=4, zero=3, reshard_after_forward=2)

    assert obstacle(llama, JOB, layout) is None
    found = obstacle(llama, JOB, replace(layout, tensor=2))
    assert str(found) == "reshard_after_forward: is 2, and the tensor axis divides parameters too"
    assert obstacle(llama, JOB, replace(layout, tensor=2, reshard_after_forward=1)) is None
