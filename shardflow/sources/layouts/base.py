"""What every layout answers, and what most of them share: roots, splits, forms by file ending."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from shardflow.errors import ConfigError
from shardflow.sources.dicom import DiscoveredFile, discover
from shardflow.sources.documents.reports import iter_document_reports
from shardflow.sources.layouts.config import LayoutConfig
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.tables import read_table
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportFormat, ReportRecord, iter_reports

__all__ = ["Layout", "LayoutInputs", "PlacedLayout", "form_of_path", "patient_attributes", "read_reports"]

_ENDINGS: Final[dict[str, ImageForm]] = {
    ".dcm": "dicom",
    ".dcm.gz": "dicom",
    ".jpeg": "raster",
    ".jpg": "raster",
    ".nii": "nifti",
    ".nii.gz": "nifti",
    ".png": "raster",
}
_SPLIT_WORDS: Final = {"dev": "val", "eval": "val", "valid": "val", "validate": "val", "validation": "val"}
_SEXES: Final = {"f": "F", "female": "F", "m": "M", "male": "M", "o": "O", "other": "O"}
_AGE: Final = re.compile(r"0*(\d{1,3})(?:\.\d+)?\s*(?:y|years?)?", re.IGNORECASE)


class LayoutInputs(Protocol):
    """The settings that a layout is opened with."""

    @property
    def dicom(self) -> tuple[Path, ...]:
        """Input folders."""

    @property
    def reports(self) -> Path | None:
        """Where the reports are."""

    @property
    def reports_format(self) -> ReportFormat | Literal["documents"]:
        """How they are read, where the layout does not say it."""

    @property
    def layout(self) -> LayoutConfig:
        """What the layout is."""


class Layout(Protocol):
    """Turns input folders into images, reports, links and splits."""

    def discover(self) -> list[DiscoveredFile]:
        """List all inputs but the reports; also rows whose file is not there, with MISSING_FILE."""

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Say whose image a file is, or why it is none; None where its DICOM header says everything."""

    def study_beside(self, file: DiscoveredFile) -> str:
        """Return the study in whose place a file lies that is no image; ``""`` where its place names none."""

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports; each names the study that `Placement.study` names."""


class PlacedLayout:
    """What layouts share that say whose an image is.

    Args:
        inputs: The settings.
        splits: Names of the dataset's splits.
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        self.settings = inputs.layout
        self.inputs = inputs
        self._splits = frozenset(splits)
        self._patient_splits = self._read_splits()
        tables = (inputs.reports, inputs.layout.table, inputs.layout.split_table)
        self._own_files = {path.resolve() for path in tables if path is not None}
        self._roots = [root.absolute() for root in inputs.dicom]

    def discover(self) -> list[DiscoveredFile]:
        """List the files below the input folders."""
        return discover(self.inputs.dicom)

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Say whose image a file is; see `Layout`."""
        path = file.path(self._roots)
        form = form_of_path(path)
        placed = self.place_image(self.relative_path(path), form) if form is not None else None
        if placed is not None:
            return self._complete(placed) if isinstance(placed, Placement) else placed
        return self.reason_of_other(path)

    def study_beside(self, file: DiscoveredFile) -> str:  # noqa: ARG002 - for layouts whose paths say it
        """Return the study in whose place a file lies; see `Layout`."""
        return ""

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place a file that looks like an image; for the layouts to say."""
        raise NotImplementedError

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports; by default there are none."""
        return iter(())

    def reason_of_other(self, path: Path) -> Reason:
        """Why a file is no image."""
        is_table = path.name.lower().endswith((".csv", ".csv.gz", ".parquet"))
        return Reason.LAYOUT_FILE if is_table or path.resolve() in self._own_files else Reason.NOT_IMAGE

    def relative_path(self, path: Path) -> str:
        """POSIX path below the input folder that holds it; a file that is an input itself has its name."""
        for root in self._roots:
            if path != root and path.is_relative_to(root):
                return path.relative_to(root).as_posix()
        return path.name

    def split_of(self, patient: str, named: str = "") -> str | Reason:
        """Return the split of a patient: of the split table, else the name that path or row gives."""
        if self._patient_splits is None:
            return self.known_split(named) if named else ""
        return self._patient_splits.get(patient, Reason.NOT_IN_LAYOUT)

    def known_split(self, name: str) -> str:
        """Return the split of the dataset for a name in a table or path.

        Raises:
            ConfigError: There is none.
        """
        folded = name.strip().casefold()
        given = {key.casefold(): value for key, value in self.settings.split_names.items()}
        split = given.get(folded) or (folded if folded in self._splits else _SPLIT_WORDS.get(folded, folded))
        if split not in self._splits:
            raise ConfigError(
                "splits must name every split of the layout, got one that they do not; add it to [splits], "
                "or map it in layout.split_names."
            )
        return split

    def split_columns(self) -> Mapping[str, str]:
        """What the split table calls its columns, by default."""
        return {"patient": "patient", "split": "split"}

    def patient_name(self, text: str) -> str:
        """Spell a patient of the split table as placements do."""
        return text

    def _read_splits(self) -> dict[str, str] | None:
        table = self.settings.split_table
        if table is None:
            return None
        columns = {**self.split_columns(), **self.settings.split_columns}
        found: dict[str, str] = {}
        for row in read_table(table, "layout.split_table", columns, ("patient", "split")):
            if row.values is None or not row.values["patient"]:
                raise ConfigError(
                    f"layout.split_table must name a patient and a split in every row, got another row (line "
                    f"{row.place}); correct it."
                )
            patient, split = self.patient_name(row.values["patient"]), self.known_split(row.values["split"])
            if found.setdefault(patient, split) != split:
                raise ConfigError(
                    "layout.split_table must have each patient in one split, got a patient in two (line "
                    f"{row.place}); correct it: a patient that is trained on must not be tested on."
                )
        return found

    def _complete(self, placed: Placement) -> Placement | Reason:
        """Refuse what names no study or patient and has no header that could."""
        if placed.form != "dicom":
            named = placed.identify(dict.fromkeys(_IDENTIFIERS, ""))
            if not named["patient_id"] or not named["study_instance_uid"]:
                return Reason.MISSING_IDENTIFIER
        return placed


_IDENTIFIERS: Final = ("patient_id", "study_instance_uid", "series_instance_uid", "sop_instance_uid")


def read_reports(inputs: LayoutInputs) -> Iterator[ReportRecord | BrokenReport]:
    """Read the reports in ``inputs.reports_format``."""
    if inputs.reports is None:
        return iter(())
    if inputs.reports_format == "documents":
        copies = inputs.layout.report_of_several_studies == "copy"
        return iter_document_reports(inputs.reports, copies=copies)
    return iter_reports(inputs.reports, inputs.reports_format)


def form_of_path(path: Path | str) -> ImageForm | None:
    """Tell by its ending how an image file is read; None where it looks like none.

    Example:
        >>> form_of_path("a/b.dcm.gz"), form_of_path("b.nii.gz"), form_of_path("notes.txt")
        ('dicom', 'nifti', None)
    """
    name = str(path).rsplit("/", 1)[-1].lower()
    return next((form for ending, form in _ENDINGS.items() if name.endswith(ending)), None)


def patient_attributes(
    *, sex: str = "", age: str = "", view: str = "", body_part: str = ""
) -> dict[str, tuple[str, ...]]:
    """Turn what tables say into DICOM attributes; the allowlist judges them later.

    Example:
        >>> patient_attributes(sex="Female", age="68.0", view="pa")
        {'PatientAge': ('068Y',), 'PatientSex': ('F',), 'ViewPosition': ('PA',)}
    """
    match = _AGE.fullmatch(age.strip())
    said = {
        "BodyPartExamined": body_part.upper(),
        "PatientAge": f"{int(match[1]):03d}Y" if match else "",
        "PatientSex": _SEXES.get(sex.casefold(), ""),
        "ViewPosition": view.upper(),
    }
    return {keyword: (text,) for keyword, text in said.items() if text}
