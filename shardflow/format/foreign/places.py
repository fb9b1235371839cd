"""Locations of foreign tars, a store that reads them, and facts on members (docs/format.md, section 14).

A manifest of foreign shards names each by a path inside the dataset, as always, and also by its location: a
relative path or a URL. An object at the path takes precedence, so a copy that includes the tars is a dataset
by itself, with the same dataset_id.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from shardflow.errors import ConfigError, ManifestError, NotFoundError, StorageError
from shardflow.format.contents.pictures import ImageHeader
from shardflow.format.foreign.scan import expand_braces
from shardflow.format.keys import Json
from shardflow.format.manifest import Manifest
from shardflow.storage import ByteRange, ByteStore, LocalStore, open_store, origin_of

LOCATIONS_VERSION: Final = 1
_WILD: Final = re.compile(r"[*?\[]")


def is_foreign(manifest: Manifest) -> bool:
    """Return whether the shards of a dataset are tars of other writers."""
    return "foreign" in manifest.extra


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """Facts of all images of a member name in a dataset, from their headers when they were indexed."""

    num_bits: int
    """8, or 16 if any image has more."""
    has_color: bool
    """Whether any image has color."""
    rows: tuple[int, int]
    """Least and greatest height, in pixels."""
    columns: tuple[int, int]
    """Least and greatest width, in pixels."""

    @classmethod
    def of(cls, header: ImageHeader) -> ImageFacts:
        """Return the facts of one image."""
        rows, columns = (header.rows, header.rows), (header.columns, header.columns)
        return cls(num_bits=header.num_bits, has_color=header.has_color, rows=rows, columns=columns)

    @property
    def size(self) -> tuple[int, int] | None:
        """Rows and columns of every image; None if they differ."""
        if self.rows[0] < self.rows[1] or self.columns[0] < self.columns[1]:
            return None
        return self.rows[0], self.columns[0]

    def plain(self) -> dict[str, Any]:
        """Return the facts as a manifest has them."""
        return {**asdict(self), "rows": list(self.rows), "columns": list(self.columns)}

    def joined(self, other: ImageFacts) -> ImageFacts:
        """Return the facts of both sets of images."""
        return ImageFacts(
            num_bits=max(self.num_bits, other.num_bits),
            has_color=self.has_color or other.has_color,
            rows=(min(self.rows[0], other.rows[0]), max(self.rows[1], other.rows[1])),
            columns=(min(self.columns[0], other.columns[0]), max(self.columns[1], other.columns[1])),
        )


def join_images(found: Iterable[tuple[str, ImageFacts]], images: dict[str, ImageFacts]) -> None:
    """Add facts of images to those of the same member names."""
    for name, facts in found:
        images[name] = images[name].joined(facts) if name in images else facts


def plain_images(images: Mapping[str, ImageFacts]) -> dict[str, Json]:
    """Return facts of images by their names as a manifest has them."""
    return {name: facts.plain() for name, facts in sorted(images.items())}


def num_samples_with(manifest: Manifest) -> Mapping[str, int] | None:
    """Return how many samples have each member name; None where an index does not say.

    Raises:
        ManifestError: The entry of the manifest is malformed.
    """
    foreign: Any = manifest.extra.get("foreign", {})
    found = foreign.get("fields")
    if found is not None and not (
        isinstance(found, dict) and all(type(count) is int for count in found.values())
    ):
        raise _malformed("fields")
    return found


def image_facts(manifest: Manifest, member: str) -> ImageFacts | None:
    """Return the facts of the images of a member name; None where an index does not say.

    Raises:
        ManifestError: The entry of the manifest is malformed.
    """
    # `ShardWriter` notes them under "members": its shards are not foreign.
    noted: Any = manifest.extra.get("foreign") or manifest.extra.get("members") or {}
    try:
        found = noted.get("images", {}).get(member)
        if found is None:
            return None
        num_bits = int(found["num_bits"])
        least_rows, most_rows = map(int, found["rows"])
        least_columns, most_columns = map(int, found["columns"])
        has_color = bool(found["has_color"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _malformed("images") from None
    if num_bits not in (8, 16) or not (0 < least_rows <= most_rows and 0 < least_columns <= most_columns):
        raise _malformed("images")
    return ImageFacts(
        num_bits=num_bits,
        has_color=has_color,
        rows=(least_rows, most_rows),
        columns=(least_columns, most_columns),
    )


def expand_places(pattern: str) -> list[str]:
    """Expand the braces of a pattern, and its ``*``, ``?`` and ``[...]``, as a shell does; sorted by name.

    Of an address the last part alone may have a ``*``, and nothing else is expanded in it.

    Raises:
        ConfigError: Braces are not closed, or no file has such a name.
        StorageError: The folder cannot be listed.
    """
    return [place for one in expand_braces(pattern) for place in _matching(one)]


def _matching(pattern: str) -> list[str]:
    if "://" in pattern:
        folder, _, name = pattern.rpartition("/")
        if "*" not in pattern:
            return [pattern]
        if "*" in folder:
            raise ConfigError(
                "the * of an address must stand after its last /, got one before; name the folders as {a,b}, "
                "or give a pattern for each."
            )
        names = open_store(folder).list(name.partition("*")[0])
        found = [f"{folder}/{one}" for one in sorted(names) if "/" not in one and fnmatchcase(one, name)]
    elif not _WILD.search(pattern) or Path(pattern).exists():
        return [pattern]
    else:
        found = sorted(one for one in glob.glob(pattern, recursive=True) if not Path(one).is_dir())  # noqa: PTH207
    if not found:
        raise ConfigError(
            "a pattern with *, ? or [ must match at least one tar, got none; correct its folder or its name."
        )
    return found


def _malformed(name: str) -> ManifestError:
    return ManifestError(f"extra.foreign.{name} of the manifest is malformed; index the tars again.")


def located(store: ByteStore, manifests: Iterable[Manifest]) -> ByteStore:
    """Return a store that finds the foreign shards of manifests as well; the same store where there are none.

    Raises:
        ManifestError: A manifest does not say where its foreign shards lie, or one that came from a remote
            store points at files of this machine.
    """
    places: dict[str, str] = {}
    for manifest in manifests:
        if is_foreign(manifest):
            places |= zip([shard.path for shard in manifest.shards], _locations(manifest), strict=True)
    if not places or isinstance(store, RelocatedStore):
        return store
    is_remote = "://" in store.url
    resolved = {path: _resolve(store.url, location) for path, location in places.items()}
    if is_remote and not all(
        "://" in place and urlsplit(place).scheme != "file" for place in resolved.values()
    ):
        raise ManifestError(
            "a remote dataset's shards must lie in remote stores, got local paths; index them where they lie."
        )
    return RelocatedStore(store, resolved)


def local_folder(store: ByteStore) -> LocalStore | None:
    """Return the local folder that what belongs beside a dataset is written to; None where it is remote.

    Foreign shards may lie anywhere: their tables lie beside the manifest. A cache has no part in writing.
    """
    store = origin_of(store)
    return store if isinstance(store, LocalStore) else None


def split_location(location: str) -> tuple[str, str]:
    """Cut a resolved location into the address of a store and an object's name in it."""
    folder, _, name = location.rpartition("/")
    return folder or "/", name


def _locations(manifest: Manifest) -> list[str]:
    foreign: Any = manifest.extra["foreign"]
    try:
        version, found = foreign["version"], list(foreign["locations"])
    except (KeyError, TypeError):
        version, found = None, []
    if (
        version != LOCATIONS_VERSION
        or len(found) != len(manifest.shards)
        or not all(isinstance(place, str) and place for place in found)
    ):
        raise ManifestError(
            f"a manifest of foreign shards must name their {len(manifest.shards)} locations (version "
            f"{LOCATIONS_VERSION}), got others; a newer format needs a newer shardflow."
        )
    return found


def _resolve(base: str, location: str) -> str:
    if "://" in location or location.startswith("/"):
        return location
    if "://" not in base:
        return os.path.normpath(f"{base}/{location}")
    parts = urlsplit(base)
    return urlunsplit(parts._replace(path=posixpath.normpath(f"{parts.path}/{location}")))


class RelocatedStore:
    """A store that finds some objects elsewhere if they are not in it. Safe for many threads.

    Args:
        base: The store of everything else.
        places: Location of each such object by path: an absolute path or an address.
    """

    def __init__(self, base: ByteStore, places: Mapping[str, str]) -> None:
        self.origin = base
        self._places = dict(places)
        self._stores: dict[str, ByteStore] = {}
        self._found: dict[str, tuple[ByteStore, str]] = {}

    @property
    def url(self) -> str:
        """The address of the base."""
        return self.origin.url

    def __reduce__(self) -> tuple[type[RelocatedStore], tuple[ByteStore, Mapping[str, str]]]:
        """Cross a process boundary without the locations found so far."""
        return type(self), (self.origin, self._places)

    def size(self, path: str) -> int:
        """Return an object's size in bytes; see `ByteStore.size`."""
        store, name = self._find(path)
        return store.size(name)

    def read(self, path: str) -> bytes:
        """Return an object whole; see `ByteStore.read`."""
        store, name = self._find(path)
        return store.read(name)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with its range; see `ByteStore.read_ranges`."""
        store, name = self._find(path)
        store.read_ranges(name, ranges, buffers)

    def map(self, path: str) -> memoryview:
        """Return a read-only view of an object; see `ByteStore.map`."""
        store, name = self._find(path)
        return store.map(name)

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object into the base; see `ByteStore.put_new`."""
        self.origin.put_new(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object into the base; see `ByteStore.put_stream`."""
        self.origin.put_stream(path, chunks, num_bytes)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names of the base; see `ByteStore.list`."""
        return self.origin.list(prefix)

    def _find(self, path: str) -> tuple[ByteStore, str]:
        place = self._places.get(path)
        if place is None:
            return self.origin, path
        found = self._found.get(path)
        if found is None:
            # Two threads may look up the same object at once, with the same result.
            found = self._found[path] = self._look(path, place)
        return found

    def _look(self, path: str, place: str) -> tuple[ByteStore, str]:
        try:
            self.origin.size(path)
        except NotFoundError:
            folder, name = split_location(place)
            store = self._stores.get(folder)
            if store is None:
                store = self._stores.setdefault(folder, open_store(folder))
            try:
                store.size(name)
            except NotFoundError:
                raise NotFoundError(
                    f"{path} must lie in the dataset or where the manifest says, found neither; was the tar "
                    "moved? Index it again, or move it back."
                ) from None
            except StorageError as error:
                raise type(error)(error.message.replace(name, path)) from None
            return store, name
        return self.origin, path
