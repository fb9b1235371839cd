"""Masks and boxes of regions: where the pixels are, equal on every way there; a bad member masks its slot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
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
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from tests.factories import MadeSample, make_dataset, sample_key
from tests.field_cases import case_series, make_case
from tests.integration.loader_support import (
    batches_of,
    check_everywhere,
    flip_bit,
    locate,
    open_loader,
    slots_of,
)

pytestmark = pytest.mark.fast

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
LABELS = ("nodule", "4711", "liver")
"""A label, the value of a code, and a label that no region has."""
CT = "modality == 'CT' and kind == 'volume'"
VIEWS = "modality in ('CR', 'DX')"
FIELDS: Mapping[str, sf.Field] = {
    "lesions": sf.Mask(like="ct", labels=LABELS, merge="stack"),
    "ct": sf.Slices(series=CT, num_slices=4, size=(9, 15), fit="letterbox", sampling="random", missing="pad"),
    "anything": sf.Mask(like="ct", threshold=0.2),
    "spots": sf.Boxes(like="ct", labels=LABELS, max_boxes=40),
    "views": sf.Image(series=VIEWS, num_images="all", missing="pad"),
    "drawn": sf.Mask(like="views"),
    "marks": sf.Boxes(like="views", max_boxes=40),
    "frontal": sf.Image(series="role == 'frontal'", size=(31, 7), missing="pad"),
    "frontal_regions": sf.Mask(like="frontal", labels=["nodule"]),
    "volume": sf.Slices(series="role == 'contrast'", missing="pad"),
    "inside": sf.Mask(like="volume"),
    "tiles": sf.Image(series=VIEWS, num_images="all", size=(10, 8), tiles=5, missing="pad"),
    "cut": sf.Mask(like="tiles"),
    "cut_boxes": sf.Boxes(like="tiles", max_boxes=99),
}


# ---- generated annotations, and what they cover --------------------------------------------------------


def is_annotated(number: int) -> bool:
    return number % 8 != 0


@cache
def regions_of(number: int) -> list[dict[str, Any]]:
    """Regions of a study: each has an entry of ``annotations.json``, and stored masks by slice."""
    generator = np.random.Generator(np.random.PCG64([number, 99]))
    found: list[dict[str, Any]] = []
    for series, case in enumerate(case_series(number)):
        slices, rows, columns = case.shape[:3]
        for form in ("mask", "fractional", "rings", "box", "line", "slice", "united", "box"):
            roi = len(found)
            label = [None, "nodule", "mass"][int(generator.integers(3))]
            code = {"scheme": "99TEST", "value": "4711"} if generator.integers(3) == 0 else None
            chosen = [index for index in range(slices) if generator.integers(4)] or [0]
            places, polygons, masks = [], [], {}
            for index in chosen:
                x0, y0 = generator.uniform(0, columns - 4), generator.uniform(0, rows - 4)
                x1, y1 = generator.uniform(x0 + 1, columns), generator.uniform(y0 + 1, rows)
                box: list[float] | None = [round(float(edge), 3) for edge in (x0, y0, x1, y1)]
                fraction: float | None = 0.1
                outlines: list[list[float]] = []
                if form in ("mask", "fractional"):
                    mask = np.zeros((rows, columns), np.uint8)
                    part = mask[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1]
                    most = 2 if form == "mask" else 256
                    part[:] = generator.integers(0, most, part.shape)
                    masks[index] = mask
                elif form in ("rings", "united"):
                    middle = [(x0 + x1) / 2 + 0.01, (y0 + y1) / 2 + 0.01]
                    outer = [x0, y0, x1, y0 + 0.3, x1 - 0.2, y1, x0 + 0.1, y1 - 0.3]
                    outlines = [outer, [x0 + 0.5, y0 + 0.6, x1 - 0.5, y0 + 0.7, *middle]]
                elif form == "line":
                    outlines, fraction = [[x0, y0, x1, y1, x1, y0]], 0.0
                elif form == "slice":
                    box, fraction = None, None
                places.append({"slice": index, "box_px": box, "fraction": fraction})
                polygons.append(outlines)
            has_outlines = any(polygons)
            entry = {
                "roi": roi,
                "series": series,
                "label": label,
                "code": code,
                "kind": "key_image" if form == "slice" else "contour" if has_outlines else "box",
                "source": "coco" if form == "united" else "rtstruct",
                "slices": places,
                "mask": mask_prefix(series, roi) if masks else None,
                "polygons": polygons if has_outlines else None,
                "flags": ["fractional"] if form == "fractional" else [],
            }
            found.append({"entry": entry, "masks": masks, "form": form})
    return found


def make_annotated(number: int, *, has_readers: bool = False, **_: Any) -> MadeSample:
    """Generate study ``number`` with its regions, by several readers if wanted."""
    extra: dict[str, bytes] = {}
    if is_annotated(number):
        rois = [
            {**one["entry"], **({"reader": reader_of(one)} if has_readers else {})}
            for one in regions_of(number)
        ]
        extra["annotations.json"] = json.dumps({"format_version": 1, "rois": rois, "dangling": []}).encode()
        for one in regions_of(number):
            for index, mask in one["masks"].items():
                name = mask_field(one["entry"]["series"], one["entry"]["roi"], index, "b2nd")
                extra[name] = encode_array("b2nd", mask)
    return make_case(number, extra=extra)


def make_annotated_dataset(folder: Path, make: Any = make_annotated) -> Dataset:
    return Dataset.open(
        make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make, facts=True)
    )


def crossings(outline: Sequence[float], x: float, y: float) -> int:
    """Count the edges of an outline to the right of a point."""
    points = list(zip(outline[::2], outline[1::2], strict=True))
    count = 0
    for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
        if (ay <= y) != (by <= y) and x < ax + (y - ay) / (by - ay) * (bx - ax):
            count += 1
    return count


def covered(
    one: Mapping[str, Any], index: int, shape: tuple[int, int], threshold: float
) -> NDArray[np.bool_]:
    """Return the stored pixels of a region, from the definition, pixel by pixel."""
    found = np.zeros(shape, bool)
    entry = one["entry"]
    at = next((at for at, each in enumerate(entry["slices"]) if each["slice"] == index), None)
    if at is None:
        return found
    if index in one["masks"]:
        return np.asarray(one["masks"][index] / (255 if one["form"] == "fractional" else 1) >= threshold)
    for row in range(shape[0]):
        for column in range(shape[1]):
            x, y = column + 0.5, row + 0.5
            if one["form"] == "box":
                x0, y0, x1, y1 = entry["slices"][at]["box_px"]
                found[row, column] = x0 <= x < x1 and y0 <= y < y1
            elif one["form"] in ("rings", "united"):
                counts = [crossings(outline, x, y) for outline in entry["polygons"][at]]
                is_in = any(each % 2 for each in counts) if one["form"] == "united" else sum(counts) % 2
                found[row, column] = bool(is_in)
    return found


def has_label(one: Mapping[str, Any], label: str | None) -> bool:
    code = one["entry"]["code"]
    return label is None or label in (one["entry"]["label"], code and code["value"])


def stored_mask(
    number: int, series: int, index: int, label: str | None, threshold: float = 0.5
) -> NDArray[np.uint8]:
    """Return the union of the regions of a label in a stored slice."""
    shape = case_series(number)[series].shape[1:3]
    united = np.zeros(shape, bool)
    for one in regions_of(number) if is_annotated(number) else ():
        if one["entry"]["series"] == series and has_label(one, label):
            united |= covered(one, index, (shape[0], shape[1]), threshold)
    return united.astype(np.uint8)


def resized(mask: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Take the nearest pixel at half-pixel centers, in exact fractions."""
    rows, columns = (
        [int(Fraction(2 * at + 1, 2) * old / new) for at in range(new)]
        for old, new in zip(mask.shape, size, strict=True)
    )
    return np.array([[mask[row, column] for column in columns] for row in rows], np.uint8)


def stored_boxes(number: int, series: int, index: int, labels: Sequence[str] | None) -> list[tuple[Any, int]]:
    """Return the boxes of a stored slice with the position of their label, in the order of the regions."""
    found = []
    for one in regions_of(number) if is_annotated(number) else ():
        for place in one["entry"]["slices"]:
            if (one["entry"]["series"], place["slice"]) == (series, index) and place["box_px"] is not None:
                numbers = [at for at, label in enumerate(labels or [None]) if has_label(one, label)]
                found += [(place["box_px"], at) for at in numbers]
    return found


def view_places(number: int) -> list[tuple[int, int]]:
    """Return series and index of the radiographs of a study by acquisition."""
    cases = case_series(number)
    if cases[0].modality == "CT":
        return []
    order = sorted(range(len(cases)), key=lambda place: cases[place].series_number or 0)
    return [(place, index) for place in order for index in range(cases[place].shape[0])]


# ---- loaders -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_annotated_dataset(tmp_path_factory.mktemp("regions") / "a")


def _loader(dataset: Dataset, fields: Mapping[str, sf.Field] = FIELDS, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


# ---- content -------------------------------------------------------------------------------------------


def test_masks_of_slices_are_where_the_slices_are(dataset: Dataset) -> None:
    num_set = [0, 0]
    with _loader(dataset) as loader:
        for batch in loader:
            assert batch["lesions"].shape == (2, 4, 3, 9, 15)
            assert batch["anything"].shape == (2, 4, 1, 9, 15)
            assert batch["lesions"].dtype == np.uint8
            for slot, number in slots_of(batch):
                if number % 4 != 1:
                    assert not batch["lesions_mask"][slot].any()
                    assert not batch["lesions"][slot].any()
                    continue
                assert batch["lesions_mask"][slot].tolist() == [is_annotated(number)] * 4
                for place, index in enumerate(batch["ct_index"][slot].tolist()):
                    top, left, rows, columns = batch["ct_box"][slot, place].tolist()
                    inside = np.s_[top : top + rows, left : left + columns]
                    for plane, label in enumerate(LABELS):
                        wanted = np.zeros((9, 15), np.uint8)
                        stored = stored_mask(number, 1, index, label)
                        wanted[inside] = resized(stored, (rows, columns))
                        assert np.array_equal(batch["lesions"][slot, place, plane], wanted)
                        num_set[0] += int(wanted.sum())
                    wanted = np.zeros((9, 15), np.uint8)
                    stored = stored_mask(number, 1, index, None, threshold=0.2)
                    wanted[inside] = resized(stored, (rows, columns))
                    assert np.array_equal(batch["anything"][slot, place, 0], wanted)
                    num_set[1] += int(wanted.sum())
        assert loader.counters.snapshot()["absent_labels"]["num_items"] > 0
    assert min(num_set) > 100


@pytest.mark.parametrize(("label", "is_warned"), [("Nodule", True), ("nodules", True), ("nodule", False)])
def test_labels_that_no_region_has_are_a_warning_with_those_that_there_are(
    dataset: Dataset, caplog: pytest.LogCaptureFixture, label: str, *, is_warned: bool
) -> None:
    fields = {"ct": FIELDS["ct"], "m": sf.Mask(like="ct", labels=[label])}
    with _loader(dataset, fields) as loader:
        for _ in loader:
            pass
    warnings = [record.getMessage() for record in caplog.records if "the label" in record.getMessage()]
    assert len(warnings) == is_warned
    assert all(f"the label {label!r}" in line and "'nodule'" in line for line in warnings)


def test_the_majority_of_readers_decides(tmp_path: Path) -> None:
    dataset = make_annotated_dataset(tmp_path / "a", make=partial(make_annotated, has_readers=True))
    fields = {
        "volume": FIELDS["volume"],
        "most": sf.Mask(like="volume", merge="majority"),
        "nodules": sf.Mask(like="volume", merge="majority", labels=["nodule", "4711"]),
        "any": sf.Mask(like="volume"),
    }
    kinds: set[tuple[bool, bool]] = set()
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                if number % 4 != 1 or not is_annotated(number):
                    assert not np.any(batch["most"][slot])
                    continue
                readers = {reader_of(one) for one in regions_of(number) if one["entry"]["series"] == 1}
                for index, found in enumerate(batch["most"][slot]):
                    for name, label in (("most", None), ("nodules", "nodule")):
                        votes = np.zeros(found.shape[1:], np.int64)
                        for reader in readers:
                            marked = np.zeros(found.shape[1:], bool)
                            for one in regions_of(number):
                                is_wanted = has_label(one, label) or (label and has_label(one, "4711"))
                                if one["entry"]["series"] == 1 and reader_of(one) == reader and is_wanted:
                                    marked |= covered(one, index, votes.shape, 0.5)
                            votes += marked
                        wanted = 2 * votes > len(readers)
                        assert np.array_equal(batch[name][slot][index, 0], wanted)
                        kinds |= {*zip((votes > 0).ravel().tolist(), wanted.ravel().tolist(), strict=True)}
                assert (batch["any"][slot] >= batch["most"][slot]).all()
    assert len(kinds) == 3  # marked by most, by some, by nobody


def reader_of(one: Mapping[str, Any]) -> int | None:
    """Return who drew a region, of three readers and one who is not known."""
    roi: int = one["entry"]["roi"]
    return None if roi % 4 == 3 else roi % 4


def test_masks_of_stored_sizes_are_the_stored_pixels(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert len(batch["drawn"][slot]) == len(batch["views"][slot]) == len(view_places(number))
                for place, (series, index) in enumerate(view_places(number)):
                    assert batch["drawn_mask"][slot, place] == is_annotated(number)
                    assert np.array_equal(
                        batch["drawn"][slot][place], stored_mask(number, series, index, None)[None]
                    )
                if number % 4 == 1:
                    wanted = np.stack([stored_mask(number, 1, index, None) for index in range(5)])
                    assert np.array_equal(batch["inside"][slot][:, 0], wanted)


def test_a_single_image_has_one_mask(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        for batch in loader:
            assert batch["frontal_regions"].shape == (2, 1, 31, 7)
            assert batch["frontal_regions_mask"].shape == (2,)
            for slot, number in slots_of(batch):
                if number % 4 == 1:
                    assert not batch["frontal_regions"][slot].any()
                    assert not batch["frontal_regions_mask"][slot]
                    continue
                assert batch["frontal_regions_mask"][slot] == is_annotated(number)
                stored = stored_mask(number, 1 if number % 4 == 0 else 0, 0, "nodule")
                assert np.array_equal(batch["frontal_regions"][slot, 0], resized(stored, (31, 7)))


def test_masks_and_boxes_of_tiles(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                masks = list(batch["cut"][slot, :, 0])
                boxes: list[tuple[list[float], int]] = []
                place = 0
                for (series, index), grid in zip(
                    view_places(number), batch["tiles_grid"][slot], strict=False
                ):
                    high, wide = grid.tolist()
                    stored = stored_mask(number, series, index, None)
                    whole = resized(stored, (high * 10, wide * 8))
                    wanted = [(resized(stored, (10, 8)), 1, 1, 0, 0)] * (high * wide > 1)
                    wanted += [
                        (whole[r * 10 : r * 10 + 10, c * 8 : c * 8 + 8], high, wide, r, c)
                        for r in range(high)
                        for c in range(wide)
                    ]
                    for mask, tall, broad, r, c in wanted:
                        assert np.array_equal(masks[place], mask)
                        for (x0, y0, x1, y1), _ in stored_boxes(number, series, index, None):
                            by_x, by_y = broad * 8 / stored.shape[1], tall * 10 / stored.shape[0]
                            box = [
                                *np.clip([x0 * by_x - c * 8, y0 * by_y - r * 10], 0, [8, 10]),
                                *np.clip([x1 * by_x - c * 8, y1 * by_y - r * 10], 0, [8, 10]),
                            ]
                            if box[2] > box[0] and box[3] > box[1]:
                                boxes.append((box, place))
                        place += 1
                assert not any(mask.any() for mask in masks[place:])
                count = int(batch["cut_boxes_mask"][slot].sum())
                assert batch["cut_boxes_index"][slot, :count].tolist() == [at for _, at in boxes]
                np.testing.assert_allclose(
                    batch["cut_boxes"][slot, :count],
                    np.array([box for box, _ in boxes]).reshape(-1, 4),
                    rtol=1e-5,
                    atol=1e-5,
                )


def test_boxes_are_in_pixels_of_the_delivered_picture(dataset: Dataset) -> None:
    num_boxes = 0
    with _loader(dataset) as loader:
        for batch in loader:
            assert batch["spots"].shape == (2, 40, 4)
            assert batch["spots"].dtype == np.float32
            for slot, number in slots_of(batch):
                wanted: list[list[float]] = []
                labels, places = [], []
                for place, index in enumerate(batch["ct_index"][slot].tolist() if number % 4 == 1 else ()):
                    top, left, rows, columns = batch["ct_box"][slot, place].tolist()
                    _, high, wide = case_series(number)[1].shape
                    for (x0, y0, x1, y1), label in stored_boxes(number, 1, index, LABELS):
                        by_x, by_y = columns / wide, rows / high
                        wanted.append([left + x0 * by_x, top + y0 * by_y, left + x1 * by_x, top + y1 * by_y])
                        labels.append(label)
                        places.append(place)
                count = len(wanted)
                num_boxes += count
                assert batch["spots_mask"][slot].tolist() == [1] * count + [0] * (40 - count)
                np.testing.assert_allclose(
                    batch["spots"][slot, :count], np.array(wanted).reshape(-1, 4), rtol=1e-6
                )
                assert not batch["spots"][slot, count:].any()
                assert batch["spots_label"][slot].tolist() == labels + [-1] * (40 - count)
                assert batch["spots_index"][slot].tolist() == places + [-1] * (40 - count)
                assert batch["spots_annotated"][slot] == (number % 4 == 1)
                of_views = [
                    (box, place)
                    for place, (series, index) in enumerate(view_places(number))
                    for box, _ in stored_boxes(number, series, index, None)
                ]
                count = len(of_views)
                assert batch["marks_index"][slot, :count].tolist() == [place for _, place in of_views]
                assert batch["marks_label"][slot, :count].tolist() == [0] * count
                np.testing.assert_allclose(
                    batch["marks"][slot, :count],
                    np.array([box for box, _ in of_views]).reshape(-1, 4),
                    rtol=1e-6,
                )
                assert batch["marks_annotated"][slot] == (is_annotated(number) and number % 4 != 1)
    assert num_boxes > 20


@pytest.mark.parametrize("unit", ["series", "image"])
def test_a_series_or_an_image_has_the_masks_that_it_has_in_its_study(dataset: Dataset, unit: Any) -> None:
    fields = {
        "x": sf.Image(series=VIEWS, num_images="all", missing="drop"),
        "m": sf.Mask(like="x", labels=["nodule"]),
    }
    found = []
    for settings in ({}, {"unit": unit}):
        with _loader(dataset, fields, **settings) as loader:
            found.append(
                sorted(
                    (image.tobytes(), mask.tobytes(), int(is_annotated))
                    for batch in loader
                    for images, masks, annotated in zip(batch["x"], batch["m"], batch["m_mask"], strict=True)
                    for image, mask, is_annotated in zip(images, masks, annotated, strict=False)
                )
            )
    assert found[0] == found[1]
    assert any(any(mask) for _, mask, _ in found[0])


# ---- equality, and what is bad -------------------------------------------------------------------------


def test_regions_are_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset,
) -> None:
    check_everywhere(lambda **settings: _loader(dataset, **settings))


def test_annotations_and_masks_are_read_with_the_slices_and_only_of_chosen_ones(dataset: Dataset) -> None:
    fields: dict[str, sf.Field] = {"ct": sf.Slices(series=CT, num_slices=2, size=(8, 8), missing="drop")}
    with _loader(dataset, fields) as loader:
        _exhaust(loader)
        without = loader.counters.snapshot()["read"]["num_items"]
    fields["lesions"] = sf.Mask(like="ct")
    fields["spots"] = sf.Boxes(like="ct")
    masks = 0
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                chosen = {*batch["ct_index"][slot].tolist()}
                masks += 1 + sum(
                    len(chosen & {*one["masks"]}) for one in regions_of(number) if one["entry"]["series"] == 1
                )
        assert loader.counters.snapshot()["read"]["num_items"] == without + masks


def _exhaust(loader: Loader) -> None:
    for _ in loader:
        pass


def test_a_bad_member_masks_its_slot_and_nothing_else(tmp_path: Path) -> None:
    dataset = make_annotated_dataset(tmp_path / "a")
    whole = batches_of(_loader(dataset))
    mask = next(
        mask_field(1, one["entry"]["roi"], 2, "b2nd")
        for one in regions_of(9)
        if one["entry"]["series"] == 1 and 2 in one["masks"]
    )
    fields = {**FIELDS, "ct": sf.Slices(series=CT, num_slices=11, size=(9, 15), missing="pad")}
    for number, field in ((9, mask), (7, "annotations.json")):
        path, offset, num_bytes = locate(dataset, number, field)
        flip_bit(path, offset + num_bytes // 2)
    damaged = batches_of(_loader(Dataset.open(tmp_path / "a"), fields))
    whole = batches_of(_loader(make_annotated_dataset(tmp_path / "b"), fields))
    bad = {sample_key(7), sample_key(9)}
    for place, batch in damaged.items():
        for slot, key in enumerate(batch["keys"]):
            assert batch["weight"][slot] == (key is not None and key not in bad)
        if not bad & {*batch["keys"]}:
            assert batch == whole[place]


@pytest.mark.parametrize(
    "change",
    [
        {"rois": 3},
        {"rois": [{"roi": 0}]},
        {"rois": [{"roi": 0, "series": 0, "slices": [{"slice": 0, "box_px": [0, 0, float("inf"), 1]}]}]},
        {
            "rois": [
                {
                    "roi": 0,
                    "series": 0,
                    "kind": "contour",
                    "slices": [{"slice": 0, "box_px": None}],
                    "polygons": [[[0, 1, 2]]],
                }
            ]
        },
    ],
)
def test_annotations_that_are_none_mask_their_slot(tmp_path: Path, change: Mapping[str, Any]) -> None:
    def make(number: int, **_: Any) -> MadeSample:
        extra = {"annotations.json": json.dumps(change).encode()} if number == 2 else {}
        return make_case(number, extra=extra)

    dataset = make_annotated_dataset(tmp_path / "a", make)
    fields = {"x": sf.Image(series=VIEWS, missing="drop"), "m": sf.Mask(like="x")}
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert batch.info.weight[slot] == (number != 2)
                assert not batch["m_mask"][slot].any()
        (row,) = loader.quarantined
    assert (row.field, row.reason) == ("annotations.json", "TEXT_UNREADABLE")


def test_a_mask_of_another_shape_masks_its_slot(tmp_path: Path) -> None:
    roi = {"roi": 0, "series": 0, "slices": [{"slice": 0, "box_px": [0, 0, 3, 3]}], "mask": "s000.m000"}
    extra = {
        "annotations.json": json.dumps({"rois": [roi]}).encode(),
        "s000.m000.i0000.b2nd": encode_array("b2nd", np.ones((5, 5), np.uint8)),
    }

    def make(number: int, **_: Any) -> MadeSample:
        return make_case(number, extra=extra if number == 2 else {})

    dataset = make_annotated_dataset(tmp_path / "a", make)
    fields = {"x": sf.Image(series=VIEWS, size=(8, 8), missing="drop"), "m": sf.Mask(like="x")}
    with _loader(dataset, fields) as loader:
        _exhaust(loader)
        (row,) = loader.quarantined
    assert (row.field, row.reason) == ("s000.m000.i0000.b2nd", "DECODE_FAILED")


def test_more_boxes_than_places_mask_the_slot(dataset: Dataset) -> None:
    counts = {
        number: sum(len(stored_boxes(number, *place, None)) for place in view_places(number))
        for number in range(NUM_SAMPLES)
    }
    most = max(counts.values()) - 1
    fields = {
        "x": sf.Image(series=VIEWS, num_images="all", size=(8, 8), missing="pad"),
        "b": sf.Boxes(like="x", max_boxes=most),
    }
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert batch.info.weight[slot] == (counts[number] <= most)
                assert batch["b_mask"][slot].sum() == (counts[number] if counts[number] <= most else 0)


def test_studies_without_annotations_are_bad_where_they_are_required(dataset: Dataset) -> None:
    fields = {"x": sf.Image(series=VIEWS, missing="drop"), "m": sf.Mask(like="x", missing="error")}
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert batch.info.weight[slot] == is_annotated(number)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"ct": sf.Slices(series=CT, missing="pad"), "m": sf.Mask(like="cts")}, "did you mean 'ct'"),
        ({"m": sf.Mask(like="report"), "report": sf.Text(missing="pad")}, "no field of images"),
        ({"m": sf.Mask(like="m")}, "no field of images"),
        ({"x": sf.Image(missing="pad"), "m": sf.Boxes(like="x", missing="drop")}, "No table knows"),
        ({"x": sf.Image(missing="pad"), "x_mask": sf.Mask(like="x")}, "reserved"),
    ],
)
def test_a_slip_in_like_is_one_sentence_before_step_0(dataset: Dataset, fields: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _loader(dataset, fields)


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (sf.Mask, {"labels": "nodule"}, r"write labels=\['nodule'\]"),
        (sf.Mask, {"labels": []}, "different names"),
        (sf.Mask, {"labels": [3]}, "different names"),
        (sf.Mask, {"labels": ["a", "a"]}, "different names"),
        (sf.Mask, {"merge": "stack"}, "write labels="),
        (sf.Mask, {"merge": "intersection"}, "merge is one of"),
        (sf.Mask, {"threshold": 0}, "threshold is"),
        (sf.Mask, {"threshold": True}, "threshold is"),
        (sf.Boxes, {"max_boxes": 0}, "max_boxes is"),
        (sf.Boxes, {"like": 3}, "like is the name"),
    ],
)
def test_a_wrong_setting_is_refused(kind: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kind(**{"like": "x", **settings})
