"""A job holds suspect images back, blanks boxes, flags heads, scrubs reports, and says all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import FileDataset

from shardflow.cli.main import main
from shardflow.format.codecs import decode_array
from shardflow.packing import PackSummary
from shardflow.viewing.page import Treatment, summarize
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase, read_ledger

pytestmark = pytest.mark.usefixtures("packs_inline")

_RULES = """
[[blackout]]
name = "corner"
when = { Modality = ["CR"], Rows = ["16"] }
boxes = [[0, 0, 4, 12]]
clears = ["declared"]
"""


def _head(dataset: FileDataset, _: int) -> None:
    dataset.BodyPartExamined = "HEAD"
    dataset.PatientName = "Okonkwo^Chinedu"
    dataset.StudyDate = "20190320"


def _dose_page(dataset: FileDataset, _: int) -> None:
    dataset.ImageType = ["DERIVED", "SECONDARY", "SCREEN SAVE"]


def _burned(dataset: FileDataset, _: int) -> None:
    dataset.BurnedInAnnotation = "YES"


def _us(dataset: FileDataset, _: int) -> None:
    dataset.Modality = "US"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, PackSummary, dict[str, MadeStudy]]:
    case = PackCase(tmp_path_factory.mktemp("deid"))
    case.prepare(has_reports=True)
    head = make_study(case.dicom / "head", patient="P1", num_slices=12, change=_head)
    # The page of another series of the same study.
    make_study(case.dicom / "page", patient="P1", series=2, num_slices=1, change=_dose_page)
    cr = make_study(case.dicom / "cr", patient="P2", modality="CR", num_slices=1, change=_burned)
    us = make_study(case.dicom / "us", patient="P3", modality="CR", num_slices=1, change=_us)
    case.write_reports({head.study_instance_uid: "Okonkwo, 03/14/2019: 8 mm nodule (image 4/12)."})
    (case.folder / "rules.toml").write_text(_RULES, encoding="ascii")
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write(
            '[deid]\nrules_file = "rules.toml"\ndate_order = "mdy"\n[policy]\nmax_quarantined_share = 0\n'
        )
    return case, case.pack(), {"head": head, "cr": cr, "us": us}


def _sample(case: PackCase, study: MadeStudy) -> tuple[dict[str, Any], dict[str, bytes]]:
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(study.study_instance_uid))
    fields = dataset.read_fields(row)
    return json.loads(fields["study.json"]), fields


def test_suspects_are_held_back_and_their_study_is_packed(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]],
) -> None:
    case, summary, studies = packed
    assert summary.status == "packed", "what a rule holds back is no sign of a broken mount"
    assert summary.reasons == {"BURNED_IN_ANNOTATION": 2}
    meta, _ = _sample(case, studies["head"])
    assert [series["num_slices"] for series in meta["series"]] == [12]
    of_us = [
        row
        for row in read_ledger(case.output)
        if row["sample_key"] == case.sample_key(studies["us"].study_instance_uid)
    ]
    assert [row["reason"] for row in of_us] == ["BURNED_IN_ANNOTATION"]


def test_a_report_is_scrubbed_and_counted(packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]]) -> None:
    case, _, studies = packed
    meta, fields = _sample(case, studies["head"])
    assert fields["report.txt"] == b"[NAME], [DATE-6]: 8 mm nodule (image 4/12)."
    assert meta["deidentification"]["report_text"] == {"mode": "strict", "replaced": {"date": 1, "name": 1}}
    assert meta["dates"]["mode"] == "days"
    assert isinstance(meta["dates"]["study_day"], int)


def test_heads_are_flagged(packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]]) -> None:
    case, _, studies = packed
    meta, _ = _sample(case, studies["head"])
    assert meta["series"][0]["deidentification"] == {
        "accepted_rules": [],
        "blackout": None,
        "face_risk": True,
    }


def test_boxes_are_blank_in_what_is_stored(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]],
) -> None:
    case, _, studies = packed
    meta, fields = _sample(case, studies["cr"])
    pixels = decode_array("b2nd", fields["s000.i0000.b2nd"])
    outside = studies["cr"].stored[0, 4:]
    np.testing.assert_array_equal(pixels[4:], outside)
    assert np.unique(pixels[:4]).tolist() == [outside.min()]
    assert meta["series"][0]["deidentification"]["blackout"] == "corner"
    assert "113101" in meta["deidentification"]["profile_codes"]
    assert meta["series"][0]["display_range"][1] <= outside.max()


def test_slices_and_frames_have_surrogates(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]],
) -> None:
    case, _, studies = packed
    meta, _ = _sample(case, studies["head"])
    keys = meta["series"][0]["instance_keys"]
    assert len(set(keys)) == 12
    assert meta["series"][0]["frame_of_reference_key"] is not None


def test_the_manifest_and_the_page_say_what_was_done(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]],
) -> None:
    case, _, _ = packed
    manifest = case.open().manifest
    assert manifest.extra["deidentification"] == {
        "counts": {"blackout_slices": 1, "face_risk_series": 1, "report_date": 1, "report_name": 1},
        "dates": "MODIFIED",
        "profile_codes": ["113100", "113101", "113105", "113107", "113108"],
        "report_text": "strict",
    }
    summary = summarize(manifest, num_reports=1, kept_keywords=(), max_age_years=90)
    assert summary is not None
    assert [code for code, _ in summary.option_codes] == manifest.extra["deidentification"]["profile_codes"]
    treatments = {one.category: one.treatment for one in summary.statements}
    assert treatments["Text of 1 report"] is Treatment.GENERALIZED
    assert treatments["2 images that may show text or a face"] is Treatment.REMOVED
    page = (case.output / "report.html").read_text(encoding="utf-8")
    assert "Clean Descriptors Option" in page


def test_settings_decide(packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]], tmp_path: Path) -> None:
    """Accepted rules, heads kept out (their report with them), texts kept, dates taken out."""
    case, _, _ = packed
    summary = case.pack(
        f"output={tmp_path / 'out'}",
        f"private_dir={tmp_path / 'private'}",
        'deid.accept=["ultrasound"]',
        "deid.face_risk=quarantine",
        "deid.dates=remove",
        "deid.report_text=keep",
    )
    assert summary.reasons == {"BURNED_IN_ANNOTATION": 2, "FACE_RISK": 12}
    assert summary.studies == {"packed": 2, "skipped": 0, "quarantined": 1}


def test_the_officers_page_shows_what_was_held_back_and_a_change_of_it_is_seen(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]], capsys: pytest.CaptureFixture[str]
) -> None:
    case, _, _ = packed
    command = ["report", str(case.output), "--privacy", str(case.private)]
    assert main(command) == 0
    page = case.private / "privacy-000001.html"
    assert page.stat().st_mode & 0o077 == 0
    assert not list(case.output.rglob("privacy*")), "the page shows what must not be in the dataset"
    text = page.read_text(encoding="utf-8")
    first = page.read_bytes()
    for said in (
        "113107",
        "Clean Recognizable Visual Features",
        "slices with boxes that a rule of the site blanks</td><td class=number>1<",
        "Of 15 images among the inputs 2 (13.33 %) were held back",
        "<code>ultrasound</code></td><td>ultrasound</td><td class=number>1<",
        "places replaced by [NAME]",
        "report_text</code></td><td>&quot;strict&quot;",
        "90 stands for every age above 89",
        "pydicom",
        "persons with several",
        "heads were packed with a flag",
    ):
        assert said in text
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.replace("http-equiv", "")
    assert "Okonkwo" not in text
    assert main([*command, "--check"]) == 0
    assert main(command) == 0
    assert page.read_bytes() == first, "the same version gives the same page"
    page.write_bytes(first.replace(b"113107", b"113106"))
    assert main([*command, "--check"]) == 1
    assert "was changed" in capsys.readouterr().out
