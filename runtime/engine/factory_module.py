"""A user's own model: `file.py:factory`, a function that returns modules, in a chain or a graph.

    def factory():                       # nn.Sequential, or a list of modules
        return nn.Sequential(Embedding(...), Block(...), ..., Head(...))

    def factory():                       # or a module with any forward(tokens[, positions])
        return UNet(...)

    def factory():                       # or a dict: each with the names of what it reads
        return {
            "stem": (Stem(...), "tokens"),
            "down": (Down(...), "stem"),
            "up": (Up(...), "down", "stem"),
            "head": (Head(...), "up"),
        }

Modules of a chain or a dict take one tensor, or those that they read in that order, and return one.
Where one takes `positions` too, or reads "positions" in a dict, ranks may divide them, if its
attention is meshwright.attention.
`tokens` are token numbers [sample, position], what the first module of a chain gets.  The last
module, which nobody reads, returns logits [sample, position, vocabulary]; or the file has its own
`loss(output, targets)`, a sum and what it counts or a mean over the samples, for targets
[sample, position] that are the tokens one position on (-100 where a position does not count).  A
module in a dict stands behind all that it reads, and a plan may take it in any such order.

The factory runs on the CPU in every rank, under the plan's seed, so that all start alike, and what
its module does with tokens is recorded; a rank then keeps its own layers only.  It also runs
without data, to learn shapes and costs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.core.mesh import Place
from meshwright.runtime.engine.losses.named_loss import token_loss
from meshwright.runtime.engine.setup import built
from meshwright.runtime.engine.token_module import (
    TokenModel,
    graph_on_tokens,
    recording_of,
    samples,
)
from meshwright.runtime.engine.user_code import UserFiles, in_users_file
from meshwright.runtime.engine.user_stage import refuse_shared_memory
from meshwright.runtime.tracing.tracer import Recorder

TOKENS, POSITIONS = "tokens", "positions"
"""Names of the model's inputs for a module that reads them; no module has these names."""


class ModuleGraph(nn.Module):
    """Modules by name that read each other's outputs, run in an order in which they can be."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reads: Mapping[str, tuple[str, ...]],
        *,
        branches: bool,
    ) -> None:
        super().__init__()
        self._reads = reads
        self.reads_positions = any(POSITIONS in inputs for inputs in reads.values())
        self.order: Sequence[str] = list(reads)
        self.branches = branches
        """True if a plan may take the modules in another order."""
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return what the last module makes of tokens [sample, position] at these positions."""
        held: dict[str, Any] = {TOKENS: tokens, POSITIONS: positions}
        for name in self.order:
            module = self.get_submodule(name)
            output = module(*(held[source] for source in self._reads[name]))
            if not isinstance(output, Tensor):
                kind = type(output).__name__
                raise TypeError(f"{type(module).__name__} returns {kind}, no tensor")
            held[name] = output
        return held[self.order[-1]]

    def reorder(self, layers: Sequence[str], seq_len: int) -> None:
        """Run the modules in the order of a plan's layers: what has no parameters goes with one."""
        if list(layers) == [name for name in self.order if name in set(layers)]:
            return
        given = samples(seq_len, numbered=_takes_positions(self))
        recording = Recorder(self, given, _inputs, units=self.order).first
        of_layer = {
            layer.name: [at for at in range(layer.first, layer.last) if at not in recording.derived]
            for layer in recording.layers
        }
        taken = [
            *sorted(recording.derived),
            *(at for layer in layers for at in of_layer.get(layer, ())),
        ]
        self.order = [self.order[at] for at in taken]


class FactoryModel(TokenModel):
    """The module that a user's factory makes, as an Engine trains it."""

    def __init__(
        self,
        plan: Plan,
        model: ModelGraph,
        *,
        device: torch.device,
        weights: Path | None = None,
        documents: bool = False,
        place: Place | None = None,
    ) -> None:
        """`model` has the digests of the files that may be run."""
        source = plan.model.source
        if weights is not None:
            raise LaunchError(
                f"weights: {source} gives its parameters their values by itself; "
                "leave --weights out"
            )
        # Without digests nothing is run: an empty table refuses the file.
        file = _load(UserFiles(source, model.files or {}))
        module = built(lambda: _call_factory(file, source), plan)
        if isinstance(module, ModuleGraph):
            layers = [item.layer for stage in plan.stages for item in stage.layers]
            module.reorder(layers, plan.seq_len)
        super().__init__(
            module,
            plan,
            inputs=_inputs,
            loss=_loss_of(file),
            device=device,
            documents=documents,
            numbered=_takes_positions(module),
            always=_takes_positions(module),
            units=_units(module),
            place=place,
        )


def graph_of_factory(
    source: str, *, seq_len: int, digests: Mapping[str, str] | None = None
) -> ModelGraph:
    """Return the ModelGraph of a user's modules; figures are of one sample of `seq_len`.

    Layers of one class with parameters of the same shapes and the same traced cost are one kind.
    The user has named the file, or its digests are `known`.
    """
    files = UserFiles(source, digests)
    file = _load(files)
    with recording_of(source):
        with torch.device("meta"):
            module = _call_factory(file, source)
        refuse_shared_memory(module)
        numbered = _takes_positions(module)
        graph = graph_on_tokens(
            module,
            seq_len,
            numbered=numbered,
            inputs=_inputs,
            loss=_loss_of(file),
            units=_units(module),
            name=source,
            branches=isinstance(module, ModuleGraph) and module.branches,
            named=numbered,
        )
    return graph.model_copy(update={"source": source, "files": dict(digests or files.imported)})


def _units(module: nn.Module) -> Sequence[str] | None:
    """Return the modules that a user named; of any other module its blocks are."""
    return module.order if isinstance(module, ModuleGraph) else None


def _takes_positions(module: nn.Module) -> bool:
    if isinstance(module, ModuleGraph):
        return module.reads_positions
    return POSITIONS in inspect.signature(module.forward).parameters


def _inputs(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (batch[0], *batch[2:3])


def _loss_of(file: ModuleType) -> Callable[[Any, tuple[Tensor, ...]], Any]:
    """Return the file's own loss, or next-token cross-entropy."""
    loss = getattr(file, "loss", None)
    if loss is None:
        return token_loss(lambda batch: batch[1])
    return lambda outputs, batch: loss(outputs, batch[1])


def _load(files: UserFiles) -> ModuleType:
    """Import a user's file."""
    module: ModuleType = in_users_file(files.source, files.load)
    return module


def _call_factory(file: ModuleType, source: str) -> nn.Module:
    """Call the factory and check what it returns."""
    name = source.rpartition(":")[2]
    factory = getattr(file, name, None)
    if not callable(factory):
        raise DocumentError("", f"has no function '{name}'; name one that it has", file=source)
    returned = in_users_file(source, factory)
    if isinstance(returned, dict):
        return _branches(returned, name, source)
    if isinstance(returned, nn.Sequential | nn.ModuleList | list | tuple):
        return _chain(list(returned), name, source)
    return returned if isinstance(returned, nn.Module) else _chain([], name, source)


def _chain(modules: Sequence[Any], factory: str, source: str) -> ModuleGraph:
    """Check that there are modules alone, and let each read the one before it."""
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise DocumentError(
            "",
            f"{factory}() must return a module, a list of modules, or a dict of modules "
            "with what they read",
            file=source,
        )
    names = [str(at) for at in range(len(modules))]
    reads = {name: (before,) for name, before in zip(names, [TOKENS, *names], strict=False)}
    return ModuleGraph(dict(zip(names, modules, strict=True)), reads, branches=False)


def _branches(returned: dict[Any, Any], factory: str, source: str) -> ModuleGraph:
    """Check a graph of modules: names, what each reads, and that one alone is read by nobody."""

    def factory_error(why: str) -> DocumentError:
        return DocumentError("", f"{factory}() returns a dict, and {why}", file=source)

    modules: dict[str, nn.Module] = {}
    reads: dict[str, tuple[str, ...]] = {}
    for name, entry in returned.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise factory_error(f"{name!r} is no name; write letters, digits and _")
        if name in (TOKENS, POSITIONS) or name in dir(ModuleGraph):
            raise factory_error(f"'{name}' is taken; choose another name")
        module, *inputs = entry if isinstance(entry, tuple) else (entry,)
        if not isinstance(module, nn.Module) or not inputs:
            raise factory_error(f"'{name}' is not (module, name of what it reads, ...)")
        for source_name in inputs:
            if source_name not in (TOKENS, POSITIONS) and source_name not in reads:
                raise factory_error(
                    f"'{name}' reads {source_name!r}, which is not defined before it; before it "
                    f"are {', '.join([TOKENS, *reads])}"
                )
        modules[name] = module
        reads[name] = tuple(inputs)
    read = {name for inputs in reads.values() for name in inputs}
    ends = [name for name in reads if name not in read]
    if len(ends) != 1:
        raise factory_error(
            f"nobody reads {', '.join(ends)}; one module alone, the last, gives the loss"
        )
    if list(reads)[-1] != ends[0]:
        raise factory_error(f"'{ends[0]}', which nobody reads, must stand last")
    return ModuleGraph(modules, reads, branches=True)
