"""Recent: the newest of what is made once for each key, so that no number of keys fills memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """The values made for the most recently used keys.

    >>> squares = Recent[int](2)
    >>> [squares.get(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], 2 in squares, squares.count
    ([1, 4, 1, 9], False, 3)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[Any, Made] = {}
        self.count = 0
        """Number of values made so far, including those that were made again."""

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return what stands under a key, made now if nothing does."""
        if key in self._made:
            value = self._made.pop(key)
        else:
            value = make()
            self.count += 1
        self._made[key] = value  # the newest stands last
        while len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return value

    def __contains__(self, key: Any) -> bool:
        """Tell whether a key has something made."""
        return key in self._made
