"""Bytes of the buckets in which replicas keep their gradients (runtime/parallel/replicas.py).

A bucket has the gradients of neighbouring parameters, one behind the other, and is allocated whole
when backward makes the first of them.
"""

from __future__ import annotations

from meshwright.planner.documents.tolerances import SETTLED
from meshwright.planner.operators.operator_table import larger, smaller

BUCKET_BYTES = 25 * 2**20
"""Least size of a bucket in bytes, if there are as many."""
LEAST_BUCKET_BYTES = 2**20
"""Least size of a small model's bucket: a message of fewer bytes takes as long."""
FEWEST_BUCKETS = 8
"""Fewest buckets of a small model: each is allocated whole while activations are alive, and its
reduction overlaps with backward."""


def gradient_bucket_bytes(whole_bytes: float) -> float:
    """Return the bytes that complete a bucket, of all gradients of a rank.

    >>> gradient_bucket_bytes(80 * 2**20) / 2**20
    10.0
    """
    return smaller(BUCKET_BYTES, larger(whole_bytes / FEWEST_BUCKETS, LEAST_BUCKET_BYTES))


def allocated_gradient_bytes(made_bytes: float, whole_bytes: float) -> float:
    """Return the bytes of all buckets that have one of the gradients made so far.

    >>> [allocated_gradient_bytes(made * 2**20, 20 * 2**20) / 2**20 for made in (0, 1, 5, 19)]
    [0.0, 2.5, 5.0, 20.0]
    """
    size = gradient_bucket_bytes(whole_bytes)
    # Sums taken in two orders differ in the last bits.
    begun = -((SETTLED * whole_bytes - made_bytes) // size)
    return larger(made_bytes, smaller(whole_bytes, begun * size))
