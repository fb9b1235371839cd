"""Grey values, sides of the patient and lengths: what a wrong picture would mislead with."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.viewing.study import (
    WINDOWS,
    EdgeLetters,
    Window,
    edge_letters,
    pixel_spacing,
    scale_bar_mm,
    to_gray,
    to_size,
)

pytestmark = pytest.mark.fast


def _affine(columns: tuple[float, float, float], rows: tuple[float, float, float]) -> list[list[float]]:
    """Step along a row (next column), step along a column (next row), a third and an origin."""
    return [[columns[i], rows[i], 1.0, 5.0] for i in range(3)] + [[0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        ((0.7, 0, 0), (0, 0.7, 0), EdgeLetters("R", "L", "A", "P")),  # axial
        ((-0.7, 0, 0), (0, 0.7, 0), EdgeLetters("L", "R", "A", "P")),  # axial, mirrored
        ((0.7, 0, 0), (0, 0, -0.7), EdgeLetters("R", "L", "H", "F")),  # coronal
        ((0, 0.7, 0), (0, 0, -0.7), EdgeLetters("A", "P", "H", "F")),  # sagittal
        ((0.7, 0.4, 0), (0, 0, -0.7), EdgeLetters("RA", "LP", "H", "F")),  # oblique by 30 degrees
        ((0.7, 0.1, 0), (0, 0, -0.7), EdgeLetters("R", "L", "H", "F")),  # by 8 degrees
    ],
)
def test_letters_follow_the_affine(
    columns: tuple[float, float, float], rows: tuple[float, float, float], expected: EdgeLetters
) -> None:
    assert edge_letters({"affine_lps": _affine(columns, rows)}) == expected


def test_letters_without_an_affine_are_those_of_the_source_or_none() -> None:
    stated = {"affine_lps": None, "technical": {"patient_orientation": ["P", "F"]}}
    assert edge_letters(stated) == EdgeLetters("A", "P", "H", "F")
    unknown: tuple[dict[str, Any], ...] = (
        {},
        {"technical": {}},
        {"technical": {"patient_orientation": ["P"]}},
        {"technical": {"patient_orientation": ["X", "F"]}},
        {"affine_lps": np.zeros((4, 4)).tolist()},
    )
    for series in unknown:
        assert edge_letters(series) == EdgeLetters()


def test_window_maps_its_ends_to_black_and_white() -> None:
    pixels = np.array([[-2000, -160, 40, 240, 3000]], np.int16)
    assert to_gray(pixels, WINDOWS["soft"]).tolist() == [[0, 0, 128, 255, 255]]
    assert to_gray(np.array([[np.nan, 1.0, 3.0]], np.float32), None).tolist() == [[0, 0, 255]]
    assert to_gray(np.full((1, 2), 7, np.int16), None).tolist() == [[0, 0]]
    colour = np.full((2, 2, 3), 9, np.uint8)
    assert to_gray(colour, Window(0, 1)) is colour


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.uint8])
@pytest.mark.parametrize("window", [Window(-160.3, 240.7), None])
def test_large_slices_are_mapped_as_small_ones(dtype: type[np.integer[Any]], window: Window | None) -> None:
    """Large ones are looked up by value."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    large = np.random.default_rng(0).integers(least, most + 1, (300, 256)).astype(dtype)
    large[0, :2] = least, most
    lines = [to_gray(line, window or Window(least, most)) for line in large[:, None]]
    assert np.array_equal(to_gray(large, window), np.concatenate(lines))


def test_window_is_parsed_or_refused() -> None:
    assert Window.parse("-600,1500") == Window(-1350.0, 150.0) == Window.parse("lung")
    for text in ("", "1", "1,2,3", "a,b", "40,0", "40,-1", "nan,1", "inf,1", "Lung"):
        with pytest.raises(ConfigError, match="--window"):
            Window.parse(text)


def test_sizes_and_lengths() -> None:
    assert to_size(np.zeros((16, 8), np.uint8), 64, 32).shape == (64, 32)
    assert to_size(np.zeros((160, 80, 3), np.uint8), 64, 32).shape == (64, 32, 3)
    assert [scale_bar_mm(width) for width in (1.6, 30, 230, 404, 600)] == [0.5, 10, 50, 100, 200]
    assert pixel_spacing({"pixel_spacing_mm": [0.5, 1]}) == (0.5, 1.0)
    for absurd in (None, [0, 1], [-1, 1], [1, 100]):
        assert pixel_spacing({"pixel_spacing_mm": absurd}) is None


def test_a_thumbnail_loads_no_server_and_no_pages() -> None:
    code = "import sys, shardflow.viewing.study\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    loaded = done.stdout.split()
    ours = {name for name in loaded if name.startswith("shardflow.viewing.")}
    assert ours == {"shardflow.viewing.study"}
    assert "http.server" not in loaded
