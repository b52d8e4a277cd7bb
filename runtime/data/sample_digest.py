"""Digests of used samples: each sample is used once, under every plan, or the run says so.

Of the sample numbers that batches were read for, three figures are kept: how many there are, their
sum, and the sum of their squares, the last two modulo a prime.  Of the first n numbers, each once,
they follow from n, so that samples that were used twice, or never, are found when a run goes on,
and named where it is one of each at most.  Two of each are always found (two sums determine two
numbers); more may cancel, as 1, 4, 7, 8 twice and 2, 3, 6, 9 never do.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.units import Count

PRIME = 2**31 - 1


class SampleDigest(Part):
    """Digest of a multiset of sample numbers."""

    count: Count = 0
    total: Count = 0
    """Their sum modulo PRIME."""
    squares: Count = 0
    """The sum of their squares modulo PRIME."""

    def __add__(self, other: SampleDigest) -> SampleDigest:
        return SampleDigest(
            count=self.count + other.count,
            total=(self.total + other.total) % PRIME,
            squares=(self.squares + other.squares) % PRIME,
        )

    @classmethod
    def of(cls, numbers: Iterable[int]) -> SampleDigest:
        """Return that of some numbers.

        >>> SampleDigest.of([2, 0, 1]) == SampleDigest.of_first(3)
        True
        """
        used = list(numbers)
        return cls(
            count=len(used),
            total=sum(used) % PRIME,
            squares=sum(number**2 for number in used) % PRIME,
        )

    @classmethod
    def of_range(cls, numbers: range) -> SampleDigest:
        """Return that of numbers one after another.

        >>> SampleDigest.of_range(range(3, 7)) == SampleDigest.of([3, 4, 5, 6])
        True
        """
        after, before = cls.of_first(numbers.stop), cls.of_first(numbers.start)
        return cls(
            count=after.count - before.count,
            total=(after.total - before.total) % PRIME,
            squares=(after.squares - before.squares) % PRIME,
        )

    @classmethod
    def of_first(cls, count: int) -> SampleDigest:
        """Return that of the first numbers, each once."""
        last = count - 1
        return cls(
            count=count,
            total=count * last // 2 % PRIME,
            squares=last * count * (2 * last + 1) // 6 % PRIME,
        )

    def wrong(self, count: int) -> str | None:
        """Return what is wrong if each of the first numbers was to be used once, else None.

        >>> SampleDigest.of([0, 1, 1, 3]).wrong(4)
        'sample 1 was used twice and sample 2 never'
        >>> SampleDigest.of([0, 1]).wrong(3)
        'sample 2 was never used'
        """
        wanted = SampleDigest.of_first(count)
        if self == wanted:
            return None
        more = self.count - count
        by = (self.total - wanted.total) % PRIME
        squares = (self.squares - wanted.squares) % PRIME
        if count > PRIME:
            more = 2  # a number is not known by its remainder
        if more == 1 and by < count and by**2 % PRIME == squares:
            return f"sample {by} was used twice"
        if more == -1 and -by % PRIME < count and by**2 % PRIME == -squares % PRIME:
            return f"sample {-by % PRIME} was never used"
        if more == 0 and by:
            # Of a that was used for b: a - b and a^2 - b^2, whose quotient is a + b.
            both = squares * pow(by, -1, PRIME)
            half = pow(2, -1, PRIME)
            twice, never = (both + by) * half % PRIME, (both - by) * half % PRIME
            if twice < count and never < count:
                return f"sample {twice} was used twice and sample {never} never"
        return f"{self.count} samples were used for the first {count}, not each of them once"
