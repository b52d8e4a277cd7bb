"""Every plan that is answered goes back through `predict`, and gives the figures of its answer."""

from __future__ import annotations

import random

import pytest

from meshwright.api.commands import answer_to, predicted_plan
from meshwright.api.plan_options import PlanOptions
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, NoPlanFits

MODELS = (
    "gpt2",
    "gpt2-xl",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "opt-1.3b",
)
CLUSTERS = (
    "8xh100-sxm-80gb",
    "2x8xa100-sxm-80gb",
    "4xrtx-4090",
    "3x4xa100-sxm-40gb",
    "16x8xh100-sxm-80gb",
    "64x4xgb200",
    "2xjupiter",
)
FRAMEWORKS = ("native", "megatron", "torchtitan", "deepspeed", "fsdp", "nanotron", "accelerate")
DEGREES = (1, 2, 4, 8, 16)


def answered_plans(seed: int, count: int) -> int:
    """Answer random requests and predict their plans again; return how many plans there were."""
    rng, plans = random.Random(seed), 0
    for _ in range(count):
        model, cluster = resolve_model(rng.choice(MODELS)), resolve_cluster(rng.choice(CLUSTERS))
        framework = rng.choice(FRAMEWORKS)
        options = PlanOptions(
            seq_len=rng.choice((512, 1000, 1024)),
            global_batch=cluster.devices * rng.choice((1, 2, 4, 6)),
            framework=framework,
            allow=rng.choice(((), (), ("offload",))),
        )
        prefer = rng.choice(("simplest", "fastest"))
        try:
            request = options.request(model, cluster, None, called=cluster.name)
            answer = answer_to(request, prefer)
        except (NoPlanFits, DocumentError):
            continue
        plans += 1
        for plan, shown in [
            (answer.plan, answer.prediction),
            *((row.plan, row.prediction) for row in answer.choices),
        ]:
            if plan is None or shown is None:
                continue
            read = Plan.parse(plan.dump())
            again = predict(read, model, resolve_cluster(plan.cluster))
            assert again.step_time_s == pytest.approx(shown.step_time_s, rel=1e-9), plan.layout
            assert again.fits == shown.fits
            assert again.stages == shown.stages
            assert again.fit_probability == pytest.approx(shown.fit_probability)
    return plans


def predicted_layouts(seed: int, count: int) -> int:
    """Price random layouts by their text, and their plans again; return how many were priced."""
    rng, layouts = random.Random(seed), 0
    while count:
        count -= 1
        tensor, pipeline = rng.choice(DEGREES), rng.choice(DEGREES)
        data = rng.choice(DEGREES)
        words = [f"tp={tensor}", f"pp={pipeline}", f"dp={data}", f"zero={rng.choice((0, 1, 2, 3))}"]
        words.append(f"micro_batch={rng.choice((1, 2))}")
        words.append(f"recompute={rng.choice(('none', 'selective', 'full'))}")
        if pipeline > 1 and rng.random() < 0.5:
            virtual = rng.choice((2, 3, 5, 8))
            words += ["schedule=interleaved", f"v={virtual}"]
        name = rng.choice(("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-405b", "qwen3-30b-a3b"))
        try:
            predicted = predicted_plan(
                name,
                f"{max(1, tensor * pipeline * data // 8)}x{min(8, tensor * pipeline * data)}xh100",
                layout=",".join(words),
                seq_len=1024,
                global_batch=data * 2 * pipeline * 4,
                framework=rng.choice(("native", "megatron")),
            )
        except DocumentError:
            continue
        layouts += 1
        assert predicted.prediction.step_time_s > 0
    return layouts


def test_a_few_answers_go_back_through_predict() -> None:
    assert answered_plans(seed=1, count=3)
    assert predicted_layouts(seed=1, count=12)


@pytest.mark.matrix
def test_five_hundred_answers_and_a_thousand_layouts_go_back_through_predict() -> None:
    assert answered_plans(seed=7, count=500) > 250
    assert predicted_layouts(seed=7, count=1000) > 250
