"""Notebooks of `examples/`: their cells run in order, each with the text that it prints.

`python -m tests.notebooks` runs them and writes what their cells print.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def outputs(notebook: dict[str, Any]) -> list[str]:
    """Return the stored text of each cell of code."""
    return [
        "".join(line for output in cell["outputs"] for line in output["text"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def run(notebook: dict[str, Any]) -> list[str]:
    """Return what each cell of code prints, its last expression too, as Jupyter shows it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        *statements, last = ast.parse("".join(cell["source"])).body
        with contextlib.redirect_stdout(io.StringIO()) as text:
            if not isinstance(last, ast.Expr):
                statements.append(last)
            exec(compile(ast.Module(statements, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                if value is not None:
                    print(value)
        printed.append(text.getvalue())
    return printed


def main() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = json.loads(path.read_text())
        texts = iter(run(notebook))
        for count, cell in enumerate(
            (cell for cell in notebook["cells"] if cell["cell_type"] == "code"), start=1
        ):
            lines = next(texts).splitlines(keepends=True)
            cell["execution_count"] = count
            cell["outputs"] = (
                [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
            )
        path.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
