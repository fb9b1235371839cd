"""The file of settings that a tuner found: TOML, so that people read it and paste it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError

__all__ = ["TUNED_FILE", "read_tuned", "tuned_text"]

TUNED_FILE: Final = "tuned.toml"
"""In the run folder."""
_MOST_BYTES: Final = 1 << 20
"""Whatever is longer is another file, a shard say."""


def tuned_text(values: Mapping[str, int | str]) -> str:
    """Write settings as tables of TOML, sorted."""
    lines = ["# Found by the tuner. [loader] and [cache] can go into a configuration as they are."]
    table = ""
    for dotted, value in sorted(values.items()):
        head, _, name = dotted.partition(".")
        if head != table:
            table = head
            lines += ["", f"[{table}]"]
        lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}")
    return "\n".join(lines) + "\n"


def read_tuned(path: Path) -> dict[str, int | str]:
    """Read what `tuned_text` wrote.

    Raises:
        ConfigError: There is no such file, or it is another one.
    """
    try:
        with path.open("rb") as file:
            tree = tomllib.loads(file.read(_MOST_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"a file of tuned settings must be readable TOML, got {type(error).__name__} ({path.name}); "
            "correct it, or do without it."
        ) from None
    found: dict[str, int | str] = {}
    for table, entries in tree.items():
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(value, int | str) or isinstance(value, bool):
                raise ConfigError(
                    f"tuned settings must be numbers or words, got {table}.{name} of another kind "
                    f"({path.name}); correct it, or do without it."
                )
            found[f"{table}.{name}"] = value
    if not found:
        raise ConfigError(
            f"a file of tuned settings must hold some, in tables, got none ({path.name}); correct it, or do "
            "without it."
        )
    return found
