"""What a command recommends fits, and its framework runs it, or both are said not to."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.attack_plans import Drafts
from meshwright.api import commands
from meshwright.cli import app
from meshwright.planner.calibration.tables.predictions import framework_plan
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Job, Layout, Plan
from meshwright.planner.documents.prediction import ALLOCATOR
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import FRAMEWORKS, caveats, configuration
from meshwright.planner.requests.pins import read_layout
from meshwright.planner.requests.request import Request, pinned_layout

SETTING = "=".join(ALLOCATOR)
FULL = {
    "deepspeed": "llama-2-13b 8xa100-sxm-80gb 4096 64",
    "transformers": "qwen3-8b 8xa100-sxm-80gb 4096 64",
    "megatron": "gpt-neox-20b 8xa100-sxm-80gb 2048 64",
}
"""Requests by framework: model, cluster, sequence and batch."""


def request(framework: str) -> Request:
    model, cluster, seq_len, batch = FULL[framework].split()
    return Request.create(
        resolve_model(model),
        resolve_cluster(cluster),
        seq_len=int(seq_len),
        global_batch=int(batch),
        framework=framework,
        called=cluster,
    )


@pytest.mark.parametrize("framework", FULL)
@pytest.mark.long("transformers")
def test_a_plan_above_its_devices_memory_fits_on_terms_that_are_said(framework: str) -> None:
    """Of any layout, as its devices are made smaller and smaller."""
    asked = request(framework)
    layout = Layout(data_shard=8, zero=3, micro_batch=1, micro_batches=8)
    group = asked.cluster.groups[0]
    seen = set()
    for at in range(50):
        size = round((0.3 + at / 50) * group.accelerator.memory_bytes)
        device = group.accelerator.model_copy(update={"memory_bytes": size})
        groups = (group.model_copy(update={"accelerator": device}),)
        cluster = asked.cluster.model_copy(update={"groups": groups})
        found = layout_prediction(replace(asked, cluster=cluster), layout)

        [stage] = found.stages
        above = found.fits and stage.peak_memory_bytes > stage.memory_capacity_bytes
        said = [note for note in found.notes if SETTING in note]
        assert bool(said) == above
        assert all("% likely to fit" in note for note in said)
        seen.add((found.fits, above))
    # The allocator of Hugging Face's framework is replayed: it reserves what a device has, never
    # more.
    replayed = framework == "transformers"
    assert seen == {(True, False), (False, False)} | (set() if replayed else {(True, True)})


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a plan that DeepSpeed's search answers, of 81.6 GiB on 80."""
    path = tmp_path_factory.mktemp("crowded") / "plan.yaml"
    model, cluster, seq_len, batch = FULL["deepspeed"].split()
    commands.plan(
        model,
        cluster,
        seq_len=int(seq_len),
        global_batch=int(batch),
        framework="deepspeed",
        fit_probability=0.5,
        output=str(path),
    )
    return path


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "command",
    [
        ["plan"],
        ["plan", "--json"],
        ["predict", "PLAN"],
        ["show", "PLAN"],
        ["compare", "PLAN", "PLAN"],
        ["compare", "PLAN", "PLAN", "--json"],
        ["compare", "PLAN", "--best"],
        ["compare", "PLAN", "--best", "--json"],
        ["export", "PLAN"],
        ["export", "PLAN", "--json"],
    ],
    ids=" ".join,
)
def test_every_command_says_what_a_full_device_takes(crowded: Path, command: list[str]) -> None:
    name, *options = [str(crowded) if word == "PLAN" else word for word in command]
    if name == "plan":
        model, cluster, seq_len, batch = FULL["deepspeed"].split()
        asked = ["--seq-len", seq_len, "--global-batch", batch, "--framework", "deepspeed"]
        asked += ["--fit-probability", "0.5"]
        options = [model, "--cluster", cluster, *asked, *options]

    ended = CliRunner().invoke(app(), [name, *options])

    assert ended.exit_code == 0
    assert SETTING in ended.output + ended.stderr


def test_a_configuration_with_comments_carries_the_setting(tmp_path: Path, crowded: Path) -> None:
    plan = document.read(Plan, crowded).model_copy(update={"framework": "fsdp"})
    path = tmp_path / "fsdp.yaml"
    document.write(plan, path)
    predicted = commands.of_plan(plan, None, None)

    written = commands.export(str(path))

    assert isinstance(written, commands.FrameworkConfiguration)
    assert (SETTING in written.text.splitlines()[0]) == bool(predicted.environment)
    assert written.environment == predicted.environment


# --- frameworks -----------------------------------------------------------------------------------


def random_plans(framework: str, count: int) -> list[Plan]:
    """Return plans of all kinds of layouts, whatever the framework makes of them."""
    model, cluster = resolve_model("qwen3-0.6b"), resolve_cluster("8xa100-sxm-40gb")
    rng = random.Random(framework)
    allowed = frozenset({"offload", "compress"})
    job = Job(seq_len=1024, global_batch=32)
    drafts = Drafts(model, cluster, job, allowed=allowed, rng=rng)
    found: list[Plan] = []
    while len(found) < count:
        draft = drafts.some()
        if draft is None:
            continue
        if rng.random() < 0.5:
            draft = drafts.neighbour(draft) or draft
        try:
            plan = Plan.of(drafts.document(draft, name="8xa100-sxm-40gb"))
        except DocumentError:
            continue
        found.append(plan.model_copy(update={"framework": framework}))
    return found


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS.keys() & frameworks().keys()))
def test_what_a_framework_refuses_to_export_its_prediction_says(framework: str) -> None:
    model, cluster = resolve_model("qwen3-0.6b"), resolve_cluster("8xa100-sxm-40gb")
    refused = 0
    for at, plan in enumerate(random_plans(framework, 60)):
        said = caveats(plan, model, cluster)
        try:
            configuration(plan, model, framework, cluster)
        except DocumentError as error:
            refused += 1
            reasons = str(error).partition("cannot run this plan: ")[2]
            assert said and reasons.split("; ")[0] in said[0]
        if at < 3:
            assert set(said) <= set(commands.of_plan(plan, None, None).notes)
    assert refused > 30


@pytest.mark.parametrize("layout", ["tp=2", "zero=3,shard=4", "cp=2", "pp=2"])
def test_a_layout_that_its_framework_cannot_run_is_priced_with_the_reason(layout: str) -> None:
    found = commands.predict(
        "llama-3.2-1b",
        "8xa100-sxm-40gb",
        layout=layout,
        seq_len=1024,
        global_batch=32,
        framework="deepspeed",
    )

    assert any(
        note.startswith("outside of what is planned for deepspeed: ") for note in found.notes
    )


LAYERS = ("recompute=none", "recompute=selective", "recompute=full", "activations=offload")


@pytest.mark.spread(2)
@pytest.mark.parametrize("model", ["llama-3.2-1b", "gpt2", "qwen3-30b-a3b"])
@pytest.mark.parametrize("pin", LAYERS)
def test_blocks_are_priced_as_they_are_pinned_or_the_pin_is_refused(pin: str, model: str) -> None:
    name, _, value = pin.partition("=")
    graph, cluster = resolve_model(model), resolve_cluster("8xh100-sxm-80gb")
    refused = set()
    for framework in sorted({"native", *(FRAMEWORKS.keys() & frameworks().keys())}):
        asked = f"dp=8,zero=3,micro_batch=1,{pin}"
        try:
            given = commands.predict(
                model,
                "8xh100-sxm-80gb",
                layout=asked,
                seq_len=512,
                global_batch=8,
                framework=framework,
            )
        except DocumentError as error:
            assert str(error).startswith(f"layout: {pin}: {framework} has "), framework
            refused.add(framework)
            continue
        if framework == "native":
            continue
        pins, idle = read_layout(asked)
        request = Request.create(
            graph, cluster, seq_len=512, global_batch=8, pins=pins, framework=framework
        )
        plan = framework_plan(request, pinned_layout(request, idle=idle))
        blocks = [one for stage in plan.stages for one in stage.layers if "." in one.layer]
        assert {getattr(one, name) for one in blocks} == {value}, framework
        assert given.step_time_s > 0
    assert "native" not in refused
    assert bool(refused) == (pin in ("recompute=selective", "activations=offload"))
