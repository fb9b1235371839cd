"""A table of files: shape, dtype, unit, decoder and three values each, and every pixel by another reader.

`reference_values.csv` was written down from SimpleITK (which decodes with GDCM), never from the code under
test. Transfer syntaxes that no real file at hand has are made by encoders, and read back by another library
than ours: GDCM, OpenJPEG, zlib.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import SimpleITK
from pydicom.uid import (
    HTJ2K,
    DeflatedExplicitVRLittleEndian,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    JPEGLossless,
    JPEGLSNearLossless,
)

from shardflow.packing.sources.dicom.dictionary import ENCAPSULATED_SYNTAXES, NATIVE_SYNTAXES
from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header
from shardflow.packing.sources.dicom.pixels import form_of, iter_slices
from tests.unit.packing.sources.dicom.corpus import BUNDLED, without_zeros
from tests.unit.packing.sources.dicom.factory import header_of, make_dataset, write

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    root: str
    file: str
    transfer_syntax_uid: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    decoder: str
    spots: dict[tuple[int, ...], list[float]]
    """(frame, row, column) -> the value, or red, green and blue."""


def _read_table() -> list[Row]:
    with Path(__file__).with_name("reference_values.csv").open(encoding="ascii", newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    spots: dict[tuple[int, ...], list[float]] = {}
    for name in ("first", "second", "third"):
        place, _, value = line[name].partition(": ")
        spots[tuple(map(int, place.split()))] = list(map(float, value.split()))
    return Row(
        root=line["root"],
        file=line["file"],
        transfer_syntax_uid=line["transfer_syntax_uid"],
        shape=tuple(map(int, line["shape"].split("x"))),
        dtype=line["dtype"],
        unit=line["unit"],
        decoder=line["decoder"],
        spots=spots,
    )


TABLE = _read_table()


@pytest.fixture(params=TABLE, ids=lambda row: row.file)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture
def path(row: Row, request: pytest.FixtureRequest) -> Path:
    root: Path = BUNDLED if row.root == "bundled" else request.getfixturevalue("shared_data")
    return root / row.file


def test_shape_dtype_unit_decoder_and_values_are_those_of_the_table(row: Row, path: Path) -> None:
    header = header_of(path)
    assert header.transfer_syntax_uid == row.transfer_syntax_uid
    form = form_of([header])
    slices = list(iter_slices(path, header))
    pixels = np.stack([one.pixels for one in slices])
    assert (pixels.shape, pixels.dtype.name, form.unit) == (row.shape, row.dtype, row.unit)
    assert {one.decoder for one in slices} == {row.decoder}
    for place, value in row.spots.items():
        np.testing.assert_allclose(np.atleast_1d(pixels[place]), value, rtol=1e-5, err_msg=str(place))


def test_every_pixel_is_simpleitks(row: Row, path: Path, tmp_path: Path) -> None:
    """But for padding, which SimpleITK keeps as it is stored."""
    slices = list(iter_slices(path, header_of(path)))
    theirs = _by_simpleitk(without_zeros(path, tmp_path)).reshape(row.shape)
    for one, expected in zip(slices, theirs, strict=True):
        valid = np.ones(one.pixels.shape, bool) if one.valid is None else one.valid
        assert valid.mean() > 0.7
        np.testing.assert_allclose(one.pixels[valid], expected[valid], rtol=1e-5, atol=1e-5)


def _by_simpleitk(path: Path) -> Array:
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    found: Array = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))
    return found


PIXELS = np.add.outer(np.arange(32) * 90, np.arange(48) * 21).astype(np.uint16)
"""0 to 3777 in 12 bits."""


def _jpeg_lossless(pixels: Array) -> bytes:
    return bytes(imagecodecs.jpeg8_encode(pixels, lossless=True, bitspersample=12, predictor=4))


def _by_openjph(path: Path) -> Array:
    """HTJ2K by OpenJPH; ours is decoded by OpenJPEG."""
    data = path.read_bytes()
    found: Array = imagecodecs.htj2k_decode(data[data.index(b"\xff\x4f\xff\x51") :])
    return found


MADE: dict[str, tuple[Callable[[Array], bytes] | None, Callable[[Path], Array], int]] = {
    DeflatedExplicitVRLittleEndian: (None, _by_simpleitk, 0),
    JPEGLossless: (_jpeg_lossless, _by_simpleitk, 0),
    JPEGLSNearLossless: (lambda pixels: bytes(imagecodecs.jpegls_encode(pixels, level=2)), _by_simpleitk, 2),
    HTJ2KLossless: (lambda pixels: bytes(imagecodecs.htj2k_encode(pixels)), _by_openjph, 0),
    HTJ2KLosslessRPCL: (lambda pixels: bytes(imagecodecs.htj2k_encode(pixels)), _by_openjph, 0),
    HTJ2K: (lambda pixels: bytes(imagecodecs.htj2k_encode(pixels)), _by_openjph, 0),
}
"""Encoder, the other reader, and how far the encoder may go."""


@pytest.mark.parametrize("syntax", MADE)
def test_made_files_are_read_as_another_library_reads_them(syntax: str, tmp_path: Path) -> None:
    encode, read, most = MADE[syntax]
    dataset = make_dataset(modality="MR", pixels=PIXELS, BitsStored=12, HighBit=11)
    frames = None if encode is None else [encode(PIXELS)]
    path = write(tmp_path / "image.dcm", dataset, syntax=syntax, frames=frames)
    header = header_of(path)
    (one,) = iter_slices(path, header)
    assert header.transfer_syntax_uid == syntax
    assert one.decoder == ("native" if encode is None else "imagecodecs")
    np.testing.assert_array_equal(one.pixels, read(path).reshape(PIXELS.shape))
    assert np.abs(one.pixels.astype(int) - PIXELS).max() <= most


def test_the_tables_hold_every_transfer_syntax_that_is_decoded() -> None:
    assert {row.transfer_syntax_uid for row in TABLE} | set(MADE) == NATIVE_SYNTAXES | ENCAPSULATED_SYNTAXES


ENDS = [
    *(f"2.4.{number}" for number in [*range(100, 109), 110, 111, 112, 94, 95, 204, 205]),
    "2.8.1",
]


@pytest.mark.parametrize("end", ENDS)
def test_what_cannot_be_decoded_is_quarantined_by_its_code(end: str, tmp_path: Path) -> None:
    """MPEG-2, MPEG-4, HEVC, JPEG XL, JPIP, deflated frames."""
    known = f"1.2.840.10008.1.{ENDS[0]}".encode()
    path = write(tmp_path / "video.dcm", make_dataset(), syntax=known.decode(), frames=[b"\0\0\1\xb3" * 8])
    # pydicom writes none of the newer ones.
    named = f"1.2.840.10008.1.{end}".encode().ljust(len(known), b"\0")
    path.write_bytes(path.read_bytes().replace(known, named))
    found = read_header(path)
    assert isinstance(found, BrokenInstance)
    assert found.reason == "UNSUPPORTED_TRANSFER_SYNTAX"
    assert found.study_instance_uid
    assert found.sop_instance_uid
