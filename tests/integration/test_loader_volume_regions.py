"""Masks and boxes beside a volume are where its voxels are, in its own grid and in any other."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.codecs import encode_array
from shardflow.format.keys import mask_field, mask_prefix
from shardflow.sampling import BatchSpec
from tests.integration.loader_support import check_everywhere, flip_bit, locate, open_loader, slots_of
from tests.volume_cases import VolumeSeries, affine_of, make_volumes

pytestmark = pytest.mark.fast

NUM_SAMPLES = 8
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
UNSEEN = 5
"""Number of a study that nobody annotated."""
SHAPE = (11, 14, 13)
ROI = (7, 8, 9)
LABELS = ("nodule", "liver", "absent")
GRIDS: dict[str, dict[str, Any]] = {
    "own": {},
    "turned": {"orientation": "RAS"},
    "mm": {"orientation": "SPL", "spacing_mm": (1.3, 0.9, 1.7)},
    "whole": {"center": "whole"},
}


@cache
def series_of(number: int) -> list[VolumeSeries]:
    random = np.random.default_rng(number)
    affine = affine_of(
        random.uniform(0.7, 2.5, 3), turn=0.3 * (number % 3), tilt=0.2 * (number % 2), flip=number % 2 == 0
    )
    return [VolumeSeries(voxels=random.integers(-1000, 1000, SHAPE).astype(np.int16), affine=affine)]


@cache
def regions_of(number: int) -> list[dict[str, Any]]:
    """Regions of a study: an entry of ``annotations.json``, and the voxels (at most 255) that it covers."""
    random = np.random.default_rng([number, 1])
    found: list[dict[str, Any]] = []
    for roi, (label, form) in enumerate(
        [("nodule", "mask"), ("liver", "fractional"), ("nodule", "box"), ("other", "mask")]
    ):
        low = random.integers(0, np.array(SHAPE) - 4)
        high = low + random.integers(2, 5, 3)
        inner = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
        voxels = np.zeros(SHAPE, np.uint8)
        voxels[inner] = {"mask": 1, "box": 1}.get(form) or random.integers(0, 256, voxels[inner].shape)
        box = [float(low[2]), float(low[1]), float(high[2]), float(high[1])]
        entry = {
            "roi": roi,
            "series": 0,
            "label": label,
            "code": None,
            "kind": "box" if form == "box" else "segmentation",
            "source": "dicom-seg",
            "slices": [{"slice": int(z), "box_px": box, "fraction": 0.5} for z in range(low[0], high[0])],
            "mask": None if form == "box" else mask_prefix(0, roi),
            "polygons": None,
            "flags": ["fractional"] if form == "fractional" else [],
        }
        corners = (low - 0.5, high - 0.5)  # in voxel centers
        found.append({"entry": entry, "voxels": voxels, "corners": corners, "label": label, "form": form})
    return found


def extra_of(number: int) -> dict[str, bytes]:
    if number == UNSEEN:
        return {}
    regions = regions_of(number)
    rois = [one["entry"] for one in regions]
    found = {"annotations.json": json.dumps({"format_version": 1, "rois": rois, "dangling": []}).encode()}
    for one in regions:
        for place in one["entry"]["slices"] if one["form"] != "box" else ():
            name = mask_field(0, one["entry"]["roi"], place["slice"], "b2nd")
            found[name] = encode_array("b2nd", np.ascontiguousarray(one["voxels"][place["slice"]]))
    return found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("regions") / "data"
    return make_volumes(folder, series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)


def covered(number: int, labels: tuple[str, ...] | None, threshold: float) -> NDArray[np.uint8]:
    """Return the stored voxels that regions of some labels cover."""
    found = np.zeros(SHAPE, np.uint8)
    for one in regions_of(number):
        if labels is None or one["label"] in labels:
            level = np.ceil(threshold * 255) if one["form"] == "fractional" else 1
            found |= one["voxels"] >= level
    return found


def fields_of(grid: dict[str, Any], **more: Any) -> dict[str, sf.Field]:
    return {
        "every": sf.Mask(like="ct", threshold=0.3),
        "ct": sf.Volume(**{"roi_size": ROI, "valid_mask": True, **grid, **more}),
        "planes": sf.Mask(like="ct", labels=LABELS, merge="stack"),
        "boxes": sf.Boxes(like="ct", labels=LABELS, max_boxes=9),
    }


@pytest.mark.parametrize("grid", GRIDS)
def test_masks_and_boxes_are_where_the_voxels_are(dataset: Dataset, grid: str) -> None:
    num_marked = num_boxes = 0
    with open_loader(dataset, SPEC, fields_of(GRIDS[grid])) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                assert batch["planes"].shape == (2, 3, *ROI)
                for slot, number in slots_of(batch):
                    is_seen = number != UNSEEN
                    assert batch["every_mask"][slot] == batch["planes_mask"][slot] == is_seen
                    assert batch["boxes_annotated"][slot] == is_seen
                    if not is_seen:
                        assert not batch["every"][slot].any()
                        continue
                    stored = np.linalg.inv(series_of(number)[0].affine) @ batch["ct_affine"][slot]
                    places = np.stack(np.meshgrid(*map(np.arange, ROI), indexing="ij"), axis=-1)
                    places = places @ stored[:3, :3].T + stored[:3, 3]
                    is_tie = (np.abs(places - np.floor(places) - 0.5) < 1e-6).any(axis=-1)
                    nearest = np.moveaxis(np.clip(np.rint(places).astype(int), 0, np.array(SHAPE) - 1), -1, 0)
                    is_right = (batch["ct_valid"][slot, 0] == 1) & ~is_tie
                    wanted = [covered(number, None, 0.3), *(covered(number, (one,), 0.5) for one in LABELS)]
                    found = [*batch["every"][slot], *batch["planes"][slot]]
                    for one, mask in zip(found, wanted, strict=True):
                        assert (one == mask[tuple(nearest)])[is_right].all()
                        assert not one[batch["ct_valid"][slot, 0] == 0].any()
                        num_marked += int(one.sum())
                    boxes = []
                    for one in regions_of(number):
                        ends = np.array(list(itertools.product(*zip(*one["corners"], strict=True))))
                        inverse = np.linalg.inv(stored)
                        corners = ends @ inverse[:3, :3].T + inverse[:3, 3] + 0.5
                        low, high = np.maximum(corners.min(axis=0), 0), np.minimum(corners.max(axis=0), ROI)
                        if one["label"] in LABELS and (high - low > 1e-6).all():
                            boxes.append([*low, *high, LABELS.index(one["label"])])
                    num = int(batch["boxes_mask"][slot].sum())
                    given = np.column_stack([batch["boxes"][slot, :num], batch["boxes_label"][slot, :num]])
                    assert given == pytest.approx(np.array(boxes).reshape(-1, 7), abs=1e-4)
                    assert (batch["boxes_label"][slot, num:] == -1).all()
                    num_boxes += num
    assert num_marked > 100
    assert num_boxes > 5


def test_regions_are_equal_everywhere(dataset: Dataset) -> None:
    fields = fields_of(GRIDS["mm"], interpolation="cubic")
    fields |= {"own": sf.Volume(roi_size=ROI, margin=(1, 0, 2)), "inside": sf.Mask(like="own")}
    check_everywhere(lambda **settings: open_loader(dataset, SPEC, fields, **settings))


def test_a_bad_mask_masks_the_slot(tmp_path: Path) -> None:
    made = make_volumes(tmp_path / "data", series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)
    entry = regions_of(2)[0]["entry"]
    path, offset, num_bytes = locate(made, 2, mask_field(0, 0, entry["slices"][0]["slice"], "b2nd"))
    flip_bit(path, offset + num_bytes // 2)
    with open_loader(made, SPEC, fields_of({}, center="middle", roi_size=SHAPE)) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert (batch.info.weight[slot] == 0) == (number == 2)
                if number == 2:
                    assert not batch["every"][slot].any()
                    assert (batch["ct"][slot] == -1024).all()


def test_a_field_of_no_pictures_cannot_be_followed(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="no field of images, slices or volumes; did you mean 'ct'"):
        open_loader(dataset, SPEC, {"ct": sf.Volume(roi_size=ROI), "mask": sf.Mask(like="cts")})
    with pytest.raises(ConfigError, match="cannot drop the others"):
        open_loader(
            dataset, SPEC, {"ct": sf.Volume(roi_size=ROI), "mask": sf.Mask(like="ct", missing="drop")}
        )
