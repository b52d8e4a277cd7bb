"""JSON Schemas of the documents, for editors: `python -m meshwright.planner.schemas [FOLDER]`.

A field's description is the docstring below it.  Sources are read for it here alone: types that
read them at import (`use_attribute_docstrings`) take seconds of every start.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from meshwright.planner.catalog.imports import Rents
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import Document, Part, schema, write_text
from meshwright.planner.documents.framework import Framework
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.profile import Profile
from meshwright.planner.solver.problem_document import Problem
from meshwright.planner.whatif.study import Study

DOCUMENTS: tuple[type[Document], ...] = (
    ModelGraph,
    ClusterSpec,
    Profile,
    Plan,
    Prediction,
    Certificate,
    Problem,
    Study,
    Rents,
    Framework,
)
FOLDER = Path("meshwright/schemas")


def texts() -> dict[str, str]:
    """Return the text of every schema by its file name."""
    return {
        str(cls.schema_file): json.dumps(described_schema(cls), indent=2, sort_keys=True) + "\n"
        for cls in DOCUMENTS
    }


def described_schema(cls: type[Document]) -> dict[str, Any]:
    """Return the JSON Schema of a document type with the meaning of every field."""
    result = schema(cls)
    definitions = result.get("$defs", {})
    for part in parts_of(cls):
        place = result if part is cls else definitions.get(part.__name__, {})
        for form in (place, *place.get("anyOf", ())):
            for name, field in form.get("properties", {}).items():
                if meaning := meanings(part).get(name):
                    field["description"] = meaning
    if cls is ClusterSpec:
        _allow_names_of_the_catalogue(result)
    return result


def _allow_names_of_the_catalogue(cluster: dict[str, Any]) -> None:
    """Let a group name its accelerator, and leave out what the catalogue then fills in."""
    group = cluster["$defs"]["DeviceGroup"]
    figures = group["properties"]["accelerator"]
    reference = {"$ref": figures.pop("$ref")}
    figures["anyOf"] = [{"type": "string"}, reference]
    group["required"] = ["accelerator", "devices_per_node"]
    cluster["required"].remove("tiers")


def parts_of(cls: type[Part]) -> tuple[type[Part], ...]:
    """Return a type and all types of its fields that have fields, each once, outermost first."""
    parts = [cls]
    for part in parts:
        for field in part.model_fields.values():
            inner = dict.fromkeys(_parts_in(field.annotation))
            parts.extend(part for part in inner if part not in parts)
    return tuple(parts)


def _parts_in(annotation: object) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts_in(inner)


def meanings(cls: type[Part]) -> dict[str, str]:
    """Return the docstrings of a type's fields, inherited ones too, each as one line.

    >>> meanings(ClusterSpec)["name"]
    'Name of the cluster.'
    """
    lines: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Part):
            lines |= _docstrings(base)
    return {name: line for name, line in lines.items() if name in cls.model_fields}


@cache
def _docstrings(cls: type[Part]) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    lines = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                lines[name] = " ".join(text.split())
    return lines


def main(folder: Path = FOLDER) -> None:
    """Write every schema to a folder."""
    for name, text in texts().items():
        write_text(text, folder / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
