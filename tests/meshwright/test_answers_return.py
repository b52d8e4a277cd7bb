"""Every plan that is answered goes back through `predict`: by its file, its layout, its export."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meshwright.api import commands
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import DocumentError, NoPlanFits
from meshwright.planner.framework_configs.import_plan import READERS

STORED = sorted((Path(__file__).parents[2] / "plans").glob("*/plan.yaml"))
META = "tp=8,pp=16,dp=128,zero=1,schedule=interleaved,v=8,micro_batch=1,recompute=none"


def figures(prediction: Prediction) -> tuple[float, float, bool]:
    return (
        prediction.step_time_s,
        max(stage.peak_memory_bytes for stage in prediction.stages),
        prediction.fits,
    )


def random_request(seed: int) -> tuple[str, str, dict[str, object]]:
    """Return model, cluster and options of a request, most of which some plan fits."""
    rng = random.Random(seed)
    model, nodes = rng.choice(
        [
            ("llama-3.2-1b", 1),
            ("qwen3-0.6b", 1),
            ("llama-3.1-8b", 1),
            ("llama-3.1-8b", 4),
            ("qwen3-30b-a3b", 4),
            ("gpt2-xl", 1),
            ("llama-3.1-70b", 16),
            ("mixtral-8x7b", 8),
        ]
    )
    device = rng.choice(["h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb"])
    framework = rng.choice(["native", "megatron", "torchtitan", "deepspeed", "nanotron", "fsdp"])
    options: dict[str, object] = {
        "seq_len": rng.choice([1024, 4096, 8192]) if "gpt2" not in model else 1024,
        "global_batch": rng.choice([64, 128, 192, 512]),
        "framework": framework,
    }
    fix = rng.choice([[], [], ["pp=2"], ["pp=4"], ["tp=2"], ["recompute=full"], ["zero=1"]])
    if framework in ("native", "megatron") and rng.random() < 0.3:
        fix = [f"schedule=interleaved,v={rng.choice([2, 3, 4])},pp={rng.choice([2, 4])}"]
    return model, f"{nodes}x8x{device}" if nodes > 1 else f"8x{device}", options | {"fix": fix}


def check_answer(seed: int, folder: Path) -> str:
    model, cluster, options = random_request(seed)
    file = folder / f"{seed}.yaml"
    try:
        answer = commands.plan(model, cluster, output=str(file), **options)  # type: ignore[arg-type]
    except (NoPlanFits, DocumentError) as error:
        return type(error).__name__
    plan = answer.plan

    again = commands.predict(str(file))

    assert figures(again) == figures(answer.prediction)
    assert again.layout == answer.prediction.layout
    by_layout(model, cluster, options, plan, answer.prediction)
    return by_export(answer.prediction, plan, file)


def by_layout(
    model: str, cluster: str, options: dict[str, object], plan: Plan, answered: Prediction
) -> None:
    """Price the printed layout; it gives an answer's figures, if stages and blocks are alike."""
    printed, framework = answered.layout_text, str(options["framework"])
    priced = commands.predict(
        model,
        cluster,
        layout=printed,
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
        framework=framework,
    )
    assert set(printed.split()) <= set(priced.layout_text.split())
    assert priced.step_time_s > 0
    if framework != "native":
        assert priced.layout.startswith(plan.layout.text())
        assert priced.layout.endswith(f" {plan.framework}")
        blocks = {layer.recompute for stage in plan.stages for layer in stage.layers[1:-1]}
        if plan.mesh.pipeline == 1 and len(blocks) == 1:
            assert figures(priced) == pytest.approx(figures(answered))


def by_export(answered: Prediction, plan: Plan, file: Path) -> str:
    if plan.framework == "native":
        return "native"
    try:
        written = commands.export(str(file))
    except DocumentError as error:
        assert "cannot run this plan" in str(error)
        return "refused"
    assert isinstance(written, commands.FrameworkConfiguration)
    if written.framework not in READERS:
        return "not read"
    exported, back = file.with_suffix(".export"), file.with_suffix(".back.yaml")
    exported.write_text(written.text)
    commands.import_plan(
        str(exported),
        of=written.framework,
        cluster=plan.cluster,
        model=plan.model.name,
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
        output=str(back),
    )
    returned = document.read(Plan, back)
    if returned.layout != plan.layout or returned.stages != plan.stages:
        return "other layout"
    assert commands.predict(str(back)).step_time_s == pytest.approx(answered.step_time_s, rel=0.01)
    return "same"


def test_answers_return_their_figures(tmp_path: Path) -> None:
    ends = [check_answer(seed, tmp_path) for seed in (3, 4, 6)]

    assert ends == ["same", "native", "same"]


@pytest.mark.parametrize("seed", [125, 81006, 81020, 93105])
def test_answers_with_idle_devices_or_options_return(seed: int, tmp_path: Path) -> None:
    assert check_answer(seed, tmp_path) in ("same", "refused", "not read", "other layout")


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_answers_return_their_figures(part: int, tmp_path: Path) -> None:
    ends = [check_answer(100 + 50 * part + at, tmp_path) for at in range(50)]

    assert ends.count("same") + ends.count("native") >= 20, ends


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.parent.name)
def test_stored_plans_return_their_figures(file: Path) -> None:
    stored = document.read(Prediction, file.with_name("prediction.yaml"))

    profile = file.with_name("profile.yaml")

    again = commands.predict(str(file), profile=str(profile) if profile.exists() else None)

    assert again.step_time_s == pytest.approx(stored.step_time_s)
    assert again.layout == stored.layout


@pytest.mark.parametrize("framework", ["megatron", "llama3", "torchtitan"])
def test_stages_of_the_embedding_or_the_head_alone_are_priced(framework: str) -> None:
    priced = commands.predict(
        "llama-3.1-405b",
        "2048x8xh100-sxm-80gb",
        layout=META,
        seq_len=8192,
        global_batch=2048,
        framework=framework,
    )

    assert 5 < priced.step_time_s < 8


def test_more_stages_than_layers_are_refused_in_words() -> None:
    with pytest.raises(DocumentError, match="256 stages, of which stage 126 has no layer"):
        commands.predict(
            "llama-3.1-405b",
            "2048x8xh100-sxm-80gb",
            layout=META.replace("v=8", "v=16"),
            seq_len=8192,
            global_batch=2048,
            framework="megatron",
        )


def test_a_printed_layout_of_another_batch_is_refused() -> None:
    with pytest.raises(DocumentError, match="has 16 micro-batches; this global batch makes 8"):
        commands.predict(
            "llama-3.2-1b",
            "8xh100-sxm-80gb",
            layout="tp=1 pp=1 dp=8 zero=1 micro_batch=1x16",
            seq_len=1024,
            global_batch=64,
        )


def test_a_layout_that_names_another_framework_is_refused() -> None:
    with pytest.raises(DocumentError, match="names megatron, and the framework is deepspeed"):
        commands.predict(
            "llama-3.2-1b",
            "8xh100-sxm-80gb",
            layout="tp=1 pp=1 dp=8 zero=1 micro_batch=1x8 megatron",
            global_batch=64,
            framework="deepspeed",
        )


def test_a_layout_with_idle_devices_is_priced_on_its_part_too() -> None:
    steps = {
        commands.predict(
            "llama-3.2-1b",
            cluster,
            layout="tp=1 pp=1 dp=8 zero=1 micro_batch=1x8 idle=8",
            global_batch=64,
        ).step_time_s
        for cluster in ("2x8xh100-sxm-80gb", "2x8xh100-sxm-80gb:1x8")
    }

    assert len(steps) == 1
