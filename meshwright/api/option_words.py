"""Fields of a record as options of the command line, for commands started elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def flag(field: str) -> str:
    """Return the option of a record's field.

    >>> flag("checkpoint_every"), flag("evaluate_every")
    ('--checkpoint-every', '--eval-every')
    """
    return "--" + field.replace("evaluate", "eval").replace("_", "-")


def option_words(values: Mapping[str, object]) -> Iterator[str]:
    """Yield the options that set these values of fields.

    >>> list(option_words({"steps": 7, "resume": True, "data": None, "training": ("a=1", "b=2")}))
    ['--steps', '7', '--resume', '--training', 'a=1', '--training', 'b=2']
    """
    for field, value in values.items():
        if isinstance(value, bool):
            yield from [flag(field)] if value else []
        elif isinstance(value, tuple | list):
            yield from (part for item in value for part in (flag(field), str(item)))
        elif value is not None:
            yield from (flag(field), str(value))
