"""The packages import each other in one direction, and the planner lives without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINE = ("planner", "runtime", "profiler", "meshwright")
HEAVY = {"torch", "transformers", "safetensors"}


def imports(file: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(file.read_text())
    names = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", LINE)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    above = set(LINE[LINE.index(package) + 1 :])

    offenders = {
        str(file.relative_to(ROOT)): sorted(imports(file) & above)
        for file in (ROOT / package).rglob("*.py")
        if imports(file) & above
    }

    assert offenders == {}


def test_the_planner_never_imports_torch() -> None:
    offenders = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "planner").rglob("*.py")
        if imports(file) & HEAVY
    ]

    assert offenders == []


def test_the_front_door_imports_torch_only_inside_a_call() -> None:
    offenders = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "meshwright").rglob("*.py")
        if imports(file, top_level_only=True) & HEAVY
    ]

    assert offenders == []


def test_only_one_file_imports_pulp() -> None:
    users = [file.name for file in (ROOT / "planner").rglob("*.py") if "pulp" in imports(file)]

    assert users in ([], ["ilp.py"])


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


def private_names(file: Path) -> set[str]:
    """Return what a file imports of torch that is not public."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module not in PRIVATE_AND_STABLE:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for name in found if name.startswith("torch.")}
    return {name for name in found if any(part.startswith("_") for part in name.split("."))}


def test_one_file_imports_private_names_of_torch() -> None:
    offenders = {
        str(file.relative_to(ROOT)): sorted(found)
        for package in ("runtime", "profiler", "meshwright", "benchmarks")
        for file in (ROOT / package).rglob("*.py")
        if file.name != "torch_internals.py" and (found := private_names(file))
    }

    assert offenders == {}


def test_solvers_and_plots_are_loaded_where_they_are_used() -> None:
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
        "        if name.partition('.')[0] in ('pulp', 'highspy', 'plotly'):\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from meshwright.cli import main\n"
        f"assert main(['launch', {str(plan)!r}, '--dry-run']) == 0\n"
        f"assert main(['show', {str(plan)!r}, '--html', 'page.html']) == 1\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "needs plotly; install it with: pip install plotly" in done.stderr
