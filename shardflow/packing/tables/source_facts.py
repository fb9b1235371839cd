"""Facts from the headers of the source, for datasets whose ``study.json`` was written without them.

Earlier versions of packing stored fewer technical attributes. Headers are found by the surrogates of their
images and pass the same allowlist as in packing; what ``study.json`` has is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardflow.errors import ConfigError, SourceError
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import image_starts
from shardflow.format.facts.series import open_series
from shardflow.packing.deid.allowlist import (
    KEYWORDS,
    VIEW_KEYWORDS,
    allow_ordinal,
    allow_patient,
    allow_technical,
)
from shardflow.packing.sources.dicom.attributes import AttributeValue, read_attributes
from shardflow.packing.tables.keys import PrivateFolder, open_keys

_SOP: Final = "SOPInstanceUID"
_NUMBERS: Final = ("SeriesNumber", "InstanceNumber")
_FILES: Final = 1024
"""Files whose keys are looked up together."""


@dataclass(frozen=True, slots=True)
class _Header:
    """Allowed values of the header of a series' first image."""

    technical: Mapping[str, Any]
    patient: Mapping[str, Any]
    series_number: int | None


class SourceFacts:
    """Facts of a dataset's series from the headers of its source. Keeps one header a series.

    Args:
        dataset: The dataset, with its series table; its rows are studies.
        source: Folder that holds the DICOM files which were packed, in any order; others in it are ignored.
        private: Private folder of the dataset.

    Attributes:
        num_files: Files with a header.
        num_images: Of these, images of the dataset.

    Raises:
        ConfigError: The folder is missing or holds no image of the dataset, or the private folder is not that
            of the dataset.
    """

    def __init__(self, dataset: Dataset, source: Path, private: PrivateFolder) -> None:
        if not source.is_dir():
            raise ConfigError("--source must be a folder of the DICOM files that were packed, got no folder.")
        self.num_files = self.num_images = 0
        self._starts = image_starts(dataset)
        self._first_series = open_series(dataset)[0].first_series()
        self._headers: dict[int, _Header] = {}
        self._views: dict[int, Mapping[str, Any]] = {}
        keys = open_keys(dataset, "sop_instance_uid", "image", private)
        for found in _blocks(_headers(source)):
            self.num_files += len(found)
            images = keys.find([str(next(iter(one[_SOP]), "")) for one in found])
            self.num_images += int(np.count_nonzero(images >= 0))
            for image, attributes in zip(images.tolist(), found, strict=True):
                if image >= 0:
                    self._take(image, attributes)
        if not self.num_images:
            raise ConfigError(
                f"None of the {self.num_files:,} files with a DICOM header in --source is an image of this "
                "dataset; name the folder that was packed."
            )

    def _take(self, image: int, attributes: Mapping[str, AttributeValue]) -> None:
        """Keep what an image's header says: of the first image of a series all, of others their view."""
        views = allow_technical({name: attributes[name] for name in VIEW_KEYWORDS if name in attributes})
        if views:
            self._views[image] = views
        series = int(np.searchsorted(self._starts, image, side="right")) - 1
        if image != int(self._starts[series]):
            return
        number = next(iter(attributes.get(_NUMBERS[0], ())), None)
        self._headers[series] = _Header(
            allow_technical(attributes),
            {name: value for name, value in allow_patient(attributes).items() if value is not None},
            allow_ordinal(int(number)) if isinstance(number, int) else None,
        )

    def complete(self, row: int, study: dict[str, Any]) -> dict[str, Any]:
        """Return a study with the facts that its ``study.json`` lacks.

        Args:
            row: Row of the samples table.
            study: Its ``study.json``.
        """
        first = int(self._first_series[row])
        described = [self._completed(first + number, one) for number, one in enumerate(study["series"])]
        patient = dict(study.get("patient") or {})
        for number in range(len(described)):
            header = self._headers.get(first + number)
            patient = {**({} if header is None else header.patient), **_known(patient)}
        return {**study, "series": described, **({"patient": patient} if patient else {})}

    def _completed(self, series: int, described: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(described)
        header = self._headers.get(series)
        if header is not None:
            technical = {**header.technical, **(described.get("technical") or {})}
            given = {
                "modality": technical.get("modality"),
                "body_part": technical.get("body_part_examined"),
                "series_number": header.series_number,
            }
            found = {**_known(given), **_known(described), "technical": technical}
        if "images" not in described:
            images = [
                self._views.get(image, {}) for image in range(*self._starts[series : series + 2].tolist())
            ]
            if described.get("kind", "images") == "images" and any(one != images[0] for one in images):
                found["images"] = images
        return found


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _headers(source: Path) -> Iterator[Mapping[str, AttributeValue]]:
    """Yield the attributes of every DICOM file below a folder."""
    for folder, names, files in os.walk(source):
        names.sort()
        for name in sorted(files):
            try:
                attributes = read_attributes(Path(folder) / name, [*KEYWORDS, _SOP, *_NUMBERS])
            except SourceError:
                continue  # no image, or one that packing did not take either
            if _SOP in attributes:
                yield attributes


def _blocks(headers: Iterator[Mapping[str, AttributeValue]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    block: list[Mapping[str, Any]] = []
    for one in headers:
        block.append(one)
        if len(block) == _FILES:
            yield block
            block = []
    yield block
