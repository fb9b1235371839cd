"""Derived seeds: independent random streams from one seed per run.

Seeds are never added (``seed + epoch`` of one run equals ``seed`` of another); every stream is a labeled
hash of everything it depends on. The derivation is frozen: changing it changes the order of every epoch
(change class ITERATION ORDER).
"""

from __future__ import annotations

import hashlib


def derive(seed: int, label: str, *counters: int) -> int:
    """Derive a 64-bit key from a seed, a label and counters.

    Args:
        seed: Run-level seed, any Python integer.
        label: What the stream is for, such as ``"epoch-order"``; keeps streams with equal counters apart.
        *counters: Positions the stream depends on, such as epoch, step and micro-batch.

    Returns:
        An integer in ``[0, 2**64)``: the first eight bytes, little-endian, of BLAKE2b over the decimal text.

    Example:
        >>> derive(7, "epoch-order", 0) != derive(8, "epoch-order", 0)
        True
    """
    text = "\x1f".join(["shardflow-seed-1", str(seed), label, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
