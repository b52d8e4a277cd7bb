"""Imports go in one direction, and the planner lives without torch; contracts: pyproject.toml."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import networkx
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
LINE = ("planner", "runtime", "profiler", "meshwright")
HEAVY = {"torch", "transformers", "safetensors"}


@functools.cache
def imports_of(source: str, *, top_level_only: bool = False) -> tuple[ast.AST, ...]:
    """Return the statements that import, as several tests read them."""
    tree = ast.parse(source)
    nodes = tree.body if top_level_only else ast.walk(tree)
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imports(file: Path, *, top_level_only: bool = False) -> set[str]:
    names = set()
    for node in imports_of(file.read_text(), top_level_only=top_level_only):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_front_door_imports_torch_only_inside_a_call() -> None:
    offenders = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "meshwright").rglob("*.py")
        if imports(file, top_level_only=True) & HEAVY
    ]

    assert offenders == []


def test_planner_and_front_door_import_with_torch_unimportable() -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("planner", "meshwright")
        for file in sorted((ROOT / package).rglob("*.py"))
        if file.name != "__main__.py"
    ]
    code = (
        "import sys, importlib\n"
        "sys.modules.update(torch=None, transformers=None, safetensors=None)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


PRIVATE_AND_STABLE = {
    "torch._guards",
    "torch._subclasses",
    "torch._subclasses.fake_tensor",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
}
"""Where torch's own documentation and other libraries import from, equal for years."""


MAY_BE_PRIVATE = re.compile(
    r"torch[\w.]*\._|from\s+torch[\w.]*\s+import\s*(?:\([^)]*|[^\n]*)(?:\b_|\\)"
)
"""What stands in every file that imports a private name of torch, and in few others."""


def private_names(file: Path) -> set[str]:
    """Return what a file imports of torch that is not public."""
    source, found = file.read_text(), set()
    for node in imports_of(source) if MAY_BE_PRIVATE.search(source) else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module not in PRIVATE_AND_STABLE:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for name in found if name.startswith("torch.")}
    return {name for name in found if any(part.startswith("_") for part in name.split("."))}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "import os, torch.a._b as b",
        "from torch._C import a",
        "from torch.a import (\n    b,\n    _c,\n)",
        "def f():\n    from torch import _c",
        "from torch.a import \\\n    _c",
    ],
)
def test_private_names_of_torch_are_seen(source: str, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(source)

    assert private_names(tmp_path / "file.py")


def test_one_file_imports_private_names_of_torch() -> None:
    offenders = {
        str(file.relative_to(ROOT)): sorted(found)
        for package in ("runtime", "profiler", "meshwright", "benchmarks")
        for file in (ROOT / package).rglob("*.py")
        if file.name != "torch_internals.py" and (found := private_names(file))
    }

    assert offenders == {}


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("meshwright", exclude_type_checking_imports=True, cache_dir=None)
    edges = [
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    ]

    circles = networkx.strongly_connected_components(networkx.DiGraph(edges))

    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


def test_directions_of_imports_are_those_of_the_contracts(tmp_path: Path) -> None:
    assert lint_imports(cache_dir=str(tmp_path)) == 0


LIBRARIES_UNTYPED = [
    *("transformers.*", "huggingface_hub.*", "PIL.*", "torch._inductor.*", "torch._dynamo.*"),
    *("torch._functorch.*", "torch._higher_order_ops.*", "torch._export.*", "torch.export.*"),
    *("torch._numpy.*", "torch.ao.*", "torch.onnx.*", "torch.package.*"),
]
"""What mypy does not follow: inner parts of libraries, which take half of a first run."""


def test_types_are_checked_in_every_package() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]

    assert mypy["strict"] and mypy["packages"] == ["meshwright"]
    skipped = [table["module"] for table in mypy["overrides"] if "follow_imports" in table]
    assert skipped == [LIBRARIES_UNTYPED]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make check"


@pytest.mark.matrix
def test_solvers_are_loaded_where_they_are_used(tmp_path: Path) -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in LINE
        for file in sorted((ROOT / package).rglob("*.py"))
        if file.name != "__main__.py"
    ]
    plan = ROOT / "plans" / "demo-4m-on-local" / "plan.yaml"
    code = (
        "import sys, importlib\n"
        "from importlib.machinery import PathFinder\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('pulp', 'highspy'):\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from meshwright.cli import main\n"
        f"assert main(['launch', {str(plan)!r}, '--dry-run']) == 0\n"
        f"assert main(['show', {str(plan)!r}, '--html', {str(tmp_path / 'page.html')!r}]) == 0\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_class_name_stands_for_one_thing() -> None:
    """Another class needs another name, private ones too: who searches for one finds one."""
    places: dict[str, list[str]] = {}
    for package in LINE:
        for file in sorted((ROOT / package).rglob("*.py")):
            for name in re.findall(r"^class _?(\w+)", file.read_text(), re.MULTILINE):
                places.setdefault(name, []).append(str(file.relative_to(ROOT)))

    assert {name: files for name, files in places.items() if len(files) > 1} == {}
