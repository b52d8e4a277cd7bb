"""The page on 127.0.0.1: who may ask, and a changed study that is planned again."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.planner.whatif.run_study import Progress, Result
from meshwright.planner.whatif.study import Study
from meshwright.studies.page_server import MOST_BYTES, PageServer, Planning
from tests.limits import PATIENCE_S
from tests.planner.whatif.test_study import study


def planned(asked: Study, progress: Progress) -> Result:
    progress(1, 1)
    return Result(study=asked, outcomes=(), ranks={model: [] for model in asked.models})


@pytest.fixture
def server() -> Iterator[PageServer]:
    asked = study(question="the first question")
    planning = Planning(result=planned(asked, lambda done, total: None), run=planned)
    with PageServer(planning) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: PageServer, path: str = "", body: str | None = None, **headers: str
) -> tuple[int, str]:
    port = int(server.server_address[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    method = "GET" if body is None else "POST"
    connection.request(method, f"/{server.token}/{path}", body=body, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_is_there_for_who_has_its_address_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, page = ask(server)
    assert status == 200 and "the first question" in page and 'id="plan"' in page

    port = int(server.server_address[1])
    own = {"Host": f"127.0.0.1:{port}", "Origin": server.origin}
    assert ask(server, **own)[0] == 200
    for header in ("Host", "Origin"):
        for foreign in ("evil.example", f"http://evil.example:{port}", "null", ""):
            assert ask(server, **{**own, header: foreign})[0] == 403


def test_an_address_without_the_token_is_refused(server: PageServer) -> None:
    real = server.token
    port = int(server.server_address[1])
    for path in ("/", "/plan", f"/{real[:-1]}/", f"/{real}x/"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", path)
        assert connection.getresponse().status == 403


def test_a_changed_study_is_planned_and_shown(server: PageServer) -> None:
    changed = study(question="a changed question").dump(defaults=False)

    status, text = ask(server, "plan", changed)

    assert status == 202 and json.loads(text)["error"] == ""
    deadline = time.monotonic() + PATIENCE_S
    while server.planning.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads(ask(server, "progress")[1]) == {
        "busy": False,
        "done": 1,
        "total": 1,
        "error": "",
    }
    assert "a changed question" in ask(server)[1]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("offers: 3", 400, "is missing"),
        ("\xff\xfe", 400, "UTF-8"),
        ("x" * (MOST_BYTES + 1), 413, "at most"),
        ("code.py:model", 400, "is a file"),
        ("a job of code.py:model", 400, "is a file"),
    ],
)
def test_what_is_no_study_is_refused_with_the_reason(
    server: PageServer, body: str, status: int, message: str
) -> None:
    if body == "code.py:model":
        body = study(models=[body]).dump(defaults=False)
    if body == "a job of code.py:model":
        job = {"name": "a", "model": "code.py:model", "tokens": 1e9, "runs_a_year": 1.0}
        body = study(models=[], goal={}, jobs=[job]).dump(defaults=False)

    answer: tuple[int, Any] = ask(server, "plan", body)

    assert answer[0] == status and message in answer[1]
    assert "the first question" in ask(server)[1]


def test_one_study_is_planned_at_a_time_and_a_failure_is_said(server: PageServer) -> None:
    waits = threading.Event()

    def fails(asked: Study, progress: Progress) -> Result:
        waits.wait(PATIENCE_S)
        raise ValueError("broken")

    server.planning.run = fails
    body = study().dump(defaults=False)

    assert ask(server, "plan", body)[0] == 202
    assert ask(server, "plan", body)[0] == 409
    waits.set()
    while server.planning.busy:
        time.sleep(0.01)
    assert "ValueError: broken" in json.loads(ask(server, "progress")[1])["error"]


def test_a_client_that_sends_nonsense_or_leaves_is_nobodys_traceback(
    server: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    port = int(server.server_address[1])
    for length in ("²", "٣", "-1", "1e3", "9" * 5000, ""):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            head = f"POST /{server.token}/plan HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            client.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert b" 413 " in client.recv(4096).split(b"\r\n")[0]
    for _ in range(3):
        client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n".encode())
        client.close()  # with a reset

    assert ask(server)[0] == 200
    assert capsys.readouterr().err == ""
