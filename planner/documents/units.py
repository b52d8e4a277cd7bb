"""Units: the validated number types of the documents, and how figures are shown to people.

Documents hold SI units only (seconds, bytes, bytes per second, FLOP per second); GiB, ms and
TFLOP/s exist here, in rendering.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter

from meshwright.planner.errors import DocumentError

# Sizes are bounded: counts are exact as floats, products of several figures stay finite, and what
# is listed one by one (devices, samples) can be listed.
MOST_COUNT = 2**53
MOST_DEVICES = 1_000_000
MOST_SAMPLES = 2**24
"""Largest number of samples of one step."""
MOST_TOKENS = 2**30
"""Largest number of tokens of one sample."""
LARGEST, SMALLEST = 1e30, 1e-30
LONGEST_S = 1e7
"""Longest wait in seconds; clocks of the runtime count no years."""


def _invertible(value: float) -> float:
    if value < SMALLEST:
        raise ValueError(f"is {value:g}; give at least {SMALLEST:g}")
    return value


Count = Annotated[int, Field(ge=0, le=MOST_COUNT, strict=True)]
Positive = Annotated[int, Field(ge=1, le=MOST_COUNT, strict=True)]
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES, strict=True)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES, strict=True)]
SampleTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
Finite = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
"""Computed figure; a figure that is read is an Amount."""
Amount = Annotated[float, Field(ge=0, le=LARGEST, strict=True, allow_inf_nan=False)]
Rate = Annotated[
    float,
    Field(gt=0, le=LARGEST, strict=True, allow_inf_nan=False),
    AfterValidator(_invertible),
]
Fraction = Annotated[
    float, Field(gt=0, le=1, strict=True, allow_inf_nan=False), AfterValidator(_invertible)
]
Share = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]
"""Part of a whole, below 1."""
Proportion = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]
Overhead = Annotated[float, Field(ge=1, le=1000, strict=True, allow_inf_nan=False)]
"""Whole over a part of it."""
Factor = Annotated[float, Field(ge=1e-3, le=1e3, strict=True, allow_inf_nan=False)]
"""Factor that changes a figure."""
Timeout = Annotated[float, Field(ge=1e-3, le=LONGEST_S, strict=True, allow_inf_nan=False)]
"""Seconds of a wait."""
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=4096, strict=True)]
"""Prose of one or several lines."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"is {text[:60]!a}; write one line of printable characters")
    return text


def _name(text: str) -> str:
    if not text.isprintable() or "/" in text or "\\" in text or text in (".", ".."):
        raise ValueError(f"is {text[:60]!a}; write printable characters, none of them / or \\")
    return text


Line = Annotated[Text, AfterValidator(_printable)]
"""Path, or word of a command line."""
Name = Annotated[str, Field(min_length=1, max_length=200, strict=True), AfterValidator(_name)]
"""Name that people use.  It is shown, and becomes part of file names."""

GIB = 2**30


def file_name(name: str) -> str:
    """Return a name as part of a file's, whatever characters it has.

    >>> file_name("llama-3.1-8b"), file_name("../../x\\n#y"), file_name("..")
    ('llama-3.1-8b', 'x-y', 'model')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100] or "model"


def name_of(path: str) -> str:
    """Return the last part of a path if that can be what a model is called, and it be printed."""
    try:
        if not path.isprintable():
            raise ValueError(path)
        return TypeAdapter(Name).validate_python(path.rpartition("/")[2])
    except ValueError as error:
        why = "names a model; give it 1 to 200 printable characters"
        raise DocumentError("", f"{path[-60:]!a} {why}") from error


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that a person would use.

    >>> seconds_text(0.00042), seconds_text(0.42), seconds_text(42.0), seconds_text(7300.0)
    ('420 µs', '420 ms', '42.0 s', '2.0 h')
    >>> seconds_text(0.99951), seconds_text(0.00099951)
    ('1 s', '1 ms')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def percent_text(share: float) -> str:
    """Return a share in percent, with two digits and without an exponent.

    >>> percent_text(0.0032), percent_text(0.9999), percent_text(3.7), percent_text(1e-9)
    ('0.32 %', '100 %', '370 %', '0 %')
    """
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 99.5 else f"{round(percent, 4):.2g} %"


def whole_number(text: str) -> int | None:
    """Return the number that a user wrote in digits, or None if it is none or beyond any count.

    >>> whole_number("12"), whole_number("1e3"), whole_number("9" * 5000)
    (12, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def duration_s(text: str) -> float:
    """Return the seconds of a written duration.

    >>> duration_s("5min"), duration_s("90s"), duration_s("1.5h"), duration_s("30")
    (300.0, 90.0, 5400.0, 30.0)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|min|m|h)?\s*", text)
    seconds = float(match[1]) * {"m": 60, "h": 3600}.get((match[2] or "s")[0], 1) if match else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise DocumentError(
            "", f"'{text:.40}' is no duration from 0 to {LONGEST_S:g} s; write 90s, 5min or 1h"
        )
    return seconds


def bytes_text(size_bytes: float) -> str:
    """Return a size in binary units, as memory is sold to programs.

    >>> bytes_text(80 * 2**30), bytes_text(3 * 2**20), bytes_text(500)
    ('80.0 GiB', '3.0 MiB', '500 B')
    """
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"


def count_text(count: float) -> str:
    """Return a count with the suffix that papers use.

    >>> count_text(8.03e9), count_text(124e6), count_text(512)
    ('8.03B', '124M', '512')
    """
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.0f}"
