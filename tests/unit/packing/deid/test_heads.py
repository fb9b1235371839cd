"""Heads: found whatever a series is called, and freed of the face without the brain."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from shardflow.packing.deid.heads import Head, HeadFinder
from tests.phantoms import CONTRASTS, Scan, head, heads, limb, scan, strangers, torso


def _finder(volume: Scan) -> HeadFinder:
    return HeadFinder(
        volume.affine_lps.tolist(), len(volume.pixels), volume.pixels.shape[1:], volume.modality
    )


def _find(volume: Scan) -> Head | None:
    return _finder(volume).find(volume.pixels.__getitem__)


def _cut(volume: Scan, found: Head) -> Any:
    affine = volume.affine_lps.tolist()
    shape = volume.pixels.shape[1:]
    return np.stack([found.face_mask(affine, index, shape) for index in range(len(volume.pixels))])


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_a_head_is_found_in_every_contrast(contrast: str) -> None:
    found = _find(scan(head(), contrast=contrast, center=(0, -8, -30), count=(128, 128, 64)))
    assert found is not None
    assert found.vertex_mm == pytest.approx(110, abs=8)
    assert found.length_mm == pytest.approx(198, abs=16)


@pytest.mark.parametrize("plane", ["axial-down", "sagittal", "coronal"])
def test_the_plane_of_acquisition_does_not_matter(plane: str) -> None:
    volume = scan(head(), contrast="T1", plane=plane, center=(0, -8, -30), count=(128, 140, 64))
    found = _find(volume)
    assert found is not None
    assert found.vertex_mm is not None
    cut = _cut(volume, found)
    assert volume.brain is not None
    assert volume.face is not None
    assert (cut & volume.brain).sum() <= 0.003 * volume.brain.sum()
    assert not (volume.face & ~cut).any()
    # No brain is beside the head: something was cut, and most was not.
    assert 0.02 < cut.mean() < 0.4


def test_the_brain_without_a_vertex_cannot_be_cut() -> None:
    slab = scan(head(), contrast="T1", center=(0, 0, 20), spacing=(2, 2, 3), count=(128, 128, 24))
    found = _find(slab)
    assert found is not None
    assert found.vertex_mm is None
    with pytest.raises(ValueError, match="vertex"):
        _cut(slab, found)


@pytest.mark.parametrize(
    "shapes", [torso(), torso(0.5), limb(82, 88), limb(58, 62), [("water", (0, 0, 0), (100, 100, np.inf))]]
)
@pytest.mark.parametrize("contrast", ["CT", "T2"])
def test_other_parts_are_no_heads(shapes: Any, contrast: str) -> None:
    assert _find(scan(shapes, contrast=contrast, spacing=(3.5, 3.5, 5.0), count=(128, 128, 48))) is None


@pytest.mark.parametrize("offset", [0.0, 4.0, 8.0])
@pytest.mark.parametrize("side", [128, 251, 256])
def test_a_low_slab_of_a_skull_is_found_at_any_height_and_size(offset: float, side: int) -> None:
    """Not every plane is looked at first, and slices of even size are reduced in another way."""
    spacing = (256 / side, 256 / side, 2.0)
    slab = scan(head(), contrast="CT", center=(0, 0, 20 + offset), spacing=spacing, count=(side, side, 13))
    assert _find(slab) is not None
    stored = dataclasses.replace(slab, pixels=slab.pixels.astype(np.int16))
    assert _find(stored) is not None


def test_a_part_of_a_small_head_is_found_in_a_small_field_of_view() -> None:
    """Slices are reduced to pixels that are no coarser than they need to be."""
    part = scan(
        head(0.6432),
        plane="sagittal",
        center=(35.2209, 46.8171, 28.1323),
        spacing=(1.4794, 1.4794, 8.0),
        count=(128, 128, 21),
        turn_deg=-39.35,
        seed=82,
    )
    assert _find(dataclasses.replace(part, pixels=part.pixels.astype(np.int16))) is not None


def test_slices_closer_than_the_planes_are_not_all_taken() -> None:
    finder = HeadFinder(np.diag([1.0, 1.0, 1.0, 1.0]).tolist(), 61, (64, 64), "CT")
    assert finder.indices == list(range(0, 61, 4))


def test_a_third_of_an_axial_stack_tells_that_it_is_no_head() -> None:
    def num_read(volume: Scan) -> int:
        asked: list[int] = []

        def read(index: int) -> Any:
            asked.append(index)
            return volume.pixels[index]

        finder = _finder(volume)
        for index in finder.first:
            finder.add(index, volume.pixels[index])
        added = finder.find(read)
        assert (added is None) == (_find(volume) is None)
        assert len(asked) == len(set(asked))
        assert not finder.first & set(asked)
        return len(finder.first) + len(asked)

    belly: dict[str, Any] = {"spacing": (3.5, 3.5, 5.0), "count": (128, 128, 48)}
    assert num_read(scan(torso(), contrast="CT", **belly)) <= 0.45 * 48
    # The surface of other modalities is known from the whole volume, and every plane of a head is looked at.
    assert num_read(scan(torso(), contrast="T2", **belly)) == 48
    assert num_read(scan(head(), contrast="CT", center=(0, -8, -30), count=(128, 128, 64))) == 64


@pytest.mark.parametrize("contrast", ["CT", "T1"])
def test_slices_that_cannot_be_decoded_hide_no_head(contrast: str) -> None:
    volume = scan(head(), contrast=contrast, center=(0, -8, -30), count=(128, 128, 64))
    finder = _finder(volume)
    # Those that are looked at first, and of thick slices every second, whose gaps would part the head.
    for broken in ({0, 31, 40}, finder.first if contrast == "CT" else set(range(0, 64, 3))):
        found = finder.find(lambda index, broken=broken: None if index in broken else volume.pixels[index])  # type: ignore[misc]
        assert found is not None
        assert found.vertex_mm == pytest.approx(110, abs=8)
    thick = scan(head(), contrast=contrast, center=(0, -8, -30), spacing=(2, 2, 10), count=(128, 128, 26))
    found = _finder(thick).find(lambda index: None if index % 2 else thick.pixels[index])
    assert found is not None


def test_an_empty_volume_is_no_head() -> None:
    empty = scan([], contrast="T1", count=(32, 32, 20))
    assert _find(empty) is None
    assert _finder(empty).find(lambda index: None) is None


@pytest.mark.slow
def test_recall_and_false_alarms() -> None:
    found = [_find(volume) is not None for _, volume in heads(num=120)]
    assert np.mean(found) >= 0.97
    wrong = [name for name, volume in strangers(num=120) if _find(volume) is not None]
    assert len(wrong) <= 2
