"""Registry of what packing loads by name: task handlers, kinds of attachments, recognizers of identifiers.

Packages offer further kinds of attachments as entry points of the group ``shardflow.attachment_kinds``, each
a tuple of `shardflow.packing.sources.attachments.AttachmentKind`. Kinds are loaded for the first file that is
not an image. They offer recognizers in the group ``shardflow.recognizers``, which ``deid.recognizers`` names.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

    from shardflow.packing.sources.attachments import AttachmentKind

TASK_HANDLERS: Final = {
    "corpus": "shardflow.packing.corpora.parts:make_handler",
    "studies": "shardflow.packing.handlers:make_handler",
}
"""Functions that make the task handler of a packing process, by kind of job."""

ATTACHMENT_KINDS: Final = {
    "annotations": "shardflow.packing.attachments.annotations.kinds:KINDS",
    "waveforms": "shardflow.packing.attachments.waveforms:KINDS",
    "records": "shardflow.packing.attachments.records.kinds:KINDS",
}
"""Kinds of attachments in the order in which they are tried; each module imports quickly."""

ATTACHMENT_KINDS_GROUP: Final = "shardflow.attachment_kinds"
RECOGNIZERS_GROUP: Final = "shardflow.recognizers"
"""Group of entry points; each names a `shardflow.packing.deid.report_text.Recognizer`."""


def load_attachment_kinds() -> list[Any]:
    """Return the kinds of attachments: those of this package, then those of installed packages by name.

    Raises:
        ConfigError: A package offers kinds that cannot be imported.
    """
    # Slow to import, and only needed for attachments.
    from importlib.metadata import entry_points

    offered = sorted(entry_points(group=ATTACHMENT_KINDS_GROUP), key=lambda entry: entry.name)
    tables = [*map(resolve_name, ATTACHMENT_KINDS.values()), *map(_load, offered)]
    return [kind for table in tables for kind in table]


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"attachment kinds {entry.name!r} (entry points {ATTACHMENT_KINDS_GROUP}) must be importable, "
            f"got {type(error).__name__}; repair or remove the package that offers them."
        ) from error


@cache
def attachment_kinds(records: str = "") -> tuple[AttachmentKind, ...]:
    """Return all kinds, in the order in which they are tried, and in which attachments are packed.

    Args:
        records: Settings of clinical records, see ``RecordsConfig.to_text``.
    """
    kinds = load_attachment_kinds()
    if not records:
        return tuple(kinds)
    from shardflow.packing.attachments.records.kinds import record_kinds
    from shardflow.packing.attachments.records.mapping import RecordsConfig

    configured = record_kinds(RecordsConfig.from_text(records))
    replaced = {kind.name for kind in configured}
    # Configured records are tried first: they may look like files of a general kind.
    return (*configured, *(kind for kind in kinds if kind.name not in replaced))


def offered_recognizers(names: Sequence[str]) -> list[EntryPoint]:
    """Return the entry points of recognizers, sorted by name.

    Args:
        names: Those of the settings.

    Raises:
        ConfigError: No installed package offers one of these names.
    """
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=RECOGNIZERS_GROUP)}
    missing = sorted(set(names) - found.keys())
    if missing:
        raise ConfigError(
            f"deid.recognizers must name installed recognizers, got {missing[0]!r}; install its package."
        )
    return [found[name] for name in sorted(set(names))]
