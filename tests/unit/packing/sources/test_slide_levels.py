"""Levels of slides: what of a JPEG tile is kept, and how often a file is read."""

from __future__ import annotations

import io
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image
from pydicom.uid import JPEGBaseline8Bit

from shardflow.errors import SourceError
from shardflow.packing.settings import SlidesConfig
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.slides import Array, DicomLevel, Place, open_levels, plain_jpeg
from shardflow.packing.studies.assembly import FragmentWriter
from shardflow.packing.studies.slides import write_slide
from tests.slide_cases import PLANTED, dicom_level, make_slide_pixels
from tests.unit.packing.sources.dicom.factory import header_of

pytestmark = pytest.mark.fast

TILE = make_slide_pixels(64, 64)
TEXT = " ".join(PLANTED).encode()


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def encoded(**options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(TILE).save(stream, "jpeg", quality=90, **options)
    return stream.getvalue()


def longer(data: bytes, marker: int) -> bytes:
    """Hide a text at the end of a segment."""
    at = data.index(bytes((0xFF, marker)))
    (length,) = struct.unpack_from(">H", data, at + 2)
    end = at + 2 + length
    return data[: at + 2] + struct.pack(">H", length + len(TEXT)) + data[at + 4 : end] + TEXT + data[end:]


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}]
)
def test_a_tile_keeps_its_pixels_and_loses_every_text(options: dict[str, Any]) -> None:
    data = encoded(comment=TEXT, exif=b"Exif\0\0" + TEXT, icc_profile=TEXT, **options)
    head = data[:2] + b"".join(segment(marker, TEXT) for marker in (*range(0xE1, 0xEE), 0xEF, 0xFE))
    found, is_rgb = plain_jpeg(head + data[2:] + TEXT, (64, 64), photometric="YBR_FULL_422")
    assert not is_rgb
    assert not [text for text in PLANTED if text.encode() in found]
    assert np.array_equal(imagecodecs.jpeg8_decode(found), imagecodecs.jpeg8_decode(data))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found))), np.asarray(Image.open(io.BytesIO(data))))
    # What is kept is kept as it is.
    again, _ = plain_jpeg(found, (64, 64), photometric="RGB")
    assert again == found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(
            (lambda data, marker=marker: longer(data, marker), f"segment {marker:#x}")
            for marker in (0xDB, 0xC4, 0xDA)
        ),
        (lambda data: data[:2] + segment(0xDD, TEXT) + data[2:], "segment 0xdd"),
        (lambda data: data[:2] + segment(0xF0, TEXT) + data[2:], "segment 0xf0"),
        (lambda data: data[:2] + segment(0xDB, b"") + segment(0xDC, b"12") + data[2:], "segment 0xdc"),
        (lambda data: data[:2] + TEXT + data[2:], "not \\(64, 64\\)"),
        (lambda data: data.replace(b"\xff\xda", TEXT + b"\xff\xda"), "no end of a JPEG tile"),
        (lambda data: data[:-2], "no end of a JPEG tile"),
        (lambda data: data[: data.index(b"\xff\xda") + 5], "no end of a JPEG tile"),
        (lambda data: data.replace(b"\xff\xc0", b"\xff\xc9"), "segment 0xc9"),
    ],
    ids=[
        *("quantization", "huffman", "scan", "restart", "unknown", "lines", "text first", "text between"),
        *("no end", "cut scan", "arithmetic"),
    ],
)
def test_a_tile_that_holds_more_or_less_than_it_declares_is_refused(change: Any, reason: str) -> None:
    with pytest.raises(SourceError, match=reason) as caught:
        plain_jpeg(change(encoded()), (64, 64), photometric="YBR_FULL")
    assert not [text for text in PLANTED if text in str(caught.value)]


def test_tables_of_a_tiff_lose_their_texts(tmp_path: Path) -> None:
    """tifffile decodes the same pixels from the file with shared tables as from the kept stream."""
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, TILE, tile=(64, 64), photometric="ycbcr", compression="jpeg", subsampling=(2, 2))
    with open_levels(path) as ((level,), _):
        ((stream, _),) = level.streams([(0, 0)])  # type: ignore[misc]
        (pixels,) = level.pixels([(0, 0)])
    # The same stream, split as TIFF has it: tables once, with a comment, and a stream without tables.
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    at = 2
    while stream[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(stream[at + 2 : at + 4], "big")
        parts[stream[at + 1] in (0xDB, 0xC4)].append(stream[at:end])
        at = end
    tables = b"".join([b"\xff\xd8", segment(0xFE, TEXT), *parts[True], b"\xff\xd9"])
    bare = b"".join([b"\xff\xd8", segment(0xE1, TEXT), *parts[False], stream[at:]])
    found, _ = plain_jpeg(bare, (64, 64), tables=tables, photometric="YBR_FULL")
    assert TEXT not in found
    assert pixels is not None
    assert np.array_equal(imagecodecs.jpeg8_decode(found), pixels)
    with pytest.raises(SourceError, match="no end of a JPEG tile"):
        plain_jpeg(bare, (64, 64), tables=tables[:-2], photometric="YBR_FULL")


class CountedLevel(DicomLevel):
    """A level that counts how often its file is opened for tiles."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, header_of(path), HeaderLimits())
        self.passes: Counter[str] = Counter()

    def pixels(self, places: Sequence[Place]) -> Iterator[Array | None]:
        self.passes["pixels"] += 1
        return super().pixels(places)

    def streams(self, places: Sequence[Place]) -> Iterator[tuple[bytes, bool] | None]:
        self.passes["streams"] += 1
        return super().streams(places)


def test_a_sparse_level_is_read_in_a_few_passes(tmp_path: Path) -> None:
    """Each pass finds all frames of a file, and the first stored tile here follows 240 that are not there."""
    pixels = np.zeros((16 * 16, 16 * 16, 3), np.uint8)
    pixels[..., 0] = 200  # tissue everywhere
    path = tmp_path / "level.dcm"
    dicom_level(
        path, pixels, study="1.2", series="1.3", tile=16, syntax=JPEGBaseline8Bit, sparse=[(15, 3), (15, 4)]
    )
    level = CountedLevel(path)
    with FragmentWriter(tmp_path / "fragment", sample_key="abcd", task_digest="d1") as writer:
        facts = write_slide(0, [level], writer, SlidesConfig(tissue_only=False))
    assert facts["slide"]["levels"][0]["num_stored_tiles"] == 2
    assert facts["slide"]["levels"][0]["encoding"] == "jpeg_ycbcr"
    assert level.passes == {"pixels": 2, "streams": 2}


@pytest.mark.parametrize("number", [0, 1])
def test_a_tile_that_ends_early_is_refused_wherever_it_is(number: int, tmp_path: Path) -> None:
    class CutLevel(CountedLevel):
        def streams(self, places: Sequence[Place]) -> Iterator[tuple[bytes, bool] | None]:
            for at, found in enumerate(super().streams(places)):
                assert found is not None
                data = found[0]
                yield plain_jpeg(
                    data[: len(data) // 2] if at == number else data, (64, 64), photometric="YBR_FULL"
                )

    path = tmp_path / "level.dcm"
    dicom_level(path, make_slide_pixels(64, 128), study="1.2", series="1.3", syntax=JPEGBaseline8Bit)
    with (
        FragmentWriter(tmp_path / "fragment", sample_key="abcd", task_digest="d1") as writer,
        pytest.raises(SourceError, match="no end of a JPEG tile"),
    ):
        write_slide(0, [CutLevel(path)], writer, SlidesConfig(tissue_only=False))


def test_a_level_names_its_pyramid(tmp_path: Path) -> None:
    path = tmp_path / "level.dcm"
    dicom_level(path, TILE, study="1.2", series="1.3", PyramidUID="1.2.3.4")
    assert header_of(path).pyramid == (PLANTED[1], "1", "1.2.3.4")
