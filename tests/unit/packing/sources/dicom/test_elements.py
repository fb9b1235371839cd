"""The element walk, held against pydicom's parser, and against files that are built to break it."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path

import pydicom
import pytest
from pydicom.data import get_testdata_files
from pydicom.datadict import dictionary_VR
from pydicom.dataset import Dataset
from pydicom.errors import InvalidDicomError
from pydicom.sequence import Sequence
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import (
    Elements,
    FileElements,
    HeaderLimits,
    read_elements,
    read_inflated,
)
from shardflow.packing.sources.dicom.headers import _WANTED
from tests.unit.packing.sources.dicom.factory import make_dataset, make_file, write

pytestmark = pytest.mark.fast

KEPT = frozenset({0x00080060, 0x00100020, 0x00280010, 0x52009229})
CHARACTER_SET = 0x00080005
PREFIX = b"\0" * 128 + b"DICM"
SYNTAX = b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.1\0"


def _read(path: Path, *, max_header_bytes: int = 1 << 26, max_inflated_bytes: int = 1 << 26) -> FileElements:
    return read_elements(
        path, KEPT, HeaderLimits(max_header_bytes=max_header_bytes, max_inflated_bytes=max_inflated_bytes)
    )


def _reason(path: Path, **limits: int) -> tuple[str, str]:
    with pytest.raises(SourceError) as caught:
        _read(path, **limits)
    return caught.value.reason, caught.value.message


@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian],
)
@pytest.mark.parametrize("undefined", [False, True])
def test_values_sequences_and_pixels_are_found_in_every_encoding(
    tmp_path: Path, syntax: str, undefined: bool
) -> None:
    inner, outer = Dataset(), Dataset()
    inner.SliceThickness = "3"
    outer.PixelMeasuresSequence = Sequence([inner, inner])
    dataset = make_dataset(SharedFunctionalGroupsSequence=Sequence([outer]))
    private = dataset.private_block(0x0029, "TEST", create=True)
    private.add_new(0x10, "OB", b"x" * 40_000)  # longer than the first read
    for sequence in (outer["PixelMeasuresSequence"], dataset["SharedFunctionalGroupsSequence"]):
        sequence.is_undefined_length = undefined
        for item in sequence.value:
            item.is_undefined_length_sequence_item = undefined
    path = write(tmp_path / "a.dcm", dataset, syntax=syntax)
    found = _read(path)
    assert found.transfer_syntax_uid == syntax
    assert found.problem is None
    assert found.values[0x00080060] == b"CT"
    assert struct.unpack("<H" if found.is_little_endian else ">H", found.values[0x00280010]) == (3,)
    (shared,) = found.items(0x52009229)
    measures = shared.items(0x00289110)
    assert [item.values[0x00180050].strip() for item in measures] == [b"3", b"3"]
    assert shared.items(0x00289110) is measures
    assert found.items(0x52009230) == []
    content = read_inflated(path, 1 << 20) if syntax == DeflatedExplicitVRLittleEndian else path.read_bytes()
    assert found.pixel_num_bytes == 24
    pixels = content[found.pixel_offset : found.pixel_offset + 24]
    assert pixels in (dataset.PixelData, dataset.PixelData[::-1]) or syntax == ExplicitVRBigEndian
    assert found.num_bytes == len(content)


def _bundled() -> list[Path]:
    return sorted(path for path in map(Path, get_testdata_files()) if path.is_file())


def _reference(path: Path, *, force: bool) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pydicom.dcmread(path, stop_before_pixels=True, force=force)


def test_raw_values_equal_those_of_pydicom() -> None:
    """All elements that the header pass asks for, on every file of pydicom's test data."""
    num_compared = 0
    for path in _bundled():
        try:
            found = read_elements(
                path, _WANTED, HeaderLimits(max_header_bytes=1 << 26, max_inflated_bytes=1 << 26)
            )
        except SourceError:
            with pytest.raises(InvalidDicomError):
                _reference(path, force=False)
            continue
        reference = _reference(path, force="no_preamble" in found.flags)
        kept = {tag: value for tag, value in found.values.items() if not _is_sequence(reference, tag)}
        wanted = {
            int(tag): reference.get_item(tag).value or b""
            for tag in reference.keys()  # noqa: SIM118 - items() would convert the values
            if int(tag) in _WANTED and not _is_sequence(reference, tag)
        }
        kept.pop(CHARACTER_SET, None)  # pydicom converts this one at once
        assert {tag: value for tag, value in kept.items() if wanted.get(tag) != value} == {}, path.name
        assert kept.keys() | {CHARACTER_SET} >= wanted.keys(), path.name
        if "encoding_contradicts_syntax" not in found.flags:
            assert reference.original_encoding == (found.is_implicit, found.is_little_endian), path.name
        num_compared += len(wanted)
    assert num_compared > 2500


def _is_sequence(dataset: Dataset, tag: int) -> bool:
    # Private elements stand in no dictionary; those that are wanted are no sequences.
    is_known = not tag >> 16 & 1
    return (is_known and str(dictionary_VR(tag)) == "SQ") or dataset.get_item(tag).VR == "SQ"


def test_a_file_without_preamble_is_taken_only_if_its_bytes_look_like_dicom(tmp_path: Path) -> None:
    whole = make_file(tmp_path / "whole.dcm").read_bytes()
    (tmp_path / "meta.dcm").write_bytes(whole[132:])
    start = whole.index(b"\x08\x00\x08\x00CS")
    (tmp_path / "bare.dcm").write_bytes(whole[start:])
    for name, flags in (("meta.dcm", ("no_preamble",)), ("bare.dcm", ("no_preamble", "no_transfer_syntax"))):
        found = _read(tmp_path / name)
        assert found.flags == flags
        assert found.transfer_syntax_uid == ExplicitVRLittleEndian
        assert found.values[0x00100020] == b"patient-1 "
    for number, junk in enumerate(
        (
            b"",
            b"\x08",
            b"\x08\x00\x05\x00\xff\xff\xff\xff",
            b"\x1f\x8b\x08\0\0\0\0\0\0",
            b"PK\x03\x04aaaa",
            b"text" * 50,
        )
    ):
        (tmp_path / f"junk{number}").write_bytes(junk)
        assert _reason(tmp_path / f"junk{number}")[0] == "NOT_DICOM"


def test_the_encoding_is_what_the_bytes_are_not_what_the_syntax_says(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", syntax=ImplicitVRLittleEndian)
    told = path.read_bytes().replace(b"1.2.840.10008.1.2\0", b"1.2.840.10008.1.9\0")
    path.write_bytes(told)
    assert _read(path).values[0x00080060] == b"CT"
    explicit = make_file(tmp_path / "b.dcm").read_bytes()
    path.write_bytes(explicit.replace(b"UI\x14\x001.2.840.10008.1.2.1\0", b"UI\x12\x001.2.840.10008.1.2\0"))
    found = _read(path)
    assert found.flags == ("encoding_contradicts_syntax",)
    assert found.values[0x00080060] == b"CT"


def _element(tag: int, value: bytes, vr: bytes = b"LO", length: int | None = None) -> bytes:
    size = len(value) if length is None else length
    return struct.pack("<HH2sH", tag >> 16, tag & 0xFFFF, vr, size) + value


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (_element(0x00100020, b"abcd") + _element(0x00200010, b"", length=500), "(0020,0010) reaches beyond"),
        (
            _element(0x00100020, b"abcd") + b"\x20\x00\x10\x00ZZ\x02\x00xx",
            "unknown VR in element (0020,0010)",
        ),
        (_element(0x00100020, b"abcd") + b"\x20\x00\x10\x00OB\x00\x00\x04", "ends inside an element"),
        (
            _element(0x00100020, b"abcd") + b"\x20\x00\x10\x00SQ\0\0\xff\xff\xff\xff" + b"x" * 8,
            "something else than items",
        ),
        (
            _element(0x00100020, b"abcd")
            + b"\x20\x00\x10\x00SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\x00\x01\x00\x00",
            "an item reaches beyond",
        ),
    ],
)
def test_damage_is_told_by_tag_and_what_came_before_is_kept(
    tmp_path: Path, tail: bytes, problem: str
) -> None:
    path = tmp_path / "a.dcm"
    path.write_bytes(PREFIX + SYNTAX + tail)
    found = _read(path)
    assert found.problem is not None
    assert problem in found.problem
    assert found.values[0x00100020] == b"abcd"


def test_trailing_zeros_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.dcm"
    path.write_bytes(PREFIX + SYNTAX + _element(0x00100020, b"abcd") + b"\0" * 50_000)
    found = _read(path)
    assert found.problem is None
    assert found.pixel_tag is None


@pytest.mark.parametrize("depth", [31, 32, 33, 10_000])
def test_nesting_is_bounded(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.dcm"
    opening = b"\x20\x00\x10\x00SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff"
    closing = b"\xfe\xff\x0d\xe0\0\0\0\0\xfe\xff\xdd\xe0\0\0\0\0"
    path.write_bytes(
        PREFIX + SYNTAX + opening * depth + closing * depth + _element(0x00280010, b"\x05\0", b"US")
    )
    if depth <= 32:
        assert _read(path).values[0x00280010] == b"\x05\0"
    else:
        assert _reason(path) == ("LIMIT_EXCEEDED", _reason(path)[1])
        assert "nested deeper than 32" in _reason(path)[1]


def test_nesting_of_defined_length_is_bounded_where_it_is_read(tmp_path: Path) -> None:
    value = b""
    for _ in range(40):
        item = b"\xfe\xff\x00\xe0" + struct.pack("<I", len(value)) + value
        value = struct.pack("<HH2sHI", 0x5200, 0x9229, b"SQ", 0, len(item)) + item
    path = tmp_path / "a.dcm"
    path.write_bytes(PREFIX + SYNTAX + value)
    elements: Elements = _read(path)
    for _ in range(32):
        (elements,) = elements.items(0x52009229)
    with pytest.raises(SourceError, match="nested deeper"):
        elements.items(0x52009229)


def test_the_header_is_bounded_in_bytes(tmp_path: Path) -> None:
    dataset = make_dataset()
    dataset.private_block(0x0029, "TEST", create=True).add_new(0x10, "OB", b"x" * 200_000)
    path = write(tmp_path / "a.dcm", dataset)
    assert _read(path).pixel_num_bytes == 24
    reason, message = _reason(path, max_header_bytes=100_000)
    assert reason == "LIMIT_EXCEEDED"
    assert "more than 100000 bytes before the pixel data" in message


def test_a_deflate_bomb_is_not_inflated(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", syntax=DeflatedExplicitVRLittleEndian)
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = bomb.compress(b"\0" * 50_000_000) + bomb.flush()
    meta = path.read_bytes()[:132] + b"\x02\x00\x10\x00UI\x16\x001.2.840.10008.1.2.1.99"
    path.write_bytes(meta + packed)
    assert len(packed) < 60_000
    reason, message = _reason(path, max_inflated_bytes=1_000_000)
    assert reason == "LIMIT_EXCEEDED"
    assert message.endswith("(the file inflates to more than 1000000 bytes)")
    path.write_bytes(meta + b"\x07" * 100)
    assert _reason(path)[0] == "HEADER_UNREADABLE"
    with pytest.raises(SourceError, match="damaged"):
        read_inflated(path, 100)


def test_an_unreadable_file_is_told_with_the_reason(tmp_path: Path) -> None:
    assert _reason(tmp_path / "SENTINEL.dcm") == (
        "FILE_UNREADABLE",
        "The operating system refused to open or read the file. (No such file or directory)",
    )
