"""What the engine cannot execute is refused by name, with the way out, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from meshwright.planner.documents.model import Edge, Experts
from meshwright.planner.documents.plan import Plan, Stage
from meshwright.planner.frameworks.native_limits import FAMILIES
from meshwright.runtime.engine.unsupported import supported
from tests.runtime import cases


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_supported_in_one_process(family: str) -> None:
    graph = cases.transformer(family)

    assert supported(cases.plan(graph), graph) is None


UNDIVIDED = ("gpt2", "gpt_oss", "olmo2", "olmo3", "phi3")
"""Families that tensor parallelism does not divide yet."""


@pytest.mark.parametrize(
    ("family", "changes", "layout", "message"),
    [
        ("llama", {}, {"tensor": 3}, "mesh.tensor: 3 does not divide seq_len 16"),
        ("llama", {"kv_heads": 1}, {"tensor": 2}, "mesh.tensor: 2 does not divide kv_heads 1"),
        (
            "llama",
            {"vocab_size": 63},
            {"tensor": 2},
            "2 does not divide vocab_size 63",
        ),
        *((name, {}, {"tensor": 2}, f"does not divide the family {name}") for name in UNDIVIDED),
        ("llama", {}, {"context": 3}, "mesh.context: 3 ranks need 2 x 3 chunks of seq_len 16"),
        (
            "llama",
            {},
            {"context": 8, "tensor": 4},
            "mesh.context: leaves 2 positions, which tensor=4 does not divide",
        ),
        (
            "mixtral",
            {},
            {"expert": 2},
            "mesh.expert: 2 does not divide the 1 ranks of data_shard x context x tensor",
        ),
        (
            "mixtral",
            {},
            {"expert": 8, "data_shard": 8, "zero": 1, "micro_batches": 1},
            "mesh.expert: 8 does not divide 4 experts",
        ),
        ("gpt2", {}, {"precision": "fp8"}, "precision: is fp8, and the products of gpt2"),
        (
            "gemma2",
            {},
            {"precision": "fp16"},
            "precision: is fp16, in which gradients of gemma2 overflow",
        ),
        (
            "llama",
            {},
            {"gradient_compression": "bf16"},
            "gradient_compression: is bf16, and without data parallelism no gradients are sent; use full",
        ),
        (
            "llama",
            {},
            {"gradient_compression": "powersgd", "data_shard": 2, "zero": 1},
            "gradient_compression: is powersgd, which needs whole gradients on every rank, not ZeRO-1",
        ),
        (
            "llama",
            {},
            {"gradient_compression": "powersgd", "data_replicate": 2, "offload": "parameters"},
            "gradient_compression: is powersgd, which cannot reduce gradients on the host",
        ),
        (
            "llama",
            {},
            {"gradient_compression": "powersgd", "data_replicate": 2, "precision": "fp16"},
            "gradient_compression: is powersgd, whose memory does not follow the loss scale of fp16",
        ),
        (
            "llama",
            {},
            {"expert": 2, "data_shard": 2, "zero": 1},
            "mesh.expert: 2 does not divide 0 experts",
        ),
        (
            "reference",
            {"experts": Experts(count=4, per_token=2, ffn_size=24), "mlp_bias": True},
            {},
            "the reference transformer has no biases in experts",
        ),
        (
            "reference",
            {"experts": Experts(count=4, per_token=2, ffn_size=24, shared_ffn_size=25)},
            {"tensor": 2},
            "2 does not divide experts.shared_ffn_size 25",
        ),
        (
            "mixtral",
            {},
            {"gradient_compression": "powersgd", "data_replicate": 2, "context": 2, "expert": 2},
            "gradient_compression: is powersgd, which does not know that ranks hold different experts",
        ),
        ("reference", {"qk_norm": True}, {}, "the reference transformer has no query/key norms"),
        (
            "llama",
            {},
            {"schedule": "pipedream-2bw", "pipeline": 2, "precision": "bf16"},
            "precision: is bf16, and pipedream-2bw has two versions of the weights in fp32",
        ),
        (
            "llama",
            {},
            {"schedule": "pipedream-2bw", "pipeline": 2, "data_shard": 2, "zero": 1},
            "mesh.data_shard: is 2, and pipedream-2bw has two versions of the weights undivided",
        ),
        (
            "llama",
            {"tied_embeddings": True},
            {"schedule": "zbv", "virtual_stages": 2, "pipeline": 2},
            "schedule: zbv puts both ends of the model on one rank",
        ),
        (
            "mixtral",
            {"kv_heads": 4},
            {"tensor": 4},
            "mesh.tensor: 4 leaves a rank 6 of an expert's 24 columns; torch's grouped product",
        ),
        ("mamba", {}, {}, "no adapter runs 'mamba'; known: reference, deepseek_v2"),
        ("gpt2", {"max_positions": 8}, {}, "seq_len: is 16; the model has 8 learned positions"),
    ],
)
def test_an_obstacle_is_named(
    family: str, changes: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    graph = cases.transformer(family, **changes)

    assert message in str(supported(cases.plan(graph, **layout), graph))


def test_a_graph_that_is_not_of_the_users_own_modules_is_refused() -> None:
    edges = (Edge(source="embedding", target="head"),)
    graph = cases.transformer().model_copy(update={"edges": edges})

    assert "model.edges: only graphs of your own modules" in str(
        supported(cases.plan(graph), graph)
    )


def test_figures_say_nothing_about_a_users_own_modules() -> None:
    graph = cases.transformer("mamba")

    assert supported(cases.plan(graph, source="mine.py:chain"), graph) is None
    assert "divides no layer of this module of your own" in str(
        supported(cases.plan(graph, source="mine.py:chain", tensor=2), graph)
    )
    for mesh in (
        {"context": 2},
        {"expert": 2, "data_shard": 2, "zero": 1},
    ):  # tried where it is built
        plan = cases.plan(graph, source="mine.py:chain", **mesh)
        assert supported(plan, graph) is None


def test_recomputing_from_8_bits_is_refused_where_experts_are_on_several_ranks() -> None:
    graph = cases.transformer("mixtral")
    layout = {"expert": 2, "tensor": 2}

    def asked(recompute: str, activations: str) -> Plan:
        plan = cases.plan(graph, recompute=recompute, **layout)
        layers = tuple(
            item.model_copy(update={"activations": activations}) for item in plan.stages[0].layers
        )
        return plan.model_copy(update={"stages": (Stage(layers=layers),)})

    assert supported(asked("none", "compress"), graph) is None
    assert supported(asked("full", "offload"), graph) is None
    assert "may send tokens to other experts" in str(supported(asked("full", "compress"), graph))


def test_8_bits_are_refused_where_gathered_tokens_leave_rows_unfilled() -> None:
    graph = cases.transformer("mixtral")
    plan = cases.plan(graph, expert=2, tensor=2, dispatch="allgather")
    layers = tuple(
        item.model_copy(update={"activations": "compress"}) for item in plan.stages[0].layers
    )
    packed = plan.model_copy(update={"stages": (Stage(layers=layers),)})

    assert supported(plan, graph) is None
    assert "rows that dispatch allgather leaves unfilled" in str(supported(packed, graph))
    assert supported(packed.model_copy(update={"dispatch": "alltoall"}), graph) is None


def test_a_model_that_nothing_builds_is_refused() -> None:
    graph = cases.transformer().model_copy(update={"architecture": None})

    assert "has no architecture" in str(supported(cases.plan(graph), graph))


def test_the_question_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import meshwright.runtime.engine.unsupported"

    subprocess.run([sys.executable, "-c", code], check=True)
