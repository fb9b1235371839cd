"""Carry a corpus plan out: scan for duplicates, pack the parts, number the shards, publish the version."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.corpora.duplicates import num_buckets, write_existing
from shardflow.corpora.known_files import list_path, write_list
from shardflow.corpora.parts import load_part, outcome_pieces, part_folder
from shardflow.corpora.passes import run_all, run_tasks
from shardflow.corpora.publishing import write_file, write_samples
from shardflow.corpora.reasons import REASON_TABLE
from shardflow.errors import ConfigError, FormatError, ShardflowError
from shardflow.packing.base import shard_number
from shardflow.packing.engine import Task
from shardflow.packing.recorded import RecordedOutcomes, reason_of_failure
from shardflow.packing.version_files import remove_strangers, samples_path, shard_order
from shardflow.shards.keys import shard_name
from shardflow.shards.line_outcomes import LineOutcomes, stream_outcomes
from shardflow.shards.manifest import Manifest, ShardEntry, commit, load, versions
from shardflow.shards.manifest_entries import FileEntry
from shardflow.shards.outcomes import OUTCOMES, OutcomeCounts
from shardflow.shards.samples import SamplesTable
from shardflow.shards.table import Table
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.corpora.config import CorpusConfig
    from shardflow.corpora.known_files import KnownFile
    from shardflow.corpora.plan import CorpusPlan
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.engine import Engine
    from shardflow.packing.progress import Progress
    from shardflow.packing.workplace import Workplace

__all__ = ["Carrying", "Tally"]

_CLASSES: Final = dict(REASON_TABLE)
_PIECE_ROWS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What became of the lines of a plan."""

    records: tuple[dict[str, Any], ...]
    """Of the parts, in their order."""
    num_kept: int

    @property
    def counts(self) -> Counter[str]:
        """Lines by name of their outcome, ``PACKED`` with them."""
        counts: Counter[str] = Counter()
        for record in self.records:
            counts.update(record["outcomes"])
        return counts

    @property
    def num_lines(self) -> int:
        """Lines of all parts."""
        return sum(sum(record["num_lines"]) for record in self.records)

    @property
    def outcomes(self) -> dict[str, int]:
        """Lines by outcome class."""
        return _by_class(self.counts)

    @property
    def reasons(self) -> dict[str, int]:
        """Lines by reason, for those that are not packed."""
        return {name: count for name, count in sorted(self.counts.items()) if _CLASSES[name] != "packed"}

    def is_over(self, share: float) -> bool:
        """Tell whether more lines are quarantined than a share of all."""
        # The small term takes back what binary fractions lose: 0.05 of 100 are 5.
        return self.outcomes["quarantined"] > math.floor(share * self.num_lines + 1e-9)


def _by_class(counts: Counter[str]) -> dict[str, int]:
    totals = dict.fromkeys(map(str, OUTCOMES), 0)
    for name, count in counts.items():
        totals[_CLASSES[name]] += count
    return totals


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrying:
    """A plan, and all that it takes to make a version of it."""

    config: CorpusConfig
    place: Workplace
    key: SecretKey
    pool: Engine
    progress: Progress
    plan: CorpusPlan
    base: Manifest | None
    """The version before; None for a first one."""
    known: tuple[KnownFile, ...]
    """The files of that version."""

    def pack(self) -> Tally:
        """Pack all parts that do not stand yet.

        Raises:
            StorageError: Something cannot be read or written.
            ShardflowError: The packing processes cannot work.
        """
        self.place.begin("corpus")
        recorded = RecordedOutcomes(self.place.recorded_outcomes)
        numbers = range(1, len(self.plan.parts) + 1)
        payloads = {number: self._payload(number, recorded) for number in numbers}
        if self._has_scan:
            self._find_duplicates(payloads, recorded)
        parts = self.place.work / "parts"
        records = {number: load_part(parts, number, payloads[number]["digest"]) for number in numbers}
        waiting = [number for number in numbers if records[number] is None]
        self.progress.phase("parts", len(numbers))
        self.progress.advance(len(numbers) - len(waiting))

        def done(task: Task, _: dict[str, Any]) -> None:
            record = load_part(parts, task.handle, payloads[task.handle]["digest"])
            if record is None:
                raise ShardflowError(
                    "a part must stand when its task is done, got none; is the work folder written by "
                    "another job?"
                )
            records[task.handle] = record
            self.progress.advance()
            counts = Counter(record["outcomes"])
            if not counts["PACKED"] and _by_class(counts)["quarantined"]:
                name, count = counts.most_common(1)[0]
                self.progress.note(
                    f"part {task.handle} has nothing that can be packed: {count} lines are {name}"
                )

        failed = run_tasks(self.pool, self._tasks("pack", waiting, payloads), done)
        for each in failed:
            # Whatever is read again will fail again: the part is left out, and every later run knows it.
            self._record(each.task.handle, str(reason_of_failure(each.failure or "failed")), recorded)
            payloads[each.task.handle] = self._payload(each.task.handle, recorded)
        again = [each.task.handle for each in failed]
        run_all(self.pool, self._tasks("pack", again, payloads), done)
        standing = tuple(record for number in numbers if (record := records[number]) is not None)
        return Tally(records=standing, num_kept=len(numbers) - len(waiting))

    def publish(self, tally: Tally, created_with: dict[str, str]) -> Manifest:
        """Write the version.

        Raises:
            ConfigError: There is no sample to publish.
            StorageError: Something cannot be written.
        """
        if not tally.counts["PACKED"]:
            raise ConfigError(
                f"the inputs must hold a line that can be packed, got none ({tally.reasons}); correct them."
            )
        output, base = self.place.output, self.base
        number = 1 if base is None else base.manifest_version + 1
        shards = self._number_shards(tally)
        if base is not None:
            shards = sorted([*base.shards, *shards], key=shard_order)
        self.progress.phase("samples", 0)
        samples = write_samples(output, samples_path(number), shards)
        self.progress.phase("outcomes", 0)
        files = [*self.known, *self._files(tally)]
        lines = self._write_outcomes(number, files, tally)
        counts = Counter({name: count for name, count in tally.counts.items() if count})
        tallies: Counter[str] = Counter()
        for record in tally.records:
            tallies.update(record["tallies"])
        if base is not None:
            former: Any = base.extra
            counts.update(former["reasons"])
            counts["PACKED"] += base.counts.packed
            tallies.update(former["deidentification"]["counts"])
        write_list(list_path(self.place.private, self.plan.digest), files)
        manifest = Manifest(
            manifest_version=number,
            parent=None if base is None else base.dataset_id,
            shards=tuple(shards),
            samples=samples,
            counts=OutcomeCounts(**_by_class(counts)),
            created_with=created_with,
            config_digest=self.config.content_digest(),
            key_id=self.key.key_id,
            extra={
                "config": self.config.content(),
                "corpus": {"kind": self.config.fields.kind, "num_files": len(files)},
                "deidentification": {
                    "counts": dict(sorted(tallies.items())),
                    "dates": "REMOVED" if self.config.deid.text != "keep" else "UNMODIFIED",
                    "report_text": self.config.deid.text,
                },
                "line_outcomes": {
                    "path": lines.path,
                    "num_bytes": lines.num_bytes,
                    "sha256": lines.sha256,
                },
                "num_slices": 0,
                "plan_digest": self.plan.digest,
                "reasons": {
                    name: count for name, count in sorted(counts.items()) if _CLASSES[name] != "packed"
                },
            },
        )
        store = LocalStore(output)
        remove_strangers(output, [*(load(store, each) for each in versions(store)), manifest])
        self.progress.phase("manifest", 0)
        commit(store, manifest)
        return manifest

    @property
    def _has_scan(self) -> bool:
        return self.config.policy.duplicates == "skip" or bool(self.config.fields.key)

    def _payload(self, number: int, recorded: RecordedOutcomes) -> dict[str, Any]:
        payload = self.plan.payload(number)
        failed = recorded.find(self._part_key(number), self.plan.num_bytes(number))
        # What a part drops depends on all the others.
        facts = [payload["digest"], self.plan.digest if self._has_scan else "", failed or ""]
        digest = hashlib.sha256("\0".join(facts).encode("ascii")).hexdigest()
        return {**payload, "failed": failed, "digest": digest}

    def _part_key(self, number: int) -> str:
        return self.key.surrogate("corpus-part", f"{self.plan.digest}:{number}")

    def _record(self, number: int, reason: str, recorded: RecordedOutcomes) -> None:
        recorded.add(self._part_key(number), self.plan.num_bytes(number), reason)
        self.progress.note(f"part {number} is left out: {reason}")

    def _tasks(self, kind: str, numbers: list[int], payloads: dict[int, dict[str, Any]]) -> Iterator[Task]:
        for number in numbers:
            seconds = self.plan.seconds(number, self.config.execution.task_timeout_s)
            yield Task(kind=kind, payload=payloads[number], timeout_s=seconds, handle=number)

    def _find_duplicates(self, payloads: dict[int, dict[str, Any]], recorded: RecordedOutcomes) -> None:
        """Read all parts for digests, and find those that occur again."""
        scans, numbers = self.place.work / "scans", list(payloads)
        self.progress.phase("duplicates", len(numbers))
        num_rows = 0
        if self.base is not None and self.config.fields.key:
            num_rows += write_existing(scans, self._existing_keys(self.base))
            numbers = [0, *numbers]

        def done(_: Task, result: dict[str, Any]) -> None:
            nonlocal num_rows
            num_rows += result["num_rows"]
            self.progress.advance()

        wanted = [number for number in payloads if payloads[number]["failed"] is None]
        for each in run_tasks(self.pool, self._tasks("scan", wanted, payloads), done):
            number = each.task.handle
            self._record(number, str(reason_of_failure(each.failure or "failed")), recorded)
            payloads[number] = self._payload(number, recorded)
        count = num_buckets(num_rows)
        tasks = (
            Task(
                kind="resolve",
                payload={"parts": numbers, "bucket": bucket, "count": count},
                timeout_s=self.config.execution.task_timeout_s,
            )
            for bucket in range(count)
        )
        run_all(self.pool, tasks, lambda *_: None)

    def _existing_keys(self, base: Manifest) -> Iterator[NDArray[Any]]:
        table = Table(LocalStore(self.place.output).map(base.samples.path), name=base.samples.path)
        samples = SamplesTable(table)
        for start in range(0, samples.num_samples, _PIECE_ROWS):
            rows = np.arange(start, min(start + _PIECE_ROWS, samples.num_samples))
            yield samples.gather("sample_key", rows)

    def _number_shards(self, tally: Tally) -> list[ShardEntry]:
        """Give the shards of all parts their names, and write their indexes."""
        following: dict[str, int] = {}
        for shard in () if self.base is None else self.base.shards:
            following[shard.split] = max(following.get(shard.split, 0), shard_number(shard) + 1)
        entries: dict[str, tuple[int, dict[str, Any]]] = {}
        for part, record in enumerate(tally.records, start=1):
            for shard in record["shards"]:
                count = following.get(shard["split"], 0)
                following[shard["split"]] = count + 1
                entries[shard_name(shard["split"], count)] = (part, shard)
        self.progress.phase("index", len(entries))
        indexes: dict[str, FileEntry] = {}

        def done(task: Task, result: dict[str, Any]) -> None:
            name = str(task.handle)
            indexes[name] = FileEntry(path=f"shards/{name}.idx", **result)
            self.progress.advance()

        tasks = (
            Task(
                kind="number",
                payload={
                    "part": part,
                    "source": shard["name"],
                    "name": name,
                    "num_bytes": shard["num_bytes"],
                },
                timeout_s=self.config.execution.task_timeout_s,
                handle=name,
            )
            for name, (part, shard) in entries.items()
        )
        run_all(self.pool, tasks, done)
        shards = [
            ShardEntry(
                name=name,
                split=shard["split"],
                path=f"shards/{name}.tar",
                num_bytes=shard["num_bytes"],
                sha256=shard["sha256"],
                index=indexes[name],
                num_samples=shard["num_samples"],
                num_fields=shard["num_fields"],
            )
            for name, (_, shard) in entries.items()
        ]
        return sorted(shards, key=shard_order)

    def _files(self, tally: Tally) -> list[KnownFile]:
        """Return the files of the plan with the numbers of their lines."""
        num_lines = [0] * len(self.plan.files)
        for pieces, record in zip(self.plan.parts, tally.records, strict=True):
            for piece, count in zip(pieces, record["num_lines"], strict=True):
                num_lines[piece.file] += count
        return [
            replace(found.known, num_lines=count)
            for found, count in zip(self.plan.files, num_lines, strict=True)
        ]

    def _write_outcomes(self, number: int, files: list[KnownFile], tally: Tally) -> FileEntry:
        parts = self.place.work / "parts"

        def pieces() -> Iterator[NDArray[np.uint8]]:
            if self.base is not None:
                yield from self._former_outcomes(self.base)
            for part, record in enumerate(tally.records, start=1):
                for piece in outcome_pieces(part_folder(parts, part), record):
                    yield np.frombuffer(piece, np.uint8)

        path = f"samples/lines-{number:06d}.tbl"
        table = stream_outcomes([(file.file, file.num_lines) for file in files], pieces(), REASON_TABLE)
        return write_file(self.place.output, path, table)

    def _former_outcomes(self, base: Manifest) -> Iterator[NDArray[np.uint8]]:
        entry = base.line_outcomes
        if entry is None:
            raise FormatError("the version before must be a corpus, got another dataset.")
        name = entry.path
        lines = LineOutcomes(Table(LocalStore(self.place.output).map(name), name=name))
        if tuple(zip(lines.names, lines.outcomes, strict=True)) != REASON_TABLE[: len(lines.names)]:
            raise FormatError(f"{name} must have reasons of this shardflow, got others; use a newer one.")
        yield from lines.pieces()
