"""Reader of WFDB records (physionet.org/physiotools/wag): a text header with its sample and annotation files.

Packing finds the header, and the other files are read with it. Their names come from the header, so they must
be plain file names in its folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.waveforms.recording import (
    MAX_BYTES,
    MAX_EVENTS,
    Channel,
    Recording,
    SampleArray,
    allow_label,
    allow_rhythm,
    allow_unit,
    attach_recording,
    parsing,
)
from shardflow.packing.sources.attachments import Attached, AttachmentItem, StudyContext

_RECORD_LINE: Final = re.compile(
    r"(?P<name>[\w-]+)(?:/(?P<segments>\d+))?[ \t]+(?P<signals>\d+)"
    r"(?:[ \t]+(?P<rate>[\d.eE+-]+)(?:/[\d.eE+-]+(?:\([\d.eE+-]+\))?)?"
    r"(?:[ \t]+(?P<samples>\d+)"
    r"(?:[ \t]+(?P<time>\d{1,2}:\d{1,2}(?::\d{1,2}(?:\.\d+)?)?)"
    r"(?:[ \t]+(?P<date>\d{1,2}/\d{1,2}/\d{4}))?)?)?)?[ \t]*",
    re.ASCII,
)
_SUBJECT: Final = re.compile(r"#\s*<?(?:subject|patient)[_ ]?id>?\s*[:=]\s*(\S+)", re.IGNORECASE)
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_MAX_HEADER_BYTES: Final = 1 << 20
_MAX_SEGMENTS: Final = 10_000
_NO_SEGMENT: Final = "~"
_MIN_RATE_HZ, _MAX_RATE_HZ = 1e-6, 1e9
_UNSTORED_BYTES: Final = 1 << 26
_MAX_RATIO: Final = 256
"""Bytes that a record may decode to for each byte that is stored, beside `_UNSTORED_BYTES`."""
# Value of a missing sample, by format (signal(5) of the WFDB guide).
_INVALID: Final = {
    "8": None, "16": -(1 << 15), "24": -(1 << 23), "32": -(1 << 31), "61": -(1 << 15), "80": -(1 << 7),
    "160": -(1 << 15), "212": -(1 << 11), "310": -(1 << 9), "311": -(1 << 9),
    "508": -(1 << 7), "516": -(1 << 15), "524": -(1 << 23),
}  # fmt: skip
# Annotators whose files are read with a header; others may be anybody's working notes.
_ANNOTATORS: Final = ("atr", "ecg", "qrs", "gqrs", "gqrsh", "gqrsl", "sqrs", "wqrs", "wabp", "ann", "st")

# Of the library's table of annotation codes (ecgcodes.h).
_SYMBOLS: Final = frozenset("NLRaVFJASEj/Q~|sT*D\"=pB^t+u?![]en@xf()r'`")


class _Header(NamedTuple):
    line: re.Match[str]
    lines: list[str]
    """Without comments and empty lines, the record line first."""
    comments: list[str]


class WfdbKind:
    """WFDB records as attachments; linked by a ``subject_id`` in the header's comments and the start."""

    name = "wfdb"
    version = 2
    sop_classes: frozenset[str] = frozenset()

    def recognise(self, path: Path, head: bytes) -> bool:
        """Tell whether the file is a header, or samples or annotations of the header beside it."""
        if path.suffix == ".hea":
            return _first_line(head) is not None
        return path.suffix != "" and path.name in _members_beside(path)

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        """Identify the patient and start of the record; return nothing for samples and annotations."""
        if path.suffix != ".hea":
            return ()
        header = _read_header(path)
        if _is_segment(path):
            return ()
        subject = next((match[1] for line in header.comments if (match := _SUBJECT.match(line))), "")
        digest = hashlib.sha256()
        for member in sorted(set(_members(path, header)) | set(_annotations(path))):
            digest.update(member.encode() + b"\0")
            file = path.parent / member
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
        return [AttachmentItem(patient_id=subject, time=_start_of(header.line), content=digest.hexdigest())]

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:  # noqa: ARG002
        """Return the signals, one array a rate, and the annotations as events."""
        return attach_recording(read_wfdb_recording(path), study)


def read_wfdb_recording(path: Path) -> Recording:
    """Read a WFDB record.

    Args:
        path: Path of the header, ``.hea``.

    Returns:
        Samples as stored, int8 to int32, and the annotations of the annotators known here.

    Raises:
        SourceError: A file is missing, cut, symbolic or elsewhere, or the record has too many samples.
    """
    header = _read_header(path)
    num_bytes = 0
    for member in set(_members(path, header)):
        file = path.parent / member
        if file.is_symlink() or not file.is_file():
            raise source_error(Reason.ATTACHMENT_UNREADABLE, "a file that the header names is missing")
        num_bytes += file.stat().st_size
    num_signals, num_samples = int(header.line["signals"]), int(header.line["samples"] or 0)
    if not num_signals:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "the record has no signals")
    # Gaps between segments are declared and not stored, so a line of text may ask for any number of samples.
    if num_signals * num_samples * 4 > min(MAX_BYTES, max(_UNSTORED_BYTES, _MAX_RATIO * num_bytes)):
        raise source_error(Reason.LIMIT_EXCEEDED, f"{num_samples} samples of {num_signals} signals")
    record: Any
    is_single = header.line["segments"] is None
    name = str(path.with_suffix(""))
    with parsing():
        import wfdb

        if is_single:
            record = wfdb.rdrecord(name, physical=False, smooth_frames=False, return_res=32)
            signals = record.e_d_signal
            per_frame = record.samps_per_frame
        else:
            record = wfdb.rdrecord(name, physical=False, return_res=32)
            signals = list(record.d_signal.T)
            per_frame = [1] * len(signals)
    frames_per_s = _checked_rate(record.fs)
    groups: dict[tuple[int, str], list[int]] = {}
    for number in range(len(signals)):
        groups.setdefault((int(per_frame[number]), _dtype(record.fmt[number])), []).append(number)
    arrays = [
        SampleArray(
            samples=np.stack([np.asarray(signals[number]).astype(dtype) for number in numbers]),
            rate_hz=frames_per_s * count,
            channels=[_channel(record, number) for number in numbers],
        )
        for (count, dtype), numbers in sorted(groups.items(), key=lambda item: (-item[0][0], item[1][0]))
    ]
    return Recording(
        source="wfdb",
        arrays=arrays,
        start=_start_of(header.line),
        events=_events(path, frames_per_s),
        flags=() if is_single else ("segments",),
    )


def _checked_rate(rate: float) -> float:
    """Return a sampling frequency that times can be computed with."""
    if not _MIN_RATE_HZ <= rate <= _MAX_RATE_HZ:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "the sampling frequency is zero or out of range")
    return float(rate)


def _dtype(fmt: str) -> str:
    """Return the smallest integer dtype that holds a format's samples."""
    return {"80": "int8", "508": "int8", "24": "int32", "32": "int32", "524": "int32"}.get(str(fmt), "int16")


def _channel(record: Any, number: int) -> Channel:
    adc_gain, baseline = float(record.adc_gain[number]), float(record.baseline[number])
    return Channel(
        label=allow_label(str(record.sig_name[number])),
        unit=allow_unit(str(record.units[number])),
        gain=1.0 / adc_gain if adc_gain else None,
        offset=-baseline / adc_gain if adc_gain else 0.0,
        invalid_value=_INVALID.get(str(record.fmt[number])),
    )


def _events(path: Path, frames_per_s: float) -> list[dict[str, Any]]:
    """Return the annotations, each with its standard symbol and the rhythm that its note names."""
    events: list[dict[str, Any]] = []
    for member in _annotations(path):
        annotator = member.rsplit(".", 1)[1]
        with parsing("annotations, "):
            import wfdb

            found = wfdb.rdann(str(path.with_suffix("")), annotator)
        rate = _checked_rate(found.fs or frames_per_s)
        for sample, symbol, note in zip(
            found.sample.tolist()[:MAX_EVENTS], found.symbol, found.aux_note, strict=False
        ):
            # Files may define symbols of their own.
            known = str(symbol) if str(symbol) in _SYMBOLS else None
            event = {"start_s": sample / rate, "symbol": known, "annotator": annotator}
            rhythm = allow_rhythm(str(note)) if note else None
            events.append(event if rhythm is None else {**event, "rhythm": rhythm})
    return sorted(events, key=lambda event: (event["start_s"], event["annotator"]))


# ---- headers -------------------------------------------------------------------------------------


def _first_line(head: bytes) -> re.Match[str] | None:
    for line in head.decode("utf-8", "replace").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            return _RECORD_LINE.fullmatch(line)
    return None


def _read_header(path: Path) -> _Header:
    with path.open("rb") as file:
        text = file.read(_MAX_HEADER_BYTES).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    comments = [line for line in lines if line.startswith("#")]
    lines = [line for line in lines if line and not line.startswith("#")]
    line = _RECORD_LINE.fullmatch(lines[0]) if lines else None
    if line is None:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "no record line")
    return _Header(line, lines, comments)


def _members(path: Path, header: _Header) -> Iterator[str]:
    """Yield the names of the files that a header names, those of its segments too.

    Raises:
        SourceError: A name leads out of the folder.
    """
    count = int(header.line["segments"] or header.line["signals"])
    if count > _MAX_SEGMENTS:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{count} files of one record")
    for line in header.lines[1 : 1 + count]:
        name = line.split()[0]
        if name == _NO_SEGMENT:
            continue
        if _PLAIN_NAME.fullmatch(name) is None:
            raise source_error(Reason.ATTACHMENT_UNREADABLE, "the header names a file outside of its folder")
        if header.line["segments"] is None:
            yield name
            continue
        segment = path.with_name(f"{name}.hea")
        yield segment.name
        if segment.is_file() and not segment.is_symlink():
            inner = _read_header(segment)
            if inner.line["segments"] is not None:
                raise source_error(Reason.ATTACHMENT_UNREADABLE, "a segment of segments")
            if int(inner.line["samples"] or 0):
                yield from _members(segment, inner)


def _annotations(path: Path) -> list[str]:
    candidates = (path.with_suffix(f".{annotator}") for annotator in _ANNOTATORS)
    return [file.name for file in candidates if file.is_file() and not file.is_symlink()]


def _members_beside(path: Path) -> set[str]:
    """Return the files that the header beside a file names; none without a header."""
    header = path.with_suffix(".hea")
    if not header.is_file():
        return set()
    try:
        return {*_members(header, _read_header(header)), *_annotations(header)}
    except Exception:  # noqa: BLE001 - the reason is that of the header
        return set()


def _is_segment(path: Path) -> bool:
    """Tell whether another header has this one as a segment: ``NAME_0001.hea`` of ``NAME.hea``."""
    stem = re.sub(r"_(?:\d+|layout)$", "", path.stem)
    whole = path.with_name(f"{stem}.hea")
    if stem == path.stem or not whole.is_file():
        return False
    try:
        header = _read_header(whole)
        count = int(header.line["segments"] or 0)
        return path.stem in {line.split()[0] for line in header.lines[1 : 1 + count]}
    except Exception:  # noqa: BLE001 - the reason is that of the record's header
        return False


def _start_of(line: re.Match[str]) -> datetime | None:
    if line["date"] is None:
        return None
    try:
        day, month, year = (int(part) for part in line["date"].split("/"))
        hours, minutes, *seconds = line["time"].split(":")
        whole = float(seconds[0]) if seconds else 0.0
        second = int(whole)
        return datetime(  # noqa: DTZ001 - WFDB has no zones
            year, month, day, int(hours), int(minutes), second, round((whole - second) * 1e6) % 1_000_000
        )
    except ValueError:
        return None
