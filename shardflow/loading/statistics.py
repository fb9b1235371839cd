"""Statistics of what fields deliver: intensities, also inside of masks; spacings and shapes of series.

The numbers that nnU-Net calls a fingerprint (Isensee et al., Nature Methods 18, 2021): mean, standard
deviation, percentiles in the unit of the pixels, over all pixels and over the foreground of a mask; and the
percentiles of spacings, from tables alone. Samples are streamed once. Integers of at most 16 bits are counted
by value, so their numbers are exact; of others a histogram has 2048 steps in each power of two. Neither
depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.catalog import SelectedSeries
from shardflow.fields.field import Field
from shardflow.fields.types.pictures import Slices
from shardflow.fields.volumes.field import DEFAULT_VOLUMES, Volume
from shardflow.loading.binding import bind_fields
from shardflow.loading.config import LoaderConfig
from shardflow.loading.loader import Loader
from shardflow.loading.rows.selection import Selection
from shardflow.sampling import BatchSpec
from shardflow.telemetry import StageCounters

PERCENTILES: Final = (0.5, 5.0, 25.0, 50.0, 75.0, 95.0, 99.5)
"""In percent; the outer ones are those that nnU-Net clips at."""
_PICTURES: Final = frozenset({"image", "slices"})
"""Types of fields whose pictures are (C, H, W)."""
_REGIONS: Final = "mask"
_LOW_BITS: Final = 12
_BLOCK: Final = 1 << 20
_ALONE: Final = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
_SERIES_COLUMNS: Final = (
    "slice_spacing_mm",
    "row_spacing_mm",
    "column_spacing_mm",
    "num_slices",
    "rows",
    "columns",
)


@dataclass(slots=True)
class Histogram:
    """Counts of values, in bounded memory; exact for integers of at most 16 bits.

    Args:
        dtype: Of the values.
    """

    dtype: np.dtype[Any]
    num_not_finite: int = 0
    """Values that are not numbers or infinite, which count nowhere else."""
    _counts: NDArray[np.int64] = field(init=False)
    _num: int = field(init=False, default=0)
    _mean: float = field(init=False, default=0.0)
    _squares: float = field(init=False, default=0.0)
    _low: float = field(init=False, default=math.inf)
    _high: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        size = 1 << (8 * self.dtype.itemsize if self.is_exact else 32 - _LOW_BITS)
        self._counts = np.zeros(size, np.int64)

    @property
    def is_exact(self) -> bool:
        """Whether each value is counted by itself."""
        return self.dtype.kind in "iub" and self.dtype.itemsize <= 2

    def add(self, values: NDArray[Any]) -> None:
        """Count values, of any shape."""
        flat = values.reshape(-1)
        for start in range(0, len(flat), _BLOCK):  # bounds what counting needs beside the counts
            self._add(flat[start : start + _BLOCK])

    def _add(self, values: NDArray[Any]) -> None:
        if self.is_exact:
            offset = np.iinfo(self.dtype).min if self.dtype.kind == "i" else 0
            places = values.astype(np.int32) - offset
        else:
            numbers = values.astype(np.float64)
            is_finite = np.isfinite(numbers)
            self.num_not_finite += int(np.count_nonzero(~is_finite))
            numbers = numbers[is_finite]
            if not len(numbers):
                return
            self._merge(len(numbers), float(numbers.mean()), float(np.square(numbers - numbers.mean()).sum()))
            self._low = min(self._low, float(numbers.min()))
            self._high = max(self._high, float(numbers.max()))
            # The bits of a float are ordered like its value once the negative ones are turned around.
            bits = numbers.astype(np.float32).view(np.uint32)
            places = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)) >> _LOW_BITS
        self._counts += np.bincount(places, minlength=len(self._counts))

    def _merge(self, num: int, mean: float, squares: float) -> None:
        """Add the moments of a block (Chan, Golub and LeVeque, 1979)."""
        total = self._num + num
        away = mean - self._mean
        self._squares += squares + away * away * (self._num * num / total)
        self._mean += away * (num / total)
        self._num = total

    def _values(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the value of counts: of a range of floats its middle."""
        if self.is_exact:
            return places.astype(np.float64) + (np.iinfo(self.dtype).min if self.dtype.kind == "i" else 0)
        codes = (places.astype(np.uint32) << _LOW_BITS) | np.uint32(1 << (_LOW_BITS - 1))
        bits = np.where(codes >> 31, codes ^ np.uint32(1 << 31), ~codes).astype(np.uint32)
        numbers = bits.view(np.float32).astype(np.float64)
        numbers[np.abs(numbers) < np.finfo(np.float32).tiny] = 0.0  # the two ranges that begin with 0
        return np.clip(numbers, self._low, self._high)

    def describe(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """Return ``num_pixels``, ``mean``, ``std``, ``min``, ``max`` and ``percentiles`` by percent.

        Between two values percentiles are interpolated linearly. All are None where there is no value.
        """
        used = np.flatnonzero(self._counts)
        counts = self._counts[used]
        num = int(counts.sum())
        found: dict[str, Any] = {"num_pixels": num}
        if not num:
            return {
                **found,
                **dict.fromkeys(("mean", "std", "min", "max")),
                "percentiles": {f"{one:g}": None for one in percentiles},
            }
        values = self._values(used)
        if self.is_exact:
            pairs = list(zip((int(one) for one in values.tolist()), counts.tolist(), strict=True))
            total, squares = sum(v * c for v, c in pairs), sum(v * v * c for v, c in pairs)
            mean, std = total / num, math.sqrt((squares * num - total * total) / (num * num))
        else:
            mean, std = self._mean, math.sqrt(self._squares / num)
        ends = np.cumsum(counts)
        places = np.array([one / 100 * (num - 1) for one in percentiles])
        low, high = (values[np.searchsorted(ends, round_(places), side="right")] for round_ in _ROUNDINGS)
        between = low + (high - low) * (places - np.floor(places))
        return {
            **found,
            "mean": mean,
            "std": std,
            "min": float(values[0]) if self.is_exact else self._low,
            "max": float(values[-1]) if self.is_exact else self._high,
            "percentiles": {
                f"{one:g}": value for one, value in zip(percentiles, between.tolist(), strict=True)
            },
        }


_ROUNDINGS: Final[tuple[Callable[[NDArray[Any]], NDArray[Any]], ...]] = (np.floor, np.ceil)


def field_statistics(
    selection: Selection,
    fields: Mapping[str, Field],
    *,
    percentiles: Sequence[float] = PERCENTILES,
    config: LoaderConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the statistics of all fields of pictures, as JSON.

    ``num_samples``, ``num_bad``, and by the name of each such field its ``units`` and ``dtype``, the
    ``channels`` (each as `Histogram.describe`), the same of ``foreground`` if there is a mask of it, with the
    number of samples that it is from, and ``series``: percentiles of spacings in mm and of shapes.

    Args:
        selection: The samples.
        fields: The fields; each is delivered as for an evaluation, without augmentation. Of a volume all
            stored slices count, neither cut nor resampled.
        percentiles: In percent.
        config: How samples are read.
        progress: Called with the samples done, and all of them.

    Raises:
        ConfigError: No field delivers pictures, a mask is like none of them, or samples of a blend are given.
        ShardflowError: Reading failed.
    """
    if selection.repeats:
        raise ConfigError(
            "Statistics are of samples that are drawn once; leave out blends, weights and classes."
        )
    if any(not 0 <= one <= 100 for one in percentiles):
        raise ConfigError("Percentiles are from 0 to 100, in percent, such as 0.5 and 99.5; got others.")
    chosen = {name: _as_stored(one) for name, one in fields.items()}
    pictures = [name for name, one in chosen.items() if one.type_name in _PICTURES]
    masks = {str(getattr(one, "like", "")): name for name, one in chosen.items() if one.type_name == _REGIONS}
    tiled = [name for name in pictures if getattr(chosen[name], "tiles", None) is not None]
    if tiled:
        raise ConfigError(
            f"The field {tiled[0]!r} delivers tiles and overviews, which show pixels twice; leave out tiles "
            "for statistics."
        )
    if not pictures:
        raise ConfigError(
            "No field of the file delivers pictures; write one of the type image, slices or volume."
        )
    kept = {name: one for name, one in chosen.items() if name in (*pictures, *masks.values())}
    selection, fields_of = bind_fields(selection, kept, StageCounters())
    bound = {one.name: one for one in fields_of.bound}
    found: dict[str, _OfField] = {name: _OfField(has_mask=name in masks) for name in pictures}
    num_bad = 0
    with Loader(selection, batch=_ALONE, seed=0, fields=kept, world="single", config=config) as loader:
        for done, batch in enumerate(loader, start=1):
            if batch.info.weight[0]:
                for name, one in found.items():
                    one.add(batch, name, masks.get(name))
            else:
                num_bad += 1
            if progress is not None:
                progress(done, len(loader))
        num = len(loader)
    shown: dict[str, Any] = {}
    for name, one in found.items():
        selected = getattr(bound[name], "selected", None)
        shown[name] = one.describe(percentiles)
        if isinstance(selected, SelectedSeries):
            shown[name] |= _of_series(selected, percentiles)
    return {"num_samples": num - num_bad, "num_bad": num_bad, "fields": shown}


def _as_stored(field: Field) -> Field:
    """Return a field without random choices; of volumes all slices, whatever is cut from them."""
    if isinstance(field, Volume):
        return Slices(series=field.series or DEFAULT_VOLUMES, missing=field.missing)
    return field.for_evaluation()


class _OfField:
    """Histograms of one field, by channel."""

    def __init__(self, *, has_mask: bool) -> None:
        self._channels: list[Histogram] = []
        self._inside: list[Histogram] = []
        self._has_mask, self._num_with_mask, self._num_with_pixels = has_mask, 0, 0

    def add(self, batch: Mapping[str, Any], name: str, mask_name: str | None) -> None:
        regions: dict[tuple[int, ...], NDArray[Any]] = {}
        if mask_name is not None:
            regions = dict(_pictures(batch[mask_name][0], batch[f"{mask_name}_mask"][0]))
            self._num_with_mask += bool(regions)
        boxes = batch[f"{name}_box"][0] if f"{name}_box" in batch else None
        num = 0
        for place, picture in _pictures(batch[name][0], batch[f"{name}_mask"][0]):
            self._open(picture)
            region = regions.get(place)
            if region is not None and region.shape[1:] != picture.shape[1:]:
                raise ConfigError(
                    f"The mask {mask_name!r} has another shape than {name!r}; use like={name!r}."
                )
            if boxes is not None:
                row, column, rows, columns = boxes[place].tolist() if place else boxes.tolist()
                inside = (..., slice(row, row + rows), slice(column, column + columns))
                picture, region = picture[inside], None if region is None else region[inside]
            foreground = None if region is None else region.any(axis=0)
            for channel, values in enumerate(picture):
                self._channels[channel].add(values)
                if foreground is not None:
                    self._inside[channel].add(values[foreground])
            num += 1
        self._num_with_pixels += bool(num)

    def _open(self, picture: NDArray[Any]) -> None:
        while len(self._channels) < len(picture):
            self._channels.append(Histogram(picture.dtype))
            self._inside.append(Histogram(picture.dtype))

    def describe(self, percentiles: Sequence[float]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "num_samples": self._num_with_pixels,
            "num_not_finite": sum(one.num_not_finite for one in self._channels),
            "channels": [one.describe(percentiles) for one in self._channels],
        }
        if self._has_mask:
            inside = [one.describe(percentiles) for one in self._inside]
            found["foreground"] = {"num_samples": self._num_with_mask, "channels": inside}
        return found


def _pictures(
    value: Any, mask: Any, place: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], NDArray[Any]]]:
    """Yield the pictures that there are, by their place in the sample."""
    if value is None:
        return
    if np.ndim(mask) == 0:
        if mask:
            yield place, np.asarray(value)
        return
    for number, (one, is_there) in enumerate(zip(value, mask, strict=False)):
        yield from _pictures(one, is_there, (*place, number))


def _of_series(selected: SelectedSeries, percentiles: Sequence[float]) -> dict[str, Any]:
    """Return units, and the fingerprint of spacings and shapes, of the selected series of the samples."""
    series: dict[str, Any] = {}
    for name in _SERIES_COLUMNS:
        values = selected.column(name).astype(np.float64)
        known = values[np.isfinite(values)]
        series[name] = {
            "num_missing": len(values) - len(known),
            "percentiles": {
                f"{one:g}": float(np.percentile(known, one)) if len(known) else None for one in percentiles
            },
        }
    units = dict(sorted(selected.count_names("unit").items()))
    return {"units": units, "num_series": sum(units.values()), "series": series}
