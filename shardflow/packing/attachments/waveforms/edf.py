"""Reader of EDF, EDF+, BDF and BDF+ (edfplus.info; biosemi.com for 24 bits): sleep, EEG and long ECG.

The header holds the patient's name and the technician's remarks. Only its numbers are published, and the
words that `shardflow.packing.attachments.waveforms.recording` allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.waveforms.recording import (
    MAX_BYTES,
    Channel,
    Recording,
    SampleArray,
    allow_event,
    allow_filter,
    allow_label,
    allow_unit,
    attach_recording,
    parsing,
)
from shardflow.packing.sources.attachments import Attached, AttachmentItem, StudyContext

if TYPE_CHECKING:
    from edfio import Bdf, Edf

_HEADS: Final = {"edf": b"0       ", "bdf": b"\xffBIOSEMI"}
_FIXED_BYTES: Final = 256
_BYTES_PER_SIGNAL: Final = 256
_MAX_SIGNALS: Final = 4096
_UNKNOWN: Final = ("", "X")


class EdfKind:
    """EDF and BDF files as attachments; linked by the patient code of EDF+ and the start of the recording."""

    name = "edf"
    version = 2
    sop_classes: frozenset[str] = frozenset()

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002
        """Tell whether the file begins as an EDF or BDF header does."""
        return len(head) >= _FIXED_BYTES and _source_of(head) is not None

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        """Identify the patient and start of the recording."""
        with path.open("rb") as file:
            head = file.read(_FIXED_BYTES)
        is_plus = head[192:197] in {b"EDF+C", b"EDF+D", b"BDF+C", b"BDF+D"}
        patient = head[8:88].decode("utf-8", "replace").strip()
        code = patient.split(" ")[0] if is_plus else patient
        recording = _open(path)
        return [AttachmentItem(patient_id="" if code in _UNKNOWN else code, time=_start_of(recording))]

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:  # noqa: ARG002
        """Return the signals, one array a rate, and the events."""
        return attach_recording(read_edf_recording(path), study)


def read_edf_recording(path: Path) -> Recording:
    """Read an EDF or BDF file.

    Returns:
        int16 samples of EDF, int32 of BDF (24 bits), as the device stored them.

    Raises:
        SourceError: The file is none, is cut before its first record ends, or has too many samples.
    """
    with path.open("rb") as file:
        head = file.read(_FIXED_BYTES)
    source = _source_of(head)
    if source is None:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "no EDF header")
    flags = ["discontinuous"] if head[192:197] in {b"EDF+D", b"BDF+D"} else []
    said, whole = _records(path, head, 3 if source == "bdf" else 2)
    if whole < said:
        flags.append("truncated")
    recording = _open(path)
    by_rate: dict[float, list[Any]] = {}
    with parsing():  # numbers of the header are read when they are asked for
        for signal in recording.signals:
            by_rate.setdefault(float(signal.sampling_frequency), []).append(signal)
        arrays = [
            SampleArray(
                samples=np.stack([signal.digital for signal in signals]),
                rate_hz=rate,
                channels=[_channel(signal) for signal in signals],
            )
            for rate, signals in sorted(by_rate.items(), reverse=True)
        ]
        events = [
            {
                "start_s": float(event.onset),
                "duration_s": None if event.duration is None else float(event.duration),
                "kind": allow_event(event.text),
            }
            for event in recording.annotations
        ]
    return Recording(source=source, arrays=arrays, start=_start_of(recording), events=events, flags=flags)


def _source_of(head: bytes) -> str | None:
    for source, magic in _HEADS.items():
        if head.startswith(magic):
            # Digits at fixed places (a date, the number of signals) distinguish EDF from a text.
            counted = head[252:256].strip()
            if counted.isdigit() and head[184:192].strip().isdigit() and head[170:171] == b".":
                return source
    return None


def _records(path: Path, head: bytes, bytes_per_sample: int) -> tuple[int, int]:
    """Return the number of data records that the header states, and of those that the file holds completely.

    Raises:
        SourceError: There is none, or what they decode to is too much.
    """
    num_signals = int(head[252:256])
    if num_signals > _MAX_SIGNALS:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{num_signals} signals, limit {_MAX_SIGNALS}")
    header_bytes = _FIXED_BYTES + num_signals * _BYTES_PER_SIGNAL
    with path.open("rb") as file:
        header = file.read(header_bytes)
    start = _FIXED_BYTES + num_signals * 216
    try:
        per_record = sum(
            int(header[start + 8 * number : start + 8 * number + 8]) for number in range(num_signals)
        )
        said = int(head[236:244])
    except ValueError:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "a count that is no number") from None
    if per_record < 1:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "no samples")
    size = path.stat().st_size - header_bytes
    if size // bytes_per_sample * (4 if bytes_per_sample == 3 else 2) > MAX_BYTES:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{size} bytes of samples")
    whole = size // (per_record * bytes_per_sample)
    if whole < 1:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "cut before its first data record ends")
    return (whole if said < 0 else said), whole


def _open(path: Path) -> Edf | Bdf:
    """Open with edfio, which reads samples when they are asked for."""
    from edfio import read_bdf, read_edf

    with path.open("rb") as file:
        is_bdf = file.read(1) == b"\xff"
    with parsing():
        return read_bdf(path) if is_bdf else read_edf(path)


def _start_of(recording: Edf | Bdf) -> datetime | None:
    from edfio import AnonymizedDateError

    try:
        return datetime.combine(recording.startdate, recording.starttime)
    except (AnonymizedDateError, ValueError):
        return None


def _channel(signal: Any) -> Channel:
    low, high = float(signal.digital_min), float(signal.digital_max)
    gain = (float(signal.physical_max) - float(signal.physical_min)) / (high - low) if high != low else 0.0
    return Channel(
        label=allow_label(signal.label),
        unit=allow_unit(signal.physical_dimension),
        gain=gain or None,
        offset=float(signal.physical_min) - low * gain if gain else 0.0,
        filters=allow_filter(signal.prefiltering),
    )
