"""Sliding windows over a volume: where they begin, how much each voxel of one counts, and outputs made whole.

Grids and weights are those of MONAI's ``dense_patch_slices`` and ``compute_importance_map``, so that a model
is evaluated as it would be there.

Sums of outputs are integers: an output times its weight, in units of 2**-37. Integers add up to the same in
any order, so a volume is equal in every bit on any number of ranks, in any order of windows, and after a
resume. Where all windows agree on a value it comes back to within 4e-9, and a whole number exactly. What is
open takes 8 bytes a voxel and channel, and 8 bytes a voxel for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, StateError
from shardflow.fields.field import check_choice
from shardflow.fields.volumes.geometry import Shape, Vector, is_perpendicular
from shardflow.fields.volumes.stored import StoredVolume, VolumeTable
from shardflow.format.facts.units import Unit

Mode: TypeAlias = Literal["gaussian", "constant"]
_LEAST_WEIGHT: Final = 1e-3
MAX_COVERS: Final = 2**10
"""Most windows that a voxel may be in."""
MAX_OUTPUT: Final = 2.0**15
"""Largest output in size: with up to `MAX_COVERS` windows a sum stays below 2**63."""
_WEIGHT_BITS: Final = 24
_VALUE_BITS: Final = 13
_WAITING, _SUMMED, _MASKED = range(3)
_BESIDE: Final = ("index", "start", "shape", "affine")


def checked_overlap(value: Any) -> Vector:
    """Return the part of a window that the next one covers again, along each axis.

    Raises:
        ConfigError: It is none.
    """
    sides = (
        [value] * 3
        if isinstance(value, int | float)
        else list(value)
        if isinstance(value, tuple | list)
        else []
    )
    if len(sides) != 3 or not all(
        isinstance(side, int | float) and not isinstance(side, bool) and 0 <= side < 1 for side in sides
    ):
        raise ConfigError(
            "overlap is a number from 0 and below 1, or one for each of D, H and W, such as 0.5, got "
            f"{value!r}."
        )
    return float(sides[0]), float(sides[1]), float(sides[2])


def check_covers(size: Shape, overlap: Vector) -> None:
    """Refuse an overlap with which a voxel is in too many windows.

    Raises:
        ConfigError: It is such.
    """
    covers = math.prod(-(-side // step_of(side, part)) for side, part in zip(size, overlap, strict=True))
    if covers > MAX_COVERS:
        raise ConfigError(
            f"With overlap={overlap} a voxel is in up to {covers:,} windows, and {MAX_COVERS:,} are allowed; "
            "write a smaller one, such as 0.5."
        )


def step_of(side: int, overlap: float) -> int:
    """Return how far a window begins after the one before it."""
    return max(int(side * (1 - overlap)), 1)  # as MONAI rounds it


def scan_starts(lengths: Shape, size: Shape, overlap: Vector) -> tuple[list[int], list[int], list[int]]:
    """Return where windows begin along each axis, ascending.

    The last one ends where the volume does. A volume that is shorter than a window has one, which begins half
    of what is missing before it (rounded down), as MONAI pads.

    Args:
        lengths: Voxels of the volume along each axis.
        size: Voxels of a window.
        overlap: Part of a window that the next one covers again.
    """
    found = []
    for length, side, part in zip(lengths, size, overlap, strict=True):
        room = max(length - side, 0)
        interval = step_of(side, part)
        before = max(side - length, 0) // 2
        found.append([min(at * interval, room) - before for at in range(1 + -(-room // interval))])
    return found[0], found[1], found[2]


def window_start(lengths: Shape, size: Shape, overlap: Vector, number: int) -> Shape:
    """Return where a window begins, numbered with the last axis running fastest."""
    depths, rows, columns = scan_starts(lengths, size, overlap)
    rest, column = divmod(number, len(columns))
    depth, row = divmod(rest, len(rows))
    return depths[depth], rows[row], columns[column]


def num_windows(lengths: Shape, size: Shape, overlap: Vector) -> int:
    """Return the number of windows of a volume."""
    return math.prod(len(starts) for starts in scan_starts(lengths, size, overlap))


def count_windows(
    table: VolumeTable,
    studies: NDArray[np.int64],
    series: NDArray[np.int64],
    shape_of: Callable[[StoredVolume], Shape],
    size: Shape,
    overlap: Vector,
) -> NDArray[np.int64]:
    """Return the number of windows of volumes, from tables alone.

    Volumes of equal shape and axes are counted once: unless axes are tilted, their place in the room does not
    decide how many voxels a grid has.

    Args:
        table: The volumes.
        studies: ``(n,)`` row of each volume's study.
        series: ``(n,)`` number of its series in the study.
        shape_of: Returns the voxels of the grid that windows are cut from.
        size: Voxels of a window.
        overlap: Part of a window that the next one covers again.
    """
    found = np.zeros(len(studies), np.int64)
    if not len(studies):
        return found
    geometry = table.geometry(studies, series)
    keys = np.ascontiguousarray(geometry).view(
        np.dtype((np.void, geometry.dtype.itemsize * geometry.shape[1]))
    )
    _, first, of = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    counts = np.zeros(len(first), np.int64)
    is_tilted = np.zeros(len(first), bool)
    for place, at in enumerate(first.tolist()):
        stored = table.volume(int(studies[at]), int(series[at]))
        counts[place] = num_windows(shape_of(stored), size, overlap)
        is_tilted[place] = stored.affine is not None and not is_perpendicular(stored.affine.columns)
    found[:] = counts[of]
    for at in np.flatnonzero(is_tilted[of]).tolist():
        found[at] = num_windows(shape_of(table.volume(int(studies[at]), int(series[at]))), size, overlap)
    return found


def importance_map(
    size: Sequence[int], mode: Mode = "gaussian", sigma_scale: float = 0.125
) -> NDArray[np.float32]:
    """Return the weight of each voxel of a window, above 0 and up to 1.

    Args:
        size: Voxels of a window.
        mode: ``gaussian`` falls from the middle to the sides; ``constant`` is 1 everywhere.
        sigma_scale: Standard deviation along each axis, in sides of the window.

    Raises:
        ConfigError: A setting is out of range.

    Source:
        ``compute_importance_map`` of MONAI 1.6.
    """
    check_choice("mode", mode, ("gaussian", "constant"))
    scale: object = sigma_scale
    if not isinstance(scale, int | float) or scale is True or not 0 < scale < math.inf:
        raise ConfigError(f"sigma_scale is a number above 0, such as 0.125, got {sigma_scale!r}.")
    found = np.ones(tuple(size), np.float32)
    for axis, side in enumerate(size if mode == "gaussian" else ()):
        places = np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2)
        along = np.exp(places**2 / np.float32(-2 * (sigma_scale * side) ** 2))
        found *= along.reshape([-1 if one == axis else 1 for one in range(len(size))])
    return np.maximum(found, max(float(found.min()), _LEAST_WEIGHT), out=found)


class WindowWeights:
    """Weights of the voxels of a window as integers.

    Args:
        size: Voxels (D, H, W) of a window.
        mode: See `importance_map`.
        sigma_scale: See `importance_map`.
    """

    def __init__(self, size: Sequence[int], mode: Mode, sigma_scale: float) -> None:
        weights = np.rint(importance_map(size, mode, sigma_scale).astype(np.float64) * 2**_WEIGHT_BITS)
        self.shape = weights.shape
        self._weights = weights.astype(np.int64)
        self._scaled = weights * 2**_VALUE_BITS

    def add(
        self,
        outputs: NDArray[np.float32],
        start: Shape,
        sums: NDArray[np.int64],
        weights: NDArray[np.int64] | None,
    ) -> None:
        """Add a window to the sums of its volume.

        Args:
            outputs: ``(C, D, H, W)`` of the window.
            start: Where it begins in the volume; what is outside is left out.
            sums: ``(C, D, H, W)`` of the volume.
            weights: ``(D, H, W)`` sum of weights, if it is wanted.

        Raises:
            ConfigError: An output is not finite, or too large.
        """
        here, there = self._inside(start, sums.shape[1:])
        part = outputs[(slice(None), *here)]
        if not (np.abs(part) <= MAX_OUTPUT).all():  # NaN is not
            raise ConfigError(
                f"The outputs of a window are not finite, or beyond {MAX_OUTPUT:,.0f} in size; stitch "
                "scores or probabilities, or scale them."
            )
        for values, total in zip(part, sums, strict=True):
            total[there] += np.rint(values * self._scaled[here]).astype(np.int64)
        if weights is not None:
            weights[there] += self._weights[here]

    def put(self, labels: NDArray[Any], start: Shape, target: NDArray[Any]) -> None:
        """Write what a window holds into its volume, ``(L, D, H, W)`` both; see `add`."""
        here, there = self._inside(start, target.shape[1:])
        target[(slice(None), *there)] = labels[(slice(None), *here)]

    def _inside(self, start: Shape, shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of a window that is inside of its volume, in both."""
        spans = [
            (at, max(at, 0), min(at + side, length))
            for at, side, length in zip(start, self.shape, shape, strict=True)
        ]
        here = tuple(slice(first - at, stop - at) for at, first, stop in spans)
        return here, tuple(slice(first, stop) for _, first, stop in spans)

    @staticmethod
    def divided(sums: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the weighted means, ``(C, D, H, W)``; NaN where no window is."""
        found = np.empty(sums.shape, np.float32)
        with np.errstate(invalid="ignore"):
            for total, target in zip(sums, found, strict=True):
                np.divide(total, weights * 2.0**_VALUE_BITS, out=target, casting="same_kind")
        return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StitchedVolume:
    """Outputs of the windows of a volume, as one array."""

    key: str
    """Sample key of the study."""
    values: NDArray[np.float32] | None
    """``(C, D, H, W)``; NaN where all windows are masked; None where none of the volume could be read."""
    affine: NDArray[np.float64]
    """``(4, 4)``: maps ``(d, h, w, 1)`` to LPS millimeters at voxel centers; NaN where that is unknown."""
    num_windows: int
    """Windows of the volume; 0 where none could be read."""
    num_masked: int
    """Windows that are missing, because their sample is bad or they were not run."""

    @property
    def is_complete(self) -> bool:
        """Whether every window is in it."""
        return self.values is not None and self.num_masked == 0


@dataclass(kw_only=True, slots=True, eq=False)
class PartialVolume:
    """Sums of some windows of a volume, which other ranks or a resumed run add to; it can be pickled."""

    key: str
    """Sample key of the study."""
    states: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    """``(num_windows,)``: 0 for a window that is not here, 1 for a summed, 2 for a masked one. Where none was
    summed, as long as it takes for the masked ones."""
    first: int = -1
    """Least number of a summed window; -1 for none."""
    affine: NDArray[np.float64] = field(default_factory=lambda: np.full((4, 4), np.nan))
    """As of that window."""
    sums: NDArray[np.int64] | None = None
    """``(C, D, H, W)``; None where no window was summed."""
    weights: NDArray[np.int64] | None = None
    """``(D, H, W)``."""

    @property
    def is_decided(self) -> bool:
        """Whether every window is here or masked."""
        return self.sums is not None and bool(self.states.all())

    def note(self, number: int, state: int, num_windows: int) -> None:
        """Note a window.

        Raises:
            StateError: It was noted before.
        """
        if len(self.states) < num_windows:
            self.states = np.pad(self.states, (0, num_windows - len(self.states)))
        if self.states[number]:
            raise StateError(
                f"Window {number} of a volume came twice; give a stitcher every batch once, and partial "
                "volumes that were taken with the state that the run resumes from."
            )
        self.states[number] = state

    def merge(self, other: PartialVolume) -> None:
        """Take over the windows of another part, whose arrays may be used up.

        Raises:
            StateError: A window is in both, or they are of different volumes.
        """
        for number in np.flatnonzero(other.states).tolist():
            self.note(number, int(other.states[number]), len(other.states))
        if other.sums is None or other.weights is None:
            return
        if self.sums is None or self.weights is None:
            self.sums, self.weights = other.sums, other.weights
        elif self.sums.shape != other.sums.shape:
            raise StateError(
                f"Two parts of a volume have the shapes {self.sums.shape} and {other.sums.shape}; merge "
                "those of one model and one field."
            )
        else:
            self.sums += other.sums
            self.weights += other.weights
        if self.first < 0 or other.first < self.first:
            self.first, self.affine = other.first, other.affine

    def finish(self) -> StitchedVolume:
        """Return the volume; its arrays are used up."""
        has_values = self.sums is not None and self.weights is not None
        return StitchedVolume(
            key=self.key,
            values=WindowWeights.divided(self.sums, self.weights) if has_values else None,  # type: ignore[arg-type]
            affine=self.affine,
            num_windows=len(self.states) if has_values else 0,
            num_masked=int(np.count_nonzero(self.states != _SUMMED)),
        )


class WindowBatch(Protocol):
    """Batch of a loader with ``unit="window"``."""

    @property
    def info(self) -> Any:
        """Samples of the batch."""

    def __getitem__(self, name: str) -> Any:
        """Return an entry."""


class Stitcher:
    """Maker of whole volumes from the outputs of their windows, with ``unit="window"``.

    A volume is returned once all of its windows have come; one with a masked window is incomplete. Of several
    ranks each stitches its own windows; what `partials` returns there is added up by `merge` on one of them.
    Volumes are equal in every bit on any number of ranks and after a resume.

    Args:
        name: Name of the field with ``center="grid"``.
        mode: Weights of the voxels of a window, as in MONAI: ``gaussian`` or ``constant``.
        sigma_scale: Standard deviation of the Gaussian along each axis, in sides of the window.

    Raises:
        ConfigError: A setting is out of range.

    Example::

        fields = {"ct": sf.Volume(roi_size=(96, 96, 96), center="grid", overlap=0.5)}
        spec = sf.BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask")
        stitcher = sf.Stitcher("ct")
        with sf.Loader(dataset, split="val", seed=0, unit="window", batch=spec, fields=fields) as loader:
            for batch in loader:
                scores = model(batch.torch("cuda")["ct"])  # (B, C, 96, 96, 96)
                for volume in stitcher.add(batch, scores):
                    save(volume.key, volume.values, volume.affine)
        incomplete = stitcher.finish()
    """

    def __init__(self, name: str, *, mode: Mode = "gaussian", sigma_scale: float = 0.125) -> None:
        importance_map((1, 1, 1), mode, sigma_scale)
        self._name, self._mode, self._sigma_scale = name, mode, sigma_scale
        self._weights: WindowWeights | None = None
        self._open: dict[str, PartialVolume] = {}

    def add(self, batch: WindowBatch, outputs: Any) -> list[StitchedVolume]:
        """Add the windows of a micro-batch, and return the volumes that have all of theirs now.

        Args:
            batch: The micro-batch, with the entries of the field, such as ``NAME_start``.
            outputs: ``(B, C, D, H, W)`` tensor or array: what the model made of its windows.

        Raises:
            ConfigError: The batch holds no windows, outputs have another shape, are not finite or too large.
            StateError: A window came twice.
        """
        try:
            found = _as_array(outputs)
        except (TypeError, ValueError):
            raise ConfigError(
                "The stitcher takes one tensor or array (B, C, D, H, W), got a "
                f"{type(outputs).__name__} of several; give it the one at full resolution."
            ) from None
        units, weight = batch.info.units, np.asarray(batch.info.weight)
        index, starts, shapes, affines = self._beside(batch, units)
        if found.ndim != 5 or len(found) != len(units):
            raise ConfigError(
                f"The stitcher takes outputs (B, C, D, H, W) of {len(units)} windows, got "
                f"{tuple(found.shape)}; give it what the model returned for the batch."
            )
        sides = self._window_sides(batch)
        if sides is not None and found.shape[2:] != sides:
            raise ConfigError(
                f"The stitcher takes outputs as large as the windows, {sides}, got {tuple(found.shape[2:])}; "
                "resize them, or let the model return a value for each voxel."
            )
        if self._weights is None or self._weights.shape != found.shape[2:]:
            self._weights = WindowWeights(found.shape[2:], self._mode, self._sigma_scale)
        touched: dict[str, PartialVolume] = {}
        for slot, unit in enumerate(units):
            if unit is None:
                continue
            part = self._open.setdefault(unit.study_key, PartialVolume(key=unit.study_key))
            touched[unit.study_key] = part
            number = unit.window or 0
            if not weight[slot]:
                part.note(number, _MASKED, number + 1)
                continue
            part.note(number, _SUMMED, int(index[slot][1]))
            if part.sums is None:
                shape = tuple(shapes[slot].tolist())
                part.sums = np.zeros((found.shape[1], *shape), np.int64)
                part.weights = np.zeros(shape, np.int64)
            elif len(part.sums) != found.shape[1]:
                raise ConfigError(
                    f"The outputs have {found.shape[1]} channels, and those of other windows of the volume "
                    f"{len(part.sums)}; give a stitcher the outputs of one model."
                )
            start = starts[slot].tolist()
            self._weights.add(found[slot], (start[0], start[1], start[2]), part.sums, part.weights)
            if part.first < 0 or number < part.first:
                part.first, part.affine = number, _whole_affine(affines[slot], starts[slot])
        return self._decided(touched)

    def merge(self, partials: Iterable[PartialVolume]) -> list[StitchedVolume]:
        """Add parts of volumes, and return the volumes that have all of their windows now.

        Args:
            partials: What `partials` of other ranks, or of a run before it was resumed, returned.

        Raises:
            StateError: A window is in two of them.
        """
        touched: dict[str, PartialVolume] = {}
        for one in partials:
            if one.key in self._open:
                self._open[one.key].merge(one)
            else:
                self._open[one.key] = one
            touched[one.key] = self._open[one.key]
        return self._decided(touched)

    def partials(self, *, is_last: bool = False) -> list[PartialVolume]:
        """Return parts of volumes, and forget them.

        Args:
            is_last: Whether no batch follows, or a run stops here: all parts are returned. Otherwise those of
                volumes before the newest, of which this rank gets no more windows.
        """
        newest = next(reversed(self._open), None)
        keys = [key for key in self._open if is_last or key != newest]
        return [self._open.pop(key) for key in keys]

    def finish(self) -> list[StitchedVolume]:
        """Return the volumes of which windows are missing, and forget them."""
        return [part.finish() for part in self.partials(is_last=True)]

    def _decided(self, touched: Mapping[str, PartialVolume]) -> list[StitchedVolume]:
        return [self._open.pop(key).finish() for key, part in touched.items() if part.is_decided]

    def _window_sides(self, batch: WindowBatch) -> tuple[int, ...] | None:
        """Return the voxels (D, H, W) of a window; None where a transform keeps no regions."""
        try:
            shape = tuple(batch[self._name].shape)
        except KeyError:
            return None
        return shape[2:] if len(shape) == 5 else None

    def _beside(self, batch: WindowBatch, units: Sequence[Unit | None]) -> list[NDArray[Any]]:
        known = [one for one in units if one is not None]
        try:
            entries = [_as_array(batch[f"{self._name}_{one}"]) for one in _BESIDE]
        except KeyError:
            entries = []
        if not entries or any(one.window is None for one in known):
            raise ConfigError(
                f"The batch holds no windows of a field {self._name!r}; write unit='window' for the loader "
                f"and center='grid' for the field, and let a transform return {self._name}_index, _start, "
                "_shape and _affine."
            )
        return entries


def _as_array(values: Any) -> NDArray[Any]:
    """Return the numbers of an array or tensor of any device; lower precisions as float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
        values = values.numpy()
    return np.asarray(values)


def _whole_affine(affine: NDArray[np.float64], start: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the affine of the volume that a window begins in."""
    found = affine.copy()
    found[:3, 3] -= affine[:3, 0] * start[0] + affine[:3, 1] * start[1] + affine[:3, 2] * start[2]
    return found
