"""Rows of Parquet files: some row groups at a time, only the columns that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shardflow.corpora.lines import DamagedFileError
from shardflow.errors import StorageError

__all__ = ["parquet_rows", "row_groups"]

_BATCH_ROWS: Final = 256


def row_groups(path: Path) -> list[int] | None:
    """Return the size of each row group, in bytes without compression; None where there is no Parquet.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        file = _open(path)
    except DamagedFileError:
        return None
    with file:
        metadata = file.metadata
        return [
            max(int(metadata.row_group(number).total_byte_size), 0)
            for number in range(metadata.num_row_groups)
        ]


def parquet_rows(path: Path, groups: range, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with their place in the file, counted from 0.

    Args:
        path: The file.
        groups: Row groups to read.
        columns: Top-level columns to read; those that the file does not have are left out of the rows.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is no Parquet, or damaged; all rows before came.
    """
    import pyarrow as pa

    with _open(path) as file:
        try:
            metadata = file.metadata
            row = sum(metadata.row_group(number).num_rows for number in range(groups.start))
            names = [name for name in file.schema_arrow.names if name in set(columns)]
            # One after another: a reader of several looks ahead, and would lose those before a damaged one.
            for group in groups:
                for batch in file.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
                ):
                    for fields in _rows(names, batch):
                        yield row, fields
                        row += 1
        except pa.ArrowMemoryError:
            raise MemoryError from None
        except (pa.ArrowException, OSError, ValueError, OverflowError):
            raise DamagedFileError from None


def _rows(names: Sequence[str], batch: Any) -> Iterator[dict[str, Any]]:
    values = [column.to_pylist() for column in batch.columns]
    for cells in zip(*values, strict=True) if values else ((),) * batch.num_rows:
        yield dict(zip(names, cells, strict=True))


def _open(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with path.open("rb") as probe:
            probe.read(1)
    except OSError as error:
        raise StorageError(
            f"an input file must be readable, got {type(error).__name__} {error.errno}; check the file "
            "system, and run the job again."
        ) from None
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    except pa.ArrowMemoryError:
        raise MemoryError from None
    except (pa.ArrowException, OSError, ValueError):
        raise DamagedFileError from None
