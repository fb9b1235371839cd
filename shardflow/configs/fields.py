"""What a field of settings may be beside its type, and the check that a dataclass asks for itself."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from shardflow.errors import ConfigError

__all__ = [
    "BYTE_SIZE",
    "PLACE",
    "SPREAD",
    "Bounds",
    "ByteSize",
    "Inside",
    "Place",
    "check_fields",
    "one_of",
    "parse_byte_size",
    "split_annotated",
    "type_hints",
]

BYTE_SIZE: Final = "byte size"
"""Marks an integer that the file may write as ``"512MiB"``."""

ByteSize = Annotated[int, BYTE_SIZE]
"""An integer number of bytes that the file may write with a unit, such as ``"512MiB"``."""

PLACE: Final = "place"
"""Marks a text that is a path or an address."""

Place = Annotated[str, PLACE]
"""A path, relative ones as those of `Path` fields, or an address such as ``s3://bucket/prefix``."""

SPREAD: Final = "spread"
"""Marks a table of integers whose entries may stand beside it, in the table that it is part of."""

_SIZE_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?B|B)?\s*")
_SIZE_FACTORS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    "KB": 1000,
    "kiB": 1024,
}


@dataclass(frozen=True, slots=True)
class Inside:
    """Marks a table whose entries may stand one level deeper, in a table of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """The closed range that a number must lie in; ``None`` is no bound."""

    minimum: float | None = None
    maximum: float | None = None

    def describe(self) -> str:
        """Say the range in words for an error message."""
        if self.minimum is None:
            return f"at most {_plain(self.maximum)}"
        if self.maximum is None:
            return f"at least {_plain(self.minimum)}"
        return f"from {_plain(self.minimum)} to {_plain(self.maximum)}"

    def holds(self, value: float) -> bool:
        """Say whether ``value`` lies in the range."""
        return (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )


def parse_byte_size(text: str) -> int:
    """Parse ``"512MiB"``, ``"1.5 GB"`` or ``"4096"`` into bytes.

    Raises:
        ConfigError: the text is no size.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"a size must be a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, got {text!r}."
        )
    return int(float(match[1]) * _SIZE_FACTORS[match[2] or "B"])


_NO_TEXT = {int: "a number", float: "a number", Path: "a pathlib.Path"}  # as a caller's slip


def check_fields(config: object) -> None:
    """Check every :class:`Bounds` and ``Literal`` of a dataclass instance; for ``__post_init__``.

    Raises:
        ConfigError: a value is out of range.
    """
    hints = type_hints(type(config))
    for field in dataclasses.fields(typing.cast("Any", config)):
        hint = hints[field.name]
        value = getattr(config, field.name)
        base, marks = split_annotated(hint)
        arms = get_args(base) if get_origin(base) in {Union, types.UnionType} else (base,)
        if isinstance(value, str) and str not in arms and arms[0] in _NO_TEXT:
            raise ConfigError(f"{field.name} must be {_NO_TEXT[arms[0]]}, got text; correct it.")
        if value is None or (isinstance(value, str) and base is not str and get_origin(base) is not Literal):
            continue
        if get_origin(base) is Literal and value not in get_args(base):
            raise ConfigError(f"{field.name} must be {one_of(get_args(base))}, got {value!r}; correct it.")
        for mark in marks:
            if isinstance(mark, Bounds) and not mark.holds(value):
                raise ConfigError(f"{field.name} must be {mark.describe()}, got {value!r}; correct it.")


def type_hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with their marks."""
    return typing.get_type_hints(cls, include_extras=True)


def split_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type and its marks."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, tuple(marks)
    return hint, ()


def one_of(choices: Sequence[Any]) -> str:
    """Say a choice in words."""
    return "one of " + ", ".join(repr(choice) for choice in choices)


def _plain(number: float | None) -> str:
    """Write a bound as people do: a whole number with all its digits."""
    whole = number is not None and float(number).is_integer() and abs(number) < 2**63
    return f"{number:.0f}" if whole else f"{number:g}"
