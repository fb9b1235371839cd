"""Lock of a run: the dataset versions, tables and sampling that a resume must find again (contract S4).

The loader's state holds digests only, so it stays small; the lock, written beside a checkpoint as
``loader.lock.json``, says what they are digests of. It names no path and no rank: it is the same on all ranks
and machines. A resume compares it with what it has opened, and names the first entry that differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError, StateError
from shardflow.fields.registry import FieldSet
from shardflow.format import Dataset
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.manifest import load
from shardflow.format.signatures import read_keys, trust_of
from shardflow.format.token_manifest import open_manifest
from shardflow.loading.rows.selection import Selection
from shardflow.sampling import LoaderState
from shardflow.sampling.blend import Blend, ComponentState

LOCK_NAME: Final = "loader.lock.json"
"""Name of the file beside a checkpoint."""
LOCK_VERSION: Final = 1


def run_id(plan_id: str, seed: int, content: str) -> str:
    """Return the identity of a run: of what decides its slots, their order, and what fills them."""
    return sha256_hex(canonical_json({"plan_id": plan_id, "seed": seed, "content_id": content}))


def make_lock(selection: Selection, state: LoaderState, fields: FieldSet) -> dict[str, Any]:
    """Return the lock as a JSON object.

    The fields of a run are in it by their content_id, and tokens that a budget counts by their digest.

    Raises:
        ConfigError: A table that the run reads is gone.
        FormatError: A table cannot be trusted.
    """
    budget = state.spec.budget
    tokenizers = [] if budget is None or not budget.cost.tokenizer else [budget.cost.tokenizer]
    tables = sorted({*selection.tables, *fields.tables})
    return {
        "version": LOCK_VERSION,
        "datasets": [
            _dataset(one, tokenizers, series, tables)
            for one, series in zip_longest(selection.datasets, fields.series_tables)
        ],
        "sampling": {
            "split": state.split,
            "subset": state.subset,
            "view": state.view,
            "seed": state.seed,
            "batch": state.spec.to_json(),
            "components": [one.to_json() for one in _components(selection)],
            **({} if selection.sampling is None else {"draws": selection.sampling.to_json()}),
        },
        "field_tables": list(fields.table_digests),
        "plan_id": state.plan_id,
        "content_id": fields.content_id,
    }


def _components(selection: Selection) -> tuple[ComponentState, ...]:
    """Return all components of a blend; the state lists those of a small one only."""
    population = selection.population
    return population.all_states() if isinstance(population, Blend) else ()


def _dataset(
    dataset: Dataset, tokenizers: list[str], series: str | None, tables: list[str]
) -> dict[str, Any]:
    return {
        "dataset_id": dataset.dataset_id,
        "manifest_version": dataset.manifest_version,
        "series_table": series,
        "tokens": {one: open_manifest(dataset, one).digest for one in tokenizers},
        "tables": {one: dataset.tables[one] for one in tables if one in dataset.tables},
    }


def encode_lock(lock: Mapping[str, Any]) -> bytes:
    """Return the bytes of the file, the same for equal locks."""
    return json.dumps(lock, indent=1, sort_keys=True).encode() + b"\n"


def lock_digest(lock: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `encode_lock`, which the state holds."""
    return sha256_hex(encode_lock(lock))


def check_lock(saved: Mapping[str, Any], ours: Mapping[str, Any], *, accepts_content: bool) -> None:
    """Refuse a lock that is not this run's.

    Args:
        saved: The lock beside the checkpoint.
        ours: The loader's.
        accepts_content: Whether other fields and tables of their contents are fine.

    Raises:
        StateError: It is none, or an entry differs; the message names the first.
    """
    _check_version(saved)
    accepted = {"content_id", "field_tables", "series_table"} if accepts_content else set()
    for place, was, now in _differences(saved, ours, ""):
        if place.rpartition(".")[2].partition("[")[0] in accepted or place.partition("[")[0] in accepted:
            continue
        raise StateError(
            f"{place} of {LOCK_NAME} was {json.dumps(was)} and is {json.dumps(now)} here: the run of the "
            "checkpoint read other data. Open the version and the tables that the lock lists "
            "(sf.open(path, version=...)), or start a new run."
        )


def open_locked(source: Dataset | Selection, lock: Mapping[str, Any]) -> Dataset | Selection:
    """Return the version of a dataset that a lock lists, with the tables that it lists.

    A selection is returned as it is, for `check_lock` to compare.

    Raises:
        StateError: It is no lock.
        ManifestError: The dataset no longer has that version.
        ConfigError: It no longer has a table.
    """
    _check_version(lock)
    listed = lock.get("datasets")
    if type(source) is not Dataset or not isinstance(listed, list) or len(listed) != 1:
        return source
    wanted = listed[0]
    if wanted.get("dataset_id") != source.dataset_id and type(wanted.get("manifest_version")) is int:
        source = Dataset(source.store, load(source.store, wanted["manifest_version"]))
    return with_tables(source, wanted)


def signed(source: Dataset | Selection, signed_by: str | os.PathLike[str]) -> Dataset | Selection:
    """Return a dataset that a key must have signed, see `Dataset.signed`; a selection must be one already.

    Raises:
        ConfigError: A dataset of the selection was opened without keys, or with one that is not among these.
        SignatureError: The dataset is not signed by one of the keys.
    """
    if isinstance(source, Dataset):
        return source.signed(signed_by)
    keys = read_keys(signed_by)
    for dataset in source.datasets:
        trust = trust_of(dataset.store)
        if trust is None:
            raise ConfigError(
                "signed_by= of a loader takes a dataset, got a blend or a selection that was opened without "
                "keys; write sf.blend(path, signed_by=...) or sf.open(path, signed_by=...)."
            )
        if not trust.keys <= keys.keys():  # what is open already was signed by one of those
            raise ConfigError(
                "signed_by= of a loader must have all keys that the blend or the selection was opened with; "
                "pass it to sf.blend or sf.open instead."
            )
        trust.admit(dataset.store, dataset.manifest)
    return source


def with_tables(dataset: Dataset, listed: Mapping[str, Any] | None) -> Dataset:
    """Return a dataset with the versions of its tables that an entry of a lock lists.

    Args:
        dataset: The dataset; its rows are studies.
        listed: One of ``lock["datasets"]``; of another version of the dataset, or None, it changes nothing.

    Raises:
        ConfigError: It no longer has one of them.
    """
    # Of series and images the lock has the digest of the rows, which are not known yet.
    if not listed or not listed.get("tables") or listed.get("manifest_version") != dataset.manifest_version:
        return dataset
    tables = dataset.tables.pinned(dataset.store, dataset.dataset_id, listed["tables"])
    return Dataset(dataset.store, dataset.manifest, tables)


def locked_digests(folders: Iterable[Path]) -> set[str]:
    """Return the digests of the tables that the locks of runs name, which their resumes need.

    Args:
        folders: Folders of runs or of checkpoints; every ``loader.lock.json`` below them is read.

    Raises:
        ConfigError: A folder is missing, or a lock is damaged.
    """
    found: set[str] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder.name!r} of runs; correct --runs.")
        for path in sorted(folder.rglob(LOCK_NAME)):
            try:
                lock = json.loads(path.read_bytes())
                _check_version(lock)
                found.update(digest for one in lock["datasets"] for digest in one["tables"].values())
                found.update(lock["field_tables"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError, StateError):
                raise ConfigError(
                    f"A {LOCK_NAME} of {folder.name!r} cannot be read, so what its run needs is not known; "
                    "delete that checkpoint, or leave the folder out of --runs."
                ) from None
    return found


def _check_version(lock: object) -> None:
    if not isinstance(lock, Mapping) or lock.get("version") != LOCK_VERSION:
        raise StateError(
            f"The lock must be what loader.lock() returned, of version {LOCK_VERSION}; read {LOCK_NAME} "
            "beside the checkpoint."
        )


def _differences(was: Any, now: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two JSON values differ, in the order of the second one, which names what decides first."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*now, *was]):
            yield from _differences(was.get(name), now.get(name), f"{place}.{name}" if place else name)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _differences(one, other, f"{place}[{number}]")
    elif was != now:
        yield place, was, now
