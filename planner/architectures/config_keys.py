"""Keys of a configuration, read: what must be there, what may be left out, and of which type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.planner.errors import DocumentError

Config = Mapping[str, Any]


class Keys(Mapping[str, Any]):
    """A configuration that notes which of its keys were read.

    >>> config = Keys({"hidden_size": 8, "engram_size": 4})
    >>> config["hidden_size"], sorted(set(config) - config.read)
    (8, ['engram_size'])
    """

    def __init__(self, config: Config, read: set[str] | None = None) -> None:
        self._config = config
        self.read = set[str]() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def __or__(self, other: Config) -> Keys:
        """Return these keys with some replaced."""
        return Keys({**self._config, **other}, self.read)

    def __ror__(self, other: Config) -> Keys:
        """Return these keys with defaults."""
        return Keys({**other, **self._config}, self.read)


AS_RECORDED = "plan FOLDER:recorded, the model as its own class runs"
"""Advice for a configuration that has no figures here."""


def without_figures(key: str, why: str) -> DocumentError:
    """Return the refusal of a setting, and what to do instead.

    >>> print(without_figures("alibi", "is true"))
    alibi: is true, which has no figures here; plan FOLDER:recorded, the model as its own class runs
    """
    return DocumentError(key, f"{why}, which has no figures here; {AS_RECORDED}")


def positive(config: Config, key: str) -> int:
    """Return a figure that must be there and be at least 1."""
    if config.get(key) is None:
        raise DocumentError(key, "is missing; give it, as the model's own config.json does")
    return whole_number(config, key, least=1)


def experts_of(config: Config, key: str) -> int:
    """Return the number of experts; `transformers` 5 writes one name for all families."""
    new_key = "num_local_experts"
    return positive(config, new_key if config.get(key) is None and new_key in config else key)


def count(config: Config, key: str) -> int:
    """Return a figure that must be there and may be 0."""
    if config.get(key) is None:
        raise DocumentError(key, "is missing; give it, as the model's own config.json does")
    return whole_number(config, key, least=0)


def optional(config: Config, key: str, default: int | None) -> int | None:
    """Return a figure that may be left out (`default`) or null (None)."""
    if key not in config:
        return default
    return None if config[key] is None else whole_number(config, key, least=0)


def whole_number(config: Config, key: str, *, least: int) -> int:
    """Return a whole number of at least `least`."""
    value = config[key]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**40:
        raise DocumentError(key, f"is {value!r:.60}; it must be a whole number of at least {least}")
    return value


def flag(config: Config, key: str, default: bool) -> bool:
    """Return a flag that may be left out."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise DocumentError(key, f"is {value!r:.60}; it must be true or false")
    return value


def settings(config: Config, key: str) -> Config:
    """Return the settings below a key; none where it is left out."""
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise DocumentError(key, f"is {rope!r:.40}; it must be a mapping")
    return rope


def rotated_features(config: Config, head_dim: int, *, key: str, default: float) -> int:
    """Return the features of a head that are rotated, 0 meaning all; `key` is their share's name.

    `transformers` 5 writes the share among the `rope_parameters`.
    """
    rope = settings(config, "rope_parameters")
    share = config.get(key, rope.get("partial_rotary_factor", default))
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise DocumentError(key, f"is {share!r:.40}; it must be above 0 and at most 1")
    features = int(head_dim * share)
    return 0 if features == head_dim else features


def divided_head_dim(config: Config, *, hidden: tuple[str, int], heads: tuple[str, int]) -> int:
    """Return the width of a head where the configuration leaves it to a division."""
    if hidden[1] % heads[1]:
        raise DocumentError(
            heads[0], f"is {heads[1]}, which does not divide {hidden[0]} {hidden[1]}"
        )
    return hidden[1] // heads[1]
