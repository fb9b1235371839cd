"""Consent withdrawn: the next version is without the study, compacted shards without its bytes, for ever."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.cli import main as cli
from shardflow.errors import ChecksumError, ConfigError, ManifestError
from shardflow.format import shard_files
from shardflow.format.checks.verification import verify
from shardflow.format.dataset import Dataset
from shardflow.format.entities import EntityRules
from shardflow.format.facts.studies import open_studies
from shardflow.format.manifest import load, versions
from shardflow.format.samples import SamplesTable
from shardflow.format.tokens import TokenIds
from shardflow.loading import open_view
from shardflow.packing.versions.base import Base
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.reports.entity_views import build_view
from shardflow.storage import LocalStore
from shardflow.training.ledger import LedgerMicroBatch, LedgerWriter
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.dicom_factory import MadeStudy, make_study
from tests.factories import sample_entries
from tests.forks import run
from tests.pack_case import PackCase, read_ledger, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

LOOSE = ("policy.max_quarantined_share=1.0", "shards.target_bytes=64KiB")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, list[MadeStudy]]:
    """Patients P0 to P3 with one study each, and P0 with another one."""
    case = PackCase(tmp_path_factory.mktemp("packed"))
    case.prepare(has_reports=True)
    studies = [
        make_study(case.dicom / f"p{n}", patient=f"P{n}", num_slices=3, seed=n, size=(32, 24))
        for n in range(4)
    ]
    studies.append(make_study(case.dicom / "p0b", patient="P0", study="B", num_slices=2))
    case.write_reports({study.study_instance_uid: f"Canary report {n}." for n, study in enumerate(studies)})
    case.pack(*LOOSE)
    return case, studies


@pytest.fixture
def case(packed: tuple[PackCase, list[MadeStudy]], tmp_path: Path) -> PackCase:
    """The dataset and its private folder in a folder of the test's own."""
    subprocess.run(["cp", "-a", f"{packed[0].folder}/.", str(tmp_path)], check=True)
    return PackCase(tmp_path)


@pytest.fixture(scope="module")
def studies(packed: tuple[PackCase, list[MadeStudy]]) -> list[MadeStudy]:
    return packed[1]


def _keys(case: PackCase, version: int | None = None) -> set[str]:
    samples = Dataset.open(case.output, version=version).samples
    return {samples.sample_key(row) for row in range(samples.num_samples)}


def _is_canonical(case: PackCase) -> bool:
    """Return whether the samples table has the bytes that follow from its rows."""
    dataset = case.open()
    splits = [shard.split for shard in dataset.manifest.shards]
    encoded = SamplesTable.encode(sample_entries(dataset.samples), shard_splits=splits)
    return encoded == (case.output / dataset.manifest.samples.path).read_bytes()


def _payloads(case: PackCase, study: MadeStudy) -> dict[str, bytes]:
    dataset = Dataset.open(case.output, version=1)
    return dataset.read_fields(dataset.samples.find(case.sample_key(study.study_instance_uid)))


def test_the_next_version_is_without_a_removed_study(case: PackCase, studies: list[MadeStudy]) -> None:
    before = tree_digests(case.output)
    summary = remove(case.output, case.private, Withdrawn(studies=[studies[1].study_instance_uid]))
    assert (summary.status, summary.manifest_version) == ("removed", 2)
    assert (summary.num_studies, summary.num_samples, summary.num_unknown) == (1, 1, 0)
    gone = case.sample_key(studies[1].study_instance_uid)
    assert _keys(case) == _keys(case, 1) - {gone}
    after = tree_digests(case.output)
    assert {name: after[name] for name in before} == before
    dataset = case.open()
    assert dataset.manifest.parent == load(LocalStore(case.output), 1).dataset_id
    assert sum(shard.num_removed for shard in dataset.manifest.shards) == 1
    assert {name: len(rows) for name, rows in dataset.splits.items()} == {
        name: numbers["num_samples"] for name, numbers in dataset.manifest.splits.items()
    }
    rows = [row for row in read_ledger(case.output, 2) if row["sample_key"] == gone]
    assert {(row["outcome"], row["reason"]) for row in rows} == {("skipped", "CONSENT_WITHDRAWN")}
    assert len(rows) == 4
    counts = dataset.manifest.counts
    assert (counts.packed, counts.skipped, counts.quarantined) == (15, 4, 0)
    # Every other sample reads as before.
    old = Dataset.open(case.output, version=1)
    for row in range(dataset.samples.num_samples):
        key = dataset.samples.sample_key(row)
        assert dataset.read_fields(row) == old.read_fields(old.samples.find(key))
    again = remove(case.output, case.private, Withdrawn(sample_keys=[gone]))
    assert (again.status, again.manifest_version) == ("nothing_new", 2)


def test_a_patient_is_removed_with_all_studies_and_stays_away(
    case: PackCase, studies: list[MadeStudy]
) -> None:
    summary = remove(case.output, case.private, Withdrawn(patients=["P0", "NOBODY"]))
    assert (summary.num_studies, summary.num_samples, summary.num_unknown) == (2, 2, 1)
    kept = {case.sample_key(studies[n].study_instance_uid) for n in (1, 2, 3)}
    assert _keys(case) == kept
    make_study(case.dicom / "p0c", patient="P0", study="C", num_slices=2)
    make_study(case.dicom / "copy", patient="P0", study="A", num_slices=1, series=7)
    make_study(case.dicom / "nobody", patient="NOBODY", num_slices=1)
    late = make_study(case.dicom / "p9", patient="P9", num_slices=1)
    assert _is_canonical(case)
    summary_2 = case.pack(*LOOSE, mode="append")
    assert _is_canonical(case)
    assert summary_2.reasons == {"CONSENT_WITHDRAWN": 3 + 2 + 2 + 2 + 1 + 1}
    assert _keys(case) == kept | {case.sample_key(late.study_instance_uid)}
    assert case.pack(*LOOSE, mode="retry").status == "nothing_new"
    compact(case.output, case.private, deletes_old=True)
    assert _is_canonical(case)
    assert case.pack(*LOOSE, mode="append").status == "nothing_new"
    assert len(_keys(case)) == 4


def _train(run: Path, keys: set[str]) -> None:
    """Leave behind what a run of a sample a step does."""
    with contextlib.closing(LedgerWriter(run, attempt=1, rank=0, world_size=1, start=0)) as writer:
        for step, key in enumerate(sorted(keys)):
            micro = LedgerMicroBatch(micro=0, keys=(key,), weights=(1.0,))
            writer.write(step, epoch=0, step=step, micro_batches=[micro])
    (run / "checkpoints" / f"step-{len(keys):08d}").mkdir(parents=True)


def test_ledgers_prove_which_model_a_removed_patient_is_in(
    case: PackCase, studies: list[MadeStudy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _train(first, _keys(case))
    dataset = Dataset.open(case.output)
    persons = open_studies(dataset)[0].array("patient_key")
    gone = {case.sample_key(studies[number].study_instance_uid) for number in (0, 4)}
    (patient,) = {persons[dataset.samples.find(key)].decode() for key in gone}

    def ask(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        options = ["--dataset", case.output, "--json"]
        code = cli.main(["ledger", *map(str, [*arguments, *options])])
        return code, json.loads(capsys.readouterr().out)

    by_shard = {
        name: ask("where", first, "--shard", name)[1]["num_draws"]
        for name in (shard.name for shard in dataset.manifest.shards)
    }
    assert sum(by_shard.values()) == 5
    code, found = ask("where", first, "--patient", patient)
    assert (code, {draw["sample_key"] for draw in found["described"]}) == (0, gone)
    code, found = ask("prove-removed", first, "--patient", patient, "--after-step", "4")
    # Nothing was drawn after the last step, but the next one may draw it.
    assert (code, found["num_draws"], found["in_newest_version"]) == (1, 0, 1)

    remove(case.output, case.private, Withdrawn(patients=["P0"]))
    _train(second, _keys(case))
    code, found = ask("prove-removed", first, "--patient", patient)
    assert (code, found["proven"], found["num_draws"]) == (1, False, 2)
    assert ask("prove-removed", first, "--patient", patient, "--after-step", "4")[0] == 0
    code, found = ask("prove-removed", second, "--patient", patient)
    assert (code, found["proven"], found["num_samples"], found["num_committed_steps"]) == (0, True, 2, 3)

    compact(case.output, case.private, deletes_old=True)
    arguments = ["ledger", "prove-removed", str(second), "--patient", patient, "--dataset", str(case.output)]
    assert cli.main(arguments) == cli.EXIT_CONFIGURATION
    assert "name the samples by --sample" in capsys.readouterr().err
    samples = [word for key in sorted(gone) for word in ("--sample", key)]
    assert ask("prove-removed", second, *samples)[0] == 0
    assert ask("prove-removed", first, *samples)[0] == 1


@pytest.mark.parametrize("who", ["study", "patient"])
def test_compact_leaves_no_byte_of_a_removed_study(
    case: PackCase, studies: list[MadeStudy], who: str
) -> None:
    gone = studies[0]
    payloads = _payloads(case, gone)
    assert len(payloads) == 7
    others = {key: _fields(case, key) for key in _keys(case) - {case.sample_key(gone.study_instance_uid)}}
    # Parts that nothing else holds by chance.
    kept = b"".join(payload for fields in others.values() for payload in fields.values())
    pieces = [piece for piece in _pieces(payloads) if piece not in kept]
    assert len(pieces) > 20
    is_patient = who == "patient"
    remove(
        case.output,
        case.private,
        Withdrawn(patients=["P0"]) if is_patient else Withdrawn(studies=[gone.study_instance_uid]),
    )
    summary = compact(case.output, case.private, deletes_old=True)
    assert (summary.status, summary.deleted_versions) == ("compacted", (1, 2))
    assert versions(LocalStore(case.output)) == [3]
    dataset = case.open()
    assert not any(shard.num_removed for shard in dataset.manifest.shards)
    # The pages of earlier versions show thumbnails.
    assert [path.name for path in case.output.glob("report*")] == ["report-000003.html"]
    data = {path: path.read_bytes() for path in case.output.rglob("*") if path.is_file()}
    for path, content in data.items():
        for name, payload in payloads.items():
            # Reports that say the same have the same findings.
            assert payload in kept or payload not in content, (path.name, name)
        assert not any(piece in content for piece in pieces), path.name
    assert {key: _fields(case, key) for key in _keys(case)} == {
        key: fields for key, fields in others.items() if key in _keys(case)
    }
    assert len(_keys(case)) == (3 if is_patient else 4)
    # The private folder knows that something was removed, and neither who nor where.
    (ledger,) = case.private.glob("inputs-*.jsonl")
    entries = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
    removed = [entry for entry in entries if entry["reason"] == "CONSENT_WITHDRAWN"]
    assert len(removed) == (7 if is_patient else 4)
    assert {key for entry in removed for key in entry} == {
        "identity",
        "input",
        "kind",
        "reason",
        "sample_key",
    }
    with pytest.raises(ManifestError, match="got 3 as its oldest: earlier ones were deleted"):
        Dataset.open(case.output, version=1)


def test_texts_of_removed_studies_have_no_tokens_and_no_entities(
    case: PackCase, studies: list[MadeStudy], tmp_path: Path
) -> None:
    train_tokenizer(case.open(), "train", 300, tmp_path / "bpe")
    tokenizer = TextTokenizer(tmp_path / "bpe")
    before = tokenize_dataset(case.open(), tokenizer)
    build_view(case.open(), EntityRules())
    remove(case.output, case.private, Withdrawn(studies=[studies[1].study_instance_uid]))
    dataset = case.open()
    after = tokenize_dataset(dataset, tokenizer)
    assert (before.num_samples, after.num_samples) == (5, 4)
    ids, offsets = TokenIds(dataset, tokenizer.digest).gather(np.arange(4))
    for row in range(4):
        (expected,) = tokenizer.encode([dataset.read_fields(row, ["report.txt"])["report.txt"].decode()])
        assert ids[offsets[row] : offsets[row + 1]].tolist() == expected
    compact(case.output, case.private, deletes_old=True)
    assert not any(path.is_file() for path in (case.output / "tokens").rglob("*"))
    assert not any(path.is_file() for path in (case.output / "views").rglob("*"))
    # What lies beside the newest version stays.
    build_view(case.open(), EntityRules())
    tokenize_dataset(open_view(case.open(), "entity"), tokenizer)
    stands = {path for folder in ("tokens", "views") for path in (case.output / folder).rglob("*.*")}
    compact(case.output, case.private, deletes_old=True)
    assert stands
    assert all(path.is_file() for path in stands)


def _fields(case: PackCase, key: str) -> dict[str, bytes]:
    dataset = Dataset.open(case.output)
    return dataset.read_fields(dataset.samples.find(key))


def _pieces(payloads: dict[str, bytes]) -> list[bytes]:
    return [payload[at : at + 64] for payload in payloads.values() for at in range(64, len(payload) - 64, 64)]


def test_compacting_in_two_runs_and_with_nothing_to_do(case: PackCase, studies: list[MadeStudy]) -> None:
    assert compact(case.output, case.private).status == "nothing_new"
    remove(case.output, case.private, Withdrawn(studies=[studies[2].study_instance_uid]))
    two = compact(case.output, case.private)
    assert (two.status, two.manifest_version, two.deleted_versions) == ("compacted", 3, ())
    assert versions(LocalStore(case.output)) == [1, 2, 3]
    assert not verify(str(case.output)).damages
    three = compact(case.output, case.private, deletes_old=True)
    assert (three.manifest_version, three.num_shards, three.deleted_versions) == (3, 0, (1, 2))
    manifest = case.open().manifest
    assert len({shard.name for shard in manifest.shards}) == len(manifest.shards)


def test_compact_renews_digests_that_an_older_shardflow_left_behind(
    case: PackCase, studies: list[MadeStudy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "MIN_NUM_BYTES", 1)
    remove(case.output, case.private, Withdrawn(studies=[studies[1].study_instance_uid]))
    with monkeypatch.context() as older:  # it knows no digests, and takes over what ``extra`` says
        older.setattr(shard_files, "MIN_NUM_BYTES", 1 << 40)
        older.setattr(Base, "extra", property(lambda base: {**base.manifest.extra}))
        compact(case.output, case.private)
    assert [case.output / "samples" / "samples-000002.blocks"] == list(case.output.rglob("*.blocks"))
    found = verify(str(case.output))
    assert not found.damages
    assert "samples-000002.blocks must hold the digests of samples/samples-000003.tbl" in found.notes[0]
    renewed = compact(case.output, case.private)
    assert (renewed.status, renewed.manifest_version, renewed.num_shards) == ("compacted", 4, 0)
    found = verify(str(case.output))
    assert (found.damages, found.notes) == ((), ())
    assert compact(case.output, case.private).status == "nothing_new"


def test_names_of_shards_are_never_used_again(case: PackCase, studies: list[MadeStudy]) -> None:
    """Not even where nothing is left of the last one: it is named by no version any more."""
    old = {shard.name for shard in case.open().manifest.shards}
    added = make_study(case.dicom / "p1b", patient="P1", study="B", num_slices=1)
    case.pack(*LOOSE, mode="append")
    (gone,) = {shard.name for shard in case.open().manifest.shards} - old
    remove(case.output, case.private, Withdrawn(studies=[added.study_instance_uid]))
    assert {shard.name for shard in case.open().manifest.shards} == old
    compact(case.output, case.private, deletes_old=True)
    assert not list((case.output / "shards").glob(f"{gone}.*"))
    make_study(case.dicom / "p1c", patient="P1", study="C", num_slices=1)
    case.pack(*LOOSE, mode="append")
    (new,) = {shard.name for shard in case.open().manifest.shards} - old
    assert (new[:-6], int(new[-6:])) == (gone[:-6], int(gone[-6:]) + 1)


def test_what_cannot_be_removed_is_refused(case: PackCase, studies: list[MadeStudy]) -> None:
    with pytest.raises(ConfigError, match="got none; give one"):
        remove(case.output, case.private, Withdrawn())
    with pytest.raises(ConfigError, match="got a removal of all"):
        remove(case.output, case.private, Withdrawn(patients=["P0", "P1", "P2", "P3"]))
    with pytest.raises(ConfigError, match=r"must match \[a-z0-9\]"):
        remove(case.output, case.private, Withdrawn(sample_keys=[studies[0].study_instance_uid]))
    (case.private / "secret.key").write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="secret key must be the one"):
        remove(case.output, case.private, Withdrawn(patients=["P0"]))
    assert "P0" not in repr(Withdrawn(patients=["P0"]))
    assert versions(LocalStore(case.output)) == [1]


class _Stop(Exception):  # noqa: N818 - stands for a kill
    pass


@pytest.mark.parametrize("compacts", [False, True], ids=["remove", "compact"])
def test_stopped_at_any_write_the_same_call_goes_on(
    case: PackCase, studies: list[MadeStudy], compacts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before and after each write and each deletion; readers always find a whole version."""
    gone = Withdrawn(studies=[studies[0].study_instance_uid])

    def run(case: PackCase) -> None:
        if compacts:
            compact(case.output, case.private, deletes_old=True)
        else:
            remove(case.output, case.private, gone)

    if compacts:
        remove(case.output, case.private, gone)
    start = tmp_path.with_name(f"{tmp_path.name}-start")
    subprocess.run(["cp", "-a", str(tmp_path), str(start)], check=True)
    run(case)
    expected = tree_digests(case.output)
    num_stops = 0
    for number in itertools.count(1):
        copy = PackCase(tmp_path / "copy")
        subprocess.run(["rm", "-rf", str(copy.folder)], check=True)
        subprocess.run(["cp", "-a", str(start), str(copy.folder)], check=True)
        with monkeypatch.context() as patch:
            counter = _stop_at(patch, number)
            try:
                run(copy)
            except _Stop:
                num_stops += 1
            else:
                assert counter.count < number
                break
        assert not verify(str(copy.output)).damages
        run(copy)
        assert tree_digests(copy.output) == expected
    assert num_stops >= (12 if compacts else 6)


class _Counter:
    count = 0


def _stop_at(patch: pytest.MonkeyPatch, number: int) -> _Counter:
    """Raise right after the n-th call that names, links, syncs or deletes a file."""
    import os

    counter = _Counter()
    for name in ("link", "replace", "unlink"):
        real = getattr(os, name)

        def stop(*args: object, real: object = real, **kwargs: object) -> None:
            real(*args, **kwargs)  # type: ignore[operator]
            counter.count += 1
            if counter.count == number:
                raise _Stop

        patch.setattr(os, name, stop)
    return counter


def test_a_damaged_shard_is_not_written_again(case: PackCase, studies: list[MadeStudy]) -> None:
    remove(case.output, case.private, Withdrawn(studies=[studies[0].study_instance_uid]))
    (holed,) = [shard for shard in case.open().manifest.shards if shard.num_removed]
    path = case.output / holed.path
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    keys = _keys(case)
    dataset = Dataset.open(case.output)
    number = list(dataset.manifest.shards).index(holed)
    index = dataset.shard_index(number)
    row = next(row for row in range(index.num_samples) if index.sample_key(row) in keys)
    data[index.fields(row)[0].offset] ^= 1
    path.write_bytes(data.tobytes())
    with pytest.raises(ChecksumError, match="must hold crc32c"):
        compact(case.output, case.private, deletes_old=True)
    assert versions(LocalStore(case.output)) == [1, 2]


def test_the_commands_take_identifiers_from_a_file_only(case: PackCase, studies: list[MadeStudy]) -> None:
    common = [str(case.output), "--private-dir", str(case.private)]

    def command(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return run(["-m", "shardflow.cli.main", *arguments], input=text)

    done = command("remove", *common, "--patients", "-", text="P1\n\n P1 \n")
    assert done.returncode == 0, done.stderr
    assert "removed: 1 sample," in done.stdout
    assert "P1" not in done.stdout + done.stderr
    (case.folder / "list.txt").write_text(studies[2].study_instance_uid, encoding="utf-8-sig")
    done = command("remove", *common, "--studies", str(case.folder / "list.txt"), "--json")
    assert json.loads(done.stdout)["manifest_version"] == 3
    assert command("remove", *common).returncode == 2
    done = command("compact", *common, "--delete-old")
    assert done.returncode == 0, done.stderr
    assert "deleted versions: 1, 2, 3" in done.stdout
    assert len(_keys(case)) == 3
