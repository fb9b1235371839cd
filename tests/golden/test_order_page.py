"""docs/determinism.md says the order in full: here it is written a second time, from that page alone.

No NumPy and no module of shardflow: as this agrees with ``order.json``, another language can plan the same
epochs.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent
WORD = 2**64 - 1


def recorded(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return values


def derive(seed: int, label: str, *counters: int) -> int:
    text = "\x1f".join(["shardflow-seed-1", str(seed), label, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(word: int) -> int:
    word &= WORD
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 & WORD
    word ^= word >> 27
    return word * 0x94D049BB133111EB & WORD


def permutation(n: int, key: int) -> Callable[[int], int]:
    if n <= 4096:
        start = derive(key, "permutation-table", n)
        return sorted(range(n), key=lambda j: mix((j + 1) * 0x9E3779B97F4A7C15 + start)).__getitem__
    left = math.isqrt(n - 1) + 1
    right = -(-n // left)
    keys = [derive(key, "permutation-round", n, i) for i in range(8)]

    def at(x: int) -> int:
        while True:
            a, b = x // right, x % right
            for i in (0, 2, 4, 6):
                a = (a + ((mix(b + keys[i]) >> 24) * left >> 40)) % left
                b = (b + ((mix(a + keys[i + 1]) >> 24) * right >> 40)) % right
            x = a * right + b
            if x < n:
                return x

    return at


def digest(values: list[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(values)}q", *values)).hexdigest()[:32]


def test_permutations() -> None:
    for name, expected in recorded("order")["permutations"].items():
        _, n, _, key = name.split()
        n, at = int(n), permutation(int(n), int(key))
        if n <= 6000:
            positions = list(range(n))
        else:
            positions = [*range(2000), *(i * (n // 2000) for i in range(2000)), *range(n - 2000, n)]
        assert digest([at(position) for position in positions]) == expected, name


def test_epochs() -> None:
    for name, expected in recorded("order")["epochs"].items():
        words = name.split()
        n, size, per_step, seed, epoch = (int(words[i]) for i in (0, 3, 5, 7, 9))
        at, tail = permutation(n, derive(seed, "epoch-order", epoch)), words[11]
        num_steps = n // (size * per_step) if tail == "drop" else -(-n // (size * per_step))
        slots = range(num_steps * size * per_step)
        rows = [-1 if s >= n and tail == "mask" else 100 + at(s % n) for s in slots]
        assert f"{num_steps} steps {digest(rows)}" == expected, name


def test_plan_id() -> None:
    state = recorded("loader-state")
    parts = {"plan_version": 1, **{key: state[key] for key in ("dataset_id", "split", "view", "batch")}}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == state["plan_id"]
