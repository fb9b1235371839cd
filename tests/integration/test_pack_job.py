"""A whole packing job: what goes in comes out, and every input ends in one outcome."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.dataset import FileDataset
from pydicom.encaps import encapsulate
from pydicom.uid import RLELossless

from shardflow.format.codecs import decode_array
from tests.dicom_factory import MadeStudy, dicom_uid, make_study, truncate
from tests.pack_case import IN_PROCESSES, PackCase, read_ledger, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _studies(case: PackCase, count: int = 5) -> list[MadeStudy]:
    kinds = ["CT", "MR", "CR"]
    return [
        make_study(
            case.dicom / f"p{number}",
            patient=f"P{number}",
            modality=kinds[number % 3],
            num_slices=2 + number,
            seed=number,
        )
        for number in range(count)
    ]


def _outcomes(case: PackCase) -> Counter[tuple[str, str, str | None]]:
    return Counter((row["kind"], row["outcome"], row["reason"]) for row in read_ledger(case.output))


def test_pixels_reports_and_facts_come_out(case: PackCase) -> None:
    studies = _studies(case)
    case.prepare(has_reports=True)
    case.write_reports({study.study_instance_uid: f"Report {n}:\nclear." for n, study in enumerate(studies)})
    summary = case.pack()
    dataset = case.open()
    assert summary.dataset_id == dataset.dataset_id
    assert summary.exit_code == 0
    assert summary.inputs == {"total": 25 + 5 - 5 + 0, "packed": 25, "skipped": 0, "quarantined": 0}
    for number, study in enumerate(studies):
        row = dataset.samples.find(case.sample_key(study.study_instance_uid))
        fields = dataset.read_fields(row)
        assert list(fields) == sorted(fields)
        assert fields["report.txt"].decode() == f"Report {number}:\nclear."
        slices = [payload for name, payload in fields.items() if name.startswith("s000.")]
        decoded = np.stack([decode_array("b2nd", payload) for payload in slices])
        np.testing.assert_array_equal(decoded, study.modality_units)
        meta = json.loads(fields["study.json"])
        assert meta["sample_key"] == case.sample_key(study.study_instance_uid)
        assert meta["has_report"] is True
        patient_key = case.key.surrogate("patient", study.patient_id)
        assert meta["patient"] == {"age_years": 41, "sex": "F", "patient_key": patient_key}
        (series,) = meta["series"]
        assert series["num_slices"] == len(study.files)
        assert series["instance_numbers"] == list(range(1, len(study.files) + 1))
        assert (series["rows"], series["columns"]) == study.stored.shape[1:]
        assert decoded.dtype == np.dtype(series["dtype"])
        low, high = series["display_range"]
        assert low < high
        assert dataset.samples.gather("text_bytes", row) == len(fields["report.txt"])
        assert dataset.samples.gather("num_slices", row) == len(study.files)


def test_only_the_dataset_is_left(case: PackCase) -> None:
    _studies(case, 2)
    case.pack(handlers=IN_PROCESSES)
    names = {path.split("/")[0] for path in tree_digests(case.output)}
    assert names == {"manifest-000001.json", "shards", "samples", "facts", "ledger.jsonl", "report.html"}
    assert {path.name for path in case.output.iterdir()} == names
    left = sorted(path.name for path in case.private.iterdir())
    assert [name for name in left if not name.startswith(("inputs-", "people-", "pictures-"))] == [
        "lock",
        "packing-processes.log",
        "secret.key",
    ]


def test_private_files_are_private(case: PackCase) -> None:
    studies = _studies(case, 2)
    case.pack()
    (ledger,) = case.private.glob("inputs-*.jsonl")
    assert ledger.stat().st_mode & 0o777 == 0o600
    rows = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
    by_path = {row["path"]: row for row in rows}
    assert set(by_path) == {str(path) for study in studies for path in study.files}
    surrogates = {row["input"]: row["sample_key"] for row in read_ledger(case.output)}
    assert {row["input"]: row["sample_key"] for row in rows} == surrogates


def test_every_key_of_a_study_stands_in_the_format_page(case: PackCase) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    rows = page.partition("**`study.json`.**")[2].partition("## 5. ")[0]
    named = {
        key
        for row in rows.splitlines()
        if row.startswith("| `")
        for key in re.findall("`(.*?)`", row.split("|")[1])
    }
    make_study(case.dicom, series=1, num_slices=5)
    case.pack("variants.thumbnail_px=24")
    meta = json.loads(case.open().read_fields(0)["study.json"])
    found = set(meta) | set(meta["series"][0])
    assert found - {"format_version"} <= named
    # Others are there only where a series has them: several views, frames in time, PET, ultrasound.
    optional = {
        "images",
        "axis",
        "channel",
        "diffusion",
        "dose",
        "frame_time_ms",
        "frame_times_ms",
        "parametric_map",
        "pet",
        "timing",
        "ultrasound_regions",
    }
    assert named - found <= optional


def test_several_series_make_one_sample_with_the_volume_first(case: PackCase) -> None:
    make_study(case.dicom / "a", series=1, num_slices=2)
    make_study(case.dicom / "b", series=2, num_slices=7)
    case.pack()
    dataset = case.open()
    assert dataset.samples.num_samples == 1
    fields = dataset.read_fields(0)
    meta = json.loads(fields["study.json"])
    assert [series["series_number"] for series in meta["series"]] == [2, 1]
    assert [series["num_slices"] for series in meta["series"]] == [7, 2]
    assert dataset.samples.gather("num_series", 0) == 2


def test_raw_slices_by_setting(case: PackCase) -> None:
    study = make_study(case.dicom / "a")
    case.pack("shards.codec=npy")
    fields = case.open().read_fields(0)
    np.testing.assert_array_equal(decode_array("npy", fields["s000.i0002.npy"]), study.modality_units[2])


def test_a_report_without_a_study_is_counted(case: PackCase) -> None:
    study = make_study(case.dicom / "a")
    case.prepare(has_reports=True)
    case.write_reports({study.study_instance_uid: "mine", "1.2.3.4": "nobody's"})
    summary = case.pack()
    assert summary.reasons == {"REPORT_WITHOUT_STUDY": 1}
    assert _outcomes(case) == {
        ("dicom", "packed", None): 4,
        ("report", "packed", None): 1,
        ("report", "skipped", "REPORT_WITHOUT_STUDY"): 1,
    }


@pytest.mark.parametrize("is_required", [True, False])
def test_a_study_without_a_report_follows_the_policy(case: PackCase, is_required: bool) -> None:
    with_report, without = (
        make_study(case.dicom / "a", patient="A"),
        make_study(case.dicom / "b", patient="B"),
    )
    case.prepare(has_reports=True)
    case.write_reports({with_report.study_instance_uid: "mine"})
    summary = case.pack(f"policy.require_report={'true' if is_required else 'false'}")
    dataset = case.open()
    keys = {dataset.samples.sample_key(row) for row in range(dataset.samples.num_samples)}
    assert case.sample_key(with_report.study_instance_uid) in keys
    assert (case.sample_key(without.study_instance_uid) in keys) is not is_required
    assert summary.reasons == ({"STUDY_WITHOUT_REPORT": 4} if is_required else {})
    if not is_required:
        row = dataset.samples.find(case.sample_key(without.study_instance_uid))
        fields = dataset.read_fields(row)
        assert "report.txt" not in fields
        assert json.loads(fields["study.json"])["has_report"] is False
        assert dataset.samples.gather("text_bytes", row) == 0


def test_different_reports_for_one_study_are_never_chosen_between(case: PackCase) -> None:
    one, other = make_study(case.dicom / "a", patient="A"), make_study(case.dicom / "b", patient="B")
    case.prepare(has_reports=True)
    case.write_reports(
        [(one.study_instance_uid, "x"), (one.study_instance_uid, "y"), (other.study_instance_uid, "z")]
    )
    summary = case.pack("policy.max_quarantined_share=1.0")
    assert summary.reasons == {"AMBIGUOUS_REPORT": 2, "STUDY_QUARANTINED": 4}
    assert case.open().samples.num_samples == 1


def test_the_same_report_twice_is_one(case: PackCase) -> None:
    study = make_study(case.dicom / "a")
    case.prepare(has_reports=True)
    case.write_reports([(study.study_instance_uid, "x"), (study.study_instance_uid, "x")])
    assert case.pack().reasons == {"DUPLICATE_REPORT": 1}


def test_an_empty_report_is_none(case: PackCase) -> None:
    study = make_study(case.dicom / "a")
    case.prepare(has_reports=True)
    case.write_reports({study.study_instance_uid: "  \n"})
    assert case.pack().reasons == {"EMPTY_REPORT": 1}
    assert "report.txt" not in case.open().read_fields(0)


def test_a_truncated_file_takes_its_study_with_it(case: PackCase) -> None:
    good, bad = make_study(case.dicom / "a", patient="A"), make_study(case.dicom / "b", patient="B")
    truncate(bad.files[1])
    case.prepare(has_reports=True)
    case.write_reports({good.study_instance_uid: "x", bad.study_instance_uid: "y"})
    summary = case.pack("policy.max_quarantined_share=1.0")
    assert summary.reasons == {"PIXEL_DATA_TRUNCATED": 1, "STUDY_QUARANTINED": 4}
    assert summary.inputs == {"total": 10, "packed": 5, "skipped": 0, "quarantined": 5}
    assert case.open().samples.num_samples == 1


def test_a_truncated_copy_of_a_whole_file_takes_nothing_with_it(case: PackCase) -> None:
    study = make_study(case.dicom / "a", num_slices=3)
    copy = case.dicom / "copy.dcm"
    copy.write_bytes(study.files[0].read_bytes())
    truncate(copy)
    summary = case.pack("policy.max_quarantined_share=1.0")
    assert summary.reasons == {"PIXEL_DATA_TRUNCATED": 1}
    assert case.open().samples.gather("num_slices", 0) == 3


def test_a_truncated_file_can_be_left_out(case: PackCase) -> None:
    study = make_study(case.dicom / "a", num_slices=5)
    truncate(study.files[2])
    summary = case.pack("policy.max_quarantined_share=1.0", "policy.on_bad_instance=drop_instance")
    assert summary.reasons == {"PIXEL_DATA_TRUNCATED": 1}
    fields = case.open().read_fields(0)
    slices = [decode_array("b2nd", payload) for name, payload in fields.items() if name.startswith("s000.")]
    np.testing.assert_array_equal(slices, study.modality_units[[0, 1, 3, 4]])


def test_slices_decoded_together_are_packed_and_blamed_alone(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(dataset: FileDataset, index: int) -> None:
        if index == 3:
            dataset.compress(RLELossless, generate_instance_uid=False)
            dataset.PixelData = encapsulate([bytes(64)])

    study = make_study(case.dicom / "a", num_slices=6, change=damage)
    bad = case.key.surrogate("input", f"0/{study.files[3].relative_to(case.dicom).as_posix()}")
    found = []
    for slices_at_once in (1, 2, 6):
        monkeypatch.setattr("shardflow.packing.studies.study._BATCH_BYTES", slices_at_once * 16 * 12 * 2)
        summary = case.pack("policy.max_quarantined_share=1.0", "policy.on_bad_instance=drop_instance")
        assert summary.reasons == {"DECODE_FAILED": 1}
        (row,) = (row for row in read_ledger(case.output) if row["reason"] is not None)
        assert row["input"] == bad
        found.append(tree_digests(case.output))
        shutil.rmtree(case.output)
    assert found[0] == found[1] == found[2]


def test_images_in_encodings_that_nothing_reads_take_no_other_image_with_them(case: PackCase) -> None:
    """Sixteen images of a study, two of them video: fourteen are packed, by default."""
    study = make_study(case.dicom / "a", num_slices=16)
    for path, end in ((study.files[4], "102"), (study.files[9], "104")):
        dataset = dcmread(path)
        dataset.file_meta.TransferSyntaxUID = f"1.2.840.10008.1.2.4.{end}"
        dataset.PixelData = encapsulate([b"\0" * 64])
        dataset["PixelData"].is_undefined_length = True
        dataset.save_as(path)
    summary = case.pack("policy.max_quarantined_share=0.2")
    assert summary.reasons == {"UNSUPPORTED_TRANSFER_SYNTAX": 2}
    assert case.open().samples.gather("num_slices", 0) == 14
    (series,) = json.loads(case.open().read_fields(0, ["study.json"])["study.json"])["series"]
    assert series["flags"] == ["missing_slices"]


def test_other_files_are_skipped_with_their_reasons(case: PackCase) -> None:
    make_study(case.dicom / "a")
    make_study(case.dicom / "sr", modality="SR", patient="S", num_slices=1)
    (case.dicom / "README.txt").write_text("hello", encoding="utf-8")
    (case.dicom / "empty").touch()
    os.mkfifo(case.dicom / "pipe")
    summary = case.pack()
    assert summary.inputs == {"total": 8, "packed": 4, "skipped": 4, "quarantined": 0}
    assert summary.reasons["NOT_REGULAR_FILE"] == 1
    assert summary.reasons["NOT_DICOM"] == 2


def test_copies_are_skipped(case: PackCase) -> None:
    study = make_study(case.dicom / "a", num_slices=3)
    (case.dicom / "copy.dcm").write_bytes(study.files[0].read_bytes())
    assert case.pack().reasons == {"DUPLICATE_INSTANCE": 1}


def test_contradictions_are_quarantined_and_the_rest_is_packed(case: PackCase) -> None:
    make_study(case.dicom / "a", num_slices=4)
    make_study(case.dicom / "again", num_slices=4, seed=1)
    make_study(case.dicom / "more", series=2, num_slices=3)
    summary = case.pack("policy.max_quarantined_share=1.0", "policy.on_bad_instance=drop_instance")
    assert summary.reasons == {"CONFLICTING_INSTANCE": 8}
    assert case.open().samples.gather("num_slices", 0) == 3


def test_nothing_is_published_without_a_sample(case: PackCase) -> None:
    make_study(case.dicom / "a", num_slices=3)
    make_study(case.dicom / "again", num_slices=3, seed=1)
    summary = case.pack("policy.max_quarantined_share=1.0")
    assert (summary.status, summary.exit_code) == ("quarantine_limit", 3)
    assert summary.reasons == {"CONFLICTING_INSTANCE": 6}
    assert not list(case.output.glob("manifest*"))


def test_one_study_of_two_patients_is_quarantined(case: PackCase) -> None:
    make_study(case.dicom / "good", patient="G")
    uid = make_study(case.dicom / "a", patient="A").study_instance_uid
    make_study(
        case.dicom / "b", patient="B", change=lambda dataset, _: setattr(dataset, "StudyInstanceUID", uid)
    )
    summary = case.pack("policy.max_quarantined_share=1.0")
    assert summary.reasons == {"CONFLICTING_IDENTIFIER": 8}


def test_a_study_over_its_limit_is_never_opened(case: PackCase) -> None:
    make_study(case.dicom / "a", patient="A", num_slices=2)
    make_study(case.dicom / "b", patient="B", num_slices=20)
    summary = case.pack("policy.max_quarantined_share=1.0", "limits.max_study_bytes=2000")
    assert summary.reasons == {"LIMIT_EXCEEDED": 20}


def test_a_patient_is_in_one_split_whatever_else_is_packed(case: PackCase) -> None:
    for number in range(8):
        for study in "AB":
            make_study(
                case.dicom / f"p{number}{study}",
                patient=f"P{number}",
                study=study,
                num_slices=1,
                modality="CR",
            )
    case.pack()
    split_of = _splits(case)
    assert set(split_of.values()) == {"train", "val"}
    for number in range(8):
        assert len({split_of[case.sample_key(_uid(number, study))] for study in "AB"}) == 1
    fewer = PackCase(case.folder / "fewer")
    fewer.folder.mkdir()
    fewer.prepare()
    for number in (1, 4, 6):
        make_study(fewer.dicom / f"x{number}", patient=f"P{number}", study="A", num_slices=1, modality="CR")
    fewer.pack()
    for key, split in _splits(fewer).items():
        assert split_of[key] == split


def _uid(number: int, study: str) -> str:
    return dicom_uid("study", f"P{number}", study)


def _splits(case: PackCase) -> dict[str, str]:
    samples = case.open().samples
    return {samples.sample_key(row): split for split, rows in samples.splits.items() for row in rows}


def test_shards_are_cut_by_bytes_and_by_count(case: PackCase) -> None:
    for number in range(6):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=3)
    case.pack("splits={train=1}", "shards.max_samples=4", "shards.target_bytes=1MiB")
    manifest = case.open().manifest
    assert [(shard.name, shard.num_samples) for shard in manifest.shards] == [
        ("train-000000", 4),
        ("train-000001", 2),
    ]
    other = PackCase(case.folder / "other")
    other.folder.mkdir()
    other.prepare()
    other.dicom.rmdir()
    case.dicom.rename(other.dicom)
    other.pack("splits={train=1}", "shards.target_bytes=4KiB")
    # Larger than the target, each: a shard of its own.
    assert [shard.num_samples for shard in other.open().manifest.shards] == [1] * 6


def test_ledger_and_manifest_agree_with_the_inputs(case: PackCase) -> None:
    _studies(case, 3)
    (case.dicom / "note.txt").write_text("x", encoding="utf-8")
    summary = case.pack()
    manifest = case.open().manifest
    rows = read_ledger(case.output)
    assert len(rows) == summary.inputs["total"] == 2 + 3 + 4 + 1
    assert [row["input"] for row in rows] == sorted(row["input"] for row in rows)
    counts = Counter(row["outcome"] for row in rows)
    assert (manifest.counts.packed, manifest.counts.skipped) == (counts["packed"], counts["skipped"])
    assert manifest.key_id == case.key.key_id
    assert manifest.config_digest == case.config().content_digest()


def test_settings_that_only_change_speed_do_not_change_the_digest(case: PackCase) -> None:
    digest = case.config().content_digest()
    assert case.config("execution.num_processes=7", "output=/elsewhere").content_digest() == digest
    assert case.config("policy.max_quarantined_share=0.5").content_digest() == digest
    assert case.config("shards.max_samples=7").content_digest() != digest
    assert case.config("splits.train=61").content_digest() != digest


def test_a_series_says_how_it_was_decoded_and_how_much_was_cut(case: PackCase) -> None:
    """Values beyond int16 are counted; a series of two encodings names both decoders."""

    def steep(dataset: FileDataset, index: int) -> None:
        dataset.RescaleSlope = "100"
        if index == 0:
            dataset.compress(RLELossless, generate_instance_uid=False)

    study = make_study(case.dicom / "steep", patient="STEEP", num_slices=3, change=steep)
    case.write_reports({})
    case.pack()
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(study.study_instance_uid))
    (series,) = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])["series"]
    units = study.stored.astype(np.int64) * 100 - 1024
    assert series["num_clipped"] == int((units > 32767).sum()) > 0
    assert len(series["decoders"]) == 2
    assert "native" in series["decoders"]
    assert series["decoders"] == sorted(series["decoders"])
