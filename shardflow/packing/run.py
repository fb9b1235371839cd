"""One run of the packing job: its settings and folders, and what it says when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shardflow.errors import ConfigError
from shardflow.packing.attaching import link_attachments
from shardflow.packing.child import peak_memory_bytes
from shardflow.packing.engine import WorkerSetup
from shardflow.packing.handlers import make_setup
from shardflow.packing.header_pass import HeaderPass
from shardflow.packing.intake import Ingest
from shardflow.packing.inventory import count_reasons
from shardflow.packing.limits import ChildLimits
from shardflow.packing.pool import ChildPool
from shardflow.packing.summary import PackSummary, Status
from shardflow.sources.reasons import Outcome, outcome_of

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.config import PackConfig
    from shardflow.packing.engine import Engine
    from shardflow.packing.intake import Intake
    from shardflow.packing.inventory import FileTable, StudyTable
    from shardflow.packing.progress import Progress
    from shardflow.packing.recorded import RecordedOutcomes
    from shardflow.packing.upload import Uploader
    from shardflow.packing.workplace import Workplace
    from shardflow.shards.manifest import Manifest
    from shardflow.sources.dicom import DiscoveredFile
    from shardflow.sources.layouts import Layout

__all__ = ["PackMode", "PackRun"]

_FILE_HEADROOM: Final = 2
"""A study writes at most what it decodes to, a shard its target; both with room for overhead."""

PackMode: TypeAlias = Literal["pack", "append", "retry"]
"""``pack`` makes a first version; ``append`` one with new inputs; ``retry`` one with quarantined studies that
are good now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRun:
    """What every part of the job needs to know of it."""

    config: PackConfig
    mode: PackMode
    layout: Layout
    place: Workplace
    progress: Progress
    handlers: str
    """What makes the task handler of the packing processes; see `shardflow.packing.registry`."""
    is_dry_run: bool
    is_merge: bool
    uploader: Uploader | None
    """Sends what stands; None where nothing is to be sent."""
    started: float = field(default_factory=time.monotonic)

    def open_engine(self) -> Engine:
        """Return the engine that the settings ask for; a context manager.

        Raises:
            ConfigError: Ray is asked for and not installed, or a table or kind that the settings name is not
                there.
            ShardflowError: Ray cannot be started or reached.
        """
        config = self.config
        execution = config.execution
        limits = ChildLimits(
            memory_bytes=execution.memory_bytes,
            task_s=execution.task_timeout_s,
            file_bytes=_FILE_HEADROOM * (config.limits.max_study_bytes + 2 * config.shards.target_bytes),
        )
        worker = WorkerSetup(
            limits=limits,
            handlers=self.handlers,
            setup=make_setup(config, self.place),
            log_path=self.place.process_log,
        )
        if execution.engine == "local":
            return ChildPool(execution.resolved_num_processes, worker)
        try:
            from shardflow.packing.ray_engine import RayEngine
        except ImportError:
            raise ConfigError(
                'execution.engine must be "local" without Ray, got "ray"; install shardflow[ray].'
            ) from None
        num_processes = execution.num_processes if execution.ray_address else execution.resolved_num_processes
        return RayEngine(num_processes, worker, address=execution.ray_address)

    def ingest(self, pool: Engine, key: SecretKey, recorded: RecordedOutcomes) -> Ingest:
        """Return what takes inputs in, with the packing processes."""
        timeout_s = self.config.execution.task_timeout_s
        inputs = self.config.inputs

        def read(files: Sequence[DiscoveredFile], studies: StudyTable) -> FileTable:
            headers = HeaderPass(
                pool,
                files,
                self.layout,
                key,
                recorded,
                timeout_s,
                self.progress,
                self.place.share,
                len(inputs.dicom),
            )
            table = headers.run(studies)
            link_attachments(table, files, key, 3600 * self.config.attachments.window_hours)
            return table

        return Ingest(
            read_headers=read,
            inputs=inputs,
            layout=self.layout,
            key=key,
            place=self.place,
            progress=self.progress,
        )

    def finish_upload(self) -> None:
        """Send what is not sent yet of every version, the manifests last.

        Raises:
            StorageError: Something could not be sent.
        """
        if self.uploader is not None:
            self.progress.phase("upload", 0)
            self.uploader.finish()

    def seconds(self) -> float:
        """Return the wall time since the run began."""
        return time.monotonic() - self.started

    def summary(self, status: Status, manifest: Manifest, pool: Engine, intake: Intake) -> PackSummary:
        """Sum up a run after which a version stands."""
        return PackSummary.of_manifest(
            status,
            manifest,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(pool),
            num_known_inputs=0 if intake.scope is None else intake.scope.num_known,
        )

    def unpublished(self, status: Status, intake: Intake, pool: Engine, **facts: Any) -> PackSummary:
        """Sum up a run that has published nothing."""
        reasons = count_reasons(intake.files.reason, intake.reports.reason)
        outcomes = dict.fromkeys(map(str, Outcome), 0)
        for reason, count in reasons.items():
            outcomes[outcome_of(reason)] += count
        return PackSummary(
            status=status,
            inputs={"total": len(intake.files) + len(intake.reports), **outcomes},
            reasons=reasons,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(pool),
            **facts,
        )


def peak_memory(pool: Engine) -> dict[str, int]:
    """Return the most resident memory of the job and of any one packing process."""
    return {"job": peak_memory_bytes(), "process": pool.peak_memory_bytes}
