"""The text of a layout reads back as the stages and choices that it was written for."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.api import commands
from meshwright.planner.documents import document
from meshwright.planner.documents.placement_text import placement_words, read_placement
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError

CHOICES = [("none", "keep"), ("full", "keep"), ("selective", "keep"), ("none", "compress")]


def random_stages(rng: random.Random) -> list[list[tuple[str, str]]]:
    """Stages whose layers come in runs of like choices."""
    few = rng.sample(CHOICES, rng.randint(1, 2))
    return [
        [
            choice
            for _ in range(rng.randint(1, 3))
            for choice in [rng.choice(few)] * rng.randint(1, 5)
        ]
        for _ in range(rng.randint(1, 5))
    ]


def test_words_of_random_stages_read_back_as_them() -> None:
    read = 0
    for seed in range(300):
        stages = random_stages(random.Random(seed))
        words = placement_words(stages)
        placement, others = read_placement(["tp=2", *words])
        assert others[0] == "tp=2" and set(others[1:]) <= set(words)
        if placement is None:  # as many layers a stage, up to one, and blocks that are alike
            sizes = [len(stage) for stage in stages]
            chain = [choice for stage in stages for choice in stage]
            assert words == [] and max(sizes) - min(sizes) <= 3 and len(set(chain[1:-1])) <= 1
            continue
        read += 1
        pinned = dict(word.split("=") for word in others[1:])
        names = [f"layer{at}" for at in range(sum(map(len, stages)))]
        back = placement.stages_of(
            names,
            len(stages),
            recompute=pinned.get("recompute", "none"),
            activations=pinned.get("activations", "keep"),
        )
        assert [[layer[1:] for layer in stage] for stage in back] == stages, " ".join(words)
        assert [layer[0] for stage in back for layer in stage] == names
    assert read > 200


@pytest.mark.parametrize("framework", ["native", "megatron"])
def test_a_printed_layout_has_the_figures_of_its_plan(framework: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    commands.plan(
        "gpt2", "4xh100-sxm-80gb", global_batch=16, seq_len=512, fix=("pp=4,tp=1",),
        framework=framework, output=str(file),
    )  # fmt: skip
    plan = document.read(Plan, str(file))
    layers = [layer for stage in plan.stages for layer in stage.layers]
    for seed in range(2):
        rng = random.Random(seed)
        cuts = [0, *sorted(rng.sample(range(1, len(layers)), len(plan.stages) - 1)), len(layers)]
        chosen = [
            layer.model_copy(update={"recompute": rng.choice(["none", "full"])}) for layer in layers
        ]
        stages = tuple(
            stage.model_copy(update={"layers": tuple(chosen[a:b])})
            for stage, (a, b) in zip(plan.stages, pairwise(cuts), strict=True)
        )
        other = plan.model_copy(update={"stages": stages})
        document.write(other, str(file))

        of_plan = commands.predict(str(file))
        of_text = commands.predict(
            "gpt2", "4xh100-sxm-80gb", global_batch=16, seq_len=512, framework=framework,
            layout=of_plan.layout_text,
        )  # fmt: skip

        assert "split=" in of_plan.layout_text
        assert of_text.step_time_s == of_plan.step_time_s
        assert of_text.stages == of_plan.stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=4,split=3+4+7", "has 3 stages, and the layout 4"),
        ("pp=4,split=3+4+4+4", "split has 15 layers, and the model 14"),
        ("pp=1,recompute=3xfull", "recompute has 3 layers, and the model 14"),
        ("pp=1,recompute=mixed", "predict the plan's file"),
        ("pp=1,recompute=14xfool", "'14xfool'"),
        ("pp=1,split=0+14", "'0' is no number of layers"),
        ("pp=1,split=14,split=14", "split is given twice"),
    ],
)
def test_a_text_of_other_layers_is_refused(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        commands.predict("gpt2", "4xh100-sxm-80gb", global_batch=16, layout=text)
