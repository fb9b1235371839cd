"""A canary in every attribute that DICOM knows and in every other channel of an input; none comes out.

The text of the report holds one of each of the 18 kinds of identifiers of 45 CFR 164.514(b)(2)(i).
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pydicom.config
import pytest
from pydicom.datadict import DicomDictionary
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence

from shardflow.packing.deid.allowlist import KEYWORDS
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PackCase, read_ledger
from tests.pack_faults import HANDLERS
from tests.privacy.canaries import DATE, KIN, NUMBER, STEM, find_canaries, output_bytes

_TEXTS = frozenset({"AE", "CS", "LO", "LT", "PN", "SH", "ST", "UC", "UR", "UT"})
_UID = f"1.2.826.0.1.3680043.10.{NUMBER}"
# What an image is made of, or is found by: with canaries in them no study would be packed.
_KEPT = frozenset(
    """
    SpecificCharacterSet ImageType SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID
    Modality PatientID SamplesPerPixel PhotometricInterpretation PlanarConfiguration NumberOfFrames
    Rows Columns BitsAllocated BitsStored HighBit PixelRepresentation PixelData RescaleSlope
    RescaleIntercept RescaleType ImagePositionPatient ImageOrientationPatient PixelSpacing
    FrameOfReferenceUID BurnedInAnnotation ConversionType RecognizableVisualFeatures
    ExtendedOffsetTable ExtendedOffsetTableLengths InstanceNumber SeriesNumber
    """.split()  # noqa: SIM905
)
_REPORT = f"""Patient: {STEM} Jane
MRN: {STEM}4711, account {STEM}-08, policy number {STEM}77, licence {STEM}9, license plate {STEM}123.
Born {DATE}. Lives at 12 {STEM.capitalize()} Street, {STEM.capitalize()}, IL 62704.
Phone (555) 123-4567, fax 555-987-6543, mail {STEM}@example.org, http://{STEM}.example.org/a, from 10.1.2.3.
SSN 123-45-6789. Device serial number {STEM}5, fingerprint {STEM}44, photo at www.{STEM}.org/face.jpg.
Study {_UID}1. Discussed with Dr. {STEM.capitalize()} at 3:45 pm on 11/13/1917.
FINDINGS: A 5 mm nodule (series 3, image 45). No effusion.
Compared with the images of {KIN.capitalize()} Doe that {KIN} requested, order {KIN}4711.
Dictated by: {STEM.capitalize()} Doe, MD
"""


def _value(vr: str, tag: int) -> Any:
    if vr in _TEXTS:
        return f"{STEM}{tag:08X}"
    if vr == "UI":
        return f"{_UID}{tag % 1000}"
    return {
        "DA": DATE,
        "DT": f"{DATE}101112",
        "TM": "101112",
        "DS": NUMBER,
        "AS": STEM[:4],
        "UN": STEM.encode(),
        "OB": STEM.encode(),
    }.get(vr)


def _fill(dataset: Dataset, *, kept: frozenset[str]) -> int:
    """Put a canary into every attribute of the dictionary that can hold one."""
    count = 0
    for tag, (vr, _, _, _, keyword) in DicomDictionary.items():
        group = tag >> 16
        if not keyword or keyword in kept or group in {0x0000, 0x0002, 0xFFFE, 0x7FE0} or group > 0x7FE0:
            continue
        value = _value(vr, tag)
        if value is None or (keyword in KEYWORDS and vr == "DS"):
            continue
        dataset.add(DataElement(tag, vr, value))
        count += 1
    return count


def _everything(dataset: FileDataset, _: int) -> None:
    assert _fill(dataset, kept=_KEPT) > 2000
    nested = Dataset()
    _fill(nested, kept=frozenset({"SpecificCharacterSet"}))
    deeper = Dataset()
    deeper.PatientName = f"{STEM}^Deep"
    nested.RequestAttributesSequence = Sequence([deeper])
    dataset.RequestAttributesSequence = Sequence([nested])
    dataset.OriginalAttributesSequence = Sequence([nested])
    block = dataset.private_block(0x0029, STEM, create=True)
    block.add_new(0x01, "LO", f"{STEM} private")
    block.add_new(0x02, "SQ", Sequence([deeper]))
    overlay = dataset.private_block(0x6001, STEM, create=True)
    overlay.add_new(0x01, "UT", STEM * 100)
    dataset.preamble = (STEM * 3).encode().ljust(128, b"\0")
    dataset.file_meta.SourceApplicationEntityTitle = STEM
    dataset.file_meta.PrivateInformationCreatorUID = f"{_UID}1"
    dataset.file_meta.PrivateInformation = STEM.encode()
    dataset.file_meta.ImplementationVersionName = STEM
    dataset.ImageType = ["ORIGINAL", "PRIMARY", STEM]


def _kin(dataset: FileDataset, index: int) -> None:
    """An order that another study of the patient was made for: who gave it, and its number."""
    _everything(dataset, index)
    order, person = Dataset(), Dataset()
    person.RequestingPhysician = f"{KIN}^Doe"
    order.RequestAttributesSequence = Sequence([person])
    order.PlacerOrderNumberImagingServiceRequest = f"{KIN}4711"
    dataset.ReferencedRequestSequence = Sequence([order])


def _nobody(dataset: FileDataset, index: int) -> None:
    _everything(dataset, index)
    dataset.PatientID = ""


def _huge(dataset: FileDataset, index: int) -> None:
    _everything(dataset, index)
    dataset.Rows = dataset.Columns = 65535
    dataset.NumberOfFrames = "2147483647"


def _burned(dataset: FileDataset, index: int) -> None:
    _everything(dataset, index)
    dataset.BurnedInAnnotation = "YES"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good inputs, and one of each kind that fails."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pydicom.config.settings, "_writing_validation_mode", pydicom.config.IGNORE)
        patch.setattr(pydicom.config.settings, "reading_validation_mode", pydicom.config.IGNORE)
        _write_inputs(PackCase(folder))
    return folder


@pytest.fixture
def case(inputs: Path, tmp_path: Path) -> PackCase:
    """The inputs in a folder of the test's own."""
    return PackCase(shutil.copytree(inputs, tmp_path / "case", symlinks=True))


def _write_inputs(case: PackCase) -> None:
    case.prepare(has_reports=True)
    folder = case.dicom / f"{STEM}^{DATE}"
    patient = f"{STEM}4711"
    good = make_study(folder / "good", patient=patient, num_slices=2, change=_everything)
    good.files[0].rename(good.files[0].with_name(f"{STEM} {DATE}.dcm"))
    make_study(folder / "kin", patient=patient, study="K", num_slices=2, change=_kin)
    cut = make_study(folder / "cut", patient=f"{patient}1", num_slices=2, change=_everything)
    truncate(cut.files[0])
    worse = make_study(folder / "worse", patient=f"{patient}2", num_slices=2, change=_everything)
    worse.files[0].write_bytes(worse.files[0].read_bytes()[:3000])
    make_study(folder / "nobody", patient=f"{patient}3", num_slices=1, change=_nobody)
    make_study(folder / "huge", patient=f"{patient}4", num_slices=1, change=_huge)
    make_study(folder / "burned", patient=f"{patient}5", num_slices=1, change=_burned)
    make_study(folder / "twice", patient=f"{patient}6", study="T", num_slices=1, change=_everything)
    twin = make_study(folder / "twin", patient=f"{patient}6", study="T", num_slices=1, change=_conflicting)
    (folder / f"{STEM}.txt").write_text(_REPORT, encoding="utf-8")
    (folder / f"{STEM}.zip").write_bytes(b"PK\x03\x04" + STEM.encode())
    (folder / f"{STEM}.link").symlink_to(folder / STEM)
    (folder / "bundle").write_text(json.dumps(_bundle(good.study_instance_uid)), encoding="utf-8")
    (folder / "message").write_text(_message(good.study_instance_uid, patient), encoding="utf-8")
    (folder / "broken").write_text('{"resourceType": "Bundle", "entry": [' + STEM, encoding="utf-8")
    uids = [study.study_instance_uid for study in (good, twin, cut)]
    with (case.folder / "reports.csv").open("w", encoding="utf-8", newline="") as table:
        table.write(f"study_instance_uid,text,patient_name,{STEM}\n")
        for uid in (*uids, f"{_UID}404", STEM):
            table.write(f'{uid},"{_REPORT}",{STEM},{DATE}\n')
        table.write(f"{STEM}\n")
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write("[policy]\nmax_quarantined_share = 1.0\n")


def _bundle(study_uid: str) -> dict[str, Any]:
    """A document of a patient whose every text is a canary."""
    date = f"{DATE[:4]}-{DATE[4:6]}-{DATE[6:]}"
    person = {
        "resourceType": "Patient",
        "id": STEM,
        "birthDate": date,
        "name": [{"family": STEM, "given": ["Jane"], "text": f"{STEM} Jane"}],
        "identifier": [{"system": f"urn:{STEM}", "value": f"{STEM}4711"}],
        "address": [{"line": [f"12 {STEM} Street"], "city": STEM}],
    }
    study = {
        "resourceType": "ImagingStudy",
        "id": f"{STEM}1",
        "status": "available",
        "subject": {"reference": f"Patient/{STEM}", "display": STEM},
        "identifier": [{"system": "urn:dicom:uid", "value": f"urn:oid:{study_uid}"}],
        "started": f"{date}T10:11:12Z",
        "description": STEM,
    }
    observation = {
        "resourceType": "Observation",
        "id": f"{STEM}2",
        "status": "final",
        "subject": {"reference": f"Patient/{STEM}"},
        "derivedFrom": [{"reference": f"ImagingStudy/{STEM}1"}],
        "code": {"coding": [{"system": "http://loinc.org", "code": "8480-6", "display": STEM}], "text": STEM},
        "effectiveDateTime": f"{date}T10:11:12Z",
        "valueString": f"{STEM.capitalize()} Jane said so on {date}",
        "note": [{"text": f"Called {STEM} Jane at (555) 123-4567."}],
        "performer": [{"display": f"Dr. {STEM.capitalize()}"}],
    }
    entries = [{"fullUrl": f"urn:uuid:{STEM}", "resource": one} for one in (person, study, observation)]
    return {"resourceType": "Bundle", "id": STEM, "type": "collection", "entry": entries}


def _message(study_uid: str, patient: str) -> str:
    """A result in HL7 v2, in which every name and number is a canary."""
    segments = [
        f"MSH|^~\\&|{STEM}|{STEM}|{STEM}|{STEM}|{DATE}101112||ORU^R01|{STEM}|P|2.5",
        f"PID|1||{patient}^^^{STEM}||{STEM}^Jane||{DATE}|F|||12 {STEM} Street^^{STEM}",
        f"OBR|1|{STEM}1|{STEM}2|71020^{STEM}|||{DATE}101112|||||||||{STEM}^Doe",
        f"OBX|1|ST|113014^DICOM Study^DCM||{study_uid}||||||F",
        f"OBX|2|TX|59776-5^Findings^LN||Patient {STEM} Jane, phone (555) 123-4567.||||||F",
    ]
    return "\r".join(segments) + "\r"


def _conflicting(dataset: FileDataset, index: int) -> None:
    """The same study, instance and pixels of another patient."""
    _everything(dataset, index)
    dataset.PatientID = f"{STEM}0815"


def _check(case: PackCase, *texts: str) -> int:
    count = 0
    for name, data in output_bytes(case.output):
        assert not find_canaries(data), name
        count += 1
    for text in texts:
        assert not find_canaries(text.encode())
    return count


def test_no_canary_comes_out(case: PackCase) -> None:
    done = case.command()
    assert done.returncode == 0, done.stderr[-2000:]
    assert _check(case, done.stdout, done.stderr) > 10
    dataset = case.open()
    assert dataset.samples.num_samples >= 1
    reasons: Any = dataset.manifest.extra["reasons"]
    for reason in (
        "BURNED_IN_ANNOTATION",
        "CONFLICTING_IDENTIFIER",
        "HEADER_UNREADABLE",
        "LIMIT_EXCEEDED",
        "MISSING_IDENTIFIER",
        "NOT_DICOM",
        "PIXEL_DATA_TRUNCATED",
    ):
        assert reason in reasons, "this way to fail was not taken"
    ledger = [row for row in read_ledger(case.output) if row["kind"] == "attachment"]
    assert any(row["outcome"] == "packed" for row in ledger), "no attachment was packed"
    texts = [
        dataset.read_fields(row).get("report.txt", b"").decode() for row in range(dataset.samples.num_samples)
    ]
    (text,) = [text for text in texts if text]
    assert "FINDINGS: A 5 mm nodule (series 3, image 45). No effusion." in text
    for number in ("555", "123-45-6789", "10.1.2.3", "62704", "3:45", "1917", "Doe"):
        assert number not in text


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_no_canary_is_said_when_a_process_ends(case: PackCase, fault: str) -> None:
    uid = (case.folder / "reports.csv").read_text(encoding="utf-8").splitlines()[1].split(",")[0]
    case.write_faults(study={case.sample_key(uid): fault})
    done = case.drive("none", HANDLERS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WORKER_" in done.stderr
    _check(case, done.stdout, done.stderr)


def test_a_killed_job_leaves_no_canary_in_the_output(case: PackCase) -> None:
    assert case.drive("phase:samples").returncode == -signal.SIGKILL
    _check(case)


def test_canaries_are_found_where_they_are() -> None:
    for text in (f"a{STEM}b", STEM.lower(), STEM[::-1], KIN, DATE, NUMBER):
        assert find_canaries(text.encode())
        assert find_canaries(text.encode("utf-16-le"))
        assert find_canaries(text.encode().hex().encode())
    assert not find_canaries(b"nothing of the kind")
