"""What a corpus job reports when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, TypeAlias

from shardflow.shards.manifest import Manifest

__all__ = ["CorpusStatus", "CorpusSummary"]

CorpusStatus: TypeAlias = Literal["packed", "already_packed", "nothing_new", "quarantine_limit"]

_EXIT_CODES: Final[Mapping[CorpusStatus, int]] = {
    "packed": 0,
    "already_packed": 0,
    "nothing_new": 0,
    "quarantine_limit": 3,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary:
    """Counts and costs of a job; holds nothing of an input."""

    status: CorpusStatus
    """``packed``; ``already_packed`` and ``nothing_new``: there was nothing to do; ``quarantine_limit``:
    nothing was published."""
    inputs: dict[str, int]
    """Lines: ``total``, ``packed``, ``skipped``, ``quarantined``."""
    reasons: dict[str, int]
    """Lines by reason code, for those that are not packed."""
    dataset_id: str | None = None
    manifest_version: int | None = None
    splits: dict[str, int] = field(default_factory=dict)
    """Samples by split."""
    num_files: int = 0
    """Input files of this run."""
    num_parts: int = 0
    num_parts_kept: int = 0
    """Parts that an earlier run had finished."""
    num_shards: int = 0
    num_bytes: int = 0
    """Size of all files of the dataset."""
    seconds: float = 0.0
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Most resident memory of the ``job`` and of any one packing ``process``."""

    @classmethod
    def of_manifest(cls, status: CorpusStatus, manifest: Manifest, **facts: Any) -> Self:
        """Sum up a published dataset."""
        counts = asdict(manifest.counts)
        extra: Mapping[str, Any] = manifest.extra
        return cls(
            status=status,
            inputs={"total": sum(counts.values()), **counts},
            reasons=dict(extra["reasons"]),
            dataset_id=manifest.dataset_id,
            manifest_version=manifest.manifest_version,
            splits={name: numbers["num_samples"] for name, numbers in manifest.splits.items()},
            num_shards=len(manifest.shards),
            num_bytes=sum(entry.num_bytes for entry in manifest.files()) + len(manifest.encode()),
            **facts,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the job: 0 done, 3 quarantine over its limit."""
        return _EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON; the command's last line."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}
