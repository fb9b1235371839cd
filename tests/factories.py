"""Tiny real datasets for tests: generated slices and text, written through the shards API. NumPy only,
quick.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardflow.format.codecs import encode_array
from shardflow.format.dataset import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import (
    REPORT_FIELD,
    STUDY_FIELD,
    canonical_json,
    sha256_hex,
    shard_name,
    slice_field,
)
from shardflow.format.ledger import LedgerChain, LedgerRow
from shardflow.format.manifest import FileEntry, LedgerEntry, Manifest, ShardEntry, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import COLUMNS, FACT_COLUMNS, SampleEntry, SampleFacts, SamplesTable
from shardflow.format.table import crc32c
from shardflow.format.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, encode_member
from shardflow.format.volumes.bricks import StoredVolume
from shardflow.seeds import derive
from shardflow.storage import LocalStore

__all__ = ["MadeSample", "encode_ledger", "make_dataset", "make_sample", "sample_key"]

_WORDS = ("clear", "stable", "no", "mild", "acute", "left", "right", "lower", "lobe", "effusion", "nodule")


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeSample:
    """A generated sample: its key, its fields in the order of the tar, and its facts."""

    key: str
    fields: dict[str, bytes]
    facts: SampleFacts
    volumes: Mapping[str, StoredVolume] = field(default_factory=dict)
    """Bricks of the fields that are volumes in bricks."""


def sample_key(number: int) -> str:
    """The key of generated sample ``number``; ascending numbers give ascending keys."""
    return f"{number:06d}".translate(str.maketrans("0123456789", "abcdefghij")) + "k" * 20


def _draw(low: int, high: int, seed: int, number: int, draw: int) -> int:
    return low + derive(seed, "test-sample", number, draw) % (high - low)


def make_sample(
    number: int,
    *,
    slices: int | Sequence[int] = (2, 4),
    size: tuple[int, int] = (16, 16),
    seed: int = 0,
    codec: str = "b2nd",
    modality: str = "CT",
) -> MadeSample:
    """Generate one sample: one series of int16 slices, a report, and ``study.json``.

    Args:
        number: Number of the sample in its dataset; pixel ``[0, 0]`` of slice ``i`` is ``number * 16 + i``,
            so a test sees whose slice it holds.
        slices: Number of slices, or the half-open range to draw it from.
        size: Rows and columns.
        seed: Of the dataset.
        codec: Of the slices.
        modality: Recorded in ``study.json`` and the facts.
    """
    # Not NumPy's generators: their streams may change, and the golden files hold digests of what is made
    # here.
    num_slices = slices if isinstance(slices, int) else _draw(slices[0], slices[1], seed, number, 0)
    rows, columns = size
    words = [_WORDS[_draw(0, len(_WORDS), seed, number, 2 + i)] for i in range(_draw(4, 12, seed, number, 1))]
    text = " ".join(words) + "."
    noise = hashlib.shake_128(f"{seed} {number}".encode()).digest(num_slices * rows * columns * 2)
    values = np.frombuffer(noise, "<u2").reshape(num_slices, rows, columns)
    pixels: NDArray[np.int16] = (values.astype(np.int32) % 2000 - 1000).astype(np.int16)
    pixels[:, 0, 0] = number * 16 + np.arange(num_slices)
    key = sample_key(number)
    series = {
        "series_key": key[::-1],
        "modality": modality,
        "body_part": "CHEST",
        "num_slices": num_slices,
        "rows": rows,
        "columns": columns,
        "samples_per_pixel": 1,
        "dtype": "<i2",
        "unit": "HU",
        "codec": codec,
        "pixel_spacing_mm": [0.75, 0.75],
        "slice_spacing_mm": 1.5,
        "affine_lps": None,
        "series_number": 1,
        "instance_numbers": list(range(1, num_slices + 1)),
        "display_range": [-1000.0, 1000.0],
        "flags": [],
        "num_clipped": 0,
        "technical": {},
    }
    study = {
        "format_version": 1,
        "sample_key": key,
        "series": [series] if num_slices else [],
        "patient": {"sex": "O", "age_years": 40},
        "has_report": True,
    }
    fields = {REPORT_FIELD: text.encode()}
    for index in range(num_slices):
        fields[slice_field(0, index, codec)] = encode_array(codec, pixels[index])
    fields[STUDY_FIELD] = json.dumps(study, sort_keys=True, separators=(",", ":")).encode()
    facts = SampleFacts(
        text_bytes=len(fields[REPORT_FIELD]),
        num_series=1 if num_slices else 0,
        num_slices=num_slices,
        rows=rows if num_slices else 0,
        columns=columns if num_slices else 0,
        modality=modality,
    )
    return MadeSample(key=key, fields=fields, facts=facts)


def make_dataset(
    path: Path | str | os.PathLike[str],
    *,
    num_samples: int = 12,
    samples_per_shard: int = 4,
    slices: int | Sequence[int] = (2, 4),
    size: tuple[int, int] = (16, 16),
    splits: Mapping[str, int] | None = None,
    seed: int = 0,
    codec: str = "b2nd",
    make: Callable[..., MadeSample] | None = None,
    facts: bool = False,
) -> str:
    """Write a tiny dataset.

    Args:
        path: Folder to create it in.
        num_samples: Number of samples, all in ``train``; ignored where ``splits`` is given.
        samples_per_shard: The last shard of a split may hold fewer.
        slices: Slices of each sample's only series, or the half-open range to draw them from.
        size: Rows and columns of the slices.
        splits: Numbers of samples by split, instead of ``num_samples``.
        seed: Decides everything else.
        codec: Of the slices.
        make: Makes a sample; `make_sample` if not given.
        facts: Whether to write the series table, which fields of images need.

    Returns:
        The dataset's URL.
    """
    store = LocalStore(Path(path))
    shards: list[ShardEntry] = []
    entries: list[SampleEntry] = []
    number = 0
    for split, count in sorted((splits or {"train": num_samples}).items()):
        for start in range(0, count, samples_per_shard):
            samples = [
                (make or make_sample)(number + i, slices=slices, size=size, seed=seed, codec=codec)
                for i in range(min(samples_per_shard, count - start))
            ]
            number += len(samples)
            name = shard_name(split, start // samples_per_shard)
            entries += _write_shard(store, name, split, len(shards), samples, shards)
    table = SamplesTable.encode(entries, shard_splits=[shard.split for shard in shards])
    rows = [
        LedgerRow(
            input=entry.sample_key, kind="dicom", outcome="packed", reason=None, sample_key=entry.sample_key
        )
        for entry in entries
    ]
    ledger, head = encode_ledger(rows)
    manifest = Manifest(
        manifest_version=1,
        shards=tuple(shards),
        samples=_put(store, "samples/samples-000001.tbl", table),
        ledger=LedgerEntry(
            path="ledger.jsonl",
            num_bytes=len(ledger),
            sha256=_put(store, "ledger.jsonl", ledger).sha256,
            head=head,
        ),
        counts=OutcomeCounts(packed=len(rows), skipped=0, quarantined=0),
        created_with={"tests": "1"},
        config_digest=sha256_hex(canonical_json({"seed": seed})),
    )
    commit(store, manifest)
    if facts:
        attach_facts(Dataset(store, manifest))
    return store.url


def encode_ledger(rows: Iterable[LedgerRow]) -> tuple[bytes, str]:
    """The bytes of a ledger, and the head of its chain."""
    chain = LedgerChain()
    lines = [chain.append(row) for row in rows]
    return b"".join([*lines, chain.close()]), chain.head


def _write_shard(
    store: LocalStore, name: str, split: str, shard: int, samples: list[MadeSample], shards: list[ShardEntry]
) -> list[SampleEntry]:
    """Write tar and index, append the shard's entry to ``shards``, return its rows of the samples table."""
    tar = bytearray()
    entries: list[SampleEntry] = []
    located: list[tuple[str, list[FieldLocation]]] = []
    volumes: list[tuple[int, StoredVolume]] = []
    for row, sample in enumerate(samples):
        first = sum(len(fields) for _, fields in located)
        names = list(sample.fields)
        volumes += [(first + names.index(one), stored) for one, stored in sorted(sample.volumes.items())]
        start = len(tar)
        fields = []
        for part, payload in sample.fields.items():
            offset = len(tar) + BLOCK_NUM_BYTES
            fields.append(FieldLocation(part, offset, len(payload), crc32c(payload)))
            tar += encode_member(f"{sample.key}.{part}", payload)
        located.append((sample.key, fields))
        entries.append(
            SampleEntry(
                sample_key=sample.key,
                shard=shard,
                row_in_shard=row,
                offset_bytes=start,
                num_bytes=len(tar) - start,
                facts=sample.facts,
            )
        )
    tar += END_OF_ARCHIVE
    entry = _put(store, f"shards/{name}.tar", bytes(tar))
    index = _put(store, f"shards/{name}.idx", ShardIndex.encode(name, len(tar), located, volumes=volumes))
    shards.append(
        ShardEntry(
            name=name,
            split=split,
            path=entry.path,
            num_bytes=entry.num_bytes,
            sha256=entry.sha256,
            index=index,
            num_samples=len(samples),
            num_fields=sum(len(sample.fields) for sample in samples),
            num_volumes=len(volumes),
        )
    )
    return entries


def sample_entries(samples: SamplesTable) -> Iterator[SampleEntry]:
    """Read back the rows of a samples table."""
    for row, key in enumerate(samples.sample_keys()):
        numbers = {name: int(samples.gather(name, row)) for name in COLUMNS if name != "sample_key"}
        facts = {name: numbers.pop(name) for name in FACT_COLUMNS}
        modality = samples.modalities[numbers.pop("modality")]
        yield SampleEntry(sample_key=key, **numbers, facts=SampleFacts(**facts, modality=modality))


def _put(store: LocalStore, path: str, data: bytes) -> FileEntry:
    store.put_new(path, data)
    return FileEntry(path=path, num_bytes=len(data), sha256=sha256_hex(data))
