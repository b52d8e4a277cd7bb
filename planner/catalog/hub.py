"""Models by the names of the Hugging Face hub: `owner/name`, whose config.json is a few kB.

The file is in the hub's cache on this machine, or `huggingface_hub` fetches it there where that is
installed and no setting asks to stay offline (`--offline`, HF_HUB_OFFLINE).  Nothing but that file
is fetched, and no code that comes with a model is run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from meshwright.planner.documents.document import is_file, read_text
from meshwright.planner.errors import DocumentError

CONFIG = "config.json"
HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
VARIANT = re.compile(r"[-_](?:instruct|chat|base|it|pt|hf)(?=[-_]|$)", re.IGNORECASE)
"""Part of a name that tells apart models of one shape by their training after the first."""
CONNECTION_S = 5.0
YES = ("1", "on", "yes", "true")


@dataclass(frozen=True, slots=True)
class FetchedConfig:
    """A configuration that this process has fetched."""

    model: str
    file: Path
    size_bytes: int

    def __str__(self) -> str:
        """Return the fetched file, its origin and its place."""
        return (
            f"fetched {CONFIG} of {self.model} from {endpoint()} ({self.size_bytes:,} bytes): "
            f"{self.file}"
        )


FETCHED: list[FetchedConfig] = []
"""Configurations that this process has fetched, in order."""


def is_hub_name(text: str) -> bool:
    """Return True if a text has the form of a hub's name.

    >>> is_hub_name("Qwen/Qwen2.5-7B"), is_hub_name("llama-3.1-8b"), is_hub_name("a/b/c")
    (True, False, False)
    """
    return HUB_NAME.fullmatch(text) is not None and ".." not in text


def plain_name(text: str) -> str:
    """Return a model's name without the suffix of its later training.

    >>> plain_name("mistralai/Mixtral-8x7B-Instruct-v0.1"), plain_name("google/gemma-2-9b-it")
    ('mistralai/Mixtral-8x7B-v0.1', 'google/gemma-2-9b')
    """
    return VARIANT.sub("", text)


CONVERTED = re.compile(r"[-_](?:mcore|megatron)(?=[-_]|$)", re.IGNORECASE)
"""Part of the name of a folder whose weights are in Megatron's format."""


def shape_name(text: str) -> str:
    """Return the name of the models of one shape, of a model's name or its folder.

    >>> shape_name("/models/Meta-Llama-3.1-8B-Instruct"), shape_name("Qwen3_8B-Base-mcore")
    ('llama-3.1-8b', 'qwen3-8b')
    """
    last = CONVERTED.sub("", text.rstrip("/").rpartition("/")[2])
    return plain_name(last).lower().replace("_", "-").removeprefix("meta-")


_OFFLINE: ContextVar[bool] = ContextVar("offline", default=False)


@contextmanager
def offline(asked: bool) -> Iterator[None]:
    """Fetch nothing inside of this context if `asked`."""
    token = _OFFLINE.set(asked or _OFFLINE.get())
    try:
        yield
    finally:
        _OFFLINE.reset(token)


def is_offline() -> bool:
    """Return True if nothing may be fetched."""
    if _OFFLINE.get():
        return True
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in YES for name in switches)


def cache_folder() -> Path:
    """Return the hub's cache folder, by its own rules."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _unreachable() -> str | None:
    """Return why no connection to the hub can be made; its own client would retry for long."""
    from urllib.request import getproxies  # noqa: PLC0415 - loads TLS, which most commands need none of

    address = urlsplit(endpoint())
    if getproxies() or address.hostname is None:
        return None
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), timeout=CONNECTION_S).close()
    except OSError as error:
        return f"{address.hostname}: {error}"
    return None


def cached_config(name: str) -> Path | None:
    """Return the config.json of a model in the hub's cache; None where there is none.

    Among several revisions, `main` counts, else the one fetched last.
    """
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if is_file(main):
        file = folder / "snapshots" / Path(read_text(main).strip()).name / CONFIG
        if is_file(file):
            return file
    files = [file for file in folder.glob(f"snapshots/*/{CONFIG}") if is_file(file)]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def config_file(name: str) -> Path:
    """Return the config.json of a model of the hub, fetched if need be; DocumentError if not."""
    cached = cached_config(name)
    if cached is not None:
        return cached
    lacks = f"'{name}' is no model of the catalogue and not in {cache_folder()}"
    if is_offline():
        raise DocumentError("", f"{lacks}, and nothing is fetched offline; give its config.json")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DocumentError(
            "", f"{lacks}; install huggingface_hub, which fetches it, or give its config.json"
        )
    if (trouble := _unreachable()) is not None:
        raise DocumentError("", f"{lacks}, and cannot be fetched: {trouble}; give its config.json")
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - no other name needs it

    try:
        file = Path(hf_hub_download(name, CONFIG))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DocumentError(
            "",
            f"{lacks}, and cannot be fetched: {type(error).__name__}: {reason:.200}; "
            "give its config.json",
        ) from error
    FETCHED.append(FetchedConfig(name, file, file.stat().st_size))
    return file
