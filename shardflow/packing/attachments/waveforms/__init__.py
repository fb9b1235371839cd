"""Waveforms of EDF, BDF, WFDB and DICOM: integers as the device stored them, with rates, gains and units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow.packing.attachments.waveforms.dicom import DicomWaveformKind, read_dicom_recording
from shardflow.packing.attachments.waveforms.edf import EdfKind, read_edf_recording
from shardflow.packing.attachments.waveforms.recording import (
    Channel,
    Recording,
    SampleArray,
    attach_recording,
)
from shardflow.packing.attachments.waveforms.wfdb_records import WfdbKind, read_wfdb_recording

if TYPE_CHECKING:
    from shardflow.packing.sources.attachments import AttachmentKind

__all__ = [
    "Channel",
    "DicomWaveformKind",
    "EdfKind",
    "Recording",
    "SampleArray",
    "WfdbKind",
    "attach_recording",
    "read_dicom_recording",
    "read_edf_recording",
    "read_wfdb_recording",
]

KINDS: Final[tuple[AttachmentKind, ...]] = (DicomWaveformKind(), EdfKind(), WfdbKind())
"""Kinds of attachments, in the order in which they are tried."""
