"""Lookup tables: modality LUT and palette."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.pixels import apply_color_lut, pixel_array
from pydicom.sequence import Sequence
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.pixels import iter_slices
from tests.unit.packing.sources.dicom.factory import header_of, make_dataset, write

pytestmark = pytest.mark.fast

STORED = np.array([[0, 3, 4, 6, 9, 200]], np.uint8)


def _decode(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    (decoded,) = iter_slices(path, header_of(path))
    return decoded.pixels


def _palette_dataset(descriptor: list[int], *tables: bytes) -> Dataset:
    dataset = make_dataset(
        modality="US",
        pixels=STORED,
        position=None,
        orientation=None,
        PhotometricInterpretation="PALETTE COLOR",
    )
    for name, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        setattr(dataset, f"{name}PaletteColorLookupTableDescriptor", descriptor)
        setattr(dataset, f"{name}PaletteColorLookupTableData", table)
    return dataset


def test_a_palette_gives_rgb_and_ends_hold(tmp_path: Path) -> None:
    tables = [bytes([10, 20, 30, 40]), bytes([1, 2, 3, 4]), bytes([9, 8, 7, 6])]
    path = write(tmp_path / "a.dcm", _palette_dataset([4, 3, 8], *tables))
    assert _decode(path)[0].tolist() == [
        [10, 1, 9],
        [10, 1, 9],
        [20, 2, 8],
        [40, 4, 6],
        [40, 4, 6],
        [40, 4, 6],
    ]


@pytest.mark.parametrize("scale", [256, 1])
def test_entries_of_sixteen_bits_become_eight(tmp_path: Path, scale: int) -> None:
    table = (np.array([10, 20, 30, 250]) * scale).astype("<u2").tobytes()
    path = write(tmp_path / "a.dcm", _palette_dataset([4, 3, 16], table, table, table))
    assert _decode(path)[0, :, 0].tolist() == [10, 10, 20, 250, 250, 250]


@pytest.mark.parametrize(
    ("descriptor", "tables"),
    [
        ([4, 3, 8], (b"1234", b"1234", b"12")),
        ([0, 0, 8], (b"1234", b"1234", b"1234")),
        ([4, 3, 40], (b"1234", b"1234", b"1234")),
        ([4, 3], (b"1234", b"1234", b"1234")),
    ],
)
def test_a_damaged_palette_is_told(tmp_path: Path, descriptor: list[int], tables: tuple[bytes, ...]) -> None:
    path = write(tmp_path / "a.dcm", _palette_dataset(descriptor, *tables))
    with pytest.raises(SourceError) as caught:
        _decode(path)
    assert caught.value.reason == "INVALID_IMAGE_DESCRIPTION"


def test_a_missing_palette_is_told(tmp_path: Path) -> None:
    dataset = make_dataset(modality="US", pixels=STORED, PhotometricInterpretation="PALETTE COLOR")
    with pytest.raises(SourceError, match="no proper descriptor"):
        _decode(write(tmp_path / "a.dcm", dataset))


def test_a_real_palette_image_equals_pydicom() -> None:
    path = get_testdata_file("examples_palette.dcm")
    assert isinstance(path, str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pydicom.dcmread(path)
        expected = apply_color_lut(pixel_array(dataset), dataset)
    if expected.dtype == np.uint16:
        expected = expected >> 8
    np.testing.assert_array_equal(_decode(Path(path)), expected)


def _with_modality_lut(syntax: str, bits: int, *, first: int = 3) -> Dataset:
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [4, first, bits])
    item.add_new("ModalityLUTType", "LO", "OD")
    order = ">" if syntax == ExplicitVRBigEndian else "<"
    values = np.array([100, 50, 20, 7])
    item.add_new("LUTData", "OW", values.astype("u1" if bits == 8 else f"{order}u2").tobytes())
    dataset = make_dataset(modality="CR", pixels=STORED, RescaleSlope=9, RescaleIntercept=9)
    dataset.ModalityLUTSequence = Sequence([item])
    return dataset


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ExplicitVRBigEndian])
def test_a_modality_lut_wins_over_slope_and_intercept(tmp_path: Path, syntax: str, bits: int) -> None:
    path = write(tmp_path / "a.dcm", _with_modality_lut(syntax, bits), syntax=syntax)
    pixels = _decode(path)
    assert pixels.tolist() == [[100, 100, 50, 7, 7, 7]]
    assert pixels.dtype == np.uint16


def test_the_first_mapped_value_may_be_negative(tmp_path: Path) -> None:
    dataset = _with_modality_lut(ExplicitVRLittleEndian, 16, first=65534)
    dataset.PixelRepresentation = 1
    assert _decode(write(tmp_path / "a.dcm", dataset)).tolist() == [[20, 7, 7, 7, 7, 100]]


def test_a_short_modality_lut_is_told(tmp_path: Path) -> None:
    dataset = _with_modality_lut(ExplicitVRLittleEndian, 16)
    dataset.ModalityLUTSequence[0].LUTData = b"12"
    with pytest.raises(SourceError, match="shorter than its descriptor"):
        _decode(write(tmp_path / "a.dcm", dataset))


def _segments(scale: float, kind: str) -> bytes:
    """Four values, a line of 120 entries, a copy of the first segment, and a line to the end."""
    top, words = (255 if kind == "u1" else 65535), 0 if kind == "u1" else 1
    offset = [0, 0] if words else [0, 0, 0, 0]
    half, full = int(top * scale / 2), int(top * scale)
    values = [0, 4, 3, 20, 40, 80, 1, 120, half, 2, 1, *offset, 1, 128, full]
    return np.array(values, kind).tobytes()


@pytest.mark.parametrize(
    ("syntax", "kind"),
    [(ExplicitVRLittleEndian, "<u2"), (ExplicitVRBigEndian, ">u2"), (ExplicitVRLittleEndian, "u1")],
)
def test_segmented_palettes_are_expanded_as_pydicom_does(tmp_path: Path, syntax: str, kind: str) -> None:
    bits = 8 if kind == "u1" else 16
    stored = np.arange(256, dtype=np.uint8).reshape(16, 16)
    dataset = make_dataset(
        modality="US",
        pixels=stored,
        position=None,
        orientation=None,
        PhotometricInterpretation="PALETTE COLOR",
    )
    for name, scale in (("Red", 1.0), ("Green", 0.5), ("Blue", 0.25)):
        setattr(dataset, f"{name}PaletteColorLookupTableDescriptor", [256, 0, bits])
        keyword = f"Segmented{name}PaletteColorLookupTableData"
        setattr(dataset, keyword, _segments(scale, kind))
        dataset[keyword].VR = "OW"
    path = write(tmp_path / "a.dcm", dataset, syntax=syntax)
    expected = apply_color_lut(stored, pydicom.dcmread(path)) >> (bits - 8)
    np.testing.assert_array_equal(_decode(path), expected)


@pytest.mark.parametrize(
    "words",
    [[], [0, 4, 1, 2], [1, 256, 9], [2, 1, 0, 0], [0, 1, 7, 2, 1, 6, 0], [9, 256, 1], [0, 255, *range(255)]],
)
def test_a_damaged_segmented_palette_is_refused(tmp_path: Path, words: list[int]) -> None:
    dataset = _palette_dataset([256, 0, 16], b"", b"", b"")
    for name in ("Red", "Green", "Blue"):
        delattr(dataset, f"{name}PaletteColorLookupTableData")
        keyword = f"Segmented{name}PaletteColorLookupTableData"
        setattr(dataset, keyword, np.array(words or [0, 0], "<u2").tobytes())
        dataset[keyword].VR = "OW"
    with pytest.raises(SourceError, match="segmented palette"):
        _decode(write(tmp_path / "a.dcm", dataset))
