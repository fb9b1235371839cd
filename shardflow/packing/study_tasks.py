"""What a packing process is told of a study, and the digest of all that its fragment depends on."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from shardflow.packing.header_pass import batch_name
from shardflow.packing.header_rows import RowPlace
from shardflow.packing.inventory import UNDECIDED
from shardflow.packing.kin import Kin
from shardflow.packing.tasks import StudyAttachment, StudyFile, StudyTask

if TYPE_CHECKING:
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable

__all__ = ["StudyTasks", "digest_of_facts"]

_FRAGMENT_VERSION: Final = 3


class StudyTasks:
    """Makes the tasks of studies.

    Args:
        files: The inventory.
        reports: The reports.
        basis: All that every fragment depends on: settings, versions, key.
    """

    def __init__(self, files: FileTable, reports: ReportTable, basis: str) -> None:
        self._files = files
        self._reports = reports
        self._basis = basis
        self._kin = Kin(files)

    def make(self, study: int, recorded_reason: str | None) -> StudyTask:
        """Make the task of a study.

        Args:
            study: Its number.
            recorded_reason: Of a death that was recorded.
        """
        table = self._files
        images: list[StudyFile] = []
        attachments: list[StudyAttachment] = []
        for position, file in enumerate(table.files_of(study).tolist()):
            if table.reason[file] != UNDECIDED:
                continue
            row = self._row(file)
            if file in table.attachments:
                items = table.attachments[file].items
                attachments.append(StudyAttachment(position=position, row=row, items=items))
            else:
                images.append(StudyFile(position=position, row=row))
        report = self._reports.report_of.get(study)
        siblings = self._kin.files_with(study) if self._has_text(study) else []
        return StudyTask(
            sample_key=table.studies.keys[study],
            task_digest=self.digest(study, recorded_reason),
            files=tuple(images),
            attachments=tuple(attachments),
            report=None if report is None else self._reports.place_of(report),
            siblings=tuple(map(self._row, siblings)),
        )

    def digest(self, study: int, recorded_reason: str | None) -> str:
        """Return the digest of all that the fragment of a study depends on.

        Args:
            study: Its number.
            recorded_reason: Of a death that was recorded.
        """
        files = self._files.files_of(study)
        digest, people = self._reports.digests_of(self._reports.report_of.get(study))
        kin = self._kin.files_with(study) if self._has_text(study) else []
        attached = self._attached(study)
        return digest_of_facts(
            [
                _FRAGMENT_VERSION,
                self._basis,
                self._files.studies.keys[study],
                self._files.digest[files].tolist(),
                self._files.modified_ns[files].tolist(),
                self._files.reason[files].tolist(),
                digest,
                people,
                recorded_reason,
                self._kin.facts(kin),
                attached,
            ]
        )

    def _row(self, file: int) -> RowPlace:
        table = self._files
        name = batch_name(int(table.source[file]))
        return RowPlace(name, int(table.row_offset[file]), int(table.row_num_bytes[file]))

    def _attached(self, study: int) -> list[list[Any]]:
        """Return the kinds of a study's attachments, and which of their records are its own."""
        known = self._files.attachments
        found = [known[file] for file in self._files.files_of(study).tolist() if file in known]
        return [[one.kind, one.version, list(one.items)] for one in found]

    def _has_text(self, study: int) -> bool:
        """Tell whether a study has texts that people are looked for in."""
        return study in self._reports.report_of or bool(self._attached(study))


def digest_of_facts(facts: Any) -> str:
    """Return the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode("ascii")).hexdigest()
