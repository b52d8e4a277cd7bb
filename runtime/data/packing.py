"""Packing: documents of different length laid into rows of one length.

Documents are taken in a seeded order, and each is put into the open row that it fills best; when
none has room, the fullest is closed.  A document longer than a row is cut off.

Which documents share a row depends on corpus, row length and seed alone; each epoch takes the rows
in an order of its own.  So sample i is the same on every rank, whatever was read before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.runtime.data.corpus import Batch, Corpus, CorpusSamples, permutation

OPEN_ROWS = 64
"""Rows that documents may still be put into: more fill better, fewer keep the order."""


def pack_rows(lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Return the documents of each row, by their place in `lengths`.

    >>> pack_rows([3, 2, 5, 1, 9], room=5)
    [[0, 1], [2], [4], [3]]
    """
    opened: list[tuple[int, int, list[int]]] = []  # by room left, then age
    closed: list[list[int]] = []
    for at, length in enumerate(lengths):
        wanted = min(length, room)
        place = bisect_left(opened, (wanted, -1))
        if place < len(opened):
            left, age, row = opened.pop(place)
            row.append(at)
        else:
            if len(opened) == OPEN_ROWS:
                closed.append(opened.pop(0)[2])
            left, age, row = room, at, [at]
        if left == wanted:
            closed.append(row)
        else:
            insort(opened, (left - wanted, age, row))
    return closed + [row for _, _, row in opened]


class PackedSamples:
    """The samples of conversations, by their index in an endless sequence of epochs."""

    def __init__(self, corpus: Corpus, *, seq_len: int, seed: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @cached_property
    def rows(self) -> list[list[int]]:
        """The documents of each row."""
        order = permutation(self.corpus.documents, self.seed)
        lengths = np.diff(self.corpus.starts)[order].tolist()
        return [[int(order[at]) for at in row] for row in pack_rows(lengths, room=self.seq_len + 1)]

    @property
    def cut(self) -> int:
        """Return how many documents are longer than a row."""
        return int((np.diff(self.corpus.starts) > self.seq_len + 1).sum())

    def batch(self, first: int, count: int) -> Batch:
        """Return samples first, first + 1, ..., `count` of them.

        What no document fills is token 0, a document of its own in which nothing counts.
        """
        room = self.seq_len + 1
        tokens = np.zeros((count, room), np.int64)
        counts = np.zeros((count, room), np.bool_)
        starts = np.zeros((count, room), np.int64)
        for at in range(count):
            filled = 0
            for begin, length in self.places(first + at):
                place = slice(filled, filled + length)
                tokens[at, place] = self.corpus.read(begin, length)
                counts[at, place] = self.corpus.counts[begin : begin + length]
                counts[at, filled] = False  # nothing in its document comes before the first
                starts[at, place] = filled
                filled += length
            starts[at, filled:] = filled
        return Batch(tokens, counts[:, 1:], starts[:, :-1])

    def epoch(self, sample: int) -> int:
        """Return how many epochs are complete before a sample."""
        return sample // len(self.rows)

    def places(self, sample: int) -> list[tuple[int, int]]:
        """Return where in the corpus each document of a sample begins, and its length here."""
        result = []
        for document in self._row(sample):
            begin, end = self.corpus.starts[document : document + 2].tolist()
            result.append((begin, min(end - begin, self.seq_len + 1)))
        return result

    def _row(self, sample: int) -> list[int]:
        epoch, place = divmod(sample, len(self.rows))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, permutation(len(self.rows), self.seed, epoch, 1)
        return self.rows[int(self._order[1][place])]


def samples_of(corpus: Corpus, *, seq_len: int, seed: int) -> CorpusSamples | PackedSamples:
    """Return a corpus's samples: a stream of text, or rows of conversations."""
    of = PackedSamples if corpus.kind == "conversations" else CorpusSamples
    return of(corpus, seq_len=seq_len, seed=seed)
