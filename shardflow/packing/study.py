"""Pack one study into a fragment, unless a former run did; runs in a packing process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardflow.packing.attached import AttachmentEntry
from shardflow.packing.attachment_mark import AttachmentMark
from shardflow.packing.fragment import FragmentWriter, fragment_path, read_fragment
from shardflow.packing.header_rows import read_rows
from shardflow.packing.linking import read_people, read_report
from shardflow.packing.study_members import StudyMembers, StudyRules
from shardflow.packing.tasks import StudyDone

if TYPE_CHECKING:
    from shardflow.packing.header_rows import HeaderRow, RowPlace
    from shardflow.packing.tasks import StudyAttachment, StudyTask
    from shardflow.sources.layouts import Placement

__all__ = ["StudyPacker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPacker:
    """Packs studies one after another, with what all of them share."""

    roots: tuple[Path, ...]
    headers: Path
    """Folder of the header rows."""
    reports: Path
    """File of the report texts."""
    fragments: Path
    """Folder of the fragments."""
    rules: StudyRules

    def pack(self, task: StudyTask) -> StudyDone:
        """Pack a study, unless a former run did.

        Raises:
            StorageError: The fragment cannot be written, or what was stored cannot be read back.
        """
        path = fragment_path(self.fragments, task.sample_key)
        mark = AttachmentMark(self.fragments, task.sample_key, task.task_digest)
        mark.clear()
        fragment = read_fragment(path, task.task_digest)
        if fragment is None:
            rows = read_rows(self.headers, [file.row for file in task.files])
            paths, placements, headers = {}, {}, []
            for file, row in zip(task.files, rows, strict=True):
                if row.header is not None:
                    paths[file.position] = self._path(row)
                    placements[file.position] = row.placement
                    headers.append(replace(row.header, file_index=file.position))
            report = task.report
            with FragmentWriter(path, sample_key=task.sample_key, task_digest=task.task_digest) as writer:
                members = StudyMembers(
                    self.rules,
                    writer,
                    task.sample_key,
                    headers,
                    paths,
                    placements,
                    None if report is None else read_report(self.reports, report),
                    self._siblings(task.siblings),
                    self._attachments(task.attachments),
                    mark,
                    {} if report is None else read_people(self.reports, report),
                )
                fragment = members.write()
        return StudyDone(outcome=fragment.outcome)

    def _path(self, row: HeaderRow) -> Path:
        return self.roots[row.root_index] / row.relative_path

    def _attachments(self, attachments: Sequence[StudyAttachment]) -> list[AttachmentEntry]:
        rows = read_rows(self.headers, [one.row for one in attachments])
        return [
            AttachmentEntry(position=one.position, path=self._path(row), row=row.attachment, items=one.items)
            for one, row in zip(attachments, rows, strict=True)
            if row.attachment is not None
        ]

    def _siblings(self, places: Sequence[RowPlace]) -> list[tuple[Path, Placement | None]]:
        rows = read_rows(self.headers, places)
        return [(self._path(row), row.placement) for row in rows if row.header]
