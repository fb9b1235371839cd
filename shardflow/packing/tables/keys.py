"""Keys of a table: which rows of a dataset an identifier of the source names.

Identifiers become surrogates with the secret key, as in packing, and are compared as those. Sample keys,
series and images are in the dataset under their surrogates; patients, accession numbers and paths are in the
private ledger. Of a foreign dataset the path is the key in its tars.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import image_starts, num_unit_rows
from shardflow.format.facts.series import open_series
from shardflow.format.keys import STUDY_FIELD
from shardflow.format.tables import TableUnit
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.header_rows import digest64
from shardflow.packing.people import read_evidence
from shardflow.packing.settings import KeyKind
from shardflow.packing.workspace import Workspace, reading_private

KEY_KINDS: Final = get_args(KeyKind)
_UNITS: Final[dict[str, tuple[TableUnit, ...]]] = {
    "series_instance_uid": ("series", "study"),
    "sop_instance_uid": ("image", "series", "study"),
}
_AMBIGUOUS: Final = -2


def key_kind(text: str) -> KeyKind:
    """Return the kind of keys of that name.

    Raises:
        ConfigError: There is none.
    """
    if text not in KEY_KINDS:
        raise ConfigError(f"--on is one of {', '.join(KEY_KINDS)}, got {text!r}.")
    return cast(KeyKind, text)


def default_unit(on: KeyKind, unit: str | None) -> TableUnit:
    """Return what a row of a table is that is joined by a key.

    Raises:
        ConfigError: The key does not name such rows.
    """
    allowed = _UNITS.get(on, ("study",))
    if unit is None:
        return allowed[0]
    if unit not in allowed:
        raise ConfigError(
            f"--on {on} names rows of unit {' or '.join(allowed)}, got --unit {unit}; values of a study "
            "repeat for its series and images without it."
        )
    return unit


class KeyIndex(ABC):
    """Index of the targets of keys. A target is what gets one value: a row, or all rows of a patient.

    Attributes:
        target_of_row: ``(num_rows,)`` target of each row of the unit; -1 where no key names it.
        num_targets: Number of targets.
    """

    target_of_row: NDArray[np.int64]
    num_targets: int

    @abstractmethod
    def find(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """Return the target of each key, ``(n,)``; -1 where there is none, -2 where there are several."""


class _SortedKeys(KeyIndex):
    """Index of pairs of a key and a row.

    Args:
        keys: ``(n,)`` surrogates or sample keys, as byte strings.
        rows: ``(n,)`` row of the unit that each names.
        num_rows: Rows of the unit.
        surrogate: Kind of the surrogates; empty for keys that are compared as they are.
        secret: The key of the surrogates.
    """

    def __init__(
        self,
        keys: NDArray[np.bytes_],
        rows: NDArray[np.int64],
        num_rows: int,
        surrogate: str = "",
        secret: SecretKey | None = None,
    ) -> None:
        self._surrogate, self._secret = surrogate, secret
        self.target_of_row = np.full(num_rows, -1, np.int64)
        self._keys, first = np.unique(keys, return_index=True)
        if len(self._keys) == len(keys):  # each key names one row
            self._targets, self.num_targets = rows[first], num_rows
            self.target_of_row[rows] = rows
            return
        number = np.searchsorted(self._keys, keys)
        pairs = np.unique(np.stack([number.astype(np.int64), rows]), axis=1)
        if len(np.unique(pairs[0])) == pairs.shape[1]:
            # A key names one row, which others may name too.
            self._targets, self.num_targets = pairs[1], num_rows
            self.target_of_row[pairs[1]] = pairs[1]
        else:
            self._targets, self.num_targets = np.arange(len(self._keys)), len(self._keys)
            self.target_of_row[pairs[1]] = pairs[0]

    def find(self, keys: Sequence[str]) -> NDArray[np.int64]:
        secret, kind = self._secret, self._surrogate
        if secret is not None:
            encoded = [secret.surrogate(kind, key).encode() if key else b"" for key in keys]
        else:
            encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
        wanted = np.array(encoded, "S")
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        found: NDArray[np.int64] = np.where(
            (self._keys[places] == wanted) & (wanted != b""), self._targets[places], -1
        )
        return found


class _Paths(KeyIndex):
    """Index of the paths of inputs; a key is a path, or the end of one."""

    def __init__(self, paths: Iterable[tuple[str, int]], num_rows: int) -> None:
        self._paths = [(PurePosixPath(path).parts, row) for path, row in paths]
        self._by_length: dict[int, dict[tuple[str, ...], int]] = {}
        self.num_targets = num_rows
        self.target_of_row = np.full(num_rows, -1, np.int64)
        rows = [row for _, row in self._paths]
        self.target_of_row[rows] = rows

    def find(self, keys: Sequence[str]) -> NDArray[np.int64]:
        parts = [PurePosixPath(key.replace("\\", "/")).parts for key in keys]
        return np.fromiter(
            (self._ending(len(one)).get(one, -1) if one else -1 for one in parts), np.int64, len(keys)
        )

    def _ending(self, length: int) -> dict[tuple[str, ...], int]:
        found = self._by_length.get(length)
        if found is None:
            found = self._by_length[length] = {}
            for parts, row in self._paths:
                if len(parts) >= length and found.setdefault(parts[-length:], row) != row:
                    found[parts[-length:]] = _AMBIGUOUS
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateFolder:
    """Private folder of a dataset: its secret key and its private ledger."""

    path: Path
    key_file: Path | None = None

    def secret(self, dataset: Dataset) -> SecretKey:
        """Return the secret key that the dataset was packed with.

        Raises:
            ConfigError: It is missing, or another one.
        """
        if self.key_file is None and not (self.path / "secret.key").is_file():
            raise ConfigError(
                "The private folder holds no secret key (secret.key); name the folder that this dataset was "
                "packed with, or its key with --key."
            )
        secret = SecretKey.load(self.key_file or self.path / "secret.key")
        if secret.key_id != dataset.manifest.key_id:
            raise ConfigError(
                "The secret key of the private folder is not the one that the dataset was packed with; name "
                "the private folder of this dataset, or its key with --key."
            )
        return secret

    def inputs(self, dataset: Dataset) -> Iterator[dict[str, Any]]:
        """Yield the lines of the private ledger.

        Raises:
            ConfigError: The folder does not hold that of this version.
            FormatError: It is damaged.
        """
        ledger = self._ledger(dataset)
        with reading_private("the private ledger (inputs-*.jsonl)"), ledger.open("rb") as file:
            yield from map(json.loads, file)

    def same_persons(self, dataset: Dataset) -> list[tuple[str, str]]:
        """Return pairs of patient keys that are of one person, of persons with several patient IDs.

        Raises:
            ConfigError: The folder is not that of this version.
            FormatError: The evidence of identity is damaged.
            StorageError: It cannot be read.
        """
        self._ledger(dataset)
        digest = str(dataset.manifest.extra.get("plan_digest"))
        pairs = []
        for line in read_evidence(Workspace(self.path, self.path).people_ledger(digest)):
            key = line.get("patient_key", line["patient"])
            pairs += [(key, other) for other in (line["patient"], line.get("person", key)) if other != key]
        return pairs

    def _ledger(self, dataset: Dataset) -> Path:
        """Return the path of the private ledger, which exists."""
        digest = str(dataset.manifest.extra.get("plan_digest"))
        ledger = Workspace(self.path, self.path).private_ledger(digest)
        if not ledger.is_file():
            raise ConfigError(
                "The private folder holds no private ledger (inputs-*.jsonl) of this version of the dataset; "
                "name the folder that it was packed with."
            )
        return ledger


def open_keys(dataset: Dataset, on: KeyKind, unit: TableUnit, private: PrivateFolder | None) -> KeyIndex:
    """Return the index of the keys of a dataset.

    Args:
        dataset: The dataset; its rows are studies.
        on: What the keys are.
        unit: What they name.
        private: Private folder of the dataset; not needed for sample keys and for paths of foreign tars.

    Raises:
        ConfigError: The private folder is needed and missing, another dataset's, or has no such identifiers.
    """
    studies = dataset.studies
    rows = np.arange(studies.num_samples)
    if on == "sample_key":
        return _SortedKeys(np.asarray(studies.column("sample_key")), rows, len(rows))
    if dataset.is_foreign:
        if on != "path":
            raise ConfigError(f"Tars of other writers have no {on}; use --on sample_key or --on path.")
        originals = [dataset.original_key(row).encode() for row in rows.tolist()]
        return _SortedKeys(np.array(originals, "S"), rows, len(rows))
    if private is None:
        raise ConfigError(
            f"--on {on} needs the private folder that the dataset was packed with, which knows whose samples "
            "they are; write --private-dir DIR, or join --on sample_key."
        )
    if on == "study_instance_uid":
        return study_keys(dataset, private.secret(dataset))
    if on in ("series_instance_uid", "sop_instance_uid"):
        return _stored_keys(dataset, on, unit, private.secret(dataset))
    return _ledger_keys(dataset, on, private)


def _ledger_keys(dataset: Dataset, on: KeyKind, private: PrivateFolder) -> KeyIndex:
    """Index the patients, accession numbers or paths that the private ledger holds."""
    studies = dataset.studies
    rows = np.arange(studies.num_samples)
    row_of = {key.decode("ascii"): row for row, key in enumerate(studies.column("sample_key").tolist())}
    lines = (
        (line, row_of[line["sample_key"]])
        for line in private.inputs(dataset)
        if line.get("sample_key") in row_of
    )
    if on == "path":
        return _Paths(((line["path"], row) for line, row in lines if line.get("path")), len(rows))
    name = "patient" if on == "patient_id" else "accession"
    people: dict[str, set[str | None]] = {}
    pairs = set()
    for line, row in lines:
        if line.get(name):
            pairs.add((line[name], row))
            people.setdefault(line[name], set()).add(line.get("patient"))
    if not pairs:
        raise ConfigError(
            f"The private folder knows no {on} of this dataset: it was packed before shardflow kept them, or "
            "no input has one; join --on study_instance_uid."
        )
    shared = frozenset(key for key, those in people.items() if len(those) > 1)
    if on == "accession_number":
        pairs = {(key, row) for key, row in pairs if key not in shared}
    keys = np.array([key.encode("ascii") for key, _ in pairs], "S")
    found = np.array([row for _, row in pairs], np.int64)
    if on == "accession_number":
        return _Accessions(keys, found, len(rows), shared)
    return _SortedKeys(keys, found, len(rows), "patient", private.secret(dataset))


def study_keys(dataset: Dataset, secret: SecretKey) -> KeyIndex:
    """Return the index of the studies of a dataset by Study Instance UID, or what a layout has instead."""
    column = np.asarray(dataset.studies.column("sample_key"))
    return _SortedKeys(column, np.arange(len(column)), len(column), "study", secret)


class _Accessions(_SortedKeys):
    """Index of digests of accession numbers, which are unique within an institution only.

    Args:
        keys: ``(n,)`` digests.
        rows: ``(n,)`` row of the study that each names.
        num_rows: Studies of the dataset.
        shared: Digests of those that studies of several patients have; they name none.
    """

    def __init__(
        self, keys: NDArray[np.bytes_], rows: NDArray[np.int64], num_rows: int, shared: frozenset[str]
    ) -> None:
        super().__init__(keys, rows, num_rows)
        self._shared = shared

    def find(self, keys: Sequence[str]) -> NDArray[np.int64]:
        digests = [accession_digest(key) for key in keys]
        found = super().find(digests)
        found[[digest in self._shared for digest in digests]] = _AMBIGUOUS
        return found


def accession_digest(accession: str) -> str:
    """Return what the private ledger holds of an accession number; empty for none."""
    return f"{digest64(accession):016x}" if accession else ""


def _stored_keys(dataset: Dataset, on: KeyKind, unit: TableUnit, secret: SecretKey) -> KeyIndex:
    """Index the surrogates of series or images, which ``study.json`` of each sample holds."""
    table, _ = open_series(dataset)
    first_series = table.first_series().tolist()
    starts = image_starts(dataset)
    keys: list[bytes] = []
    rows: list[int] = []
    for study in range(dataset.studies.num_samples):
        stored = json.loads(dataset.read_fields(study, [STUDY_FIELD])[STUDY_FIELD])["series"]
        for number, series in enumerate(stored):
            row = first_series[study] + number
            if on == "series_instance_uid":
                found, places = [series.get("series_key")], [row]
            else:
                found = series.get("instance_keys") or []
                places = list(range(int(starts[row]), int(starts[row]) + len(found)))
            if unit != ("series" if on == "series_instance_uid" else "image"):
                places = [row if unit == "series" else study] * len(found)
            for key, place in zip(found, places, strict=True):
                if key:
                    keys.append(key.encode("ascii"))
                    rows.append(place)
    if not keys:
        raise ConfigError(f"The samples hold no surrogates for {on}; join --on study_instance_uid.")
    kind = "series" if on == "series_instance_uid" else "instance"
    num_rows = num_unit_rows(dataset, unit)
    return _SortedKeys(np.array(keys, "S"), np.array(rows, np.int64), num_rows, kind, secret)
