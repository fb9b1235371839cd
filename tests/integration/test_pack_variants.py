"""Small versions and thumbnails: where they lie in the body, what they hold, who reads them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
from pydicom.dataset import FileDataset

from shardflow.errors import ConfigError
from shardflow.fields.types.pictures import Slices
from shardflow.format import Dataset, FieldLocation, decode_array, webdataset_decoder
from shardflow.format.keys import parse_slice_field, parse_small_field
from shardflow.loading import Loader, LoaderConfig
from shardflow.packing.studies.variants import shrink
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange, LocalStore
from tests.dicom_factory import make_study
from tests.pack_case import PackCase, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

_ROWS, _COLUMNS, _SLICES = 26, 34, 5
_VARIANTS = ("variants.small_px=11", "variants.thumbnail_px=24")
_ONE_SPLIT = ("splits.train=1", "splits.val=0", "shards.target_bytes=4MiB")


def _make_oblique_ramp(dataset: FileDataset, index: int) -> None:
    """Values that rise evenly in space: a mean over an area is the value at its centre."""
    column, row = np.meshgrid(np.arange(_COLUMNS), np.arange(_ROWS))
    dataset.PixelData = (900 + 20 * column + 7 * row + 31 * index).astype("<u2").tobytes()
    dataset.ImageOrientationPatient = [0.8, 0.6, 0.0, -0.6, 0.8, 0.0]
    dataset.ImagePositionPatient = [-40.0, 12.5, 3.0 * index]
    dataset.PixelSpacing = [0.8, 0.6]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackCase:
    case = PackCase(tmp_path_factory.mktemp("variants"))
    case.prepare()
    size = (_ROWS, _COLUMNS)
    make_study(case.dicom / "ramp", patient="ramp", num_slices=_SLICES, size=size, change=_make_oblique_ramp)
    make_study(case.dicom / "mr", patient="mr", modality="MR", num_slices=3, size=(20, 24))
    make_study(case.dicom / "tiny", patient="tiny", num_slices=2, size=(10, 11))
    case.pack(*_VARIANTS, *_ONE_SPLIT)
    return case


def _rows_by_size(dataset: Dataset) -> dict[int, int]:
    return {int(rows): row for row, rows in enumerate(dataset.samples.column("rows").tolist())}


def _series(dataset: Dataset, row: int) -> dict[str, object]:
    study = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])
    series: dict[str, object] = study["series"][0]
    return series


def test_a_small_slice_lies_where_the_large_one_lies(case: PackCase) -> None:
    """SimpleITK takes the large slices to the places where the small pixels say they are."""
    dataset = case.open()
    row = _rows_by_size(dataset)[_ROWS]
    series = _series(dataset, row)
    small = series["variants"]["small"]  # type: ignore[index]
    fields = dataset.read_fields(row)
    large = np.stack([decode_array("b2nd", fields[f"s000.i{i:04d}.b2nd"]) for i in range(_SLICES)])
    image = SimpleITK.GetImageFromArray(large.astype(np.float64))
    affine = np.array(series["affine_lps"])
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(affine[:3, 3].tolist())
    image.SetDirection((affine[:3, :3] / spacing).ravel().tolist())
    assert (small["rows"], small["columns"]) == (8, 11)
    assert small["pixel_spacing_mm"] == pytest.approx([0.8 * _ROWS / 8, 0.6 * _COLUMNS / 11])
    for index in range(_SLICES):
        pixels = decode_array("b2nd", fields[f"s000.small.i{index:04d}.b2nd"])
        assert pixels.shape == (8, 11)
        assert pixels.dtype == np.int16
        for at_row, at_column in np.ndindex(pixels.shape):
            place = np.array(small["affine_lps"]) @ [at_column, at_row, index, 1]
            expected = image.EvaluateAtPhysicalPoint(place[:3].tolist(), SimpleITK.sitkLinear)
            # Rounding, and that pixels are steps where the ramp is none; half a small pixel would be 42.
            assert abs(pixels[at_row, at_column] - expected) <= 0.5 + 2.2


def test_small_slices_are_means_in_the_unit_of_the_slices(case: PackCase) -> None:
    dataset = case.open()
    row = _rows_by_size(dataset)[20]
    fields = dataset.read_fields(row)
    for name, payload in fields.items():
        parsed = parse_small_field(name)
        if parsed is not None:
            full = decode_array("b2nd", fields[name.replace(".small", "")])
            assert (decode_array("b2nd", payload) == shrink(full, 9, 11)).all()
    assert sum(parse_small_field(name) is not None for name in fields) == 3
    assert sum(parse_slice_field(name) is not None for name in fields) == 3
    assert dataset.samples.column("num_slices")[row] == 3
    # All small slices of a series are neighbours: one read.
    names = list(fields)
    first = names.index("s000.small.i0000.b2nd")
    assert names[first : first + 4] == [*(f"s000.small.i{i:04d}.b2nd" for i in range(3)), "s000.thumb.jpg"]


def test_what_is_small_already_has_no_small_version(case: PackCase) -> None:
    dataset = case.open()
    row = _rows_by_size(dataset)[10]
    assert set(_series(dataset, row)["variants"]) == {"thumbnail"}  # type: ignore[call-overload]
    assert not any(".small." in name for name in dataset.read_fields(row))


def test_thumbnails_are_pictures_with_square_pixels(case: PackCase) -> None:
    dataset = case.open()
    row = _rows_by_size(dataset)[_ROWS]
    jpeg = dataset.read_fields(row, ["s000.thumb.jpg"])["s000.thumb.jpg"]
    pixels = webdataset_decoder(".s000.thumb.jpg", jpeg)
    said = _series(dataset, row)["variants"]["thumbnail"]  # type: ignore[index]
    # 26 x 0.8 mm by 34 x 0.6 mm is nearly a square, of at most 24 pixels.
    assert pixels.shape == (said["rows"], said["columns"]) == (24, 24)
    assert said["slice"] == 2
    # A larger one than the page's half is taken as it is; these are too coarse, and made anew.
    page = (case.output / "report.html").read_text(encoding="utf-8")
    assert base64.b64encode(jpeg).decode() not in page


def test_the_page_takes_thumbnails_that_are_there(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "a", patient="a", size=(120, 100), num_slices=1)
    case.pack("variants.thumbnail_px=120", *_ONE_SPLIT)
    jpeg = case.open().read_fields(0, ["s000.thumb.jpg"])["s000.thumb.jpg"]
    assert base64.b64encode(jpeg).decode() in (case.output / "report.html").read_text(encoding="utf-8")


def test_variants_are_the_same_bytes_and_change_no_other(case: PackCase, tmp_path: Path) -> None:
    other = PackCase(tmp_path)
    other.prepare()
    dicom = f'inputs.dicom=["{case.dicom}"]'
    again, without = f"output={tmp_path / 'again'}", f"output={tmp_path / 'without'}"
    other.pack(dicom, again, *_VARIANTS, *_ONE_SPLIT, "execution.num_processes=3")
    assert tree_digests(tmp_path / "again") == tree_digests(case.output)
    (tmp_path / "second").mkdir(mode=0o700)
    key = (other.private / "secret.key").read_bytes()
    (tmp_path / "second" / "secret.key").touch(mode=0o600)
    (tmp_path / "second" / "secret.key").write_bytes(key)
    other.pack(dicom, without, f"private_dir={tmp_path / 'second'}", *_ONE_SPLIT)
    plain, dataset = Dataset.open(tmp_path / "without"), case.open()
    for row in range(3):
        fields = dataset.read_fields(row)
        for name, payload in plain.read_fields(row).items():
            assert name == "study.json" or fields[name] == payload
    with pytest.raises(ConfigError, match="small_px"):
        _loader(plain)


class _WatchedStore(LocalStore):
    """Remembers what is read of tars."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.spans: list[ByteRange] = []

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        self.spans += ranges if path.endswith(".tar") else []
        super().read_ranges(path, ranges, buffers)


def _loader(dataset: Dataset, resolution: str = "small") -> Loader:
    fields = {"image": Slices(num_slices=2, size=(8, 11), resolution=resolution)}  # type: ignore[arg-type]
    spec = BatchSpec(micro_batch_size=3, micro_batches_per_step=1)
    config = LoaderConfig(num_threads=1)
    return Loader(dataset, split="train", batch=spec, seed=3, fields=fields, config=config)


def test_a_loader_reads_the_small_version_alone(case: PackCase) -> None:
    store = _WatchedStore(case.output)
    dataset = Dataset(store, case.open().manifest)
    (batch,) = _loader(dataset)
    rows = _rows_by_size(dataset)
    _, fields = dataset.sample_fields(rows[_ROWS])
    full = [field for field in fields if parse_slice_field(field.name)]
    small = [field for field in fields if parse_small_field(field.name)]

    def is_read(field: FieldLocation) -> bool:
        return any(span.offset <= field.offset < span.offset + span.num_bytes for span in store.spans)

    assert not any(map(is_read, full))
    # The small slice between the two wanted ones is so short that all are one read.
    assert {field.name for field in small if is_read(field)} >= {
        f"s000.small.i{index:04d}.b2nd" for index in (1, 3)
    }
    # The same slices as of the full resolution: the middles of two equal parts.
    slot = batch.arrays["row"].tolist().index(rows[_ROWS])
    payloads = dataset.read_fields(rows[_ROWS])
    for place, index in enumerate((1, 3)):
        expected = decode_array("b2nd", payloads[f"s000.small.i{index:04d}.b2nd"])
        assert (batch["image"][slot, place, 0] == expected).all()
    # What has no small version is read as it is.
    _, tiny = dataset.sample_fields(rows[10])
    assert sum(is_read(field) for field in tiny if parse_slice_field(field.name)) >= 2


def test_a_loader_of_full_slices_reads_no_small_one(case: PackCase) -> None:
    store = _WatchedStore(case.output)
    dataset = Dataset(store, case.open().manifest)
    assert len(list(_loader(dataset, "full"))) == 1
    read = {span.offset for span in store.spans}
    for row in range(3):
        _, fields = dataset.sample_fields(row)
        assert not read & {field.offset for field in fields if parse_small_field(field.name)}
