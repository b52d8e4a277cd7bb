"""Telemetry: a run's figures for Prometheus and OpenTelemetry, read from its events.

The launcher that leads follows events.jsonl in a thread, so ranks do nothing for it, and what is
served outlives them.  Prometheus reads them over HTTP, on 127.0.0.1 unless another address is
named; there is nothing to ask for but figures.  Nothing here imports torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from meshwright.planner.documents.events import LONGEST_EVENT_BYTES, events_of
from meshwright.planner.errors import LaunchError
from meshwright.planner.whatif.run_status import RunView, Viewer
from meshwright.runtime.core import checksums
from meshwright.runtime.run.run_clock import unix_now_s
from meshwright.runtime.run.run_folder import events_file

HOST = "127.0.0.1"
EVERY_S = 2.0
"""Between looks at the events."""
EXPORT_MS = 15_000
IDLE_S = 10.0
"""Seconds that a connection may say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryFigure:
    """One number of a run."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def figures(view: RunView, *, now_s: float) -> Iterator[TelemetryFigure]:
    """Yield the figures of a run.

    >>> from meshwright.planner.whatif.run_status import run_view
    >>> [figure.name for figure in figures(run_view([]), now_s=0.0)][:2]
    ['meshwright_attempts', 'meshwright_steps_lost']
    """
    figure = _figure
    yield figure("attempts", "Times that ranks were started", view.seconds.attempts)
    yield figure("steps_lost", "Steps that were done again", view.seconds.steps_lost)
    yield figure("event_age_seconds", "Since the last event", max(0.0, now_s - view.at_unix_s))
    yield figure("devices", "Devices that train", view.devices)
    for cause, count in view.seconds.incidents.items():
        yield figure("incidents", "Incidents by cause", count, cause=cause)
    for part, seconds in view.seconds.parts_s.items():
        yield figure("seconds", "Of the wall clock, by part", seconds, part=part.replace(" ", "_"))
    if view.seconds.trained_s:
        yield figure("goodput_ratio", "Share of the time that trained", view.seconds.goodput)
    if view.expected is not None:
        yield figure("predicted_goodput_ratio", "As predicted before", view.expected.goodput)
    if view.predicted_step_s is not None:
        yield figure("predicted_step_seconds", "A step as predicted", view.predicted_step_s)
    if view.last is not None:
        values = view.last.model_dump(exclude_none=True, exclude={"step_s"})
        for name, value in values.items():
            yield figure(name, f"{name.replace('_', ' ')}, of the last step", float(value))
    if view.step_s is not None:
        yield figure("step_seconds", "A step, the median of the last ones", view.step_s)
    for rank in view.paced.ranks if view.paced is not None else ():
        for phase, spent in (("data", rank.data_s), ("work", rank.work_s), ("step", rank.step_s)):
            if spent is not None:
                what = "A step of the slowest ranks"
                yield figure("rank_phase_seconds", what, spent, rank=str(rank.rank), phase=phase)


def _figure(name: str, text: str, value: float, **labels: str) -> TelemetryFigure:
    return TelemetryFigure(
        name=f"meshwright_{name}", help=text, value=float(value), labels=tuple(labels.items())
    )


def exposition(figures: Iterator[TelemetryFigure]) -> str:
    """Return figures in the text format that Prometheus reads (version 0.0.4).

    >>> print(exposition(iter([_figure("incidents", "By cause", 2, cause="crash")])), end="")
    # HELP meshwright_incidents By cause
    # TYPE meshwright_incidents gauge
    meshwright_incidents{cause="crash"} 2.0
    """
    lines = []
    named: set[str] = set()
    for figure in figures:
        if figure.name not in named:
            named.add(figure.name)
            lines += [f"# HELP {figure.name} {figure.help}", f"# TYPE {figure.name} gauge"]
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in figure.labels)
        lines.append(f"{figure.name}{f'{{{labels}}}' if labels else ''} {figure.value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def address_of(text: str) -> tuple[str, int]:
    """Return host and port as `--prometheus` names them; LaunchError for anything else.

    >>> address_of("9464"), address_of("10.0.0.5:0"), address_of("[::1]:9464")
    (('127.0.0.1', 9464), ('10.0.0.5', 0), ('::1', 9464))
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 2**16):
        raise LaunchError(f"prometheus: is '{text}'; name a PORT, or HOST:PORT")
    return host.strip("[]") or HOST, int(port)


class EventTail:
    """Follows the events of a run in a thread, and has its view."""

    def __init__(self, output: Path) -> None:
        self._file, self._offset = events_file(output), 0
        self._viewer = Viewer()
        self._lock = threading.Lock()

    def figures(self) -> list[TelemetryFigure]:
        """Return the figures until now."""
        with self._lock:
            self._read()
            return list(figures(self._viewer.view(), now_s=unix_now_s()))

    def _read(self) -> None:
        """Take what was added, line by line, so that no more than one lies in memory."""
        if not self._file.exists():
            return
        with checksums.open_regular(self._file) as lines:
            lines.seek(self._offset)
            while (line := lines.readline(LONGEST_EVENT_BYTES + 1)).endswith(b"\n"):
                self._offset += len(line)
                for event in events_of([line]):
                    self._viewer.add(event)


class PrometheusServer:
    """Serves figures at /metrics."""

    def __init__(
        self, address: tuple[str, int], figures: Callable[[], list[TelemetryFigure]]
    ) -> None:
        """Raises LaunchError where nobody can listen there."""
        self._server: ThreadingHTTPServer
        try:
            self._server = _server(address)(address, _handler(figures))
        except OSError as error:
            raise LaunchError(f"prometheus: {address[0]}:{address[1]}: {error.strerror}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _server(address: tuple[str, int]) -> type[ThreadingHTTPServer]:
    import socket  # noqa: PLC0415 - for the family alone

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    return Server


def _handler(figures: Callable[[], list[TelemetryFigure]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            """Answer with figures, and nothing else."""
            if self.path != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            body = exposition(iter(figures())).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: the launcher's lines are the run's."""

    return Handler


class OpenTelemetry:
    """Sends figures to a collector by OTLP over HTTP, as opentelemetry's own exporter does."""

    def __init__(self, endpoint: str, figures: Callable[[], list[TelemetryFigure]]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415 - only where wanted
            OTLPMetricExporter,
        )
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

        exporter = OTLPMetricExporter(endpoint=endpoint)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=EXPORT_MS)
        self._provider: Any = MeterProvider(metric_readers=[reader])
        self._meter: Any = self._provider.get_meter("meshwright")
        self._found = figures
        self._known: set[str] = set()
        self._reading: list[TelemetryFigure] = []
        self._asked: set[str] = set()
        """Names that were asked for in this reading; each is asked for once in every one."""

    def offer(self) -> None:
        """Make an instrument for each figure that is new."""
        self._reading, self._asked = self._found(), set()
        for figure in self._reading:
            if figure.name not in self._known:
                self._known.add(figure.name)
                self._meter.create_observable_gauge(
                    figure.name, callbacks=[self._observing(figure.name)], description=figure.help
                )

    def close(self) -> None:
        """Send what is left."""
        self.offer()
        self._provider.shutdown()

    def _observing(self, name: str) -> Callable[[object], list[Any]]:
        def observe(_: object) -> list[Any]:
            from opentelemetry.metrics import Observation  # noqa: PLC0415

            figures = [figure for figure in self._figures_of_reading(name) if figure.name == name]
            return [Observation(figure.value, dict(figure.labels)) for figure in figures]

        return observe

    def _figures_of_reading(self, name: str) -> list[TelemetryFigure]:
        """Return all figures, computed once for each reading of all instruments."""
        if not self._asked or name in self._asked:
            self._reading, self._asked = self._found(), set()
        self._asked.add(name)
        return self._reading


class Telemetry:
    """Telemetry that a launcher serves and sends while a `with` block lasts."""

    def __init__(self, output: Path, *, prometheus: str | None, opentelemetry: str | None) -> None:
        self._output = output
        self._prometheus, self._opentelemetry = prometheus, opentelemetry
        self.server: PrometheusServer | None = None
        self._sender: OpenTelemetry | None = None
        self._next_s = 0.0

    def __enter__(self) -> Telemetry:
        tail = EventTail(self._output)
        if self._prometheus is not None:
            self.server = PrometheusServer(address_of(self._prometheus), tail.figures)
        if self._opentelemetry is not None:
            self._sender = OpenTelemetry(self._opentelemetry, tail.figures)
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.close()
        if self._sender is not None:
            self._sender.close()

    def look(self) -> None:
        """Offer what is new, from time to time."""
        if self._sender is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self._sender.offer()
