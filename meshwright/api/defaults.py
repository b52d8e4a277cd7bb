"""Defaults that a user sets once: cluster, framework, precision, prices.

The command line decides; else an environment variable (`MESHWRIGHT_CLUSTER`, ...), else the file
that `MESHWRIGHT_DEFAULTS` names (empty: none), else `~/.config/meshwright/defaults.yaml`.  Commands
report the defaults that they used.  Calls of the Python functions read none of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import ClassVar, cast, get_args

from meshwright.planner.catalog.expressions import full_names, locate_model
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.document import Document, is_file, nearest
from meshwright.planner.documents.units import Line
from meshwright.planner.errors import DocumentError

FILE = "MESHWRIGHT_DEFAULTS"
PATHS = ("cluster", "prices")
"""Values that may be files; a relative one may be beside the file of defaults."""


class Defaults(Document):
    """A user's own defaults of options; each is what the option of that name takes."""

    kind_of_document: ClassVar[str] = "file of defaults"

    cluster: Line | None = None
    """Default of `--cluster`."""
    framework: Line | None = None
    """Default of `--framework`."""
    precision: Precision | None = None
    """Default of `--precision`."""
    prices: Line | None = None
    """Default of `--prices`."""


class CommandDefaults:
    """Defaults of one command, and what it took from them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.notes: list[str] = []
        """Options that were not given, with their values and the sources of these."""

    def value_of(self, option: str, given: str | None) -> str | None:
        """Return the given value, else the user's default of an option, else None."""
        if given is not None:
            return given
        variable = f"MESHWRIGHT_{option.upper()}"
        value: str | None = self._environment.get(variable) or None
        if value is not None:
            self.notes.append(f"--{option} {value} ({variable})")
            return value
        value = getattr(self._file, option)
        if value is not None:
            if option in PATHS:
                value = locate_model(value, self._path)
            self.notes.append(f"--{option} {value} ({self._path})")
        return value

    def precision(self, given: Precision | None) -> Precision | None:
        """Return the precision that was given, or the user's default."""
        name = self.value_of("precision", given)
        precisions = get_args(Precision)
        if name is not None and name not in precisions:
            why = f"is '{name:.40}'; {nearest(name, list(precisions))}"
            raise DocumentError("MESHWRIGHT_PRECISION", why)
        return cast("Precision | None", name)

    def left_open(self, options: Mapping[str, tuple[object, object]]) -> None:
        """Note options that were not given, with what the command took for them."""
        open_ = [f"--{name} {taken}" for name, (given, taken) in options.items() if given is None]
        if open_:
            self.notes.append(f"{' '.join(open_)} (not given)")

    def abbreviated(self, clusters: str) -> None:
        """Note which accelerators the short names of a command's clusters were taken for."""
        self.notes += [f"{short} is {full}" for short, full in full_names(clusters).items()]

    @cached_property
    def _path(self) -> str:
        named = self._environment.get(FILE)
        if named is not None:
            return named
        home = self._environment.get("XDG_CONFIG_HOME") or "~/.config"
        try:
            return str(Path(home).expanduser() / "meshwright" / "defaults.yaml")
        except RuntimeError:  # no home folder
            return ""

    @cached_property
    def _file(self) -> Defaults:
        if not self._path or (FILE not in self._environment and not is_file(self._path)):
            return Defaults()
        return document.read(Defaults, self._path)


def of_user() -> CommandDefaults:
    """Return the defaults of whoever runs the command."""
    return CommandDefaults(os.environ)
