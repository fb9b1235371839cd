"""Recordings of a sample as ``waveforms.json`` lists them: arrays of stored integers, and what they mean."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardflow.errors import FormatError


@dataclass(frozen=True, slots=True)
class StoredChannel:
    """One row of an array. ``physical = stored * gain + offset``, in ``unit``."""

    names: frozenset[str]
    """Its label, the same without the word of its type (``ECG II``: ``II``), and its code as
    ``SCHEME:VALUE``; in lower case."""
    unit: str | None
    gain: float | None
    """None where the recording is not calibrated."""
    offset: float
    invalid: int | None
    """Stored where there is no sample."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Channels of one rate, ``(channels, samples)``."""

    field: str
    rate_hz: float
    start_s: float
    """From the start of the recording."""
    channels: Sequence[StoredChannel]


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """Entry of ``waveforms.json``."""

    number: int
    seconds: float | None
    """From the study to its start; None if unknown."""
    arrays: Sequence[StoredArray]


def read_recordings(payload: bytes) -> list[StoredRecording]:
    """Read ``waveforms.json``.

    Args:
        payload: The field's bytes.

    Raises:
        FormatError: It is no such list.
    """
    try:
        return [_recording(each) for each in json.loads(payload).get("recordings", ())]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(
            "waveforms.json must list recordings as docs/format.md, section 4, says, got "
            f"{type(error).__name__} while reading them; verify the dataset."
        ) from None


def _recording(entry: Mapping[str, Any]) -> StoredRecording:
    seconds = entry.get("seconds_from_study")
    arrays = [
        StoredArray(
            str(array["field"]),
            _finite(array["rate_hz"], above=0.0),
            _finite(array.get("start_s", 0.0)),
            [_channel(channel) for channel in array["channels"]],
        )
        for array in entry["arrays"]
    ]
    return StoredRecording(int(entry["recording"]), None if seconds is None else _finite(seconds), arrays)


def _channel(entry: Mapping[str, Any]) -> StoredChannel:
    label, code, gain, invalid = (entry.get(name) for name in ("label", "code", "gain", "invalid_value"))
    names = set() if label is None else {label.lower()}
    for kind in ("ecg ", "ekg ", "eeg ", "lead "):
        names |= {name.removeprefix(kind) for name in names}
    if code is not None:
        names.add(f"{code['scheme']}:{code['value']}".lower())
    return StoredChannel(
        frozenset(names),
        entry.get("unit"),
        None if gain is None else _finite(gain),
        _finite(entry.get("offset", 0.0)),
        None if invalid is None else int(invalid),
    )


def _finite(value: Any, above: float = -math.inf) -> float:
    number = float(value)
    if not math.isfinite(number) or number <= above:
        raise ValueError("a number out of range")
    return number
