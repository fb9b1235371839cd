"""Next versions: `append` takes what is new, `retry` what is good now, and neither touches the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.format.checks.verification import verify
from shardflow.format.dataset import Dataset
from shardflow.format.manifest import load
from shardflow.packing.scan import NUM_BUCKETS
from shardflow.storage import LocalStore
from tests.dicom_factory import MadeStudy, make_study, truncate
from tests.pack_case import PackCase, read_ledger, tree_digests
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")

LOOSE = "policy.max_quarantined_share=1.0"


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    return case


def _study(case: PackCase, number: int, *, study: str = "A", num_slices: int = 3) -> MadeStudy:
    folder = case.dicom / f"p{number}-{study}"
    return make_study(folder, patient=f"P{number}", study=study, num_slices=num_slices, seed=number)


def _inputs(case: PackCase, *names: str) -> str:
    return f"inputs.dicom={json.dumps([str(case.folder / name) for name in names])}"


def _keys(case: PackCase, version: int | None = None) -> set[str]:
    samples = Dataset.open(case.output, version=version).samples
    return {samples.sample_key(row) for row in range(samples.num_samples)}


def _rows(case: PackCase, version: int) -> dict[str, tuple[str, str | None, str | None]]:
    rows = read_ledger(case.output, version)
    assert len({row["input"] for row in rows}) == len(rows)
    return {row["input"]: (row["outcome"], row["reason"], row["sample_key"]) for row in rows}


def _check_counts(case: PackCase, version: int) -> None:
    """P2, for the version and its ledger."""
    counts = load(LocalStore(case.output), version).counts
    outcomes = [outcome for outcome, _, _ in _rows(case, version).values()]
    assert (counts.packed, counts.skipped, counts.quarantined) == tuple(
        outcomes.count(name) for name in ("packed", "skipped", "quarantined")
    )


def test_new_studies_become_new_shards_and_nothing_else_changes(case: PackCase) -> None:
    first = [_study(case, number) for number in range(4)]
    (case.dicom / "note.txt").write_text("x", encoding="utf-8")
    reports = {study.study_instance_uid: f"Report {n}." for n, study in enumerate(first)}
    case.write_reports(reports)
    one = case.pack()
    before = tree_digests(case.output)
    second = [_study(case, number) for number in range(4, 7)]
    case.write_reports({second[0].study_instance_uid: "New.", **reports})  # every line moved down by one
    two = case.pack(mode="append")
    assert (two.status, two.manifest_version, two.num_known_inputs) == ("packed", 2, 4 * 3 + 1 + 4)
    assert two.inputs == {"total": 27, "packed": 26, "skipped": 1, "quarantined": 0}
    after = tree_digests(case.output)
    assert {name: after[name] for name in before} == before
    assert {"manifest-000002.json", "ledger-000002.jsonl", "samples/samples-000002.tbl"} <= set(after)
    manifest = case.open().manifest
    assert manifest.parent == one.dataset_id
    old = load(LocalStore(case.output), 1)
    assert set(old.shards) < set(manifest.shards)
    new = set(manifest.shards) - set(old.shards)
    for split in ("train", "val"):
        numbers = sorted(int(shard.name[-6:]) for shard in manifest.shards if shard.split == split)
        assert numbers == list(range(len(numbers)))
        assert all(
            int(shard.name[-6:]) >= old.splits.get(split, {"num_shards": 0})["num_shards"]
            for shard in new
            if shard.split == split
        )
    assert _keys(case) == {case.sample_key(study.study_instance_uid) for study in first + second}
    assert _keys(case, 1) == {case.sample_key(study.study_instance_uid) for study in first}
    _check_counts(case, 1)
    _check_counts(case, 2)
    # Readers of the new version find the new report with its study.
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(second[0].study_instance_uid))
    assert dataset.read_fields(row, ["report.txt"]) == {"report.txt": b"New."}


def test_appending_what_is_there_says_so(case: PackCase) -> None:
    studies = [_study(case, number) for number in range(2)]
    case.write_reports({studies[0].study_instance_uid: "Text."})
    one = case.pack()
    before = tree_digests(case.output)
    again = case.pack(mode="append")
    assert (again.status, again.exit_code, again.dataset_id) == ("nothing_new", 0, one.dataset_id)
    assert again.num_known_inputs == 7
    assert tree_digests(case.output) == before
    # Moved and renamed folders hold the same inputs.
    case.dicom.rename(case.folder / "elsewhere")
    assert case.pack(_inputs(case, "elsewhere"), mode="append").status == "nothing_new"


def test_append_is_no_resume_and_pack_is_no_append(case: PackCase) -> None:
    _study(case, 0)
    case.write_reports({})
    with pytest.raises(ConfigError, match="without --append"):
        case.pack(mode="append")
    case.pack()
    _study(case, 1)
    with pytest.raises(ConfigError, match="add --append"):
        case.pack()


@pytest.mark.parametrize("override", ["splits.val=39", "shards.target_bytes=20KiB"])
def test_other_settings_are_refused(case: PackCase, override: str) -> None:
    """Other parts of the splits would move patients (P6)."""
    _study(case, 0)
    case.write_reports({})
    case.pack()
    _study(case, 1)
    with pytest.raises(ConfigError, match="with other settings"):
        case.pack(override, mode="append")


def test_another_key_and_a_lost_private_ledger_are_refused(case: PackCase) -> None:
    _study(case, 0)
    case.write_reports({})
    case.pack()
    _study(case, 1)
    (ledger,) = case.private.glob("inputs-*.jsonl")
    kept = ledger.read_bytes()
    ledger.write_bytes(kept[: kept.index(b"\n") + 1])
    with pytest.raises(FormatError, match="does not match"):
        case.pack(mode="append")
    ledger.write_bytes(kept[:-20])
    with pytest.raises(FormatError, match="holds a damaged line"):
        case.pack(mode="append")
    ledger.unlink()
    with pytest.raises(ConfigError, match="found none"):
        case.pack(mode="append")
    (case.private / "secret.key").write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="another secret key"):
        case.pack(mode="append")


def test_a_known_patient_stays_in_its_split(case: PackCase) -> None:
    split = {n: case.key.bucket("split", f"P{n}", NUM_BUCKETS) < 0.6 * NUM_BUCKETS for n in range(40)}
    numbers = [n for n in split if split[n]][:2] + [n for n in split if not split[n]][:2]
    for number in numbers:
        _study(case, number)
    case.write_reports({})
    case.pack()
    for number in numbers:
        _study(case, number, study="B")
    case.pack(mode="append")
    dataset = case.open()
    split_of = {
        dataset.samples.sample_key(row): name for name, rows in dataset.splits.items() for row in rows
    }
    assert len(set(split_of.values())) == 2
    uids = {
        (number, label): _study(case, number, study=label).study_instance_uid
        for number in numbers
        for label in "AB"
    }
    for number in numbers:
        assert split_of[case.sample_key(uids[number, "A"])] == split_of[case.sample_key(uids[number, "B"])]


def test_a_packed_study_is_not_touched_and_what_is_new_of_it_is_named(case: PackCase) -> None:
    study = _study(case, 0)
    case.write_reports({study.study_instance_uid: "Text."})
    case.pack()
    make_study(case.dicom / "more", patient="P0", num_slices=2, series=2)
    case.write_reports([(study.study_instance_uid, text) for text in ("Text.", "Text.", "Addendum.", " ")])
    stopped = case.pack(mode="append")
    assert (stopped.status, stopped.exit_code) == ("quarantine_limit", 3)
    assert not (case.output / "manifest-000002.json").exists()
    summary = case.pack(LOOSE, mode="append")
    assert summary.reasons == {"DUPLICATE_REPORT": 1, "EMPTY_REPORT": 1, "STUDY_ALREADY_PACKED": 3}
    assert summary.studies == {"packed": 1, "skipped": 0, "quarantined": 0}
    old, new = _rows(case, 1), _rows(case, 2)
    assert {name: new[name] for name in old} == old
    assert case.open().manifest.shards == load(LocalStore(case.output), 1).shards
    _check_counts(case, 2)
    assert case.pack(LOOSE, mode="append").status == "nothing_new"


def test_folders_that_repeat_names_hold_other_inputs(case: PackCase) -> None:
    """A second delivery often has the same file names, and a table that begins at line 2 again."""
    one = make_study(case.dicom, patient="P1", num_slices=2, shuffle_names=False)
    case.write_reports({one.study_instance_uid: "One."})
    case.pack()
    two = make_study(case.folder / "second", patient="P2", num_slices=2, shuffle_names=False)
    case.write_reports({two.study_instance_uid: "Two."})
    summary = case.pack(_inputs(case, "second"), mode="append")
    assert summary.inputs == {"total": 6, "packed": 6, "skipped": 0, "quarantined": 0}
    assert len(_rows(case, 2)) == 6
    assert len(_keys(case)) == 2
    # Both folders together hold nothing new, in any order.
    for folders in (("dicom", "second"), ("second", "dicom")):
        assert case.pack(_inputs(case, *folders), mode="append").status == "nothing_new"


def test_a_report_without_images_waits_for_them(case: PackCase) -> None:
    _study(case, 0)
    late = make_study(case.folder / "late", patient="P9", num_slices=2)
    case.write_reports({late.study_instance_uid: "Late."})
    assert case.pack().reasons == {"REPORT_WITHOUT_STUDY": 1}
    summary = case.pack(_inputs(case, "dicom", "late"), mode="append")
    assert summary.reasons == {}
    assert len(_rows(case, 2)) == 3 + 2 + 1
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(late.study_instance_uid))
    assert dataset.read_fields(row, ["report.txt"]) == {"report.txt": b"Late."}


def test_a_study_without_report_is_packed_when_one_is_found(case: PackCase) -> None:
    first, second = _study(case, 0), _study(case, 1)
    case.write_reports({first.study_instance_uid: "One."})
    strict = "policy.require_report=true"
    assert case.pack(strict).reasons == {"STUDY_WITHOUT_REPORT": 3}
    case.write_reports({first.study_instance_uid: "One.", second.study_instance_uid: "Two."})
    assert case.pack(strict, mode="append").reasons == {}
    assert len(_keys(case)) == 2


def test_a_study_of_which_a_part_lies_elsewhere_is_packed_whole(case: PackCase) -> None:
    """The other files are fetched from where they lay when the study was quarantined."""
    _study(case, 0)
    broken = _study(case, 1, num_slices=4)
    case.write_reports({})
    whole = broken.files[2].read_bytes()
    truncate(broken.files[2])
    case.pack(LOOSE)
    (case.folder / "resent").mkdir()
    (case.folder / "resent" / "again.dcm").write_bytes(whole)
    summary = case.pack(LOOSE, _inputs(case, "resent"), mode="append")
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(broken.study_instance_uid))
    assert int(dataset.samples.gather("num_slices", row)) == 4
    # The cut file is a broken copy of the good one, and still named.
    assert summary.reasons == {"PIXEL_DATA_TRUNCATED": 1}
    assert len(_rows(case, 2)) == 8
    # Where its other files are gone, a study is not packed in part.
    third = _study(case, 2, num_slices=4)
    whole = third.files[1].read_bytes()
    truncate(third.files[1])
    case.pack(LOOSE, mode="append")
    third.files[3].unlink()
    (case.folder / "resent" / "other.dcm").write_bytes(whole)
    summary = case.pack(LOOSE, _inputs(case, "resent"), mode="append")
    assert case.sample_key(third.study_instance_uid) not in _keys(case)
    assert summary.reasons["FILE_UNREADABLE"] == 1


def test_a_report_that_is_not_at_hand_keeps_its_study_out(case: PackCase) -> None:
    study = _study(case, 0)
    _study(case, 1)
    whole = study.files[0].read_bytes()
    truncate(study.files[0])
    case.write_reports({study.study_instance_uid: "Known."})
    case.pack(LOOSE)
    study.files[0].write_bytes(whole)
    case.write_reports({})
    summary = case.pack(LOOSE, mode="append")
    assert summary.reasons == {"STUDY_INCOMPLETE": 3, "STUDY_QUARANTINED": 1}
    case.write_reports({study.study_instance_uid: "Known."})
    assert case.pack(mode="retry").reasons == {}
    assert len(_keys(case)) == 2


def test_retry_packs_what_was_repaired_and_nothing_else(case: PackCase) -> None:
    _study(case, 0)
    first, second = _study(case, 1), _study(case, 2)
    whole = [study.files[0].read_bytes() for study in (first, second)]
    for study in (first, second):
        truncate(study.files[0])
    case.write_reports([(first.study_instance_uid, "Text."), (second.study_instance_uid, "Text.")])
    one = case.pack(LOOSE)
    before = tree_digests(case.output)
    same = case.pack(mode="retry")
    assert (same.status, same.exit_code, same.dataset_id) == ("nothing_new", 0, one.dataset_id)
    assert tree_digests(case.output) == before
    first.files[0].write_bytes(whole[0])
    _study(case, 3)  # new: not for retry
    two = case.pack(mode="retry")
    assert (two.status, two.manifest_version) == ("packed", 2)
    assert two.inputs == {"total": 11, "packed": 7, "skipped": 0, "quarantined": 4}
    assert two.reasons == {"PIXEL_DATA_TRUNCATED": 1, "STUDY_QUARANTINED": 3}
    assert case.sample_key(first.study_instance_uid) in _keys(case)
    assert set(_rows(case, 2)) == set(_rows(case, 1))
    after = tree_digests(case.output)
    assert {name: after[name] for name in before} == before
    second.files[0].write_bytes(whole[1])
    assert case.pack(mode="retry").reasons == {}
    assert case.pack(mode="retry").status == "nothing_new"
    assert case.pack(mode="append").inputs["total"] == 14
    _check_counts(case, 4)


def test_retry_takes_up_a_file_whose_study_nobody_knew(case: PackCase) -> None:
    _study(case, 0)
    study = _study(case, 1, num_slices=1)
    whole = study.files[0].read_bytes()
    study.files[0].write_bytes(whole[:150])
    case.write_reports({})
    assert case.pack(LOOSE).reasons == {"HEADER_UNREADABLE": 1}
    study.files[0].write_bytes(whole)
    assert case.pack(mode="retry").inputs == {"total": 4, "packed": 4, "skipped": 0, "quarantined": 0}


def test_retry_lifts_recorded_deaths(case: PackCase) -> None:
    studies = [_study(case, number) for number in range(3)]
    case.write_reports({})
    key = case.sample_key(studies[1].study_instance_uid)
    case.write_faults(study={key: "kill"})
    assert case.pack(LOOSE, handlers="tests.pack_faults:make_handler").reasons == {"WORKER_KILLED": 3}
    assert case.pack(mode="append").status == "nothing_new"
    # It dies again: recorded again, and nothing is new.
    assert case.pack(mode="retry", handlers="tests.pack_faults:make_handler").status == "nothing_new"
    assert key in (case.private / "resource_outcomes.jsonl").read_text(encoding="utf-8")
    case.write_faults()
    assert case.pack(mode="retry").reasons == {}
    assert key in _keys(case)
    assert not (case.private / "retrying").exists()


@pytest.mark.parametrize("num_processes", sampled([1, 2, 5], {5}))
def test_the_number_of_processes_does_not_show(tmp_path: Path, num_processes: int) -> None:
    """Against a golden job with one process; the bytes of both versions."""
    digests = []
    for name, processes in (("golden", 1), ("other", num_processes)):
        case = PackCase(tmp_path / name)
        case.folder.mkdir()
        case.prepare()
        for number in range(3):
            _study(case, number)
        case.pack()
        for number in range(3, 7):
            _study(case, number)
        case.pack(f"execution.num_processes={processes}", mode="append")
        digests.append(tree_digests(case.output))
    assert digests[0] == digests[1]


def test_a_dry_run_says_what_would_be_and_writes_no_dataset(case: PackCase) -> None:
    for number in range(4):
        _study(case, number)
    study = _study(case, 4)
    truncate(study.files[0])
    (case.dicom / "note.txt").write_text("x", encoding="utf-8")
    case.write_reports({study.study_instance_uid: "Text."})
    plan = case.pack(LOOSE, is_dry_run=True)
    assert not case.output.exists()
    assert (plan.status, plan.exit_code, plan.dataset_id) == ("planned", 0, None)
    done = case.pack(LOOSE)
    assert (plan.inputs, plan.reasons, plan.studies) == (done.inputs, done.reasons, done.studies)
    assert (plan.splits, plan.num_shards, plan.num_slices) == (done.splits, done.num_shards, done.num_slices)
    before = tree_digests(case.output)
    _study(case, 5)
    grown = case.pack(is_dry_run=True, mode="append")
    assert (grown.inputs["total"], grown.num_known_inputs, grown.num_shards) == (3, 17, 1)
    assert case.pack(is_dry_run=True, mode="retry").inputs["quarantined"] == 4
    assert tree_digests(case.output) == before
    assert case.pack(LOOSE, mode="append").num_known_inputs == 17
    assert case.pack(LOOSE, is_dry_run=True, mode="append").status == "nothing_new"


def test_nothing_of_an_input_is_in_what_append_writes(case: PackCase) -> None:
    study = _study(case, 0)
    case.write_reports({study.study_instance_uid: "Text."})
    case.pack()
    new = make_study(case.dicom / "DOE-JANE", patient="CANARY77", num_slices=2)
    case.pack(mode="append")
    secrets = [b"CANARY77", b"DOE-JANE", new.study_instance_uid.encode()]
    for path in case.output.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(secret in data for secret in secrets), path.name


def test_the_command(case: PackCase) -> None:
    _study(case, 0)
    case.write_reports({})
    planned = case.command("--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout.splitlines()[-1])["status"] == "planned"
    assert not case.output.exists()
    assert case.command("--json").returncode == 0
    _study(case, 1)
    appended = case.command("--append")
    assert appended.returncode == 0, appended.stderr
    assert json.loads(appended.stdout.splitlines()[-1])["manifest_version"] == 2
    assert "known" in appended.stdout
    retried = case.command("--retry")
    assert (retried.returncode, "nothing to do" in retried.stdout) == (0, True)
    assert case.command("--retry", "--append").returncode == 2


def test_a_version_that_was_published_is_not_made_again(case: PackCase) -> None:
    _study(case, 0)
    case.write_reports({})
    case.pack()
    _study(case, 1)
    case.pack(mode="append")
    shutil.rmtree(case.dicom / "p0-A")
    assert case.pack(mode="append").status == "nothing_new"
    assert not verify(str(case.output)).damages
