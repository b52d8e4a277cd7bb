"""Lengths of samples that vary, and what batches make of them.

    packed    several samples in a row of `seq_len` tokens, with attention inside each
    longest   each micro-batch is padded to its longest sample
    exact     the samples of a micro-batch one behind the other, without padding

Memory is that of the longest batch, time that of the mean one.  Lengths are drawn one by one from a
file, or from a log-normal distribution of the mean and the 95th percentile that are given, cut at
the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np

from meshwright.planner.documents.document import json_data, read_text
from meshwright.planner.documents.units import MOST_TOKENS
from meshwright.planner.errors import DocumentError

Batching = Literal["packed", "longest", "exact"]
QUANTILES = 1024
"""Samples of a distribution that is given by three numbers."""
MOST_LINES = 1_000_000
LENGTH_MULTIPLE = 64
"""Lengths are rounded up to it, so that ranks divide positions."""
Z95 = NormalDist().inv_cdf(0.95)
"""Standard deviations of the 95th percentile."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of samples, the shortest first."""

    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Tokens of a sample, on average."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.tokens[-1]

    def percentile(self, share: float) -> int:
        """Return the length that a share of the samples does not exceed."""
        return self.tokens[min(len(self.tokens) - 1, math.ceil(share * len(self.tokens)) - 1)]

    @property
    def of_token(self) -> float:
        """Length of the sample that a token is in, on average over tokens.

        >>> Lengths((10, 30)).of_token
        25.0
        """
        return sum(each**2 for each in self.tokens) / sum(self.tokens)

    def longest_of(self, count: int) -> float:
        """Return the length of the longest of `count` samples, on average.

        >>> Lengths((1, 2)).longest_of(2)
        1.75
        """
        n = len(self.tokens)
        below = (np.arange(n + 1) / n) ** count
        return float(np.dot(np.asarray(self.tokens, dtype=float), np.diff(below)))

    def packed_share(self, seq_len: int) -> float:
        """Return the share of positions that samples fill, each row as long as the next one fits.

        >>> Lengths((30, 30, 30)).packed_share(100)
        0.9
        """
        order = np.random.default_rng(0).permutation(len(self.tokens))
        rows, left = 1, seq_len
        for at in order:
            size = min(self.tokens[at], seq_len)
            if size > left:
                rows, left = rows + 1, seq_len
            left -= size
        filled = sum(min(size, seq_len) for size in self.tokens)
        return filled / (rows * seq_len)

    def cut(self, seq_len: int) -> Lengths:
        """Return the lengths of samples that are cut at `seq_len` tokens."""
        return Lengths(tuple(min(size, seq_len) for size in self.tokens))


def read_lengths(text: str) -> Lengths:
    """Read `mean,p95,max`, or a file with a sample on each line.

    >>> read_lengths("600,1800,4096").longest
    4096
    """
    parts = text.split(",")
    if len(parts) == 3 and all(part.strip().replace(".", "", 1).isdecimal() for part in parts):
        return _log_normal(*(float(part) for part in parts))
    if not Path(text).is_file():
        raise DocumentError(
            "lengths", f"'{text:.60}' is no file; name one, or write MEAN,P95,MAX as 600,1800,4096"
        )
    sizes = []
    for number, line in enumerate(read_text(text).splitlines(), 1):
        if number > MOST_LINES:
            raise DocumentError("lengths", f"has more than {MOST_LINES:,} lines; draw fewer")
        if line.strip():
            sizes.append(_length_of(line, number))
    if not sizes:
        raise DocumentError("lengths", f"{text}: has no line; give a sample on each")
    return Lengths(tuple(sorted(sizes)))


def _length_of(line: str, number: int) -> int:
    """Return the tokens of a sample: a number, `length`, or how many `input_ids` there are."""
    try:
        sample = json_data(line)
    except DocumentError as error:
        raise DocumentError(
            "lengths", f"line {number} is no JSON; give one value a line"
        ) from error
    if isinstance(sample, dict):
        tokens = sample.get("input_ids", sample.get("tokens"))
        sample = len(tokens) if isinstance(tokens, list) else sample.get("length")
    if isinstance(sample, bool) or not isinstance(sample, int) or not 1 <= sample <= MOST_TOKENS:
        raise DocumentError(
            "lengths",
            f"line {number} has no number of tokens; give a whole number, `length` or `input_ids`",
        )
    return sample


def _log_normal(mean: float, high: float, longest: float) -> Lengths:
    if not 1 <= mean <= high <= longest <= MOST_TOKENS:
        raise DocumentError(
            "lengths", "do not rise; give a mean, a 95th percentile and a longest, as 600,1800,4096"
        )
    ratio = math.log(high / mean)
    room = Z95**2 - 2 * ratio
    if room < 0:
        raise DocumentError(
            "lengths",
            f"has a 95th percentile of {high:g}, beyond {mean * math.exp(Z95**2 / 2):.0f}, the "
            "most of a log-normal distribution with that mean; give a file",
        )
    deviation = Z95 - math.sqrt(room)
    middle = math.log(mean) - deviation**2 / 2
    normal = NormalDist(middle, deviation) if deviation else None
    shares = ((at + 0.5) / QUANTILES for at in range(QUANTILES))
    sizes = [math.exp(normal.inv_cdf(share)) if normal else mean for share in shares]
    cut = [max(1, min(round(size), round(longest))) for size in sizes]
    return Lengths((*cut[:-1], round(longest)))


def summary(lengths: Lengths) -> str:
    """Return lengths in words.

    >>> summary(read_lengths("100,100,100"))
    'samples of 100 tokens on average, 95 % within 100, the longest 100'
    """
    return (
        f"samples of {lengths.mean:,.0f} tokens on average, 95 % within "
        f"{lengths.percentile(0.95):,}, the longest {lengths.longest:,}"
    )


def rounded_up(tokens: float, multiple: int) -> int:
    """Return the next multiple: ranks divide positions."""
    return max(1, math.ceil(tokens / multiple)) * multiple


@dataclass(frozen=True, slots=True)
class LengthsOfJob:
    """Lengths of a job: tokens of a sample, and of the document that a token is in."""

    seq_len: int | None
    document_len: int | None
    lengths: Lengths | None = None
    batching: Batching = "packed"

    def mean_len(self, micro_batch: int, multiple: int) -> int:
        """Return the tokens that a sample of a mean micro-batch takes, where none is packed."""
        assert self.lengths is not None
        tokens = self.lengths.mean
        if self.batching == "longest":
            tokens = self.lengths.longest_of(micro_batch)
        return rounded_up(tokens, multiple)


def lengths_of_job(
    text: str | None,
    batching: Batching | None,
    *,
    seq_len: int | None,
    document_len: int | None,
) -> LengthsOfJob:
    """Return a job's lengths; samples longer than a `seq_len` that is given are cut there."""
    if text is None:
        if batching is not None:
            raise DocumentError("batching", f"is {batching}, and no lengths are given; add them")
        return LengthsOfJob(seq_len, document_len)
    if document_len is not None:
        raise DocumentError("document-len", "follows from the lengths; leave it out")
    lengths = read_lengths(text)
    seq_len = seq_len or rounded_up(lengths.longest, LENGTH_MULTIPLE)
    lengths = lengths.cut(seq_len)
    if batching in (None, "packed"):
        return LengthsOfJob(seq_len, round(lengths.of_token), lengths)
    longest = min(seq_len, rounded_up(lengths.longest, LENGTH_MULTIPLE))
    return LengthsOfJob(longest, None, lengths, batching or "packed")
