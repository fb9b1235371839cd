"""Tiny trees of every layout, generated: pixels from a seed, identifiers and texts made up."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from tests.dicom_factory import make_study

__all__ = [
    "MadeCase",
    "MadeTree",
    "VolumeTree",
    "make_bids",
    "make_chexpert",
    "make_ct_rate",
    "make_lidc",
    "make_manifest",
    "make_mimic",
    "make_msd",
    "make_nnunet",
    "make_openi",
    "make_padchest",
    "make_pairs",
    "make_rsna",
    "make_totalsegmentator",
    "picture",
    "storage_affine",
    "write_nifti",
    "write_png",
    "write_table",
]

Pixels = NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeTree:
    """What was written: a folder of images and, by study as the layout names it, what must come out."""

    images: Path
    studies: dict[str, list[Pixels]] = field(default_factory=dict)
    """The arrays of each study: one a series."""
    reports: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...]
    """Overrides for `tests.pack_case.PackCase.pack`."""
    secrets: tuple[str, ...] = ()
    """Identifiers that no output may hold."""


def picture(seed: int, size: tuple[int, int] = (24, 20), bits: int = 8) -> Pixels:
    """Make a gray picture."""
    pixels = np.random.default_rng(seed).integers(0, 1 << bits, size)
    return np.sort(pixels, axis=1).astype(np.uint8 if bits == 8 else np.uint16)


def write_png(path: Path, pixels: Pixels) -> Pixels:
    """Write a PNG; colour is given as RGB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), pixels[..., ::-1] if pixels.ndim == 3 else pixels)
    return pixels


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write a CSV; its columns are those of the first row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_nifti(
    path: Path,
    voxels: Pixels,
    affine: Pixels | None,
    *,
    slope: float | None = None,
    intercept: float = 0.0,
) -> None:
    """Write a volume ``(i, j, k)`` of stored values; without an affine, with a header that states none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(  # type: ignore[no-untyped-call]
        voxels, affine if affine is not None else np.eye(4)
    )
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    image.to_filename(plain)
    if affine is None:
        with plain.open("r+b") as file:
            file.seek(252)  # the codes of qform and sform: unknown
            file.write(bytes(4))
    if slope is not None:
        # nibabel scales what it writes: the two fields are put in behind its back.
        with plain.open("r+b") as file:
            file.seek(112)
            file.write(np.array([slope, intercept], "<f4").tobytes())
    if path.suffix == ".gz":
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()


def make_mimic(folder: Path) -> MadeTree:
    """MIMIC-CXR: two patients, three studies, one file in gzip, reports in a tree, official splits."""
    images, texts = folder / "mimic", folder / "mimic-reports"
    studies: dict[str, list[Pixels]] = {}
    reports: dict[str, str] = {}
    records, splits = [], []
    for patient, study, split, views in (
        ("10000032", "50414267", "train", ("PA", "LATERAL")),
        ("10000032", "53189527", "train", ("AP",)),
        ("10000764", "57375967", "validate", ("PA",)),
    ):
        place = Path("files") / f"p{patient[:2]}" / f"p{patient}"
        for number, view in enumerate(views):
            name = f"{study}-{number}-ab12cd34"
            made = make_study(
                folder / "made" / name, patient=patient, study=name, modality="CR", num_slices=1, seed=number
            )
            target = images / place / f"s{study}" / f"{name}.dcm"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made.files[0], target)
            if number == 1:
                Path(f"{target}.gz").write_bytes(gzip.compress(target.read_bytes()))
                target.unlink()
            studies.setdefault(study, []).append(made.stored[0])
            records.append({"subject_id": patient, "study_id": study, "dicom_id": name, "ViewPosition": view})
            splits.append({"dicom_id": name, "study_id": study, "subject_id": patient, "split": split})
        reports[study] = f"FINAL REPORT\nStudy {len(reports)}: no pneumothorax.\n"
        report = texts / place / f"s{study}.txt"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(reports[study], encoding="utf-8")
    shutil.rmtree(folder / "made")
    table = write_table(folder / "cxr-record-list.csv", records)
    split_table = write_table(folder / "mimic-cxr-2.0.0-split.csv", splits)
    return MadeTree(
        images=images,
        studies=studies,
        reports=reports,
        settings=(
            "inputs.layout.kind=mimic-cxr",
            f"inputs.dicom={images}",
            f"inputs.reports={texts}",
            f"inputs.layout.table={table}",
            f"inputs.layout.split_table={split_table}",
        ),
        secrets=("10000032", "10000764", "50414267", "53189527", "57375967", "ab12cd34"),
    )


def make_chexpert(folder: Path) -> MadeTree:
    """CheXpert Plus: PNG, and one table with reports, sexes and views."""
    images = folder / "chexpert"
    studies: dict[str, list[Pixels]] = {}
    reports: dict[str, str] = {}
    rows = []
    for number, path in enumerate(
        (
            "train/patient00001/study1/view1_frontal",
            "train/patient00001/study1/view2_lateral",
            "train/patient00001/study2/view1_frontal",
            "valid/patient64541/study1/view1_frontal",
        )
    ):
        _, patient, study, view = path.split("/")
        key = f"{patient}/{study}"
        studies.setdefault(key, []).append(write_png(images / f"{path}.png", picture(number)))
        reports.setdefault(key, f"IMPRESSION: {len(reports)} nodules.")
        rows.append(
            {
                "path_to_image": f"{path}.jpg",
                "frontal_lateral": view.rsplit("_", 1)[-1].capitalize(),
                "ap_pa": "AP" if view.endswith("frontal") else "",
                "deid_patient_id": patient,
                "report": reports[key],
                "age": "67.0",
                "sex": "Female",
            }
        )
    table = write_table(folder / "df_chexpert_plus.csv", rows)
    return MadeTree(
        images=images,
        studies=studies,
        reports=reports,
        settings=(
            "inputs.layout.kind=chexpert",
            f"inputs.dicom={images}",
            f"inputs.reports={table}",
            f"inputs.layout.table={table}",
        ),
        secrets=("patient00001", "patient64541", "view1_frontal"),
    )


def make_padchest(folder: Path) -> MadeTree:
    """PadChest: 16-bit PNG below numbered folders, one table."""
    images = folder / "padchest"
    studies: dict[str, list[Pixels]] = {}
    reports: dict[str, str] = {}
    rows = []
    for number, (patient, study, view) in enumerate(
        (
            (
                "839860488694292331637988235681460987",
                "20536686640136348236148679891455886468",
                "POSTEROANTERIOR",
            ),
            ("839860488694292331637988235681460987", "20536686640136348236148679891455886468", "LATERAL"),
            ("313572750430997347502932654319389875", "73131427650976361914720213510826165461", "AP"),
        )
    ):
        name = f"2167976192870698277802412872003{number}_q3md2e.png"
        pixels = write_png(images / str(number % 2) / name, picture(number, bits=16))
        studies.setdefault(study, []).append(pixels)
        reports.setdefault(study, f"sin hallazg patolog {len(reports)}")
        rows.append(
            {
                "": number,
                "ImageID": name,
                "StudyID": study,
                "PatientID": patient,
                "PatientSex_DICOM": "F",
                "ViewPosition_DICOM": view,
                "Modality_DICOM": "CR",
                "Report": reports[study],
            }
        )
    table = write_table(folder / "padchest.csv", rows)
    return MadeTree(
        images=images,
        studies=studies,
        reports=reports,
        settings=(
            "inputs.layout.kind=padchest",
            "reports.align=false",  # its reports are in Spanish
            f"inputs.dicom={images}",
            f"inputs.reports={table}",
            f"inputs.layout.table={table}",
        ),
        secrets=("839860488694292331637988235681460987", "20536686640136348236148679891455886468", "q3md2e"),
    )


def make_openi(folder: Path) -> MadeTree:
    """Open-i: XML reports that name their images; radiographs stored in colour."""
    images, texts = folder / "openi", folder / "openi-reports"
    texts.mkdir(parents=True)
    studies: dict[str, list[Pixels]] = {}
    reports: dict[str, str] = {}
    for study, names in (
        ("1", ("CXR1_1_IM-0001-3001", "CXR1_1_IM-0001-4001")),
        ("2", ("CXR2_IM-0652-1001",)),
    ):
        for name in names:
            pixels = picture(len(name) + int(name[-4]), bits=8)
            write_png(images / f"{name}.png", np.repeat(pixels[..., None], 3, axis=2))
            studies.setdefault(study, []).append(pixels)
        parts = {
            "COMPARISON": "None.",
            "FINDINGS": f"The heart is normal, XXXX {study}.",
            "IMPRESSION": "Normal.",
        }
        sections = "".join(
            f'<AbstractText Label="{name}">{text}</AbstractText>' for name, text in parts.items()
        )
        parents = "".join(f'<parentImage id="{name}"><figureId>F1</figureId></parentImage>' for name in names)
        (texts / f"{study}.xml").write_text(
            f"<eCitation><uId id='CXR{study}'/><Abstract>{sections}</Abstract>{parents}</eCitation>",
            encoding="utf-8",
        )
        reports[study] = "\n".join(f"{name}: {text}" for name, text in parts.items())
    return MadeTree(
        images=images,
        studies=studies,
        reports=reports,
        settings=("inputs.layout.kind=openi", f"inputs.dicom={images}", f"inputs.reports={texts}"),
        secrets=("IM-0001", "IM-0652"),
    )


def make_ct_rate(folder: Path, *, is_blank: bool = False) -> MadeTree:
    """CT-RATE: two reconstructions of one scan, one of another patient; blank headers if asked for.

    Voxels are stored so that HU = stored - 1024; ``studies`` has them as ``(slices, rows, columns)``.
    """
    images = folder / "ct-rate"
    studies: dict[str, list[Pixels]] = {}
    reports: dict[str, str] = {}
    facts, texts = [], []
    affine = np.diag([-0.7, -0.8, 2.5, 1.0])  # i to the left, j to the back: as DICOM has columns and rows
    affine[:3, 3] = (100.0, 120.0, -300.0)
    for number, name in enumerate(("train_1_a_1", "train_1_a_2", "valid_7_a_1")):
        split, patient, scan, _ = name.split("_")
        study = f"{split}_{patient}_{scan}"
        stored = np.random.default_rng(number).integers(0, 3000, (12, 10, 5 + number)).astype(np.int16)
        path = images / split / f"{split}_{patient}" / study / f"{name}.nii.gz"
        if is_blank:
            write_nifti(path, stored, None)
        else:
            write_nifti(path, stored, affine, slope=1.0, intercept=-1024.0)
        studies.setdefault(study, []).append(stored.transpose(2, 1, 0) - 1024)
        facts.append(
            {
                "VolumeName": f"{name}.nii.gz",
                "RescaleSlope": "1",
                "RescaleIntercept": "-1024",
                "XYSpacing": "[0.8, 0.7]",
                "ZSpacing": "2.5",
                "PatientSex": "M",
                "PatientAge": "053Y",
            }
        )
        findings, impression = f"Lungs are clear ({patient}).", "Normal."
        reports[study] = f"FINDINGS: {findings}\nIMPRESSION: {impression}"
        texts.append({"VolumeName": f"{name}.nii.gz", "Findings_EN": findings, "Impressions_EN": impression})
    table = write_table(folder / "metadata.csv", facts)
    report_table = write_table(folder / "reports.csv", texts)
    return MadeTree(
        images=images,
        studies=studies,
        reports=reports,
        settings=(
            "inputs.layout.kind=ct-rate",
            f"inputs.dicom={images}",
            f"inputs.reports={report_table}",
            f"inputs.layout.table={table}",
            f"inputs.layout.volume_facts={'table' if is_blank else 'header'}",
        ),
        secrets=("train_1", "valid_7"),
    )


def make_lidc(folder: Path) -> MadeTree:
    """LIDC-IDRI: DICOM with the readers' XML beside it."""
    images = folder / "lidc"
    made = make_study(images / "LIDC-IDRI-0001" / "scan", patient="LIDC-IDRI-0001", num_slices=4)
    (images / "LIDC-IDRI-0001" / "scan" / "069.xml").write_text("<LidcReadMessage/>", encoding="utf-8")
    return MadeTree(
        images=images,
        studies={made.study_instance_uid: [made.modality_units]},
        settings=("inputs.layout.kind=lidc", f"inputs.dicom={images}"),
        secrets=("LIDC-IDRI-0001", made.study_instance_uid),
    )


def make_rsna(folder: Path) -> MadeTree:
    """RSNA: study, series and instance in the path, labels in a table, no patient in the header."""
    images = folder / "rsna"
    made = make_study(
        folder / "made",
        modality="MR",
        num_slices=4,
        shuffle_names=False,
        change=lambda data, _: data.pop("PatientID"),
    )
    target = images / "train_images" / "4003253" / "702807833"
    target.mkdir(parents=True)
    for number, path in enumerate(made.files, start=1):
        shutil.move(path, target / f"{number}.dcm")
    shutil.rmtree(folder / "made")
    write_table(images / "train_label_coordinates.csv", [{"study_id": "4003253", "x": 3, "y": 4}])
    return MadeTree(
        images=images,
        studies={"4003253": [made.stored]},
        settings=(
            "inputs.layout.kind=rsna",
            f"inputs.dicom={images}",
            "inputs.layout.is_patient_study=true",
        ),
        secrets=("4003253", "702807833"),
    )


def make_manifest(folder: Path) -> MadeTree:
    """One table for a PNG, a JPEG of the same study, and a DICOM file of another patient."""
    images = folder / "manifest"
    first = write_png(images / "a" / "one.png", picture(1))
    second = np.full((16, 16), 90, np.uint8)  # flat, so that JPEG keeps it
    assert cv2.imwrite(str(images / "a" / "two.jpg"), second)
    made = make_study(images / "b", patient="header-name", modality="CR", num_slices=1, shuffle_names=False)
    common = {"sex": "", "age": "", "view": "", "modality": "CR", "split": ""}
    rows = [
        {
            "path": "a/one.png",
            "patient": "Pat-11",
            "study": "St-21",
            **common,
            "sex": "F",
            "age": "97",
            "view": "PA",
        },
        {"path": "a/two.jpg", "patient": "Pat-11", "study": "St-21", **common, "view": "LATERAL"},
        {"path": "b/00000.dcm", "patient": "Pat-12", "study": "St-22", **common},
    ]
    table = write_table(folder / "images.csv", rows)
    reports = {"St-21": "No fracture.", "St-22": "A fracture."}
    texts = write_table(
        folder / "texts.csv", [{"study": study, "text": text} for study, text in reports.items()]
    )
    return MadeTree(
        images=images,
        studies={"St-21": [first, second], "St-22": [made.stored[0]]},
        reports=reports,
        settings=(
            "inputs.layout.kind=manifest",
            f"inputs.dicom={images}",
            f"inputs.reports={texts}",
            f"inputs.layout.table={table}",
        ),
        secrets=("Pat-11", "Pat-12", "St-21", "St-22", "one.png", "header-name"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeCase:
    """Files of one case."""

    images: dict[str | None, tuple[Path, int | None]]
    """Channel to its file, and to its place along the file's fourth axis."""
    label: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeTree:
    """A tree of volumes with their labels."""

    images: Path
    cases: dict[str, MadeCase]
    """By study as the layout names it."""
    classes: dict[str, tuple[int, ...]]
    settings: tuple[str, ...]
    secrets: tuple[str, ...] = ()


def storage_affine(number: int) -> Pixels:
    """Make an affine to RAS: oblique, stored as RAS, as LAS, or with axes in another order, by the number."""
    oblique = Rotation.from_euler("zyx", (17.0, -8.0, 5.0), degrees=True).as_matrix()
    turn = (oblique, np.eye(3), np.diag([-1.0, 1.0, 1.0]), np.eye(3)[:, [2, 0, 1]])[number % 4]
    affine = np.eye(4)
    affine[:3, :3] = turn * (0.9, 1.3, 2.5)
    affine[:3, 3] = (-31.5, 12.25, 7.0 + number)
    return affine


def _make_case(
    number: int, shape: tuple[int, int, int] = (9, 11, 6), num_labels: int = 3
) -> tuple[Pixels, Pixels, Pixels]:
    """Make two channels, a label map and an affine."""
    random = np.random.default_rng(number)
    channels = random.integers(-1000, 1000, (*shape, 2)).astype(np.int16)
    labels = np.zeros(shape, np.uint8)
    for label in range(1, num_labels + 1):
        low = random.integers(0, np.array(shape) - 3)
        labels[tuple(slice(int(at), int(at) + 3) for at in low)] = label
    return channels, labels, storage_affine(number)


LABEL_TYPES = (np.uint8, np.float32, np.int16, np.float64)


def make_nnunet(folder: Path) -> VolumeTree:
    """nnU-Net raw: a file a channel, classes of several numbers; of one case nothing is marked."""
    root = folder / "Dataset017_Made"
    cases: dict[str, MadeCase] = {}
    names = ("T1w", "FLAIR")
    for number in range(5):
        channels, labels, affine = _make_case(number)
        part, case = ("Ts", "made_900") if number == 4 else ("Tr", f"made_{number:03d}")
        images: dict[str | None, tuple[Path, int | None]] = {}
        for channel, name in enumerate(names):
            path = root / f"images{part}" / f"{case}_{channel:04d}.nii.gz"
            write_nifti(path, channels[..., channel], affine)
            images[name] = (path, None)
        label = None
        if part == "Tr":
            label = root / "labelsTr" / f"{case}.nii.gz"
            marked = labels * 0 if number == 3 else labels
            write_nifti(label, marked.astype(LABEL_TYPES[number]), affine)
        cases[f"{root.name}/{case}"] = MadeCase(images=images, label=label)
    classes = {"whole lesion": (1, 2, 3), "core": (2, 3), "ring-like rim": (3,)}
    content = {
        "channel_names": {str(number): name for number, name in enumerate(names)},
        "labels": {"background": 0, **{name: list(numbers) for name, numbers in classes.items()}},
        "regions_class_order": [1, 2, 3],
        "numTraining": 4,
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(content), encoding="utf-8")
    return VolumeTree(
        images=root,
        cases=cases,
        classes=classes,
        settings=(
            "inputs.layout.kind=nnunet",
            f"inputs.dicom={root}",
            "inputs.layout.is_patient_study=true",
            "splits={train = 1, val = 1, test = 0}",
        ),
        secrets=("Dataset017", "made_0", "made_9"),
    )


def make_msd(folder: Path) -> VolumeTree:
    """Decathlon: images of four axes below a folder of tasks, and what a Mac leaves in an archive."""
    root = folder / "tasks"
    task = root / "Task01_Made"
    cases: dict[str, MadeCase] = {}
    names = ("FLAIR", "T1w")
    for number in range(4):
        channels, labels, affine = _make_case(10 + number)
        case = f"MADE_{number:03d}"
        path, label = task / "imagesTr" / f"{case}.nii.gz", task / "labelsTr" / f"{case}.nii.gz"
        write_nifti(path, channels, affine)
        write_nifti(label, labels.astype(LABEL_TYPES[number]), affine)
        (task / "imagesTr" / f"._{case}.nii.gz").write_bytes(b"\0\5\26\7 AppleDouble")
        images: dict[str | None, tuple[Path, int | None]] = {
            name: (path, at) for at, name in enumerate(names)
        }
        cases[f"{task.name}/{case}"] = MadeCase(images=images, label=label)
    content = {
        "modality": {str(number): name for number, name in enumerate(names)},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        "training": [
            {"image": f"./imagesTr/{name[12:]}.nii.gz", "label": f"./labelsTr/{name[12:]}.nii.gz"}
            for name in cases
        ],
    }
    (task / "dataset.json").write_text(json.dumps(content), encoding="utf-8")
    return VolumeTree(
        images=task,
        cases=cases,
        classes={"edema": (1,), "non-enhancing tumor": (2,), "enhancing tumour": (3,)},
        settings=(
            "inputs.layout.kind=msd",
            f"inputs.dicom={root}",
            "inputs.layout.is_patient_study=true",
        ),
        secrets=("Task01", "MADE_0"),
    )


def make_pairs(folder: Path) -> VolumeTree:
    """Pairs: labels in other number types and under names with an ending, classes by a description."""
    root = folder / "pairs"
    cases: dict[str, MadeCase] = {}
    for number in range(4):
        channels, labels, affine = _make_case(20 + number)
        path = root / "images" / f"pair{number}.nii.gz"
        label = root / "labels" / f"pair{number}{('', '_seg', '-label', '_mask')[number]}.nii.gz"
        write_nifti(path, channels[..., 0], affine)
        write_nifti(label, labels.astype(LABEL_TYPES[number]), affine)
        cases[f"pairs/pair{number}"] = MadeCase(images={None: (path, None)}, label=label)
    (root / "dataset.json").write_text('{"labels": {"a": 1, "b": 2, "c": 3}}', encoding="utf-8")
    return VolumeTree(
        images=root,
        cases=cases,
        classes={"a": (1,), "b": (2,), "c": (3,)},
        settings=(
            "inputs.layout.kind=pairs",
            f"inputs.dicom={root}",
            "inputs.layout.modality=CT",
            "inputs.layout.is_patient_study=true",
        ),
        secrets=("pair0", "pair1"),
    )


def make_bids(folder: Path, *, first_case: int = 40) -> VolumeTree:
    """BIDS: sessions, sidecars at two levels, series of points, derivatives with masks, tables of people."""
    root = folder / "made-bids"
    cases: dict[str, MadeCase] = {}
    for number, (subject, session) in enumerate((("sub-k1", "ses-a"), ("sub-k1", "ses-b"), ("sub-k2", ""))):
        channels, labels, affine = _make_case(first_case + number)
        stem = f"{subject}_{session}" if session else subject
        place = Path(subject, session) if session else Path(subject)
        anat = root / place / "anat"
        images: dict[str | None, tuple[Path, int | None]] = {}
        for at, name in enumerate(("T1w", "FLAIR")):
            path = anat / f"{stem}_acq-secretname_{name}.nii.gz"
            write_nifti(path, channels[..., at], affine)
            images[name] = (path, None)
        (anat / f"{stem}_acq-secretname_T1w.json").write_text(
            json.dumps({"EchoTime": 0.003 + number / 1000, "Manufacturer": "Siemens"}), encoding="utf-8"
        )
        bold = root / place / "func" / f"{stem}_task-rest_bold.nii.gz"
        write_nifti(bold, np.stack([channels[..., 0], channels[..., 1] // 2], axis=-1), affine)
        if not session:
            write_nifti(
                root / place / "dwi" / f"{stem}_dwi.nii.gz", np.stack([channels[..., 0]] * 3, axis=-1), affine
            )
            (root / place / "dwi" / f"{stem}_dwi.bval").write_text("0 1000 1000\n", encoding="utf-8")
        derived = root / "derivatives" / "lesions" / place / "anat"
        label = derived / f"{stem}_space-T1w_dseg.nii.gz"
        write_nifti(label, labels.astype(LABEL_TYPES[number]), affine)
        write_nifti(derived / f"{stem}_label-brain_mask.nii.gz", (labels > 0).astype(np.uint8), affine)
        write_nifti(derived / f"{stem}_space-MNI152_dseg.nii.gz", labels, affine)
        write_nifti(derived / f"{stem}_desc-preproc_T1w.nii.gz", channels[..., 0], affine)
        cases["/".join(filter(None, (subject, session)))] = MadeCase(images=images, label=label)
    files = {
        "dataset_description.json": '{"Name": "made", "BIDSVersion": "1.10.0"}',
        "README": "made",
        "T1w.json": '{"MagneticFieldStrength": 3, "EchoTime": 0.9, "RepetitionTime": 2.3}',
        "task-rest_bold.json": '{"RepetitionTime": 2.0, "TaskName": "rest"}',
        "participants.tsv": "participant_id\tage\tsex\tgroup\tname\n"
        "sub-k1\t34\tF\tpatient\tMiller\nsub-k2\tn/a\tM\tcontrol\tMayer\n",
        "sub-k1/sub-k1_sessions.tsv": "session_id\tscore\nses-a\t1.5\nses-b\t2.5\n",
        "derivatives/lesions/dataset_description.json": "{}",
        "derivatives/lesions/dseg.tsv": "index\tname\tabbreviation\n"
        "0\tbackground\tBG\n1\tedema\t\n2\tx\tGM\n3\tcore\t\n",
    }
    for name, text in files.items():
        (root / name).write_text(text, encoding="utf-8")
    return VolumeTree(
        images=root,
        cases=cases,
        classes={"edema": (1,), "gray matter": (2,), "core": (3,)},
        settings=("inputs.layout.kind=bids", f"inputs.dicom={root}", "splits={train = 1, test = 0}"),
        secrets=("secretname", "sub-k1", "ses-a", "Miller", "Mayer"),
    )


def make_totalsegmentator(folder: Path) -> VolumeTree:
    """TotalSegmentator: a folder a subject, a mask a class, official splits; a name that no class has."""
    root = folder / "total"
    cases: dict[str, MadeCase] = {}
    names = ("kidney_left", "vertebrae_L5", "of_mr_miller")
    for number in range(4):
        channels, labels, affine = _make_case(30 + number)
        path = root / f"s000{number}" / "ct.nii.gz"
        write_nifti(path, channels[..., 0], affine)
        for value, name in enumerate(names, start=1):
            mask = (labels == value).astype(LABEL_TYPES[number])
            write_nifti(path.parent / "segmentations" / f"{name}.nii.gz", mask, affine)
        cases[f"s000{number}"] = MadeCase(images={None: (path, None)}, label=None)
    rows = "".join(f"s000{number};50;m;{'val' if number == 2 else 'train'}\n" for number in range(4))
    (root / "meta.csv").write_text(f"image_id;age;gender;split\n{rows}", encoding="utf-8")
    return VolumeTree(
        images=root,
        cases=cases,
        classes={},
        settings=("inputs.layout.kind=totalsegmentator", f"inputs.dicom={root}"),
        secrets=("s0000", "s0001", "miller"),
    )
