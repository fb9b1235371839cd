"""Best-fit decreasing: packs the samples of a shuffle window into sequences of a fixed length.

A sample goes into the fullest sequence that still has room for it, the longest samples first (Johnson et al.,
"Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM J. Comput. 3, 1974).
Samples of equal length are alike, so sequences are filled in groups of equal content: the time follows from
the distinct lengths, not from the number of samples, and only lengths decide.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.sampling.permutation import Int64Array


@dataclass(frozen=True, slots=True)
class _Part:
    """Samples of one length in each sequence of a group, and those before them."""

    length: int
    """Number of the length among the distinct ones."""
    num_samples: int
    before: _Part | None


@dataclass(slots=True)
class _Group:
    """Sequences of equal content."""

    num_sequences: int
    num_free: int
    """Samples that each may still take."""
    content: _Part


def count_sequences(lengths: NDArray[Any], *, max_tokens: int, max_samples: int) -> int:
    """Return how many sequences `pack_sequences` makes of samples, ``(n,)`` descending."""
    values, counts = _distinct(lengths)
    return sum(one.num_sequences for one in _groups(values, counts, max_tokens, max_samples))


def pack_sequences(
    lengths: Int64Array, *, max_tokens: int, max_samples: int
) -> tuple[Int64Array, Int64Array]:
    """Pack samples into sequences.

    Args:
        lengths: ``(n,)`` integers, descending, each at least 1.
        max_tokens: Length of a sequence; a longer sample is alone.
        max_samples: Most samples of a sequence.

    Returns:
        order: ``(n,)`` int64, the samples in the order of the sequences.
        cuts: ``(m + 1,)`` int64, where each sequence begins in ``order``, and ``n``.
    """
    values, counts = _distinct(lengths)
    following = np.cumsum(counts) - counts
    order: list[Int64Array] = [np.zeros(0, np.int64)]
    sizes: list[Int64Array] = [np.zeros(0, np.int64)]
    for group in _groups(values, counts, max_tokens, max_samples):
        columns: list[Int64Array] = []
        part: _Part | None = group.content
        while part is not None:
            first, num = int(following[part.length]), group.num_sequences * part.num_samples
            columns.append(np.arange(first, first + num).reshape(group.num_sequences, part.num_samples))
            following[part.length] += num
            part = part.before
        members = np.concatenate(columns[::-1], axis=1)
        order.append(members.reshape(-1))
        sizes.append(np.full(group.num_sequences, members.shape[1], np.int64))
    cuts = np.zeros(sum(map(len, sizes)) + 1, np.int64)
    np.cumsum(np.concatenate(sizes), out=cuts[1:])
    return np.concatenate(order), cuts


def _distinct(lengths: NDArray[Any]) -> tuple[Int64Array, Int64Array]:
    """Return the distinct lengths, descending, and how many samples have each."""
    starts = np.append(0, np.flatnonzero(np.diff(lengths)) + 1)[: len(lengths)]
    counts = np.diff(np.append(starts, len(lengths)))
    return lengths[starts].astype(np.int64), counts.astype(np.int64)


def _groups(values: Int64Array, counts: Int64Array, max_tokens: int, max_samples: int) -> list[_Group]:
    """Fill sequences with the samples of each length, groups of sequences at a time."""
    open_groups: dict[int, list[_Group]] = {}
    rooms: list[int] = []  # ascending, each with a group
    done: list[_Group] = []

    def keep(group: _Group, room: int) -> None:
        if not group.num_sequences:
            return
        if room <= 0 or not group.num_free:
            done.append(group)
            return
        if room not in open_groups:
            insort(rooms, room)
        open_groups.setdefault(room, []).append(group)

    for number, (length, count) in enumerate(zip(values.tolist(), counts.tolist(), strict=True)):
        left = count
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                each = min(max(1, max_tokens // length), max_samples)
                num_full, rest = divmod(left, each)
                keep(
                    _Group(num_full, max_samples - each, _Part(number, each, None)),
                    max_tokens - each * length,
                )
                if rest:
                    keep(_Group(1, max_samples - rest, _Part(number, rest, None)), max_tokens - rest * length)
                break
            room = rooms[at]
            group = open_groups[room].pop()
            if not open_groups[room]:
                del open_groups[room], rooms[at]
            # A sequence stays the fullest with room while it takes samples of this length.
            each = min(room // length, group.num_free, left)
            num = min(group.num_sequences, left // each)
            keep(_Group(group.num_sequences - num, group.num_free, group.content), room)
            filled = _Group(num, group.num_free - each, _Part(number, each, group.content))
            keep(filled, room - each * length)
            left -= num * each
    for room in rooms:
        done += open_groups[room]
    return done
