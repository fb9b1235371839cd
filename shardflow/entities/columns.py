"""Rows of entities as columns: those of one shard are a part, and all parts together the table of a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.entities.rows import EntityRow
from shardflow.shards.canonical import Json
from shardflow.shards.entity_dataset import ASSERTIONS, LATERALITIES, TABLE_KIND, entity_key
from shardflow.shards.entity_manifest import EntityRules
from shardflow.shards.keys import check_sample_key
from shardflow.shards.table import Table, encode_table

__all__ = ["LocatedRow", "encode_part", "encode_view", "open_part"]

_PART_KIND = "entities-part"
_VERSION = 1
_CODED = {"label": "labels", "anatomy": "anatomies", "modality": "modalities"}
"""Columns whose names are known when all parts are there, and where the table lists them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedRow:
    """A row, and the study that it points into."""

    row: EntityRow
    study: int
    """Row of the samples table."""
    study_key: str
    shard: int
    row_in_shard: int
    num_bytes: int
    """Of the fields that are read for it."""


def encode_part(rows: Sequence[LocatedRow], *, num_aligned: int, job: Mapping[str, Json]) -> bytes:
    """Encode the rows of a shard.

    Args:
        rows: In the order of the samples table.
        num_aligned: Studies of the shard that have an alignment.
        job: What the part was made for: another job's is not taken.
    """
    found = [located.row for located in rows]
    names = {
        "labels": sorted({row.label for row in found}),
        "anatomies": sorted({row.anatomy for row in found}),
        "modalities": sorted({row.modality for row in found}),
    }
    keys = [entity_key(one.study_key, one.row.entity, one.row.series) for one in rows]
    sizes = np.array([one.num_bytes for one in rows], "<u8")
    lengths = np.array([len(row.slices) for row in found], "<u8")
    columns: dict[str, NDArray[Any]] = {
        "sample_key": np.array([check_sample_key(key).encode("ascii") for key in keys], "S"),
        "shard": np.array([one.shard for one in rows], "<u4"),
        "row_in_shard": np.array([one.row_in_shard for one in rows], "<u4"),
        # Not where the study begins: what the rows of the shard read, one behind another.
        "offset_bytes": np.cumsum(sizes, dtype="<u8") - sizes,
        "num_bytes": sizes,
        "text_bytes": _numbers([row.text[1] - row.text[0] for row in found]),
        "num_series": _numbers([1] * len(found)),
        "num_slices": lengths.astype("<u4"),
        "rows": _numbers([row.rows for row in found]),
        "columns": _numbers([row.columns for row in found]),
        "modality": _codes([row.modality for row in found], names["modalities"]).astype("u1"),
        "study": _numbers([one.study for one in rows]),
        "entity": _numbers([row.entity for row in found]),
        "series": _numbers([row.series for row in found]),
        "centre": _numbers([row.centre for row in found]),
        "text_start": _numbers([row.text[0] for row in found]),
        "span_start": _numbers([row.span[0] for row in found]),
        "span_bytes": _numbers([row.span[1] - row.span[0] for row in found]),
        "label": _codes([row.label for row in found], names["labels"]),
        "anatomy": _codes([row.anatomy for row in found], names["anatomies"]),
        "assertion": _codes([row.assertion for row in found], ASSERTIONS).astype("u1"),
        "laterality": _codes([row.laterality for row in found], LATERALITIES).astype("u1"),
        "confidence": np.array([row.confidence for row in found], "<f8"),
        "first_slice": np.concatenate(([0], np.cumsum(lengths))).astype("<u8"),
        "slices": _numbers([index for row in found for index in row.slices]),
        "slice_weights": np.array([weight for row in found for weight in row.weights], "<f4"),
    }
    meta: dict[str, Json] = {"kind": _PART_KIND, "format_version": _VERSION, "num_aligned": num_aligned}
    return encode_table(columns, {**meta, "job": dict(job), **{name: list(of) for name, of in names.items()}})


def open_part(data: bytes, *, name: str, job: Mapping[str, Json]) -> Table | None:
    """Return a part with all of its bytes checked; None for that of another job.

    Raises:
        FormatError: It is no part.
        ChecksumError: It is damaged.
    """
    table = Table(memoryview(data), name=name)
    table.expect_kind(_PART_KIND, _VERSION)
    table.verify()
    return table if table.meta.get("job") == dict(job) else None


def encode_view(
    parts: Sequence[Table], *, dataset_id: str, rules: EntityRules, splits: Mapping[str, range]
) -> bytes:
    """Encode the table of a view.

    Args:
        parts: Of all shards, in the order of the samples table; one at least.
        dataset_id: Of the dataset.
        rules: Of the view.
        splits: The rows of each split in the samples table.
    """
    names: dict[str, list[str]] = {
        key: sorted({name for part in parts for name in part.meta[key]}) for key in _CODED.values()
    }
    # A finding without a place has number 0.
    names["anatomies"] = ["", *(name for name in names["anatomies"] if name)]
    columns = {name: _joined(parts, name, names) for name in parts[0].column_names}
    study = columns["study"]
    bounds = {
        split: np.searchsorted(study, [rows.start, rows.stop]).tolist()
        for split, rows in sorted(splits.items())
    }
    meta: dict[str, Json] = {
        "kind": TABLE_KIND,
        "format_version": _VERSION,
        "dataset_id": dataset_id,
        "rules": {**asdict(rules), "threshold": repr(float(rules.threshold))},
        "splits": {split: span for split, span in bounds.items() if span[0] < span[1]},
        **{key: list(values) for key, values in names.items()},
    }
    return encode_table(columns, meta)


def _joined(parts: Sequence[Table], name: str, names: Mapping[str, list[str]]) -> NDArray[Any]:
    """Return a column of all parts."""
    found = [part.column(name) for part in parts]
    if name == "first_slice":
        before = np.cumsum([0, *(int(column[-1]) for column in found)])
        shifted = [column[:-1] + first for column, first in zip(found, before.tolist(), strict=False)]
        return np.concatenate([*shifted, before[-1:]]).astype("<u8")
    if name in _CODED:
        known = {value: number for number, value in enumerate(names[_CODED[name]])}
        found = [
            np.array([known[value] for value in part.meta[_CODED[name]]] or [0], column.dtype)[column]
            for part, column in zip(parts, found, strict=True)
        ]
    return np.concatenate(found)


def _numbers(values: Sequence[int]) -> NDArray[np.uint32]:
    return np.array(values, "<u4")


def _codes(values: Sequence[str], names: Sequence[str]) -> NDArray[np.uint32]:
    numbers = {name: number for number, name in enumerate(names)}
    return _numbers([numbers[value] for value in values])
