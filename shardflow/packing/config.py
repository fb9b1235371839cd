"""Settings of a packing job.

Two kinds are kept apart, because one decides bytes and the other must not: settings that decide the dataset's
content (`PackConfig.content`, part of every digest), and settings of the run (folders, processes, memory,
time), which never change the bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardflow.config import Bounds, ByteSize, Inside, check_fields
from shardflow.errors import ConfigError
from shardflow.format.keys import canonical_json
from shardflow.packing.attachments.records.mapping import RecordsConfig
from shardflow.packing.settings import (
    AttachmentsConfig,
    DeidConfig,
    PolicyConfig,
    ReportsConfig,
    SlidesConfig,
    TableFile,
    VariantsConfig,
    VolumesConfig,
)
from shardflow.packing.sources.dicomweb.config import ArchiveConfig, check_address
from shardflow.packing.sources.layouts.base import LayoutConfig
from shardflow.reports.alignment.evidence import AlignmentRules

if TYPE_CHECKING:
    from shardflow.packing.sources.dicomweb.retrieval import Archive

_SPLIT_NAME = re.compile(r"[a-z0-9]{1,32}")
_KIB = 1 << 10
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class InputsConfig:
    """Locations of the inputs; nothing is ever written there."""

    dicom: tuple[Path, ...] = ()
    """Folders (or single files) of images; every file below them ends in one outcome."""
    dicomweb: str = ""
    """Root of an archive's DICOMweb service, such as ``https://archive/dicom-web``; empty for none."""
    archive: ArchiveConfig = field(default_factory=ArchiveConfig)
    """What is fetched from there, and how."""
    attachments: tuple[Path, ...] = ()
    """Further folders (or single files), of attachments alone: images there are not packed."""
    reports: Path | None = None
    """Table or folder of reports; none packs images alone."""
    reports_format: Literal["csv", "documents", "folder", "jsonl"] = "csv"
    """Format of ``reports``, unless the layout determines it. ``documents``: DICOM SR, C-CDA, FHIR and HL7v2,
    each file by its content."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Assignment of inputs to studies and patients, if DICOM headers do not suffice."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.dicom and not self.dicomweb:
            raise ConfigError("inputs.dicom must name at least one folder; add one, or set inputs.dicomweb.")
        if self.archive != ArchiveConfig() and not self.dicomweb:
            raise ConfigError("inputs.archive is of an archive, but inputs.dicomweb names none; set it.")
        if self.dicomweb:
            check_address(self.dicomweb, self.archive)
            if self.layout.kind != "headers":
                raise ConfigError(
                    f"inputs.dicomweb needs layout.kind 'headers', got {self.layout.kind!r}: an archive has "
                    "no tables and folders; remove one of the two."
                )

    @property
    def roots(self) -> tuple[Path, ...]:
        """All folders that files are looked for in: of images, then of attachments."""
        return (*self.dicom, *self.attachments)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityConfig:
    """The secret key of all surrogates."""

    key_file: Path | None = None
    """File of at least 32 random bytes, mode 0600. By default ``secret.key`` in the private folder, created
    by the first run. Keep it: with another key, samples get other names and patients change their split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardsConfig:
    """How samples become files."""

    target_bytes: Annotated[ByteSize, Bounds(4 * _KIB, 1 << 40)] = 512 * _MIB
    """A shard is closed before its estimated size passes this; a larger study has a shard of its own."""
    max_samples: Annotated[int, Bounds(1, 1 << 24)] = 10_000
    """A shard is closed at this many studies."""
    codec: Literal["b2nd", "fast", "htj2k", "npy", "png16"] = "b2nd"
    """Codec of slices and volumes, lossless all: ``b2nd``, ``fast`` (``b2nd`` too, which decodes 2 to 3 times
    as fast and is larger), ``htj2k`` (smallest), ``npy`` (raw), ``png16`` (for other tools). Volumes in
    bricks are ``b2nd`` or ``fast``. Series that a codec cannot hold, such as float32, are ``b2nd``."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitsConfig:
    """Limits that decide outcomes, equal on every machine and checked before anything is allocated."""

    max_frame_pixels: Annotated[int, Bounds(1)] = 1 << 28
    """Rows times columns of one frame."""
    max_frames: Annotated[int, Bounds(1)] = 1 << 16
    """Frames of one instance."""
    max_pixel_bytes: Annotated[ByteSize, Bounds(1)] = 16 * _GIB
    """Decoded bytes of one instance."""
    max_header_bytes: Annotated[ByteSize, Bounds(1)] = 64 * _MIB
    """Bytes of one file before its pixel data."""
    max_inflated_bytes: Annotated[ByteSize, Bounds(1)] = 512 * _MIB
    """Bytes that a file in the deflated transfer syntax inflates to."""
    max_study_bytes: Annotated[ByteSize, Bounds(1)] = 64 * _GIB
    """Decoded bytes of one study."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageConfig:
    """The dataset page, ``report.html``."""

    enabled: bool = True
    """Whether to write one."""
    num_thumbnails: Annotated[int, Bounds(0, 500)] = 24
    """Maximum number of studies to show. Thumbnails are pixels of patients, as the slices are."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionConfig:
    """How the job runs; changes its speed and never its bytes."""

    engine: Literal["local", "ray"] = "local"
    """Where packing processes run: on this machine, or on those of a Ray cluster (extra ``ray``)."""
    ray_address: str = ""
    """Of a running Ray cluster (``host:port``, or ``auto``); empty starts Ray on this machine, for this job.
    All its machines see inputs, output and private folder under the same paths."""
    num_processes: Annotated[int, Bounds(0, 4096)] = 0
    """Packing processes; 0 takes every processor that the job may use, or that the Ray cluster has."""
    memory_bytes: Annotated[ByteSize, Bounds(512 * _MIB)] = 4 * _GIB
    """Address space of one packing process; about 0.3 GiB of it are libraries."""
    task_timeout_s: Annotated[float, Bounds(0.1)] = 900.0
    """Time without progress after which a process is killed and replaced: for one file of a study or header,
    for a shard, for what a study needs beside its files."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def resolved_num_processes(self) -> int:
        """Number of processes, with 0 resolved for this machine."""
        if self.num_processes:
            return self.num_processes
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def check_splits(splits: Mapping[str, int], name: str) -> None:
    """Check names and parts of splits.

    Args:
        splits: Parts of each split.
        name: Their setting.

    Raises:
        ConfigError: They cannot be used.
    """
    for split, parts in splits.items():
        if not _SPLIT_NAME.fullmatch(split):
            raise ConfigError(f"a split's name must be 1 to 32 of [a-z0-9], got {split!r}; rename it.")
        if parts < 0:
            raise ConfigError(f"{name}.{split} must be at least 0, got {parts}; correct it.")
    if sum(splits.values()) < 1:
        raise ConfigError(f"{name} must have at least one part in all, got 0; give a split some.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig:
    """All settings of a packing job."""

    output: Path
    """Folder of the dataset: new, empty, or of an interrupted job with the same settings."""
    upload_to: str = ""
    """Address in an object store (``s3://bucket/prefix``) that the dataset is uploaded to while it is packed,
    its manifest last; empty for none."""
    keep_local: bool = True
    """Whether shards stay in ``output`` after their upload. If not, each is removed as soon as it was read
    back from there; manifests, tables and ledgers stay."""
    private_dir: Path
    """Folder outside the dataset for what must never be in it (mode 0700): the key, the ledger of input
    paths, headers while the job runs, the crash log. One for each dataset."""
    inputs: InputsConfig
    identity: IdentityConfig = field(default_factory=IdentityConfig)
    splits: Annotated[dict[str, int], Inside("parts")] = field(
        default_factory=lambda: {"train": 90, "val": 5, "test": 5}
    )
    """Parts of each split, in the order in which the dataset lists them; patients are assigned by a keyed
    hash. May be in a table ``parts``, as in the settings of a corpus."""
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    page: PageConfig = field(default_factory=PageConfig)
    variants: VariantsConfig = field(default_factory=VariantsConfig)
    volumes: VolumesConfig = field(default_factory=VolumesConfig)
    slides: SlidesConfig = field(default_factory=SlidesConfig)
    deid: DeidConfig = field(default_factory=DeidConfig)
    reports: ReportsConfig = field(default_factory=ReportsConfig)
    alignment: AlignmentRules = field(default_factory=AlignmentRules)
    attachments: AttachmentsConfig = field(default_factory=AttachmentsConfig)
    records: RecordsConfig = field(default_factory=RecordsConfig)
    tables: tuple[TableFile, ...] = ()
    """Tables that are attached by this job and by each that appends; see docs/tables.md."""
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        check_splits(self.splits, "splits")
        if not self.keep_local and not self.upload_to:
            raise ConfigError("keep_local = false needs upload_to; name an address.")
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ConfigError("[[tables]] must each have a name of their own, got one twice; rename one.")
        self.deid.rules()

    def archive(self) -> Archive | None:
        """Return the archive of the inputs; None if there is none."""
        inputs = self.inputs
        if not inputs.dicomweb:
            return None
        # It brings an HTTP client.
        from shardflow.packing.sources.dicomweb.retrieval import Archive

        return Archive(
            url=inputs.dicomweb,
            settings=inputs.archive,
            folder=inputs.archive.folder or self.private_dir / "archive",
            max_instance_bytes=self.limits.max_pixel_bytes + self.limits.max_header_bytes,
        )

    @property
    def key_file(self) -> Path:
        """File of the secret key."""
        return self.identity.key_file or self.private_dir / "secret.key"

    def content(self) -> dict[str, Any]:
        """Return the settings that decide the dataset's bytes, as JSON without fractions."""
        later = {
            "alignment": None if self.alignment == AlignmentRules() else self.alignment.digest(),
            "attachments": self.attachments.content(),
            "layout": self.inputs.layout.content(),
            "drop_reasons": None
            if self.policy.drop_reasons == PolicyConfig().drop_reasons
            else sorted(self.policy.drop_reasons),
            "records": self.records.content(),
            "reports": self.reports.content(),
            "slides": self.slides.content(),
            "volumes": self.volumes.content(),
        }
        return {
            # Left out at their defaults: settings older than these sections keep their digest.
            **{name: value for name, value in later.items() if value is not None},
            "deid": self.deid.content(),
            "limits": asdict(self.limits),
            "on_bad_instance": self.policy.on_bad_instance,
            "page": asdict(self.page),
            "require_report": self.policy.require_report,
            "shards": asdict(self.shards),
            "variants": self.variants.content(),
            "splits": [[name, parts] for name, parts in self.splits.items()],
        }

    def content_digest(self) -> str:
        """Return the digest of `content`: the ``config_digest`` of the manifest."""
        return content_digest(self.content())


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings that decide content."""
    return hashlib.sha256(canonical_json(content)).hexdigest()
