"""Program that `--hosts` starts on a host: it describes the host, then runs one command.

    <- {"version", "files": {path: checksum}, "devices"}    a line of stdin: what has to be here
    -> MARK {"wrong": [...]}                                a line of stdout
    <- {"secret", "arguments", "stays"}                     the command, once all have answered
    <- {"signal": "SIGTERM"}                                for the command, any number of times

The secret comes by stdin alone: nobody sees it among the arguments of processes.  Where whoever
started this is gone without a word, the command goes on if it `stays`, and has a notice otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import IO, Any

from meshwright.runtime.core import checksums
from meshwright.runtime.run.authenticated_channel import SECRET
from meshwright.runtime.run.rank_exit import end_with_parent

MARK = "meshwright-host "
"""Prefix of the one line that is ours; a shell's greeting may come before it."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL")
CHUNK_BYTES = 65536
COMMAND = (sys.executable, "-P", "-m", "meshwright")
"""Command before the arguments of the order."""


def version() -> str:
    """Return the version of this meshwright."""
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "of no installation"


def wrong_here(asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences from what is needed.

    >>> list(wrong_here({"version": version(), "files": {}, "devices": 0}))
    []
    """
    if asked["version"] != version():
        yield f"has meshwright {version()}, and {asked['version']} is wanted"
    for path, checksum in asked["files"].items():
        try:
            digests = checksums.of_file(Path(path).resolve())
        except OSError as error:
            yield f"{path}: {error.strerror or error}"
        else:
            if digests != checksum:
                yield f"{path}: is another file than where the command was given"
    if util.find_spec("torch") is None:
        yield "has no torch"
    elif asked["devices"]:
        from meshwright.runtime.launch.preflight import cuda_devices  # noqa: PLC0415 - it takes a second

        if (here := cuda_devices()) < asked["devices"]:
            yield f"has {here} devices, and the plan needs {asked['devices']} of each node"


def main() -> int:
    """Serve one command, whose exit status this has."""
    line = sys.stdin.readline()
    if not line:
        return 1
    answer = {"wrong": list(wrong_here(json.loads(line)))}
    print(f"{MARK}{json.dumps(answer)}", flush=True)
    line = sys.stdin.readline()
    return _run(json.loads(line)) if line else 1


def _run(command: Mapping[str, Any]) -> int:
    process = subprocess.Popen(
        [*COMMAND, *command["arguments"]],
        env={**os.environ, SECRET: command["secret"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one thread until here
    )
    assert process.stdout is not None and process.stderr is not None
    pumps = [
        threading.Thread(target=_hand_on, args=pair)
        for pair in ((process.stdout, 1), (process.stderr, 2))
    ]
    for pump in pumps:
        pump.start()
    heeds = threading.Thread(target=_heed, args=(process, command["stays"]), daemon=True)
    heeds.start()
    code = process.wait()
    for pump in pumps:
        pump.join()
    return code if code >= 0 else 128 - code


def _hand_on(source: IO[bytes], descriptor: int) -> None:
    """Copy the command's output; drop it once there is no listener, so that it continues."""
    listens = True
    while chunk := os.read(source.fileno(), CHUNK_BYTES):
        while listens and chunk:
            try:
                chunk = chunk[os.write(descriptor, chunk) :]
            except OSError:
                listens = False


def _heed(process: subprocess.Popen[bytes], stays: bool) -> None:
    """Send the requested signals to the command."""
    for line in sys.stdin:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            name = json.loads(line)["signal"]
            if name in SIGNALS:
                process.send_signal(signal.Signals[name])
    if not stays:
        process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
