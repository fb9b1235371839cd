"""Waveforms: EDF and BDF, WFDB, DICOM. Integers as the device stored them, with rates, gains and units."""

from shardflow.waveforms.dicom import DicomWaveformKind, read_dicom_recording
from shardflow.waveforms.edf import EdfKind, read_edf_recording
from shardflow.waveforms.recording import Channel, Recording, SampleArray, attach_recording
from shardflow.waveforms.wfdb_records import WfdbKind, read_wfdb_recording

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
