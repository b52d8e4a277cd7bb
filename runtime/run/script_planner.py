"""Planner of scripts: it takes the arguments of an Engine where a script runs to be planned.

Not to train: `meshwright run --ranks N` plans so (meshwright.launch.plan_script).  No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Planner = Callable[[Any, Any, Mapping[str, Any]], None]
"""It is given `build`, the plan that the script names, and what `meshwright.plan` takes beside."""
planners: list[Planner] = []
"""One, in a process that plans."""
