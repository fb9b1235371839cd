"""Turn the attachments of one study into fields, whatever single files do.

Their order follows from what they hold, never from where they lie, so that numbers and bytes are the same
wherever files are moved. A file that cannot be converted is named, and harms neither the study nor another
file; of one that ends the process a mark is left, so that the job can pack the study without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import SourceError, StorageError
from shardflow.packing.kinds import attachment_kinds
from shardflow.packing.study_json import encode_json
from shardflow.shards.keys import (
    FIELD_PATTERN,
    REPORT_FIELD,
    REPORT_JSON_FIELD,
    STUDY_FIELD,
    parse_slice_field,
    parse_variant_field,
)
from shardflow.sources.reasons import Outcome, Reason, outcome_of

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.attachment_mark import AttachmentMark
    from shardflow.packing.header_rows import AttachmentRow
    from shardflow.sources.attachments import Attached, AttachmentKind, StudyContext

__all__ = ["PART_VERSION", "AttachedFields", "AttachmentEntry", "attach"]

PART_VERSION: Final = 1
"""``format_version`` of the JSON fields that are put together here."""

_OWN_FIELDS: Final = frozenset({"alignment.json", REPORT_FIELD, REPORT_JSON_FIELD, STUDY_FIELD})
_DANGLING: Final = "dangling"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentEntry:
    """One attachment of a study, or the part of it that is the study's."""

    position: int
    """In the study's list of files."""
    path: Path
    row: AttachmentRow
    items: tuple[int, ...]


@dataclass(slots=True)
class AttachedFields:
    """What the attachments of a study have become."""

    fields: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """Of those that are not packed, by position."""

    def json_fields(self) -> dict[str, dict[str, Any]]:
        """Return the objects of the JSON fields, by the part's name."""
        return {
            name: {"format_version": PART_VERSION, **{key: _summed(key, lists[key]) for key in sorted(lists)}}
            for name, lists in sorted(self.parts.items())
        }

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of entries of every list."""
        return {(part, name): len(one) for part, lists in self.parts.items() for name, one in lists.items()}

    def take(self, position: int, attached: Attached, items: Sequence[int]) -> None:
        """Add what one attachment has become."""
        if not self._may_have(attached):
            self.reasons[position] = Reason.WORKER_FAILED.value
            return
        self.fields.update(attached.fields)
        for part, lists in attached.parts.items():
            mine = self.parts.setdefault(part, {})
            for name, entries in lists.items():
                mine.setdefault(name, []).extend(entries)
        missing = [attached.reasons[item] for item in items if item in attached.reasons]
        if len(missing) == len(items):
            bad = [reason for reason in missing if outcome_of(reason) is Outcome.QUARANTINED]
            self.reasons[position] = str((bad or missing)[0].value)

    def _may_have(self, attached: Attached) -> bool:
        """Tell whether fields have names of their own, and no list is part of what is written elsewhere."""
        is_taken = any(
            name in self.fields
            or name in _OWN_FIELDS
            or not FIELD_PATTERN.fullmatch(name)
            or parse_slice_field(name)
            or parse_variant_field(name)
            for name in attached.fields
        )
        return not is_taken and not any(f"{part}.json" in _OWN_FIELDS for part in attached.parts)


def attach(
    entries: Sequence[AttachmentEntry],
    context: Callable[[Mapping[tuple[str, str], int]], StudyContext],
    *,
    records: str = "",
    mark: AttachmentMark | None = None,
) -> AttachedFields:
    """Convert the attachments of a study.

    Args:
        entries: In any order.
        context: Makes the study's context from the numbers of entries that stand.
        records: Settings of clinical records, as text.
        mark: Says which attachment is under way; left standing where one raises.

    Raises:
        MemoryError: One needs more memory than the process may take.
        StorageError: The mark cannot be written, or a file's disk is in trouble.
    """
    kinds = {kind.name: kind for kind in attachment_kinds(records)}
    order = {name: number for number, name in enumerate(kinds)}
    made = AttachedFields()
    for entry in sorted(entries, key=lambda one: (order[one.row.kind], one.row.content, one.items)):
        if mark is not None:
            mark.write(entry.position)
        found = _convert(kinds[entry.row.kind], entry, context(made.counts()))
        if isinstance(found, str):
            made.reasons[entry.position] = found
        else:
            made.take(entry.position, found, entry.items)
    if mark is not None:
        mark.clear()
    return made


def _convert(kind: AttachmentKind, entry: AttachmentEntry, study: StudyContext) -> Attached | str:
    try:
        attached = kind.convert(entry.path, entry.items, study)
        # What JSON does not know (NaN, infinity) must end here: in the study's fields it would end the study.
        encode_json(attached.parts)
        _check(attached)
    except SourceError as error:
        return str(error.reason)
    except (MemoryError, StorageError):
        raise
    except Exception:  # noqa: BLE001 - the parsers of all formats, over whatever a file holds
        return Reason.ATTACHMENT_UNREADABLE.value
    else:
        return attached


def _check(attached: Attached) -> None:
    """Fail here, for this attachment, where the study would fail later.

    Raises:
        TypeError: A field is no bytes, or a dangling entry has no count.
        KeyError: A dangling entry lacks something.
        ValueError: A count is none.
    """
    if not all(isinstance(payload, bytes) for payload in attached.fields.values()):
        raise TypeError("fields must be bytes")
    for lists in attached.parts.values():
        for name, entries in lists.items():
            _summed(name, list(entries))


def _summed(name: str, entries: list[Any]) -> list[Any]:
    if name != _DANGLING:
        return entries
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[str(entry["reason"])] += int(entry["count"])
    return [{"reason": reason, "count": count} for reason, count in sorted(counts.items())]
