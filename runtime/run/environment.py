"""Environment variables by which `meshwright run` tells the Engine of a script what to do."""

from __future__ import annotations

PLAN_VARIABLE = "MESHWRIGHT_PLAN"
"""Names the plan's file for a script's Engine."""
OUTPUT_VARIABLE = "MESHWRIGHT_OUTPUT"
"""Names the folder where a script's Engine writes its metrics."""
CHECKPOINT_VARIABLE = "MESHWRIGHT_CHECKPOINT"
"""Names the folder where a script's Engine saves by itself what it goes on from."""
EVERY_VARIABLE = "MESHWRIGHT_CHECKPOINT_EVERY"
"""After how many steps; without it where the least is lost."""
TOKEN_VARIABLE = "MESHWRIGHT_RUN"
"""The same on all ranks of an attempt, and new in each."""
STORE_VARIABLE = "MESHWRIGHT_STORE"
"""The address of the object store that checkpoints are sent to."""
