"""Reader of DICOM waveforms (PS3.3 C.10.9): ECG, hemodynamics, EEG and respiration; voice is never read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.codes import Code, allow_code
from shardflow.packing.attachments.waveforms.recording import (
    MAX_BYTES,
    Channel,
    Recording,
    SampleArray,
    allow_label,
    allow_unit,
    attach_recording,
    parsing,
)
from shardflow.packing.sources.attachments import Attached, AttachmentItem, StudyContext
from shardflow.packing.sources.dicom.values import is_whole

if TYPE_CHECKING:
    from pydicom import Dataset

_ROOT: Final = "1.2.840.10008.5.1.4.1.1.9."
# 9.4.x is audio, and a voice identifies its owner.
_CLASSES: Final = frozenset(
    _ROOT + suffix
    for suffix in (
        "1.1", "1.2", "1.3", "1.4", "2.1", "3.1", "5.1", "6.1", "6.2", "7.1", "7.2", "7.3", "7.4", "8.1",
    )
)  # fmt: skip
_LINKING: Final = (
    "SpecificCharacterSet",
    "StudyInstanceUID",
    "AccessionNumber",
    "PatientID",
    "AcquisitionDateTime",
    "ContentDate",
    "ContentTime",
)
_MAX_ANNOTATIONS: Final = 100_000


class DicomWaveformKind:
    """DICOM waveform objects as attachments; linked by their study, else by patient and acquisition time."""

    name = "dicom-waveform"
    version = 2
    sop_classes = _CLASSES

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002
        """Return False: DICOM objects are recognized by their class."""
        return False

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        """Identify the patient, study and start of the waveforms."""
        dataset = _read(path, with_samples=False)
        study = str(dataset.get("StudyInstanceUID") or "")
        return [
            AttachmentItem(
                study_uids=(study,) if study else (),
                accession=str(dataset.get("AccessionNumber") or ""),
                patient_id=str(dataset.get("PatientID") or ""),
                time=_start_of(dataset),
            )
        ]

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:  # noqa: ARG002
        """Return the samples, one array a multiplex group, and the coded annotations."""
        return attach_recording(read_dicom_recording(path), study)


def read_dicom_recording(path: Path) -> Recording:
    """Read a DICOM waveform object.

    Returns:
        An array for each multiplex group, ``(channels, samples)``, as stored (8, 16 or 32 bits).

    Raises:
        SourceError: There are no samples that can be read, or too many.
    """
    from pydicom.waveforms import multiplex_array

    dataset = _read(path, with_samples=True)
    arrays = []
    num_bytes = 0
    for number, group in enumerate(dataset.get("WaveformSequence") or ()):
        num_bytes += len(group.get("WaveformData") or b"")
        if num_bytes > MAX_BYTES:
            raise source_error(Reason.LIMIT_EXCEEDED, "too many bytes of samples")
        with parsing():
            padding = _padding(group)
            arrays.append(
                SampleArray(
                    samples=multiplex_array(dataset, number, as_raw=True).T,
                    rate_hz=float(group.SamplingFrequency),
                    channels=[_channel(channel, padding) for channel in group.ChannelDefinitionSequence],
                    start_s=float(group.get("MultiplexGroupTimeOffset") or 0.0) / 1000.0,
                )
            )
    events, num_left_out = _events(dataset)
    return Recording(
        source="dicom-waveform",
        arrays=arrays,
        start=_start_of(dataset),
        events=events,
        flags=("annotations_left_out",) if num_left_out else (),
    )


def _read(path: Path, *, with_samples: bool) -> Dataset:
    from pydicom import dcmread

    with parsing():
        dataset = dcmread(path, force=True, specific_tags=None if with_samples else list(_LINKING))
    if with_samples and not is_whole(dataset):
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "the file is truncated")
    return dataset


def _start_of(dataset: Dataset) -> datetime | None:
    acquired = str(dataset.get("AcquisitionDateTime") or "")
    content = str(dataset.get("ContentDate") or "") + str(dataset.get("ContentTime") or "")
    for text in (acquired, content):
        with contextlib.suppress(ValueError):
            # The original clock, without fractions and zone: used for linking, never published.
            return datetime.strptime(text[:14], "%Y%m%d%H%M%S")  # noqa: DTZ007
    return None


def _code(sequence: Any) -> dict[str, str] | None:
    if not sequence:
        return None
    item = sequence[0]
    scheme, value = (str(item.get(name) or "").strip() for name in ("CodingSchemeDesignator", "CodeValue"))
    return allow_code(Code(scheme, value))


def _channel(channel: Dataset, padding: int | None) -> Channel:
    source = channel.get("ChannelSourceSequence")
    unit = None
    units = channel.get("ChannelSensitivityUnitsSequence")
    if units:
        unit = allow_unit(str(units[0].get("CodeValue") or ""))
    gain = None
    if channel.get("ChannelSensitivity") is not None:
        gain = float(channel.ChannelSensitivity) * float(
            channel.get("ChannelSensitivityCorrectionFactor", 1.0)
        )
    label = str(source[0].get("CodeMeaning") or "") if source else ""
    label = label.removeprefix("Lead ").split(" (")[0]
    low, high, notch = (
        channel.get(f"{name}Frequency") for name in ("FilterLow", "FilterHigh", "NotchFilter")
    )
    filters = [
        f"{name}:{float(value):g}Hz" for name, value in (("HP", low), ("LP", high), ("N", notch)) if value
    ]
    return Channel(
        label=allow_label(label),
        unit=unit,
        gain=gain,
        offset=float(channel.get("ChannelBaseline") or 0.0) if gain is not None else 0.0,
        code=_code(source),
        invalid_value=padding,
        filters=" ".join(filters) or None,
    )


def _padding(group: Dataset) -> int | None:
    value = group.get("WaveformPaddingValue")
    if value is None:
        return None
    if isinstance(value, bytes):
        signed = str(group.get("WaveformSampleInterpretation") or "")[:1] == "S"
        return int.from_bytes(value, "little", signed=signed) if len(value) <= 4 else None
    return int(value)


def _events(dataset: Dataset) -> tuple[list[dict[str, Any]], int]:
    """Return the coded annotations, and the number of others; their texts are never read."""
    events: list[dict[str, Any]] = []
    annotations = list(dataset.get("WaveformAnnotationSequence") or ())
    for item in annotations[:_MAX_ANNOTATIONS]:
        code = _code(item.get("ConceptNameCodeSequence"))
        if code is None:
            continue
        units = item.get("MeasurementUnitsCodeSequence")
        values, places = _values(item, "NumericValue"), _values(item, "ReferencedSamplePositions")
        unit = allow_unit(str(units[0].get("CodeValue") or "")) if units else None
        event: dict[str, Any] = {
            "code": code,
            # Without a unit a number may be a date or identify the patient.
            "values": [number for number in map(float, values) if math.isfinite(number)] if unit else [],
            "unit": unit,
        }
        events.append({**event, "samples": [int(place) for place in places]} if places else event)
    return events, len(annotations) - len(events)


def _values(item: Dataset, keyword: str) -> Sequence[Any]:
    value = item.get(keyword)
    return () if value is None else value if hasattr(value, "__len__") else (value,)
