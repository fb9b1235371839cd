"""The header pass: what is taken out of a file, and how each file that cannot be packed is told."""

from __future__ import annotations

import inspect
import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.data import get_testdata_file
from pydicom.uid import (
    MPEG2MPML,
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
)

from shardflow.errors import SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom import description, headers, planes, values
from shardflow.packing.sources.dicom.elements import Elements, HeaderLimits
from shardflow.packing.sources.dicom.headers import (
    BrokenInstance,
    InstanceHeader,
    header_from_json,
    header_to_json,
    read_header,
)
from tests.unit.packing.sources.dicom.factory import (
    UID_ROOT,
    header_of,
    make_dataset,
    make_file,
    make_header,
    write,
)

pytestmark = pytest.mark.fast


def _bundled(name: str) -> Path:
    path = get_testdata_file(name)
    assert isinstance(path, str)
    return Path(path)


def _broken(path: Path, **limits: int) -> tuple[str, str]:
    found = read_header(path, limits=HeaderLimits(**limits))
    assert isinstance(found, BrokenInstance)
    assert found.study_instance_uid == UID_ROOT + "1.1"
    return found.reason.value, found.detail


def _refused(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        read_header(path)
    return caught.value.reason


@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian, "1.2.840.10008.1.2.1"],
)
def test_the_facts_are_the_same_in_every_encoding(tmp_path: Path, syntax: str) -> None:
    path = make_file(
        tmp_path / "a.dcm",
        syntax=syntax,
        number=7,
        position=(1.5, -2.0, 1e-3),
        PixelPaddingValue=63536,
        WindowCenter=["40", "-600"],
        WindowWidth=["0", "1500"],
        PatientID="p\u00fc",
        SpecificCharacterSet="ISO_IR 192",
        SeriesDescription="Topogram 0.6",
        RescaleType="HU",
        EchoTime="12.50",
        ImagerPixelSpacing=[0.1, 0.2],
        FrameOfReferenceUID="1.2.9",
    )
    header = header_of(path, file_index=3)
    assert header.file_index == 3
    assert header.patient_id == "p\u00fc"
    assert header.sop_instance_uid == UID_ROOT + "3.7"
    assert header.transfer_syntax_uid == syntax
    assert (header.modality, header.image_type) == ("CT", ("ORIGINAL", "PRIMARY", "AXIAL"))
    assert (header.image.rows, header.image.columns, header.image.num_frames) == (3, 4, 1)
    assert (header.series_number, header.instance_number) == (1, 7)
    assert header.padding == (63536.0, 63536.0)
    assert header.is_localizer
    assert (header.unit, header.detector_spacing, header.frame_of_reference_uid) == (
        "HU",
        (0.1, 0.2),
        "1.2.9",
    )
    (plane,) = header.planes
    assert plane.position == (1.5, -2.0, 0.001)
    assert plane.pixel_spacing == (0.5, 0.75)
    assert (plane.slope, plane.intercept, plane.slice_thickness) == (1.0, -1024.0, 2.5)
    assert plane.window == (-600.0, 1500.0)  # the first one has no width
    assert header.pixel_num_bytes == 24
    assert header.flags == ()


def test_a_header_is_small_plain_and_survives_pickle_and_json(tmp_path: Path) -> None:
    headers = [make_header(tmp_path, number, position=(0, 0, number * 1.1)) for number in range(1, 51)]
    assert pickle.loads(pickle.dumps(headers)) == headers
    assert len(pickle.dumps(headers)) / len(headers) < 500
    rows = json.dumps([header_to_json(header) for header in headers])
    assert [header_from_json(row) for row in json.loads(rows)] == headers
    assert headers[0].image is headers[49].image


def test_facts_are_read_once_for_equal_values_alone() -> None:
    rows, columns, window = 0x00280010, 0x00280011, 0x00281050
    seen = []

    @values.shared(rows, columns)
    def shape(elements: Elements) -> tuple[int | None, ...]:
        seen.append(elements.values)
        return values.short(elements, rows), values.short(elements, columns)

    first = {rows: b"\x02\x01", columns: b"\x03\x01", window: b"40"}
    assert shape(Elements(values=first)) == (258, 259)
    assert shape(Elements(values={**first, window: b"80"})) == (258, 259)
    assert seen == [{rows: b"\x02\x01", columns: b"\x03\x01"}], "once, and nothing else is seen"
    assert shape(Elements(values={rows: b"\x02\x01"})) == (258, None)
    assert shape(Elements(values=first, is_little_endian=False)) == (513, 769)
    assert len(seen) == 3
    long = Elements(values={rows: b"\x02\x01" * 4096})
    assert shape(long) == shape(long) == (258, None)
    assert len(seen) == 5, "a file cannot fill the memory with what is kept"


@pytest.mark.parametrize(
    "read",
    [
        description._read_description,
        headers._series_facts,
        planes._classic_facts,
        planes._classic_phase,
    ],
)
def test_facts_that_are_shared_depend_on_the_named_tags_alone(read: Callable[[Elements], object]) -> None:
    """Another tag would be absent for the reader, which nobody would see."""
    words = [b"MONOCHROME2", b"ORIGINAL\\PRIMARY\\AXIAL", b"20240102", b"\xc4nna", b"ISO_IR 100", b"+0100"]
    words += [b"3", b"5\\6", b"1\\0\\0\\0\\1\\0", b"\x08\0", b"\x01\0", struct.pack("<d", 700.0)]
    words += [b"SIEMENS MR HEADER", b"GEMS_PARM_01", b"PHILIPS IMAGING DD 001", b"PHILIPS MR IMAGING DD 001"]

    def outcome(read: Callable[[Elements], object], elements: Elements) -> object:
        try:
            return read(elements)
        except SourceError as error:
            return error.message

    rng = random.Random(0)
    for _ in range(300):
        elements = Elements(values={tag: rng.choice(words) for tag in sorted(headers._WANTED)})
        assert outcome(read, elements) == outcome(inspect.unwrap(read), elements)


def test_a_damaged_stored_header_is_refused(tmp_path: Path) -> None:
    row = header_to_json(make_header(tmp_path, 1))
    for broken in ({**row, "image": [1]}, {**row, "planes": 7}, {key: row[key] for key in list(row)[2:]}):
        with pytest.raises(SourceError, match="stored header"):
            header_from_json(broken)


@pytest.mark.parametrize("keyword", ["PatientID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"])
@pytest.mark.parametrize("value", ["", None])
def test_a_missing_identifier_is_named(tmp_path: Path, keyword: str, value: Any) -> None:
    found = read_header(write(tmp_path / "a.dcm", make_dataset(**{keyword: value})))
    assert isinstance(found, BrokenInstance)
    assert found.reason is Reason.MISSING_IDENTIFIER
    names = {
        "PatientID": "patient_id",
        "StudyInstanceUID": "study_instance_uid",
        "SeriesInstanceUID": "series_instance_uid",
        "SOPInstanceUID": "sop_instance_uid",
    }
    assert found.detail.endswith(f"({names[keyword]})")


@pytest.mark.parametrize(
    ("attributes", "reason", "detail"),
    [
        ({"Rows": 0}, Reason.INVALID_IMAGE_DESCRIPTION, "0 rows and 4 columns"),
        ({"Columns": None}, Reason.INVALID_IMAGE_DESCRIPTION, "3 rows and 0 columns"),
        ({"BitsAllocated": 12}, Reason.INVALID_IMAGE_DESCRIPTION, "16 of 12 bits"),
        ({"BitsStored": 17}, Reason.INVALID_IMAGE_DESCRIPTION, "17 of 16 bits"),
        ({"PhotometricInterpretation": "RGB"}, Reason.INVALID_IMAGE_DESCRIPTION, "1 samples per pixel"),
        ({"PhotometricInterpretation": "CMYK"}, Reason.INVALID_IMAGE_DESCRIPTION, "it is unknown"),
        ({"SamplesPerPixel": 3}, Reason.INVALID_IMAGE_DESCRIPTION, "3 samples per pixel"),
        ({"NumberOfFrames": 2}, Reason.PIXEL_DATA_TRUNCATED, "24 of 48 bytes"),
        ({"NumberOfFrames": -2}, Reason.INVALID_IMAGE_DESCRIPTION, "frames is not a number"),
        ({"PixelData": b""}, Reason.PIXEL_DATA_TRUNCATED, "0 of 24 bytes"),
        (
            {"NumberOfFrames": 2**31 - 1, "Rows": 65535, "Columns": 65535},
            Reason.LIMIT_EXCEEDED,
            "4294836225 pixels",
        ),
        ({"NumberOfFrames": 2**31 - 1}, Reason.LIMIT_EXCEEDED, "2147483647 frames declared"),
        (
            {"Rows": 16384, "Columns": 16384, "NumberOfFrames": 65536},
            Reason.LIMIT_EXCEEDED,
            "bytes of pixels declared",
        ),
    ],
)
def test_a_description_that_cannot_be_trusted_is_told_in_numbers(
    tmp_path: Path, attributes: dict[str, Any], reason: Reason, detail: str
) -> None:
    found, told = _broken(make_file(tmp_path / "a.dcm", **attributes))
    assert found == reason
    assert detail in told


def test_limits_are_settings(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm")
    assert isinstance(read_header(path, limits=HeaderLimits(max_frame_pixels=12)), InstanceHeader)
    assert _broken(path, max_frame_pixels=11)[0] == "LIMIT_EXCEEDED"
    assert _broken(path, max_pixel_bytes=23)[0] == "LIMIT_EXCEEDED"


@pytest.mark.parametrize("frames", ["", "0", "1"])
def test_no_frames_mean_one(tmp_path: Path, frames: str) -> None:
    assert header_of(make_file(tmp_path / "a.dcm", NumberOfFrames=frames)).image.num_frames == 1


def test_a_file_that_ends_in_its_pixels_or_its_header_is_told_apart(tmp_path: Path) -> None:
    whole = make_file(tmp_path / "whole.dcm").read_bytes()
    path = tmp_path / "cut.dcm"
    path.write_bytes(whole[:-1])
    assert _broken(path) == (
        "PIXEL_DATA_TRUNCATED",
        "The pixel data is shorter than rows, columns, bits and frames say. (23 of 24 bytes)",
    )
    path.write_bytes(whole[:-40])
    assert _broken(path)[0] == "HEADER_UNREADABLE"
    path.write_bytes(whole[:200])
    assert _refused(path) in ("HEADER_UNREADABLE", "NO_PIXEL_DATA")


def test_what_is_no_packable_image_is_refused_with_its_kind(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"hello")
    assert _refused(tmp_path / "text") == "NOT_DICOM"
    assert _refused(tmp_path / "absent") == "FILE_UNREADABLE"
    assert _refused(_bundled("DICOMDIR")) == "DICOM_DIRECTORY"
    assert _refused(_bundled("test-SR.dcm")) == "UNSUPPORTED_SOP_CLASS"
    assert _refused(_bundled("rtplan.dcm")) == "UNSUPPORTED_SOP_CLASS"
    assert _refused(_bundled("liver_1frame.dcm")) == "UNSUPPORTED_SOP_CLASS"
    assert _refused(_bundled("waveform_ecg.dcm")) == "UNSUPPORTED_SOP_CLASS"
    assert _refused(make_file(tmp_path / "no_pixels.dcm", PixelData=None)) == "NO_PIXEL_DATA"
    for name, pixels, reason in (("a", b"\0" * 24, "UNSUPPORTED_SOP_CLASS"), ("b", None, "NO_PIXEL_DATA")):
        path = write(tmp_path / name, make_dataset(SOPClassUID=None, PixelData=pixels))
        path.write_bytes(path.read_bytes().replace(b"UI\x06\x001.2.3\0", b"UI\x06\x00" + b"\0" * 6))
        assert _refused(path) == reason  # no class anywhere


def test_the_class_of_the_meta_information_stands_in_for_a_missing_one(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm")
    tag = b"\x08\x00\x16\x00UI\x1a\x00" + CTImageStorage.encode()
    path.write_bytes(path.read_bytes().replace(tag, b"\x08\x00\x17\x00UI\x1a\x00" + CTImageStorage.encode()))
    assert header_of(path).sop_class_uid == CTImageStorage


def test_encodings_that_nobody_decodes_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", make_dataset(), syntax=MPEG2MPML, frames=[b"xx"])
    data = path.read_bytes()
    for syntax in (
        b"1.2.840.10008.1.2.4.100",
        b"1.2.840.10008.1.2.4.110",
        b"1.2.840.10008.1.2.1.98\0",
        b"1.2.3.4.5" + b"\0" * 14,
    ):
        path.write_bytes(data.replace(MPEG2MPML.encode(), syntax))
        assert _broken(path)[0] == "UNSUPPORTED_TRANSFER_SYNTAX"


def test_pixels_must_be_encapsulated_exactly_where_the_syntax_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", make_dataset(), frames=[b"xx"], syntax=JPEGBaseline8Bit)
    data = path.read_bytes()
    path.write_bytes(data.replace(JPEGBaseline8Bit.encode(), b"1.2.840.10008.1.2.1\0\0\0"))
    assert _broken(path)[0] == "INVALID_IMAGE_DESCRIPTION"
    native = make_file(tmp_path / "b.dcm").read_bytes()
    path.write_bytes(native.replace(b"\x14\x001.2.840.10008.1.2.1\0", b"\x14\x001.2.840.10008.1.2.5\0"))
    assert _broken(path)[0] == "INVALID_IMAGE_DESCRIPTION"


def test_odd_but_usable_files_carry_flags(tmp_path: Path) -> None:
    padded = make_dataset(HighBit=3)
    padded.PixelData += b"\0" * 10
    assert header_of(write(tmp_path / "a.dcm", padded)).flags == ("high_bit_corrected", "excess_pixel_bytes")
    header = header_of(_bundled("MR_small_padded.dcm"))
    assert header.flags == ("excess_pixel_bytes",)


def test_padding_is_read_by_the_sign_of_the_pixels(tmp_path: Path) -> None:
    signed = np.zeros((3, 4), np.int16)
    options: dict[str, Any] = {"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -1990}
    assert header_of(make_file(tmp_path / "a.dcm", pixels=signed, **options)).padding == (-2000, -1990)
    lonely = make_file(tmp_path / "b.dcm", pixels=signed, PixelPaddingRangeLimit=-1990)
    assert header_of(lonely).padding is None


def test_values_that_do_not_parse_are_absent_not_fatal(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", InstanceNumber="12", SliceLocation="1.25")
    data = (
        path.read_bytes()
        .replace(b"IS\x02\x0012", b"IS\x02\x00xx")
        .replace(b"DS\x04\x001.25", b"DS\x04\x00\\\\ab")
    )
    path.write_bytes(data.replace(b"DS\x08\x000.5\\0.75", b"DS\x08\x00inf\\nan "))
    header = header_of(path)
    assert header.instance_number is None
    assert header.slice_location is None
    assert header.planes[0].pixel_spacing is None


@pytest.mark.parametrize("number", [b"1e300   ", b"-1e13   ", b"nan     ", b"inf     ", b"1e400   "])
def test_implausible_numbers_are_absent(tmp_path: Path, number: bytes) -> None:
    """They would overflow on the way to an affine or a pixel."""
    path = make_file(tmp_path / "a.dcm", RescaleSlope="12345678", SliceLocation="12345678", EchoTime="5")
    path.write_bytes(path.read_bytes().replace(b"DS\x08\x0012345678", b"DS\x08\x00" + number))
    header = header_of(path)
    assert header.planes[0].slope is None
    assert header.slice_location is None


@pytest.mark.parametrize(("written", "number"), [("-12", -12), ("2147483648", None), ("999999999999", None)])
def test_integers_have_thirty_two_bits(tmp_path: Path, written: str, number: int | None) -> None:
    path = make_file(tmp_path / "a.dcm", InstanceNumber=written)
    assert header_of(path).instance_number == number


def test_no_identifier_in_a_representation(tmp_path: Path) -> None:
    header = make_header(tmp_path, 1, PatientID="SENTINEL")
    broken = read_header(make_file(tmp_path / "b.dcm", PatientID="SENTINEL", Rows=0))
    assert f"{header} {broken}" == "InstanceHeader(CT, 1 x 3 x 4) BrokenInstance(INVALID_IMAGE_DESCRIPTION)"


def test_what_tells_people_apart_is_read_as_devices_write_it(tmp_path: Path) -> None:
    """Escapes of ISO 2022 in a name whose bytes are all of ASCII; several identifiers in one value."""
    dataset = make_dataset()
    dataset.SpecificCharacterSet = ["", "ISO 2022 IR 87"]
    kanji = "\u5c71\u7530^\u592a\u90ce"
    dataset.PatientName = f"Yamada^Tarou={kanji}"
    dataset.PatientAge, dataset.OtherPatientIDs = "055Y", "12-7, 0099; B"
    header = read_header(write(tmp_path / "a.dcm", dataset))
    assert isinstance(header, InstanceHeader)
    assert header.patient_name.split("=")[1] == kanji
    assert (header.patient_age, header.other_patient_ids) == ("055Y", ("0099", "12-7", "B"))
