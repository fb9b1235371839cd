"""Layouts without image tables: ``folder`` (a pattern over paths), ``headers``, ``lidc`` and ``rsna``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom.discover import DiscoveredFile, discover
from shardflow.packing.sources.layouts.base import LayoutInputs, PlacedLayout, read_reports
from shardflow.packing.sources.placement import ImageForm, Placement
from shardflow.packing.sources.reports import BrokenReport, ReportRecord


class Folder(PlacedLayout):
    """A pattern with named groups must match the whole path below the input folder.

    Reports are read as without a layout; they name the study as the group ``study`` does (behind
    ``patient/`` with ``is_study_within_patient``).
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        self._pattern = re.compile(self.settings.pattern)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place by the groups of the pattern."""
        match = self._pattern.fullmatch(path)
        if match is None:
            return Reason.NOT_IN_LAYOUT
        said = {name: value or "" for name, value in match.groupdict().items()}
        patient, study, series = said.get("patient", ""), self._study(match), said.get("series", "")
        split = self.split_of(patient, said.get("split", ""))
        if isinstance(split, Reason):
            return split
        number = said.get("number", "")
        return Placement(
            form=form,
            patient=patient,
            study=study,
            series=f"{study}/{series or path}" if series or form != "dicom" else "",
            instance="" if form == "dicom" else path,
            number=int(number) if number.isascii() and number.isdigit() else None,
            split=split,
            modality=self.settings.modality.upper(),
            attributes={},
            is_patient_study=self.settings.is_patient_study,
        )

    def study_of_attachment(self, file: DiscoveredFile) -> str:
        """Return what the pattern calls the study, where it fits the path of a file that is no image too."""
        match = self._pattern.fullmatch(self.relative_path(file.path(self._roots)))
        return "" if match is None else self._study(match)

    def _study(self, match: re.Match[str]) -> str:
        study, patient = match["study"] or "", match.groupdict().get("patient") or ""
        return f"{patient}/{study}" if self.settings.is_study_within_patient and patient else study

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``."""
        return read_reports(self.inputs)


_INSTANCE: Final = re.compile(r"(?:.*/)?(?:train|test)_images/([^/]+)/([^/]+)/(\d+)\.dcm(?:\.gz)?")


class Headers:
    """Layout without tables: the DICOM header of each file identifies its study."""

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:  # noqa: ARG002 - as every layout
        self._inputs = inputs
        self._is_patient_study = inputs.layout.is_patient_study

    def discover(self) -> list[DiscoveredFile]:
        """List the files below the input folders."""
        return discover(self._inputs.dicom)

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:  # noqa: ARG002 - all alike
        """Leave it to the header."""
        return Placement(attributes={}, is_patient_study=True) if self._is_patient_study else None

    def study_of_attachment(self, file: DiscoveredFile) -> str:  # noqa: ARG002 - headers name the study
        """Return nothing: only headers name studies."""
        return ""

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``."""
        return read_reports(self._inputs)


class Lidc(PlacedLayout):
    """LIDC-IDRI: headers identify the study; the readers' XML is linked later, as an attachment."""

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Leave images to their headers."""
        path = file.path(self._roots)
        if path.suffix.lower() == ".xml":
            return Reason.ANNOTATION_FILE
        if path.suffix.lower() in {".dcm", ""}:
            return Placement(attributes={}, is_patient_study=self.settings.is_patient_study)
        return self.reason_of_other(path)


class Rsna(PlacedLayout):
    """RSNA challenges: ``train_images/<study>/<series>/<instance>.dcm``; their tables are labels."""

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Take study and series from the path, the patient from the header."""
        match = _INSTANCE.fullmatch(path)
        if match is None or form != "dicom":
            return Reason.NOT_IN_LAYOUT
        study, series, _ = match.groups()
        return Placement(
            study=study,
            series=f"{study}/{series}",
            attributes={},
            is_patient_study=self.settings.is_patient_study,
        )

    def reason_of_other(self, path: Path) -> Reason:
        """Tables of labels are annotations."""
        return Reason.ANNOTATION_FILE if path.suffix.lower() == ".csv" else super().reason_of_other(path)
