"""Kind ``mimic-cxr``: MIMIC-CXR and MIMIC-CXR-JPG.

``files/p10/p10000032/s50414267/<dicom_id>.dcm`` (or ``.dcm.gz``, ``.jpg``); reports at
``files/p10/p10000032/s50414267.txt``; ``cxr-record-list.csv`` or the metadata table of the JPG version as
``layout.table``; ``mimic-cxr-2.0.0-split.csv`` as ``layout.split_table``. Tables may be ``.csv.gz``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final

from shardflow.errors import ConfigError
from shardflow.sources.layouts.base import patient_attributes
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.table_layout import TableLayout
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord, read_report_file

__all__ = ["MimicCxr"]

_IMAGE: Final = re.compile(r"(?:.*/)?p(\d+)/s(\d+)/([^/]+?)(?:\.dcm\.gz|\.dcm|\.jpe?g|\.png)", re.IGNORECASE)
_REPORT: Final = re.compile(r"(?:.*/)?p\d+/s(\d+)\.txt")


class MimicCxr(TableLayout):
    """The folders name patient and study; a row that says otherwise makes the link ambiguous."""

    columns: ClassVar[Mapping[str, str]] = {
        "image": "dicom_id",
        "patient": "subject_id",
        "study": "study_id",
        "view": "ViewPosition",
    }
    required: ClassVar[tuple[str, ...]] = ("image", "patient", "study")

    def key_of_row(self, values: Mapping[str, str]) -> str:
        """The image's identifier."""
        return values["image"]

    def key_of_file(self, path: str) -> str:
        """The same, which is the file's name."""
        match = _IMAGE.fullmatch(path)
        return match[3] if match else path

    def split_columns(self) -> Mapping[str, str]:
        """Names in the official split table."""
        return {"patient": "subject_id", "split": "split"}

    def place_row(self, values: Mapping[str, str], path: str, form: ImageForm) -> Placement | Reason:
        """Place by folders, by the row where there is no file, and compare the two."""
        match = _IMAGE.fullmatch(path)
        if match is None and not values["study"]:
            return Reason.NOT_IN_LAYOUT
        patient, study = (match[1], match[2]) if match else (values["patient"], values["study"])
        if self.has_table and (patient, study) != (values["patient"], values["study"]):
            return Reason.AMBIGUOUS_LINK
        split = self.split_of(patient)
        if isinstance(split, Reason):
            return split
        return Placement(
            form=form,
            patient=patient,
            study=study,
            series="" if form == "dicom" else f"{study}/{self.key_of_file(path)}",
            instance=self.key_of_file(path),
            split=split,
            modality=self.settings.modality.upper() or "DX",
            attributes=patient_attributes(view=values["view"]),
            is_gray=True,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the report tree, sorted by path; it may be the tree of the images."""
        source = self.inputs.reports
        if source is None:
            return
        if not source.is_dir():
            raise ConfigError("inputs.reports must be the folder of the report tree, got a file; correct it.")
        texts = sorted(_texts_below(source), key=os.fsencode)
        for place, text in enumerate(texts, start=1):
            match = _REPORT.fullmatch(text)
            if match is None:
                yield BrokenReport(place=place, reason=Reason.NOT_REPORT, detail="")
            else:
                yield read_report_file(source / text, place, match[1])

    def reason_of_other(self, path: Path) -> Reason:
        """Reports beside the images have outcomes of their own."""
        return Reason.LAYOUT_FILE if _REPORT.fullmatch(path.as_posix()) else super().reason_of_other(path)


def _texts_below(folder: Path) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".txt"):
                yield (Path(where) / name).relative_to(folder).as_posix()
