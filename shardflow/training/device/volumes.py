"""Augmentation of volumes on the device: one resampling of regions and their masks, then intensities.

Indices of voxels are integers of 32 binary places, as the loader's own (`shardflow.fields.volumes`): which
voxel is nearest, and what is outside, is the same on CPU and CUDA. Nothing is read back from the device, and
no generator of torch is used: noise is a function of a key and the number of a voxel.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.volumes.augmentation import (
    BIAS_DEGREE,
    BIAS_POWERS,
    IndexMap,
    IntensityDraw,
    SlotDraw,
    VolumeAugmentSettings,
)
from shardflow.fields.volumes.geometry import FRACTION_BITS, ONE
from shardflow.fields.volumes.resampling import Interpolation
from shardflow.sampling.permutation import MAX_COUNTER, checked_int

if TYPE_CHECKING:
    from shardflow.loading import Batch
    from shardflow.loading.tensors import Device

_LOGGER = logging.getLogger(__name__)
_AXES: Final = (0, 1, 2)
_POLE: Final = 3.0**0.5 - 2.0
_SPLINE_REACH: Final = 12
"""Voxels that the prefilter of a cubic spline sums on each side; what lies farther weighs under 2e-7."""
_TINY: Final = 1e-7
_TRUNCATE: Final = 4.0
"""Standard deviations at which a Gaussian filter ends, as SciPy's."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VolumeDraw:
    """How one volume of a batch is augmented, with what follows it; made on the host."""

    name: str
    """Of its field."""
    masks: Sequence[str]
    """Entries that take the nearest voxel."""
    maps: Sequence[IndexMap]
    """One a slot, as `tones`."""
    tones: Sequence[IntensityDraw]
    small: Mapping[str, NDArray[Any]]
    """Entries that are ready: affines and boxes."""


@dataclass(frozen=True, kw_only=True)
class VolumeAugmentation(VolumeAugmentSettings):
    """Augmentation of a loader's volumes with their masks and boxes, on a device.

    ``augmentation(batch)`` resamples each region once: rotation, zoom, flips, bending and another spacing
    together, linearly or by cubic B-splines; masks take the nearest voxel, boxes become those around the
    turned ones. Then intensities change, in the order of a scan: bias field, noise, blur, brightness,
    contrast, low resolution, gamma. All fields of a slot move alike, about the middles of their regions.

    Each number follows from `seed` and the place of the slot in the plan (epoch, step, micro-batch, slot): it
    is the same on any number of ranks and after a resume, on CPU and CUDA.

    Example::

        augmentation = sf.VolumeAugmentation.preset("nnunet", roi_size=(96, 96, 96), seed=7)
        fields = {
            "ct": sf.Volume(roi_size=(96, 96, 96), margin=augmentation.margin()),
            "lesion": sf.Mask(like="ct", labels=["lesion"]),
        }
        for batch in loader:
            tensors = augmentation(batch, "cuda")  # as batch.torch("cuda")

    Ranges of ``nnunet`` are those of nnU-Net v2 (Isensee et al., Nature Methods 18, 2021).

    Raises:
        ConfigError: A setting is out of range.
    """

    seed: int = 0
    """Seed of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        seed = checked_int("seed", self.seed, low=0, high=MAX_COUNTER, where=where, error=ConfigError)
        object.__setattr__(self, "seed", seed)

    def __call__(self, batch: Batch, device: Device = None) -> dict[str, Any]:
        """Return the entries of a batch as tensors, see `shardflow.Batch.torch`, with augmented volumes.

        Of each volume of the batch ``NAME`` ``(B, C, D, H, W)`` becomes float32 of ``roi_size``, in the unit
        of the field; ``NAME_affine`` maps its indices to where its voxels were (bending left out),
        ``NAME_valid``, masks and boxes beside it follow. All other entries stay.

        Args:
            batch: Of a loader with a field of type `Volume`.
            device: Where the tensors are wanted; the CPU by default.

        Raises:
            ConfigError: The batch has no volume, or ``spacing_mm`` is set and a series has no known geometry.
        """
        drawn = self.draw_batch(batch)
        return self.apply(batch.torch(device), drawn)

    def draw_batch(self, batch: Batch) -> list[VolumeDraw]:
        """Draw how the volumes of a batch are augmented: the half of a call that is the host's.

        Args:
            batch: See `__call__`.

        Raises:
            ConfigError: See `__call__`.
        """
        if not hasattr(batch, "descriptor"):
            raise ConfigError(
                f"An augmentation takes a batch of a loader, got a {type(batch).__name__}; write "
                "augmentation(batch, 'cuda') in place of batch.torch('cuda')."
            )
        entries = [entry for entry in batch.descriptor["entries"] if isinstance(entry, Mapping)]
        names = [str(entry["name"]) for entry in entries if entry["type"] == "volume"]
        if not names:
            raise ConfigError(
                "The batch has no field of type volume to augment; write one with sf.Volume(...), without a "
                "transform of the loader."
            )
        places = [(batch.epoch, batch.step, batch.micro, slot) for slot in range(batch.num_slots)]
        moves = [self.draw(self.seed, place) for place in places]
        found = []
        for name in names:
            is_there, affines = batch[f"{name}_mask"].astype(bool), batch[f"{name}_affine"]
            if self.spacing_mm is not None and not np.isfinite(affines).all():
                raise ConfigError(
                    f"A series of the field {name!r} has no known place in millimeters, which spacing_mm "
                    "needs; add 'and slice_spacing_mm > 0' to its series, or leave spacing_mm out."
                )
            shape = batch[name].shape[-3:]
            self._check_size(name, shape, affines[is_there])
            maps = [
                IndexMap.of(move if there else SlotDraw(), affine, shape, self)
                for move, there, affine in zip(moves, is_there, affines, strict=True)
            ]
            tones = [
                self.draw_intensity(self.seed, name, place) if there else IntensityDraw()
                for place, there in zip(places, is_there, strict=True)
            ]
            own = [one.affine(affine) for one, affine in zip(maps, affines, strict=True)]
            small: dict[str, NDArray[Any]] = {f"{name}_affine": np.stack(own)}
            masks = [f"{name}_valid"]
            for entry in entries:
                if entry.get("like") == name and entry["type"] == "mask":
                    masks.append(str(entry["name"]))
                elif entry.get("like") == name and entry["type"] == "boxes":
                    small |= _moved_boxes(batch, str(entry["name"]), maps)
            found.append(VolumeDraw(name=name, masks=masks, maps=maps, tones=tones, small=small))
        return found

    def _check_size(self, name: str, shape: Sequence[int], affines: NDArray[Any]) -> None:
        """Log once if regions hold less than what is read from them: the rest of the result is filled."""
        for axes in affines[:, :3, :3]:
            lengths = np.sqrt((axes * axes).sum(axis=0))
            known = lengths.tolist() if np.isfinite(lengths).all() else [1.0] * 3
            needed = self.num_needed(known)
            is_short = any(side <= least - 2 for side, least in zip(shape, needed, strict=True))
            if is_short and name not in _WARNED:
                _WARNED.add(name)
                _LOGGER.warning(
                    "the field %r delivers %s voxels, and its augmentation reads from %s of that spacing: "
                    "what is beyond is filled; write margin=augmentation.margin(...) with the spacing of the "
                    "finest series, or less rotation of thick slices",
                    name,
                    " x ".join(map(str, shape)),
                    " x ".join(str(math.ceil(one)) for one in needed),
                )

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Any], drawn: Sequence[VolumeDraw]) -> dict[str, Any]:
        """Augment the tensors of a batch: the half of a call that is the device's.

        Args:
            tensors: By the names of the batch's entries, as far as they are wanted.
            drawn: Of `draw_batch`.
        """
        found = dict(tensors)
        for one in drawn:
            if one.name not in tensors:
                continue
            regions, mode = tensors[one.name].to(torch.float32), self.interpolation
            masks = [mask for mask in one.masks if mask in tensors]
            found[one.name] = regions.new_empty((*regions.shape[:2], *self.roi_size))
            for mask in masks:
                found[mask] = tensors[mask].new_empty((*tensors[mask].shape[:2], *self.roi_size))
            for slot, (index_map, tone) in enumerate(zip(one.maps, one.tones, strict=True)):
                places, region = Places(index_map, regions.shape[-3:], regions.device), regions[slot]
                outside: Any = _least(region) if self.fill is None else self.fill
                values = places.sample(region, mode, outside)
                found[one.name][slot] = changed(values, tone, mean=self.mean, deviation=self.deviation)
                for mask in masks:
                    found[mask][slot] = places.sample(tensors[mask][slot], "nearest", 0)
            for name, array in one.small.items():
                if name in tensors:
                    found[name] = torch.from_numpy(array).to(regions.device)
        return found


_WARNED: Final[set[str]] = set()
"""Fields whose regions are too small, which is logged once."""


def _moved_boxes(batch: Batch, name: str, maps: Sequence[IndexMap]) -> dict[str, NDArray[Any]]:
    arrays = zip(maps, batch[name], batch[f"{name}_mask"], strict=True)
    moved = [index_map.boxes(boxes, is_box) for index_map, boxes, is_box in arrays]
    boxes, is_left = (np.stack(each) for each in zip(*moved, strict=True))
    labels = np.where(is_left, batch[f"{name}_label"], -1)
    return {name: boxes, f"{name}_mask": is_left.astype(np.uint8), f"{name}_label": labels}


# ---- resampling ----------------------------------------------------------------------------------------


class Places:
    """Where in a region each voxel of a result lies; integers of `FRACTION_BITS` binary places.

    Args:
        index_map: Says where.
        shape: Voxels (D, H, W) of the region.
        device: Of the voxels.
    """

    def __init__(self, index_map: IndexMap, shape: Sequence[int], device: torch.device) -> None:
        self._shape = [int(side) for side in shape]
        steps = np.rint(index_map.steps * ONE).astype(np.int64)
        origin = np.rint(index_map.origin * ONE).astype(np.int64)
        along = [torch.arange(side, device=device).view(_along(k)) for k, side in enumerate(index_map.shape)]
        # Along its own axis alone, if nothing turns or bends: then sums of all axes are separable.
        self._is_separable = index_map.bend is None and not (steps - np.diag(np.diag(steps))).any()
        self._places = [
            _total([along[k] * int(steps[a, k]) for k in ([a] if self._is_separable else _AXES)])
            + int(origin[a])
            for a in _AXES
        ]
        if index_map.bend is not None:
            moved = _bending(index_map, device)
            for a in _AXES:
                offset = _total([moved[k] * float(steps[a, k]) for k in _AXES])
                self._places[a] = self._places[a] + torch.round(offset).to(torch.int64)
        half = ONE >> 1
        is_inside = [
            (place >= -half) & (place < side * ONE - half)
            for place, side in zip(self._places, self._shape, strict=True)
        ]
        self._is_inside = is_inside[0] & is_inside[1] & is_inside[2]

    def sample(self, region: torch.Tensor, mode: Interpolation, outside: Any) -> torch.Tensor:
        """Return a region's values at the places.

        Args:
            region: ``(C, D, H, W)``; float32 unless ``mode`` is ``nearest``.
            mode: How to interpolate.
            outside: Value beyond the box of the region, a number or ``(C, 1, 1, 1)``.

        Returns:
            ``(C, D, H, W)`` of the result, in the dtype of the region.
        """
        if mode == "cubic":
            region = _spline_coefficients(region)
        taps = [_taps(place, side, mode) for place, side in zip(self._places, self._shape, strict=True)]
        if self._is_separable:
            found = region
            for a, (indices, weights) in enumerate(taps):
                parts = [
                    found.index_select(1 + a, index.flatten()) * weight
                    for index, weight in zip(indices, weights, strict=True)
                ]
                found = _total(parts)
        else:
            flat = region.reshape(len(region), -1)
            strides = (self._shape[1] * self._shape[2], self._shape[2], 1)
            corners = [
                [(index * stride, weight) for index, weight in zip(*tap, strict=True)]
                for tap, stride in zip(taps, strides, strict=True)
            ]
            found = region.new_zeros(())
            for (z, z_share), (y, y_share) in itertools.product(corners[0], corners[1]):
                at, share = z + y, z_share * y_share
                for x, x_share in corners[2]:
                    picked = flat.index_select(1, (at + x).flatten()).view(len(flat), *at.shape)
                    found = found + picked * (share * x_share)
            found = found.to(region.dtype)
        filled: torch.Tensor = torch.where(
            self._is_inside, found, torch.as_tensor(outside, dtype=found.dtype, device=found.device)
        )
        return filled


def _along(k: int) -> list[int]:
    """Return the shape of a vector along one of three axes."""
    shape = [1, 1, 1]
    shape[k] = -1
    return shape


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


def _taps(place: torch.Tensor, length: int, mode: Interpolation) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the voxels along an axis that places depend on, and their weights."""
    if mode == "nearest":
        return [((place + (ONE >> 1)) >> FRACTION_BITS).clamp(0, length - 1)], [1]
    first = place >> FRACTION_BITS
    t = (place & (ONE - 1)).to(torch.float32) / ONE
    if mode == "linear":
        return [first.clamp(0, length - 1), (first + 1).clamp(0, length - 1)], [1 - t, t]
    indices = [_mirrored(first + step, length) for step in (-1, 0, 1, 2)]
    back = 1 - t
    weights = [back**3, 3 * t**3 - 6 * t**2 + 4, 3 * back**3 - 6 * back**2 + 4, t**3]
    return indices, [weight / 6 for weight in weights]


def _mirrored(indices: torch.Tensor, length: int) -> torch.Tensor:
    """Reflect indices at the centers of the outermost voxels."""
    if length == 1:
        return torch.zeros_like(indices)
    folded = indices.remainder(2 * (length - 1))
    return torch.minimum(folded, 2 * (length - 1) - folded)


def _spline_coefficients(region: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of the cubic B-spline through voxels, mirrored at the edges.

    The recursive filter (Unser 1999, box 2) has the impulse response ``-6 z / (1 - z^2) z^|k|``, which is
    summed here, since a recursion would take a kernel of the device for each voxel of a line.
    """
    scale = -6 * _POLE / (1 - _POLE**2)
    kernel = [scale * _POLE ** abs(step) for step in range(-_SPLINE_REACH, _SPLINE_REACH + 1)]
    for axis in _AXES:
        if region.shape[1 + axis] > 1:
            region = _filtered(region, axis, kernel, _mirrored)
    return region


def _filtered(
    values: torch.Tensor,
    axis: int,
    kernel: Sequence[float],
    folded: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Return a symmetric weighted sum of neighbors along an axis; ``folded`` says what is beyond the ends.

    Plain sums: a convolution of cuDNN would round its inputs to 10 bits (TF32).
    """
    length, reach = values.shape[1 + axis], len(kernel) // 2
    places = torch.arange(-reach, length + reach, device=values.device)
    wide = values.index_select(1 + axis, folded(places, length))
    return _total([wide.narrow(1 + axis, tap, length) * weight for tap, weight in enumerate(kernel)])


def _bending(index_map: IndexMap, device: torch.device) -> torch.Tensor:
    """Return how far each voxel of a result is moved, in its voxels, ``(3, D, H, W)`` float64."""
    assert index_map.bend is not None  # noqa: S101 - the caller asked
    found = torch.from_numpy(index_map.bend).to(device)
    for k, side in enumerate(index_map.shape):
        cells, weights = index_map.basis(k, np.arange(side))
        first = torch.from_numpy(cells).to(device)
        shares = torch.from_numpy(weights).to(device)
        parts = [
            found.index_select(1 + k, first + tap) * shares[tap].view(_along(k)) for tap in range(len(shares))
        ]
        found = _total(parts)
    sides = torch.from_numpy(index_map.cell_sides).to(device)
    return found * sides.view(3, 1, 1, 1)


# ---- intensities ---------------------------------------------------------------------------------------


def changed(
    values: torch.Tensor, drawn: IntensityDraw, *, mean: float | None = None, deviation: float | None = None
) -> torch.Tensor:
    """Return a volume with other intensities.

    Args:
        values: ``(C, D, H, W)`` float32.
        drawn: What to change.
        mean: Value that brightness leaves; None is that of each channel.
        deviation: Unit of noise; None is that of each channel.
    """
    if drawn.bias is not None:
        least = _least(values)
        values = (values - least) * torch.exp(_polynomial(drawn.bias, values)) + least
    if drawn.noise is not None:
        unit: Any = _deviation(values) if deviation is None else deviation
        values = values + normal_noise(values.shape[1:], drawn.noise_key, values.device) * (
            unit * drawn.noise
        )
    if drawn.blur is not None:
        for axis, sigma in enumerate(drawn.blur):
            if sigma > 0:
                values = _filtered(values, axis, _gaussian(sigma), _repeated)
    if drawn.brightness is not None:
        center: Any = _mean(values) if mean is None else mean
        values = (values - center) * drawn.brightness + center
    if drawn.contrast is not None:
        low, high, middle = _least(values), values.amax(dim=(1, 2, 3), keepdim=True), _mean(values)
        values = torch.minimum(torch.maximum((values - middle) * drawn.contrast + middle, low), high)
    if drawn.low_resolution is not None:
        values = _coarse(values, drawn.low_resolution)
    if drawn.inverted_gamma is not None:
        values = -_with_gamma(-values, drawn.inverted_gamma)
    if drawn.gamma is not None:
        values = _with_gamma(values, drawn.gamma)
    return values


def normal_noise(shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Return standard normal noise, float32: a function of the key and the number of each voxel alone.

    SplitMix64 of Steele, Lea and Flood (2014) as a counter gives 64 bits a voxel; Box and Muller (1958) make
    of them a normal number.
    """
    counts = torch.arange(1, math.prod(shape) + 1, device=device)
    word = counts * _signed(0x9E3779B97F4A7C15) + _signed(key)
    word = (word ^ _shifted(word, 30)) * _signed(0xBF58476D1CE4E5B9)
    word = (word ^ _shifted(word, 27)) * _signed(0x94D049BB133111EB)
    word = word ^ _shifted(word, 31)
    # Half a unit from the ends: the logarithm of 0 is never taken.
    first, second = (
        (bits.to(torch.float64) + 0.5) / 2.0**32 for bits in (_shifted(word, 32), word & 0xFFFFFFFF)
    )
    found = torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
    return found.to(torch.float32).view(*shape)


def _signed(word: int) -> int:
    """Return 64 bits as torch's signed integers hold them, whose products wrap around."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right with zeros, where torch repeats the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _least(values: torch.Tensor) -> torch.Tensor:
    return values.amin(dim=(1, 2, 3), keepdim=True)


def _mean(values: torch.Tensor) -> torch.Tensor:
    return values.mean(dim=(1, 2, 3), keepdim=True)


def _deviation(values: torch.Tensor) -> torch.Tensor:
    return values.std(dim=(1, 2, 3), correction=0, keepdim=True)


def _polynomial(coefficients: Sequence[float], values: torch.Tensor) -> torch.Tensor:
    """Return a polynomial of positions from -1 to 1, ``(D, H, W)``."""
    z, y, x = (
        ((2 * torch.arange(side, device=values.device, dtype=torch.float64) + 1) / side - 1).view(_along(k))
        for k, side in enumerate(values.shape[1:])
    )
    terms = dict(zip(BIAS_POWERS, coefficients, strict=True))
    powers = range(BIAS_DEGREE + 1)
    found = torch.zeros((), device=values.device)
    for i in powers:
        planes = [y**j * _total([x**k * terms.get((i, j, k), 0.0) for k in powers]) for j in powers]
        found = found + (z**i * _total(planes)).to(torch.float32)
    return found


def _gaussian(sigma: float) -> list[float]:
    reach = int(_TRUNCATE * sigma + 0.5)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(-reach, reach + 1)]
    return [weight / math.fsum(weights) for weight in weights]


def _repeated(indices: torch.Tensor, length: int) -> torch.Tensor:
    return indices.clamp(0, length - 1)


def _coarse(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return a volume as from a share of its voxels along each axis: the nearest ones, interpolated."""
    for axis in _AXES:
        length = values.shape[1 + axis]
        num_kept = max(1, round(length * share))
        kept = np.minimum((np.arange(num_kept) + 0.5) * (length / num_kept), length - 1).astype(np.int64)
        at = np.clip((np.arange(length) + 0.5) * (num_kept / length) - 0.5, 0, num_kept - 1)
        first = np.floor(at).astype(np.int64)
        after = np.minimum(first + 1, num_kept - 1)
        weight = torch.from_numpy((at - first).astype(np.float32)).to(values.device).view(_along(axis))
        near, far = (
            values.index_select(1 + axis, torch.from_numpy(kept[each]).to(values.device))
            for each in (first, after)
        )
        values = near * (1 - weight) + far * weight
    return values


def _with_gamma(values: torch.Tensor, gamma: float) -> torch.Tensor:
    """Raise the share of the range to a power, and keep mean and deviation."""
    low, middle, spread = _least(values), _mean(values), _deviation(values)
    width = values.amax(dim=(1, 2, 3), keepdim=True) - low
    raised = ((values - low) / width.clamp(min=_TINY)).clamp(min=0) ** gamma * width + low
    return (raised - _mean(raised)) * (spread / _deviation(raised).clamp(min=_TINY)) + middle
