"""Readers of tables: a file becomes batches of columns, streamed twice.

Readers of other packages come from the entry points of the group ``shardflow.tables``; the name of an entry
point is the extension of the files that it reads.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from numpy.typing import NDArray

from shardflow.errors import ConfigError, os_reason

Values: TypeAlias = Sequence[Any] | NDArray[Any]
Batch: TypeAlias = Mapping[str, Values]
"""Columns of consecutive rows by name: strings, numbers, booleans or lists of numbers, None where there is no
value. Strings are parsed as those of a CSV are. Batches may lack columns."""
TableReader: TypeAlias = Callable[[Path], Iterator[Batch]]
READER_GROUP: Final = "shardflow.tables"
_ROWS: Final = 8_192
_SEPARATORS: Final = ",;\t|"
_MAX_FIELD_CHARACTERS: Final = 1 << 24


def open_table(path: Path) -> TableReader:
    """Return the reader of a file by its extension; ``.gz`` behind it is unpacked by the readers of text.

    Raises:
        ConfigError: There is no file, or no reader of the extension; or a reader cannot be imported.
    """
    if not path.is_file():
        raise ConfigError(f"There is no file {path.name!r} to attach; correct the path.")
    suffixes = [suffix.lower().removeprefix(".") for suffix in path.suffixes]
    extension = suffixes[-2] if suffixes[-1:] == ["gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]
    found = {entry.name: entry for entry in entry_points(group=READER_GROUP)}
    if extension in _READERS:
        return _READERS[extension]
    if extension not in found:
        known = ", ".join(f".{name}" for name in sorted({*_READERS, *found}))
        raise ConfigError(f"Tables are read from {known}, got .{extension}; convert the file.")
    try:
        reader: TableReader = found[extension].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The reader of .{extension} cannot be imported ({type(error).__name__})."
        ) from error
    return reader


def _open_text(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def read_csv(path: Path) -> Iterator[Batch]:
    """Yield the columns of a CSV; its separator is the most frequent of ``, ; |`` and tab in the header."""
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    try:
        with _open_text(path) as file:
            header = file.readline()
            separator = max(_SEPARATORS, key=header.count)
            names = next(csv.reader([header], delimiter=separator), [])
            _check_header(names)
            rows, first = csv.reader(file, delimiter=separator), 2
            while batch := list(itertools.islice(rows, _ROWS)):
                yield _columns(names, [row for row in batch if row], first)
                first += len(batch)
    except csv.Error as error:
        raise ConfigError(f"{path.name} is no CSV that can be read: {error}.") from None
    except (UnicodeDecodeError, EOFError, OSError) as error:
        raise _unreadable(path, error) from None


def _check_header(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise ConfigError(
            "A CSV begins with a line of the names of its columns, separated by commas, semicolons, tabs or "
            "vertical bars; this one has a single name or none."
        )
    doubled = sorted({name for name in names if name and names.count(name) > 1})
    if doubled:
        raise ConfigError(f"The header of the CSV names a column twice ({doubled[0]!r}); rename one.")


def _columns(names: Sequence[str], rows: list[list[str]], first: int) -> Batch:
    try:
        columns = list(zip(*rows, strict=True))
    except ValueError:
        columns = []
    if rows and len(columns) != len(names):
        number = next(place for place, row in enumerate(rows) if len(row) != len(names))
        raise ConfigError(
            f"Row {first + number} of the CSV has {len(rows[number])} values instead of {len(names)}; quote "
            "values that contain the separator."
        )
    # A column without a name is the row number that some writers add.
    return {name: column for name, column in zip(names, columns, strict=False) if name}


def read_json_lines(path: Path) -> Iterator[Batch]:
    """Yield the columns of a file with one JSON object per line."""
    try:
        with _open_text(path) as file:
            lines = enumerate(file, start=1)
            while batch := list(itertools.islice(lines, _ROWS)):
                rows = [_parse(line, number) for number, line in batch if line.strip()]
                names = dict.fromkeys(name for row in rows for name in row)
                yield {name: [row.get(name) for row in rows] for name in names}
    except (UnicodeDecodeError, EOFError, OSError) as error:
        raise _unreadable(path, error) from None


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ConfigError(f"Line {number} of the file is no JSON object; write one object per line.")
    return row


def read_parquet(path: Path) -> Iterator[Batch]:
    """Yield the columns of a Parquet file."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("Reading Parquet needs pyarrow; pip install 'shardflow[pack]'.") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield {
                    name: _values(column)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _values(column: Any) -> Values:
    """Return a column as an array where it is one of numbers without missing values, else as a list."""
    import pyarrow as pa

    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if is_number and not column.null_count:
        found: Values = column.to_numpy(zero_copy_only=False)
        return found
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and not column.null_count and len(column):
        flat = column.flatten()
        if not flat.null_count and pa.types.is_floating(flat.type) and len(flat) % len(column) == 0:
            lengths = set(column.value_lengths().to_pylist())
            if len(lengths) == 1:
                lists: Values = flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)
                return lists
    found_list: list[Any] = column.to_pylist()
    return found_list


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path.name} cannot be read ({os_reason(error)}); is it whole, and UTF-8?")


_READERS: Final[Mapping[str, TableReader]] = {
    "csv": read_csv,
    "tsv": read_csv,
    "json": read_json_lines,
    "jsonl": read_json_lines,
    "ndjson": read_json_lines,
    "parquet": read_parquet,
}
