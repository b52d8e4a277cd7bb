"""Stdout has the results alone, whatever C libraries print to descriptor 1."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOISE = """
import ctypes, highspy, os, sys

class Loud(highspy.Highs):
    def __init__(self, *rest):
        super().__init__(*rest)
        ctypes.CDLL(None).puts(b"a banner that C holds back")
        os.write(1, b"a banner\\n")

highspy.Highs = Loud
"""
"""A HiGHS that prints wherever it is constructed, as one of its versions does."""
GPT2 = ("plan", "gpt2", "--cluster", "4xa100-sxm-40gb", "--seq-len", "1024", "--global-batch", "64")
DEMO = ("plan", "demo-4m", "--cluster", "local:2", "--global-batch", "16")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code of which stdout is a pipe, as a program that reads the answer has it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def command(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return run(
        f"{before}\nimport sys\nfrom meshwright import cli\nsys.exit(cli.main({list(words)}))"
    )


@pytest.mark.long("exact")
@pytest.mark.parametrize("words", [(*DEMO, "--solver", "ilp"), DEMO], ids=["ilp", "exact"])
def test_json_is_all_of_stdout_with_a_solver_that_prints(words: tuple[str, ...]) -> None:
    done = command(*words, "--json", before=NOISE)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["model"]["name"] == "demo-4m"


@pytest.mark.matrix
def test_a_solver_that_prints_is_silent_in_python_too() -> None:
    done = run(
        f"{NOISE}\nfrom meshwright import commands\nfrom meshwright.cli.options import Solver\n"
        "commands.plan('demo-4m', 'local:2', global_batch=16, solver=Solver.ILP)\n"
        "print('only this')"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "only this\n"


def test_what_any_other_library_prints_goes_to_stderr() -> None:
    code = (
        "import ctypes, os, subprocess, sys\n"
        "from meshwright.planner.system.stdout_guard import results_apart\n"
        "libc = ctypes.CDLL(None)\n"
        "with results_apart():\n"
        "    libc.puts(b'held back by C')\n"
        "    os.write(1, b'written at once\\n')\n"
        "    subprocess.run(['echo', 'of a child'], check=True)\n"
        "    print('{}')\n"
        "print('after')\n"
        "libc.puts(b'C again')\n"
    )

    done = run(code)

    assert done.stdout == "{}\nafter\nC again\n"
    assert sorted(done.stderr.splitlines()) == ["held back by C", "of a child", "written at once"]


@pytest.mark.parametrize("closed", ["os.close(1)", "sys.stdout = None", "sys.stdout.close()"])
def test_without_a_stdout_a_command_still_ends(closed: str) -> None:
    load = "import os, sys\nfrom meshwright.planner.system.stdout_guard import results_apart"
    code = f"{load}\n{closed}\n"

    done = run(code + "with results_apart(): pass\nos.write(2, b'done')\nos._exit(0)")

    assert done.stderr == "done"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "demo-4m", "--cluster", "local:2", "--global-batch", "0"),
        ("plan", "no-such", "--cluster", "1xrtx-4090"),
        (*DEMO, "--fix", "tp=3"),
        ("solve", "/dev/null"),
        ("compare", "nowhere.yaml", "neither.yaml"),
        ("validate", "/dev/null"),
        ("catalog", "nonsense"),
        ("plan", "--no-such-option"),
    ],
    ids=" ".join,
)
def test_a_failure_under_json_is_one_object_on_stdout(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    from meshwright import cli

    code = cli.main([*words, "--json"])

    output = capfd.readouterr()
    assert code in (1, 2)
    assert json.loads(output.out)["error"]["status"] == code
    assert output.err


def test_the_solver_is_constructed_in_one_place() -> None:
    constructed = {
        str(file.relative_to(ROOT))
        for package in ("planner", "runtime", "profiler", "meshwright")
        for file in (ROOT / package).rglob("*.py")
        if re.search(r"\bhighs(?:py)?\b.*\(|HiGHS\(", text := file.read_text(), re.IGNORECASE)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node).rpartition(".")[2] in ("Highs", "HiGHS")
    }

    assert constructed == {"planner/solver/highs.py"}


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_an_installation_without_constraints_prints_json_alone(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    binary = tmp_path / "env" / "bin"
    subprocess.run(
        [binary / "pip", "install", "-q", "--no-compile", ROOT], check=True, cwd=tmp_path
    )

    for words in ((*GPT2, "--solver", "ilp"), GPT2):
        done = subprocess.run(
            [binary / "meshwright", *words, "--json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["plan"]["model"]["name"] == "gpt2"
