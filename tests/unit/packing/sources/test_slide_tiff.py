"""Levels of slides in TIFF: those of the scan's own pyramid, and the scale of the scan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.stacks import split_series
from shardflow.packing.sources.placement import Placement
from shardflow.packing.sources.slides import open_levels, read_tiff

pytestmark = pytest.mark.fast

SCAN = np.full((320, 320, 3), 200, np.uint8)
TILED: dict[str, Any] = {"photometric": "rgb", "tile": (32, 32), "compression": "zlib"}


def shapes(path: Path) -> tuple[list[tuple[int, int]], int]:
    with open_levels(path) as (levels, num_other):
        return [(level.rows, level.columns) for level in levels], num_other


def named(name: str, mpp: float) -> dict[str, Any]:
    sizes = {f"PhysicalSize{axis}": mpp for axis in "XY"}
    return {"axes": "YXS", "Name": name, **sizes, "PhysicalSizeXUnit": "µm", "PhysicalSizeYUnit": "µm"}


@pytest.mark.parametrize("name", ["label image", "Label_Image", "second"])
@pytest.mark.parametrize("side", [96, 160])
def test_another_image_of_an_ome_file_is_no_level(tmp_path: Path, name: str, side: int) -> None:
    path = tmp_path / "slide.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(SCAN, subifds=1, metadata=named("scan", 0.25), **TILED)
        writer.write(SCAN[::4, ::4], subfiletype=1, metadata=None, **TILED)
        writer.write(SCAN[:side, :side], metadata=named(name, 10.0), **TILED)
    assert shapes(path) == ([(320, 320), (80, 80)], 1)
    with open_levels(path) as (levels, _):
        assert levels[0].spacing_mm == pytest.approx((0.00025, 0.00025))


@pytest.mark.parametrize("name", ["Label_Image", "Aperio\nlabel 160x160", "barcode", "slide-macro"])
def test_a_page_that_is_named_a_label_is_no_level(tmp_path: Path, name: str) -> None:
    path = tmp_path / "slide.svs"
    with tifffile.TiffWriter(path) as writer:
        for factor, text in ((1, "Aperio"), (4, "Aperio"), (2, name)):
            writer.write(SCAN[::factor, ::factor], description=text, metadata=None, **TILED)
    assert shapes(path) == ([(320, 320), (80, 80)], 1)


def test_a_level_that_is_padded_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "slide.tif"
    with tifffile.TiffWriter(path) as writer:
        for rows, columns in ((319, 317), (160, 158), (96, 96)):
            writer.write(SCAN[:rows, :columns], metadata=None, **TILED)
    assert shapes(path) == ([(319, 317), (160, 158)], 1)


def test_ycbcr_that_is_no_jpeg_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, SCAN, **{**TILED, "photometric": "ycbcr"})
    with pytest.raises(SourceError, match="YCbCr"):
        shapes(path)


def test_each_file_of_a_series_is_a_slide(tmp_path: Path) -> None:
    """One of half the size is no level of the other, whose file alone would be opened."""
    headers = []
    for number, factor in enumerate((1, 2)):
        path = tmp_path / f"{number}.svs"
        tifffile.imwrite(path, SCAN[::factor, ::factor], **TILED)
        placement = Placement(patient="p", study="s", series="r", instance=path.name, attributes={})
        headers.append(read_tiff(path, placement, limits=HeaderLimits()))
    slides = split_series(headers)
    assert [[level.sop_instance_uid for level in slide.levels] for slide in slides] == [["0.svs"], ["1.svs"]]
    assert {slide.flags for slide in slides} == {("several_slides",)}
