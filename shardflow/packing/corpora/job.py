"""Corpus job: files, parts, shards, manifest.

Files are listed and inspected; the plan cuts them into parts; processes turn each part into shards of its
own; then shards are numbered, and the samples table, the outcomes and the manifest are written. The job may
be killed at any moment: the same command resumes after the finished parts and produces identical bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from shardflow.errors import ConfigError
from shardflow.format.manifest import Manifest, load, versions
from shardflow.format.shard_files import package_versions
from shardflow.packing.corpora.execution import Execution, run_all, unpacked
from shardflow.packing.corpora.inputs import (
    InputFile,
    bad_lines_path,
    build_plan,
    discover,
    list_path,
    read_list,
)
from shardflow.packing.corpora.parts import HANDLERS, CorpusSetup, InspectDone, InspectTask
from shardflow.packing.engines.base import Task, WorkerLimits, WorkerSetup
from shardflow.packing.engines.local import LocalEngine
from shardflow.packing.engines.worker import peak_memory_bytes
from shardflow.packing.plan import check_files, check_same_settings, load_key
from shardflow.packing.progress import SilentProgress
from shardflow.packing.workspace import locked_workspace
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.engines.base import Engine
    from shardflow.packing.progress import Progress
    from shardflow.packing.workspace import Workspace

CorpusMode: TypeAlias = Literal["pack", "append"]
"""``pack`` makes a first version; ``append`` one with new files."""
CorpusStatus: TypeAlias = Literal["packed", "already_packed", "nothing_new", "quarantine_limit"]

# Deadlines are the job's: a part of one large compressed file may take days of processor time.
_TASK_S: Final = 30 * 86_400.0
_FILE_BYTES: Final = 1 << 46
_FILES_AT_ONCE: Final = 32
# The packages whose versions decide the bytes of a corpus.
_PACKAGES: Final = ("numpy", "pyarrow", "rapidfuzz", "shardflow")
# Those that check pictures and make them from slices.
_PICTURE_PACKAGES: Final = ("opencv-python-headless", "pillow")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary:
    """Counts and costs of a job, without any content of the inputs."""

    status: CorpusStatus
    """``packed``; ``already_packed`` and ``nothing_new``: there was nothing to do; ``quarantine_limit``:
    nothing was published."""
    inputs: dict[str, int]
    """Lines: ``total``, ``packed``, ``skipped``, ``quarantined``."""
    reasons: dict[str, int]
    """Lines by reason code, for those that are not packed."""
    forms: dict[str, int] = field(default_factory=dict)
    """Packed conversations by form."""
    bad_lines: str = ""
    """Name of the list of the lines that are not packed, in the private folder; empty if all are."""
    dataset_id: str | None = None
    manifest_version: int | None = None
    splits: dict[str, int] = field(default_factory=dict)
    """Samples by split."""
    num_files: int = 0
    """Input files of this run."""
    num_parts: int = 0
    num_parts_kept: int = 0
    """Parts that an earlier run has packed."""
    num_shards: int = 0
    num_bytes: int = 0
    """Size of all files of the dataset."""
    seconds: float = 0.0
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Peak resident memory of the ``job`` and of any packing ``process``."""

    @classmethod
    def of_manifest(cls, status: CorpusStatus, manifest: Manifest, **facts: Any) -> Self:
        """Summarize a published dataset."""
        counts = asdict(manifest.counts)
        extra: Mapping[str, Any] = manifest.extra
        return cls(
            status=status,
            inputs={"total": sum(counts.values()), **counts},
            reasons=dict(extra["reasons"]),
            forms=dict(extra["corpus"].get("forms", {})),
            dataset_id=manifest.dataset_id,
            manifest_version=manifest.manifest_version,
            splits={name: numbers["num_samples"] for name, numbers in manifest.splits.items()},
            num_shards=len(manifest.shards),
            num_bytes=sum(entry.num_bytes for entry in manifest.files()) + len(manifest.encode()),
            **facts,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the job: 0 done, 3 quarantine over its limit."""
        return 3 if self.status == "quarantine_limit" else 0

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON; the command's last line."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def pack_corpus(
    config: CorpusConfig,
    progress: Progress | None = None,
    *,
    mode: CorpusMode = "pack",
    handlers: str = HANDLERS,
) -> CorpusSummary:
    """Pack text files into a dataset or its next version, or resume a stopped run.

    Args:
        config: All settings.
        progress: Receives the progress of the job.
        mode: ``append`` takes new files into the next version.
        handlers: Name in `shardflow.packing.registry.TASK_HANDLERS`; a ``"module:function"`` is for tests
            that make processes fail on purpose.

    Returns:
        Summary; its ``status`` tells whether a version was published.

    Raises:
        ConfigError: A setting, a folder or the key is wrong, there is nothing to pack, or the output holds
            something that these settings did not make.
        StorageError: Something cannot be read or written; the job can be run again.
        ShardflowError: The packing processes cannot work; the job can be run again.
    """
    with locked_workspace(config.output, config.private_dir, config.inputs.files) as workspace:
        key = load_key(config.key_file, may_create=config.identity.key_file is None)
        limits = WorkerLimits(
            memory_bytes=config.execution.memory_bytes, task_s=_TASK_S, file_bytes=_FILE_BYTES
        )
        with LocalEngine(
            config.execution.resolved_num_processes,
            WorkerSetup(
                limits=limits,
                handlers=handlers,
                setup=CorpusSetup(config=config, output=workspace.output, work=workspace.work),
                log_path=workspace.process_log,
            ),
        ) as engine:
            job = _Job(
                config=config,
                workspace=workspace,
                key=key,
                engine=engine,
                progress=progress or SilentProgress(),
            )
            return job.make(mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    config: CorpusConfig
    workspace: Workspace
    key: SecretKey
    engine: Engine
    progress: Progress
    started: float = field(default_factory=time.monotonic)

    def make(self, mode: CorpusMode) -> CorpusSummary:
        store = LocalStore(self.workspace.output)
        finished = load(store) if versions(store) else None
        if mode == "append" and finished is None:
            raise ConfigError(
                "there is no dataset in output to append to; resume an interrupted first packing without "
                "--append."
            )
        if finished is not None:
            check_same_settings(self.key, self.config.content_digest(), finished)
        self.progress.phase("inputs", 0)
        has_conversations = self.config.has_conversations
        files = discover(self.config.inputs.files, has_conversations=has_conversations)
        if all(file.format == "other" for file in files):
            endings = f".jsonl, .jsonl.gz, .jsonl.zst{', .json' if has_conversations else ''}"
            raise ConfigError(
                f"inputs.files has no {endings} or .parquet file, only {len(files)} others; correct the "
                "folders."
            )
        files = self._inspect(files)
        if finished is None:
            return self._pack(files, None, [])
        known = read_list(list_path(self.workspace.private, str(finished.extra.get("plan_digest"))))
        new = _new_files(files, known)
        if mode == "append" and new:
            return self._pack(new, finished, known)
        if new:
            raise ConfigError(
                f"the inputs have {len(new)} files that the dataset in output does not know; add --append to "
                "pack them, or name another output."
            )
        check_files(store, finished)
        return self._finish("nothing_new" if mode == "append" else "already_packed", finished, len(files))

    def _inspect(self, files: list[InputFile]) -> list[InputFile]:
        """Inspect every file in the packing processes; fill in what they find."""
        files = [replace(file, file=self.key.surrogate("input", file.name)) for file in files]

        def done(task: Task, result: InspectDone) -> None:
            for index, found in enumerate(result.files, start=task.handle):
                files[index] = replace(files[index], probe=found.probe, groups=found.groups)

        tasks = (
            Task(
                kind="inspect",
                payload=InspectTask(files=tuple(files[start : start + _FILES_AT_ONCE])),
                timeout_s=self.config.execution.task_timeout_s,
                handle=start,
            )
            for start in range(0, len(files), _FILES_AT_ONCE)
        )
        run_all(self.engine, tasks, InspectDone, done)
        return files

    def _pack(self, files: list[InputFile], base: Manifest | None, known: list[InputFile]) -> CorpusSummary:
        pictures = _PICTURE_PACKAGES if self.config.has_conversations else ()
        created_with = package_versions((*_PACKAGES, *pictures))
        parent = None if base is None else base.dataset_id
        plan = build_plan(
            self.config, self.key, files, created_with=created_with, parent=parent, studies=self._studies()
        )
        execution = Execution(
            config=self.config,
            workspace=self.workspace,
            key=self.key,
            engine=self.engine,
            progress=self.progress,
            plan=plan,
            base=base,
            known=known,
        )
        tally = execution.pack()
        execution.list_bad_lines(tally)
        facts: dict[str, Any] = {"num_parts": len(plan.parts), "num_parts_kept": tally.num_kept}
        if tally.is_over(self.config.policy.max_quarantined_share):
            self.progress.phase("done", 0)
            return CorpusSummary(
                status="quarantine_limit",
                inputs={"total": tally.num_lines, **tally.outcomes},
                reasons=unpacked(tally.counts),
                bad_lines=self._bad_lines(plan.digest),
                **self._costs(len(files)),
                **facts,
            )
        return self._finish("packed", execution.publish(tally, created_with), len(files), **facts)

    def _studies(self) -> str | None:
        """Return the ``dataset_id`` of the studies that lines may name, once they can be used."""
        from shardflow.packing.corpora.studies import StudyFinder, check_splits_of

        studies = self.config.conversations.studies
        if studies is None or not self.config.has_conversations:
            return None
        dataset = StudyFinder(studies).dataset
        check_splits_of(dataset, self.config.splits.parts)
        return dataset.dataset_id

    def _finish(
        self, status: CorpusStatus, manifest: Manifest, num_files: int, **facts: Any
    ) -> CorpusSummary:
        self.workspace.remove_work()
        self.progress.phase("done", 0)
        listed = self._bad_lines(str(manifest.extra["plan_digest"]))
        return CorpusSummary.of_manifest(
            status, manifest, bad_lines=listed, **self._costs(num_files), **facts
        )

    def _bad_lines(self, plan_digest: str) -> str:
        path = bad_lines_path(self.workspace.private, plan_digest)
        return path.name if path.exists() else ""

    def _costs(self, num_files: int) -> dict[str, Any]:
        return {
            "num_files": num_files,
            "seconds": time.monotonic() - self.started,
            "peak_memory_bytes": {"job": peak_memory_bytes(), "process": self.engine.peak_memory_bytes},
        }


def _new_files(files: list[InputFile], known: list[InputFile]) -> list[InputFile]:
    """Return the files that a version does not have; refuse those that changed since."""
    before = {file.file: file for file in known}
    num_changed = sum(file.file in before and not file.is_same(before[file.file]) for file in files)
    if num_changed:
        raise ConfigError(
            f"{num_changed} files of the corpus have changed since they were packed; pack into a new "
            "output, or put new lines into new files."
        )
    return [file for file in files if file.file not in before]
