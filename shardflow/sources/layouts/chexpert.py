"""Kind ``chexpert``: CheXpert and CheXpert Plus.

``train/patient00001/study1/view1_frontal.jpg`` (or ``.png``, ``.dcm``); ``train.csv`` or the table of
CheXpert Plus as ``layout.table``; the latter as ``inputs.reports``, too: it has the texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

from shardflow.errors import ConfigError
from shardflow.sources.layouts.base import LayoutInputs, patient_attributes
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.table_layout import TableLayout, read_report_rows
from shardflow.sources.layouts.tables import read_table
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord

__all__ = ["Chexpert"]

_IMAGE: Final = re.compile(
    r"(?:.*/)?(train|valid|test)/(patient\d+)/(study\d+)/((view\d+)_\w+)\.\w+", re.IGNORECASE
)
_PLUS: Final = {
    "age": "age",
    "image": "path_to_image",
    "position": "ap_pa",
    "sex": "sex",
    "view": "frontal_lateral",
}
_REPORT: Final = {
    "findings": "section_findings",
    "image": "path_to_image",
    "impression": "section_impression",
    "text": "report",
}


class Chexpert(TableLayout):
    """Paths name patient and study; the table adds sex, age and view."""

    columns: ClassVar[Mapping[str, str]] = {
        "age": "Age",
        "image": "Path",
        "position": "AP/PA",
        "sex": "Sex",
        "view": "Frontal/Lateral",
    }
    required: ClassVar[tuple[str, ...]] = ("image",)

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        table = inputs.layout.table
        if table is not None and not inputs.layout.columns and _is_plus(table):
            self.columns = _PLUS  # type: ignore[misc] # the two tables of one collection
        super().__init__(inputs, splits)

    def key_of_row(self, values: Mapping[str, str]) -> str:
        """Path from the split on, without its ending: tables of either form name images of either form."""
        return self.key_of_file(values["image"]) if _IMAGE.fullmatch(values["image"]) else ""

    def key_of_file(self, path: str) -> str:
        """The same of a file."""
        match = _IMAGE.fullmatch(path)
        return "/".join(match.groups()[:4]) if match else path

    def place_row(self, values: Mapping[str, str], path: str, form: ImageForm) -> Placement | Reason:
        """Place by the path."""
        match = _IMAGE.fullmatch(path) or _IMAGE.fullmatch(f"{path}.jpg")
        if match is None:
            return Reason.NOT_IN_LAYOUT
        where, patient, study, image, _ = match.groups()
        split = self.split_of(patient, where)
        if isinstance(split, Reason):
            return split
        is_lateral = (values["view"] or image).lower().endswith("lateral")
        return Placement(
            form=form,
            patient=patient,
            study=f"{patient}/{study}",
            series="" if form == "dicom" else f"{patient}/{study}/{image}",
            instance="" if form == "dicom" else f"{patient}/{study}/{image}",
            split=split,
            modality=self.settings.modality.upper() or "CR",
            attributes=patient_attributes(
                sex=values["sex"],
                age=values["age"],
                view=values["position"] or ("LATERAL" if is_lateral else ""),
            ),
            is_gray=True,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the texts of CheXpert Plus: the whole report, or the sections where it is not there."""
        source = self.inputs.reports
        if source is None:
            return iter(())
        if not source.is_file():
            raise ConfigError("inputs.reports must be the table of CheXpert Plus, got a folder; correct it.")
        return read_report_rows(
            source, self.settings.report_columns, _REPORT, ("image",), _studies_of, _text_of
        )


def _is_plus(table: object) -> bool:
    row = next(read_table(table, "layout.table", _PLUS), None)  # type: ignore[arg-type]
    return row is not None and bool(row.values and row.values["image"])


def _studies_of(values: Mapping[str, str]) -> Sequence[str]:
    match = _IMAGE.fullmatch(values["image"])
    return [f"{match[2]}/{match[3]}"] if match else []


def _text_of(values: Mapping[str, str]) -> str:
    sections = [f"{name.upper()}: {values[name]}" for name in ("findings", "impression") if values[name]]
    return values["text"] or "\n".join(sections)
