"""Text in pixels: found at every turn and depth, markers kept, and nothing found where there is none."""

from __future__ import annotations

from itertools import product
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.packing.deid.pixel_text import TextFinder, _placed, _straight, _windows, models_digest
from tests.phantoms import scan, torso
from tests.sweeps import sampled

pytest.importorskip("onnxruntime", reason="the extra pixels is not installed")


@pytest.fixture(scope="module")
def finder() -> TextFinder:
    return TextFinder()


def body(rows: int = 320, columns: int = 400) -> NDArray[np.float32]:
    """A bright disk with noise on a dark ground."""
    y, x = np.mgrid[:rows, :columns]
    disk = np.hypot((y - rows / 2) / (0.4 * rows), (x - columns / 2) / (0.35 * columns)) < 1
    noise = np.random.default_rng(4).normal(0, 12, (rows, columns))
    soft = np.asarray(cv2.GaussianBlur(disk.astype(np.float32), (0, 0), 2), np.float32)
    return np.asarray(40 + 300 * soft + noise, np.float32)


def burn(
    pixels: NDArray[Any], text: str, at: tuple[int, int], value: float, *, height: int = 14, turn: int = 0
) -> NDArray[np.bool_]:
    """Write text into an image; return its pixels."""
    canvas = np.zeros((height * 2, height * (len(text) + 2)), np.uint8)
    scale = cv2.getFontScaleFromHeight(cv2.FONT_HERSHEY_SIMPLEX, height, 1)
    cv2.putText(canvas, text, (4, height + 4), cv2.FONT_HERSHEY_SIMPLEX, scale, 255, 1, cv2.LINE_AA)
    drawn = np.rot90(canvas, turn // 90)
    ink = np.zeros(pixels.shape[:2], bool)
    rows, columns = np.nonzero(drawn > 100)
    ink[at[0] + rows - rows.min(), at[1] + columns - columns.min()] = True
    pixels[ink] = value
    return ink


def covered(boxes: tuple[tuple[int, int, int, int], ...], ink: NDArray[np.bool_]) -> float:
    hidden = np.zeros_like(ink)
    for top, left, bottom, right in boxes:
        hidden[top:bottom, left:right] = True
    return float((hidden & ink).sum() / ink.sum())


@pytest.mark.parametrize(
    ("turn", "value"),
    sampled(product([0, 90, 180, 270], [0.0, 3000.0]), {(0, 0.0), (90, 3000.0), (180, 3000.0), (270, 0.0)}),
)
def test_a_name_is_found_at_every_turn_and_value(finder: TextFinder, turn: int, value: float) -> None:
    pixels = body().astype(np.int16)
    ink = burn(pixels, "WEBER, UWE", (100, 170), value, turn=turn)
    found = finder.find(pixels)
    assert covered(found.boxes, ink) > 0.98
    assert not found.is_page
    hidden = sum((bottom - top) * (right - left) for top, left, bottom, right in found.boxes)
    assert hidden < 0.1 * pixels.size


@pytest.mark.parametrize("turn", [90, 270])
def test_a_small_faint_name_on_end_is_found_whole(finder: TextFinder, turn: int) -> None:
    """The first search marks some letters of it alone."""
    pixels = body(240, 240).clip(0).astype(np.int16)
    ink = burn(pixels, "KOWALSKI, Lucia", (110, 12), 160, height=7, turn=turn)
    found = finder.find(pixels)
    assert covered(found.boxes, ink) > 0.98
    assert (
        sum((bottom - top) * (right - left) for top, left, bottom, right in found.boxes) < 0.1 * pixels.size
    )


@pytest.mark.parametrize(("height", "value", "is_small"), [(7, 160, True), (18, 3000, False)])
def test_only_small_lines_are_searched_again(
    finder: TextFinder, monkeypatch: pytest.MonkeyPatch, height: int, value: float, is_small: bool
) -> None:
    """A second search of larger ones would double the time, and finds nothing more."""
    searched: list[Any] = []
    detect = TextFinder._detect

    def count(self: TextFinder, part: Any, *place: Any) -> Any:
        searched.append(part)
        return detect(self, part, *place)

    monkeypatch.setattr(TextFinder, "_detect", count)
    pixels = body(240, 240).clip(0).astype(np.int16)
    ink = burn(pixels, "KOWALSKI", (110, 12), value, height=height)
    assert covered(finder.find(pixels).boxes, ink) > 0.98
    assert (len(searched) > len(_windows(pixels))) == is_small


def test_what_is_marked_beside_the_image_blanks_nothing() -> None:
    """The second search of a line at the edge looks beyond it, at repeated pixels."""
    straight = _straight((2.0, 50.0), 0.0, 100.0, 20.0)  # of columns -48 to 52 and rows 40 to 60
    assert _placed((5, 10, 15, 30), straight, (100, 90)) is None
    assert _placed((5, 40, 15, 60), straight, (100, 90)) == (45, 0, 55, 12)
    turned = _straight((50.0, 2.0), 90.0, 100.0, 20.0)
    places = [_placed((5, left, 15, left + 20), turned, (90, 100)) for left in (0, 40, 80)]
    assert sorted(one is None for one in places) == [False, False, True]


def test_text_in_a_corner_of_a_large_image_and_in_color(finder: TextFinder) -> None:
    large = body(1500, 500).astype(np.uint16)  # larger than what is searched at once
    ink = burn(large, "MRN 5501733", (1460, 290), 380, height=18)
    assert covered(finder.find(large).boxes, ink) > 0.98
    color = np.repeat(body().clip(0, 255).astype(np.uint8)[..., None], 3, axis=2)
    color[...] = 250
    ink = burn(color, "born 02.03.1950", (40, 60), 0)
    color[ink] = (0, 0, 255)
    assert covered(finder.find(color).boxes, ink) > 0.98


def test_markers_stay_and_what_is_beside_them_goes(finder: TextFinder) -> None:
    pixels = body().astype(np.uint8)
    side = burn(pixels, "RMLO", (20, 20), 255, height=18)
    name = burn(pixels, "DUBOIS", (280, 20), 255, height=18)
    found = finder.find(pixels)
    assert covered(found.boxes, side) == 0.0
    assert covered(found.kept, side) > 0.98
    assert covered(found.boxes, name) > 0.98
    assert covered(TextFinder(keep=()).find(pixels).boxes, side) > 0.98


def test_a_body_is_no_text(finder: TextFinder) -> None:
    for pixels in (body(), body()[::-1] * -1, np.zeros((64, 64)), np.full((40, 40, 3), 7, np.uint8)):
        found = finder.find(pixels)
        assert (found.boxes, found.kept, found.is_page) == ((), (), False)


def test_a_body_in_a_small_image_is_no_letter_and_large_text_in_one_is_found(finder: TextFinder) -> None:
    """Lungs in a slice of 64 x 64 look like the holes of a B."""
    volume = scan(torso(0.9), contrast="CT", spacing=(6.5, 6.5, 6.0), count=(64, 64, 20), seed=5)
    for index in (10, 14, 16, 18):
        assert finder.find(volume.pixels[index]).boxes == ()
    strip = body(64, 220).astype(np.int16)
    ink = burn(strip, "NOVAK PETR", (20, 10), 3000, height=22)
    assert covered(finder.find(strip).boxes, ink) > 0.9
    small = body(160, 192).astype(np.int16)
    ink = burn(small, "WEBER", (60, 10), 3000, height=38)
    assert covered(finder.find(small).boxes, ink) > 0.9


def test_large_letters_of_another_script_are_found(finder: TextFinder) -> None:
    """A name of strokes that need no font: three horizontal ones, and a field between."""
    three = [(1, 1, 9, 1), (2, 5, 8, 5), (0, 9, 10, 9)]
    field = [(1, 1, 9, 1), (9, 1, 9, 9), (1, 1, 1, 9), (1, 9, 9, 9), (1, 5, 9, 5), (5, 1, 5, 9)]
    pixels, ink = body(128, 160).astype(np.int16), np.zeros((128, 160), np.uint8)
    for number, strokes in enumerate(([*three, (5, 1, 5, 9)], field, three)):
        corner = np.array((20 + 36 * number, 80))
        for stroke in strokes:
            start, end = (corner + 2.8 * np.array(at) for at in (stroke[:2], stroke[2:]))
            cv2.line(ink, start.astype(int).tolist(), end.astype(int).tolist(), 1, 3)
    pixels[ink > 0] = 3000
    assert covered(finder.find(pixels).boxes, ink > 0) > 0.98


def test_what_one_frame_of_a_cine_shows_is_found(finder: TextFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that frame is not among those that are searched."""
    monkeypatch.setattr("shardflow.packing.deid.pixel_text._MAX_FRAMES", 2)
    frames = [body(120, 240).astype(np.uint8) // 2 for _ in range(8)]
    ink = burn(frames[3], "NOVAK PETR", (30, 60), 255)
    assert covered(finder.find_in_frames(iter(frames), 8).boxes, ink) > 0.98


def test_the_same_image_gives_the_same_boxes(finder: TextFinder) -> None:
    pixels = body().astype(np.int16)
    burn(pixels, "LINDQVIST", (150, 100), 2000)
    assert finder.find(pixels) == finder.find(pixels.copy()) == TextFinder().find(pixels)
    assert len(models_digest()) == 64
