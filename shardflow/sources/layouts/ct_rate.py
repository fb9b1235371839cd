"""Kind ``ct-rate``: CT-RATE, NIfTI volumes named ``train_1_a_1.nii.gz``: patient, scan, reconstruction.

The table of reports is ``inputs.reports``; the metadata table is ``layout.table``. The headers of the first
release were blank, and the table has spacing, slope and intercept (``volume_facts = "table"``); the headers
of the fixed release have them (``"header"``). One of the two is taken: nothing is rescaled twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

from shardflow.errors import ConfigError
from shardflow.sources.layouts.base import LayoutInputs, patient_attributes
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.layouts.table_layout import TableLayout, read_report_rows
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import BrokenReport, ReportRecord

__all__ = ["CtRate"]

_VOLUME: Final = re.compile(r"(?:.*/)?((((train|valid)_\d+)_[a-z]+)_(\d+))\.nii(?:\.gz)?")
_REPORT: Final = {"findings": "Findings_EN", "image": "VolumeName", "impression": "Impressions_EN"}


class CtRate(TableLayout):
    """The file's name says everything; several reconstructions of a scan are series of one study."""

    columns: ClassVar[Mapping[str, str]] = {
        "age": "PatientAge",
        "image": "VolumeName",
        "intercept": "RescaleIntercept",
        "sex": "PatientSex",
        "slope": "RescaleSlope",
        "xy": "XYSpacing",
        "z": "ZSpacing",
    }
    required: ClassVar[tuple[str, ...]] = ("image",)

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        if self.settings.volume_facts == "table" and not self.has_table:
            raise ConfigError(
                "layout.table must name the metadata table for volume_facts 'table', got none; name it."
            )

    def key_of_row(self, values: Mapping[str, str]) -> str:
        """Name of the volume."""
        return self.key_of_file(values["image"])

    def key_of_file(self, path: str) -> str:
        """Name of the volume, without ending."""
        match = _VOLUME.fullmatch(path)
        return match[1] if match else path

    def place_row(
        self,
        values: Mapping[str, str],
        path: str,
        form: ImageForm,  # noqa: ARG002 - volumes only
    ) -> Placement | Reason:
        """Place by the name; the table fills the header's place or adds age and sex."""
        match = _VOLUME.fullmatch(path) or _VOLUME.fullmatch(f"{path}.nii.gz")
        if match is None:
            return Reason.NOT_IN_LAYOUT
        series, study, patient, where, number = match.groups()
        split = self.split_of(patient, where)
        if isinstance(split, Reason):
            return split
        rescale, spacing = None, None
        if self.settings.volume_facts == "table":
            facts = _table_facts(values)
            if facts is None:
                return Reason.INVALID_IMAGE_DESCRIPTION
            rescale, spacing = facts
        return Placement(
            form="nifti",
            patient=patient,
            study=study,
            series=series,
            instance=series,
            number=int(number),
            split=split,
            modality="CT",
            attributes=patient_attributes(sex=values["sex"], age=values["age"], body_part="CHEST"),
            spacing_mm=spacing,
            rescale=rescale,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports; every reconstruction repeats the one of its scan."""
        if self.inputs.reports is None:
            return iter(())
        return read_report_rows(
            self.inputs.reports,
            self.settings.report_columns,
            _REPORT,
            ("image", "findings", "impression"),
            _studies_of,
            _text_of,
        )


def _studies_of(values: Mapping[str, str]) -> Sequence[str]:
    match = _VOLUME.fullmatch(values["image"])
    return [match[2]] if match else []


def _text_of(values: Mapping[str, str]) -> str:
    sections = {"FINDINGS": values["findings"], "IMPRESSION": values["impression"]}
    return "\n".join(f"{name}: {text}" for name, text in sections.items() if text)


def _table_facts(values: Mapping[str, str]) -> tuple[tuple[float, float], tuple[float, float, float]] | None:
    """Rescale and spacing between rows, columns, slices; None where the row lacks one."""
    try:
        in_plane = json.loads(values["xy"])
        rows, columns = in_plane if isinstance(in_plane, list) else (in_plane, in_plane)
        numbers = [float(each) for each in (values["slope"], values["intercept"], rows, columns, values["z"])]
    except (TypeError, ValueError):
        return None
    slope, intercept, *spacing = numbers
    if not all(map(math.isfinite, numbers)) or min(spacing) <= 0 or slope == 0:
        return None
    return (slope, intercept), (spacing[0], spacing[1], spacing[2])
