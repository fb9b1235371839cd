"""Adoption of newer versions of a dataset by a run, at the start of an epoch (``data.adopt_new_versions``).

Rank 0 looks for the newest version and tells the others. A version is adopted if it descends from the one
that the run trains on, so that samples were added or removed since and nothing else; the loop then saves a
checkpoint and prepares the run again from it. ``ledger/versions.jsonl`` has a line for each epoch that
begins: a start that repeats the epoch takes the version of its line, whatever is newest by then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardflow.errors import (
    ConfigError,
    ManifestError,
    NotFoundError,
    ShardflowError,
    SignatureError,
    StorageError,
)
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.conversations.templates import Template, template_digest
from shardflow.fields.field import with_dependencies
from shardflow.format import Dataset, Manifest
from shardflow.format.counts import CountsManifest, counts_name
from shardflow.format.manifest import latest_version, versions
from shardflow.format.manifest_table import load_shared
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.signatures import trust_only
from shardflow.format.token_manifest import TokensManifest
from shardflow.loading.rows.selection import FULL_STUDY
from shardflow.logs import EventLog, read_events
from shardflow.storage import ByteStore, fsync_directory, open_store
from shardflow.storage.local import make_directories
from shardflow.training.config import DataConfig, TrainConfig
from shardflow.training.ledger import LEDGER_FOLDER
from shardflow.training.model_fields import CONVERSATION_FIELD
from shardflow.training.tokenizing import tokenizer_digest

_FILE: Final = "versions.jsonl"
_LOGGER = logging.getLogger(__name__)


def recorded_versions(run: Path) -> list[Mapping[str, Any]]:
    """Return the lines of the epochs that began, in the order in which they did."""
    path = run / LEDGER_FOLDER / _FILE
    return [line for line in read_events(path) if line["event"] == "version"] if path.exists() else []


def choose_version(config: TrainConfig, state: Mapping[str, Any] | None) -> int:
    """Return the version that a start of the run trains on; on rank 0.

    Args:
        config: All settings.
        state: What the checkpoint holds beside tensors; None for a fresh start.

    Raises:
        ConfigError: The newest version is none that the run can adopt, or the version that an epoch began
            with was replaced; the message says why.
        ManifestError: A version cannot be read or trusted.
        StorageError: Reading failed.
    """
    data, run = config.data, config.run.output
    position: Mapping[str, Any] = {"epoch": 0, "step": 0} if state is None else state["loader"]
    if position["step"]:
        return int(position["manifest_version"])
    global_step = 0 if state is None else state["global_step"]
    for line in reversed(recorded_versions(run)):
        if (line["global_step"], line["epoch"]) == (global_step, position["epoch"]):
            return _began_with(data, line)
    if state is None:
        # Where no version is ready, opening the newest says what it lacks.
        ready = next(_ready_versions(data, 0, _counts(config)), None)
        return latest_version(open_store(data.dataset)) if ready is None else ready[1].manifest_version
    if "meanings" not in state:  # of a run that did not adopt versions yet: there is nothing to compare
        return int(position["manifest_version"])
    current, dataset_id = int(position["manifest_version"]), position["dataset_id"]
    for line in recorded_versions(run):  # the position of series or parts has the digest of those
        dataset_id = line["dataset_id"] if line["manifest_version"] == current else dataset_id
    return newest_descendant(data, run, current, dataset_id, _counts(config))


def _counts(config: TrainConfig) -> tuple[type[SidecarManifest], str] | None:
    """Return kind and name of the counts of tokens that a budget charges for; None where it needs none."""
    if config.batch.max_tokens is None:
        return None
    if config.task.has_conversations:
        field = config.fields[CONVERSATION_FIELD]
        assert isinstance(field, Conversation)  # noqa: S101 - checked when the settings were read
        template = ""
        if isinstance(field.template, Template):
            if config.data.view != FULL_STUDY or config.data.unit != "study":
                # Only an opened version knows its rows; the loader refuses one that is not counted.
                return None
            named = with_dependencies(config.fields, field.depends_on)
            template = template_digest(field.template, {name: config.fields[name] for name in named})
        digest = Renderer.load(field.processor).digest
        return CountsManifest, counts_name(digest, field.split_at, template)
    if config.batch.text_tokens == "counted":
        return TokensManifest, tokenizer_digest(config.text.folder)
    return None


def _began_with(data: DataConfig, line: Mapping[str, Any]) -> int:
    """Return the version that an epoch began with; another one of the same number is refused."""
    number = int(line["manifest_version"])
    if load_shared(open_store(data.dataset), number).dataset_id != line["dataset_id"]:
        raise ConfigError(
            f"version {number} of the dataset is not the one that epoch {line['epoch']} of the run began "
            "with: it was replaced; restore that version, or start a new run."
        )
    return number


def newest_descendant(
    data: DataConfig,
    run: Path,
    current: int,
    dataset_id: str,
    counts: tuple[type[SidecarManifest], str] | None = None,
) -> int:
    """Return the newest version of a dataset, which descends from the one that a run trains on.

    Versions that no trusted key has signed yet, or whose tokens are not counted yet, are passed over.

    Args:
        data: The table ``[data]``.
        run: The run folder.
        current: The version that the run trains on, returned where none is newer.
        dataset_id: Its digest.
        counts: Kind and name of the counts that a version must have.

    Raises:
        ConfigError: The newest version is no descendant, or brings back samples that were removed.
    """
    for store, manifest in _ready_versions(data, current, counts):
        _check_descent(store, manifest, current, dataset_id)
        trained = {int(line["manifest_version"]): line["dataset_id"] for line in recorded_versions(run)}
        # Digests bind the versions in between, which nobody needs to have signed.
        _check_removed(open_store(data.dataset), {**trained, current: dataset_id}, manifest)
        return manifest.manifest_version
    return current


def _ready_versions(
    data: DataConfig, current: int, counts: tuple[type[SidecarManifest], str] | None
) -> Iterator[tuple[ByteStore, Manifest]]:
    """Yield the versions above one that are signed and counted where that is asked, the newest first."""
    store = open_store(data.dataset)
    trust = None
    if data.trusted_keys is not None:
        store, trust = trust_only(store, data.trusted_keys)
    for number in reversed([one for one in versions(store) if one > current]):
        manifest = load_shared(store, number)
        if trust is not None:
            try:
                trust.admit(store, manifest)
            except SignatureError as error:
                _LOGGER.info("version %d is not adopted: %s", number, error.message)
                continue
        if counts is not None and not _has(store, manifest, *counts):
            _LOGGER.info(
                "version %d is not adopted: no trusted counts of tokens (shardflow tokenize)", number
            )
            continue
        yield store, manifest


def _has(store: ByteStore, manifest: Manifest, kind: type[SidecarManifest], name: str) -> bool:
    """Tell whether a version has a sidecar, one that is trusted where keys are given."""
    try:
        kind.load(store, name, manifest.dataset_id)
    except (NotFoundError, SignatureError):  # signed before it was there, and not again yet
        return False
    return True


class Adoption:
    """Adoption in a run that trains on one version; on rank 0.

    Args:
        config: All settings.
        dataset: The version.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset) -> None:
        self._config, self._data, self._run = config, config.data, config.run.output
        self._version, self._dataset_id = dataset.manifest_version, dataset.manifest.dataset_id

    def record(self, global_step: int, epoch: int) -> None:
        """Write down, before its first step, that an epoch is trained on this version.

        Raises:
            StorageError: The line cannot be written.
        """
        folder = self._run / LEDGER_FOLDER
        make_directories(folder)
        with EventLog(folder / _FILE, clock=None) as log:
            facts = {"manifest_version": self._version, "dataset_id": self._dataset_id}
            log.write("version", global_step=global_step, epoch=epoch, **facts)
            log.sync()
        fsync_directory(folder)

    def finds_newer(self) -> bool:
        """Return whether a newer version is there; the start that adopts it tells of one that is refused."""
        try:
            counts = _counts(self._config)
            found = newest_descendant(self._data, self._run, self._version, self._dataset_id, counts)
        except StorageError as error:
            _LOGGER.warning("no newer version of the dataset is looked for in this epoch: %s", error.message)
            return False
        except ShardflowError:
            return True
        return found > self._version


def _check_descent(store: ByteStore, manifest: Manifest, current: int, dataset_id: str) -> None:
    newest = manifest
    while manifest.parent != dataset_id:
        number = manifest.manifest_version - 1
        try:
            parent = load_shared(store, number) if number > current else None
        except ManifestError:
            parent = None
        if parent is None or parent.dataset_id != manifest.parent:
            raise _refused(newest, f"it does not descend from version {current}, which the run trains on")
        manifest = parent


def _check_removed(store: ByteStore, trained: Mapping[int, str], manifest: Manifest) -> None:
    """Refuse a version with samples that a version of the run had and a later one had not any more.

    Args:
        store: The dataset's, without trusted keys.
        trained: Digests of the versions that the run was trained on.
        manifest: The version to adopt, a descendant of the newest of those.
    """
    line = [manifest]
    for number in reversed(
        [one for one in versions(store) if min(trained) <= one < line[0].manifest_version]
    ):
        older = load_shared(store, number)
        if older.dataset_id in (line[-1].parent, trained.get(number)):
            line.append(older)
    before = gone = np.zeros(0, "S1")
    for one in reversed(line):
        keys = Dataset(store, one).samples.column("sample_key")
        gone = np.union1d(gone, np.setdiff1d(before, keys))
        before = keys
    num_back = int(np.isin(gone, before).sum())
    if num_back:
        raise _refused(manifest, f"it brings back {num_back} samples that were removed")


def check_meanings(saved: Mapping[str, str], ours: Mapping[str, str], manifest: Manifest) -> None:
    """Refuse a version in which a field of the batch means something else.

    Args:
        saved: Digests of what the fields meant, see `shardflow.loading.binding.field_meanings`.
        ours: Those of the version to adopt.
        manifest: The version to adopt.

    Raises:
        ConfigError: A field has another dtype, other classes or other columns.
    """
    changed = sorted(name for name in {*saved, *ours} if saved.get(name) != ours.get(name))
    if changed:
        raise _refused(manifest, f"it changes the dtype, classes or columns of {', '.join(changed)}")


def _refused(manifest: Manifest, why: str) -> ConfigError:
    return ConfigError(
        f"version {manifest.manifest_version} of the dataset cannot be adopted: {why}; start a new run "
        "with it, or continue with the version before by data.adopt_new_versions = 'never'."
    )
