"""Configurations that others complete, by Hydra's list of defaults.

An entry names a file in a folder beside the configuration, and the section that it fills; later
entries go before earlier ones (https://hydra.cc/docs/advanced/defaults_list).  Nothing is run.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import named_file

_MOST_FILES = 60


def compose(
    data: Mapping[str, Any], surroundings: ScriptEnvironment | None, of: str
) -> dict[str, Any]:
    """Return settings with those of the files that `defaults` names.

    DocumentError where a file is not there: it decides what the run takes.
    """
    left = [_MOST_FILES]
    return _with_files(dict(data), "", surroundings, of, left)


def _with_files(
    data: dict[str, Any],
    folder: str,
    surroundings: ScriptEnvironment | None,
    of: str,
    left: list[int],
) -> dict[str, Any]:
    entries = data.pop("defaults", None)
    if not isinstance(entries, list):
        return data
    result: dict[str, Any] = {}
    is_merged = False
    for entry in entries:
        if entry == "_self_":
            _merge(result, data)
            is_merged = True
            continue
        for place, sections in _places_of(entry, folder):
            left[0] -= 1
            if left[0] < 0:
                raise DocumentError(
                    of, f"names more than {_MOST_FILES} files by 'defaults'; give the whole of them"
                )
            _, text = named_file("defaults", f"{place}.yaml", surroundings)
            inside = _with_files(
                limits.settings(text, of), posixpath.dirname(place), surroundings, of, left
            )
            for section in reversed(sections):
                inside = {section: inside}
            _merge(result, inside)
    if not is_merged:
        _merge(result, data)
    return result


def _places_of(entry: object, folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the files of an entry without their ending, and the sections that each fills."""
    key, options = next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", entry)
    *words, group = str(key).split() or [""]
    if words == ["override"] and group.startswith("hydra/"):  # its own plugins
        return
    if "override" in words:
        raise DocumentError(
            "defaults", f"has '{key:.60}', which is not followed; give the composed configuration"
        )
    for option in options if isinstance(options, list) else [options]:
        if option is None:
            continue
        if not isinstance(option, str):
            raise DocumentError("defaults", f"has {entry!r:.60}; an entry is GROUP: NAME")
        path, _, package = (group or option).partition("@")
        name = option.removesuffix(".yaml") if group else ""
        place = posixpath.normpath(posixpath.join(folder, path.removesuffix(".yaml"), name))
        usual = path if group and ".." not in path else ""
        parts = (package or usual).replace("/", ".").split(".")
        yield place.lstrip("/"), [part for part in parts if part not in ("", *_PACKAGES)]


_PACKAGES = ("_here_", "_global_")
"""Words for a place that is no section."""


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        inside = into.get(key)
        if isinstance(inside, dict) and isinstance(value, dict):
            _merge(inside, value)
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value
