"""Stored tokens: the token ids of every text of a dataset for one tokenizer, and their counts.

A sidecar, added later without touching a shard: ``tokens/<tokenizer>/<dataset_id>/`` holds ``counts.tbl``,
one row per row of the samples table, one table of ids per shard, and ``manifest.json``, which names the
dataset, the tokenizer and every file, and is written last. The layout is in docs/format.md, section 13.

`TokenIds` reads the ids of many rows at once without an object per token. Each map of a table holds a file
descriptor, opening one costs more than reading a text, and visiting each of twenty tables costs a batch more
than its texts. So the tables of a local dataset are joined to one, in a node file that all processes map,
unless they are few and large. Otherwise each table is mapped when one of its rows is first needed, and the
number of open ones is bounded.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ShardflowError
from shardflow.format.dataset import Dataset
from shardflow.format.dataset_index import MIN_COLLECTED_SHARDS
from shardflow.format.keys import Json
from shardflow.format.table import StreamedColumn, Table, encode_table, stream_table
from shardflow.format.token_manifest import (
    COUNTS_NAME,
    TokensManifest,
    ids_name,
    open_manifest,
    tokens_folder,
)
from shardflow.storage import LocalStore
from shardflow.storage.node_files import named_bytes, node_file

COUNT_COLUMN: Final = "text_tokens"
_FORMAT_VERSION: Final = 1
_COUNTS_KIND: Final = "token-counts"
_IDS_KIND: Final = "token-ids"
_MAX_OPEN_TABLES: Final = 128
_MAX_SPREAD: Final = 4
"""Tokens that may be copied for each one that is wanted, so that all rows are copied at once."""
MAX_JOINED_BYTES: Final = 256 << 20
"""Bytes of tables, fewer than `MIN_COLLECTED_SHARDS`, up to which they are joined: half a second, once."""
logger = logging.getLogger(__name__)


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
        ids: ``(sum(counts),)`` uint16 or uint32: the tokens of all texts, one after another.
        counts: ``(rows,)``: number of tokens of each text.
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
    places, ids = (table.dtype_and_shape(name) for name in ("first_token", "token_ids"))
    found = *(table.meta.get(key) for key in ("dataset_id", "tokenizer", "first_row")), places
    is_right = ids[0] in (np.dtype("<u2"), np.dtype("<u4")) and len(ids[1]) == 1
    if not is_right or found != (dataset_id, tokenizer, first_row, (np.dtype("<u8"), (num_rows + 1,))):
        raise FormatError(
            f"{table.name} must hold the ids of its shard's {num_rows} texts, got another table; delete its "
            "folder and tokenize again."
        )
    return table


def open_counts(dataset: Dataset, tokenizer: str) -> NDArray[Any]:
    """Return the counts of a tokenizer, ``(n,)`` uint32 by text row of the dataset; memory-mapped, checked.

    Args:
        dataset: The dataset, any store.
        tokenizer: SHA-256 of its ``tokenizer.json``.

    Raises:
        ConfigError: This version of the dataset has no tokens of this tokenizer.
        FormatError: The tokens are another dataset's, or cannot be trusted.
        ChecksumError: The table is damaged.
    """
    return _counts_of(dataset, open_manifest(dataset, tokenizer))


def _counts_of(dataset: Dataset, manifest: TokensManifest) -> NDArray[Any]:
    tokenizer = manifest.tokenizer
    name = f"{tokens_folder(tokenizer, dataset.text_id)}/{COUNTS_NAME}"
    rows = range(dataset.studies.num_samples)
    table = dataset.table_beside(name, sha256=manifest.counts_sha256, num_bytes=None, rows=rows)
    return counts_column(
        table,
        tokenizer=tokenizer,
        dataset_id=dataset.text_id,
        num_samples=dataset.num_texts,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlaces:
    """Places of the tokens of some texts; holds no memory map, so any number of them may exist."""

    files: list[tuple[int, slice]]
    """Number of each table, and the slice of the places below that are in it."""
    texts: NDArray[np.int64]
    """``(k,)`` position of each text in the request; rows of -1 are left out."""
    starts: NDArray[np.int64]
    """``(k,)`` first token in the table."""
    stops: NDArray[np.int64]
    """``(k,)`` token after the last one."""

    def lengths(self, num_texts: int) -> NDArray[np.int64]:
        """Return how many tokens each text has, ``(num_texts,)``."""
        lengths = np.zeros(num_texts, np.int64)
        lengths[self.texts] = self.stops - self.starts
        return lengths

    def each(self) -> Iterator[TokenPlaces]:
        """Yield the places of one text at a time."""
        for number, here in self.files:
            for place in range(here.start, here.stop):
                one = slice(place, place + 1)
                yield TokenPlaces(
                    files=[(number, slice(0, 1))],
                    texts=self.texts[one],
                    starts=self.starts[one],
                    stops=self.stops[one],
                )


class _IdsFile:
    """An open table. Safe for many threads, which at worst repeat work."""

    __slots__ = ("_first_token", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._first_token: NDArray[np.int64] | None = None

    def bounds(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the tokens of some rows begin and end, ``(n,)`` each."""
        if self._first_token is None:
            first_token = self._table.whole("first_token")
            if first_token is None:
                found = self._table.gather("first_token", np.concatenate((rows, rows + 1)))
                starts, stops = found[: len(rows)], found[len(rows) :]
                self._check((starts <= stops).all() and stops.max(initial=0) <= self._num_tokens)
                return starts.view(np.int64), stops.view(np.int64)
            is_ascending = (first_token[1:] >= first_token[:-1]).all()
            self._check(is_ascending and first_token[-1] <= self._num_tokens)
            self._first_token = first_token.view(np.int64)
        return self._first_token[rows], self._first_token[rows + 1]

    def ids(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
        """Return all ids, of which the given spans are checked."""
        ids = self._table.whole("token_ids")
        if ids is not None and self._first_token is not None:
            return ids
        return self._table.spans("token_ids", starts, stops)

    @property
    def _num_tokens(self) -> int:
        return self._table.num_rows("token_ids")

    def _check(self, is_right: Any) -> None:
        if not is_right:
            raise FormatError(
                f"{self._table.name} must place its texts one behind another in {self._num_tokens} tokens, "
                "got other places; delete the folder and tokenize again."
            )


def _concatenated(ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
    """Return spans of ids, one after another; of bytes that takes a third of the time of arrays."""
    data, size = ids.view(np.uint8).data, ids.itemsize
    spans = zip((starts * size).tolist(), (stops * size).tolist(), strict=True)
    return np.frombuffer(b"".join([data[start:stop] for start, stop in spans]), ids.dtype)


def _windows(
    ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], width: int
) -> NDArray[Any]:
    """Return spans of ids as rows, ``(n, width)``, in one copy; behind each span is what follows it."""
    last = len(ids) - width
    found: NDArray[Any] = np.ndarray((last + 1, width), ids.dtype, ids, 0, 2 * ids.strides)[
        np.minimum(starts, last)
    ]
    for row in np.flatnonzero(starts > last).tolist():
        found[row, : stops[row] - starts[row]] = ids[starts[row] : stops[row]]
    return found


class TokenIds:
    """The tokens of one tokenizer beside a dataset. Safe for many threads.

    Args:
        dataset: The dataset, any store; a remote one fetches the tables whole.
        tokenizer: SHA-256 of its ``tokenizer.json``.

    Attributes:
        digest: Of the manifest of the tokens.
        counts: ``(n,)`` uint32, number of tokens by text row of the dataset; memory-mapped, checked.

    Raises:
        ConfigError: This version of the dataset has no tokens of this tokenizer.
        FormatError: The tokens are another dataset's, or cannot be trusted.
        ChecksumError: The table of counts is damaged.
    """

    def __init__(self, dataset: Dataset, tokenizer: str) -> None:
        manifest = open_manifest(dataset, tokenizer)
        self._dataset = dataset
        self._tokenizer = tokenizer
        self.digest = manifest.digest
        self.counts = _counts_of(dataset, manifest)
        self._files = manifest.files
        self._first_rows = np.concatenate(([0], np.cumsum(manifest.files.num_rows)))
        self._open_files: OrderedDict[int, _IdsFile] = OrderedDict()
        self._lock = threading.Lock()
        num_bytes = int(manifest.files.num_bytes.sum())
        is_joined = len(manifest.files) > 1 and (
            len(manifest.files) >= MIN_COLLECTED_SHARDS or num_bytes <= MAX_JOINED_BYTES
        )
        if is_joined and isinstance(dataset.store, LocalStore):
            self._join(manifest)

    def __reduce__(self) -> tuple[type[TokenIds], tuple[Dataset, str]]:
        """Cross a process boundary without maps."""
        return type(self), (self._dataset, self._tokenizer)

    def gather(
        self, rows: NDArray[np.int64], max_tokens: int | None = None
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the tokens of some texts.

        Args:
            rows: ``(n,)`` text rows of the dataset, in any order; -1 is an empty text.
            max_tokens: Longer texts are cut to this length.

        Returns:
            ids: ``(sum of lengths,)`` uint32, the texts one after another in the order of ``rows``.
            offsets: ``(n + 1,)``; text ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

        Raises:
            ChecksumError: A block that holds one of the texts is damaged.
            FormatError: A table is another one than the manifest's.
        """
        places = self.find(rows, max_tokens)
        offsets = np.concatenate(([0], np.cumsum(places.lengths(len(rows)))))
        ids = np.empty(offsets[-1], np.uint32)
        self.read(places, offsets, ids)
        return ids, offsets

    def find(self, rows: NDArray[np.int64], max_tokens: int | None = None) -> TokenPlaces:
        """Find the tokens of some texts, without reading them.

        Arguments as of `gather`.

        Raises:
            ChecksumError: A block of their places is damaged.
            FormatError: A table is another one than the manifest's.
            IndexError: There is no such row.
        """
        num_rows = int(self._first_rows[-1])
        if rows.max(initial=-1) >= num_rows:
            raise IndexError(f"text rows must lie below {num_rows}, got others.")
        texts = np.flatnonzero(rows >= 0)
        inside, cuts, numbers = rows[texts], [0, len(texts)], np.zeros(1, np.int64)
        if len(self._first_rows) > 2:  # the texts of each table follow each other
            numbers = np.searchsorted(self._first_rows, inside, side="right") - 1
            order = np.argsort(numbers, kind="stable")
            texts, inside, numbers = texts[order], inside[order], numbers[order]
            inside -= self._first_rows[numbers]
            cuts[1:1] = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        files = [(int(numbers[first]), slice(first, stop)) for first, stop in pairwise(cuts) if first < stop]
        starts, stops = np.empty((2, len(texts)), np.int64)
        for number, here in files:
            starts[here], stops[here] = self._file(number).bounds(inside[here])
        if max_tokens is not None:
            stops = np.minimum(stops, starts + max_tokens)
        return TokenPlaces(files=files, texts=texts, starts=starts, stops=stops)

    def read(self, places: TokenPlaces, offsets: NDArray[np.int64], out: NDArray[np.uint32]) -> None:
        """Copy tokens into an output array.

        Args:
            places: From `find`.
            offsets: ``(n,)`` or more; text ``i`` goes to ``out[offsets[i]:]``.
            out: ``(m,)``.

        Raises:
            ChecksumError: A block that holds one of the texts is damaged; some of ``out`` may be written.
            FormatError: A table is another one than the manifest's.
        """
        targets = offsets[places.texts]
        ends = targets + (places.stops - places.starts)
        for number, here in places.files:
            starts, stops, to, until = (each[here] for each in (places.starts, places.stops, targets, ends))
            ids = self._file(number).ids(starts, stops)
            if (to[1:] == until[:-1]).all():
                out[to[0] : until[-1]] = _concatenated(ids, starts, stops)
                continue
            # Copying a slice per text costs a quarter of indexing each token.
            for start, stop, first, end in zip(
                starts.tolist(), stops.tolist(), to.tolist(), until.tolist(), strict=True
            ):
                out[first:end] = ids[start:stop]

    def read_rows(
        self, places: TokenPlaces, rows: NDArray[np.int64], mask: NDArray[np.uint8], out: NDArray[Any]
    ) -> None:
        """Copy tokens into rows of an output array, with zeros behind each text.

        Args:
            places: From `find`.
            rows: ``(n,)``; text ``i`` goes to ``out[rows[i]]``.
            mask: ``(B, m)``, 1 where a token belongs, 0 behind the text.
            out: ``(B, m)``.

        Raises:
            ChecksumError: A block that holds one of the texts is damaged; some of ``out`` may be written.
            FormatError: A table is another one than the manifest's.
        """
        for number, here in places.files:
            starts, stops, to = places.starts[here], places.stops[here], rows[places.texts[here]]
            ids = self._file(number).ids(starts, stops)
            lengths = stops - starts
            width = int(lengths.max())
            if width * len(starts) > _MAX_SPREAD * int(lengths.sum()):
                out[to] = 0
                for row, start, stop in zip(to.tolist(), starts.tolist(), stops.tolist(), strict=True):
                    out[row, : stop - start] = ids[start:stop]
                continue
            found = _windows(ids, starts, stops, width)
            found *= mask[to, :width]
            out[to, :width], out[to, width:] = found, 0

    def _join(self, manifest: TokensManifest) -> None:
        """Replace the tables by a node file that holds all of them; keep them where there can be none."""
        name = f"tokens-{manifest.digest}.tbl"
        try:
            path = node_file(name, lambda _: self._joined())
            table = Table(LocalStore(path.parent).map(name), name=name)
            owner = self._dataset.text_id
            ids_table(
                table,
                first_row=0,
                num_rows=manifest.num_samples,
                tokenizer=self._tokenizer,
                dataset_id=owner,
            )
        except ShardflowError as error:
            logger.warning("Stored tokens are read from a table a shard, which is slower: %s", error)
            return
        self._first_rows = np.array([0, manifest.num_samples])
        self._open_files[0] = _IdsFile(table)

    def _joined(self) -> Iterator[bytes]:
        """Yield one table of the ids of all shards."""
        counts = self.counts
        shards = list(pairwise(self._first_rows.tolist()))
        first_tokens = np.cumsum([0, *(counts[first:stop].sum(dtype=np.int64) for first, stop in shards)])

        def bounds() -> Iterator[NDArray[Any]]:
            yield np.zeros(1, "<u8")
            for (first, stop), before in zip(shards, first_tokens.tolist(), strict=False):
                yield before + np.cumsum(counts[first:stop], dtype=np.uint64)

        def ids() -> Iterator[NDArray[Any]]:
            for number, (first, stop) in enumerate(shards):
                table = self._open(number, is_kept=False)
                if not np.array_equal(np.diff(table.column("first_token")), counts[first:stop]):
                    raise FormatError(
                        f"{table.name} must hold as many tokens a text as {COUNTS_NAME} says, got other "
                        "numbers; delete the folder and tokenize again."
                    )
                yield table.column("token_ids")

        dtype = self._open(0, is_kept=False).column("token_ids").dtype if shards else np.dtype("<u2")
        num_rows = int(self._first_rows[-1])
        columns = [
            StreamedColumn(name="first_token", dtype=np.dtype("<u8"), shape=(num_rows + 1,), pieces=bounds()),
            StreamedColumn(name="token_ids", dtype=dtype, shape=(int(first_tokens[-1]),), pieces=ids()),
        ]
        meta = {**_meta(_IDS_KIND, self._tokenizer, self._dataset.text_id), "first_row": 0}
        yield from stream_table(columns, meta)

    def _file(self, number: int) -> _IdsFile:
        with self._lock:
            file = self._open_files.get(number)
            if file is not None:
                self._open_files.move_to_end(number)
                return file
        file = _IdsFile(self._open(number))
        with self._lock:
            self._open_files[number] = file
            while len(self._open_files) > _MAX_OPEN_TABLES:
                self._open_files.popitem(last=False)
        return file

    def _open(self, number: int, *, is_kept: bool = True) -> Table:
        file, dataset = self._files[number], self._dataset
        name = f"{tokens_folder(self._tokenizer, dataset.text_id)}/{ids_name(number)}"
        first = int(self._first_rows[number])
        rows = range(first, first + file.num_rows)
        if is_kept:
            table = dataset.table_beside(name, sha256=file.sha256, num_bytes=file.num_bytes, rows=rows)
        else:
            data = named_bytes(dataset.store, name, sha256=file.sha256, num_bytes=file.num_bytes)
            table = Table(memoryview(data), name=name)
        return ids_table(
            table,
            first_row=int(self._first_rows[number]),
            num_rows=file.num_rows,
            tokenizer=self._tokenizer,
            dataset_id=dataset.text_id,
        )
