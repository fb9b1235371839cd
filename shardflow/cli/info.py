"""The command ``shardflow info``: contents of a dataset, by its manifest, table and some indexes."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_where,
    counted,
    human_bytes,
    open_dataset,
    positive_number,
    show_facts,
    show_table,
    told_languages,
    write_json,
)
from shardflow.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardflow.format import Dataset
    from shardflow.loading.selection import SplitRows

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
    """Collect what is known of a dataset, as a JSON object; sizes in bytes.

    Args:
        dataset: The dataset.
        where: Expression that selects samples of all splits; the facts are those of these samples.
        keys: File of keys that selects samples.

    Raises:
        ConfigError: The expression or the file cannot be read, or no sample is left.
    """
    import numpy as np

    from shardflow.format.keys import REPORT_COUNTS

    manifest, samples = dataset.manifest, dataset.samples
    files = manifest.files()
    chosen = None if where is None and keys is None else _chosen(dataset, where, keys)
    rows = slice(None) if chosen is None else np.fromiter(chosen.rows, np.int64)
    columns = {name: samples.column(name)[rows] for name in ("modality", *_COUNTED, *_MEASURED)}
    modalities = np.bincount(columns["modality"], minlength=len(samples.modalities))
    return {
        "dataset_id": dataset.dataset_id,
        "format_version": dataset.manifest.format_version,
        "manifest_version": dataset.manifest_version,
        "key_id": manifest.key_id,
        "created_with": dict(manifest.created_with),
        "samples": samples.num_samples,
        "shards": len(manifest.shards),
        "files": len(files) + 1,
        "bytes": sum(file.num_bytes for file in files) + len(manifest.encode()),
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
                "bytes": sum(shard.num_bytes for shard in manifest.shards if shard.split == split),
            }
            for split, counts in manifest.splits.items()
        },
        **({} if chosen is None else {"selected": _selected(dataset, rows, chosen.num_missing)}),
        "fields": _fields(dataset),
        "facts": {
            "modality": dict(zip(samples.modalities, modalities.tolist(), strict=True)),
            **{name: _spread(columns[name]) | _total(columns[name]) for name in _COUNTED},
            **{name: _spread(columns[name]) for name in _MEASURED},
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


def _chosen(dataset: Dataset, where: str | None, keys: str | None) -> SplitRows:
    # The loader takes a moment to import, and only a selection needs it.
    from shardflow.loading.selection import choose_rows

    return choose_rows(dataset, "+".join(name for name, span in dataset.splits.items() if span), where, keys)


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

    from shardflow.fields.catalog import Limits, TableSelection
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


def _fields(dataset: Dataset) -> dict[str, Any]:
    """Count the fields, and their kinds in at most `_MAX_INDEXES_READ` shards."""
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
        "total": sum(shard.num_fields for shard in dataset.manifest.shards),
        "kinds": dict(sorted(kinds.items())),
        "shards_counted": len(read) if num_shards else 0,
    }


def _kind(name: str) -> str:
    """Return what fields of one kind have in common: their numbers become stars."""
    return _NUMBER.sub(r"\1*", name)


def _spread(values: np.ndarray[Any, Any]) -> dict[str, int]:
    import numpy as np

    if not len(values):
        return {"min": 0, "median": 0, "max": 0}
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


def _total(values: np.ndarray[Any, Any]) -> dict[str, int]:
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
