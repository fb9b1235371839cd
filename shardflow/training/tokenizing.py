"""Stored tokens: tokenizes every text of a dataset shard by shard, resumable after a kill.

The ids of each shard are a file of their own; the counts and the manifest that makes them valid are written
when the last one exists. Shards are tokenized in parallel, and the tokenizer has threads of its own. Needs
``tokenizers``, but neither torch nor transformers.

Conversations are counted in the same way by a model's processor, in processes of their own: a file of counts
a shard, and the table when the last one exists. Shards that an earlier version of the dataset has too keep
their counts. Those of more than a number of tokens may be split, and have a row for each part. Those that a
template makes are counted anew for each version, whose columns and earlier studies may differ.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.errors import ChecksumError, ConfigError, FormatError, ShardflowError, os_reason
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.conversations.stored import count_conversations, picture_entries
from shardflow.fields.field import Field
from shardflow.format import Dataset
from shardflow.format.counts import COUNTS_NAME as CONVERSATION_COUNTS
from shardflow.format.counts import (
    ConversationCounts,
    CountedShard,
    CountsManifest,
    counts_folder,
    counts_name,
    open_conversation_counts,
    template_counts_name,
)
from shardflow.format.entities import EntityDataset
from shardflow.format.foreign.places import local_folder
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.table import Table, crc32c
from shardflow.format.token_manifest import (
    COUNTS_NAME,
    TokenFile,
    TokenFiles,
    TokensManifest,
    ids_name,
    open_manifest,
    tokens_folder,
)
from shardflow.format.tokens import encode_counts, encode_ids, ids_table, open_counts
from shardflow.loading.counting import TemplateCounter
from shardflow.processes import group_signals_held_back, ignore_group_signals
from shardflow.storage import ByteRange, LocalStore, write_atomic

_FILE = "tokenizer.json"
_MANIFEST = "manifest.json"
# Texts that are read and tokenized together; bounds the memory of a thread, and has no effect on the ids.
_BATCH = 1024
_WIDEST_UINT16 = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedDataset:
    """Summary of a job."""

    tokenizer: str
    num_samples: int
    num_tokens: int
    num_shards: int
    num_shards_kept: int
    """Shards that an earlier job had finished."""


def tokenizer_digest(path: Path) -> str:
    """Return the identity of a tokenizer: the SHA-256 of its ``tokenizer.json``.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        ConfigError: There is no such file.
    """
    return hashlib.sha256(read_tokenizer(path)).hexdigest()


def read_tokenizer(path: Path) -> bytes:
    """Read the ``tokenizer.json`` of a tokenizer; arguments and errors as of `tokenizer_digest`."""
    try:
        return (path / _FILE if path.is_dir() else path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"The tokenizer {path.name!r} is not a {_FILE} or a folder with one ({os_reason(error)}); "
            "correct text.tokenizer or --tokenizer, or make one with: shardflow train-tokenizer --help."
        ) from None


class TextTokenizer:
    """Tokenizer for whole texts, without begin and end tokens. Safe for many threads.

    Args:
        path: ``tokenizer.json``, or the folder that holds it.

    Attributes:
        digest: Identity of the tokenizer.
        dtype: uint16 if every id fits, else uint32.

    Raises:
        ConfigError: The tokenizer cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        content = read_tokenizer(path)
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a broken file
            raise ConfigError(
                f"{_FILE} must be a tokenizer, got {type(error).__name__} on reading it; make it anew."
            ) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # a text that happens to spell "</s>" does not end there
        self._tokenizer = tokenizer
        self.digest = hashlib.sha256(content).hexdigest()
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self.dtype = np.dtype("<u2" if largest < _WIDEST_UINT16 else "<u4")

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return [encoded.ids for encoded in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def tokenize_dataset(
    dataset: Dataset,
    tokenizer: TextTokenizer,
    *,
    num_threads: int = 2,
    on_shard: Callable[[int, int], None] | None = None,
) -> TokenizedDataset:
    """Tokenize all texts of a dataset, and write the ids and their counts beside it.

    Args:
        dataset: A dataset in a folder, or a view of one.
        tokenizer: The tokenizer.
        num_threads: Shards that are tokenized at once; each holds its own ids in memory.
        on_shard: Called with the number of shards done, and of all.

    Raises:
        ConfigError: The dataset is not in a local folder.
        ShardflowError: A text cannot be read or trusted.
    """
    folder = _local_store(dataset).root / tokens_folder(tokenizer.digest, dataset.dataset_id)
    shards = list(_shard_rows(dataset))
    if (folder / _MANIFEST).is_file():
        open_manifest(dataset, tokenizer.digest)
        counts = open_counts(dataset, tokenizer.digest)
        return _summary(tokenizer, counts, len(shards), num_kept=len(shards))
    counts = np.zeros(dataset.samples.num_samples, np.uint32)
    files = []
    num_kept = 0
    with ThreadPoolExecutor(num_threads) as pool:
        jobs = [pool.submit(_tokenize_shard, dataset, tokenizer, folder, *each) for each in enumerate(shards)]
        try:
            for number, (job, rows) in enumerate(zip(jobs, shards, strict=True)):
                file, counts[rows.start : rows.stop], is_kept = job.result()
                files.append(file)
                num_kept += is_kept
                if on_shard is not None:
                    on_shard(number + 1, len(shards))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    table = encode_counts(counts, tokenizer=tokenizer.digest, dataset_id=dataset.dataset_id)
    manifest = TokensManifest(
        dataset_id=dataset.dataset_id,
        tokenizer=tokenizer.digest,
        num_samples=len(counts),
        counts_sha256=sha256_hex(table),
        files=TokenFiles.of(files),
    )
    write_atomic(folder / COUNTS_NAME, [table], replace=True)
    write_atomic(folder / _MANIFEST, [manifest.encode()], replace=True)
    return _summary(tokenizer, counts, len(shards), num_kept=num_kept)


def _local_store(dataset: Dataset) -> LocalStore:
    store = local_folder(dataset.store)
    if store is None:
        raise ConfigError(
            "DATASET must be a folder, got a remote store; tokenize where the shards were packed."
        )
    return store


def _summary(
    tokenizer: TextTokenizer, counts: npt.NDArray[Any], num_shards: int, *, num_kept: int
) -> TokenizedDataset:
    return TokenizedDataset(
        tokenizer=tokenizer.digest,
        num_samples=len(counts),
        num_tokens=int(counts.sum(dtype=np.int64)),
        num_shards=num_shards,
        num_shards_kept=num_kept,
    )


def _shard_rows(dataset: Dataset) -> Iterator[range]:
    """Yield the rows of each shard: the samples table is ordered by split and shard."""
    shard = dataset.samples.column("shard")[:]
    starts = np.append(0, np.flatnonzero(np.diff(shard)) + 1).tolist() if len(shard) else []
    for start, stop in zip(starts, [*starts[1:], len(shard)], strict=False):
        yield range(start, stop)


def _tokenize_shard(
    dataset: Dataset, tokenizer: TextTokenizer, folder: Path, number: int, rows: range
) -> tuple[TokenFile, npt.NDArray[Any], bool]:
    """Return the file of a shard, the counts of its rows, and whether an earlier job wrote it."""
    path = folder / ids_name(number)
    try:
        data = path.read_bytes()
        table = ids_table(
            Table(memoryview(data), name=path.name),
            first_row=rows.start,
            num_rows=len(rows),
            tokenizer=tokenizer.digest,
            dataset_id=dataset.dataset_id,
        )
        table.verify()
        counts = np.diff(table.column("first_token").astype(np.int64)).astype(np.int64)
        is_kept = True
    except (OSError, ShardflowError):
        ids, counts = _encoded(dataset, tokenizer, rows)
        data = encode_ids(
            ids,
            counts,
            first_row=rows.start,
            tokenizer=tokenizer.digest,
            dataset_id=dataset.dataset_id,
        )
        write_atomic(path, [data], replace=True)
        is_kept = False
    return TokenFile(num_rows=len(rows), num_bytes=len(data), sha256=sha256_hex(data)), counts, is_kept


def _encoded(
    dataset: Dataset, tokenizer: TextTokenizer, rows: range
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Tokenize the texts of a shard: the ids of all, and how many each has."""
    counts = np.zeros(len(rows), np.int64)
    pieces = [np.zeros(0, tokenizer.dtype)]
    for places, texts in _texts(dataset, rows):
        encoded = tokenizer.encode(texts)
        counts[places] = [len(ids) for ids in encoded]
        pieces.append(np.fromiter(chain.from_iterable(encoded), tokenizer.dtype))
    return np.concatenate(pieces), counts


def _texts(dataset: Dataset, rows: range) -> Iterator[tuple[npt.NDArray[np.int64], list[str]]]:
    """Yield the texts of a shard with their places among its rows, in order, a batch at a time."""
    shard = int(dataset.samples.gather("shard", rows.start))
    index, path = dataset.shard_index(shard), dataset.manifest.shards[shard].path
    every = np.arange(rows.start, rows.stop)
    samples = dataset.samples.gather("row_in_shard", every).astype(np.int64)
    keys = dataset.studies.gather("sample_key", dataset.study_rows(every))
    if samples.max() >= index.num_samples or (index.sample_keys[samples] != keys).any():
        raise FormatError(
            f"samples table and index must name the same samples, got others ({index.shard}); run "
            "`shardflow verify`."
        )
    # A sample that was removed has no row, but its bytes stay in the shard until it is compacted.
    is_text = np.array([name == index.text_field for name in index.field_names])
    found = np.flatnonzero(is_text[index.field_name_ids] & (index.field_num_bytes > 0))
    field_of = np.full(index.num_samples, -1)
    field_of[np.searchsorted(index.first_field, found, side="right") - 1] = found
    # In the order of the rows, as the ids are stored.
    fields = field_of[samples]
    places = np.flatnonzero(fields >= 0)
    for start in range(0, len(places), _BATCH):
        at = places[start : start + _BATCH]
        # Entities of one study have one report.
        batch, of_place = np.unique(fields[at], return_inverse=True)
        ranges = [
            ByteRange(offset, size)
            for offset, size in zip(
                index.field_offsets[batch].tolist(), index.field_num_bytes[batch].tolist(), strict=True
            )
        ]
        buffers = [bytearray(span.num_bytes) for span in ranges]
        dataset.store.read_ranges(path, ranges, [memoryview(buffer) for buffer in buffers])
        checksums = index.field_crc32c[batch].tolist()
        for buffer, checksum in zip(buffers, checksums, strict=True):
            if crc32c(memoryview(buffer)) != checksum:
                raise ChecksumError(
                    f"a text of {index.shard} must have its index's crc32c, got another; run `shardflow "
                    "verify`."
                )
        pieces = _pieces(dataset, every[at])
        texts = [
            bytes(buffers[number][piece]) for number, piece in zip(of_place.tolist(), pieces, strict=True)
        ]
        yield at, [_text(text, index.shard) for text in texts]


def _pieces(dataset: Dataset, rows: npt.NDArray[np.int64]) -> list[slice]:
    """Return which bytes of its report each row covers: all of them, except for entities."""
    if not isinstance(dataset, EntityDataset):
        return [slice(None)] * len(rows)
    starts = dataset.samples.gather("text_start", rows).astype(np.int64)
    stops = starts + dataset.samples.gather("text_bytes", rows)
    return [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _text(payload: bytes, shard: str) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(
            f"a text of {shard} must be UTF-8, got other bytes; run `shardflow verify`."
        ) from None


# ---- conversations -------------------------------------------------------------------------------

_CHUNK = 32
"""Conversations that a process renders before it returns their counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedConversations:
    """Summary of a job."""

    processor: str
    num_samples: int
    num_tokens: int
    """Of all sequences, those of pictures included."""
    num_images: int
    num_split: int
    """Samples whose conversation is split."""
    num_parts: int
    """Parts of those."""
    num_empty: int
    """Samples without a conversation, or with one that cannot be rendered."""
    longest: int
    """Tokens of the longest sequence; of a part, where conversations are split."""
    num_shards: int
    num_shards_kept: int
    """Shards that an earlier job had finished, or that an earlier version has too."""


def count_dataset(
    dataset: Dataset,
    processor: Path,
    *,
    split_at: int | None = None,
    fields: Mapping[str, Field] | None = None,
    name: str = "",
    num_processes: int = 1,
    on_shard: Callable[[int, int], None] | None = None,
) -> CountedConversations:
    """Render all conversations of a dataset, and write how many tokens and pictures each has beside it.

    Args:
        dataset: A dataset in a folder; of stored conversations one of whole studies.
        processor: Folder of the model's processor.
        split_at: Tokens above which a conversation is split at its turns; None to split none.
        fields: Fields of a loader, of which one makes conversations by a template; None for stored ones.
        name: Of that field.
        num_processes: Processes that render; 1 renders in this one.
        on_shard: Called with the number of shards done, and of all.

    Raises:
        ConfigError: The dataset is not in a local folder, the processor cannot be used, or the template does
            not fit the dataset.
        ShardflowError: A sample cannot be read or trusted.
    """
    job = _Job(dataset, processor, split_at, None if fields is None else (fields, name))
    counter = _Counter(job)
    store, template = _local_store(dataset), counter.template
    name = counter.counts_name
    folder = store.root / counts_folder(name, dataset.text_id)
    shards = list(_shard_rows(dataset))
    if _is_done(folder, counter):
        found = open_conversation_counts(
            dataset, counter.renderer.digest, split_at=split_at, template=template
        )
        return _counted(counter.renderer, found, len(shards), num_kept=len(shards))
    known = _counted_shards(folder, name) if template is None else {}
    # Parts that were counted with other columns are not resumed.
    of_part = sha256_hex(canonical_json([name, *template.tables])) if template and template.tables else name
    digests = [
        dataset.manifest.shards[int(dataset.samples.gather("shard", one.start))].sha256 for one in shards
    ]
    parts: list[ConversationCounts] = []
    num_kept = 0
    # A process imports transformers, which takes longer than a chunk of texts.
    num_processes = max(1, min(num_processes, sum(-(-len(rows) // _CHUNK) for rows in shards)))
    with _counting(job, counter, num_processes) as count:
        waiting: deque[tuple[int, ConversationCounts | None, list[Future[ConversationCounts]]]] = deque()
        for number, rows in enumerate(shards):
            former = known.get((digests[number], len(rows))) or _part(folder, number, rows, of_part)
            num_kept += former is not None
            waiting.append((number, former, [] if former is not None else count(rows)))
            while waiting and (len(waiting) > num_processes or number == len(shards) - 1):
                done, found_part, jobs = waiting.popleft()
                if found_part is None:
                    found_part = counter.joined([job.result() for job in jobs])
                    data = found_part.encode(
                        processor=of_part, dataset_id=dataset.text_id, first_row=shards[done].start
                    )
                    write_atomic(folder / _part_name(done), [data], replace=True)
                parts.append(found_part)
                if on_shard is not None:
                    on_shard(done + 1, len(shards))
    counts = counter.joined(parts)
    table = counts.encode(processor=name, dataset_id=dataset.text_id)
    manifest = CountsManifest(
        dataset_id=dataset.text_id,
        processor=name,
        num_samples=len(counts),
        num_bytes=len(table),
        sha256=sha256_hex(table),
        shards=tuple(
            CountedShard(sha256=digest, num_rows=len(part))
            for digest, part in zip(digests, parts, strict=True)
        ),
        template=template,
    )
    (folder / CountsManifest.file_name).unlink(missing_ok=True)  # of other columns
    write_atomic(folder / CONVERSATION_COUNTS, [table], replace=True)
    write_atomic(folder / CountsManifest.file_name, [manifest.encode()], replace=True)
    for number in range(len(shards)):
        (folder / _part_name(number)).unlink(missing_ok=True)
    return _counted(counter.renderer, counts, len(shards), num_kept=num_kept)


def _is_done(folder: Path, counter: _Counter) -> bool:
    """Return whether valid counts exist; those of a template are not, once a table that it reads changed."""
    path = folder / CountsManifest.file_name
    if not path.is_file():
        return False
    return CountsManifest.decode(path.read_bytes(), name=path.name).template == counter.template


def _counted(
    renderer: Renderer, counts: ConversationCounts, num_shards: int, *, num_kept: int
) -> CountedConversations:
    of_sample = np.diff(counts.first_rows())
    return CountedConversations(
        processor=renderer.digest,
        num_samples=counts.num_samples,
        num_tokens=int(counts.tokens.sum(dtype=np.int64)),
        num_images=int(counts.images.sum(dtype=np.int64)),
        num_split=int((of_sample > 1).sum()),
        num_parts=int(of_sample[of_sample > 1].sum()),
        num_empty=int((counts.tokens[:, 0] == 0).sum()),
        longest=int(counts.tokens.max(initial=0)),
        num_shards=num_shards,
        num_shards_kept=num_kept,
    )


def _part_name(number: int) -> str:
    return f"part-{number:06d}.tbl"


def _part(folder: Path, number: int, rows: range, name: str) -> ConversationCounts | None:
    """Return the counts of a shard that an earlier job wrote; None if there are none."""
    path = folder / _part_name(number)
    with suppress(OSError, ShardflowError):
        table = Table(memoryview(path.read_bytes()), name=path.name)
        table.verify()
        found = ConversationCounts.decode(
            table, processor=name, dataset_id=folder.name, num_rows=None, first_row=rows.start
        )
        return found if found.num_samples == len(rows) else None
    return None


def _counted_shards(folder: Path, name: str) -> dict[tuple[str, int], ConversationCounts]:
    """Return the counts of other versions, by SHA-256 and number of samples of the shard."""
    found: dict[tuple[str, int], ConversationCounts] = {}
    for path in sorted(folder.parent.glob(f"*/{CountsManifest.file_name}")):
        with suppress(OSError, ShardflowError):
            manifest = CountsManifest.decode(path.read_bytes(), name=path.name)
            data = (path.parent / CONVERSATION_COUNTS).read_bytes()
            if sha256_hex(data) != manifest.sha256:
                continue
            counts = ConversationCounts.decode(
                Table(memoryview(data), name=CONVERSATION_COUNTS),
                processor=name,
                dataset_id=manifest.dataset_id,
                num_rows=manifest.num_samples,
            )
            row = 0
            for shard in manifest.shards:
                own = counts.take(slice(row, row + shard.num_rows))
                found[shard.sha256, own.num_samples] = own
                row += shard.num_rows
    return found


_Count = Callable[[range], "list[Future[ConversationCounts]]"]


@dataclass(frozen=True, slots=True)
class _Job:
    """What processes that count are started with."""

    dataset: Dataset
    processor: Path
    split_at: int | None
    template: tuple[Mapping[str, Field], str] | None
    """Fields of a loader, and the name of the one that has the template; None for stored conversations."""


class _Counter:
    """Counter of the conversations of some rows, stored ones or those of a template."""

    def __init__(self, job: _Job) -> None:
        self._job, self._of_template = job, None
        if job.template is None:
            self.renderer = Renderer.load(job.processor)
            self.entries, self.template = picture_entries(self.renderer), None
            self.counts_name = counts_name(self.renderer.digest, job.split_at)
            return
        fields, name = job.template
        counter = self._of_template = TemplateCounter(job.dataset, fields, name, job.processor)
        self.renderer, self.entries, self.template = counter.renderer, counter.entries, counter.template
        self.counts_name = template_counts_name(job.dataset, self.renderer.digest, counter.template)

    def count(self, rows: range) -> ConversationCounts:
        """Count the conversations of some rows."""
        numbers = np.arange(rows.start, rows.stop)
        if self._of_template is not None:
            return self._of_template.count(numbers)[0]
        job = self._job
        return count_conversations(self.renderer, job.dataset, numbers, self.entries, split_at=job.split_at)

    def joined(self, blocks: list[ConversationCounts]) -> ConversationCounts:
        """Return the counts of all rows, one block after another."""
        return ConversationCounts.joined(blocks, self.entries, is_split=self._job.split_at is not None)


@contextmanager
def _counting(job: _Job, counter: _Counter, num_processes: int) -> Iterator[_Count]:
    """Give a function that counts the rows of a shard, in this process or in others."""
    if num_processes == 1:

        def here(rows: range) -> list[Future[ConversationCounts]]:
            done: Future[ConversationCounts] = Future()
            done.set_result(counter.count(rows))
            return [done]

        yield here
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _open_counter, (job,)) as pool:

        def elsewhere(rows: range) -> list[Future[ConversationCounts]]:
            with group_signals_held_back():
                return [
                    pool.submit(_count_rows, range(first, min(first + _CHUNK, rows.stop)))
                    for first in range(rows.start, rows.stop, _CHUNK)
                ]

        try:
            yield elsewhere
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_of_process: dict[str, _Counter] = {}


def _open_counter(job: _Job) -> None:
    """Prepare a process; it ends with the one that started it."""
    ignore_group_signals()
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - of a process that was spawned

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _of_process["counter"] = _Counter(job)


def _count_rows(rows: range) -> ConversationCounts:
    return _of_process["counter"].count(rows)
