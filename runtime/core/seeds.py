"""Seeds of random generators, one for each parameter of a run."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, name: str) -> int:
    """Return the generator seed of one parameter.

    >>> seed_of(0, "head.norm.weight") == seed_of(0, "head.norm.weight")
    True
    >>> seed_of(0, "head.norm.weight") == seed_of(1, "head.norm.weight")
    False
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
