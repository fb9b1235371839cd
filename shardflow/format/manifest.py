"""Manifest: the list of a dataset's files with sizes and digests, written last.

``manifest-000001.json`` never changes after that; version 2 is another file. Its digest is the
``dataset_id``. Entries validate themselves, so that a foreign manifest can neither lead out of its folder
nor count backwards. The layout is in docs/format.md, section 8.
"""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from shardflow.errors import FormatError, ManifestError, NoListingError, NotFoundError, StorageError
from shardflow.format.keys import (
    DIGEST_PATTERN,
    SHARD_NAME_PATTERN,
    SPLIT_PATTERN,
    Json,
    canonical_json,
    parse_json,
    sha256_hex,
)
from shardflow.format.reasons import OutcomeCounts
from shardflow.storage import ByteStore, check_object_path

FORMAT = "shardflow"
FORMAT_VERSION = 1
BRICKS_FORMAT_VERSION = 2
"""Of a version in which a series has bricks and no slices."""
_PAGE = "page"
_LINES = "line_outcomes"
SAMPLES_BLOCKS = "samples_blocks"
"""Name in ``extra`` of `Manifest.samples_blocks`."""
MAX_NUM_BYTES = 96 << 20
"""Of the file of a manifest: some 270,000 shards. A larger one is refused before it is read."""
# A copy may hold the newest version alone, so the first numbers may be missing.
_MAX_MISSING_VERSIONS = 8
_PATH = re.compile(r"manifest-(\d{6})\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file of the dataset: its path inside it, its size, its SHA-256.

    Raises:
        ManifestError: The path leaves the dataset, the size is no count, or the digest is none.
    """

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        try:
            check_object_path(self.path)
        except (StorageError, AttributeError, TypeError):
            raise ManifestError("a file's path must stay inside the dataset, got another one.") from None
        check_count(self.num_bytes, "num_bytes")
        check_digest(self.sha256, "sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A shard: tar, index, and what they hold; known elsewhere by its position in the list.

    Raises:
        ManifestError: A name, count or file is none.
    """

    name: str
    split: str
    path: str
    num_bytes: int
    sha256: str
    index: FileEntry
    num_samples: int
    """Samples that the files hold."""
    num_fields: int
    num_removed: int = 0
    """Samples of them that this version does not have any more."""
    num_volumes: int = 0
    """Fields of them that are volumes in bricks."""

    def __post_init__(self) -> None:
        names = ((self.name, SHARD_NAME_PATTERN), (self.split, SPLIT_PATTERN))
        if not all(pattern.fullmatch(name) for name, pattern in names):
            raise ManifestError("a shard must have a name and a split of format 1, got another name.")
        check_count(self.num_samples, "num_samples")
        check_count(self.num_fields, "num_fields")
        check_count(self.num_removed, "num_removed")
        check_count(self.num_volumes, "num_volumes")
        if self.num_removed and self.num_removed >= self.num_samples:
            raise ManifestError("a shard without any sample of a version must not be named by it, got one.")
        # Checks path, size and digest.
        _ = self.file

    @property
    def file(self) -> FileEntry:
        """The tar as a file."""
        return FileEntry(path=self.path, num_bytes=self.num_bytes, sha256=self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry(FileEntry):
    """The ledger: a file, and the head of its hash chain.

    Raises:
        ManifestError: The file or the head is none.
    """

    head: str

    def __post_init__(self) -> None:
        FileEntry.__post_init__(self)
        check_digest(self.head, "head")


def check_count(value: object, name: str) -> None:
    """Check a count.

    Raises:
        ManifestError: ``value`` is no integer, or negative.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ManifestError(f"{name} must be an integer from 0, got a {type(value).__name__} {value!a:.20}.")


def check_digest(value: object, name: str) -> None:
    """Check a SHA-256.

    Raises:
        ManifestError: ``value`` is not 64 lower-case hexadecimal digits.
    """
    if not isinstance(value, str) or not DIGEST_PATTERN.fullmatch(value):
        raise ManifestError(f"{name} must be 64 hexadecimal digits, got another value.")


class ShardPlace(NamedTuple):
    """Part of a shard's entry that a reader needs for each sample."""

    name: str
    path: str
    num_bytes: int
    num_volumes: int


class CheckedShards(Sequence[ShardEntry]):
    """Shards of a manifest that was parsed and checked before, see `shardflow.format.manifest_table`.

    Attributes:
        splits: Numbers of samples and shards of each split, as `Manifest.splits`.
        has_volumes: Whether some shard has volumes in bricks.
        index_num_bytes: Size of all indexes.
    """

    splits: dict[str, dict[str, int]]
    has_volumes: bool
    index_num_bytes: int

    @abstractmethod
    def place(self, place: int) -> ShardPlace:
        """Return name, path and sizes of a shard, without making its entry."""

    @abstractmethod
    def find(self, path: str) -> int | None:
        """Return the position of the shard whose tar or index has a path; None if none has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One version of a dataset.

    Raises:
        ManifestError: The entries disagree with each other.
    """

    manifest_version: int
    shards: tuple[ShardEntry, ...] | CheckedShards
    samples: FileEntry
    counts: OutcomeCounts
    ledger: LedgerEntry | None = None
    parent: str | None = None
    """``dataset_id`` of the version before; None for version 1."""
    created_with: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that decide the bytes."""
    config_digest: str | None = None
    """Digest of the settings that decide the bytes; None where nothing was packed by settings."""
    key_id: str | None = None
    """Which pseudonym key made the sample keys; not a secret."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """Facts of the dataset as JSON without floats; never a clock, host or duration. ``page``,
    ``line_outcomes`` and ``samples_blocks``, where there are any, are files, see there."""
    _digest: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count(self.manifest_version, "manifest_version")
        for name, count in asdict(self.counts).items():
            check_count(count, name)
        for digest, name in ((self.parent, "parent"), (self.config_digest, "config_digest")):
            if digest is not None:
                check_digest(digest, name)
        if isinstance(self.shards, CheckedShards):
            return
        names = [shard.name for shard in self.shards]
        paths = [entry.path for entry in self.files()]
        if len({*names}) < len(names) or len({*paths}) < len(paths):
            raise ManifestError("a manifest must name each shard and each file once, got one twice.")

    @property
    def dataset_id(self) -> str:
        """SHA-256 of the canonical bytes without the digest itself, as 64 hexadecimal digits."""
        if self._digest is None:
            object.__setattr__(self, "_digest", sha256_hex(canonical_json(self._body())))
        return str(self._digest)

    @property
    def format_version(self) -> int:
        """Version of the format that a reader has to know."""
        shards = self.shards
        has_volumes = (
            shards.has_volumes
            if isinstance(shards, CheckedShards)
            else any(shard.num_volumes for shard in shards)
        )
        return BRICKS_FORMAT_VERSION if has_volumes else FORMAT_VERSION

    @property
    def index_num_bytes(self) -> int:
        """Size of the indexes of all shards."""
        shards = self.shards
        if isinstance(shards, CheckedShards):
            return shards.index_num_bytes
        return sum(shard.index.num_bytes for shard in shards)

    @property
    def splits(self) -> dict[str, dict[str, int]]:
        """Numbers of samples and shards of each split, sorted by name."""
        if isinstance(self.shards, CheckedShards):
            return {split: dict(numbers) for split, numbers in sorted(self.shards.splits.items())}
        totals: dict[str, dict[str, int]] = {}
        for shard in self.shards:
            counts = totals.setdefault(shard.split, {"num_samples": 0, "num_shards": 0})
            counts["num_samples"] += shard.num_samples - shard.num_removed
            counts["num_shards"] += 1
        return dict(sorted(totals.items()))

    def shard_place(self, number: int) -> ShardPlace:
        """Return name, path and sizes of a shard, by its position."""
        if isinstance(self.shards, CheckedShards):
            return self.shards.place(number)
        entry = self.shards[number]
        return ShardPlace(entry.name, entry.path, entry.num_bytes, entry.num_volumes)

    @property
    def page(self) -> FileEntry | None:
        """The HTML page of the dataset; None if it has none.

        It is named in ``extra``, so that readers without support for pages open the dataset.
        """
        return _file_in(self.extra, _PAGE)

    @property
    def line_outcomes(self) -> FileEntry | None:
        """The outcomes of a corpus' lines (`shardflow.format.ledger`); None of any other dataset.

        It is named in ``extra`` for the same reason.
        """
        return _file_in(self.extra, _LINES)

    @property
    def samples_blocks(self) -> FileEntry | None:
        """The digests of the blocks of the samples table, see `shardflow.format.file_blocks`; None without.

        It is named in ``extra`` for the same reason.
        """
        return _file_in(self.extra, SAMPLES_BLOCKS)

    def with_page(self, page: FileEntry) -> Manifest:
        """Return a copy of this manifest that also names a page."""
        return replace(self, extra={**self.extra, _PAGE: asdict(page)})

    def files(self) -> list[FileEntry]:
        """Every file that the manifest names: shard, its index, ..., and `other_files`."""
        files = [entry for shard in self.shards for entry in (shard.file, shard.index)]
        return [*files, *self.other_files()]

    def other_files(self) -> list[FileEntry]:
        """Return the files that are of no shard: samples table, its blocks, ledger, lines, page."""
        others = (self.samples, self.samples_blocks, self.ledger, self.line_outcomes, self.page)
        return [entry for entry in others if entry]

    def encode(self) -> bytes:
        """Return the bytes of the manifest file."""
        return canonical_json({**self._body(), "digest": self.dataset_id}) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest file and check it against its own digest.

        Raises:
            ManifestError: The bytes are not canonical JSON, name another format or a newer version of it,
                carry another digest than theirs, or miss an entry.
        """
        body = _parse_object(data)
        found = (body.get("format"), body.get("format_version"))
        if found not in ((FORMAT, FORMAT_VERSION), (FORMAT, BRICKS_FORMAT_VERSION)):
            raise ManifestError(
                f"a manifest must be of format {FORMAT} {FORMAT_VERSION} or {BRICKS_FORMAT_VERSION}, got "
                f"{found[0]!a} {found[1]!a}; newer formats need a newer shardflow."
            )
        digest = body.pop("digest", None)
        check_digest(digest, "the digest of a manifest")
        # The bytes are canonical, and so are those without the digest: no second encoding.
        named = f',"digest":"{digest}"'.encode()
        rest = data[:-1].replace(named, b"") if data.count(named) == 1 else canonical_json(body)
        expected = sha256_hex(rest)
        if digest != expected:
            raise ManifestError(
                f"a manifest must carry its content's digest {expected}, got {digest!a}; fetch it again."
            )
        try:
            manifest = _from_body(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestError(
                f"a manifest must hold every entry of format 1, got {type(error).__name__} on reading."
            ) from None
        object.__setattr__(manifest, "_digest", expected)
        return manifest

    @classmethod
    def checked(
        cls, body: dict[str, Any], shards: tuple[ShardEntry, ...] | CheckedShards, dataset_id: str
    ) -> Manifest:
        """Return a manifest whose other entries were parsed and checked before, as its shards were."""
        manifest = _with_shards(body, shards)
        object.__setattr__(manifest, "_digest", dataset_id)
        return manifest

    def body_without_shards(self) -> dict[str, Json]:
        """Return the other entries, for `checked`."""
        return {
            "format": FORMAT,
            "format_version": self.format_version,
            "manifest_version": self.manifest_version,
            "parent": self.parent,
            "created_with": dict(self.created_with),
            "config_digest": self.config_digest,
            "key_id": self.key_id,
            "splits": self.splits,
            "samples": asdict(self.samples),
            "ledger": asdict(self.ledger) if self.ledger else None,
            "counts": asdict(self.counts),
            "extra": dict(self.extra),
        }

    def _body(self) -> dict[str, Json]:
        shards: list[Json] = [
            {
                "name": shard.name,
                "split": shard.split,
                **_encoded(shard),
                "index": _encoded(shard.index),
                "num_samples": shard.num_samples,
                "num_fields": shard.num_fields,
                **({"num_removed": shard.num_removed} if shard.num_removed else {}),
                **({"num_volumes": shard.num_volumes} if shard.num_volumes else {}),
            }
            for shard in self.shards
        ]
        return {**self.body_without_shards(), "shards": shards}


def _encoded(file: FileEntry | ShardEntry) -> dict[str, Json]:
    return {"path": file.path, "num_bytes": file.num_bytes, "sha256": file.sha256}


def manifest_path(version: int) -> str:
    """Name the manifest file of a version, from 1."""
    return f"manifest-{version:06d}.json"


def versions(store: ByteStore) -> list[int]:
    """Return the versions that a store holds, ascending.

    A store that cannot list (plain HTTP) is asked for one number after the other, until so many are missing
    that no more are expected.
    """
    try:
        paths = store.list("manifest-")
    except NoListingError:
        return _probe_versions(store)
    matches = (_PATH.fullmatch(path) for path in paths)
    return sorted(int(match[1]) for match in matches if match)


def _probe_versions(store: ByteStore) -> list[int]:
    found: list[int] = []
    for number in itertools.count(1):
        if number - (found[-1] if found else 0) > _MAX_MISSING_VERSIONS:
            return found
        with suppress(NotFoundError):
            store.size(manifest_path(number))
            found.append(number)
    return found


def latest_version(store: ByteStore) -> int:
    """Return the newest version of the dataset in a store.

    Raises:
        ManifestError: There is none: no such folder, or packing did not finish.
    """
    found = versions(store)
    if not found:
        # What else is there is not listed: a mistyped path may be a folder with millions of files below it.
        raise ManifestError(
            "a dataset must hold a manifest-NNNNNN.json, found none; is the path right, "
            "and did packing finish?"
        )
    return found[-1]


def load(store: ByteStore, version: int | None = None, *, num_bytes: int | None = None) -> Manifest:
    """Load a version of the dataset in a store; the newest unless one is given.

    Args:
        store: Where the dataset is stored.
        version: Number of the version.
        num_bytes: Size of its manifest, where it is known already.

    Raises:
        ManifestError: There is no such manifest, or it cannot be trusted; see `Manifest.parse`.
    """
    number = latest_version(store) if version is None else version
    path = manifest_path(number)
    try:
        check_size(store.size(path) if num_bytes is None else num_bytes)
        manifest = Manifest.parse(store.read(path))
    except NotFoundError:
        raise _no_version(number, versions(store)) from None
    except ManifestError as error:
        raise ManifestError(f"{path}: {error.message}") from None
    if manifest.manifest_version != number:
        raise ManifestError(
            f"{path} must hold version {number}, got {manifest.manifest_version}; was it copied?"
        )
    return manifest


def check_size(num_bytes: int) -> None:
    """Refuse a manifest that is too large, before it is read.

    Raises:
        ManifestError: It is.
    """
    if num_bytes > MAX_NUM_BYTES:
        raise ManifestError(
            f"a manifest must have at most {MAX_NUM_BYTES >> 20} MiB, got {num_bytes >> 20} MiB; fetch it "
            "again, and if the dataset has that many shards, pack it into larger ones."
        )


def _no_version(number: int, found: list[int]) -> ManifestError:
    if found and number < found[0]:
        return ManifestError(
            f"version {number} of the dataset must exist, got {found[0]} as its oldest: earlier ones were "
            "deleted after samples were removed (shardflow compact); begin anew with a newer one."
        )
    return ManifestError(f"{manifest_path(number)} must exist, found none; versions here: {found}.")


def commit(store: ByteStore, manifest: Manifest) -> str:
    """Write the manifest of a dataset whose other files all exist: the commit point.

    Returns:
        The ``dataset_id``.

    Raises:
        AlreadyExistsError: This version exists.
    """
    store.put_new(manifest_path(manifest.manifest_version), manifest.encode())
    return manifest.dataset_id


def _file_in(extra: Mapping[str, Json], name: str) -> FileEntry | None:
    """Read the entry of a file that ``extra`` names.

    Raises:
        ManifestError: It is no file.
    """
    fields = extra.get(name)
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.keys() != {"path", "num_bytes", "sha256"}:
        raise ManifestError(
            f"extra.{name} must be a file with path, num_bytes and sha256, got another value."
        )
    entry: dict[str, Any] = fields
    return FileEntry(**entry)


def _parse_object(data: bytes) -> dict[str, Any]:
    if not data.endswith(b"\n"):
        raise ManifestError("a manifest must end with a line end, got none; is the file cut?")
    try:
        body = parse_json(data[:-1], what="a manifest")
    except FormatError as error:
        raise ManifestError(error.message) from None
    if not isinstance(body, dict):
        raise ManifestError("a manifest must be a JSON object, got another value.")
    return body


def _from_body(body: dict[str, Any]) -> Manifest:
    shards = (ShardEntry(**{**shard, "index": FileEntry(**shard["index"])}) for shard in body["shards"])
    manifest = _with_shards(body, tuple(shards))
    if body["splits"] != manifest.splits:
        raise ManifestError("a manifest's splits must be the sums of its shards, got other numbers.")
    if manifest._body() != body:  # entries are of the types that the classes check, so 1 is not True
        raise ManifestError(
            "a manifest must hold the entries of its format and no others; see docs/format.md."
        )
    return manifest


def _with_shards(body: dict[str, Any], shards: tuple[ShardEntry, ...] | CheckedShards) -> Manifest:
    ledger = body["ledger"]
    return Manifest(
        manifest_version=body["manifest_version"],
        shards=shards,
        samples=FileEntry(**body["samples"]),
        counts=OutcomeCounts(**body["counts"]),
        ledger=LedgerEntry(**ledger) if ledger else None,
        parent=body["parent"],
        created_with=body["created_with"],
        config_digest=body["config_digest"],
        key_id=body["key_id"],
        extra=body["extra"],
    )
