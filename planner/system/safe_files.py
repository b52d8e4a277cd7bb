"""Files written into folders that others may have filled: a run, a checkpoint, a cache.

Such a folder can hold a link, a pipe or a device under each name that is written there.  A file
here is opened without following a link, in its own folder or below it, and nothing of it is
truncated before it is known to be a regular file with one name; or it is written beside and takes
the name, which leaves what the name led to as it is.  tests/test_writes.py names every other place
that writes, with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from meshwright.planner.errors import DocumentError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SYSTEM = ("/dev/", "/proc/")
"""Folders whose links lead to open files of a process: `/dev/stdout`."""


def open_below(path: Path, *, within: Path, append: bool = False) -> BinaryIO:
    """Open a file to be written, empty unless `append`; `within` is the folder that a user named.

    DocumentError where the file, or a folder between, is a link or nothing that a run writes.
    """
    *folders, name = path.relative_to(within).parts
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        folder = os.open(within, _FOLDER)
        try:
            for part in folders:
                inner = _inner(folder, part, path)
                os.close(folder)
                folder = inner
            with contextlib.suppress(FileNotFoundError):
                _check(os.stat(name, dir_fd=folder, follow_symlinks=False), path)
            handle = os.open(name, flags | os.O_APPEND * append, 0o666, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check(os.fstat(handle), path)
            if not append:
                os.ftruncate(handle, 0)
        except BaseException:
            os.close(handle)
            raise
        return os.fdopen(handle, "ab" if append else "wb", buffering=0)
    except (OSError, ValueError) as error:
        raise _unwritable(error, path) from error


def replace_file(text: str, path: Path, *, private: bool = False) -> None:
    """Write a text file whole or not at all: beside, then under its name.

    A link is replaced, not followed.  A pipe or device that a user names is written to as it is, a
    pipe only while it has a reader.
    """
    try:
        if _is_stream(path):
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(handle, True)
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            return
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            if not private:
                Path(temporary).chmod(0o666 & ~_umask())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise _unwritable(error, path) from error


def path_from_here(path: Path | str) -> Path:
    """Path as a user writes it: relative if it lies in the current folder."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def folder_within(within: Path, name: str, *, emptied_of: str | None = None) -> Path:
    """Make a folder below one that a user named, or find it there, if it is no link.

    Files in it whose names match the pattern `emptied_of` are deleted, others are left.
    """
    path = within / name
    try:
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise _foreign(path, "is a symbolic link")
        for old in path.glob(emptied_of) if emptied_of is not None else ():
            old.unlink()
    except OSError as error:
        raise _unwritable(error, path) from error
    return path


def folder_beside(path: Path) -> Path:
    """Return a new, hidden folder beside a path, to be renamed to it when it is whole."""
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new."))
    folder.chmod(0o777 & ~_umask())
    return folder


def _umask() -> int:
    """Return the permissions that this process's new files lack."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _inner(folder: int, name: str, path: Path) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _foreign(path, f"lies in '{name}', which is a link or no folder") from error
        raise


def _check(status: os.stat_result, path: Path) -> None:
    """Refuse what is no file of a run's own."""
    if stat.S_ISLNK(status.st_mode):
        raise _foreign(path, "is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise _foreign(path, "is no regular file")
    if status.st_nlink > 1:
        raise _foreign(path, "is a file that has other names too (hard links)")


def _is_stream(path: Path) -> bool:
    """Return True if a path names a pipe or device, itself or by the system's name for one."""
    system = str(path.absolute()).startswith(_SYSTEM)
    try:
        mode = path.stat(follow_symlinks=system).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode)


def _foreign(path: Path, what: str) -> DocumentError:
    return DocumentError("", f"{what}; remove it, or name another folder", file=str(path))


def _unwritable(error: Exception, path: Path) -> DocumentError:
    if isinstance(error, DocumentError):
        return error
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DocumentError("", f"cannot be written: {reason}", file=str(path))
