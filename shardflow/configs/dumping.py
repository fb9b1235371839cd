"""Write settings as TOML."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardflow.errors import ConfigError

__all__ = ["dump_config"]


def dump_config(config: object) -> str:
    """Write a dataclass as TOML that :func:`load_config` reads back to an equal instance.

    Keys whose value is ``None`` are left out; paths are written as they are (absolute after loading).
    """
    lines: list[str] = []
    _dump_table(_as_tree(config), (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _as_tree(config: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            tree[field.name] = _as_tree(value) if dataclasses.is_dataclass(value) else value
    return tree


def _dump_table(tree: Mapping[str, Any], keys: tuple[str, ...], lines: list[str]) -> None:
    scalars = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if keys:
        lines.extend(["", f"[{'.'.join(map(_toml_key, keys))}]"])
    lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in scalars.items())
    for key, value in tree.items():
        if key not in scalars:
            _dump_table(value, (*keys, key), lines)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    # JSON's escapes are TOML's basic-string escapes, but for DEL, which TOML wants escaped, and for surrogate
    # pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _toml_text(str(value))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # Tables inside a list stand on one line.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _as_tree(value)
    if isinstance(value, dict):
        pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(f"a setting must be a TOML value, got {type(value).__name__}; this is a bug.")
