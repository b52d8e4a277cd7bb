"""Hostile requests to the page of a study, as bytes on a socket, made from a seed.

    python -m tests.meshwright.hostile_requests --seed 0 --count 1000

The server is the command's own, in a process of its own.  Behind each request it must still answer
the right one, and have said nothing on stderr; behind all of them no file was written and no code
ran.  Nothing here knows how the server reads a request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STUDY = """
format: 1
name: small
jobs:
- {name: one, model: gpt2, seq_len: 128, global_batch: 8, tokens: 1e9, runs_a_year: 1}
offers:
- {cluster: 8xa100-sxm-80gb}
"""
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "", "G\0T")
VERSIONS = (
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/2.0",
    "HTTP/9.9.9",
    "HTTP/a.b",
    "http/1.1",
    "",
)
LENGTHS = (
    *(
        "",
        "0",
        "-1",
        "²",
        "1e3",
        "0x10",
        "+5",
        " 7 ",
        "99999999999999999999",
        "1048577",
        "١٢",
        "3, 4",
    ),
    *("007", "NaN", "5\t", "1_0"),
)
PATHS = (
    "",
    "plan",
    "progress",
    "../../etc/passwd",
    "%00",
    "plan/../progress",
    "//",
    "?a=b",
    "é",
    "\0",
)
BODIES = (
    b"",
    b"{}",
    b"[" * 100_000,
    b"a: &a [*a, *a]",
    b"!!python/object/apply:os.system ['touch code-was-run']",
    b"\xff\xfe\x00",
    b'{"jobs": [{"model": "own.py:Own"}]}',
    b"jobs: [" + b"{}, " * 20_000 + b"]",
    b"name: " + b"9" * 200_000,
    b"offers: [{cluster: /etc/passwd}]",
    b"jobs: [{model: ../secret.yaml, seq_len: 1e400, global_batch: -1, tokens: .nan}]",
    STUDY.encode(),
)
HEADERS = (
    *("X: " + "a" * 70_000, "Transfer-Encoding: chunked", "Expect: 100-continue", "Host:", ": b"),
    *(
        "Origin: http://evil.example",
        "Origin: null",
        "Host: evil.example",
        "no colon",
        "X: \0",
        "X: é",
    ),
    *("Connection: keep-alive", "Upgrade: websocket", "Content-Type: text/yaml; charset=utf-99"),
)


@dataclass
class Served:
    """A study's page that is served, and what its process has said."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    token: str

    def said(self) -> str:
        """Everything on stderr."""
        return (self.folder / "stderr.txt").read_text(errors="replace")

    def send(self, content: bytes, *, rest_s: float = 0.0, answered: bool = True) -> bytes:
        """Send bytes, and return what comes back before the connection ends."""
        got = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port)) as end,
        ):
            end.settimeout(2.0)
            end.sendall(content)
            if not answered:
                return got  # and leave
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_WR)
            while part := end.recv(2**16):
                got += part
        time.sleep(rest_s)
        return got

    def request(self, path: str = "progress") -> bytes:
        """Return the answer to a request that is right."""
        host = f"127.0.0.1:{self.port}"
        return self.send(f"GET /{self.token}/{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


@contextlib.contextmanager
def served() -> Iterator[Served]:
    """Serve a small study as the command does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "study.yaml").write_text(STUDY)
        with (
            (folder / "stderr.txt").open("wb") as stderr,
            (folder / "stdout.txt").open("wb") as out,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "meshwright", "whatif", "study.yaml", "--serve"],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=stderr,
            )
        try:
            until_s = time.monotonic() + 120
            address = None
            while address is None:
                assert process.poll() is None and time.monotonic() < until_s, (
                    folder / "stderr.txt"
                ).read_text()
                time.sleep(0.1)
                text = (folder / "stdout.txt").read_text() + (folder / "stderr.txt").read_text()
                address = re.search(r"http://127\.0\.0\.1:(\d+)/([A-Za-z0-9_-]+)/", text)
            yield Served(process, folder, int(address[1]), address[2])
        finally:
            process.kill()
            process.wait()


def request(rng: random.Random, there: Served) -> bytes:
    """Return a request that is right but for a few of its parts."""
    body = rng.choice(BODIES)
    if rng.random() < 0.3:
        body = bytes(rng.randrange(256) for _ in range(rng.randrange(400)))
    host = f"127.0.0.1:{there.port}"
    token = there.token if rng.random() < 0.8 else rng.choice(["", "a", "%", "\u00e9" * 9])
    method = rng.choice(["GET", "POST"]) if rng.random() < 0.7 else rng.choice(METHODS)
    path = rng.choice(["plan", "plan", ""]) if rng.random() < 0.7 else rng.choice(PATHS)
    version = "HTTP/1.1" if rng.random() < 0.7 else rng.choice(VERSIONS)
    lines = [f"{method} /{token}/{path} {version}"]
    lines += [f"Host: {host}"] if rng.random() < 0.9 else []
    length = str(len(body)) if rng.random() < 0.6 else rng.choice(LENGTHS)
    lines += [f"Content-Length: {length}"] if rng.random() < 0.9 else []
    lines += rng.sample(HEADERS, rng.choice([0, 0, 0, 0, 1, 2]))
    lines += [f"X-{number}: a" for number in range(rng.choice([0] * 15 + [150]))]
    end = rng.choice(["\r\n", "\r\n", "\r\n", "\n"])
    text = end.join(lines).encode("utf-8", "surrogatepass") + 2 * end.encode() + body
    if rng.random() < 0.1:
        text = text[: rng.randrange(len(text))]
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    return text


def findings(seed: int, count: int) -> list[str]:
    """Return what so many requests have found."""
    found = []
    with served() as there:
        said = there.said()
        names = {path.name for path in there.folder.iterdir()}
        for number in range(count):
            rng = random.Random(f"{seed}/{number}")
            answer = there.send(request(rng, there), answered=rng.random() < 0.9)
            status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
            if status and status[1][:1] == b"5" and status[1] != b"501" and status[1] != b"505":
                found.append(f"{number}: status {status[1].decode()}")
            if (now := there.said()) != said:
                found.append(f"{number}: on stderr: {now[len(said) :][-300:]}")
                said = now
            if there.process.poll() is not None:
                found.append(f"{number}: the server ended with {there.process.returncode}")
                break
            if number % 10 == 9 and b'"busy"' not in there.request():
                found.append(f"{number}: the server does not answer any more")
        new = {path.name for path in there.folder.iterdir()} - names
        found += [f"a file was written: {name}" for name in sorted(new)]
    return found


def main() -> int:
    """Print what was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    found = findings(args.seed, args.count)
    print(json.dumps({"requests": args.count, "findings": found}))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
