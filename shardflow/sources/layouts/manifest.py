"""Kind ``manifest``: one table lists all images, whatever their folders look like."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

from shardflow.errors import ConfigError
from shardflow.sources.layouts.base import LayoutInputs, patient_attributes
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.table_layout import TableLayout, read_report_rows
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord

__all__ = ["Manifest"]

Values = Mapping[str, str]

_MAX_DIGITS: Final = 18
_REPORT_COLUMNS = {name: name for name in ("accession", "patient", "report", "role", "study", "text")}


class Manifest(TableLayout):
    """The table's ``path`` is relative to the input folder; every other column may be left to the header.

    Reports join by ``study``; by ``report``, which rows of images name as well; or by ``patient`` and
    ``accession`` together, never by accession number alone: two hospitals count alike.
    """

    columns: ClassVar[Mapping[str, str]] = {
        name: name
        for name in (
            *(
                "accession",
                "age",
                "body_part",
                "instance",
                "intercept",
                "modality",
                "number",
                "path",
                "patient",
            ),
            *("report", "series", "sex", "slope", "split", "study", "view"),
        )
    }
    required: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        if {"accession"} <= self.settings.columns.keys() and not any(
            row["patient"] for _, row in self.rows()
        ):
            raise ConfigError(
                "layout.columns must name patients with accession numbers, got accession numbers alone; add "
                "the column of patients."
            )

    def key_of_row(self, values: Values) -> str:
        """Path without a leading ``./``."""
        return values["path"].removeprefix("./")

    def key_of_file(self, path: str) -> str:
        """The path itself."""
        return path

    def place_row(self, values: Values, path: str, form: ImageForm) -> Placement | Reason:
        """Take the row's word for everything that it says."""
        split = self.split_of(values["patient"], values["split"])
        if isinstance(split, Reason):
            return split
        study = self._study(values)
        series = values["series"] or path
        if not (_is_rescale(values["slope"], values["intercept"]) and _is_ordinal(values["number"])):
            return Reason.INVALID_IMAGE_DESCRIPTION
        # A volume has a header that may say it too; a picture has nothing but its row.
        is_asked = form == "raster" or (form == "nifti" and self.settings.volume_facts == "table")
        return Placement(
            form=form,
            patient=values["patient"],
            study=study,
            series=f"{study}/{series}" if values["series"] or form != "dicom" else "",
            instance=values["instance"] or ("" if form == "dicom" else path),
            number=int(values["number"]) if values["number"] else None,
            split=split,
            modality=(values["modality"] or self.settings.modality).upper(),
            attributes=patient_attributes(
                sex=values["sex"], age=values["age"], view=values["view"], body_part=values["body_part"]
            ),
            is_patient_study=self.settings.is_patient_study,
            other_ids=tuple(sorted({values["accession"], values["report"]} - {""})),
            rescale=_rescale(values["slope"], values["intercept"]) if is_asked else None,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the table of reports."""
        source = self.inputs.reports
        if source is None:
            return iter(())
        return read_report_rows(
            source,
            self.settings.report_columns,
            _REPORT_COLUMNS,
            ("text",),
            _Join(self).studies_of,
            lambda values: values["text"],
            copies=self.settings.report_of_several_studies == "copy",
        )

    def study_of_row(self, values: Values) -> str:
        """Name of the study of an image or a report."""
        return self._study(values)

    def _study(self, values: Values) -> str:
        if self.settings.is_study_within_patient and values["study"]:
            return f"{values['patient']}/{values['study']}" if values["patient"] else ""
        return values["study"]


class _Join:
    """Which studies a row of the reports names."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._by_report: defaultdict[str, set[str]] = defaultdict(set)
        self._by_accession: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for _, values in manifest.rows():
            study = manifest.study_of_row(values)
            if values["report"]:
                self._by_report[values["report"]].add(study)
            if values["accession"] and values["patient"]:
                self._by_accession[values["patient"], values["accession"]].add(study)

    def studies_of(self, values: Values) -> Sequence[str]:
        """Return the studies by the surest key that the row has."""
        if study := self._manifest.study_of_row(values):
            return [study]
        if values["report"]:
            return sorted(self._by_report.get(values["report"], {values["report"]}))
        if values["accession"] and values["patient"]:
            key = values["patient"], values["accession"]
            return sorted(self._by_accession.get(key, {"/".join(key)}))
        return []


def _rescale(slope: str, intercept: str) -> tuple[float, float] | None:
    """Slope and intercept, where the row states either."""
    return (float(slope or 1), float(intercept or 0)) if slope or intercept else None


def _is_rescale(slope: str, intercept: str) -> bool:
    """Whether values can be rescaled so: with a slope of 0, or with what is no number, all would be one."""
    try:
        factor, offset = float(slope or 1), float(intercept or 0)
    except ValueError:
        return False
    return math.isfinite(factor) and math.isfinite(offset) and factor != 0


def _is_ordinal(text: str) -> bool:
    return text.isascii() and len(text) <= _MAX_DIGITS and (text.isdigit() or not text)
