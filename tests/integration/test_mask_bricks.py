"""Masks in bricks are those in slices, voxel by voxel, for every merge; damage of each kind is found."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import FormatError
from shardflow.format import Dataset, verify
from shardflow.format.codecs import decode_array, encode_array
from shardflow.format.contents.regions import read_regions
from shardflow.format.facts.voxels import VoxelsManifest, attach_voxels
from shardflow.format.keys import mask_field, mask_prefix, parse_mask_field, parse_volume_field
from shardflow.format.volumes.bricks import EncodedVolume
from shardflow.format.volumes.masks import join_masks, split_masks
from shardflow.packing.attachments.annotations.region_writer import RegionFacts, RegionWriter
from shardflow.packing.attachments.annotations.targets import Target
from shardflow.packing.attachments.annotations.vocabulary import Vocabulary
from shardflow.sampling import BatchSpec
from tests.integration.loader_support import check_everywhere, flip_bit, locate, open_loader, slots_of
from tests.integration.test_loader_volume_regions import GRIDS, SHAPE, series_of
from tests.layout_trees import make_nnunet
from tests.pack_case import PackCase
from tests.volume_cases import make_volumes

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("packs_inline")]

NUM_SAMPLES = 8
UNSEEN = 5
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
LABELS = ("nodule", "liver", "other")
BOX_ONLY = 3
"""Number of the region that is a box."""


@cache
def masks_of(number: int) -> list[NDArray[np.uint8]]:
    """Voxels of each region of a study: overlapping, of three readers; one fractional, one a box."""
    random = np.random.default_rng([number, 7])
    found = []
    for roi in range(8):
        low = random.integers(1, 4, 3)
        high = low + random.integers(4, 8, 3)
        voxels = np.zeros(SHAPE, np.uint8)
        part = voxels[tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))]
        part[...] = 1 if roi == BOX_ONLY else random.integers(0, 256 if roi == 1 else 2, part.shape)
        part[:, 0, 0] = 1  # every slice is marked
        found.append(voxels)
    return found


def roi_of(number: int, roi: int) -> dict[str, Any]:
    voxels = masks_of(number)[roi]
    places = []
    for index in np.flatnonzero(voxels.any(axis=(1, 2))).tolist():
        rows, columns = np.nonzero(voxels[index])
        box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        places.append({"slice": index, "box_px": [float(edge) for edge in box], "fraction": 0.5})
    return {
        "roi": roi,
        "series": 0,
        "label": LABELS[roi % 3],
        "code": None,
        "kind": "box" if roi == BOX_ONLY else "segmentation",
        "source": "dicom-seg",
        "slices": places,
        "mask": None if roi == BOX_ONLY else mask_prefix(0, roi),
        "polygons": None,
        "flags": ["fractional"] if roi == 1 else [],
        "reader": roi // 2 % 3,
    }


def extra_of(number: int) -> dict[str, bytes]:
    if number == UNSEEN:
        return {}
    rois = [roi_of(number, roi) for roi in range(len(masks_of(number)))]
    found = {"annotations.json": json.dumps({"format_version": 1, "rois": rois, "dangling": []}).encode()}
    for roi, voxels in zip(rois, masks_of(number), strict=True):
        for place in roi["slices"] if roi["mask"] else ():
            name = mask_field(0, roi["roi"], place["slice"], "b2nd")
            found[name] = encode_array("b2nd", np.ascontiguousarray(voxels[place["slice"]]))
    return found


@pytest.fixture(scope="module")
def in_slices(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("masks") / "slices"
    made = make_volumes(folder, series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)
    attach_voxels(made)
    return made


@pytest.fixture(scope="module")
def in_bricks(in_slices: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    target = tmp_path_factory.mktemp("masks") / "bricks"
    assert cli.main(["copy", in_slices.store.url, str(target), "--volumes", "bricks"]) == 0
    return Dataset.open(target)


def fields_of(**settings: Any) -> dict[str, sf.Field]:
    return {
        "ct": sf.Volume(**{"roi_size": (7, 8, 9), **settings}),
        "every": sf.Mask(like="ct", threshold=0.3),
        "most": sf.Mask(like="ct", merge="majority"),
        "few": sf.Mask(like="ct", merge="majority", labels=["nodule"]),
        "planes": sf.Mask(like="ct", labels=["other", "nodule", "absent", "liver"], merge="stack"),
    }


def test_masks_become_one_volume_of_combinations(in_slices: Dataset, in_bricks: Dataset) -> None:
    assert verify(in_bricks.store.url).is_whole
    for row in range(NUM_SAMPLES):
        names = {one.name for one in in_bricks.sample_fields(row)[1]}
        volumes = sorted(
            name for name in names if (parsed := parse_volume_field(name)) and parsed[1] is not None
        )
        number = row  # samples are in the order of their numbers
        if number == UNSEEN:
            assert not volumes
            continue
        assert volumes == ["s000.m000.volume.b2nd", "s000.m001.volume.b2nd"]  # the second is fractional
        assert not [name for name in names if parse_mask_field(name)]
        regions = read_regions(in_bricks.read_fields(row, ["annotations.json"])["annotations.json"])
        stored = {volume: in_bricks.read_masks(row, 0, volume) for volume in (0, 1)}
        assert np.array_equal(stored[1], masks_of(number)[1])
        for region in regions:
            if region.number == BOX_ONLY:
                assert region.volume is None
                continue
            assert region.volume == (1 if region.is_fractional else 0)
            is_inside = region.table(stored[region.volume].dtype)[stored[region.volume]]
            level = 128 if region.is_fractional else 1
            assert np.array_equal(is_inside, masks_of(number)[region.number] >= level)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_merge_is_that_of_slices(in_slices: Dataset, in_bricks: Dataset, grid: str) -> None:
    marked: dict[str, int] = {}
    fields = fields_of(**GRIDS[grid])
    with open_loader(in_slices, SPEC, fields) as first, open_loader(in_bricks, SPEC, fields) as second:
        for mine, theirs in zip(first, second, strict=True):
            assert dict(mine).keys() == dict(theirs).keys()
            for name in fields:
                assert np.array_equal(mine[name], theirs[name]), name
                assert np.array_equal(mine[f"{name}_mask"], theirs[f"{name}_mask"])
                marked[name] = marked.get(name, 0) + int((mine[name] > 0).sum())
    assert min(marked.values()) > 20, marked


def test_the_majority_of_readers_is_counted_in_a_volume(in_bricks: Dataset) -> None:
    fields = {"ct": sf.Volume(roi_size=SHAPE, center="middle"), "most": sf.Mask(like="ct", merge="majority")}
    num_marked = 0
    with open_loader(in_bricks, SPEC, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                if number == UNSEEN:
                    continue
                votes = np.zeros(SHAPE, np.int64)
                for reader in range(3):
                    own = [
                        voxels >= (128 if roi == 1 else 1)
                        for roi, voxels in enumerate(masks_of(number))
                        if roi // 2 % 3 == reader
                    ]
                    votes += np.any(own, axis=0)
                assert np.array_equal(batch["most"][slot, 0], 2 * votes > 3)
                num_marked += int(batch["most"][slot].sum())
    assert num_marked


def test_masks_beside_slices_are_those_of_slices(in_slices: Dataset, in_bricks: Dataset) -> None:
    fields = {
        "ct": sf.Slices(num_slices=5, size=(12, 12), sampling="random"),
        "every": sf.Mask(like="ct"),
        "most": sf.Mask(like="ct", merge="majority"),
        "planes": sf.Mask(like="ct", labels=LABELS, merge="stack", threshold=0.7),
        "boxes": sf.Boxes(like="ct", max_boxes=99),
    }
    num_marked = 0
    with open_loader(in_slices, SPEC, fields) as first, open_loader(in_bricks, SPEC, fields) as second:
        for mine, theirs in zip(first, second, strict=True):
            for name in fields:
                assert np.array_equal(mine[name], theirs[name]), name
            num_marked += int(mine["planes"].sum())
    assert num_marked > 100


def test_masks_in_bricks_are_equal_everywhere(in_bricks: Dataset) -> None:
    fields = fields_of(**GRIDS["mm"])
    check_everywhere(lambda **settings: open_loader(in_bricks, SPEC, fields, **settings))


def test_there_and_back_are_the_same_bytes(in_bricks: Dataset, in_slices: Dataset, tmp_path: Path) -> None:
    for name, source, storage in (
        ("slices", in_bricks.store.url, "slices"),
        ("bricks", str(tmp_path / "slices"), "bricks"),
    ):
        assert cli.main(["copy", source, str(tmp_path / name), "--volumes", storage]) == 0
        assert verify(tmp_path / name).is_whole
    back, again = (Dataset.open(tmp_path / name) for name in ("slices", "bricks"))
    assert back.manifest.format_version == 1
    for row in range(NUM_SAMPLES):
        former, now = in_slices.read_fields(row), back.read_fields(row)
        assert former.keys() == now.keys()
        for name in former:
            if parse_mask_field(name):
                mine, theirs = (decode_array("b2nd", one) for one in (former[name], now[name]))
                assert np.array_equal(mine, theirs)
            elif name.endswith(".json"):
                assert json.loads(former[name]) == json.loads(now[name])
    assert [one.sha256 for one in again.manifest.shards] == [one.sha256 for one in in_bricks.manifest.shards]


def test_voxels_of_classes_are_the_same(in_slices: Dataset, in_bricks: Dataset) -> None:
    attach_voxels(in_bricks)
    mine, theirs = (VoxelsManifest.open(one)[0] for one in (in_slices, in_bricks))
    for sample in range(NUM_SAMPLES):
        pairs = zip(mine.of_sample(sample), theirs.of_sample(sample), strict=True)
        for one, other in pairs:
            assert (one.series, one.name, one.num_voxels) == (other.series, other.name, other.num_voxels)
            assert np.array_equal(one.voxels, other.voxels)


def test_a_damaged_brick_of_masks_is_found_and_masked(in_slices: Dataset, tmp_path: Path) -> None:
    assert cli.main(["copy", in_slices.store.url, str(tmp_path / "a"), "--volumes", "bricks"]) == 0
    made = Dataset.open(tmp_path / "a")
    path, offset, num_bytes = locate(made, 2, "s000.m000.volume.b2nd")
    index = made.shard_index(int(made.studies.gather("shard", 2)))
    volume = index.volume(index.volumes_of(int(made.studies.gather("row_in_shard", 2)), 0)[0])
    flip_bit(path, int(volume.starts[0]) + 40)
    assert offset < int(volume.starts[0]) < offset + num_bytes
    (damage,) = (one for one in verify(made.store.url).damages if one.path.endswith(".tar"))
    assert (damage.field, damage.offset) == ("s000.m000.volume.b2nd", int(volume.starts[0]))
    with open_loader(made, SPEC, fields_of(center="middle", roi_size=SHAPE)) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert (batch.info.weight[slot] == 0) == (number == 2)
                assert not (number == 2 and batch["every"][slot].any())


def test_annotations_that_name_no_stored_volume_mask_the_slot(in_bricks: Dataset, tmp_path: Path) -> None:
    rois = [{**roi_of(0, 0), "mask": "s000.m000.volume", "values": [1]}]

    def extra(number: int) -> dict[str, bytes]:
        content = {"format_version": 1, "rois": rois, "dangling": []}
        return {"annotations.json": json.dumps(content).encode()} if number == 1 else {}

    made = make_volumes(tmp_path / "a", series_of, num_samples=4, extra_of=extra)
    with open_loader(made, SPEC, fields_of(center="middle")) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert (batch.info.weight[slot] == 0) == (number == 1)
        assert [one.reason for one in loader.quarantined] == ["FIELD_MISSING"]


@pytest.mark.parametrize("num_regions", [3, 12])
def test_combinations_of_many_regions_come_back(num_regions: int) -> None:
    """Twelve regions overlap in more than 255 ways, so a voxel takes two bytes."""
    shape = (5, 24, 30)
    random = np.random.default_rng(num_regions)
    masks = (random.random((num_regions, *shape)) < 0.5).astype(np.uint8)
    rois = [
        {
            "roi": roi,
            "series": 0,
            "label": f"l{roi}",
            "kind": "segmentation",
            "source": "nifti",
            "slices": [{"slice": index, "box_px": None, "fraction": 0.5} for index in range(shape[0])],
            "mask": mask_prefix(0, roi),
            "polygons": None,
            "flags": [],
        }
        for roi in range(num_regions)
    ]
    annotations = json.dumps({"dangling": [], "format_version": 1, "rois": rois}).encode()
    payloads = {
        mask_field(0, roi, index, "b2nd"): encode_array("b2nd", masks[roi, index])
        for roi, index in itertools.product(range(num_regions), range(shape[0]))
    }
    joined = join_masks(
        annotations,
        payloads,
        lambda names: {name: payloads[name] for name in names},
        {0: shape},
        brick_shape=(2, 8, 8),
    )
    assert joined is not None
    assert joined.former == payloads.keys()
    (encoded,) = joined.fields.values()
    assert encoded.stored.dtype.itemsize == (1 if num_regions == 3 else 2)  # type: ignore[union-attr]
    values = blosc2.ndarray_from_cframe(encoded.read_frame())[...]  # type: ignore[union-attr]
    for region in read_regions(joined.annotations):
        assert np.array_equal(region.table(values.dtype)[values], masks[region.number])
    back = split_masks(
        joined.annotations, lambda _, __, part: values[part], {0: shape}, depth=2, codec="b2nd"
    )
    assert back is not None
    assert back.fields == payloads
    assert json.loads(back.annotations) == json.loads(annotations)


def test_a_value_that_a_volume_cannot_hold_is_an_error() -> None:
    roi = {**roi_of(0, 0), "mask": "s000.m000.volume", "values": [300]}
    (region,) = read_regions(json.dumps({"rois": [roi]}).encode())
    with pytest.raises(FormatError, match=r"annotations\.json"):
        region.table(np.dtype(np.uint8))


def test_regions_of_every_kind_of_file_come_back() -> None:
    """Outlines with holes and beyond the edges, masks of classes, parts of pixels, boxes and lines."""
    slices, rows, columns = shape = (6, 20, 26)
    target = Target(number=0, rows=rows, columns=columns, instances=[("1", at + 1) for at in range(slices)])
    writer = RegionWriter(vocabulary=Vocabulary(), surrogate=lambda kind, value: f"{kind}{value}")
    random = np.random.default_rng(3)
    square = np.array([[0.0, 0.0], [9.0, 0.0], [9.0, 9.0], [0.0, 9.0]])
    for number, source in enumerate(("rtstruct", "lidc-xml", "coco", "rtstruct")):
        region = writer.open(RegionFacts(kind="contour", source=source, label="liver"))  # type: ignore[arg-type]
        for index in range(number, slices):
            moved = np.array([3 * number - 4, 2 * index])
            outlines = [square + moved, square / 3 + moved + 3]
            region.add_outlines(target, index, outlines)
    for source, is_fractional in (("nifti", False), ("dicom-seg", True)):
        region = writer.open(
            RegionFacts(kind="segmentation", source=source, is_fractional=is_fractional)  # type: ignore[arg-type]
        )
        for index in (1, 2, 4):
            region.add_mask(
                target, index, random.integers(0, 256 if is_fractional else 2, (rows, columns), np.uint8)
            )
    region = writer.open(RegionFacts(kind="measurement", source="sr-tid1500"))
    region.add_open(target, 2, square + 3)
    region.add_mask(target, 3, np.eye(rows, columns, dtype=np.uint8))
    mixed = writer.open(RegionFacts(kind="box", source="csv"))
    mixed.add_box(target, 0, (2, 3, 9, 11))
    mixed.add_mask(target, 1, np.eye(rows, columns, dtype=np.uint8))
    writer.open(RegionFacts(kind="box", source="csv")).add_box(target, 5, (0, 0, 5, 5))
    part, fields = writer.finish()
    annotations = json.dumps({"format_version": 1, **part}).encode()
    joined = join_masks(annotations, fields, lambda names: {name: fields[name] for name in names}, {0: shape})
    assert joined is not None
    before, after = read_regions(annotations), read_regions(joined.annotations)
    assert [one.volume for one in after] == [0, 0, 0, 0, 0, 5, 0, None, None]  # no box is lost
    volumes = {
        (parse_volume_field(name) or (0, None))[1]: blosc2.ndarray_from_cframe(volume.read_frame())[...]
        for name, volume in joined.fields.items()
        if isinstance(volume, EncodedVolume)
    }
    for former, region_now in zip(before, after, strict=True):
        if region_now.volume is None:
            continue
        values = volumes[region_now.volume]
        is_inside = region_now.table(values.dtype, 0.3)[values]
        for index in range(slices):
            name = mask_field(0, former.number, index, "b2nd")
            stored = decode_array("b2nd", fields[name]) if name in fields else former.fill(index, shape[1:])
            level = former.mask_level(0.3) if name in fields else 1
            assert np.array_equal(
                is_inside[index], np.zeros(shape[1:], bool) if stored is None else stored >= level
            )
    kept = {mask_field(0, 7, 1, "b2nd")}
    assert joined.former == fields.keys() - kept


def test_a_crop_reads_the_bricks_of_masks_that_it_touches(tmp_path: Path) -> None:
    """A damaged brick masks the regions that touch it, and no others."""
    case = PackCase(tmp_path)
    case.prepare()
    tree = make_nnunet(case.folder)
    case.pack(
        *tree.settings,
        "volumes.storage=bricks",
        "volumes.brick_shape=[2, 4, 4]",
        "splits={train = 1, test = 0}",
    )
    made, size = Dataset.open(case.output), (2, 3, 3)
    row, number = next(
        (row, series)
        for row in range(made.samples.num_samples)
        for name in (one.name for one in made.sample_fields(row)[1])
        for series, roi in [parse_volume_field(name) or (0, None)]
        if roi is not None
    )
    (roi,) = {
        parsed[1]
        for name in (one.name for one in made.sample_fields(row)[1])
        if (parsed := parse_volume_field(name)) and parsed[0] == number and parsed[1] is not None
    }
    index = made.shard_index(int(made.studies.gather("shard", row)))
    field = index.volumes_of(int(made.studies.gather("row_in_shard", row)), roi)[number]
    volume = index.volume(field)
    grid = np.argwhere(volume.low < volume.high)
    low = grid[len(grid) // 2] * volume.brick_shape
    plan = volume.plan(low, np.minimum(low + 1, volume.shape))
    channel = json.loads(made.read_fields(row, ["study.json"])["study.json"])["series"][number]["channel"]
    fields = {
        "image": sf.Volume(series=f"channel == '{channel}'", roi_size=size),
        "parts": sf.Mask(like="image", labels=[*tree.classes], merge="stack"),
    }

    def weights() -> list[tuple[bool, NDArray[np.float64], float]]:
        found = []
        spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
        with open_loader(Dataset.open(case.output), spec, fields, split="train") as loader:
            for epoch in range(25):
                loader.set_epoch(epoch)
                for batch in loader:
                    is_it = batch.info.sample_keys[0] in (None, made.studies.sample_key(row))
                    found.append((is_it, batch["image_affine"][0].copy(), float(batch.info.weight[0])))
        return found

    before = weights()
    path = Path(made.store.url) / made.sample_fields(row)[0]
    flip_bit(path, int(plan.offsets[0]) + 20)
    facts = json.loads(made.read_fields(row, ["study.json"])["study.json"])["series"][number]
    stored = np.linalg.inv(np.array(facts["affine_lps"]))
    num_touching = 0
    for (is_it, affine, weight), (_, _, now) in zip(before, weights(), strict=True):
        ends = np.array([[0, 0, 0, 1], [*(np.array(size) - 1), 1]]) @ (stored @ affine).T
        first = np.rint(ends[:, 2::-1].min(axis=0))
        is_touching = is_it and ((first < low + volume.brick_shape) & (first + size > low)).all()
        assert weight == 1
        assert now == (0 if is_touching else 1)
        num_touching += bool(is_touching)
    assert 3 < num_touching < 25
