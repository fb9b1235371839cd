"""Images with planted text: the same for the same draws, readable, and counted as they are."""

from __future__ import annotations

import numpy as np
import pytest

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.identifiers import (
    PlantedImage,
    letters_of,
    make_backgrounds,
    measure_pixels,
    plant_text,
)
from shardflow.synthetic.identifiers.burned_in import Pixels


@pytest.fixture(scope="module")
def images() -> list[PlantedImage]:
    return _plant()


def _plant() -> list[PlantedImage]:
    fonts = letters_of("test")
    return [
        plant_text(pixels, modality, "test", Draws(3, "plant", number), fonts)
        for number, (modality, pixels) in enumerate(make_backgrounds("test", 8))
    ]


def test_equal_draws_give_equal_images(images: list[PlantedImage]) -> None:
    for one, other in zip(images, _plant(), strict=True):
        np.testing.assert_array_equal(one.pixels, other.pixels)
        assert [line.text for line in one.lines] == [line.text for line in other.lines]
    assert {image.modality for image in images} == {"CT", "MR", "CR", "US"}
    assert not letters_of("test").keys() & letters_of("development").keys()


def test_the_pixels_of_letters_are_known(images: list[PlantedImage]) -> None:
    for image in images:
        changed = image.pixels != image.clean
        changed = changed if changed.ndim == 2 else changed.any(2)
        ink = np.any([line.ink for line in image.lines], axis=0)
        assert (changed & ink).sum() > 0.9 * ink.sum()


def test_what_is_found_and_what_is_blanked_by_mistake_is_counted(images: list[PlantedImage]) -> None:
    clean = {image.clean.tobytes() for image in images}

    def around(pixels: Pixels) -> list[tuple[int, int, int, int]]:
        image = next((one for one in images if one.pixels is pixels), None)
        if image is None:
            return []
        places = [np.nonzero(line.ink) for line in image.lines if not line.is_marker]
        return [(int(y.min()), int(x.min()), int(y.max()) + 1, int(x.max()) + 1) for y, x in places]

    num_lines = sum(not line.is_marker for image in images for line in image.lines)
    table = measure_pixels(images, around).table()
    assert (table["lines"], table["missed"], table["recall"]) == (num_lines, 0, 1.0)
    assert table["images_blanked_by_mistake"] == 0
    assert table["markers_kept"][0] == table["markers_kept"][1] > 0
    assert sum(found for found, _ in table["by"]["turn"].values()) == num_lines

    missed: list[str] = []
    table = measure_pixels(
        images,
        lambda pixels: [(0, 0, 1, pixels.shape[1])] if pixels.tobytes() in clean else [],
        on_fault=lambda _, line: missed.append("" if line is None else line.text),
    ).table()
    assert (table["recall"], table["missed"]) == (0.0, num_lines)
    assert missed.count("") == table["images_blanked_by_mistake"] == len(images)
    assert 0 < table["wrong_area_share"]["worst"] < 0.01
