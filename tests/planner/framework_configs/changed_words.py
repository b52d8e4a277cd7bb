"""Configurations of every reader with one word added, dropped, renamed or given another value."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import yaml

from benchmarks.inputs_read import Input, inputs
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.framework_configs.configuration import FRAMEWORKS, configuration
from meshwright.planner.framework_configs.import_plan import READERS
from meshwright.planner.framework_configs.readers.shell import is_script
from tests.planner.framework_configs import public_configurations as public
from tests.planner.framework_configs.test_export_oracles import MODEL, written

NEW = "unheard_of_word"
KINDS = ("add", "drop", "rename", "revalue")
TREES = ("megatron-bridge", "deepspeed", "accelerate", "transformers", "nanotron", *public.TUNING)
FLAGS = ("megatron", "slurm")
PUBLISHED: dict[str, list[public.Row]] = {
    "megatron": public.MEGATRON,
    "megatron-bridge": public.MEGATRON_BRIDGE,
    "torchtitan@0.2": public.TORCHTITAN,
    "torchtitan": public.TORCHTITAN_PYTHON,
    "deepspeed": public.DEEPSPEED,
    "accelerate": public.ACCELERATE,
    "transformers": public.TRANSFORMERS,
    "nanotron": public.NANOTRON,
    "fsdp": public.FSDP,
    **public.TUNING,
}


class Base(NamedTuple):
    """A configuration as it is known."""

    of: str
    text: str
    cluster: str
    model: str | None
    files: dict[str, str]


class Change(NamedTuple):
    """One word of a configuration changed; `others` give the same word other values."""

    kind: str
    key: str
    text: str
    others: tuple[str, ...]


def _reader_of(entry: Input) -> str | None:
    """Return the reader by which an input is read: a script is read by its command."""
    if entry.reader is None or entry.reader in FLAGS:
        return entry.reader
    return "slurm" if is_script(entry.text) else entry.reader


@lru_cache
def bases(of: str) -> list[Base]:
    """Return known configurations of a reader: published, retyped, and what we write."""
    found = [
        Base(of, row.text, row.cluster, row.model, {})
        for row in PUBLISHED.get(of, [])
        if row.model is None or not row.model.startswith("{")
    ]
    found += [
        Base(of, entry.text, entry.cluster, entry.model, dict(entry.files))
        for entry in inputs()
        if _reader_of(entry) == of
        and entry.refused is None
        and not entry.values
        # A word in a branch that is not taken, or of a command that trains nothing, says nothing.
        and not (of in FLAGS and re.search(r"\b(case|if|swift infer)\b", entry.text))
    ]
    if of in FRAMEWORKS and of in READERS:
        for wide, _ in written(of)[:4]:
            devices = wide.mesh.devices
            cluster = f"{devices}xh100-sxm-80gb"
            cluster = cluster if devices <= 8 else f"{devices // 8}x8xh100-sxm-80gb"
            machine = resolve_cluster(cluster)
            if machine.devices == devices:
                plan = wide.model_copy(update={"cluster": cluster})
                found.append(Base(of, configuration(plan, MODEL, of, machine), cluster, "", {}))
    return found


def changes(base: Base, rng: random.Random) -> Change | None:
    """Return one change of a configuration, None where it has no such place."""
    kind = rng.choice(KINDS)
    if base.of in TREES or "MODEL_ARGS" in base.text:
        return _of_tree(base, kind, rng)
    if base.of in FLAGS:
        return _of_flags(base, kind, rng)
    return _of_lines(base, kind, rng)


def other_values(value: Any) -> list[Any]:
    """Return other values in the place of one; words are ones that nobody knows."""
    return [new for new in _values(value) if new != value]


def _values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1, value + 1, 4 * value or 3, 1]
    if isinstance(value, float):
        return [value / 2 or 0.5, value / 3]
    if isinstance(value, list):
        return [[*value, NEW], value[:-1]]
    return [NEW]


def _sections(data: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections of a document by their paths."""
    if isinstance(data, dict):
        yield path, data
        for key, value in data.items():
            yield from _sections(value, f"{path}{key}.")


def _of_tree(base: Base, kind: str, rng: random.Random) -> Change | None:
    write = json.dumps if base.text.lstrip().startswith("{") else _yaml_text

    def text(change: Callable[[dict[str, Any], str], None]) -> str:
        data = yaml.safe_load(base.text)
        change(dict(_sections(data))[path], key)
        return write(data)

    sections = [(path, part) for path, part in _sections(yaml.safe_load(base.text)) if part]
    path, section = rng.choice(sections)
    key = rng.choice(list(section))
    if kind == "add":
        return Change(kind, path + NEW, text(lambda part, _: part.update({NEW: True})), ())
    if kind == "rename":
        if section[key] is None:
            return None
        new = f"{key}_{NEW}"
        renamed = text(lambda part, old: part.update({new: part.pop(old)}))
        return Change(kind, path + new, renamed, ())
    value = section[key]
    if isinstance(value, dict) or value is None:
        return None
    others = [
        text(lambda part, same, new=new: part.update({same: new})) for new in other_values(value)
    ]
    if kind == "drop":
        return Change(kind, path + key, text(lambda part, old: part.pop(old)), tuple(others))
    return Change(kind, path + key, rng.choice(others), ()) if others else None


def _yaml_text(data: Any) -> str:
    return str(yaml.safe_dump(data, sort_keys=False))


_FLAG = re.compile(r"(?<=[\s(])--([A-Za-z][\w-]*)((?:[ =]+(?!--)[\w.+,/-]+)?)")


def _of_flags(base: Base, kind: str, rng: random.Random) -> Change | None:
    # Comments, and commands that do not train.
    passed = re.finditer(r"^(#|python eval\.py).*$", base.text, re.MULTILINE)
    comments = [span.span() for span in passed]
    found = [
        match
        for match in _FLAG.finditer(base.text)
        if not any(first <= match.start() < last for first, last in comments)
    ]
    if not found:
        return None
    match = rng.choice(found)
    before, behind = base.text[: match.start()], base.text[match.end() :]
    name, value = match[1], match[2].lstrip(" =")
    if kind == "add":
        new = NEW.replace("_", "-")
        return Change(kind, new, f"{before}--{new} {match[0]}{behind}", ())
    if kind == "rename":
        new = f"{name}-{NEW}"
        return Change(kind, new, f"{before}--{new}{match[2]}{behind}", ())
    values = other_values(_plain(value)) if value else ["false"]
    others = [f"{before}--{name} {new}{behind}" for new in values]
    if kind == "drop":
        return Change(kind, name, before + behind, tuple(others))
    return Change(kind, name, rng.choice(others), ()) if others else None


def _plain(text: str) -> Any:
    value = yaml.safe_load(text)
    try:
        return value if not isinstance(value, str) else float(value)
    except ValueError:
        return value


_LINE = re.compile(r"^( *)((?:config\.)?[\w.]+)( = )(.+)$", re.MULTILINE)
_KEYWORD = re.compile(r"(?<=[(\s])()(\w+)(=)([^,()\s]+)")
_HEADER = re.compile(r"^\[([\w.]+)\]$", re.MULTILINE)


def _of_lines(base: Base, kind: str, rng: random.Random) -> Change | None:
    """Change `key = value` of TOML or Python, or a keyword."""
    form = _KEYWORD if base.of == "torchtitan" and rng.random() < 0.5 else _LINE
    found = list(form.finditer(base.text))
    match = rng.choice(found) if found else None
    if match is None or "(" in match[4] or match[2] in _OF_CODE:
        return None
    before, behind = base.text[: match.start()], base.text[match.end() :]
    indent, name, sign, value = match.groups()
    headers = [header[1] + "." for header in _HEADER.finditer(before)]
    section = headers[-1] if headers and base.of == "torchtitan@0.2" else ""
    path = section + name.removeprefix("config.")
    key = name.rpartition(".")[2]
    if kind == "add":
        new = name.replace(key, NEW) if "." in name else NEW
        between = ", " if form is _KEYWORD else "\n"
        added = f"{before}{indent}{new}{sign}{_TRUE[base.of]}{between}{match[0]}{behind}"
        return Change(kind, path.replace(key, NEW), added, ())
    if kind == "rename":
        new = f"{name}_{NEW}"
        return Change(kind, f"{path}_{NEW}", f"{before}{indent}{new}{sign}{value}{behind}", ())
    python = base.of in ("torchtitan", "fsdp")
    try:
        plain = ast.literal_eval(value) if python else json.loads(value)
    except (ValueError, SyntaxError):
        return None
    texts = [repr(new) if python else json.dumps(new) for new in other_values(plain)]
    others = [f"{before}{indent}{name}{sign}{new}{behind}" for new in texts]
    if kind == "drop":
        return Change(kind, path, before + behind.lstrip(", "), tuple(others))
    return Change(kind, path, rng.choice(others), ()) if others else None


_OF_CODE = ("mesh", "settings", "adam", "matrices", "vectors", "lr", "betas", "eps")
_TRUE = {"torchtitan": "True", "fsdp": "True", "torchtitan@0.2": "true"}
