"""Tables of a layout: CSV or Parquet, read row by row, by roles instead of column names."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Row", "read_table"]

_MAX_FIELD_BYTES: Final = 1 << 24
_BATCH_ROWS: Final = 1 << 14


class Row(NamedTuple):
    """One row of a table. Holds identifiers and text; its ``repr`` shows none."""

    place: int
    """Line where the row begins (CSV), or number of the row (Parquet); from 1."""
    values: dict[str, str] | None
    """Role to text without outer spaces, ``""`` where it is empty or no such column is there; None where the
    row has another number of columns than the table."""

    def __repr__(self) -> str:
        return f"Row(place={self.place})"


def read_table(
    path: Path, what: str, columns: Mapping[str, str], required: Iterable[str] = ()
) -> Iterator[Row]:
    """Read a table.

    Args:
        path: ``.csv``, ``.csv.gz`` or ``.parquet``.
        what: What errors call the table.
        columns: Role to name of the column; case and outer spaces do not count.
        required: Roles whose column must be there; others are empty without it.

    Raises:
        ConfigError: The table is missing, damaged, or lacks a required column.
    """
    try:
        if path.suffix.lower() == ".parquet":
            yield from _read_parquet(path, what, columns, required)
        else:
            yield from _read_csv(path, what, columns, required)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{what} must be a readable table, got {type(error).__name__}; correct its path or the file."
        ) from None


def _read_csv(path: Path, what: str, columns: Mapping[str, str], required: Iterable[str]) -> Iterator[Row]:
    csv.field_size_limit(_MAX_FIELD_BYTES)
    with _open(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(text, strict=True)
        try:
            header = next(rows, [])
            found = _find(header, what, columns, required)
            place = rows.line_num + 1
            for row in rows:
                if row:
                    whole = len(row) == len(header)
                    values = (
                        {role: row[at].strip() if at is not None else "" for role, at in found.items()}
                        if whole
                        else None
                    )
                    yield Row(place, values)
                place = rows.line_num + 1
        except csv.Error:
            raise ConfigError(
                f"{what} must be well-formed CSV, got a quote or field without end (line {rows.line_num}); "
                "repair the table."
            ) from None


def _read_parquet(
    path: Path, what: str, columns: Mapping[str, str], required: Iterable[str]
) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            found = _find(names, what, columns, required)
            wanted = sorted({names[at] for at in found.values() if at is not None})
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                for values in batch.to_pylist():
                    place += 1
                    yield Row(
                        place,
                        {role: "" if at is None else _text(values[names[at]]) for role, at in found.items()},
                    )
    except pa.ArrowException as error:
        raise ConfigError(
            f"{what} must be a readable Parquet table, got {type(error).__name__}; repair the table."
        ) from None


def _text(value: object) -> str:
    # A column of integers with gaps comes as floats: 17.0 is the study 17.
    if isinstance(value, float):
        return "" if value != value else f"{value:.0f}" if value.is_integer() else repr(value)
    return "" if value is None else str(value).strip()


def _find(
    header: Sequence[str], what: str, columns: Mapping[str, str], required: Iterable[str]
) -> dict[str, int | None]:
    names = [name.strip().casefold() for name in header]
    for role in required:
        count = names.count(columns[role].casefold())
        if count != 1:
            raise ConfigError(
                f"{what} must have one column {columns[role]!r} ({role}), got {count}; correct the table, or "
                "name the column in the settings of the layout."
            )
    wanted = {role: name.casefold() for role, name in columns.items()}
    return {role: names.index(name) if name in names else None for role, name in wanted.items()}


def _open(path: Path) -> BinaryIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value] # a GzipFile reads as one
    return path.open("rb")
