"""Checksums: whether the files of a folder are those that were written.

A checksum is the SHA-256 of a file's bytes: `sha256:` and 64 hex digits.  It tells damage, not who
wrote a file.  Functions return what is wrong, beginning with the file's path, or None.  Files are
opened only where they are files: a link, pipe or device in a received folder is never followed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

_SEAL = re.compile(r'(?P<body>.*), "checksum": "(?P<checksum>sha256:[0-9a-f]{64})"\}\n', re.DOTALL)
NO_FILE = "is a link, folder or device; a checkpoint has files only"


def of_bytes(data: bytes) -> str:
    """Return the checksum of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def of_file(path: Path) -> str:
    """Return the checksum of a file."""
    with open_regular(path) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; OSError if it is anything else."""
    try:
        # Without O_NONBLOCK a pipe waits for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(NO_FILE) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(NO_FILE)
    return os.fdopen(handle, "rb")


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of all that a folder has."""
    return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}


def with_seal(text: str) -> str:
    """Return a JSON object's text with the checksum of all that stands before it as its last key.

    >>> with_seal('{"step": 3}')[:32]
    '{"step": 3, "checksum": "sha256:'
    """
    body = text.rstrip().removesuffix("}")
    return f'{body}, "checksum": "{of_bytes(body.encode())}"}}\n'


def seal_holds(text: str) -> bool:
    """Return whether a sealed text is as it was written, to the byte.

    >>> sealed = with_seal('{"step": 3}')
    >>> seal_holds(sealed), seal_holds(sealed.replace("3", "4", 1))
    (True, False)
    """
    match = _SEAL.fullmatch(text)
    return match is not None and of_bytes(match["body"].encode()) == match["checksum"]


def misplaced_file(folder: Path, sizes: Mapping[str, int], *, besides: str) -> str | None:
    """Return which file is missing, added, of another size or no file at all.

    `besides` is the file that has the list.
    """
    try:
        entries = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    except OSError as error:
        return f"{folder}: cannot be read: {error.strerror}"
    for name in sizes:
        if name not in entries:
            return f"{folder / name}: is missing"
    for name, seen in sorted(entries.items()):
        path = folder / name
        if name not in sizes and name != besides:
            return f"{path}: is none of the files that were written here"
        if not stat.S_ISREG(seen.st_mode):
            return f"{path}: {NO_FILE}"
        if name in sizes and seen.st_size != sizes[name]:
            return f"{path}: has {seen.st_size} bytes, and {sizes[name]} were written"
    return None


def differing(
    folder: Path, checksums: Mapping[str, str], names: Sequence[str], *, threads: int = 1
) -> str | None:
    """Return which of the named files has other bytes than those that were written."""

    def look(name: str) -> str | None:
        path = folder / name
        try:
            checksum = of_file(path)
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror or error}"
        if checksum == checksums[name]:
            return None
        wrote = checksums[name]
        return f"{path}: is damaged: its checksum is {checksum[:23]}, and {wrote[:23]} was written"

    with ThreadPoolExecutor(max(1, threads)) as workers:
        return next((problem for problem in workers.map(look, names) if problem), None)
