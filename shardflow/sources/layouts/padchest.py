"""Kind ``padchest``: PadChest, 16-bit PNG and one table, which is ``layout.table`` and ``inputs.reports``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from shardflow.sources.layouts.base import patient_attributes
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.table_layout import TableLayout, read_report_rows
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord

__all__ = ["PadChest"]

_VIEWS = {"ANTEROPOSTERIOR": "AP", "LATERAL": "LATERAL", "POSTEROANTERIOR": "PA"}


class PadChest(TableLayout):
    """The table names everything by the file's name, whatever folder it lies in."""

    columns: ClassVar[Mapping[str, str]] = {
        "image": "ImageID",
        "modality": "Modality_DICOM",
        "patient": "PatientID",
        "sex": "PatientSex_DICOM",
        "study": "StudyID",
        "view": "ViewPosition_DICOM",
    }
    required: ClassVar[tuple[str, ...]] = ("image", "patient", "study")

    def key_of_row(self, values: Mapping[str, str]) -> str:
        """Name of the file."""
        return values["image"]

    def key_of_file(self, path: str) -> str:
        """Name of the file."""
        return path.rsplit("/", 1)[-1]

    def place_row(
        self,
        values: Mapping[str, str],
        path: str,  # noqa: ARG002 - the row says everything
        form: ImageForm,
    ) -> Placement | Reason:
        """Place by the row."""
        if not values["image"]:
            return Reason.NOT_IN_LAYOUT
        split = self.split_of(values["patient"])
        if isinstance(split, Reason):
            return split
        view = values["view"].upper()
        return Placement(
            form=form,
            patient=values["patient"],
            study=values["study"],
            series=values["image"],
            instance=values["image"],
            split=split,
            modality=(values["modality"] or self.settings.modality or "DX").upper(),
            attributes=patient_attributes(sex=values["sex"], view=_VIEWS.get(view, view)),
            is_patient_study=self.settings.is_patient_study,
            is_gray=True,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the texts; every image of a study repeats its report."""
        if self.inputs.reports is None:
            return iter(())
        return read_report_rows(
            self.inputs.reports,
            self.settings.report_columns,
            {"study": "StudyID", "text": "Report"},
            ("study", "text"),
            lambda values: [values["study"]] if values["study"] else [],
            lambda values: values["text"],
        )
