"""Installed packages add frameworks, accelerators, exporters and loggers, and take no other's place."""

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.documents import plugins
from meshwright.planner.documents.framework import Framework, framework_of
from meshwright.planner.errors import DocumentError
from tests.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
FRAMEWORK = "format: 1\nname: {}\nextends: base\nsummary: 's'\n"
BASE: dict[str, Any] = {"format": 1, "name": "base", "summary": "s"}

Installing = Callable[..., None]


def put(folder: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write what tells Python that a package is installed."""
    info = folder / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def test_the_example_plans_exports_and_logs(tmp_path: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    put(tmp_path / "site", "meshwright_example", project["entry-points"])
    plan = ROOT / "plans" / "demo-4m-on-local" / "plan.yaml"
    code = (
        "from meshwright.cli import main\n"
        "def run(words):\n"
        "    assert main(words.split()) == 0, words\n"
        "run('catalog --plugins')\n"
        "run('plan llama-3.1-8b --cluster 8xexample-one --framework example-trainer -o p.yaml')\n"
        "run('export p.yaml -o trainer.yaml')\n"
        f"run('launch {plan} --dry-run --logger table')\n"
        f"assert main('launch {plan} --dry-run --logger tabel'.split()) == 1\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(EXAMPLE)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert done.returncode == 0, done.stderr
    for kind, points in project["entry-points"].items():
        assert f"{kind.removeprefix('meshwright.')} " in done.stdout
        assert all(name in done.stdout for name in points)
    assert "replicas: 8" in (tmp_path / "trainer.yaml").read_text()
    assert "did you mean 'table'?" in done.stderr


def test_what_the_example_logs_is_a_line_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from meshwright_example.table import Table  # type: ignore[import-not-found]

    table = Table(output=tmp_path, first=3, config={})
    table.log(3, {"loss": 2.5, "step_time_s": 1.0})
    table.close()

    assert (tmp_path / "table.csv").read_text().split() == ["step,loss", "3,2.5"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installing]:
    """Return what installs a package of one framework: its entry point's name, and its module."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(package: str, name: str, module: str) -> None:
        put(tmp_path, package, {"meshwright.frameworks": {name: f"{package}:FRAMEWORK"}})
        (tmp_path / f"{package}.py").write_text(module)
        plugins.plugins.cache_clear()

    yield installed
    plugins.plugins.cache_clear()


def frameworks_with_plugins() -> dict[str, Framework]:
    own = {"base": Framework.of(BASE | {"aliases": ["basis"]})}
    return plugins.installed_entries(
        "frameworks", own, lambda name, data: framework_of(data, {"base": BASE})
    )


def module_of(text: str) -> str:
    return (
        "class File:\n"
        "    def read_text(self, encoding):\n"
        f"        return {text!r}\n"
        "FRAMEWORK = File()\n"
    )


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [
        ("base", module_of(FRAMEWORK.format("base")), "there is 'base' already"),
        (
            "mine",
            module_of(FRAMEWORK.format("mine") + "aliases: [Basis]\n"),
            "there is 'Basis' already",
        ),
        ("mine", "import no_such_module", "No module named 'no_such_module'"),
        ("mine", "raise SystemError('broken')", "SystemError: broken"),
        ("mine", "FRAMEWORK = 7", "is no file"),
        ("mine", module_of("- 1"), "no mapping"),
        ("mine", module_of("format: ["), "cannot be used"),
        ("mine", module_of("format: 1\nname: !!python/name:os.system x\n"), "cannot be used"),
        ("mine", module_of(FRAMEWORK.format("mine") + "host: {step_s: -1}\n"), "host.step_s"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_with_its_package(
    name: str, module: str, said: str, install: Installing, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("broken_package", name, module)
    monkeypatch.delitem(sys.modules, "broken_package", raising=False)

    with pytest.raises(DocumentError, match=r"of package broken_package 0\.1\.0") as caught:
        frameworks_with_plugins()

    assert said in str(caught.value)
    assert "MESHWRIGHT_PLUGINS=0" in str(caught.value)
    monkeypatch.setenv("MESHWRIGHT_PLUGINS", "0")
    plugins.plugins.cache_clear()
    assert frameworks_with_plugins() == {}


def test_two_packages_do_not_add_the_same_name(install: Installing) -> None:
    install("one_package", "mine", module_of(FRAMEWORK.format("mine")))
    assert [*frameworks_with_plugins()] == ["mine"]
    install("other_package", "mine", module_of(FRAMEWORK.format("mine")))

    with pytest.raises(DocumentError, match=r"(one|other)_package and (one|other)_package both"):
        frameworks_with_plugins()


@pytest.mark.matrix
def test_the_example_installs_beside_a_wheel(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    install = [python, "-m", "pip", "install", "-q", *constraints]
    subprocess.run([*install, str(ROOT), "hatchling"], check=True, timeout=600)
    subprocess.run([*install, "--no-build-isolation", str(EXAMPLE)], check=True, timeout=600)

    command = [tmp_path / "env" / "bin" / "meshwright"]
    listed = subprocess.run(
        [*command, "catalog", "--plugins"], capture_output=True, text=True, check=True
    )
    planned = subprocess.run(
        [*command, "plan", "gpt2", "--cluster", "8xexample-one", "--framework", "example-trainer"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "example-one" in listed.stdout
    assert planned.returncode == 0, planned.stderr
