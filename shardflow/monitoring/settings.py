"""The settings of a run, as its folder holds them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["CONFIG_FILE", "read_settings"]

CONFIG_FILE: Final = "resolved_config.toml"
"""In a run folder."""


def read_settings(run: Path) -> dict[str, object]:
    """Return the settings of a run by dotted name; none where its folder holds none that can be read."""
    try:
        tables = tomllib.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(_flat(tables, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
