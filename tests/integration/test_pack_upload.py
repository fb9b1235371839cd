"""Packing into an object store: whole or no dataset there, nothing sent twice, nothing overwritten."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pydicom
import pytest

import shardflow as sf
from shardflow.errors import ChecksumError, ConfigError
from shardflow.format import Dataset
from shardflow.format.checks.verification import verify
from shardflow.format.copies.copying import copy_object
from shardflow.format.facts.columns import open_columns
from shardflow.format.manifest import FileEntry
from shardflow.packing import ArrayTask, upload
from shardflow.storage import open_store
from tests.dicom_factory import make_study
from tests.object_stores import s3_bucket
from tests.pack_case import PATIENCE_S, REPOSITORY, PackCase
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")

_NUMBERS = count()


def _make(folder: Path, prefix: str) -> PackCase:
    folder.mkdir()
    case = PackCase(folder)
    case.prepare()
    for number in range(5):
        name = f"{prefix}{number}"
        make_study(case.dicom / name, patient=name, num_slices=2 + number, seed=number + ord(prefix))
    case.write_faults()
    return case


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    return _make(tmp_path / "job", "P")


@pytest.fixture
def address(s3: str) -> str:
    return f"{s3_bucket(s3, f'pack-{os.getpid()}-{next(_NUMBERS)}')}/set"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the files that are sent, or read back, from now on."""
    paths: list[str] = []
    real: Callable[..., bool] = copy_object

    def counted(source: object, target: object, entry: FileEntry) -> bool:
        paths.append(entry.path)
        return real(source, target, entry)

    monkeypatch.setattr(upload, "copy_object", counted)
    return paths


def _write(case: PackCase, address: str) -> None:
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(f'upload_to = "{address}"\n{text}', encoding="utf-8")


def _check(case: PackCase, address: str) -> None:
    """The same files, and a whole dataset."""
    local, remote = open_store(case.output), open_store(address)
    names = [path for path in remote.list("") if path != "claim-000001.json"]
    assert names == [path for path in local.list("") if not path.startswith(".")]
    for path in names:
        assert remote.read(path) == local.read(path), path
    assert verify(address).is_whole


def test_the_dataset_is_there_and_is_sent_once(case: PackCase, address: str, sent: list[str]) -> None:
    setting = f"upload_to={address}"
    assert case.pack(setting).status == "packed"
    _check(case, address)
    assert len(sent) == len(set(sent))
    sent.clear()
    assert case.pack(setting).status == "already_packed"
    assert sent == []


@pytest.mark.parametrize("keeps_local", sampled([True, False], {False}))
def test_tables_are_there_with_every_version(case: PackCase, address: str, keeps_local: bool) -> None:
    """Joined by series, whose keys are read from shards, which need not be local any more."""
    uids = {
        pydicom.dcmread(path, stop_before_pixels=True).SeriesInstanceUID: path.parent.name
        for path in sorted(case.dicom.rglob("*"))
        if path.is_file()
    }
    rows = [f"{uid},{place}" for place, uid in enumerate(uids)]
    (case.folder / "grades.csv").write_text("\n".join(["SeriesInstanceUID,grade", *rows]), encoding="utf-8")
    entry = '[[tables]]\nfile = "grades.csv"\nname = "grades"\non = "series_instance_uid"\n'
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(f"{text}\n{entry}", encoding="utf-8")
    settings = (f"upload_to={address}", f"keep_local={str(keeps_local).lower()}")
    assert case.pack(*settings).status == "packed"
    make_study(case.dicom / "later", patient="later", num_slices=2, seed=99)
    assert case.pack(*settings, mode="append").notes == ()
    for version in (1, 2):
        dataset = Dataset.open(address, version=version)
        assert set(dataset.tables) == {"grades"}
        columns = open_columns(dataset)
        found = columns.stored("grades.grade")
        missing = [False] * 5 if found.is_missing is None else found.is_missing.tolist()
        assert sorted(
            value for value, gone in zip(found.values.tolist(), missing, strict=True) if not gone
        ) == list(range(5))
        assert len(missing) == 4 + version
    where = "any(grades.grade >= 2)"
    split = "+".join(name for name, span in dataset.splits.items() if span)
    spec = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
    fields = {"report": sf.Text(missing="pad")}
    with sf.Loader(dataset, split=split, seed=1, batch=spec, where=where, fields=fields) as loader:
        assert sum(1 for _ in loader) == 3
        assert set(loader.lock()["datasets"][0]["tables"]) == {"grades"}
    assert verify(address).is_whole


@pytest.mark.parametrize("point", sampled(["phase:samples", "phase:upload"], {"phase:samples"}))
def test_a_killed_job_goes_on_and_sends_nothing_twice(
    case: PackCase, address: str, sent: list[str], point: str
) -> None:
    _write(case, address)
    assert case.drive(point).returncode == -signal.SIGKILL
    remote = open_store(address)
    assert not [path for path in remote.list("") if path.startswith("manifest")]
    marks = {path.name for path in (case.output / ".work" / "uploaded").glob("[!.]*")}
    assert marks <= {path.replace("/", "-") for path in remote.list("")}
    case.pack()
    _check(case, address)
    assert sent
    assert not {path.replace("/", "-") for path in sent} & marks


def test_an_object_of_another_is_neither_overwritten_nor_taken(case: PackCase, address: str) -> None:
    case.pack()
    name = f"shards/{next((case.output / 'shards').glob('*.tar')).name}"
    shutil.rmtree(case.output)
    remote = open_store(address)
    other = bytes(10240)
    remote.put_new(name, other)
    with pytest.raises(ChecksumError, match=name):
        case.pack(f"upload_to={address}")
    assert remote.read(name) == other
    assert not [path for path in remote.list("") if path.startswith("manifest")]


def test_an_address_that_holds_another_dataset_is_refused_at_once(
    case: PackCase, address: str, tmp_path: Path
) -> None:
    case.pack(f"upload_to={address}")
    other = _make(tmp_path / "other", "Q")
    with pytest.raises(ConfigError, match="upload_to must be empty"):
        other.pack(f"upload_to={address}")
    assert not (other.output / "shards").exists()
    _check(case, address)


def test_of_two_jobs_with_one_address_one_is_refused(case: PackCase, address: str, tmp_path: Path) -> None:
    jobs = [case, _make(tmp_path / "other", "Q")]
    running = []
    for job in jobs:
        _write(job, address)
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "pipelines.pack", "--config", str(job.config_path), "--json"],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    said = [json.loads(process.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]) for process in running]
    codes = [process.returncode for process in running]
    assert sorted(codes) == [0, 2], said
    _check(jobs[codes.index(0)], address)
    assert "upload_to is claimed" in said[codes.index(2)]["error"]
    assert not list((jobs[codes.index(2)].output).glob("manifest*"))


@pytest.mark.slow
def test_tasks_send_their_shards_and_the_merge_the_rest(
    case: PackCase, address: str, sent: list[str]
) -> None:
    setting = f"upload_to={address}"
    for index in range(2):
        case.pack(setting, array_task=ArrayTask(index, 2))
    shards = set(sent)
    assert shards
    assert not [path for path in open_store(address).list("") if path.startswith("manifest")]
    sent.clear()
    case.pack(setting, is_merge=True)
    assert not shards & set(sent)
    _check(case, address)
