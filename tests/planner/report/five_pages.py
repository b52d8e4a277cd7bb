"""The five pages on inputs that stay the same: a study, a plan, a tuning, a run, a validation.

    python -m tests.planner.report.five_pages FOLDER

writes them; `node benchmarks/page_check/shots.js FOLDER PICTURES` takes their first screens.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from meshwright.api import commands
from meshwright.launch.watch import slowness_text
from meshwright.planner.calibration.scores.validate import validate
from meshwright.planner.documents.plan import Layout
from meshwright.planner.report import run_page, trials
from meshwright.planner.report.facts import Fact
from meshwright.planner.report.validation_report import validation_page
from meshwright.planner.report.whatif_html import study_page
from meshwright.planner.tuning.next_trial import Outcome, Tuner
from meshwright.planner.tuning.record import Trial
from meshwright.planner.tuning.trial_options import TrialOption
from meshwright.planner.whatif.run_study import run
from meshwright.planner.whatif.study import Study
from tests.planner.calibration.scores.test_validate import written

QUOTE = {"date": "2026-11", "source": "a quote"}
STUDY = {
    "format": 1,
    "name": "Buy, reserve or rent two nodes of H200 for 1e12 tokens",
    "models": ["llama-3.1-8b"],
    "work": {"framework": "megatron"},
    "goal": {"tokens": 1e12, "deadline_days": 200.0, "budget_usd": 400_000.0},
    "offers": [
        {"cluster": "2x8xh200-sxm", "rent": {"usd_per_device_hour": 5.4, **QUOTE}},
        {"cluster": "2x8xh100-sxm-80gb", "rent": {"usd_per_device_hour": 4.5, **QUOTE}},
        {
            "name": "H200 for a year",
            "cluster": "2x8xh200-sxm",
            "rent": {
                "usd_per_device_hour": 3.1,
                "commitment": "reserved",
                "term_months": 12.0,
                **QUOTE,
            },
        },
        {
            "name": "H200 bought",
            "cluster": "2x8xh200-sxm",
            "buy": {"usd_per_device": 38_000.0, **QUOTE},
        },
    ],
}


def write_pages(folder: Path) -> list[Path]:
    """Write the five pages and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.html" for name in ("study", "plan", "tune", "run", "validate")]
    study, plan, tune, watched, validated = files
    study.write_text(study_page(run(Study.of(STUDY), processes=1)), encoding="utf-8")
    commands.plan(
        "llama-3.1-8b", "2x8xh100-sxm-80gb", output=str(folder / "plan.yaml"), html=str(plan)
    )
    tune.write_text(tune_page(), encoding="utf-8")
    watched.write_text(watched_page(), encoding="utf-8")
    validated.write_text(validation_page(validate(_table(folder))), encoding="utf-8")
    return files


def tune_page() -> str:
    """Return the page of three trials of five plans."""
    options = [
        TrialOption(
            layout=Layout(tensor=tensor, data_shard=8 // tensor, zero=1, micro_batch=batch),
            kept="none",
            step_s=step_s,
            parts={"forward": 0.8 * step_s, "tensor communication": 0.2 * step_s},
            devices_per_node=8,
            fit_probability=0.99,
        )
        for tensor, batch, step_s in (
            (1, 1, 1.0),
            (1, 2, 1.02),
            (2, 1, 1.05),
            (4, 1, 1.2),
            (2, 2, 1.1),
        )
    ]
    names = [option.layout.text() for option in options]
    tuner, rows = Tuner(options), []
    for at, step_s in ((0, 1.31), (1, 1.12), (2, 1.22)):
        believed_s = tuner.posterior.seconds(at)[0]
        tuner = tuner.with_outcome(Outcome(option=at, step_s=step_s))
        rows.append(
            Trial(
                trial=at + 1,
                plan_digest=f"{at}",
                layout=names[at],
                ended="ran",
                predicted_s=options[at].step_s,
                believed_s=believed_s,
                step_s=step_s,
                steps=20,
                memory_ratio=0.97,
                seconds=60.0,
                answer=names[1],
                sure=0.5 + 0.1 * at,
            )
        )
    facts = [
        Fact(label="plan", text=names[1]),
        Fact(label="time", text="1.12 s a step, measured (1.08 s to 1.16 s); predicted 1.02 s"),
        Fact(label="gain", text="14.5 % less time than the plan that was predicted to be fastest"),
        Fact(label="tried", text="3 of 5 plans; the next is not worth its time"),
        Fact(label="sure", text="70 % that no other plan is more than 2 % faster"),
        Fact(label="cost", text="24 device-minutes of trials, 1.2 CPU s of planning"),
    ]
    return trials.page("llama-3.1-8b on 8xh100-sxm-80gb", facts, names, tuner, rows)


def watched_page() -> str:
    """Return the page of a run that takes four times what was predicted."""
    curve = tuple((step, 11 / math.sqrt(1 + step / 20), 4.4) for step in range(1, 200))
    alarm = slowness_text(4.4, 1.1)
    facts = (
        Fact(label="run", text="llama-3.1-8b, 16 devices, dp=16 zero=1 micro_batch=1x4"),
        Fact(label="SLOW", text=alarm),
        Fact(label="state", text="training"),
        Fact(label="step", text="200 of 2,000, loss 3.3166"),
        Fact(label="pace", text="4.4 s a step, 1.1 s predicted (1.0 s to 1.4 s)"),
        Fact(label="goodput", text="97.1 %, 96.5 % predicted (94.0 to 98.2)"),
        Fact(label="saved", text="step 150; training waited 0.8 s"),
    )
    seconds = run_page.RunTable(
        title="Seconds",
        head=("part", "predicted", "measured"),
        rows=(("forward", "0.3 s", "0.3 s"), ("data communication", "0.1 s", "3.4 s")),
    )
    reading = run_page.RunReading(
        title="run-7", facts=facts, tables=(seconds,), alarm=alarm, curve=curve
    )
    return run_page.page(reading)


def _table(folder: Path) -> Path:
    """Write five measured rows."""
    rows = [
        {"tp": "1", "step_time_s": "1.0", "sweep": "s", "peak_memory_gib": "20"},
        {"tp": "2", "step_time_s": "1.2", "sweep": "s", "out_of_memory": "0"},
        {"tp": "8", "step_time_s": "2.0", "sweep": "s"},
        {"source": "two", "step_time_s": "0.9", "out_of_memory": "0"},
        {"source": "two", "layers": "", "step_time_s": "1.0"},
    ]
    return written(folder / "table.csv", rows)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
