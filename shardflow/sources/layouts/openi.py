"""Kind ``openi``: the Indiana chest X-rays of Open-i. ``inputs.reports`` is the folder of XML reports.

A report names its images (``parentImage``), several of them; there are no patients, so every study is one
of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree as ET

from shardflow.errors import ConfigError
from shardflow.sources.layouts.base import LayoutInputs, PlacedLayout
from shardflow.sources.layouts.placement import ImageForm, Placement
from shardflow.sources.reasons import Reason
from shardflow.sources.reports import MAX_REPORT_BYTES, BrokenReport, ReportRecord, make_record

__all__ = ["OpenI"]

_SECTIONS: Final = ("COMPARISON", "INDICATION", "FINDINGS", "IMPRESSION")


class _Report(NamedTuple):
    study: str
    images: tuple[str, ...]
    text: str


class OpenI(PlacedLayout):
    """Images belong to the report that names them; an image that two reports name belongs to nobody."""

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        source = inputs.reports
        if source is None or not source.is_dir():
            raise ConfigError("inputs.reports must be the folder of the XML reports, got none; name it.")
        self._source = source
        self._studies: defaultdict[str, set[str]] = defaultdict(set)
        for record in self._read_all():
            if isinstance(record, _Report):
                for image in record.images:
                    self._studies[image].add(record.study)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place by the name of the file."""
        image = path.rsplit("/", 1)[-1].removesuffix(".gz").rsplit(".", 1)[0]
        studies = self._studies.get(image, set())
        if len(studies) != 1:
            return Reason.AMBIGUOUS_LINK if studies else Reason.NOT_IN_LAYOUT
        (study,) = studies
        return Placement(
            form=form,
            patient=study,
            study=study,
            series="" if form == "dicom" else image,
            instance=image,
            modality=self.settings.modality.upper() or "DX",
            attributes={},
            is_gray=True,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the sections of each report."""
        for place, record in enumerate(self._read_all(), start=1):
            if isinstance(record, _Report):
                yield make_record(place, record.study, record.text)
            else:
                yield BrokenReport(place=place, reason=record, detail="")

    def reason_of_other(self, path: Path) -> Reason:
        """Reports beside the images have outcomes of their own."""
        is_report = path.suffix.lower() == ".xml" and path.is_relative_to(self._source.absolute())
        return Reason.LAYOUT_FILE if is_report else super().reason_of_other(path)

    def _read_all(self) -> Iterator[_Report | Reason]:
        for path in sorted(self._source.rglob("*.xml"), key=os.fsencode):
            yield _read_report(path)


def _read_report(path: Path) -> _Report | Reason:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_REPORT_BYTES + 1)
    except OSError:
        return Reason.FILE_UNREADABLE
    if len(data) > MAX_REPORT_BYTES:
        return Reason.LIMIT_EXCEEDED
    # A report needs no entities, and with them a few bytes can become gigabytes.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        return Reason.REPORT_UNREADABLE
    try:
        root = ET.fromstring(data)  # noqa: S314 - no entities, bounded size
    except ET.ParseError:
        return Reason.REPORT_UNREADABLE
    images = tuple(image.get("id", "").strip() for image in root.iter("parentImage"))
    said = {
        part.get("Label", "").strip().upper(): "".join(part.itertext()).strip()
        for part in root.iter("AbstractText")
    }
    text = "\n".join(f"{name}: {said[name]}" for name in _SECTIONS if said.get(name))
    return _Report(path.stem, tuple(image for image in images if image), text)
