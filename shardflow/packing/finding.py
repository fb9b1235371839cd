"""Recognise attachments: by SOP class where a file is DICOM, else by its first bytes.

Asked only for files that are no images, so that a job without attachments loads none of their packages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import SourceError
from shardflow.packing.header_rows import AttachmentRow
from shardflow.packing.kinds import attachment_kinds
from shardflow.sources.attachments import HEAD_BYTES
from shardflow.sources.dicom import sop_class_of
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.sources.attachments import AttachmentKind
    from shardflow.sources.dicom import HeaderLimits

__all__ = ["AttachmentFinder"]

_WHOLE_BYTES: Final = 8 << 20
"""Of a larger file, so many bytes of either end stand for what it holds, as a header does for an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentFinder:
    """Recognises files and asks their kind whose they are."""

    limits: HeaderLimits
    max_bytes: int
    """Size above which an attachment is not read."""
    leave_out: tuple[str, ...] = ()
    """Names of kinds that are not packed."""
    records: str = ""
    """Settings of clinical records, as text."""

    def kinds(self) -> list[AttachmentKind]:
        """Return the kinds that are packed, in their order."""
        return [kind for kind in attachment_kinds(self.records) if kind.name not in self.leave_out]

    def identity(self) -> list[Any]:
        """Return what decides which files are attachments, as JSON."""
        kinds = [[kind.name, kind.version] for kind in self.kinds()]
        return [self.max_bytes, kinds, *([self.records] if self.records else [])]

    def find(self, path: Path) -> AttachmentRow | str | None:
        """Read an attachment.

        Returns:
            What it is; the reason where it is of a kind and cannot be used; None for a file of no kind.
        """
        kind = self._recognise(path)
        if kind is None:
            return None
        try:
            if path.stat().st_size > self.max_bytes:
                return Reason.LIMIT_EXCEEDED.value
            items = tuple(kind.describe(path))
            content = _digest(path, "/".join(item.content for item in items))
        except SourceError as error:
            return str(error.reason)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - the parsers of all formats, over whatever a file holds
            return Reason.ATTACHMENT_UNREADABLE.value
        return AttachmentRow(kind.name, kind.version, content, items)

    def _recognise(self, path: Path) -> AttachmentKind | None:
        kinds = self.kinds()
        if not kinds:
            return None
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError:
            # Whoever looked whether it is an image has said so.
            return None
        sop_class = sop_class_of(path, limits=self.limits)
        if sop_class:
            return next((kind for kind in kinds if sop_class in kind.sop_classes), None)
        return next((kind for kind in kinds if kind.recognise(path, head)), None)


def _digest(path: Path, beside: str) -> str:
    hasher = hashlib.sha256(beside.encode("utf-8", "surrogatepass"))
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        hasher.update(file.read(_WHOLE_BYTES))
        if size > _WHOLE_BYTES:
            file.seek(max(_WHOLE_BYTES, size - _WHOLE_BYTES))
            hasher.update(file.read())
    hasher.update(size.to_bytes(8, "little"))
    return hasher.hexdigest()
