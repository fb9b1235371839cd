"""What must hold before a job does anything: key, settings, reports; each refusal says what to do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.packing.inventory import count_reasons

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.progress import Progress
    from shardflow.shards.manifest import Manifest
    from shardflow.storage import ByteStore

__all__ = [
    "check_files",
    "check_reports",
    "check_same_settings",
    "load_key",
    "note_missing_reports",
    "nothing_to_pack",
]


_NUM_THREADS: Final = 8
"""Sizes that are asked for at once."""


def load_key(config: PackConfig) -> SecretKey:
    """Load the secret key; the first run of a dataset makes one, unless the settings name a file.

    Raises:
        ConfigError: The key cannot be used or made.
    """
    if config.identity.key_file is None and not config.key_file.exists():
        try:
            return SecretKey.create(config.key_file)
        except ConfigError:
            if not config.key_file.exists():
                raise
            # Another task of the same job was faster.
    return SecretKey.load(config.key_file)


def check_same_settings(config: PackConfig, key: SecretKey, finished: Manifest) -> None:
    """Refuse at once what could not be the dataset that stands, or a version of it.

    Settings hold the parts of the splits: with others, patients would change their split.

    Raises:
        ConfigError: Key or settings are others.
    """
    for what, stands, asked in (
        ("secret key", finished.key_id, key.key_id),
        ("settings", finished.config_digest, config.content_digest()),
    ):
        if stands != asked:
            raise ConfigError(
                f"output must be new, or hold a dataset of the same {what}, got one of another; "
                "name another output."
            )


def check_reports(config: PackConfig) -> None:
    """Refuse reports that are not there.

    Raises:
        ConfigError: They are named and absent, or asked for and not named.
    """
    reports = config.inputs.reports
    if reports is not None and not reports.exists():
        raise ConfigError(
            "inputs.reports must be an existing file or folder, got none; correct it, or leave it out to "
            "pack images alone."
        )
    if config.policy.require_report and reports is None:
        raise ConfigError(
            "policy.require_report must be false without inputs.reports, got true; name the reports."
        )


def check_files(store: ByteStore, manifest: Manifest) -> None:
    """Look whether every file of a version stands with its size.

    Raises:
        FormatError: One does not.
        StorageError: The store cannot be asked.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sizes = pool.map(lambda entry: _size(store, entry.path), manifest.files())
    for entry, num_bytes in zip(manifest.files(), sizes, strict=True):
        if num_bytes != entry.num_bytes:
            raise FormatError(
                f"{entry.path} must stand with {entry.num_bytes} bytes, got another file or none; "
                "run `shardflow verify`, and pack into a new output if it is damaged."
            )


def _size(store: ByteStore, path: str) -> int | None:
    try:
        return store.size(path)
    except NotFoundError:
        return None


def nothing_to_pack(files: FileTable) -> ConfigError:
    """Make the error for inputs that hold no image."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(files.reason).items())
    return ConfigError(
        f"inputs.dicom must hold DICOM images, got {len(files)} files and none of them ({reasons}); "
        "correct the folders."
    )


def note_missing_reports(
    config: PackConfig, plan: PackPlan, reports: ReportTable, progress: Progress
) -> None:
    """Say it while the job can be stopped: a table whose identifiers fit no study is no error."""
    if config.inputs.reports is None:
        return
    count = sum(study not in reports.report_of for shard in plan.shards for study in shard.studies)
    if count:
        progress.note(f"{count} of {plan.num_studies} studies have no report, and are packed without one")
