"""A run's settings for other people's eyes: no path but its last part, and nothing that opens a door."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.verdict.judging import CONFIG_FILE

__all__ = ["read_settings", "shown"]

_SECRET: Final = re.compile(r"secret|password|credential|access_key|authorization", re.IGNORECASE)
_MOST_CHARACTERS: Final = 200


def read_settings(run: Path) -> dict[str, str]:
    """Return the settings of a run by their names, ``loader.num_threads``; empty for a run without them."""
    try:
        tree = tomllib.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(_flat(tree, ""))


def shown(value: object) -> str:
    """Return a value as it may be shown: what looks like a path or an address is cut to its last part."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    text = str(value)
    parts = [part for part in re.split(r"[/\\]", text) if part]
    if len(parts) > 1 or re.search(r"[/\\]", text):
        # What follows ? in an address may be a signature.
        text = f"\u2026/{parts[-1].partition('?')[0]}" if parts else "/"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}\u2026"


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            for place, one in enumerate(value):
                yield from (
                    _flat(one, f"{name}.{place}.")
                    if isinstance(one, Mapping)
                    else ((f"{name}.{place}", shown(one)),)
                )
        else:
            yield name, "(not shown)" if _SECRET.search(key) else shown(value)
