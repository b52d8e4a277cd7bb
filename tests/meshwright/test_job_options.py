"""Every command that asks of a job asks alike: each option beside each command.

The oracle is arithmetic on the options and the command beside: a job is the same record wherever it
was asked for, and `predict` of a plan's layout gives the plan's own figures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.api import commands
from meshwright.cli import main
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.planning import request_of
from meshwright.studies.study_command import study_of
from meshwright.tune.tune import tune

MODEL, CLUSTER = "llama-3.2-1b", "1xa100-sxm-80gb"
FIXED = ["micro_batch=1", "recompute=none"]
OPTIONS: dict[str, dict[str, Any]] = {
    "adapters": {"lora": ["rank=16"]},
    "packed": {"lora": ["rank=8,weights=nf4"]},
    "optimizer": {"optimizer": "adamw-8bit"},
    "masters": {"masters": "none"},
    "preferences": {"objective": "dpo"},
    "lengths": {"lengths": "600,1800,4096"},
    "documents": {"document_len": 900},
}
EXPECTED: dict[str, dict[str, object]] = {
    "adapters": {"rank": 16, "weights": "full"},
    "packed": {"rank": 8, "weights": "nf4"},
    "optimizer": {"optimizer": "adamw-8bit"},
    "masters": {"master_weights": "none"},
    "preferences": {"objective": "dpo", "sequences": 32},
    # Of a log-normal with that mean and 95th percentile: e^(sigma^2) times the mean, cut at 4,096.
    "lengths": {"seq_len": 4096, "document_len": 1248},
    "documents": {"document_len": 900},
}


def job_of_whatif(options: dict[str, Any]) -> Job:
    """Return the job of a study of these options."""
    study = study_of(
        model=MODEL, clusters=[CLUSTER], global_batch=16, framework="transformers", **options
    )
    candidate = next(iter(candidates_of(study)))
    return request_of(study, resolve_model(MODEL), candidate, "transformers").job


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.matrix] * (kind in ("adapters", "masters")))
        for kind in OPTIONS
    ],
)
def test_a_job_is_the_same_wherever_it_is_asked_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = OPTIONS[kind] | {"global_batch": 16, "framework": "transformers"}
    answer = commands.plan(MODEL, CLUSTER, **options, fix=FIXED, output="plan.yaml")
    job = answer.plan.job

    for name, value in EXPECTED[kind].items():
        assert getattr(job.lora if name in ("rank", "weights") else job, name) == value
    layout = answer.plan.layout.text()
    predicted = commands.predicted_plan(MODEL, CLUSTER, layout=layout, **options)
    assert predicted.job == job
    assert predicted.prediction.step_time_s == pytest.approx(answer.prediction.step_time_s)
    assert predicted.prediction.stages == answer.prediction.stages
    assert predicted.prediction.notes == answer.prediction.notes
    assert commands.predict("plan.yaml").stages == answer.prediction.stages
    assert job_of_whatif(OPTIONS[kind]) == job
    assert commands.export("plan.yaml").framework in ("transformers", "trl")
    for option, value in OPTIONS[kind].items():
        with pytest.raises(DocumentError, match="a plan has its own already"):
            commands.predict("plan.yaml", **{option: value})
        with pytest.raises(DocumentError, match="a plan has its own already"):
            tune("plan.yaml", CLUSTER, **{option: value})
    for program in ("trl", "axolotl", "llama-factory"):
        file = f"{program}.yaml"
        commands.export("plan.yaml", to=program, output=file, with_recipe=True)
        back = commands.import_plan(
            file, of=program, cluster=CLUSTER, model=MODEL, document_len=job.document_len
        )
        # Weights that are loaded in 16 bits have no masters there, whatever a plan says.
        assert replace(back.plan.job, master_weights=job.master_weights) == job, program
        assert back.not_understood == (), program
        assert back.prediction.step_time_s == pytest.approx(answer.prediction.step_time_s), program


@pytest.mark.parametrize("kind", ["packed", "lengths"])
def test_tuning_tries_plans_of_the_job(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = tune(MODEL, CLUSTER, **OPTIONS[kind], global_batch=16, fix=FIXED, dry_run=True)

    for candidate in result.candidates:
        job = candidate.plan.job
        for name, value in EXPECTED[kind].items():
            assert getattr(job.lora if name in ("rank", "weights") else job, name) == value


def test_what_a_framework_lacks_is_refused_with_those_that_have_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", MODEL, "--cluster", CLUSTER, "--framework", "megatron"]

    assert main([*asked, "--objective", "dpo"]) == 1

    assert "no objective dpo: it trains sft. Change that, or name another" in (
        " ".join(capfd.readouterr().err.split())
    )
    with pytest.raises(DocumentError, match="which --lora contradicts"):
        study_of(model=MODEL, clusters=[CLUSTER], tuning="full", lora=["rank=8"])
    with pytest.raises(DocumentError, match="compare clusters by packed samples"):
        study_of(model=MODEL, clusters=[CLUSTER], lengths="60,180,400", batching="longest")
