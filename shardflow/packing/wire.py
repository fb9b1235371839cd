"""Codec between typed records and JSON: the one place where task payloads and results cross a process border.

A record is a frozen dataclass; it travels as a JSON object, field by field under the field's name. Its
annotations are the schema: what comes from another process is checked against them, so that a process that
was taken over by an input can send wrong values, but none of another type. A class with ``to_json`` and
``from_json`` has a form of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardflow.errors import ShardflowError

Record = TypeVar("Record")
Decoder = Callable[[Any], Any]


def encode(value: Any) -> Any:
    """Return a record, or a collection of records, as JSON values."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [encode(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): encode(one) for key, one in value.items()}
    return str(value) if isinstance(value, (Path, str)) else value


def decode(record: type[Record], value: Any) -> Record:
    """Read what `encode` returned for a record of this type.

    Raises:
        ShardflowError: The value does not have the fields and types of the record.
    """
    try:
        schema: Any = record
        decoded: Record = _decoder(schema)(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ShardflowError(
            f"a message between processes must be a {record.__name__}, got {type(error).__name__}; "
            "this is an internal error."
        ) from None
    return decoded


@cache
def _decoder(kind: Any) -> Decoder:
    """Build the function that reads values of a type; once per type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if hasattr(kind, "from_json"):
        from_json: Decoder = kind.from_json
        return from_json
    if is_dataclass(kind):
        return _record_decoder(kind)
    if origin is Annotated:
        return _decoder(arguments[0])
    if origin in {Union, types.UnionType}:
        (other,) = (_decoder(one) for one in arguments if one is not type(None))
        return lambda value: None if value is None else other(value)
    if origin is Literal:
        return lambda value: arguments[arguments.index(value)]
    if origin is tuple:
        element = _decoder(arguments[0])
        return _of(list, lambda value: tuple([element(one) for one in value]))
    if origin is dict:
        key, element = arguments[0], _decoder(arguments[1])
        return _of(dict, lambda value: {key(name): element(one) for name, one in value.items()})
    if kind is Path:
        return Path
    exact = _of(kind, lambda value: value)
    return (lambda value: value if type(value) is int else exact(value)) if kind is float else exact


def _record_decoder(record: Any) -> Decoder:
    hints = get_type_hints(record, include_extras=True)
    decoders = [(field.name, _decoder(hints[field.name])) for field in fields(record)]
    return lambda value: record(**{name: decoder(value[name]) for name, decoder in decoders})


def _of(kind: type, read: Decoder) -> Decoder:
    """Read values of exactly one JSON type."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return read(value)

    return check
