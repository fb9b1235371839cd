"""Ingestion: headers, reports, and, for `append` and `retry`, what of them the dataset already knows.

Nothing is decoded here. The resulting tables tell which study every found input belongs to, and whether the
job is to decide it.

With the reports of a study, a few headers of the patient's other studies (its siblings) are read too: a
report may name the physician, the order number or the maiden name that only they have. This decides bytes
of the study, so the choice of files must not depend on what happens to be among the inputs.

Reports in PDF and RTF are read by packing processes, each under the limits of a task (`DocumentPass`):
their parsers meet files of anybody, and a loop or a bomb costs that report and nothing else. A job that
links its reports again, because it must look at more files, takes their texts from its private folder.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from shardflow.errors import naming_os_errors
from shardflow.format.reasons import Reason
from shardflow.packing.engines.base import Engine, Failure, Task, TaskDone, decode
from shardflow.packing.inventory import NO_STUDY, UNDECIDED, StudyTable, of_inputs, of_studies
from shardflow.packing.linking import ReportPlace, ReportTable, link_reports, read_report
from shardflow.packing.sources.placement import DiscoveredFile
from shardflow.packing.sources.reports import BrokenReport, ReportDocument, ReportRecord
from shardflow.packing.studies.tasks import DocumentDone, DocumentTask
from shardflow.packing.versions.scope import (
    NEW,
    GrowMode,
    Scope,
    ScopeMaker,
    quarantined_rows,
    recognize_files,
    recognize_reports,
)
from shardflow.packing.workspace import CrashLog, reason_of_failure, write_plainly

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.config import InputsConfig
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.people import Identities
    from shardflow.packing.progress import Progress
    from shardflow.packing.sources.layouts.base import Layout
    from shardflow.packing.versions.base import Base, KnownInputs
    from shardflow.packing.workspace import Workspace

_FILES_OF_STUDY: Final = 4
_MAX_STUDIES: Final = 32
"""Siblings that are read for a study: the first ones by sample key."""
_MAX_WAITING: Final = 256
"""Reports that wait for a document before them; the order of the source is kept."""
_MAX_CHARACTERS: Final = 1 << 26


def representatives(surrogates: NDArray[np.bytes_]) -> NDArray[np.int64]:
    """Choose the files of a study that are read for its siblings, by position: a few, by a keyed hash."""
    return np.argsort(surrogates, kind="stable")[:_FILES_OF_STUDY].astype(np.int64)


def missing_siblings(
    known: KnownInputs, studies: StudyTable, scope: Scope, is_found: NDArray[np.bool_]
) -> list[int]:
    """Return known files of siblings of the studies to pack that were not found among the inputs.

    They are located by the private ledger, so that the bytes of the next version do not depend on whether
    files of packed studies are among the inputs.

    Args:
        known: Inputs of the previous version.
        studies: Those of ``known``, followed by new ones.
        scope: Studies to pack.
        is_found: ``(num_known,)``.
    """
    open_studies = np.flatnonzero(scope.study_reason == UNDECIDED).tolist()
    patients = {studies.patients[study] for study in open_studies} - {""}
    opened = set(open_studies)
    files = np.flatnonzero(known.is_image & (known.path != 0) & (known.study != NO_STUDY))
    files = files[np.argsort(known.study[files], kind="stable")]
    starts = np.searchsorted(known.study[files], np.arange(len(known.keys) + 1))
    chosen: list[int] = []
    for study, patient in enumerate(known.patients):
        if patient in patients and study not in opened:
            rows = files[starts[study] : starts[study + 1]]
            chosen += rows[representatives(known.surrogate[rows])].tolist()
    return [row for row in chosen if not is_found[row]]


class Siblings:
    """Finder of the files of sibling studies to read with a study.

    Args:
        files: The inventory.
    """

    def __init__(self, files: FileTable) -> None:
        self._files = files
        self._studies_of: dict[str, list[int]] = {}
        for study, patient in enumerate(files.studies.patients):
            if patient:
                self._studies_of.setdefault(patient, []).append(study)

    def files_with(self, study: int) -> list[int]:
        """Return the files of the siblings of a study."""
        studies = self._files.studies
        others = [one for one in self._studies_of.get(studies.patients[study], ()) if one != study]
        others.sort(key=lambda one: studies.keys[one])
        chosen: list[int] = []
        for other in others[:_MAX_STUDIES]:
            files = self._files.images_of(other)
            chosen += files[representatives(self._files.surrogate[files])].tolist()
        return chosen

    def facts(self, files: Sequence[int]) -> list[list[int]]:
        """Return digests and times by which changed files are noticed."""
        return [self._files.digest[files].tolist(), self._files.modified_ns[files].tolist()]


class DocumentTexts:
    """Texts of documents that this job has read, by digest, in a private file that goes with the job.

    Args:
        path: The file; what an earlier job left there is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, tuple[ReportPlace, str | None]] = {}
        self._end = 0

    def find(self, digest: str) -> DocumentDone | None:
        """Return what a document said; None if it was not read.

        Raises:
            StorageError: It cannot be read whole.
        """
        place = self._places.get(digest)
        if place is None:
            return None
        text = read_report(self._path, place[0])
        return DocumentDone(text=text.decode("utf-8", "surrogatepass"), reason=place[1])

    def add(self, digest: str, done: DocumentDone) -> None:
        """Keep what a document says, if it has a digest.

        Raises:
            StorageError: The file cannot be written.
        """
        if not digest or digest in self._places:
            return
        text = done.text.encode("utf-8", "surrogatepass")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if self._places else os.O_TRUNC)
        with naming_os_errors("writing report texts to the private folder"):
            descriptor = os.open(self._path, flags, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(self._end)
                file.write(text)
        place = ReportPlace(offset=self._end, num_bytes=len(text), people_num_bytes=0)
        self._places[digest] = place, done.reason
        self._end += len(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPass:
    """The job's side of reading reports in PDF and RTF, which survives documents that end their process.

    As with headers, a document that fails is tried once more, alone; a second failure is logged, and decides.
    """

    engine: Engine
    key: SecretKey
    crash_log: CrashLog
    task_timeout_s: float
    texts: DocumentTexts

    def read(self, records: Iterable[ReportRecord | BrokenReport]) -> Iterator[ReportRecord | BrokenReport]:
        """Yield the records in their order, with the texts of their documents.

        Raises:
            ShardflowError: Processes cannot start.
            StorageError: The crash log cannot be written.
        """
        queue: deque[_Waiting] = deque()
        for record in records:
            queue.append(self._begin(record))
            if len(queue) > _MAX_WAITING or sum(one.num_characters for one in queue) > _MAX_CHARACTERS:
                self._settle(queue[0])
            while queue and (done := queue[0].done) is not None:
                queue.popleft()
                yield done
        while queue:
            yield self._settle(queue.popleft())

    def _begin(self, record: ReportRecord | BrokenReport) -> _Waiting:
        waiting = _Waiting(record)
        if isinstance(record, BrokenReport) or record.document is None:
            waiting.done = record
            return waiting
        known = self.crash_log.find(self._surrogate(record), record.document.num_bytes)
        if known is not None:
            waiting.done = record.completed("", known)
            return waiting
        waiting.digest = record.document.digest()
        read = self.texts.find(waiting.digest)
        if read is not None:
            waiting.done = record.completed(read.text, read.reason)
            return waiting
        while not self.engine.has_idle:
            self._take(self.engine.wait())
        self._submit(waiting, record.document)
        return waiting

    def _submit(self, waiting: _Waiting, document: ReportDocument) -> None:
        payload = DocumentTask(document=document)
        self.engine.submit(
            Task(kind="document", payload=payload, timeout_s=self.task_timeout_s, handle=waiting)
        )

    def _take(self, done: TaskDone) -> None:
        waiting: _Waiting = done.task.handle
        waiting.failure = done.failure
        if done.result is not None and isinstance(waiting.record, ReportRecord):
            answer = decode(DocumentDone, done.result)
            self.texts.add(waiting.digest, answer)
            waiting.done = waiting.record.completed(answer.text, answer.reason)

    def _settle(self, waiting: _Waiting) -> ReportRecord | BrokenReport:
        """Return the record, once its document is read."""
        while waiting.done is None and waiting.failure is None:
            self._take(self.engine.wait())
        record = waiting.record
        if waiting.done is not None or isinstance(record, BrokenReport) or record.document is None:
            return waiting.done or record
        while self.engine.num_running:
            self._take(self.engine.wait())
        self.engine.restart(1)
        self._submit(waiting, record.document)
        done = self.engine.wait()
        self._take(done)
        if done.failure is not None:
            reason = reason_of_failure(done.failure)
            self.crash_log.add(self._surrogate(record), record.document.num_bytes, reason)
            waiting.done = record.completed("", reason)
        self.engine.restart()
        return waiting.done or record

    def _surrogate(self, record: ReportRecord) -> str:
        return self.key.surrogate("input-report", str(record.place))


@dataclass(slots=True)
class _Waiting:
    """A report whose document may have yet to be read."""

    record: ReportRecord | BrokenReport
    done: ReportRecord | BrokenReport | None = None
    failure: Failure | None = None
    digest: str = ""
    """Of the document."""

    @property
    def num_characters(self) -> int:
        record = self.record if self.done is None else self.done
        if isinstance(record, BrokenReport):
            return 0
        return len(record.text) + (0 if record.document is None else len(record.document.data))


ReadHeaders = Callable[[Sequence[DiscoveredFile], StudyTable], "FileTable"]
"""Reads the headers of files into a table whose first studies are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """The inputs of a job, before anything is packed."""

    discovered: Sequence[DiscoveredFile]
    files: FileTable
    reports: ReportTable
    scope: Scope | None = None
    """Inputs that the job decides; None for a first version, which decides all."""
    identities: Identities | None = None
    """Persons among the patients, once they are known."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the inputs lack, for log and summary."""
        return self.reports.notes()

    @property
    def identity_counts(self) -> dict[str, int]:
        """Counts of what links patients, for the summary."""
        return {} if self.identities is None else self.identities.counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingest:
    """Ingestion of the inputs of a run."""

    read_headers: ReadHeaders
    """Runs the header pass."""
    documents: DocumentPass
    inputs: InputsConfig
    layout: Layout
    key: SecretKey
    workspace: Workspace
    progress: Progress

    def everything(self, discovered: Sequence[DiscoveredFile]) -> Ingested:
        """Ingest all inputs, for a first version."""
        files = self.read_headers(discovered, StudyTable())
        return Ingested(discovered=discovered, files=files, reports=self._link(files.studies))

    def more(self, mode: GrowMode, base: Base, discovered: Sequence[DiscoveredFile]) -> Ingested:
        """Ingest the inputs of a next version.

        Args:
            mode: ``append`` or ``retry``.
            base: The previous version.
            discovered: Found files; empty for ``retry``, which gets them from the private ledger.
        """
        known, inputs = base.known, self.inputs
        found = list(discovered)
        if mode == "retry":
            found += _recall(known, np.flatnonzero(_files_to_retry(base)).tolist(), inputs)
        siblings: list[int] = []
        while True:
            studies = StudyTable(dict(zip(known.keys, known.patients, strict=True)))
            for sample_key in known.keys:
                studies.add(sample_key, "", 0)
            files = self.read_headers(found, studies)
            reports = self._link(files.studies)
            found_files = recognize_files(known, self.key, files, found, inputs.roots)
            found_reports = recognize_reports(known, self.key, reports, inputs.reports or Path())
            if siblings:
                # They are only read for their siblings, and not decided, whatever they hold now.
                of_siblings = slice(len(found) - len(siblings), len(found))
                found_files.row[of_siblings], found_files.replaced[of_siblings] = siblings, NEW
            scope = ScopeMaker(mode, base, files, reports, found_files, found_reports).make()
            # A study is packed completely or not at all: read its other files at their recorded paths.
            if len(scope.missing):
                found += _recall(known, scope.missing.tolist(), inputs)
                continue
            if not siblings and (len(reports) or files.attachments):
                is_found = np.zeros(len(known), np.bool_)
                is_found[found_files.row[found_files.row != NEW]] = True
                siblings = missing_siblings(known, files.studies, scope, is_found)
                if siblings:
                    found += _recall(known, siblings, inputs)
                    continue
            scope = replace(scope, num_known=scope.num_known - len(siblings))
            return Ingested(discovered=found, files=files, reports=reports, scope=scope)

    def _link(self, studies: StudyTable) -> ReportTable:
        if self.inputs.reports is None:
            return ReportTable()
        self.progress.phase("reports", 0)
        layout = self.inputs.layout
        return link_reports(
            self.documents.read(self.layout.reports()),
            studies,
            self.key,
            self.workspace.reports,
            several=layout.reports_of_one_study,
            copies=layout.report_of_several_studies == "copy",
        )


def clear_crash_log(base: Base, crash_log: CrashLog, workspace: Workspace) -> None:
    """Remove crashes of the studies of a `retry` from the log, once, so that a resumed one keeps new crashes.

    Raises:
        StorageError: Something cannot be written.
    """
    mark = base.manifest.dataset_id.encode("ascii")
    if workspace.retry_mark.exists() and workspace.retry_mark.read_bytes() == mark:
        return
    known = base.known
    rows = quarantined_rows(known)
    studies = known.study[rows & (known.study != NO_STUDY)]
    names = {known.keys[study] for study in np.unique(studies).tolist()}
    crash_log.lift(names | {name.decode("ascii") for name in known.surrogate[rows].tolist()})
    write_plainly(workspace.retry_mark, mark)


def _files_to_retry(base: Base) -> NDArray[np.bool_]:
    """Return the mask of known files to read again: quarantined ones, and all files of their studies."""
    known = base.known
    wanted = quarantined_rows(known)
    packed, removed = base.packed_keys(), base.removed_studies
    may_open = np.array([key not in packed and key not in removed for key in known.keys], np.bool_)
    is_open = of_studies(known.study[wanted], len(known.keys)) & may_open
    without_study = wanted & (known.study == NO_STUDY)
    chosen: NDArray[np.bool_] = (of_inputs(is_open, known.study) | without_study) & ~known.is_report
    return chosen


def _recall(known: KnownInputs, rows: Iterable[int], inputs: InputsConfig) -> list[DiscoveredFile]:
    """Find known files at their recorded paths; missing ones get a reason, and so do their studies."""
    found: dict[str, DiscoveredFile] = {}
    for entry in known.entries(rows):
        # The parts of an attachment share a path.
        if entry.get("path") is None or entry["path"] in found:
            continue
        path = str(entry["path"])
        num_bytes, problem = 0, None
        try:
            num_bytes = Path(path).stat().st_size
        except (OSError, ValueError):
            was_missing = entry["reason"] == Reason.MISSING_FILE
            problem = Reason.MISSING_FILE if was_missing else Reason.FILE_UNREADABLE
        # Joined to any root, an absolute path remains itself.
        is_apart = entry["kind"] == "attachment" and len(inputs.attachments) > 0
        found[path] = DiscoveredFile(
            root_index=len(inputs.dicom) if is_apart else 0,
            relative_path=path,
            num_bytes=num_bytes,
            problem=problem,
        )
    return list(found.values())
