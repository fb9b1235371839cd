"""Augmentation of volumes: settings with published presets, keyed draws, and the one map of indices.

All that moves voxels (rotation, zoom, flips, bending, another spacing) is composed into one map from the
indices of the result to those of the delivered region, so a volume is resampled once, and masks and boxes
follow by the same map. Numbers are drawn for each slot from the seed and the plan's place (epoch, step,
micro-batch, slot), so they are equal on any number of ranks and after a resume; each has a label of its own,
so a setting does not change what the others draw. Here are only a few numbers for each slot; voxels are
sampled on the device (`shardflow.training.device.volumes`).

Bending moves control points of a uniform cubic B-spline. Below 0.4 of their distance no two points meet (Choi
and Lee, Injectivity conditions of 2D and 3D uniform cubic B-spline functions, 2000).
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import check_choice, check_count
from shardflow.fields.settings import checked_shape, checked_spacing
from shardflow.fields.volumes.geometry import Shape, Vector, is_perpendicular
from shardflow.seeds import derive

Range: TypeAlias = tuple[float, float]
Place: TypeAlias = tuple[int, int, int, int]
"""Epoch, step, micro-batch and slot."""
Float64Array: TypeAlias = NDArray[np.float64]

_WORD: Final = 2.0**64
_AXES: Final = (0, 1, 2)
_MAX_BEND: Final = 0.4
_MAX_CELLS: Final = 32
_COVERED_ZOOM: Final = 1 / 0.85
"""Enlargement of the source that nnU-Net reads around a patch; what a rarer draw needs beyond is filled."""
_MAX_STEPS: Final = 40
_STEP_ENDS: Final = 1e-4
"""Of the iteration that inverts bending: at most so many steps, or until one is so few voxels."""
_LEAST_SIDE: Final = 1e-3
"""Voxels that count as none: of a box that is left, and of a region that is too short."""
BIAS_DEGREE: Final = 3
BIAS_POWERS: Final = tuple(
    powers for powers in itertools.product(range(BIAS_DEGREE + 1), repeat=3) if 0 < sum(powers) <= BIAS_DEGREE
)
"""Exponents of the terms of a bias field along D, H and W."""

# What nnU-Net v2.5 trains with (`nnUNetTrainer.get_training_transforms`, isotropic patches). There each of
# the channels, which are series, is blurred and coarsened with a probability of 0.5 in 0.2 and 0.25 of the
# samples; here each series is a field, and draws for itself.
_NNUNET_GEOMETRY: Final[dict[str, Any]] = {
    "rotate_deg": (30.0, 30.0, 30.0),
    "rotate_prob": 0.2,
    "zoom": (0.7, 1.4),
    "zoom_prob": 0.2,
    "flip_prob": (0.5, 0.5, 0.5),
}
_NNUNET: Final[dict[str, Any]] = {
    **_NNUNET_GEOMETRY,
    "noise": (0.0, 0.1),
    "noise_prob": 0.1,
    "blur": (0.5, 1.0),
    "blur_prob": 0.1,
    "brightness": (0.75, 1.25),
    "brightness_prob": 0.15,
    "contrast": (0.75, 1.25),
    "contrast_prob": 0.15,
    "low_resolution": (0.5, 1.0),
    "low_resolution_prob": 0.125,
    "gamma": (0.7, 1.5),
    "gamma_prob": 0.3,
    "inverted_gamma_prob": 0.1,
}
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "nnunet": _NNUNET,
    "geometry": _NNUNET_GEOMETRY,
    "strong": {
        **_NNUNET,
        "elastic": (0.0, 0.3),
        "elastic_prob": 0.2,
        "bias_field": (-0.5, 0.5),  # TorchIO's RandomBiasField, order 3
        "bias_field_prob": 0.15,
    },
    "none": {},
}
"""Settings by name of a preset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotDraw:
    """How one slot is moved."""

    rotate_deg: Vector = (0.0, 0.0, 0.0)
    zoom: float = 1.0
    flip: tuple[bool, bool, bool] = (False, False, False)
    bend: Float64Array | None = None
    """``(3, n, n, n)``, how far control points move along D, H and W, in distances of control points."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntensityDraw:
    """What changes the intensities of one volume; None leaves them."""

    bias: tuple[float, ...] | None = None
    """Coefficients of `BIAS_POWERS`."""
    noise: float | None = None
    noise_key: int = 0
    blur: Vector | None = None
    brightness: float | None = None
    contrast: float | None = None
    low_resolution: float | None = None
    inverted_gamma: float | None = None
    gamma: float | None = None


@dataclass(frozen=True, kw_only=True)
class VolumeAugmentSettings:
    """Settings of the augmentation of volumes. Every ``NAME_prob`` is the probability that ``NAME`` is drawn.

    Without any of them a region is only brought to ``roi_size`` and ``spacing_mm``.

    Raises:
        ConfigError: A setting is out of range.
    """

    presets: ClassVar[tuple[str, ...]] = tuple(PRESETS)

    roi_size: tuple[int, int, int]
    """Voxels (D, H, W) of the result. The field `Volume` delivers more, by its ``margin``, see `margin`."""
    spacing_mm: tuple[float, float, float] | None = None
    """Distance of voxels of the result along D, H and W; None is that of the delivered region."""
    interpolation: Literal["linear", "cubic"] = "linear"
    """Between voxels of volumes; masks take the nearest one. ``cubic`` is a B-spline of order 3."""
    fill: float | None = None
    """Value beyond the delivered region. None is the least value of the region."""

    rotate_deg: tuple[float, float, float] = (30.0, 30.0, 30.0)
    """Largest angle, either way, about D, H and W. Rotations are about the middle and in millimeters, so
    anatomy keeps its shape where voxels are no cubes."""
    rotate_prob: float = 0.0
    zoom: tuple[float, float] = (0.7, 1.4)
    """Least and greatest length of what is shown by the length of the region: below 1 enlarges anatomy."""
    zoom_prob: float = 0.0
    flip_prob: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Probability that D, H and W run backwards. A mirrored body is another patient where sides matter."""
    elastic: tuple[float, float] = (0.0, 0.3)
    """Least and greatest displacement of control points in their distances, at most 0.4."""
    elastic_prob: float = 0.0
    elastic_cells: int = 5
    """Distances of control points along each side of the region."""

    mean: float | None = None
    """Value that ``brightness`` leaves, such as the mean of the foreground that ``shardflow stats`` reports;
    None is the mean of each region."""
    deviation: float | None = None
    """Value that ``noise`` counts in; None is the standard deviation of each region."""
    bias_field: tuple[float, float] = (-0.5, 0.5)
    """Coefficients of a polynomial of degree 3 in positions from -1 to 1, whose exponential multiplies values
    (above the least of the region), as the coil of an MR scanner does."""
    bias_field_prob: float = 0.0
    noise: tuple[float, float] = (0.0, 0.1)
    """Standard deviation of Gaussian noise, in ``deviation``."""
    noise_prob: float = 0.0
    blur: tuple[float, float] = (0.5, 1.0)
    """Standard deviation of a Gaussian filter, voxels, for each axis."""
    blur_prob: float = 0.0
    brightness: tuple[float, float] = (0.75, 1.25)
    """Factor of values about ``mean``; of this and the next two half of the draws are below 1."""
    brightness_prob: float = 0.0
    contrast: tuple[float, float] = (0.75, 1.25)
    """Factor of values about the mean of the region, cut to the range that they had."""
    contrast_prob: float = 0.0
    gamma: tuple[float, float] = (0.7, 1.5)
    """Exponent of values as a share of their range; mean and deviation stay."""
    gamma_prob: float = 0.0
    inverted_gamma_prob: float = 0.0
    """Probability of another exponent from ``gamma``, on the inverted values."""
    low_resolution: tuple[float, float] = (0.5, 1.0)
    """Share of voxels along each axis that a coarser scan would have; each takes the nearest, and the region
    is interpolated from them."""
    low_resolution_prob: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "roi_size", checked_shape("roi_size", self.roi_size))
        if self.spacing_mm is not None:
            object.__setattr__(self, "spacing_mm", checked_spacing(self.spacing_mm))
        check_choice("interpolation", self.interpolation, ("linear", "cubic"))
        check_count("elastic_cells", self.elastic_cells, _MAX_CELLS)
        for name in (one.name for one in fields(self) if one.name.endswith("_prob")):
            count = 3 if name == "flip_prob" else 1
            self._check(name, count, 0.0, 1.0, f"{'three probabilities' if count == 3 else 'a probability'}")
        self._check("rotate_deg", 3, 0.0, 180.0, "three angles of degrees, about D, H and W,")
        for name, least, most in _RANGES:
            self._check(name, 2, least, most, "(least, greatest)")
            low, high = getattr(self, name)
            if low > high:
                raise ConfigError(f"{name} is (least, greatest), got {(low, high)!r}; exchange them.")
        for name in ("mean", "deviation", "fill"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value)):
                raise ConfigError(f"{name} is a number or None, got {value!r}.")
        if self.deviation is not None and self.deviation <= 0:
            raise ConfigError(f"deviation is a number above 0, got {self.deviation!r}; leave it out.")

    def _check(self, name: str, count: int, least: float, most: float, what: str) -> None:
        value: Any = getattr(self, name)
        given = list(value) if isinstance(value, tuple | list) else [value]
        is_right = len(given) == count and all(
            isinstance(one, int | float) and not isinstance(one, bool) and least <= one <= most
            for one in given
        )
        if not is_right or (count == 1) == isinstance(value, tuple | list):
            raise ConfigError(f"{name} is {what} from {least:g} to {most:g}, got {value!r}.")
        numbers = tuple(float(one) for one in given)
        object.__setattr__(self, name, numbers if count > 1 else numbers[0])

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the settings of a preset, with some changed.

        Args:
            name: ``nnunet``: what nnU-Net v2 trains with. ``geometry``: its rotation, zoom and flips alone,
                for intensities that are measurements. ``strong``: ``nnunet``, bending and a bias field.
                ``none``: nothing at random.
            **changes: Settings that differ; ``roi_size`` is needed.

        Raises:
            ConfigError: There is no such preset, or a setting is out of range.
        """
        if name not in [*PRESETS]:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"preset is one of {', '.join(map(repr, PRESETS))}, got {name!r}{hint}")
        known = [one.name for one in fields(cls)]
        for setting in changes:
            if setting not in known:
                near = difflib.get_close_matches(setting, known, n=1, cutoff=0.0)
                raise ConfigError(
                    f"Augmentation of volumes has no setting {setting!r}; did you mean {near[0]!r}?"
                )
        return cls(**{**PRESETS[name], **changes})

    def for_evaluation(self) -> Self:
        """Return the same with nothing drawn at random: the same size and spacing."""
        off: dict[str, Any] = {one.name: 0.0 for one in fields(self) if one.name.endswith("_prob")}
        return replace(self, **{**off, "flip_prob": (0.0, 0.0, 0.0)})

    def margin(self, stored_spacing_mm: Sequence[float] | None = None) -> Shape:
        """Return the ``margin`` of a `Volume` of the same ``roi_size`` that augmentation reads from.

        It covers the largest rotation about one axis, and a region larger by 1 / 0.85, as nnU-Net reads; the
        little that rarer draws need beyond it is filled.

        Args:
            stored_spacing_mm: Distance of stored voxels along D, H and W, of the finest series; needed with
                ``spacing_mm``. None is for cubes. Thick slices need much beside them to be turned; nnU-Net
                turns these about their own axis alone, as ``rotate_deg=(180, 0, 0)``.

        Raises:
            ConfigError: It is missing.
        """
        if stored_spacing_mm is None:
            if self.spacing_mm is not None:
                raise ConfigError(
                    "margin() needs the distance of stored voxels where spacing_mm is set; write "
                    "margin(stored_spacing_mm=(2.0, 0.7, 0.7)) with that of the finest series."
                )
            stored_spacing_mm = (1.0, 1.0, 1.0)
        stored = checked_spacing(stored_spacing_mm)
        a, b, c = (
            max(0, math.ceil((needed - side) / 2 - _LEAST_SIDE))
            for needed, side in zip(self.num_needed(stored), self.roi_size, strict=True)
        )
        return a, b, c

    def num_needed(self, stored_spacing_mm: Sequence[float]) -> Vector:
        """Return how many stored voxels along D, H and W augmentation reads from, see `margin`."""
        spacing = self.spacing_mm or stored_spacing_mm
        sides = [self.roi_size[k] * spacing[k] for k in _AXES]
        reach = list(sides)
        for about, degrees in enumerate(self.rotate_deg if self.rotate_prob else ()):
            for k in (one for one in _AXES if one != about):
                other = sides[3 - k - about]
                worst = min(math.radians(degrees), math.atan2(other, sides[k]))
                reach[k] = max(reach[k], sides[k] * math.cos(worst) + other * math.sin(worst))
        zoom = min(max(self.zoom[1], 1.0), _COVERED_ZOOM) if self.zoom_prob else 1.0
        bend = 1 + 2 * self.elastic[1] / self.elastic_cells if self.elastic_prob else 1.0
        a, b, c = (reach[k] * zoom * bend / stored_spacing_mm[k] for k in _AXES)
        return a, b, c

    # ---- draws ---------------------------------------------------------------------------------------

    def draw(self, seed: int, place: Place) -> SlotDraw:
        """Draw how a slot is moved.

        Args:
            seed: Of the run.
            place: Epoch, step, micro-batch and slot.
        """
        key = _Key(seed, "", place)
        turned = (0.0, 0.0, 0.0)
        if key.happens("rotate", self.rotate_prob):
            a, b, c = ((2 * key.uniform(f"rotate-{k}") - 1) * most for k, most in enumerate(self.rotate_deg))
            turned = a, b, c
        zoom = key.between("zoom", self.zoom) if key.happens("zoom", self.zoom_prob) else 1.0
        first, second, third = (key.happens(f"flip-{k}", prob) for k, prob in enumerate(self.flip_prob))
        bend = None
        if key.happens("elastic", self.elastic_prob):
            num_points, most = self.elastic_cells + 3, key.between("elastic", self.elastic)
            # One derived word seeds the points: there are hundreds, and each would be a hash.
            words = np.random.Philox(key=key.word("elastic-points")).random_raw(3 * num_points**3)
            bend = (words / _WORD * 2 - 1).reshape(3, num_points, num_points, num_points) * most
        return SlotDraw(rotate_deg=turned, zoom=zoom, flip=(first, second, third), bend=bend)

    def draw_intensity(self, seed: int, name: str, place: Place) -> IntensityDraw:
        """Draw what changes the intensities of the volume of a field.

        Args:
            seed: Of the run.
            name: Name of the field; each draws for itself.
            place: Epoch, step, micro-batch and slot.
        """
        key = _Key(seed, f"{name}-", place)
        drawn: dict[str, Any] = {}
        if key.happens("bias", self.bias_field_prob):
            drawn["bias"] = tuple(
                key.between(f"bias-{number}", self.bias_field) for number in range(len(BIAS_POWERS))
            )
        if key.happens("noise", self.noise_prob):
            drawn |= {"noise": key.between("noise", self.noise), "noise_key": key.word("noise-voxels")}
        if key.happens("blur", self.blur_prob):
            drawn["blur"] = tuple(key.between(f"blur-{k}", self.blur) for k in _AXES)
        if key.happens("low-resolution", self.low_resolution_prob):
            drawn["low_resolution"] = key.between("low-resolution", self.low_resolution)
        for one, limits, prob in (
            ("brightness", self.brightness, self.brightness_prob),
            ("contrast", self.contrast, self.contrast_prob),
            ("gamma", self.gamma, self.gamma_prob),
            ("inverted_gamma", self.gamma, self.inverted_gamma_prob),
        ):
            if key.happens(one, prob):
                drawn[one] = key.about_one(one, limits)
        return IntensityDraw(**drawn)


_RANGES: Final = (
    ("zoom", 0.1, 10.0),
    ("elastic", 0.0, _MAX_BEND),
    ("bias_field", -5.0, 5.0),
    ("noise", 0.0, 100.0),
    ("blur", 0.0, 20.0),
    ("brightness", 0.0, 10.0),
    ("contrast", 0.0, 10.0),
    ("gamma", 0.05, 20.0),
    ("low_resolution", 0.05, 1.0),
)
"""Settings that are ranges, and the numbers they may have."""


@dataclass(frozen=True, slots=True)
class _Key:
    """Key of the numbers of a slot."""

    seed: int
    prefix: str
    place: Place

    def word(self, name: str) -> int:
        return derive(self.seed, f"augment-volume-{self.prefix}{name}", *self.place)

    def uniform(self, name: str) -> float:
        return self.word(name) / _WORD

    def happens(self, name: str, prob: float) -> bool:
        return prob > 0 and self.uniform(f"{name}-whether") < prob

    def between(self, name: str, limits: Range) -> float:
        return limits[0] + self.uniform(name) * (limits[1] - limits[0])

    def about_one(self, name: str, limits: Range) -> float:
        """Return a factor; half of them are below 1 where the range has both sides."""
        low, high = limits
        if low >= 1 or high <= 1:
            return self.between(name, limits)
        share = 2 * self.uniform(name)
        return low + (1 - low) * share if share < 1 else 1 + (high - 1) * (share - 1)


# ---- the map of indices --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Map from indices of the result to those of a delivered region: bending, then an affine map.

    Attributes:
        shape: Voxels (D, H, W) of the result.
        steps: ``(3, 3)``: ``steps[a, k]`` is how far a step along axis k of the result leads along axis a.
        origin: ``(3,)``: index of the region that index (0, 0, 0) of the result shows, without bending.
        bend: Control points, see `SlotDraw.bend`; None for none.
    """

    shape: Shape
    steps: Float64Array
    origin: Float64Array
    bend: Float64Array | None = None

    @classmethod
    def of(
        cls, draw: SlotDraw, affine: NDArray[Any], source: Sequence[int], settings: VolumeAugmentSettings
    ) -> IndexMap:
        """Compose the map of a slot; the middle of the result shows the middle of the region.

        Args:
            draw: What the slot gets.
            affine: ``(4, 4)`` of the region, indices to millimeters; where it is not finite, voxels count as
                cubes of 1 mm. Of tilted slices, whose axes are not perpendicular, the result has the
                perpendicular axes that are closest.
            source: Voxels (D, H, W) of the region.
            settings: Size and spacing of the result.
        """
        axes = np.asarray(affine, np.float64)[:3, :3]
        lengths = np.sqrt((axes * axes).sum(axis=0))
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            axes, lengths = np.eye(3), np.ones(3)
        spacing = lengths if settings.spacing_mm is None else np.array(settings.spacing_mm)
        along_d, along_h, along_w = axes.T.tolist()
        if is_perpendicular((along_d, along_h, along_w)):
            steps = _turned(draw) * spacing / lengths[:, None]
        else:
            left, _, right = np.linalg.svd(axes / lengths)
            steps = np.linalg.inv(axes) @ (left @ right) @ (_turned(draw) * spacing)
        middle = (np.array(settings.roi_size) - 1) / 2
        origin = (np.array(source) - 1) / 2 - steps @ middle
        return cls(settings.roi_size, steps, origin, draw.bend)

    def affine(self, source: NDArray[Any]) -> Float64Array:
        """Return the affine of the result, bending left out: indices to millimeters, ``(4, 4)``.

        Args:
            source: That of the region.
        """
        own = np.eye(4)
        own[:3, :3], own[:3, 3] = self.steps, self.origin
        found: Float64Array = np.asarray(source, np.float64) @ own
        return found

    def basis(self, k: int, places: NDArray[Any]) -> tuple[NDArray[np.int64], Float64Array]:
        """Return the control points along an axis that places on it depend on, and their weights.

        Args:
            k: The axis.
            places: ``(n,)``, in voxels of the result.

        Returns:
            The number of the first of four points, ``(n,)``, and the weights of these, ``(4, n)``.
        """
        assert self.bend is not None  # noqa: S101 - the callers asked
        num_cells, length = self.bend.shape[1] - 3, self.shape[k]
        at = (np.clip(np.asarray(places, np.float64), -0.5, length - 0.5) + 0.5) * (num_cells / length)
        cell = np.clip(np.floor(at), 0, num_cells - 1).astype(np.int64)
        t = at - cell
        weights = [(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]
        return cell, np.stack(weights) / 6

    def bent(self, points: Float64Array) -> Float64Array:
        """Return how far bending moves points of the result, in its voxels; both ``(n, 3)``."""
        if self.bend is None:
            return np.zeros_like(points)
        cells, weights = zip(*(self.basis(k, points[:, k]) for k in _AXES), strict=True)
        found = np.zeros_like(points)
        for taps in itertools.product(range(4), repeat=3):
            share = weights[0][taps[0]] * weights[1][taps[1]] * weights[2][taps[2]]
            moved = self.bend[:, cells[0] + taps[0], cells[1] + taps[1], cells[2] + taps[2]]
            found += (share * moved).T
        return found * self.cell_sides

    @property
    def cell_sides(self) -> Float64Array:
        """Distance of control points along each axis, in voxels of the result."""
        num_cells = 1 if self.bend is None else self.bend.shape[1] - 3
        return np.array(self.shape) / num_cells

    def source(self, points: Float64Array) -> Float64Array:
        """Return the indices of the region that points of the result show; both ``(n, 3)``."""
        found: Float64Array = (points + self.bent(points)) @ self.steps.T + self.origin
        return found

    def result(self, indices: Float64Array) -> Float64Array:
        """Return the points of the result that show indices of the region; both ``(n, 3)``."""
        straight = (indices - self.origin) @ np.linalg.inv(self.steps).T
        if self.bend is None or not len(straight):
            return straight
        points = straight
        for _ in range(_MAX_STEPS):
            before, points = points, straight - self.bent(points)
            if np.abs(points - before).max() < _STEP_ENDS:
                break
        return points

    def boxes(
        self, boxes: NDArray[Any], is_box: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the boxes around what boxes of the region hold, cut to the result.

        Args:
            boxes: ``(n, 6)``, edges in voxels: least along D, H and W, then greatest.
            is_box: ``(n,)``, which of them there are.

        Returns:
            The same shapes; a box of which nothing is left is all 0, and counts as none.
        """
        found, is_left = np.zeros((len(boxes), 6), np.float32), np.zeros(len(boxes), bool)
        present = np.flatnonzero(is_box)
        corners = np.asarray(boxes, np.float64)[present].reshape(-1, 2, 3)
        shares = np.array([*itertools.product((0.0, 0.5, 1.0), repeat=3)])
        lattice = corners[:, None, 0] + shares * (corners[:, None, 1] - corners[:, None, 0])
        # Edges are half a voxel from the centers that indices count.
        points = self.result((lattice - 0.5).reshape(-1, 3)).reshape(lattice.shape) + 0.5
        low = np.maximum(points.min(axis=1), 0.0)
        high = np.minimum(points.max(axis=1), np.array(self.shape, np.float64))
        is_seen = (high - low > _LEAST_SIDE).all(axis=1)
        is_left[present] = is_seen
        found[present[is_seen]] = np.concatenate((low, high), axis=1)[is_seen]
        return found, is_left


def _turned(draw: SlotDraw) -> Float64Array:
    """Return the map from the result to the region in millimeters about their middles."""
    found: Float64Array = np.eye(3)
    for about, degrees in enumerate(draw.rotate_deg):
        if degrees:
            first, second = (k for k in _AXES if k != about)
            cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            turn = np.eye(3)
            turn[first, first] = turn[second, second] = cosine
            turn[first, second], turn[second, first] = -sine, sine
            found = found @ turn
    signs = [-draw.zoom if is_flipped else draw.zoom for is_flipped in draw.flip]
    turned: Float64Array = found * np.array(signs)
    return turned
