"""Recordings of real devices, beside what their own libraries say of them; and those that lie."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom.data import get_testdata_file
from pydicom.waveforms import multiplex_array

from shardflow.errors import SourceError
from shardflow.packing.attachments.waveforms.dicom import DicomWaveformKind, read_dicom_recording
from shardflow.packing.attachments.waveforms.edf import EdfKind, read_edf_recording
from shardflow.packing.attachments.waveforms.recording import (
    Channel,
    Recording,
    SampleArray,
    attach_recording,
)
from shardflow.packing.attachments.waveforms.wfdb_records import WfdbKind, read_wfdb_recording
from shardflow.packing.sources.attachments import HEAD_BYTES, Attached, StudyContext

ECG = Path(str(get_testdata_file("waveform_ecg.dcm")))


def study(counts: Mapping[tuple[str, str], int] | None = None) -> StudyContext:
    return StudyContext(
        sample_key="abc",
        study_uid="1.2.3",
        patient_id="p",
        series=(),
        surrogate=lambda kind, value: f"{kind}-{len(value)}",
        scrub=lambda text, people: "",
        when=lambda moment: {"day_offset": moment.day},
        seconds_from_study=lambda moment: float(moment.second),
        counts=counts or {},
    )


def physical(array: SampleArray, number: int) -> NDArray[np.float64]:
    """What docs/format.md says a reader must compute."""
    channel = array.channels[number]
    assert channel.gain is not None
    units: NDArray[np.float64] = array.samples[number] * channel.gain + channel.offset
    return units


def test_edf_signals_have_the_units_that_edfio_gives_them(shared_data: Path) -> None:
    import edfio

    path = shared_data / "edf" / "test_generator.bdf"
    recording = read_edf_recording(path)
    signals = sorted(edfio.read_bdf(path).signals, key=lambda signal: -signal.sampling_frequency)
    assert [array.rate_hz for array in recording.arrays] == [1000.0, 999.0, 975.0, 800.0, 500.0]
    for array, signal in zip(recording.arrays, signals, strict=True):
        assert array.samples.dtype == np.int32
        np.testing.assert_allclose(physical(array, 0), signal.data, atol=1e-9)
        assert array.channels[0].unit == "uV"
        assert array.channels[0].label is None  # "sine 5Hz" is nobody's standard name


def test_edf_start_events_and_known_names_are_kept(shared_data: Path) -> None:
    recording = read_edf_recording(shared_data / "edf" / "test_subsecond.edf")
    assert recording.start == datetime(2020, 1, 24, 4, 5, 56, 394531)  # noqa: DTZ001
    (array,) = recording.arrays
    assert array.samples.shape == (1, 89344)
    assert array.samples.dtype == np.int16
    assert array.channels[0].label == "Fp1"
    assert [event["kind"] for event in recording.events] == [None] * 4  # a vendor's words: times only
    stages = read_edf_recording(shared_data / "wfdb" / "test_edfann.edf")
    assert not stages.arrays
    assert stages.events[0] == {"start_s": 0.0, "duration_s": 30.0, "kind": "Sleep stage W"}
    assert attach_recording(stages, study()).parts["waveforms"]["recordings"][0]["arrays"] == []


def test_edf_is_linked_by_its_patient_code_and_start(shared_data: Path) -> None:
    kind = EdfKind()
    path = shared_data / "wfdb" / "test_edfann.edf"
    (item,) = kind.describe(path)
    assert (item.patient_id, item.time) == ("SN001", None)  # its date was taken out
    (item,) = kind.describe(shared_data / "edf" / "test_utf8.edf")
    assert item.patient_id == ""  # "X" names nobody
    assert item.time is not None
    assert item.time.year == 2020


def test_edf_that_was_cut_keeps_its_whole_records_and_says_so(shared_data: Path, tmp_path: Path) -> None:
    whole = (shared_data / "edf" / "test_subsecond.edf").read_bytes()
    path = tmp_path / "cut.edf"
    path.write_bytes(whole[: len(whole) // 2])
    recording = read_edf_recording(path)
    assert "truncated" in recording.flags
    assert 0 < recording.arrays[0].samples.shape[1] < 89344
    path.write_bytes(whole[:900])
    with pytest.raises(SourceError, match="cut before its first data record ends"):
        read_edf_recording(path)


def test_edf_with_gaps_says_so(shared_data: Path, tmp_path: Path) -> None:
    data = bytearray((shared_data / "edf" / "test_subsecond.edf").read_bytes())
    data[192:197] = b"EDF+D"
    path = tmp_path / "gaps.edf"
    path.write_bytes(data)
    assert "discontinuous" in read_edf_recording(path).flags


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param((252, b"9999"), id="signals"),
        pytest.param((236, b"many    "), id="records"),
        pytest.param((184, b"x"), id="header-bytes"),
    ],
)
def test_edf_header_that_lies_is_refused(
    shared_data: Path, tmp_path: Path, damage: tuple[int, bytes]
) -> None:
    data = bytearray((shared_data / "edf" / "test_subsecond.edf").read_bytes())
    place, value = damage
    data[place : place + len(value)] = value
    path = tmp_path / "lies.edf"
    path.write_bytes(data)
    with pytest.raises(SourceError):
        read_edf_recording(path)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of wfdb, called here as the oracle
@pytest.mark.parametrize("name", ["100", "a103l", "03700181"])
def test_wfdb_signals_have_the_units_that_wfdb_gives_them(shared_data: Path, name: str) -> None:
    import wfdb

    recording = read_wfdb_recording(shared_data / "wfdb" / f"{name}.hea")
    record = wfdb.rdrecord(str(shared_data / "wfdb" / name), smooth_frames=False)
    found = {
        channel.label: (array, number)
        for array in recording.arrays
        for number, channel in enumerate(array.channels)
    }
    assert list(record.sig_name) == sorted(found, key=record.sig_name.index)
    for number, label in enumerate(record.sig_name):
        array, row = found[label]
        expected = record.e_p_signal[number]
        valid = array.samples[row] != array.channels[row].invalid_value
        assert np.array_equal(valid, ~np.isnan(expected))
        np.testing.assert_allclose(physical(array, row)[valid], expected[valid], atol=1e-9)
        assert array.rate_hz == record.fs * record.samps_per_frame[number]
        assert array.channels[row].unit == record.units[number]


def test_wfdb_annotations_are_symbols_and_rhythms_without_notes(shared_data: Path) -> None:
    recording = read_wfdb_recording(shared_data / "wfdb" / "100.hea")
    first = recording.events[0]
    assert first == {"start_s": 18 / 360, "symbol": "+", "annotator": "atr", "rhythm": "(N"}
    assert {event["annotator"] for event in recording.events} == {"atr", "qrs"}
    assert sum(event["annotator"] == "atr" for event in recording.events) == 2274


def test_wfdb_files_are_read_with_their_header(shared_data: Path, tmp_path: Path) -> None:
    kind = WfdbKind()
    folder = tmp_path / "records"
    shutil.copytree(shared_data / "wfdb", folder)
    recognised = {
        path.name for path in folder.iterdir() if kind.recognise(path, path.read_bytes()[:HEAD_BYTES])
    }
    assert {"100.hea", "100.dat", "100.atr", "a103l.mat", "03700181.gqrsh"} <= recognised
    assert not {"LICENSE", "test_edfann.edf"} & recognised
    (header,) = kind.describe(folder / "100.hea")
    assert kind.describe(folder / "100.dat") == ()
    data = bytearray((folder / "100.dat").read_bytes())
    data[-1] ^= 1
    (folder / "100.dat").write_bytes(data)
    (changed,) = kind.describe(folder / "100.hea")
    assert header.content != changed.content


def test_wfdb_subject_and_start_link_the_record(shared_data: Path, tmp_path: Path) -> None:
    shutil.copy(shared_data / "wfdb" / "100.dat", tmp_path / "100.dat")
    text = (shared_data / "wfdb" / "100.hea").read_text()
    text = text.replace("100 2 360 650000", "100 2 360 650000 10:11:12 03/02/2150")
    (tmp_path / "100.hea").write_text(text + "# <subject_id>: 10000032\n")
    (item,) = WfdbKind().describe(tmp_path / "100.hea")
    assert item.patient_id == "10000032"
    assert item.time == datetime(2150, 2, 3, 10, 11, 12)  # noqa: DTZ001


@pytest.mark.parametrize(
    "line",
    [
        "../100.dat 212 200 11 1024 995 -22131 0 MLII",
        "/etc/passwd 16 200 11 0 0 0 0 MLII",
        "gone.dat 212 200 11 1024 995 -22131 0 MLII",
        "link.dat 212 200 11 1024 995 -22131 0 MLII",
        "100.dat 999 200 11 1024 995 -22131 0 MLII",
    ],
    ids=["parent", "absolute", "missing", "link", "format"],
)
def test_wfdb_header_that_leads_elsewhere_is_refused(shared_data: Path, tmp_path: Path, line: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    for place in (tmp_path / "100.dat", folder / "100.dat"):
        shutil.copy(shared_data / "wfdb" / "100.dat", place)
    (folder / "link.dat").symlink_to(tmp_path / "100.dat")
    header = folder / "x.hea"
    header.write_text(f"x 1 360 650000\n{line}\n")
    with pytest.raises(SourceError) as caught:
        read_wfdb_recording(header)
    assert "passwd" not in str(caught.value)


def test_wfdb_header_of_more_samples_than_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.dat").write_bytes(b"\0" * 64)
    (tmp_path / "x.hea").write_text("x 1 360 99999999999\nx.dat 16 200 11 0 0 0 0 II\n")
    with pytest.raises(SourceError, match="samples"):
        read_wfdb_recording(tmp_path / "x.hea")


def test_wfdb_gaps_cannot_ask_for_more_than_files_hold(tmp_path: Path) -> None:
    (tmp_path / "x_0001.dat").write_bytes(b"\0" * 64)
    (tmp_path / "x_0001.hea").write_text("x_0001 1 360 32\nx_0001.dat 16 200 11 0 0 0 0 II\n")
    (tmp_path / "x.hea").write_text("x/2 1 360 100000000\nx_0001 32\n~ 99999968\n")
    with pytest.raises(SourceError, match="100000000 samples"):
        read_wfdb_recording(tmp_path / "x.hea")
    assert WfdbKind().describe(tmp_path / "x_0001.hea") == ()


def test_record_of_segments_is_one_recording(shared_data: Path, tmp_path: Path) -> None:
    shutil.copy(shared_data / "wfdb" / "100.dat", tmp_path / "100.dat")
    shutil.copy(shared_data / "wfdb" / "100.hea", tmp_path / "whole_0001.hea")
    text = (tmp_path / "whole_0001.hea").read_text().replace("\n100 2", "\nwhole_0001 2")
    (tmp_path / "whole_0001.hea").write_text(text)
    (tmp_path / "whole.hea").write_text("whole/1 2 360 650000\nwhole_0001 650000\n")
    kind = WfdbKind()
    assert len(kind.describe(tmp_path / "whole.hea")) == 1
    assert kind.describe(tmp_path / "whole_0001.hea") == ()
    recording = read_wfdb_recording(tmp_path / "whole.hea")
    assert recording.flags == ("segments",)
    single = read_wfdb_recording(shared_data / "wfdb" / "100.hea")
    assert np.array_equal(recording.arrays[0].samples, single.arrays[0].samples)


def test_dicom_groups_have_the_units_that_pydicom_gives_them() -> None:
    dataset = pydicom.dcmread(ECG)
    recording = read_dicom_recording(ECG)
    assert [array.samples.shape for array in recording.arrays] == [(12, 10000), (12, 1200)]
    for number, array in enumerate(recording.arrays):
        expected = multiplex_array(dataset, number, as_raw=False)
        for row in range(12):
            np.testing.assert_allclose(physical(array, row), expected[:, row])
    assert [channel.label for channel in recording.arrays[0].channels][:6] == [
        "I", "II", "III", "aVR", "aVL", "aVF",
    ]  # fmt: skip
    assert recording.arrays[0].channels[0].filters == "HP:0.05Hz LP:300Hz"


def test_dicom_annotations_are_codes_and_numbers_without_texts() -> None:
    recording = read_dicom_recording(ECG)
    assert recording.events[0] == {
        "code": {"scheme": "SCPECG", "value": "5.10.2.1-3"},
        "values": [982.0],
        "unit": "ms",
    }
    assert "annotations_left_out" in recording.flags
    assert "SINUSALE" not in str(recording.events)
    (item,) = DicomWaveformKind().describe(ECG)
    assert item.study_uids == (str(pydicom.dcmread(ECG).StudyInstanceUID),)


def test_a_number_without_a_unit_may_be_anybodys(tmp_path: Path) -> None:
    dataset = pydicom.dcmread(ECG)
    annotation = dataset.WaveformAnnotationSequence[0]
    for one in dataset.WaveformAnnotationSequence:
        if "MeasurementUnitsCodeSequence" in one:
            annotation = one
            break
    annotation.NumericValue = ["19171113"]
    annotation.MeasurementUnitsCodeSequence[0].CodeValue = "QZJXKV"
    dataset.save_as(tmp_path / "ecg.dcm")
    events = read_dicom_recording(tmp_path / "ecg.dcm").events
    assert "19171113" not in str(events)
    assert any(event["values"] for event in events)


def test_voice_is_no_attachment() -> None:
    assert not any(uid.startswith("1.2.840.10008.5.1.4.1.1.9.4") for uid in DicomWaveformKind.sop_classes)


def test_fields_are_plain_numpy_files_that_go_on_counting() -> None:
    samples = np.arange(6, dtype=np.int16).reshape(2, 3)
    channel = Channel(label="II", unit="mV", gain=0.5, offset=-1.0)
    recording = Recording(
        source="edf",
        arrays=[SampleArray(samples=samples, rate_hz=250.0, channels=[channel, channel])],
        start=datetime(2020, 1, 2, 3, 4, 5),  # noqa: DTZ001
    )
    attached: Attached = attach_recording(recording, study({("waveforms", "recordings"): 7}))
    ((name, payload),) = attached.fields.items()
    assert name == "w007.g00.npy"
    assert np.array_equal(np.load(io.BytesIO(payload)), samples)
    (entry,) = attached.parts["waveforms"]["recordings"]
    assert entry["start"] == {"day_offset": 2}
    assert entry["seconds_from_study"] == 5.0
    expected: dict[str, Any] = {
        "field": name,
        "dtype": "int16",
        "num_samples": 3,
        "rate_hz": 250.0,
        "start_s": 0.0,
    }
    assert expected.items() <= entry["arrays"][0].items()
