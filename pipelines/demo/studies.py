"""Real studies, and generated reports for them.

The images are the test studies that pydicom's wheel carries, and those of the data folder beside the
repository where there is one. They come without reports, so this module writes short ones from technical
facts alone (modality, body part, number and size of the slices). Every report says that it is generated.
"""

from __future__ import annotations

import csv
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from pydicom import Dataset, dcmread

__all__ = ["GENERATED", "DemoStudy", "find_studies", "input_folders", "write_reports"]

GENERATED = "Generated text, not a medical report."
"""Opens every report of the demo."""

_SHARED_FOLDERS = (
    "ct_philips_phantom",
    "dcmqi_ct_seg_sr",
    "dicom2nifti_small",
    "highdicom",
    "mr_ge_fruit",
    "mr_oblique_20",
    "rt_utils",
)
_NAMES = {"CR": "computed radiography", "CT": "computed tomography", "DX": "digital radiography"}
_NAMES |= {"MR": "magnetic resonance imaging"}
_KEYWORDS = ["BodyPartExamined", "Columns", "Modality", "NumberOfFrames", "PixelData", "Rows"]
_KEYWORDS += ["SOPInstanceUID", "SeriesInstanceUID", "SliceThickness", "StudyInstanceUID"]
# Below this many pixels a side an image counts as a thumbnail; the bundled files hold many.
_SMALL_PIXELS = 100
_MANY_SLICES = 16


@dataclass(slots=True)
class DemoStudy:
    """What the generated report of one study may tell."""

    modality: str
    body_part: str
    slices_of_series: Counter[str] = field(default_factory=Counter)
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    thickness_mm: float | None = None

    @property
    def num_slices(self) -> int:
        """Slices of all series together."""
        return self.slices_of_series.total()


def input_folders(repository: Path) -> list[Path]:
    """Return the folders with DICOM files that are there: pydicom's own, and the shared data."""
    bundled = Path(str(files("pydicom"))) / "data"
    shared = repository.parent / "shared" / "data"
    return [
        bundled / "charset_files",
        bundled / "test_files",
        *(shared / name for name in _SHARED_FOLDERS if (shared / name).is_dir()),
    ]


def find_studies(folders: list[Path]) -> dict[str, DemoStudy]:
    """Read headers and collect the studies that get a report, by Study Instance UID."""
    studies: dict[str, DemoStudy] = {}
    seen: set[str] = set()
    for header in _headers(folders):
        instance = str(header.get("SOPInstanceUID", ""))
        if instance in seen:  # one image in several encodings
            continue
        seen.add(instance)
        uid, modality = str(header.get("StudyInstanceUID", "")), str(header.get("Modality", ""))
        if not uid or modality not in _NAMES or "PixelData" not in header:
            continue
        body_part = str(header.get("BodyPartExamined") or "").strip().lower()
        study = studies.setdefault(uid, DemoStudy(modality, body_part))
        study.body_part = study.body_part or body_part
        study.slices_of_series[str(header.get("SeriesInstanceUID", ""))] += int(
            header.get("NumberOfFrames") or 1
        )
        study.shapes[int(header.Rows), int(header.Columns)] += 1
        if header.get("SliceThickness"):
            study.thickness_mm = float(header.SliceThickness)
    return studies


def _headers(folders: list[Path]) -> Iterator[Dataset]:
    # Many bundled files are broken on purpose: packing says what became of each, here they get no report.
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
            try:
                header = dcmread(path, specific_tags=_KEYWORDS, defer_size=4096)
                header.decode()
            except Exception:  # noqa: BLE001, S112 - a parser of broken files raises anything
                continue
            yield header


def _report(study: DemoStudy) -> str:
    """Write a report from technical facts: same facts, same text, so that a small model can learn it."""
    (rows, columns), _ = study.shapes.most_common(1)[0]
    num_slices, num_series = study.num_slices, len(study.slices_of_series)
    part = f" of the {study.body_part}" if study.body_part else ""
    slices = "1 slice" if num_slices == 1 else f"{num_slices} slices"
    thickness = f", {study.thickness_mm:g} mm thick" if study.thickness_mm else ""
    amount = "a long stack of slices" if num_slices >= _MANY_SLICES else "a few slices"
    amount = "a single image" if num_slices == 1 else amount
    size = "thumbnail" if max(rows, columns) < _SMALL_PIXELS else "full"
    return "\n".join(
        [
            GENERATED,
            f"Examination: {_NAMES[study.modality]}{part}.",
            f"Technique: {slices} in {num_series} series, {rows} x {columns} pixels{thickness}.",
            f"Findings: {amount} of {size} size.",
            f"Impression: {study.modality}{part}, {amount}.",
        ]
    )


def write_reports(studies: dict[str, DemoStudy], path: Path) -> None:
    """Write the reports as a CSV table of study and text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["study_instance_uid", "text"])
        for uid, study in sorted(studies.items()):
            table.writerow([uid, _report(study)])
