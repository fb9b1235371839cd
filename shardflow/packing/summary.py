"""What a packing job reports when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

if TYPE_CHECKING:
    from shardflow.shards.manifest import Manifest

__all__ = ["PackSummary", "Status"]

Status: TypeAlias = Literal["packed", "already_packed", "quarantine_limit"]

_EXIT_CODES: Final[Mapping[Status, int]] = {"packed": 0, "already_packed": 0, "quarantine_limit": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """Counts and costs of a job; holds nothing of an input."""

    status: Status
    """``packed``, ``already_packed``, or ``quarantine_limit``: nothing was published."""
    inputs: dict[str, int]
    """Files and reports: ``total``, ``packed``, ``skipped``, ``quarantined``; after a stop, those known by
    then."""
    reasons: dict[str, int]
    """Inputs by reason code, for those that are not packed."""
    studies: dict[str, int] = field(default_factory=dict)
    """Studies: ``packed``, ``skipped``, ``quarantined``."""
    dataset_id: str | None = None
    """Digest of the manifest; None where none was published."""
    splits: dict[str, int] = field(default_factory=dict)
    """Samples by split."""
    num_shards: int = 0
    num_slices: int = 0
    num_bytes: int = 0
    """Size of all files of the dataset."""
    seconds: float = 0.0
    """Wall time of this run."""
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Most resident memory of the ``job`` and of any one packing ``process``."""

    @classmethod
    def of_manifest(
        cls, status: Status, manifest: Manifest, *, seconds: float, peak_memory_bytes: dict[str, int]
    ) -> Self:
        """Sum up a published dataset."""
        counts = asdict(manifest.counts)
        extra: Mapping[str, Any] = manifest.extra
        return cls(
            status=status,
            inputs={"total": sum(counts.values()), **counts},
            reasons=dict(extra["reasons"]),
            studies=dict(extra["studies"]),
            dataset_id=manifest.dataset_id,
            splits={name: numbers["num_samples"] for name, numbers in manifest.splits.items()},
            num_shards=len(manifest.shards),
            num_slices=extra["num_slices"],
            num_bytes=sum(entry.num_bytes for entry in manifest.files()) + len(manifest.encode()),
            seconds=seconds,
            peak_memory_bytes=peak_memory_bytes,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the job: 0 done, 3 quarantine over its limit."""
        return _EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON; the command's last line."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}
