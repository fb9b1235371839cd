"""The kinds of attachments that packing knows, loaded when the first file is none of the images."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from shardflow.packing.registry import load_attachment_kinds

if TYPE_CHECKING:
    from shardflow.sources.attachments import AttachmentKind

__all__ = ["attachment_kinds"]


@cache
def attachment_kinds(records: str = "") -> tuple[AttachmentKind, ...]:
    """Return all kinds, in the order in which they are asked, and in which their attachments are packed.

    Args:
        records: Settings of clinical records, as `shardflow.records.RecordsConfig.to_text` writes them.
    """
    kinds = load_attachment_kinds()
    if not records:
        return tuple(kinds)
    from shardflow.records.config import RecordsConfig
    from shardflow.records.kinds import record_kinds

    configured = record_kinds(RecordsConfig.from_text(records))
    replaced = {kind.name for kind in configured}
    # What a mapping describes is asked first: it may look like a kind that everybody has.
    return (*configured, *(kind for kind in kinds if kind.name not in replaced))
