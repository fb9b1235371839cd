"""The content that loaders are measured on: CT studies of 40 slices, in our format and as PNG in plain tars.

Slices come from the CT phantom beside the repository where it is present (shifted and mirrored, so that no
two are alike), else from smooth random fields with noise; the results say which.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.format import Dataset, encode_array, tokens
from shardflow.format.facts.making import attach_facts
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, sha256_hex, shard_name, slice_field
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import SampleEntry, SampleFacts, SamplesTable
from shardflow.format.table import crc32c
from shardflow.format.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, encode_member
from shardflow.format.token_manifest import TokenFile, TokenFiles, TokensManifest, ids_name, tokens_folder
from shardflow.storage import LocalStore

__all__ = [
    "NUM_SLICES",
    "SIZE",
    "TOKENIZER",
    "make_content",
    "make_radiographs",
    "make_texts",
    "write_dataset",
]

NUM_SLICES = 40
SIZE = 512
STUDIES_PER_SHARD = 8
TEXTS_PER_SHARD = 5000
TEXTS_PER_TAR = 1000
TOKENS_PER_TEXT = 450
TOKENIZER = "0" * 64
PHANTOM = Path(__file__).resolve().parents[3] / "shared" / "data" / "ct_philips_phantom" / "S21570" / "S2010"


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample to write: fields in ascending order of their names, and what the samples table says."""

    key: str
    fields: list[tuple[str, bytes]]
    facts: SampleFacts


def write_dataset(folder: Path, samples: Iterable[Sample], *, samples_per_shard: int) -> None:
    """Write a dataset of format 1 with one split, ``train``."""
    store = LocalStore(folder)
    shards: list[ShardEntry] = []
    entries: list[SampleEntry] = []
    remaining = iter(samples)
    while chunk := list(islice(remaining, samples_per_shard)):
        name, out = shard_name("train", len(shards)), bytearray()
        located: list[tuple[str, list[FieldLocation]]] = []
        for sample in chunk:
            begin, fields = len(out), []
            for field, payload in sample.fields:
                offset = len(out) + BLOCK_NUM_BYTES
                fields.append(FieldLocation(field, offset, len(payload), crc32c(payload)))
                out += encode_member(f"{sample.key}.{field}", payload)
            entries.append(
                SampleEntry(
                    sample_key=sample.key,
                    shard=len(shards),
                    row_in_shard=len(located),
                    offset_bytes=begin,
                    num_bytes=len(out) - begin,
                    facts=sample.facts,
                )
            )
            located.append((sample.key, fields))
        out += END_OF_ARCHIVE
        tar = _put(store, f"shards/{name}.tar", bytes(out))
        index_entry = _put(store, f"shards/{name}.idx", ShardIndex.encode(name, tar.num_bytes, located))
        shards.append(
            ShardEntry(
                name=name,
                split="train",
                path=tar.path,
                num_bytes=tar.num_bytes,
                sha256=tar.sha256,
                index=index_entry,
                num_samples=len(located),
                num_fields=sum(len(fields) for _, fields in located),
            )
        )
    table = SamplesTable.encode(entries, shard_splits=["train"] * len(shards))
    commit(
        store,
        Manifest(
            manifest_version=1,
            shards=tuple(shards),
            samples=_put(store, "samples/samples-000001.tbl", table),
            counts=OutcomeCounts(packed=len(entries), skipped=0, quarantined=0),
        ),
    )


def make_content(
    folder: Path,
    num_studies: int,
    *,
    num_slices: int = NUM_SLICES,
    with_png: bool = True,
    loose: bool = False,
) -> str:
    """Write CT studies as ``folder/ours`` (a dataset) and ``folder/png`` (plain tars of 16-bit PNG).

    Args:
        folder: Where.
        num_studies: How many.
        num_slices: Of each.
        with_png: Whether to write the plain tars.
        loose: Whether to write ``folder/dicom`` too, a folder of files for each study.

    Returns:
        What the slices are.
    """
    source, kind = _base_slices()
    rng = np.random.default_rng(1)
    (folder / "png").mkdir(parents=True)

    def samples() -> Iterator[Sample]:
        for number in range(num_studies):
            key = f"study{number:06d}"
            slices = [_variant(source[(number + index) % len(source)], rng) for index in range(num_slices)]
            if with_png:
                _write_png(folder / "png" / f"{number // STUDIES_PER_SHARD:06d}.tar", key, slices)
            if loose:
                _write_dicom(folder / "dicom" / key, slices)
            fields = list(_fields(key, slices))
            facts = SampleFacts(
                text_bytes=len(fields[0][1]),
                num_series=1,
                num_slices=num_slices,
                rows=SIZE,
                columns=SIZE,
                modality="CT",
            )
            yield Sample(key, fields, facts)

    write_dataset(folder / "ours", samples(), samples_per_shard=STUDIES_PER_SHARD)
    attach_facts(Dataset.open(folder / "ours"))
    return kind


def make_radiographs(folder: Path, num_images: int) -> None:
    """Write 1024 x 1024 JPEG radiographs with reports as ``folder/ours``: smooth fields with noise."""
    rng = np.random.default_rng(2)
    words = [
        word.encode()
        for word in ["lungs", "clear", "heart", "normal", "no", "effusion", "or", "focal", "consolidation"]
    ]

    def samples() -> Iterator[Sample]:
        for number in range(num_images):
            coarse = rng.normal(128, 40, (32, 32)).astype(np.float32)
            smooth = cv2.resize(coarse, (1024, 1024), interpolation=cv2.INTER_CUBIC)
            noise = cv2.resize(rng.normal(0, 8, (512, 512)).astype(np.float32), (1024, 1024))
            pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
            is_written, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])
            if not is_written:
                raise RuntimeError("OpenCV wrote no JPEG")
            report = b" ".join(words[place] for place in rng.integers(0, len(words), 40))
            facts = SampleFacts(
                text_bytes=len(report), num_series=1, num_slices=0, rows=1024, columns=1024, modality="DX"
            )
            fields = [("image.jpg", data.tobytes()), (REPORT_FIELD, report)]
            yield Sample(f"image{number:06d}", fields, facts)

    write_dataset(folder / "ours", samples(), samples_per_shard=64)


def make_texts(folder: Path, num_texts: int) -> None:
    """Write records of 900 bytes of text as ``folder/ours``, and 450 16-bit tokens beside each.

    For the peers ``folder/json`` holds the tokens of a quarter of them, as JSON in plain tars.
    """
    rng = np.random.default_rng(3)
    facts = SampleFacts(text_bytes=900, num_series=0, num_slices=0, rows=0, columns=0, modality="")

    def samples() -> Iterator[Sample]:
        for number in range(num_texts):
            text = rng.integers(97, 123, 900, dtype=np.uint8).tobytes()
            yield Sample(f"text{number:08d}", [(REPORT_FIELD, text)], facts)

    write_dataset(folder / "ours", samples(), samples_per_shard=TEXTS_PER_SHARD)
    _write_tokens(Dataset.open(folder / "ours"), rng)
    (folder / "json").mkdir()
    for first in range(0, num_texts // 4, TEXTS_PER_TAR):
        with tarfile.open(folder / "json" / f"{first // TEXTS_PER_TAR:06d}.tar", "w") as tar:
            for number in range(first, min(first + TEXTS_PER_TAR, num_texts // 4)):
                data = json.dumps(rng.integers(0, 1 << 16, TOKENS_PER_TEXT).tolist()).encode()
                member = tarfile.TarInfo(f"text{number:08d}.tokens.json")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _write_tokens(dataset: Dataset, rng: np.random.Generator) -> None:
    """Write what ``shardflow tokenize`` would, with drawn numbers for tokens."""
    store = dataset.store
    names = {"tokenizer": TOKENIZER, "dataset_id": dataset.dataset_id}
    where = tokens_folder(TOKENIZER, dataset.dataset_id)
    files = []
    first_row = 0
    for number, shard in enumerate(dataset.manifest.shards):
        ids = rng.integers(0, 1 << 16, shard.num_samples * TOKENS_PER_TEXT, dtype=np.uint16)
        counts = np.full(shard.num_samples, TOKENS_PER_TEXT, np.uint32)
        data = tokens.encode_ids(ids, counts, first_row=first_row, **names)
        store.put_new(f"{where}/{ids_name(number)}", data)
        files.append(TokenFile(num_rows=shard.num_samples, num_bytes=len(data), sha256=sha256_hex(data)))
        first_row += shard.num_samples
    counts_data = tokens.encode_counts(np.full(first_row, TOKENS_PER_TEXT, np.uint32), **names)
    store.put_new(f"{where}/counts.tbl", counts_data)
    manifest = TokensManifest(
        num_samples=first_row,
        counts_sha256=sha256_hex(counts_data),
        files=TokenFiles.of(files),
        **names,
    )
    store.put_new(f"{where}/manifest.json", manifest.encode())


def _write_png(path: Path, key: str, slices: list[NDArray[np.int16]]) -> None:
    with tarfile.open(path, "a") as tar:
        for index, pixels in enumerate(slices):
            is_written, data = cv2.imencode(".png", (pixels.astype(np.int32) + 32768).astype(np.uint16))
            if not is_written:
                raise RuntimeError("OpenCV wrote no PNG")
            member = tarfile.TarInfo(f"{key}.i{index:04d}.png")
            member.size = data.size
            tar.addfile(member, io.BytesIO(data.tobytes()))


def _write_dicom(folder: Path, slices: list[NDArray[np.int16]]) -> None:
    from pydicom.dataset import Dataset as Image
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    folder.mkdir(parents=True)
    for index, pixels in enumerate(slices):
        image = Image()
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        image.file_meta.MediaStorageSOPClassUID = image.SOPClassUID = CTImageStorage
        image.file_meta.MediaStorageSOPInstanceUID = image.SOPInstanceUID = generate_uid()
        image.Rows, image.Columns = pixels.shape
        image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
        image.BitsAllocated = image.BitsStored = 16
        image.HighBit, image.PixelRepresentation = 15, 1
        image.RescaleSlope, image.RescaleIntercept = 1, 0
        image.PixelData = pixels.astype("<i2").tobytes()
        image.save_as(folder / f"{index:04d}.dcm", enforce_file_format=True)


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
    series = {
        "modality": "CT",
        "kind": "volume",
        "unit": "HU",
        "num_slices": len(slices),
        "rows": SIZE,
        "columns": SIZE,
        "dtype": "int16",
        "codec": "b2nd",
        "display_range": [-160.0, 240.0],
    }
    study = {"format_version": 1, "sample_key": key, "series": [series]}
    yield STUDY_FIELD, json.dumps(study).encode()


def _put(store: LocalStore, path: str, data: bytes) -> FileEntry:
    store.put_new(path, data)
    return FileEntry(path=path, num_bytes=len(data), sha256=sha256_hex(data))
