"""Settings of fields, most of volumes: checked when a field is written, and a wrong one is one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Final

import numpy as np

from shardflow.errors import ConfigError
from shardflow.fields.field import check_choice, check_count
from shardflow.fields.layout import WINDOWS

_OF_LEADER: Final = frozenset(
    {"roi_size", "center", "within", "overlap", "num_samples", "labels", "pos", "neg", "spacing_mm"}
    | {"placement", "orientation", "margin", "study"}
)
"""Settings that decide where a region is: a volume that is like another has none of them."""
_WITHIN: Final = ("random", "middle", "whole")
_MAX_SIDE: Final = 2**11
_SPACINGS_MM: Final = (0.01, 1000)
"""Finer than a micro-CT, and longer than a body: a number beyond is a slip."""


def checked_shape(name: str, value: Any) -> tuple[int, int, int]:
    """Return a number of voxels along each axis.

    Raises:
        ConfigError: It is none.
    """
    try:
        depth, rows, columns = value
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is voxels (D, H, W), such as (96, 96, 96), got {value!r}.") from None
    for side in (depth, rows, columns):
        check_count(f"each side of {name}", side, _MAX_SIDE)
    return depth, rows, columns


def checked_spacing(value: Any) -> tuple[float, float, float]:
    """Return three distances in millimeters.

    Raises:
        ConfigError: They are none.
    """
    found = numbers(value)
    least, most = _SPACINGS_MM
    if len(found) != 3 or not all(least <= each <= most for each in found):
        raise ConfigError(
            f"spacing_mm is three numbers from {least} to {most} of millimeters along D, H and W, such as "
            f"(1.5, 1.0, 1.0), got {value!r}."
        )
    return found[0], found[1], found[2]


def numbers(value: Any) -> list[float]:
    """Return a sequence of numbers; an empty list where it is none: neither True nor "1" is a number."""
    found = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(found, str) or not isinstance(found, Sequence):
        return []
    if not all(isinstance(each, Real) and not isinstance(each, bool) for each in found):
        return []
    return [float(each) for each in found]


def checked_share(name: str, value: Any) -> float:
    """Return a share from 0 to 1.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is a share from 0 to 1, such as 0.5, got {value!r}.")
    return float(value)


def checked_margin(value: Any) -> int | tuple[int, int, int]:
    """Return a number of voxels for all axes, or one for each.

    Raises:
        ConfigError: It is none.
    """
    sides = [value] * 3 if isinstance(value, int) else list(value) if isinstance(value, tuple | list) else []
    if len(sides) != 3 or not all(type(side) is int and 0 <= side <= _MAX_SIDE for side in sides):
        raise ConfigError(f"margin is a number of voxels, or one for each of D, H and W, got {value!r}.")
    return value if isinstance(value, int) else (sides[0], sides[1], sides[2])


def margins(value: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the margin along each axis."""
    return (value, value, value) if isinstance(value, int) else value


def checked_windows(windows: Any) -> tuple[tuple[float, float] | str, ...]:
    """Return windows as centers and widths, or names.

    Raises:
        ConfigError: One is neither.
    """
    if isinstance(windows, str) or len(numbers(windows)) == 2:
        raise ConfigError(f"windows is a list of windows, write windows=[{windows!r}].")
    if not isinstance(windows, tuple | list):
        raise ConfigError(
            f"windows is a list of windows, such as [(40, 400), 'lung'], got {windows!r}; leave it out for "
            "stored values."
        )
    found: list[tuple[float, float] | str] = []
    for window in windows:
        if isinstance(window, str):
            check_choice("each named window", window, tuple(WINDOWS))
            found.append(window)
            continue
        center, width = given if len(given := numbers(window)) == 2 else (0.0, 0.0)
        if not (math.isfinite(center) and 0 < width < math.inf):
            raise ConfigError(
                "each window is (center, width), such as (40, 400), or a name such as 'lung', got "
                f"{window!r}."
            )
        found.append((center, width))
    return tuple(found)


def window_ends(window: tuple[float, float] | str) -> tuple[float, float]:
    """Return the values that a window shows as its least and its greatest."""
    if isinstance(window, str):
        return WINDOWS[window]
    center, width = window
    return center - width / 2, center + width / 2


def check_series(series: object, example: str, default: str) -> None:
    """Refuse what is no expression that selects series.

    Args:
        series: The setting; None selects ``default``.
        example: An expression, for the message.
        default: What it selects otherwise, in words.

    Raises:
        ConfigError: It is none.
    """
    if series is not None and not (isinstance(series, str) and series.strip()):
        raise ConfigError(
            f'series is an expression such as "{example}", got {series!r}; leave it out for {default}.'
        )


def checked_labels(value: Any) -> tuple[str, ...] | None:
    """Return labels of regions; None for all.

    Raises:
        ConfigError: They are none.
    """
    if value is None:
        return None
    if isinstance(value, str):
        raise ConfigError(f"labels is a list of names, write labels=[{value!r}].")
    labels = tuple(value) if isinstance(value, tuple | list) else ()
    if not labels or {type(one) for one in labels} != {str} or "" in labels or len({*labels}) < len(labels):
        raise ConfigError("labels is a list of different names, or None for regions of any label.")
    return labels


def checked_center(center: Any, choices: tuple[str, ...]) -> bool:
    """Return whether a region is at a place of an attached table, named ``TABLE.COLUMN``.

    Raises:
        ConfigError: It is neither such a name nor a choice.
    """
    if isinstance(center, str) and center.count(".") == 1 and all(center.split(".")):
        return True
    if center not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(
            f"center is one of {listed}, or a column of places such as 'lesions.center', got {center!r}."
        )
    return False


def check_within(within: Any, center: str, labels: Sequence[str] | None) -> None:
    """Refuse a box in which no region is placed.

    Raises:
        ConfigError: It is such.
    """
    check_choice("within", within, (None, "body", "foreground"))
    if within is not None and center not in _WITHIN:
        raise ConfigError(
            f"within={within!r} cuts a volume before its region is random, in the middle or all of it, got "
            f"center={center!r}; leave one of them out."
        )
    if within == "foreground" and labels is None:
        raise ConfigError("within='foreground' is the box around labels; write labels=['NAME', ...].")


def check_foreground(labels: Sequence[str] | None, pos: Any, neg: Any, *, is_used: bool) -> None:
    """Refuse weights that are none, and settings that nothing uses.

    Raises:
        ConfigError: They are such.
    """
    for name, weight in (("pos", pos), ("neg", neg)):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"{name} is a weight from 0, such as 1, got {weight!r}.")
    if not pos:
        raise ConfigError("pos=0 asks for no region around a voxel of labels; write center='random'.")
    if not is_used and (labels is not None or (pos, neg) != (1, 1)):
        raise ConfigError(
            "labels need center='foreground' or within='foreground', and pos and neg the former; write it, "
            "or leave them out."
        )


def check_like(like: Any, changed: Sequence[str]) -> None:
    """Refuse a volume without a region, and one like another that has settings of a region of its own.

    Args:
        like: The setting.
        changed: Names of all settings that differ from their defaults.

    Raises:
        ConfigError: It is such a volume.
    """
    if like is None:
        if "roi_size" not in changed:
            raise ConfigError(
                "A volume needs roi_size, the voxels (D, H, W) of its region, such as (96, 96, 96), or "
                "like, the name of another volume field, for the same region of another series."
            )
        return
    if not isinstance(like, str):
        raise ConfigError(f"like is the name of a Volume field, got {like!r}.")
    if given := [name for name in changed if name in _OF_LEADER]:
        raise ConfigError(
            f"like={like!r} delivers the region of that field, which {given[0]} would change; leave it out."
        )
