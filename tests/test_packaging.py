"""What is released says one version everywhere, and the image copies what a wheel is built of."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FOLDERS = ("planner", "runtime", "profiler", "meshwright")
"""Where the one package lies: meshwright/ links to the other three, and a wheel follows links."""
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["version"] == PROJECT["project"]["version"] == metadata.version("meshwright")
    assert re.fullmatch(r"\d+\.\d+\.\d+", citation["version"])


def test_the_image_copies_what_the_wheel_is_built_of_and_nothing_else() -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", recipe, flags=re.MULTILINE)
        for name in line.split()
    }
    files = {"pyproject.toml", "constraints.txt", "README.md"}

    assert copied == {*FOLDERS} | files | set(PROJECT["project"]["license-files"])
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in allowed if line.startswith("!")} == copied
    assert "--build-constraint constraints.txt" in recipe and "-c constraints.txt" in recipe
    assert re.search(r"^USER (?!root)", recipe, flags=re.MULTILINE)
    # The last stage has the environment of the first, and no sources, compilers or caches.
    last = recipe.rpartition("\nFROM ")[2]
    assert re.findall(r"^COPY (.*)$", last, flags=re.MULTILINE) == [
        "--from=build /opt/meshwright /opt/meshwright"
    ]
    assert "pip" not in last
    readme = (ROOT / "README.md").read_text()
    assert "docker build -t meshwright ." in readme


def test_every_push_and_every_release_runs_what_ci_runs() -> None:
    for name, trigger in (("ci", "pull_request"), ("release", "push")):
        flow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        steps = [step for job in flow["jobs"].values() for step in job["steps"]]

        assert trigger in flow[True]  # YAML 1.1 reads the key `on` as true
        assert "bash .ci/run" in [step.get("run") for step in steps]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_an_installation_has_the_files_that_are_no_code() -> None:
    """Data, templates and scripts that code reads are in the folders of a wheel, and tracked."""
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tracked = set(listed.stdout.strip("\0").split("\0"))
    data = {
        str(file.relative_to(ROOT))
        for name in FOLDERS
        for file in (ROOT / name).rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    }

    links = {f"meshwright/{name}" for name in FOLDERS[:-1]}
    assert wheel == {"packages": ["meshwright"]}  # nothing is left out
    assert {link: str((ROOT / link).readlink()) for link in links} == {
        link: f"../{Path(link).name}" for link in links
    }
    assert data == {file for file in tracked if not file.endswith(".py")} - links
    assert {Path(file).suffix for file in data} == {
        ".yaml",
        ".json",
        ".html",
        ".mjs",
        ".css",
        ".typed",
    }
    assert [file for file in data if file.endswith("py.typed")] == ["meshwright/py.typed"]
    assert set(PROJECT["project"]["scripts"]) == {"meshwright"}


@pytest.mark.matrix
def test_the_steps_of_the_image_make_a_command_that_plans(tmp_path: Path) -> None:
    """What the container file does, in an empty folder and an environment of its own.

    There is no container engine where this runs, so the base image is this machine's Python; what
    is copied, installed and started is read from the file.  Its user is not made.
    """
    recipe = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    source, work = tmp_path / "source", tmp_path / "work"
    source.mkdir()
    work.mkdir()
    for line in re.findall(r"^COPY (?!--from)(.*)$", recipe, flags=re.MULTILINE):
        *names, target = line.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target)
            else:
                shutil.copy(ROOT / name, source / target)
    steps, user = re.findall(r"^RUN (.*)$", recipe, flags=re.MULTILINE)
    assert user.startswith("useradd ")
    install = steps.replace("/opt/meshwright", f"{tmp_path}/image")
    path = f"{tmp_path}/image/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    clean = {"PATH": path, "HOME": str(work), "EXTRAS": "", "COLUMNS": "80"}
    clean |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    subprocess.run(["bash", "-ec", install], cwd=source, env=clean, check=True)
    shutil.rmtree(source)
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', recipe, flags=re.MULTILINE)
    plan = [entry, "plan", "llama-3.1-8b", "--cluster", "8xh100-sxm-80gb", "-o", "plan.yaml"]
    done = subprocess.run(plan, cwd=work, env=clean, check=True, capture_output=True, text=True)

    assert done.stdout.startswith("llama-3.1-8b on 8xh100-sxm-80gb: ")
    assert len(done.stdout.splitlines()) <= 10
    assert (work / "plan.yaml").is_file()

    asked = [
        entry,
        "whatif",
        "--model",
        "gpt2",
        "--clusters",
        "8xh100-sxm-80gb",
        "--html",
        "p.html",
    ]
    subprocess.run(asked, cwd=work, env=clean, check=True, capture_output=True)

    page = (work / "p.html").read_text(encoding="utf-8")
    for folder in ("planner/whatif", "planner/whatif/pricing", "planner/report/page"):
        for module in (ROOT / folder).glob("*.mjs"):
            assert f"const ${module.stem} = " in page
    assert (ROOT / "planner/report/page/page.css").read_text(encoding="utf-8").strip() in page


def test_each_dependency_has_a_lower_bound_and_no_upper_one() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["torch"]]

    for dependency in wanted:
        assert re.fullmatch(r"[\w-]+>=[\d.]+(; python_version (<|>=) '3\.\d+')?", dependency)


def test_a_bill_of_materials_names_each_package_with_its_hash(tmp_path: Path) -> None:
    origin = {"url": "https://x/a.whl", "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    report = {
        "install": [
            {"metadata": {"name": "Zeta", "version": "2"}, "download_info": origin},
            {
                "metadata": {"name": "alpha", "version": "1", "license_expression": "MIT"},
                "download_info": origin,
            },
            {
                "metadata": {"name": "meshwright", "version": "0.1.0"},
                "download_info": {"url": "file:///here", "dir_info": {}},
            },
        ]
    }
    command = [sys.executable, str(ROOT / ".ci" / "hashes.py"), "--bill"]

    def bill(of: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, input=json.dumps(of), capture_output=True, text=True, check=False
        )

    found = json.loads(bill(report).stdout)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["name"] == "meshwright"
    assert [one["purl"] for one in found["components"]] == ["pkg:pypi/alpha@1", "pkg:pypi/zeta@2"]
    assert found["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    del origin["archive_info"]
    assert "no sha256" in bill(report).stderr
