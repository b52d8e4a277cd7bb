"""A study's page and a plan's page in headless Chromium: figures, controls, widths, accessibility.

`make matrix` installs playwright-core and axe-core for it; where no Chromium is, it is left out.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import pytest

from meshwright.api import commands
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.report.whatif_html import study_page
from meshwright.planner.whatif.ranking import Rank
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.study import Study
from tests.planner.report.five_pages import write_pages
from tests.planner.report.test_page_arithmetic import OFFERS, SET, planned_once, worked_out
from tests.planner.whatif.test_study import study

CHECK = Path(__file__).parents[3] / "benchmarks" / "page_check"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not Path(CHROMIUM).is_file(), reason=f"there is no {CHROMIUM}"),
]
ASKED = study(offers=OFFERS, goal={"tokens": 2e10, "deadline_days": 60.0, "budget_usd": 90_000.0})


def chromium(script: str, *arguments: str, given: str = "") -> str:
    """Return what a script of page_check prints; it fails on any fault."""
    assert (CHECK / "node_modules").is_dir(), "npm install --prefix benchmarks/page_check"
    done = subprocess.run(
        [str(shutil.which("node")), str(CHECK / script), *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def result() -> Result:
    return worked_out(ASKED, planned_once(ASKED))


def test_the_page_of_a_study_shows_what_python_computes(result: Result, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(study_page(result), encoding="utf-8")
    fragments = [urlencode({k: "" if v is None else v for k, v in one.items()}) for one in SET]

    shown = json.loads(chromium("figures.js", str(page), given=json.dumps(fragments)))

    plans = planned_once(ASKED)
    for values, one in zip(SET, shown, strict=True):
        expected = worked_out(Study.parse(one["yaml"]), plans).ranks["gpt2"]
        rows = list(csv.DictReader(io.StringIO(one["csv"])))
        assert [row["candidate"] for row in rows] == [rank.outcome.candidate for rank in expected]
        for row, rank in zip(rows, expected, strict=True):
            for name, value in table_row(rank).items():
                same = row[name] == "" if value is None else close(float(row[name]), value)
                assert same, (values, row["candidate"], name, row[name], value)


def close(shown: float, expected: float) -> bool:
    return math.isclose(shown, expected, rel_tol=ROUNDING, abs_tol=1e-15)


def table_row(rank: Rank) -> dict[str, float | None]:
    outcome = rank.outcome
    spans = {
        "hours_to_result": outcome.result_hours,
        "usd": outcome.usd,
        "usd_per_device_hour": outcome.usd_per_device_hour,
        "outlay_usd": outcome.outlay_usd,
    }
    ends = {"": "value", "_low": "low", "_high": "high"}
    return {
        **{
            name + end: None if span is None else getattr(span, attribute)
            for name, span in spans.items()
            for end, attribute in ends.items()
        },
        "place": rank.place,
        "tokens_in_budget": outcome.tokens_in_budget,
        "probability_cheapest": rank.first.get("cost"),
        "probability_fastest": rank.first.get("time"),
        "probability_goals": outcome.chance,
        "energy_kwh": outcome.energy_kwh.value if outcome.energy_kwh else None,
        "carbon_kg": outcome.carbon_kg.value if outcome.carbon_kg else None,
    }


def test_pages_have_no_fault_at_any_width_light_and_dark(result: Result, tmp_path: Path) -> None:
    """Controls, address, reset, print, axe-core, 390 to 1,920 pixels, scripts' errors, size."""
    pages = [str(tmp_path / name) for name in ("study.html", "shown.html")]
    plan = str(tmp_path / "plan.yaml")
    Path(pages[0]).write_text(study_page(result), encoding="utf-8")
    commands.plan("llama-3.1-8b", "8xh100-sxm-80gb", output=plan)
    commands.show(plan, html=pages[1])
    pages += [str(page) for page in write_pages(tmp_path / "five")]

    said = chromium("check.js", *pages)

    assert said.endswith("7 pages, 0 faults\n")


def test_first_screens_are_like_their_kept_pictures(tmp_path: Path) -> None:
    """The five pages, light and dark, at 1,280 and 390 pixels; a page of another colour is far."""
    pages, pictures = tmp_path / "pages", tmp_path / "pictures"
    write_pages(pages)

    chromium("shots.js", str(pages), str(pictures))

    said = chromium("alike.js", str(pictures), str(CHECK.parents[1] / "docs" / "pictures"))
    assert said.count("-top-") == 20
    dark, light = (pictures / f"run-top-{colours}-1280.png" for colours in ("dark", "light"))
    shutil.copy(dark, light)
    with pytest.raises(AssertionError, match="1 faults"):
        chromium("alike.js", str(pictures), str(CHECK.parents[1] / "docs" / "pictures"))
