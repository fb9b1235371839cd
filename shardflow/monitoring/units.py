"""Human-readable numbers with units, shared by the run page and the live view."""

from __future__ import annotations

import math
from typing import Final

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show(value: float | None, unit: str = "") -> str:
    """Render a number with its unit.

    Args:
        value: None if it is not known.
        unit: ``s``, ``share``, ``bytes``, ``bytes/s``, or the text that follows a plain number.
    """
    if value is None or not math.isfinite(value):
        return "\u2013"
    if unit == "s":
        return duration(value)
    if unit == "share":
        return f"{100 * value:.1f} %" if 0 < abs(value) < 0.995 else f"{100 * value:.0f} %"
    if unit in ("bytes", "bytes/s"):
        return _binary(value) + unit.removeprefix("bytes")
    text = compact(value)
    return f"{text} {unit}" if unit else text


def duration(seconds: float) -> str:
    """Render a time: ``12 ms``, ``3.25 s``, ``4 min 10 s``, ``2 d 3 h``."""
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.001:
        return f"{seconds * 1e6:.0f} \u00b5s"
    if size < 1:
        return f"{seconds * 1e3:.3g} ms"
    if size < 60:
        return f"{seconds:.3g} s"
    whole = round(size)
    if whole < 3600:
        parts = (whole // 60, "min", whole % 60, "s")
    elif whole < 86400:
        parts = (whole // 3600, "h", whole % 3600 // 60, "min")
    else:
        parts = (whole // 86400, "d", whole % 86400 // 3600, "h")
    text = f"{parts[0]} {parts[1]}" + (f" {parts[2]} {parts[3]}" if parts[2] else "")
    return f"-{text}" if seconds < 0 else text


def compact(value: float) -> str:
    """Render a plain number: exactly if it is whole and below 100,000, with three digits otherwise."""
    if value == int(value) and abs(value) < 100_000:
        return f"{int(value):,}"
    size = abs(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= factor * (10 if unit == "k" else 1):
            return f"{value / factor:.4g}{unit}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 0.001 else f"{value:.2e}"


def _binary(num_bytes: float) -> str:
    size, power = abs(num_bytes), 0
    while size >= 1024 and power < len(_BINARY) - 1:
        size /= 1024
        power += 1
    sign = "-" if num_bytes < 0 else ""
    text = f"{size:.0f}" if power == 0 or size >= 100 else f"{size:.3g}"
    return f"{sign}{text} {_BINARY[power]}"
