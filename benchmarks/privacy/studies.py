"""Generated studies with planted identifiers, packed whole: what of them is in any byte of the dataset.

python -m benchmarks.privacy.studies [--num 500]

Every person has two studies under two spellings of one patient ID. Identifiers are in headers (nested and
private elements, preamble, file names), reports, clinical records, ultrasound and declared pixels, and pages;
every tenth person's second study is a head, another one's a body that is none. The words planted begin alike
and are words of no language, so that a search for their beginning in the forms of `tests.privacy.canaries`
finds each of them; names that are words are measured by ``benchmarks/privacy/text.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset as Attributes
from pydicom.sequence import Sequence

from benchmarks.about import about_run
from shardflow.format import Dataset
from shardflow.format.codecs import decode_array
from shardflow.synthetic.draws import Draws
from shardflow.synthetic.identifiers import PlantedImage, letters_of, make_backgrounds, plant_text
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase
from tests.phantoms import Scan, head, scan, torso
from tests.privacy.canaries import output_bytes, variants

WORD: Final = "Qzarv"
"""Beginning of every planted word."""
NUMBER: Final = "908172"
"""Beginning of every planted number."""
UID: Final = "1.2.826.0.1.3680043.10.1234."
"""Beginning of every UID."""
_LEFT: Final = 0.1
"""Share of a line's ink that may stay; with more it counts as readable."""
_FACE_LEFT: Final = 0.01
"""Share of a face's voxels that may stay."""
_BACKGROUNDS: Final = 48
_DATE: Final = re.compile(r"(?:18|19|20)\d\d-?\d\d-?\d\d|\d{1,2}[./]\d{1,2}[./](?:19|20)\d\d")
_IMAGES: Final = ("BURNED_IN_ANNOTATION", "FACE_RISK")
SETTINGS: Final = (
    'deid.pixel_text="blank"',
    'deid.face_risk="deface"',
    'deid.date_order="mdy"',
    "policy.max_quarantined_share=1.0",
    'shards.target_bytes="16MiB"',
    "splits={train=50, val=25, test=25}",
    'execution.memory_bytes="4GiB"',
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedStudy:
    """A study, and what was planted in its images."""

    person: int
    kind: str
    made: MadeStudy
    image: PlantedImage | None = None
    volume: Scan | None = None


@dataclass(kw_only=True, slots=True)
class PlantedStudies:
    """A packed collection of generated studies."""

    case: PackCase
    studies: list[PlantedStudy] = field(default_factory=list)


def make_studies(folder: Path, num: int, every: int = 1) -> PlantedStudies:
    """Write two studies of each of ``num`` persons, or of every n-th, with reports and records."""
    case = PackCase(folder)
    case.prepare(has_reports=True)
    found = PlantedStudies(case=case)
    backgrounds = list(make_backgrounds("development", min(num, _BACKGROUNDS) // 4 * 4 + 4))
    fonts, reports = letters_of("test"), {}
    for person in range(0, num, every):
        for visit in (0, 1):
            study = _make(case, person, visit, backgrounds, fonts)
            found.studies.append(study)
            reports[study.made.study_instance_uid] = _report(person, visit)
    case.write_reports(reports)
    return found


def _values(person: int) -> dict[str, str]:
    letters = "".join("abcdefghijklmnop"[person >> shift & 15] for shift in (8, 4, 0))
    return {
        "family": f"{WORD}i{letters}",
        "given": f"{WORD}elle{letters}",
        "doctor": f"{WORD}o{letters}",
        "hospital": f"{WORD}um{letters}",
        "street": f"{WORD}en{letters}",
        "id": f"{NUMBER}{person:05d}",
        "accession": f"ACC{NUMBER}7{person:05d}",
        "phone": f"555-{NUMBER[:3]}-{NUMBER[3:]}{person % 10}",
        "birth": f"{1930 + person % 60}{1 + person % 12:02d}{2 + person % 26:02d}",
        "day": f"{2012 + person % 9}{1 + person % 11:02d}{3 + person % 24:02d}",
    }


def _patient_id(person: int, visit: int) -> str:
    plain = _values(person)["id"]
    other = (f"00{plain}", f"{plain[:3]}-{plain[3:]}", f"{plain}^WEST", f"H{plain}")[person % 4]
    return other if visit else plain


def _report(person: int, visit: int) -> str:
    v = _values(person)
    birth, day = (f"{one[4:6]}/{one[6:]}/{one[:4]}" for one in (v["birth"], v["day"]))
    return (
        f"PATIENT: {v['family'].upper()}, {v['given'].upper()}   MRN: {_patient_id(person, visit)}\n"
        f"DOB: {birth}   Accession: {v['accession']}{visit}   Date of exam: {day}\n"
        f"Clinic {v['hospital']}, 12 {v['street']} Street, phone {v['phone']}, "
        f"{v['family'].lower()}@{v['hospital'].lower()}.example\n"
        f"INDICATION: {v['given']} is a ninety-four year old with cough.\n"
        f"FINDINGS: 5 mm nodule in the right upper lobe. No pleural effusion. Compared with {day}.\n"
        f"IMPRESSION: Stable nodule. Discussed with {v['doctor']} by telephone.\n"
        f"cc: {v['given']} {v['family']}. Dictated by Dr. {v['doctor']}\n"
    )


def _fill(dataset: Attributes, person: int, visit: int) -> None:
    """Put the person into a header: where it belongs, deep in sequences, and where it does not belong."""
    v = _values(person)
    name = f"{v['family']}^{v['given']}"
    dataset.PatientName, dataset.PatientBirthDate, dataset.PatientSex = name, v["birth"], "FM"[person % 2]
    dataset.PatientAge, dataset.AccessionNumber = "094Y", f"{v['accession']}{visit}"
    dataset.StudyDate = dataset.SeriesDate = dataset.AcquisitionDate = v["day"]
    dataset.StudyTime, dataset.InstitutionName = "101112", f"Clinic {v['hospital']}"
    dataset.ReferringPhysicianName = dataset.OperatorsName = f"{v['doctor']}^A"
    dataset.PatientAddress, dataset.PatientTelephoneNumbers = f"12 {v['street']} Street", v["phone"]
    dataset.StationName = f"{v['hospital'][:12]}1"
    dataset.StudyDescription = dataset.ProtocolName = f"Chest of {v['family']}"
    dataset.PatientComments = dataset.ImageComments = f"Brother of {v['given']}, {v['phone']}"
    dataset.OtherPatientIDs = _patient_id(person, 1 - visit)
    item = Attributes()
    item.RequestingPhysician, item.PatientID = f"{v['doctor']}^B", v["id"]
    item.RequestedProcedureDescription = f"For {v['family']}"
    dataset.RequestAttributesSequence = Sequence([item])
    block = dataset.private_block(0x0029, v["hospital"], create=True)
    block.add_new(0x01, "LO", f"{v['family']} private")
    block.add_new(0x02, "UN", v["id"].encode())


def _record(person: int, visit: int) -> dict[str, Any]:
    v = _values(person)
    iso = f"{v['day'][:4]}-{v['day'][4:6]}-{v['day'][6:]}"
    patient = {
        "resourceType": "Patient",
        "id": "p",
        "identifier": [{"value": _patient_id(person, visit)}],
        "name": [{"family": v["family"], "given": [v["given"]]}],
        "telecom": [{"value": v["phone"]}],
        "birthDate": f"{v['birth'][:4]}-{v['birth'][4:6]}-{v['birth'][6:]}",
    }
    value = {
        "resourceType": "Observation",
        "status": "final",
        "subject": {"reference": "Patient/p", "display": f"{v['given']} {v['family']}"},
        "code": {"coding": [{"system": "http://loinc.org", "code": "718-7", "display": v["hospital"]}]},
        "effectiveDateTime": f"{iso}T09:30:00Z",
        "valueQuantity": {"value": 13.5, "unit": "g/dL", "code": "g/dL"},
        "note": [{"text": f"Told to {v['doctor']} of {v['hospital']}, {v['phone']}"}],
    }
    return {"resourceType": "Bundle", "entry": [{"resource": patient}, {"resource": value}]}


def _make(
    case: PackCase, person: int, visit: int, backgrounds: list[tuple[str, NDArray[Any]]], fonts: Any
) -> PlantedStudy:
    """Write one study; what is in its image follows from the numbers of person and visit."""
    v, draws = _values(person), Draws(5, "studies", person, visit)
    folder = case.dicom / f"{v['family']}_{_patient_id(person, visit)}_{v['birth']}"
    kind = ("head" if person % 10 == 0 else "body" if person % 10 == 5 else "image") if visit else "image"
    image, volume = None, None
    modality, pixels = backgrounds[(3 * person + visit) % len(backgrounds)]
    if kind in ("head", "body"):
        contrast = ("CT", "T1", "T2", "FLAIR")[person // 10 % 4]
        size = draws.real(0.9, 1.05)
        shapes, spacing, count = (
            (head(size), (4.0, 4.0, 6.0), (64, 64, 42))
            if kind == "head"
            else (torso(size), (6.5, 6.5, 6.0), (64, 64, 20))
        )
        center = (0.0, -8.0, -30.0) if kind == "head" else (0.0, 0.0, 0.0)
        volume = scan(shapes, contrast=contrast, center=center, spacing=spacing, count=count, seed=person)
        modality = volume.modality
    elif not visit and person % 5 == 1:
        kind, modality = "page", ("CT", "MR")[person // 5 % 2]
    elif modality == "US" or (not visit and person % 5 == 3):
        kind = "text"
        pixels = _unique(pixels, person, visit)
        image = plant_text(pixels, modality, "test", draws, fonts)

    def change(dataset: Attributes, index: int) -> None:
        _fill(dataset, person, visit)
        dataset.preamble = f"{v['family']} {v['id']}".encode().ljust(128, b"\0")
        if volume is not None:
            affine = volume.affine_lps
            dataset.SeriesDescription, dataset.BodyPartExamined = "220FOV", ""
            dataset.PixelSpacing = [float(affine[1, 1]), float(affine[0, 0])]
            dataset.SliceThickness = float(affine[2, 2])
            dataset.ImagePositionPatient = [float(one) for one in (affine @ [0, 0, index, 1])[:3]]
            _set_pixels(dataset, _stored(volume)[index] + 1024 * (modality == "CT"))
        elif kind == "page":
            _set_pixels(dataset, _page(person, visit))
        else:
            shown = _unique(pixels, person, visit) if image is None else image.pixels
            _set_pixels(dataset, shown - min(0, int(shown.min())))
        if kind == "text":
            dataset.BurnedInAnnotation = "YES"
            if modality == "US":
                dataset.Modality, dataset.SOPClassUID = "US", "1.2.840.10008.5.1.4.1.1.6.1"
                dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID

    num = 1 if volume is None else len(volume.pixels)
    made = make_study(
        folder,
        patient=_patient_id(person, visit),
        study=f"V{visit}",
        modality={"US": "CR", "PT": "MR"}.get(modality, modality),
        num_slices=num,
        size=(8, 8),
        change=change,
    )
    if person % 4 == 0:
        (folder / "record.json").write_text(json.dumps(_record(person, visit)), encoding="utf-8")
    return PlantedStudy(person=person, kind=kind, made=made, image=image, volume=volume)


def _stored(volume: Scan) -> NDArray[np.int64]:
    """Return a volume as a dataset stores it where nothing is cut."""
    zero = 1024 * (volume.modality == "CT")
    return np.clip(volume.pixels + zero, 0, 4095).astype(np.int64) - zero


def _unique(pixels: NDArray[Any], person: int, visit: int) -> NDArray[Any]:
    """Return an image that is no copy of another: copies are one person."""
    rng = np.random.default_rng([person, visit])
    grain = rng.integers(0, 2, (*pixels.shape[:2], *[1] * (pixels.ndim - 2)))
    return np.asarray(np.clip(pixels + grain, None, np.iinfo(pixels.dtype).max), pixels.dtype)


def _set_pixels(dataset: Attributes, pixels: NDArray[Any]) -> None:
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    if pixels.dtype == np.uint8:
        dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 8, 8, 7
        if pixels.ndim == 3:
            dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 3, "RGB"
            dataset.PlanarConfiguration = 0
        dataset.PixelData = np.ascontiguousarray(pixels).tobytes()
        return
    dataset.BitsStored, dataset.HighBit = 16, 15
    dataset.PixelData = pixels.astype("<u2").tobytes()


def _page(person: int, visit: int) -> NDArray[np.uint16]:
    """A screen of text about the person, declared as an image."""
    v, layer = _values(person), np.zeros((400, 640), np.uint8)
    for number, text in enumerate([*_report(person, visit).split("\n"), v["phone"], v["street"]]):
        cv2.putText(layer, text[:70], (10, 24 + 30 * number), cv2.FONT_HERSHEY_SIMPLEX, 0.5, 255, 1)
    return np.asarray(layer, np.uint16) * 16


def measure(planted: PlantedStudies, *settings: str) -> dict[str, Any]:
    """Pack the studies, and count what is left of each kind of identifier."""
    case = planted.case
    start = time.process_time()
    summary = case.pack(*SETTINGS, *settings)
    dataset = case.open()
    return {
        "persons": len({one.person for one in planted.studies}),
        "studies": len(planted.studies),
        "images": sum(len(one.made.files) for one in planted.studies),
        "found_in_bytes": _found_in_bytes(case),
        "dates_found": _found_dates(planted, dataset),
        **_pixels(planted, dataset),
        **_persons(planted, dataset),
        **_held_back(planted, case),
        "reasons": summary.reasons,
        "seconds_of_the_job_alone": round(time.process_time() - start, 1),
    }


def _found_in_bytes(case: PackCase) -> int:
    forms = sorted({form for text in (WORD, NUMBER, UID) for form in variants(text)})
    return sum(data.count(form) for _, data in output_bytes(case.output) for form in forms)


def _found_dates(planted: PlantedStudies, dataset: Dataset) -> int:
    """Count birth dates and dates of studies in the texts of the samples."""
    days = set()
    for person in {one.person for one in planted.studies}:
        for one in (_values(person)["birth"], _values(person)["day"]):
            days |= {one, f"{one[:4]}-{one[4:6]}-{one[6:]}", f"{one[4:6]}/{one[6:]}/{one[:4]}"}
    found = 0
    for row in range(dataset.samples.num_samples):
        for name, data in dataset.read_fields(row).items():
            if name.endswith((".json", ".txt")):
                found += sum(one in days for one in _DATE.findall(data.decode("utf-8")))
    return found


def _rows(dataset: Dataset, planted: PlantedStudies) -> dict[str, int]:
    """Return the rows of the studies that were packed, by Study Instance UID."""
    row_of = {key.decode(): row for row, key in enumerate(dataset.samples.column("sample_key").tolist())}
    uids = [one.made.study_instance_uid for one in planted.studies]
    keys = map(planted.case.sample_key, uids)
    return {uid: row_of[key] for uid, key in zip(uids, keys, strict=True) if key in row_of}


def _slices(dataset: Dataset, row: int | None) -> Iterator[NDArray[Any]]:
    """Yield the stored slices of a study in order; none if it was held back."""
    if row is not None:
        for name, data in sorted(dataset.read_fields(row).items()):
            if name.startswith("s000.i"):
                yield decode_array(name.rpartition(".")[2], data)


def _pixels(planted: PlantedStudies, dataset: Dataset) -> dict[str, Any]:
    """Count lines of text, pages and faces that are still to be seen."""
    counts: Counter[str] = Counter()
    rows = _rows(dataset, planted)
    for study in planted.studies:
        row = rows.get(study.made.study_instance_uid)
        if study.image is not None:
            lines = [line for line in study.image.lines if not line.is_marker]
            counts["lines"] += len(lines)
            for stored in _slices(dataset, row):
                shown = np.asarray(study.image.pixels, np.int64) - min(0, int(study.image.pixels.min()))
                kept = np.asarray(stored, np.int64) == shown - 1024 * (study.image.modality == "CT")
                kept = kept if kept.ndim == 2 else kept.all(2)
                assert kept.mean() > 0.5, "images cannot be compared"
                counts["lines_readable"] += sum(float(kept[line.ink].mean()) > _LEFT for line in lines)
                counts["images_with_text_packed"] += 1
        elif study.kind == "page":
            counts["pages"] += 1
            counts["pages_packed"] += len(list(_slices(dataset, row)))
        elif study.kind == "head" and study.volume is not None and study.volume.face is not None:
            counts["heads"] += 1
            volume = list(_slices(dataset, row))
            if volume:
                counts["heads_packed"] += 1
                is_kept = np.stack(volume) == _stored(study.volume)
                assert is_kept.mean() > 0.5, "volumes cannot be compared"
                counts["faces_published"] += float(is_kept[study.volume.face].mean()) > _FACE_LEFT
    names = ("lines", "lines_readable", "images_with_text_packed", "pages", "pages_packed")
    return {name: counts[name] for name in (*names, "heads", "heads_packed", "faces_published")}


def _persons(planted: PlantedStudies, dataset: Dataset) -> dict[str, int]:
    """Count persons whose studies are in two splits, or under two keys."""
    rows = _rows(dataset, planted)
    shards = [shard.split for shard in dataset.manifest.shards]
    column = dataset.samples.column("shard")
    splits: dict[int, set[str]] = {}
    keys: dict[int, set[str]] = {}
    for study in planted.studies:
        row = rows.get(study.made.study_instance_uid)
        if row is not None:
            facts = json.loads(dataset.read_fields(row, ["study.json"])["study.json"])
            splits.setdefault(study.person, set()).add(shards[int(column[row])])
            keys.setdefault(study.person, set()).add(facts["patient"]["patient_key"])
    return {
        "persons_in_two_splits": sum(len(one) > 1 for one in splits.values()),
        "persons_under_two_keys": sum(len(one) > 1 for one in keys.values()),
        "persons_packed": len(keys),
    }


def _held_back(planted: PlantedStudies, case: PackCase) -> dict[str, Any]:
    """Count images that show neither text nor a head and were held back."""
    (ledger,) = case.private.glob("inputs-*.jsonl")
    reasons = {}
    for line in ledger.read_text(encoding="ascii").splitlines():
        entry = json.loads(line)
        reasons[entry.get("path")] = entry["reason"]
    harmless = [
        str(path.absolute())
        for one in planted.studies
        if one.kind in ("image", "body")
        for path in one.made.files
    ]
    wrong = sum(reasons[path] in _IMAGES for path in harmless)
    return {
        "harmless_images": len(harmless),
        "held_back_by_mistake": wrong,
        "held_back_by_mistake_share": round(wrong / max(1, len(harmless)), 5),
    }


def _under_quarantine(planted: PlantedStudies, folder: Path) -> int:
    """Pack the volumes again with ``face_risk = "quarantine"``; return the heads that are published."""
    folder.mkdir()
    case = PackCase(folder)
    case.prepare()
    again = PlantedStudies(case=case, studies=[one for one in planted.studies if one.volume is not None])
    for number, one in enumerate(again.studies):
        target = case.dicom / str(number)
        target.mkdir()
        for path in one.made.files:
            path.rename(target / path.name)
    if case.pack(*SETTINGS[2:], 'deid.face_risk="quarantine"').status != "packed":
        return 0  # nothing but heads: nothing is published
    rows = _rows(case.open(), again)
    return sum(one.kind == "head" and one.made.study_instance_uid in rows for one in again.studies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=500, help="persons; each has two studies")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/privacy_studies.json"))
    parser.add_argument("--every", type=int, default=1, help="every N-th of them alone; 10: all heads")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        planted = make_studies(Path(folder), options.num, options.every)
        result = measure(planted, "execution.num_processes=2")
        result["heads_packed_under_quarantine"] = _under_quarantine(planted, Path(folder) / "again")
    about = about_run(["numpy", "onnxruntime", "rapidocr"])
    options.out.write_text(json.dumps({"about": about, **result}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
