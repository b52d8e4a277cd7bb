"""Documents: YAML or JSON text to frozen, validated values, and back.

Reading is safe: plain YAML 1.2 scalars only, no tags, no aliases, bounded size, depth and count.
Whatever is wrong becomes one DocumentError with the path inside the file, the value seen and the
way out.
Writing is atomic: a file appears whole or not at all.
"""

from __future__ import annotations

import csv
import difflib
import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import one_line
from meshwright.planner.system.safe_files import open_below as opened_to_write
from meshwright.planner.system.safe_files import replace_file

SCHEMAS_URL = "https://raw.githubusercontent.com/meshwright/meshwright/main/meshwright/schemas/"
"""Folder of the JSON Schemas."""
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 40
MAX_COLUMNS = 1000
MAX_ROWS = 500_000
MAX_VALUES = 200_000
"""Largest number of keys and values of a document; reading takes up to 400 bytes for each."""
MAX_CELLS = 2_000_000
"""Largest number of cells of a table, each of whose rows is as long as its header."""

D = TypeVar("D", bound="Document")


def _end_at_the_first_wrong_item(schema: Any) -> None:
    """Let lists report no item after a wrong one: each finding takes a kilobyte."""
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list | tuple):
            _end_at_the_first_wrong_item(inner)
    if isinstance(schema, dict) and schema.get("type") in ("list", "tuple", "set", "frozenset"):
        schema["fail_fast"] = True


class Part(BaseModel):
    """A frozen piece of a document; unknown keys are errors that name the nearest known key."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), defer_build=True
    )

    @classmethod
    def usual_names(cls) -> Mapping[str, str]:
        """Return ways out for keys that others use, where no spelling leads to ours."""
        return {}

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        _end_at_the_first_wrong_item(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    hint = cls.usual_names().get(str(key)) or _near_fields(str(key), cls)
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key; {known}",
                        {"known": hint, "key": str(key)[:80]},
                    )
        return data


class Document(Part):
    """A part that is a whole file; `format` is the version of its types."""

    kind_of_document: ClassVar[str]
    schema_file: ClassVar[str | None] = None
    """Name of the file of `meshwright/schemas` with its JSON Schema; None: it has none."""
    not_digested: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that the digest leaves out."""
    format: Literal[1] = 1
    """Version of the document's types."""

    @property
    def digest(self) -> str:
        """Short content hash, equal for equal documents: `sha256:` and 16 hex digits."""
        data = self.model_dump(mode="json", exclude_none=True, exclude=set(self.not_digested))
        text = json.dumps(data, sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def parse(cls, text: str, *, file: str | None = None) -> Self:
        """Read the document from YAML or JSON text."""
        try:
            return cls.of(plain(text))
        except DocumentError as error:
            raise (error.in_file(file) if file else error) from error.__cause__

    @classmethod
    def of(cls, data: object) -> Self:
        """Validate plain data (dicts, lists, scalars)."""
        if not isinstance(data, dict):
            raise DocumentError(
                "",
                f"is {_shown_value(data)}; a {cls.kind_of_document} is a mapping of keys to values",
            )
        read, given = cls.model_fields["format"].default, data.get("format")
        if isinstance(given, int) and given != read:
            raise DocumentError(
                "format",
                f"is {_shown_value(given)}, and this version of Meshwright reads {read}; install "
                "the version that wrote the file",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise first_error(error) from error
        except RecursionError as error:
            raise DocumentError("", "is nested too deeply; write it flatter") from error

    def dump(self, *, defaults: bool = True) -> str:
        """Return the document as YAML, with its defaults or with explicit values alone.

        The first line names the schema, so that editors complete and check the fields.
        """
        data = self.model_dump(mode="json", exclude_none=True, exclude_unset=not defaults)
        data = {"format": self.format, **data}
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)
        return f"{schema_line(self.schema_file)}{text}" if self.schema_file else text


def schema_line(schema_file: str) -> str:
    """Return the comment that names a document's schema to editors."""
    return f"# yaml-language-server: $schema={SCHEMAS_URL}{schema_file}\n"


def read(cls: type[D], path: str | os.PathLike[str]) -> D:
    """Read a document of type `cls` from a file."""
    return cls.parse(read_text(path), file=str(path))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return True if there is such a file; a name that no file can have names none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long, or a null byte
        return False


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return True if there is such a folder."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return True if a path leads to anything."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def unreadable(error: Exception, path: str | os.PathLike[str]) -> DocumentError:
    """Return the message on a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DocumentError("", "is not there; name a file that exists", file=str(path))
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DocumentError("", f"cannot be read: {reason}", file=str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text; one clear error if it is missing, binary or too large."""
    try:
        return read_bytes(path, most=MAX_BYTES).decode("utf-8-sig")  # editors may put a mark first
    except UnicodeDecodeError as error:
        raise DocumentError("", "is not UTF-8 text; save it as UTF-8", file=str(path)) from error


def read_bytes(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Return a regular file's bytes, at most `most`.

    All that a user names is read here.
    """
    try:
        with open_regular_file(path) as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise unreadable(error, path) from error
    if len(data) > most:
        raise DocumentError("", f"has more than {bytes_text(most)}", file=str(path))
    return data


def open_regular_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or what a link to one leads to; OSError if it cannot be read.

    DocumentError for a pipe or device: it may never end, and opening one may wait for ever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise _irregular(path)


def refuse_irregular(folder: str | os.PathLike[str]) -> None:
    """Refuse pipes and devices in a folder that a library reads, and in those of one level more."""
    for parent, folders, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.exists() and not path.is_file():
                raise _irregular(path)
        if Path(parent) != Path(folder):
            folders.clear()


def _irregular(path: str | os.PathLike[str]) -> DocumentError:
    return DocumentError("", "is no regular file; write what it gives to one first", file=str(path))


def read_table(path: str | os.PathLike[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the header and the rows of a CSV file, every row with all of the header's columns.

    Cells are stripped; those that a row lacks are empty, those beyond the header are left out.
    """
    text = read_text(path)
    if text.count(",") > MAX_CELLS:
        raise _too_many_cells(path)
    try:
        lines = csv.reader(io.StringIO(text, newline=""))
        header = [name.strip() for name in next(lines, [])]
        if len(header) > MAX_COLUMNS:
            raise DocumentError(
                "header",
                f"has more than {MAX_COLUMNS} columns; leave out those that are not used",
                file=str(path),
            )
        rows: list[dict[str, str]] = []
        for line in lines:
            if len(rows) == MAX_ROWS:
                raise DocumentError(
                    "",
                    f"has more than {MAX_ROWS:,} rows; divide it into several tables",
                    file=str(path),
                )
            if (len(rows) + 1) * len(header) > MAX_CELLS:
                raise _too_many_cells(path)
            if line:
                cells = [cell.strip() for cell in line[: len(header)]]
                cells += [""] * (len(header) - len(cells))
                rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DocumentError("", f"is no CSV table: {error}", file=str(path)) from error
    return header, rows


def _too_many_cells(path: str | os.PathLike[str]) -> DocumentError:
    return DocumentError(
        "",
        f"has more than {MAX_CELLS:,} cells; divide it, or leave out columns that are not read",
        file=str(path),
    )


def write(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a document to a file, whole or not at all."""
    write_text(document.dump(), path)


def write_text(text: str, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write text to a file, whole or not at all; a device or pipe is written to as it is.

    Only its owner reads a file that is `private`.
    """
    replace_file(text, Path(path), private=private)


def json_line(part: Part) -> str:
    """Return a part as one line of JSON, its end too."""
    return json.dumps(part.model_dump(mode="json", exclude_none=True)) + "\n"


def append_line(part: Part, path: Path) -> None:
    """Add a part's line to a file, in one write so that a reader never sees half of it.

    OSError where the file has no room for all of it; none of it stays then.
    """
    line = json_line(part).encode()
    with opened_to_write(path, within=path.parent, append=True) as file:
        if (written := file.write(line)) < len(line):
            file.truncate(file.seek(0, os.SEEK_END) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def plain(text: str) -> object:
    """Return YAML or JSON text as dicts, lists and scalars, refusing whatever could do harm."""
    if len(text) > MAX_BYTES:
        raise DocumentError(
            "", f"has more than {MAX_BYTES >> 20} MiB; divide it, or leave out what is not used"
        )
    # The YAML reader counts what may have more.
    if _values(text, MAX_VALUES) <= MAX_VALUES and text.lstrip()[:1] in ("{", "["):
        try:
            return _json(text)
        except (ValueError, RecursionError):
            pass  # YAML in braces, or wrong: the YAML reader knows the place
    try:
        _refuse_harm(text)
        return yaml.load(text, Loader=_SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DocumentError(place, f"is not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise DocumentError("", f"is not YAML: {' '.join(str(error).split())}") from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise DocumentError("", f"is not YAML that can be read: {error}") from error


def json_data(text: str | bytes, *, most_values: int | None = MAX_VALUES) -> Any:
    """Return JSON as plain data: no deeper than MAX_DEPTH, with at most this number of values.

    None is for text whose bytes are few: 3 bytes of JSON take up to 72 in memory.  Raises
    DocumentError, without a file, for what is no JSON, too deep or too much.
    """
    try:
        whole = text.decode() if isinstance(text, bytes) else text
        if most_values is not None and _values(whole, most_values) > most_values:
            raise DocumentError(
                "",
                f"has more than {most_values:,} keys and values; "
                "divide it, or leave out what is not used",
            )
        data = json.loads(whole)
        _refuse_deep(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError("", f"is not JSON: {one_line(str(error))[:200]}") from error
    return data


def schema(cls: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema of a document type, for editors."""
    result = cls.model_json_schema()
    result["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return result


def path_text(location: tuple[int | str, ...]) -> str:
    """Return a place in a document as a person writes it.

    >>> path_text(("stages", 1, "layers", 3, "recompute"))
    'stages[1].layers[3].recompute'
    """
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return one_line(text)


def nearest(name: str, names: list[str]) -> str:
    """Return a way out for an unknown name: the nearest known one, or a few of them.

    >>> nearest("mbs", ["tp", "pp", "micro_batch"])
    "did you mean 'micro_batch'?"

    Names that share an ending alone are of other families.

    >>> nearest("minimax_text_01", ["gemma3_text", "minimax_m2"])
    "did you mean 'minimax_m2'?"
    >>> nearest("facebook-llama-3.1-8b", ["llama-3.1-8b", "llama-3.1-70b"])
    "did you mean 'llama-3.1-8b' or 'llama-3.1-70b'?"
    >>> nearest("dbrx", ["bert", "gpt2"])
    'known: bert, gpt2'
    """
    word = name.strip().lower()
    begun = [k for k in names if word and k.lower().startswith(word)]
    initials = {k: "".join(part[:1] for part in k.lower().split("_")) for k in names}
    begun += [k for k, letters in initials.items() if len(letters) > 1 and letters in word[:3]]
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    near = begun[:3] or [k for k in close if _is_of_family(word, k.lower())]
    if near:
        return "did you mean " + " or ".join(f"'{n}'" for n in near) + "?"
    return "known: " + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _is_of_family(word: str, name: str) -> bool:
    """Return whether the first part of a name is about a part of a word, or both are nearly one."""
    parts, (first, *others) = re.split(r"[-_.]", word), re.split(r"[-_.]", name)
    if len(parts) == 1 and not others:
        return _likeness(word, name) >= 0.6
    if len(parts) == 1 or not others or _likeness(word, name) >= 0.75:
        return True
    return any(_likeness(part, first) >= 0.5 for part in parts)


def _likeness(first: str, other: str) -> float:
    return difflib.SequenceMatcher(None, first, other).ratio()


class _SafeLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML with the scalars of YAML 1.2: no dates, no sexagesimals, `yes` is a word."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {_shown_value(key)} is not a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key}' appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what _Loader reads back; quotes all that YAML 1.1 or 1.2 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_SCALARS = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF))$",
        list("-+0123456789."),
    ),
)
for _tag, _pattern, _first in _SCALARS:
    _SafeLoader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)
# YAML 1.1 reads 010 as eight; a document's 010 is ten.
_SafeLoader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node))
)
_SafeLoader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(loader.construct_scalar(node).lower().replace(".inf", "inf")),
)


def _json(text: str) -> object:
    """Return JSON as plain data; ValueError for data that the YAML reader refuses too."""

    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key appears twice; leave one out")
        return result

    def constant(name: str) -> object:
        raise ValueError(f"{name} is no number of JSON; write a finite one")

    data: object = json.loads(text, object_pairs_hook=mapping, parse_constant=constant)
    _refuse_deep(data)
    return data


_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def _values(text: str, most: int) -> int:
    """Return how many keys and values JSON has, or a number that is not smaller and up to `most`.

    >>> _values('{"a": "b, c"}', 9), _values('{"a": "b, c"}', 3)
    (4, 3)
    """
    nodes = 1 + sum(text.count(mark) for mark in ",:{[")
    return nodes if nodes <= most else 1 + sum(_STRING.sub("", text).count(m) for m in ",:{[")


def _refuse_deep(data: object) -> None:
    """Refuse JSON of more levels than a document has; ValueError."""
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"is nested more than {MAX_DEPTH} deep; write it flatter")


def _refuse_harm(text: str) -> None:
    """Refuse aliases (they can multiply without bound), tags, depth and values without end."""
    depth = values = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        mark = event.start_mark
        assert mark is not None
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise DocumentError(place, "has a YAML alias (*); write the value out instead")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise DocumentError(place, f"has the YAML tag {tag}; documents hold plain data")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise DocumentError(place, f"is nested more than {MAX_DEPTH} deep; write it flatter")
        values += isinstance(event, yaml.NodeEvent)
        if values > MAX_VALUES:
            raise DocumentError(
                place, f"has more than {MAX_VALUES:,} keys and values; a document has fewer"
            )


def _near_fields(key: str, cls: type[BaseModel]) -> str:
    near = difflib.get_close_matches(key, list(cls.model_fields), n=1)
    return f"did you mean '{near[0]}'?" if near else _known_fields(cls)


def _known_fields(cls: type[BaseModel]) -> str:
    return "known keys: " + ", ".join(cls.model_fields)


def first_error(error: ValidationError) -> DocumentError:
    """Return pydantic's first finding as our error; the rest is counted."""
    try:
        findings = error.errors(include_url=False)
    except UnicodeEncodeError:  # pydantic cannot report a key that is no text
        return DocumentError("", "has a key with half of a surrogate pair; write characters whole")
    first = findings[0]
    location = tuple(first["loc"])
    context = first.get("ctx", {})
    if first["type"] == "unknown_key":
        message = first["msg"]
        location = (*location, str(context.get("key", "")))
    elif first["type"] == "missing":
        message = "is missing; give it a value"
    elif first["type"] in ("value_error", "assertion_error"):
        message = str(context.get("error", first["msg"]))
    else:
        message = f"is {_shown_value(first['input'])}; {first['msg'][:1].lower()}{first['msg'][1:]}"
    if len(findings) > 1:
        message += f" (and {len(findings) - 1} more)"
    return DocumentError(path_text(location), one_line(message))


def _shown_value(value: object) -> str:
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys that JSON has not, or no end
        text = object.__repr__(value)
    return text if len(text) <= 60 else text[:57] + "..."
