"""Cache of profiles on disk: finished ones by content, and the parts of one cut short.

    CACHE/profiles/                     CACHE is $MESHWRIGHT_CACHE, or ~/.cache/meshwright
    └── 3f9c.../                        one for each model, job, budget, machine and software
        ├── profile.json                when it is whole
        └── rank-00000.json             what a rank has measured of it so far

The key is a digest of everything that could change a figure except the minute in which it was
measured; the sources of the code that runs and measures are part of it.  Nothing here imports
torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.planner.catalog.machine_figures import cache_folder
from meshwright.planner.documents.document import write_text
from meshwright.planner.errors import DocumentError
from meshwright.profiler.start_ranks import versions

SOFTWARE = ("torch", "transformers", "numpy", "meshwright")
PACKAGES = ("profiler", "runtime")


def folder_of(content: dict[str, Any]) -> Path:
    """Return the folder in which the profile with this content is cached."""
    parent = cache_folder() / "profiles"
    whole = {**content, "software": versions(SOFTWARE), "sources": _sources()}
    text = json.dumps(whole, sort_keys=True)
    return parent / hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _sources() -> str:
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def load(file: Path) -> Any:
    """Return a file's data, or None if it is missing or incomplete."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def save(data: Any, file: Path) -> bool:
    """Write a file, whole or not at all; a cache that cannot be written is no error."""
    try:
        write_text(json.dumps(data), file)
    except DocumentError:
        return False
    return True


class Parts:
    """Measurements of one rank so far, by name; a run that was interrupted reuses them."""

    def __init__(self, folder: str | None, rank: int, agree: Callable[[float], float]) -> None:
        self._file = Path(folder) / f"rank-{rank:05}.json" if folder else None
        self._agree = agree
        """Returns the least of all ranks' values."""
        parts = load(self._file) if self._file else None
        self._parts: dict[str, Any] = parts if isinstance(parts, dict) else {}

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def everywhere_stored(self, name: str) -> bool:
        """Return True if every rank has a part; all ranks call it together."""
        return self._agree(1.0 if name in self._parts else 0.0) > 0

    def store(self, name: str, part: Any) -> None:
        """Keep a part."""
        self._parts[name] = part
        if self._file is not None:
            save(self._parts, self._file)

    def once(self, name: str, measure: Callable[[], Any], *, keep: bool = True) -> Any:
        """Return a part, measured if any rank lacks it.  Plain data; all ranks call it together.

        Values that may change from one day to the next must not be cached.
        """
        if not keep:
            return measure()
        if not self.everywhere_stored(name):
            self.store(name, measure())
        return self._parts[name]
