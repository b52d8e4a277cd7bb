"""Requirements of users on a split beside its speed, in words or as part of a document.

    layers 0-3 together
    layer embedding on stage 0               layers 4-7 on stages 1-2
    at most 12 layers on stage 0             at most 12 layers on each stage
    layers block.0..block.7 recompute full   layers 0-9 activations keep or offload

Layers are counted from 0 along the chain, the embedding included, or named; stages are counted from
0; ranges include both ends.  `planner.solver.side_constraints` has what a solver makes of each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self, get_args

from pydantic import model_validator

from meshwright.planner.documents.document import Part, nearest
from meshwright.planner.documents.plan import Activations
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.documents.units import Count, Flag, Positive, Text, whole_number
from meshwright.planner.errors import DocumentError
from meshwright.planner.solver.side_constraints import SideConstraint

_LAYERS = re.compile(r"layers? (\S+) (.+)")
_MOST = re.compile(r"at most (\d+) layers? on (.+)")
_FORMS = (
    "'layers 0-3 together', 'layers 0-3 on stage 0', 'at most 8 layers on stage 0' (or 'each "
    "stage'), 'layers 0-3 recompute full' or 'layers 0-3 activations keep'"
)


class Requirement(Part):
    """Exactly one of: layers together, layers on stages, most layers of stages, their options."""

    layers: tuple[Count, Count] | None = None
    """Numbers of the first and the last layer."""
    together: Flag = False
    """True: these layers are on one stage."""
    stages: tuple[Count, ...] | None = None
    """Stages on which these layers are, or to which `at_most` applies; None: all stages."""
    at_most: Positive | None = None
    """Largest number of layers of a stage."""
    options: tuple[Text, ...] | None = None
    """Options among which these layers choose."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.layers is None:
            if self.at_most is None or self.together or self.options is not None:
                raise ValueError("layers: is missing; only at_most does without")
            return self
        if self.layers[0] > self.layers[1]:
            raise ValueError(f"layers: is {list(self.layers)}; the first comes first")
        asked = (self.together, self.stages is not None, self.options is not None)
        if sum(asked) != 1 or self.at_most is not None:
            raise ValueError("ask for one of together, stages and options of these layers")
        if self.stages == () or self.options == ():
            raise ValueError("stages and options must not be empty; leave out what is not asked")
        return self

    def __str__(self) -> str:
        """Say what it asks for."""
        first, last = self.layers or (0, -1)
        return str(self._tie_of(tuple(range(first, last + 1))))

    def _tie_of(self, layers: tuple[int, ...]) -> SideConstraint:
        return SideConstraint(
            layers=layers,
            together=self.together,
            stages=self.stages or (),
            at_most=self.at_most,
            options=self.options or (),
        )

    def tie(self, numbers: Sequence[int], stages: int) -> SideConstraint | None:
        """Return what a solver keeps; None if no split into this number of stages can.

        `numbers` are those of the layers in the order of the chain.
        """
        if self.layers is None:
            return self._tie_of(())
        first, last = self.layers
        if last >= len(numbers):
            raise DocumentError(
                "require", f"speaks of layer {last}; the chain has layers 0 to {len(numbers) - 1}"
            )
        if self.stages is not None and min(self.stages) >= stages:
            return None
        return self._tie_of(tuple(sorted(numbers[first : last + 1])))


def read_requirements(texts: Sequence[str], names: Sequence[str]) -> tuple[Requirement, ...]:
    """Read what the command line gives; `names` are those of the chain's layers.

    >>> read_requirements(["layers a..b on stage 1"], ["a", "b", "c"])[0].layers
    (0, 1)
    """
    return tuple(_requirement(" ".join(text.split()), names) for text in texts)


def _requirement(text: str, names: Sequence[str]) -> Requirement:
    most = _MOST.fullmatch(text)
    if most:
        of_every_stage = most[2] in ("each stage", "every stage")
        stages = None if of_every_stage else _stages(most[2], text)
        count = whole_number(most[1])
        if not count:
            raise DocumentError(
                "require", f"'{text:.60}': a stage has at least 1 layer; ask for 1 or more"
            )
        return Requirement(at_most=count, stages=stages)
    of_layers = _LAYERS.fullmatch(text)
    if of_layers is None:
        raise DocumentError("require", f"'{text}': write {_FORMS}")
    layers = _range(of_layers[1], names, text)
    rest = of_layers[2]
    if rest == "together":
        return Requirement(layers=layers, together=True)
    if rest.startswith("on "):
        return Requirement(layers=layers, stages=_stages(rest.removeprefix("on "), text))
    word, _, wanted = rest.partition(" ")
    every = {"recompute": get_args(Recompute), "activations": get_args(Activations)}
    if word not in every:
        raise DocumentError("require", f"'{text}': write {_FORMS}")
    chosen = re.split(r" or |, ?", wanted)
    for choice in chosen:
        if choice not in every[word]:
            raise DocumentError("require", f"'{text}': {nearest(choice, list(every[word]))}")
    return Requirement(
        layers=layers,
        options=tuple(
            option_name(recompute, activations)
            for recompute in (chosen if word == "recompute" else every["recompute"])
            for activations in (chosen if word == "activations" else every["activations"])
        ),
    )


def option_name(recompute: str, activations: str) -> str:
    """Return the name of a layer's option.

    >>> option_name("full", "keep"), option_name("full", "offload")
    ('full', 'full, offload')
    """
    return recompute if activations == "keep" else f"{recompute}, {activations}"


def _range(text: str, names: Sequence[str], whole: str) -> tuple[int, int]:
    if text in names:
        return names.index(text), names.index(text)
    numbers = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if numbers:
        first, last = int(numbers[1]), int(numbers[2] or numbers[1])
        if not first <= last < len(names):
            raise DocumentError(
                "require",
                f"'{whole}': layers are numbered 0 to {len(names) - 1}; write the lower one first",
            )
        return first, last
    ends = text.split("..")
    for name in ends:
        if name not in names:
            raise DocumentError("require", f"'{whole}': {nearest(name, list(names))}")
    if len(ends) != 2 or names.index(ends[0]) > names.index(ends[1]):
        raise DocumentError("require", f"'{whole}': write layers as 0-3, NAME or NAME..NAME")
    return names.index(ends[0]), names.index(ends[1])


def _stages(text: str, whole: str) -> tuple[int, ...]:
    number = "([0-9]{1,4})"
    match = re.fullmatch(
        rf"stages? {number}(?:-{number})?((?:,[0-9]{{1,4}})*)", text.replace(", ", ",")
    )
    if match is None:
        raise DocumentError("require", f"'{whole}': write stages as 'stage 0' or 'stages 0-2'")
    first, last = int(match[1]), int(match[2] or match[1])
    more = [int(number) for number in match[3].split(",") if number]
    if first > last:
        raise DocumentError(
            "require", f"'{whole}': stages {first}-{last} are none; write the lower one first"
        )
    return tuple(sorted({*range(first, last + 1), *more}))
