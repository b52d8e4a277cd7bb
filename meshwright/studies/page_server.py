"""A study's page on this machine, which can plan a changed study again.

The server listens on 127.0.0.1 alone.  Every address begins with a token that only the printed one
has.  A request is refused unless its Host is this server, and its Origin too if it has one: no page
of another site can ask for anything, whatever name it gives to this machine.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshwright.planner.documents.document import is_file, is_folder
from meshwright.planner.errors import DocumentError, MeshwrightError
from meshwright.planner.report.whatif_html import study_page
from meshwright.planner.whatif.run_study import Progress, Result
from meshwright.planner.whatif.study import Study

HOST = "127.0.0.1"
MOST_BYTES = 2**20
"""Largest number of bytes of a study in a request."""
MOST_DROPPED = 2**24
"""Number of bytes of a larger study that are read and dropped: a client that still sends does not
read the answer."""
IDLE_S = 30.0
"""Largest number of seconds for which a connection may be silent."""

Run = Callable[[Study, Progress], Result]


@dataclass(slots=True)
class Planning:
    """Study that is shown, and the progress of planning a changed one."""

    result: Result
    run: Run
    """Function that plans a study; it is called in a thread of its own, one at a time."""
    done: int = 0
    total: int = 0
    error: str = ""
    busy: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, study: Study) -> bool:
        """Plan a study in the background; False while another one is planned."""
        with self.lock:
            if self.busy:
                return False
            self.busy, self.done, self.total, self.error = True, 0, 0, ""
        threading.Thread(target=self._plan, args=(study,), daemon=True).start()
        return True

    def _plan(self, study: Study) -> None:
        try:
            self.result = self.run(study, self._progress)
        except MeshwrightError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"a bug in Meshwright: {type(error).__name__}: {error}"
        finally:
            self.busy = False

    def _progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the page."""
        return {"busy": self.busy, "done": self.done, "total": self.total, "error": self.error}


class PageServer(ThreadingHTTPServer):
    """The server of one study's page."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be taken: with the default of 5 a burst of them delays the page."""

    def __init__(self, planning: Planning, port: int = 0) -> None:
        """Listen on 127.0.0.1, on any free port if none is given."""
        self.planning = planning
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that left; anything else is our bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """Address to open, including the token."""
        return f"{self.origin}/{self.token}/"

    @property
    def origin(self) -> str:
        """Origin of this server's pages."""
        return f"http://{HOST}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer with the page or with the progress."""
        path = self._authorized_path()
        if path == "":
            page = study_page(self.server.planning.result, served=True)
            self._send(HTTPStatus.OK, page, "text/html")
        elif path == "progress":
            self._send_json(HTTPStatus.OK, self.server.planning.as_dict())
        elif path is not None:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

    def do_POST(self) -> None:
        """Plan the study that is sent."""
        path = self._authorized_path()
        if path is None:
            return
        if path != "plan":
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})
            return
        length = self.headers.get("Content-Length", "")
        is_number = re.fullmatch("[0-9]{1,18}", length) is not None
        if not is_number or int(length) > MOST_BYTES:
            self._drop(int(length) if is_number else 0)
            error = f"send a study of at most {MOST_BYTES:,} bytes, with its Content-Length"
            self._send_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": error})
            return
        try:
            study = _study(self.rfile.read(int(length)), self.server.planning.result.study)
        except DocumentError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        if self.server.planning.begin(study):
            self._send_json(HTTPStatus.ACCEPTED, self.server.planning.as_dict())
        else:
            self._send_json(HTTPStatus.CONFLICT, {"error": "another study is being planned"})

    def _drop(self, length: int) -> None:
        """Read what is sent, and keep none of it."""
        left = min(length, MOST_DROPPED)
        while left and (part := self.rfile.read(min(left, MOST_BYTES))):
            left -= len(part)

    def _authorized_path(self) -> str | None:
        """Return the path behind the token; None if the request was refused."""
        origin = self.headers.get("Origin")
        if f"http://{self.headers.get('Host')}" != self.server.origin or origin not in (
            None,
            self.server.origin,
        ):
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "asked from elsewhere"})
            return None
        token, _, path = self.path.lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "the address lacks its token"})
            return None
        return path

    def _send_json(self, status: HTTPStatus, data: dict[str, Any]) -> None:
        self._send(status, json.dumps(data), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of http.server
        """Say nothing: the terminal belongs to the command."""


def _study(sent: bytes, planned: Study) -> Study:
    """Return the study that is sent; it names no file that the study of the command does not."""
    try:
        study = Study.parse(sent.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DocumentError("", "is not UTF-8 text; save it as UTF-8") from error
    jobs = {job.model for job in planned.jobs}
    names = {*planned.models, *jobs, *(offer.cluster for offer in planned.offers)}
    for path, name in (
        *(("models", model) for model in study.models),
        *(("jobs", job.model) for job in study.jobs),
        *(("offers", offer.cluster) for offer in study.offers),
    ):
        if name not in names and (":" in name or is_file(name) or is_folder(name)):
            raise DocumentError(
                path, f"'{name:.60}' is a file; a page names what the catalogue has"
            )
    return study
