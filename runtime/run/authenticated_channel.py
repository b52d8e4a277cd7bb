"""Messages between two nodes that know one secret: each is authenticated, none can be replayed.

Both sides send a greeting with a nonce of their own.  Keys, one for each direction, come from the
secret and both nonces, so what was recorded of one connection is worthless on another.  A message
is JSON, with its length before it and behind it a code over the direction, its number, length and
bytes:

    greeting    MAGIC  nonce (32 bytes)
    message     length (8 bytes)  JSON  HMAC-SHA256 (32 bytes)
    content     pieces of 1 MiB, the last one shorter, each with its code behind it

How long content is, a message before it has said.

Messages are authenticated, not encrypted: who can listen on the network reads them.  The secret
itself never travels.  Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.planner.errors import LaunchError

MAGIC = b"meshwright-1\n"
NONCE_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
LENGTH = struct.Struct("!Q")
CODE_BYTES = 32
MAX_INTRODUCTION_BYTES = 4096
"""Most bytes of the first message, which comes from anybody."""
MAX_MESSAGE_BYTES = 2**30
"""Most bytes of a message from a node that knows the secret."""
SECRET = "MESHWRIGHT_SECRET"
SECRET_FILE = "MESHWRIGHT_SECRET_FILE"
PIECE_BYTES = 2**20
MIN_SECRET = 16
MAX_SECRET = 4096


class Unauthentic(ValueError):  # noqa: N818 - reads as the sentence that it is
    """A message is not from somebody with the secret; the text says why."""


class Channel:
    """One side of a connection, which it owns.

    `greeting` is sent first, then the other side's is `meet`, then messages go both ways.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, serves: bool) -> None:
        self.connection = connection
        self.greeting = MAGIC + secrets.token_bytes(NONCE_BYTES)
        self._secret, self._serves = secret, serves
        self._sent = self._received = 0
        self._keys = {True: b"", False: b""}

    def meet(self, greeting: bytes) -> None:
        """Take the other side's greeting; from here on messages can be sent and received."""
        if not greeting.startswith(MAGIC):
            raise Unauthentic("it does not speak as a node of a job does")
        both = (self.greeting, greeting) if self._serves else (greeting, self.greeting)
        self._keys = {
            serves: hmac.digest(self._secret, b"%d" % serves + b"".join(both), hashlib.sha256)
            for serves in (True, False)
        }

    def send(self, data: Any) -> None:
        """Send a message."""
        text = json.dumps(data).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise LaunchError(f"a message to another node has {len(text)} bytes; that is too much")
        code = self._code(self._serves, self._sent, text)
        self._sent += 1
        self.connection.sendall(LENGTH.pack(len(text)) + text + code)

    def receive(self, *, limit: int = MAX_MESSAGE_BYTES, until: float | None = None) -> Any:
        """Wait for a message, for ever or until a moment of time.monotonic(), and return it."""
        length = checked_length(exactly(self.connection, LENGTH.size, until=until), limit)
        return self.open_message(exactly(self.connection, length + CODE_BYTES, until=until))

    def open_message(self, sealed: bytes | bytearray) -> Any:
        """Return what a message says, given all of it behind its length."""
        text, code = bytes(sealed[:-CODE_BYTES]), bytes(sealed[-CODE_BYTES:])
        if not hmac.compare_digest(code, self._code(not self._serves, self._received, text)):
            raise Unauthentic("it does not know this job's secret")
        self._received += 1
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unauthentic(f"what it says is not JSON ({error})") from None

    def send_content(self, content: memoryview) -> None:
        """Send bytes, whose number the other side knows."""
        for at in range(0, len(content), PIECE_BYTES):
            piece = content[at : at + PIECE_BYTES]
            self.connection.sendall(piece)
            self.connection.sendall(self._code(self._serves, self._sent, piece))
            self._sent += 1

    def content(self, size: int, *, until: float | None = None) -> Iterator[bytes]:
        """Receive this number of bytes, piece by piece, each authentic."""
        for at in range(0, size, PIECE_BYTES):
            piece = exactly(self.connection, min(PIECE_BYTES, size - at), until=until)
            code = exactly(self.connection, CODE_BYTES, until=until)
            if not hmac.compare_digest(code, self._code(not self._serves, self._received, piece)):
                raise Unauthentic("what it sends is not what it says")
            self._received += 1
            yield piece

    def _code(self, serves: bool, number: int, text: bytes | memoryview) -> bytes:
        digest = hmac.new(self._keys[serves], LENGTH.pack(number), hashlib.sha256)
        digest.update(LENGTH.pack(len(text)))
        digest.update(text)
        return digest.digest()

    def introduce(self, introduction: Any, *, until: float) -> Any:
        """Greet the side that serves, say who this is, and return what it answers."""
        self.meet(exactly(self.connection, GREETING_BYTES, until=until))
        self.connection.sendall(self.greeting)
        self.send(introduction)
        return self.receive(limit=MAX_INTRODUCTION_BYTES, until=until)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def checked_length(head: bytes | bytearray, limit: int) -> int:
    """Return the length that stands before a message.

    >>> checked_length(LENGTH.pack(12), 4096)
    12
    """
    (length,) = LENGTH.unpack(head)
    if length > limit:
        raise Unauthentic(f"it announces a message of {length} bytes; {limit} are allowed")
    return int(length)


def exactly(connection: socket.socket, count: int, *, until: float | None = None) -> bytes:
    """Wait for a number of bytes and return them; memory is taken as they come."""
    parts, left = [], count
    while left:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(min(left, 2**20))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def job_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret that all nodes of a job share.

    It is the text of MESHWRIGHT_SECRET, or that of the file MESHWRIGHT_SECRET_FILE; without either,
    that of `secret` in the user's configuration folder, which is made if it is not there: nodes of
    a cluster usually share the home folder.
    """
    secret, named = environment.get(SECRET), environment.get(SECRET_FILE)
    if secret:
        return _long_enough(os.fsencode(secret).strip(), SECRET)
    if named:
        return _read(Path(named))
    home = environment.get("XDG_CONFIG_HOME") or "~/.config"
    file = Path(home, "meshwright", "secret")
    try:
        file = file.expanduser()
        if not file.exists():
            _make_secret(file)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"{file}: cannot be written ({error}); the nodes of a job share a secret: set {SECRET} "
            f"or {SECRET_FILE} to the same on all of them"
        ) from None
    return _read(file)


def new_secret() -> str:
    """Return a secret that nobody guesses."""
    return secrets.token_urlsafe(32)


def without_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for processes that need not know the secret."""
    return {name: value for name, value in environment.items() if name != SECRET}


def _make_secret(file: Path) -> None:
    """Make a secret that appears whole, once, even if several nodes make it at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".secret.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(new_secret() + "\n")
    try:
        os.link(temporary, file)
    except FileExistsError:
        pass  # another node was first
    finally:
        temporary.unlink()


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(MAX_SECRET + 1)
    except OSError as error:
        raise LaunchError(f"{file}: the secret cannot be read: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise LaunchError(f"{file}: others may read this secret; chmod 600 it, or make a new one")
    return _long_enough(text.strip(), str(file))


def _long_enough(secret: bytes, place: str) -> bytes:
    if not MIN_SECRET <= len(secret) <= MAX_SECRET:
        raise LaunchError(
            f"{place}: has a secret of {len(secret)} bytes; give {MIN_SECRET} to {MAX_SECRET} that "
            "nobody guesses, as `openssl rand -hex 32` prints them"
        )
    return secret
