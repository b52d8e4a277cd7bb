"""The version, which `--version` prints without loading any command."""

from __future__ import annotations


def version() -> str:
    """Return the output of `--version`."""
    from importlib import metadata  # noqa: PLC0415 - of this alone

    return f"meshwright {metadata.version('meshwright')}"
