"""Facts read again from the headers of the source: those of packing, for a dataset that lacks them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydicom
import pytest

from shardflow.cli.main import main
from shardflow.format import Dataset
from shardflow.format.facts.series import SERIES_NAME, SeriesManifest, open_series
from shardflow.format.facts.studies import STUDIES_NAME, StudiesManifest
from shardflow.format.keys import STUDY_FIELD
from tests.dicom_factory import make_study
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

_LACKING = ("technical", "images", "modality", "body_part", "series_number")


def _views(dataset: pydicom.Dataset, index: int) -> None:
    dataset.Modality, dataset.ViewPosition, dataset.ImageLaterality = "DX", ["PA", "LL"][index % 2], "L"
    dataset.SeriesNumber, dataset.PatientAge, dataset.PatientSex = 3, "061Y", "F"


def _ct(dataset: pydicom.Dataset, index: int) -> None:
    dataset.KVP, dataset.SliceThickness, dataset.ConvolutionKernel = "120", "2.5", "B30f"
    dataset.BodyPartExamined, dataset.PatientAge = "CHEST", "044Y"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackCase:
    case = PackCase(tmp_path_factory.mktemp("source") / "job")
    case.folder.mkdir()
    case.prepare()
    for number, change in enumerate((_ct, _views, _ct, _views)):
        make_study(
            case.dicom / f"p{number}",
            patient=f"CANARY{number}",
            study=str(number),
            num_slices=2,
            seed=number,
            change=change,
        )
    case.pack()
    return case


def _tables(case: PackCase) -> list[bytes]:
    dataset_id = Dataset.open(case.output).manifest.dataset_id
    return [
        (case.output / SeriesManifest.folder(dataset_id) / SERIES_NAME).read_bytes(),
        (case.output / StudiesManifest.folder(dataset_id) / STUDIES_NAME).read_bytes(),
    ]


def _earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let studies lack what packing did not store once."""
    read_fields = Dataset.read_fields

    def lacking(self: Dataset, row: int, names: Sequence[str], **settings: Any) -> Any:
        found = dict(read_fields(self, row, names, **settings))
        study = json.loads(found[STUDY_FIELD])
        study["series"] = [
            {name: value for name, value in one.items() if name not in _LACKING} for one in study["series"]
        ]
        study["patient"] = {"patient_key": study["patient"]["patient_key"]}
        return {**found, STUDY_FIELD: json.dumps(study).encode()}

    monkeypatch.setattr(Dataset, "read_fields", lacking)


def test_headers_give_the_facts_that_packing_would_have_stored(
    packed: PackCase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _tables(packed)
    roles = open_series(Dataset.open(packed.output))[0].count_roles()
    assert roles["mixed"] or roles["frontal"]
    dataset_id = Dataset.open(packed.output).manifest.dataset_id
    for folder in (SeriesManifest.folder(dataset_id), StudiesManifest.folder(dataset_id)):
        for path in (packed.output / folder).iterdir():
            path.unlink()
    _earlier_version(monkeypatch)
    facts = ["attach", str(packed.output), "--facts"]
    assert main(facts) == 0
    without = _tables(packed)
    assert without[0] != expected[0]
    (packed.dicom / "notes.txt").write_text("no image")
    source = ["--source", str(packed.dicom), "--private-dir", str(packed.private)]
    capsys.readouterr()
    assert main([*facts, *source, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["source_files"], said["source_images"]) == (8, 8)
    assert _tables(packed) == expected
    assert b"CANARY" not in b"".join(_tables(packed))
    # Without the source what is known is kept.
    assert main(facts) == 0
    assert _tables(packed) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--facts", "--source", "{dicom}"], "--source DIR --private-dir DIR"),
        (["--facts", "--source", "{empty}", "--private-dir", "{private}"], "None of the 0 files"),
        (["--facts", "--source", "{dicom}/none", "--private-dir", "{private}"], "got no folder"),
        (["--facts", "--source", "{dicom}", "--private-dir", "{empty}"], "no secret key"),
    ],
)
def test_a_slip_is_one_sentence(
    packed: PackCase, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], sentence: str
) -> None:
    places = {"dicom": packed.dicom, "private": packed.private, "empty": tmp_path}
    assert main(["attach", str(packed.output), *(one.format(**places) for one in given)]) == 2
    assert sentence in capsys.readouterr().err
