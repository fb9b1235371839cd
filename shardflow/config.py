"""Typed settings: a strict TOML file becomes a frozen dataclass, or an error that names the mistake.

Reads, overrides and checks the settings of every job; the dataclasses belong to the packages that they
configure. An unknown key is always an error, and nothing is read from the environment.

Field types: ``bool int float str Path``, ``Literal[...]``, ``tuple[T, ...]`` and ``Sequence[T]``, ``dict[str,
T]``, ``T | None``, ``Any`` (its owner checks it), nested dataclasses (TOML tables), and ``Annotated`` with
:data:`BYTE_SIZE` (``"1MiB"`` or an integer), :data:`PLACE` (a path or a URL), :class:`Bounds`,
:class:`TypeKey` for a table whose key ``type`` names its dataclass, or, for a table that may stand in two
places, :class:`Inside` or :data:`SPREAD`. Of several types (``int | Literal["all"]``) the first one that
takes a value. Relative paths are resolved against the folder of the file, those of ``--set`` against the
current folder; ``~`` is the home folder. A dataclass may have a mapping ``moved_keys`` from keys that it had
to a sentence on what to write now.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from shardflow.errors import ConfigError

BYTE_SIZE: Final = "byte size"
"""Mark of an integer that may be written as ``"512MiB"``."""

ByteSize = Annotated[int, BYTE_SIZE]
"""A number of bytes that may be written with a unit, such as ``"512MiB"``."""

PLACE: Final = "place"
"""Mark of a string that is a path or a URL."""

Place = Annotated[str, PLACE]
"""A path, resolved like `Path` fields, or a URL such as ``s3://bucket/prefix``."""

SPREAD: Final = "spread"
"""Mark of a table of integers whose entries may also be written in the table that contains it."""

_SIZE_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?B|B)?\s*")
_SIZE_FACTORS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    "KB": 1000,
    "kiB": 1024,
}
_NO_TEXT = {int: "a number", float: "a number", Path: "a pathlib.Path"}  # a likely mistake of Python callers
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Inside:
    """Mark of a table whose entries may be written one level deeper, in a table of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class TypeKey:
    """Mark of a table whose key ``type`` names its dataclass, such as a registered field type."""

    find: Callable[[str], type[Any]]
    """Returns the dataclass of a name.

    Raises:
        ConfigError: There is none.
    """
    name: Callable[[type[Any]], str]
    """Returns the name of a dataclass that ``find`` takes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Closed range of a number; ``None`` is no bound."""

    minimum: float | None = None
    maximum: float | None = None

    def describe(self) -> str:
        """Describe the range for an error message."""
        if self.minimum is None:
            return f"at most {_bound_text(self.maximum)}"
        if self.maximum is None:
            return f"at least {_bound_text(self.minimum)}"
        return f"from {_bound_text(self.minimum)} to {_bound_text(self.maximum)}"

    def holds(self, value: float) -> bool:
        """Return whether ``value`` lies in the range."""
        return (self.minimum is None or value >= self.minimum) and (
            self.maximum is None or value <= self.maximum
        )


def parse_byte_size(text: str) -> int:
    """Parse ``"512MiB"``, ``"1.5 GB"`` or ``"4096"`` into bytes.

    Raises:
        ConfigError: the text is no size.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a size; write a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB."
        )
    return int(float(match[1]) * _SIZE_FACTORS[match[2] or "B"])


def check_fields(config: object) -> None:
    """Check every :class:`Bounds` and ``Literal`` of a dataclass instance; for ``__post_init__``.

    Raises:
        ConfigError: a value is out of range.
    """
    hints = _type_hints(type(config))
    for field in dataclasses.fields(typing.cast("Any", config)):
        hint = hints[field.name]
        value = getattr(config, field.name)
        base, marks = _split_annotated(hint)
        arms = get_args(base) if get_origin(base) in {Union, types.UnionType} else (base,)
        marked = [_split_annotated(arm) for arm in arms]
        arms = tuple(arm for arm, _ in marked)
        if isinstance(value, (int, float)):
            marks = (*marks, *(mark for _, own in marked for mark in own))
        if isinstance(value, str) and str not in arms and arms[0] in _NO_TEXT:
            raise ConfigError(f"{field.name} must be {_NO_TEXT[arms[0]]}, got text; correct it.")
        if {*arms} <= {str, type(None)} and not isinstance(value, (str, type(None))):
            raise ConfigError(f"{field.name} must be text, got {type(value).__name__}; correct it.")
        choices = [one for arm in arms if get_origin(arm) is Literal for one in get_args(arm)]
        if choices and value is not None and len(arms) <= 1 + (type(None) in arms) and value not in choices:
            raise ConfigError(f"{field.name} must be {_one_of(choices)}, got {value!r}; correct it.")
        if value is None or (isinstance(value, str) and base is not str):
            continue
        if int in arms and float not in arms and isinstance(value, (bool, float)) and type(value) not in arms:
            raise ConfigError(f"{field.name} must be a whole number, got {value!r}; correct it.")
        for mark in marks:
            if isinstance(mark, Bounds) and not mark.holds(value):
                raise ConfigError(f"{field.name} must be {mark.describe()}, got {value!r}; correct it.")


def _type_hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with their marks."""
    return typing.get_type_hints(cls, include_extras=True)


def _split_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type and its marks."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, tuple(marks)
    return hint, ()


def _one_of(choices: Sequence[Any]) -> str:
    """Describe a choice for an error message."""
    return "one of " + ", ".join(repr(choice) for choice in choices)


def _bound_text(number: float | None) -> str:
    """Format a bound; a whole number with all its digits."""
    whole = number is not None and float(number).is_integer() and abs(number) < 2**63
    return f"{number:.0f}" if whole else f"{number:g}"


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Override:
    """A value from ``--set``: the text as typed, and its TOML value (or the text again)."""

    text: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a value, for messages and relative paths."""

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


_KEEPS_INTEGERS: Final = ContextVar("keeps_integers", default=False)


@contextmanager
def keeping_integers() -> Iterator[None]:
    """Load settings in this context as `dump_config` wrote them: an integer for a float stays one.

    The identity of a run tells 500 from 500.0, and who reads its settings must find the same.
    """
    token = _KEEPS_INTEGERS.set(True)
    try:
        yield
    finally:
        _KEEPS_INTEGERS.reset(token)


def load_config(cls: type[_T], path: str | Path, overrides: Sequence[str] = (), *, within: str = "") -> _T:
    """Read a TOML file into a frozen dataclass.

    Args:
        cls: The dataclass of all settings; its nested dataclasses are the file's tables.
        path: The TOML file.
        overrides: ``"table.key=value"`` each, applied after the file; the value is TOML, or plain text where
            it does not parse as TOML.
        within: Table by which a file shows that it holds other settings beside these, which are not read.

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
            f"the configuration file does not exist: got no file of the name {path.name!r}; correct the path."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the configuration file is not readable: {error.strerror} ({path.name}); check its permissions."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration must be TOML, got: {error} ({path.name}); correct the file."
        ) from None
    for override in overrides:
        _apply_override(tree, override)
    if within in tree:
        own = {one.name for one in dataclasses.fields(typing.cast("Any", cls))}
        tree = {name: value for name, value in tree.items() if name in own}
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
    hints = _type_hints(cls)
    for name in fields:
        if SPREAD in _split_annotated(hints[name])[1]:
            tree = _gathered(tree, name, fields, place)
    for key in tree:
        if key not in fields:
            raise _unknown_key(key, tree[key], cls, list(fields), place)
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
    """Move the integers of a table that are not its own settings into its table ``name``."""
    beside = {key: value for key, value in tree.items() if key not in fields and type(_plain(value)) is int}
    inner = _plain(tree.get(name, {}))
    if not beside or not isinstance(inner, dict):
        return tree
    for key in beside.keys() & inner.keys():
        if not _comes_from_override(beside[key]):
            raise place.below(key).error(f"written once, here or in {name}", "both", "remove one")
    return {**{key: value for key, value in tree.items() if key not in beside}, name: {**inner, **beside}}


def _lifted(tree: dict[str, Any], name: str, place: _Place) -> dict[str, Any]:
    """Return the entries of the inner table ``name``, merged with those that ``--set`` put beside it."""
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
    """Return whether all of a value came from ``--set``, and none of it from the file."""
    if isinstance(value, dict):
        return bool(value) and all(map(_comes_from_override, value.values()))
    return isinstance(value, _Override)


def _unknown_key(key: str, value: Any, cls: type[Any], known: list[str], place: _Place) -> ConfigError:
    moved: Mapping[str, str] = getattr(cls, "moved_keys", {})
    if key in moved:
        return ConfigError(f"{place.below(key).name} has moved ({place.file_name}): {moved[key]}")
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    remedy = f"the nearest known key is {nearest[0]!r}" if nearest else "no key is known here"
    table = f"table [{place.name}]" if place.keys else "top level"
    source = "--set" if _comes_from_override(value) else place.file_name
    return ConfigError(f"a key must be a known setting, got {key!r} ({source}, {table}); {remedy}.")


def _bind(hint: Any, value: Any, place: _Place) -> Any:
    """Convert a TOML value to the type ``hint``."""
    base, marks = _split_annotated(hint)
    if isinstance(value, _Override):
        place = dataclasses.replace(place, folder=Path.cwd(), file_name="--set")
        takes_text = base in {str, Path} or get_origin(base) is Literal or BYTE_SIZE in marks
        value = value.text if takes_text and not isinstance(value.value, str) else value.value
    origin = get_origin(base)
    if origin in {Union, types.UnionType}:
        return _bind_union([arm for arm in get_args(base) if arm is not type(None)], marks, value, place)
    for mark in marks:
        if isinstance(mark, TypeKey):
            return _bind_typed(mark, value, place)
    if dataclasses.is_dataclass(base):
        return _bind_dataclass(typing.cast("type[Any]", base), value, place)
    if origin in {tuple, Sequence}:
        return _bind_tuple(get_args(base)[0], value, place)
    if origin is dict:
        return _bind_table(get_args(base)[1], marks, value, place)
    if origin is Literal:
        if value not in get_args(base):
            raise place.error(_one_of(get_args(base)), repr(value), "take one of these")
        return value
    value = _bind_scalar(base, marks, value, place)
    for mark in marks:
        if isinstance(mark, Bounds) and not mark.holds(value):
            raise place.error(mark.describe(), repr(value), "correct it")
    return value


def _bind_union(arms: list[Any], marks: tuple[Any, ...], value: Any, place: _Place) -> Any:
    """Convert a value to the first type that takes it; if none does, the error is that of the first type."""
    if isinstance(value, dict):  # a table is meant to be one, and what is wrong inside of it is told
        arms = sorted(arms, key=lambda arm: not dataclasses.is_dataclass(arm))
    first = Annotated[(arms[0], *marks)] if marks else arms[0]
    try:
        return _bind(first, value, place)
    except ConfigError:
        for arm in arms[1:]:
            with suppress(ConfigError):
                return _bind(arm, value, place)
        raise


def _bind_typed(mark: TypeKey, value: Any, place: _Place) -> Any:
    if not isinstance(value, dict):
        raise place.error("a table", _kind(value), f"write [{place.name}]")
    name = _plain(value.get("type"))
    if not isinstance(name, str):
        found = "nothing" if name is None else _kind(name)
        raise place.below("type").error("the name of a type", found, 'write for example type = "image"')
    try:
        cls = mark.find(name)
    except ConfigError as error:
        raise ConfigError(
            f"{place.below('type').name}: {error.message.rstrip('.')} ({place.file_name})."
        ) from None
    return _bind_dataclass(cls, {key: item for key, item in value.items() if key != "type"}, place)


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
    if base is Any:
        return value
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
        if _KEEPS_INTEGERS.get():
            return value
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
    """Return the kind of a value, never the value itself, which may be a path that identifies a person."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), type(value).__name__)


# ---- writing -------------------------------------------------------------------------------------


def dump_config(config: object) -> str:
    """Write a dataclass as TOML that :func:`load_config` reads back to an equal instance.

    Keys whose value is ``None`` are left out; paths are written as they are (absolute after loading).
    """
    lines: list[str] = []
    _dump_table(_as_tree(config), (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _as_tree(config: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    hints = _type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, dict):
            _, marks = _split_annotated(get_args(_split_annotated(hints[field.name])[0])[1])
            names = [mark.name for mark in marks if isinstance(mark, TypeKey)]
            if names:
                value = {key: {"type": names[0](type(one)), **_as_tree(one)} for key, one in value.items()}
        if value is not None:
            tree[field.name] = _as_tree(value) if dataclasses.is_dataclass(value) else value
    return tree


def _dump_table(tree: Mapping[str, Any], keys: tuple[str, ...], lines: list[str]) -> None:
    scalars = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if keys and (scalars or not tree):
        lines.extend(["", f"[{'.'.join(map(_toml_key, keys))}]"])
    lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in scalars.items())
    for key, value in tree.items():
        if key not in scalars:
            _dump_table(value, (*keys, key), lines)


def _toml_key(key: object) -> str:
    key = str(key)  # epochs and the like are integers
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    # JSON escapes are TOML escapes, except that TOML also requires DEL to be escaped and has no surrogate
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
    # Tables inside a list are written on one line.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _as_tree(value)
    if isinstance(value, dict):
        pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(f"a setting of type {type(value).__name__} cannot be written as TOML; this is a bug.")
