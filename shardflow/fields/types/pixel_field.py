"""Settings that fields of images and slices share, and how a batch presents their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

from shardflow.errors import ConfigError
from shardflow.fields.field import Arrays, Field, check_choice, check_count
from shardflow.fields.layout import WINDOWS, PixelDtype, present_pictures
from shardflow.fields.reader import Resolution
from shardflow.fields.settings import check_series

_MAX_TILES: Final = 2**10
Fit: TypeAlias = Literal["stretch", "letterbox"]
Padding: TypeAlias = Literal["cap", "longest"]
DEFAULT_SERIES: Final = "kind is missing or kind not in ('localizer', 'secondary', 'slide')"
"""Series that a field selects where its spec names none."""
MAX_SIDE: Final = 2**16


@dataclass(frozen=True, kw_only=True)
class PixelField(Field):
    """Settings that images and slices share."""

    reads_previous: ClassVar[bool] = True

    series: str | None = None
    """Expression over the series table that selects series and images, such as ``"role == 'frontal'"``. None
    selects all but localizers, secondary captures and slides (`DEFAULT_SERIES`)."""
    size: tuple[int, int] | None = None
    """Rows and columns (H, W) to resize to: by area where an image shrinks, linearly where it grows. None
    keeps the stored size; where sizes differ in the population, the entry is a list of arrays."""
    fit: Fit = "stretch"
    """``letterbox`` keeps the aspect ratio and centers the image on `fill`; ``NAME_box`` holds its place."""
    dtype: PixelDtype | None = None
    """None is the smallest dtype that holds every selected image of the population without loss. A smaller
    one saturates, is logged once, and counted as ``saturated``."""
    channels: Literal[1, 3] | None = None
    """Channels (C): 1 turns color into luminance, 3 repeats gray. None is 3 if an image of the population has
    color, otherwise 1."""
    resolution: Resolution = "full"
    """``small`` reads the small versions that packing made, where there are any."""
    fill: float | None = None
    """Value of places without an image, and around a letterboxed one. None is air (-1024) where every
    selected image of the population is in HU, otherwise 0."""
    windows: tuple[str, ...] = ()
    """For CT: ``NAME_range`` is one of these windows, drawn anew in each epoch; `WINDOWS` lists them."""
    tiles: int | None = None
    """Cut each picture into at most so many tiles of ``size``, after resizing it to a whole number of them,
    see `shardflow.sampling.image_sizes.TileRule`. The entry is ``(B, P, C, H, W)``, an overview first where a
    picture has several tiles, then the tiles row by row, picture after picture; ``NAME_grid`` ``(B, N, 2)``
    int64 is the number of rows and columns of tiles of each picture."""
    padding: Padding = "cap"
    """Places for pictures or tiles: ``cap``, the most that any sample may have; ``longest``, as many as the
    largest sample of the micro-batch has, at least one."""

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", _checked_size(self.size))
        for setting, value in (("fit", "letterbox"), ("resolution", "small")):
            if getattr(self, setting) == value and not self.resizes:
                raise ConfigError(
                    f"{setting}={value!r} needs a size to bring pictures to; write size=(rows, columns)."
                )
        if self.tiles is not None:
            check_count("tiles", self.tiles, _MAX_TILES)
            if self.size is None or self.fit != "stretch":
                raise ConfigError("tiles needs size=(rows, columns) of a tile, and fit='stretch'.")
        check_choice("padding", self.padding, ("cap", "longest"))
        check_choice("fit", self.fit, ("stretch", "letterbox"))
        check_choice("dtype", self.dtype, (None, "uint8", "int16", "uint16", "float32"))
        check_choice("channels", self.channels, (None, 1, 3))
        check_choice("resolution", self.resolution, ("full", "small"))
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        object.__setattr__(self, "windows", _checked_windows(self.windows))
        check_series(self.series, "role == 'frontal'", "all but localizers and secondary captures")

    @property
    def resizes(self) -> bool:
        """Whether pictures are brought to a size that the spec states."""
        return self.size is not None

    def for_evaluation(self) -> PixelField:
        """Return the field with the first of its windows."""
        return replace(self, windows=self.windows[:1])

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the pixels, their mask and their display range."""
        return present_pixels(entry, arrays)


def _checked_size(size: Any) -> tuple[int, int]:
    try:
        rows, columns = size
    except (TypeError, ValueError):
        raise ConfigError(f"size is (rows, columns), such as (512, 512), got {size!r}.") from None
    for side in (rows, columns):
        check_count("each side of size", side, MAX_SIDE)
    return rows, columns


def _checked_windows(windows: Any) -> tuple[str, ...]:
    if isinstance(windows, str):
        raise ConfigError(f"windows is a list of names, write windows=({windows!r},).")
    if not isinstance(windows, tuple | list):
        raise ConfigError(f"windows is a list of names, such as ('lung',), got {windows!r}; leave it out.")
    for window in windows:
        check_choice("each window", window, tuple(WINDOWS))
    return tuple(windows)


def present_pixels(entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the entries of a field of pixels, see `Image` and `Slices`."""
    name = entry["name"]
    mask, index = arrays[f"{name}_mask"], arrays[f"{name}_index"]
    ranges = arrays[f"{name}_range"]
    boxes = {key: arrays[key] for key in (f"{name}_box", f"{name}_grid") if key in arrays}
    if f"{name}_variant" in arrays:
        boxes[f"{name}_variant"] = arrays[f"{name}_variant"]
    if entry.get("stack"):
        found: dict[str, Any] = {f"{name}_mask": mask, f"{name}_index": index, f"{name}_range": ranges[:, 0]}
    elif entry.get("single"):
        boxes = {key: value[:, 0] for key, value in boxes.items()}
        found = {f"{name}_mask": mask[:, 0], f"{name}_range": ranges[:, 0]}
    else:
        found = {f"{name}_mask": mask, f"{name}_range": ranges}
    return {name: present_pictures(entry, arrays), **found, **boxes}
