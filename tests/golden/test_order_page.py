"""The order of `order.md`, written a second time from that page alone.

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


# Subsets and blends, in the full shuffle; see ``test_order_blends.py`` for what was recorded.


def rows_digest(rows: list[int]) -> str:
    first, span = rows[0], rows[-1] - rows[0] + 1
    bits = sum(1 << (row - first) for row in rows)
    text = b"shardflow-rows-1" + struct.pack("<QQ", first, span) + bits.to_bytes(-(-span // 8), "little")
    return hashlib.sha256(text).hexdigest()


def canonical_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def masked(rows: list[int]) -> str:
    """Steps of 4 micro-batches of 3 samples with tail mask."""
    num_steps = -(-len(rows) // 12)
    return f"{num_steps} steps {digest(rows + [-1] * (num_steps * 12 - len(rows)))}"


SUBSET = list(range(0, 5000, 3))
CHOSEN = [list(range(900)), SUBSET, list(range(900)), list(range(7))]
REPEATS = [1.0, 0.3, 0.25, 2.5]
BASES = [0, 900, 5900, 6800]


def test_a_subset_is_the_order_of_its_rows() -> None:
    recorded_values = recorded("order-blends")
    state = recorded_values["states"]["subset"]
    assert rows_digest(SUBSET) == state["subset"]
    parts = {
        "plan_version": 1,
        **{key: state[key] for key in ("dataset_id", "split", "view", "batch", "subset")},
    }
    assert canonical_digest(parts) == state["plan_id"]
    for epoch in (0, 3):
        at = permutation(len(SUBSET), derive(7, "epoch-order", epoch))
        rows = [SUBSET[at(position)] for position in range(len(SUBSET))]
        assert masked(rows) == recorded_values["subsets"][f"full shuffle, epoch {epoch}"]


def test_a_blend_is_the_order_of_its_draws() -> None:
    recorded_values = recorded("order-blends")
    counts = [math.floor(len(rows) * repeat + 0.5) for rows, repeat in zip(CHOSEN, REPEATS, strict=True)]
    assert counts == recorded_values["draws"]
    parts = [
        {
            "dataset_id": "0123456789abcdef" * 4,
            "split": "train",
            "subset": rows_digest(rows) if rows is SUBSET else None,
            "count": count,
        }
        for rows, count in zip(CHOSEN, counts, strict=True)
    ]
    assert canonical_digest({"blend_version": 1, "components": parts}) == recorded_values["blend digest"]
    state = recorded_values["states"]["blend"]
    assert [text.split(":")[1] for text in state["components"]] == [
        canonical_digest(part)[:8] for part in parts
    ]
    for epoch in (0, 1, 2, 17):
        at = permutation(sum(counts), derive(7, "epoch-order", epoch))
        passes: dict[tuple[int, int], Callable[[int], int]] = {}
        rows = []
        for position in range(sum(counts)):
            draw, component = at(position), 0
            while draw >= counts[component]:
                draw, component = draw - counts[component], component + 1
            n = len(CHOSEN[component])
            number, place = divmod(epoch * counts[component] + draw, n)
            if (component, number) not in passes:
                passes[component, number] = permutation(n, derive(7, "blend", component, number))
            rows.append(BASES[component] + CHOSEN[component][passes[component, number](place)])
        assert masked(rows) == recorded_values["blends"][f"full shuffle, epoch {epoch}"]


def test_parts_of_a_pass_give_their_draws_as_they_fall_due() -> None:
    sizes = [9, 2, 31]
    due = sorted((((2 * j + 1) << 31) // n, part) for part, n in enumerate(sizes) for j in range(n))
    for count, expected in recorded("order-blends")["first draws of parts of 9, 2 and 31"].items():
        given = [part for _, part in due[: int(count)]]
        assert [given.count(part) for part in range(3)] == expected
