"""Values of samples that Python gives to `ShardWriter`: fields as bytes, and columns as arrays."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.codecs import CODECS, array_header, encode_array
from shardflow.format.contents.pictures import HEAD_NUM_BYTES, image_header
from shardflow.format.foreign.places import ImageFacts
from shardflow.format.keys import STUDY_FIELD, check_field, parse_slice_field, slice_field
from shardflow.format.samples import IMAGE_KINDS
from shardflow.format.shard_files import Fields
from shardflow.format.tables import COLUMN_NAME, MAX_CLASSES, ColumnKind, StoredColumn

_NUMBERS: Final = "biufc"
_COLORS: Final = 3
_NUM_EXACT: Final = 1 << 53
"""Integers up to here are floats without loss."""


def encode_fields(sample: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Encode the fields of a sample, in the order of a shard; see `ShardWriter` for values and names.

    Raises:
        FormatError: A name or a value is none that can be stored.
    """
    fields: dict[str, bytes] = {}
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        check_field(name)
        for stored, payload in _encoded(name, value):
            if stored in fields:
                raise FormatError(f"a sample must have each field once, got {stored} twice.")
            fields[stored] = payload
    if not fields:
        raise FormatError("a sample must have a field beside its __key__, got none.")
    return sorted(fields.items())


def _encoded(name: str, value: Any) -> Iterator[tuple[str, bytes]]:
    kind = name.rpartition(".")[2]
    if isinstance(value, (bytes, bytearray, memoryview)):
        yield name, bytes(value)
    elif isinstance(value, str) and kind == "txt":
        try:
            yield name, value.encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError(f"a text must be Unicode without lone surrogates ({name}).") from None
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool) and kind == "cls":
        yield name, b"%d" % int(value)
    elif isinstance(value, (dict, list)) and kind == "json":
        try:
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"a value must be one that JSON holds, got {type(error).__name__} ({name})."
            ) from None
        yield name, text.encode("ascii")
    elif isinstance(value, dict) and kind == "npz":
        yield name, _npz(name, value)
    elif isinstance(value, np.ndarray) and (kind == "png" or kind in CODECS):
        yield from _encoded_array(name, value)
    else:
        raise FormatError(
            "a field must be bytes, a str in .txt, an int in .cls, a dict or list in .json, a dict of arrays "
            f"in .npz, or an array in .png, {', '.join(f'.{codec}' for codec in CODECS)}, got a "
            f"{type(value).__name__} in {name}; rename the field, or encode its value to bytes."
        )


def _encoded_array(name: str, value: NDArray[Any]) -> Iterator[tuple[str, bytes]]:
    head, _, kind = name.rpartition(".")
    if kind == "png":
        yield name, _png(name, value)
    elif parse_slice_field(f"{head}.i0000.{kind}") is not None:
        for index, plane in enumerate(value):
            yield slice_field(int(head[1:]), index, kind), encode_array(kind, plane)
    elif kind == "npy" and parse_slice_field(name) is None:
        yield name, _npy(name, value)
    else:
        yield name, encode_array(kind, value)


def _npy(name: str, value: NDArray[Any]) -> bytes:
    if value.dtype.kind not in _NUMBERS:
        raise FormatError(
            f"an array must hold numbers or bools, got dtype {value.dtype} in {name}; convert it, or store "
            "texts as .json."
        )
    stream = io.BytesIO()
    plain = np.asarray(value, value.dtype.newbyteorder("<"), order="C")
    npy_format.write_array(stream, plain, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _npz(name: str, value: Mapping[Any, Any]) -> bytes:
    if not value or not all(
        isinstance(key, str) and key and isinstance(one, np.ndarray) for key, one in value.items()
    ):
        raise FormatError(f"an .npz must be a dict of arrays by name, got other entries in {name}.")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for key in sorted(value):
            # Its default time is the same for all.
            entry = zipfile.ZipInfo(f"{key}.npy")
            archive.writestr(entry, _npy(name, value[key]), zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def _png(name: str, value: NDArray[Any]) -> bytes:
    is_image = value.ndim == 2 or (value.ndim == _COLORS and value.shape[2] == _COLORS)
    if not is_image or not value.size or value.dtype.newbyteorder("=") not in (np.uint8, np.uint16):
        raise FormatError(
            "a .png must be (rows, columns) or (rows, columns, 3) RGB of uint8 or uint16, got "
            f"{value.dtype} {value.shape} in {name}; convert it, or store it as .npy."
        )
    return encode_array("png16", value)


def check_series(fields: Fields) -> tuple[int, int]:
    """Return rows and columns of the primary series, 0 without one; refuse series that no reader expects.

    Raises:
        FormatError: Series or slices are not numbered from 0, or slices of a series differ in form.
    """
    forms: dict[int, set[tuple[str, tuple[int, ...], np.dtype[Any]]]] = {}
    numbers: dict[int, list[int]] = {}
    for name, payload in fields:
        part = parse_slice_field(name)
        if part is not None and part.codec in CODECS:
            form = (part.codec, *array_header(part.codec, payload))
            forms.setdefault(part.series, set()).add(form)
            numbers.setdefault(part.series, []).append(part.index)
    for place, series in enumerate(sorted(numbers)):
        if series != place or sorted(numbers[series]) != list(range(len(numbers[series]))):
            raise FormatError("series and their slices must be numbered from 0 without gaps, got others.")
        if len(forms[series]) > 1:
            raise FormatError(
                f"slices of a series must have one shape, dtype and codec, got others (s{series:03d})."
            )
    if not forms:
        return 0, 0
    ((_, (rows, columns, *_), _),) = forms[0]
    return rows, columns


def modality_of(sample: Mapping[str, Any]) -> str:
    """Return the modality of the primary series, as ``study.json`` has it."""
    study: Any = sample.get(STUDY_FIELD)
    with suppress(LookupError, TypeError, ValueError, RecursionError):
        if isinstance(study, (bytes, bytearray)):
            study = json.loads(study)
        modality = study["series"][0]["modality"]
        return modality if isinstance(modality, str) else ""
    return ""


def picture_facts(fields: Fields) -> Iterator[tuple[str, ImageFacts]]:
    """Yield the facts of JPEG and PNG fields, by name; thumbnails are none."""
    for name, payload in fields:
        if name.rpartition(".")[2] not in IMAGE_KINDS or name.endswith(".thumb.jpg"):
            continue
        header = image_header(payload[:HEAD_NUM_BYTES])
        if header is not None:
            yield name, ImageFacts.of(header)


# ---- columns -------------------------------------------------------------------------------------------


class ColumnValues:
    """Columns of samples being written: one kind each, None for what a sample lacks.

    Args:
        kinds: Kinds of columns that are known already; shared, and added to.
    """

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds
        self._values: dict[str, list[Any]] = {}
        self._num_rows = 0

    def check(self, given: Mapping[Any, Any]) -> dict[str, tuple[str, Any]]:
        """Return kind and plain value of each given column that has a value.

        Raises:
            FormatError: A name or a value is none of a column, or a value is of another kind than those
                before.
        """
        found: dict[str, tuple[str, Any]] = {}
        for name, value in given.items():
            if not isinstance(name, str) or not COLUMN_NAME.fullmatch(name):
                raise FormatError(
                    "the name of a column must be 1 to 64 of a-z, 0-9 and _ after a letter, got another; "
                    "rename it."
                )
            kind, plain = _plain(name, value)
            if plain is None:
                continue
            joined = joined_kind(self._kinds.get(name, kind), kind)
            if joined is None:
                raise FormatError(
                    f"the column {name!r} must hold values of one kind, got {_named(kind)} after "
                    f"{_named(self._kinds[name])}; convert them."
                )
            found[name] = joined, plain
        return found

    def add(self, checked: Mapping[str, tuple[str, Any]]) -> None:
        """Append the values of a sample, as `check` returned them."""
        for name, (kind, value) in checked.items():
            self._kinds[name] = kind
            column = self._values.setdefault(name, [])
            column += [None] * (self._num_rows - len(column))
            column.append(value)
        self._num_rows += 1

    def stored(self) -> list[StoredColumn]:
        """Return the columns that have a value, by name, and begin anew."""
        columns = [
            _stored(name, self._kinds[name], values + [None] * (self._num_rows - len(values)))
            for name, values in sorted(self._values.items())
        ]
        self._values, self._num_rows = {}, 0
        return columns


def _plain(name: str, value: Any) -> tuple[str, Any]:
    """Return kind and value of a cell; the value is None where there is none."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "", None
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return "int", value
    if isinstance(value, float):
        return "float", value
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):
            value.encode()
            return "string", value
    if isinstance(value, (list, tuple, np.ndarray)):
        with suppress(TypeError, ValueError, OverflowError):
            numbers = np.asarray(value, np.float32)
            if numbers.ndim == 1 and len(numbers) and np.isfinite(numbers).all():
                return f"floats:{len(numbers)}", numbers
    raise FormatError(
        f"a column must hold bools, integers of 64 bits, floats, texts, or lists of finite floats, got "
        f"another {type(value).__name__} in {name!r}; store it as a field of the sample, such as .json."
    )


def joined_kind(first: str, second: str) -> str | None:
    """Return the kind that holds values of both; None if there is none."""
    if first == second:
        return first
    return "float" if {first, second} == {"int", "float"} else None


def _named(kind: str) -> str:
    base, _, length = kind.partition(":")
    return f"lists of {length} floats" if length else {"string": "text"}.get(base, base)


def _stored(name: str, kind: str, values: Sequence[Any]) -> StoredColumn:
    is_missing = np.array([value is None for value in values], bool)
    base, _, length = kind.partition(":")
    names: tuple[str, ...] = ()
    filled: NDArray[Any]
    if base == "string":
        names = tuple(sorted({value for value in values if value is not None}))
        codes = {text: code for code, text in enumerate(names)}
        filled = np.array([0 if value is None else codes[value] for value in values], np.int64)
    elif base == "floats":
        filled = np.zeros((len(values), int(length)), np.float32)
        filled[~is_missing] = [value for value in values if value is not None]
    elif base == "float":
        _refuse_inexact(name, [value for value in values if isinstance(value, int)])
        filled = np.array([0.0 if value is None else value for value in values], np.float64)
    else:
        filled = np.array([0 if value is None else value for value in values], base)
    found: Any = base
    return StoredColumn(name=name, kind=found, values=filled, is_missing=is_missing, names=names)


def _refuse_inexact(name: str, numbers: Any) -> None:
    if max(map(abs, numbers), default=0) > _NUM_EXACT:
        raise FormatError(
            f"the column {name!r} must hold either floats or integers above 2**53, got both; give one kind."
        )


def kind_of(column: StoredColumn) -> str:
    """Return the kind of a stored column as `ColumnValues` has it."""
    return f"floats:{column.values.shape[1]}" if column.kind == "floats" else column.kind


def join_columns(parts: Sequence[tuple[Mapping[str, StoredColumn], int]]) -> list[StoredColumn]:
    """Join the columns of shards, by name; texts of few values become a category.

    Args:
        parts: Columns of each shard, and its number of samples.

    Raises:
        FormatError: A column has values of several kinds.
    """
    return [_join(name, parts) for name in sorted({name for columns, _ in parts for name in columns})]


def _join(name: str, parts: Sequence[tuple[Mapping[str, StoredColumn], int]]) -> StoredColumn:
    pieces = [(columns.get(name), count) for columns, count in parts]
    kind = ""
    for piece, _ in pieces:
        if piece is not None:
            joined = joined_kind(kind or kind_of(piece), kind_of(piece))
            if joined is None:
                raise FormatError(
                    f"the column {name!r} must hold values of one kind in all parts, got {_named(kind)} and "
                    f"{_named(kind_of(piece))}; convert them, and write the parts again."
                )
            kind = joined
    base, _, length = kind.partition(":")
    names = sorted({text for piece, _ in pieces if piece is not None for text in piece.names})
    places = {text: code for code, text in enumerate(names)}
    num_rows = sum(count for _, count in pieces)
    dtype = {"string": "i8", "floats": "f4", "float": "f8", "int": "i8"}.get(base, "?")
    values = np.zeros((num_rows, int(length)) if length else num_rows, dtype)
    is_missing = np.ones(num_rows, bool)
    start = 0
    for piece, count in pieces:
        rows = slice(start, start + count)
        start += count
        if piece is None:
            continue
        known = ~piece.is_missing
        is_missing[rows] = piece.is_missing
        given = piece.values[known]
        if base == "string":
            given = np.array([places[text] for text in piece.names], np.int64)[given]
        elif base == "float" and piece.kind == "int":
            _refuse_inexact(name, given.tolist())
        values[rows][known] = given
    is_category = base == "string" and len(names) <= MAX_CLASSES
    found: Any = "category" if is_category else base
    stored_kind: ColumnKind = found
    return StoredColumn(name=name, kind=stored_kind, values=values, is_missing=is_missing, names=tuple(names))
