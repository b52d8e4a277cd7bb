"""A search under a framework that recomputes modules one by one chooses among them."""

from __future__ import annotations

import pytest

from meshwright.api.commands import answer_to
from meshwright.api.plan_options import PlanOptions
from meshwright.planner.catalog import framework
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.search.cluster_parts import search_parts
from meshwright.planner.search.recomputed_modules import module_sets, with_modules


def asked(
    seq_len: int, batch: int, *, called: str = "megatron", pins: tuple[str, ...] = ()
) -> Request:
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
    options = PlanOptions(seq_len=seq_len, global_batch=batch, framework=called, fix=pins)
    return options.request(model, cluster, None, called=cluster.name)


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        ("llama-3.1-8b", {"layernorm", "mlp", "layernorm mlp"}),
        (
            "qwen3-30b-a3b",
            {"layernorm", "moe-act", "moe", "layernorm moe-act", "layernorm moe"},
        ),
        (
            "deepseek-v3",
            {
                *("layernorm", "mla-up-proj", "moe-act", "mlp", "shared-experts", "moe"),
                "layernorm mla-up-proj moe-act",
                "layernorm mla-up-proj moe-act mlp",
                "layernorm mla-up-proj moe-act shared-experts",
                "layernorm mla-up-proj moe",
                "layernorm mla-up-proj mlp moe",
            },
        ),
    ],
)
def test_sets_are_of_what_a_model_has(model: str, sets: set[str]) -> None:
    tried = list(module_sets(resolve_model(model), framework("megatron")))

    assert {" ".join(modules) for modules in tried} == sets
    assert len(tried) == len(sets)


@pytest.mark.parametrize("called", ["torchtitan", "megatron+recompute-mlp", "native"])
def test_no_set_where_modules_are_chosen_or_unknown(called: str) -> None:
    assert not list(module_sets(resolve_model("llama-3.1-8b"), framework(called)))


def test_long_samples_are_faster_by_a_module_than_by_none_or_all() -> None:
    request = asked(32_768, 32)

    answer = answer_to(request, "fastest")

    assert answer.plan.framework == "megatron+recompute-layernorm"
    assert any("recompute layernorm alone" in note for note in answer.prediction.notes)
    for recompute in ("none", "selective", "full"):
        layers = [
            stage.model_copy(
                update={
                    "layers": tuple(
                        layer.model_copy(update={"recompute": recompute})
                        if layer.recompute == "selective"
                        else layer
                        for layer in stage.layers
                    )
                }
            )
            for stage in answer.plan.stages
        ]
        other = answer.plan.model_copy(update={"stages": tuple(layers)})
        prediction = predict(other, request.model, request.cluster)
        assert prediction.fit_probability is not None
        is_sure = prediction.fit_probability >= request.fit_probability
        assert is_sure == (recompute != "none")
        assert (prediction.step_time_s > answer.prediction.step_time_s) == (recompute == "full")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_a_user_has_asked_for_is_not_searched(recompute: str) -> None:
    request = asked(32_768, 32, pins=(f"recompute={recompute}",))

    assert not list(with_modules(request, None))


def test_no_set_is_searched_where_more_memory_brings_nothing() -> None:
    request = asked(1024, 64, pins=("tp=1", "pp=1", "micro_batch=1"))

    assert not list(with_modules(request, search_parts(request)))


@pytest.mark.matrix
@pytest.mark.parametrize(("seq_len", "batch"), [(1024, 64), (4096, 64), (8192, 64), (32_768, 32)])
def test_what_is_left_out_finds_nothing(seq_len: int, batch: int) -> None:
    usual = answer_to(asked(seq_len, batch), "fastest")
    for modules in module_sets(resolve_model("llama-3.1-8b"), framework("megatron")):
        called = "+".join(["megatron", *(f"recompute-{module}" for module in modules)])
        try:
            answer = answer_to(asked(seq_len, batch, called=called), "fastest")
        except DocumentError:
            continue
        assert answer.prediction.step_time_s >= usual.prediction.step_time_s * 0.9999
