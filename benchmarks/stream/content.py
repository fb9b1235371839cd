"""The content that loaders are measured on: CT studies of 40 slices, in our format and as PNG in plain tars.

Slices come from the CT phantom beside the repository where it is present (shifted and mirrored, so that no
two are alike), else from smooth random fields with noise; the results say which.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.shards import encode_array
from shardflow.shards.canonical import sha256_hex
from shardflow.shards.index import FieldLocation, ShardIndex
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD, shard_name, slice_field
from shardflow.shards.manifest import FileEntry, Manifest, ShardEntry, commit
from shardflow.shards.outcomes import OutcomeCounts
from shardflow.shards.samples import SampleEntry, SampleFacts, SamplesTable
from shardflow.shards.table_layout import crc32c
from shardflow.shards.tar import TarWriter
from shardflow.storage import LocalStore

__all__ = ["NUM_SLICES", "SIZE", "make_content"]

NUM_SLICES = 40
SIZE = 512
STUDIES_PER_SHARD = 8
PHANTOM = Path(__file__).resolve().parents[3] / "shared" / "data" / "ct_philips_phantom" / "S21570" / "S2010"


def make_content(folder: Path, num_studies: int) -> str:
    """Write ``folder/ours`` (a dataset) and ``folder/png`` (plain tars); return what the slices are."""
    source, kind = _base_slices()
    rng = np.random.default_rng(1)
    store = LocalStore(folder / "ours")
    (folder / "png").mkdir(parents=True)
    shards: list[ShardEntry] = []
    entries: list[SampleEntry] = []
    for start in range(0, num_studies, STUDIES_PER_SHARD):
        name = shard_name("train", len(shards))
        ours, png = io.BytesIO(), io.BytesIO()
        writer, png_writer = TarWriter(ours), TarWriter(png)
        located: list[tuple[str, list[FieldLocation]]] = []
        for number in range(start, min(start + STUDIES_PER_SHARD, num_studies)):
            key = f"study{number:06d}"
            slices = [_variant(source[(number + index) % len(source)], rng) for index in range(NUM_SLICES)]
            begin, fields = writer.num_bytes, []
            for field, payload in _fields(key, slices):
                offset = writer.add(f"{key}.{field}", payload)
                fields.append(FieldLocation(field, offset, len(payload), crc32c(payload)))
            for index, pixels in enumerate(slices):
                is_written, data = cv2.imencode(".png", (pixels.astype(np.int32) + 32768).astype(np.uint16))
                if not is_written:
                    raise RuntimeError("OpenCV wrote no PNG")
                png_writer.add(f"{key}.i{index:04d}.png", data.tobytes())
            located.append((key, fields))
            facts = SampleFacts(
                text_bytes=fields[0].num_bytes, num_series=1, num_slices=NUM_SLICES, rows=SIZE, columns=SIZE,
                modality="CT",
            )  # fmt: skip
            entries.append(
                SampleEntry(
                    sample_key=key, shard=len(shards), row_in_shard=number - start, offset_bytes=begin,
                    num_bytes=writer.num_bytes - begin, facts=facts,
                )
            )  # fmt: skip
        writer.close()
        png_writer.close()
        (folder / "png" / f"{name}.tar").write_bytes(png.getvalue())
        tar = _put(store, f"shards/{name}.tar", ours.getvalue())
        index_entry = _put(store, f"shards/{name}.idx", ShardIndex.encode(name, tar.num_bytes, located))
        shards.append(
            ShardEntry(
                name=name, split="train", path=tar.path, num_bytes=tar.num_bytes, sha256=tar.sha256,
                index=index_entry, num_samples=len(located),
                num_fields=sum(len(fields) for _, fields in located),
            )
        )  # fmt: skip
    table = SamplesTable.encode(entries, shard_splits=["train"] * len(shards))
    commit(
        store,
        Manifest(
            manifest_version=1,
            shards=tuple(shards),
            samples=_put(store, "samples/samples-000001.tbl", table),
            counts=OutcomeCounts(packed=num_studies, skipped=0, quarantined=0),
        ),
    )
    return kind


def _base_slices() -> tuple[list[NDArray[np.int16]], str]:
    if PHANTOM.is_dir():
        import pydicom

        found = [pydicom.dcmread(path) for path in sorted(PHANTOM.iterdir())]
        slices = [
            (image.pixel_array * float(image.RescaleSlope) + float(image.RescaleIntercept)).astype(np.int16)
            for image in found
            if (image.get("Rows"), image.get("Columns")) == (SIZE, SIZE)
        ]
        return slices, f"{len(slices)} slices of the CT phantom, shifted and mirrored"
    rng = np.random.default_rng(0)
    fields = [
        cv2.resize(rng.normal(0, 400, (16, 16)), (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
        for _ in range(28)
    ]
    slices = [
        np.clip(field + rng.normal(0, 12, field.shape), -1024, 3071).astype(np.int16) for field in fields
    ]
    return slices, "28 smooth random fields with noise of 12 HU, shifted and mirrored"


def _variant(pixels: NDArray[np.int16], rng: np.random.Generator) -> NDArray[np.int16]:
    moved = np.roll(pixels, tuple(rng.integers(-20, 21, 2).tolist()), axis=(0, 1))
    return np.ascontiguousarray(moved[:, ::-1] if rng.integers(2) else moved)


def _fields(key: str, slices: list[NDArray[np.int16]]) -> Iterator[tuple[str, bytes]]:
    yield REPORT_FIELD, b"Generated for a measurement."
    for index, pixels in enumerate(slices):
        yield slice_field(0, index, "b2nd"), encode_array("b2nd", pixels)
    study = {"format_version": 1, "sample_key": key, "series": [{"display_range": [-160.0, 240.0]}]}
    yield STUDY_FIELD, json.dumps(study).encode()


def _put(store: LocalStore, path: str, data: bytes) -> FileEntry:
    store.put_new(path, data)
    return FileEntry(path=path, num_bytes=len(data), sha256=sha256_hex(data))
