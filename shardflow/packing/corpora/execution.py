"""Execution of a corpus plan: finds duplicates, packs the parts, numbers the shards, publishes the version.

Data that grows with the number of lines is read from the parts a block at a time; the job holds one record
for each part and each shard.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from shardflow.errors import ConfigError, FormatError, ShardflowError
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import carry_tables
from shardflow.format.foreign.places import ImageFacts, image_facts
from shardflow.format.keys import shard_name
from shardflow.format.ledger import LineOutcomes, stream_outcomes
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, commit, load, versions
from shardflow.format.reasons import OUTCOMES, OutcomeCounts
from shardflow.format.samples import SamplesTable
from shardflow.format.shard_files import write_file, write_samples
from shardflow.format.table import Table
from shardflow.packing.corpora.config import IMAGE_REASONS, PACKED, REASON_TABLE, REASONS, LineReason
from shardflow.packing.corpora.duplicates import ResolveTask, ScanDone, num_buckets, write_existing
from shardflow.packing.corpora.inputs import InputFile, PartTask, bad_lines_path, list_path, write_list
from shardflow.packing.corpora.parts import (
    Finished,
    NumberTask,
    PartRecord,
    load_part,
    most_frequent,
    outcome_blocks,
    part_folder,
)
from shardflow.packing.deid.pseudonyms import SURROGATE_LENGTH
from shardflow.packing.engines.base import Task, TaskDone, decode, run_each
from shardflow.packing.versions.base import shard_number
from shardflow.packing.versions.files import remove_strangers, samples_path, shard_order
from shardflow.packing.workspace import CrashLog, reason_of_failure
from shardflow.storage import LocalStore, write_atomic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.corpora.inputs import CorpusPlan
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.engines.base import Engine
    from shardflow.packing.progress import Progress
    from shardflow.packing.workspace import Workspace

_CLASSES: Final = dict(REASON_TABLE)
_BLOCK_ROWS: Final = 1 << 20
_MAX_LISTED: Final = 10_000
"""Lines of each reason in the list of bad lines."""
_COUNT: Final = "/count"
"""Suffix of the key of a part in the crash log: counting its lines failed as well."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Outcomes of the lines of a plan."""

    records: tuple[PartRecord, ...]
    """Records of the parts, in order."""
    num_kept: int
    """Parts that an earlier run has packed."""

    @property
    def counts(self) -> Counter[str]:
        """Lines by name of their outcome, ``PACKED`` included."""
        return _added(record.outcomes for record in self.records)

    @property
    def num_lines(self) -> int:
        """Lines of all parts."""
        return sum(sum(record.num_lines) for record in self.records)

    @property
    def outcomes(self) -> dict[str, int]:
        """Lines by outcome class."""
        return _by_class(self.counts)

    def is_over(self, share: float) -> bool:
        """Return whether more lines than the given share are quarantined."""
        # The small term compensates for binary fractions: 0.05 of 100 lines are 5.
        return self.outcomes["quarantined"] > math.floor(share * self.num_lines + 1e-9)


def _without_images(record: PartRecord | None) -> PartRecord | None:
    """Return a record, or None if images were missing: they may exist by now."""
    is_final = record is not None and not any(reason in record.outcomes for reason in IMAGE_REASONS)
    return record if is_final else None


def unpacked(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the reasons among counts by name, sorted: all but ``PACKED``."""
    return {name: count for name, count in sorted(counts.items()) if _CLASSES[name] != "packed"}


def _told(forms: Counter[str], sources: Counter[str]) -> dict[str, Any]:
    """Describe conversations for a manifest; empty for texts."""
    if not forms:
        return {}
    listed = [
        {"source": source, "license": license_name, "num_samples": count}
        for name, count in most_frequent(sources).items()
        for source, _, license_name in [name.partition("\t")]
    ]
    return {"forms": dict(sorted(forms.items())), "sources": listed}


def _image_facts(records: Iterable[PartRecord], base: Manifest | None) -> dict[str, Any]:
    """Return the facts of pictures by name for a manifest (`extra.members`); empty without any."""
    former: Any = {} if base is None else base.extra.get("members", {})
    known = () if base is None else [(name, image_facts(base, name)) for name in former.get("images", {})]
    found: dict[str, ImageFacts] = {}
    for name, facts in (*known, *(item for record in records for item in record.images.items())):
        if facts is not None:
            found[name] = facts.joined(found.get(name, facts))
    images = {name: facts.plain() for name, facts in sorted(found.items())}
    return {"members": {"images": images}} if images else {}


def _added(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _by_class(counts: Mapping[str, int]) -> dict[str, int]:
    totals = dict.fromkeys(map(str, OUTCOMES), 0)
    for name, count in counts.items():
        totals[_CLASSES[name]] += count
    return totals


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Execution of a plan, which makes a version of it."""

    config: CorpusConfig
    workspace: Workspace
    key: SecretKey
    engine: Engine
    progress: Progress
    plan: CorpusPlan
    base: Manifest | None
    """The previous version; None for a first one."""
    known: Sequence[InputFile]
    """Its files."""

    def pack(self) -> Tally:
        """Pack all parts that no earlier run has packed.

        Raises:
            StorageError: Something cannot be read or written.
            ShardflowError: The packing processes cannot work.
        """
        self.workspace.begin("corpus")
        crash_log = CrashLog(self.workspace.crash_log)
        numbers = range(1, len(self.plan.parts) + 1)
        tasks = {number: self._part_task(number, crash_log) for number in numbers}
        if self._has_scan:
            self._find_duplicates(tasks, crash_log)
        parts = self.workspace.work / "parts"
        records = {
            number: _without_images(load_part(parts, number, tasks[number].digest)) for number in numbers
        }
        waiting = [number for number in numbers if records[number] is None]
        num_kept = len(numbers) - len(waiting)
        self.progress.phase("parts", len(numbers))
        self.progress.advance(num_kept)

        def done(task: Task, _: Finished) -> None:
            record = load_part(parts, task.handle, tasks[task.handle].digest)
            if record is None:
                raise ShardflowError(
                    "a finished task left no part in the work folder; make sure that no other job writes "
                    "there, and run the job again."
                )
            records[task.handle] = record
            self.progress.advance()
            counts = Counter(record.outcomes)
            if not counts["PACKED"] and _by_class(counts)["quarantined"]:
                name, count = counts.most_common(1)[0]
                self.progress.note(
                    f"part {task.handle} has no line that can be packed: {count} lines are {name}"
                )

        # The lines of a part that fails are counted; where that fails too, each of its files counts as one.
        for _ in range(2):
            waiting = self._run_parts("pack", waiting, tasks, crash_log, Finished, done)
        run_all(self.engine, self._tasks("pack", waiting, tasks), Finished, done)
        packed = tuple(record for number in numbers if (record := records[number]) is not None)
        return Tally(records=packed, num_kept=num_kept)

    def publish(self, tally: Tally, created_with: dict[str, str]) -> Manifest:
        """Write the version.

        Raises:
            ConfigError: There is no sample to publish.
            StorageError: Something cannot be written.
        """
        if not tally.counts["PACKED"]:
            listed = bad_lines_path(self.workspace.private, self.plan.digest).name
            raise ConfigError(
                f"the inputs hold no line that can be packed ({unpacked(tally.counts)}); correct them. "
                f"{listed} in private_dir lists them, with what to do."
            )
        output, base = self.workspace.output, self.base
        number = 1 if base is None else base.manifest_version + 1
        shards = self._number_shards(tally)
        if base is not None:
            shards = sorted([*base.shards, *shards], key=shard_order)
        self.progress.phase("samples", 0)
        samples = write_samples(output, samples_path(number), shards, key_num_bytes=SURROGATE_LENGTH)
        self.progress.phase("outcomes", 0)
        files = [*self.known, *self._files(tally)]
        lines = self._write_outcomes(number, files, tally)
        counts = tally.counts
        tallies = _added(record.tallies for record in tally.records)
        forms = _added(record.forms for record in tally.records)
        sources = _added(record.sources for record in tally.records)
        if base is not None:
            former: Any = base.extra
            forms.update(former["corpus"].get("forms", {}))
            for each in former["corpus"].get("sources", ()):
                sources[f"{each['source']}\t{each['license']}"] += each["num_samples"]
            counts.update(former["reasons"])
            counts["PACKED"] += base.counts.packed
            tallies.update(former["deidentification"]["counts"])
        write_list(list_path(self.workspace.private, self.plan.digest), files)
        manifest = Manifest(
            manifest_version=number,
            parent=None if base is None else base.dataset_id,
            shards=tuple(shards),
            samples=samples.table,
            counts=OutcomeCounts(**_by_class(counts)),
            created_with=created_with,
            config_digest=self.config.content_digest(),
            key_id=self.key.key_id,
            extra={
                "config": self.config.content(),
                "corpus": {
                    "kind": self.config.fields.kind,
                    "num_files": len(files),
                    **_told(forms, sources),
                    **({"studies": self.plan.studies} if self.plan.studies else {}),
                },
                "deidentification": {
                    "counts": dict(sorted(tallies.items())),
                    "dates": "REMOVED" if self.config.deid.text != "keep" else "UNMODIFIED",
                    "report_text": self.config.deid.text,
                },
                "line_outcomes": asdict(lines),
                **_image_facts(tally.records, base),
                "num_slices": 0,
                "plan_digest": self.plan.digest,
                "reasons": unpacked(counts),
                **samples.extra,
            },
        )
        store = LocalStore(output)
        remove_strangers(output, [*(load(store, each) for each in versions(store)), manifest])
        if base is not None:
            carry_tables(store, Dataset(store, base), Dataset(store, manifest))
        self.progress.phase("manifest", 0)
        commit(store, manifest)
        return manifest

    def list_bad_lines(self, tally: Tally) -> None:
        """Write the list of the lines that are not packed, with what to do, into the private folder.

        It has the first ones of each reason; the others are counted.

        Raises:
            StorageError: It cannot be written, or the outcomes cannot be read.
        """
        path = bad_lines_path(self.workspace.private, self.plan.digest)
        if not unpacked(tally.counts):
            path.unlink(missing_ok=True)
            return
        found: Counter[int] = Counter()
        lines = (f"{json.dumps(line)}\n".encode("ascii") for line in self._bad_lines(tally, found))
        write_atomic(path, lines, replace=True, mode=0o600)

    def _bad_lines(self, tally: Tally, found: Counter[int]) -> Iterator[dict[str, Any]]:
        """Yield what the list says of each line, and at the end how many it leaves out."""
        before: Counter[int] = Counter()
        for part, (pieces, record) in enumerate(zip(self.plan.parts, tally.records, strict=True), start=1):
            stops, start = np.cumsum(record.num_lines), 0
            for block in outcome_blocks(part_folder(self.workspace.work / "parts", part), record):
                codes = np.frombuffer(block, np.uint8)
                listed: list[int] = []
                for code in np.unique(codes[codes != PACKED]).tolist():
                    here = np.flatnonzero(codes == code)
                    listed += here[: max(_MAX_LISTED - found[code], 0)].tolist()
                    found[code] += len(here)
                for place in sorted(listed):
                    number = int(np.searchsorted(stops, start + place, side="right"))
                    piece, first = pieces[number], int(stops[number]) - record.num_lines[number]
                    name, outcome = REASON_TABLE[int(codes[place])]
                    info = REASONS[LineReason(name)]
                    yield {
                        "path": piece.path,
                        "line": before[piece.index] + start + place - first + 1,
                        "outcome": outcome,
                        "reason": name,
                        "problem": info.meaning,
                        "remedy": info.remedy,
                    }
                start += len(codes)
            for piece, count in zip(pieces, record.num_lines, strict=True):
                before[piece.index] += count
        for code, count in sorted(found.items()):
            if count > _MAX_LISTED:
                yield {"reason": REASON_TABLE[code][0], "num_not_listed": count - _MAX_LISTED}

    @property
    def _has_scan(self) -> bool:
        return self.config.policy.duplicates == "skip" or bool(self.config.fields.key)

    def _part_task(self, number: int, crash_log: CrashLog) -> PartTask:
        key, num_bytes = self._part_key(number), self.plan.num_bytes(number)
        failed = crash_log.find(key, num_bytes)
        is_counted = crash_log.find(f"{key}{_COUNT}", num_bytes) is None
        # The duplicates of a part depend on all other parts.
        facts = [self.plan.part_digest(number), self.plan.digest if self._has_scan else ""]
        facts.append(f"{failed} {is_counted}" if failed else "")
        return PartTask(
            number=number,
            digest=hashlib.sha256("\0".join(facts).encode("ascii")).hexdigest(),
            pieces=self.plan.parts[number - 1],
            failed=failed,
            is_counted=is_counted,
        )

    def _part_key(self, number: int) -> str:
        return self.key.surrogate("corpus-part", f"{self.plan.digest}:{number}")

    def _run_parts(
        self,
        kind: str,
        numbers: Sequence[int],
        tasks: dict[int, PartTask],
        crash_log: CrashLog,
        result: type[Result],
        on_done: Callable[[Task, Result], None],
    ) -> list[int]:
        """Run a task for each part; record those that failed twice, and return their numbers."""
        failed = run_tasks(self.engine, self._tasks(kind, numbers, tasks), result, on_done)
        for each in failed:
            # A third try would fail too. The crash log makes later runs leave the part out at once.
            number, reason = each.task.handle, str(reason_of_failure(each.failure or "failed"))
            is_known = tasks[number].failed is not None
            key = f"{self._part_key(number)}{_COUNT if is_known else ''}"
            crash_log.add(key, self.plan.num_bytes(number), reason)
            left_out = "'s lines cannot be counted" if is_known else " is left out"
            self.progress.note(f"part {number}{left_out}: {reason}")
            tasks[number] = self._part_task(number, crash_log)
        return [each.task.handle for each in failed]

    def _tasks(self, kind: str, numbers: Sequence[int], tasks: Mapping[int, PartTask]) -> Iterator[Task]:
        for number in numbers:
            timeout_s = self.plan.timeout_s(number, self.config.execution.task_timeout_s)
            yield Task(kind=kind, payload=tasks[number], timeout_s=timeout_s, handle=number)

    def _find_duplicates(self, tasks: dict[int, PartTask], crash_log: CrashLog) -> None:
        """Read the digests of all parts, and find those that repeat."""
        scans, numbers = self.workspace.work / "scans", list(tasks)
        self.progress.phase("duplicates", len(numbers))
        num_rows = 0
        if self.base is not None and self.config.fields.key:
            num_rows += write_existing(scans, self._existing_keys(self.base))
            numbers = [0, *numbers]

        def done(_: Task, scanned: ScanDone) -> None:
            nonlocal num_rows
            num_rows += scanned.num_rows
            self.progress.advance()

        readable = [number for number, task in tasks.items() if task.failed is None]
        self._run_parts("scan", readable, tasks, crash_log, ScanDone, done)
        count = num_buckets(num_rows)
        buckets = (
            Task(
                kind="resolve",
                payload=ResolveTask(parts=tuple(numbers), bucket=bucket, count=count),
                timeout_s=self.config.execution.task_timeout_s,
            )
            for bucket in range(count)
        )
        run_all(self.engine, buckets, Finished, lambda *_: None)

    def _existing_keys(self, base: Manifest) -> Iterator[NDArray[Any]]:
        table = Table(LocalStore(self.workspace.output).map(base.samples.path), name=base.samples.path)
        samples = SamplesTable(table)
        for start in range(0, samples.num_samples, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, samples.num_samples))
            yield samples.gather("sample_key", rows)

    def _number_shards(self, tally: Tally) -> list[ShardEntry]:
        """Number the shards of all parts, and write their indexes."""
        following: Counter[str] = Counter()
        for shard in () if self.base is None else self.base.shards:
            following[shard.split] = max(following[shard.split], shard_number(shard) + 1)
        tasks: list[Task] = []
        shards: list[ShardEntry] = []
        for part, record in enumerate(tally.records, start=1):
            for shard in record.shards:
                name = shard_name(shard.split, following[shard.split])
                following[shard.split] += 1
                tasks.append(
                    Task(
                        kind="number",
                        payload=NumberTask(part=part, source=shard.name, name=name),
                        timeout_s=self.config.execution.task_timeout_s,
                        handle=len(shards),
                    )
                )
                shards.append(replace(shard, name=name, path=f"shards/{name}.tar"))
        self.progress.phase("index", len(shards))

        def done(task: Task, index: FileEntry) -> None:
            shards[task.handle] = replace(shards[task.handle], index=index)
            self.progress.advance()

        run_all(self.engine, tasks, FileEntry, done)
        return sorted(shards, key=shard_order)

    def _files(self, tally: Tally) -> list[InputFile]:
        """Return the files of the plan with their line counts."""
        num_lines = [0] * len(self.plan.files)
        for pieces, record in zip(self.plan.parts, tally.records, strict=True):
            for piece, count in zip(pieces, record.num_lines, strict=True):
                num_lines[piece.index] += count
        return [
            replace(file, num_lines=count) for file, count in zip(self.plan.files, num_lines, strict=True)
        ]

    def _write_outcomes(self, number: int, files: list[InputFile], tally: Tally) -> FileEntry:
        parts = self.workspace.work / "parts"

        def blocks() -> Iterator[NDArray[np.uint8]]:
            if self.base is not None:
                yield from self._former_outcomes(self.base)
            for part, record in enumerate(tally.records, start=1):
                for block in outcome_blocks(part_folder(parts, part), record):
                    yield np.frombuffer(block, np.uint8)

        path = f"samples/lines-{number:06d}.tbl"
        table = stream_outcomes([(file.file, file.num_lines) for file in files], blocks(), REASON_TABLE)
        return write_file(self.workspace.output, path, table)

    def _former_outcomes(self, base: Manifest) -> Iterator[NDArray[np.uint8]]:
        entry = base.line_outcomes
        if entry is None:
            raise FormatError(
                "the dataset in output was not packed from texts; append to it with shardflow pack, or name "
                "another output."
            )
        name = entry.path
        lines = LineOutcomes(Table(LocalStore(self.workspace.output).map(name), name=name))
        if tuple(zip(lines.names, lines.outcomes, strict=True)) != REASON_TABLE[: len(lines.names)]:
            raise FormatError(f"{name} has reasons that this version of shardflow does not know; upgrade it.")
        yield from lines.pieces()


def run_tasks(
    engine: Engine, tasks: Iterable[Task], result: type[Result], on_done: Callable[[Task, Result], None]
) -> list[TaskDone]:
    """Run tasks; failed ones run a second time, one at a time in a fresh process.

    Args:
        engine: The processes.
        tasks: Created as they are needed.
        result: Record of their results.
        on_done: Called for each finished task, in no particular order.

    Returns:
        Tasks that failed twice.

    Raises:
        StorageError: A task could not read or write.
    """
    failed = _run_once(engine, tasks, result, on_done)
    if not failed:
        return []
    engine.restart(1)
    again = _run_once(engine, [done.task for done in failed], result, on_done)
    engine.restart()
    return again


def run_all(
    engine: Engine, tasks: Iterable[Task], result: type[Result], on_done: Callable[[Task, Result], None]
) -> None:
    """Run tasks that cannot fail because of an input.

    Raises:
        ShardflowError: One failed twice.
    """
    failed = run_tasks(engine, tasks, result, on_done)
    if failed:
        raise ShardflowError(
            f"the task {failed[0].task.kind} failed twice: {failed[0].failure} ({failed[0].detail}); check "
            "the memory and the disk of this machine."
        )


def _run_once(
    engine: Engine, tasks: Iterable[Task], result: type[Result], on_done: Callable[[Task, Result], None]
) -> list[TaskDone]:
    failed: list[TaskDone] = []
    for done in run_each(engine, tasks):
        if done.failure is not None or done.result is None:
            failed.append(done)
        else:
            on_done(done.task, decode(result, done.result))
    return failed
