"""Tables joined to a packed dataset: every kind of key, what is refused, and no identifier in any byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

import shardflow as sf
from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.checks.verification import verify
from shardflow.format.copies.copying import copy_dataset
from shardflow.format.facts.columns import image_starts, open_columns
from shardflow.format.facts.series import open_series
from shardflow.loading.rows.lock import encode_lock
from shardflow.packing.settings import KeyKind
from shardflow.packing.tables import joining
from shardflow.packing.tables.joining import AttachedTable, TableSettings, attach_table
from shardflow.packing.tables.keys import PrivateFolder
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.storage import LocalStore
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

_NUMBER = 5


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, list[MadeStudy]]:
    """CT studies of two slices; the last two are of one patient."""
    case = PackCase(tmp_path_factory.mktemp("tables") / "job")
    case.folder.mkdir()
    case.prepare()
    studies = [make_one(case, number) for number in range(_NUMBER)]
    case.pack()
    return case, studies


def make_one(case: PackCase, number: int) -> MadeStudy:
    return make_study(
        case.dicom / f"p{number}",
        patient=f"CANARY{min(number, 3)}",
        study=str(number),
        num_slices=2,
        seed=number,
        change=lambda dataset, _: setattr(dataset, "AccessionNumber", f"ACC{number}"),
    )


@pytest.fixture
def job(packed: tuple[PackCase, list[MadeStudy]], tmp_path: Path) -> PackCase:
    """The packed dataset, and a copy of it that a test may change."""
    shutil.copytree(packed[0].folder, tmp_path / "job")
    return PackCase(tmp_path / "job")


def write_csv(path: Path, names: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    path.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)) + "\n", encoding="utf-8")
    return path


def attach(job: PackCase, file: Path, on: KeyKind, **settings: object) -> AttachedTable:
    how = TableSettings(name="labels", on=on, **settings)  # type: ignore[arg-type]
    return attach_table(Dataset.open(job.output), file, how, private=PrivateFolder(path=job.private))


def by_study(job: PackCase, studies: Sequence[MadeStudy], column: str) -> list[object]:
    """Values of a column in the order of the studies; None where it is missing."""
    dataset = Dataset.open(job.output)
    found = open_columns(dataset).column(f"labels.{column}")
    rows = [dataset.studies.find(job.sample_key(study.study_instance_uid)) for study in studies]
    missing = found.is_missing
    return [None if missing is not None and missing[row] else found.values[row].item() for row in rows]


def test_every_key_names_its_rows(job: PackCase, packed: tuple[PackCase, list[MadeStudy]]) -> None:
    studies, file = packed[1], job.folder / "labels.csv"
    cases: Mapping[KeyKind, list[tuple[str, object]]] = {
        "study_instance_uid": [(study.study_instance_uid, n) for n, study in enumerate(studies)],
        "accession_number": [(f"ACC{n}", n) for n in range(_NUMBER)],
        "sample_key": [(job.sample_key(study.study_instance_uid), n) for n, study in enumerate(studies)],
        "path": [
            (str(next(path for path in (job.dicom / f"p{n}").rglob("*") if path.is_file())), n)
            for n in range(_NUMBER)
        ],
    }
    for on, rows in cases.items():
        if on == "path":  # the private ledger holds where the files were when they were packed
            rows = [(f"p{n}/{Path(str(path)).name}", n) for path, n in rows]
        done = attach(job, write_csv(file, [on, "value"], rows), on)
        assert by_study(job, studies, "value") == list(range(_NUMBER)), on
        assert (done.num_unmatched, done.num_without_row) == (0, 0), on
    attach(job, write_csv(file, ["patient_id", "value"], [(f"CANARY{n}", n) for n in range(4)]), "patient_id")
    assert by_study(job, studies, "value") == [0, 1, 2, 3, 3]


def _set_accession(dataset: pydicom.Dataset, _: int, *, number: str) -> None:
    dataset.AccessionNumber = number


def test_an_accession_number_of_several_patients_names_none_of_them(tmp_path: Path) -> None:
    case = PackCase(tmp_path / "job")
    case.folder.mkdir()
    case.prepare()
    studies = [
        make_study(
            case.dicom / f"p{number}",
            patient=patient,
            study=str(number),
            num_slices=1,
            seed=number,
            change=partial(_set_accession, number=accession),
        )
        for number, (patient, accession) in enumerate(
            [("ONE", "SHARED"), ("TWO", "SHARED"), ("THREE", "OWN"), ("THREE", "OWN")]
        )
    ]
    case.pack()
    file = write_csv(case.folder / "labels.csv", ["accession_number", "value"], [("SHARED", 1), ("OWN", 2)])
    done = attach(case, file, "accession_number")
    assert by_study(case, studies, "value") == [None, None, 2, 2]
    assert (done.num_ambiguous, done.num_without_row) == (1, 2)


def test_a_type_that_no_value_has_is_refused_and_others_are_counted(
    job: PackCase, packed: tuple[PackCase, list[MadeStudy]]
) -> None:
    rows = [(study.study_instance_uid, f"0.{n}", str(n)) for n, study in enumerate(packed[1], 1)]
    file = write_csv(job.folder / "labels.csv", ["StudyInstanceUID", "risk", "grade"], rows)
    with pytest.raises(ConfigError, match=r"No value of the column 'risk' of labels\.csv is of the type int"):
        attach(job, file, "study_instance_uid", types={"risk": "int"})
    rows[0] = (rows[0][0], rows[0][1], "x")
    write_csv(file, ["StudyInstanceUID", "risk", "grade"], rows)
    done = attach(job, file, "study_instance_uid", types={"grade": "int"})
    assert done.type_conflicts == {"grade": 1}


def test_series_and_images_have_rows(job: PackCase, packed: tuple[PackCase, list[MadeStudy]]) -> None:
    instances = {}
    for number in range(_NUMBER):
        for path in sorted((job.dicom / f"p{number}").rglob("*")):
            if path.is_file():
                header = pydicom.dcmread(path, stop_before_pixels=True)
                instances[header.SOPInstanceUID] = (
                    number,
                    int(header.InstanceNumber),
                    header.SeriesInstanceUID,
                )
    file = job.folder / "labels.csv"
    write_csv(file, ["SOPInstanceUID", "value"], [(uid, n * 10 + i) for uid, (n, i, _) in instances.items()])
    assert attach(job, file, "sop_instance_uid").unit == "image"
    dataset = Dataset.open(job.output)
    values = open_columns(dataset).stored("labels.value").values
    starts, first = image_starts(dataset), open_series(dataset)[0].first_series()
    for number, study in enumerate(packed[1]):
        row = dataset.studies.find(job.sample_key(study.study_instance_uid))
        stored = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])["series"][0]
        start = starts[first[row]]
        assert values[start : start + 2].tolist() == [number * 10 + i for i in stored["instance_numbers"]]
    series = {uid: number for number, _, uid in instances.values()}
    write_csv(file, ["SeriesInstanceUID", "value"], list(series.items()))
    assert attach(job, file, "series_instance_uid").unit == "series"
    assert sorted(open_columns(Dataset.open(job.output)).stored("labels.value").values) == list(
        range(_NUMBER)
    )
    assert attach(job, file, "series_instance_uid", unit="study").unit == "study"
    assert by_study(job, packed[1], "value") == list(range(_NUMBER))


def test_no_identifier_enters(job: PackCase, packed: tuple[PackCase, list[MadeStudy]]) -> None:
    studies = packed[1]
    file = write_csv(
        job.folder / "labels.csv",
        ["StudyInstanceUID", "SeriesUID", "PatientName", "Remark", "StudyDate", "Code", "Finding", "Edema"],
        [
            (
                study.study_instance_uid,
                f"1.2.840.99999.1.{n}.4711",
                f"CANARYNAME{n}",
                f"CANARYTEXT seen on the left side {n}",
                f"2019-03-{n + 10}",
                f"CANARYCODE{n}",
                ("clear", "opacity")[n % 2],
                "1.0" if n % 2 else "",
            )
            for n, study in enumerate(studies)
        ]
        + [
            (
                "1.2.3.4.5.6.7.8.9.10.11",
                "1.2.840.99999.1.9.4711",
                "CANARYNAME9",
                "",
                "",
                "",
                "CANARYCLASS",
                "0",
            )
        ],
    )
    done = attach(job, file, "study_instance_uid")
    assert dict(done.columns) == {"finding": "category", "edema": "int"}
    assert {*done.left_out} == {"series_uid", "patient_name", "remark", "study_date", "code"}
    assert (done.num_unmatched, done.num_without_row) == (1, 0)
    listed = (job.private / "tables" / "labels.jsonl").read_text(encoding="utf-8")
    assert "1.2.3.4.5.6.7.8.9.10.11" in listed
    canaries = [
        b"CANARY",
        b"1.2.840.99999",
        b"2019-03",
        *(one.study_instance_uid.encode() for one in studies),
    ]
    for path in (path for path in job.output.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for canary in canaries:
            assert canary not in data, path.relative_to(job.output)
    with pytest.raises(ConfigError, match="DICOM UIDs, which never enter"):
        attach(job, file, "study_instance_uid", columns=["SeriesUID"])
    named = attach(job, file, "study_instance_uid", columns=["code", "Finding"])
    assert dict(named.columns) == {"code": "category", "finding": "category"}
    assert named.taken_anyway == {"code": "a different text in most rows"}


@pytest.mark.parametrize("rows_at_once", [1, 1 << 18])
def test_doubled_keys_and_rounded_keys(
    job: PackCase,
    packed: tuple[PackCase, list[MadeStudy]],
    rows_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "_TARGETS_AT_ONCE", rows_at_once)
    uid = packed[1][0].study_instance_uid
    file = write_csv(job.folder / "a.csv", ["study_instance_uid", "value"], [(uid, 1), (uid, 2), (uid, 1)])
    with pytest.raises(ConfigError, match=r"1 rows of a\.csv repeat a key with other values"):
        attach(job, file, "study_instance_uid")
    assert '"row": 2' in (job.private / "tables" / "labels.jsonl").read_text()
    write_csv(file, ["study_instance_uid", "value"], [(uid, 1), (uid, "1.0"), ("1.2e+05", 3), ("17.0", 4)])
    done = attach(job, file, "study_instance_uid")
    assert (done.num_duplicates, done.num_through_float, done.num_unmatched) == (1, 2, 2)


def test_a_folder_without_the_key_asks_for_that_of_the_dataset(job: PackCase, tmp_path: Path) -> None:
    file = write_csv(job.folder / "a.csv", ["StudyInstanceUID", "x"], [("1.2", 1)])
    how = TableSettings(name="labels", on="study_instance_uid")
    with pytest.raises(ConfigError, match="that this dataset was packed with, or its key with --key"):
        attach_table(Dataset.open(job.output), file, how, private=PrivateFolder(path=tmp_path / "none"))


@pytest.mark.parametrize(
    ("names", "rows", "settings", "message"),
    [
        (["uid", "x"], [("1.2", 1)], {}, "no column of study_instance_uid; name it with --key-column"),
        (["StudyInstanceUID", "x"], [("1.2", 1)], {}, "None of the 1 rows"),
        (["StudyInstanceUID", "x", "x"], [("1.2", 1, 1)], {}, "names a column twice"),
        (["StudyInstanceUID", "x"], [("{uid}", 1, 2)], {}, "has 3 values instead of 2"),
        (["StudyInstanceUID", "A b", "a_b"], [("{uid}", 1, 2)], {}, "would both be a_b"),
        (["StudyInstanceUID", "x"], [("{uid}", 1)], {"columns": ["y"]}, "has no column 'y'"),
        (["StudyInstanceUID", "x"], [("{uid}", 1)], {"unit": "image"}, "got --unit image"),
        (["StudyInstanceUID", "x"], [("{uid}", n) for n in [*range(19), "?"]], {}, "type conflict"),
        (["StudyInstanceUID", "note"], [("{uid}", "")], {}, "note: no value"),
    ],
)
def test_slips_get_a_sentence(
    names: list[str],
    rows: list[tuple[object, ...]],
    settings: dict[str, object],
    message: str,
    job: PackCase,
    packed: tuple[PackCase, list[MadeStudy]],
) -> None:
    uid = packed[1][0].study_instance_uid
    rows = [tuple(uid if value == "{uid}" else value for value in row) for row in rows]
    with pytest.raises(ConfigError, match=message):
        attach(job, write_csv(job.folder / "a.csv", names, rows), "study_instance_uid", **settings)


def test_the_command_joins(
    job: PackCase, packed: tuple[PackCase, list[MadeStudy]], capsys: pytest.CaptureFixture[str]
) -> None:
    uid = packed[1][0].study_instance_uid
    file = write_csv(job.folder / "a.csv", ["study_instance_uid", "value"], [(uid, 1.5), ("9.9", 2)])
    arguments = ["attach", str(job.output), str(file), "--name", "labels", "--on", "study_instance_uid"]
    assert main([*arguments, "--private-dir", str(job.private)]) == 0
    shown = capsys.readouterr().out
    assert "value (float)" in shown
    assert "1 rows name none of the samples" in shown
    assert uid not in shown
    assert main(["info", str(job.output)]) == 0
    assert "attached tables" in capsys.readouterr().out
    assert main(arguments) != 0
    assert "needs the private folder" in capsys.readouterr().err


def test_versions_carry_tables_over(
    job: PackCase, packed: tuple[PackCase, list[MadeStudy]], tmp_path: Path
) -> None:
    studies = list(packed[1])
    names = ["study_instance_uid", "value", "kind"]
    rows = [(study.study_instance_uid, n, f"k{n % 3}") for n, study in enumerate(studies)]
    attach(job, write_csv(job.folder / "a.csv", names, rows), "study_instance_uid")
    first = dict(Dataset.open(job.output).tables)
    studies.append(make_one(job, _NUMBER))
    job.pack(mode="append")
    assert by_study(job, studies, "value") == [*range(_NUMBER), None]
    remove(job.output, job.private, Withdrawn(studies=[studies[2].study_instance_uid]))
    kept = [study for study in studies if study is not studies[2]]
    assert by_study(job, kept, "value") == [0, 1, 3, 4, None]
    assert open_columns(Dataset.open(job.output))["labels.kind"].names == ("k0", "k1")
    compact(job.output, job.private, deletes_old=True)
    assert by_study(job, kept, "value") == [0, 1, 3, 4, None]
    assert len(list(job.output.glob("tables/*/*"))) == 1
    assert first != dict(Dataset.open(job.output).tables)
    report = verify(str(job.output))
    assert not report.damages
    assert report.num_tables == 1
    copied = copy_dataset(LocalStore(job.output), LocalStore(tmp_path / "copy"))
    assert [one.name for one in copied.tables] == ["labels-000001"]
    assert dict(Dataset.open(tmp_path / "copy").tables) == dict(Dataset.open(job.output).tables)
    (table,) = (tmp_path / "copy").glob("tables/*/*/rows.tbl")
    data = bytearray(table.read_bytes())
    data[-100] ^= 1
    table.chmod(0o644)
    table.write_bytes(data)
    assert verify(str(tmp_path / "copy")).damages


def test_an_append_attaches_tables_of_the_settings_and_names_the_others(
    job: PackCase, packed: tuple[PackCase, list[MadeStudy]], caplog: pytest.LogCaptureFixture
) -> None:
    studies = [*packed[1], make_one(job, _NUMBER)]
    file = write_csv(
        job.folder / "grades.csv", ["AccessionNumber", "grade"], [(f"ACC{n}", n) for n in range(9)]
    )
    other = write_csv(
        job.folder / "a.csv", ["study_instance_uid", "value"], [(studies[0].study_instance_uid, 7)]
    )
    attach(job, other, "study_instance_uid")
    entry = f'\n[[tables]]\nfile = "{file.name}"\nname = "grades"\non = "accession_number"\n'
    settings = job.config_path.read_text(encoding="utf-8")
    job.config_path.write_text(settings + entry, encoding="utf-8")
    summary = job.pack(mode="append")
    assert summary.status == "packed"
    (note,) = summary.notes
    assert note.startswith("1 new samples have no values in labels; ")
    assert "shardflow attach DATASET FILE --name labels --on KEY --private-dir DIR" in note
    dataset = Dataset.open(job.output)
    found = open_columns(dataset).column("grades.grade")
    rows = [dataset.studies.find(job.sample_key(study.study_instance_uid)) for study in studies]
    assert found.values[rows].tolist() == list(range(_NUMBER + 1))
    assert found.is_missing is None
    assert by_study(job, studies, "value") == [7, *[None] * _NUMBER]
    assert job.pack(mode="append").notes == ()  # nothing is new
    # A file that does not fit any more is a warning: the studies are packed, and the table lacks them.
    write_csv(file, ["AccessionNumber", "grade"], [("ACC0", 1), ("ACC0", 2)])
    make_one(job, _NUMBER + 1)
    assert "in grades, labels;" in job.pack(mode="append").notes[0]
    assert "table grades of the settings is not attached: 1 rows of grades.csv repeat a key" in caplog.text


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ('file = "none.csv"\nname = "a"\non = "path"', r"no file 'none\.csv' to attach"),
        ('file = "a.csv"\nname = "A b"\non = "path"', "name of a table is 1 to 64"),
        ('file = "a.csv"\nname = "a"\non = "path"', "no column of path"),
        ('file = "a.csv"\nname = "a"\non = "patient"', "must be one of"),
        ('file = "a.csv"\nname = "a"\non = "sample_key"\nunit = "image"', "got --unit image"),
    ],
)
def test_a_table_of_the_settings_that_cannot_be_read_stops_before_packing(
    entry: str, sentence: str, job: PackCase
) -> None:
    write_csv(job.folder / "a.csv", ["sample_key", "value"], [("a", 1)])
    settings = job.config_path.read_text(encoding="utf-8")
    job.config_path.write_text(f"{settings}\n[[tables]]\n{entry}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        job.pack(mode="append")


def test_a_new_study_of_a_known_person_gets_its_fold(
    job: PackCase, packed: tuple[PackCase, list[MadeStudy]], capsys: pytest.CaptureFixture[str]
) -> None:
    def folds() -> dict[bytes, int]:
        assert main(["folds", str(job.output), "--k", "3", "--stratify", "facts.modality"]) == 0
        dataset = Dataset.open(job.output)
        found = open_columns(dataset).column("folds.fold")
        assert found.is_missing is None
        return dict(zip(dataset.studies.column("sample_key").tolist(), found.values.tolist(), strict=True))

    first = folds()
    assert sorted(np.bincount(list(first.values())).tolist()) == [1, 2, 2]  # the two of one person together
    make_one(job, _NUMBER)
    job.pack(mode="append")
    capsys.readouterr()
    second = folds()
    assert f"{_NUMBER} studies keep their fold" in capsys.readouterr().out
    dataset = Dataset.open(job.output)
    person = open_columns(dataset).column("facts.patient_key").values.tolist()
    owner = dict(zip(dataset.studies.column("sample_key").tolist(), person, strict=True))
    (added,) = second.keys() - first.keys()
    assert {key: second[key] for key in first} == first
    assert [second[key] for key in first if owner[key] == owner[added]] == [second[added]] * 2


def test_values_are_those_of_their_rows_in_parquet(job: PackCase) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    keys = [key.decode() for key in Dataset.open(job.output).studies.column("sample_key").tolist()]
    vectors = np.arange(3.0 * len(keys), dtype="f4").reshape(-1, 3)
    table = pa.table({"sample_key": keys[::-1], "vector": list(vectors), "share": [0.5, None, 1.0, 2.0, 3.0]})
    parquet.write_table(table, job.folder / "a.parquet")
    done = attach(job, job.folder / "a.parquet", "sample_key")
    assert dict(done.columns) == {"vector": "floats", "share": "float"}
    columns = open_columns(Dataset.open(job.output))
    np.testing.assert_array_equal(columns.column("labels.vector").values, vectors[::-1])
    missing = columns.column("labels.share").is_missing
    assert missing is not None
    assert missing.tolist() == [False, False, False, True, False]


def test_removed_tables_are_gone_and_versions_that_a_run_needs_stay(
    job: PackCase, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [key.decode() for key in Dataset.open(job.output).studies.column("sample_key").tolist()]
    runs = job.folder / "runs"
    (runs / "first" / "step-00000002").mkdir(parents=True)

    def attach_values(factor: int) -> None:
        rows = [(key, factor * place) for place, key in enumerate(keys)]
        attach(job, write_csv(job.folder / "a.csv", ["sample_key", "value"], rows), "sample_key")

    def loader(lock: Any = None) -> sf.Loader:
        spec = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
        split = "+".join(name for name, span in Dataset.open(job.output).splits.items() if span)
        fields = {"value": sf.Column("labels.value")}
        return sf.Loader(Dataset.open(job.output), split=split, seed=1, batch=spec, fields=fields, lock=lock)

    def run(*arguments: str) -> str:
        assert main(["attach", str(job.output), *arguments]) == 0
        return capsys.readouterr().out

    attach_values(2)
    lock = loader().lock()
    (runs / "first" / "step-00000002" / "loader.lock.json").write_bytes(encode_lock(lock))
    attach_values(3)
    attach_values(4)
    folders = [f"labels-{number:06d}" for number in (1, 2, 3, 4)]
    assert "deleted labels, version 2" in run("--delete-old", "--runs", str(runs))
    assert sorted(path.name for path in job.output.glob("tables/*")) == [folders[0], folders[2]]
    assert "table labels is removed" in run("--name", "labels", "--remove")
    assert not Dataset.open(job.output).tables
    with pytest.raises(ConfigError, match=r"no column 'labels\.value'"):
        loader()
    with loader(lock) as resumed:
        assert resumed.lock() == lock
        found = {key: int(batch["value"][0]) for batch in resumed for key in batch.info.sample_keys}
    assert found == {key: 2 * place for place, key in enumerate(keys)}
    assert verify(str(job.output)).is_whole
    assert main(["attach", str(job.output), "--name", "labels", "--remove"]) == 2
    assert "no attached table 'labels' to remove; there are none" in capsys.readouterr().err
    # What the run needs stays behind the version that hides it; without the run all of it goes.
    assert "kept labels, version 1" in run("--delete-old", "--runs", str(runs))
    assert sorted(path.name for path in job.output.glob("tables/*")) == [folders[0], folders[3]]
    job.pack(mode="append")
    assert not Dataset.open(job.output).tables
    assert "deleted labels, version 4" in run("--delete-old", "--runs", "none")
    assert not list(job.output.glob("tables/*"))
    attach_values(5)
    assert Dataset.open(job.output).tables.places["labels"].manifest.number == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--delete-old"], "--delete-old needs --runs DIR"),
        (["--delete-old", "--runs", "nowhere"], "no folder 'nowhere' of runs"),
        (["--remove"], "--remove needs --name"),
        (["--remove", "--facts"], "needs one of a file, --facts, --voxels, --remove and --delete-old"),
    ],
)
def test_slips_of_removal_get_a_sentence(
    arguments: list[str], sentence: str, job: PackCase, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", str(job.output), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_damaged_lock_deletes_nothing(job: PackCase, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [key.decode() for key in Dataset.open(job.output).studies.column("sample_key").tolist()]
    for factor in (1, 2):
        rows = [(key, factor * place) for place, key in enumerate(keys)]
        attach(job, write_csv(job.folder / "a.csv", ["sample_key", "value"], rows), "sample_key")
    (job.folder / "runs").mkdir()
    (job.folder / "runs" / "loader.lock.json").write_text("{}")
    assert main(["attach", str(job.output), "--delete-old", "--runs", str(job.folder / "runs")]) == 2
    assert "what its run needs is not known" in capsys.readouterr().err
    assert len(list(job.output.glob("tables/*"))) == 2
