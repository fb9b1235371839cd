"""The corpus job: files, parts, shards, manifest.

The data's way: `discover` lists the files and a look at each says how it can be cut; the plan cuts them into
parts; processes turn each part into shards of its own; then shards get their numbers and indexes, and the
samples table, the outcomes and the manifest are written. Any moment may be the last: the same command goes on
from the parts that stand, and comes to the same bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shardflow.corpora.carrying import Carrying
from shardflow.corpora.handlers import HANDLERS, make_setup
from shardflow.corpora.inputs import discover
from shardflow.corpora.known_files import KnownFile, list_path, read_list
from shardflow.corpora.plan import FoundFile, build_plan, look_at
from shardflow.corpora.publishing import created_with
from shardflow.corpora.summary import CorpusStatus, CorpusSummary
from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import ConfigError
from shardflow.packing.child import peak_memory_bytes
from shardflow.packing.engine import WorkerSetup
from shardflow.packing.limits import ChildLimits
from shardflow.packing.pool import ChildPool
from shardflow.packing.preconditions import check_files
from shardflow.packing.progress import SilentProgress
from shardflow.packing.workplace import locked_workplace
from shardflow.shards.manifest import Manifest, load, versions
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from shardflow.corpora.config import CorpusConfig
    from shardflow.packing.engine import Engine
    from shardflow.packing.progress import Progress
    from shardflow.packing.workplace import Workplace

__all__ = ["CorpusMode", "pack_corpus"]

CorpusMode: TypeAlias = Literal["pack", "append"]
"""``pack`` makes a first version; ``append`` one with new files."""

# Deadlines are the job's: a part of one large compressed file may take days of processor time.
_TASK_S: Final = 30 * 86_400.0
_FILE_BYTES: Final = 1 << 46


def pack_corpus(
    config: CorpusConfig,
    progress: Progress | None = None,
    *,
    mode: CorpusMode = "pack",
    handlers: str = HANDLERS,
) -> CorpusSummary:
    """Pack text files into a dataset or its next version, or go on where a former run stopped.

    Args:
        config: All settings.
        progress: Hears where the job is.
        mode: ``append`` takes new files into the next version.
        handlers: Name in `shardflow.packing.registry.TASK_HANDLERS`; a ``"module:function"`` serves tests,
            which make processes fail on purpose.

    Returns:
        What was done; its ``status`` says whether a version was published.

    Raises:
        ConfigError: A setting, a folder or the key is wrong, there is nothing to pack, or the output holds
            something that these settings do not go with.
        StorageError: Something cannot be read or written; the job can be run again.
        ShardflowError: The packing processes cannot work; the job can be run again.
    """
    with locked_workplace(config.output, config.private_dir, config.inputs.files) as place:
        is_new_key = config.identity.key_file is None and not config.key_file.exists()
        key = SecretKey.create(config.key_file) if is_new_key else SecretKey.load(config.key_file)
        limits = ChildLimits(
            memory_bytes=config.execution.memory_bytes, task_s=_TASK_S, file_bytes=_FILE_BYTES
        )
        with ChildPool(
            config.execution.resolved_num_processes,
            WorkerSetup(
                limits=limits,
                handlers=handlers,
                setup=make_setup(config, place.output, place.work),
                log_path=place.process_log,
            ),
        ) as pool:
            job = _Job(config=config, place=place, key=key, pool=pool, progress=progress or SilentProgress())
            return job.make(mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    config: CorpusConfig
    place: Workplace
    key: SecretKey
    pool: Engine
    progress: Progress
    started: float = field(default_factory=time.monotonic)

    def make(self, mode: CorpusMode) -> CorpusSummary:
        store = LocalStore(self.place.output)
        finished = load(store) if versions(store) else None
        if mode == "append" and finished is None:
            raise ConfigError(
                "output must hold a dataset for append, got none; an interrupted first packing goes on "
                "without --append."
            )
        if finished is not None:
            self._check_settings(finished)
        self.progress.phase("inputs", 0)
        files = discover(self.config.inputs.files)
        if all(file.format == "other" for file in files):
            raise ConfigError(
                f"inputs.files must hold .jsonl, .jsonl.gz, .jsonl.zst or .parquet files, got {len(files)} "
                "others; correct the folders."
            )
        found = look_at(self.pool, files, self.key, self.config.execution.task_timeout_s)
        if finished is None:
            return self._publish(found, None, ())
        known = read_list(list_path(self.place.private, str(finished.extra.get("plan_digest"))))
        new = self._compare(found, known)
        if mode == "append" and new:
            return self._publish(new, finished, known)
        if new:
            raise ConfigError(
                f"output must be new, or hold a dataset of the same files, got {len(new)} files that it does "
                "not know; add --append to take them in, or name another output."
            )
        check_files(store, finished)
        self.place.remove_work()
        self.progress.phase("done", 0)
        return self._summary("nothing_new" if mode == "append" else "already_packed", finished, len(found))

    def _check_settings(self, finished: Manifest) -> None:
        for what, stands, asked in (
            ("secret key", finished.key_id, self.key.key_id),
            ("settings", finished.config_digest, self.config.content_digest()),
        ):
            if stands != asked:
                raise ConfigError(
                    f"output must be new, or hold a corpus of the same {what}, got one of another; name "
                    "another output."
                )

    def _compare(self, found: list[FoundFile], known: list[KnownFile]) -> list[FoundFile]:
        """Return the files that are new; refuse those that changed."""
        before = {file.file: file for file in known}
        num_changed = sum(
            each.known.file in before and not each.known.is_same(before[each.known.file]) for each in found
        )
        if num_changed:
            raise ConfigError(
                f"files of a corpus must stay as they were, got {num_changed} that changed since; pack into "
                "a new output, or put new lines into new files."
            )
        return [each for each in found if each.known.file not in before]

    def _publish(
        self, found: list[FoundFile], base: Manifest | None, known: tuple[KnownFile, ...] | list[KnownFile]
    ) -> CorpusSummary:
        parent = None if base is None else base.dataset_id
        packages = created_with()
        plan = build_plan(self.config, self.key, found, created_with=packages, parent=parent)
        work = Carrying(
            config=self.config,
            place=self.place,
            key=self.key,
            pool=self.pool,
            progress=self.progress,
            plan=plan,
            base=base,
            known=tuple(known),
        )
        tally = work.pack()
        facts: dict[str, Any] = {"num_parts": len(plan.parts), "num_parts_kept": tally.num_kept}
        if tally.is_over(self.config.policy.max_quarantined_share):
            self.progress.phase("done", 0)
            return CorpusSummary(
                status="quarantine_limit",
                inputs={"total": tally.num_lines, **tally.outcomes},
                reasons=tally.reasons,
                num_files=len(found),
                seconds=time.monotonic() - self.started,
                peak_memory_bytes=self._peak_memory(),
                **facts,
            )
        manifest = work.publish(tally, packages)
        self.place.remove_work()
        self.progress.phase("done", 0)
        return self._summary("packed", manifest, len(found), **facts)

    def _summary(
        self, status: CorpusStatus, manifest: Manifest, num_files: int, **facts: Any
    ) -> CorpusSummary:
        return CorpusSummary.of_manifest(
            status,
            manifest,
            num_files=num_files,
            seconds=time.monotonic() - self.started,
            peak_memory_bytes=self._peak_memory(),
            **facts,
        )

    def _peak_memory(self) -> dict[str, int]:
        return {"job": peak_memory_bytes(), "process": self.pool.peak_memory_bytes}
