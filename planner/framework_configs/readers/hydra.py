"""Configurations that others complete, by Hydra's list of defaults.

An entry names a file in a folder beside the configuration, and the section that it fills; later
entries go before earlier ones (https://hydra.cc/docs/advanced/defaults_list).  Nothing is run.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
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
        place, package = _place_of(entry, folder)
        if place is None:
            continue
        left[0] -= 1
        if left[0] < 0:
            raise DocumentError(
                of, f"names more than {_MOST_FILES} files by 'defaults'; give the whole of them"
            )
        _, text = named_file("defaults", f"{place}.yaml", surroundings)
        inside = _with_files(
            limits.settings(text, of), posixpath.dirname(place), surroundings, of, left
        )
        for section in reversed(package):
            inside = {section: inside}
        _merge(result, inside)
    if not is_merged:
        _merge(result, data)
    return result


def _place_of(entry: object, folder: str) -> tuple[str | None, list[str]]:
    """Return the file of an entry without its ending, and the sections that it fills."""
    if isinstance(entry, dict) and len(entry) == 1:
        [(key, option)] = entry.items()
    else:
        key, option = "", entry
    words = str(key).split()
    if "override" in words:  # of Hydra's own plugins
        return None, []
    group, _, package = (words[-1] if words else "").partition("@")
    if option is None and group and isinstance(entry, dict):
        return None, []
    if not isinstance(option, str):
        return None, []
    if not words:
        option, _, package = option.partition("@")
    sections = [part for part in (package or group).split(".") if part and part != "_here_"]
    if not words and not package:
        sections = []
    if ".." in group:
        sections = [part for part in package.split(".") if part]
    place = posixpath.normpath(posixpath.join(folder, group, option.removesuffix(".yaml")))
    return place.lstrip("/"), sections


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
