"""Dataset writer: samples from Python become a dataset, in parts that run side by side and resume.

A part writes into a folder of its own below ``parts/``; a shard there is finished by its ``.json``, which is
written last. Whoever finishes the last part links all shards into their places and writes the samples table,
the attached table and, as the commit point, the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import AlreadyExistsError, ConfigError, FormatError, naming_os_errors
from shardflow.format.foreign.places import ImageFacts, join_images, plain_images
from shardflow.format.keys import SPLIT_PATTERN, Json, canonical_json, check_sample_key, shard_name
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, commit, load, versions
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.sample_values import (
    ColumnValues,
    check_series,
    encode_fields,
    join_columns,
    joined_kind,
    kind_of,
    modality_of,
    picture_facts,
)
from shardflow.format.samples import MAX_MODALITIES, KeySet, SamplesTable, repeated_key
from shardflow.format.shard_files import SplitFiles, link_shard, package_versions, write_file, write_samples
from shardflow.format.table import Table
from shardflow.format.tables import (
    ColumnsTable,
    StoredColumn,
    check_table_name,
    encode_columns,
    write_table,
)
from shardflow.storage import LocalStore, write_atomic
from shardflow.storage.local import file_locks

_MAX_PARTS: Final = 1_000_000
# The packages whose versions decide the bytes that `ShardWriter` writes.
_PACKAGES: Final = ("blosc2", "imagecodecs", "numpy", "opencv-python-headless", "shardflow")
_PARTS: Final = "parts"
_DONE: Final = "done"
_SETTINGS: Final = "settings.json"


class ShardWriter:
    """Writes a dataset from Python, sample by sample; a context manager.

    The dataset appears when the block ends: the manifest is written last, and an exception removes what was
    written before it. The same samples in the same order give the same bytes. Held in memory are the index of
    the open shard of each split and at most 40 bytes for each sample (64 where ``resume`` finds the dataset
    finished), beside values given as ``columns=``.

    A sample is a mapping with a ``__key__`` (1 to 64 of ``a-z`` and ``0-9``) and fields named as in
    docs/format.md, section 4. The last part of a field's name says how its value is stored:

    ============================  ==============================================================
    value                         field
    ============================  ==============================================================
    ``bytes``                     any; stored as they are
    ``str``                       ``*.txt``; stored as UTF-8
    int                           ``*.cls``, ``cls``; stored as decimal digits
    dict or list                  ``*.json``, ``json``; stored as JSON
    array of any shape            ``*.npy``, ``npy``: numbers or bools
    dict of arrays                ``*.npz``, ``npz``
    ``(H, W)`` or ``(H, W, 3)``   ``*.png``, ``png``; uint8 or uint16
    array                         ``*.b2nd``, ``*.htj2k``, ``*.png16``; one image
    array ``(slices, ...)``       ``sSSS.CODEC``, such as ``s000.b2nd``: all slices of a series
    ============================  ==============================================================

    Fields of a loader (docs/fields.md) deliver slices as images once ``shardflow attach --facts`` has run.
    ``study.json`` may state facts of series that pixels do not, such as ``{"series": [{"modality": "DX",
    "technical": {"view_position": "PA"}}]}``. Names that begin with two underscores are notes of WebDataset
    and are not stored. Labels and other values are given as ``columns=`` and become an attached table.

    Args:
        path: Folder of the dataset; must be new or empty.
        split: Split of samples that `write` is given without one.
        splits: Parts of each split, such as ``{"train": 90, "val": 10}``, instead of ``split``: a sample goes
            where its group (else its key) falls, whatever else is written.
        target_bytes: A shard is closed before it passes this; a larger sample is alone in one.
        max_samples: A shard is closed when it holds so many samples; None for no limit.
        table: Name of the attached table that ``columns=`` become.
        part: Which of ``num_parts`` this writer writes, from 0; each has its own samples.
        num_parts: Writers that make one dataset, in any processes or threads and in any order. Their samples
            follow each other by part, so the bytes do not depend on who wrote which part, nor on how many at
            a time. The dataset appears when the last part is closed.
        resume: Go on where a stopped writer of the part was: given the same samples in the same order,
            `write` passes over those in finished shards, by key. An exception then leaves finished shards.

    Attributes:
        dataset_id: Of the dataset; None until its last part is closed.

    Raises:
        ConfigError: The folder holds something, another process writes the part, or a setting is wrong.
        StorageError: The folder cannot be made.

    Example::

        with ShardWriter("chest", splits={"train": 90, "val": 10}) as writer:
            for number, (pixels, report, age) in enumerate(studies):
                sample = {"__key__": f"study{number}", "s000.b2nd": pixels, "report.txt": report}
                writer.write(sample, columns={"age": age})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str = "train",
        splits: Mapping[str, int] | None = None,
        target_bytes: int = 512 << 20,
        max_samples: int | None = None,
        table: str = "labels",
        part: int = 0,
        num_parts: int = 1,
        resume: bool = False,
    ) -> None:
        if target_bytes < 1 or (max_samples is not None and max_samples < 1):
            raise ConfigError("target_bytes and max_samples must be at least 1, got less; correct them.")
        self._shares = {split: 1} if splits is None else dict(splits)
        if min(self._shares.values(), default=0) < 0 or not sum(self._shares.values()):
            raise ConfigError("splits must give parts of at least 0, and some split a part; correct them.")
        for name in self._shares:
            _check_split(name)
        check_table_name(table)
        if not 0 <= part < num_parts <= _MAX_PARTS:
            raise ConfigError(
                f"part must be one of 0 to num_parts - 1, and num_parts at most {_MAX_PARTS:,}, got part "
                f"{part!r} of {num_parts!r}; correct them."
            )
        self._root = Path(path).absolute()
        self._target_bytes = target_bytes
        self._max_samples = max_samples
        self._table = table
        self._num_parts = num_parts
        self._is_resumed = resume
        self._part = part
        self._folder = self._root / _PARTS / f"{part:06d}"
        self._splits: dict[str, _WrittenSplit] = {}
        self._modalities: set[str] = set()
        self._kinds: dict[str, str] = {}
        self._keys = KeySet()
        self._stored_keys: KeySet | None = None
        self._is_open = True
        self._lock: int | None = None
        self.dataset_id: str | None = None
        settings: dict[str, Json] = {
            "splits": [list(item) for item in self._shares.items()],
            "target_bytes": target_bytes,
            "max_samples": max_samples,
            "table": table,
            "num_parts": num_parts,
            "packages": package_versions(_PACKAGES),
        }
        with naming_os_errors("making the folder of a dataset"):
            self._root.mkdir(parents=True, exist_ok=True)
            if resume and versions(LocalStore(self._root)):
                self._open_finished()
                return
            others = {one.name for one in self._root.iterdir()}
            if others - ({_PARTS, "shards", "samples", "tables"} if resume else _open_to(num_parts)):
                raise ConfigError(
                    "a dataset must be written into a new or empty folder, got one that holds something; "
                    "name another, or go on with what a stopped writer left by resume=True."
                )
            self._take_part(canonical_json(settings))
            self._is_done = (self._folder / _DONE).exists()
        for name in sorted({one.name.rpartition("-")[0] for one in self._folder.glob("shards/*.json")}):
            self._open_split(name)

    def _take_part(self, settings: bytes) -> None:
        """Make the folder of the part, or take it over."""
        try:
            # Of two writers that find the folder empty one makes this.
            self._folder.mkdir(parents=True, exist_ok=self._is_resumed)
        except FileExistsError:
            raise ConfigError(
                "a dataset must be written into a new or empty folder, and each part once, got a part that "
                f"another writer began ({self._part}); go on with it by resume=True, or name another folder."
            ) from None
        fcntl = file_locks()
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise ConfigError(
                f"a part must have one writer at a time, got a second one of part {self._part}; wait for the "
                "first, or end it."
            ) from None
        place = self._root / _PARTS / _SETTINGS
        try:
            write_atomic(place, [settings])
        except AlreadyExistsError:
            if place.read_bytes() != settings:
                self._release()
                raise ConfigError(
                    "all parts of a dataset, and a resumed writer, must have the same splits, target_bytes, "
                    "max_samples, table, num_parts and package versions, got others than the first writer; "
                    "use its, or write into another folder."
                ) from None

    def _open_finished(self) -> None:
        """Take a finished dataset: `write` then checks that it holds the sample."""
        store = LocalStore(self._root)
        manifest = load(store)
        samples = SamplesTable(Table(store.map(manifest.samples.path), name=manifest.samples.path))
        self._stored_keys = KeySet(samples.sample_keys())
        self.dataset_id = manifest.dataset_id
        shutil.rmtree(self._root / _PARTS, ignore_errors=True)

    def _open_split(self, name: str) -> _WrittenSplit:
        written = self._splits.get(name)
        if written is None:
            written = self._splits[name] = _WrittenSplit(
                self._folder, name, self._target_bytes, self._max_samples, self._kinds
            )
            self._modalities |= written.modalities
        return written

    def write(
        self,
        sample: Mapping[str, Any],
        *,
        split: str | None = None,
        group: str | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a sample.

        Args:
            sample: ``__key__`` and fields, see the class.
            split: The split it goes to; as the writer's settings have it if not given.
            group: Name of samples that stay in one split, such as a patient; replaces the key in the choice.
            columns: Values by column of the attached table, read as ``sf.Column("labels.NAME")``: bools,
                integers, floats, texts or lists of floats; None and NaN are missing.

        Raises:
            FormatError: The sample cannot be stored as it is, or is not the one that a finished shard holds
                at its place; the writer stays as it was.
            StorageError: It cannot be written.
        """
        if not self._is_open:
            raise ConfigError("a writer must be open for a sample, got a closed one; open another.")
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise FormatError('a sample must have a text as its "__key__", got none; name each sample.')
        check_sample_key(key)
        if key in self._keys:
            raise FormatError(f"each sample must have a key of its own, got {key} twice.")
        if self._stored_keys is not None:
            if key not in self._stored_keys:
                raise FormatError(
                    f"a finished dataset takes no further samples, got {key}; write it into another folder."
                )
            self._keys.add(key)
            return
        name = self._split_of(key if group is None else group) if split is None else _check_split(split)
        if name in self._splits and self._splits[name].passes_over(key):
            self._keys.add(key)
            return
        if self._is_done:
            raise FormatError(
                f"a finished part takes no further samples, got {key}; write it as another part, into "
                "another folder."
            )
        fields = encode_fields(sample)
        shape = check_series(fields)
        modality = modality_of(sample)
        if modality not in self._modalities and len(self._modalities) == MAX_MODALITIES:
            raise FormatError(f"a dataset must have at most {MAX_MODALITIES} modalities, got more.")
        self._open_split(name).add(key, fields, shape, modality, columns or {})
        self._modalities.add(modality)
        self._keys.add(key)

    def close(self) -> None:
        """Finish the part and, if it is the last one, the dataset; a closed writer stays as it is.

        Raises:
            FormatError: No sample was written, two parts have a sample of one key, a column has several kinds
                in them, or a resumed writer got fewer samples than were stored.
            StorageError: A file cannot be written; there is no dataset then.
        """
        if self._is_open:
            try:
                if self._stored_keys is None:
                    self._finish()
            except BaseException:
                self.abandon()
                raise
            self._is_open = False
            self._release()

    def abandon(self) -> None:
        """Remove what this part has written, with ``resume`` only what is unfinished; there is no dataset."""
        self._is_open = False
        for written in self._splits.values():
            written.files.abandon()
        if self._lock is not None and not self._is_resumed:
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._num_parts == 1:
                for name in (_PARTS, "shards", "samples", "tables"):
                    shutil.rmtree(self._root / name, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._is_open:
            self.abandon()

    def _split_of(self, group: str) -> str:
        digest = hashlib.sha256(b"split\0" + group.encode("utf-8", "surrogatepass")).digest()
        position, end = int.from_bytes(digest[:8], "big"), 0
        total = sum(self._shares.values())
        for name, parts in self._shares.items():
            end += parts
            if position * total < end << 64:
                return name
        raise AssertionError  # the position is below the last end

    def _finish(self) -> None:
        """Close the shards of the part; publish the dataset if no part is missing."""
        if not self._keys and self._num_parts == 1:
            raise FormatError("a dataset must hold a sample, got none; write one.")
        self._keys = KeySet()  # none can follow, and what does needs the room
        for written in self._splits.values():
            written.close()
        write_atomic(self._folder / _DONE, [], replace=True)
        with _locked(self._root / _PARTS):
            if versions(LocalStore(self._root)):  # another part was the last one too
                self.dataset_id = load(LocalStore(self._root)).dataset_id
                return
            parts = [self._root / _PARTS / f"{number:06d}" for number in range(self._num_parts)]
            if all((part / _DONE).exists() for part in parts):
                self.dataset_id = _publish(self._root, parts, self._table)
                shutil.rmtree(self._root / _PARTS, ignore_errors=True)


class _WrittenSplit:
    """A split of a part: its shards, and the facts of the open one's samples that no index holds.

    Args:
        folder: Of the part; may hold finished shards, which are kept, and unfinished ones, which are removed.
        split: Its name.
        target_bytes: As `SplitFiles` has it.
        max_samples: As `SplitFiles` has it.
        kinds: Kinds of the columns of the part.
    """

    def __init__(
        self, folder: Path, split: str, target_bytes: int, max_samples: int | None, kinds: dict[str, str]
    ) -> None:
        self._folder, self._split = folder, split
        finished: list[ShardEntry] = []
        self.modalities: set[str] = set()
        # Digests, read at once: whoever finishes the last part removes the shards of this one.
        self._stored = array("Q")
        self._place = 0
        for shard in _finished(folder, split):
            finished.append(shard.entry)
            self.modalities |= set(shard.modalities)
            for name, column in shard.columns.items():
                kind = kind_of(column)
                kinds[name] = joined_kind(kinds.get(name, kind), kind) or kind
            self._stored.extend(map(_key_digest, shard.keys.tolist()))
        self._remove_unfinished({entry.name for entry in finished})
        self._columns = ColumnValues(kinds)
        self._begin()
        self.files = SplitFiles(
            folder,
            split,
            target_bytes,
            max_samples,
            finished=finished,
            on_shard=self._end_shard,
        )

    def _begin(self) -> None:
        self._rows, self._num_columns, self._modality = array("I"), array("I"), array("B")
        self._codes: dict[str, int] = {}
        self._images: dict[str, ImageFacts] = {}

    def _remove_unfinished(self, finished: set[str]) -> None:
        for path in (self._folder / "shards").glob(f"*{self._split}-*"):
            if path.name.partition(".")[0] not in finished and path.name.lstrip(".").startswith(
                f"{self._split}-"
            ):
                path.unlink()

    def passes_over(self, key: str) -> bool:
        """Return whether a finished shard holds the next sample.

        Raises:
            FormatError: It holds another one at this place.
        """
        if self._place == len(self._stored):
            return False
        if self._stored[self._place] != _key_digest(key.encode("ascii")):
            raise FormatError(
                "a resumed writer must be given the same samples in the same order, got another key as "
                f"sample {self._place} of split {self._split}; give the same, or write into another folder."
            )
        self._place += 1
        return True

    def add(
        self,
        key: str,
        fields: Sequence[tuple[str, bytes]],
        shape: tuple[int, int],
        modality: str,
        columns: Mapping[str, Any],
    ) -> None:
        """Append a sample; refused as a whole, or taken."""
        values = self._columns.check(columns)
        self.files.add(key, fields)
        self._columns.add(values)
        self._rows.append(shape[0])
        self._num_columns.append(shape[1])
        self._modality.append(self._codes.setdefault(modality, len(self._codes)))
        join_images(picture_facts(fields), self._images)

    def close(self) -> None:
        """End the last shard.

        Raises:
            FormatError: Fewer samples came than finished shards hold.
        """
        if self._place < len(self._stored):
            raise FormatError(
                f"a resumed writer must be given all samples again, got {self._place} of the "
                f"{len(self._stored)} stored ones of split {self._split}; give the others too."
            )
        self._stored, self._place = array("Q"), 0
        self.files.close()

    def _end_shard(self, entry: ShardEntry) -> None:
        """Write what no index holds beside a shard; with this it is finished."""
        facts = {
            "entry": asdict(entry),
            "rows": self._rows.tolist(),
            "columns": self._num_columns.tolist(),
            "modalities": list(self._codes),
            "modality": self._modality.tolist(),
            "images": {name: found.plain() for name, found in self._images.items()},
        }
        columns = self._columns.stored()
        if columns:
            write_file(
                self._folder,
                f"shards/{entry.name}.tbl",
                [encode_columns(columns, "study", entry.num_samples)],
            )
        write_file(self._folder, f"shards/{entry.name}.json", [json.dumps(facts).encode()])
        self._begin()


class _FinishedShard:
    """A finished shard of a part, as its files tell; each sample takes 9 bytes, and its columns theirs."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, store = folder, LocalStore(folder)
        facts: dict[str, Any] = json.loads(store.read(f"shards/{name}.json"))
        entry = facts["entry"]
        self.entry = ShardEntry(**{**entry, "index": FileEntry(**entry["index"])})
        self.images: dict[str, dict[str, Any]] = facts["images"]
        self.modalities: list[str] = facts["modalities"]
        self.modality = np.array(facts["modality"], "u1")
        self.rows, self.num_columns = np.array(facts["rows"], "u4"), np.array(facts["columns"], "u4")
        self.columns: dict[str, StoredColumn] = {}
        if (folder / "shards" / f"{name}.tbl").exists():
            table = ColumnsTable(Table(store.map(f"shards/{name}.tbl"), name="the columns of a part"))
            self.columns = {column: table.gather(column) for column in table.kinds}

    @property
    def keys(self) -> NDArray[np.bytes_]:
        """Keys of the samples; the index is mapped anew."""
        path = self.entry.index.path
        return Table(LocalStore(self.folder).map(path), name="the index of a part").column("sample_key")


def _key_digest(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _finished(folder: Path, split: str) -> Iterator[_FinishedShard]:
    """Yield the finished shards of a split of a part, in order."""
    number = 0
    while (folder / "shards" / f"{shard_name(split, number)}.json").exists():
        yield _FinishedShard(folder, shard_name(split, number))
        number += 1


def _publish(root: Path, parts: Sequence[Path], table: str) -> str:
    """Make the dataset of finished parts, whose files stay; the manifest is written last."""
    for name in ("shards", "samples", "tables"):  # of a job that was killed here
        shutil.rmtree(root / name, ignore_errors=True)
    by_split: dict[str, list[_FinishedShard]] = {}
    for part in parts:
        for split in sorted({one.name.rpartition("-")[0] for one in part.glob("shards/*.json")}):
            by_split.setdefault(split, []).extend(_finished(part, split))
    found = [shard for split in sorted(by_split) for shard in by_split[split]]
    if not found:
        raise FormatError("a dataset must hold a sample, got none in any part; write one.")
    num_samples = sum(shard.entry.num_samples for shard in found)
    if len(parts) > 1:  # a part has refused its own
        repeated = repeated_key(lambda: (shard.keys for shard in found), num_samples)
        if repeated is not None:
            raise FormatError(
                f"each sample must have a key of its own, got {repeated} in two parts; delete "
                "the folder, and write the parts with other keys."
            )
    modalities = sorted({name for shard in found for name in shard.modalities})
    if len(modalities) > MAX_MODALITIES:
        raise FormatError(f"a dataset must have at most {MAX_MODALITIES} modalities, got more.")
    columns = join_columns([(shard.columns, shard.entry.num_samples) for shard in found])
    places = {name: code for code, name in enumerate(modalities)}
    codes = [np.array([places[name] for name in shard.modalities], "u1")[shard.modality] for shard in found]
    shards = []
    for split in sorted(by_split):
        for number, shard in enumerate(by_split[split]):
            name = shard_name(split, number)
            index = link_shard(shard.folder, shard.entry.name, root, name)
            shards.append(replace(shard.entry, name=name, path=f"shards/{name}.tar", index=index))
    samples = write_samples(
        root,
        "samples/samples-000001.tbl",
        shards,
        key_num_bytes=max(shard.keys.dtype.itemsize for shard in found),
        modalities=modalities,
        given={
            "rows": np.concatenate([shard.rows for shard in found]),
            "columns": np.concatenate([shard.num_columns for shard in found]),
            "modality": np.concatenate(codes),
        },
    )
    pictures = _picture_facts(found)
    manifest = Manifest(
        manifest_version=1,
        shards=tuple(shards),
        samples=samples.table,
        counts=OutcomeCounts(packed=num_samples, skipped=0, quarantined=0),
        created_with=package_versions(_PACKAGES),
        extra={**({"members": {"images": pictures}} if pictures else {}), **samples.extra},
    )
    store = LocalStore(root)
    if columns:
        # Before the manifest, so that no reader sees the samples without their labels.
        write_table(store, manifest.dataset_id, table, "study", columns, number=1)
    return commit(store, manifest)


def _picture_facts(shards: Sequence[_FinishedShard]) -> dict[str, Json]:
    """Return what the manifest says of pictures, by their names."""
    images: dict[str, ImageFacts] = {}
    for shard in shards:
        for name, plain in shard.images.items():
            facts = ImageFacts(**{**plain, "rows": tuple(plain["rows"]), "columns": tuple(plain["columns"])})
            join_images([(name, facts)], images)
    return plain_images(images)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of all parts."""
    with naming_os_errors("locking the parts of a dataset"):
        try:
            descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # another part was the last one, and has removed the folder
            descriptor = None
    try:
        if descriptor is not None:
            fcntl = file_locks()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_to(num_parts: int) -> set[str]:
    """Return what a folder may hold before a part is begun in it."""
    return {_PARTS} if num_parts > 1 else set()


def _check_split(split: str) -> str:
    if not SPLIT_PATTERN.fullmatch(split):
        raise ConfigError("a split's name must be 1 to 32 of [a-z0-9], got another; rename it.")
    return split
