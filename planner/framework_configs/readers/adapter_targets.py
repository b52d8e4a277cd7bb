"""Modules that PEFT gives adapters, where a configuration names them by one pattern.

PEFT takes a text as a pattern of a module's whole name (`peft.tuners.tuners_utils`,
check_target_module_exists), and a list as the ends of names.  A pattern of others is matched with
known names, within limits, and never with a model's.
"""

from __future__ import annotations

import re
import warnings

_MOST_CHARACTERS = 400
_MOST_REPEATS = 3
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_PREFIXES = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "model.text_model.layers",
    "language_model.layers",
    "transformer.h",
)
_PARTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b")),
    "self_attn.kv_a_proj_with_mqa",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *(f"mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")),
)
_LAYERS = 40


def is_pattern(text: str) -> bool:
    """Tell whether a text is a pattern of names, and not names with commas between them.

    >>> is_pattern(r"model.layers.[\\d]+.mlp.(up|down)_proj"), is_pattern("q_proj,v_proj")
    (True, False)
    """
    return re.search(r"[\[(|*+\\^$]", text) is not None


def modules_of(pattern: str) -> list[str] | None:
    """Return the modules of every block that a pattern names; None where it is not understood.

    >>> modules_of(r"model.layers.[\\d]+.(mlp|self_attn).(up|down|q)_proj")
    ['q_proj', 'up_proj', 'down_proj']
    >>> modules_of(r".*\\.layers\\.(3|7)\\.self_attn\\.q_proj") is None
    True
    """
    if (
        len(pattern) > _MOST_CHARACTERS
        or len(_REPEATS.findall(pattern)) > _MOST_REPEATS
        or _REPEATED_GROUP.search(pattern)
    ):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matches = re.compile(pattern).fullmatch
    except (re.error, OverflowError, RecursionError):
        return None
    for prefix in _PREFIXES:
        counts = {
            part: sum(matches(f"{prefix}.{at}.{part}") is not None for at in range(_LAYERS))
            for part in _PARTS
        }
        if any(counts.values()):
            if set(counts.values()) - {0, _LAYERS}:  # some blocks alone
                return None
            named = [part.rpartition(".")[2] for part, count in counts.items() if count]
            return list(dict.fromkeys(named))
    return None
