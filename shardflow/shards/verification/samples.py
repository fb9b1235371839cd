"""Check the samples table against the manifest and the indexes: it holds nothing that they do not say too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.shards.foreign.images import IMAGE_KINDS
from shardflow.shards.index import ShardIndex
from shardflow.shards.keys import parse_slice_field
from shardflow.shards.manifest import Manifest
from shardflow.shards.samples import SamplesTable
from shardflow.shards.tar import BLOCK_NUM_BYTES

__all__ = ["SamplesChecker", "SamplesFinding"]


@dataclass(frozen=True, order=True, slots=True)
class SamplesFinding:
    """A wrong row of the samples table, its column, and the problem; row -1 stands for the table."""

    row: int
    column: str
    problem: str


class SamplesChecker:
    """Compares one samples table with the manifest it belongs to.

    Args:
        manifest: The manifest that names the table.
        samples: The table, whole.

    Attributes:
        samples: The table.
        shard_numbers: Position of each shard in the manifest, by the path of its tar.

    Raises:
        FormatError: A column is missing.
    """

    def __init__(self, manifest: Manifest, samples: SamplesTable) -> None:
        self.manifest = manifest
        self.shard_numbers = {shard.path: number for number, shard in enumerate(manifest.shards)}
        self.samples = samples
        self._shards = samples.column("shard").astype(np.int64)
        self._order = np.argsort(self._shards, kind="stable")
        bounds = np.arange(len(manifest.shards) + 1)
        self._starts = np.searchsorted(self._shards[self._order], bounds)

    def find_own_damage(self) -> SamplesFinding | None:
        """Compare splits and shard numbers with the manifest, and keys with each other."""
        stop = 0
        for name, rows in sorted(self.samples.splits.items()):
            if rows.start != stop:
                return SamplesFinding(-1, "splits", f"split {name} begins at {rows.start} instead of {stop}")
            stop = rows.stop
            numbers = {i for i, shard in enumerate(self.manifest.shards) if shard.split == name}
            wrong = np.flatnonzero(~np.isin(self._shards[rows.start : rows.stop], sorted(numbers)))
            if len(wrong):
                row = rows.start + int(wrong[0])
                return SamplesFinding(row, "shard", f"a shard that is not of split {name}")
        if stop != len(self._shards):
            return SamplesFinding(-1, "splits", f"splits of {stop} rows instead of {len(self._shards)}")
        keys = self.samples.column("sample_key")
        order = np.argsort(keys, kind="stable")
        again = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        if len(again):
            row = int(order[1:][again].min())
            return SamplesFinding(row, "sample_key", "a key that an earlier row has")
        return None

    def find_shard_damage(self, shard: int, index: ShardIndex) -> SamplesFinding | None:
        """Compare the rows of a shard with its index: keys, places, and the facts that field names tell."""
        rows = np.sort(self._order[self._starts[shard] : self._starts[shard + 1]])
        num_samples = index.num_samples - self.manifest.shards[shard].num_removed
        if len(rows) != num_samples:
            problem = f"{len(rows)} rows of {index.shard} instead of {num_samples}"
            return SamplesFinding(-1, "shard", problem)
        places: Any = slice(None)
        if num_samples != index.num_samples:
            places = self.samples.gather("row_in_shard", rows).astype(np.int64)
            if (np.diff(places) <= 0).any() or (len(places) and places[-1] >= index.num_samples):
                problem = f"rows of {index.shard} that do not ascend, or that it does not have"
                return SamplesFinding(-1, "row_in_shard", problem)
        findings = []
        for column, all_expected in _expected_columns(index):
            expected = all_expected[places]
            found = self.samples.gather(column, rows)
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                first = int(wrong[0])
                values = f"{_show(found[first])} instead of {_show(expected[first])}"
                findings.append(SamplesFinding(int(rows[first]), column, f"{values} ({index.shard})"))
        return min(findings, default=None)


def _show(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(int(value))


def _expected_columns(index: ShardIndex) -> Iterator[tuple[str, NDArray[Any]]]:
    """What the samples table must hold for the samples of a shard, in their order."""
    first = index.first_field.astype(np.int64)
    starts = first[:-1]
    header_offsets = index.field_offsets - np.uint64(BLOCK_NUM_BYTES)
    padded = -(-index.field_num_bytes.astype(np.int64) // BLOCK_NUM_BYTES) * BLOCK_NUM_BYTES
    # In our own shards the members of a sample follow each other, so the sum is where the last one ends.
    sizes = np.add.reduceat(padded + BLOCK_NUM_BYTES, starts) if len(starts) else np.zeros(0, np.int64)
    yield "sample_key", index.sample_keys
    yield "row_in_shard", np.arange(index.num_samples)
    yield "offset_bytes", header_offsets[starts]
    yield "num_bytes", sizes

    samples = np.repeat(np.arange(index.num_samples), np.diff(first))
    is_report = np.array([name == index.text_field for name in index.field_names], bool)[index.field_name_ids]
    text_bytes = np.zeros(index.num_samples, np.int64)
    text_bytes[samples[is_report]] = index.field_num_bytes[is_report]
    yield "text_bytes", text_bytes

    if index.is_foreign:
        is_image = np.array([name.rpartition(".")[2] in IMAGE_KINDS for name in index.field_names], bool)
        num_images = np.bincount(samples[is_image[index.field_name_ids]], minlength=index.num_samples)
        yield "num_series", np.minimum(num_images, 1)
        yield "num_slices", num_images
        return
    parsed = [parse_slice_field(name) for name in index.field_names]
    series = np.array([part.series if part else -1 for part in parsed], np.int64)[index.field_name_ids]
    slices = np.array([part.index if part else -1 for part in parsed], np.int64)[index.field_name_ids]
    is_slice = series >= 0
    triples = np.stack([samples, series, slices], axis=1)[is_slice]
    for column, parts in (("num_series", triples[:, :2]), ("num_slices", triples)):
        owners = np.unique(parts, axis=0)[:, 0]
        yield column, np.bincount(owners, minlength=index.num_samples)
