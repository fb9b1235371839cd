"""Bind a TOML file and overrides to a dataclass; every mistake is named with its place."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from shardflow.configs.fields import (
    BYTE_SIZE,
    PLACE,
    SPREAD,
    Bounds,
    Inside,
    one_of,
    parse_byte_size,
    split_annotated,
    type_hints,
)
from shardflow.errors import ConfigError

__all__ = ["load_config"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Override:
    """A value from ``--set``: the text as typed, and what TOML makes of it (or the text again)."""

    text: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands, for messages and for relative paths."""

    file_name: str
    folder: Path
    keys: tuple[str, ...] = ()

    def below(self, key: str) -> _Place:
        return dataclasses.replace(self, keys=(*self.keys, key))

    @property
    def name(self) -> str:
        return ".".join(self.keys) or "the configuration"

    def error(self, expected: str, found: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.name} must be {expected}, got {found} ({self.file_name}); {remedy}.")


def load_config(cls: type[_T], path: str | Path, overrides: Sequence[str] = ()) -> _T:
    """Read a TOML file into a frozen dataclass.

    Args:
        cls: The dataclass of all settings; its nested dataclasses are the file's tables.
        path: The TOML file.
        overrides: ``"table.key=value"`` each, applied after the file; the value is TOML, or plain text where
            it does not parse as TOML.

    Returns:
        An instance whose ``__post_init__`` checks have passed and whose paths are absolute.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown (the nearest known one is named),
            missing, of the wrong type or out of range.
    """
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"the configuration file must exist, got no file of the name {path.name!r}; correct the path."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the configuration file must be readable, got {error.strerror} ({path.name}); check it."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration must be TOML, got: {error} ({path.name}); correct the file."
        ) from None
    for override in overrides:
        _apply_override(tree, override)
    place = _Place(file_name=path.name, folder=path.resolve().parent)
    return typing.cast("_T", _bind_dataclass(cls, tree, place))


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(
            f"--set must be table.key=value, got {override.split('=', maxsplit=1)[0]!r}; write both sides."
        )
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tree
    for key in keys[:-1]:
        child = table.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"--set {dotted} must name a key of a table, got {key!r}, which is a value; correct it."
            )
        table = child
    table[keys[-1]] = _Override(text=text, value=value)


def _bind_dataclass(cls: type[Any], tree: Any, place: _Place) -> Any:
    if isinstance(tree, _Override):
        tree = tree.value
    if not isinstance(tree, dict):
        raise place.error("a table", _kind(tree), f"write [{place.name}]")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = type_hints(cls)
    for name in fields:
        if SPREAD in split_annotated(hints[name])[1]:
            tree = _gathered(tree, name, fields, place)
    for key in tree:
        if key not in fields:
            raise _unknown_key(key, tree[key], list(fields), place)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _bind(hints[name], tree[name], place.below(name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(hints[name]):
                raise place.below(name).error("set", "nothing", "add the key")
            values[name] = _bind_dataclass(typing.cast("type[Any]", hints[name]), {}, place.below(name))
    try:
        return cls(**values)
    except ConfigError as error:
        prefix = f"[{place.name}] " if place.keys else ""
        raise ConfigError(f"{prefix}{error.message.rstrip('.')} ({place.file_name}).") from None


def _gathered(tree: dict[str, Any], name: str, fields: Collection[str], place: _Place) -> dict[str, Any]:
    """Put the integers of a table that are no setting of it into its table ``name``."""
    beside = {key: value for key, value in tree.items() if key not in fields and type(_plain(value)) is int}
    inner = _plain(tree.get(name, {}))
    if not beside or not isinstance(inner, dict):
        return tree
    for key in beside.keys() & inner.keys():
        if not _comes_from_override(beside[key]):
            raise place.below(key).error(f"written once, here or in {name}", "both", "remove one")
    return {**{key: value for key, value in tree.items() if key not in beside}, name: {**inner, **beside}}


def _lifted(tree: dict[str, Any], name: str, place: _Place) -> dict[str, Any]:
    """Return the entries of a table that stand in its table ``name``, with what ``--set`` puts beside it."""
    inner = _plain(tree.get(name))
    if not isinstance(inner, dict):
        return tree
    beside = {key: value for key, value in tree.items() if key != name}
    for key, value in beside.items():
        if not _comes_from_override(value):
            raise place.below(key).error(f"left out beside {name}", "both", f"keep {name} alone")
    return {**inner, **beside}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Override) else value


def _comes_from_override(value: Any) -> bool:
    """Tell whether all of a value was typed behind ``--set``, so that the file is not to blame."""
    if isinstance(value, dict):
        return bool(value) and all(map(_comes_from_override, value.values()))
    return isinstance(value, _Override)


def _unknown_key(key: str, value: Any, known: list[str], place: _Place) -> ConfigError:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    remedy = f"the nearest known key is {nearest[0]!r}" if nearest else "no key is known here"
    table = f"table [{place.name}]" if place.keys else "top level"
    source = "--set" if _comes_from_override(value) else place.file_name
    return ConfigError(f"a key must be a known setting, got {key!r} ({source}, {table}); {remedy}.")


def _bind(hint: Any, value: Any, place: _Place) -> Any:
    """Turn a TOML value into the type that ``hint`` asks for."""
    base, marks = split_annotated(hint)
    if isinstance(value, _Override):
        place = dataclasses.replace(place, folder=Path.cwd(), file_name="--set")
        takes_text = base in {str, Path} or get_origin(base) is Literal or BYTE_SIZE in marks
        value = value.text if takes_text and not isinstance(value.value, str) else value.value
    origin = get_origin(base)
    if origin in {Union, types.UnionType}:
        inner = [arm for arm in get_args(base) if arm is not type(None)]
        return _bind(Annotated[(inner[0], *marks)] if marks else inner[0], value, place)
    if dataclasses.is_dataclass(base):
        return _bind_dataclass(typing.cast("type[Any]", base), value, place)
    if origin is tuple:
        return _bind_tuple(get_args(base)[0], value, place)
    if origin is dict:
        return _bind_table(get_args(base)[1], marks, value, place)
    if origin is Literal:
        if value not in get_args(base):
            raise place.error(one_of(get_args(base)), repr(value), "take one of these")
        return value
    value = _bind_scalar(base, marks, value, place)
    for mark in marks:
        if isinstance(mark, Bounds) and not mark.holds(value):
            raise place.error(mark.describe(), repr(value), "correct it")
    return value


def _bind_table(item_hint: Any, marks: tuple[Any, ...], value: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise place.error("a table", _kind(value), f"write [{place.name}]")
    for mark in marks:
        if isinstance(mark, Inside):
            value = _lifted(value, mark.name, place)
    return {key: _bind(item_hint, item, place.below(key)) for key, item in value.items()}


def _bind_tuple(item_hint: Any, value: Any, place: _Place) -> tuple[Any, ...]:
    if isinstance(value, str) and place.file_name == "--set":
        value = [value]  # `--set inputs.dicom=/data` is a list of one
    if not isinstance(value, list):
        raise place.error("a list", _kind(value), "put it in brackets")
    return tuple(_bind(item_hint, item, place.below(str(index))) for index, item in enumerate(value))


def _bind_scalar(base: Any, marks: tuple[Any, ...], value: Any, place: _Place) -> Any:
    if BYTE_SIZE in marks and isinstance(value, str):
        try:
            return parse_byte_size(value)
        except ConfigError:
            raise place.error("a size such as 512MiB", repr(value), "correct it") from None
    if (base is Path or PLACE in marks) and isinstance(value, str):
        if not value:
            raise place.error("a path", "an empty text", "name a file or folder")
        if PLACE in marks and "://" in value:
            return value
        path = place.folder / Path(value).expanduser()
        return path if base is Path else str(path)
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if base is float and isinstance(value, float) and not math.isfinite(value):
        raise place.error("a finite number", repr(value), "correct it")
    if type(value) is not base:
        expected = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
        raise place.error(
            expected.get(base, getattr(base, "__name__", str(base))), _kind(value), "correct the value"
        )
    return value


def _kind(value: Any) -> str:
    """Name a value's kind, never the value: it may be a path that tells whose data this is."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), type(value).__name__)
