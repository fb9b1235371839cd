"""A recording as it is stored: integers as the device made them, and what turns them into units."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.shards import npy
from shardflow.sources.attachments import Attached
from shardflow.sources.reasons import Reason, source_error

if TYPE_CHECKING:
    from shardflow.sources.attachments import StudyContext

__all__ = [
    "MAX_BYTES",
    "MAX_EVENTS",
    "Channel",
    "Recording",
    "SampleArray",
    "attach_recording",
    "quiet_library",
]

MAX_BYTES: Final = 1 << 31
"""Decoded samples of one recording: two days of a twelve-lead ECG at 500 Hz, a night of polysomnography."""
MAX_EVENTS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """One signal. ``physical = stored * gain + offset``, in ``unit``."""

    label: str | None
    unit: str | None
    gain: float | None
    """None where the recording is not calibrated."""
    offset: float
    code: Mapping[str, str] | None = None
    """What is measured, as ``scheme`` and ``value``."""
    invalid_value: int | None = None
    """Stored where there is no sample."""
    filters: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``waveforms.json``."""
        return {
            "label": self.label,
            "code": self.code,
            "unit": self.unit,
            "gain": self.gain,
            "offset": self.offset + 0.0,  # no negative zero
            "invalid_value": self.invalid_value,
            "filters": self.filters,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleArray:
    """Channels of one rate."""

    samples: NDArray[np.integer[Any]]
    """``(channels, samples)`` int8, int16 or int32; uint8, uint16, uint32 where the device stored these."""
    rate_hz: float
    channels: Sequence[Channel]
    start_s: float = 0.0
    """Since the recording began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What one file, or one header with its files, holds."""

    source: str
    arrays: Sequence[SampleArray]
    start: datetime | None
    events: Sequence[Mapping[str, Any]] = ()
    flags: Sequence[str] = field(default_factory=tuple)


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """Inside, warnings of a library are dropped: what is odd in a file is a flag or an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def attach_recording(recording: Recording, study: StudyContext) -> Attached:
    """Return the fields of a recording, ``wNNN.gMM.npy`` for each array, and its part of ``waveforms.json``.

    Raises:
        SourceError: There are neither samples nor events, or too many samples.
    """
    num_bytes = sum(array.samples.nbytes for array in recording.arrays)
    if not num_bytes and not recording.events:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "neither samples nor events")
    if num_bytes > MAX_BYTES:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{num_bytes} bytes of samples, limit {MAX_BYTES}")
    number = study.num("waveforms", "recordings")
    fields, arrays = {}, []
    for group, array in enumerate(recording.arrays):
        name = f"w{number:03d}.g{group:02d}.npy"
        samples = np.ascontiguousarray(array.samples)
        fields[name] = npy.encode(samples.astype(samples.dtype.newbyteorder("<"), copy=False))
        arrays.append(
            {
                "field": name,
                "dtype": samples.dtype.name,
                "num_samples": samples.shape[1],
                "rate_hz": array.rate_hz,
                "start_s": array.start_s,
                "channels": [channel.to_json() for channel in array.channels],
            }
        )
    start = recording.start
    entry = {
        "recording": number,
        "source": recording.source,
        "start": {} if start is None else dict(study.when(start)),
        "seconds_from_study": None if start is None else study.seconds_from_study(start),
        "arrays": arrays,
        "events": list(recording.events[:MAX_EVENTS]),
        "flags": [*recording.flags, *(["events_left_out"] if len(recording.events) > MAX_EVENTS else [])],
    }
    return Attached(fields=fields, parts={"waveforms": {"recordings": [entry]}})
