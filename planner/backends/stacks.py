"""Which stack a run of a table is priced by."""

from __future__ import annotations

from planner.backends.runs import Run
from planner.catalog import stack_name, stacks
from planner.errors import DocumentError
from planner.stack import Stack


def known_stack(framework: str) -> Stack | None:
    """Return the stack that a framework's name or alias stands for; None for an unknown one.

    >>> found = known_stack("Megatron LM")
    >>> found.name if found else None, known_stack("abacus"), known_stack("unknown")
    ('megatron', None, None)
    """
    try:
        found = stacks()[stack_name(framework)]
    except DocumentError:
        return None
    return None if found.name == "unknown" else found


def stack_of_run(run: Run) -> tuple[Stack, bool]:
    """Return the stack of a run's framework, and whether it is a known one.

    An unknown framework gets the closest stack: that of fine-tuning with `transformers` for
    adapters and single devices, of plain FSDP for ZeRO-3, `unknown` otherwise.
    """
    found = known_stack(run.framework)
    if found is not None:
        return found, True
    if run.task != "pretrain" and run.tensor * run.pipeline == 1:
        return stacks()["transformers"], False
    return stacks()["fsdp" if run.zero == 3 else "unknown"], False
