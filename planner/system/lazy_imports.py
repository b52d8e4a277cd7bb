"""Packages that are loaded where they are used, so that everything else works without them.

Solvers are no part of a training image: launching needs none.
"""

from __future__ import annotations

import importlib
from typing import Any

from meshwright.planner.errors import LaunchError


class OnUse:
    """A module that is imported on the first access to one of its attributes.

    >>> OnUse("math", "rounding").floor(1.5)
    1
    >>> OnUse("absent.part", "a plot").draw
    Traceback (most recent call last):
    meshwright.planner.errors.LaunchError: a plot needs absent; install it with: pip install absent
    """

    def __init__(self, module: str, what: str) -> None:
        """`what` is what needs it."""
        self._module, self._what = module, what

    def __getattr__(self, name: str) -> Any:
        package = self._module.partition(".")[0]
        try:
            module = importlib.import_module(self._module)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            raise LaunchError(
                f"{self._what} needs {package}; install it with: pip install {package}"
            ) from error
        return getattr(module, name)
