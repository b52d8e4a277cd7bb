"""The packages import each other in one direction, and the planner lives without torch."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx
import pytest

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


@pytest.mark.parametrize("package", LINE)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    above = set(LINE[LINE.index(package) + 1 :])

    offenders = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in (ROOT / package).rglob("*.py")
        if (found := imports(file) & above)
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

    assert users == ["highs.py"]


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
    for node in imports_of(file.read_text()):
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


def rows_of(drawing: str) -> dict[str, int]:
    """Return the row of every file and folder that is drawn, by its path inside planner/.

    Names end where descriptions begin, at column 45; indented rows are inside the folder above.
    """
    result: dict[str, int] = {}
    folder = ""
    for row, line in enumerate(drawing.splitlines()):
        names = [word[0] for word in re.finditer(r"\S+", line) if word.start() < 45]
        if names and not line.startswith(" "):
            folder = names[0] if len(names) == 1 and names[0].endswith("/") else ""
            result |= dict.fromkeys(names, row)
        else:
            result |= {folder + name: row for name in names}
    return result


def place_of(file: str, rows: Mapping[str, int]) -> str | None:
    """Return the name under which a file is drawn: its own, or that of its innermost folder.

    A folder whose files are drawn one by one speaks for its `__init__.py` alone, unless that is
    drawn too.
    """
    own = file.removesuffix(".py")
    if own in rows:
        return own
    for folder in (f"{parent}/" for parent in Path(file).parents):
        if folder in rows:
            inside = any(name != folder and name.startswith(folder) for name in rows)
            return None if inside and file != f"{folder}__init__.py" else folder
    return None


def imported(source: str, files: Mapping[str, str]) -> Iterator[str]:
    """Yield the files of planner/ that a source imports anywhere, inside functions too."""
    for node in imports_of(source):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            path = name.replace(".", "/")
            for one in (path, path.rpartition("/")[0]):
                known = {f"{one}.py", f"{one}/__init__.py"} & {f"planner/{f}" for f in files}
                if known:
                    yield known.pop().removeprefix("planner/")
                    break


def downward(files: Mapping[str, str], rows: Mapping[str, int]) -> list[str]:
    """Return what a drawing of rows forbids: imports of lower rows, circles, files in no row."""
    edges = [(file, one) for file, source in files.items() for one in imported(source, files)]
    place = {file: place_of(file, rows) for file in files if file != "__init__.py"}
    lower = [
        f"{file} imports {one}, which stands lower"
        for file, one in edges
        if (a := place[file]) and (b := place[one]) and rows[b] > rows[a]
    ]
    graph = networkx.DiGraph(edges)
    return [
        *(f"{file} stands in no row" for file, where in place.items() if where is None),
        *lower,
        *(
            "a circle: " + ", ".join(sorted(circle))
            for circle in networkx.strongly_connected_components(graph)
            if len(circle) > 1
        ),
    ]


def test_the_planner_imports_as_its_rows_are_drawn() -> None:
    chapter = (ROOT / "ARCHITECTURE.md").read_text().partition("## The planner, by layer")[2]
    rows = rows_of(chapter.split("```")[1])
    folder = ROOT / "planner"
    files = {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*.py")}

    drawn = {place_of(file, rows) for file in files} | {f"{Path(file).parent}/" for file in files}
    assert [name for name in rows if name not in drawn] == []
    assert downward(files, rows) == []


@pytest.mark.parametrize(
    ("below", "offence"),
    [
        ("from planner.folder import low", "high.py imports folder/low.py, which stands lower"),
        ("def f():\n    import planner.folder.low", "high.py imports folder/low.py, which stands"),
        ("if TYPE_CHECKING:\n    from planner.folder.low import X", "which stands lower"),
        ("from planner.beside import x", "a circle: beside.py, high.py"),
        ("", "new.py stands in no row"),
    ],
)
def test_an_import_that_is_drawn_nowhere_is_found(below: str, offence: str) -> None:
    rows = rows_of("high  beside".ljust(45) + "words\nfolder/\n    low")
    files = {
        "high.py": below,
        "beside.py": "from planner.high import y",
        "folder/__init__.py": "",
        "folder/low.py": "from planner import high",
        **({} if below else {"new.py": ""}),
    }

    found = downward(files, rows)

    assert any(offence in one for one in found), found


def test_types_are_checked_in_every_package() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]

    assert mypy["strict"]
    assert sorted(mypy["packages"]) == sorted(LINE)
    skipped = [table["module"] for table in mypy["overrides"] if "follow_imports" in table]
    assert skipped == [["transformers.*"]]
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
