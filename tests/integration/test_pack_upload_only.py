"""Packing into an object store that holds the only copy: little lies here, every version is made there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from shardflow.errors import ChecksumError, ConfigError, StorageError
from shardflow.format.checks.verification import verify
from shardflow.format.copies.copying import copy_object
from shardflow.format.dataset import Dataset
from shardflow.format.facts.series import SeriesManifest
from shardflow.format.facts.studies import StudiesManifest
from shardflow.format.manifest import FileEntry, load, versions
from shardflow.packing import ArrayTask, upload
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.storage import ByteStore, LocalStore, open_store
from tests.dicom_factory import make_study
from tests.object_stores import s3_bucket
from tests.pack_case import PackCase, tree_digests
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")

_NUMBERS = count()
NUM_STUDIES = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of a patient each; every study becomes a shard of its own."""
    case = PackCase(tmp_path_factory.mktemp("made") / "job")
    case.folder.mkdir()
    case.prepare()
    for number in range(NUM_STUDIES):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=2, seed=number)
    case.write_faults()
    text = case.config_path.read_text(encoding="utf-8").replace('"10KiB"', '"4KiB"')
    case.config_path.write_text(text, encoding="utf-8")
    return case.folder


@pytest.fixture
def address(s3: str) -> str:
    return f"{s3_bucket(s3, f'away-{os.getpid()}-{next(_NUMBERS)}')}/set"


@pytest.fixture
def case(made: Path, tmp_path: Path, address: str) -> PackCase:
    shutil.copytree(made, tmp_path / "job")
    case = PackCase(tmp_path / "job")
    text = case.config_path.read_text(encoding="utf-8")
    settings = f'upload_to = "{address}"\nkeep_local = false\n{text}'
    case.config_path.write_text(settings, encoding="utf-8")
    return case


def _shards_here(case: PackCase) -> list[str]:
    return sorted(path.name for path in (case.output / "shards").glob("*"))


def _objects(address: str) -> dict[str, bytes]:
    store = open_store(address)
    return {path: store.read(path) for path in store.list("") if not path.startswith("claim-")}


def _keys(address: str) -> set[str]:
    samples = Dataset.open(address).samples
    return {samples.sample_key(row) for row in range(samples.num_samples)}


def _check_whole(case: PackCase, address: str) -> None:
    """A whole dataset there, nothing beside it, and no shard here."""
    assert verify(address).is_whole
    store = open_store(address)
    manifests = [load(store, number) for number in versions(store)]
    named = {entry.path for manifest in manifests for entry in manifest.files()}
    for folder, table in ((SeriesManifest.folder, "series.tbl"), (StudiesManifest.folder, "studies.tbl")):
        named |= {
            f"{folder(one.dataset_id)}/{name}" for one in manifests for name in ("manifest.json", table)
        }
    assert {path for path in _objects(address) if not path.startswith("manifest-")} == named
    assert _shards_here(case) == []
    assert not (case.output / ".work").exists()
    local = LocalStore(case.output)
    assert [load(local, number).dataset_id for number in versions(local)] == [
        manifest.dataset_id for manifest in manifests
    ]


def test_the_only_copy_is_there_and_has_the_bytes_of_a_local_one(
    case: PackCase, address: str, made: Path, tmp_path: Path
) -> None:
    assert case.pack().status == "packed"
    _check_whole(case, address)
    shutil.copytree(made, tmp_path / "local")
    local = PackCase(tmp_path / "local")
    local.pack()
    assert _objects(address) == {
        name: (local.output / name).read_bytes() for name in tree_digests(local.output)
    }
    assert case.pack().status == "already_packed"
    _check_whole(case, address)


def test_few_shards_lie_here_however_slowly_they_leave(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real: Callable[..., bool] = copy_object

    def slow(source: object, target: object, entry: FileEntry) -> bool:
        time.sleep(0.15)
        seen.append(sum(name.endswith(".tar") for name in _shards_here(case)))
        return real(source, target, entry)

    monkeypatch.setattr(upload, "copy_object", slow)
    monkeypatch.setattr(upload, "MAX_WAITING_SHARDS", 2)
    case.pack()
    # Two on their way; one that stands and cannot join them; one that the process assembles meanwhile.
    assert max(seen) <= 4 < NUM_STUDIES


@pytest.mark.parametrize(
    "point",
    sampled(["advance:studies:5", "phase:samples", "phase:upload", "cleaning"], {"advance:studies:5"}),
)
def test_a_killed_job_goes_on_though_its_shards_have_left(
    case: PackCase, address: str, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    assert case.drive(point).returncode == -signal.SIGKILL
    sent: list[str] = []
    real: Callable[..., bool] = copy_object

    def counted(source: object, target: object, entry: FileEntry) -> bool:
        sent.append(entry.path.replace("/", "-"))
        return real(source, target, entry)

    marks = {path.name for path in (case.output / ".work" / "uploaded").glob("[!.]*")}
    monkeypatch.setattr(upload, "copy_object", counted)
    case.pack()
    _check_whole(case, address)
    assert len(_keys(address)) == NUM_STUDIES
    assert not marks & set(sent)


def test_a_version_goes_where_the_dataset_is_and_nowhere_else(case: PackCase, address: str) -> None:
    case.pack()
    make_study(case.dicom / "new", patient="N", num_slices=2)
    with pytest.raises(ConfigError, match="upload_to must be the address that holds the shards"):
        case.pack(f"upload_to={address}-2", mode="append")
    with pytest.raises(ConfigError, match="keep_local = false needs upload_to"):
        case.pack("upload_to=", mode="append")
    assert case.pack(mode="append").manifest_version == 2
    _check_whole(case, address)
    assert len(_keys(address)) == NUM_STUDIES + 1


@pytest.mark.parametrize("keeps_local", [False, True])
def test_who_withdraws_is_gone_from_there_too(case: PackCase, address: str, keeps_local: bool) -> None:
    # All patients of a split in one shard: it is written again and not only left out.
    case.pack(f"keep_local={str(keeps_local).lower()}", "shards.target_bytes=1MiB")
    gone = case.key.surrogate("patient", "P3")
    (key,) = _keys_of(address, gone)
    samples = Dataset.open(address)
    payloads = samples.read_fields(samples.samples.find(key))
    assert remove(case.output, case.private, Withdrawn(patients=["P3"])).num_samples == 1
    assert key not in _keys(address)
    assert versions(open_store(address)) == [1, 2]
    assert compact(case.output, case.private, deletes_old=True).deleted_versions == (1, 2)
    assert versions(open_store(address)) == [load(LocalStore(case.output)).manifest_version]
    assert verify(address).is_whole
    assert len(_keys(address)) == NUM_STUDIES - 1
    for path, data in _objects(address).items():
        for name, payload in payloads.items():
            assert payload not in data, (path, name)
    if not keeps_local:
        _check_whole(case, address)


def _keys_of(address: str, patient: str) -> list[str]:
    dataset = Dataset.open(address)
    return [
        dataset.samples.sample_key(row)
        for row in range(dataset.samples.num_samples)
        if json.loads(dataset.read_fields(row, ["study.json"])["study.json"])["patient"]["patient_key"]
        == patient
    ]


@pytest.mark.parametrize("after", sampled(["finish", "send", "erase_unnamed"], {"finish"}))
def test_a_withdrawal_that_stops_goes_on(
    case: PackCase, address: str, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Stopped before each step at the address: by the same two calls it is done."""
    case.pack("shards.target_bytes=1MiB")

    def withdraw() -> None:
        remove(case.output, case.private, Withdrawn(patients=["P3"]))
        compact(case.output, case.private, deletes_old=True)

    def stop(*_: object) -> None:
        raise StorageError("the store must answer, got nothing; run the job again.")

    with monkeypatch.context() as patch:
        patch.setattr(upload.Uploader, after, stop)
        with pytest.raises(StorageError):
            withdraw()
    assert verify(address).is_whole
    withdraw()
    _check_whole(case, address)
    assert len(_keys(address)) == NUM_STUDIES - 1


def test_what_a_stopped_append_sent_is_erased_by_a_removal(case: PackCase, address: str) -> None:
    case.pack()
    make_study(case.dicom / "n1", patient="N1", num_slices=2, seed=91)
    make_study(case.dicom / "n2", patient="N2", num_slices=2, seed=92)
    assert case.drive("phase:samples", mode="append").returncode == -signal.SIGKILL
    before = set(_objects(address))
    remove(case.output, case.private, Withdrawn(patients=["N1"]))
    assert len(before - set(_objects(address))) == 4  # two shards with their indexes
    _check_whole(case, address)
    # Under the numbers of those shards others stand now.
    assert case.pack(mode="append").reasons == {"CONSENT_WITHDRAWN": 2}
    _check_whole(case, address)
    assert len(_keys(address)) == NUM_STUDIES + 1


def test_a_shard_that_arrived_damaged_does_not_leave(case: PackCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaging(source: LocalStore, target: ByteStore, entry: FileEntry) -> bool:
        target.put_new(entry.path, bytes(entry.num_bytes))
        return True

    monkeypatch.setattr(upload, "copy_object", damaging)
    with pytest.raises(ChecksumError):
        case.pack()
    assert _shards_here(case)
    assert not list((case.output / ".work").glob("uploaded/*"))


@pytest.mark.slow
def test_shards_of_tasks_leave_and_the_merge_knows_it(case: PackCase, address: str) -> None:
    for index in range(2):
        assert case.pack(array_task=ArrayTask(index, 2)).status == "task_done"
        assert _shards_here(case) == []
    assert case.pack(is_merge=True).status == "packed"
    _check_whole(case, address)
    assert len(_keys(address)) == NUM_STUDIES
