"""Frameworks, accelerators, exporters and loggers of other packages, by their entry points.

A package names them in its `pyproject.toml`; `docs/how-to/extend.md` says what each is:

    [project.entry-points."meshwright.frameworks"]
    ours = "our_package:FRAMEWORK"

They are used by name, as the catalogue's own are; no document makes one load that is not installed,
and none takes the place of something that is there already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple, Protocol, TypeVar

from meshwright.planner.documents.document import nearest, plain
from meshwright.planner.errors import DocumentError

GROUPS = ("frameworks", "accelerators", "exporters", "loggers")
OFF = "MESHWRIGHT_PLUGINS"
"""Environment variable that disables all plugins when it is 0."""


class _Entry(Protocol):
    @property
    def aliases(self) -> tuple[str, ...]: ...


E = TypeVar("E", bound=_Entry)


class Plugin(NamedTuple):
    """One entry point of an installed package."""

    kind: str
    """Kind of the plugin, a member of GROUPS."""
    name: str
    package: str
    version: str
    value: str
    """Location of the object, `module:object`."""


@cache
def plugins(kind: str) -> Mapping[str, Plugin]:
    """Return the plugins of a kind in installed packages, by name; nothing of them is loaded.

    DocumentError where two packages add the same name.

    >>> plugins("frameworks").keys() & {"native"}
    set()
    """
    if os.environ.get(OFF) == "0":
        return {}
    entries: dict[str, Plugin] = {}
    for point in metadata.entry_points(group=f"meshwright.{kind}"):
        package, version = ("", "") if point.dist is None else (point.dist.name, point.dist.version)
        plugin = Plugin(kind, point.name, package, version, point.value)
        before = entries.setdefault(point.name, plugin)
        if before.package != package:
            raise DocumentError(
                "plugins",
                f"{before.package} and {package} both add '{point.name}' to {kind}; uninstall one",
            )
    return entries


def load_plugin(kind: str, name: str) -> Any:
    """Return the object that a plugin names; DocumentError names its package if it cannot be had.

    >>> load_plugin("loggers", "absent")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    meshwright...DocumentError: loggers: no installed package adds 'absent'; none adds any
    """
    registered = plugins(kind)
    if name not in registered:
        which = nearest(name, list(registered)) if registered else "none adds any"
        raise DocumentError(kind, f"no installed package adds '{name:.60}'; {which}")
    plugin = registered[name]
    try:
        return metadata.EntryPoint(name, plugin.value, f"meshwright.{kind}").load()
    except Exception as error:
        raise _unusable(plugin, f"{type(error).__name__}: {error}") from error


def installed_entries(
    kind: str, catalogue: Mapping[str, E], build: Callable[[str, dict[str, Any]], E]
) -> dict[str, E]:
    """Return the entries of plugins in YAML files beside `catalogue`; `build` makes each of data.

    DocumentError names the package of what cannot be read, or has a name or alias of another.
    """
    result: dict[str, E] = {}
    for name, plugin in plugins(kind).items():
        file = load_plugin(kind, name)
        try:
            data = plain(file.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise DocumentError(
                    "",
                    "its file is no mapping of keys to values; "
                    "write a mapping, or uninstall the package",
                )
            entry = build(name, data)
        except DocumentError as error:
            raise _unusable(plugin, str(error)) from error
        except Exception as error:
            raise _unusable(plugin, f"{plugin.value} is no file: {type(error).__name__}") from error
        others = {**catalogue, **result}
        taken = {word.lower() for at, entry in others.items() for word in (at, *entry.aliases)}
        for word in (name, *entry.aliases):
            if word.lower() in taken:
                raise _unusable(plugin, f"there is '{word:.60}' already; take another name")
        result[name] = entry
    return result


def _unusable(plugin: Plugin, why: str) -> DocumentError:
    """Return the error of a plugin, with the way to go on without it."""
    return DocumentError(
        f"plugin {plugin.name}",
        f"of package {plugin.package} {plugin.version} cannot be used: {why}. "
        f"Set {OFF}=0 to go on without plugins",
    )
