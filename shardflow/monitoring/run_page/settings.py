"""A run's settings for other people's eyes: no path but its last part, and nothing that opens a door."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["shown", "shown_settings"]

_SECRET: Final = re.compile(r"secret|password|credential|access_key|authorization", re.IGNORECASE)
_MOST_CHARACTERS: Final = 200


def shown_settings(settings: Mapping[str, object]) -> dict[str, str]:
    """Return settings by their names, ``loader.num_threads``, as they may be shown."""
    return dict(_shown(settings, ""))


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


def _shown(settings: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _shown(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            for place, one in enumerate(value):
                yield from (
                    _shown(one, f"{name}.{place}.")
                    if isinstance(one, Mapping)
                    else ((f"{name}.{place}", shown(one)),)
                )
        else:
            yield name, "(not shown)" if _SECRET.search(key) else shown(value)
