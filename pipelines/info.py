"""``shardflow info``: what a dataset holds, from its manifest, its samples table and some of its indexes."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np

from pipelines.surface import (
    add_dataset,
    add_json,
    human_bytes,
    open_dataset,
    show_facts,
    show_table,
    write_json,
)
from shardflow.shards import Dataset
from shardflow.shards.keys import parse_slice_field
from shardflow.shards.manifest import FORMAT_VERSION

__all__ = ["SUMMARY", "add_arguments", "describe", "run"]

SUMMARY = "show what a dataset holds"
DESCRIPTION = """\
Samples, shards, bytes, splits, identity, fields and facts of a dataset. Nothing of a sample is read; to check
its bytes use: shardflow verify DATASET
"""
# Indexes grow with the number of fields; so many are read to count the kinds of fields, evenly spread.
_MAX_INDEXES_READ = 64
_COUNTED = ("num_slices", "num_series", "text_bytes")
_MEASURED = ("rows", "columns")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow info``."""
    parser.description = DESCRIPTION
    add_dataset(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    facts = describe(open_dataset(arguments.dataset))
    if arguments.json:
        write_json(facts)
    else:
        _show(facts)
    return 0


def describe(dataset: Dataset) -> dict[str, Any]:
    """Collect what is known of a dataset, as a JSON object; sizes in bytes."""
    manifest, samples = dataset.manifest, dataset.samples
    files = manifest.files()
    modalities = np.bincount(samples.column("modality"), minlength=len(samples.modalities))
    return {
        "dataset_id": dataset.dataset_id,
        "format_version": FORMAT_VERSION,
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
        "splits": {
            split: {
                "samples": counts["num_samples"],
                "shards": counts["num_shards"],
                "bytes": sum(shard.num_bytes for shard in manifest.shards if shard.split == split),
            }
            for split, counts in manifest.splits.items()
        },
        "fields": _fields(dataset),
        "facts": {
            "modality": dict(zip(samples.modalities, modalities.tolist(), strict=True)),
            **{name: _spread(samples.column(name)) | _total(samples.column(name)) for name in _COUNTED},
            **{name: _spread(samples.column(name)) for name in _MEASURED},
        },
    }


def _fields(dataset: Dataset) -> dict[str, Any]:
    """Count the fields, and their kinds in at most `_MAX_INDEXES_READ` shards."""
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
    field = parse_slice_field(name)
    return f"s*.i*.{field.codec}" if field else name


def _spread(values: np.ndarray[Any, Any]) -> dict[str, int]:
    if not len(values):
        return {"min": 0, "median": 0, "max": 0}
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


def _total(values: np.ndarray[Any, Any]) -> dict[str, int]:
    return {"total": int(values.sum(dtype=np.int64))}


def _show(facts: dict[str, Any]) -> None:
    fields = facts["fields"]
    inputs = ", ".join(f"{count:,} {outcome}" for outcome, count in facts["inputs"].items())
    show_facts(
        [
            ("dataset_id", facts["dataset_id"]),
            ("version", f"{facts['manifest_version']} (format {facts['format_version']})"),
            ("samples", f"{facts['samples']:,} in {facts['shards']:,} shards"),
            ("size", f"{human_bytes(facts['bytes'])} in {facts['files']:,} files"),
            ("inputs", inputs),
        ]
    )
    show_table(
        "splits",
        ("", "samples", "shards", "size"),
        [
            (split, f"{part['samples']:,}", f"{part['shards']:,}", human_bytes(part["bytes"]))
            for split, part in facts["splits"].items()
        ],
    )
    counted = fields["shards_counted"]
    where = "" if counted == facts["shards"] else f" (kinds counted in {counted} shards)"
    show_table(
        f"{fields['total']:,} fields{where}",
        ("", "fields"),
        [(kind, f"{count:,}") for kind, count in fields["kinds"].items()],
    )
    spreads = {name: spread for name, spread in facts["facts"].items() if name != "modality"}
    show_table(
        "facts of a sample",
        ("", "min", "median", "max"),
        [(name, spread["min"], spread["median"], spread["max"]) for name, spread in spreads.items()],
    )
    show_table(
        "modality of the primary series",
        ("", "samples"),
        [(name or "(none)", f"{count:,}") for name, count in facts["facts"]["modality"].items()],
    )
