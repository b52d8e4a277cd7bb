"""A run's figures are served to Prometheus and sent by OpenTelemetry, from its events alone."""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshwright.planner.documents.document import json_line
from meshwright.planner.documents.events import (
    Attempt,
    Event,
    Incident,
    Paced,
    RankPart,
    StepDone,
    StepRecord,
)
from meshwright.planner.errors import LaunchError
from meshwright.planner.whatif.run_status import run_view
from meshwright.runtime.run.run_folder import events_file
from meshwright.runtime.run.telemetry import (
    EventTail,
    Telemetry,
    TelemetryFigure,
    address_of,
    exposition,
    figures,
)

HAPPENED: list[Event] = [
    Attempt(at_unix_s=100.0, plan="p", devices=2, predicted_step_s=1.5),
    StepDone(
        at_unix_s=112.0,
        record=StepRecord(step=1, loss=2.5, grad_norm=1.0, step_s=2.0, epoch=0, mfu=0.4),
    ),
    Paced(
        at_unix_s=112.0,
        after_step=1,
        ranks=(RankPart(rank=7, data_s=0.5, work_s=None, step_s=2.0),),
    ),
    Incident(at_unix_s=113.0, cause="hang", rank=1, after_step=1, evidence="x"),
]


def add(output: Path, events: list[Event], *, cut: int = 0) -> None:
    text = "".join(map(json_line, events))
    with events_file(output).open("a") as lines:
        lines.write(text[: len(text) - cut])


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_figures_are_served_while_the_run_goes_on(tmp_path: Path) -> None:
    add(tmp_path, HAPPENED[:1])
    with Telemetry(tmp_path, prometheus="0", opentelemetry=None) as served:
        assert served.server is not None
        before = get(served.server.port, "/metrics")
        add(tmp_path, HAPPENED[1:], cut=9)
        after = get(served.server.port, "/metrics")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(served.server.port, "/plan.yaml")
        port = served.server.port
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")

    assert "meshwright_predicted_step_seconds 1.5\n" in before
    assert "meshwright_loss" not in before
    for line in (
        "# TYPE meshwright_loss gauge",
        "meshwright_loss 2.5",
        "meshwright_step_seconds 2.0",
        "meshwright_mfu 0.4",
        f"meshwright_goodput_ratio {2 / 12!r}",
        'meshwright_seconds{part="start"} 10.0',
        'meshwright_rank_phase_seconds{rank="7",phase="data"} 0.5',
    ):
        assert f"{line}\n" in after
    assert "work" not in after.split("rank_phase")[-1]
    assert "incidents" not in after  # its line is not whole yet
    with events_file(tmp_path).open("a") as lines:
        lines.write(json_line(HAPPENED[-1])[-9:])
    (hangs,) = [one for one in EventTail(tmp_path).figures() if one.name.endswith("incidents")]
    assert (hangs.value, hangs.labels) == (1.0, (("cause", "hang"),))


LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'
SAMPLE = re.compile(
    rf"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{{LABEL}(?:,{LABEL})*\}})? "
    r"(?:[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)|nan)"
)
"""A line of Prometheus' text format 0.0.4, by its documentation."""


def test_what_is_served_is_of_the_text_format() -> None:
    """Each name has its help, its type and then all of its samples, and comes once."""
    names: list[str] = []
    head: list[str] = []
    for line in exposition(figures(run_view(HAPPENED), now_s=1e9)).splitlines():
        if line.startswith("#"):
            _, kind, name, text = line.split(" ", 3)
            assert kind == ("HELP" if not head else "TYPE")
            assert kind == "HELP" or (name, text) == (head[0], "gauge")
            head = [*head, name]
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        if head:
            assert sample["name"] not in names
            names.append(sample["name"])
        assert (sample["name"], head) in ((names[-1], []), (names[-1], [names[-1]] * 2))
        head = []

    assert {"meshwright_loss", "meshwright_seconds", "meshwright_rank_phase_seconds"} <= {*names}


def test_labels_are_escaped() -> None:
    figure = TelemetryFigure(name="a", help="b", value=1.0, labels=(("c", 'd"\\\n'),))

    *_, line = exposition(iter([figure])).splitlines()
    assert line == 'a{c="d\\"\\\\\\n"} 1.0'
    assert SAMPLE.fullmatch(line)


@pytest.mark.parametrize("text", ["", "x", "1.2.3.4", "host:", "70000", "host:-1", "9464/metrics"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="prometheus: is '"):
        address_of(text)


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    with Telemetry(tmp_path, prometheus="0", opentelemetry=None) as first:
        assert first.server is not None
        second = Telemetry(tmp_path, prometheus=str(first.server.port), opentelemetry=None)
        with pytest.raises(LaunchError, match="Address already in use"):
            second.__enter__()


class Collector:
    """Stands for opentelemetry: what is asked of it."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.endpoint, self.is_shut = "", False

    def exporter(self, endpoint: str) -> str:
        self.endpoint = endpoint
        return endpoint

    def get_meter(self, name: str) -> Collector:
        return self

    def create_observable_gauge(self, name: str, callbacks: list[Any], description: str) -> None:
        self.made[name] = callbacks[0]

    def shutdown(self) -> None:
        self.is_shut = True


def test_figures_are_sent_by_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    here = {
        "opentelemetry.exporter.otlp.proto.http.metric_exporter": {
            "OTLPMetricExporter": collector.exporter
        },
        "opentelemetry.sdk.metrics": {"MeterProvider": lambda metric_readers: collector},
        "opentelemetry.sdk.metrics.export": {
            "PeriodicExportingMetricReader": lambda exporter, export_interval_millis: exporter
        },
        "opentelemetry.metrics": {"Observation": lambda value, labels: (value, labels)},
    }
    for name, what in here.items():
        parts = name.split(".")
        for at in range(1, len(parts)):
            parent = ".".join(parts[:at])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(what)
        monkeypatch.setitem(sys.modules, name, module)
    add(tmp_path, HAPPENED)

    read: list[int] = []
    tail_figures = EventTail.figures
    monkeypatch.setattr(EventTail, "figures", lambda tail: read.append(1) or tail_figures(tail))

    with Telemetry(tmp_path, prometheus=None, opentelemetry="http://there:4318") as sends:
        sends.look()
        offered = len(read)
        for _reading in range(2):
            for observe in collector.made.values():
                observe(None)
        assert len(read) - offered <= 2  # once for each reading of all instruments

    assert collector.endpoint == "http://there:4318"
    assert collector.is_shut
    assert collector.made["meshwright_incidents"](None) == [(1.0, {"cause": "hang"})]
    assert collector.made["meshwright_loss"](None) == [(2.5, {})]
