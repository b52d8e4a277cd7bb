"""Inputs written after public files and reports: what each should give, and what it gives.

python -m benchmarks.inputs_read > docs/results/inputs.md

Inputs are in `benchmarks/inputs/*.yaml`, retyped as the least that says the same; a file that one
names is beside it.  An input that is imported `gives` values of the plan, has words `named` as not
understood, and needs words `assumed`; or it is `refused` by a message that matches.  An input that
is planned or predicted is a `command`, whose answer `says` what matches.

silently wrong   a value is another one, and no word is named that could be the cause
wrong            the same, and the answer names such a word
crash            the answer is an error of ours
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.api import commands
from meshwright.cli import main
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import MeshwrightError

FOLDER = Path(__file__).parent / "inputs"


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input, and what it should give."""

    source: str
    group: str
    reader: str | None = None
    command: str | None = None
    cluster: str = "8xh100-sxm-80gb"
    model: str | None = None
    text: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    gives: Mapping[str, Any] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    understood: bool = False
    """No word is left that is not understood."""
    refused: str | None = None
    says: str | None = None
    later: bool = False
    """Written after the readers stood."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an input gives."""

    text: str
    differences: tuple[str, ...]
    kind: str
    """right, wrong, silently wrong or crash."""


def inputs() -> list[Input]:
    """Return all inputs, file by file."""
    found = []
    for file in sorted(FOLDER.glob("*.yaml")):
        for entry in yaml.safe_load(file.read_text()):
            values = {key: value for key, value in entry.items() if key != "from"}
            for key in ("named", "values"):
                values[key] = tuple(values.get(key, ()))
            found.append(Input(group=file.stem, reader=entry.get("from"), **values))
    return found


def value_of(plan: Plan, name: str) -> Any:
    """Return a value of a plan by its path; `recompute` is that of most blocks."""
    if name == "recompute":
        counts = Counter(
            item.recompute
            for stage in plan.stages
            for item in stage.layers
            if item.layer not in ("embedding", "head")
        )
        return counts.most_common(1)[0][0]
    value: Any = plan
    for part in (f"training.{name}" if name.startswith("lora.") else name).split("."):
        value = getattr(value, part, None)
    return list(value) if isinstance(value, tuple) else value


def reading(entry: Input) -> Reading:
    """Return what an input gives, held against what it should."""
    try:
        return _imported(entry) if entry.command is None else _answered(entry)
    except MeshwrightError as error:
        message = re.sub(r"\S*/input\b", "input", str(error))
        right = entry.refused is not None and re.search(entry.refused, message, re.DOTALL)
        differences = () if right else (f"is refused: {message}",)
        return Reading(
            text=f"refused: {message}", differences=differences, kind="right" if right else "wrong"
        )
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Reading(text=text, differences=(text,), kind="crash")


def _imported(entry: Input) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "input"
        file.write_text(entry.text)
        for name, text in entry.files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_text(text)
        imported = commands.import_plan(
            str(file),
            of=str(entry.reader),
            cluster=entry.cluster,
            model=entry.model,
            values=entry.values,
        )
    plan, words = imported.plan, imported.not_understood
    differences = [
        f"{name} is {value_of(plan, name)}, not {value}"
        for name, value in entry.gives.items()
        if value_of(plan, name) != value
    ]
    differences += [f"'{name}' is not named" for name in entry.named if name not in " ".join(words)]
    if entry.understood and words:
        differences.append(f"{', '.join(words)} should be understood")
    if entry.refused is not None:
        differences.append("is not refused")
    odds = imported.prediction.fit_probability
    if words and odds is not None and not 0.1 < odds < 0.9:
        differences.append(f"is certain ({odds}) beside words that were not understood")
    unnamed = [text for text in differences if "should be understood" not in text]
    kind = "right" if not differences else "silently wrong" if unnamed and not words else "wrong"
    shown = plan.layout.text()
    if words:
        shown += f"; not understood: {', '.join(words[:3])}" + " ..." * (len(words) > 3)
    return Reading(text=shown, differences=tuple(differences), kind=kind)


def _answered(entry: Input) -> Reading:
    """Run a command as a user would, and look for what it should say."""
    out, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in entry.files.items():
            Path(name).write_text(text)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(shlex.split(str(entry.command)))
    shown = out.getvalue() + errors.getvalue()
    wanted = entry.says if entry.refused is None else entry.refused
    is_there = wanted is None or re.search(wanted, shown, re.DOTALL) is not None
    differences = []
    if not is_there:
        differences.append(f"does not say {wanted!r}")
    if (code != 0) != (entry.refused is not None):
        differences.append(f"ends with {code}")
    lines = [line for line in shown.splitlines() if line.strip()]
    text = " / ".join(line.strip() for line in lines[:2])
    crashed = "Traceback" in shown or "is a bug" in shown
    kind = "crash" if crashed else "right" if not differences else "silently wrong"
    return Reading(text=text[:160], differences=tuple(differences), kind=kind)


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    every = [(entry, reading(entry)) for entry in inputs()]
    counts = Counter(result.kind for _, result in every)
    later = sum(entry.later for entry, _ in every)
    yield "# Inputs as people have them"
    yield ""
    yield (
        f"{len(every)} inputs written after public files and reports, retyped as the least that "
        f"says the same; {later} of them after the readers stood. Each says what it should give: "
        "values of the plan, words that must be named as not understood, or a refusal. "
        "An input is silently wrong where a value differs and no word is named."
    )
    yield ""
    yield "| right | wrong, and said | silently wrong | crashes |"
    yield "|---|---|---|---|"
    kinds = ("right", "wrong", "silently wrong", "crash")
    yield "| " + " | ".join(str(counts[kind]) for kind in kinds) + " |"
    yield ""
    yield "`python -m benchmarks.inputs_read > docs/results/inputs.md` writes this page from"
    yield "`benchmarks/inputs/*.yaml`."
    for group in dict.fromkeys(entry.group for entry, _ in every):
        yield ""
        yield f"## {group.replace('_', ' ').capitalize()}"
        yield ""
        yield "| after | read as | should give | gives | |"
        yield "|---|---|---|---|---|"
        for entry, result in every:
            if entry.group == group:
                yield _row(entry, result)


def _row(entry: Input, result: Reading) -> str:
    wanted = [f"{name} {value}" for name, value in entry.gives.items()]
    wanted += [f"names {', '.join(entry.named)}"] * bool(entry.named)
    wanted += ["all understood"] * entry.understood
    wanted += [f"says {entry.says}"] * (entry.says is not None)
    wanted += [f"refused: {entry.refused}"] * (entry.refused is not None)
    verdict = result.kind + (f": {'; '.join(result.differences)}" if result.differences else "")
    how = entry.reader or f"`{entry.command}`"
    cells = (entry.source, how, "; ".join(wanted), result.text[:200], verdict)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
