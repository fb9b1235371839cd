"""The header pass: every input file is opened once, in batches dealt to the packing processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardflow.errors import ShardflowError, StorageError
from shardflow.packing.engine import Engine, Failure, Task, TaskDone
from shardflow.packing.inventory import INPUT_KINDS, FileTable
from shardflow.packing.recorded import RecordedOutcomes, reason_of_failure
from shardflow.packing.scan import NO_IMAGE
from shardflow.packing.tasks import InputFile, ProbeTask, ScanDone, ScanTask
from shardflow.packing.wire import decode
from shardflow.sources.layouts import Placement
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import StudyTable
    from shardflow.packing.progress import Progress
    from shardflow.packing.shares import Share
    from shardflow.sources.dicom import DiscoveredFile
    from shardflow.sources.layouts import Layout

__all__ = ["BATCH_FILES", "HeaderPass", "batch_name"]

BATCH_FILES: Final = 128
"""Files of one task. Fixed, so that a restart with other processes finds the same batches."""


def batch_name(file: int) -> str:
    """Name the file of header rows that holds an input file's row."""
    return f"batch-{file // BATCH_FILES:07d}.jsonl"


@dataclass(frozen=True, slots=True)
class HeaderPass:
    """Reads all headers, and survives those that cannot be read."""

    pool: Engine
    files: Sequence[DiscoveredFile]
    layout: Layout
    key: SecretKey
    recorded: RecordedOutcomes
    task_timeout_s: float
    progress: Progress
    share: Share | None = None
    """The task that this is, of a job in tasks."""
    num_image_roots: int | None = None
    """Input folders from this one on hold attachments alone, which no layout places; None for no such."""

    def run(self, studies: StudyTable | None = None) -> FileTable:
        """Return the inventory of all files.

        Args:
            studies: Studies that are known before any file is read.

        Raises:
            ShardflowError: Processes cannot start, or a batch cannot be read even without its bad files.
            StorageError: Header rows cannot be written.
        """
        table = FileTable(len(self.files), studies)
        self.progress.phase("headers", len(self.files))
        starts = list(range(0, len(self.files), BATCH_FILES))
        troubled = sorted(self._scan(table, starts if self.share is None else self.share.order(starts)))
        if troubled:
            self.pool.restart(1)
            # Alone, most of them succeed: their process was killed for what others did.
            for start in self._scan(table, troubled):
                self._find_bad_files(start)
                if self._scan(table, [start]):
                    raise ShardflowError(
                        "a batch of headers must be read without its bad files, got another failure; run the "
                        "job again, with more execution.memory_bytes if it is small."
                    )
            self.pool.restart()
        return table

    def _scan(self, table: FileTable, starts: Sequence[int]) -> list[int]:
        """Scan batches; return those whose process died or failed."""
        waiting = list(reversed(starts))
        troubled: list[int] = []
        while waiting or self.pool.num_running:
            while waiting and self.pool.has_idle:
                self.pool.submit(self._scan_task(waiting.pop()))
            done = self.pool.wait()
            start: int = done.task.handle
            if done.result is None:
                _raise_storage(done)
                troubled.append(start)
            else:
                task: ScanTask = done.task.payload
                scanned = decode(ScanDone, done.result).files
                table.kind[start : start + len(scanned)] = [_kind(file.placement) for file in task.files]
                table.add(start, scanned)
                self.progress.advance(len(scanned))
        return troubled

    def _scan_task(self, start: int) -> Task:
        batch = self.files[start : start + BATCH_FILES]
        payload = ScanTask(name=batch_name(start), files=tuple(map(self._input_file, batch)))
        return self._task("scan", payload, start)

    def _input_file(self, file: DiscoveredFile) -> InputFile:
        reason, placement = self._place(file)
        return InputFile(
            root_index=file.root_index,
            relative_path=file.relative_path,
            num_bytes=file.num_bytes,
            reason=reason,
            placement=placement,
        )

    def _place(self, file: DiscoveredFile) -> tuple[Reason | str | None, Placement | None]:
        """Ask the layout; a reason that it has says more than that a file cannot be read."""
        if self.num_image_roots is not None and file.root_index >= self.num_image_roots:
            return self._known_reason(file), None
        placed = self.layout.place(file)
        if isinstance(placed, Reason):
            if placed not in NO_IMAGE:
                return placed, None
            beside = self.layout.study_beside(file)
            placement = Placement(study=beside, attributes={}) if beside else None
            return self._known_reason(file) or placed, placement
        return self._known_reason(file), placed

    def _find_bad_files(self, start: int) -> None:
        """Read the files of a batch one by one; record those that end two processes."""
        for file in self.files[start : start + BATCH_FILES]:
            reason = self._place(file)[0]
            if (reason is None or reason in NO_IMAGE) and self._probe(file) is not None:
                self.pool.restart(1)
                failure = self._probe(file)
                if failure is not None:
                    self.recorded.add(self._surrogate(file), file.num_bytes, reason_of_failure(failure))

    def _probe(self, file: DiscoveredFile) -> Failure | None:
        self.pool.submit(self._task("probe", ProbeTask(file=self._input_file(file)), 0))
        done = self.pool.wait()
        _raise_storage(done)
        return done.failure

    def _known_reason(self, file: DiscoveredFile) -> Reason | str | None:
        if file.problem is not None or not len(self.recorded):
            return file.problem
        return self.recorded.find(self._surrogate(file), file.num_bytes)

    def _surrogate(self, file: DiscoveredFile) -> str:
        return self.key.surrogate("input", f"{file.root_index}/{file.relative_path}")

    def _task(self, kind: str, payload: ScanTask | ProbeTask, start: int) -> Task:
        return Task(kind=kind, payload=payload, timeout_s=self.task_timeout_s, handle=start)


def _kind(placement: Placement | None) -> int:
    return INPUT_KINDS.index("dicom" if placement is None else placement.form)


def _raise_storage(done: TaskDone) -> None:
    if done.failure == "storage":
        raise StorageError(done.detail)
