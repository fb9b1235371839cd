"""Kind ``folder``: the path of a file says whose image it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardflow.sources.dicom import DiscoveredFile
from shardflow.sources.layouts.base import LayoutInputs, PlacedLayout, read_reports
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord

__all__ = ["Folder"]


class Folder(PlacedLayout):
    """A pattern with named groups must match the whole path below the input folder.

    Reports are read as without a layout; they name the study as the group ``study`` does (behind
    ``patient/`` with ``is_study_within_patient``).
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        self._pattern = re.compile(self.settings.pattern)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Take what the groups say."""
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

    def study_beside(self, file: DiscoveredFile) -> str:
        """Return what the pattern calls the study, where it fits the path of a file that is no image too."""
        match = self._pattern.fullmatch(self.relative_path(file.path(self._roots)))
        return "" if match is None else self._study(match)

    def _study(self, match: re.Match[str]) -> str:
        study, patient = match["study"] or "", match.groupdict().get("patient") or ""
        return f"{patient}/{study}" if self.settings.is_study_within_patient and patient else study

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``."""
        return read_reports(self.inputs)
