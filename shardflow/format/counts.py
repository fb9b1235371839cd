"""Counts of rendered conversations: how many tokens and pictures each has for one processor.

A sidecar, added later without touching a shard: ``conversations/<processor>/<dataset_id>/`` holds
``counts.tbl``, one row per row of the samples table, and ``manifest.json``, which is written last. Where
conversations of more than a number of tokens are split, a row is a part of one, and another digest takes the
place of the processor's. Of conversations that a template makes of studies, series or findings a row is one
of those, and the digest is of processor and template. The layout is in docs/format.md, section 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.dataset import Dataset
from shardflow.format.keys import DIGEST_PATTERN, Json, canonical_json, sha256_hex
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table, encode_table

COUNTS_NAME: Final = "counts.tbl"
"""Name of the table in its folder."""
NUM_ENDS: Final = 2
"""Sequences of a row at most: those of a preference pair."""
_FORMAT_VERSION: Final = 1
_KIND: Final = "conversation-counts"
_ROWS: Final = "rows_"
_MESSAGES: Final = "messages"


@dataclass(frozen=True, slots=True)
class ConversationCounts:
    """Tokens and pictures of conversations, by row; the second sequence is the rejected one of a pair."""

    tokens: NDArray[Any]
    """``(n, 2)`` uint32, 0 for no sequence, such as one that cannot be rendered."""
    images: NDArray[Any]
    """``(n, 2)`` uint32, pictures that are shown."""
    rows: Mapping[str, NDArray[Any]]
    """Rows of each entry of the pictures, such as ``pixel_values`` (patches or images), ``(n, 2)`` uint32."""
    messages: NDArray[Any] | None = None
    """Where rows are parts: the first message of each, and the one behind its last, ``(n, 2)`` uint32; the
    first part of a sample begins at 0. None where rows are samples."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: NDArray[np.int64] | slice) -> ConversationCounts:
        """Return those of some rows."""
        return ConversationCounts(
            self.tokens[rows],
            self.images[rows],
            {name: one[rows] for name, one in self.rows.items()},
            None if self.messages is None else self.messages[rows],
        )

    def differs(self, other: ConversationCounts) -> NDArray[np.bool_]:
        """Return which rows have other tokens or pictures, ``(n,)``."""
        pairs = [(self.tokens, other.tokens), (self.images, other.images)]
        pairs += [(own, other.rows[name]) for name, own in self.rows.items()]
        found: NDArray[np.bool_] = np.any([(one != two).any(axis=1) for one, two in pairs], axis=0)
        return found

    @property
    def num_samples(self) -> int:
        """Samples that the rows belong to."""
        return len(self) if self.messages is None else int((self.messages[:, 0] == 0).sum())

    def first_rows(self) -> NDArray[np.int64]:
        """Return the first row of each sample, and the number of rows, ``(num_samples + 1,)``."""
        if self.messages is None:
            return np.arange(len(self) + 1)
        return np.append(np.flatnonzero(self.messages[:, 0] == 0), len(self))

    @classmethod
    def zeros(cls, num_rows: int, entries: tuple[str, ...], *, is_split: bool = False) -> ConversationCounts:
        """Return counts of nothing, to be filled in."""
        made = [np.zeros((num_rows, NUM_ENDS), np.uint32) for _ in range(2 + len(entries) + is_split)]
        messages = made.pop() if is_split else None
        return cls(made[0], made[1], dict(zip(entries, made[2:], strict=True)), messages)

    @classmethod
    def joined(
        cls, blocks: list[ConversationCounts], entries: tuple[str, ...], *, is_split: bool = False
    ) -> ConversationCounts:
        """Return the rows of all blocks, one block after another."""
        blocks = [cls.zeros(0, entries, is_split=is_split), *blocks]
        messages = [one.messages for one in blocks if one.messages is not None]
        return cls(
            np.concatenate([one.tokens for one in blocks]),
            np.concatenate([one.images for one in blocks]),
            {name: np.concatenate([one.rows[name] for one in blocks]) for name in entries},
            np.concatenate(messages) if messages else None,
        )

    def encode(self, *, processor: str, dataset_id: str, first_row: int = 0) -> bytes:
        """Encode a table; arguments as of `decode`."""
        columns = {"tokens": self.tokens, "images": self.images}
        columns |= {} if self.messages is None else {_MESSAGES: self.messages}
        columns |= {f"{_ROWS}{name}": one for name, one in sorted(self.rows.items())}
        return encode_table(columns, _meta(processor, dataset_id, first_row))

    @classmethod
    def decode(
        cls, table: Table, *, processor: str, dataset_id: str, num_rows: int | None, first_row: int = 0
    ) -> ConversationCounts:
        """Return the counts of a table, and compare it with what it must be the table of.

        Args:
            table: The table.
            processor: Name of the counts, see `counts_name`.
            dataset_id: Digest of the manifest.
            num_rows: Rows that it must have; None for any number.
            first_row: Row of the samples table that the first one belongs to.

        Raises:
            FormatError: It is another one.
            ChecksumError: It is damaged.
        """
        table.expect_kind(_KIND, _FORMAT_VERSION)
        columns = {name: table.column(name) for name in table.column_names}
        if num_rows is None and "tokens" in columns:
            num_rows = len(columns["tokens"])
        expected = _meta(processor, dataset_id, first_row)
        is_same = {name: table.meta.get(name) for name in expected} == expected
        if not (is_same and {"tokens", "images"} <= columns.keys()) or any(
            one.shape != (num_rows, NUM_ENDS) or one.dtype != np.dtype("<u4") for one in columns.values()
        ):
            raise FormatError(
                f"{table.name} must hold the counts of this processor for {num_rows} samples of this "
                "dataset, got another table; delete its folder and count again."
            )
        tokens, images, messages = columns.pop("tokens"), columns.pop("images"), columns.pop(_MESSAGES, None)
        return cls(tokens, images, {name.removeprefix(_ROWS): one for name, one in columns.items()}, messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedTemplate:
    """What decides the conversations that a template makes of a dataset, beside its rows."""

    digest: str
    """SHA-256 of the template and of the settings of the fields that it names."""
    tables: tuple[str, ...] = ()
    """SHA-256 of the tables beside the dataset that it reads: those of the columns that it names, that of
    other studies, and of images the series table."""


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
    """Digest of the processor: its files, their chat template, and the version of the adapter; of the parts
    of conversations what `counts_name` makes of it."""
    num_samples: int
    """Rows of the table."""
    num_bytes: int
    """Of the table."""
    sha256: str
    shards: tuple[CountedShard, ...]
    """In the order of the samples table."""
    template: CountedTemplate | None = None
    """Of conversations that a template makes; None, and left out of the file, of stored ones."""

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        body = asdict(self)
        if self.template is None:
            del body["template"]
        return body

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        """Make a manifest of its entries."""
        shards = tuple(CountedShard(**shard) for shard in body["shards"])
        found = {**body, "shards": shards}
        if "template" in body:
            digest, tables = body["template"]["digest"], tuple(body["template"]["tables"])
            found["template"] = CountedTemplate(digest=digest, tables=tables)
        return cls(**found)

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of the table."""
        return {COUNTS_NAME: (self.num_bytes, self.sha256)}

    def belongs_in(self, name: str, owner: str) -> bool:
        """Return whether this is the manifest of a processor and an owner."""
        return (self.processor, self.dataset_id) == (name, owner)


def counts_name(processor: str, split_at: int | None = None, template: str = "", rows: str = "") -> str:
    """Return the name of the counts of a processor among those of a dataset: a digest.

    Args:
        processor: Digest of the processor.
        split_at: Tokens above which conversations are split into parts; None where none is.
        template: Digest of the template that makes them; empty for stored ones.
        rows: Digest of the rows, where a template makes a conversation of each series or image.
    """
    if split_at is None and not template:
        return processor
    parts = {"split_at": split_at, "template": template or None, "rows": rows or None}
    given = {name: one for name, one in parts.items() if one is not None}
    return sha256_hex(canonical_json({"processor": processor, **given}))


def template_counts_name(dataset: Dataset, processor: str, template: CountedTemplate) -> str:
    """Return the name of the counts of the conversations that a template makes of a dataset's rows."""
    rows = "" if dataset.dataset_id == dataset.text_id else dataset.dataset_id
    return counts_name(processor, template=template.digest, rows=rows)


def counts_folder(name: str, dataset_id: str) -> str:
    """Return where counts are stored in a dataset, by their name and its digest."""
    return f"{CountsManifest.root}/{name}/{dataset_id}"


def open_conversation_counts(
    dataset: Dataset,
    processor: str,
    *,
    split_at: int | None = None,
    template: CountedTemplate | None = None,
) -> ConversationCounts:
    """Return the counts of a processor by text row of the dataset, or by parts; memory-mapped, checked.

    Args:
        dataset: The dataset, any store.
        processor: Digest of the processor.
        split_at: As of `counts_name`.
        template: Of conversations that a template makes; the counts are by row of the dataset's own table.

    Raises:
        ConfigError: This version of the dataset has none of this processor, or counted with other tables; the
            message says what makes it.
        FormatError: They are another dataset's, or cannot be trusted.
        ChecksumError: The table is damaged.
    """
    owner, name = dataset.text_id, counts_name(processor, split_at)
    if template is not None:
        name = template_counts_name(dataset, processor, template)
    manifest: CountsManifest | None = None
    with suppress(NotFoundError):
        manifest = CountsManifest.load(dataset.store, name, owner)
    if manifest is None or (template is not None and manifest.template != template):
        what, needs, option = "counts of tokens", "a token budget needs", ""
        if split_at is not None:
            what, needs = f"counts of parts of up to {split_at:,} tokens", "split_long needs"
            option = f" --max-tokens {split_at}"
        if template is not None:
            what, option = "counts of the tokens of this template", " --fields FILE, the file of its field"
            needs += " anew where a column has changed" if manifest is not None else ""
        raise ConfigError(
            f"Version {dataset.manifest_version} of the dataset has no {what} for this processor "
            f"({processor[:12]}), which {needs}; run: shardflow tokenize DATASET --processor DIR{option}"
        )
    table = dataset.table_beside(
        f"{counts_folder(name, owner)}/{COUNTS_NAME}",
        sha256=manifest.sha256,
        num_bytes=manifest.num_bytes,
        rows=range(dataset.studies.num_samples),
    )
    num_samples = dataset.num_texts if template is None else dataset.samples.num_samples
    num_rows = num_samples if split_at is None else manifest.num_samples
    found = ConversationCounts.decode(table, processor=name, dataset_id=owner, num_rows=num_rows)
    if found.num_samples != num_samples or (found.messages is None) != (split_at is None):
        raise FormatError(
            f"{table.name} must have {num_samples:,} samples of this dataset, got "
            f"{found.num_samples:,}; delete its folder and count again."
        )
    return found


def _meta(processor: str, dataset_id: str, first_row: int) -> dict[str, Json]:
    return {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "dataset_id": dataset_id,
        "processor": processor,
        "first_row": first_row,
    }
