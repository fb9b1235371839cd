"""Pictures of a packed dataset: slices, regions and findings of the studies that a conversation refers to.

A study is identified by its sample key, or by an identifier of its source, which the private folder of the
dataset resolves. Its slices become 8-bit pictures in their display range or a given window, which is what
vision-language models take, and are stored in the conversation's own sample.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.errors import ConfigError
from shardflow.format.codecs import encode_array
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import image_starts
from shardflow.format.facts.series import open_series
from shardflow.format.keys import ANNOTATIONS_FIELD, STUDY_FIELD
from shardflow.format.tables import TableUnit
from shardflow.packing.corpora.config import LineError, LineReason
from shardflow.packing.corpora.pictures import StoredPicture
from shardflow.packing.tables.keys import PrivateFolder, open_keys
from shardflow.viewing.study import WINDOWS, Window, choose_slices, decode_slice, to_gray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.corpora.config import StudiesConfig
    from shardflow.packing.corpora.conversations import StudyPlace

_ALIGNMENT: Final = "alignment.json"
_UNITS: Final[Mapping[str, TableUnit]] = {"series_instance_uid": "series", "sop_instance_uid": "image"}


@dataclass(frozen=True, slots=True)
class _Target:
    """Target of a key: a study, one of its series, or one slice."""

    row: int
    series: int | None = None
    index: int | None = None


class StudyFinder:
    """Finds the slices that conversations refer to.

    Args:
        config: The dataset, and the kind of its keys.

    Attributes:
        dataset: The dataset.

    Raises:
        ConfigError: It is not a dataset of studies, or a needed private folder belongs to another one.
    """

    def __init__(self, config: StudiesConfig) -> None:
        self.dataset = Dataset.open(config.dataset)
        private = None if config.private_dir is None else PrivateFolder(path=config.private_dir)
        self._unit: TableUnit = _UNITS.get(config.on, "study")
        self._keys = open_keys(self.dataset, config.on, self._unit, private)
        if self._unit != "study":
            self._first_series = open_series(self.dataset)[0].first_series()
            self._starts = image_starts(self.dataset)

    def split(self, place: StudyPlace) -> str:
        """Return the split of a place's study.

        Raises:
            LineError: There is no such study.
        """
        row = self._target(place).row
        return next(split for split, rows in self.dataset.splits.items() if row in rows)

    def pictures(self, place: StudyPlace) -> list[StoredPicture]:
        """Return the pictures of a place, a slice each.

        Raises:
            LineError: The dataset lacks what the place refers to.
            StorageError: It cannot be read.
            FormatError: A member of it is damaged.
        """
        target = self._target(place)
        place_series = place.series if target.series is None else target.series
        number, indexes, box = self._slices(place, target, 0 if place_series is None else place_series)
        described = dict(enumerate(self._json(target.row, STUDY_FIELD).get("series", [])))
        names = self.dataset.slice_names(target.row, number)
        if not indexes or max(indexes) >= len(names):
            raise LineError(LineReason.UNKNOWN_STUDY)
        payloads = self.dataset.read_fields(target.row, [names[index] for index in indexes])
        planes = [_cut(decode_slice(names[index], payloads[names[index]]), box) for index in indexes]
        if planes[0].ndim == 2:
            series = described.get(number, {})
            window = _window(place.window) or Window.of_series(series) or _extremes(planes)
            beside = {"window": [window.low, window.high], "unit": series.get("unit")}
        else:  # colors are shown as they are
            window, beside = None, {}
        return [
            StoredPicture(
                encode_array("png16", np.ascontiguousarray(to_gray(plane, window))),
                "png",
                plane.shape[0],
                plane.shape[1],
                beside,
            )
            for plane in planes
        ]

    def _target(self, place: StudyPlace) -> _Target:
        found = int(self._keys.find([place.study])[0])
        if found < 0:
            raise LineError(LineReason.UNKNOWN_STUDY)
        if self._unit == "study":
            return _Target(found)
        index = None
        if self._unit == "image":
            image, found = found, int(np.searchsorted(self._starts, found, "right")) - 1
            index = image - int(self._starts[found])
        row = int(np.searchsorted(self._first_series, found, "right")) - 1
        return _Target(row, found - int(self._first_series[row]), index)

    def _slices(
        self, place: StudyPlace, target: _Target, series: int
    ) -> tuple[int, list[int], tuple[float, ...] | None]:
        """Return the series, the indexes of its slices and the box to crop them to, in pixels."""
        if place.region is not None:
            return self._region(place, target.row)
        if place.finding is not None:
            return self._finding(place, target.row)
        num_slices = len(self.dataset.slice_names(target.row, series))
        if target.index is not None:
            return series, [target.index], None
        if isinstance(place.slices, tuple):
            return series, list(range(place.slices[0], min(place.slices[1], num_slices + 1))), None
        if place.slices is None and num_slices != 1:
            raise LineError(LineReason.UNKNOWN_STUDY)
        return series, list(choose_slices(num_slices, place.slices or 1)), None

    def _region(self, place: StudyPlace, row: int) -> tuple[int, list[int], tuple[float, ...] | None]:
        """Choose the slice where a region is largest, or as many as requested; cropped to its boxes."""
        for region in self._json(row, ANNOTATIONS_FIELD).get("rois", []):
            if region["roi"] == place.region and place.series in (None, region["series"]):
                boxed = [each for each in region["slices"] if each.get("box_px")]
                boxed.sort(key=lambda each: (-_area(each["box_px"]), each["slice"]))
                chosen = boxed[: _count(place)]
                if not chosen:
                    break
                corners = np.array([each["box_px"] for each in chosen])
                box = (*corners[:, :2].min(0).tolist(), *corners[:, 2:].max(0).tolist())
                return region["series"], sorted(each["slice"] for each in chosen), box
        raise LineError(LineReason.UNKNOWN_STUDY)

    def _finding(self, place: StudyPlace, row: int) -> tuple[int, list[int], tuple[float, ...] | None]:
        """Choose the slice that shows a finding best, or as many as requested."""
        for aligned in self._json(row, _ALIGNMENT).get("entities", []):
            if aligned["entity"] == place.finding and place.series in (None, aligned["series"]):
                ranked = sorted(
                    zip(aligned["slices"], aligned["weights"], strict=True),
                    key=lambda each: (-each[1], each[0]),
                )
                return aligned["series"], sorted(index for index, _ in ranked[: _count(place)]), None
        raise LineError(LineReason.UNKNOWN_STUDY)

    def _json(self, row: int, name: str) -> Mapping[str, Any]:
        """Return a member of a study; empty if it has none."""
        _, fields = self.dataset.sample_fields(row)
        if all(field.name != name for field in fields):
            return {}
        found: Mapping[str, Any] = json.loads(self.dataset.read_fields(row, [name])[name])
        return found


@lru_cache(maxsize=1)
def open_studies(config: StudiesConfig) -> StudyFinder:
    """Return the finder of a packing process, which its parts share.

    Raises:
        ConfigError: See `StudyFinder`.
    """
    return StudyFinder(config)


def check_splits_of(dataset: Dataset, parts: Mapping[str, int]) -> None:
    """Check that a job has all splits of the studies.

    Raises:
        ConfigError: One is missing.
    """
    missing = [split for split, rows in dataset.splits.items() if rows and split not in parts]
    if missing:
        raise ConfigError(
            f"conversations go where their studies are, and splits.parts has no {missing[0]}; add it, with 0 "
            "parts if no other line is to go there."
        )


def _count(place: StudyPlace) -> int:
    if isinstance(place.slices, tuple):
        raise LineError(LineReason.WRONG_TYPE)
    return place.slices or 1


def _area(box: list[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _cut(plane: NDArray[Any], box: tuple[float, ...] | None) -> NDArray[Any]:
    """Crop a slice to a box of edges: the pixels that it touches."""
    if box is None:
        return plane
    left, top = (max(math.floor(edge), 0) for edge in box[:2])
    cut = plane[top : math.ceil(box[3]), left : math.ceil(box[2])]
    if not cut.size:
        raise LineError(LineReason.UNKNOWN_STUDY)
    return cut


def _window(stated: str | tuple[float, float] | None) -> Window | None:
    if stated is None:
        return None
    if isinstance(stated, str):
        if stated not in WINDOWS:
            raise LineError(LineReason.WRONG_TYPE)
        return WINDOWS[stated]
    center, width = stated
    return Window(center - width / 2, center + width / 2)


def _extremes(planes: list[NDArray[Any]]) -> Window:
    return Window(
        min(float(np.nanmin(plane)) for plane in planes), max(float(np.nanmax(plane)) for plane in planes)
    )
