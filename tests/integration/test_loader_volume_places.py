"""Regions in the body, within a box, and at places of tables: where they are, and equal everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset, verify
from shardflow.format.copies.conversion import VolumeStorage
from shardflow.format.copies.subset import copy_subset
from shardflow.format.entities import EntityRules
from shardflow.format.facts.sampling import BODY, BodyFinder, cell_shape
from shardflow.format.facts.voxels import VOXELS_NAME, VoxelsManifest, attach_voxels
from shardflow.format.keys import REPORT_FIELD
from shardflow.format.tables import StoredColumn, write_table
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.reports import ReportReader
from shardflow.reports.entity_views import build_view
from shardflow.sampling import BatchSpec
from tests.dicom_factory import make_study
from tests.integration.loader_support import check_everywhere, open_loader, slots_of
from tests.layout_trees import make_nnunet
from tests.pack_case import PackCase
from tests.volume_cases import VolumeSeries, affine_of, make_volumes

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("packs_inline")]

NUM_SAMPLES = 8
SHAPE = (20, 40, 48)
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
AIR_ONLY = 6
AFFINE = affine_of((2.0, 0.8, 0.7), flip=True)


def body_of(number: int) -> tuple[slice, slice, slice]:
    """Return the body of a study, in whole cells of 1 x 8 x 8 voxels."""
    return slice(4 + number % 3, 13), slice(8, 24 + 8 * (number % 2)), slice(16, 40)


def roi_box(number: int) -> tuple[int, ...]:
    return 7, 10 + number, 20, 10, 15 + number, 30


def series_of(number: int) -> list[VolumeSeries]:
    voxels = np.full(SHAPE, -1000, np.int16)
    if number != AIR_ONLY:
        voxels[body_of(number)] = 40
    return [VolumeSeries(voxels=voxels, affine=AFFINE)]


def roi_of(label: str, places: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a region of ``annotations.json``: a box in some slices."""
    return {
        "roi": 0,
        "series": 0,
        "label": label,
        "code": None,
        "kind": "box",
        "source": "csv",
        "slices": places,
        "mask": None,
        "polygons": None,
        "flags": [],
    }


def extra_of(number: int) -> dict[str, bytes]:
    z0, y0, x0, z1, y1, x1 = roi_box(number)
    places = [{"slice": z, "box_px": [x0, y0, x1, y1], "fraction": 0.1} for z in range(z0, z1)]
    roi = roi_of("liver", places)
    found = {"format_version": 1, "rois": [roi] if number != 2 else [], "dangling": []}
    return {"annotations.json": json.dumps(found).encode()}


def to_mm(places: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(places, float) @ AFFINE[:3, :3].T + AFFINE[:3, 3]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("places") / "data"
    made = make_volumes(folder, series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)
    attach_voxels(made)
    is_missing = np.arange(NUM_SAMPLES) == 3
    boxes = np.array([roi_box(number) for number in range(NUM_SAMPLES)], float)
    boxes[:, 3:] -= 1
    columns = [
        StoredColumn(name=name, kind="floats", values=values.astype(np.float32), is_missing=is_missing)
        for name, values in {
            "point": to_mm(boxes[:, :3]),
            "box": np.concatenate([to_mm(boxes[:, :3]), to_mm(boxes[:, 3:])], axis=1),
            "pair": boxes[:, :2],
        }.items()
    ]
    number = StoredColumn(name="number", kind="int", values=np.arange(NUM_SAMPLES), is_missing=is_missing)
    write_table(made.store, made.dataset_id, "lesions", "study", [*columns, number])
    return Dataset.open(made.store.url)


def stored_box(affine: NDArray[Any], shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first stored voxel of a delivered array, and the one after its last."""
    ends = np.array([[0, 0, 0, 1], [*(np.array(shape) - 1), 1]])
    found = np.rint((ends @ (np.linalg.inv(AFFINE) @ affine).T)[:, :3]).astype(int)
    return found.min(axis=0), found.max(axis=0) + 1


def regions(dataset: Dataset, epochs: int = 3, **settings: Any) -> list[tuple[int, Any, Any]]:
    found = []
    with open_loader(dataset, SPEC, {"ct": sf.Volume(**settings)}) as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                for slot, number in slots_of(batch):
                    found.append((number, *stored_box(batch["ct_affine"][slot], settings["roi_size"])))
    return found


def test_tables_have_bodies_and_boxes(dataset: Dataset) -> None:
    table, _ = VoxelsManifest.open(dataset)
    table.verify()
    for number in range(NUM_SAMPLES):
        entries = {one.name: one for one in table.of_sample(number)}
        assert entries.keys() == ({BODY} if number != AIR_ONLY else set()) | (
            {"liver"} if number != 2 else set()
        )
        if number != 2:
            assert entries["liver"].box == roi_box(number)
        if number != AIR_ONLY:
            body = body_of(number)
            assert entries[BODY].box == (*(one.start for one in body), *(one.stop for one in body))
            voxels = entries[BODY].voxels
            assert 0 < len(voxels) <= 64
            for voxel in voxels.tolist():
                assert series_of(number)[0].voxels[tuple(voxel)] == 40


def test_regions_around_the_body_have_their_middle_in_it(dataset: Dataset) -> None:
    middles = set()
    for number, start, stop in regions(dataset, center="body", roi_size=(3, 3, 3)):
        if number != AIR_ONLY:
            middle = tuple(((start + stop) // 2).tolist())
            assert series_of(number)[0].voxels[middle] == 40
            middles.add(middle)
    assert len(middles) > 15


@pytest.mark.parametrize("grid", [{}, {"orientation": "RAS"}])
def test_a_volume_is_cut_to_its_body_first(dataset: Dataset, grid: dict[str, Any]) -> None:
    for number, start, stop in regions(dataset, within="body", roi_size=(4, 4, 5), **grid):
        if number != AIR_ONLY:
            low, high = (
                np.array([getattr(one, end) for one in body_of(number)]) for end in ("start", "stop")
            )
            assert (start >= low).all()
            assert (stop <= high).all()
    starts = {tuple(start) for number, start, _ in regions(dataset, within="body", roi_size=(4, 4, 5))}
    assert len(starts) > 10


def test_a_whole_organ_is_brought_to_a_size(dataset: Dataset) -> None:
    volume = sf.Volume(center="whole", within="foreground", labels=["liver"], roi_size=(6, 10, 20))
    with open_loader(dataset, SPEC, {"ct": volume, "liver": sf.Mask(like="ct")}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert batch["liver"][slot].all() == (number != 2)  # nothing of it is elsewhere
    spaced = sf.Volume(
        center="middle", within="foreground", labels=["liver"], roi_size=(3, 5, 4), spacing_mm=(2, 0.8, 1.4)
    )
    with open_loader(dataset, SPEC, {"ct": spaced}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                if number != 2:
                    box = np.array(roi_box(number), float)
                    middle = to_mm((box[:3] + box[3:] - 1) / 2)
                    found = batch["ct_affine"][slot] @ [1, 2, 1.5, 1]
                    assert np.linalg.norm(found[:3] - middle) < 2.5


def test_regions_are_at_the_places_of_a_table(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    half = np.array((3, 3, 5)) // 2
    for number, start, _ in regions(dataset, center="lesions.point", roi_size=(3, 3, 5)):
        if number != 3:
            assert np.array_equal(start, np.array(roi_box(number)[:3]) - half)
    assert "7 of 8 samples have a place in lesions.point" in caplog.text
    starts = set()
    for number, start, stop in regions(dataset, center="lesions.box", roi_size=(5, 3, 12)):
        if number != 3:
            low, high = np.array(roi_box(number)[:3]), np.array(roi_box(number)[3:])
            assert (start[[0, 2]] <= low[[0, 2]]).all()  # the region holds the box, 3 x 5 x 10,
            assert (stop[[0, 2]] >= high[[0, 2]]).all()
            assert low[1] <= start[1] < stop[1] <= high[1]  # and lies in it where that is longer
            starts.add(tuple(start.tolist()))
    assert len(starts) > 8


@pytest.mark.parametrize(
    "settings",
    [{"center": "body"}, {"center": "lesions.box"}, {"within": "body", "spacing_mm": (1.5, 1, 1)}],
    ids=str,
)
def test_places_are_equal_everywhere(dataset: Dataset, settings: dict[str, Any]) -> None:
    fields = {
        "ct": sf.Volume(**{"roi_size": (4, 6, 7), "num_samples": 2, **settings}),
        "m": sf.Mask(like="ct"),
    }
    check_everywhere(lambda **more: open_loader(dataset, SPEC, fields, **more))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"center": "bodies"}, "or a column of places such as"),
        ({"center": "lesions.pint"}, r"no column 'lesions.pint'; did you mean lesions\.point"),
        ({"center": "lesions.pair"}, "got lists of 2"),
        ({"center": "lesions.number"}, "got int"),
        ({"within": "head"}, "within is one of"),
        ({"within": "foreground"}, "write labels="),
        ({"within": "foreground", "labels": ["livr"]}, "did you mean 'liver'"),
        ({"within": "body", "center": "foreground"}, "leave one of them out"),
    ],
    ids=str,
)
def test_slips_are_one_sentence(dataset: Dataset, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_loader(dataset, SPEC, {"ct": sf.Volume(roi_size=(3, 3, 3), **settings)})


def finding_of(number: int) -> dict[str, bytes]:
    """Return a nodule of a report in slices 8 to 10, and regions: of it, of another nodule, of the liver."""
    text = "FINDINGS: A 9 mm nodule in the right upper lobe.\n"
    content = ReportReader().read(text).to_json()
    placed = {
        "entity": 0,
        "series": 0,
        "slices": [8, 9, 10],
        "weights": [0.5, 1.0, 0.5],
        "confidence": 0.95,
        "evidence": [{"rule": "E1", "confidence": 0.95}],
    }
    rois: list[dict[str, Any]] = []
    for label, low, high, y, x in (
        ("nodule", 8, 11, 20 + number, 30),
        ("nodule", 2, 5, 5, 5),
        ("liver", 8, 11, 4, 40),
    )[1 if number == AIR_ONLY else 0 :]:
        places = [
            {"slice": z, "box_px": [x - 2, y - 2, x + 3, y + 3], "fraction": 0.1} for z in range(low, high)
        ]
        rois.append({**roi_of(label, places), "roi": len(rois)})
    return {
        "alignment.json": json.dumps(
            {"format_version": 1, "threshold": 0.7, "entities": [placed], "unaligned": []}
        ).encode(),
        "annotations.json": json.dumps({"format_version": 1, "rois": rois, "dangling": []}).encode(),
        "report.json": json.dumps({"format_version": 1, **content}).encode(),
        REPORT_FIELD: text.encode(),
    }


@pytest.mark.parametrize("grid", [{}, {"orientation": "RAS"}])
def test_regions_are_around_findings_of_reports(tmp_path: Path, grid: dict[str, Any]) -> None:
    made = make_volumes(tmp_path / "data", series_of, num_samples=NUM_SAMPLES, extra_of=finding_of)
    build_view(made, EntityRules(context_slices=0))
    size = (7, 9, 5) if grid else (5, 9, 7)

    def middles() -> dict[int, tuple[int, ...]]:
        volume = sf.Volume(roi_size=size, center="finding", **grid)
        found = {}
        with open_loader(made, SPEC, {"ct": volume}, unit="entity") as loader:
            for batch in loader:
                for slot, number in slots_of(batch):
                    start, stop = stored_box(batch["ct_affine"][slot], size)
                    found[number] = tuple(((start + stop) // 2).tolist())
        assert len(found) == NUM_SAMPLES
        return found

    plane = (SHAPE[1] - 1) / 2, (SHAPE[2] - 1) / 2
    for middle in middles().values():  # without a voxel table only the slice is known
        assert np.abs(np.subtract(middle, (9, *plane))).max() <= 1
    attach_voxels(made)
    for number, middle in middles().items():
        place = plane if number == AIR_ONLY else (20 + number, 30)
        assert np.abs(np.subtract(middle, (9, *place))).max() <= 1
    volumes = {"ct": sf.Volume(roi_size=size, center="finding", **grid)}
    check_everywhere(lambda **settings: open_loader(made, SPEC, volumes, unit="entity", **settings))
    with pytest.raises(ConfigError, match="samples are no findings; write unit='entity'"):
        open_loader(made, SPEC, volumes)


def test_a_table_of_before_is_made_again(tmp_path: Path) -> None:
    made = make_volumes(tmp_path / "data", series_of, num_samples=3, extra_of=extra_of)
    with pytest.raises(ConfigError, match="attach DATASET --voxels"):
        open_loader(made, SPEC, {"ct": sf.Volume(roi_size=(3, 3, 3), center="body")})


def test_a_body_of_other_units_is_above_the_dark(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    voxels = random.normal(12, 3, (130, 40, 48))
    voxels[20:110, 8:32, 16:40] += 300
    finder = BodyFinder((130, 40, 48), None)
    for index, plane in enumerate(voxels):
        finder.add(index, plane.astype(np.float32))
    body = finder.entry(0, "key")
    assert body is not None
    assert len(finder.indices) <= 64
    assert np.abs(np.array(body.box) - (20, 8, 16, 110, 32, 40)).max() <= 3
    empty = BodyFinder((3, 8, 8), "HU")
    for index in range(3):
        empty.add(index, np.full((8, 8), -1000))
    assert empty.entry(0, "key") is None


@pytest.mark.parametrize("shape", [(5, 17, 33), (70, 16, 24), (130, 41, 49)])
def test_a_body_counts_the_voxels_of_its_cells(shape: tuple[int, int, int]) -> None:
    """Cells at the ends are smaller where the sides of the volume are no multiples of theirs."""
    random = np.random.default_rng(1)
    side, finder = cell_shape(shape), BodyFinder(shape, "HU")
    cells = random.random([-(-end // step) for end, step in zip(shape, side, strict=True)]) < 0.1
    cells[:, :, -1] = cells[:, 0] = False
    cells[0, -1, 0] = True
    whole = cells.repeat(side[0], 0).repeat(side[1], 1).repeat(side[2], 2)
    voxels = np.where(whole, 40, -1000).astype(np.int16)[: shape[0], : shape[1], : shape[2]]
    for index, plane in enumerate(voxels):
        finder.add(index, plane)
    body = finder.entry(0, "key")
    assert body is not None
    places = np.argwhere(voxels == 40)
    assert body.num_voxels == len(places)
    assert body.box == (*places.min(axis=0), *(places.max(axis=0) + 1))
    assert len(body.voxels) == min(64, cells.sum())
    assert (voxels[tuple(body.voxels.T)] == 40).all()
    assert len(np.unique(body.voxels // side, axis=0)) == len(body.voxels)


@pytest.mark.parametrize("storage", ["slices", "bricks"])
def test_packing_makes_the_table_that_attaching_makes(tmp_path: Path, storage: str) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    tree = make_nnunet(case.folder)
    settings = (*tree.settings, f"volumes.storage={storage}", "splits={train = 1, test = 0}")
    assert case.pack(*settings).status == "packed"
    made = case.open()
    path = case.output / VoxelsManifest.folder(made.dataset_id) / VOXELS_NAME
    packed = path.read_bytes()
    table, _ = VoxelsManifest.open(made)
    assert {*tree.classes} < {*table.names}
    assert BODY in table.names
    path.unlink()
    attached = attach_voxels(made)
    assert path.read_bytes() == packed
    assert attached.num_bodies == (table.name == table.names.index(BODY)).sum() > 0
    report = verify(case.output)
    assert report.is_whole, report.damages
    other: VolumeStorage = "slices" if storage == "bricks" else "bricks"
    copy_subset(made, np.arange(made.samples.num_samples), tmp_path / "copy", volumes=other)
    copied = VoxelsManifest.open(Dataset.open(tmp_path / "copy"))[0]
    for sample in range(table.num_samples):
        assert [one.box for one in copied.of_sample(sample)] == [one.box for one in table.of_sample(sample)]
    shutil.rmtree(path.parent)
    copy_subset(made, np.arange(1, made.samples.num_samples), tmp_path / "other", volumes=other)
    copied = VoxelsManifest.open(Dataset.open(tmp_path / "other"))[0]
    for sample in range(copied.num_samples):
        for one, before in zip(copied.of_sample(sample), table.of_sample(sample + 1), strict=True):
            assert (one.series, one.name, one.box) == (before.series, before.name, before.box)
            assert np.array_equal(one.voxels, before.voxels)


def test_an_append_carries_the_table_and_one_without_it_makes_none(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "a", patient="A", num_slices=5, seed=1)
    case.write_faults()
    case.pack()
    first = VoxelsManifest.open(case.open())[0]
    make_study(case.dicom / "b", patient="B", num_slices=6, seed=2)
    case.pack(mode="append")
    made = case.open()
    table = VoxelsManifest.open(made)[0]
    assert made.manifest_version == 2
    assert table.num_samples == made.samples.num_samples == first.num_samples + 1
    assert attach_voxels(made).num_samples_kept == first.num_samples
    assert verify(case.output).is_whole
    for folder in (case.output / "facts" / "voxels").iterdir():
        shutil.rmtree(folder)
    make_study(case.dicom / "c", patient="C", num_slices=6, seed=3)
    case.pack(mode="append")
    with pytest.raises(ConfigError, match="--voxels"):
        VoxelsManifest.open(case.open())


def test_a_compaction_keeps_the_table(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    for seed, name in enumerate("abc"):
        make_study(case.dicom / name, patient=name.upper(), num_slices=5, seed=seed)
    case.config_path.write_text(
        case.config_path.read_text(encoding="utf-8").replace("10KiB", "1MiB"), encoding="utf-8"
    )
    case.write_faults()
    case.pack("splits={train = 1}")
    made = case.open()
    table, _ = VoxelsManifest.open(made)
    assert table.num_samples == 3
    assert len(made.manifest.shards) == 1
    remove(case.output, case.private, Withdrawn(sample_keys=[made.samples.sample_key(1)]))
    assert VoxelsManifest.open(Dataset.open(case.output))[0].num_samples == 2
    compact(case.output, case.private, deletes_old=True)
    compacted = Dataset.open(case.output)
    kept, _ = VoxelsManifest.open(compacted)
    path = case.output / VoxelsManifest.folder(compacted.dataset_id) / VOXELS_NAME
    before = path.read_bytes()
    assert [one.name for sample in range(2) for one in kept.of_sample(sample)] == [BODY, BODY]
    attach_voxels(compacted)
    assert path.read_bytes() == before
