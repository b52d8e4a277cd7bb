"""Install a wheel with the oldest and the newest allowed packages, and ask each for a plan.

    python .ci/install_matrix.py WHEEL FOLDER python3.11 python3.12 ...
    python .ci/install_matrix.py WHEEL[torch] FOLDER python3.11

`make install-matrix` does so.  Each environment of FOLDER has the wheel with every dependency at
its lower bound, or at whatever the index has newest, and nothing that this project pins.  With
`[torch]` it also trains two steps.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PLAN = ["plan", "gpt2", "--cluster", "8xa100-sxm-80gb"]
SECOND_OPINION = [*PLAN, "--solver", "ilp"]
TRAIN = ["launch", str(ROOT / "plans" / "demo-4m-on-local" / "plan.yaml"), "--steps", "2"]


def lower_bounds(python: str, extra: str | None = None) -> list[str]:
    """Return each dependency at the lowest version that is allowed under a Python, `3.12`.

    Of several lines of one package that hold the last is the narrowest.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest: dict[str, str] = {}
    added = project["optional-dependencies"][extra] if extra else []
    for dependency in [*project["dependencies"], *added]:
        named, _, marker = dependency.partition(";")
        bound = re.fullmatch(r"([\w-]+)>=([\d.]+)(,<[\d.]+)?", named.strip())
        if bound is None:
            sys.exit(f"{dependency}: has no lower bound; write NAME>=VERSION")
        if not marker or holds(marker, python):
            lowest[bound[1]] = bound[2]
    return [f"{name}=={version}" for name, version in lowest.items()]


def holds(marker: str, python: str) -> bool:
    """Tell whether `python_version < '3.13'` or the like holds."""
    found = re.fullmatch(r"\s*python_version\s*(<|>=)\s*'3\.(\d+)'\s*", marker)
    if found is None:
        sys.exit(f"{marker}: only python_version < or >= is read")
    minor = int(python.split(".")[1])
    return minor < int(found[2]) if found[1] == "<" else minor >= int(found[2])


def installed(python: str, wheel: str, extra: str | None, folder: Path, end: str) -> Path:
    """Make an environment with one end of the allowed versions; return its folder."""
    version = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    place = folder / f"{version}-{end}"
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    bounds = place / "bounds.txt"
    bounds.write_text("\n".join(lower_bounds(version, extra)) if end == "oldest" else "")
    pip = [place / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--only-binary", ":all:", "-c", bounds, wheel], check=True)
    return place


def said(place: Path, words: list[str]) -> dict[str, Any]:
    """Return what an environment answers as JSON, with nothing beside it, and no warning."""
    done = subprocess.run(
        [place / "bin" / "meshwright", *words, "--json"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "Warning" in done.stderr:
        sys.exit(f"{place.name}: {' '.join(words)}: {done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Install both ends under each Python that is here; all have to give the same plan."""
    wheel, to, *pythons = sys.argv[1:]
    folder = Path(to).resolve()
    extra = "torch" if wheel.endswith("[torch]") else None
    found: dict[str, float] = {}
    for python in pythons:
        if subprocess.run(["which", python], capture_output=True, check=False).returncode:
            print(f"{python}: not here")
            continue
        for end in ("oldest", "newest"):
            place = installed(python, wheel, extra, folder, end)
            found[place.name] = said(place, PLAN)["step_time_s"]
            said(place, SECOND_OPINION)
            if extra:
                said(place, TRAIN)
            print(f"{place.name}: {found[place.name]:.6f} s", flush=True)
    if not found or len({f"{seconds:.9g}" for seconds in found.values()}) > 1:
        sys.exit(f"different answers: {found}")


if __name__ == "__main__":
    main()
