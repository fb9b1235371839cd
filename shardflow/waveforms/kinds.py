"""The kinds of attachments that are waveforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow.waveforms.dicom import DicomWaveformKind
from shardflow.waveforms.edf import EdfKind
from shardflow.waveforms.wfdb_records import WfdbKind

if TYPE_CHECKING:
    from shardflow.sources.attachments import AttachmentKind

__all__ = ["KINDS"]

KINDS: Final[tuple[AttachmentKind, ...]] = (DicomWaveformKind(), EdfKind(), WfdbKind())
