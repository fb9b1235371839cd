"""Pages of text are recognized by their pixels, pictures with a little text are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.packing.deid.pixel_text import is_page
from tests.phantoms import head, scan

LINES = (
    "Dose Report   CT Head without contrast",
    "Series   Type     Scan Range   CTDIvol   DLP",
    "1        Scout    -            -         -",
    "2        Helical  I12 to S190  54.2 mGy  980",
    "Total exam DLP    980.44 mGy-cm",
    "Phantom in cm     16",
    "Accession 20391823   Operator AB",
    "Printed on console 3 at 10:14",
)


def _page(
    lines: tuple[str, ...], *, paper: int, ink: int, size: tuple[int, int] = (512, 640)
) -> NDArray[Any]:
    image = np.full(size, paper, np.uint8)
    for number, line in enumerate(lines):
        cv2.putText(image, line, (16, 30 + 24 * number), cv2.FONT_HERSHEY_SIMPLEX, 0.5, ink, 1, cv2.LINE_AA)
    return image


@pytest.mark.parametrize(("paper", "ink"), [(0, 255), (255, 0), (40, 190), (230, 90)])
def test_a_page_is_recognized_in_any_polarity(paper: int, ink: int) -> None:
    page = _page(LINES, paper=paper, ink=ink)
    assert is_page(page)
    assert is_page(np.stack([page] * 3, axis=2))
    assert is_page(page.astype(np.int16) * 16 - 1000)


def test_a_picture_with_some_text_is_no_page() -> None:
    volume = scan(head(), contrast="T1", count=(256, 256, 3), spacing=(1, 1, 4))
    picture = np.clip(volume.pixels[1] / 4, 0, 255).astype(np.uint8)
    assert not is_page(picture)
    cv2.putText(picture, "DOE, JANE 0048213", (4, 14), cv2.FONT_HERSHEY_SIMPLEX, 0.4, 255, 1, cv2.LINE_AA)
    cv2.putText(picture, "12.03.1961 F", (4, 28), cv2.FONT_HERSHEY_SIMPLEX, 0.4, 255, 1, cv2.LINE_AA)
    assert not is_page(picture)


def test_blank_images_noise_and_a_few_lines_are_no_pages() -> None:
    assert not is_page(np.zeros((64, 64), np.int16))
    rng = np.random.default_rng(0)
    assert not is_page(rng.integers(0, 4096, (256, 256)).astype(np.uint16))
    specks = np.where(rng.random((256, 256)) < 0.02, 255, 0).astype(np.uint8)
    assert not is_page(specks)
    assert not is_page(_page(LINES[:2], paper=0, ink=255))


def test_the_real_pages_are_recognized(shared_data: Path) -> None:
    folder = shared_data / "ct_philips_phantom"
    import pydicom

    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "DIRFILE" and "LICENSE" not in path.name:
            dataset = pydicom.dcmread(path, force=True)
            if "PixelData" in dataset:
                found[path.parent.name, dataset.pixel_array.ndim] = is_page(dataset.pixel_array)
    assert found == {("S1000", 2): False, ("S2010", 2): False, ("S4010", 2): False, ("S4010", 3): True}
