"""The site's reference, from types and commands: `python -m meshwright.cli.reference [FOLDER]`."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic.fields import FieldInfo

import meshwright
from meshwright import cli
from meshwright.api.defaults import Defaults
from meshwright.cli.examples import EXAMPLES
from meshwright.planner.documents.document import Document, Part, write_text
from meshwright.planner.schemas import DOCUMENTS, meanings, parts_of

FOLDER = Path("docs/reference")
DOCUMENT_FILES = {
    "model": Path("plans/llama-3.1-8b-on-8xh100/model.yaml"),
    "cluster": Path("plans/llama-3.1-8b-on-8xh100/cluster.yaml"),
    "profile": Path("plans/demo-4m-on-local/profile.yaml"),
    "plan": Path("plans/llama-3.1-8b-on-8xh100/plan.yaml"),
    "prediction": Path("plans/llama-3.1-8b-on-8xh100/prediction.yaml"),
    "certificate": Path("plans/llama-3.1-8b-on-8xh100/certificate.yaml"),
    "problem": Path("docs/reference/problem.md"),
    "study": Path("plans/studies/05-a100-or-h100-for-13b.yaml"),
    "list of rents": Path("planner/catalog/prices.yaml"),
    "framework": Path("examples/plugin/meshwright_example/framework.yaml"),
}
"""Files of the repository whose first lines are the examples of documents."""
EXAMPLE_LINES = 16
PAGES_URL = "https://github.com/meshwright/meshwright/blob/main/docs/"
LINKS = {
    "First plan, a tutorial": "tutorial/first-plan.md",
    "Plan": "how-to/plan.md",
    "Launch": "how-to/launch.md",
    "Train your script": "how-to/train-your-script.md",
    "Export to another framework": "how-to/export.md",
    "Describe your cluster": "how-to/describe-your-cluster.md",
    "Choose hardware": "how-to/choose-hardware.md",
    "Commands": "reference/commands.md",
    "Documents": "reference/documents.md",
    "Python": "reference/python.md",
}
"""Pages of the site that `llms.txt` links."""
LLMS_HEAD = """# Meshwright

> Meshwright finds the fastest way to train a model on a cluster that fits in memory: mesh, \
sharding, pipeline stages, micro-batches, recomputation. It proves how far a plan is from the \
optimum. It launches the plan or writes it as another framework's configuration.

Install: `pip install "meshwright[torch]"`; without `[torch]` it only plans.

- Model: a name of `meshwright catalog models` (`llama-3.1-8b`), a folder or file with a Hugging \
Face `config.json`, or `file.py:factory` that returns a module.
- Cluster: `8xh100-sxm-80gb` (a node of 8 devices), `4x8xh100-sxm-80gb` (4 nodes of 8), `local` \
(this machine), or a file `cluster.yaml`.
- Output: results go to stdout, messages to stderr. `--json` prints one JSON object and nothing \
else.
- Exit status: 0 done; 1 the user must act, and the message says how; 2 wrong usage; 75 \
interrupted and saved, so run the same command again; 130 Ctrl-C.
"""
LONGEST_DEFAULT = 40
UNITS = {
    "_s_per_byte": "s per byte",
    "_s_per_parameter": "s per parameter",
    "bytes_per_s_per_device": "bytes per s",
    "bytes_per_s": "bytes per s",
    "bits_per_s": "bits per s",
    "bytes_per_parameter": "bytes per parameter",
    "_g_per_kwh": "g per kWh",
    "_bytes": "bytes",
    "_flops": "FLOP",
    "_usd": "$",
    "_tokens": "tokens",
    "_seq_len": "tokens",
    "_document_len": "tokens",
    "_days": "days",
    "_months": "months",
    "_hours": "h",
    "_years": "years",
    "_kg": "kg",
    "_tb": "TB",
    "_w": "W",
    "_w_per_device": "W",
    "_s": "s",
}
"""Units by the end of a field's name, longer ends first."""


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
    group: Any = typer.main.get_command(cli.app())
    for name, command in group.commands.items():
        yield from ("", f"## {name}", "", inspect.cleandoc(command.help), "")
        yield from ("| option | what it is |", "|---|---|")
        for parameter in command.params:
            names = f"`{parameter.name}`"
            if parameter.param_type_name == "option":
                names = ", ".join(f"`{option}`" for option in parameter.opts)
            yield f"| {names} | {_cell(parameter.help)} |"
        yield from ("", "```", *EXAMPLES[name], "```")


def llms_text() -> str:
    """Return `llms.txt`: the tool on one page, for assistants that use it."""
    group: Any = typer.main.get_command(cli.app())
    commands = [
        f"- {name}: {inspect.cleandoc(command.help).splitlines()[0]} `{EXAMPLES[name][0]}`"
        for name, command in group.commands.items()
    ]
    links = [f"- [{title}]({PAGES_URL}{page})" for title, page in LINKS.items()]
    return "\n".join((LLMS_HEAD, "## Commands", "", *commands, "", "## Pages", "", *links, ""))


def _documents() -> Iterator[str]:
    """Yield each document with an example and all fields of it and of its parts."""
    yield "# Documents"
    yield ""
    yield "YAML or JSON, read safely: no tags, no aliases, bounded sizes, no unknown keys. "
    yield "Seconds, bytes and FLOPs are SI units. `meshwright/schemas/` of an installation has the "
    yield "JSON Schemas. The first line of each file that Meshwright writes names its schema, and "
    yield "an editor with a YAML language server completes the fields."
    documents: tuple[type[Document], ...] = (*DOCUMENTS, Defaults)
    described: set[type[Part]] = set()
    for cls in documents:
        yield from ("", f"## {cls.kind_of_document}", "", inspect.getdoc(cls) or "", "")
        yield from ("```yaml", *_example(cls), "```")
        for part in parts_of(cls):
            if part in described:
                continue
            described.add(part)
            if part is not cls:
                yield from ("", f"### {part.__name__}", "", inspect.getdoc(part) or "")
            yield ""
            yield from _fields(part)


def _fields(part: type[Part]) -> Iterator[str]:
    """Yield the table of a type's fields."""
    yield from ("| field | meaning | unit | default | type |", "|---|---|---|---|---|")
    lines = meanings(part)
    for name, field in part.model_fields.items():
        kinds = (
            base.__annotations__.get(name)
            for base in part.__mro__
            if name in vars(base).get("__annotations__", {})
        )
        kind = _cell(str(next(kinds, field.annotation)))
        meaning = _cell(lines.get(name, ""))
        yield f"| `{name}` | {meaning} | {unit_of(name)} | {_default(field)} | `{kind}` |"


def unit_of(name: str) -> str:
    """Return the unit that a field's name ends with, or nothing.

    >>> unit_of("latency_s"), unit_of("usd_per_device_hour"), unit_of("nodes")
    ('s', '$ per device hour', '')
    """
    if price := re.search(r"usd_per_(\w+)$", name):
        return f"$ per {price[1].replace('_', ' ')}"
    return next((unit for end, unit in UNITS.items() if f"_{name}".endswith(end)), "")


def _default(field: FieldInfo) -> str:
    """Return the cell of a field's default."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Part):
        return "its defaults"
    text = json.dumps(value, default=lambda part: part.model_dump(mode="json"))
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see the schema"


def _example(cls: type[Document]) -> list[str]:
    """Return the first lines of a document of a kind."""
    if cls is Defaults:
        return ["cluster: 8xh100-sxm-80gb", "framework: megatron", "precision: bf16"]
    path = DOCUMENT_FILES[cls.kind_of_document]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = text.partition("```yaml\n")[2].partition("```")[0]
    lines = text.splitlines()
    more = ["# ..."] if len(lines) > EXAMPLE_LINES else []
    return lines[:EXAMPLE_LINES] + more


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
    """Write every page to a folder, and `llms.txt` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        write_text(text, folder / name)
    write_text(llms_text(), folder.parent / "llms.txt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
