"""The site's reference, from types and commands: `python -m meshwright.cli.reference [FOLDER]`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import meshwright
from meshwright import cli
from meshwright.api.defaults import Defaults
from meshwright.cli.examples import EXAMPLES
from meshwright.planner.documents.document import Document, write_text
from meshwright.planner.schemas import DOCUMENTS

FOLDER = Path("docs/reference")


def texts() -> dict[str, str]:
    """Return the text of every page by its file name."""
    pages = {"commands": _commands(), "documents": _documents(), "python": _python()}
    return {f"{name}.md": "\n".join(lines).rstrip() + "\n" for name, lines in pages.items()}


def _commands() -> Iterator[str]:
    """Yield each command with its arguments, options and examples."""
    yield "# Commands"
    yield ""
    yield "Results go to stdout, messages to stderr. `--json` prints one JSON object and nothing "
    yield 'else, `{"error": {"kind", "message", "status", "file", "path"}}` where a command fails. '
    yield "Exit 0: done; 1: the user must act; 2: wrong usage; 75: interrupted and saved, run the "
    yield "same command again; 130: Ctrl-C ended it; a traceback is a bug."
    group: Any = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        yield from ("", f"## {name}", "", inspect.cleandoc(command.help), "")
        yield from ("| option | what it is |", "|---|---|")
        for parameter in command.params:
            names = f"`{parameter.name}`"
            if parameter.param_type_name == "option":
                names = ", ".join(f"`{option}`" for option in parameter.opts)
            yield f"| {names} | {_cell(parameter.help)} |"
        yield from ("", "```", *EXAMPLES[name], "```")


def _documents() -> Iterator[str]:
    """Yield each document with the fields of its first level."""
    yield "# Documents"
    yield ""
    yield "YAML or JSON, read safely: no tags, no aliases, bounded sizes, no unknown keys. "
    yield "Seconds, bytes and FLOPs are SI units. `docs/schemas/` has whole schemas for editors."
    documents: tuple[type[Document], ...] = (*DOCUMENTS, Defaults)
    for cls in documents:
        yield from ("", f"## {cls.kind_of_document}", "", inspect.getdoc(cls) or "", "")
        yield from ("| field | required | type |", "|---|---|---|")
        for name, field in cls.model_fields.items():
            required = "yes" if field.is_required() else ""
            kinds = (
                base.__annotations__.get(name)
                for base in cls.__mro__
                if name in vars(base).get("__annotations__", {})
            )
            yield f"| `{name}` | {required} | `{_cell(str(next(kinds, field.annotation)))}` |"


def _python() -> Iterator[str]:
    """Yield every public name of the package with its signature and docstring."""
    yield "# Python"
    yield ""
    yield "`import meshwright` gives these; nothing is imported before it is used."
    for name in meshwright.__all__:
        value = getattr(meshwright, name)
        yield from ("", f"## {name}", "")
        if inspect.isfunction(value):
            yield from ("```", f"def {name}{inspect.signature(value)}: ...", "```", "")
        for paragraph in (inspect.getdoc(value) or "").split("\n\n"):
            example = paragraph.startswith(">>>")
            yield from ("```", paragraph, "```", "") if example else (paragraph, "")


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def main(folder: Path = FOLDER) -> None:
    """Write every page to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        write_text(text, folder / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
