"""A page of memory that a rank writes and its side reads, without locks and without the rank's help.

Two slots: the main thread writes the phase, the pulse thread what a wait for data is for. Each slot is
guarded by a count that is odd while it is being written, so a rank that is stopped amid a write leaves the
last whole text with its reader. The page is anonymous and inherited by descriptor: nothing is left behind,
however the processes end.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Board", "BoardView"]

_SLOT_BYTES: Final = 4096
_MAX_LETTERS: Final = 1800
_HEAD: Final = struct.Struct("<QI")  # count, length of the JSON behind it
_PULSE: Final = struct.Struct("<Q")
_PULSE_AT: Final = 2 * _SLOT_BYTES
_SIZE: Final = _PULSE_AT + _PULSE.size


@dataclass(slots=True)
class BoardView:
    """What a reader last saw; ``seen`` counts are only good for telling two looks apart."""

    phase: dict[str, Any]
    waits_for: str
    phase_count: int
    pulse_count: int


class Board:
    """The page.

    Args:
        descriptor: Of the page that another process created; without one a new page is made.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("shardflow-watch")
            os.ftruncate(descriptor, _SIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SIZE)
        self._seen: list[tuple[int, Any]] = [(0, {}), (0, "")]

    def write_phase(self, phase: str, *, limit_s: float | None, is_together: bool) -> None:
        """Say what begins now; by the main thread.

        Args:
            phase: A few words.
            limit_s: How long it may take on this rank; None for no limit.
            is_together: It ends when other ranks have done their part, so they are to blame if it does not.
        """
        self._write(0, {"phase": _fitting(phase), "limit_s": limit_s, "together": is_together})

    def write_wait(self, text: str) -> None:
        """Say what the wait for data is for; by the pulse thread."""
        self._write(1, _fitting(text))

    def beat(self) -> None:
        """Show that the interpreter runs; by the pulse thread."""
        (count,) = _PULSE.unpack_from(self._page, _PULSE_AT)
        _PULSE.pack_into(self._page, _PULSE_AT, count + 1)

    def read(self) -> BoardView:
        """Look at the page; a slot that is being written shows what it held before."""
        for slot in (0, 1):
            self._read(slot)
        (pulse_count,) = _PULSE.unpack_from(self._page, _PULSE_AT)
        (phase_count, phase), (_, waits_for) = self._seen
        return BoardView(phase, waits_for, phase_count, pulse_count)

    def close(self) -> None:
        """Give the page back."""
        self._page.close()
        os.close(self.descriptor)

    def _write(self, slot: int, value: Any) -> None:
        start = slot * _SLOT_BYTES
        data = json.dumps(value).encode()
        count, _ = _HEAD.unpack_from(self._page, start)
        _HEAD.pack_into(self._page, start, count + 1, 0)
        self._page[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._page, start, count + 2, len(data))

    def _read(self, slot: int) -> None:
        start = slot * _SLOT_BYTES
        count, num_bytes = _HEAD.unpack_from(self._page, start)
        if count % 2 or count == self._seen[slot][0]:
            return
        data = self._page[start + _HEAD.size : start + _HEAD.size + num_bytes]
        if _HEAD.unpack_from(self._page, start)[0] != count:
            return  # it changed while we read; the next look sees the new text
        self._seen[slot] = (count, json.loads(data))


def _fitting(text: str) -> str:
    """Cut a text so that its JSON, where a letter may become two, fits a slot beside other values."""
    return text[:_MAX_LETTERS].encode("ascii", "replace").decode()
