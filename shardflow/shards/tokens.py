"""Tokens beside a dataset: the token ids of every text for one tokenizer, and how many there are.

A sidecar, added later without touching a shard: ``tokens/<tokenizer>/<dataset_id>/`` holds ``counts.tbl``,
one row per row of the samples table, one table of ids per shard, and ``manifest.json``, which names the
dataset, the tokenizer and every file, and is written last. The layout is in docs/format.md, section 13.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.shards.canonical import Json, canonical_json, parse_json, sha256_hex
from shardflow.shards.dataset import Dataset
from shardflow.shards.table import Table, encode_table

__all__ = [
    "COUNTS_NAME",
    "COUNT_COLUMN",
    "DIGEST_PATTERN",
    "TokenFile",
    "TokensManifest",
    "counts_column",
    "encode_counts",
    "encode_ids",
    "ids_name",
    "ids_table",
    "open_counts",
    "open_manifest",
    "stored_tokenizers",
    "tokens_folder",
]

COUNT_COLUMN: Final = "text_tokens"
COUNTS_NAME: Final = "counts.tbl"
"""Name of the table of counts in its folder."""
_FORMAT: Final = "shardflow-tokens"
_FORMAT_VERSION: Final = 1
_COUNTS_KIND: Final = "token-counts"
_IDS_KIND: Final = "token-ids"
DIGEST_PATTERN: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
"""SHA-256 in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """A table of token ids: some consecutive rows of the samples table, those of one shard."""

    num_rows: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensManifest:
    """What makes tables of tokens valid."""

    dataset_id: str
    tokenizer: str
    """SHA-256 of ``tokenizer.json``."""
    num_samples: int
    counts_sha256: str
    files: tuple[TokenFile, ...]
    """One a shard, in the order of the samples table."""

    def encode(self) -> bytes:
        """Return the file's bytes."""
        body: dict[str, Json] = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "dataset_id": self.dataset_id,
            "tokenizer": self.tokenizer,
            "num_samples": self.num_samples,
            "counts_sha256": self.counts_sha256,
            "files": [asdict(file) for file in self.files],
        }
        return canonical_json({**body, "digest": sha256_hex(canonical_json(body))}) + b"\n"

    @classmethod
    def decode(cls, data: bytes, *, name: str) -> TokensManifest:
        """Parse and check a manifest.

        Raises:
            FormatError: It is no manifest of tokens, or its digest is another one.
        """
        body = parse_json(data.removesuffix(b"\n"), what=name)
        try:
            digest = body.pop("digest")
            head = (body.pop("format"), body.pop("format_version"))
            is_whole = digest == sha256_hex(
                canonical_json({**body, "format": head[0], "format_version": head[1]})
            )
            files = tuple(_token_file(entry) for entry in body.pop("files"))
            manifest = cls(**body, files=files)
        except (KeyError, TypeError, ValueError, AttributeError):
            is_whole, head, files = False, ("", 0), ()
        if not is_whole or head != (_FORMAT, _FORMAT_VERSION):
            raise FormatError(
                f"{name} must be a whole manifest of tokens of format {_FORMAT_VERSION}, got another file; "
                "delete its folder and tokenize again."
            )
        return manifest


def _token_file(entry: dict[str, Any]) -> TokenFile:
    file = TokenFile(**entry)
    if min(file.num_rows, file.num_bytes) < 0 or not DIGEST_PATTERN.fullmatch(file.sha256):
        raise ValueError
    return file


def tokens_folder(tokenizer: str, dataset_id: str) -> str:
    """Return where the tokens of a tokenizer lie in a dataset.

    Args:
        tokenizer: SHA-256 of its ``tokenizer.json``, 64 hexadecimal digits.
        dataset_id: Digest of the manifest that is open, or of the entity view: rows of another one are other
            rows.
    """
    return f"tokens/{tokenizer}/{dataset_id}"


def stored_tokenizers(dataset: Dataset) -> list[str]:
    """Return the tokenizers whose ids of this version of the dataset are stored whole, ascending.

    Args:
        dataset: The dataset.

    Raises:
        NoListingError: Its store cannot list.
    """
    names = (path.split("/") for path in dataset.store.list("tokens/"))
    found = {
        parts[1]
        for parts in names
        if parts[2:] == [dataset.dataset_id, "manifest.json"] and DIGEST_PATTERN.fullmatch(parts[1])
    }
    return sorted(found)


def ids_name(number: int) -> str:
    """Return the name of a table of ids in the folder."""
    return f"ids-{number:06d}.tbl"


def encode_counts(counts: NDArray[np.uint32], *, tokenizer: str, dataset_id: str) -> bytes:
    """Encode the table of counts, ``(n,)`` uint32 by row of the samples table."""
    return encode_table(
        {COUNT_COLUMN: counts.astype("<u4", copy=False)}, _meta(_COUNTS_KIND, tokenizer, dataset_id)
    )


def encode_ids(
    ids: NDArray[Any], counts: NDArray[Any], *, first_row: int, tokenizer: str, dataset_id: str
) -> bytes:
    """Encode the table of ids of a shard.

    Args:
        ids: ``(sum(counts),)`` uint16 or uint32: the tokens of all texts, one behind another.
        counts: ``(rows,)``: how many are of each text.
        first_row: Row of the samples table that the first text belongs to.
        tokenizer: SHA-256 of the ``tokenizer.json``.
        dataset_id: Digest of the manifest.
    """
    first_token = np.zeros(len(counts) + 1, "<u8")
    np.cumsum(counts, out=first_token[1:], dtype=np.uint64)
    meta = {**_meta(_IDS_KIND, tokenizer, dataset_id), "first_row": first_row}
    return encode_table({"first_token": first_token, "token_ids": ids}, meta)


def ids_table(table: Table, *, first_row: int, num_rows: int, tokenizer: str, dataset_id: str) -> Table:
    """Compare a table of ids with what it must be the table of, and return it.

    Raises:
        FormatError: It is another one.
    """
    table.expect_kind(_IDS_KIND, _FORMAT_VERSION)
    found = (
        *(table.meta.get(key) for key in ("dataset_id", "tokenizer", "first_row")),
        table.num_rows("first_token"),
    )
    if found != (dataset_id, tokenizer, first_row, num_rows + 1):
        raise FormatError(
            f"{table.name} must hold the ids of its shard's {num_rows} texts, got another table; delete its "
            "folder and tokenize again."
        )
    return table


def open_manifest(dataset: Dataset, tokenizer: str) -> TokensManifest:
    """Return the manifest of a tokenizer's tokens.

    Args:
        dataset: The dataset, any store.
        tokenizer: SHA-256 of its ``tokenizer.json``.

    Raises:
        ConfigError: Nobody tokenized with this tokenizer and this version of the dataset.
        FormatError: The tokens are another dataset's, or cannot be trusted.
    """
    name = f"{tokens_folder(tokenizer, dataset.dataset_id)}/manifest.json"
    try:
        data = dataset.store.read(name)
    except NotFoundError:
        raise ConfigError(
            f"the dataset must be tokenized with tokenizer {tokenizer[:12]}, got no tokens of it beside "
            f"version {dataset.manifest_version}; run: shardflow tokenize DATASET --tokenizer FILE (and "
            "--view for the entities of a view)"
        ) from None
    manifest = TokensManifest.decode(data, name=name)
    num_samples = dataset.samples.num_samples
    found = (manifest.dataset_id, manifest.tokenizer, manifest.num_samples)
    if (
        found != (dataset.dataset_id, tokenizer, num_samples)
        or sum(file.num_rows for file in manifest.files) != num_samples
    ):
        raise FormatError(
            f"{name} must name this dataset, tokenizer and {num_samples} samples, got others; delete the "
            "folder and tokenize again."
        )
    return manifest


def open_counts(dataset: Dataset, tokenizer: str) -> NDArray[Any]:
    """Return the counts of a tokenizer, ``(n,)`` uint32 by row of the samples table; memory-mapped, checked.

    Args:
        dataset: The dataset, any store.
        tokenizer: SHA-256 of its ``tokenizer.json``.

    Raises:
        ConfigError: Nobody tokenized with this tokenizer and this version of the dataset.
        FormatError: The tokens are another dataset's, or cannot be trusted.
        ChecksumError: The table is damaged.
    """
    open_manifest(dataset, tokenizer)
    name = f"{tokens_folder(tokenizer, dataset.dataset_id)}/{COUNTS_NAME}"
    table = Table(dataset.store.map(name), name=name)
    return counts_column(
        table,
        tokenizer=tokenizer,
        dataset_id=dataset.dataset_id,
        num_samples=dataset.samples.num_samples,
    )


def counts_column(table: Table, *, tokenizer: str, dataset_id: str, num_samples: int) -> NDArray[Any]:
    """Return the counts of a table, ``(n,)`` uint32, and compare it with what it must be the table of.

    Raises:
        FormatError: It is another one.
        ChecksumError: It is damaged.
    """
    table.expect_kind(_COUNTS_KIND, _FORMAT_VERSION)
    found = (table.meta.get("dataset_id"), table.meta.get("tokenizer"))
    counts = table.column(COUNT_COLUMN)
    if found != (dataset_id, tokenizer) or counts.dtype != np.dtype("<u4") or counts.shape != (num_samples,):
        raise FormatError(
            f"{table.name} must hold one 32-bit count a sample of this dataset, got another table; delete "
            "the folder and tokenize again."
        )
    return counts


def _meta(kind: str, tokenizer: str, dataset_id: str) -> dict[str, Json]:
    return {
        "kind": kind,
        "format_version": _FORMAT_VERSION,
        "dataset_id": dataset_id,
        "tokenizer": tokenizer,
    }
