"""What verification finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["WHOLE_FILE", "Damage", "VerifyReport"]

WHOLE_FILE = "whole file"


@dataclass(frozen=True, slots=True)
class Damage:
    """The first damage of a file."""

    path: str
    place: str
    """In words: header, payload or padding of a member; column of a table; line of the ledger."""
    problem: str
    offset: int | None = None
    """First wrong byte, or first byte of the smallest part that is known to be wrong; None: the whole
    file.
    """
    sample_key: str | None = None
    field: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was checked, and what is wrong."""

    dataset_id: str | None
    """Of the newest manifest; None if that is damaged."""
    manifest_version: int
    damages: tuple[Damage, ...]
    """The first damage of each file: manifests, then shards with their indexes, samples tables, ledgers,
    pages, and entity views and stored tokens with their tables."""
    notes: tuple[str, ...]
    """What is no damage, but worth knowing, such as files that no manifest names."""
    num_files: int
    num_bytes: int
    num_shards: int
    num_samples: int
    num_fields: int
    num_views: int
    """Entity views of the dataset's versions that were checked."""
    num_tokenizations: int
    """Sets of stored tokens of the versions, or of their views, that were checked."""

    @property
    def is_whole(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.damages

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)
