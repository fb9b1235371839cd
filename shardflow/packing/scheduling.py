"""Scheduling of a plan: assignment of shards to array tasks, and packing despite the failure of processes.

The shard with the largest study is opened first, and the studies of a shard are scheduled largest first, so
that no large study is left for the end. A shard is assembled as soon as its studies are done, so that the
work folder holds only a few shards. When, and by which process, something is packed never shows in the
bytes.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.errors import ConfigError, ShardflowError
from shardflow.format.reasons import HELD_BACK, Outcome, outcome_of
from shardflow.packing.engines.base import Engine, Task, TaskDone, decode
from shardflow.packing.header_rows import RowPlace
from shardflow.packing.inventory import UNDECIDED, reason_code
from shardflow.packing.progress import RunningTasks
from shardflow.packing.studies.assembly import (
    AttachmentMark,
    FragmentWriter,
    fragment_path,
    has_sizes,
    load_record,
)
from shardflow.packing.studies.tasks import (
    CheckDone,
    CheckTask,
    FragmentName,
    ShardDone,
    ShardTask,
    StudyAttachment,
    StudyDone,
    StudyFile,
    StudyOutcome,
    StudyTask,
)
from shardflow.packing.versions.ingest import Siblings
from shardflow.packing.workspace import CrashLog, conversion_of, reason_of_failure

if TYPE_CHECKING:
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.progress import Progress
    from shardflow.packing.upload import Uploader
    from shardflow.packing.workspace import ArrayTask, Workspace


_FRAGMENT_VERSION: Final = 5
"""Incremented whenever fragments of equal inputs and settings change."""
_MAX_ASSEMBLIES: Final = 3


def assign_shards(plan: PackPlan, count: int) -> list[int]:
    """Assign shards to array tasks: largest first, each to the task with the least work.

    Returns:
        The task of each shard of the plan.
    """
    loads = [(0, task) for task in range(count)]
    owners = [0] * len(plan.shards)
    sizes = [shard.estimated_bytes for shard in plan.shards]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + max(1, sizes[number]), owners[number]))
    return owners


def own_shards(plan: PackPlan, array_task: ArrayTask | None) -> list[int]:
    """Return the numbers of the shards of an array task; all of them if there is none."""
    if array_task is None:
        return list(range(len(plan.shards)))
    return [
        number
        for number, owner in enumerate(assign_shards(plan, array_task.count))
        if owner == array_task.index
    ]


def opening_order(largest: Mapping[int, int]) -> list[int]:
    """Order shards so that no large study is left for the end.

    Args:
        largest: Size of the largest study of each shard, by the shard's number.
    """
    return sorted(largest, key=lambda number: (-largest[number], number))


def missing_tasks(plan: PackPlan, count: int | None, missing: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the tasks whose shards are missing.

    Raises:
        ConfigError: Shards are missing, and no task has ever run here.
    """
    if not missing:
        return ()
    if count is None:
        raise ConfigError(
            "no array task has run here, so there is nothing to merge; run every --task i/n first."
        )
    owners = assign_shards(plan, count)
    return tuple(sorted({owners[number] for number in missing}))


def count_studies(workspace: Workspace, plan: PackPlan, shards: Sequence[int]) -> dict[str, int]:
    """Count the studies of packed shards by outcome."""
    counts = {"packed": 0, "skipped": 0, "quarantined": 0}
    for number in shards:
        record = load_record(workspace.records, plan.shards[number].name)
        for outcome in () if record is None else record["outcomes"].values():
            counts[outcome["outcome"]] += 1
    return counts


class StudyTasks:
    """Factory of study tasks.

    Args:
        files: The inventory.
        reports: The reports.
        basis: Digest of all that every fragment depends on: settings, versions, key.
    """

    def __init__(self, files: FileTable, reports: ReportTable, basis: str) -> None:
        self._files = files
        self._reports = reports
        self._basis = basis
        self._siblings = Siblings(files)

    def make(self, study: int, recorded_reason: str | None) -> StudyTask:
        """Make the task of a study.

        Args:
            study: Its number.
            recorded_reason: Reason in the crash log.
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
        return StudyTask(
            sample_key=table.studies.keys[study],
            task_digest=self.digest(study, recorded_reason),
            files=tuple(images),
            attachments=tuple(attachments),
            report=None if report is None else self._reports.place_of(report),
            siblings=tuple(map(self._row, self._siblings_of(study))),
            person=table.studies.person_of(study),
        )

    def digest(self, study: int, recorded_reason: str | None) -> str:
        """Return the digest of all that the fragment of a study depends on.

        Args:
            study: Its number.
            recorded_reason: Reason in the crash log.
        """
        files = self._files.files_of(study)
        digest, people = self._reports.digests_of(self._reports.report_of.get(study))
        person = self._files.studies.person_of(study)
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
                self._siblings.facts(self._siblings_of(study)),
                self._attached(study),
                *([] if person is None else [person.patient_key]),
            ]
        )

    def _row(self, file: int) -> RowPlace:
        return RowPlace.of(self._files, file)

    def _attached(self, study: int) -> list[list[Any]]:
        """Return the attachments of a study: kind, version, and the study's records."""
        known = self._files.attachments
        found = [known[file] for file in self._files.files_of(study).tolist() if file in known]
        return [[one.kind, one.version, list(one.items)] for one in found]

    def _siblings_of(self, study: int) -> list[int]:
        """Return the files of sibling studies to read; none for a study without texts."""
        has_text = study in self._reports.report_of or bool(self._attached(study))
        return self._siblings.files_with(study) if has_text else []


def digest_of_facts(facts: Any) -> str:
    """Return the SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode("ascii")).hexdigest()


class QuarantineLimitError(Exception):
    """More inputs are quarantined than the settings allow; never leaves the packing package."""


@dataclass(slots=True)
class _OpenShard:
    number: int
    waiting: set[int]
    """Studies that are not packed yet."""
    num_assemblies: int = 0


@dataclass(eq=False, kw_only=True)
class StudyPass:
    """Packs the studies of a plan into its shards."""

    engine: Engine
    plan: PackPlan
    files: FileTable
    reports: ReportTable
    workspace: Workspace
    crash_log: CrashLog
    """Crashes of earlier runs."""
    basis: str
    """Digest of all that every fragment depends on: settings, versions, key."""
    max_quarantined: int
    """Number of quarantined inputs above which the job stops."""
    task_timeout_s: float
    progress: Progress
    """Receives every finished study."""
    shards: Sequence[int]
    """Numbers of the shards to pack."""
    trusts_sizes: bool = False
    """Accept existing shards by their sizes, without reading them back."""
    uploader: Uploader | None = None
    """Uploads packed shards; None without an address."""

    def __post_init__(self) -> None:
        self._tasks = StudyTasks(self.files, self.reports, self.basis)
        self._to_open = deque(opening_order({number: self._largest(number) for number in self.shards}))
        self._ready: deque[Task] = deque()
        self._open: dict[int, _OpenShard] = {}
        self._shard_of: dict[int, int] = {}
        self._troubled: dict[int, int | None] = {}
        """Studies that failed once, with the attachment (a row of the files) that was being converted."""
        self._running = RunningTasks()
        self._has_trouble = False
        self._exceptions: dict[int, StudyOutcome] = {}
        self._is_counted = np.zeros(len(self.files.studies), np.bool_)
        self._num_quarantined = 0
        self._recall_conversions()

    def run(self, num_quarantined: int) -> None:
        """Pack and assemble everything.

        Args:
            num_quarantined: Inputs that headers and reports alone quarantine.

        Raises:
            QuarantineLimitError: Too many inputs are quarantined; what is packed stays for the next run.
            StorageError: Something cannot be written or read back.
            ShardflowError: Processes cannot start.
        """
        self.progress.phase("studies", sum(len(self.plan.shards[number].studies) for number in self.shards))
        self._count_quarantined(num_quarantined)
        self._drain()
        while self._troubled:
            troubled, self._troubled = self._troubled, {}
            for study in sorted(troubled, key=self._key):
                self._retry_alone(study, troubled[study])
            self.engine.restart()
            self._drain()

    def missing(self) -> list[int]:
        """Return the numbers of missing shards, by their records and the sizes of their files."""
        found = []
        for number in self.shards:
            task = self._shard_task(number)
            record = load_record(self.workspace.records, task.name)
            if (
                record is None
                or record["digest"] != task.digest
                or not (self._is_uploaded(record) or has_sizes(self.workspace.output, record))
            ):
                found.append(number)
        return found

    def decide_exceptions(self) -> None:
        """Set the known reasons of files, when the job stops early."""
        for study, outcome in self._exceptions.items():
            files = self.files.files_of(study)
            undecided = self.files.reason[files] == UNDECIDED
            for position, file in enumerate(files.tolist()):
                reason = outcome.instances.get(position, outcome.reason)
                if undecided[position] and reason is not None:
                    self.files.reason[file] = reason_code(reason)

    def _drain(self) -> None:
        """Keep every process busy until no task is left that can run beside others."""
        while True:
            while self.engine.has_idle and (task := self._next_task()) is not None:
                self._running.begin((task.kind, task.handle))
                self.engine.submit(task)
            if not self.engine.num_running:
                return
            done = self.engine.wait()
            self._running.end((done.task.kind, done.task.handle))
            self._take(done)

    def _next_task(self) -> Task | None:
        while not self._ready and self._to_open:
            self._open_shard(self._to_open.popleft(), may_exist=True)
        return self._ready.popleft() if self._ready else None

    def _open_shard(self, number: int, *, may_exist: bool) -> None:
        """Create the tasks of a shard: a check of an existing one, or its studies."""
        shard = self.plan.shards[number]
        self._open[number] = _OpenShard(number, set(shard.studies))
        for study in shard.studies:
            self._shard_of[study] = number
        record = load_record(self.workspace.records, shard.name) if may_exist else None
        if record is not None:
            digest = self._shard_task(number).digest
            if record["digest"] == digest and self._is_uploaded(record):
                self._take_check(number, is_whole=True)
                return
            check = CheckTask(name=shard.name, digest=digest, trusts_sizes=self.trusts_sizes)
            self._ready.append(self._task("check", check, number))
            return
        sizes = {study: self._study_bytes(study) for study in shard.studies}
        for study in sorted(shard.studies, key=lambda study: (-sizes[study], self._key(study))):
            self._submit_study(study)

    def _is_uploaded(self, record: Mapping[str, Any]) -> bool:
        return self.uploader is not None and self.uploader.has_shard(record)

    def _submit_study(self, study: int) -> None:
        reason = self._recorded_reason(study)
        if reason is not None:
            self._give_up(study, reason)
        else:
            self._ready.append(self._study_task(study))

    def _take(self, done: TaskDone) -> None:
        match done.task.kind:
            case "study" if done.result is None:
                self._has_trouble = True
                self._troubled[done.task.handle] = self._attachment_under_way(done.task.handle)
            case "study" if done.result is not None:
                self._finish_study(done.task.handle, decode(StudyDone, done.result).outcome)
            case "check":
                is_whole = done.result is not None and decode(CheckDone, done.result).is_whole
                self._take_check(done.task.handle, is_whole=is_whole)
            case _:
                self._take_shard(done)

    def _take_check(self, number: int, *, is_whole: bool) -> None:
        shard = self.plan.shards[number]
        record = load_record(self.workspace.records, shard.name) if is_whole else None
        if record is None:
            self._open_shard(number, may_exist=False)
            return
        for study in shard.studies:
            self._count_outcome(study, decode(StudyOutcome, record["outcomes"][self._key(study)]))
        self._close_shard(number)

    def _take_shard(self, done: TaskDone) -> None:
        """Close an assembled shard; retry one that lacks fragments or crashed its process."""
        number: int = done.task.handle
        shard = self._open[number]
        missing = set(decode(ShardDone, done.result).missing) if done.result is not None else None
        if missing is not None and not missing:
            self._close_shard(number)
            return
        shard.num_assemblies += 1
        if shard.num_assemblies >= _MAX_ASSEMBLIES:
            problem = f"{done.failure}, {done.detail}" if missing is None else "missing fragments"
            raise ShardflowError(
                f"{self.plan.shards[number].name} could not be assembled in {_MAX_ASSEMBLIES} tries: "
                f"{problem}; check the disk and run the job again to resume it."
            )
        if missing is None:
            self._ready.appendleft(done.task)
            return
        for study in self.plan.shards[number].studies:
            if self._key(study) in missing:
                shard.waiting.add(study)
                self._submit_study(study)

    def _close_shard(self, number: int) -> None:
        del self._open[number]
        if self.uploader is not None:
            record = load_record(self.workspace.records, self.plan.shards[number].name)
            if record is not None:
                self.uploader.add_shard(record)

    def _finish_study(self, study: int, outcome: StudyOutcome) -> None:
        self._count_outcome(study, outcome)
        shard = self._open[self._shard_of[study]]
        shard.waiting.discard(study)
        if not shard.waiting:
            self._ready.appendleft(self._task("shard", self._shard_task(shard.number), shard.number))

    def _retry_alone(self, study: int, culprit: int | None) -> None:
        """Retry a study alone on the machine.

        A second failure decides: an attachment that was being converted both times is quarantined, and the
        study tried without it; otherwise the study is quarantined.
        """
        seen = {culprit}
        while True:
            self.engine.restart(1)
            self.engine.submit(self._study_task(study))
            done = self.engine.wait()
            if done.failure is None or done.result is not None:
                break
            culprit = self._attachment_under_way(study)
            if culprit not in seen:
                seen.add(culprit)
                continue
            reason = reason_of_failure(done.failure)
            if culprit is None:
                self.progress.note(f"sample {self._key(study)} is quarantined: {reason} ({done.detail})")
                self.crash_log.add(self._key(study), self._study_bytes(study), reason)
                self._give_up(study, reason)
                return
            self.progress.note(
                f"an attachment of sample {self._key(study)} is quarantined: {reason} ({done.detail})"
            )
            self.crash_log.add(*self._conversion(culprit), reason)
            self.files.reason[culprit] = reason_code(reason)
            self._count_quarantined(1)
        if done.result is not None:
            self._finish_study(study, decode(StudyDone, done.result).outcome)

    def _attachment_under_way(self, study: int) -> int | None:
        """Return the row of the attachment whose conversion failed; None if the study itself failed."""
        mark = AttachmentMark(self.workspace.fragments, self._key(study), self._task_digest(study))
        position, files = mark.read(), self.files.files_of(study)
        if position is None or not 0 <= position < len(files):
            return None
        file = int(files[position])
        return file if file in self.files.attachments else None

    def _recall_conversions(self) -> None:
        """Leave out attachments whose conversion is in the crash log."""
        if not len(self.crash_log):
            return
        planned = {study for number in self.shards for study in self.plan.shards[number].studies}
        for file in sorted(self.files.attachments):
            if int(self.files.study[file]) in planned and self.files.reason[file] == UNDECIDED:
                reason = self.crash_log.find(*self._conversion(file))
                if reason is not None:
                    self.files.reason[file] = reason_code(reason)

    def _conversion(self, file: int) -> tuple[str, int]:
        """Return name and size of an attachment's conversion in the crash log."""
        name = conversion_of(self.files.surrogate[file].decode("ascii"))
        return name, int(self.files.decoded_bytes[file])

    def _give_up(self, study: int, reason: str) -> None:
        """Write a fragment without members for a study that crashes its process."""
        key = self._key(study)
        path = fragment_path(self.workspace.fragments, key)
        outcome = StudyOutcome(outcome=Outcome.QUARANTINED, reason=str(reason))
        with FragmentWriter(path, sample_key=key, task_digest=self._task_digest(study)) as writer:
            writer.commit(outcome, None)
        self._finish_study(study, outcome)

    def _count_outcome(self, study: int, outcome: StudyOutcome) -> None:
        if self._is_counted[study]:
            return
        self._is_counted[study] = True
        self.progress.advance(has_late=self._has_trouble or self._running.has_late)
        if outcome.reason is not None or outcome.instances:
            self._exceptions[study] = outcome
        own = [
            outcome_of(reason) is Outcome.QUARANTINED and reason not in HELD_BACK
            for reason in outcome.instances.values()
        ]
        shared = self._num_undecided(study) - len(own)
        if outcome.outcome == Outcome.QUARANTINED and outcome.reason not in HELD_BACK:
            self._count_quarantined(sum(own) + shared + (study in self.reports.report_of))
        else:
            self._count_quarantined(sum(own))

    def _count_quarantined(self, count: int) -> None:
        self._num_quarantined += count
        self.check_limit(self._num_quarantined)

    def check_limit(self, num_quarantined: int) -> None:
        """Stop the job where too many inputs are quarantined.

        Raises:
            QuarantineLimitError: There are more than the settings allow.
        """
        if num_quarantined > self.max_quarantined:
            raise QuarantineLimitError

    def _study_task(self, study: int) -> Task:
        return self._task("study", self._tasks.make(study, self._recorded_reason(study)), study)

    def _shard_task(self, number: int) -> ShardTask:
        shard = self.plan.shards[number]
        members = [(self._key(study), self._task_digest(study)) for study in shard.studies]
        fragments = tuple(FragmentName(sample_key=key, task_digest=digest) for key, digest in members)
        return ShardTask(name=shard.name, digest=digest_of_facts([shard.name, members]), fragments=fragments)

    def _task_digest(self, study: int) -> str:
        return self._tasks.digest(study, self._recorded_reason(study))

    def _recorded_reason(self, study: int) -> str | None:
        if not len(self.crash_log):
            return None
        return self.crash_log.find(self._key(study), self._study_bytes(study))

    def _task(self, kind: str, payload: StudyTask | ShardTask | CheckTask, handle: int) -> Task:
        # A file is decoded for its slices and its pages, for text or heads, and again to find all bad ones.
        num_steps = 4 * len(payload.files) + 1 if isinstance(payload, StudyTask) else 1
        return Task(
            kind=kind, payload=payload, timeout_s=self.task_timeout_s, num_steps=num_steps, handle=handle
        )

    def _key(self, study: int) -> str:
        return self.files.studies.keys[study]

    def _study_bytes(self, study: int) -> int:
        return int(self.files.decoded_bytes[self.files.files_of(study)].sum())

    def _largest(self, number: int) -> int:
        return max(map(self._study_bytes, self.plan.shards[number].studies), default=0)

    def _num_undecided(self, study: int) -> int:
        return int((self.files.reason[self.files.files_of(study)] == UNDECIDED).sum())
