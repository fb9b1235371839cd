"""The tables of facts that packing writes: what they say, and that every kind of version has its own."""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset

from shardflow.format.checks.verification import verify
from shardflow.format.copies.copying import copy_dataset
from shardflow.format.dataset import Dataset
from shardflow.format.facts.making import attach_facts, series_of_study
from shardflow.format.facts.series import SERIES_NAME, SeriesManifest, encode_series, open_series
from shardflow.format.facts.studies import (
    STUDIES_NAME,
    StudiesManifest,
    StudyTable,
    encode_study_facts,
    facts_of_study,
    merge_study_facts,
    open_studies,
)
from shardflow.format.table import Table
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.storage import LocalStore, open_store
from tests.dicom_factory import MadeStudy, dicom_uid, make_study
from tests.object_stores import s3_bucket
from tests.pack_case import PackCase, tree_digests
from tests.sweeps import sampled
from tests.unit.format.tampering import flip

pytestmark = pytest.mark.usefixtures("packs_inline")

_NUMBERS = count()
_VIEWS = (("PA", ["L", "F"]), ("LL", ["A", "F"]))


def _radiographs(case: PackCase, number: int, *, views: tuple[int, ...] = (0, 1)) -> MadeStudy:
    """Write a study of one series of radiographs with these views."""

    def change(dataset: FileDataset, index: int) -> None:
        dataset.ViewPosition, dataset.PatientOrientation = _VIEWS[views[index]]

    return make_study(
        case.dicom / f"x{number}",
        patient=f"X{number}",
        modality="CR",
        num_slices=len(views),
        seed=number,
        change=change,
    )


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    """Radiographs of two views in one series, of one view, and CT."""
    case = PackCase(tmp_path / "job")
    case.folder.mkdir()
    case.prepare()
    for number in range(4):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=3, seed=number)
        _radiographs(case, number, views=(0, 1) if number % 2 else (1, 1))
    return case


def _expected(dataset: Dataset) -> tuple[bytes, bytes]:
    """Encode the facts of all samples at once, from their stored descriptions."""
    studies = [
        json.loads(dataset.read_fields(row, ["study.json"])["study.json"])
        for row in range(dataset.samples.num_samples)
    ]
    series = encode_series(series_of_study(study) for study in studies)
    table = encode_study_facts(map(facts_of_study, studies))
    one = StudyTable(Table(memoryview(table), name="all of them"))
    return series, merge_study_facts([(one, np.arange(len(studies)))], dataset)


def _stored(dataset: Dataset) -> tuple[bytes, bytes]:
    read, own = dataset.store.read, dataset.dataset_id
    return (
        bytes(read(f"{SeriesManifest.folder(own)}/{SERIES_NAME}")),
        bytes(read(f"{StudiesManifest.folder(own)}/{STUDIES_NAME}")),
    )


def test_packing_writes_what_the_studies_say(case: PackCase) -> None:
    case.pack("execution.num_processes=2")
    dataset = case.open()
    assert _stored(dataset) == _expected(dataset)
    assert open_series(dataset)[0].count_roles() == {"lateral": 2, "mixed": 2, "unknown": 4}
    report = verify(case.output)
    assert (report.damages, report.notes, report.num_study_tables) == ((), (), 1)
    # The command finds nothing to do, and makes the same bytes from nothing.
    before = tree_digests(case.output)
    assert attach_facts(dataset).num_shards_kept == len(dataset.manifest.shards)
    shutil.rmtree(case.output / "facts")
    assert attach_facts(dataset).num_shards_kept == 0
    assert tree_digests(case.output) == before


def test_an_earlier_study_of_the_person_is_known_through_every_version(case: PackCase) -> None:
    def visit(label: str, day: str) -> str:
        def change(dataset: FileDataset, _: int) -> None:
            dataset.StudyDate, dataset.PatientSex, dataset.PatientAge = day, "F", "061Y"

        folder = case.dicom / f"visit{label}"
        made = make_study(folder, patient="V", study=label, num_slices=2, seed=len(label), change=change)
        return case.sample_key(made.study_instance_uid)

    def earlier() -> dict[str, str | None]:
        dataset = case.open()
        keys = [dataset.samples.sample_key(row) for row in range(dataset.samples.num_samples)]
        rows = open_studies(dataset)[0].array("previous_row").tolist()
        assert verify(case.output).damages == ()
        assert _stored(dataset) == _expected(dataset)
        found = {key: None if row < 0 else keys[row] for key, row in zip(keys, rows, strict=True)}
        return {key: found[key] for key in visits if key in found}

    visits = [visit("A", "20200101"), visit("BB", "20210101")]
    case.pack("page.enabled=false")
    first, third = visits
    assert earlier() == {first: None, third: first}
    table, _ = open_studies(case.open())
    row = case.open().samples.find(third)
    days = table.array("study_day")
    assert days[row] - days[case.open().samples.find(first)] == 366
    assert (table.array("age_years")[row], table.column("sex").names) == (61, ("", "F"))
    # An older study that comes later takes its place in the order of days.
    visits.insert(1, visit("CCC", "20200601"))
    case.pack("page.enabled=false", mode="append")
    assert earlier() == {first: None, visits[1]: first, third: visits[1]}
    remove(case.output, case.private, Withdrawn(sample_keys=[visits[1]]))
    assert earlier() == {first: None, third: first}
    compact(case.output, case.private, deletes_old=True)
    assert earlier() == {first: None, third: first}


def test_images_of_a_series_have_views_of_their_own_only_where_they_differ(case: PackCase) -> None:
    case.pack()
    dataset = case.open()
    for row in range(dataset.samples.num_samples):
        study = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])
        for series in study["series"]:
            images = series.get("images")
            assert (images is not None) == (
                series["modality"] == "CR" and study["sample_key"] in _mixed_keys(case)
            )
            if images is None:
                continue
            # Their order is that of the pixels: the instance numbers say which file each one is.
            expected = [
                {"view_position": _VIEWS[number - 1][0], "patient_orientation": _VIEWS[number - 1][1]}
                for number in series["instance_numbers"]
            ]
            assert images == expected
    table, _ = open_series(dataset)
    roles = [table.vocabulary("image_role")[code] for code in table.array("image_role")]
    assert sorted(roles) == ["frontal", "frontal", "lateral", "lateral"]


def _mixed_keys(case: PackCase) -> set[str]:
    return {case.sample_key(dicom_uid("study", f"X{number}", "A")) for number in (1, 3)}


def test_an_append_a_removal_and_a_compaction_carry_it(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.pack("page.enabled=false")
    read: list[str] = []
    plain = Dataset.read_fields

    def watched(dataset: Dataset, row: int, *arguments: object) -> object:
        read.append(dataset.manifest.shards[int(dataset.studies.column("shard")[row])].name)
        return plain(dataset, row, *arguments)  # type: ignore[arg-type]

    withdrawn = _radiographs(case, 9)
    make_study(case.dicom / "p9", patient="P9", num_slices=2, seed=9)
    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "read_fields", watched)
        case.pack("page.enabled=false", mode="append")
    # New shards are known from their assembly, old ones from the version before: none is read again.
    assert read == []
    assert _stored(case.open()) == _expected(case.open())

    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "read_fields", watched)
        remove(case.output, case.private, Withdrawn(studies=[withdrawn.study_instance_uid]))
    former = {shard.name for shard in case.open().manifest.shards}
    assert _stored(case.open()) == _expected(case.open())

    read.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "read_fields", watched)
        compact(case.output, case.private, deletes_old=True)
    assert not former & {*read}
    dataset = case.open()
    assert _stored(dataset) == _expected(dataset)
    assert {path.name for path in (case.output / "facts" / "series").iterdir()} == {dataset.dataset_id}
    report = verify(case.output)
    assert (report.damages, report.notes, report.num_study_tables) == ((), (), 1)


def test_a_version_after_one_without_a_table_has_one(case: PackCase) -> None:
    case.pack()
    shutil.rmtree(case.output / "facts")
    _radiographs(case, 9)
    case.pack(mode="append")
    dataset = case.open()
    assert dataset.manifest_version == 2
    assert _stored(dataset) == _expected(dataset)
    assert verify(case.output).num_series_tables == 1


@pytest.mark.parametrize("keeps_local", sampled([True, False], {True}))
def test_it_is_published_with_its_version(case: PackCase, s3: str, keeps_local: bool) -> None:
    address = f"{s3_bucket(s3, f'facts-{os.getpid()}-{next(_NUMBERS)}')}/set"
    text = case.config_path.read_text(encoding="utf-8")
    settings = f'upload_to = "{address}"\nkeep_local = {str(keeps_local).lower()}\n{text}'
    case.config_path.write_text(settings, encoding="utf-8")
    case.pack()
    _radiographs(case, 9)
    case.pack(mode="append")
    dataset = Dataset.open(address)
    assert dataset.manifest_version == 2
    assert open_series(dataset)[0].num_samples == dataset.samples.num_samples
    assert _stored(dataset) == _expected(dataset)
    report = verify(address)
    assert (report.damages, report.num_series_tables) == ((), 2)
    remove(case.output, case.private, Withdrawn(sample_keys=[dataset.samples.sample_key(0)]))
    compact(case.output, case.private, deletes_old=True)
    dataset = Dataset.open(address)
    assert _stored(dataset) == _expected(dataset)
    assert {path.split("/")[2] for path in open_store(address).list("facts/")} == {dataset.dataset_id}


def test_a_copy_brings_it_along_and_damage_is_found(case: PackCase, tmp_path: Path) -> None:
    case.pack()
    report = copy_dataset(LocalStore(case.output), LocalStore(tmp_path / "copy"))
    assert [facts.name for facts in report.facts] == [SeriesManifest.name, StudiesManifest.name]
    assert _stored(Dataset.open(tmp_path / "copy")) == _stored(case.open())
    path = tmp_path / "copy" / SeriesManifest.folder(case.open().dataset_id) / SERIES_NAME
    flip(path, path.stat().st_size * 4)
    (damage,) = verify(tmp_path / "copy").damages
    assert damage.path.endswith(SERIES_NAME)


def test_a_table_of_other_numbers_of_series_is_damage(case: PackCase) -> None:
    case.pack()
    dataset = case.open()
    folder = case.output / SeriesManifest.folder(dataset.dataset_id)
    wrong = encode_series([[]] * dataset.samples.num_samples)
    (folder / SERIES_NAME).write_bytes(wrong)
    (folder / SeriesManifest.file_name).write_bytes(SeriesManifest.of(dataset.dataset_id, wrong).encode())
    (damage,) = verify(case.output).damages
    assert "another number of series" in damage.problem
    assert np.diff(open_series(dataset)[0].first_series()).sum() == 0
