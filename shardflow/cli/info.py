"""Commands that show what a dataset holds: ``info``, ``stats`` of its voxels, and ``columns``."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_unit,
    add_where,
    choose_samples,
    open_dataset,
    positive_number,
    show_facts,
    show_lines,
    show_table,
    step_progress,
    told_languages,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.logs import counted, human_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardflow.format import Dataset
    from shardflow.format.facts.columns import ColumnInfo, Columns
    from shardflow.format.tables import ColumnValues

DESCRIPTION = """\
Samples, shards, bytes, splits, identity, fields and facts of a dataset, and its images by role where it has a
series table. Nothing of a sample is read; to check its bytes use: shardflow verify DATASET

With --where, also how many samples of each split it selects, and facts are those of these samples.
"""
EXAMPLES = """\
examples:
  shardflow info my-dataset
  shardflow info my-dataset --json
  shardflow info my-dataset --where "facts.modality == 'CT' and facts.num_slices >= 16"
"""
# Indexes grow with the number of fields; so many are read to count the kinds of fields, evenly spread.
_MAX_INDEXES_READ = 64
# What counts fields of one kind: s003.m000.i0045.b2nd, w000.g00.npy, document.000.txt.
_NUMBER = re.compile(r"(?<![^.])([simvwg]?)\d{2,8}(?=\.)", re.ASCII)
_ROWS_AT_ONCE = 1 << 18
_COUNTED = ("num_slices", "num_series", "text_bytes")
_MEASURED = ("rows", "columns")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow info``."""
    add_dataset(parser)
    parser.add_argument("--version", type=positive_number, metavar="N", help="version to show (the newest)")
    add_where(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    dataset = open_dataset(arguments.dataset, version=arguments.version)
    facts = describe(dataset, arguments.where, arguments.keys)
    if arguments.json:
        write_json(facts)
    else:
        _show(facts)
    return 0


def describe(dataset: Dataset, where: str | None = None, keys: str | None = None) -> dict[str, Any]:
    """Return the facts of a dataset as a JSON object; sizes in bytes.

    Args:
        dataset: The dataset.
        where: Expression that selects samples of all splits; the facts are those of these samples.
        keys: File of keys that selects samples.

    Raises:
        ConfigError: The expression or the file cannot be read, or no sample is left.
    """
    import numpy as np

    from shardflow.format.keys import REPORT_COUNTS
    from shardflow.format.manifest import manifest_path

    manifest, samples = dataset.manifest, dataset.samples
    chosen = None if where is None and keys is None else choose_samples(dataset, None, where, keys)
    rows = slice(None) if chosen is None else chosen[0]

    def column(name: str) -> NDArray[Any]:
        return samples.column(name)[rows]

    modalities = sum(
        (np.bincount(part, minlength=len(samples.modalities)) for part in _parts(column("modality"))),
        np.zeros(len(samples.modalities), np.int64),
    )
    num_fields, index_bytes = 0, 0
    split_bytes: Counter[str] = Counter()
    for shard in manifest.shards:  # one pass: there may be 10^5 of them
        num_fields += shard.num_fields
        index_bytes += shard.index.num_bytes
        split_bytes[shard.split] += shard.num_bytes
    others = manifest.other_files()
    own_bytes = dataset.store.size(manifest_path(dataset.manifest_version))
    return {
        "dataset_id": dataset.dataset_id,
        "format_version": dataset.manifest.format_version,
        "manifest_version": dataset.manifest_version,
        "key_id": manifest.key_id,
        "created_with": dict(manifest.created_with),
        "samples": samples.num_samples,
        "shards": len(manifest.shards),
        "files": 2 * len(manifest.shards) + len(others) + 1,
        "bytes": split_bytes.total() + index_bytes + own_bytes + sum(file.num_bytes for file in others),
        "inputs": {
            "packed": manifest.counts.packed,
            "skipped": manifest.counts.skipped,
            "quarantined": manifest.counts.quarantined,
        },
        "reports": manifest.extra.get(REPORT_COUNTS, {}),
        "splits": {
            split: {
                "samples": counts["num_samples"],
                "shards": counts["num_shards"],
                "bytes": split_bytes[split],
            }
            for split, counts in manifest.splits.items()
        },
        **({} if chosen is None else {"selected": _selected(dataset, *chosen)}),
        "fields": {"total": num_fields, **_kinds(dataset)},
        "facts": {
            "modality": dict(zip(samples.modalities, modalities.tolist(), strict=True)),
            **{name: _spread(column(name)) | _total(column(name)) for name in _COUNTED},
            **{name: _spread(column(name)) for name in _MEASURED},
        },
        "images_by_role": _images_by_role(dataset, rows),
        "tables": {
            name: {
                "number": place.manifest.number,
                "unit": place.manifest.unit,
                "columns": {column.name: column.kind for column in place.manifest.columns},
            }
            for name, place in dataset.tables.places.items()
        },
    }


def _selected(dataset: Dataset, rows: Any, num_missing: int) -> dict[str, Any]:
    return {
        "samples": len(rows),
        "left_out_for_missing_values": num_missing,
        "bytes": int(dataset.samples.column("num_bytes")[rows].sum(dtype="int64")),
        "splits": {
            split: int(((rows >= span.start) & (rows < span.stop)).sum())
            for split, span in dataset.splits.items()
        },
    }


def _images_by_role(dataset: Dataset, rows: NDArray[np.int64] | slice) -> dict[str, int] | None:
    """Count the images of some samples by role, the largest first; None without a series table."""
    import numpy as np

    from shardflow.fields.series_rows import Limits, TableSelection
    from shardflow.format.facts.series import open_series

    try:
        table, _ = open_series(dataset)
    except ConfigError:
        return None
    is_used = np.zeros(table.num_samples, bool)
    is_used[rows] = True
    images = TableSelection(table, None).images(Limits())
    counts = images.only(table, np.repeat(is_used, np.diff(table.first_series()))).count_roles(table)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _kinds(dataset: Dataset) -> dict[str, Any]:
    """Count the fields by kind in at most `_MAX_INDEXES_READ` shards."""
    import numpy as np

    num_shards = len(dataset.manifest.shards)
    read = sorted({number * num_shards // _MAX_INDEXES_READ for number in range(_MAX_INDEXES_READ)})
    kinds: Counter[str] = Counter()
    for shard in read if num_shards else []:
        index = dataset.shard_index(shard)
        counts = np.bincount(index.field_name_ids, minlength=len(index.field_names))
        for name, count in zip(index.field_names, counts.tolist(), strict=True):
            kinds[_kind(name)] += count
    return {
        "kinds": dict(sorted(kinds.items())),
        "shards_counted": len(read) if num_shards else 0,
    }


def _kind(name: str) -> str:
    """Return the common name of fields of one kind: numbers become asterisks."""
    return _NUMBER.sub(r"\1*", name)


def _parts(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Cut a column, so that what is computed of it stays in the processor's cache."""
    return (values[start : start + _ROWS_AT_ONCE] for start in range(0, len(values), _ROWS_AT_ONCE))


def _spread(values: NDArray[Any]) -> dict[str, int]:
    """Return least, middle and largest of unsigned numbers of at most 32 bits, in bounded memory."""
    if not len(values):
        return {"min": 0, "median": 0, "max": 0}
    least, most = int(values.min()), int(values.max())
    middle = _at_ranks(values, [(len(values) - 1) // 2, len(values) // 2], least, most)
    return {"min": least, "median": sum(middle) // 2, "max": most}


def _at_ranks(values: NDArray[Any], ranks: Sequence[int], least: int, most: int) -> list[int]:
    """Return the numbers at some places of the sorted values: by their high 16 bits, then by the others."""
    import numpy as np

    if least == most:
        return [least] * len(ranks)
    num_high = ((most - least) >> 16) + 1
    high = np.array([len(values)])
    if num_high > 1:
        counts = (np.bincount((part - least) >> 16, minlength=num_high) for part in _parts(values))
        high = sum(counts, np.zeros(num_high, np.int64))
    places = np.searchsorted(np.cumsum(high), ranks, side="right").tolist()
    found = []
    low: dict[int, NDArray[np.int64]] = {}
    for rank, place in zip(ranks, places, strict=True):
        if place not in low:
            low[place] = np.zeros(1 << 16, np.int64)
            for part in _parts(values):
                shifted = part - least
                here = shifted[shifted >> 16 == place] & 0xFFFF if num_high > 1 else shifted
                low[place] += np.bincount(here, minlength=1 << 16)
        inside = rank - int(high[:place].sum())
        found.append(
            least + (place << 16) + int(np.searchsorted(np.cumsum(low[place]), inside, side="right"))
        )
    return found


def _total(values: NDArray[Any]) -> dict[str, int]:
    return {"total": int(values.sum(dtype="int64"))}


def _show(facts: dict[str, Any]) -> None:
    fields = facts["fields"]
    inputs = ", ".join(f"{count:,} {outcome}" for outcome, count in facts["inputs"].items())
    show_facts(
        [
            ("dataset_id", facts["dataset_id"]),
            ("version", f"{facts['manifest_version']} (format {facts['format_version']})"),
            ("samples", f"{facts['samples']:,} in {counted(facts['shards'], 'shard')}"),
            ("size", f"{human_bytes(facts['bytes'])} in {counted(facts['files'], 'file')}"),
            ("inputs", inputs),
        ]
    )
    if facts["reports"]:
        show_facts([("reports", told_languages(facts["reports"]))])
    selected = facts.get("selected")
    if selected is not None:
        counts = ", ".join(f"{count:,} of {split}" for split, count in selected["splits"].items())
        missing = selected["left_out_for_missing_values"]
        lacking = f"; {missing:,} left out because a value is missing" if missing else ""
        size = human_bytes(selected["bytes"])
        show_facts([("selected", f"{selected['samples']:,} samples ({counts}), {size}{lacking}")])
    of = "" if selected is None else ", of those selected"
    show_table(
        "splits",
        ("", "samples", "shards", "size"),
        [
            (split, f"{part['samples']:,}", f"{part['shards']:,}", human_bytes(part["bytes"]))
            for split, part in facts["splits"].items()
        ],
    )
    of_shards = fields["shards_counted"]
    where = "" if of_shards == facts["shards"] else f" (kinds counted in {of_shards} shards)"
    show_table(
        f"{fields['total']:,} fields{where}",
        ("", "fields"),
        [(kind, f"{count:,}") for kind, count in fields["kinds"].items()],
    )
    spreads = {name: spread for name, spread in facts["facts"].items() if name != "modality"}
    show_table(
        f"facts of a sample{of}",
        ("", "min", "median", "max"),
        [(name, spread["min"], spread["median"], spread["max"]) for name, spread in spreads.items()],
    )
    show_table(
        f"modality of the primary series{of}",
        ("", "samples"),
        [(name or "(none)", f"{count:,}") for name, count in facts["facts"]["modality"].items()],
    )
    if facts["images_by_role"]:
        show_table(
            f"images by role{of}",
            ("", "images"),
            [(role, f"{count:,}") for role, count in facts["images_by_role"].items()],
        )
    if facts["tables"]:
        show_table(
            "attached tables",
            ("", "version", "a row per", "columns"),
            [
                (name, table["number"], table["unit"], len(table["columns"]))
                for name, table in facts["tables"].items()
            ],
        )


STATS_DESCRIPTION = """\
Reads a split of DATASET once, by the fields of a TOML file, and shows for each field of images, slices or
volumes: mean, standard deviation, range and percentiles of the pixels in their unit, by channel; the same of
the foreground, where a field of the type mask is like= that field; and the percentiles of spacings and shapes
of the selected series. They are what a normalization and a target spacing are chosen from.

Numbers are those of the training split, so that nothing of the others enters a training. Integers of at most
16 bits are counted exactly; of other numbers percentiles are right to 0.03 %. Memory does not grow with the
dataset, and the result depends neither on threads nor on machines. Resizing in the fields changes pixels; a
field without size= shows them as they are stored. Of a volume all stored slices count, whatever is cut of it.
"""
STATS_EXAMPLES = """\
examples:
  shardflow stats my-dataset --fields my-fields.toml
  shardflow stats my-dataset --fields my-fields.toml --where "facts.modality == 'CT'" -o fingerprint.json
  shardflow stats my-dataset --fields my-fields.toml --percentiles 1,50,99 --json
"""
_SERIES = {
    "slice_spacing_mm": "spacing of slices, mm",
    "row_spacing_mm": "spacing of rows, mm",
    "column_spacing_mm": "spacing of columns, mm",
    "num_slices": "slices",
    "rows": "rows",
    "columns": "columns",
}


def add_stats_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow stats``."""
    add_dataset(parser)
    parser.add_argument("--fields", metavar="FILE", required=True, help="TOML file of the fields of a loader")
    parser.add_argument("--split", metavar="SPLIT", default="train", help="split to read (train)")
    add_where(parser)
    add_unit(parser)
    parser.add_argument(
        "--percentiles",
        metavar="P,Q",
        default="0.5,5,25,50,75,95,99.5",
        help="percentiles, in percent (0.5,5,25,50,75,95,99.5)",
    )
    parser.add_argument("--threads", metavar="N", type=positive_number, help="threads (all processors)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the numbers as JSON too")
    add_json(parser)


def run_stats(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.fields.registry import read_fields
    from shardflow.loading import LoaderConfig, select
    from shardflow.loading.statistics import field_statistics
    from shardflow.storage.local import write_atomic

    try:
        percentiles = [float(one) for one in arguments.percentiles.split(",")]
    except ValueError:
        raise ConfigError(
            f"--percentiles are numbers with commas, such as 1,50,99, got {arguments.percentiles!r}."
        ) from None
    selection = select(
        open_dataset(arguments.dataset),
        arguments.split,
        unit=arguments.unit or "study",
        where=arguments.where,
        keys=arguments.keys,
    )
    config = None if arguments.threads is None else LoaderConfig(num_threads=arguments.threads)
    with step_progress("reading samples") as advance:
        found = field_statistics(
            selection,
            read_fields(arguments.fields),
            percentiles=percentiles,
            config=config,
            progress=advance,
        )
    found = {"split": selection.split, **found}
    if arguments.output is not None:
        write_atomic(arguments.output, [json.dumps(found, indent=1).encode() + b"\n"], replace=True)
    if arguments.json:
        write_json(found)
        return 0
    bad = f"; {found['num_bad']:,} could not be read" if found["num_bad"] else ""
    show_lines([f"{counted(found['num_samples'], 'sample')} of split {selection.split}{bad}"])
    for name, one in found["fields"].items():
        _show_stats(name, one)
    return 0


def _show_stats(name: str, found: Mapping[str, Any]) -> None:
    units = found.get("units", {})
    unit = ", ".join(units) if all(units) else ""
    parts = [("", found), *([("foreground", found["foreground"])] if "foreground" in found else [])]
    rows = [row for part, numbers in parts for row in _rows(part, numbers)]
    names = [f"{one} %" for one in found["channels"][0]["percentiles"]] if found["channels"] else []
    show_table(
        f"{name}{f' ({unit})' if unit else ''}, {counted(found['num_samples'], 'sample')}",
        ("", "pixels", "mean", "std", "min", "max", *names),
        rows,
    )
    notes = []
    if len(units) > 1:
        shares = ", ".join(f"{count:,} {unit or 'without'}" for unit, count in units.items())
        notes.append(f"note: series of several units are mixed ({shares}); select those of one with --where")
    if found["num_not_finite"]:
        notes.append(f"note: {found['num_not_finite']:,} pixels are not finite, and count nowhere")
    if "foreground" in found:
        with_mask = found["foreground"]["num_samples"]
        notes.append(f"foreground is that of {counted(with_mask, 'sample')} with a mask")
    show_lines(notes)
    if "series" in found:
        percents = list(next(iter(found["series"].values()))["percentiles"])
        show_table(
            f"{name}, {found['num_series']:,} series",
            ("", "missing", *(f"{one} %" for one in percents)),
            [
                (label, f"{one['num_missing']:,}", *map(_number, one["percentiles"].values()))
                for label, one in ((_SERIES[key], one) for key, one in found["series"].items())
            ],
        )


def _rows(part: str, numbers: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for channel, one in enumerate(numbers["channels"]):
        label = part or "all pixels"
        label += f", channel {channel}" if len(numbers["channels"]) > 1 else ""
        shown = [_number(one[key]) for key in ("mean", "std", "min", "max")]
        yield (label, f"{one['num_pixels']:,}", *shown, *map(_number, one["percentiles"].values()))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


COLUMNS_DESCRIPTION = """\
Lists the columns of DATASET: facts of studies (facts.*) and of series (series.*), and those of attached
tables (TABLE.COLUMN), each with its type, what has a value of it, and the share of missing values. With NAME
the values of one: each with its count, or the range of numbers that are many. Values are those of all splits.

--where of plan, bench and info, and where= of a loader, select by these names.
"""
COLUMNS_EXAMPLES = """\
examples:
  shardflow columns my-dataset
  shardflow columns my-dataset facts.modality
  shardflow columns my-dataset series.role --json
"""
_MAX_VALUES: Final = 50
"""Distinct numbers up to which each is listed; names are all listed."""


def add_columns_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow columns``."""
    add_dataset(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="one column, to see its values")
    add_json(parser)


def run_columns(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.format.facts.columns import open_columns

    dataset = open_dataset(arguments.dataset)
    columns = open_columns(dataset)
    if arguments.name is not None:
        _show_values(_values_of(dataset, columns, arguments.name), as_json=arguments.json)
        return 0
    found, unreadable = [], set()
    for info in columns.values():
        try:
            found.append(_describe_column(dataset, columns, info))
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


def _describe_column(dataset: Dataset, columns: Columns, info: ColumnInfo) -> dict[str, Any]:
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


def _values_of(dataset: Dataset, columns: Columns, name: str) -> dict[str, Any]:
    """Return the facts of a column with its values: ``counts`` by value, or ``range`` of many numbers.

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
    found = _describe_column(dataset, columns, info)
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
