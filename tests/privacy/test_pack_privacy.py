"""Sentinels in every input channel; not one in any byte that leaves the private folder, whatever fails."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydicom.dataset import Dataset, FileDataset
from pydicom.sequence import Sequence

from shardflow.format.codecs import decode_array
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PackCase
from tests.pack_faults import HANDLERS

_NAMES = {
    "PatientName": "Zqxname^Vkjane",
    "OtherPatientNames": "Zqxother^Vkname",
    "PatientMotherBirthName": "Zqxmother^Vk",
    "ReferringPhysicianName": "Zqxreferring^Vk",
    "PerformingPhysicianName": "Zqxperforming^Vk",
    "OperatorsName": "Zqxoperator^Vk",
    "NameOfPhysiciansReadingStudy": "Zqxreading^Vk",
    "RequestingPhysician": "Zqxrequesting^Vk",
    "ResponsiblePerson": "Zqxresponsible^Vk",
}
_TEXTS = {
    "PatientID": "ZQXMRN4711VK",
    "OtherPatientIDs": "ZQXOTHERID0815VK",
    "AccessionNumber": "ZQXACC99VK",
    "StudyID": "ZQXSTUDYID5VK",
    "InstitutionName": "Zqx Hospital Vk",
    "InstitutionAddress": "Zqxstreet 5 Vktown",
    "InstitutionalDepartmentName": "Zqx Department Vk",
    "StationName": "ZQXSTATIONVK",
    "DeviceSerialNumber": "ZQXSERIALVK",
    "PatientAddress": "Zqxroad 12 Vkcity",
    "PatientTelephoneNumbers": "0049-ZQX-555-VK",
    "PatientComments": "Zqx comment on the patient Vk",
    "ImageComments": "Zqx comment on the image Vk",
    "StudyDescription": "Zqx study of Vk Jane",
    "SeriesDescription": "Zqx series of Vk Jane",
    "ProtocolName": "Zqx protocol Vk",
    "RequestedProcedureDescription": "Zqx procedure Vk",
    "AdditionalPatientHistory": "Zqx history Vk",
    "MedicalRecordLocator": "ZQXLOCATORVK",
    "EthnicGroup": "ZQXETHNICVK",
    "Occupation": "ZQXOCCUPATIONVK",
    "InsurancePlanIdentification": "ZQXINSURANCEVK",
    "CountryOfResidence": "ZQXCOUNTRYVK",
    "MilitaryRank": "ZQXRANKVK",
    "ContrastBolusAgent": "Zqx contrast Vk",
    "SoftwareVersions": "ZQXSOFTWAREVK",
    "FillerOrderNumberImagingServiceRequest": "ZQXORDERVK",
    # Typed into fields of which a value may leave.
    "BodyPartExamined": "ZQXBODYVK",
    "Manufacturer": "Zqx maker Vk",
    "ManufacturerModelName": "Zqx model Vk",
    "ConvolutionKernel": "ZQXKERNELVK",
    "ScanningSequence": "ZQXSEQUENCEVK",
    "ViewPosition": "ZQXVIEWVK",
    "PatientPosition": "ZQXPOSITIONVK",
    "Laterality": "Z",
    "RescaleType": "ZQXUNITVK",
    "WindowCenterWidthExplanation": "ZQXWINDOWVK",
}
_DATES = {
    "PatientBirthDate": "19530607",
    "StudyDate": "20170819",
    "SeriesDate": "20170820",
    "AcquisitionDate": "20170821",
    "ContentDate": "20170822",
    "InstanceCreationDate": "20170823",
    "StudyTime": "031459.265358",
    "AcquisitionDateTime": "20170824031459.26",
}
_PLACES = [
    "ZQXFOLDERVK",
    "ZQXFILEVK",
    "Zqxréportvk",
    "ZQXPREAMBLEVK",
    "ZQXPRIVATEVK",
    "ZQXNESTEDVK",
    "ZQXTYPEVK",
]
_FAULT = "DOE^JANE"
_REPORT = "Zqxreporttext Vkfinding"


def _sentinels() -> list[str]:
    names = list(itertools.chain.from_iterable(value.split("^") for value in _NAMES.values()))
    return [
        *names,
        *_NAMES.values(),
        *(value for value in _TEXTS.values() if len(value) > 3),
        *_DATES.values(),
        *_PLACES,
        _FAULT,
        "1.2.826.0.1.3680043.10.1234.",
    ]


def _identify(dataset: FileDataset, _: int) -> None:
    for keyword, value in {**_NAMES, **_TEXTS, **_DATES}.items():
        if keyword != "PatientID":
            setattr(dataset, keyword, value)
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "ZQXTYPEVK"]
    # Some sites put dates and record numbers where images are counted.
    dataset.SeriesNumber, dataset.InstanceNumber = 20170819, 20170822
    dataset.ExposureInuAs = 19530607
    dataset.preamble = b"ZQXPREAMBLEVK".ljust(128, b"\0")
    nested = Dataset()
    nested.PatientName = "ZQXNESTEDVK^Jane"
    nested.StudyInstanceUID = "1.2.826.0.1.3680043.10.1234.77"
    dataset.RequestAttributesSequence = Sequence([nested])
    dataset.OriginalAttributesSequence = Sequence([nested])
    block = dataset.private_block(0x0029, "ZQXPRIVATEVK", create=True)
    block.add_new(0x01, "LO", "ZQXPRIVATEVK value")


def _without_patient(dataset: FileDataset, index: int) -> None:
    _identify(dataset, index)
    dataset.PatientID = ""


def _strange(dataset: FileDataset, index: int) -> None:
    _identify(dataset, index)
    dataset.PhotometricInterpretation = "ZQXTYPEVK"


def _typed_into_modality(dataset: FileDataset, index: int) -> None:
    _identify(dataset, index)
    dataset.Modality = "ZQXBODYVK"


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    """Good and failing inputs, all of them full of sentinels."""
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    # Strict scrubbing would mask the sentinel of the report, which has to be in its place.
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write('[deid]\nreport_text = "scrub"\n')
    folder = case.dicom / "ZQXFOLDERVK^1953"
    mrn = _TEXTS["PatientID"]
    good = make_study(folder / "good", patient=mrn, change=_identify)
    other = make_study(folder / "other", patient=f"{mrn}2", modality="CR", num_slices=1, change=_identify)
    make_study(folder / "silent", patient=f"{mrn}3", modality="MR", change=_identify)
    cut = make_study(folder / "cut", patient=f"{mrn}4", change=_identify)
    truncate(cut.files[0])
    worse = make_study(folder / "worse", patient=f"{mrn}5", change=_identify)
    data = worse.files[1].read_bytes()
    # A value representation that is none, a length that leads nowhere, a header cut inside a name.
    worse.files[1].write_bytes(data.replace(b"PN", b"QQ", 1))
    worse.files[2].write_bytes(data[:700])
    worse.files[3].write_bytes(data.replace(b"LO\x0c\x00", b"LO\xff\xff", 1))
    make_study(folder / "nobody", patient=f"{mrn}6", change=_without_patient)
    make_study(folder / "strange", patient=f"{mrn}7", change=_strange)
    make_study(folder / "typed", patient=f"{mrn}8", change=_typed_into_modality)
    good.files[0].rename(good.files[0].with_name("ZQXFILEVK 19530607.dcm"))
    (folder / "Zqxréportvk.txt").write_text(f"{_REPORT} {_NAMES['PatientName']}", encoding="utf-8")
    case.write_reports(
        [
            (good.study_instance_uid, _REPORT),
            (other.study_instance_uid, _REPORT),
            (cut.study_instance_uid, _REPORT),
            ("1.2.826.0.1.3680043.10.1234.404", f"{_REPORT} of {_NAMES['PatientName']}"),
            (_NAMES["PatientName"], _REPORT),
        ]
    )
    with (case.folder / "reports.csv").open("a", encoding="utf-8") as table:
        table.write(f",{_REPORT}\n{mrn}\n{mrn},{_REPORT},ZQXNESTEDVK\n")
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(text + "[policy]\nmax_quarantined_share = 1.0\n", encoding="utf-8")
    return case


def _variants(sentinel: str) -> Iterator[bytes]:
    """A sentinel as it is, in other cases and encodings, backwards, and inside base64 at any offset."""
    for text in {sentinel, sentinel.lower(), sentinel.upper(), sentinel[::-1]}:
        plain = text.encode()
        yield plain
        yield text.encode("utf-16-le")
        yield text.encode("utf-16-be")
        yield plain.hex().encode()
        yield json.dumps(text)[1:-1].encode()
        for offset in range(3):
            encoded = base64.b64encode(bytes(offset) + plain + bytes(3))
            yield encoded[4 : -4 - (len(plain) + offset) % 3 - 1]


def _leaks(data: bytes, *, but: str = "") -> list[str]:
    return [
        sentinel
        for sentinel in _sentinels()
        if sentinel != but and any(variant in data for variant in _variants(sentinel) if len(variant) > 5)
    ]


def _check_folder(folder: Path) -> int:
    """Look into every byte below a folder, and into what slices decode to."""
    count = 0
    for path in folder.rglob("*"):
        assert not _leaks(str(path.relative_to(folder)).encode())
        if path.is_file():
            assert not _leaks(path.read_bytes()), path.name
            count += 1
    for path in folder.rglob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                assert (member.uname, member.gname, member.mtime, member.uid) == ("", "", 0, 0)
                stream = tar.extractfile(member)
                assert stream is not None
                payload = stream.read()
                assert not _leaks(payload)
                if member.name.endswith(".b2nd"):
                    assert not _leaks(decode_array("b2nd", payload).tobytes())
                is_report = member.name.endswith("report.txt")
                assert (_REPORT.encode() in payload) is is_report
    return count


def test_nothing_identifying_leaves(case: PackCase) -> None:
    done = case.command()
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    # The failing inputs failed, and the good ones were packed: else the test would show nothing.
    assert summary["studies"]["packed"] >= 4
    assert summary["inputs"]["quarantined"] >= 8
    assert "MISSING_IDENTIFIER" in summary["reasons"]
    assert _check_folder(case.output) >= 6
    assert not _leaks((done.stdout + done.stderr).encode())
    for path in case.output.rglob("*"):
        if path.is_file() and path.suffix != ".tar":
            assert _REPORT.encode() not in path.read_bytes()
    assert _REPORT not in done.stdout + done.stderr


def test_nothing_identifying_lies_in_the_work_folder(case: PackCase) -> None:
    """A killed job leaves its work folder inside the dataset's; headers and texts are in the private one."""
    assert case.drive("phase:samples").returncode == -signal.SIGKILL
    assert (case.output / ".work").is_dir()
    _check_folder(case.output)
    fragments = [path for path in (case.output / ".work").rglob("*") if path.is_file()]
    assert fragments
    private = b"".join(path.read_bytes() for path in (case.private / "headers").iterdir())
    assert _leaks(private), "headers must be where they are looked for"


def test_nothing_identifying_is_said_when_processes_fail(case: PackCase) -> None:
    """A process raises an error that quotes a name; the job stops at its limit and says why."""
    case.write_faults(study={case.sample_key(uid): "raise" for uid in _study_uids(case)})
    done = case.drive("none", HANDLERS)
    assert done.returncode == 0, done.stderr
    assert "WORKER_FAILED (ValueError at tests/pack_faults.py" in done.stderr
    assert not _leaks((done.stdout + done.stderr).encode())
    _check_folder(case.output)


def test_nothing_identifying_lies_in_the_logs_of_ray(case: PackCase) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from tests.ray_cluster import ray_cluster

    uids = _study_uids(case)
    case.write_faults(study={case.sample_key(uid): "raise" for uid in uids[:1]})
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    try:
        with ray_cluster(folder, num_nodes=1) as cluster:
            settings = ["execution.engine=ray", f"execution.ray_address={cluster.address}"]
            assert case.pack(*settings, handlers=HANDLERS).reasons["WORKER_FAILED"] >= 1
        logs = [path for path in folder.rglob("*") if path.is_file()]
        assert any("worker" in path.name for path in logs)
        for path in logs:
            assert not _leaks(path.read_bytes()), path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _study_uids(case: PackCase) -> list[str]:
    lines = (case.folder / "reports.csv").read_text(encoding="utf-8").splitlines()
    return [line.split(",")[0] for line in lines[1:] if line.startswith("1.2.")]


@pytest.mark.parametrize(
    "mistake",
    [
        ("inputs.dicom=/data/ZQXFOLDERVK^1953",),
        ("inputs.reports=/data/ZQXFOLDERVK^1953.csv",),
        ("output=/proc/ZQXFOLDERVK/out",),
        ("identity.key_file=/data/ZQXFOLDERVK",),
        ("inputs.reports_format=folder",),
    ],
)
def test_nothing_identifying_is_said_about_mistaken_settings(
    case: PackCase, mistake: tuple[str, ...]
) -> None:
    arguments = [part for setting in mistake for part in ("--set", setting)]
    done = case.command(*arguments)
    assert done.returncode in {1, 2}, done.stderr
    assert not _leaks((done.stdout + done.stderr).encode())


def test_nothing_identifying_is_said_about_a_broken_table(case: PackCase) -> None:
    with (case.folder / "reports.csv").open("a", encoding="utf-8") as table:
        table.write(f'"{_TEXTS["PatientID"]},{_REPORT}\nZQXNESTEDVK')
    done = case.command()
    assert done.returncode == 2
    assert not _leaks((done.stdout + done.stderr).encode())
    assert _REPORT not in done.stdout + done.stderr


def test_sentinels_are_found_where_they_are() -> None:
    """The check itself: every variant is seen."""
    for text in ("x Zqxname^Vkjane y", "zqxname^vkjane", "ZQXMRN4711VK"[::-1]):
        assert _leaks(text.encode())
        assert _leaks(b"a" + base64.b64encode(b"??" + text.encode() + b"??"))
    assert _leaks("19530607".encode("utf-16-le"))
    assert not _leaks(b"nothing of the kind")
