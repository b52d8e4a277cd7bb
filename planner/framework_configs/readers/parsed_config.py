"""A parsed configuration in the words of a plan, with the words that were not understood."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import one_line
from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.schedules import SCHEDULES

_VARIABLE = re.compile(r"\$\{(?:oc\.env:)?([\w.]+)[^}]*\}|\$\([^)]*\)?")
OWN_FAMILY = "own"
"""Family of a decoder that only the figures of a configuration describe."""
WORDS_OF_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Settings:
    """Settings by key, with a record of the keys that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._taken: set[str] = set()
        self._parts: list[Settings] = []
        self.loose: list[str] = []
        """Unknown words behind a switch, which may be words of their own."""
        self.unusual: list[str] = []
        """Settings `key=value` with a known key and an unknown value."""
        self.without_effect: list[str] = []
        """Keys that decide nothing beside the other settings."""

    def pop(self, key: str, *others: str) -> Any:
        """Return the value of a key, or of one of its other names; None if none of them is there.

        DocumentError where that is a variable that nothing sets.
        """
        result = self.ignore(key, *others)
        for word in result if isinstance(result, list) else [result]:
            unknown = _VARIABLE.search(word) if isinstance(word, str) else None
            if unknown is not None:
                name = unknown[1] or key
                how = f"add --set {name}=VALUE" if "." not in name else "write its value here"
                raise DocumentError(key, f"is {word:.60}, which is not set here; {how}")
        return result

    def ignore(self, key: str, *others: str) -> Any:
        """Return the same of a key that may be unknown, because it decides nothing."""
        result = None
        for name in (key, *others):
            self._taken.add(name)
            value = self._values.get(name)
            result = value if result is None else result
        return result

    @property
    def understood(self) -> int:
        """Number of the present keys that were read."""
        count = sum(
            name in self._taken and value is not None and not isinstance(value, dict)
            for name, value in self._values.items()
        )
        return count + sum(part.understood for part in self._parts)

    def word(self, key: str, *others: str) -> str | None:
        """Return a word or number as text; DocumentError if it is a list or a section."""
        value = self.pop(key, *others)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, bool | int | float):
            raise DocumentError(key, f"is {value!r:.40}; it is one word")
        return str(value)

    def model_name(self, key: str, *others: str) -> str | None:
        """Return the name or path of a model; only its last part need be known."""
        value = self.ignore(key, *others)
        if isinstance(value, str) and _VARIABLE.search(value):
            last = value.rpartition("/")[2]
            return None if _VARIABLE.search(last) else last
        return self.word(key, *others)

    def devices(self, key: str) -> int | None:
        """Return a number of devices or nodes; None where a variable of the machine has it."""
        value = self.ignore(key)
        is_open = isinstance(value, str) and _VARIABLE.search(value) is not None
        return None if is_open else self.count(key)

    def expect(self, key: str, *values: object) -> None:
        """Take a key of which plans have these values alone; any other is not understood."""
        value = self.ignore(key)
        if isinstance(value, dict | list):
            raise DocumentError(key, f"is {value!r:.40}; it is one word")
        if value is not None and all(not _is_alike(value, usual) for usual in values):
            self.name(key)

    def expect_each(self, usual: Mapping[str, Sequence[object]]) -> None:
        """Take keys of which plans have some values alone, by key."""
        for key, values in usual.items():
            self.expect(key, *values)

    def name(self, *keys: str) -> None:
        """Record keys as not understood, with their values."""
        for key in keys:
            value = self.ignore(key)
            if value is not None:
                shown = f"{key}={_value_text(value)}" if value is not True else key
                self.unusual += [shown] * (shown not in self.unusual)

    def idle(self, *keys: str) -> None:
        """Take keys that decide nothing beside the other settings."""
        self.without_effect += [key for key in keys if self.ignore(key) is not None]

    def choice(self, key: str, values: Mapping[str, str], usual: str) -> str:
        """Return what a word means; one that is not among `values` is not understood."""
        value = self.word(key)
        if value is None:
            return usual
        meanings = {word.lower(): meaning for word, meaning in values.items()}
        meaning = meanings.get(value.lower())
        if meaning is None:
            self.name(key)
        return meaning or usual

    def number(self, key: str, *others: str) -> int | None:
        """Return a whole number; DocumentError if it is none."""
        return _number(self.pop(key, *others), key, whole=True)  # type: ignore[return-value]

    def count(self, key: str, *others: str) -> int | None:
        """Return a whole number from 1, None where the value is missing or 0."""
        value = self.number(key, *others)
        if value is not None and value < 0:
            raise DocumentError(key, f"is {value}; it is a whole number from 0")
        return value or None

    def degree(self, key: str, *others: str) -> int:
        """Return a whole number from 1, which is 1 where the value is missing."""
        value = self.number(key, *others)
        if value is not None and value < 1:
            raise DocumentError(key, f"is {value}; it is a whole number from 1")
        return value or 1

    def bound(self, key: str, *others: str) -> float | None:
        """Return a number, which may be infinite; DocumentError if it is none."""
        return _number(self.pop(key, *others), key, whole=False)

    def amount(self, key: str, *others: str) -> float | None:
        """Return a finite number; DocumentError if it is none."""
        value = self.bound(key, *others)
        if value is not None and math.isinf(value):
            raise DocumentError(key, "is infinite; it is a number")
        return value

    def share(self, key: str, *others: str) -> float | None:
        """Return a number from 0 to 1; DocumentError if it is none."""
        value = self.bound(key, *others)
        if value is not None and not 0 <= value <= 1:
            raise DocumentError(key, f"is {value:g}; it is a share from 0 to 1")
        return value

    def pair(self, key: str) -> tuple[float | None, float | None]:
        """Return two numbers of a list; DocumentError if it is anything else."""
        value = self.pop(key)
        if value is None or value == "auto":
            return None, None
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise DocumentError(key, f"is {value!r:.40}; it is two numbers")
        first, second = (_number(item, key, whole=False) for item in value)
        return first, second

    def words(self, key: str) -> list[str]:
        """Return the words of a list, or of a text with commas; none where the value is missing."""
        value = self.pop(key)
        if value is None:
            return []
        listed = value if isinstance(value, list | tuple) else str(value).split(",")
        return [str(item) for item in listed]

    def flag(self, key: str, *others: str) -> bool | None:
        """Return whether a switch is on; an unknown word behind it is one of its own."""
        value = self.ignore(key, *others)
        if isinstance(value, str) and _VARIABLE.match(value):
            self.loose.append(value)
            return True
        value = self.pop(key, *others)
        if value is None or isinstance(value, bool):
            return value
        truth = WORDS_OF_TRUTH.get(str(value).lower())
        if truth is None:
            raise DocumentError(key, f"is {value!r:.40}; it is true or false")
        return truth

    def part(self, key: str) -> Settings:
        """Return the settings of a section; the caller puts what it leaves under `key`."""
        value = self.pop(key)
        if value is None:
            return Settings({})
        if not isinstance(value, dict):
            raise DocumentError(key, f"is {value!r:.40}; it is a section of settings")
        self._parts.append(Settings(value))
        return self._parts[-1]

    @property
    def unread(self) -> list[str]:
        """Keys with a value that were not read, in their order."""
        return [
            key
            for key, value in self._values.items()
            if value is not None and key not in self._taken
        ]

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None


def _is_alike(value: object, usual: object) -> bool:
    """Return True if a value is the usual one, however it is written."""
    if isinstance(usual, bool):
        return WORDS_OF_TRUTH.get(str(value).lower()) is usual
    try:
        return value == usual or float(value) == float(usual)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return str(value).lower() == str(usual).lower()


MOST_SHOWN = 160
"""Characters of a value that is shown: as many as an expression with several words has."""


def _value_text(value: object) -> str:
    text = one_line(str(value))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


def _number(value: Any, key: str, *, whole: bool) -> float | None:
    if value is None or value == "auto":
        return None
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if math.isnan(number) or (whole and not (abs(number) < 1e15 and number == int(number))):
        raise DocumentError(key, f"is {value!r:.40}; it is a {'whole ' * whole}number")
    return int(number) if whole else number


@dataclass(kw_only=True)
class ParsedConfig:
    """Settings of a configuration; None for those that it does not contain."""

    framework: str
    devices: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data_replicate: int | None = None
    data_shard: int | None = None
    """Number of ranks that divide states; -1: all remaining ranks."""
    zero: int = 0
    sequence_parallel: bool = True
    schedule: str | None = None
    virtual_stages: int = 1
    micro_batch: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    offload: str = "none"
    recompute: str = "none"
    samples_of_schedule: int | None = None
    """Samples that a run of a pipeline's schedule takes, of which a plan has one a step."""
    overlaps_reduction: bool = True
    """Gradients are reduced beside the backwards, as plans have it."""
    words_of_replicas: list[str] = field(default_factory=list)
    """Words that have no effect where one rank has all samples."""
    recompute_every: int = 1
    """Every n-th block of a rank is recomputed."""
    loss_chunks: int | None = None
    """Number of parts in which a micro-batch's loss is computed; None: one, from all logits."""
    recomputed: int | None = None
    """The number of blocks of each stage, from its first; None: all."""
    blocks: list[int] | None = None
    """Blocks of each stage in the model's order, where they are listed."""
    ends: tuple[int | None, int | None] = (None, None)
    """Number of blocks of the first and of the last stage."""
    lighter: tuple[int, int] = (0, 0)
    """Number of blocks by which the first and the last stage have fewer than the others."""
    compile: str = "none"
    scales: str = "tensorwise"
    axes: dict[str, Any] = field(default_factory=dict)
    """Unusual values of other axes of a layout, by name."""
    options: list[str] = field(default_factory=list)
    """Options of the framework, such as `deepep`."""
    training: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Figures of the model: layers, hidden_size, heads, ffn_size; or its name."""
    assumed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    understood: int = 0
    """Number of settings that were read."""

    def gather(
        self, settings: Settings, section: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        """Record the keys of a section that were not read, and those without effect.

        `names` are those that the configuration has for keys.
        """
        before = f"{section}." if section else ""

        def in_place(word: str) -> str:
            key, sign, value = word.partition("=")
            return before + (names or {}).get(key, key) + sign + value

        self.unknown += [in_place(word) for word in (*settings.unread, *settings.unusual)]
        self.unknown += settings.loose
        self.without_effect += [in_place(key) for key in settings.without_effect]

    def trains_by_adamw(self, values: Settings) -> None:
        """Note the arguments of torch.optim.AdamW, by torch's names."""
        beta1, beta2 = values.pair("betas")
        self.trains(
            learning_rate=values.amount("lr"),
            beta1=beta1,
            beta2=beta2,
            epsilon=values.amount("eps"),
            weight_decay=values.amount("weight_decay"),
        )

    def trains(self, **values: Any) -> None:
        """Record the settings of the optimizer that are present."""
        self.training |= {name: value for name, value in values.items() if value is not None}


def schedule_name(framework: str, word: str) -> str | None:
    """Return the schedule that a framework calls so."""
    return next((s.name for s in SCHEDULES.values() if s.names.get(framework) == word), None)


def named_file(key: str, name: object, surroundings: ScriptEnvironment | None) -> tuple[str, str]:
    """Return name and text of another file that a configuration names; it must be there."""
    if not isinstance(name, str):
        raise DocumentError(key, f"is {name!r:.40}; it is a file, or a section of settings")
    text = None if surroundings is None else surroundings.text_of(name)
    if text is None:
        raise DocumentError(
            key,
            f"names {name!r:.60}, which is not beside this file; put it there, since it decides "
            "what the run takes",
        )
    return name, text
