"""Base of bound fields that deliver one region of one series of each sample: volumes, and tiles of slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.catalog import SelectedSeries
from shardflow.fields.field import Arrays, BoundField, Coverage, Field, FieldContext, SlotRequest, Slots
from shardflow.fields.series_rows import ImageSet, Limits
from shardflow.format.facts.units import WindowTable

_LIMITS: Final = Limits(max_series=1)


def present_region(entry: Mapping[str, Any], arrays: Arrays, beside: Sequence[str]) -> dict[str, Any]:
    """Return the regions of an entry, and the arrays beside them that the batch has."""
    name = entry["name"]
    names = (f"{name}_{one}" for one in beside)
    return {name: arrays[name], **{one: arrays[one] for one in names if one in arrays}}


class BoundRegion(BoundField):
    """Field of regions, bound to a selection; the first selected series of a sample is delivered.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        selected: The series to deliver regions of.
        context: The samples and their tables.

    Raises:
        ConfigError: Samples are single images.
    """

    has_pictures = True
    beside: ClassVar[tuple[str, ...]]
    """Arrays beside the regions: ``NAME_mask`` and others."""
    spec: Field

    def __init__(self, name: str, spec: Field, selected: SelectedSeries, context: FieldContext) -> None:
        super().__init__(name)
        self.spec, self.selected = spec, selected
        self._samples, self._populations = context.samples, context.populations
        self._num_samples, self._num_missing = context.num_samples, 0
        if "image" in {getattr(dataset, "unit", "study") for dataset in context.samples.datasets}:
            raise ConfigError(
                f"The field {name!r} needs whole series, and samples are single images; write "
                "unit='series' or unit='study'."
            )

    def _count_missing(self, context: FieldContext, what: str) -> None:
        """Count the samples without content, once `has_content` is known.

        Args:
            context: The samples and their tables.
            what: What they lack, for the message.

        Raises:
            ConfigError: There are some, and ``missing`` is ``error``.
        """
        self._num_missing = context.count_missing(self.has_content)
        if self._num_missing and self.spec.missing == "error":
            raise ConfigError(
                f"{self._num_missing:,} of {self._num_samples:,} samples have no {what}; write missing='pad' "
                "to pad and mask them, or missing='drop' to leave them out."
            )

    @property
    def has_content(self) -> list[NDArray[np.bool_]]:
        """Rows of each dataset's own table that have a selected series, ``(num_rows,)``."""
        return [self.selected.num_images(place) > 0 for place in range(len(self.selected.catalog.tables))]

    @property
    def coverage(self) -> Coverage:
        """Series that are delivered, by the images that these hold, and others that are left out."""
        delivered, left_out = self.selected.roles(_LIMITS)
        return Coverage(
            num_samples=self._num_samples,
            num_missing=self._num_missing,
            delivered=delivered,
            left_out=left_out,
        )

    def delivered_images(self, place: int) -> ImageSet:
        """Return the stored images of a dataset that the field delivers."""
        return self.selected.images(place, _LIMITS)

    def num_delivered(self, place: int) -> NDArray[np.int64]:
        """Return 1 for each row of a dataset that has a series: a region costs the same, wherever it is."""
        return self.has_content[place].astype(np.int64)

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Empty what is beside the regions of every slot."""
        self._blank_beside(arrays, slice(None))

    def _blank_beside(self, arrays: Arrays, slots: int | slice) -> None:
        for beside in self.beside:
            if f"{self.name}_{beside}" in arrays:
                arrays[f"{self.name}_{beside}"][slots] = np.eye(4) if beside == "affine" else 0

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.spec.type_name, "name": self.name}

    def _window(self, request: SlotRequest) -> int:
        """Return the number of the window, or of the tile, that a sample is."""
        samples = self._samples.datasets[request.component].samples
        assert isinstance(samples, WindowTable)  # noqa: S101 - checked when the fields were bound
        return int(samples.numbers(np.array([request.table_row]))[0])
