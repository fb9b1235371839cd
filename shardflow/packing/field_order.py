"""Fields in the order of their names, though some are made long before their place comes.

Slices stream by; what is made beside them (masks, annotations, documents) waits here until the next name is
behind theirs.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.fragment import FragmentWriter

__all__ = ["InOrder"]


class InOrder:
    """Writes fields of one sample, and those that wait between them.

    Args:
        writer: Of the study's fragment.
    """

    def __init__(self, writer: FragmentWriter) -> None:
        self._writer = writer
        self._waiting: list[tuple[str, bytes]] = []

    @property
    def folder(self) -> Path:
        """See `shardflow.packing.fragment.FragmentWriter.folder`."""
        return self._writer.folder

    def hold(self, name: str, payload: bytes) -> None:
        """Take a field whose place comes with the first `add` of a name behind it, or with `finish`."""
        heapq.heappush(self._waiting, (name, payload))

    def add(self, name: str, payload: bytes) -> None:
        """Write a field, and before it those that wait and belong there.

        Raises:
            StorageError: No space left, or the like.
        """
        while self._waiting and self._waiting[0][0] < name:
            self._writer.add(*heapq.heappop(self._waiting))
        self._writer.add(name, payload)

    def finish(self) -> None:
        """Write what still waits."""
        while self._waiting:
            self._writer.add(*heapq.heappop(self._waiting))
