"""Field types that users write: images, slices, texts, JSON, bytes and arrays of a sample.

Every type here describes what one entry of a batch holds; docs/fields.md has a table of shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

from shardflow.errors import ConfigError
from shardflow.fields.field import BoundField, Field, FieldContext
from shardflow.fields.views import WINDOWS, Arrays, PixelDtype, Resolution

Fit: TypeAlias = Literal["stretch", "letterbox"]
Sampling: TypeAlias = Literal["even", "random", "slab"]
DEFAULT_SERIES: Final = "kind is missing or kind not in ('localizer', 'secondary')"
"""Series that a field selects where its spec names none."""
_MAX_SIDE: Final = 2**16
_MAX_IMAGES: Final = 2**12


@dataclass(frozen=True, kw_only=True)
class PixelField(Field):
    """Settings that images and slices share."""

    series: str | None = None
    """Expression over the series table that selects series and images, such as ``"role == 'frontal'"``. None
    selects all but localizers and secondary captures (`DEFAULT_SERIES`)."""
    size: tuple[int, int] | None = None
    """Rows and columns (H, W) to resize to: by area where an image shrinks, linearly where it grows. None
    keeps the stored size; where sizes differ in the population, the entry is a list of arrays."""
    fit: Fit = "stretch"
    """``letterbox`` keeps the aspect ratio and centers the image on zeros; ``NAME_box`` holds its place."""
    dtype: PixelDtype | None = None
    """None is the smallest dtype that holds every selected image of the population without loss. A smaller
    one saturates, is logged once, and counted as ``saturated``."""
    channels: Literal[1, 3] | None = None
    """Channels (C): 1 turns color into luminance, 3 repeats gray. None is 3 if an image of the population has
    color, otherwise 1."""
    resolution: Resolution = "full"
    """``small`` reads the small versions that packing made, where there are any."""
    windows: tuple[str, ...] = ()
    """For CT: ``NAME_range`` is one of these windows, drawn anew in each epoch; `WINDOWS` lists them."""

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", _checked_size(self.size))
        elif self.fit != "stretch":
            raise ConfigError("fit='letterbox' needs a size to fit into; write size=(rows, columns).")
        _check_choice("fit", self.fit, ("stretch", "letterbox"))
        _check_choice("dtype", self.dtype, (None, "uint8", "int16", "uint16", "float32"))
        _check_choice("channels", self.channels, (None, 1, 3))
        _check_choice("resolution", self.resolution, ("full", "small"))
        _check_choice("missing", self.missing, ("pad", "drop", "error"))
        object.__setattr__(self, "windows", _checked_windows(self.windows))

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the pixels, their mask and their display range."""
        from shardflow.fields.pixels import present_pixels

        return present_pixels(entry, arrays)


@dataclass(frozen=True, kw_only=True)
class Image(PixelField):
    """One or several images of a sample, across its series.

    ``(B, C, H, W)``, or with ``num_images`` other than 1 ``(B, N, C, H, W)``, in the order of acquisition.
    ``NAME_mask`` ``(B,)`` or ``(B, N)`` uint8 is 1 where there is an image; ``NAME_range`` ``(B, 2)`` or
    ``(B, N, 2)`` float32 is the display range in the unit of the pixels. Units are those stored (CT: HU).

    Example::

        sf.Image(series="role == 'frontal'", size=(512, 512))

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "image"

    num_images: int | Literal["all"] = 1
    """Places for images (N); ``"all"`` is the largest number of selected images that a sample of the
    population has."""

    def _check(self) -> None:
        super()._check()
        if self.num_images != "all":
            _check_count("num_images", self.num_images, _MAX_IMAGES, "or 'all', ")

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        from shardflow.fields.pixels import BoundImage

        return BoundImage(name, self, context)


@dataclass(frozen=True, kw_only=True)
class Slices(PixelField):
    """K of the N slices of one series of a sample.

    ``(B, K, C, H, W)`` in geometric order. The first selected series by acquisition is delivered; others are
    counted as left out. ``NAME_mask`` ``(B, K)`` uint8 is 1 where there is a slice, ``NAME_index`` ``(B, K)``
    int64 its position in the series (-1 for none), ``NAME_range`` ``(B, 2)`` float32 the display range.

    Example::

        sf.Slices(series="modality == 'CT' and kind == 'volume'", num_slices=32, size=(256, 256))

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "slices"

    num_slices: int | None = None
    """Slices to deliver (K); None delivers all, as a list of arrays where the population's numbers differ."""
    sampling: Sampling = "even"
    """``even``: spread over the series; ``random``: drawn anew in each epoch; ``slab``: adjacent ones that
    begin at a slice drawn anew in each epoch. A series of fewer slices is delivered whole."""

    def _check(self) -> None:
        super()._check()
        _check_choice("sampling", self.sampling, ("even", "random", "slab"))
        if self.num_slices is None:
            if self.sampling != "even":
                raise ConfigError(f"sampling={self.sampling!r} needs num_slices, the number to draw.")
        else:
            _check_count("num_slices", self.num_slices, _MAX_SIDE)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        from shardflow.fields.pixels import BoundSlices

        return BoundSlices(name, self, context)


@dataclass(frozen=True, kw_only=True)
class Text(Field):
    """Text of a sample: its report, or another text field.

    The entry is a list of B strings; ``NAME_mask`` ``(B,)`` uint8 is 1 where there is a text.

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "text"

    member: str | None = None
    """Stored field that holds the text, UTF-8; None is the report, whose size tables know."""
    max_bytes: int = 1 << 16
    """Size that a text of ``member`` may have; a larger one masks its slot. Reports need no bound."""

    def __post_init__(self) -> None:
        _check_member(self)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        from shardflow.fields.members import BoundText

        return BoundText(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the texts and their mask."""
        from shardflow.fields.members import present_texts

        return present_texts(entry, arrays)


def _check_member(spec: Any) -> None:
    _check_choice("missing", spec.missing, ("pad", "drop", "error"))
    _check_count("max_bytes", spec.max_bytes, 1 << 40)


def _check_count(name: str, value: Any, most: int, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is a number from 1 to {most:,}, {more}got {value!r}.")


def _checked_size(size: Any) -> tuple[int, int]:
    try:
        rows, columns = size
    except (TypeError, ValueError):
        raise ConfigError(f"size is (rows, columns), such as (512, 512), got {size!r}.") from None
    for side in (rows, columns):
        _check_count("each side of size", side, _MAX_SIDE)
    return rows, columns


def _checked_windows(windows: Any) -> tuple[str, ...]:
    if isinstance(windows, str):
        raise ConfigError(f"windows is a list of names, write windows=({windows!r},).")
    for window in windows:
        _check_choice("each window", window, tuple(WINDOWS))
    return tuple(windows)


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        listed = ", ".join(repr(one) for one in allowed)
        raise ConfigError(f"{name} is one of {listed}, got {value!r}.")
