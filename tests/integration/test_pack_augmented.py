"""The augmentation pool from packing to batches: the same bytes, only what is allowed, chosen by the plan."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import FileDataset

from shardflow.errors import ConfigError
from shardflow.fields.augmentation import ALLOWED, Draw, Warp, change_intensity
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.text import Text
from shardflow.format import Dataset, decode_array
from shardflow.format.keys import parse_slice_field, parse_variant_field, variant_field
from shardflow.loading import Loader, LoaderConfig, World
from shardflow.packing.studies.variants import study_names_a_side
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange, LocalStore
from tests.dicom_factory import make_study
from tests.integration.loader_support import HookedStore, flip_bit
from tests.pack_case import PackCase, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

_SIZE, _SLICES, _VARIANTS = (72, 80), 3, 2
_POOL = tuple(
    f"variants.augment.{setting}"
    for setting in (
        f"num_variants={_VARIANTS}",
        "rotate_deg=180.0",
        "zoom=1.0",
        "shift=1.0",
        "intensity=1.0",
        "elastic=0.05",
        "mirror=1.0",
        "flip=1.0",
    )
)
_ONE_SPLIT = ("splits.train=1", "splits.val=0", "shards.target_bytes=4MiB")
_STUDIES = {
    "ct": ("CT", "No effusion."),
    "mr": ("MR", "Unremarkable."),
    "breast": ("MG", "Dense tissue."),
    "sided": ("MG", "A mass in the left breast."),
    "other": ("BI", "Nothing."),
}


def _set_modality(modality: str, dataset: FileDataset, _index: int) -> None:
    dataset.Modality = modality


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackCase:
    case = PackCase(tmp_path_factory.mktemp("augmented"))
    case.prepare(has_reports=True)
    reports = {}
    for name, (modality, text) in _STUDIES.items():
        made = make_study(
            case.dicom / name,
            patient=name,
            modality="CT" if modality == "CT" else "MR",
            num_slices=_SLICES,
            size=_SIZE,
            change=partial(_set_modality, modality),
        )
        reports[made.study_instance_uid] = text
    case.write_reports(reports)
    case.pack(*_POOL, *_ONE_SPLIT)
    return case


def _by_text(dataset: Dataset) -> dict[str, int]:
    texts = [dataset.read_fields(row, ["report.txt"])["report.txt"].decode() for row in range(len(_STUDIES))]
    names = {text: name for name, (_, text) in _STUDIES.items()}
    return {names[text]: row for row, text in enumerate(texts)}


def _series(fields: dict[str, bytes]) -> dict[str, Any]:
    series: dict[str, Any] = json.loads(fields["study.json"])["series"][0]
    return series


def _draws(fields: dict[str, bytes]) -> list[Draw]:
    return [Draw.from_json(said) for said in _series(fields).get("variants", {}).get("augmented", [])]


def test_only_what_the_modality_allows_is_made(case: PackCase) -> None:
    dataset = case.open()
    for name, row in _by_text(dataset).items():
        fields, modality = dataset.read_fields(row), _STUDIES[name][0]
        draws = _draws(fields)
        if modality not in ALLOWED:
            assert not any(map(parse_variant_field, fields))
            continue
        allowed = ALLOWED[modality]
        assert len(draws) == _VARIANTS
        for draw in draws:
            assert abs(draw.rotate_deg) <= allowed.rotate_deg
            assert draw.zoom <= 1 + allowed.zoom
            assert max(abs(draw.shift_x), abs(draw.shift_y)) <= allowed.shift
            assert abs(draw.gain - 1) <= allowed.intensity
            assert draw.changes_intensity == bool(allowed.intensity)
            assert draw.elastic == allowed.elastic
            assert draw.mirror == (allowed.mirror and name != "sided")
            assert draw.flip == allowed.flip


def test_sides_are_found_in_reports_documents_and_annotations() -> None:
    assert not study_names_a_side([b"Normal.", b""], {"annotations": {"rois": [{"laterality": None}]}})
    assert study_names_a_side([b"", b"Effusion on the RIGHT."], {})
    assert study_names_a_side([b""], {"annotations": {"rois": [{"laterality": "L"}]}})
    assert study_names_a_side([b""], {"annotations": {"rois": [{"laterality": None, "label": "left lung"}]}})


def test_variants_are_the_slices_turned_and_count_as_nothing(case: PackCase) -> None:
    dataset = case.open()
    for row in range(len(_STUDIES)):
        fields = dataset.read_fields(row)
        series = _series(fields)
        assert sum(parse_slice_field(name) is not None for name in fields) == _SLICES
        assert int(dataset.samples.column("num_slices")[row]) == _SLICES
        spacing = series["pixel_spacing_mm"]
        for variant, draw in enumerate(_draws(fields), 1):
            warp = Warp(draw, *_SIZE, pixel_aspect=spacing[0] / spacing[1])
            for index in range(_SLICES):
                pixels = decode_array("b2nd", fields[f"s000.i{index:04d}.b2nd"])
                if draw.changes_intensity:
                    pixels = change_intensity(pixels, draw, tuple(series["display_range"]))
                stored = decode_array("b2nd", fields[variant_field(0, variant, index, "b2nd")])
                fill = -1024 if series["unit"] == "HU" else 0
                assert (stored == warp.image(pixels, fill=fill)).all()
                assert (stored != pixels).any()
        names = [name for name in fields if parse_variant_field(name)]
        # All slices of a variant are neighbours: one read.
        assert names == [variant_field(0, v, i, "b2nd") for v in (1, 2) for i in range(_SLICES)][: len(names)]


def test_the_same_bytes_for_any_number_of_processes(case: PackCase, tmp_path: Path) -> None:
    shutil.copytree(case.private, tmp_path / "private")
    for found in (tmp_path / "private").iterdir():
        if found.name != "secret.key":
            shutil.rmtree(found) if found.is_dir() else found.unlink()
    (tmp_path / "private").chmod(0o700)
    again = (f"output={tmp_path / 'again'}", f"private_dir={tmp_path / 'private'}")
    case.pack(*again, *_POOL, *_ONE_SPLIT, "execution.num_processes=3")
    assert tree_digests(tmp_path / "again") == tree_digests(case.output)


def _loader(
    dataset: Dataset, *, rank: int = 0, world: int = 1, pool: float = 0.7, threads: int = 2
) -> Loader:
    image = Slices(num_slices=_SLICES, size=_SIZE, dtype="float32", augment_pool=pool)
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=2, tail="mask")
    return Loader(
        dataset,
        split="train",
        batch=spec,
        seed=3,
        fields={"image": image, "report": Text(missing="pad")},
        world=World(rank=rank, world_size=world),
        config=LoaderConfig(num_threads=threads),
    )


def _seen(loader: Loader) -> dict[tuple[int, int, int], tuple[int, int, bytes]]:
    """What came at each place of the plan: row, variant and pixels."""
    return {
        (batch.epoch, batch.step, batch.micro): (
            int(batch.arrays["row"][0]),
            int(batch["image_variant"][0]),
            batch["image"][0].tobytes(),
        )
        for batch in loader
        if batch.arrays["weight"][0]
    }


def test_the_batch_holds_the_variant_that_it_says(case: PackCase) -> None:
    dataset = case.open()
    payloads = [dataset.read_fields(row) for row in range(len(_STUDIES))]
    seen: set[int] = set()
    with _loader(dataset) as loader:
        for epoch in range(4):
            loader.set_epoch(epoch)
            for row, variant, pixels in _seen(loader).values():
                fields = payloads[row]
                names = [
                    variant_field(0, variant, i, "b2nd") if variant else f"s000.i{i:04d}.b2nd"
                    for i in range(_SLICES)
                ]
                expected = np.stack([decode_array("b2nd", fields[name]) for name in names])
                assert pixels == expected.astype(np.float32).tobytes()
                seen.add(variant)
    assert seen == {0, 1, 2}


def test_every_resume_on_any_world_gets_the_same_variants(case: PackCase) -> None:
    dataset = case.open()
    with _loader(dataset) as loader:
        whole = _seen(loader)
        num_steps = loader.num_steps
    with _loader(dataset) as loader:
        states = [loader.state_dict()]
        states += [loader.state_dict() for batch in loader if batch.slot == 1]
    assert len(states) == num_steps + 1
    for step, state in enumerate(states[:-1]):
        for world in (1, 2):
            found: dict[tuple[int, int, int], tuple[int, int, bytes]] = {}
            for rank in range(world):
                with _loader(dataset, rank=rank, world=world, threads=1) as resumed:
                    resumed.load_state_dict(state)
                    found |= _seen(resumed)
            assert found == {place: value for place, value in whole.items() if place[1] >= step}


def _first_variant(dataset: Dataset) -> tuple[int, int]:
    """A row of which epoch 0 gets a variant, and which."""
    with _loader(dataset) as loader:
        return next((row, variant) for row, variant, _ in _seen(loader).values() if variant)


def test_a_damaged_variant_costs_its_slot_where_it_is_chosen(case: PackCase, tmp_path: Path) -> None:
    row, variant = _first_variant(case.open())
    shutil.copytree(case.output, tmp_path / "damaged")
    dataset = Dataset.open(tmp_path / "damaged")
    (shard,) = dataset.manifest.shards
    _, fields = dataset.sample_fields(row)
    name = variant_field(0, variant, 1, "b2nd")
    (field,) = [field for field in fields if field.name == name]
    flip_bit(tmp_path / "damaged" / shard.path, field.offset + field.num_bytes // 2)
    with _loader(dataset) as loader:
        for batch in loader:
            is_hit = int(batch.arrays["row"][0]) == row
            assert len(batch.quarantined) == is_hit
            if is_hit:
                assert batch.quarantined[0].field == name
                assert batch["image_variant"][0] == -1
                assert not batch["image"].any()
    with _loader(dataset, pool=0.0) as without:
        assert all("image_variant" not in batch and not batch.quarantined for batch in without)


def test_only_the_chosen_version_is_read(case: PackCase) -> None:
    spans: list[ByteRange] = []
    store = HookedStore(
        LocalStore(case.output), lambda path, ranges: spans.extend(ranges if path.endswith(".tar") else ())
    )
    dataset = Dataset(store, case.open().manifest)
    with _loader(dataset, threads=1) as loader:
        chosen = {row: variant for row, variant, _ in _seen(loader).values()}
        num_read = loader.counters.snapshot()["read"]["num_bytes"]
    expected = 0
    for row, variant in chosen.items():
        _, fields = dataset.sample_fields(row)
        for field in fields:
            slice_, varied = parse_slice_field(field.name), parse_variant_field(field.name)
            is_wanted = varied.variant == variant if varied else slice_ is None or not variant
            if slice_ or varied:
                stop = field.offset + field.num_bytes
                is_read = any(
                    span.offset <= field.offset and stop <= span.offset + span.num_bytes for span in spans
                )
                assert field.num_bytes > 4096  # else the reader reads over it
                assert is_read == is_wanted
            elif field.name not in ("study.json", "report.txt"):
                continue
            expected += field.num_bytes * is_wanted
    assert num_read == expected


def test_a_dataset_without_a_pool_is_refused(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "a", patient="a", num_slices=1)
    case.pack(*_ONE_SPLIT)
    assert case.open().manifest.extra["variants"] == {"small_px": 0, "thumbnail_px": 0}
    with pytest.raises(ConfigError, match=r"variants\.augment"):
        _loader(case.open())
