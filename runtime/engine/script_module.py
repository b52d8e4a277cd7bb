"""Record of a script's training: the function that builds a module, and all that goes with it.

A script hands them to meshwright.plan.  Commands read them from its file, where MODEL is
`script.py:build` and the file has a `batch` of its own:

    def build():                          # or the class of the module
        return Net()

    batch = images(64)                    # an example of a global batch, or what returns one
    def loss(outputs, batch): ...
    optimizer, groups, inputs, units      # those that the script gives its Engine

    if __name__ == "__main__":            # the file is imported, too
        main()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.planner.documents.model import BatchLeaf, ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError
from meshwright.runtime.core.batches import samples_in
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.core.side_effects import restore_side_effects
from meshwright.runtime.engine.module_graph import DEGREES, batch_leaves, script_model
from meshwright.runtime.engine.setup import check_functions
from meshwright.runtime.engine.user_code import UserFiles, in_users_file
from meshwright.runtime.engine.user_module import OwnModel
from meshwright.runtime.engine.weightless_build import built_for_trace

_FUNCTIONS = ("loss", "inputs", "optimizer", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScript:
    """A module that a script builds, with what its Engine is given beside a plan."""

    build: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[Any, Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    groups: Callable[[str, Any], Any] | None = None
    units: Sequence[str] | None = None
    source: str = ""
    """`script.py:build`; empty where the function itself was given."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the file and of what it imported beside it."""

    @classmethod
    def of_file(cls, source: str, digests: Mapping[str, str] | None = None) -> OwnScript:
        """Import the file of `script.py:build`; with `known` digests, only what has them."""
        files = UserFiles(source, digests)
        file = in_users_file(source, files.load)
        name = source.rpartition(":")[2]
        given: dict[str, Any] = {
            one: getattr(file, one, None) for one in (name, "batch", "units", *_FUNCTIONS)
        }
        for required in (name, "loss"):
            if not callable(given[required]):
                raise DocumentError(
                    "", f"has no function '{required}'; name one that it has", file=source
                )
        if callable(given["batch"]):
            given["batch"] = in_users_file(source, given["batch"])
        return cls(
            build=given.pop(name), source=source, files=dict(digests or files.imported), **given
        )

    @property
    def name(self) -> str:
        """Name of the module in a plan."""
        name = getattr(self.build, "__name__", type(self.build).__name__)
        return name if name.isidentifier() else "build"

    @property
    def samples(self) -> int:
        """Number of samples of the example, which is a global batch."""
        return samples_in(self.batch)

    @property
    def leaves(self) -> dict[str, BatchLeaf]:
        """Shape and type of one sample's tensors."""
        return batch_leaves(self.batch)

    def graph(self) -> ModelGraph:
        """Return the module's layers and what each costs; nothing is computed."""
        if self.batch is None:
            raise DocumentError("batch", "is missing; give an example of a global batch")
        module, rebuild = built_for_trace(self.build)
        with restore_side_effects(self.build):
            graph: ModelGraph = script_model(
                module,
                self.batch,
                self.inputs,
                loss=self.loss,
                units=self.units,
                name=self.name,
                optimizer=self.optimizer,
                groups=self.groups,
                degrees=DEGREES,
                rebuild=rebuild,
            )
        return graph

    def model(self, plan: Plan, *, device: torch.device, place: Place) -> OwnModel:
        """Return what an Engine trains of it, with AdamW where no optimizer is said."""
        assert self.loss is not None
        optimizer = self.optimizer or torch.optim.AdamW
        check_functions(self.loss, optimizer)
        return OwnModel(
            self.build,
            plan,
            loss=self.loss,
            optimizer=optimizer,
            batch=self.batch,
            inputs=self.inputs,
            groups=self.groups,
            units=self.units,
            tensor=None,
            by_micro_batch=True,  # the Engine of the script says whether it is meant
            device=device,
            place=place,
        )
