"""Settings that may change while they are in use: their values, their limits, and how one is changed.

Owns the form and nothing else. Who reads or trains offers such an object, and who tunes turns it. None of
these settings changes what is read or trained, or in which order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["KnobLimit", "Knobs", "setting_text", "size_text"]

_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobLimit:
    """What a setting may be on this machine, with the other settings as they are."""

    least: int = 0
    most: int = 0
    """At least ``least``; both are 0 for a setting of words."""
    choices: tuple[str, ...] = ()
    """The words of a setting of words; empty for a number."""
    is_live: bool = True
    """Whether a change acts on what runs; otherwise from the next boundary of steps or iterations on."""


class Knobs(Protocol):
    """Settings by name, as in the configuration: ``loader.num_threads``, ``cache.ram_bytes``, ..."""

    def values(self) -> dict[str, int | str]:
        """Return all settings that can be changed here, as they were set last."""

    def limits(self) -> dict[str, KnobLimit]:
        """Return what each of them may be now; what is missing cannot be changed here."""

    def set(self, name: str, value: int | str) -> None:
        """Change one. Safe from any thread.

        Raises:
            ConfigError: There is no such setting here, or the value is outside its limits; nothing changes.
        """


def size_text(num_bytes: int) -> str:
    """Write a size as a configuration may hold it, to the next MiB from 1 MiB on."""
    return f"{math.ceil(num_bytes / _MIB)}MiB" if num_bytes >= _MIB else f"{num_bytes}"


def setting_text(name: str, value: int | str) -> str:
    """Write the value of a setting for people; sizes as in a configuration."""
    text = str(value)
    return size_text(int(text)) if name.endswith("_bytes") and text.isascii() and text.isdigit() else text
