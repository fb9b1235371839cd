"""Pack one study into a fragment, unless a former run did; runs in a packing process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardflow.packing.attached import AttachmentEntry
from shardflow.packing.attachment_mark import AttachmentMark
from shardflow.packing.fragment import FragmentWriter, fragment_path, read_fragment
from shardflow.packing.header_rows import read_rows
from shardflow.packing.linking import read_people, read_report
from shardflow.packing.study_members import StudyMembers, StudyRules

if TYPE_CHECKING:
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

    def pack(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Pack a study, unless a former run did.

        Args:
            payload: ``sample_key``; ``task_digest``; ``files`` as ``[position, rows file, offset, size]``
                each, the position being that of the file in the study; ``attachments`` alike, with the
                records that are the study's behind;
                ``report`` as ``[offset, size, size of what it says of people]`` or None; ``kin``, the
                patient's other files, as ``[rows file, offset, size]`` each.

        Returns:
            ``outcome`` as in `shardflow.packing.fragment.StudyOutcome`, ``num_bytes`` of the fragment,
            ``num_slices``.

        Raises:
            StorageError: The fragment cannot be written, or what was stored cannot be read back.
        """
        sample_key, task_digest = str(payload["sample_key"]), str(payload["task_digest"])
        path = fragment_path(self.fragments, sample_key)
        mark = AttachmentMark(self.fragments, sample_key, task_digest)
        mark.clear()
        fragment = read_fragment(path, task_digest)
        if fragment is None:
            places = [(name, offset, size) for _, name, offset, size in payload["files"]]
            rows = read_rows(self.headers, places)
            paths, placements, headers = {}, {}, []
            for (position, *_), row in zip(payload["files"], rows, strict=True):
                if row.header is not None:
                    paths[int(position)] = self.roots[row.root_index] / row.relative_path
                    placements[int(position)] = row.placement
                    headers.append(dataclasses.replace(row.header, file_index=int(position)))
            text = payload["report"]
            report = None if text is None else read_report(self.reports, *text[:2])
            with FragmentWriter(path, sample_key=sample_key, task_digest=task_digest) as writer:
                members = StudyMembers(
                    self.rules,
                    writer,
                    sample_key,
                    headers,
                    paths,
                    placements,
                    report,
                    self._kin(payload.get("kin", ())),
                    self._attachments(payload.get("attachments", ())),
                    mark,
                    {} if text is None else read_people(self.reports, *text),
                )
                fragment = members.write()
        return {
            "outcome": dataclasses.asdict(fragment.outcome),
            "num_bytes": fragment.num_bytes,
            "num_slices": 0 if fragment.facts is None else fragment.facts.num_slices,
        }

    def _attachments(self, places: Sequence[Sequence[Any]]) -> list[AttachmentEntry]:
        rows = read_rows(self.headers, [(name, offset, size) for _, name, offset, size, _ in places])
        return [
            AttachmentEntry(
                position=int(position),
                path=self.roots[row.root_index] / row.relative_path,
                row=row.attachment,
                items=tuple(items),
            )
            for (position, *_, items), row in zip(places, rows, strict=True)
            if row.attachment is not None
        ]

    def _kin(self, places: Sequence[Sequence[Any]]) -> list[tuple[Path, Placement | None]]:
        rows = read_rows(self.headers, [(name, offset, size) for name, offset, size in places])
        return [(self.roots[row.root_index] / row.relative_path, row.placement) for row in rows if row.header]
