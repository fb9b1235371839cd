"""Waveforms of EDF, BDF, WFDB and DICOM: integers as the device stored them, with rates, gains and units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow.packing.attachments.waveforms.dicom import DicomWaveformKind
from shardflow.packing.attachments.waveforms.edf import EdfKind
from shardflow.packing.attachments.waveforms.wfdb_records import WfdbKind

if TYPE_CHECKING:
    from shardflow.packing.sources.attachments import AttachmentKind

KINDS: Final[tuple[AttachmentKind, ...]] = (DicomWaveformKind(), EdfKind(), WfdbKind())
"""Kinds of attachments, in the order in which they are tried."""
