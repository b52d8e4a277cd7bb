"""`import meshwright` is light, complete and documented, and plans a module of the caller's own."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import meshwright
from meshwright.api.commands import ImportedPlan
from meshwright.api.functions import DOCUMENTS
from meshwright.cli import app
from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.profile import Birth, Profile
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.report.text import time_text
from meshwright.planner.whatif.study import Study
from tests.runtime.own_modules import GPT, WORDS, ResNet, Undecided


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = (
        "import time, sys; begin = time.process_time(); import meshwright; dir(meshwright);"
        "used = time.process_time() - begin;"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'networkx', 'typer', 'planner'};"
        "print(used, sorted(heavy & set(sys.modules)))"
    )
    used, heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split(maxsplit=1)

    assert heavy.strip() == "[]"
    assert float(used) < 0.3


def test_every_name_is_there_and_documented() -> None:
    wanted = [
        "plan",
        "predict",
        "compare",
        "profile",
        "whatif",
        "export",
        "load",
        "save",
        "Engine",
        "Plan",
        "Prediction",
    ]
    assert set(wanted) <= set(meshwright.__all__) == set(dir(meshwright))
    for name in meshwright.__all__:
        found = getattr(meshwright, name)
        assert inspect.getdoc(found), name
        if inspect.isfunction(found):
            assert doctest.DocTestFinder().find(found, name)[0].examples, name
            assert all(
                p.annotation is not p.empty for p in inspect.signature(found).parameters.values()
            )
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = meshwright.plans


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(meshwright.__file__).parent / "py.typed").is_file()


def build() -> nn.Module:
    return ResNet()


def test_a_module_is_planned_by_the_one_search(tmp_path: Path) -> None:
    found = meshwright.search(build, "local:2", batch=example(), loss=loss, global_batch=64)
    plan = found.plan
    file = tmp_path / "plan.yaml"
    meshwright.save(plan, file)

    assert plan.model.source == "script:build"
    assert (plan.global_batch, plan.precision, plan.mesh.devices) == (64, "fp32", 2)
    assert plan.model.graph is not None
    assert plan.model.graph.parameters == sum(p.numel() for p in ResNet().parameters())
    assert plan.batch is not None
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in plan.batch.items()} == {
        "[0]": ((3, 8, 8), "float32"),
        "[1]": ((), "int64"),
    }
    assert "seq_len" not in document.plain(file.read_text())  # type: ignore[operator]
    assert meshwright.load(file) == plan
    assert meshwright.load(file).digest == plan.digest
    told = meshwright.predict(plan)
    assert told.step_time_s == pytest.approx(found.prediction.step_time_s)
    assert told.fits
    assert meshwright.predict(file).step_time_s == told.step_time_s


@pytest.mark.matrix
def test_two_stages_are_planned_where_two_are_asked_for() -> None:
    batch = torch.randint(0, WORDS, (8, 7))
    plan = meshwright.plan(GPT, "local:2", batch=batch, fix=["pp=2"])

    assert len(plan.stages) == 2
    placed = [item.layer for stage in plan.stages for item in stage.layers]
    assert placed == ["words", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"]
    assert plan.model.source == "script:GPT"


@pytest.mark.matrix
def test_a_module_without_a_recording_is_one_layer() -> None:
    plan = meshwright.plan(Undecided, "local:2", batch=torch.randn(8, 8))

    assert [item.layer for stage in plan.stages for item in stage.layers] == ["model"]
    with pytest.raises(meshwright.MeshwrightError, match="pp=2 stands in the way"):
        meshwright.plan(Undecided, "local:2", batch=torch.randn(8, 8), fix=["pp=2"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": None}, "batch: is missing"),
        ({"batch": (torch.ones(4, 3), torch.ones(3))}, "4 samples and .*3 samples"),
        ({"batch": {"a": 1}}, "no tensor with samples"),
        ({"seq_len": 8}, "seq-len: is given by the shapes"),
        ({"framework": "megatron"}, "trained natively"),
        ({"fix": ["tp=2"]}, "tp=2 stands in the way"),
    ],
)
@pytest.mark.long("changes5-tp=2 stands in the way")
def test_what_a_module_cannot_be_planned_with_is_said(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(meshwright.MeshwrightError, match=message):
        meshwright.plan(build, "local:2", **{"batch": example(), **changes})


def test_a_scripts_plan_is_shown_and_not_launched_as_a_language_model(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    meshwright.save(meshwright.plan(build, "local:2", batch=example()), file)
    runner = CliRunner()

    shown = runner.invoke(app(), ["show", str(file)])
    launched = runner.invoke(app(), ["launch", str(file)])

    assert shown.exit_code == 0, shown.output
    assert "build on local:2" in shown.output
    assert "SCRIPT.py" in shown.output and "launch" not in shown.output
    assert "meshwright run --plan" in str(launched.exception)


def test_a_script_trains_samples_and_not_tokens() -> None:
    plan = meshwright.plan(ResNet, "2xa100-sxm-80gb", batch=example(), loss=loss, global_batch=16)
    told = meshwright.predict(plan)
    text = time_text(told)

    assert f"{16 / told.step_time_s:,.0f} samples/s" in text
    assert "tokens" not in text
    of_tokens = meshwright.predict(meshwright.plan("gpt2-small", "2xa100-sxm-80gb"))
    assert f"{of_tokens.tokens_per_s:,.0f} tokens/s" in time_text(of_tokens)


def test_a_plan_is_predicted_as_its_file_is(tmp_path: Path) -> None:
    """Refused alike too, on a cluster that has not as many devices."""
    plan = meshwright.plan("gpt2-small", "4xa100-sxm-80gb", seq_len=1024, global_batch=64)
    file = tmp_path / "plan.yaml"
    meshwright.save(plan, file)

    assert meshwright.predict(plan) == meshwright.predict(file)
    for one in (plan, file):
        with pytest.raises(meshwright.DocumentError, match=r"takes 4 ranks, and .* has 2 dev"):
            meshwright.predict(one, "2xa100-sxm-80gb")


def test_every_kind_of_document_is_loaded_as_what_it_is(tmp_path: Path) -> None:
    found = meshwright.search("gpt2-small", "2xa100-sxm-80gb", seq_len=1024, global_batch=16)
    model, cluster = resolve_model("gpt2-small"), resolve_cluster("2xa100-sxm-80gb")
    study = Study.of(
        {
            "name": "a",
            "models": ["gpt2-small"],
            "goal": {"tokens": 1e9, "by": "cost"},
            "offers": [{"cluster": "2xa100-sxm-80gb"}],
        }
    )
    birth = Birth(
        command="a", date="b", host="c", device="d", ranks=1, threads_per_rank=1, software={}
    )
    profile = Profile(model=model.name, model_digest=model.digest, birth=birth, layers=())
    written = [
        found.plan, found.prediction, found.certificate, model, cluster, profile, study,
        frameworks()["native"],
    ]  # fmt: skip
    for at, one in enumerate(written):
        meshwright.save(one, tmp_path / f"{at}.yaml")
        assert type(meshwright.load(tmp_path / f"{at}.yaml")) is type(one)
    assert {type(one) for one in written} == set(DOCUMENTS)


def test_notebooks_show_tables_with_text_escaped() -> None:
    found = meshwright.search("gpt2-small", "2xa100-sxm-80gb", seq_len=1024, global_batch=16)
    evil = "<script>alert(1)</script>"
    plan = found.plan.model_copy(
        update={"model": found.plan.model.model_copy(update={"name": evil})}
    )
    told = found.prediction.with_notes(evil)
    proof = found.certificate.model_copy(update={"statement": evil})
    study = meshwright.whatif(model="gpt2-small", clusters=["2xa100-sxm-80gb"], tokens=1e9)

    birth = Birth(
        command="a", date="b", host="c", device="d", ranks=1, threads_per_rank=1, software={}
    )
    profile = Profile(model="<script>", model_digest="0", birth=birth, layers=())
    answer = replace(found, certificate=proof)
    imported = ImportedPlan(
        plan=plan, assumed=(evil,), unknown=(), without_effect=(), not_understood=(),
        prediction=told,
    )  # fmt: skip

    for shown in (plan, told, proof, study, profile, answer, imported):
        text = shown._repr_html_()
        assert "<table>" in text
        assert "<script" not in text
    assert str(plan).splitlines()[0].endswith(plan.layout.text())
    assert len(str(plan).splitlines()) == 1 + len(plan.stages)
    assert f"{told.layout}: step " in str(told)
    assert isinstance(plan, Plan)
    assert isinstance(told, Prediction)
    assert isinstance(proof, Certificate)
    assert "&lt;script&gt;" in plan._repr_html_() and "&lt;script&gt;" in told._repr_html_()


@pytest.mark.matrix
def test_where_nothing_fits_surely_the_message_says_what_fits_as_predicted() -> None:
    asked = ["tp=1", "pp=1", "dp=8", "micro_batch=1", "recompute=none"]

    def plan(probability: float) -> Plan:
        return meshwright.plan(
            "llama-3.1-8b",
            "8xh100-sxm-80gb",
            global_batch=1024,
            framework="megatron",
            fix=asked,
            fit_probability=probability,
        )

    with pytest.raises(
        NoPlanFits, match=r"95% certainty.*--fit-probability 0\.5 the plan is tp=1 pp=1 dp=8"
    ):
        plan(0.95)
    assert plan(0.5).mesh.devices == 8
