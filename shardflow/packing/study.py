"""Pack one study into a fragment, unless a former run did; runs in a packing process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.packing.fragment import FragmentWriter, fragment_path, read_fragment
from shardflow.packing.header_rows import read_rows
from shardflow.packing.linking import read_report
from shardflow.packing.study_members import StudyMembers, StudyRules

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
                each, the position being that of the file in the study; ``report`` as ``[offset, size]`` or
                None.

        Returns:
            ``outcome`` as in `shardflow.packing.fragment.StudyOutcome`, ``num_bytes`` of the fragment,
            ``num_slices``.

        Raises:
            StorageError: The fragment cannot be written, or what was stored cannot be read back.
        """
        sample_key, task_digest = str(payload["sample_key"]), str(payload["task_digest"])
        path = fragment_path(self.fragments, sample_key)
        fragment = read_fragment(path, task_digest)
        if fragment is None:
            places = [(name, offset, size) for _, name, offset, size in payload["files"]]
            rows = read_rows(self.headers, places)
            paths, headers = {}, []
            for (position, *_), row in zip(payload["files"], rows, strict=True):
                if row.header is not None:
                    paths[int(position)] = self.roots[row.root_index] / row.relative_path
                    headers.append(dataclasses.replace(row.header, file_index=int(position)))
            report = None if payload["report"] is None else read_report(self.reports, *payload["report"])
            with FragmentWriter(path, sample_key=sample_key, task_digest=task_digest) as writer:
                members = StudyMembers(self.rules, writer, sample_key, headers, paths, report)
                fragment = members.write()
        return {
            "outcome": dataclasses.asdict(fragment.outcome),
            "num_bytes": fragment.num_bytes,
            "num_slices": 0 if fragment.facts is None else fragment.facts.num_slices,
        }
