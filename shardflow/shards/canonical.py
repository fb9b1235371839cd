"""Canonical JSON: one sequence of bytes for one value, so that digests of JSON mean something.

Keys sorted, no spaces, everything outside ASCII escaped, integers only: two languages print 0.1 + 0.2
differently, and a second reader must be able to rebuild the bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from shardflow.errors import FormatError

__all__ = ["Json", "canonical_json", "parse_json", "sha256_hex"]

# One for all values: `json.dumps` makes a new one for each.
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_PLAIN: Final = frozenset({str, int, bool, type(None)})

Json: TypeAlias = "bool | int | str | Sequence[Json] | Mapping[str, Json] | None"


def canonical_json(value: Json) -> bytes:
    """Encode a value without floating-point numbers as canonical JSON, without a line end.

    Raises:
        FormatError: The value holds something that canonical JSON has no bytes for.
    """
    _refuse_floats(value)
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"a JSON value must be plain data, got {type(error).__name__} on encoding."
        ) from None
    return text.encode("ascii")


def parse_json(data: bytes, *, what: str) -> Any:
    """Parse JSON bytes that claim to be canonical.

    Raises:
        FormatError: They are not JSON, or not the canonical bytes of their value: a flipped bit in a space or
            an escape
            would else go unseen.
    """
    try:
        value = json.loads(data)
        is_canonical = canonical_json(value) == data
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"{what} must be canonical JSON, got {type(error).__name__} on reading.") from None
    if not is_canonical:
        raise FormatError(
            f"{what} must be canonical JSON (sorted keys, no spaces), got other bytes for the same value."
        )
    return value


def sha256_hex(data: bytes | memoryview) -> str:
    """SHA-256 of a buffer, as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _refuse_floats(value: Json) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, float):
        raise FormatError(
            "a number in the dataset's JSON must be an integer, got a float; write it as a string."
        )
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise FormatError("a key in the dataset's JSON must be a string, got another type.")
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_floats(item)
