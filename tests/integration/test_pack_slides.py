"""Whole slides: tiles as other readers see them, nothing that names a patient, a reason for the rest."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
import wsidicom
from numpy.typing import NDArray
from pydicom.uid import JPEG2000, ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, generate_uid

from shardflow.format import Dataset
from shardflow.format.checks.verification import verify
from tests.pack_case import PackCase, read_ledger, tree_digests
from tests.slide_cases import PLANTED, dicom_level, make_slide_pixels, pyramid, write_ome, write_svs

pytestmark = pytest.mark.usefixtures("packs_inline")

LAYOUT = '[inputs.layout]\nkind = "folder"\npattern = "(?P<patient>[^/]+)/(?P<study>[^/]+)[.][a-z.]+"\n'
PIXELS = make_slide_pixels(900, 1100)
LEVELS = pyramid(PIXELS)
SPARSE = [(row, column) for row in range(2, 12) for column in range(3, 14)]
STUDIES = {
    "jpeg": (JPEGBaseline8Bit, None),
    "jpeg2000": (JPEG2000Lossless, None),
    "lossy2000": (JPEG2000, None),
    "native": (ExplicitVRLittleEndian, SPARSE),
}
UIDS = {name: (generate_uid(entropy_srcs=[name]), generate_uid(entropy_srcs=[name, "s"])) for name in STUDIES}


def stored_tiles(dataset: Dataset, row: int, level: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return a level that a shard has, read from its TIFF by tifffile, and which tiles are stored."""
    name = f"s000.l{level:02d}.tif"
    with tifffile.TiffFile(io.BytesIO(dataset.read_fields(row, [name])[name])) as file:
        page = file.pages.first
        grid = -(-page.imagelength // page.tilelength), -(-page.imagewidth // page.tilewidth)
        return page.asarray(), np.array(page.databytecounts).reshape(grid) > 0


def slide_of(dataset: Dataset, row: int) -> dict[str, Any]:
    (series,) = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])["series"]
    return dict(series)


def is_stored(stored: NDArray[np.bool_], shape: tuple[int, ...], tile: int = 64) -> NDArray[np.bool_]:
    return np.kron(stored, np.ones((tile, tile), bool))[: shape[0], : shape[1]].astype(bool)


def write_dicom(folder: Path) -> None:
    for name, (syntax, sparse) in STUDIES.items():
        study, series = UIDS[name]
        for number, level in enumerate(LEVELS):
            dicom_level(
                folder / name / f"{PLANTED[3]}{number}.dcm",
                level,
                study=study,
                series=series,
                mpp=0.25 * 4**number,
                syntax=syntax,
                sparse=sparse if number == 0 else None,
                patient=name,
            )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, Dataset]:
    case = PackCase(tmp_path_factory.mktemp("slides"))
    case.prepare()
    write_dicom(case.dicom)
    study, series = UIDS["jpeg"]
    odd = {"study": study, "series": series, "patient": "jpeg"}
    for number, flavor in enumerate(("LABEL", "OVERVIEW", "THUMBNAIL")):
        dicom_level(case.dicom / f"odd{number}.dcm", LEVELS[1], flavor=flavor, **odd)
    dicom_level(case.dicom / "shown.dcm", LEVELS[1], SpecimenLabelInImage="YES", **odd)
    dicom_level(case.dicom / "paths.dcm", LEVELS[1], NumberOfOpticalPaths=2, **odd)
    dicom_level(case.dicom / "planes.dcm", LEVELS[1], TotalPixelMatrixFocalPlanes=3, **odd)
    summary = case.pack()
    assert summary.inputs == {"total": 14, "packed": 8, "skipped": 6, "quarantined": 0}
    assert summary.reasons == {"SLIDE_LABEL": 4, "UNSUPPORTED_SLIDE": 2}
    return case, case.open()


@pytest.fixture(scope="module")
def packed_tiffs(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, Dataset]:
    case = PackCase(tmp_path_factory.mktemp("tiffs"))
    case.prepare()
    write_svs(case.dicom / "p1" / "rgb.svs", LEVELS)
    write_svs(case.dicom / "p2" / "ycbcr.svs", LEVELS, photometric="ycbcr")
    write_svs(case.dicom / "p3" / "lzw.tif", LEVELS, compression="lzw", has_label=False)
    write_ome(case.dicom / "p4" / "ome.tif", LEVELS)
    write_svs(case.dicom / "p6" / "jpeg2000.svs", LEVELS, compression="aperio_jp2000_rgb")
    write_svs(case.dicom / "p5" / "blank.svs", [np.full((300, 200, 3), 241, np.uint8)])
    tifffile.imwrite(case.dicom / "p1" / "gray.tif", PIXELS[..., 0], tile=(64, 64))
    tifffile.imwrite(case.dicom / "p1" / "flat.tif", PIXELS, photometric="rgb")
    (case.dicom / "p1" / "cut.svs").write_bytes((case.dicom / "p1" / "rgb.svs").read_bytes()[:40])
    case.config_path.write_text(case.config_path.read_text(encoding="utf-8") + LAYOUT, encoding="utf-8")
    summary = case.pack('policy.on_bad_instance="drop_instance"', "policy.max_quarantined_share=0.5")
    assert summary.reasons == {"UNSUPPORTED_SLIDE": 2, "HEADER_UNREADABLE": 1}
    return case, case.open()


@pytest.mark.parametrize("name", STUDIES)
def test_stored_tiles_of_dicom_are_those_that_another_reader_sees(
    packed: tuple[PackCase, Dataset], name: str
) -> None:
    case, dataset = packed
    row = dataset.samples.find(case.sample_key(UIDS[name][0]))
    files = sorted((case.dicom / name).iterdir())
    with wsidicom.WsiDicom.open(files) as slide:
        for number, level in enumerate(LEVELS):
            found, stored = stored_tiles(dataset, row, number)
            assert found.shape == level.shape
            assert stored.any()
            assert not stored.all()
            inside = is_stored(stored, level.shape)
            rows, columns = level.shape[:2]
            seen = np.asarray(slide.read_region((0, 0), 2 * number, (columns, rows)))  # by powers of 2
            if name == "jpeg":  # decoders of a lossy format round in other ways
                assert np.abs(seen.astype(int) - found)[inside].mean() < 1
                assert np.abs(level.astype(int) - found)[inside].mean() < 4
            else:
                assert np.array_equal(seen[inside], found[inside])
                is_lossy = name == "lossy2000"  # what its decoder says is stored, without further loss
                assert np.array_equal(level[inside], found[inside]) != is_lossy


def test_a_slide_is_described(packed: tuple[PackCase, Dataset]) -> None:
    case, dataset = packed
    series = slide_of(dataset, dataset.samples.find(case.sample_key(UIDS["jpeg"][0])))
    assert (series["kind"], series["modality"], series["codec"]) == ("slide", "SM", "tiles")
    assert (series["rows"], series["columns"], series["num_slices"]) == (900, 1100, 1)
    assert series["pixel_spacing_mm"] == pytest.approx([0.00025] * 2)
    assert series["slide"]["objective_power"] == 40
    first, second = series["slide"]["levels"]
    assert (first["encoding"], second["encoding"]) == ("jpeg_ycbcr", "jpeg_ycbcr")
    assert (first["num_tiles"], second["rows"], second["columns"]) == (15 * 18, 225, 275)
    assert 0 < first["num_tissue_tiles"] < first["num_stored_tiles"] < first["num_tiles"]
    sparse = slide_of(dataset, dataset.samples.find(case.sample_key(UIDS["native"][0])))
    assert sparse["slide"]["levels"][0]["num_stored_tiles"] <= len(SPARSE)
    assert sparse["slide"]["levels"][0]["encoding"] == "deflate"


def test_nothing_that_names_a_patient_leaves(
    packed: tuple[PackCase, Dataset], packed_tiffs: tuple[PackCase, Dataset]
) -> None:
    planted = [text.encode() for text in (*PLANTED, "19991231", "1999:12:31", "DOE", "BARCODE")]
    for case, _ in (packed, packed_tiffs):
        sources = b"".join(path.read_bytes() for path in case.dicom.rglob("*") if path.is_file())
        assert sum(text in sources for text in planted) >= 5
        for path in case.output.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not [text for text in planted if text in content or text.decode() in path.name], path


@pytest.mark.parametrize("place", ["p1/rgb.svs", "p2/ycbcr.svs", "p3/lzw.tif", "p6/jpeg2000.svs"])
def test_stored_tiles_of_tiff_are_those_that_openslide_sees(
    packed_tiffs: tuple[PackCase, Dataset], place: str
) -> None:
    case, dataset = packed_tiffs
    study = Path(place).stem
    row = dataset.samples.find(case.sample_key(study))
    with openslide.OpenSlide(case.dicom / place) as slide:
        found, stored = stored_tiles(dataset, row)
        seen = np.asarray(slide.read_region((0, 0), 0, (1100, 900)))[..., :3]
        inside = is_stored(stored, PIXELS.shape)
        assert inside.any()
        difference = np.abs(seen.astype(int) - found)[inside]
        assert difference.max() <= (0 if study in ("lzw", "jpeg2000") else 4)
    # Stored levels are slides of their own: the field's other tools open them.
    member = case.folder / f"{study}.tif"
    member.write_bytes(dataset.read_fields(row, ["s000.l00.tif"])["s000.l00.tif"])
    with openslide.OpenSlide(member) as slide:
        assert slide.dimensions == (1100, 900)
        (top, left) = np.argwhere(stored)[len(np.argwhere(stored)) // 2] * 64
        tile = np.asarray(slide.read_region((int(left), int(top)), 0, (64, 64)))[..., :3]
        assert np.abs(tile.astype(int) - found[top : top + 64, left : left + 64]).max() <= 4


def test_scales_and_other_images_of_tiff(packed_tiffs: tuple[PackCase, Dataset]) -> None:
    case, dataset = packed_tiffs
    said = {}
    for study in ("rgb", "ycbcr", "lzw", "jpeg2000", "ome", "blank"):
        series = slide_of(dataset, dataset.samples.find(case.sample_key(study)))
        levels = series["slide"]["levels"]
        said[study] = (
            series["pixel_spacing_mm"][0] * 1000,
            len(levels),
            levels[0]["encoding"],
            "slide_images_left_out" in series["flags"],
        )
        assert series["modality"] == "SM"
    assert said == {
        "rgb": (0.25, 2, "jpeg_ycbcr", True),
        "ycbcr": (0.25, 2, "jpeg_ycbcr", True),
        "lzw": (0.25, 2, "deflate", True),
        "jpeg2000": (0.25, 2, "deflate", True),
        "ome": (0.25, 2, "deflate", False),
        "blank": (0.25, 1, "jpeg_ycbcr", True),
    }
    found, stored = stored_tiles(dataset, dataset.samples.find(case.sample_key("ome")))
    assert np.array_equal(found[is_stored(stored, PIXELS.shape)], PIXELS[is_stored(stored, PIXELS.shape)])


def test_a_slide_without_tissue_is_kept_whole(packed_tiffs: tuple[PackCase, Dataset]) -> None:
    case, dataset = packed_tiffs
    series = slide_of(dataset, dataset.samples.find(case.sample_key("blank")))
    assert not series["slide"]["has_tissue"]
    (level,) = series["slide"]["levels"]
    assert (level["num_stored_tiles"], level["num_tissue_tiles"]) == (level["num_tiles"], 0)


@pytest.mark.slow
def test_chosen_resolutions_and_all_tiles(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    study, series = UIDS["jpeg"]
    for number, level in enumerate(pyramid(PIXELS, (1, 2, 8))):
        dicom_level(
            case.dicom / f"{number}.dcm", level, study=study, series=series, mpp=0.25 * (1, 2, 8)[number]
        )
    case.pack("slides.mpp=[0.5, 1.5]", "slides.tissue_only=false")
    dataset = case.open()
    described = slide_of(dataset, 0)
    (level,) = described["slide"]["levels"]  # the coarsest that is as fine as 0.5, and as 1.5
    assert (level["rows"], described["rows"]) == (450, 450)
    assert described["pixel_spacing_mm"] == pytest.approx([0.0005] * 2)
    assert level["num_stored_tiles"] == level["num_tiles"]


@pytest.mark.slow
def test_a_dataset_is_the_same_on_any_number_of_processes(
    packed: tuple[PackCase, Dataset], tmp_path: Path
) -> None:
    first, _ = packed
    case = PackCase(tmp_path)
    case.prepare()
    for path in first.dicom.rglob("*.dcm"):
        target = case.dicom / path.relative_to(first.dicom)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    case.pack("execution.num_processes=2")
    assert tree_digests(case.output / "shards") == tree_digests(first.output / "shards")
    assert {row["outcome"] for row in read_ledger(case.output)} == {"packed", "skipped"}


def test_a_damaged_tile_is_named(packed: tuple[PackCase, Dataset], tmp_path: Path) -> None:
    case, dataset = packed
    row = dataset.samples.find(case.sample_key(UIDS["jpeg"][0]))
    entry = dataset.manifest.shards[int(dataset.studies.gather("shard", row))]
    index = dataset.shard_index(int(dataset.studies.gather("shard", row)))
    (finest, _) = index.levels_of(int(dataset.studies.gather("row_in_shard", row)), 0)
    level = index.volume(finest)
    tile = int(np.flatnonzero(level.columns["num_bytes"])[3])
    copy = tmp_path / "copy"
    for path in case.output.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(case.output)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    shard = copy / entry.path
    content = bytearray(shard.read_bytes())
    content[int(level.starts[tile]) + 300] ^= 1
    shard.write_bytes(content)
    (damage,) = verify(str(copy)).damages
    assert "brick" in str(damage) or "crc32c" in str(damage)
