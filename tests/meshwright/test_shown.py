"""What others wrote is shown as text: no markup, no terminal codes, no formulas, no HTML."""

from __future__ import annotations

import csv
import json
import re
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli
from meshwright.launch import launch as launches
from meshwright.planner.errors import LaunchError
from meshwright.planner.report import svg
from meshwright.planner.report.terminal import Terminal
from tests.meshwright.test_malformed import CLUSTER, changed
from tests.meshwright.test_validate_command import TABLE

STEERING = "\x1b[2J\x1b]0;owned\x07\b\x9b31m\u202e"
MARKUP = "[/red][bold]x[link=http://a]:smile:"
TAG = "<img src=x onerror=alert(1)></script><script>alert(1)</script>"


def shown(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Return all that a command prints, which must be lines of printable characters."""
    capfd.readouterr()
    assert cli.main(list(arguments)) == code, capfd.readouterr().err
    output = capfd.readouterr()
    text = output.out + output.err
    assert text.replace("\n", "").isprintable(), re.findall(r"[^\n -~]+", text)
    return text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_and_sources_in_documents_are_text_on_the_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = yaml.safe_load(changed(CLUSTER, "groups.0.accelerator.name", MARKUP.replace("/", "")))
    data["groups"][0]["accelerator"]["curve"]["source"] = f"{STEERING}{MARKUP}"
    file = f"{MARKUP.replace('/', '')}.yaml"
    Path(file).write_text(json.dumps(data))
    demo = ["demo-4m", "--seq-len", "64", "--global-batch", "8"]

    text = shown(capfd, "plan", *demo, "--cluster", file, "-o", "plan.yaml")
    monkeypatch.setenv("COLUMNS", "1000")
    text += shown(capfd, "show", "plan.yaml", "--explain")
    text += shown(capfd, "predict", "plan.yaml", "--explain")

    assert file in text
    assert text.count(rf"\x1b[2J\x1b]0;owned\x07\x08\x9b31m\u202e{MARKUP}") >= 2


def test_a_study_is_text_on_the_terminal_and_in_its_page_and_its_table(
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = f"=1+1{MARKUP}{TAG}"
    study = {
        "format": 1,
        "name": f"{MARKUP}{TAG}",
        "question": f"{STEERING}{MARKUP}{TAG}",
        "models": ["gpt2"],
        "work": {"seq_len": 512, "global_batch": 8, "framework": "deepspeed"},
        "goal": {"tokens": 1e8},
        "offers": [
            {
                "name": name,
                "cluster": "1xa10g",
                "rent": {
                    "usd_per_device_hour": 1.0,
                    "date": "2026-01-01",
                    "source": f"{STEERING}{MARKUP}{TAG}",
                },
            }
        ],
    }
    Path("study.yaml").write_text(json.dumps(study))

    text = shown(capfd, "whatif", "study.yaml", "--html", "page.html", "--csv", "table.csv")

    assert MARKUP in text.replace("\n", "")
    (row,) = csv.DictReader(Path("table.csv").read_text().splitlines())
    assert row["candidate"] == f"'{name}"
    assert float(row["step_time_s"]) > 0
    source = Path("page.html").read_text()
    page = Page(source)
    assert "img" not in page.tags
    assert source.count("<script") == 2  # the page's data and its own modules
    assert not page.alerts
    assert "<img" not in source
    assert "&lt;img" in source
    assert "\\u003cimg" in source


def test_rows_of_a_table_are_text_in_the_scores(capfd: pytest.CaptureFixture[str]) -> None:
    table = TABLE.replace("a-1,a,", f"=HYPERLINK(1),{MARKUP}{STEERING}{TAG},").replace(
        "a-2,a,", "@a-2,b,"
    )
    Path("table.csv").write_text(table)

    shown(capfd, "validate", "table.csv", "--rows", "rows.csv", "--html", "page.html")

    rows = list(csv.reader(Path("rows.csv").read_text().splitlines()))
    assert [row[0] for row in rows[1:]] == ["'=HYPERLINK(1)", "'@a-2"]
    assert float(rows[1][1]) > 0
    page = Page(Path("page.html").read_text())
    assert "img" not in page.tags and not page.alerts


def test_what_a_scheduler_says_is_text(
    capfd: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["plan", "gpt2", "--cluster", "2x4xa100-sxm-80gb", "--seq-len", "512"]
    shown(capfd, *plan, "--global-batch", "32", "-o", "plan.yaml")
    sbatch = here / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nprintf '%s' '{STEERING}{MARKUP}'\nexit $REFUSED\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")

    for refused in (0, 1):
        monkeypatch.setenv("REFUSED", str(refused))
        text = shown(capfd, "launch", "plan.yaml", "--on", "slurm", code=refused)
        assert MARKUP in text


def test_messages_and_tracebacks_are_text(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LaunchError(f"log:\n{STEERING}{MARKUP}")

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(f"{STEERING}{MARKUP}")

    monkeypatch.setattr(launches, "launch", refuse)
    assert "log:\n\\x1b[2J" in shown(capfd, "launch", "plan.yaml", code=1)
    monkeypatch.setattr(launches, "launch", fail)
    before = sys.excepthook
    try:
        with pytest.raises(ValueError, match="owned") as raised:
            cli.main(["launch", "plan.yaml"])
        sys.excepthook(raised.type, raised.value, raised.tb)
    finally:
        sys.excepthook = before
    text = capfd.readouterr().err
    assert "ValueError" in text and MARKUP in text
    assert text.replace("\n", "").isprintable()


def test_a_terminal_keeps_its_own_colours_and_none_of_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from rich.table import Table
    from rich.text import Text

    terminal = Terminal(force_terminal=True, color_system="standard", width=200)
    table = Table(f"{STEERING}{MARKUP}", title=f"{STEERING}{MARKUP}")
    table.add_row(Text(f"{STEERING}{MARKUP}", style="red"))

    terminal.print(table)
    terminal.print(f"{STEERING}{MARKUP}")

    text = capfd.readouterr().out
    ours = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert ours.replace("\n", "").isprintable()
    assert ours.count(MARKUP) == 4
    assert "\x1b[31m" in text


def test_labels_of_pictures_are_text() -> None:
    chart = svg.stacked_bars(TAG, [(TAG, {TAG: 1.0})], TAG)

    assert Page(chart).tags == {"svg", "text", "line", "rect", "title"}
    assert TAG.replace("<", "&lt;").replace(">", "&gt;")[:20] in chart


class Page(HTMLParser):
    """The tags of a page, and its scripts that would run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.alerts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script &= tag != "script"

    def handle_data(self, data: str) -> None:
        if not self._in_script:
            return
        if data.startswith("alert"):
            self.alerts.append(data)
