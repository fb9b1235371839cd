"""``shardflow columns``: the columns that expressions, fields and weights may name, and their values."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from shardflow.cli.common import add_dataset, add_json, open_dataset, show_lines, show_table, write_json
from shardflow.errors import ConfigError
from shardflow.logs import counted

if TYPE_CHECKING:
    from shardflow.format import Dataset
    from shardflow.format.facts.columns import ColumnInfo, Columns
    from shardflow.format.tables import ColumnValues

DESCRIPTION = """\
Lists the columns of DATASET: facts of studies (facts.*) and of series (series.*), and those of attached
tables (TABLE.COLUMN), each with its type, what has a value of it, and the share of missing values. With NAME
the values of one: each with its count, or the range of numbers that are many. Values are those of all splits.

--where of plan, bench and info, and where= of a loader, select by these names.
"""
EXAMPLES = """\
examples:
  shardflow columns my-dataset
  shardflow columns my-dataset facts.modality
  shardflow columns my-dataset series.role --json
"""
_ROWS_AT_ONCE: Final = 1 << 20
_MAX_VALUES: Final = 50
"""Distinct numbers up to which each is listed; names are all listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow columns``."""
    add_dataset(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="one column, to see its values")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.format.facts.columns import open_columns

    dataset = open_dataset(arguments.dataset)
    columns = open_columns(dataset)
    if arguments.name is not None:
        _show_values(values_of(dataset, columns, arguments.name), as_json=arguments.json)
        return 0
    found, unreadable = [], set()
    for info in columns.values():
        try:
            found.append(describe(dataset, columns, info))
        except ConfigError as error:  # its table is missing
            unreadable.add(error.message)
    if arguments.json:
        write_json({"columns": found, "notes": sorted(unreadable)})
        return 0
    empty = [one["name"] for one in found if one["missing"] == one["rows"] and _is_optional(one["name"])]
    if empty:
        found = [one for one in found if one["name"] not in empty]
        unreadable.add(f"no series has a value of {', '.join(empty)}")
    show_table(
        f"{counted(len(found), 'column')}",
        ("", "type", "of each", "missing"),
        [(one["name"], one["type"], one["unit"], f"{one['missing_share']:.1%}") for one in found],
    )
    show_lines([f"note: {note}" for note in sorted(unreadable)])
    return 0


def _is_optional(name: str) -> bool:
    """Return whether a table stores a column only if a series has a value of it."""
    from shardflow.format.facts.columns import SERIES_PREFIX
    from shardflow.format.facts.series import OPTIONAL

    return name.startswith(SERIES_PREFIX) and name.removeprefix(SERIES_PREFIX) in OPTIONAL


def describe(dataset: Dataset, columns: Columns, info: ColumnInfo) -> dict[str, Any]:
    """Return name, type, unit and missing values of a column.

    Raises:
        ConfigError: Its table is missing.
    """
    num_rows = num_missing = 0
    for block in _blocks(dataset, columns, info):
        num_rows += len(block.values)
        num_missing += 0 if block.is_missing is None else int(block.is_missing.sum())
    return {
        "name": info.name,
        "type": info.kind,
        "unit": info.unit,
        "rows": num_rows,
        "missing": num_missing,
        "missing_share": num_missing / max(num_rows, 1),
    }


def values_of(dataset: Dataset, columns: Columns, name: str) -> dict[str, Any]:
    """Return `describe` of a column with its values: ``counts`` by value, or ``range`` of many numbers.

    Raises:
        ConfigError: There is no such column, or its table is missing.
    """
    import difflib

    import numpy as np

    if name not in columns:
        near = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "shardflow columns DATASET lists them."
        raise ConfigError(f"There is no column {name!r}; {hint}")
    info = columns[name]
    counts: Counter[Any] = Counter()
    low, high, total = float("inf"), float("-inf"), 0.0
    for block in _blocks(dataset, columns, info):
        if info.kind in ("string", "floats"):
            continue  # texts and vectors are no values to list
        known = block.values if block.is_missing is None else block.values[~block.is_missing]
        if not len(known):
            continue
        if info.kind in ("int", "float"):
            low, high = min(low, float(known.min())), max(high, float(known.max()))
            total += float(known.sum(dtype="float64"))
        if len(counts) <= _MAX_VALUES or info.kind in ("bool", "category"):
            values, numbers = np.unique(known, return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    found = describe(dataset, columns, info)
    num_known = found["rows"] - found["missing"]
    if info.kind == "category":
        found["counts"] = {info.names[code]: number for code, number in sorted(counts.items())}
    elif info.kind == "bool" or (info.kind in ("int", "float") and len(counts) <= _MAX_VALUES):
        found["counts"] = {str(value): number for value, number in sorted(counts.items())}
    elif info.kind in ("int", "float"):
        found["range"] = {"min": low, "mean": total / max(num_known, 1), "max": high}
    return found


def _blocks(dataset: Dataset, columns: Columns, info: ColumnInfo) -> Iterator[ColumnValues]:
    """Yield the values of a column, some rows of its own unit at a time."""
    import numpy as np

    from shardflow.format.facts.columns import num_unit_rows

    num_rows = num_unit_rows(dataset, info.unit)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        yield columns.stored(info.name, np.arange(start, min(start + _ROWS_AT_ONCE, num_rows)))


def _show_values(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(found)
        return
    missing = f"{found['missing']:,} of {found['rows']:,} missing ({found['missing_share']:.1%})"
    show_lines([f"{found['name']}: {found['type']}, one value for each {found['unit']}; {missing}"])
    if "counts" in found:
        rows = (
            sorted(found["counts"].items(), key=lambda item: -item[1])
            if found["type"] == "category"
            else (found["counts"].items())
        )
        show_table("values", ("", found["unit"]), [(value, f"{count:,}") for value, count in rows])
    if "range" in found:
        show_lines([", ".join(f"{name} {value:g}" for name, value in found["range"].items())])
