"""Words of a layout for what its stages have: `split=9+2x8+9 recompute=none+3xfull+30xnone`.

`split` are layers of each stage, `recompute` and `activations` choices along the chain of layers,
the first and the last included; `3xfull` are three in a row.  Layouts whose stages have as many
blocks as each other, up to one, and whose blocks are alike need none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from meshwright.planner.documents.document import nearest
from meshwright.planner.documents.profile import Recompute
from meshwright.planner.documents.units import whole_number
from meshwright.planner.errors import DocumentError

MOST_RUNS = 40
"""Largest number of runs that a text has; a text of more would not be read."""
MOST_LAYERS = 100_000
Choice = tuple[str, str]
"""Recomputation of a layer, and the place of its activations."""


def placement_words(stages: Sequence[Sequence[Choice]]) -> list[str]:
    """Return the words for stages, of which each has the choices of its layers; none if they are
    as many, up to one, and alike.

    >>> plain, full = ("none", "keep"), ("full", "keep")
    >>> placement_words([[plain, full, full], [full, full, plain]])
    []
    >>> placement_words([[plain, full, plain, plain], [plain, plain]])
    ['split=4+2', 'recompute=none+full+4xnone']
    """
    chain = list(itertools.chain.from_iterable(stages))
    blocks = [len(stage) - (at == 0) - (at == len(stages) - 1) for at, stage in enumerate(stages)]
    if len(set(chain[1:-1])) <= 1 and max(blocks, default=0) - min(blocks, default=0) <= 1:
        return []
    split = [f"split={_text_of_runs(map(len, stages))}"] if len(stages) > 1 else []
    usual = ("recompute", "none"), ("activations", "keep")
    return split + [
        f"{name}={text}"
        for at, (name, value) in enumerate(usual)
        if (text := _text_of_runs(choice[at] for choice in chain)) != value
    ]


def alike_words(choices: Iterable[Choice]) -> list[str]:
    """Return the words of layers that are alike; none of unlike ones.

    >>> alike_words([("full", "keep"), ("full", "keep")]), alike_words([("none", "keep")])
    (['recompute=full'], [])
    """
    each = set(choices)
    if len(each) != 1:
        return []
    [(recompute, activations)] = each
    words = [f"recompute={recompute}"] if recompute != "none" else []
    return words + ([f"activations={activations}"] if activations != "keep" else [])


def layout_with(layout: str, placement: Sequence[str]) -> str:
    """Return a layout's text with words of its stages, in place of those for alike blocks.

    >>> layout_with("tp=1 pp=2 recompute=full", ["split=4+2", "recompute=none+5xfull"])
    'tp=1 pp=2 split=4+2 recompute=none+5xfull'
    """
    names = {word.partition("=")[0] for word in placement}
    words = [word for word in layout.split(" ") if word.partition("=")[0] not in names]
    return " ".join([*words, *placement])


def _text_of_runs(values: Iterable[Hashable]) -> str:
    """Return values in a row: `none+3xfull`; the value alone where there is no other.

    >>> _text_of_runs([9, 8, 8, 9]), _text_of_runs(["full", "full"])
    ('9+2x8+9', 'full')
    """
    runs = [(value, len(list(group))) for value, group in itertools.groupby(values)]
    if len(runs) == 1 and not isinstance(runs[0][0], int):
        return str(runs[0][0])
    if len(runs) > MOST_RUNS:
        return "mixed"
    return "+".join(f"{count}x{value}" if count > 1 else str(value) for value, count in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers of each stage, and their choices along the chain; None where a text has none."""

    split: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    activations: tuple[str, ...] | None = None

    def stages_of(
        self, names: Sequence[str], stages: int, *, recompute: str, activations: str
    ) -> list[list[tuple[str, str, str]]]:
        """Return the layers of each stage with their choices; those that are left out as given.

        DocumentError where they are other layers than `names`, or other stages.
        """
        split = self.split or (len(names),)
        if len(split) != stages:
            reason = f"has {len(split)} stages, and the layout {stages}; write one number for each"
            raise DocumentError("layout", f"split={_text_of_runs(split)} {reason}")
        choices = [
            [value] * len(names) if each is None else list(each)
            for each, value in ((self.recompute, recompute), (self.activations, activations))
        ]
        counts = {"split": sum(split), "recompute": len(choices[0]), "activations": len(choices[1])}
        for name, count in counts.items():
            if count != len(names):
                raise DocumentError(
                    "layout",
                    f"{name} has {count} layers, and the model {len(names)}, the first and the "
                    "last included; count them all",
                )
        layers = iter(zip(names, *choices, strict=True))
        return [list(itertools.islice(layers, count)) for count in split]


def read_placement(words: Iterable[str]) -> tuple[Placement | None, list[str]]:
    """Return what words of a layout say of its stages, and the words that say something else.

    >>> placement, others = read_placement(["tp=2", "split=2+1", "recompute=2xnone+full"])
    >>> placement.split, placement.recompute, others
    ((2, 1), ('none', 'none', 'full'), ['tp=2'])
    """
    values: dict[str, tuple[str, ...]] = {}
    others: list[str] = []
    for word in words:
        name, _, text = word.partition("=")
        if name == "split" or (name in ("recompute", "activations") and _has_runs(text)):
            if name in values:
                raise DocumentError("layout", f"'{word:.40}': {name} is given twice; leave one out")
            values[name] = _values_of_runs(name, text)
        else:
            others.append(word)
    if not values:
        return None, others
    split = tuple(_positive(text) for text in values.pop("split", ())) or None
    return Placement(split=split, **values), others


def _has_runs(text: str) -> bool:
    return text == "mixed" or "+" in text or text[:1].isdecimal()


_CHOICES = {"recompute": get_args(Recompute), "activations": ("keep", "offload", "compress")}


def _values_of_runs(name: str, text: str) -> tuple[str, ...]:
    if text == "mixed":
        raise DocumentError(
            "layout",
            f"{name}=mixed stands for more than a text has; predict the plan's file instead",
        )
    values: list[str] = []
    for run in text.split("+"):
        first, sign, rest = run.partition("x")
        has_count = bool(sign) and first.isdecimal()
        count, value = (_positive(first), rest) if has_count else (1, run)
        if name in _CHOICES and value not in _CHOICES[name]:
            raise DocumentError("layout", f"'{run:.40}': {nearest(value, list(_CHOICES[name]))}")
        if len(values) + count > MOST_LAYERS:
            raise DocumentError("layout", f"{name} has more than {MOST_LAYERS:,} layers; lower it")
        values += [value] * count
    return tuple(values)


def _positive(text: str) -> int:
    number = whole_number(text)
    if not number or number > MOST_LAYERS:
        raise DocumentError("layout", f"'{text:.40}' is no number of layers; write 1 or more")
    return number
