"""Trees as people have them, packed: pixels, links, splits, outcomes; nothing identifying comes out."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.format.codecs import decode_array
from shardflow.format.dataset import Dataset
from shardflow.format.manifest import load
from shardflow.packing import PackSummary, pack
from shardflow.packing.progress import SilentProgress
from shardflow.storage import LocalStore
from tests.dicom_factory import make_study
from tests.layout_trees import (
    MadeTree,
    make_chexpert,
    make_ct_rate,
    make_lidc,
    make_manifest,
    make_mimic,
    make_openi,
    make_padchest,
    make_rsna,
    picture,
    write_nifti,
    write_png,
    write_table,
)
from tests.pack_case import PackCase, read_ledger, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

TREES: dict[str, Callable[[Path], MadeTree]] = {
    "chexpert": make_chexpert,
    "ct-rate": make_ct_rate,
    "lidc": make_lidc,
    "manifest": make_manifest,
    "mimic-cxr": make_mimic,
    "openi": make_openi,
    "padchest": make_padchest,
    "rsna": make_rsna,
}


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _open_study(
    dataset: Dataset, sample_key: str
) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]], str | None]:
    """Return ``study.json``, the array of each series, and the report."""
    fields = dataset.read_fields(dataset.samples.find(sample_key))
    arrays: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name in sorted(fields):
        if name.endswith(".b2nd"):
            arrays.setdefault(name.split(".")[0], []).append(decode_array("b2nd", fields[name]))
    report = fields.get("report.txt")
    return (
        json.loads(fields["study.json"]),
        [np.stack(slices) for slices in arrays.values()],
        None if report is None else report.decode("utf-8"),
    )


def _same_arrays(found: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> bool:
    """Compare series without their order, which a keyed hash decides among equals."""
    stacked = [each if each.ndim == 3 else each[None] for each in expected]
    left = list(found)
    for each in stacked:
        at = next((at for at, one in enumerate(left) if np.array_equal(one, each)), None)
        if at is None:
            return False
        del left[at]
    return not left


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_is_packed_whole_and_says_nothing(case: PackCase, kind: str) -> None:
    tree = TREES[kind](case.folder)
    summary = case.pack(*tree.settings)
    assert summary.inputs["quarantined"] == 0, summary.reasons
    dataset = case.open()
    assert sum(map(len, dataset.splits.values())) == len(tree.studies)
    for study, expected in tree.studies.items():
        _, arrays, report = _open_study(dataset, case.sample_key(study))
        assert _same_arrays(arrays, expected)
        assert report == tree.reports.get(study)
    written = b"".join(path.read_bytes() for path in case.output.rglob("*") if path.is_file())
    for secret in tree.secrets:
        assert secret.encode() not in written
        assert secret not in json.dumps(summary.to_json())


def _split_of(dataset: Dataset, sample_key: str) -> str:
    row = dataset.samples.find(sample_key)
    return next(split for split, rows in dataset.splits.items() if row in rows)


def test_official_splits_are_kept(case: PackCase) -> None:
    tree = make_mimic(case.folder)
    case.pack(*tree.settings)
    dataset = case.open()
    splits = {study: _split_of(dataset, case.sample_key(study)) for study in tree.studies}
    assert splits == {"50414267": "train", "53189527": "train", "57375967": "val"}
    study, _, _ = _open_study(dataset, case.sample_key("50414267"))
    assert {one["technical"].get("view_position") for one in study["series"]} == {"PA", "LATERAL"}


def test_what_a_picture_does_not_say_is_null(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    case.pack(*tree.settings)
    study, _, _ = _open_study(case.open(), case.sample_key("St-21"))
    assert (study["patient"]["age_years"], study["patient"]["sex"]) == (90, "F")
    for series in study["series"]:
        assert series["affine_lps"] is series["pixel_spacing_mm"] is series["slice_spacing_mm"] is None
        assert (series["modality"], series["unit"], series["decoders"]) == ("CR", "raw", ["opencv"])


@pytest.mark.parametrize("is_blank", [False, True])
def test_volumes_are_rescaled_once_and_lie_where_they_lay(case: PackCase, is_blank: bool) -> None:
    tree = make_ct_rate(case.folder, is_blank=is_blank)
    case.pack(*tree.settings)
    study, arrays, _ = _open_study(case.open(), case.sample_key("train_1_a"))
    assert _same_arrays(arrays, tree.studies["train_1_a"])
    assert len(study["series"]) == 2
    for series in study["series"]:
        assert (series["unit"], series["dtype"], series["modality"]) == ("HU", "int16", "CT")
        assert series["pixel_spacing_mm"] == pytest.approx([0.8, 0.7])
        if is_blank:  # nobody knows where it lay
            assert series["affine_lps"] is None
        else:
            expected = np.diag([0.7, 0.8, 2.5, 1.0])
            expected[:3, 3] = (-100.0, -120.0, -300.0)
            assert np.allclose(series["affine_lps"], expected, atol=1e-4)
            assert series["slice_spacing_mm"] == pytest.approx(2.5)


def test_a_volume_that_file_and_table_rescale_is_quarantined(case: PackCase) -> None:
    tree = make_ct_rate(case.folder)
    summary = case.pack(*tree.settings, "inputs.layout.volume_facts=table")
    assert summary.status == "quarantine_limit"
    assert summary.reasons["INVALID_IMAGE_DESCRIPTION"] == 3


def test_bytes_do_not_depend_on_processes(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    case.pack(*tree.settings)
    other = case.folder / "other"
    private = case.folder / "other-private"
    private.mkdir(mode=0o700)
    (private / "secret.key").touch(mode=0o600)
    (private / "secret.key").write_bytes((case.private / "secret.key").read_bytes())
    case.pack(*tree.settings, "execution.num_processes=2", f"output={other}", f"private_dir={private}")
    assert tree_digests(case.output) == tree_digests(other)


def _edit_table(path: Path, change: Callable[[list[dict[str, str]]], object]) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    change(rows)
    write_table(path, rows)


def _reasons(case: PackCase) -> dict[str, int]:
    return dict(Counter(row["reason"] for row in read_ledger(case.output) if row["reason"]))


EVERYTHING = "policy.max_quarantined_share=1"


def test_each_odd_input_of_a_manifest_has_its_outcome(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    images = tree.images
    write_png(images / "a" / "nobody.png", picture(5))
    whole = (images / "a" / "one.png").read_bytes()
    (images / "a" / "cut.png").write_bytes(whole[:-20])
    (images / "a" / "html.png").write_text("<html>404</html>", encoding="utf-8")
    write_png(images / "a" / "torn.png", picture(6))
    (images / "README").write_text("about", encoding="utf-8")
    write_table(images / "labels.csv", [{"a": 1}])

    def add(rows: list[dict[str, str]]) -> None:
        row = {**rows[0], "patient": "Pat-30"}
        rows += [
            {**row, "path": "a/cut.png", "study": "St-31"},
            {**row, "path": "a/html.png", "study": "St-32"},
            {**row, "path": "a/gone.png", "study": "St-33"},
            {**row, "path": "a/torn.png", "study": "St-34"},
            {**row, "path": "a/torn.png", "study": "St-35"},
            dict(rows[0]),  # the same once more says nothing new
        ]

    _edit_table(case.folder / "images.csv", add)
    _edit_table(
        case.folder / "texts.csv",
        lambda rows: rows.extend([{"study": "St-99", "text": "?"}, {"study": "St-33", "text": "!"}]),
    )
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons == {
        "AMBIGUOUS_LINK": 1,
        "DAMAGED_IMAGE": 1,
        "LAYOUT_FILE": 1,
        "MISSING_FILE": 1,
        "NOT_IMAGE": 1,
        "NOT_IN_LAYOUT": 1,
        "PIXEL_DATA_TRUNCATED": 1,
        "REPORT_WITHOUT_STUDY": 1,
        "STUDY_QUARANTINED": 1,
    }
    assert summary.reasons == _reasons(case)
    assert summary.studies["packed"] == 2
    private = "".join(path.read_text(encoding="utf-8") for path in case.private.glob("*.log"))
    assert "Pat-30" not in private


class _Log(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_summary_and_log_say_that_most_reports_found_no_study(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    _edit_table(
        case.folder / "texts.csv", lambda rows: [row.update(study=f"x{row['study']}") for row in rows]
    )
    log = _Log()
    dry = pack(case.config(*tree.settings), log, is_dry_run=True)
    summary = pack(case.config(*tree.settings), log)
    for found in (dry, summary):
        (note,) = found.notes
        assert note.startswith("Only 0 of 2 reports belong to a study of the images;")
    assert log.notes.count(note) == 2


def test_rows_without_files_can_be_ignored(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    (tree.images / "b" / "00000.dcm").unlink()
    summary = case.pack(*tree.settings, "inputs.layout.missing_files=ignore")
    assert summary.inputs == {"total": 4, "packed": 3, "skipped": 1, "quarantined": 0}
    assert summary.reasons == {"REPORT_WITHOUT_STUDY": 1}


def _rename(old: str, new: str) -> Callable[[list[dict[str, str]]], object]:
    def change(rows: list[dict[str, str]]) -> None:
        rows[:] = [{new if name == old else name: value for name, value in row.items()} for row in rows]

    return change


def _set(index: int, **values: str) -> Callable[[list[dict[str, str]]], object]:
    return lambda rows: rows[index].update(values)


MISTAKES: dict[str, tuple[Callable[[list[dict[str, str]]], object], tuple[str, ...], str]] = {
    "no column of paths": (_rename("path", "file"), (), "must have one column 'path'"),
    "a named column that is not there": (
        lambda rows: None,
        ("inputs.layout.columns={patient = 'subject'}",),
        "must have one column 'subject'",
    ),
    "an unknown role": (
        lambda rows: None,
        ("inputs.layout.columns={pattient = 'patient'}",),
        "must name roles out of",
    ),
    "a row without a path": (_set(1, path=""), (), "line 3 names none"),
    "an unknown split": (_set(1, split="holdout"), (), "[splits] lacks a split"),
    "a patient in two splits": (
        lambda rows: (_set(0, split="train")(rows), _set(1, split="valid")(rows)),
        (),
        "the layout assigns 1 patients to two splits",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_tables_are_named(case: PackCase, mistake: str) -> None:
    change, settings, expected = MISTAKES[mistake]
    tree = make_manifest(case.folder)
    _edit_table(case.folder / "images.csv", change)
    with pytest.raises(ConfigError) as caught:
        case.pack(*tree.settings, *settings)
    assert expected in caught.value.message
    assert not any(secret in caught.value.message for secret in tree.secrets)
    assert not list(case.output.glob("manifest*"))


def test_a_report_of_several_studies_is_copied_only_if_asked(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    _edit_table(case.folder / "images.csv", lambda rows: [row.update(report="R-1") for row in rows])
    write_table(case.folder / "texts.csv", [{"report": "R-1", "text": "Both are clear."}])
    columns = "inputs.layout.report_columns={report = 'report'}"
    summary = case.pack(
        *tree.settings, columns, "inputs.layout.report_of_several_studies=copy", "splits={train = 1}"
    )
    assert summary.reasons == {}
    dataset = case.open()
    for study in tree.studies:
        assert _open_study(dataset, case.sample_key(study))[2] == "Both are clear."
    with pytest.raises(ConfigError, match="another"):
        case.pack(*tree.settings, columns)
    strict = (f"output={case.folder / 'strict'}", f"private_dir={case.folder / 'strict-private'}")
    refused = case.pack(*tree.settings, columns, *strict, "policy.max_quarantined_share=0.5")
    assert refused.status == "quarantine_limit"
    assert refused.reasons["AMBIGUOUS_LINK"] == 2


def test_an_accession_number_links_with_its_patient_only(case: PackCase) -> None:
    tree = make_manifest(case.folder)

    def number(rows: list[dict[str, str]]) -> None:
        for row in rows:
            row["accession"] = "A-1"  # two hospitals, one number

    _edit_table(case.folder / "images.csv", number)
    write_table(
        case.folder / "texts.csv",
        [
            {"patient": "Pat-12", "accession": "A-1", "text": "Hers."},
            {"patient": "", "accession": "A-1", "text": "Whose?"},
        ],
    )
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons == {"MISSING_IDENTIFIER": 1}
    dataset = case.open()
    assert _open_study(dataset, case.sample_key("St-22"))[2] == "Hers."
    assert _open_study(dataset, case.sample_key("St-21"))[2] is None


def test_addenda_follow_the_final_report(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    write_table(
        case.folder / "texts.csv",
        [
            {"study": "St-21", "role": "addendum", "text": "Addendum: seen again."},
            {"study": "St-21", "role": "preliminary", "text": "Preliminary."},
            {"study": "St-21", "role": "final", "text": "Final."},
            {"study": "St-22", "role": "", "text": "One."},
            {"study": "St-22", "role": "", "text": "Another."},
        ],
    )
    summary = case.pack(*tree.settings, "inputs.layout.reports_of_one_study=append", EVERYTHING)
    assert summary.reasons == {"AMBIGUOUS_REPORT": 2, "STUDY_QUARANTINED": 1, "SUPERSEDED_REPORT": 1}
    assert summary.inputs["packed"] == 4
    dataset = case.open()
    report = _open_study(dataset, case.sample_key("St-21"))[2]
    assert report == "Final.\n\nAddendum: seen again.\n"


def test_a_row_that_contradicts_its_folder_links_nobody(case: PackCase) -> None:
    tree = make_mimic(case.folder)
    _edit_table(case.folder / "cxr-record-list.csv", _set(0, subject_id="10000764"))
    summary = case.pack(*tree.settings, EVERYTHING)
    assert summary.reasons["AMBIGUOUS_LINK"] == 1


def test_a_split_table_with_a_patient_twice_is_refused(case: PackCase) -> None:
    tree = make_mimic(case.folder)
    _edit_table(case.folder / "mimic-cxr-2.0.0-split.csv", _set(0, split="test"))
    with pytest.raises(ConfigError, match=r"\[splits\] lacks a split"):
        case.pack(*tree.settings)
    with pytest.raises(ConfigError, match=r"each patient in one split, but the patient on line 3 is in two"):
        case.pack(*tree.settings, "splits.test=1")


def test_a_folder_pattern_says_whose_images_are(case: PackCase) -> None:
    images = case.folder / "trees"
    pixels = write_png(images / "train" / "p1" / "s1" / "3.png", picture(3, bits=16))
    write_png(images / "val" / "p2" / "s1" / "1.png", picture(4))
    write_png(images / "val" / "loose.png", picture(4))
    pattern = r"(?P<split>\w+)/(?P<patient>p\d+)/(?P<study>s\d+)/(?P<number>\d+)\.png"
    settings = (
        "inputs.layout.kind=folder",
        f"inputs.dicom={images}",
        f"inputs.layout.pattern={pattern}",
        "inputs.layout.is_study_within_patient=true",
        "inputs.layout.modality=dx",
    )
    summary = case.pack(*settings, EVERYTHING)
    assert summary.reasons == {"NOT_IN_LAYOUT": 1}
    dataset = case.open()
    study, arrays, _ = _open_study(dataset, case.sample_key("p1/s1"))
    assert np.array_equal(arrays[0][0], pixels)
    assert study["series"][0]["instance_numbers"] == [3]
    assert _split_of(dataset, case.sample_key("p2/s1")) == "val"


def test_a_study_may_be_its_own_patient(case: PackCase) -> None:
    make_study(case.dicom / "a", change=lambda data, _: data.pop("PatientID"))
    assert case.pack("inputs.layout.is_patient_study=true").inputs["packed"] == 4


def test_new_rows_are_appended(case: PackCase) -> None:
    tree = make_manifest(case.folder)
    case.pack(*tree.settings)
    pixels = write_png(tree.images / "a" / "later.png", picture(8))
    _edit_table(
        case.folder / "images.csv",
        lambda rows: rows.append({**rows[0], "path": "a/later.png", "patient": "Pat-40", "study": "St-40"}),
    )
    summary = pack(case.config(*tree.settings), mode="append")
    assert (summary.status, summary.manifest_version, summary.num_known_inputs) == ("packed", 2, 5)
    _, arrays, _ = _open_study(case.open(), case.sample_key("St-40"))
    assert np.array_equal(arrays[0][0], pixels)


def _patients_by_split(case: PackCase) -> dict[str, set[str]]:
    """P6, from the samples themselves."""
    dataset = case.open()
    found: dict[str, set[str]] = {}
    for split, rows in dataset.splits.items():
        for row in rows:
            fields = dataset.read_fields(row, ["study.json"])
            found.setdefault(split, set()).add(json.loads(fields["study.json"])["patient"]["patient_key"])
    return found


def _append_after_the_table_changed(case: PackCase, split: str | None) -> tuple[PackSummary, str]:
    """Pack a study of two patients, edit or drop the row of the one in train, append a study of each."""
    images = case.folder / "images"
    table = case.folder / "images.csv"

    def write(rows: list[list[str]]) -> None:
        for path, *_ in rows:
            write_png(images / path, picture(int(path[1:2])))
        lines = [["path", "patient", "study", "split"], *rows]
        table.write_text("".join(",".join(row) + "\n" for row in lines), encoding="utf-8")

    settings = (
        "inputs.layout.kind=manifest",
        f"inputs.layout.table={table}",
        f"inputs.dicom={images}",
        "inputs.layout.modality=DX",
        EVERYTHING,
    )
    first = [["p1a.png", "p1", "1a", "train"], ["p2a.png", "p2", "2a", "val"]]
    write(first)
    case.pack(*settings)
    moved = [*first[0][:3], split or ""]
    write([moved, first[1], ["p1b.png", "p1", "1b", split or ""], ["p2b.png", "p2", "2b", "val"]])
    return case.pack(*settings, mode="append"), case.sample_key("1b")


def test_an_edited_split_table_moves_no_packed_patient(case: PackCase) -> None:
    summary, key = _append_after_the_table_changed(case, "val")
    assert summary.reasons == {"SPLIT_CHANGED": 1}
    assert [row["reason"] for row in read_ledger(case.output, 2) if row["sample_key"] == key] == [
        "SPLIT_CHANGED"
    ]
    splits = _patients_by_split(case)
    assert not splits["train"] & splits["val"]
    assert sum(map(len, splits.values())) == 2
    # The study that no row moved was packed.
    assert case.open().samples.find(case.sample_key("2b")) is not None


def test_a_patient_whom_the_table_forgets_stays(case: PackCase) -> None:
    summary, key = _append_after_the_table_changed(case, None)
    assert "SPLIT_CHANGED" not in summary.reasons
    assert _split_of(case.open(), key) == "train"
    splits = _patients_by_split(case)
    assert not splits["train"] & splits["val"]


def test_a_missing_image_without_an_ending_stays_missing_until_it_is_there(case: PackCase) -> None:
    tree = make_mimic(case.folder)
    files = sorted(case.folder.rglob("*.dcm*"))
    hidden = case.folder / "hidden"
    files[0].rename(hidden)
    case.pack(*tree.settings, EVERYTHING)
    missing = [row for row in read_ledger(case.output) if row["reason"] == "MISSING_FILE"]
    assert len(missing) == 1
    case.pack(*tree.settings, EVERYTHING, mode="retry")
    newest = load(LocalStore(case.output)).manifest_version
    assert [row for row in read_ledger(case.output, newest) if row["reason"] == "MISSING_FILE"] == missing
    hidden.rename(files[0])
    summary = case.pack(*tree.settings, EVERYTHING, mode="append")
    assert summary.reasons.get("MISSING_FILE") is None
    key = missing[0]["sample_key"]
    assert case.open().samples.find(key) is not None


def test_the_ledger_says_what_an_input_was(case: PackCase) -> None:
    """Also of inputs that a later version takes over."""
    images = case.folder / "images"
    write_png(images / "p1.png", picture(1))
    make_study(images / "ct", patient="C", num_slices=2)
    table = case.folder / "images.csv"
    rows = ["path,patient,study", "p1.png,p1,1a"]
    rows += [f"ct/{path.name},C,1c" for path in (images / "ct").iterdir()]
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    settings = (
        "inputs.layout.kind=manifest",
        f"inputs.layout.table={table}",
        f"inputs.dicom={images}",
        "inputs.layout.modality=DX",
        EVERYTHING,
    )
    case.pack(*settings)
    assert Counter(row["kind"] for row in read_ledger(case.output)) == {"raster": 1, "dicom": 2}
    write_png(images / "p2.png", picture(2))
    table.write_text("\n".join([*rows, "p2.png,p2,2a"]) + "\n", encoding="utf-8")
    case.pack(*settings, mode="append")
    assert Counter(row["kind"] for row in read_ledger(case.output, 2)) == {"raster": 2, "dicom": 2}


def test_an_intercept_alone_is_applied(case: PackCase) -> None:
    stored = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    write_nifti(case.folder / "images" / "v.nii", stored, None)
    row = {"path": "v.nii", "patient": "p", "study": "s", "modality": "CT", "slope": "", "intercept": "-1024"}
    table = write_table(case.folder / "images.csv", [row])
    case.pack(
        "inputs.layout.kind=manifest",
        f"inputs.dicom={case.folder / 'images'}",
        f"inputs.layout.table={table}",
        "inputs.layout.volume_facts=table",
    )
    study, (array,), _ = _open_study(case.open(), case.sample_key("s"))
    assert study["series"][0]["unit"] == "HU"
    assert np.array_equal(array, stored.transpose(2, 1, 0) - 1024)


def test_names_in_another_encoding_are_names(case: PackCase) -> None:
    for number, name in enumerate(
        (b"m\xfcller", "m\N{LATIN SMALL LETTER U WITH DIAERESIS}ller".encode(), b"new\nline")
    ):
        folder = case.folder / "images" / os.fsdecode(name)
        pixels = write_png(case.folder / "one.png", picture(number))
        folder.mkdir(parents=True)
        (case.folder / "one.png").rename(folder / os.fsdecode(b"\xe9.png"))
    settings = (
        "inputs.layout.kind=folder",
        f"inputs.dicom={case.folder / 'images'}",
        r"inputs.layout.pattern=(?P<patient>[^/]+)/(?P<study>[^/]+)\.png",
        "inputs.layout.is_study_within_patient=true",
    )
    summary = case.pack(*settings)
    assert summary.inputs == {"total": 3, "packed": 3, "skipped": 0, "quarantined": 0}
    study = f"{os.fsdecode(b'new' + bytes([10]) + b'line')}/{os.fsdecode(bytes([0xE9]))}"
    _, (array,), _ = _open_study(case.open(), case.sample_key(study))
    assert np.array_equal(array[0], pixels)
    assert case.pack(*settings, mode="append").status == "nothing_new"
