"""Products in 8 bits of torchtitan: every choice is planned, written, and read back the same."""

from __future__ import annotations

import ast
import tomllib

import pytest

from meshwright.planner.catalog import framework
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.framework_configs.configuration import configuration
from meshwright.planner.framework_configs.import_plan import import_plan
from meshwright.planner.operators import layer_operators as arithmetic
from meshwright.planner.operators.kernels import kernels_of
from meshwright.planner.operators.operator_table import Setting
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from tests.planner.framework_configs import frameworks

MODEL = resolve_model("llama-3.1-8b")
H100, B200 = "8xh100-sxm-80gb", "8xb200"


def planned(precision: Precision, pins: str, cluster: str = H100, name: str = "torchtitan") -> Plan:
    request = Request.create(
        MODEL,
        resolve_cluster(cluster),
        seq_len=8192,
        global_batch=16,
        precision=precision,
        pins=read_pins([f"micro_batch=1,zero=3,recompute=full,{pins}"]),
        framework=name,
        called=cluster,
    )
    return search(request).plan


CHOICES: list[tuple[Precision, str, str]] = [
    ("fp8", "scales=rowwise", H100),
    ("fp8", "scales=rowwise_with_gw_hp", H100),
    ("fp8", "scales=tensorwise", H100),
    ("fp8", "scales=tensorwise,weights=full", H100),
    ("fp8", "scales=tensorwise,tp=2,tensor_overlap=async", H100),
    ("mxfp8", "tp=1", B200),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("precision", "pins", "cluster"), CHOICES)
def test_a_choice_is_written_and_read_back(precision: Precision, pins: str, cluster: str) -> None:
    plan, machine = planned(precision, pins, cluster), resolve_cluster(cluster)

    text = configuration(plan, MODEL, "torchtitan@0.2", machine)
    job = frameworks.torchtitan(text, layers=32)
    again = import_plan(text, "torchtitan@0.2", machine, model=MODEL, called=cluster).plan

    assert plan.compile == "block"
    assert job["compile"]["enable"]
    assert again.layout == plan.layout
    assert again.precision == precision
    assert predict(again, MODEL, machine).step_time_s == predict(plan, MODEL, machine).step_time_s
    linear = tomllib.loads(text)["quantize"]["linear"]
    [own] = linear.values()
    assert own["filter_fqns"] == ["output"]
    if precision == "fp8":
        gathers = own.get("enable_fsdp_float8_all_gather", False)
        assert gathers == (plan.weight_gather_dtype == "fp8")
        assert own.get("recipe_name", "tensorwise") == plan.scales


@pytest.mark.matrix
def test_the_release_with_python_has_scales_of_rows_alone() -> None:
    machine = resolve_cluster(H100)
    usual = planned("fp8", "tp=1")

    text = configuration(usual, MODEL, "torchtitan", machine)

    assert usual.scales == "rowwise"
    made = "Float8LinearConverter.Config(recipe_name='rowwise', filter_fqns=['lm_head'], "
    assert made + "model_compile_enabled=True)" in text
    ast.parse(text)
    again = import_plan(text, "torchtitan", machine, model=MODEL, called=H100).plan
    assert again.layout == usual.layout
    with pytest.raises(DocumentError, match="plan with --fix scales=rowwise, or write torchtitan@"):
        configuration(planned("fp8", "scales=tensorwise"), MODEL, "torchtitan", machine)


def test_mxfp8_converts_the_linears_of_blocks() -> None:
    text = configuration(planned("mxfp8", "tp=1", B200), MODEL, "torchtitan", resolve_cluster(B200))

    wanted = "MXFP8LinearConverter.Config(fqns=['attention', 'feed_forward'], "
    assert wanted + "model_compile_enabled=True)" in text


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("precision", "pins", "why"),
    [
        ("fp8", "weights=fp8,scales=rowwise", "torchao gathers so with one scale alone"),
        ("bf16", "scales=rowwise", "rowwise scales in bf16"),
        ("bf16", "weights=fp8", "weights that travel as fp8 in bf16"),
        ("fp8", "scales=rowwise,tp=2,tensor_overlap=async", "gathers are not fused"),
        ("fp8", "scales=delayed", "has rowwise or tensorwise or rowwise_with_gw_hp"),
        ("mxfp8", "tp=1", "h100-sxm-80gb has no matrix products with"),
    ],
)
def test_what_it_does_not_train_is_refused_by_name(
    precision: Precision, pins: str, why: str
) -> None:
    with pytest.raises((NoPlanFits, DocumentError), match=why):
        planned(precision, pins)


@pytest.mark.matrix
def test_without_the_compiler_eight_bits_cost_more_than_they_save() -> None:
    machine = resolve_cluster(H100)
    compiled, eager = (planned("fp8", f"scales=rowwise,compile={how}") for how in ("block", "none"))
    wide = planned("bf16", "compile=none")

    fast, slow, plain = (
        predict(one, MODEL, machine).step_time_s for one in (compiled, eager, wide)
    )

    assert fast < plain < slow
    text = configuration(eager, MODEL, "torchtitan", machine)
    assert "compile.enable = False" in text
    assert "model_compile_enabled=False" in text


def test_what_torchao_leaves_out_is_as_it_says() -> None:
    """Of Llama-3-8B keys and values (1,024 columns) under one scale; under scales by row too."""
    block = next(layer for layer in MODEL.layers if layer.repeat > 1)
    wide = {}
    for scales in ("tensorwise", "rowwise"):
        kernels = kernels_of(framework("torchtitan+auto-filter"), "fp8")
        setting = Setting(
            micro_batch=1,
            seq_len=8192,
            precision="fp8",
            scales=scales,  # type: ignore[arg-type]
            tensor=2,
            kernels=kernels,
        )
        table = arithmetic.table(MODEL, block, setting)
        products = [op for op in table.operators if op.kind == "matmul" and op.weights]
        wide[scales] = {name for op in products if not op.aligned for name in op.outputs}
        assert sum(op.weights for op in products) * 2 == pytest.approx(218_103_808)

    assert wide == {"tensorwise": {"k_linear", "v"}, "rowwise": {"k_linear", "v"}}
    plan = planned("fp8", "scales=tensorwise")
    machine = resolve_cluster(H100)
    filtered = plan.model_copy(update={"framework": "torchtitan+auto-filter"})
    text = configuration(filtered, MODEL, "torchtitan@0.2", machine)
    assert '["output", "auto_filter_small_kn"]' in text
    assert import_plan(
        text, "torchtitan@0.2", machine, model=MODEL, called=H100
    ).plan.framework == ("torchtitan+auto-filter")
    with pytest.raises(DocumentError, match="auto_filter_small_kn, which converts nothing there"):
        configuration(
            filtered.model_copy(update={"scales": "rowwise", "weight_gather_dtype": "full"}),
            MODEL,
            "torchtitan",
            machine,
        )
    steps = [predict(one, MODEL, machine).step_time_s for one in (plan, filtered)]
    assert steps[0] != steps[1]
