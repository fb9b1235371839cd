"""Manifest of stored tokens: which tables hold the ids of the texts, and of which dataset and tokenizer.

It names a table for each shard. That of 10^5 shards is 11 MB of JSON, which takes seconds to parse, and its
entries 30 MB. So the first process of a node writes them as columns to a node file named by the SHA-256 of
the manifest's bytes; the others digest those and map the columns, as for the manifest of a dataset
(`shardflow.format.manifest_table`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError, ShardflowError
from shardflow.format import manifest_table
from shardflow.format.dataset import Dataset
from shardflow.format.keys import DIGEST_PATTERN, Json, canonical_json
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.signatures import trust_of
from shardflow.format.table import Table, encode_table
from shardflow.storage import ByteStore, LocalStore
from shardflow.storage.node_files import named_bytes, node_file, object_pieces

COUNTS_NAME: Final = "counts.tbl"
"""Name of the table of counts in its folder."""
_FORMAT_VERSION: Final = 1
_KIND: Final = "token-files"
_KIND_VERSION: Final = 1
_COLUMNS: Final = ("num_rows", "num_bytes", "sha256")
_MAX: Final = 1 << 62
_PIECE_NUM_BYTES: Final = 1 << 20
_FILES: Final = b',"files":['
_COUNT: Final = rb"(0|[1-9][0-9]{0,17})"
_FILE: Final = re.compile(
    rb'(,?)\{"num_bytes":' + _COUNT + rb',"num_rows":' + _COUNT + rb',"sha256":"([0-9a-f]{64})"\}'
)
"""An entry as every writer of the format makes it, which is also the check that its bytes are canonical."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """A table of token ids: the consecutive rows of the samples table that belong to one shard."""

    num_rows: int
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        is_size = min(self.num_rows, self.num_bytes) >= 0 and max(self.num_rows, self.num_bytes) < _MAX
        if not is_size or not DIGEST_PATTERN.fullmatch(self.sha256):
            raise FormatError("a table of tokens has a size, a number of rows and a SHA-256; got others.")


@dataclass(frozen=True, slots=True, eq=False)
class TokenFiles:
    """The tables of token ids, in the order of the samples table; an entry is made when it is asked for."""

    num_rows: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    sha256: NDArray[np.bytes_]

    @classmethod
    def of(cls, files: Iterable[TokenFile]) -> TokenFiles:
        """Return the columns of entries."""
        each = [*files]
        sizes = np.array([(file.num_rows, file.num_bytes) for file in each], "<i8").reshape(-1, 2)
        return cls(sizes[:, 0], sizes[:, 1], np.array([file.sha256 for file in each], "S64"))

    def __len__(self) -> int:
        return len(self.num_rows)

    def __getitem__(self, number: int) -> TokenFile:
        return TokenFile(
            num_rows=int(self.num_rows[number]),
            num_bytes=int(self.num_bytes[number]),
            sha256=self.sha256[number].decode("ascii"),
        )

    def __iter__(self) -> Iterator[TokenFile]:
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True, kw_only=True)
class TokensManifest(SidecarManifest):
    """Manifest of the tables of one tokenizer."""

    root = "tokens"
    file_name = "manifest.json"
    head: ClassVar[Mapping[str, Json]] = {"format": "shardflow-tokens", "format_version": _FORMAT_VERSION}
    remedy = "tokenize again"

    dataset_id: str
    tokenizer: str
    """SHA-256 of ``tokenizer.json``."""
    num_samples: int
    counts_sha256: str
    files: TokenFiles
    """One per shard, in the order of the samples table."""

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        files: list[Json] = [
            {"num_bytes": num_bytes, "num_rows": num_rows, "sha256": sha256.decode("ascii")}
            for num_bytes, num_rows, sha256 in zip(
                self.files.num_bytes.tolist(),
                self.files.num_rows.tolist(),
                self.files.sha256.tolist(),
                strict=True,
            )
        ]
        return {**self._others(), "files": files}

    def _others(self) -> dict[str, Json]:
        return {
            "counts_sha256": self.counts_sha256,
            "dataset_id": self.dataset_id,
            "num_samples": self.num_samples,
            "tokenizer": self.tokenizer,
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> TokensManifest:
        """Make a manifest of its entries."""
        return cls(**{**body, "files": TokenFiles.of(TokenFile(**file) for file in body["files"])})

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of each table; the size of the counts is not recorded."""
        ids = {ids_name(number): (file.num_bytes, file.sha256) for number, file in enumerate(self.files)}
        return {COUNTS_NAME: (None, self.counts_sha256), **ids}

    def belongs_in(self, name: str, owner: str) -> bool:
        """Return whether this is the manifest of a tokenizer and an owner."""
        return (self.tokenizer, self.dataset_id) == (name, owner)

    @classmethod
    def decode(cls, data: bytes, *, name: str) -> Self:
        """Parse and check a manifest, see `SidecarManifest.decode`, which says what is wrong with one."""
        return cls._matched(data) or super().decode(data, name=name)

    @classmethod
    def _matched(cls, data: bytes) -> Self | None:
        """Return a manifest whose entries all match the pattern; None where only parsing it can judge it."""
        at = start = data.find(_FILES) + len(_FILES)
        sizes, digests = array("q"), bytearray()
        for entry in _FILE.finditer(data, start):
            if entry.start() != at or bool(entry[1]) != (at > start):
                return None
            at = entry.end()
            sizes.extend((int(entry[3]), int(entry[2])))
            digests += entry[4]
        columns = np.asarray(sizes, "<i8").reshape(-1, 2)
        files = TokenFiles(columns[:, 0], columns[:, 1], np.frombuffer(digests, "S64"))
        rest = data[:start] + data[at:]
        try:
            entries = json.loads(rest)
            digest = entries.pop("digest")
            others = entries.keys() - cls.head.keys() - {"files"}
            manifest = cls(**{key: entries[key] for key in others}, files=files)
            body = {**cls.head, **manifest._others(), "files": []}
            if canonical_json({**body, "digest": digest}) + b"\n" != rest:
                return None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, FormatError):
            return None
        own = hashlib.sha256(data[:start].replace(f',"digest":"{digest}"'.encode("ascii", "replace"), b""))
        own.update(memoryview(data)[start:-1])
        return manifest._known_as(digest) if own.hexdigest() == digest else None

    def _known_as(self, digest: str) -> Self:
        """Return the manifest with its digest, which is not computed again."""
        vars(self)["digest"] = digest
        return self

    def encode_shared(self, file_sha256: str) -> bytes:
        """Return the node file of a manifest whose bytes have a SHA-256."""
        meta: dict[str, Json] = {
            "kind": _KIND,
            "format_version": _KIND_VERSION,
            "file_sha256": file_sha256,
            "digest": self.digest,
            "entries": self._others(),
        }
        return encode_table({name: getattr(self.files, name) for name in _COLUMNS}, meta)

    @classmethod
    def open_shared(cls, path: Path, file_sha256: str) -> Self:
        """Open a node file; the columns stay mapped.

        Raises:
            FormatError: It is damaged, or that of another manifest.
        """
        table = Table(LocalStore(path.parent).map(path.name), name=path.name)
        table.expect_kind(_KIND, _KIND_VERSION)
        if table.meta["file_sha256"] != file_sha256:
            raise FormatError(f"{path} is of another manifest.")
        files = TokenFiles(*map(table.column, _COLUMNS))
        return cls(**table.meta["entries"], files=files)._known_as(table.meta["digest"])


def tokens_folder(tokenizer: str, dataset_id: str) -> str:
    """Return where the tokens of a tokenizer are stored in a dataset.

    Args:
        tokenizer: SHA-256 of its ``tokenizer.json``, 64 hexadecimal digits.
        dataset_id: Digest of the manifest that is open, or of the entity view: rows of another one are other
            rows.
    """
    return f"{TokensManifest.root}/{tokenizer}/{dataset_id}"


def ids_name(number: int) -> str:
    """Return the name of a table of ids in the folder."""
    return f"ids-{number:06d}.tbl"


def open_manifest(dataset: Dataset, tokenizer: str) -> TokensManifest:
    """Return the manifest of a tokenizer's tokens.

    Args:
        dataset: The dataset, any store.
        tokenizer: SHA-256 of its ``tokenizer.json``.

    Raises:
        ConfigError: This version of the dataset has no tokens of this tokenizer.
        FormatError: The tokens are another dataset's, or cannot be trusted.
    """
    owner, num_samples = dataset.text_id, dataset.num_texts
    try:
        manifest = _load(dataset.store, tokenizer, owner)
    except NotFoundError:
        raise ConfigError(
            f"the dataset must be tokenized with tokenizer {tokenizer[:12]}, got no tokens of it beside "
            f"version {dataset.manifest_version}; run: shardflow tokenize DATASET --tokenizer FILE (and "
            "--view for the entities of a view)"
        ) from None
    num_rows = manifest.files.num_rows.tolist()  # a sum of 64 bits could begin again at 0
    if {manifest.num_samples, sum(num_rows)} != {num_samples}:
        raise FormatError(
            f"the manifest in {tokens_folder(tokenizer, owner)} names {manifest.num_samples} samples, but "
            f"this dataset has {num_samples}; delete the folder and tokenize again."
        )
    return manifest


def _load(store: ByteStore, tokenizer: str, owner: str) -> TokensManifest:
    """Load a manifest, a large one from a node file; errors as of `SidecarManifest.load`."""
    path = f"{tokens_folder(tokenizer, owner)}/{TokensManifest.file_name}"
    num_bytes = store.size(path)
    if num_bytes < manifest_table.MIN_SHARED_BYTES:
        return TokensManifest.load(store, tokenizer, owner)
    digest = hashlib.sha256()
    for piece in object_pieces(store, path, num_bytes, _PIECE_NUM_BYTES):
        digest.update(piece)
    sha256 = digest.hexdigest()
    trust = trust_of(store)
    if trust is not None:
        trust.check_digest(path, sha256)

    def make(_: Path) -> Iterator[bytes]:
        # The bytes that were digested, though the file may be another one now.
        data = named_bytes(store, path, sha256=sha256, num_bytes=num_bytes)
        yield TokensManifest.decode(data, name=path).encode_shared(sha256)

    try:
        place = node_file(f"token-files-{sha256}.tbl", make)
        try:
            manifest = TokensManifest.open_shared(place, sha256)
        except (FormatError, KeyError, TypeError):
            place.unlink(missing_ok=True)  # the next process makes it again
            raise
    except (ShardflowError, KeyError, TypeError) as error:
        logger.warning("The manifest of tokens is parsed by each process, which is slower: %s", error)
        return TokensManifest.load(store, tokenizer, owner)
    # What is not of this folder is refused there, with the reason.
    is_own = manifest.belongs_in(tokenizer, owner)
    return manifest if is_own else TokensManifest.load(store, tokenizer, owner)
