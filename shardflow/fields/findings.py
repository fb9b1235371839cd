"""Findings in a batch: arrays of what a finding is and where, and its regions in the slices of a view.

Only a selection with an entity view has the arrays. In a blend the samples of other components have -1 in all
of them, and names are numbered over all views of the blend.

Masks and boxes of regions are carried through crop, resize and flip as the slices are. Pixel coordinates
count edges, as in ``annotations.json``: a crop is a box of the stored slice, which is resized and then
flipped. Masks take the nearest pixel, at half-pixel centers as images do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.fields.reader import Samples
from shardflow.fields.views import ArraySpec
from shardflow.format.codecs import decode_array
from shardflow.format.entities import ASSERTIONS, LATERALITIES, EntityDataset, EntityPlace
from shardflow.format.keys import parse_mask_field

NO_ENTITY = -1
_NAMED = {"label": "labels", "anatomy": "anatomies", "assertion": "assertions", "laterality": "lateralities"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityNames:
    """Names that the codes of a batch index."""

    labels: tuple[str, ...]
    anatomies: tuple[str, ...]
    """The first one is empty: no anatomy was given."""
    assertions: tuple[str, ...] = ASSERTIONS
    lateralities: tuple[str, ...] = LATERALITIES

    @classmethod
    def of(cls, samples: Samples) -> EntityNames:
        """Collect the names of all views of a selection; empty without views."""
        views = [dataset.samples for dataset in samples.datasets if isinstance(dataset, EntityDataset)]
        return cls(
            labels=tuple(sorted({name for view in views for name in view.labels})),
            anatomies=tuple(sorted({name for view in views for name in view.anatomies})),
        )


class FindingArrays:
    """Finding arrays of a selection's micro-batches. Safe for many threads.

    Args:
        samples: The samples, at least some of an entity view.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.names = EntityNames.of(samples)
        self._codes = [self._codes_of(dataset) for dataset in samples.datasets]

    @classmethod
    def of(cls, samples: Samples) -> FindingArrays | None:
        """Return the finding arrays of a selection; None if no part of it is an entity view."""
        has_entities = any(isinstance(dataset, EntityDataset) for dataset in samples.datasets)
        return cls(samples) if has_entities else None

    def array_specs(self, num_slots: int) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        numbers = ("entity", "entity_series", "entity_centre", *(f"entity_{name}" for name in _NAMED))
        return [
            *(ArraySpec.of(name, np.int64, num_slots) for name in numbers),
            ArraySpec.of("entity_span", np.int64, num_slots, 2),
            ArraySpec.of("entity_confidence", np.float64, num_slots),
        ]

    def put(self, rows: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill the arrays of a micro-batch.

        Args:
            rows: ``(B,)`` rows of the selection; -1 is a slot without a sample.
            arrays: Of the micro-batch.

        Raises:
            ChecksumError: The table was damaged after it was opened.
        """
        for spec in self.array_specs(len(rows)):
            arrays[spec.name][:] = NO_ENTITY
        slots = np.flatnonzero(rows >= 0)
        components = self._samples.components_of(rows[slots])
        inside = self._samples.table_rows(rows[slots])
        for component in sorted(set(components.tolist())):
            dataset = self._samples.datasets[component]
            if not isinstance(dataset, EntityDataset):
                continue
            here, at = slots[components == component], inside[components == component]
            samples = dataset.samples
            arrays["entity"][here] = samples.gather("entity", at)
            arrays["entity_series"][here] = samples.gather("series", at)
            arrays["entity_centre"][here] = samples.centre_slices(at)
            for name in _NAMED:
                arrays[f"entity_{name}"][here] = self._codes[component][name][samples.gather(name, at)]
            start = samples.gather("span_start", at).astype(np.int64) - samples.gather("text_start", at)
            arrays["entity_span"][here, 0] = start
            arrays["entity_span"][here, 1] = start + samples.gather("span_bytes", at)
            arrays["entity_confidence"][here] = samples.gather("confidence", at)

    def _codes_of(self, dataset: Any) -> dict[str, NDArray[np.int64]]:
        """Return for each column the number here of each of the dataset's own names."""
        if not isinstance(dataset, EntityDataset):
            return {}
        found = {}
        for name, field in _NAMED.items():
            known = {value: number for number, value in enumerate(getattr(self.names, field))}
            own = dataset.samples.vocabularies[name]
            found[name] = np.array([known[value] for value in own], np.int64)
        return found


def centre_first(chosen: NDArray[np.int64], place: EntityPlace) -> NDArray[np.int64]:
    """Return the slices of a finding to deliver: the center one first, then the others in order.

    Args:
        chosen: Positions among the finding's slices that a view chose; if the center is not among them, it
            replaces its nearest neighbor.
        place: The finding.

    Returns:
        As many indices of slices of the series.
    """
    if not len(chosen):
        return chosen
    nearest = int(np.argmin(np.abs(chosen - place.centre)))
    others = np.delete(chosen, nearest)
    return np.concatenate((place.slices[place.centre : place.centre + 1], place.slices[others]))


def region_masks(
    fields: Mapping[str, bytes], region: Mapping[str, Any], slices: Sequence[int], shape: tuple[int, int]
) -> NDArray[np.uint8]:
    """Decode the masks of a region in chosen slices.

    Args:
        fields: Fields of the sample by name; only the region's masks are used.
        region: Its entry in ``annotations.json``.
        slices: Indexes of the slices, in any order.
        shape: Rows and columns of the slices.

    Returns:
        ``(len(slices), rows, columns)``; zeros outside the region.

    Raises:
        FormatError: A mask has another shape, or cannot be decoded.
    """
    masks = np.zeros((len(slices), *shape), np.uint8)
    if region["mask"] is None:
        return masks
    found = {}
    for name in fields:
        part = parse_mask_field(name)
        if part is not None and (part.series, part.roi) == (region["series"], region["roi"]):
            found[part.index] = (part.codec, name)
    for place, index in enumerate(slices):
        if index in found:
            codec, name = found[index]
            mask = decode_array(codec, fields[name])
            if mask.shape != shape or mask.dtype != np.uint8:
                raise FormatError(
                    f"a mask must be uint8 of the shape {shape}, got {mask.dtype} of {mask.shape} "
                    f"(field {name}); verify the dataset."
                )
            masks[place] = mask
    return masks


def carry_mask(
    mask: NDArray[np.uint8],
    size: tuple[int, int],
    *,
    crop: Sequence[float] | None = None,
    flip_rows: bool = False,
    flip_columns: bool = False,
) -> NDArray[np.uint8]:
    """Transform a mask as its slice was transformed.

    Args:
        mask: ``(..., rows, columns)`` of the stored slice.
        size: Rows and columns of the result.
        crop: ``x0, y0, x1, y1`` in the stored slice, integers or not; the whole slice by default. Outside the
            slice the mask is 0.
        flip_rows: Whether rows are reversed afterwards.
        flip_columns: Whether columns are reversed afterwards.

    Returns:
        ``(..., *size)``.
    """
    rows, columns = mask.shape[-2:]
    x0, y0, x1, y1 = crop or (0, 0, columns, rows)
    at_row, is_row = _sources(size[0], y0, y1, rows, is_flipped=flip_rows)
    at_column, is_column = _sources(size[1], x0, x1, columns, is_flipped=flip_columns)
    carried: NDArray[np.uint8] = mask[..., at_row[:, None], at_column[None, :]]
    return carried * (is_row[:, None] & is_column[None, :])


def carry_box(
    box: Sequence[float],
    shape: tuple[int, int],
    size: tuple[int, int],
    *,
    crop: Sequence[float] | None = None,
    flip_rows: bool = False,
    flip_columns: bool = False,
) -> tuple[float, float, float, float] | None:
    """Transform a box as its slice was transformed, see `carry_mask`.

    Args:
        box: ``x0, y0, x1, y1`` in the stored slice.
        shape: Rows and columns of the stored slice.
        size: As in `carry_mask`, like the arguments below.
        crop: Box in the stored slice.
        flip_rows: Whether rows are reversed afterwards.
        flip_columns: Whether columns are reversed afterwards.

    Returns:
        The visible part of the box in the result; None if nothing is visible.
    """
    left, top, right, bottom = crop or (0, 0, shape[1], shape[0])
    x0, x1 = _carried(box[0], box[2], left, right, size[1], is_flipped=flip_columns)
    y0, y1 = _carried(box[1], box[3], top, bottom, size[0], is_flipped=flip_rows)
    return (x0, y0, x1, y1) if x1 > x0 and y1 > y0 else None


def _sources(
    length: int, start: float, stop: float, limit: int, *, is_flipped: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the stored pixel under each pixel of the result, and whether there is one."""
    at = np.floor(start + (np.arange(length) + 0.5) * (stop - start) / length).astype(np.int64)
    at = at[::-1] if is_flipped else at
    return np.clip(at, 0, limit - 1), (at >= 0) & (at < limit)


def _carried(
    low: float, high: float, start: float, stop: float, length: int, *, is_flipped: bool
) -> tuple[float, float]:
    scale = length / (stop - start)
    first, last = ((min(max(edge, start), stop) - start) * scale for edge in (low, high))
    return (length - last, length - first) if is_flipped else (first, last)
