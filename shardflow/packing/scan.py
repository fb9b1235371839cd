"""Header pass: every input file is opened once, in batches that the packing processes share.

A process reads the headers of a batch, recognizes attachments (by SOP class if a file is DICOM, else by its
first bytes), stores the rows, and reports numbers, digests and surrogates: the job itself never sees an
identifier. Attachments are only looked for in files that are not images, so that a job without any loads
none of their packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ShardflowError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.deid.identity import Listed, StatedPerson, evidence_of, listed_together
from shardflow.packing.deid.pseudonyms import parse_date
from shardflow.packing.engines.base import Engine, Failure, Task, decode, run_each, step
from shardflow.packing.header_rows import (
    BATCH_FILES,
    AttachmentRow,
    HeaderRow,
    batch_name,
    digest64,
    digest_bytes,
    image_facts,
    link_facts,
    load_rows,
    store_rows,
)
from shardflow.packing.inventory import INPUT_KINDS, Attachment, FileTable, ScannedFile
from shardflow.packing.progress import RunningTasks
from shardflow.packing.registry import attachment_kinds
from shardflow.packing.sources.attachments import HEAD_BYTES, LABEL_VOLUMES, AttachmentItem
from shardflow.packing.sources.dicom.dictionary import DEFLATED
from shardflow.packing.sources.dicom.elements import HeaderLimits, read_at
from shardflow.packing.sources.dicom.headers import BrokenInstance, InstanceHeader, sop_class_of
from shardflow.packing.sources.images import read_image
from shardflow.packing.sources.placement import Placement
from shardflow.packing.studies.tasks import InputFile, ProbeDone, ProbeTask, ScanDone, ScanTask
from shardflow.packing.workspace import CrashLog, reason_of_failure

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.inventory import StudyTable
    from shardflow.packing.progress import Progress
    from shardflow.packing.sources.attachments import AttachmentKind
    from shardflow.packing.sources.layouts.base import Layout
    from shardflow.packing.sources.placement import DiscoveredFile
    from shardflow.packing.workspace import ArrayTask

NUM_BUCKETS: Final = 10_000
"""Number of keyed buckets by which patients are assigned to splits; part of the format, never changed."""

_NUM_SEARCHES: Final = 3
"""How often the files of a batch that fails are read one by one."""
_ROWS_VERSION: Final = 11
"""Incremented whenever the meaning of a header row changes: rows of another version are read again."""
_WHOLE_BYTES: Final = 8 << 20
"""A larger file is digested by this many bytes of each end, as an image is by its header."""
_PIXEL_BYTES: Final = 16 << 10
"""Bytes from the middle of an image's stored pixels that tell copies of it."""
_MIN_COMPRESSED: Final = 64, 8
"""Bytes, and divisor, of the least compressed size of such a block: air and blank pages are no copies."""
_STEP_BYTES: Final = 2 << 10
"""Bytes of a block that are compressed before the next look at whether it holds enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachmentFinder:
    """Recognizes attachments, and reads what they are linked by."""

    limits: HeaderLimits
    max_bytes: int
    """Size above which an attachment is not read."""
    leave_out: tuple[str, ...] = ()
    """Names of kinds that are not packed."""
    records: str = ""
    """Settings of clinical records, as text."""

    def kinds(self) -> list[AttachmentKind]:
        """Return the kinds that are packed, in order."""
        return [kind for kind in attachment_kinds(self.records) if kind.name not in self.leave_out]

    def identity(self) -> list[Any]:
        """Return all that decides which files are attachments, as JSON."""
        kinds = [[kind.name, kind.version] for kind in self.kinds()]
        return [self.max_bytes, kinds, *([self.records] if self.records else [])]

    def find(self, path: Path, placement: Placement | None = None) -> AttachmentRow | str | None:
        """Read an attachment.

        Args:
            path: The file.
            placement: Of a volume of labels, which needs no recognizing then: its study and its classes.

        Returns:
            The attachment; a reason if its kind is known but it cannot be used; None for a file of no kind.
        """
        classes = None if placement is None else placement.classes
        if classes is None:
            kind = self._recognize(path)
        else:
            kind = next((one for one in self.kinds() if one.name == LABEL_VOLUMES), None)
        if kind is None:
            return None
        try:
            if path.stat().st_size > self.max_bytes:
                return Reason.LIMIT_EXCEEDED.value
            items = tuple(kind.describe(path))
            if placement is not None and classes is not None:
                # Empty masks of many studies have the same bytes, and are inputs of their own.
                named = json.dumps([placement.study, classes])
                items = (AttachmentItem(study_uids=(placement.study,), content=named),)
            content = _digest(path, "/".join(item.content for item in items))
        except SourceError as error:
            return str(error.reason)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - the parsers of all formats, over whatever a file holds
            return Reason.ATTACHMENT_UNREADABLE.value
        return AttachmentRow(kind.name, kind.version, content, items, classes=classes)

    def _recognize(self, path: Path) -> AttachmentKind | None:
        kinds = self.kinds()
        if not kinds:
            return None
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError:
            # The attempt to read it as an image has reported this already.
            return None
        sop_class = sop_class_of(path, limits=self.limits)
        if sop_class:
            return next((kind for kind in kinds if sop_class in kind.sop_classes), None)
        return next((kind for kind in kinds if _recognises(kind, path, head)), None)


def _recognises(kind: AttachmentKind, path: Path, head: bytes) -> bool:
    """Whether a file is of a kind; a recognizer that fails over arbitrary bytes does not know the file."""
    try:
        return kind.recognise(path, head)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parsers of all formats, over whatever a file holds
        return False


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


NO_IMAGE: Final = frozenset(
    {
        Reason.ANNOTATION_FILE,
        Reason.LAYOUT_FILE,
        Reason.NOT_DICOM,
        Reason.NOT_IMAGE,
        Reason.NO_PIXEL_DATA,
        Reason.UNSUPPORTED_SOP_CLASS,
    }
)
"""Reasons of files that are not images, and may be attachments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scanner:
    """Reads headers in a packing process and turns identifiers into surrogates."""

    roots: tuple[Path, ...]
    """Folders of images, then those of attachments alone."""
    folder: Path
    """Folder of the header rows."""
    key: SecretKey
    limits: HeaderLimits
    splits: tuple[str, ...] = ()
    """Names of the splits, in the order of the settings."""
    finder: AttachmentFinder | None = None
    """Finder of attachments; None packs images alone."""
    num_image_roots: int | None = None
    """Number of roots that hold images; None for all."""

    def scan(self, task: ScanTask) -> ScanDone:
        """Read the headers of a batch, or load them from an earlier run."""
        paths = list(map(self._path_of, task.files))
        times = list(map(_modified_ns, paths))
        digest = self._digest(task.files, times)
        path = self.folder / task.name
        stored = load_rows(path, digest)
        if stored is None:
            rows = list(map(self._read_next, task.files, paths))
            stored = rows, store_rows(path, digest, rows)
        return ScanDone(
            files=tuple(
                self._scanned(row, place, modified_ns)
                for row, place, modified_ns in zip(*stored, times, strict=True)
            )
        )

    def probe(self, task: ProbeTask) -> ProbeDone:
        """Read one file only to find out whether the process survives."""
        self._read(task.file, self._path_of(task.file))
        return ProbeDone()

    def _path_of(self, file: InputFile) -> Path:
        return self.roots[file.root_index] / file.relative_path

    def _read_next(self, file: InputFile, path: Path) -> HeaderRow:
        step()
        return self._read(file, path)

    def _is_for_attachments(self, root_index: int) -> bool:
        return self.num_image_roots is not None and root_index >= self.num_image_roots

    def _read(self, file: InputFile, path: Path) -> HeaderRow:
        reason, placement = file.reason, file.placement
        row = HeaderRow(file.root_index, file.relative_path, placement=placement)
        if self._is_for_attachments(file.root_index):
            found = None if reason is not None else self._find_attachment(row, path)
            return found or _without_header(row, reason or Reason.NOT_ATTACHMENT)
        if reason is None and placement is not None and placement.classes is not None:
            found = self._find_attachment(row, path)
            return found or _without_header(replace(row, placement=None), Reason.ANNOTATION_FILE)
        if reason is not None:
            # The placement names the study beside the file here, not that it is an image.
            found = self._find_attachment(row, path) if reason in NO_IMAGE else None
            return found or _without_header(
                replace(row, placement=None) if reason in NO_IMAGE else row, reason
            )
        try:
            header = read_image(path, placement, limits=self.limits)
        except SourceError as error:
            found = self._find_attachment(row, path) if error.reason in NO_IMAGE else None
            return found or _without_header(row, error.reason)
        if isinstance(header, BrokenInstance):
            return replace(
                row,
                reason=header.reason.value,
                patient_id=header.patient_id,
                study_instance_uid=header.study_instance_uid,
                sop_instance_uid=header.sop_instance_uid,
            )
        pixels = _pixel_digest(path, header)
        return HeaderRow(
            file.root_index, file.relative_path, header=header, placement=placement, pixels=pixels
        )

    def _find_attachment(self, row: HeaderRow, path: Path) -> HeaderRow | None:
        """Return the row of an attachment, usable or not; None for any other file."""
        if self.finder is None:
            return None
        found = self.finder.find(path, row.placement)
        if found is None:
            return None
        if not isinstance(found, AttachmentRow):
            return replace(row, placement=None, attachment=AttachmentRow("", 0, "0" * 16, ()), reason=found)
        reason = None if found.items else Reason.ATTACHMENT_PART.value
        beside = "" if row.placement is None else row.placement.study
        found = replace(found, study_beside=beside)
        return replace(row, placement=None, attachment=found, reason=reason)

    def _scanned(self, row: HeaderRow, place: tuple[int, int], modified_ns: int) -> ScannedFile:
        """Reduce a row to what the job may know."""
        header = row.header
        patient = row.patient_id if header is None else header.patient_id
        study = row.study_instance_uid if header is None else header.study_instance_uid
        attachment = None
        if row.attachment is not None:
            attachment = link_facts(row.attachment, self.key)
        elif self._is_for_attachments(row.root_index):
            attachment = Attachment(kind="", version=0, links=())
        offset, num_bytes = place
        surrogate = partial(_surrogate, self.key)
        return ScannedFile(
            surrogate=self.key.surrogate("input", f"{row.root_index}/{row.relative_path}"),
            reason=row.reason,
            study=surrogate("study", study) if study else "",
            patient=surrogate("patient", patient) if patient else "",
            bucket=self._bucket(patient, row.placement),
            decoded_bytes=0 if header is None else decoded_num_bytes(header),
            num_slices=0 if header is None else header.image.num_frames,
            instance=row.instance_digest(),
            series=0 if header is None else digest64(header.series_instance_uid),
            digest=row.digest(),
            modified_ns=modified_ns,
            row_offset=offset,
            row_num_bytes=num_bytes,
            facts=image_facts(row),
            attachment=attachment,
            pixels=row.pixels,
            evidence=evidence_of(self.key, _stated(patient, header)) if patient else (),
            listed=() if row.attachment is None else _listed(row.attachment, self.key),
        )

    def _bucket(self, patient: str, placement: Placement | None) -> int:
        """Return the keyed bucket of a patient, or `NUM_BUCKETS` plus the split that the layout names."""
        if placement is not None and placement.split:
            return NUM_BUCKETS + self.splits.index(placement.split)
        return _bucket_of(self.key, patient) if patient else 0

    def _digest(self, files: Sequence[InputFile], times: Sequence[int]) -> str:
        limits = [getattr(self.limits, name) for name in HeaderLimits.__slots__]
        text = json.dumps(
            [
                _ROWS_VERSION,
                self.key.key_id,
                limits,
                [*map(str, self.roots)],
                None if self.finder is None else self.finder.identity(),
                [[file.root_index, file.relative_path, file.num_bytes, file.reason] for file in files],
                times,
                [None if file.placement is None else file.placement.to_json() for file in files],
            ]
        )
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


@lru_cache(maxsize=1024)
def _surrogate(key: SecretKey, kind: str, value: str) -> str:
    return key.surrogate(kind, value)


@lru_cache(maxsize=1024)
def _bucket_of(key: SecretKey, patient: str) -> int:
    return key.bucket("split", patient, NUM_BUCKETS)


def _stated(patient_id: str, header: InstanceHeader | None) -> StatedPerson:
    if header is None:
        return StatedPerson(patient_id=patient_id)
    # Equal statements share their evidence: an age and its date differ by study, and a birth date says more.
    has_date = parse_date(header.birth_date) is not None
    return StatedPerson(
        patient_id=patient_id,
        issuer=header.patient_id_issuer,
        other_ids=header.other_patient_ids,
        name=header.patient_name,
        birth_date=header.birth_date,
        sex=header.sex,
        age="" if has_date else header.patient_age,
        study_date="" if has_date else header.study_date,
    )


def _listed(attachment: AttachmentRow, key: SecretKey) -> tuple[Listed, ...]:
    found = {
        listed_together(key, tuple((one.number, one.issuer) for one in item.patient_numbers))
        for item in attachment.items
        if item.patient_numbers
    }
    return tuple(sorted(found - {()}))


def _pixel_digest(path: Path, header: InstanceHeader) -> int:
    """Return 64 bits of a block of the stored pixels, equal for copies with other identifiers.

    Returns 0 for a block that unrelated images may share, and for the deflated syntax, whose pixels have no
    place in the file.
    """
    if header.transfer_syntax_uid == DEFLATED:
        return 0
    end = header.num_bytes if header.pixel_num_bytes is None else header.pixel_offset + header.pixel_num_bytes
    start = max(header.pixel_offset, (header.pixel_offset + end - _PIXEL_BYTES) // 2)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            block = read_at(descriptor, min(_PIXEL_BYTES, end - start), start)
        finally:
            os.close(descriptor)
    except OSError:
        return 0
    if not _tells_copies(block):
        return 0
    return digest_bytes(b"%d %d " % (header.image.rows, header.image.columns) + block)


def _tells_copies(block: bytes) -> bool:
    """Return whether a block of pixels holds enough to be no other image's; most tell by a third."""
    least, divisor = _MIN_COMPRESSED
    wanted = max(least, len(block) // divisor)
    compressor, num_bytes = zlib.compressobj(1), 0
    for start in range(0, len(block), _STEP_BYTES):
        num_bytes += len(compressor.compress(block[start : start + _STEP_BYTES]))
        num_bytes += len(compressor.flush(zlib.Z_SYNC_FLUSH))
        if num_bytes >= wanted:
            return True
    return False


def _without_header(row: HeaderRow, reason: str) -> HeaderRow:
    """Identify a file without a usable header, as far as its layout can."""
    placement = row.placement
    if placement is None:
        return replace(row, reason=reason)
    if reason in {Reason.NOT_DICOM, Reason.NOT_IMAGE} and placement.study:
        reason = Reason.DAMAGED_IMAGE
    identified = placement.identify(
        {"patient_id": "", "study_instance_uid": "", "series_instance_uid": "", "sop_instance_uid": ""}
    )
    return replace(
        row,
        reason=str(reason),
        patient_id=identified["patient_id"],
        study_instance_uid=identified["study_instance_uid"],
        sop_instance_uid=identified["sop_instance_uid"],
    )


def decoded_num_bytes(header: InstanceHeader) -> int:
    """Return the decoded size of an instance, as its header declares it."""
    image = header.image
    if header.is_slide:  # never decoded as a whole
        return header.num_bytes
    samples = image.rows * image.columns * (3 if image.is_color else 1) * image.num_frames
    return samples * max(1, -(-image.bits_allocated // 8))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderPass:
    """The job's side of the header pass, which survives files that crash their process."""

    engine: Engine
    files: Sequence[DiscoveredFile]
    layout: Layout
    key: SecretKey
    crash_log: CrashLog
    task_timeout_s: float
    progress: Progress
    num_image_roots: int
    """Number of input folders with images; the others hold attachments alone, which no layout places."""
    array_task: ArrayTask | None = None
    """The array task that this is; None for a whole job."""

    def run(self, studies: StudyTable | None = None) -> FileTable:
        """Build the inventory of all files.

        Args:
            studies: Studies that are already known.

        Raises:
            ShardflowError: Processes cannot start, or a batch cannot be read even without its bad files.
            StorageError: Header rows cannot be written.
        """
        table = FileTable(len(self.files), studies)
        self.progress.phase("headers", len(self.files))
        starts = list(range(0, len(self.files), BATCH_FILES))
        ordered = starts if self.array_task is None else self.array_task.order(starts)
        troubled = sorted(self._scan(table, ordered))
        if troubled:
            self.engine.restart(1)
            # Alone, most of them succeed: their process was killed because of others.
            for start in self._scan(table, troubled, is_again=True):
                for _ in range(_NUM_SEARCHES):
                    self._find_bad_files(start)
                    if not self._scan(table, [start], is_again=True):
                        break
                else:
                    raise ShardflowError(
                        "a batch of headers failed again and again, although each of its files was read by "
                        "itself; run the job again, with more execution.memory_bytes or "
                        "execution.task_timeout_s if one of them is small."
                    )
            self.engine.restart()
        return table

    def _scan(self, table: FileTable, starts: Sequence[int], *, is_again: bool = False) -> list[int]:
        """Scan batches; return those that failed or crashed."""
        troubled: list[int] = []
        running = RunningTasks()

        def tasks() -> Iterator[Task]:
            for start in starts:
                running.begin(start)
                yield self._scan_task(start)

        for done in run_each(self.engine, tasks()):
            start: int = done.task.handle
            running.end(start)
            if done.result is None:
                troubled.append(start)
            else:
                task: ScanTask = done.task.payload
                scanned = decode(ScanDone, done.result).files
                table.kind[start : start + len(scanned)] = [_kind(file.placement) for file in task.files]
                table.add(start, scanned)
                has_late = is_again or bool(troubled) or running.has_late
                self.progress.advance(len(scanned), has_late=has_late)
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
        """Ask the layout; its reason takes precedence over that of an unreadable file."""
        if file.study_instance_uid:
            study, instance = file.study_instance_uid, file.sop_instance_uid
            return file.problem, Placement(study=study, instance=instance, attributes={})
        if file.root_index >= self.num_image_roots:
            return self._known_reason(file), None
        placed = self.layout.place(file)
        if isinstance(placed, Reason):
            if placed not in NO_IMAGE:
                return placed, None
            beside = self.layout.study_of_attachment(file)
            placement = Placement(study=beside, attributes={}) if beside else None
            return self._known_reason(file) or placed, placement
        return self._known_reason(file), placed

    def _find_bad_files(self, start: int) -> None:
        """Read the files of a batch one by one; log those that crash two processes."""
        for file in self.files[start : start + BATCH_FILES]:
            reason = self._place(file)[0]
            if (reason is None or reason in NO_IMAGE) and self._probe(file) is not None:
                self.engine.restart(1)
                failure = self._probe(file)
                if failure is not None:
                    self.crash_log.add(self._surrogate(file), file.num_bytes, reason_of_failure(failure))

    def _probe(self, file: DiscoveredFile) -> Failure | None:
        self.engine.submit(self._task("probe", ProbeTask(file=self._input_file(file)), 0))
        done = self.engine.wait()
        return done.failure

    def _known_reason(self, file: DiscoveredFile) -> Reason | str | None:
        if file.problem is not None or not len(self.crash_log):
            return file.problem
        return self.crash_log.find(self._surrogate(file), file.num_bytes)

    def _surrogate(self, file: DiscoveredFile) -> str:
        return self.key.surrogate("input", f"{file.root_index}/{file.relative_path}")

    def _task(self, kind: str, payload: ScanTask | ProbeTask, start: int) -> Task:
        num_steps = len(payload.files) if isinstance(payload, ScanTask) else 1
        return Task(
            kind=kind, payload=payload, timeout_s=self.task_timeout_s, num_steps=num_steps, handle=start
        )


def _kind(placement: Placement | None) -> int:
    return INPUT_KINDS.index("dicom" if placement is None else placement.form)
