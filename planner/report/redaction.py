"""Text that leaves a company: without names of hosts, addresses and paths."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable

PATH, HOST, USER = "<path>", "<host>", "<user>"
_CODE = re.compile(r"(?:/[^\s/'\"():,;]+)+/([\w.-]+\.py)\b")
_PATH = re.compile(r"(?<![\w<])(?:~|\.{1,2})?(?:/[^\s/'\"(),;:]+)+/?|[A-Za-z]:\\[^\s'\"]+")
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*)?::"
    r"(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*)?(?![\w:])"
)
_PORT = re.compile(r"\b[A-Za-z][\w-]*(?:\.[\w-]+)*(?=:\d{2,5}\b)")
_DOMAIN = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|com|net|org|io|edu|cloud)\b")


def redact(text: str, names: Iterable[str] = ()) -> str:
    r"""Return text without hosts, addresses and paths; of code the file's name stays.

    `names` are further words that must not stand in it.

    >>> redact('rank 1 at node7.cluster.local:29500, File "/home/ann/my/train.py", line 3')
    'rank 1 at <host>:29500, File "train.py", line 3'
    >>> redact("10.1.2.3 wrote /data/secret/run-1; see ~/runs/a on fe80::1", ["run"])
    '<host> wrote <path>; see <path> on <host>'
    """
    text = _CODE.sub(lambda found: found[1], text)
    text = _PATH.sub(PATH, text)
    text = _ADDRESS.sub(HOST, text)
    text = _DOMAIN.sub(HOST, text)
    text = _PORT.sub(lambda found: found[0] if found[0].endswith("py") else HOST, text)
    for name in sorted({*names, socket.gethostname(), socket.gethostname().split(".")[0]}):
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", HOST, text)
    return text
