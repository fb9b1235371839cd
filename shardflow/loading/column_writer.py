"""Writing back: what a model says about samples, from all ranks, as an attached table of their dataset.

Each rank collects rows and writes them as part files beside the tables (``tables/NAME-parts/SESSION/``);
rank 0 merges those of all ranks. A row carries where its batch was in the run, and of several rows of a
sample the first in the order of the run counts, so the table is the same for every number of ranks.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import AlreadyExistsError, ConfigError, NotFoundError, StateError, WaitTimeoutError
from shardflow.fields.units import UnitDataset, unit_of
from shardflow.format import Dataset
from shardflow.format.facts.columns import image_starts, num_unit_rows
from shardflow.format.foreign.places import local_folder
from shardflow.format.keys import Json, canonical_json
from shardflow.format.table import Table, encode_table
from shardflow.format.tables import (
    COLUMN_NAME,
    MAX_CLASSES,
    ColumnKind,
    StoredColumn,
    TableUnit,
    check_table_name,
    write_table,
)
from shardflow.loading.batch import Batch
from shardflow.loading.config import resolve_world
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from shardflow.loading.loader import Loader

_PART: Final = "column-part"
_FORMAT_VERSION: Final = 1
_SESSION: Final = "session.json"
_PLACE_COLUMNS: Final = ("row", "at", "place")
_BUFFER_BYTES: Final = 32 << 20
_ROWS_AT_ONCE: Final = 1 << 20
_POLL_S: Final = 0.05
_LATE: Final = np.iinfo(np.int64).max
_STORED: Final[Mapping[str, str]] = {
    "bool": "|u1",
    "int": "<i8",
    "float": "<f8",
    "category": "<i4",
    "floats": "<f4",
}
# A text that packing would not let through either; names of classes have words.
_UID: Final = re.compile(r"[\d.]{12,}", re.ASCII)


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """Result of `ColumnWriter.finish`; counts alone."""

    name: str
    number: int
    """Of the version of the table."""
    digest: str
    is_new: bool
    """Whether the content differs from the newest version."""
    num_samples: int
    """Samples with values."""
    num_missing: int
    """Samples of the loader, or rows of the dataset, without."""
    num_repeated: int
    """Rows of samples that had a value from earlier in the run."""


class ColumnWriter:
    """Writer of an attached table from predictions; every rank has one, and adds the batches it sees.

    Padding and masked samples are left out. Of a sample that comes more than once, as with weighted draws,
    ``tail="repeat"`` or after a resume, the first in the order of the run counts. A rank holds at most
    32 MiB; rank 0 merges through files. Ranks of several nodes need one shared folder.

    Args:
        source: The loader whose samples get values, all of them; or a dataset, all of whose rows do.
        name: Of the table: its columns are ``NAME.COLUMN``.
        columns: Kind by name: ``bool``, ``int``, ``float``, ``floats`` for vectors of one length, or the list
            of the names of the classes that numbers from 0 stand for. Texts are not taken, so that neither
            identifiers nor reports can enter.
        resume: Whether an unfinished run of this name is continued. Its rows are kept.
        to: Folder for the table beside a read-only dataset, for ``sf.open(path, tables=[folder])``.
        world: As of `Loader`; by default that of the loader.
        timeout_s: Time that rank 0 waits for the others in `finish`, and they for its first file.

    Raises:
        ConfigError: A name or kind cannot be used, the dataset is remote and has no ``to``, the loader is one
            of a blend or of findings, or an unfinished run exists and ``resume`` does not say to continue it.
        StateError: The unfinished run has other columns, or another version of the dataset.

    Example::

        with sf.ColumnWriter(loader, name="predictions", columns={"edema": "float"}) as writer:
            for batch in loader:
                writer.add(batch, edema=model(batch))
            writer.finish()
    """

    def __init__(
        self,
        source: Dataset | Loader,
        *,
        name: str,
        columns: Mapping[str, ColumnKind | Sequence[str]],
        resume: bool = False,
        to: str | Path | None = None,
        world: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        check_table_name(name)
        self._name, self._columns = name, _checked_columns(columns)
        self._expected: NDArray[np.bool_] | None = None
        if isinstance(source, Dataset):
            self._dataset = source
        else:
            if source.selection.is_blend:
                raise ConfigError(
                    "A table belongs to one dataset, and the loader reads a blend of several; write the "
                    "predictions of each with a loader of its own."
                )
            self._dataset, world = source.dataset, world or source.world
            self._expected = source.selection.population_of(0)
        unit = unit_of(self._dataset)
        if unit not in get_args(TableUnit):
            raise ConfigError(
                f"A table has rows of studies, series or images, got a loader of unit {unit!r}; write "
                "unit='study', 'series' or 'image' for the loader."
            )
        store = local_folder(self._dataset.store) if to is None else LocalStore(to)
        if store is None:
            raise ConfigError(
                "A table is written into a dataset in a local folder, this one is remote; write to=DIR, and "
                "open it with sf.open(path, tables=[DIR])."
            )
        self._unit = cast(TableUnit, unit)
        self._world = resolve_world(world).world
        self._store, self._root = store, store.root
        self._folder = f"tables/{name}-parts"
        self._timeout_s = timeout_s
        self._rows: list[dict[str, NDArray[Any]]] = []
        self._num_bytes = 0
        self._widths: dict[str, int] = {}
        self._session = self._open_session(resume=resume) if self._world.rank == 0 else self._read_session()
        self._forget_end()

    # ---- adding ----------------------------------------------------------------------------------

    def add(self, batch: Batch, **values: Any) -> None:
        """Add the values of a batch: an array, tensor or list per column, with an item per slot.

        Args:
            batch: Of the loader.
            values: By column ``(B,)`` or ``(B, 1)``, of ``floats`` ``(B, d)``; those of padding and of masked
                samples are ignored. Of masked arrays of NumPy, samples that one of them masks get no value.

        Raises:
            ConfigError: A column is missing or unknown, has another shape or cannot hold a value, or the
                batch is of another dataset or unit. Nothing of the batch is added then.
        """
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"add() needs the batch of the loader, which knows its samples, got {type(batch).__name__}; "
                "pass the batch itself, not its tensors."
            )
        if values.keys() != self._columns.keys():
            raise ConfigError(
                f"add() needs a value for each column ({', '.join(self._columns)}), got "
                f"{', '.join(values) or 'none'}."
            )
        has_value = batch.arrays["weight"] > 0
        for given in values.values():
            if isinstance(given, np.ma.MaskedArray) and len(given) == len(has_value):
                has_value &= ~np.ma.getmaskarray(given).reshape(len(given), -1).any(axis=1)
        slots = np.flatnonzero(has_value)
        found = {name: self._converted(name, given, batch.num_slots, slots) for name, given in values.items()}
        rows: dict[str, NDArray[Any]] = {"row": self._table_rows(batch, slots)}
        rows["at"] = np.full(len(slots), batch.epoch << 40 | batch.step, "<i8")
        rows["place"] = batch.micro << 32 | slots
        for name, one in found.items():
            if self._columns[name][0] == "floats" and len(slots):
                width = self._widths.setdefault(name, one.shape[1])
                if width != one.shape[1]:
                    raise ConfigError(
                        f"{name} had {width} numbers per sample, and now has {one.shape[1]}; a column of "
                        "floats has vectors of one length."
                    )
        if not len(slots):
            return
        self._rows.append(rows | found)
        self._num_bytes += sum(one.nbytes for one in self._rows[-1].values())
        if self._num_bytes >= _BUFFER_BYTES:
            self.flush()

    def _converted(self, name: str, given: Any, num_slots: int, slots: NDArray[np.intp]) -> NDArray[Any]:
        kind, names = self._columns[name]
        values = _as_array(given)
        expected = "(B, d)" if kind == "floats" else "(B,)"
        if kind != "floats" and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if (
            values.dtype.kind not in "biuf"
            or values.ndim != 1 + (kind == "floats")
            or len(values) != num_slots
        ):
            raise ConfigError(
                f"{name} needs numbers of shape {expected} with B = {num_slots}, the slots of the batch, got "
                f"{values.dtype} of shape {tuple(values.shape)}."
            )
        chosen = values[slots]
        if kind in ("float", "floats"):
            if np.isnan(chosen).any():
                raise ConfigError(
                    f"{name} is not a number (NaN) for some samples of weight 1; a table has no value only "
                    "where nothing was added."
                )
            return chosen.astype(_STORED[kind])
        whole = chosen.astype("<i8")
        allowed = {"bool": 2, "category": len(names)}.get(kind)
        is_allowed = True if allowed is None else bool(((whole >= 0) & (whole < allowed)).all())
        if not is_allowed or not np.array_equal(whole, chosen):
            meant = {"bool": "false or true", "category": f"numbers of classes from 0 to {len(names) - 1}"}
            raise ConfigError(
                f"{name} holds {meant.get(kind, 'whole numbers')}, got others; write columns={{{name!r}: "
                "'float'}} for scores."
            )
        return whole.astype(_STORED[kind])

    def _table_rows(self, batch: Batch, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the rows of the table that slots belong to, after comparing their keys."""
        rows = batch.arrays["row"][slots]
        samples = self._dataset.samples
        keys = np.array(
            [key.encode() for key in map(batch.sample_keys.__getitem__, slots.tolist()) if key], "S"
        )
        is_known = bool((rows >= 0).all() and (rows < samples.num_samples).all())
        if not is_known or not np.array_equal(samples.gather("sample_key", rows), keys):
            raise ConfigError(
                f"The batch holds samples that are not rows of unit {self._unit!r} of this dataset; make the "
                "writer from the loader that made the batch: sf.ColumnWriter(loader, ...)."
            )
        return self._targets(rows)

    def _targets(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the table that rows of the dataset belong to."""
        if not isinstance(self._dataset, UnitDataset):
            return self._dataset.study_rows(rows)
        samples = self._dataset.samples
        series = samples.series_rows(rows)
        return series if self._unit == "series" else self._image_starts[series] + samples.images(rows)

    @cached_property
    def _image_starts(self) -> NDArray[np.int64]:
        return image_starts(self._dataset)

    # ---- parts -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was added as a part file, durably; call it before saving a state of the loader.

        Then a run that resumes from the state has lost nothing.

        Raises:
            StorageError: Writing failed.
            WaitTimeoutError: Rank 0 has not begun.
        """
        if not self._rows:
            return
        arrays = {name: np.concatenate([one[name] for one in self._rows]) for name in self._rows[0]}
        folder, rank = self._session_folder(), self._world.rank
        numbers = [0, *(number for _, owner, number in self._parts() if owner == rank)]
        meta: dict[str, Json] = {"kind": _PART, "format_version": _FORMAT_VERSION}
        self._store.put_new(
            f"{folder}/part-{rank:05d}-{max(numbers) + 1:06d}.tbl", encode_table(arrays, meta)
        )
        self._rows, self._num_bytes = [], 0

    def _parts(self) -> Iterator[tuple[str, int, int]]:
        """Yield the path, rank and number of each part of the session, in order."""
        for path in self._store.list(f"{self._session_folder()}/"):
            found = re.fullmatch(r"part-(\d{5})-(\d{6})\.tbl", path.rpartition("/")[2])
            if found is not None:
                yield path, int(found[1]), int(found[2])

    def _session_folder(self) -> str:
        deadline = time.monotonic() + self._timeout_s
        while self._session is None:
            self._session = self._read_session()
            if self._session is None:
                _wait(deadline, f"rank 0 to begin the table {self._name!r}", self._timeout_s)
        return f"{self._folder}/{self._session}"

    def _described(self) -> dict[str, Json]:
        columns: dict[str, Json] = {
            name: list(names) if kind == "category" else kind for name, (kind, names) in self._columns.items()
        }
        return {"dataset_id": self._dataset.manifest.dataset_id, "unit": self._unit, "columns": columns}

    def _open_session(self, *, resume: bool) -> str:
        own = secrets.token_hex(8)
        try:
            self._store.put_new(
                f"{self._folder}/{_SESSION}", canonical_json({**self._described(), "session": own})
            )
        except AlreadyExistsError:
            if not resume:
                raise ConfigError(
                    f"An earlier run that wrote the table {self._name!r} was not finished; write resume=True "
                    f"to continue it, or delete {self._folder} to begin again."
                ) from None
            return cast(str, self._read_session())
        for left in (self._root / self._folder).iterdir():
            if left.is_dir():  # of a run that was killed after its table was written
                shutil.rmtree(left, ignore_errors=True)
        return own

    def _read_session(self) -> str | None:
        try:
            found = json.loads(self._store.read(f"{self._folder}/{_SESSION}"))
        except NotFoundError:
            return None
        for key, value in self._described().items():
            if found[key] != value:
                raise StateError(
                    f"The unfinished run of the table {self._name!r} has another {key} than this one; "
                    f"continue it with the same, or delete {self._folder} to begin again."
                )
        return str(found["session"])

    # ---- merging ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what was added, without making the table: a later run with ``resume=True`` continues."""
        self.flush()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what was added; what fails after an error is not raised over it."""
        try:
            self.close()
        except Exception:
            if error is None:
                raise

    def finish(self, *, partial: bool = False) -> WrittenTable | None:
        """Write what was added, and on rank 0 the table, once all ranks have called it.

        Args:
            partial: Whether samples may have no value, as bad samples, those that ``tail="drop"`` leaves out
                and those never drawn have.

        Returns:
            What was written; None on other ranks than 0, which need not wait for it.

        Raises:
            ConfigError: A sample has no value, and ``partial`` does not allow it. What was added is kept, and
                the call may be repeated.
            WaitTimeoutError: A rank has not called it in time.
            StorageError: The table cannot be written.
        """
        self.flush()
        folder = self._session_folder()
        if not (self._root / self._end(self._world.rank)).exists():
            self._store.put_new(self._end(self._world.rank), b"")
        if self._world.rank:
            return None
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self._world.world_size):
            while not (self._root / self._end(rank)).exists():
                _wait(deadline, f"rank {rank} to call finish() of the table {self._name!r}", self._timeout_s)
        scratch = self._root / folder / "merging"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            written = self._merge(scratch, partial=partial)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        # The session goes first: without it no later run reads what a kill leaves of the parts.
        (self._root / self._folder / _SESSION).unlink()
        shutil.rmtree(self._root / self._folder, ignore_errors=True)
        return written

    def _end(self, rank: int) -> str:
        return f"{self._session_folder()}/end-{rank:05d}-of-{self._world.world_size:05d}"

    def _forget_end(self) -> None:
        """Remove what says that this rank has added all, if an earlier process wrote it."""
        if self._session is not None:
            (self._root / self._end(self._world.rank)).unlink(missing_ok=True)

    def _merge(self, scratch: Path, *, partial: bool) -> WrittenTable:
        num_rows = num_unit_rows(self._dataset, self._unit)
        arrays: dict[str, NDArray[Any]] = {}
        num_added = 0
        for path, _, _ in self._parts():
            table = Table(self._store.map(path), name=path)
            table.expect_kind(_PART, _FORMAT_VERSION)
            part = {name: table.column(name) for name in table.column_names}
            num_added += len(part["row"])
            for name, values in part.items():
                shape = (num_rows, *values.shape[1:])
                if name not in arrays:
                    arrays[name] = np.memmap(scratch / name, values.dtype, "w+", shape=shape)
                    arrays[name][:] = _LATE if name in ("at", "place") else 0
                elif arrays[name].shape != shape:
                    raise ConfigError(
                        f"{name} has {arrays[name].shape[1]} numbers per sample in one part and "
                        f"{shape[1]} in another; a column of floats has vectors of one length."
                    )
            _keep_first(arrays, part)
        if not arrays:
            raise ConfigError(
                f"No value was added to the table {self._name!r}, so there is nothing to write."
            )
        is_missing = arrays["at"] == _LATE
        num_missing, num_expected = self._count_missing(is_missing)
        if num_missing and not partial:
            raise ConfigError(
                f"{num_missing:,} of {num_expected:,} samples have no value (bad samples, those that "
                "tail='drop' leaves out, or never reached); write finish(partial=True) for a table without "
                "them, or add them and call it again."
            )
        stored = [self._stored(name, arrays[name], is_missing) for name in self._columns]
        manifest, is_new = write_table(
            self._store, self._dataset.manifest.dataset_id, self._name, self._unit, stored
        )
        num_samples = num_rows - int(is_missing.sum())
        return WrittenTable(
            self._name,
            manifest.number,
            manifest.digest,
            is_new,
            num_samples,
            num_missing,
            num_added - num_samples,
        )

    def _count_missing(self, is_missing: NDArray[np.bool_]) -> tuple[int, int]:
        """Return how many samples have no value, and how many there are."""
        num_missing = num_samples = 0
        for start in range(0, self._dataset.samples.num_samples, _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, self._dataset.samples.num_samples))
            if self._expected is not None:
                rows = rows[self._expected[rows]]
            num_samples += len(rows)
            num_missing += int(is_missing[self._targets(rows)].sum())
        return num_missing, num_samples

    def _stored(self, name: str, values: NDArray[Any], is_missing: NDArray[np.bool_]) -> StoredColumn:
        kind, names = self._columns[name]
        if kind == "category":
            ascending = sorted(names)
            values = np.array([ascending.index(one) for one in names])[values]
            names = tuple(ascending)
        return StoredColumn(name=name, kind=kind, values=values, is_missing=is_missing, names=names)


def _keep_first(arrays: Mapping[str, NDArray[Any]], part: Mapping[str, NDArray[Any]]) -> None:
    """Put the rows of a part into arrays by row, where they are the first of their sample."""
    row, at, place = (part[name] for name in _PLACE_COLUMNS)
    order = np.lexsort((place, at, row))
    is_first = np.ones(len(order), bool)
    is_first[1:] = np.diff(row[order]) != 0
    chosen = order[is_first]
    target = row[chosen]
    known_at, known_place = arrays["at"][target], arrays["place"][target]
    is_earlier = (at[chosen] < known_at) | ((at[chosen] == known_at) & (place[chosen] < known_place))
    chosen, target = chosen[is_earlier], target[is_earlier]
    for name, values in part.items():
        arrays[name][target] = values[chosen]


def _checked_columns(
    columns: Mapping[str, ColumnKind | Sequence[str]],
) -> dict[str, tuple[ColumnKind, tuple[str, ...]]]:
    if not columns:
        raise ConfigError("columns= needs at least one column, such as {'edema': 'float'}.")
    found: dict[str, tuple[ColumnKind, tuple[str, ...]]] = {}
    for name, given in columns.items():
        if not COLUMN_NAME.fullmatch(name) or name in _PLACE_COLUMNS:
            raise ConfigError(
                "The name of a column is 1 to 64 of a-z, 0-9 and _ after a letter, and none of "
                f"{', '.join(_PLACE_COLUMNS)}; got {name!r}."
            )
        if isinstance(given, str):
            if given not in _STORED or given == "category":
                raise ConfigError(
                    f"The kind of {name} is bool, int, float, floats, or the list of the names of its "
                    f"classes, got {given!r}."
                )
            found[name] = (cast(ColumnKind, given), ())
            continue
        names = tuple(given)
        is_right = 0 < len(names) <= MAX_CLASSES and len(set(names)) == len(names)
        if not is_right or not all(one and not _UID.fullmatch(str(one)) for one in names):
            raise ConfigError(
                f"The classes of {name} are 1 to {MAX_CLASSES:,} different texts that are no identifiers; "
                "got others."
            )
        found[name] = ("category", names)
    return found


def _as_array(given: Any) -> NDArray[Any]:
    """Return an array of a tensor on any device, an array or a list."""
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        if str(given.dtype) == "torch.bfloat16":  # NumPy has none
            given = given.float()
        given = given.numpy()
    try:
        return np.asarray(given)
    except ValueError:  # lists of several lengths
        return np.zeros(0, object)


def _wait(deadline: float, what: str, timeout_s: float) -> None:
    if time.monotonic() > deadline:
        raise WaitTimeoutError(
            f"This rank waited {math.ceil(timeout_s)} s for {what}; is it alive, and is the folder shared by "
            "all ranks?"
        )
    time.sleep(_POLL_S)
