"""Waveforms as the page needs them: what a stretch of a recording reaches in each column of a picture."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.shards import Dataset, decode_array

__all__ = ["MOST_BYTES", "Signals", "Stretch"]

_FIELD: Final = "waveforms.json"
_MOST_COLUMNS: Final = 8192
MOST_BYTES: Final = 512 << 20
"""Of an array that is drawn: it is one field, which is read whole."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a recording, condensed to columns."""

    num_channels: int
    num_columns: int
    per_column: int
    """Samples that a column holds."""
    data: bytes
    """``(channels, columns, 2)`` float32: least and most of a column, in the channel's unit (as stored where
    it is not calibrated); NaN where there is no sample."""


@dataclass(frozen=True, slots=True)
class _Held:
    row: int
    name: str
    samples: NDArray[np.integer[Any]]
    channels: Sequence[Mapping[str, Any]]


class Signals:
    """Reads recordings; keeps the one that was read last, so that scrolling through it costs no read."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._lock = threading.Lock()
        self._held: _Held | None = None

    def stretch(
        self, row: int, recording: int, group: int, *, start: int, count: int, columns: int
    ) -> Stretch:
        """Return what the samples of an array reach, from ``start`` on.

        Args:
            row: Of the sample.
            recording: Its number in ``waveforms.json``.
            group: The array of the recording.
            start: First sample.
            count: Samples; fewer where the array ends.
            columns: Into so many these are condensed, if there are more.

        Raises:
            ConfigError: There is no such array, or it is too large to be drawn.
            ShardflowError: It is damaged.
        """
        held = self._read(row, f"w{recording:03d}.g{group:02d}.npy")
        part = held.samples[:, start : start + count]
        if not part.shape[1]:
            raise ConfigError(f"a stretch must begin within {held.samples.shape[1]} samples, got {start}.")
        per_column = -(-part.shape[1] // max(1, min(columns, _MOST_COLUMNS)))
        starts = np.arange(0, part.shape[1], per_column)
        reached = [_reached(one, channel, starts) for one, channel in zip(part, held.channels, strict=True)]
        data = np.stack(reached).astype("<f4")
        return Stretch(len(reached), len(starts), per_column, data.tobytes())

    def _read(self, row: int, name: str) -> _Held:
        # One after the other: what two threads would read at once is mostly the same recording.
        with self._lock:
            held = self._held
            if held is not None and (held.row, held.name) == (row, name):
                return held
            _, fields = self._dataset.sample_fields(row)
            sizes = {field.name: field.num_bytes for field in fields}
            if name not in sizes or _FIELD not in sizes:
                raise ConfigError("a recording must be one of the study, got another one.")
            if sizes[name] > MOST_BYTES:
                raise ConfigError(
                    f"a recording must have at most {MOST_BYTES >> 20} MiB to be drawn, got "
                    f"{sizes[name] >> 20} MiB; read it from Python."
                )
            read = self._dataset.read_fields(row, [name, _FIELD])
            samples = decode_array("npy", read[name])
            channels = _channels(read[_FIELD], name)
            if samples.ndim != 2 or len(channels) != len(samples):
                raise FormatError(f"waveforms.json must describe each channel of {name}, got another number.")
            self._held = held = _Held(row, name, samples, channels)
            return held


def _channels(description: bytes, name: str) -> Sequence[Mapping[str, Any]]:
    try:
        arrays = [one for each in json.loads(description)["recordings"] for one in each["arrays"]]
        return [dict(channel) for one in arrays if one["field"] == name for channel in one["channels"]]
    except (ValueError, KeyError, TypeError):
        raise FormatError("waveforms.json must describe recordings, got something else.") from None


def _reached(
    stored: NDArray[np.integer[Any]], channel: Mapping[str, Any], starts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Least and most of each column, ``(columns, 2)``."""
    invalid = channel.get("invalid_value")
    missing = None if invalid is None else stored == invalid
    if missing is None or not missing.any():
        least, most = np.minimum.reduceat(stored, starts), np.maximum.reduceat(stored, starts)
        ends = np.stack([least, most], axis=1).astype(np.float64)
    else:
        values = np.where(missing, np.nan, stored)
        ends = np.stack([np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)], axis=1)
    gain = channel.get("gain")
    if gain is not None:
        ends = ends * float(gain) + float(channel.get("offset") or 0.0)
    return np.sort(ends, axis=1)  # a negative gain turns them around; NaN stay, as both are
