"""Counts of rendered conversations: how many tokens and pictures each has for one processor.

A sidecar, added later without touching a shard: ``conversations/<processor>/<dataset_id>/`` holds
``counts.tbl``, one row per row of the samples table, and ``manifest.json``, which is written last. The layout
is in docs/format.md, section 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.dataset import Dataset
from shardflow.format.keys import DIGEST_PATTERN, Json
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table, encode_table

COUNTS_NAME: Final = "counts.tbl"
"""Name of the table in its folder."""
NUM_ENDS: Final = 2
"""Sequences of a row at most: those of a preference pair."""
_FORMAT_VERSION: Final = 1
_KIND: Final = "conversation-counts"
_ROWS: Final = "rows_"


@dataclass(frozen=True, slots=True)
class ConversationCounts:
    """Tokens and pictures of conversations, by row; the second sequence is the rejected one of a pair."""

    tokens: NDArray[Any]
    """``(n, 2)`` uint32, 0 for no sequence, such as one that cannot be rendered."""
    images: NDArray[Any]
    """``(n, 2)`` uint32, pictures that are shown."""
    rows: Mapping[str, NDArray[Any]]
    """Rows of each entry of the pictures, such as ``pixel_values`` (patches or images), ``(n, 2)`` uint32."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: NDArray[np.int64] | slice) -> ConversationCounts:
        """Return those of some rows."""
        return ConversationCounts(
            self.tokens[rows], self.images[rows], {name: one[rows] for name, one in self.rows.items()}
        )

    @classmethod
    def zeros(cls, num_rows: int, entries: tuple[str, ...]) -> ConversationCounts:
        """Return counts of nothing, to be filled in."""
        made = [np.zeros((num_rows, NUM_ENDS), np.uint32) for _ in range(2 + len(entries))]
        return cls(made[0], made[1], dict(zip(entries, made[2:], strict=True)))

    @classmethod
    def joined(cls, parts: list[ConversationCounts], entries: tuple[str, ...]) -> ConversationCounts:
        """Return the rows of all parts, one part after another."""
        parts = [cls.zeros(0, entries), *parts]
        return cls(
            np.concatenate([one.tokens for one in parts]),
            np.concatenate([one.images for one in parts]),
            {name: np.concatenate([one.rows[name] for one in parts]) for name in entries},
        )

    def encode(self, *, processor: str, dataset_id: str, first_row: int = 0) -> bytes:
        """Encode a table; arguments as of `decode`."""
        columns = {"tokens": self.tokens, "images": self.images}
        columns |= {f"{_ROWS}{name}": one for name, one in sorted(self.rows.items())}
        return encode_table(columns, _meta(processor, dataset_id, first_row))

    @classmethod
    def decode(
        cls, table: Table, *, processor: str, dataset_id: str, num_rows: int, first_row: int = 0
    ) -> ConversationCounts:
        """Return the counts of a table, and compare it with what it must be the table of.

        Args:
            table: The table.
            processor: Digest of the processor.
            dataset_id: Digest of the manifest.
            num_rows: Rows that it must have.
            first_row: Row of the samples table that the first one belongs to.

        Raises:
            FormatError: It is another one.
            ChecksumError: It is damaged.
        """
        table.expect_kind(_KIND, _FORMAT_VERSION)
        columns = {name: table.column(name) for name in table.column_names}
        expected = _meta(processor, dataset_id, first_row)
        is_same = {name: table.meta.get(name) for name in expected} == expected
        if not (is_same and {"tokens", "images"} <= columns.keys()) or any(
            one.shape != (num_rows, NUM_ENDS) or one.dtype != np.dtype("<u4") for one in columns.values()
        ):
            raise FormatError(
                f"{table.name} must hold the counts of this processor for {num_rows} samples of this "
                "dataset, got another table; delete its folder and count again."
            )
        rows = {
            name.removeprefix(_ROWS): one for name, one in columns.items() if name not in ("tokens", "images")
        }
        return cls(columns["tokens"], columns["images"], rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedShard:
    """Rows of one shard, in the order of the samples table."""

    sha256: str
    """Of the shard: the same bytes in another version have the same counts."""
    num_rows: int

    def __post_init__(self) -> None:
        if self.num_rows < 0 or not DIGEST_PATTERN.fullmatch(self.sha256):
            raise FormatError("a counted shard has a SHA-256 and a number of rows; got others.")


@dataclass(frozen=True, kw_only=True)
class CountsManifest(SidecarManifest):
    """Manifest of the counts of one processor."""

    root = "conversations"
    file_name = "manifest.json"
    head: ClassVar[Mapping[str, Json]] = {
        "format": "shardflow-conversation-counts",
        "format_version": _FORMAT_VERSION,
    }
    remedy = "run: shardflow tokenize DATASET --processor DIR"

    dataset_id: str
    processor: str
    """Digest of the processor: its files, their chat template, and the version of the adapter."""
    num_samples: int
    num_bytes: int
    """Of the table."""
    sha256: str
    shards: tuple[CountedShard, ...]
    """In the order of the samples table."""

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        """Make a manifest of its entries."""
        return cls(**{**body, "shards": tuple(CountedShard(**shard) for shard in body["shards"])})

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of the table."""
        return {COUNTS_NAME: (self.num_bytes, self.sha256)}

    def belongs_in(self, name: str, owner: str) -> bool:
        """Return whether this is the manifest of a processor and an owner."""
        return (self.processor, self.dataset_id) == (name, owner)


def counts_folder(processor: str, dataset_id: str) -> str:
    """Return where the counts of a processor are stored in a dataset, by their two digests."""
    return f"{CountsManifest.root}/{processor}/{dataset_id}"


def open_conversation_counts(dataset: Dataset, processor: str) -> ConversationCounts:
    """Return the counts of a processor by text row of the dataset; memory-mapped, checked.

    Args:
        dataset: The dataset, any store.
        processor: Digest of the processor.

    Raises:
        ConfigError: This version of the dataset has none of this processor; the message says what makes it.
        FormatError: They are another dataset's, or cannot be trusted.
        ChecksumError: The table is damaged.
    """
    owner, num_samples = dataset.text_id, dataset.num_texts
    try:
        manifest = CountsManifest.load(dataset.store, processor, owner)
    except NotFoundError:
        raise ConfigError(
            f"Version {dataset.manifest_version} of the dataset has no counts of tokens for this processor "
            f"({processor[:12]}), which a token budget needs; run: shardflow tokenize DATASET --processor DIR"
        ) from None
    table = dataset.table_beside(
        f"{counts_folder(processor, owner)}/{COUNTS_NAME}",
        sha256=manifest.sha256,
        num_bytes=manifest.num_bytes,
        rows=range(dataset.studies.num_samples),
    )
    return ConversationCounts.decode(table, processor=processor, dataset_id=owner, num_rows=num_samples)


def _meta(processor: str, dataset_id: str, first_row: int) -> dict[str, Json]:
    return {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "dataset_id": dataset_id,
        "processor": processor,
        "first_row": first_row,
    }
