"""Environment variables by which `meshwright run` tells the Engine of a script what to do."""

from __future__ import annotations

PLAN_VARIABLE = "MESHWRIGHT_PLAN"
"""Names the plan's file for a script's Engine."""
OUTPUT_VARIABLE = "MESHWRIGHT_OUTPUT"
"""Names the folder where a script's Engine writes its metrics."""
