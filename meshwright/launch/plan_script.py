"""A plan for a script that has none: the script runs until it makes its Engine, which is planned.

    plan_for_script(Path("train.py"), ["--epochs", "3"], ranks=2, into=Path("runs/train/plan.yaml"))

It runs in a process of its own, alone.  The arguments of its Engine are those of `meshwright.plan`;
a layout that it names is kept, and a plan that it names is written as it is.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.runtime.run.script_planner import planners

LAST_LINES = 20


def plan_for_script(script: Path, arguments: Sequence[str], *, ranks: int, into: Path) -> Plan:
    """Write the plan of a script for some ranks of this machine, and return it.

    Raises LaunchError with the script's own words where it fails before its Engine, or makes none.
    """
    if not document.is_file(script):
        raise LaunchError(f"{script}: is no file; name the script that trains")
    into.parent.mkdir(parents=True, exist_ok=True)
    into.unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, str(into), str(ranks), str(script), *arguments]
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    if not document.is_file(into):
        lines = done.stderr.strip().splitlines()[-LAST_LINES:]
        why = "\n".join(lines) or "it ended without making a meshwright.Engine"
        raise LaunchError(
            f"{script}: cannot be planned: {why}\nGive a plan by --plan, or start it by torchrun"
        )
    return document.read(Plan, str(into))


def main() -> int:
    """Run a script until it makes an Engine, and plan what it is given."""
    into, ranks, script, *arguments = sys.argv[1:]

    def plan_engine(build: Any, plan: Any, settings: Mapping[str, Any]) -> NoReturn:
        document.write(_plan_of_engine(build, plan, settings, ranks=int(ranks)), Path(into))
        raise SystemExit(0)

    planners.append(plan_engine)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _plan_of_engine(build: Any, plan: Any, settings: Mapping[str, Any], *, ranks: int) -> Plan:
    from meshwright.api.functions import plan as search_plan  # noqa: PLC0415
    from meshwright.runtime.core.batches import samples_in  # noqa: PLC0415
    from meshwright.runtime.engine.setup import plan_or_layout  # noqa: PLC0415

    wanted = plan_or_layout(plan)
    if isinstance(wanted, Plan):
        return wanted
    return search_plan(
        build,
        f"local:{ranks}",
        global_batch=samples_in(settings["batch"]),
        fix=[f"{field}={value}" for field, value in wanted.items()],
        **settings,
    )


if __name__ == "__main__":
    raise SystemExit(main())
