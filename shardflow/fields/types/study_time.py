"""Time around a study: windows such as ``("-48h", "0h")``, and whether a dataset states the times in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.contents.records import RECORD_TIMES

_SECONDS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_557_600}
_DISTANCE: Final = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(s|min|h|d|w|y)", re.ASCII)
_EXAMPLE: Final = '("-48h", "0h")'


def window_seconds(window: Sequence[str | float]) -> tuple[float, float]:
    """Return begin and end of a window in seconds from the study, both inclusive.

    Args:
        window: Two of a number of seconds, or a text of a number and ``s``, ``min``, ``h``, ``d``, ``w`` or
            ``y``; ``"-inf"`` and ``"inf"`` are no bound.

    Raises:
        ConfigError: It is no such pair, or ends before it begins.

    Example:
        >>> window_seconds(("-48h", "0h"))
        (-172800.0, 0.0)
    """
    ends = [] if isinstance(window, str) else list(window)
    if len(ends) != 2:
        raise ConfigError(f"window is a begin and an end, such as {_EXAMPLE}, got {window!r}.")
    start, stop = map(_seconds, ends)
    if start > stop:
        raise ConfigError(f"window begins before it ends, such as {_EXAMPLE}, got {window!r}.")
    return start, stop


def _seconds(end: Any) -> float:
    if isinstance(end, str):
        if end in ("-inf", "inf"):
            return float(end)
        match = _DISTANCE.fullmatch(end.strip())
        if match is not None:
            return float(match[1]) * _SECONDS[match[2]]
    elif isinstance(end, int | float) and not isinstance(end, bool) and not math.isnan(end):
        return float(end)
    raise ConfigError(
        f"an end of window is a number with s, min, h, d, w or y, such as '-48h', got {end!r}; correct it."
    )


def check_record_times(datasets: Sequence[Dataset], name: str) -> None:
    """Refuse packed datasets whose records do not state when things happened.

    Args:
        datasets: Those of the loader; what other writers made is taken as it is.
        name: Of the field, for the message.

    Raises:
        ConfigError: The dataset was packed before records had times of day, or without dates.
    """
    for dataset in datasets:
        extra: Mapping[str, Any] = dataset.manifest.extra
        resolution = extra.get(RECORD_TIMES)
        if "plan_digest" in extra and resolution is None:
            raise ConfigError(
                f"The field {name!r} needs the times of records, and this dataset was packed without them; "
                "pack it again into a new output: shardflow pack --config FILE"
            )
        if resolution == "none":
            raise ConfigError(
                f"The field {name!r} needs the times of records, and this dataset was packed with "
                "deid.dates = 'remove'; pack it again with 'days': shardflow pack --config FILE"
            )
