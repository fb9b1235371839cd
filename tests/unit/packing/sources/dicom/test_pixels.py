"""Modality units: the order of operations, the form of a stack, clipping, padding, polarity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom.uid import RLELossless

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.pixels import (
    DecodedSlice,
    SliceForm,
    _rescale,
    check_copies,
    form_of,
    iter_slices,
)
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.dicom.stacks import build_studies
from tests.stacks import iter_stack
from tests.unit.packing.sources.dicom.factory import header_of, make_dataset, make_file, make_header, write

pytestmark = pytest.mark.fast

Array = np.ndarray[Any, np.dtype[Any]]


def _decode(path: Path, **options: Any) -> DecodedSlice:
    (decoded,) = iter_slices(path, header_of(path), **options)
    return decoded


def _make(tmp_path: Path, stored: list[list[int]], dtype: str = "u2", **options: Any) -> Path:
    return make_file(tmp_path / "a.dcm", pixels=np.array(stored, dtype), **options)


# ---- CT --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "stored", "slope", "intercept", "expected", "num_clipped"),
    [
        ("u2", [0, 1024, 4095], 1, -1024, [-1024, 0, 3071], 0),
        ("i2", [-1024, 0, 3071], 1, 0, [-1024, 0, 3071], 0),
        ("i2", [-32768, 0, 32767], 1, -1024, [-32768, -1024, 31743], 1),
        ("u2", [0, 40000, 65535], 1, -1024, [-1024, 32767, 32767], 2),
        ("u2", [0, 100, 20000], 2, -1024, [-1024, -824, 32767], 1),
        ("u2", [0, 1, 3], 0.5, 0, [0, 0, 2], 0),  # rounded half to even
        ("u1", [0, 1, 255], 1, -1000, [-1000, -999, -745], 0),
        ("u4", [0, 1, 4_000_000_000], 1, 0, [0, 1, 32767], 1),
        ("u2", [1, 2, 3], -1, 0, [-1, -2, -3], 0),
    ],
)
def test_ct_is_hounsfield_units_in_int16_with_a_count_of_what_was_cut(
    tmp_path: Path,
    dtype: str,
    stored: list[int],
    slope: float,
    intercept: float,
    expected: list[int],
    num_clipped: int,
) -> None:
    path = _make(tmp_path, [stored], dtype, RescaleSlope=slope, RescaleIntercept=intercept)
    decoded = _decode(path)
    assert form_of([header_of(path)]) == SliceForm(dtype="int16", unit="HU", fill=-1024)
    assert decoded.pixels.dtype == np.int16
    assert decoded.pixels.tolist() == [expected]
    assert (decoded.num_clipped, decoded.num_padding, decoded.valid) == (num_clipped, 0, None)


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"RescaleType": "HU"}, "HU"),
        ({"RescaleType": "US"}, "raw"),
        ({"RescaleSlope": None, "RescaleIntercept": None}, "raw"),
        ({"RescaleIntercept": None}, "raw"),
        ({"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]}, "raw"),
        ({"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"], "RescaleType": "HU"}, "HU"),
    ],
)
def test_a_ct_is_in_hounsfield_units_only_where_it_says_so(
    tmp_path: Path, options: dict[str, Any], unit: str
) -> None:
    assert form_of([header_of(_make(tmp_path, [[1]], **options))]).unit == unit


def test_padding_is_found_before_rescale_and_becomes_air(tmp_path: Path) -> None:
    path = _make(
        tmp_path, [[-2000, -2000, 0, 63]], "i2", PixelPaddingValue=-2000, RescaleIntercept=5, RescaleSlope=1
    )
    decoded = _decode(path)
    assert decoded.pixels.tolist() == [[-1024, -1024, 5, 68]]
    assert decoded.num_padding == 2
    assert decoded.valid is not None
    assert decoded.valid.tolist() == [[False, False, True, True]]


def test_a_range_of_padding_and_clipped_padding_is_not_counted_as_clipped(tmp_path: Path) -> None:
    path = _make(
        tmp_path,
        [[65535, 65530, 50000, 7]],
        PixelPaddingValue=65535,
        PixelPaddingRangeLimit=65530,
        RescaleIntercept=0,
    )
    decoded = _decode(path)
    assert decoded.pixels.tolist() == [[-1024, -1024, 32767, 7]]
    assert (decoded.num_clipped, decoded.num_padding) == (1, 2)


# ---- other modalities ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "padding", "options", "expected"),
    [
        ([[0, 7, 9]], 0, {}, [[0, 7, 9]]),  # a background of zero stays as it is, bit for bit
        ([[300, 7, 9]], 300, {}, [[0, 7, 9]]),
        ([[65535, 7, 9]], 65535, {}, [[0, 7, 9]]),
        ([[0, 7, 9]], 0, {"RescaleSlope": 1, "RescaleIntercept": 5}, [[5, 12, 14]]),
    ],
)
def test_padding_becomes_one_value_that_no_pixel_decides(
    tmp_path: Path, stored: list[list[int]], padding: int, options: dict[str, Any], expected: list[list[int]]
) -> None:
    path = _make(tmp_path, stored, modality="MR", PixelPaddingValue=padding, **options)
    decoded = _decode(path)
    assert decoded.pixels.tolist() == expected
    assert decoded.num_padding == 1


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"BitsStored": 12, "HighBit": 11}, "int16"),
        ({"BitsStored": 16}, "uint16"),
        ({"BitsStored": 8, "HighBit": 7}, "uint8"),
        ({"PixelRepresentation": 1}, "int16"),
        ({"BitsStored": 12, "HighBit": 11, "RescaleSlope": 1, "RescaleIntercept": -1000}, "int16"),
        ({"RescaleSlope": 1, "RescaleIntercept": -1000}, "int32"),
        ({"RescaleSlope": 70000, "RescaleIntercept": 0}, "float32"),
        ({"RescaleSlope": 0.25, "RescaleIntercept": 0}, "float32"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "uint16"),  # a slope of zero is none
    ],
)
def test_the_smallest_type_that_holds_all_declared_values(
    tmp_path: Path, options: dict[str, Any], dtype: str
) -> None:
    path = _make(tmp_path, [[1, 2]], modality="MR", **options)
    assert form_of([header_of(path)]) == SliceForm(dtype=dtype, unit="raw")
    assert _decode(path).pixels.dtype == np.dtype(dtype)


def test_slopes_are_applied_per_slice_and_all_slices_share_one_form(tmp_path: Path) -> None:
    headers = [
        make_header(
            tmp_path,
            k,
            modality="PT",
            position=(0, 0, k),
            RescaleSlope=slope,
            RescaleIntercept=0,
            Units="BQML",
        )
        for k, slope in ((1, 1), (2, 2), (3, 0.5))
    ]
    form = form_of(headers)
    assert form == SliceForm(dtype="float32", unit="BQML")
    (study,) = build_studies(headers).studies
    decoded = list(iter_stack(study.stacks[0], lambda header: tmp_path / f"{header.file_index}.dcm"))
    assert [one.pixels[0, 0] for one in decoded] == [16.0, 64.0, 24.0]
    assert {one.pixels.dtype for one in decoded} == {np.dtype(np.float32)}


def test_signed_and_unsigned_slices_are_promoted_together(tmp_path: Path) -> None:
    one = make_header(tmp_path, 1, modality="MR", pixels=np.array([[60000]], np.uint16))
    two = make_header(tmp_path, 2, modality="MR", pixels=np.array([[-5]], np.int16))
    form = form_of([one, two])
    assert form.dtype == "int32"
    assert [
        next(iter_slices(tmp_path / f"{h.file_index}.dcm", h, form=form)).pixels.tolist() for h in (one, two)
    ] == [
        [[60000]],
        [[-5]],
    ]


@given(
    st.sampled_from(["u1", "i1", "u2", "i2"]),
    st.integers(-70000, 70000),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from(["uint8", "int16", "uint16", "int32"]),
    st.data(),
)
def test_integer_arithmetic_is_exact_or_clipped(
    dtype: str, intercept: int, slope: float, target: str, data: st.DataObject
) -> None:
    info = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=1, max_size=20))
    form = SliceForm(dtype=target, unit="raw")
    plane = PlaneHeader(slope=slope, intercept=float(intercept))
    pixels, num_clipped = _rescale(np.array([values], dtype), plane, form, None)
    exact = [int(slope) * value + intercept for value in values]
    assert form.range is not None
    low, high = form.range
    assert pixels.tolist() == [[min(max(value, low), high) for value in exact]]
    assert num_clipped == sum(not low <= value <= high for value in exact)
    assert pixels.dtype == np.dtype(target)


# ---- polarity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["CR", "DX", "US", "OT"])
def test_display_images_in_monochrome1_are_mirrored_once(tmp_path: Path, modality: str) -> None:
    path = _make(
        tmp_path,
        [[0, 1, 4095]],
        modality=modality,
        BitsStored=12,
        HighBit=11,
        PhotometricInterpretation="MONOCHROME1",
        PresentationLUTShape="INVERSE",
    )
    assert form_of([header_of(path)]) == SliceForm(dtype="int16", unit="raw", mirror=4095.0)
    assert _decode(path).pixels.tolist() == [[4095, 4094, 0]]


def test_a_mirrored_value_has_no_unit_any_more(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "modality": "CR",
        "RescaleType": "OD",
        "RescaleSlope": 1,
        "RescaleIntercept": 0,
    }
    upright = _make(tmp_path, [[0, 1]], **options)
    assert form_of([header_of(upright)]).unit == "OD"
    negative = _make(tmp_path, [[0, 1]], PhotometricInterpretation="MONOCHROME1", **options)
    assert form_of([header_of(negative)]).unit == "raw"


@pytest.mark.parametrize("modality", ["CT", "MR", "PT"])
def test_measurements_are_never_mirrored(tmp_path: Path, modality: str) -> None:
    path = _make(
        tmp_path,
        [[0, 1, 9]],
        modality=modality,
        PhotometricInterpretation="MONOCHROME1",
        RescaleIntercept=0,
        RescaleSlope=1,
    )
    assert _decode(path).pixels.tolist() == [[0, 1, 9]]


def test_mirroring_comes_after_rescale_and_padding_turns_dark(tmp_path: Path) -> None:
    path = _make(
        tmp_path,
        [[0, 10, 200, 255]],
        "u1",
        modality="CR",
        PhotometricInterpretation="MONOCHROME1",
        RescaleSlope=2,
        RescaleIntercept=100,
        PixelPaddingValue=0,
    )
    decoded = _decode(path)
    assert form_of([header_of(path)]).mirror == 100 + 610
    assert decoded.pixels.tolist() == [[100, 590, 210, 100]]  # the darkest value that the bits allow
    assert decoded.num_padding == 1


def test_a_slice_of_padding_alone_is_empty(tmp_path: Path) -> None:
    decoded = _decode(_make(tmp_path, [[7, 7]], modality="MR", PixelPaddingValue=7))
    assert decoded.pixels.tolist() == [[0, 0]]
    assert decoded.num_padding == 2


def test_a_fractional_slope_of_a_mirrored_image(tmp_path: Path) -> None:
    path = _make(
        tmp_path,
        [[0, 255]],
        "u1",
        modality="CR",
        PhotometricInterpretation="MONOCHROME1",
        RescaleSlope=0.5,
        RescaleIntercept=0,
    )
    decoded = _decode(path)
    assert decoded.pixels.dtype == np.float32
    assert decoded.pixels.tolist() == [[127.5, 0.0]]


# ---- stacks and copies -----------------------------------------------------------------------------


def test_frames_of_a_stack_come_in_geometric_order(tmp_path: Path) -> None:
    """Slices of two files interleave; a cine keeps the order of its frames."""
    headers = [
        make_header(tmp_path, number, position=(0, 0, z)) for number, z in ((1, 30), (2, 10), (3, 20), (4, 0))
    ]
    (study,) = build_studies(headers).studies
    found = [
        one.pixels[0, 0] + 1024
        for one in iter_stack(study.stacks[0], lambda header: tmp_path / f"{header.file_index}.dcm")
    ]
    assert found == [64, 32, 48, 16]
    pixels = np.arange(3 * 12, dtype=np.uint8).reshape(3, 3, 4)
    cine = make_header(tmp_path, 9, modality="US", pixels=pixels, position=None, orientation=None)
    (study,) = build_studies([cine]).studies
    frames = list(iter_stack(study.stacks[0], lambda _: tmp_path / "9.dcm"))
    np.testing.assert_array_equal(np.stack([one.pixels for one in frames]), pixels)


def _rle_copy(folder: Path, header: InstanceHeader, changed: int = 0) -> InstanceHeader:
    dataset = make_dataset(number=header.instance_number or 0)
    pixels = np.frombuffer(dataset.PixelData, np.uint16).copy()
    pixels[0] += changed
    planes = [pixels.byteswap().view(np.uint8).reshape(-1, 2)[:, k].tobytes() for k in range(2)]
    segments = [bytes([11]) + plane + b"\0" for plane in planes]
    head = np.array([2, 64, 78, *[0] * 13], "<u4").tobytes()
    path = write(folder / "copy.dcm", dataset, syntax=RLELossless, frames=[head + b"".join(segments)])
    return header_of(path, file_index=99)


def test_a_compressed_copy_is_a_copy_and_a_changed_one_a_conflict(tmp_path: Path) -> None:
    header = make_header(tmp_path, 1)

    def locate(one: InstanceHeader) -> Path:
        return tmp_path / ("copy.dcm" if one.file_index == 99 else "1.dcm")

    (study,) = build_studies([header, _rle_copy(tmp_path, header)]).studies
    assert [(pair.kept.file_index, pair.copy.file_index) for pair in study.copies] == [(1, 99)]
    check_copies(study, locate)
    (study,) = build_studies([header, _rle_copy(tmp_path, header, changed=1)]).studies
    with pytest.raises(SourceError) as caught:
        check_copies(study, locate)
    assert (caught.value.reason, caught.value.message[-8:]) == ("CONFLICTING_INSTANCE", "(pixels)")


def test_a_copy_at_another_place_is_a_conflict(tmp_path: Path) -> None:
    header = make_header(tmp_path, 1)
    moved = replace(header, file_index=2, planes=(replace(header.planes[0], position=(0.0, 0.0, 1.0)),))
    (study,) = build_studies([header, moved]).studies
    with pytest.raises(SourceError, match="frames or positions"):
        check_copies(study, lambda _: tmp_path / "1.dcm")
