"""Registry of what packing loads by name: task handlers and kinds of attachments.

Packages offer further kinds of attachments as entry points of the group ``shardflow.attachment_kinds``, each
a tuple of `shardflow.sources.attachments.AttachmentKind`.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

TASK_HANDLERS: Final = {
    "corpus": "shardflow.corpora.parts:make_handler",
    "studies": "shardflow.packing.handlers:make_handler",
}
"""Functions that make the handler of a packing process, by the job that starts it."""

ATTACHMENT_KINDS: Final = {
    "annotations": "shardflow.annotations.kinds:KINDS",
    "waveforms": "shardflow.waveforms.kinds:KINDS",
    "records": "shardflow.records.kinds:KINDS",
}
"""Kinds of attachments, in the order in which they are asked; each module imports quickly."""

ATTACHMENT_KINDS_GROUP: Final = "shardflow.attachment_kinds"


def resolve(target: str) -> Any:
    """Return what ``"module:name"`` refers to."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def load_attachment_kinds() -> list[Any]:
    """Return the kinds of attachments: those of this package, then those of installed packages by name."""
    # Slow to import, and of no use to a process that meets no attachment.
    from importlib.metadata import entry_points

    offered = sorted(entry_points(group=ATTACHMENT_KINDS_GROUP), key=lambda entry: entry.name)
    tables = [*map(resolve, ATTACHMENT_KINDS.values()), *(entry.load() for entry in offered)]
    return [kind for table in tables for kind in table]
