"""Display ranges: fixed for CT and colour, the file's window for projections, percentiles for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.packing.sources.dicom.pixels import DisplayRange, form_of
from shardflow.packing.sources.dicom.stacks import build_studies
from tests.stacks import iter_stack
from tests.unit.packing.sources.dicom.factory import make_header

pytestmark = pytest.mark.fast


def _range(folder: Path, *slices: dict[str, Any]) -> tuple[float, float]:
    headers = [make_header(folder, number, **options) for number, options in enumerate(slices, start=1)]
    (study,) = build_studies(headers).studies
    (stack,) = study.stacks
    form = form_of([one.instance for one in stack.slices])
    display = DisplayRange(stack, form)
    for decoded in iter_stack(stack, lambda header: folder / f"{header.file_index}.dcm", form=form):
        display.add(decoded)
    return display.result()


def test_ct_has_a_fixed_wide_window(tmp_path: Path) -> None:
    assert _range(tmp_path, {"WindowCenter": 40, "WindowWidth": 80}) == (-1000.0, 1000.0)


def test_a_ct_without_units_takes_percentiles(tmp_path: Path) -> None:
    low, high = _range(tmp_path, {"RescaleSlope": None, "RescaleIntercept": None})
    assert 16 <= low < high <= 27


def test_colour_is_eight_bits(tmp_path: Path) -> None:
    assert _range(tmp_path, {"modality": "US", "pixels": np.zeros((3, 4, 3), np.uint8)}) == (0.0, 255.0)


def test_mr_takes_percentiles_over_the_whole_stack(tmp_path: Path) -> None:
    """Not per slice: a dark slice stays dark."""
    rng = np.random.default_rng(0)
    dark, bright = rng.integers(0, 100, (90, 70)), rng.integers(900, 1000, (90, 70))
    slices = [
        {"modality": "MR", "pixels": pixels.astype(np.uint16), "position": (0, 0, z)}
        for z, pixels in enumerate((dark, bright))
    ]
    low, high = _range(tmp_path, *slices)
    both = np.stack([dark, bright])
    assert (low, high) == pytest.approx(tuple(np.percentile(both, [0.5, 99.5])), abs=1.5)


def test_padding_does_not_count(tmp_path: Path) -> None:
    pixels = np.full((64, 64), 30000, np.uint16)
    pixels[:, :32] = 100 + np.arange(32)
    pixels[0, 0] = 0  # the darkest value, which padding becomes
    low, high = _range(tmp_path, {"modality": "MR", "pixels": pixels, "PixelPaddingValue": 30000})
    assert 100 <= low < high <= 131


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"WindowCenter": 2048, "WindowWidth": 4096}, (0.0, 4095.0)),
        ({"WindowCenter": 2048, "WindowWidth": 4096, "VOILUTFunction": "LINEAR_EXACT"}, (0.0, 4096.0)),
        ({"WindowCenter": 1000, "WindowWidth": 400, "VOILUTFunction": "SIGMOID"}, (800.0, 1200.0)),
        ({"WindowCenter": [7, 1000], "WindowWidth": [0, 401]}, (799.5, 1199.5)),
    ],
)
def test_a_projection_takes_its_own_window(
    tmp_path: Path, options: dict[str, Any], expected: tuple[float, float]
) -> None:
    assert _range(tmp_path, {"modality": "DX", "BitsStored": 12, "HighBit": 11, **options}) == expected


def test_the_window_of_a_mirrored_image_is_mirrored(tmp_path: Path) -> None:
    options = {
        "modality": "DX",
        "BitsStored": 12,
        "HighBit": 11,
        "PhotometricInterpretation": "MONOCHROME1",
        "WindowCenter": 100.5,
        "WindowWidth": 101,
    }
    assert _range(tmp_path, options) == (4095 - 150.0, 4095 - 50.0)


@pytest.mark.parametrize(
    "window", [{}, {"WindowCenter": 5, "WindowWidth": 0}, {"WindowCenter": 5, "WindowWidth": 1}]
)
def test_without_a_proper_window_a_projection_takes_percentiles(
    tmp_path: Path, window: dict[str, Any]
) -> None:
    low, high = _range(tmp_path, {"modality": "CR", **window})
    assert 16 <= low < high <= 27


def test_low_is_always_below_high(tmp_path: Path) -> None:
    flat = {"modality": "MR", "pixels": np.full((4, 4), 7, np.uint16)}
    assert _range(tmp_path, flat) == (7.0, 8.0)
    assert _range(tmp_path, {**flat, "PixelPaddingValue": 7}) == (0.0, 1.0)


def test_samples_are_bounded(tmp_path: Path) -> None:
    header = make_header(tmp_path, 1, modality="MR", pixels=np.zeros((3000, 3000), np.uint8))
    (study,) = build_studies([header]).studies
    display = DisplayRange(study.stacks[0], form_of([header]))
    for decoded in iter_stack(study.stacks[0], lambda _: tmp_path / "1.dcm"):
        display.add(decoded)
    assert sum(sample.size for sample in display._samples) <= 1 << 20
